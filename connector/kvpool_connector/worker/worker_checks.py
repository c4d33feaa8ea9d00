"""What a worker reads beside its transfers: to measure the pool, and to compare its blocks.

In the pool's thread. Pool errors end a check early: what was read until then is its result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvpool import ROOT, KvpoolError, Namespace, Pool, WriteStatus
from kvpool.types import Memory
from kvpool_connector.memory.block_form import BlockForm
from kvpool_connector.memory.block_memory import BlockMemory
from kvpool_connector.records.messages import (
    GroupBlocks,
    Mismatch,
    ProbeRequest,
    ProbeResult,
    VerifyRequest,
    VerifyResult,
)
from kvpool_connector.records.provenance import UNKNOWN, BlockWriter, writer_of
from kvpool_engines.comparison import TOLERANCES, difference, segments, spread

#: A transfer that the pool's client did not end by its deadline is cancelled so much later.
CANCEL_AFTER_S: Final = 1.0
#: Blocks that one comparison reads, and some more where it finds one that differs.
_COMPARED_MAX: Final = 16
#: Of so many saves that meet blocks which the pool has already, one compares them, for so long.
_SAVES_PER_CHECK: Final = 64
_VERIFY_SAVED_S: Final = 2.0


class TransferContext(NamedTuple):
    """What the transfers of one step have in common, for each group.

    `events`: the device's work up to this step, which transfers wait for. `serial`: of the info
    that the names are made of. `mark` stands behind what is saved.
    """

    namespaces: Sequence[Namespace]
    events: Sequence[Any]
    serial: int
    mark: bytes = b""


@dataclass
class WorkerChecks:
    """The checks of one rank, whose first part of a block is `part`. Comparisons take a slot of
    those of saves: loads go first."""

    rank: int
    part: int
    slots: asyncio.Semaphore
    form: BlockForm
    compares: bool = False
    _saves_beside: int = 0  # that have met blocks which the pool had

    async def probe(
        self,
        pool: Pool | None,
        memories: Sequence[BlockMemory],
        probe: ProbeRequest,
        context: TransferContext,
    ) -> ProbeResult:
        """Read blocks into scratch memory, and say how long it took."""
        began = time.monotonic()
        size = 0
        try:
            async with asyncio.timeout(probe.timeout_s + CANCEL_AFTER_S):
                for blocks in probe.blocks if pool is not None else ():
                    assert pool is not None
                    memory = memories[blocks.group]
                    part_bytes = memory.block_bytes // memory.parts
                    scratch: list[Memory] = [bytearray(part_bytes) for _ in blocks.digests]
                    for part in range(memory.parts):
                        found = await self.form.read(
                            *(pool, context.namespaces[blocks.group], memory),
                            *(blocks.digests, scratch),
                            part=self.part + part,
                            match=blocks.match,
                            until=began + probe.timeout_s,
                        )
                        size += sum(part_bytes for one in found if not one.problem)
        except (KvpoolError, TimeoutError):
            pass
        return ProbeResult(size, time.monotonic() - began)

    async def verify(
        self,
        pool: Pool | None,
        memories: Sequence[BlockMemory] | Mapping[int, BlockMemory],
        verify: VerifyRequest,
        context: TransferContext,
    ) -> VerifyResult:
        """Compare some of the blocks of each group, up to the first of its chain that differs."""
        result, differing = VerifyResult(verify.job, 0), list[tuple[float, Mismatch]]()
        try:
            async with asyncio.timeout(verify.timeout_s + CANCEL_AFTER_S):
                for blocks in verify.blocks if pool is not None else ():
                    assert pool is not None
                    memory = memories[blocks.group]
                    if problem := _incomparable(memory):
                        return result._replace(problem=problem)
                    comparison = _Comparison(self, pool, context, memory, blocks, verify.timeout_s)
                    found = await comparison.run(_COMPARED_MAX // len(verify.blocks))
                    # A save follows blocks that somebody may have computed wrongly before.
                    if found == 0 and not verify.job and blocks.parents[:1] != (ROOT,):
                        comparison.differing[0] = comparison.differing[0]._replace(writer=UNKNOWN)
                    if found is not None:
                        share = found / len(blocks.digests)
                        differing.append((share, comparison.differing[found]))
                    result = VerifyResult(
                        verify.job,
                        result.compared + len(comparison.equal) + len(comparison.differing),
                        max(result.difference, comparison.difference),
                        # All groups have blocks of the same tokens: the first of these.
                        min(differing)[1] if differing else None,
                        equal=result.equal.union(*comparison.equal.values()),
                    )
        except (KvpoolError, TimeoutError):
            pass
        return result

    async def verify_saved(
        self,
        pool: Pool,
        memory: BlockMemory,
        blocks: GroupBlocks,
        written: Sequence[Sequence[WriteStatus]],
        context: TransferContext,
    ) -> VerifyResult | None:
        """Compare what the pool had already of a save, by the statuses of its parts; of most saves,
        None. It computes nothing, and an engine that loads nothing has nothing else to go by."""
        there = [set(parts) == {WriteStatus.ALREADY_STORED} for parts in zip(*written, strict=True)]
        if not self.compares or True not in there:
            return None
        self._saves_beside += 1
        if self._saves_beside % _SAVES_PER_CHECK != 1:
            return None
        first = there.index(True)
        last = [*there, False].index(False, first)
        some = GroupBlocks(
            blocks.group,
            blocks.digests[first:last],
            blocks.block_ids[first:last],
            blocks.parents[first:last],
        )
        request = VerifyRequest(0, (some,), _VERIFY_SAVED_S)
        return await self.verify(pool, {blocks.group: memory}, request, context)


@dataclass
class _Comparison:
    """Compares blocks of one chain, one by one: memory has at most one of the pool's."""

    _checks: WorkerChecks
    _pool: Pool
    _context: TransferContext
    _memory: BlockMemory
    _blocks: GroupBlocks
    _timeout_s: float
    difference: float = 0.0
    #: By place: who wrote what is equal; what is not.
    equal: dict[int, set[bytes]] = field(default_factory=dict)
    differing: dict[int, Mismatch] = field(default_factory=dict)

    async def run(self, count: int) -> int | None:
        """Compare about so many; the place of the first one that differs."""
        last_equal = -1
        for place in spread(0, len(self._blocks.digests), count):
            differs = await self._differs(place)
            if differs:
                return await self._first(last_equal, place)
            if differs is False:
                last_equal = place
        return None

    async def _first(self, equal: int, differing: int) -> int:
        """What is behind the first one differs as well, so that it is found by halving."""
        while differing - equal > 1:
            middle = (equal + differing) // 2
            differs = await self._differs(middle)
            if differs is None:  # the pool has lost it: nobody knows which one is the first
                found = self.differing[differing]
                self.differing[differing] = found._replace(writer=UNKNOWN)
                break
            equal, differing = (equal, middle) if differs else (middle, differing)
        return differing

    async def _differs(self, place: int) -> bool | None:
        """None if the pool has not every part of it."""
        writers = set[bytes]()
        for part in range(self._memory.parts):
            writer = await self._compare(place, part)
            if writer is None:
                return None
            writers.add(writer.id)
        if place in self.differing:
            return True
        own = writer_of(self._context.mark)
        self.equal[place] = writers - {own.id, UNKNOWN.id}
        return False

    async def _compare(self, place: int, part: int) -> BlockWriter | None:
        """Who wrote this part of a block; None if the pool has it no more."""
        memory, blocks, checks = self._memory, self._blocks, self._checks
        digest, block = blocks.digests[place], blocks.block_ids[place]
        size = memory.block_bytes // memory.parts
        stored = bytearray(size)
        match = blocks.match.of(place, place + 1) if blocks.match is not None else None
        async with checks.slots:
            [(problem, writer)] = await checks.form.read(
                *(self._pool, self._context.namespaces[blocks.group], memory, [digest], [stored]),
                part=checks.part + part,
                match=match,
                until=time.monotonic() + self._timeout_s,
            )
            if problem:
                return None
            pieces = await memory.host_source(block, self._context.events[blocks.group], part)
        for layer, pairs in segments(memory.layers, pieces, stored):
            found = difference(pairs, layer.dtype)
            tolerance = TOLERANCES[layer.dtype] + checks.form.tolerance
            known = self.differing.get(place)
            if found > tolerance and (known is None or found > known.difference):
                self.differing[place] = Mismatch(
                    checks.rank,
                    checks.part + part,
                    blocks.group,
                    digest,
                    layer.layer,
                    found,
                    tolerance,
                    writer,
                )
            self.difference = max(self.difference, found)
            await asyncio.sleep(0)  # loads go first
        return writer


def _incomparable(memory: BlockMemory) -> str:
    """Why blocks of this memory cannot be compared, or empty."""
    for layer in memory.layers:
        if layer.dtype not in TOLERANCES:
            return f"{layer.layer} has elements of type {layer.dtype}"
    return ""
