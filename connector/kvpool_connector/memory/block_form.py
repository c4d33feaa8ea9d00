"""How blocks stand in the pool: as they are in the engine, or coded.

Without a codec (`form_choice.py`) they are as they are, each with its writer's mark behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpool.types import Memory, ReadResult, WriteStatus
from kvpool_connector.records.provenance import MARK_BYTES, BlockWriter, MarkedBlocks, marked

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

    def __init__(self, blocks: MarkedBlocks, size: int) -> None:
        self.memory = blocks.memory
        self._blocks, self._size = blocks, size + MARK_BYTES

    async def found(self, results: Sequence[ReadResult], until: float) -> list[Found]:
        found = zip(results, await self._blocks.writers(), strict=True)
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
        return PlainRows(await marked(blocks), memory.block_bytes // memory.parts)

    async def to_write(self, memory: BlockMemory, blocks: list[Memory], mark: bytes) -> Rows:
        return PlainRows(await marked(blocks, mark), memory.block_bytes // memory.parts)

    def take_counters(self) -> Mapping[str, float]:
        return {}
