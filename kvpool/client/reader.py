"""How a client reads: from the best server of each block, then from the next one.

A read in one breath: the blocks are grouped by the best server that holds them, each group goes
down that server's channel into the caller's buffers, and what did not come is asked of the next
replica, until everything is there or every place has been tried.
"""

from __future__ import annotations

import asyncio
import enum
import functools
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from kvpool import logs
from kvpool.client import buffers as pieces
from kvpool.client.buffers import Buffers, OnDevice, Rows
from kvpool.client.device_staging import Staging
from kvpool.client.idle_timeout import InactivityTimer, ServerUnresponsive
from kvpool.client.location_cache import Sighting, Sightings
from kvpool.client.lookup import Lookup
from kvpool.client.servers import Servers, together
from kvpool.config import ClientConfig
from kvpool.errors import (
    DeadlineExceeded,
    KvpoolError,
    MasterLost,
    Overloaded,
    PeerError,
    Unavailable,
)
from kvpool.protocols import Channel, ReadOptions, View
from kvpool.types import Match, Namespace, ReadBlock, ReadResult, ReadStatus

log = logs.get("kvpool.client")


class _FoundBy(enum.Enum):
    """Who says where the blocks of a read are."""

    MATCH = enum.auto()
    MASTER = enum.auto()
    SIGHTING = enum.auto()


@dataclass(slots=True)
class _Fetch:
    """One `Pool.read` on its way; lists run parallel to the digests."""

    reading: ReadOptions
    digests: Sequence[bytes]
    memory: list[tuple[memoryview, ...]]
    device: Mapping[int, OnDevice]  # positions whose memory is there
    sizes: Sequence[int]
    results: list[ReadResult]
    places: list[list[str]]  # servers to ask, best last
    deadline: float
    found_by: _FoundBy
    others: bool = False  # somebody else may have them, too, but it is not known who
    silent: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    corrupt: dict[str, dict[bytes, None]] = field(default_factory=dict)

    def has_others(self, position: int) -> bool:
        """Whether somebody else may have the block, as far as is known."""
        return self.others or bool(self.places[position])

    def leave(self, server: str, positions: Iterable[int]) -> None:
        """It was silent: others are asked first, who may be no better; then it is asked again."""
        self.silent.add(server)
        if self.found_by is not _FoundBy.SIGHTING:  # a master will name it again
            for position in positions:
                self.places[position].insert(0, server)


class Reader:
    """Reads of one client."""

    def __init__(
        self,
        config: ClientConfig,
        lookup: Lookup,
        servers: Servers,
        sightings: Sightings,
        staging: Staging,
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._lookup = lookup
        self._servers = servers
        self._sightings = sightings
        self._staging = staging
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
        found_by = _FoundBy.MASTER if match is None else _FoundBy.MATCH
        seen = self._sightings.of(namespace, digests) if match is None else []
        if seen:
            found_by = _FoundBy.SIGHTING
            results = [ReadResult(ReadStatus.NOT_YET)] * len(seen)
            places = [[sighting.server] for sighting in seen]
        else:
            results, places = await self._lookup.locate(namespace, digests, part, match, deadline)
        reading = ReadOptions(namespace, part, self._config.verify)
        fetch = _Fetch(reading, digests, *buffers, results, places, deadline, found_by)
        fetch.others = not all(sighting.alone for sighting in seen)
        await self._fetch_all(fetch, range(len(digests)))
        if seen:
            await self._fetch_moved(fetch)
        await self._report_corrupt(fetch)
        self._count(results)
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
        results, places = await self._lookup.locate(namespace, digests, part, match, deadline)
        views = [View(result.status) for result in results]
        reading = ReadOptions(namespace, part, self._config.verify)
        async with AsyncExitStack() as stack:
            missing = [i for i, servers in enumerate(places) if servers]
            while missing:
                for server, group in _grouped(missing, places, [0] * len(digests)):
                    wanted = [digests[i] for i in group]
                    try:
                        async with InactivityTimer(self._config.attempt_s) as idle_timeout:
                            channel = await self._servers.viewable(server, deadline)
                            shown = await stack.enter_async_context(
                                channel.read_view(
                                    reading._replace(idle_timeout=idle_timeout),
                                    wanted,
                                    deadline=deadline,
                                )
                            )
                    except (Unavailable, PeerError, Overloaded) as error:
                        shown = [View(_why(error))] * len(group)
                    for position, view in zip(group, shown, strict=True):
                        views[position] = view
                        if view.status is ReadStatus.NOT_YET:  # on its way from a slow tier
                            places[position].append(server)
                missing = [i for i in missing if not views[i].status.hit and places[i]]
            self._count([ReadResult(view.status) for view in views])
            yield views

    # --- inside --------------------------------------------------------------------------

    async def _fetch(self, fetch: _Fetch, positions: Iterable[int]) -> None:
        """Read blocks from one server after the other until they are there or no place is left.

        A block is asked of one server at a time, so its buffer has one writer; a server that is
        silent is left before the next one is asked.
        """
        missing = [i for i in positions if not fetch.results[i].status.hit and fetch.places[i]]
        groups = _grouped(missing, fetch.places, fetch.sizes)
        if len(groups) == 1:
            await self._fetch_from(fetch, *groups[0])
        elif groups:
            async with asyncio.TaskGroup() as group:
                for server, batch in groups:
                    group.create_task(self._fetch_from(fetch, server, batch))

    async def _fetch_moved(self, fetch: _Fetch) -> None:
        """What was not where it had been seen: let a master say where it is."""
        missing = [i for i, result in enumerate(fetch.results) if not result.status.hit]
        if not missing or self._loop.time() >= fetch.deadline:
            return
        namespace, part, *_ = fetch.reading
        digests = [fetch.digests[i] for i in missing]
        self._sightings.lost(digests)
        fetch.found_by, fetch.others = _FoundBy.MASTER, False
        results, places = await self._lookup.locate(namespace, digests, part, None, fetch.deadline)
        for position, result, servers in zip(missing, results, places, strict=True):
            fetch.places[position] = [s for s in servers if s not in fetch.given_up]
            if fetch.places[position] or not servers:
                fetch.results[position] = result
        await self._fetch_all(fetch, missing)

    async def _fetch_all(self, fetch: _Fetch, positions: Iterable[int]) -> None:
        """Blocks for the host's memory as they come, those for a device by way of it."""
        if not fetch.device:
            return await self._fetch(fetch, positions)
        await self._fetch(fetch, [i for i in positions if i not in fetch.device])
        staged = {i: fetch.device[i] for i in positions if i in fetch.device and fetch.places[i]}
        if staged:
            await self._fetch_staged(fetch, staged)

    async def _fetch_staged(self, fetch: _Fetch, blocks: Mapping[int, OnDevice]) -> None:
        """The same for blocks whose memory lies on a device: rows of the host stand in for it."""

        async def into(rows: Rows) -> Mapping[int, ReadResult]:
            for position, row in rows.items():
                fetch.memory[position] = row
            await self._fetch(fetch, rows)
            return {position: fetch.results[position] for position in rows}

        staged = await self._staging.read(blocks, into, fetch.deadline)
        for position, result in staged.items():
            fetch.results[position] = result

    async def _fetch_from(self, fetch: _Fetch, server: str, positions: list[int]) -> None:
        """Ask one server until it has nothing more for us, then the next for what is missing.

        A server that is bringing blocks from a slow tier is asked again and again; where another
        has them, too, it must have something new within `hedge_s`.
        """
        touch = self._loop.time()
        waiting = positions
        while waiting:
            hedged = fetch.has_others(waiting[0]) and server not in fetch.silent
            await self._ask(fetch, server, waiting)
            now = self._loop.time()
            still = [i for i in waiting if fetch.results[i].status is ReadStatus.NOT_YET]
            if len(still) < len(waiting):
                touch = now
            waiting = still
            if waiting and hedged and now - touch >= self._config.hedge_s:
                fetch.leave(server, waiting)
                break
        await self._fetch(fetch, positions)

    async def _ask(self, fetch: _Fetch, server: str, positions: list[int]) -> None:
        """One question to one server, and what came of it."""
        blocks = [ReadBlock(fetch.digests[i], fetch.memory[i], fetch.sizes[i]) for i in positions]
        hedged = fetch.has_others(positions[0]) and server not in fetch.silent
        silence_s = self._config.hedge_s if hedged else self._config.attempt_s
        try:
            async with InactivityTimer(silence_s) as idle_timeout:
                reading = fetch.reading._replace(idle_timeout=idle_timeout)
                answer = await self._servers.call(
                    server,
                    lambda channel: pieces.read(channel, reading, blocks, fetch.deadline),
                    fetch.deadline,
                    sum(fetch.sizes[i] for i in positions),
                    lambda results: sum(result.size for result in results),
                )
        except (Unavailable, PeerError, Overloaded) as error:
            answer = [ReadResult(_why(error))] * len(positions)
            if isinstance(error, ServerUnresponsive):
                self._servers.silent(server, given_up=not hedged)
                if hedged:
                    fetch.leave(server, positions)
                else:
                    fetch.silent.add(server)
                    fetch.given_up.add(server)
        seen = []
        for position, result in zip(positions, answer, strict=True):
            fetch.results[position] = result
            if result.status is ReadStatus.HIT:
                seen.append(fetch.digests[position])
            elif result.status is ReadStatus.CORRUPT:
                fetch.corrupt.setdefault(server, {})[fetch.digests[position]] = None
        if fetch.found_by is _FoundBy.MASTER:
            alone = not fetch.places[positions[0]]
            self._sightings.saw(Sighting(fetch.reading.namespace, server, alone), seen)

    async def _report_corrupt(self, fetch: _Fetch) -> None:
        namespace, part = fetch.reading.namespace, fetch.reading.part
        for server, digests in [(s, list(d)) for s, d in fetch.corrupt.items()]:
            log.error("wrong checksum", server=server, blocks=len(digests))
            self._counters["corrupt"] += len(digests)
            report_corruption = functools.partial(
                _suspect, namespace, part, digests, fetch.deadline
            )
            await together([self._servers.call(server, report_corruption, fetch.deadline)])

    def _count(self, results: Sequence[ReadResult]) -> None:
        hits = 0
        for status, size in results:
            if status is ReadStatus.HIT:
                hits += 1
                self._counters["read_bytes"] += size
            else:
                self._counters[f"read_{status.name.lower()}"] += 1
        self._counters["read_hit"] += hits


def _grouped(
    missing: Sequence[int], places: list[list[str]], sizes: Sequence[int]
) -> list[tuple[str, list[int]]]:
    """Take the next server of each block; blocks of one server go together, in batches.

    Those that nobody else has are kept apart: they are worth waiting for.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    for position in missing:
        server = places[position].pop()
        groups.setdefault((server, bool(places[position])), []).append(position)
    return [
        (server, batch)
        for (server, _), positions in groups.items()
        for batch in pieces.batches(positions, sizes)
    ]


async def _suspect(
    namespace: Namespace, part: int, digests: Sequence[bytes], deadline: float, channel: Channel
) -> list[bool]:
    return await channel.report_corruption(namespace, part, digests, deadline=deadline)


def _why(error: KvpoolError) -> ReadStatus:
    """The miss that an error means for a reader."""
    if isinstance(error, DeadlineExceeded):
        return ReadStatus.DEADLINE
    if isinstance(error, MasterLost):
        return ReadStatus.NO_MASTER
    if isinstance(error, Overloaded):
        return ReadStatus.REFUSED
    return ReadStatus.SERVER_LOST
