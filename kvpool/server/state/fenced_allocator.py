"""An allocator of which one range can be *fenced* (design: allocator).

What is free in the range, or becomes free, is kept for the one who has fenced it. So a range can be
emptied in steps while others allocate (`clearing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvpool.errors import InvariantViolated
from kvpool.server.state.allocator import Allocator


class FencedAllocator(Allocator):
    """The usual one, and its fence."""

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        super().__init__(capacity, alignment)
        self.fence = (0, 0)  # start and end of the fenced range
        self.fenced = 0  # bytes in it that are free
        self._fenced: dict[int, int] = {}  # offset -> size of its free pieces
        self._fenced_ends: dict[int, int] = {}  # end -> offset, as for the free extents

    @property
    def available(self) -> int:
        return self.capacity - self.allocated - self.fenced

    def may_pass_on(self, offset: int, size: int) -> bool:
        """As that of any allocator, and outside of the fence."""
        start, end = self.fence
        return self._sizes[offset] == self.rounded(size) and not start <= offset < end

    def largest_holes(self, count: int) -> list[int]:
        """The offsets of up to `count` free extents, of the largest classes."""
        found: list[int] = []
        classes = self._nonempty
        while classes and len(found) < count:
            top = classes.bit_length() - 1
            classes ^= 1 << top
            found += islice(self._classes[top], count - len(found))
        return found

    def hole_size(self, offset: int) -> int:
        """The size of the free extent that begins there."""
        return self._free[offset]

    def walk(self, offset: int) -> Iterator[tuple[int, int, bool]]:
        """The extents from `offset` on, where one must begin: offset, size, and whether it is free.

        Ends at the fence and at the end of the segment. Nothing may change meanwhile.
        """
        sizes, free = self._sizes, self._free
        while offset < self.capacity:
            size = sizes.get(offset)
            if size is not None:
                yield offset, size, False
            else:
                size = free.get(offset)
                if size is None:
                    return
                yield offset, size, True
            offset += size

    def open_fence(self, offset: int) -> None:
        """Fence an empty range that begins at an extent; `extend_fence` makes it longer."""
        if self.fence[0] != self.fence[1]:
            raise InvariantViolated(f"a range is fenced already: {self.fence}")
        self.fence = (offset, offset)

    def extend_fence(self, size_max: int) -> int | None:
        """Fence one more extent, of a hole `size_max` bytes at most. None at the segment's end.

        Returns the offset of the extent if it is allocated: it must be emptied. Otherwise -1.
        """
        start, end = self.fence
        size = self._sizes.get(end)
        if size is not None:
            self.fence = (start, end + size)
            return end
        if end not in self._free:
            return None
        size = self._take_free(end)
        if size > size_max:
            self._put_free(end + size_max, size - size_max)
            size = size_max
        self.fence = (start, end + size)
        self._keep(end, size)
        return -1

    def take_fenced(self, size: int) -> int:
        """Allocate the first `size` bytes of the range, which must be empty; end the fence."""
        size = self.rounded(size)
        start, end = self.fence
        if self.fenced != end - start or not 0 < size <= self.fenced:
            raise InvariantViolated(f"{self.fenced} bytes of {self.fence} are free, not {size}")
        self.fence, self.fenced, self._fenced, self._fenced_ends = (0, 0), 0, {}, {}
        self._sizes[start] = size
        self.allocated += size
        if start + size < end:
            self._join_free(start + size, end - start - size)
        return start

    def lift_fence(self) -> None:
        """End the fence: what is free in the range is free for all."""
        pieces, self._fenced, self._fenced_ends = self._fenced, {}, {}
        self.fence, self.fenced = (0, 0), 0
        for offset, size in pieces.items():
            self._join_free(offset, size)

    def _keep(self, offset: int, size: int) -> None:
        """Free bytes of the fenced range. Joined, so that lifting the fence is little work."""
        self.fenced += size
        left = self._fenced_ends.pop(offset, None)
        if left is not None:
            size += self._fenced.pop(left)
            offset = left
        right = self._fenced.pop(offset + size, None)
        if right is not None:
            size += right
        self._fenced[offset] = size
        self._fenced_ends[offset + size] = offset

    def _join_free(self, offset: int, size: int) -> None:
        start, end = self.fence
        if start <= offset < end:
            self._keep(offset, size)
        else:
            super()._join_free(offset, size)
