"""How a client reads: from the best servers of each block, then from the next one.

A plan (`attempts.py`) says which blocks each server is asked for. They are read over that server's
channel into the caller's buffers; what did not come is read from the next replica, until everything
is there or every replica has been tried.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Protocol

from kvpool import logs, removals
from kvpool.client.attempts import MEASURED_BYTES_MIN, Attempt, Attempts, ReadRates, group_by_server
from kvpool.client.buffers import Buffers, DeviceBlock
from kvpool.client.extension import PLANS
from kvpool.client.idle_timeout import InactivityTimer, ServerUnresponsive
from kvpool.client.location_cache import CachedLocation, LocationCache
from kvpool.client.lookup import Lookup
from kvpool.client.servers import Servers, gather_errors
from kvpool.config import ClientConfig
from kvpool.errors import (
    DeadlineExceeded,
    KvpoolError,
    MasterLost,
    Overloaded,
    PeerError,
    Unavailable,
)
from kvpool.protocols import ReadOptions, View
from kvpool.runtime import task_group
from kvpool.types import Match, Namespace, ReadBlock, ReadResult, ReadStatus, row_of

log = logs.get("kvpool.client")

_BLOCK = row_of(ReadBlock)
#: A property of the enum would be called for each block.
_HIT, _NOT_YET, _CORRUPT = ReadStatus.HIT, ReadStatus.NOT_YET, ReadStatus.CORRUPT
#: A server that hands over a block has evicted it: another one may have it (design: movers).
_EVICTED = ReadStatus.EVICTED


class Asker(Protocol):
    """Asks servers for those blocks of one read that do not come into memory of the host."""

    def takes(self, position: int) -> bool:
        """Whether it asks for the block at this position now."""

    async def ask(self, attempt: Attempt, hedged: bool) -> list[ReadResult]:
        """One message to one server, and what came of it, as `Reader._ask`."""


class LocationSource(enum.Enum):
    """Who named the servers of a read."""

    MATCH = enum.auto()
    MASTER = enum.auto()
    CACHE = enum.auto()


@dataclass(slots=True)
class ReadState:
    """One `Pool.read` while it runs; lists run parallel to the digests.

    Each block is in one of these states:

    | state    | `results[i]`       | `candidates[i]` | leaves it when                             |
    |----------|--------------------|-----------------|--------------------------------------------|
    | waiting  | reason so far      | not empty       | the plan has a server for it               |
    | asked    | reason so far      | those after it  | the server answers, fails or is deferred   |
    | promoted | NOT_YET            | those after it  | the same server, asked again, has read it  |
    |          |                    |                 | from its slow tier, or is deferred         |
    | read     | HIT                | any             | never                                      |
    | missed   | reason of the miss | empty           | a cached location was wrong: masters are   |
    |          |                    |                 | asked once, and it is waiting again        |

    A block is asked of one server at a time, so its buffer has one writer (design: hedging).
    """

    options: ReadOptions
    digests: Sequence[bytes]
    host: list[tuple[memoryview, ...]]
    device: Mapping[int, DeviceBlock]  # positions whose memory is on a device
    sizes: Sequence[int]
    results: list[ReadResult]
    candidates: list[list[str]]  # servers to ask, best last
    deadline: float
    source: LocationSource
    promoted: bool = False  # a server had to bring some of it up from a slow tier
    more_replicas: bool = False  # other servers may have them, too, but it is not known which
    unresponsive: set[str] = field(default_factory=set)  # each is given `attempt_s` from now on
    given_up: set[str] = field(default_factory=set)  # not asked again in this read
    corrupt: dict[str, dict[bytes, None]] = field(default_factory=dict)
    asker: Asker | None = None  # of blocks that do not come into memory of the host

    def is_hedged(self, attempt: Attempt) -> bool:
        """Whether to leave that server after `hedge_s`: another replica may exist.

        A server that was left once is not hedged again, or two slow replicas would be asked in
        turn for ever (design: hedging).
        """
        # The blocks of an attempt are alike in this: the plan keeps the others apart.
        has_alternatives = self.more_replicas or bool(self.candidates[attempt.positions[0]])
        return has_alternatives and attempt.server not in self.unresponsive

    def defer(self, server: str, positions: Iterable[int]) -> None:
        """It was slow: others are asked first, who may be no better; then it is asked again."""
        self.unresponsive.add(server)
        if self.source is not LocationSource.CACHE:  # then a master will name it again
            for position in positions:
                self.candidates[position].insert(0, server)

    def record(self, attempt: Attempt, answer: Sequence[ReadResult]) -> list[bytes]:
        """Keep what a server answered; the digests of the hits."""
        hits = []
        for position, result in zip(attempt.positions, answer, strict=True):
            self.results[position] = result
            if result.status is _HIT:
                hits.append(self.digests[position])
            elif result.status is _CORRUPT:
                self.corrupt.setdefault(attempt.server, {})[self.digests[position]] = None
        return hits


class ReadsElsewhere(Protocol):
    """Reads what is not for memory of the host: `BlockTransfers`."""

    async def read(self, reader: Reader, state: ReadState, blocks: dict[int, DeviceBlock]) -> None:
        """Read these blocks, by position, and set their results in `state`."""


class Reader:
    """Reads of one client. `memory` reads what is not for memory of the host."""

    def __init__(
        self,
        config: ClientConfig,
        lookup: Lookup,
        servers: Servers,
        locations: LocationCache,
        memory: ReadsElsewhere,
        rates: ReadRates,
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._lookup = lookup
        self._rates = rates
        self._servers = servers
        self._locations = locations
        self._memory = memory
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._plan: type[Attempts] = resolve_name(PLANS[-1])

    async def read(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        buffers: Buffers,
        match: Match | None,
        deadline: float,
    ) -> list[ReadResult]:
        """As `Pool.read`, except that a buffer that is too small is one of the results."""
        # A caller who passes a match decides where to read; the cache is for the others.
        cached = self._locations.get(namespace, digests) if match is None else []
        if match is not None:
            source = LocationSource.MATCH
            results, candidates = self._lookup.locate_in(match, part, len(digests))
        elif cached:
            source = LocationSource.CACHE
            results = [ReadResult(_NOT_YET)] * len(cached)
            candidates = [[location.server] for location in cached]
        else:
            source = LocationSource.MASTER
            results, candidates = await self._lookup.locate(namespace, part, digests, deadline)
        options = ReadOptions(namespace, part, self._config.verify)
        state = ReadState(options, digests, *buffers, results, candidates, deadline, source)
        if cached:
            state.more_replicas = not all(location.sole_replica for location in cached)
        servers = {one[-1] for one in candidates if one}
        began = self._loop.time()
        await self._fetch_all(state, range(len(digests)))
        self._measure(state, servers, self._loop.time() - began)
        if cached or (match is not None and any(one.status is _EVICTED for one in results)):
            await self._refetch_from_masters(state)
        if state.corrupt:
            await self.report_corruption(state)
        self._count(results)
        return results

    async def read_from(
        self,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        buffers: Buffers,
        deadline: float,
    ) -> list[ReadResult]:
        """Read blocks from one server alone, always verified: for a writer that makes copies.

        As `read`, but it is no read of the user: it is not counted.
        """
        results = [ReadResult(_NOT_YET)] * len(digests)
        candidates = [[server] for _ in digests]
        options = ReadOptions(namespace, part, verify=True)
        source = LocationSource.MATCH
        state = ReadState(options, digests, *buffers, results, candidates, deadline, source)
        await self._fetch_all(state, range(len(digests)))
        if state.corrupt:
            await self.report_corruption(state)
        return results

    @asynccontextmanager
    async def read_view(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        match: Match | None,
        deadline: float,
    ) -> AsyncIterator[list[View]]:
        """As `Pool.read_view`."""
        if match is not None:
            results, candidates = self._lookup.locate_in(match, part, len(digests))
        else:
            results, candidates = await self._lookup.locate(namespace, part, digests, deadline)
        views = [View(result.status) for result in results]
        options = ReadOptions(namespace, part, self._config.verify)
        async with AsyncExitStack() as stack:
            missing = [i for i, servers in enumerate(candidates) if servers]
            while missing:
                for attempt in group_by_server(missing, candidates, [0] * len(digests)):
                    wanted = [digests[i] for i in attempt.positions]
                    try:
                        async with InactivityTimer(self._config.attempt_s) as timer:
                            channel = await self._servers.zero_copy_channel(
                                attempt.server, deadline
                            )
                            shown = await stack.enter_async_context(
                                channel.read_view(
                                    options._replace(idle_timeout=timer), wanted, deadline=deadline
                                )
                            )
                    except (Unavailable, PeerError, Overloaded) as error:
                        shown = [View(miss_reason(error))] * len(wanted)
                    for position, view in zip(attempt.positions, shown, strict=True):
                        views[position] = view
                        if view.status is _NOT_YET:  # on its way from a slow tier: ask again
                            candidates[position].append(attempt.server)
                missing = [i for i in missing if views[i].status is not _HIT and candidates[i]]
            self._count([ReadResult(view.status) for view in views])
            yield views

    # --- inside --------------------------------------------------------------------------

    async def _fetch_all(self, state: ReadState, positions: Sequence[int]) -> None:
        """Blocks for the host's memory as they come, those for a device directly or staged."""
        if not state.device:
            await self.fetch(state, positions)
            return
        await self.fetch(state, [i for i in positions if i not in state.device])
        # Only for those that have a server: nothing is even made for the others.
        blocks = {
            i: state.device[i] for i in positions if i in state.device and state.candidates[i]
        }
        if blocks:
            await self._memory.read(self, state, blocks)

    async def fetch(self, state: ReadState, positions: Sequence[int]) -> None:
        """Attempt after attempt, until the blocks are read or have no candidate left."""
        plan = self._plan(
            *(state.candidates, state.sizes, state.results, state.unresponsive),
            *(self._servers.standing, self._rates, self._servers.under_way, self._config.hedge_s),
        )
        with closing(plan):
            attempts = plan.begin(positions, self._loop.time())
            # Nearly always all are on one server: then no task, which costs a turn of the loop.
            while len(attempts) == 1:
                if await self._attempt(state, attempts[0]) and attempts[0].overdue is None:
                    return  # and nothing waits
                attempts = plan.ended(attempts[0], self._loop.time())
            if not attempts:
                return
            # Ways do not wait for each other: a lost server delays its own blocks only.
            async with task_group() as group:

                async def follow(attempt: Attempt) -> None:
                    """Ask one server after the other; what others are to bring gets new tasks."""
                    attempts = [attempt]
                    while attempts:
                        await self._attempt(state, attempts[0])
                        attempts = plan.ended(attempts[0], self._loop.time())
                        for other in attempts[1:]:
                            group.create_task(follow(other))

                for attempt in attempts:
                    group.create_task(follow(attempt))

    async def _attempt(self, state: ReadState, attempt: Attempt) -> bool:
        """Ask one server, and again for blocks that are NOT_YET, as long as it makes progress.
        Returns True if it brought all of them at once.

        While it reads blocks from a slow tier it is asked again and again. Where another server
        has them, too, it must have a new one within `hedge_s` (design: promotion). Writes ask
        again in the same shape: `Writer.write_on`.
        """
        server, waiting, _ = first = attempt
        progress_at = self._loop.time()
        while waiting:
            hedged = state.is_hedged(attempt)
            hits = state.record(attempt, await self._ask(state, attempt, hedged))
            if state.source is LocationSource.MASTER and hits:
                # A match may be old; the cache keeps what a master said just now.
                sole_replica = not state.candidates[waiting[0]]
                location = CachedLocation(state.options.namespace, server, sole_replica)
                self._locations.put(location, hits)
            if len(hits) == len(waiting):
                return attempt is first
            still = [i for i in waiting if state.results[i].status is _NOT_YET]
            now = self._loop.time()
            if len(still) < len(waiting):  # the timer of a message sees only its own silence
                progress_at = now
            elif still:
                state.promoted = True
            waiting = still
            if waiting and hedged and now - progress_at >= self._config.hedge_s:
                state.defer(server, waiting)
                break
            attempt = attempt._replace(positions=waiting)
        return False

    async def _ask(self, state: ReadState, attempt: Attempt, hedged: bool) -> list[ReadResult]:
        """One message to one server, and what came of it; its failure is a result, too."""
        if state.asker is not None and state.asker.takes(attempt.positions[0]):
            return await state.asker.ask(attempt, hedged)
        server, positions, _ = attempt
        columns = (
            [state.digests[i] for i in positions],
            [state.host[i] for i in positions],
            [state.sizes[i] for i in positions],
        )
        blocks = list(map(_BLOCK, zip(*columns, strict=True)))
        try:
            async with self.timer(state, attempt, hedged) as timer:
                options = state.options._replace(idle_timeout=timer)
                return await self._servers.call(
                    server,
                    lambda channel: channel.read(options, blocks, deadline=state.deadline),
                    state.deadline,
                    "read",
                )
        except (Unavailable, PeerError, Overloaded) as error:
            return self.failed(state, attempt, hedged, error)

    def timer(self, state: ReadState, attempt: Attempt, hedged: bool) -> InactivityTimer:
        """A server that has the only copy is worth a longer wait (design: hedging). If only the
        cache says so, a master is asked meanwhile: there may be others by now."""
        silence_s = self._config.hedge_s if hedged else self._config.attempt_s
        if hedged or state.source is not LocationSource.CACHE:
            # Blocks that come up from a slow tier show nothing about the way.
            return InactivityTimer(silence_s, None if state.promoted else attempt.overdue)
        is_elsewhere = functools.partial(self._is_elsewhere, state, attempt)
        return InactivityTimer(silence_s, ask_s=self._config.hedge_s, may_leave=is_elsewhere)

    async def _is_elsewhere(self, state: ReadState, attempt: Attempt) -> bool:
        """Whether a master knows another server that has one of these blocks."""
        _, candidates = await self._lookup.locate(
            state.options.namespace,
            state.options.part,
            [state.digests[i] for i in attempt.positions],
            state.deadline,
        )
        return any(server != attempt.server for servers in candidates for server in servers)

    def failed(
        self, state: ReadState, attempt: Attempt, hedged: bool, error: KvpoolError
    ) -> list[ReadResult]:
        """The misses of a call that failed.

        The timer's exit has waited for the call: nothing writes to the buffers any more, so the
        next server may.
        """
        server, positions, _ = attempt
        if isinstance(error, ServerUnresponsive):
            hedged = hedged or error.left_early
            self._servers.mark_unresponsive(server, str(error), given_up=not hedged)
            if hedged:
                state.defer(server, positions)
            else:
                state.unresponsive.add(server)
                state.given_up.add(server)
        return [ReadResult(miss_reason(error))] * len(positions)

    def _measure(self, state: ReadState, servers: Collection[str], seconds: float) -> None:
        """Keep the rate of a read that was whole, from memory, and from one side: from servers
        of this host, or from others."""
        size = sum([result.size for result in state.results if result.status is _HIT])
        if size < MEASURED_BYTES_MIN or state.promoted or state.unresponsive or state.device:
            return
        far = {self._servers.standing(server).far for server in servers}
        if len(far) == 1:
            self._rates.record(True not in far, size, seconds, self._loop.time())

    async def _refetch_from_masters(self, state: ReadState) -> None:
        """Blocks that are not where the cache or the match says: ask a master, once. They may have
        moved since (design: movers)."""
        missing = [i for i, result in enumerate(state.results) if result.status is not _HIT]
        if not missing or self._loop.time() >= state.deadline:
            return
        digests = [state.digests[i] for i in missing]
        # Before the master is asked: what it answers is put in again by `_attempt`.
        self._locations.discard(digests)
        state.source, state.more_replicas = LocationSource.MASTER, False
        results, candidates = await self._lookup.locate(
            state.options.namespace, state.options.part, digests, state.deadline
        )
        for position, result, servers in zip(missing, results, candidates, strict=True):
            state.candidates[position] = [s for s in servers if s not in state.given_up]
            # Where only servers are named that were given up, their failure stays the reason.
            if state.candidates[position] or not servers:
                state.results[position] = result
        await self._fetch_all(state, missing)

    async def report_corruption(self, state: ReadState) -> set[bytes]:
        """Have each server check its copies itself: only the server removes a block. Returns
        those of which one was wrong."""
        namespace, part = state.options.namespace, state.options.part
        confirmed: set[bytes] = set()
        for server, digests in [(s, list(d)) for s, d in state.corrupt.items()]:
            log.error("wrong checksum", server=server, blocks=len(digests))
            self._counters["corrupt"] += len(digests)
            report = functools.partial(
                removals.report_corruption,
                namespace=namespace,
                part=part,
                digests=digests,
                deadline=state.deadline,
            )
            (answer,) = await gather_errors([self._servers.call(server, report, state.deadline)])
            if not isinstance(answer, KvpoolError):
                confirmed.update(itertools.compress(digests, answer))
        return confirmed

    def _count(self, results: Sequence[ReadResult]) -> None:
        sizes = [result.size for result in results if result.status is _HIT]
        self._counters["read_hit"] += len(sizes)
        if sizes:
            self._counters["read_bytes"] += sum(sizes)
        if len(sizes) < len(results):
            for result in results:
                if result.status is not _HIT:
                    self._counters[f"read_{result.status.name.lower()}"] += 1


def miss_reason(error: KvpoolError) -> ReadStatus:
    """The miss that an error means for a reader."""
    if isinstance(error, DeadlineExceeded):
        return ReadStatus.DEADLINE
    if isinstance(error, MasterLost):
        return ReadStatus.NO_MASTER
    if isinstance(error, Overloaded):
        return ReadStatus.REFUSED
    return ReadStatus.SERVER_LOST
