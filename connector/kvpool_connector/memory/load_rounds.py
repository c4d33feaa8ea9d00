"""The reads of one load in one group: several rounds at once, so that the network, verification
and the copies to a device overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias

from kvpool import Match, Namespace, Pool, ReadStatus
from kvpool.types import SHARED_BYTES_MIN
from kvpool_connector.memory.block_memory import READS_MAX, BlockMemory
from kvpool_connector.records.messages import GroupBlocks
from kvpool_connector.records.promises import BlockWait

#: A load is at most so many reads, of at least so many bytes each, or half as many where servers
#: share it. When a load is aborted, the reads that have ended count.
_READS_PER_LOAD: Final = 8
#: Where they overlap: the first one's network and the last one's copy do not.
_OVERLAPPING_READS: Final = 16
_READ_BYTES_MIN: Final = 2 << 20
#: A master that takes longer to say whether a promised block is there is as good as none.
LOOK_TIMEOUT_S: Final = 1.0


class Span(NamedTuple):
    """Blocks `first` to `last` (excluded) of a chain, and where they are, if that is known. They
    are to be there at the time `deadline`."""

    first: int
    last: int
    match: Match | None
    deadline: float


#: Reads one part of the blocks of a span; returns the ids of those read.
ReadPart: TypeAlias = Callable[[Span, int], Awaitable[set[int]]]


class LoadRounds:
    """Reads `blocks` to where they belong, up to a miss, until the time `until`, which moves by
    the time that is waited for promised blocks."""

    def __init__(
        self,
        pool: Pool,
        namespace: Namespace,
        blocks: GroupBlocks,
        memory: BlockMemory,
        until: float,
        wait: BlockWait | None = None,
    ) -> None:
        self._pool, self._namespace, self._blocks = pool, namespace, blocks
        self._parts, self._until, self._wait = memory.parts, until, wait
        total = len(blocks.digests) * memory.block_bytes
        runs = blocks.match.runs if blocks.match is not None else ()
        ways = min(len({one.server for run in runs for one in run.replicas}), READS_MAX)
        # The client asks different servers at once. What is waited for comes one by one.
        self._at_once = max(memory.reads_at_once, ways) if wait is None else 1
        reads = _READS_PER_LOAD if self._at_once == 1 else _OVERLAPPING_READS
        size = max(total // reads, _READ_BYTES_MIN)
        if size >= SHARED_BYTES_MIN:  # the client shares each: one is left for another load
            self._at_once = min(self._at_once, READS_MAX - 1)
        elif self._at_once == ways > 1:  # as many for each: none is idle while others read the rest
            size = max(total // (ways * -(-total // (ways * size))), _READ_BYTES_MIN // 2)
        self._step = min(memory.blocks_per_transfer, -(-size // memory.block_bytes))
        self._reads = max(1, round(total / size))  # that are left
        self._next, self._loaded = 0, set[int]()

    async def run(self, read_part: ReadPart) -> set[int]:
        """The ids of the blocks that were read. Raises the first error of `read_part`, when no
        round is under way any more."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_once):
                    group.create_task(self._run_rounds(read_part))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return self._loaded

    async def _run_rounds(self, read_part: ReadPart) -> None:
        while (span := await self._take()) is not None:
            ids = self._blocks.block_ids[span.first : span.last]
            complete = set(ids)
            for part in range(self._parts):
                if complete:
                    complete &= await read_part(span, part)
            self._loaded |= complete
            if len(complete) < len(ids):  # attention needs the whole prefix: stop at a miss
                self._next = len(self._blocks.digests)

    async def _take(self) -> Span | None:
        """The next blocks to read; None: there are none, or they do not come in time."""
        first, match = self._next, self._blocks.match
        left = len(self._blocks.digests) - first
        last = first + min(self._step, -(-left // self._reads))
        if first == last:
            return None
        self._reads = max(1, self._reads - 1)
        if self._wait is not None:
            match = await self._wait_for(self._blocks.digests[first:last], self._wait)
            if match is None:
                return None
            last = first + match.length
        elif match is not None:
            match = match.of(first, last)
        self._next = last
        waited_s = self._wait.waited_s if self._wait is not None else 0.0
        return Span(first, last, match, self._until + waited_s)

    async def _wait_for(self, digests: tuple[bytes, ...], wait: BlockWait) -> Match | None:
        """Where the first of these blocks are, as soon as there is one. None: none comes in time.

        A look is one small message to a master. (design: load-or-recompute)
        """
        while True:
            began = time.monotonic()
            match = await self._pool.match(self._namespace, digests, timeout=LOOK_TIMEOUT_S)
            if match.length:
                wait.came(match.length)
                return match
            look_s = wait.next_look_s()
            if match.stopped is ReadStatus.NO_MASTER or look_s is None:
                return None
            await asyncio.sleep(look_s)
            wait.waited(time.monotonic() - began)
