"""How a server reaches other servers: as their client, over the transports that it listens on.

It asks masters where they are, and keeps a channel to each that it has used (design: moves).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from weakref import WeakValueDictionary

from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    MasterLost,
    Overloaded,
    PeerError,
    ServerLost,
    Unavailable,
)
from kvpool.protocols import Channel, Link, Network, SupportsReachability, Transport
from kvpool.runtime import Host
from kvpool.server.moves.state.wants import BlockName
from kvpool.types import Cluster
from kvpool.wire import messages as wire

#: One master is asked for so long before the next one is.
_MASTER_S: Final = 1.0
#: The list of members is asked for so often at most.
REFRESH_S: Final = 0.5
_MEMBERS_MAX: Final = 4096
#: What was not used for so long is closed: a connection costs the other side memory and a place.
#: Longer than any call takes.
_IDLE_S: Final = 20.0


class PeerServers:
    """Channels to other servers, and questions to masters. Nothing is opened before it is used, and
    what is used no more is closed."""

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
        self._masters = masters
        self._cluster = cluster
        self._network = network
        self._transports = transports
        self._links: list[Link] = []
        self._members: dict[str, wire.MemberInfo] = {}
        self._refreshed_at = float("-inf")
        self._channels: dict[str, tuple[int, Channel]] = {}  # with the epoch of the server
        self._used_at: dict[str, float] = {}  # each of these channels
        self._asked_at = float("-inf")  # a master
        self._rest: asyncio.TimerHandle | None = None
        #: Each server has its own: one that is frozen keeps nobody from the others.
        self._connecting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def ask(self, message: wire.Message, answer: type[wire.M], deadline: float) -> wire.M:
        """The first good answer of a master. Raises MasterLost."""
        if not self._links and not self._closed:
            self._links = [self._network.connect(address) for address in self._masters]
        self._asked_at = _now()
        self._watch()
        problem = "this server is closed"
        for link in list(self._links):
            until = min(deadline, _now() + _MASTER_S)
            try:
                got = await link.request(*wire.encode(message), deadline=until)
                return wire.decode_answer(answer, *got)
            except (Unavailable, Overloaded, PeerError) as error:
                problem = str(error)  # and not the error, which refers to this frame
                if link in self._links:  # the others first, the next time
                    self._links.remove(link)
                    self._links.append(link)
        raise MasterLost(f"no master answers: {problem}")

    async def members(self, deadline: float) -> Mapping[str, wire.MemberInfo]:
        """Every server that a master knows, by name; not older than half a second.

        Raises MasterLost.
        """
        if _now() < self._refreshed_at + REFRESH_S:
            return self._members
        found: dict[str, wire.MemberInfo] = {}
        after, more = "", True
        while more and len(found) < _MEMBERS_MAX:
            page = await self.ask(wire.Members(after), wire.MembersReply, deadline)
            # Pages are sorted. A master whose pages do not go on would be asked for ever.
            if not page.members or page.members[-1].server <= after:
                break
            found.update((info.server, info) for info in page.members)
            after, more = page.members[-1].server, page.more
        self._members, self._refreshed_at = found, _now()
        return found

    async def holders(
        self, names: Sequence[BlockName], among: Iterable[str], deadline: float
    ) -> dict[BlockName, set[str]]:
        """Which of the servers `among` have each block of one namespace and part.

        Raises MasterLost.
        """
        namespace, part, size = names[0].namespace, names[0].part, len(names[0].digest)
        holders, servers = {name: set[str]() for name in names}, set(among)
        first = 0
        while first < len(names):
            batch = names[first : first + wire.QUESTION_KEYS_MAX]
            packed = b"".join(name.digest for name in batch)
            request = wire.Find(namespace.name, namespace.parts, size, packed, False)
            found = await self.ask(request, wire.FindReply, deadline)
            for start, last, replicas in found.runs:
                here = {server for server, _, one in replicas if one == part} & servers
                holders.update((name, here) for name in batch[start : last + 1])
            answered = sum([last + 1 - start for start, last, _ in found.runs]) + len(found.misses)
            first += max(1, answered) if found.more else len(batch)
        return holders

    async def channel(self, server: str, deadline: float) -> Channel:
        """A channel to this server. Raises ServerLost when no path to it works, MasterLost."""
        kept = self._channels.get(server)
        if kept is not None and kept[0] == self._epoch(server):
            self._used(server)
            return kept[1]
        connecting = self._connecting.setdefault(server, asyncio.Lock())
        async with connecting:
            info = (await self.members(deadline)).get(server)
            if info is None or server == self.server:
                raise ServerLost(f"no master knows another server {server!r}")
            kept = self._channels.get(server)
            if kept is not None and kept[0] != info.epoch:  # it was restarted
                self.failed(server, kept[1])
            if server not in self._channels:
                self._channels[server] = info.epoch, await self._connect(info, deadline)
            self._used(server)
            return self._channels[server][1]

    def failed(self, server: str, channel: Channel | None) -> None:
        """A call on this channel has failed, or there was none: connect anew the next time, to what
        a master knows then. A channel that another call has opened meanwhile stays."""
        self._refreshed_at = float("-inf")
        if channel is not None and channel is self._channels.get(server, (0, None))[1]:
            self._close(server)

    async def close(self) -> None:
        """End every call and connection. Idempotent."""
        self._closed = True
        if self._rest is not None:
            self._rest.cancel()
        for server in list(self._channels):
            self._close(server)
        links, self._links = self._links, []
        for link in links:
            link.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _close(self, server: str) -> None:
        kept = self._channels.pop(server, None)
        if kept is not None:
            kept[1].abort()
            closing = asyncio.get_running_loop().create_task(kept[1].close())
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
            del self._used_at[server]
            self._close(server)
        if self._asked_at <= before:
            links, self._links = self._links, []
            for link in links:
                link.close()
        if self._used_at or self._links:
            self._watch()

    def _epoch(self, server: str) -> int:
        info = self._members.get(server)
        return info.epoch if info is not None else 0

    async def _connect(self, info: wire.MemberInfo, deadline: float) -> Channel:
        problem = "it has no transport in common with this server"
        for transport, address in self._paths(info):
            try:
                return await transport.connect(
                    address, cluster=self._cluster, client=self.server, deadline=deadline
                )
            except DeadlineExceeded:
                raise
            except (Unavailable, PeerError, Overloaded, ConfigError, OSError) as error:
                problem = str(error)
        raise ServerLost(f"server {info.server!r}: {problem}")

    def _paths(self, info: wire.MemberInfo) -> list[tuple[Transport, str]]:
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
