"""Records of the backing tier whose blocks have left: they must go before a restart. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvpool.server.state.blocks import Blocks
from kvpool.server.state.divided_allocator import DividedAllocator


class Erasures:
    """Where a record may lie that no block has: what is not erased is back after a restart.

    An offset is added when its block leaves, or when its record may be written although the block
    never came; it is taken when it is erased, and added again if that failed. A lost part needs
    none: nothing reads it any more.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        #: Each offset once: a disk that takes no writes fails at the same ones for hours.
        self._by_part: defaultdict[int, dict[int, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._by_part.values()))

    def add(self, offset: int) -> None:
        """The record at this offset of the backing tier must go."""
        allocator = self._blocks.backing.allocator
        if not isinstance(allocator, DividedAllocator):
            self._by_part[0][offset] = None
        elif (part := allocator.part_of(offset)) not in allocator.retired:
            self._by_part[part][offset] = None

    def take(self, part: int | None = None) -> list[int]:
        """All offsets, or those in one part, since the last call: erase their records."""
        if part is not None:
            return list(self._by_part.pop(part, ()))
        found, self._by_part = self._by_part, defaultdict(dict)
        return [offset for offsets in found.values() for offset in offsets]

    def failed(self, offsets: Iterable[int]) -> None:
        """Their records may still be there: `take` returns them once more."""
        for offset in offsets:
            self.add(offset)
