"""How a server reaches other servers: as their client, over the transports that it listens on.

It asks masters where they are (`asked_masters.py`), and keeps a channel to each that it has used
(design: moves).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    PeerError,
    ServerLost,
    Unavailable,
)
from kvpool.protocols import Channel, Network, SupportsReachability, Transport
from kvpool.runtime import Host
from kvpool.server.moves.asked_masters import AskedMasters
from kvpool.types import Cluster, Member

#: What was not used for so long is closed: a connection costs the other side memory and a place.
_IDLE_S: Final = 20.0
#: A call that has a channel waits so long at most for a better one.
_BETTER_S: Final = 0.5

_Path: TypeAlias = tuple[Transport, str]  # with the address


class _Kept(NamedTuple):
    """A channel to a server of this epoch."""

    epoch: int
    channel: Channel
    #: Paths that are better and have failed, and when to try them again.
    better: Sequence[_Path]
    again_at: float


class PeerServers:
    """Channels to other servers. Nothing is opened before it is used, and what is used no more is
    closed, `masters` included."""

    def __init__(
        self,
        server: str,
        host: Host,
        masters: Sequence[str],
        *,
        cluster: Cluster,
        network: Network,
        transports: Mapping[str, Transport],
    ) -> None:
        self.server = server
        self._host = host
        self._cluster = cluster
        self._transports = transports
        self.masters = AskedMasters(network, masters, self._watch)
        self._channels: dict[str, _Kept] = {}
        self._used_at: dict[str, float] = {}  # each of these channels
        self._replaced: dict[Channel, float] = {}  # by a better one; calls on it still end well
        self._in_use: Counter[Channel] = Counter()
        self._rest: asyncio.TimerHandle | None = None
        #: Each server has its own: one that is frozen keeps nobody from the others.
        self._connecting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def channel(self, server: str, deadline: float) -> Channel:
        """A channel to this server. Raises ServerLost when no path to it works, MasterLost,
        DeadlineExceeded."""
        kept = self._channels.get(server)
        if kept is not None and kept.epoch == self.masters.epoch(server):
            self._used(server)
            if kept.better and _now() >= kept.again_at:
                return await self._better(server, kept, deadline)
            return kept.channel
        connecting = self._connecting.setdefault(server, asyncio.Lock())
        try:
            async with asyncio.timeout_at(deadline):
                await connecting.acquire()
        except TimeoutError:  # another call has more time
            raise DeadlineExceeded(f"still connecting to server {server!r}") from None
        try:
            info = (await self.masters.members(deadline)).get(server)
            if info is None or server == self.server:
                raise ServerLost(f"no master knows another server {server!r}")
            kept = self._channels.get(server)
            if kept is not None and kept.epoch != info.epoch:  # it was restarted
                self.failed(server, kept.channel)
            if server not in self._channels:
                self._channels[server] = await self._connect(
                    server, info.epoch, self._paths(info), deadline
                )
            if self._closed:  # meanwhile
                self._close(server)
                raise ServerLost("this server is closing")
            self._used(server)
            return self._channels[server].channel
        finally:
            connecting.release()

    @contextmanager
    def in_use(self, channel: Channel) -> Iterator[None]:
        """Until the block ends this channel is not idle, however long it waits for a turn."""
        self._in_use[channel] += 1
        try:
            yield
        finally:
            self._in_use[channel] -= 1
            self._in_use += Counter()  # without those at 0

    def failed(self, server: str, channel: Channel | None) -> None:
        """A call on this channel has failed, or there was none: connect anew the next time, to what
        a master knows then. A channel that another call has opened meanwhile stays."""
        self.masters.members_changed()
        kept = self._channels.get(server)
        if kept is not None and kept.channel is channel:
            self._close(server)

    async def close(self) -> None:
        """End every call and connection. Idempotent."""
        self._closed = self.masters.ended = True
        if self._rest is not None:
            self._rest.cancel()
        for server in list(self._channels):
            self._close(server)
        for channel in self._replaced:
            self._end(channel)
        self.masters.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _close(self, server: str) -> None:
        if (kept := self._channels.pop(server, None)) is not None:
            self._end(kept.channel)

    def _end(self, channel: Channel) -> None:
        channel.abort()
        closing = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _used(self, server: str) -> None:
        self._used_at[server] = _now()
        self._watch()

    def _watch(self) -> None:
        if self._rest is None and not self._closed:
            self._rest = asyncio.get_running_loop().call_later(_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        self._rest = None
        before = _now() - _IDLE_S
        for server in [one for one, used_at in self._used_at.items() if used_at <= before]:
            kept = self._channels.get(server)
            if kept is None or kept.channel not in self._in_use:
                del self._used_at[server]
                self._close(server)
        replaced = [one for one, since in self._replaced.items() if since <= before]
        for channel in [one for one in replaced if one not in self._in_use]:
            del self._replaced[channel]
            self._end(channel)
        if self.masters.asked_at <= before:
            self.masters.close()
        if self._used_at or self._replaced or self.masters.are_connected:
            self._watch()

    async def _better(self, server: str, kept: _Kept, deadline: float) -> Channel:
        """Over one of the better paths if it works again, else the one that is kept."""
        now = _now()
        # Other calls use the kept one meanwhile, and this one needs time for itself.
        kept = self._channels[server] = kept._replace(again_at=now + _IDLE_S)
        until = min(now + _BETTER_S, (now + deadline) / 2)
        try:
            better = await self._connect(server, kept.epoch, kept.better, until)
        except (ServerLost, DeadlineExceeded):
            return kept.channel
        if self._channels.get(server) is not kept:  # it has failed or was closed meanwhile
            self._end(better.channel)
            return kept.channel
        self._channels[server] = better
        self._replaced[kept.channel] = _now()
        return better.channel

    async def _connect(
        self, server: str, epoch: int, paths: Sequence[_Path], deadline: float
    ) -> _Kept:
        problem = "it has no transport in common with this server"
        for number, (transport, address) in enumerate(paths):
            # One that hangs leaves as much time to the others.
            now, last = _now(), number == len(paths) - 1
            until = deadline if last else (now + deadline) / 2
            try:
                channel = await transport.connect(
                    address, cluster=self._cluster, client=self.server, deadline=until
                )
                return _Kept(epoch, channel, paths[:number], _now() + _IDLE_S)
            except (Unavailable, PeerError, Overloaded, ConfigError, OSError) as error:
                if last and isinstance(error, DeadlineExceeded):
                    raise
                problem = str(error)
        raise ServerLost(f"server {server!r}: {problem}")

    def _paths(self, info: Member) -> list[_Path]:
        """Those inside this host first."""
        by_scheme = {address.partition("://")[0]: address for address in info.addresses}
        inside, remote = [], []
        for scheme, transport in self._transports.items():
            address = by_scheme.get(scheme)
            if address is None or (
                isinstance(transport, SupportsReachability) and not transport.can_reach(address)
            ):
                continue
            if not transport.same_host:
                remote.append((transport, address))
            elif info.host == self._host.id:
                inside.append((transport, address))
        return [*inside, *remote]


def _now() -> float:
    return asyncio.get_running_loop().time()
