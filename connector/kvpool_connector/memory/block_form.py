"""How blocks stand in the pool: as they are in the engine, or coded.

Without a codec (`form_choice.py`) they are as they are, each with its writer's mark behind it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool.types import DeviceRows, Memory, ReadResult, WriteStatus
from kvpool_connector.records.provenance import MARK_BYTES, BlockWriter, writer_of

if TYPE_CHECKING:
    from kvpool_connector.memory.block_memory import BlockMemory


class Found(NamedTuple):
    """What a read has brought of a block: `problem` says why it is a miss, or is empty."""

    problem: str
    writer: BlockWriter


class Rows(Protocol):
    """Blocks on their way: `memory` is what the pool reads into or writes."""

    memory: list[Memory]

    async def found(self, results: Sequence[ReadResult], until: float) -> list[Found]:
        """After a read: the blocks without a problem are in the engine's memory.

        What was not done by `until`, on the monotonic clock, is a miss. When it returns or is
        cancelled, nothing writes into that memory any more.
        """

    def written(self, statuses: Sequence[WriteStatus]) -> Sequence[WriteStatus]:
        """After a write: the same statuses."""


class BlockForm(Protocol):
    #: How far blocks may be from what their writer has computed (`comparison.difference`).
    tolerance: float

    def memories(self, memories: Sequence[BlockMemory]) -> Sequence[BlockMemory]:
        """The same memories, as this form can take them. Raises ConfigError for one it cannot."""

    async def to_read(self, memory: BlockMemory, blocks: list[Memory]) -> Rows:
        """Room for parts of blocks of this memory."""

    async def to_write(self, memory: BlockMemory, blocks: list[Memory], mark: bytes) -> Rows:
        """Parts of blocks of this memory, with their writer's mark."""

    def take_counters(self) -> Mapping[str, float]:
        """What happened since the last call."""


class PlainRows:
    """Blocks as they are, each with a mark behind it."""

    def __init__(self, memory: list[Memory], marks: Sequence[Any], size: int) -> None:
        self.memory = memory
        self._marks, self._size = marks, size

    @classmethod
    async def of(cls, blocks: Sequence[Memory], size: int, mark: bytes = b"") -> PlainRows:
        """Parts of blocks of this size, to be written with this mark, or to be read: then there is
        room for theirs."""
        marks: list[Any]
        if blocks and isinstance(blocks[0], DeviceRows):
            device = blocks[0].rows[0].device  # type: ignore[attr-defined]
            if mark:
                marks = [await asyncio.to_thread(_on_device, mark, device)] * len(blocks)
            else:
                marks = [_room_on(device) for _ in blocks]
        elif mark:
            marks = [memoryview(mark)] * len(blocks)
        else:
            room = memoryview(bytearray(MARK_BYTES * len(blocks)))
            marks = [room[at : at + MARK_BYTES] for at in range(0, len(room), MARK_BYTES)]
        memory = [_with(*one) for one in zip(blocks, marks, strict=True)]
        return cls(memory, marks, size + MARK_BYTES)

    async def writers(self) -> list[BlockWriter]:
        """Of each block, after a read."""
        if not self._marks or isinstance(self._marks[0], memoryview):
            return [writer_of(bytes(mark)) for mark in self._marks]
        # In a thread: the device is waited for.
        return await asyncio.to_thread(
            lambda: [writer_of(mark.cpu().numpy().tobytes()) for mark in self._marks]
        )

    async def found(self, results: Sequence[ReadResult], until: float) -> list[Found]:
        found = zip(results, await self.writers(), strict=True)
        return [Found(self._problem(result), writer) for result, writer in found]

    def written(self, statuses: Sequence[WriteStatus]) -> Sequence[WriteStatus]:
        return statuses

    def _problem(self, result: ReadResult) -> str:
        if not result.status.hit:
            return result.status.label
        return "" if result.size == self._size else "wrong size"


class PlainForm:
    tolerance = 0.0

    def memories(self, memories: Sequence[BlockMemory]) -> Sequence[BlockMemory]:
        return memories

    async def to_read(self, memory: BlockMemory, blocks: list[Memory]) -> Rows:
        return await PlainRows.of(blocks, memory.block_bytes // memory.parts)

    async def to_write(self, memory: BlockMemory, blocks: list[Memory], mark: bytes) -> Rows:
        return await PlainRows.of(blocks, memory.block_bytes // memory.parts, mark)

    def take_counters(self) -> Mapping[str, float]:
        return {}


def _with(block: Memory, mark: Any) -> Memory:
    if isinstance(block, DeviceRows):
        return DeviceRows([*block.rows, mark], block.ready)
    return [*block, mark] if isinstance(block, list) else [block, mark]  # type: ignore[list-item]


def _room_on(device: Any) -> Any:
    import torch

    with torch.cuda.stream(torch.cuda.current_stream(device)):
        return torch.empty(MARK_BYTES, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=8)
def _on_device(mark: bytes, device: Any) -> Any:
    """A copy of the mark, which has ended."""
    import torch

    torch.cuda.set_device(device)  # or leaving the stream makes a context on the first one
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        return _room_on(device).copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
