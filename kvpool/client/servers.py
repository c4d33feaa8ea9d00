"""How a client reaches masters and servers: which one, by which path, and for how long.

Two kinds of trouble are told apart. A path that *fails* (refused, reset, nonsense) is dropped and
the next one taken; a server none of whose paths works is left alone for a while. A peer that is
*silent* (frozen, cut off, overloaded) is not waited for: after `hedge_s` somebody else is asked,
and when there is nobody else it is given up after `attempt_s`.

Where several paths to other hosts work, the faster one is taken, as measured (`paths.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from kvpool import logs
from kvpool.client import buffers as pieces
from kvpool.client.masters import Masters
from kvpool.client.path_selector import Choice
from kvpool.config import ClientConfig
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    KvpoolError,
    LinkBroken,
    MasterLost,
    Overloaded,
    PeerError,
    ServerLost,
    Unavailable,
)
from kvpool.protocols import (
    Channel,
    NeedsMeasurement,
    SupportsReachability,
    SupportsZeroCopyView,
    Transport,
    WriteOptions,
)
from kvpool.runtime import Host
from kvpool.types import Cluster, Member, WriteBlock, WriteStatus
from kvpool.wire import messages as wire

log = logs.get("kvpool.client")

T = TypeVar("T")

#: After a server did not answer it is left alone for this long, doubling up to the second value.
_BACKOFF_S: Final = 0.2
_BACKOFF_S_MAX: Final = 5.0
#: While a server is left alone, masters are asked this often whether it has come back.
_REFRESH_S: Final = 0.5
#: Servers that a client takes a master's word for.
_MEMBERS_MAX: Final = 4096


def nothing(_: object) -> int:
    """What a call moved that moves no blocks."""
    return 0


class _Path(NamedTuple):
    """One way to reach one server."""

    scheme: str
    address: str


class _Server:
    """What a client knows of one server: how to reach it, and how that went."""

    def __init__(self, server: str, rank: float) -> None:
        self.server = server
        self.rank = rank
        self.host = ""
        self.epoch = 0
        self.paths: list[_Path] = []
        self.far: Choice[_Path] | None = None  # those that lead to other hosts, if there are more
        self.channels: dict[_Path, Channel] = {}
        self.connecting = asyncio.Lock()
        self.retry_at = 0.0  # lost: not asked at all until then
        self.slow_until = 0.0  # silent: asked last until then
        self.failures = 0

    def failed(self, chance: random.Random) -> float:
        """Count one more failure; how long to keep away, jittered."""
        self.failures += 1
        backoff_s = min(_BACKOFF_S * 2.0**self.failures, _BACKOFF_S_MAX)
        return backoff_s * chance.uniform(0.5, 1.0)


class Servers:
    """Channels to servers: the best common transport first, the next one when it fails."""

    def __init__(
        self,
        config: ClientConfig,
        cluster: Cluster,
        host: Host,
        transports: Mapping[str, Transport],
        masters: Masters,
        counters: Counter[str],
        chance: random.Random | None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._transports = transports
        self._masters = masters
        self._counters = counters
        self._chance = chance or random.SystemRandom()
        self._servers: dict[str, _Server] = {}
        self._host = host
        self._refreshed = 0.0
        self._broken: dict[_Path, float] = {}  # a path that failed is tried again after this
        self._dying: set[asyncio.Task[None]] = set()
        self._preparing: dict[_Path, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"servers={sorted(self._servers)}"

    async def refresh(self, deadline: float) -> list[Member]:
        """Ask who is there. A server with a new epoch is another server: its channels go."""
        infos: list[wire.MemberInfo] = []
        more = True
        while more:
            after = infos[-1].server if infos else ""
            answer = await self._masters.ask(wire.Members(after), wire.MembersReply, deadline)
            infos += answer.members
            onward = bool(answer.members) and answer.members[0].server > after
            more = answer.more and onward and len(infos) < _MEMBERS_MAX
        self._refreshed = asyncio.get_running_loop().time()
        members = []
        for info in infos:
            fields = {name: getattr(info, name) for name in info.__struct_fields__}
            fields["addresses"] = tuple(info.addresses)
            fields["tiers"] = tuple(info.tiers)
            members.append(Member(**fields))
            known = self._servers.get(info.server)
            if known is None:
                known = _Server(info.server, self._chance.random())
                self._servers[info.server] = known
            if known.paths and not info.alive:
                continue  # a master that has lost touch knows less than we do
            if known.epoch != info.epoch:
                known.epoch = info.epoch
                known.retry_at = known.slow_until = known.failures = 0
                self._drop_channels(known)
            known.host = info.host
            self._find_paths(known, info.addresses)
        return members

    async def call(
        self,
        server: str,
        operation: Callable[[Channel], Awaitable[T]],
        deadline: float,
        size: int = 0,
        moved: Callable[[T], int] = nothing,
    ) -> T:
        """Run `operation` on the best path that works. Raises ServerLost when none does.

        It may run twice: a connection that the server closed while it was idle shows that only
        when it is used, and says nothing about the server. `size`: the bytes that it moves if
        all goes well; `moved`: those that it moved, from its result.
        """
        known = await self._known(server, deadline)
        epoch = known.epoch
        try:
            return await self._call(known, operation, deadline, size, moved)
        except ServerLost as error:
            lost = error
        # It may live again, elsewhere. Only when it does not is it left alone: others who ask for
        # it meanwhile must not be told that it is lost.
        with contextlib.suppress(MasterLost):
            await self.refresh(deadline)
        if known.epoch == epoch:
            known.retry_at = asyncio.get_running_loop().time() + known.failed(self._chance)
            known.paths = []  # ask again where it is
            raise lost
        return await self._call(known, operation, deadline, size, moved)

    async def _call(
        self,
        known: _Server,
        operation: Callable[[Channel], Awaitable[T]],
        deadline: float,
        size: int,
        moved: Callable[[T], int],
    ) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        problem: KvpoolError | None = None
        order = self._order(known, size)
        for path in order:
            for again in (True, False):
                channel = known.channels.get(path)
                used = channel is not None
                started = loop.time()
                try:
                    last = path == order[-1]
                    channel = await self._connected(known, path, deadline, last=last)
                    result = await operation(channel)
                except BaseException as error:
                    if known.far is not None:
                        known.far.gave_up(path, loop.time())
                    if not isinstance(error, Unavailable | PeerError):
                        raise
                    problem = error
                    if loop.time() >= deadline:
                        # A hurried call says nothing about the path; a patient one does.
                        if deadline - began >= self._config.attempt_s:
                            self._failed(known, path, channel, error)
                        raise DeadlineExceeded(f"server {known.server}: {error}") from None
                    if used and again and isinstance(error, LinkBroken):
                        continue
                    self._failed(known, path, channel, error)
                    break
                known.failures = 0
                if known.far is not None:
                    self._took(known.server, known.far, path, moved(result), started)
                return result
        raise ServerLost(f"server {known.server}: {problem or 'no common transport'}")

    def silent(self, server: str, *, given_up: bool) -> None:
        """It was left in mid-call: for a while, others are asked first.

        One that is given up may be gone without a word (power, cable); its connections go, too.
        """
        known = self._servers.get(server)
        if known is not None:
            now = asyncio.get_running_loop().time()
            known.slow_until = now + known.failed(self._chance)
            self._counters["hedged"] += not given_up
            if given_up:
                # Perhaps it is not the server but the wire: another one is taken for a while.
                for path in known.channels if known.far is not None else ():
                    if not self._transports[path.scheme].same_host:
                        self._broken[path] = now + _BACKOFF_S_MAX
                self._drop_channels(known)
            log.warning("server is silent", server=server)

    def best_first(self, servers: Iterable[str]) -> list[str]:
        """The same servers: those on this host first, those that were silent or lost lately last.

        Of equals each client has a favourite of its own, so that replicas share the load.
        """
        now = asyncio.get_running_loop().time()

        def preference(server: str) -> tuple[bool, bool, float]:
            known = self._servers.get(server)
            if known is None:
                return False, True, 0.0
            ailing = now < max(known.slow_until, known.retry_at)
            return ailing, known.host != self._host.id, known.rank

        return sorted(servers, key=preference)

    async def write(
        self, server: str, writing: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[WriteStatus]:
        """`Channel.write` on the best path that works, again while the server makes room."""
        statuses = await self._write_once(server, writing, blocks, deadline)
        while waiting := [i for i, s in enumerate(statuses) if s is WriteStatus.NOT_YET]:
            rest = [blocks[i] for i in waiting]
            try:
                answer = await self._write_once(server, writing, rest, deadline)
            except Unavailable:  # what has been stored is stored
                answer = [WriteStatus.NO_SPACE] * len(rest)
            for position, status in zip(waiting, answer, strict=True):
                statuses[position] = status
        return statuses

    async def _write_once(
        self, server: str, writing: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
    ) -> list[WriteStatus]:
        return await self.call(
            server,
            lambda channel: pieces.write(channel, writing, blocks, deadline),
            deadline,
            sum([block.size for block in blocks]),
            lambda statuses: sum(
                block.size
                for block, status in zip(blocks, statuses, strict=True)
                if status is WriteStatus.STORED
            ),
        )

    async def viewable(self, server: str, deadline: float) -> SupportsZeroCopyView:
        """A channel that shows memory in place. Raises Overloaded when no path does."""
        known = await self._known(server, deadline)
        for path in self._order(known):
            try:
                channel = await self._connected(known, path, deadline)
            except (Unavailable, PeerError) as error:
                self._failed(known, path, None, error)
                continue
            if isinstance(channel, SupportsZeroCopyView):
                return channel
        raise Overloaded(f"server {server} has no transport here that can show its memory")

    async def close(self) -> None:
        if preparing := list(self._preparing.values()):
            for task in preparing:
                task.cancel()
            await asyncio.wait(preparing)
        for known in self._servers.values():
            self._drop_channels(known)
        if self._dying:
            await asyncio.wait(self._dying)

    async def _known(self, server: str, deadline: float) -> _Server:
        known = self._servers.get(server)
        loop = asyncio.get_running_loop()
        now = loop.time()
        lost = known is not None and now < known.retry_at
        if known is None or not known.paths or (lost and now >= self._refreshed + _REFRESH_S):
            await self.refresh(deadline)
            known = self._servers.get(server)
        if known is not None and now < known.retry_at:
            raise ServerLost(f"server {server} did not answer; next try in a moment")
        if known is None:
            raise ServerLost(f"no master knows server {server}")
        return known

    def _find_paths(self, known: _Server, addresses: Sequence[str]) -> None:
        """The paths that this client can take, in its order of preference."""
        by_scheme = {address.partition("://")[0]: address for address in addresses}
        near, far, needs_measurement = [], [], []
        for scheme, transport in self._transports.items():
            if scheme not in by_scheme:
                continue
            path = _Path(scheme, by_scheme[scheme])
            if isinstance(transport, SupportsReachability) and not transport.can_reach(
                path.address
            ):
                continue
            if transport.same_host:
                near += [path] if known.host == self._host.id else []
            elif (
                self._config.measure
                and isinstance(transport, NeedsMeasurement)
                and transport.needs_measurement
            ):
                needs_measurement.append(path)
            else:
                far.append(path)
        far += needs_measurement
        if not self._config.measure or len(far) < 2:
            known.far = None
        elif known.far is None or known.far.paths != far:
            known.far = Choice(far)
        known.paths = [*near, *far]

    def _order(self, known: _Server, size: int = 0) -> list[_Path]:
        """Preference order, except that a path that failed lately comes last."""
        now = asyncio.get_running_loop().time()

        def broken(path: _Path) -> bool:
            return self._broken.get(path, 0.0) > now

        order = known.paths
        if known.far is not None:
            near = order[: len(order) - len(known.far.paths)]
            # Nothing is tried out while a nearer path serves, or while any of them is in trouble.
            calm = all(map(broken, near)) and not any(map(broken, known.far.paths))
            if calm and size and (path := known.far.candidate(now)) is not None:
                self._prepare(known, known.far, path)
            order = [*near, *known.far.order(size if calm else 0, now, known.channels)]
        return sorted(order, key=broken)

    def _prepare(self, known: _Server, far: Choice[_Path], path: _Path) -> None:
        """Connect a path that is to be tried, beside the calls: none of them waits for it."""

        async def connect() -> None:
            try:
                await self._connected(known, path, loop.time() + self._config.attempt_s)
            except (Unavailable, PeerError, Overloaded) as error:
                far.gave_up(path, loop.time())
                self._failed(known, path, None, error)

        if path in known.channels or path in self._preparing:
            return
        loop = asyncio.get_running_loop()
        task = self._preparing[path] = loop.create_task(connect())
        task.add_done_callback(lambda _: self._preparing.pop(path, None))

    def _took(
        self, server: str, far: Choice[_Path], path: _Path, moved: int, started: float
    ) -> None:
        """Tell the choice of paths how long a call took."""
        now = asyncio.get_running_loop().time()
        before = far.best
        if far.moved(path, moved, now - started, now):
            self._counters[f"chosen_{path.scheme}"] += 1
            log.info("faster path", server=server, address=path.address, before=before.address)

    async def _connected(
        self, known: _Server, path: _Path, deadline: float, *, last: bool = True
    ) -> Channel:
        """The channel of a path. While there are others, it may take half of an attempt."""
        channel = known.channels.get(path)
        if channel is not None:
            return channel
        broken = self._broken.get(path)
        try:
            async with asyncio.timeout_at(deadline):
                await known.connecting.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"still connecting to {path.address}") from None
        try:
            channel = known.channels.get(path)
            if channel is None:
                if self._broken.get(path) != broken:  # who came first has just found out
                    raise LinkBroken(f"{path.address} cannot be reached")
                loop = asyncio.get_running_loop()
                began = loop.time()
                until = min(deadline, began + self._config.attempt_s / (1 if last else 2))
                try:
                    channel = await self._transports[path.scheme].connect(
                        path.address,
                        cluster=self._cluster,
                        client=self._host.process,
                        deadline=until,
                    )
                except ConfigError as error:  # the server's mistake, not the caller's
                    raise LinkBroken(str(error)) from None
                except asyncio.CancelledError:
                    if not last and loop.time() - began >= self._config.hedge_s:
                        self._broken[path] = loop.time() + _BACKOFF_S_MAX  # not the next time
                    raise
                known.channels[path] = channel
                log.debug("connected", server=known.server, address=path.address)
        finally:
            known.connecting.release()
        return channel

    def _failed(
        self, known: _Server, path: _Path, channel: Channel | None, error: KvpoolError
    ) -> None:
        """A channel that fails is not trusted any more, and its path comes last for a while."""
        if channel is not None and known.channels.get(path) is channel:
            self._bury(known.channels.pop(path))
        self._broken[path] = asyncio.get_running_loop().time() + _BACKOFF_S_MAX
        self._counters[f"failed_{path.scheme}"] += 1
        log.warning("transport failed", server=known.server, address=path.address, why=str(error))

    def _drop_channels(self, known: _Server) -> None:
        while known.channels:
            self._bury(known.channels.popitem()[1])

    def _bury(self, channel: Channel) -> None:
        """Abort now; give its memory back when its last copy has stopped."""
        channel.abort()
        task = asyncio.get_running_loop().create_task(channel.close())
        self._dying.add(task)
        task.add_done_callback(self._dying.discard)


async def together(calls: Sequence[Awaitable[T]]) -> list[T | KvpoolError]:
    """Run calls side by side; those that the other side failed give their error as answer.

    If this is cancelled, it waits until every call has stopped: none may go on in the caller's
    buffers.
    """
    if len(calls) == 1:
        return [await _outcome(calls[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_outcome(call)) for call in calls]
    return [task.result() for task in tasks]


async def _outcome(call: Awaitable[T]) -> T | KvpoolError:
    try:
        return await call
    except (Unavailable, PeerError, Overloaded) as error:
        return error
