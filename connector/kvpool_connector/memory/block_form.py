"""How blocks stand in the pool: as they are in the engine, or coded, each with its writer's mark
behind it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from kvpool import ConfigError, Match, Namespace, Pool
from kvpool.threads import in_thread
from kvpool.types import DeviceRows, Memory, ReadResult, WriteStatus
from kvpool_connector.memory.block_memory import STAGING_BYTES, BlockMemory, DirectBlockMemory
from kvpool_connector.records.provenance import MARK_BYTES, UNKNOWN, BlockWriter, writer_of
from kvpool_engines.comparison import LayerBytes

Layers: TypeAlias = Sequence[LayerBytes]
#: The pieces of a block, how many of their bytes have come, and what stood behind those.
Arrived: TypeAlias = tuple[list[memoryview], int, bytes]


class BlockCoder(Protocol):
    """Makes blocks smaller on their way to the pool (`kvpool_codecs.coder`)."""

    #: How far blocks may be from what their writer has computed (`comparison.difference`).
    tolerance: float
    #: Of what stands behind each block.
    end_bytes: int

    async def encoded(self, block: list[memoryview], layers: Layers) -> list[memoryview]: ...

    async def decoded(
        self, arrived: Sequence[Arrived], layers: Layers, until: float
    ) -> list[str]: ...

    def on_read(self, size: int, seconds: float) -> None: ...

    def on_written(self, size: int, seconds: float) -> None: ...

    def take_counters(self) -> Mapping[str, float]: ...


class Found(NamedTuple):
    """What a read has brought of a block: `problem` says why it is a miss, or is empty."""

    problem: str
    writer: BlockWriter


class BlockForm:
    """Reads and writes parts of blocks. Without a `coder` they stand there as they are."""

    def __init__(self, coder: BlockCoder | None = None) -> None:
        self.coder = coder
        #: Behind each part of a block.
        self._end_bytes = MARK_BYTES + (coder.end_bytes if coder is not None else 0)

    @property
    def tolerance(self) -> float:
        return self.coder.tolerance if self.coder is not None else 0.0

    def memories(self, memories: Sequence[BlockMemory]) -> Sequence[BlockMemory]:
        """The same memories, as this form can take them. Raises ConfigError for one it cannot."""
        for memory in memories if self.coder is not None else ():
            if isinstance(memory, DirectBlockMemory):
                raise ConfigError("codec: a codec needs blocks in memory of the host: not `direct`")
            # What is encoded waits in memory until it is written.
            limit = max(1, STAGING_BYTES // (memory.block_bytes // memory.parts))
            memory.blocks_per_transfer = min(memory.blocks_per_transfer, limit)
        return memories

    async def read(
        self,
        pool: Pool,
        namespace: Namespace,
        memory: BlockMemory,
        digests: Sequence[bytes],
        into: Sequence[Memory],
        *,
        part: int,
        match: Match | None,
        until: float,
    ) -> list[Found]:
        """Read a part of these blocks into memory like that of `memory`. Without a problem it is
        there; what is not done by `until`, on the monotonic clock, is a miss. When it returns or is
        cancelled, nothing writes into that memory any more."""
        size, ends = memory.block_bytes // memory.parts, self._room(into)
        rows, began = _behind(into, ends), time.monotonic()
        results = await pool.read(
            namespace, digests, rows, part=part, match=match, timeout=max(0.0, until - began)
        )
        if self.coder is not None:
            self.coder.on_read(
                sum(one.size for one in results if one.status.hit), time.monotonic() - began
            )
            return await self._decoded(self.coder, memory, [*map(_pieces, rows)], results, until)
        whole = size + MARK_BYTES
        problems = [_problem(one, whole, whole) for one in results]
        return [*map(Found, problems, await _writers(ends))]

    async def write(
        self,
        pool: Pool,
        namespace: Namespace,
        memory: BlockMemory,
        digests: Sequence[bytes],
        blocks: Sequence[Memory],
        mark: bytes,
        **options: Any,
    ) -> Sequence[WriteStatus]:
        """Write parts of blocks like those of `memory`, with their writer's mark."""
        if self.coder is None:
            device, end = _device_of(blocks), memoryview(mark)
            if device is not None:
                end = await in_thread(_on_device, mark, device)
            return await pool.write(
                namespace, digests, _behind(blocks, [end] * len(blocks)), **options
            )
        rows = [
            [*await self.coder.encoded(_pieces(block), memory.layers), memoryview(mark)]
            for block in blocks
        ]
        began = time.monotonic()
        statuses = await pool.write(namespace, digests, rows, **options)
        if set(statuses) == {WriteStatus.STORED}:  # others have moved no bytes
            self.coder.on_written(
                sum(len(one) for row in rows for one in row), time.monotonic() - began
            )
        return statuses

    def take_counters(self) -> Mapping[str, float]:
        """What happened since the last call."""
        return self.coder.take_counters() if self.coder is not None else {}

    def _room(self, blocks: Sequence[Memory]) -> list[Any]:
        """For what stands behind these blocks."""
        if (device := _device_of(blocks)) is not None:
            return [_room_on(device) for _ in blocks]
        room = memoryview(bytearray(self._end_bytes * len(blocks)))
        return [room[at : at + self._end_bytes] for at in range(0, len(room), self._end_bytes)]

    async def _decoded(
        self,
        coder: BlockCoder,
        memory: BlockMemory,
        rows: Sequence[list[memoryview]],
        results: Sequence[ReadResult],
        until: float,
    ) -> list[Found]:
        most = memory.block_bytes // memory.parts + self._end_bytes
        found = [Found(_problem(one, self._end_bytes, most), UNKNOWN) for one in results]
        arrived = {}
        for number, (result, row) in enumerate(zip(results, rows, strict=True)):
            if not found[number].problem:  # where it ends, which is within the block as a rule
                taken = result.size - self._end_bytes
                end = _cut(row, taken, result.size)
                found[number] = Found("", writer_of(end[-MARK_BYTES:]))
                arrived[number] = row[:-1], taken, end[:-MARK_BYTES]
        problems = await coder.decoded([*arrived.values()], memory.layers, until)
        for number, problem in zip(arrived, problems, strict=True):
            found[number] = found[number]._replace(problem=problem)
        return found


def _problem(result: ReadResult, least: int, most: int) -> str:
    if not result.status.hit:
        return result.status.label
    return "" if least <= result.size <= most else "wrong size"


def _pieces(block: Any) -> list[memoryview]:
    """The pieces of a block in memory of the host, as bytes."""
    return [memoryview(one).cast("B") for one in (block if isinstance(block, list) else [block])]


def _cut(pieces: Iterable[memoryview], first: int, last: int) -> bytes:
    """A copy of the bytes `first` to `last` (excluded) of pieces that follow one another."""
    found = []
    for piece in pieces:
        found.append(piece[max(first, 0) : max(last, 0)])
        first, last = first - len(piece), last - len(piece)
    return b"".join(found)


def _behind(blocks: Sequence[Memory], ends: Sequence[Any]) -> list[Memory]:
    """Each block, and its end behind it."""
    return [
        DeviceRows([*block.rows, end], block.ready)
        if isinstance(block, DeviceRows)
        else [*(block if isinstance(block, list) else [block]), end]
        for block, end in zip(blocks, ends, strict=True)
    ]


async def _writers(marks: Sequence[Any]) -> list[BlockWriter]:
    """Of each block, after a read."""
    if not marks or isinstance(marks[0], memoryview):
        return [writer_of(bytes(mark)) for mark in marks]
    # In a thread: the device is waited for.
    return await in_thread(lambda: [writer_of(mark.cpu().numpy().tobytes()) for mark in marks])


def _device_of(blocks: Sequence[Memory]) -> Any:
    """Where these blocks lie; None: in memory of the host."""
    first = blocks[0] if blocks else None
    return first.rows[0].device if isinstance(first, DeviceRows) else None  # type: ignore[attr-defined]


def _room_on(device: Any) -> Any:
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        return torch.empty(MARK_BYTES, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=8)
def _on_device(mark: bytes, device: Any) -> Any:
    """A copy of the mark, which has ended."""
    torch.cuda.set_device(device)  # or leaving the stream makes a context on the first one
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        return _room_on(device).copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
