"""How a client reaches servers: by which path, and what it does when a path or a server fails.

Two kinds of trouble are kept apart. A path that *fails* (refused, reset, nonsense) is closed and
the next path is taken; a server without a working path is lost for a while. A server that is *slow*
(frozen, cut off, overloaded) sends nothing for `hedge_s`: then it is asked after the others, and
when there are no others it is given up after `attempt_s` (design: hedging).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple, TypeVar

from kvpool import logs
from kvpool.backoff import Backoff
from kvpool.client.attempts import Standing
from kvpool.client.masters import Masters
from kvpool.config import ClientConfig
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    Forbidden,
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
    OverFabric,
    SupportsReachability,
    SupportsZeroCopyView,
    Transport,
)
from kvpool.runtime import Host, task_group
from kvpool.types import Cluster, Duration, Member
from kvpool.wire import messages as wire

log = logs.get("kvpool.client")

T = TypeVar("T")

#: A server that did not answer is avoided for this long, doubling up to the second value.
_BACKOFF_S: Final = 0.4
_BACKOFF_S_MAX: Final = 5.0
#: While a server is lost, masters are asked this often whether it has come back.
REFRESH_S: Final = 0.5
#: After this, or up to twice of it, they are asked anyway: a restart may have brought better paths.
_RENEW_S: Final = 60.0
#: Members that a client accepts from a master.
_MEMBERS_MAX: Final = 4096
#: A server that masters list no more is forgotten after this: one that has just started knows few.
_FORGET_S: Final = 60.0


class Durations:
    """How long a client waited, since it was opened: a count for each operation, transport and
    duration. `counts` may be copied in any thread.

    Durations are rounded to two digits, so a sum is right to 5 %, every histogram can be made of
    the counts, and there are some hundred of them for each operation and transport. A duration
    costs a microsecond, once for a message and never for a block.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}

    def record(self, operation: str, transport: str, seconds: float) -> None:
        """One more that took so long."""
        key = operation, transport, f"{seconds:.2g}"
        self._counts[key] = self._counts.get(key, 0) + 1

    def counts(self) -> dict[Duration, int]:
        """As of now."""
        copied = self._counts.copy()  # in one step, for other threads
        return {Duration(key[0], key[1], float(key[2])): count for key, count in copied.items()}


class Path(NamedTuple):
    """One way to reach one server."""

    scheme: str
    address: str


class KnownServer:
    """What a client knows of one server.

    | state | while              | `call` does                           | ends with              |
    |-------|--------------------|---------------------------------------|------------------------|
    | new   | `paths` is empty   | asks a master for the addresses       | addresses              |
    | ready | none of the others | takes the best path                   |                        |
    | slow  | now < `slow_until` | the same; `rank` puts the server last | that time, a new epoch |
    | lost  | now < `retry_at`   | raises ServerLost without asking it,  | that time, a new epoch |
    |       |                    | and asks masters every `REFRESH_S`   |                        |

    `mark_unresponsive` makes a server slow. A call for which no path worked makes it lost and new.
    A call that succeeds resets the backoff that both states take their time from.
    """

    def __init__(self, server: str, rng: random.Random) -> None:
        self.server = server
        # Of equal servers each client prefers another one, so that replicas share the load.
        self.preference = rng.random()
        self.backoff = Backoff(_BACKOFF_S, _BACKOFF_S_MAX, rng=rng)
        self.host = ""
        self.epoch = 0
        self.paths: list[Path] = []  # best first: those inside this host, then the remote ones
        self.channels: dict[Path, Channel] = {}
        self.connecting = asyncio.Lock()
        self.retry_at = 0.0
        self.slow_until = 0.0
        self.worked_at = -math.inf  # a call succeeded
        self.path_failed = False  # and no master was asked for the addresses since
        self.missing_since = math.inf  # masters list it no more
        self.calls = 0  # that are under way


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
        rng: random.Random | None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self.transports = transports
        self._masters = masters
        self._counters = counters
        self.durations = Durations()
        self.under_way: Counter[str] = Counter()  # attempts to read, by server
        self._rng = rng or random.SystemRandom()
        self.known: dict[str, KnownServer] = {}  # by name
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.refreshed_at = 0.0
        self._broken_until: dict[Path, float] = {}  # paths that failed are tried last until then
        self._closing: set[asyncio.Task[None]] = set()
        self._renewal: asyncio.Task[None] | None = None  # asks a master for all addresses

    def __repr__(self) -> str:
        return f"servers={sorted(self.known)}"

    async def refresh(self, deadline: float, *, patient: bool = False) -> list[Member]:
        """The members that a master knows. Raises MasterLost, as `Masters.ask` does.

        A server with a new epoch has restarted, empty: its channels are closed, and it is ready.
        """
        members: list[Member] = []
        more = True
        while more:
            after = members[-1].server if members else ""
            answer = await self._masters.ask(
                wire.Members(after), wire.MembersReply, deadline, patient=patient
            )
            # Pages are sorted. A master whose pages do not go on would be asked for ever.
            if not answer.members or answer.members[-1].server <= after:
                break
            members += answer.members
            more = answer.more and len(members) < _MEMBERS_MAX
        self.refreshed_at = self._loop.time()
        for member in members:
            self._update(member)
        self._forget_missing(self.known.keys() - {member.server for member in members})
        return members

    async def call(
        self,
        server: str,
        operation: Callable[[Channel], Awaitable[T]],
        deadline: float,
        counted_as: str = "",
    ) -> T:
        """Run `operation` on the best path that works. Raises ServerLost, or Forbidden as it came.

        It may run twice: a connection that the server closed while it was idle shows that only
        when it is used, and says nothing about the server. `counted_as`: the operation in
        `durations`, where an answer counts.
        """
        record = self.known.get(server)
        if record is None or not record.paths or self._loop.time() < record.retry_at:
            record = await self.resolve(server, deadline)
        before = record.epoch, record.paths
        try:
            order = self._paths_in_order(record)
            return await self.call_on(record, order, operation, deadline, counted_as)
        except ServerLost as error:
            why = str(error)  # and not the error, which refers to this frame
        # It may be elsewhere now. It becomes lost only when no master knows of that:
        # before the answer, other calls to it would get ServerLost from a server that is well.
        with contextlib.suppress(MasterLost):
            await self.refresh(deadline)
        if not record.paths or (record.epoch, record.paths) == before:
            record.retry_at = self._loop.time() + record.backoff.next_delay()
            record.paths = []
            raise ServerLost(why)
        order = self._paths_in_order(record)
        return await self.call_on(record, order, operation, deadline, counted_as)

    def mark_unresponsive(self, server: str, why: str, *, given_up: bool) -> None:
        """A call to it was cancelled because it was silent or slow: for a while it is ranked last.

        With `given_up` its host may be gone without a word (power, cable): its channels are
        closed, too.
        """
        record = self.known.get(server)
        if record is not None:
            now = self._loop.time()
            known = now < record.slow_until
            record.slow_until = now + record.backoff.next_delay()
            self._counters["hedged"] += not given_up
            if given_up:
                # The network may be at fault instead: where there are other ways to that host,
                # they are taken for a while.
                remote = [p for p in record.paths if not self.transports[p.scheme].same_host]
                for path in record.channels.keys() & set(remote) if len(remote) > 1 else set():
                    self.mark_broken(path)
                self._close_channels(record)
            if not known:  # one line, however many calls wait for it
                log.warning("server is silent or slow", server=server, why=why)

    def rank(self, servers: Iterable[str], *below: str, now: bool = False) -> list[str]:
        """The same servers, each once, best first: this host's, others, then slow and lost ones. Of
        equal ones those `below` memory last, and first, `now`, that which it reads least from."""

        def key(server: str) -> tuple[Standing, bool, int, float]:
            record = self.known.get(server)
            choice = record.preference if record is not None else 0.0
            return self.standing(server), server in below, now and self.under_way[server], choice

        return sorted(dict.fromkeys(servers), key=key)

    def standing(self, server: str) -> Standing:
        """How good it is now, as far as it is known."""
        record = self.known.get(server)
        if record is None:
            return Standing(ailing=False, far=True, networked=True)
        now = self._loop.time()
        mapped = record.paths and self.transports[record.paths[0].scheme].same_host
        return Standing(
            ailing=now < record.slow_until or now < record.retry_at,
            far=record.host != self._host.id,
            networked=not mapped,
        )

    async def zero_copy_channel(self, server: str, deadline: float) -> SupportsZeroCopyView:
        """A channel that shows memory in place. Raises Overloaded when no path has one."""
        record = await self.resolve(server, deadline)
        for path in self._paths_in_order(record):
            channel = record.channels.get(path)
            if channel is None:
                try:
                    channel = await self._connect(record, path, deadline)
                except (Unavailable, PeerError) as error:
                    self._path_failed(record, path, None, error)
                    continue
            if isinstance(channel, SupportsZeroCopyView):
                self._renew_addresses(record)
                return channel
        raise Overloaded(f"server {server} has no transport here that can show its memory")

    async def close(self) -> None:
        """End every call and connection; returns when their copies have stopped."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal])
        for record in self.known.values():
            self._close_channels(record)
        if self._closing:
            await asyncio.wait(self._closing)

    # --- what is known of a server -------------------------------------------------------

    async def resolve(self, server: str, deadline: float) -> KnownServer:
        """The record of a server that may be called. Raises ServerLost, MasterLost."""
        record, now = self.known.get(server), self._loop.time()
        due = now >= self.refreshed_at + REFRESH_S
        if record is None or not record.paths or (now < record.retry_at and due):
            await self.refresh(deadline)
            record = self.known.get(server)
        if record is None:
            raise ServerLost(f"no master knows server {server}")
        if now < record.retry_at:
            raise ServerLost(f"server {server} did not answer; next try in a moment")
        return record

    def _update(self, member: Member) -> None:
        """Take over what a master says of one server."""
        record = self.known.get(member.server)
        if record is None:
            record = self.known[member.server] = KnownServer(member.server, self._rng)
        record.missing_since = math.inf
        # A master that has lost touch with a server knows less of it than this client.
        if member.alive or not record.paths:
            if record.epoch != member.epoch:
                record.epoch = member.epoch
                record.retry_at = record.slow_until = 0.0
                record.backoff.reset()
                self._close_channels(record)
            record.host = member.host
            self._find_paths(record, member.addresses)

    def _forget_missing(self, missing: Set[str]) -> None:
        """Drop those of them that were missing before, and for long. What a call uses stays."""
        now, many = self.refreshed_at, len(self.known) > 2 * _MEMBERS_MAX
        for record in [self.known[server] for server in missing]:
            record.missing_since = min(record.missing_since, now)
            if not record.calls and (many or record.missing_since <= now - _FORGET_S):
                self._close_channels(self.known.pop(record.server))

    def _renew_addresses(self, used: KnownServer) -> None:
        """Ask a master for all addresses in the background, if those of a server in use failed, or
        are old.

        A path that fails beside one that works may be an address of before a restart, and the
        server has a new one. Asked once for all failures until now, and not sooner than
        `REFRESH_S` after the last answer; what is still wrong fails again, and asks again.
        """

        async def renew() -> None:
            with contextlib.suppress(KvpoolError):
                await self.refresh(self._loop.time() + self._config.attempt_s)

        age = self._loop.time() - self.refreshed_at
        due = age >= (REFRESH_S if used.path_failed else (1 + used.preference) * _RENEW_S)
        if not due or (self._renewal is not None and not self._renewal.done()):
            return
        for record in self.known.values():
            record.path_failed = False
        self._renewal = self._loop.create_task(renew())

    def _find_paths(self, record: KnownServer, addresses: Sequence[str]) -> None:
        """The paths that this client can take, in its order of preference."""
        by_scheme = {address.partition("://")[0]: address for address in addresses}
        local, remote = [], []
        for scheme, transport in self.transports.items():
            if scheme not in by_scheme:
                continue
            path = Path(scheme, by_scheme[scheme])
            if isinstance(transport, SupportsReachability) and not transport.can_reach(
                path.address
            ):
                continue
            if transport.same_host:
                local += [path] if record.host == self._host.id else []
            else:
                remote.append(path)
        # Over tcp's lanes ucx is slower than tcp (design: ucx).
        remote.sort(key=lambda path: not is_fast(self.transports[path.scheme]))
        record.paths = [*local, *remote]

    # --- calls ---------------------------------------------------------------------------

    async def call_on(
        self,
        record: KnownServer,
        order: Sequence[Path],
        operation: Callable[[Channel], Awaitable[T]],
        deadline: float,
        counted_as: str,
    ) -> T:
        """`call` on these paths alone, in this order."""
        began = self._loop.time()
        problem = "no common transport"
        for path in order:
            for first in (True, False):
                channel = record.channels.get(path)
                reused = channel is not None
                started = self._loop.time()
                record.calls += 1
                try:
                    if channel is None:
                        last = path == order[-1]
                        channel = await self._connect(record, path, deadline, last=last)
                    result = await operation(channel)
                except Forbidden:  # an answer: the server, and the path, are as good as before
                    raise
                except (Unavailable, PeerError) as error:
                    problem = str(error)  # and not the error, which refers to this frame
                    if self._loop.time() >= deadline:
                        # A call with a short deadline proves nothing about the path, nor does one
                        # that had to wait for others, nor one beside others that succeed.
                        attempt_s = self._config.attempt_s
                        mute = self._loop.time() - record.worked_at >= attempt_s
                        if mute and deadline - began >= attempt_s:
                            self._path_failed(record, path, channel, error)
                        raise DeadlineExceeded(f"server {record.server}: {error}") from None
                    if reused and first and isinstance(error, LinkBroken):
                        continue  # closed while it was idle: once more, on a fresh connection
                    self._path_failed(record, path, channel, error)
                    break
                finally:
                    record.calls -= 1
                record.worked_at = self._loop.time()
                self._renew_addresses(record)
                if record.backoff.failures:
                    record.backoff.reset()
                if counted_as:
                    took = self._loop.time() - started
                    self.durations.record(counted_as, path.scheme, took)
                return result
        raise ServerLost(f"server {record.server}: {problem}")

    def _paths_in_order(self, record: KnownServer) -> list[Path]:
        """Preference order, except that a path that failed lately comes last."""
        if not self._broken_until:
            return record.paths
        now = self._loop.time()
        return sorted(record.paths, key=lambda path: self.is_broken(path, now))

    def is_broken(self, path: Path, now: float) -> bool:
        """It failed lately."""
        return self._broken_until.get(path, 0.0) > now

    # --- channels ------------------------------------------------------------------------

    async def _connect(
        self, record: KnownServer, path: Path, deadline: float, *, last: bool = True
    ) -> Channel:
        """The channel of a path. While there are other paths, it may take half of an attempt."""
        broken_until = self._broken_until.get(path, 0.0)
        try:
            async with asyncio.timeout_at(deadline):
                await record.connecting.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"still connecting to {path.address}") from None
        try:
            channel = record.channels.get(path)
            if channel is None:
                # The call that held the lock before this one has just found the path broken:
                # if each waiting call found out by itself, the last would wait for all of them.
                if self._broken_until.get(path, 0.0) > broken_until:
                    raise LinkBroken(f"{path.address} cannot be reached")
                began = self._loop.time()
                until = min(deadline, began + self._config.attempt_s / (1 if last else 2))
                try:
                    channel = await self.transports[path.scheme].connect(
                        path.address,
                        cluster=self._cluster,
                        client=self._host.process,
                        deadline=until,
                    )
                except (ConfigError, OSError) as error:  # not the caller's mistake
                    if isinstance(error, Unavailable):
                        raise
                    raise LinkBroken(str(error)) from None
                except asyncio.CancelledError:
                    # Hedged while it connected: the next call takes another path first.
                    if not last and self._loop.time() - began >= self._config.hedge_s:
                        self.mark_broken(path)
                    raise
                if self._masters.closed or self.known.get(record.server) is not record:
                    self._abort_and_close(channel)
                    raise LinkBroken(f"{path.address} is not used any more")
                record.channels[path] = channel
                log.debug("connected", server=record.server, address=path.address)
        finally:
            record.connecting.release()
        return channel

    def _path_failed(
        self, record: KnownServer, path: Path, channel: Channel | None, error: KvpoolError
    ) -> None:
        """A channel that failed is not used again, and its path comes last for a while."""
        # Another call may have replaced it already: a fresh channel is not closed for an old one.
        if channel is not None and record.channels.get(path) is channel:
            self._abort_and_close(record.channels.pop(path))
        known = self.is_broken(path, self._loop.time())
        self.mark_broken(path)
        record.path_failed = True
        self._counters[f"failed_{path.scheme}"] += 1
        if not known:
            why = str(error)
            log.warning("transport failed", server=record.server, address=path.address, why=why)

    def mark_broken(self, path: Path) -> None:
        """The path comes last for a while. Paths whose time is over are forgotten: a server that
        restarts has new ones each time."""
        now = self._loop.time()
        self._broken_until = {p: until for p, until in self._broken_until.items() if until > now}
        self._broken_until[path] = now + _BACKOFF_S_MAX

    def _close_channels(self, record: KnownServer) -> None:
        while record.channels:
            self._abort_and_close(record.channels.popitem()[1])

    def _abort_and_close(self, channel: Channel) -> None:
        """Abort now; give its memory back when its last copy has stopped."""
        channel.abort()
        task = self._loop.create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def is_fast(transport: Transport) -> bool:
    """False for one that is fast over a fabric only, where there is none."""
    return not isinstance(transport, OverFabric) or transport.has_fabric


async def gather_errors(calls: Sequence[Awaitable[T]]) -> list[T | KvpoolError]:
    """Run calls side by side; one that the other side failed has its error as its result.

    If this is cancelled, it waits until every call has stopped: none may go on in the caller's
    buffers.
    """
    if len(calls) == 1:
        return [await _result_or_error(calls[0])]
    async with task_group() as group:
        tasks = [group.create_task(_result_or_error(call)) for call in calls]
    return [task.result() for task in tasks]


async def _result_or_error(call: Awaitable[T]) -> T | KvpoolError:
    try:
        return await call
    except (Unavailable, PeerError, Overloaded) as error:
        return error
