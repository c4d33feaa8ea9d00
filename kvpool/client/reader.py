"""How a client reads: from the best servers of each block, then from the next one.

`Ways` says which blocks each server is asked for. They are read over that server's channel into the
caller's buffers; what did not come is read from the next replica, until everything is there or
every replica has been tried.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool import logs
from kvpool.client.buffers import Buffers, DeviceBlock, HostRows
from kvpool.client.idle_timeout import InactivityTimer, ServerUnresponsive
from kvpool.client.location_cache import CachedLocation, LocationCache
from kvpool.client.lookup import Lookup
from kvpool.client.read_rates import MEASURED_BYTES_MIN, ReadRates
from kvpool.client.servers import Servers, gather_errors
from kvpool.client.ways import Attempt, Ways, group_by_server
from kvpool.config import AUTO, DIRECT, STAGED, ClientConfig
from kvpool.errors import (
    DeadlineExceeded,
    KvpoolError,
    MasterLost,
    Overloaded,
    PeerError,
    Unavailable,
)
from kvpool.protocols import (
    Channel,
    DeviceArrival,
    DeviceReadBlock,
    ReadOptions,
    SupportsDeviceRead,
    View,
)
from kvpool.runtime import task_group
from kvpool.types import Match, Namespace, ReadBlock, ReadResult, ReadStatus, rows_of

if TYPE_CHECKING:
    import torch

    from kvpool.client.device_direct import DirectReads
    from kvpool.client.device_staging import Staging
    from kvpool.device.thread import DeviceFailed

log = logs.get("kvpool.client")

#: A property of the enum would be called for each block.
_HIT, _NOT_YET, _CORRUPT = ReadStatus.HIT, ReadStatus.NOT_YET, ReadStatus.CORRUPT
#: A server that hands over a block has evicted it: another one may have it (design: movers).
_EVICTED = ReadStatus.EVICTED


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
    | waiting  | reason so far      | not empty       | `Ways` has a server for it                 |
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
    #: Memory on devices that blocks are received into directly, while that is tried.
    direct: dict[int, torch.Tensor] = field(default_factory=dict)
    #: Servers that did not bring a block directly, and may through the host: best last.
    indirect: dict[int, list[str]] = field(default_factory=dict)
    #: Blocks that came directly with wrong bytes.
    direct_corrupt: set[int] = field(default_factory=set)

    def is_hedged(self, attempt: Attempt) -> bool:
        """Whether to leave that server after `hedge_s`: another replica may exist.

        A server that was left once is not hedged again, or two slow replicas would be asked in
        turn for ever (design: hedging).
        """
        # The blocks of an attempt are alike in this: `Ways` keeps the others apart.
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


class Reader:
    """Reads of one client. `staging` makes the pinned memory when a read first needs it, `direct`
    what direct reads need."""

    def __init__(
        self,
        config: ClientConfig,
        lookup: Lookup,
        servers: Servers,
        locations: LocationCache,
        staging: Callable[[], Staging],
        direct: Callable[[], DirectReads],
        rates: ReadRates,
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._path = config.device_path
        self._staging_logged = False
        self._lookup = lookup
        self._rates = rates
        self._servers = servers
        self._locations = locations
        self._staging = staging
        self._direct = direct
        self._counters = counters
        self._loop = asyncio.get_running_loop()

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
            await self._report_corruption(state)
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
            await self._report_corruption(state)
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
            await self._fetch(state, positions)
            return
        await self._fetch(state, [i for i in positions if i not in state.device])
        # Only for those that have a server: nothing is even made for the others.
        blocks = {
            i: state.device[i] for i in positions if i in state.device and state.candidates[i]
        }
        if blocks and self._path != STAGED:
            blocks = await self._fetch_direct(state, blocks)
        if blocks:
            await self._fetch_staged(state, blocks)
            self._distrust_direct(state)

    async def _fetch_staged(self, state: ReadState, blocks: Mapping[int, DeviceBlock]) -> None:
        """Through pinned memory of the host."""

        async def fetch_rows(rows: HostRows) -> Mapping[int, ReadResult]:
            for position, row in rows.items():  # rows of the host stand in for the device's
                state.host[position] = row
            await self._fetch(state, list(rows))
            return {position: state.results[position] for position in rows}

        # A hit counts when the device has the bytes, so results are set again here.
        staged = await self._staging().read(blocks, fetch_rows, state.deadline)
        for position, result in staged.items():
            state.results[position] = result

    async def _fetch_direct(
        self, state: ReadState, blocks: dict[int, DeviceBlock]
    ) -> dict[int, DeviceBlock]:
        """From the network into the devices; returns the blocks that are to be staged instead."""
        # not at the top (design: layout)
        from kvpool.client import device_direct
        from kvpool.device.thread import DeviceFailed

        if self._path == DIRECT:
            device_direct.check_sizes(blocks, "read")
            chosen = blocks
        else:
            chosen = {
                i: block
                for i, block in blocks.items()
                if device_direct.fits(block)
                and self._servers.reaches_devices(state.candidates[i][-1], only_fabrics=True)
                and self._direct().is_ready(block)
            }
            self._log_what_is_staged(len(blocks) - len(chosen))

        async def fetch_rows(rows: device_direct.DeviceTargets) -> Mapping[int, ReadResult]:
            state.direct.update(rows)
            try:
                await self._fetch(state, list(rows))
            finally:
                for position in rows:
                    del state.direct[position]
            return {position: state.results[position] for position in rows}

        if not chosen:
            return blocks
        candidates = {i: list(state.candidates[i]) for i in chosen}
        try:
            found = await self._direct().read(chosen, fetch_rows, state.deadline)
        except DeviceFailed as error:
            if self._path == DIRECT:
                raise
            self._give_up_direct(state, candidates, error)
            return blocks
        for position, result in found.items():
            state.results[position] = result
        left = {i: block for i, block in blocks.items() if i not in chosen}
        if state.direct_corrupt and self._path == AUTO:
            await self._acquit_the_way(state)
        for position, servers in state.indirect.items():
            if state.results[position].status is not _HIT:
                state.candidates[position] += servers
                left[position] = blocks[position]
        state.indirect.clear()
        return left

    def _log_what_is_staged(self, blocks: int) -> None:
        """Once: who chose `auto` learns that it is of no use for some blocks, and why."""
        if blocks and not self._staging_logged:
            self._staging_logged = True
            why = self._servers.device_lack or (
                "their servers are on this host, or no network card is known to reach them, or "
                "triton is not installed or still compiles, or they are large and in pieces"
            )
            log.info("blocks for devices are staged", device_path=AUTO, blocks=blocks, why=why)

    def _give_up_direct(
        self, state: ReadState, candidates: Mapping[int, list[str]], error: DeviceFailed
    ) -> None:
        """All once more, through the host: what has come is in rows that nobody has verified."""
        if self._path != STAGED:
            self._path = STAGED
            log.warning("direct reads failed: staged from now on", error=str(error))
        for position, servers in candidates.items():
            state.candidates[position] = servers
            state.results[position] = ReadResult(ReadStatus.DEADLINE)
        state.indirect.clear()
        state.direct_corrupt.clear()

    async def _acquit_the_way(self, state: ReadState) -> None:
        """Have servers look at their copies before these are read once more: then a wrong one may
        be gone, and another right, and nobody could say what was wrong."""
        confirmed = await self._report_corruption(state)
        state.corrupt.clear()
        state.direct_corrupt = {
            i for i in state.direct_corrupt if state.digests[i] not in confirmed
        }

    def _distrust_direct(self, state: ReadState) -> None:
        """Bytes that were wrong on the device and right on the host: the server is well, and the
        way to the device is not."""
        wrong = [i for i in state.direct_corrupt if state.results[i].status is _HIT]
        if wrong and self._path == AUTO:
            self._path = STAGED
            log.error(
                "direct reads gave wrong bytes, which were not used: staged from now on",
                blocks=len(wrong),
                advice="make gpu-acceptance, and client.device_path: staged",
            )

    async def _fetch(self, state: ReadState, positions: Sequence[int]) -> None:
        """Attempt after attempt, until the blocks are read or have no candidate left."""
        ways = Ways(
            *(state.candidates, state.sizes, state.results, state.unresponsive),
            *(self._servers.standing, self._rates, self._config.hedge_s),
        )
        with closing(ways):
            attempts = ways.begin(positions, self._loop.time())
            # Nearly always all are on one server: then no task, which costs a turn of the loop.
            while len(attempts) == 1:
                if await self._attempt(state, attempts[0]) and attempts[0].overdue is None:
                    return  # and nothing waits
                attempts = ways.ended(attempts[0], self._loop.time())
            if not attempts:
                return
            # Ways do not wait for each other: a lost server delays its own blocks only.
            async with task_group() as group:

                async def follow(attempt: Attempt) -> None:
                    """Ask one server after the other; what others are to bring gets new tasks."""
                    attempts = [attempt]
                    while attempts:
                        await self._attempt(state, attempts[0])
                        attempts = ways.ended(attempts[0], self._loop.time())
                        for other in attempts[1:]:
                            group.create_task(follow(other))

                for attempt in attempts:
                    group.create_task(follow(attempt))

    async def _attempt(self, state: ReadState, attempt: Attempt) -> bool:
        """Ask one server, and again for blocks that are NOT_YET, as long as it makes progress.
        Returns True if it brought all of them at once.

        While it reads blocks from a slow tier it is asked again and again. Where another server
        has them, too, it must have a new one within `hedge_s` (design: promotion). Writes ask
        again in the same shape: `Writer.write_to`.
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
        if attempt.positions[0] in state.direct:
            return await self._ask_direct(state, attempt, hedged)
        server, positions, _ = attempt
        blocks = rows_of(
            ReadBlock,
            [state.digests[i] for i in positions],
            [state.host[i] for i in positions],
            [state.sizes[i] for i in positions],
        )
        try:
            async with self._timer(state, attempt, hedged) as timer:
                options = state.options._replace(idle_timeout=timer)
                return await self._servers.call(
                    server,
                    lambda channel: channel.read(options, blocks, deadline=state.deadline),
                    state.deadline,
                    "read",
                )
        except (Unavailable, PeerError, Overloaded) as error:
            return self._failed(state, attempt, hedged, error)

    async def _ask_direct(
        self, state: ReadState, attempt: Attempt, hedged: bool
    ) -> list[ReadResult]:
        """The same for memory on devices, where the blocks are verified once they are there."""
        server, positions, _ = attempt
        blocks = [DeviceReadBlock(state.digests[i], state.direct[i]) for i in positions]
        only_fabrics = self._path == AUTO
        try:
            async with self._timer(state, attempt, hedged) as timer:
                options = state.options._replace(idle_timeout=timer)
                arrivals = await self._servers.device_call(
                    server,
                    functools.partial(_receive, options, blocks, state.deadline),
                    state.deadline,
                    only_fabrics=only_fabrics,
                    counted_as="read",
                )
        except (Unavailable, PeerError, Overloaded) as error:
            if isinstance(error, ServerUnresponsive):
                self._servers.avoid_device_paths(server)  # the lane may be at fault
            elif only_fabrics and not isinstance(error, DeadlineExceeded):
                self._note_indirect(state, attempt)
            return self._failed(state, attempt, hedged, error)
        # Outside of the timer, and no error of a device is one of the server.
        try:
            results = await self._direct().verify(options, blocks, arrivals, state.deadline)
        except DeadlineExceeded:
            return [ReadResult(ReadStatus.DEADLINE)] * len(positions)
        wrong = [i for i, one in zip(positions, results, strict=True) if one.status is _CORRUPT]
        self._counters["direct_corrupt"] += len(wrong)
        if only_fabrics and wrong:
            # Is the server's copy wrong, or the way to this device? The next look is the host's.
            state.direct_corrupt.update(wrong)
            self._note_indirect(state, Attempt(server, wrong))
        return results

    def _note_indirect(self, state: ReadState, attempt: Attempt) -> None:
        for position in attempt.positions:
            state.indirect.setdefault(position, []).insert(0, attempt.server)

    def _timer(self, state: ReadState, attempt: Attempt, hedged: bool) -> InactivityTimer:
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

    def _failed(
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

    async def _report_corruption(self, state: ReadState) -> set[bytes]:
        """Have each server check its copies itself: only the server removes a block. Returns
        those of which one was wrong."""
        namespace, part = state.options.namespace, state.options.part
        confirmed: set[bytes] = set()
        for server, digests in [(s, list(d)) for s, d in state.corrupt.items()]:
            log.error("wrong checksum", server=server, blocks=len(digests))
            self._counters["corrupt"] += len(digests)
            report = functools.partial(_report_to, namespace, part, digests, state.deadline)
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


async def _report_to(
    namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    return await channel.report_corruption(namespace, part, digests, deadline=deadline)


async def _receive(
    options: ReadOptions, blocks: Sequence[DeviceReadBlock], deadline: float, channel: Channel
) -> list[DeviceArrival]:
    if not isinstance(channel, SupportsDeviceRead):
        raise Overloaded("this transport receives nothing into memory on devices")
    return await channel.read_to_device(options, blocks, deadline=deadline)


def miss_reason(error: KvpoolError) -> ReadStatus:
    """The miss that an error means for a reader."""
    if isinstance(error, DeadlineExceeded):
        return ReadStatus.DEADLINE
    if isinstance(error, MasterLost):
        return ReadStatus.NO_MASTER
    if isinstance(error, Overloaded):
        return ReadStatus.REFUSED
    return ReadStatus.SERVER_LOST
