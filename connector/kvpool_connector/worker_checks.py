"""What a worker reads beside its transfers: to measure the pool, and to compare its blocks.

In the pool's thread. Pool errors end a check early: what was read until then is its result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvpool import KvpoolError, Namespace, Pool
from kvpool_connector.block_memory import BlockMemory
from kvpool_connector.comparison import TOLERANCES, difference, segments
from kvpool_connector.messages import (
    GroupBlocks,
    Mismatch,
    ProbeRequest,
    ProbeResult,
    VerifyRequest,
    VerifyResult,
)
from kvpool_connector.provenance import MARK_BYTES, writer_of

#: A transfer that the pool's client did not end by its deadline is cancelled so much later.
CANCEL_AFTER_S: Final = 1.0


class TransferContext(NamedTuple):
    """What the transfers of one step have in common, for each group.

    `events`: the device's work up to this step, which transfers wait for. `serial`: of the info
    that the names are made of. `mark` stands behind what is saved.
    """

    namespaces: Sequence[Namespace]
    events: Sequence[Any]
    serial: int
    mark: bytes = b""


class WorkerChecks:
    """The checks of one rank, whose first part of a block is `part`. Comparisons take a slot of
    those of saves: loads go first."""

    def __init__(self, rank: int, part: int, slots: asyncio.Semaphore) -> None:
        self._rank = rank
        self._part = part
        self.slots = slots

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
                    scratch = [
                        bytearray(memory.block_bytes // memory.parts + MARK_BYTES)
                        for _ in blocks.digests
                    ]
                    for part in range(memory.parts):
                        results = await pool.read(
                            context.namespaces[blocks.group],
                            blocks.digests,
                            scratch,
                            part=self._part + part,
                            match=blocks.match,
                            timeout=probe.timeout_s,
                        )
                        size += sum(result.size for result in results if result.status.hit)
        except (KvpoolError, TimeoutError):
            pass
        return ProbeResult(size, time.monotonic() - began)

    async def verify(
        self,
        pool: Pool | None,
        memories: Sequence[BlockMemory],
        verify: VerifyRequest,
        context: TransferContext,
    ) -> VerifyResult:
        """Compare block by block: memory has at most one of the pool's. (design: namespace)"""
        result = VerifyResult(verify.job, 0)
        try:
            async with asyncio.timeout(verify.timeout_s + CANCEL_AFTER_S):
                for blocks in verify.blocks if pool is not None else ():
                    assert pool is not None
                    memory = memories[blocks.group]
                    for part in range(memory.parts):
                        result = await self._compare(
                            pool, context, blocks, memory, part, verify.timeout_s, result
                        )
        except (KvpoolError, TimeoutError):
            pass
        return result

    async def _compare(
        self,
        pool: Pool,
        context: TransferContext,
        blocks: GroupBlocks,
        memory: BlockMemory,
        part: int,
        timeout_s: float,
        result: VerifyResult,
    ) -> VerifyResult:
        """The result with one more part of a block; unchanged if the pool has it no more."""
        for layer in memory.layers:
            if layer.dtype not in TOLERANCES:
                return result._replace(problem=f"{layer.layer} has elements of type {layer.dtype}")
        size = memory.block_bytes // memory.parts
        stored = bytearray(size + MARK_BYTES)
        async with self.slots:
            [read] = await pool.read(
                context.namespaces[blocks.group],
                blocks.digests,
                [stored],
                part=self._part + part,
                match=blocks.match,
                timeout=timeout_s,
            )
            if not read.status.hit or read.size != len(stored):
                return result
            [block] = blocks.block_ids
            pieces = await memory.host_source(block, context.events[blocks.group], part)
        if part == 0:
            result = result._replace(compared=result.compared + 1)
        writer = writer_of(bytes(stored[size:]))
        for layer, pairs in segments(memory.layers, pieces, memoryview(stored)[:size]):
            found, tolerance = difference(pairs, layer.dtype), TOLERANCES[layer.dtype]
            mismatch = result.mismatch
            if found > tolerance and (mismatch is None or found > mismatch.difference):
                mismatch = Mismatch(
                    self._rank,
                    self._part + part,
                    blocks.group,
                    blocks.digests[0],
                    layer.layer,
                    found,
                    tolerance,
                    writer,
                )
            worst = max(result.difference, found)
            result = result._replace(difference=worst, mismatch=mismatch)
            await asyncio.sleep(0)  # loads go first
        return result
