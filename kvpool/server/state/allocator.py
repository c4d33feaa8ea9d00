"""Extents inside one segment, with exact accounting (design: allocator).

Two-level segregated fit (Masmano et al., TLSF, ECRTS 2004): free extents are kept in size
classes, eight to each power of two, and a bit mask tells which classes are not empty, so finding
room takes no search. Neighbours are joined when an extent is freed. Everything is a multiple of
`alignment`, and `free + allocated == capacity` holds after each call.

One range can be *fenced*: what is free in it, or becomes free, is kept for the one who has fenced
it. So a range can be emptied in steps while others allocate (design: allocator).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from kvpool.errors import InvariantViolated, UsageError

#: log2 of the classes per power of two: a class spans at most 1/8 of its size.
_STEPS_LOG2: Final = 3


def _class_of(units: int) -> int:
    """The class that a free extent of `units` belongs to (rounding down)."""
    power = units.bit_length() - 1
    if power <= _STEPS_LOG2:
        return units
    return ((power - _STEPS_LOG2 + 1) << _STEPS_LOG2) + (
        (units >> (power - _STEPS_LOG2)) & ((1 << _STEPS_LOG2) - 1)
    )


def _class_that_fits(units: int) -> int:
    """The first class in which every extent has at least `units` (rounding up)."""
    power = units.bit_length() - 1
    if power <= _STEPS_LOG2:
        return units
    return _class_of(units + (1 << (power - _STEPS_LOG2)) - 1)


class Allocator:
    """Hands out non-overlapping extents of one segment; offsets and sizes are bytes."""

    def __init__(self, capacity: int, alignment: int = 4096, *, from_front: bool = False) -> None:
        """With `from_front` the segment fills from its start, so that it may be cut at its end."""
        if alignment < 1 or alignment & (alignment - 1):
            raise UsageError(f"alignment is {alignment}, expected a power of two")
        if capacity < alignment:
            raise UsageError(f"capacity is {capacity} bytes, expected at least {alignment}")
        self.alignment = alignment
        self.capacity = capacity - capacity % alignment
        self.allocated = 0
        self._from_front = from_front
        self._sizes: dict[int, int] = {}  # offset -> size of each allocated extent
        self._free: dict[int, int] = {}  # offset -> size of each free extent
        self._free_ends: dict[int, int] = {}  # end -> offset, to join with the left neighbour
        self._classes: dict[int, dict[int, None]] = {}  # class -> offsets, newest last
        self._nonempty = 0  # bit i is set when class i has an extent
        self.fence = (0, 0)  # start and end of the fenced range
        self.fenced = 0  # bytes in it that are free
        self._fenced: dict[int, int] = {}  # offset -> size of its free pieces
        self._fenced_ends: dict[int, int] = {}  # end -> offset, as for the free extents
        self._put_free(0, self.capacity)

    def __repr__(self) -> str:
        return f"<Allocator {self.allocated}/{self.capacity} bytes, {len(self._free)} free extents>"

    @property
    def free(self) -> int:
        return self.capacity - self.allocated

    @property
    def available(self) -> int:
        """Free bytes that `allocate` may use, if they lie together."""
        return self.capacity - self.allocated - self.fenced

    def rounded(self, size: int) -> int:
        """The bytes that an extent for `size` bytes takes: the next multiple of `alignment`."""
        return -(-size // self.alignment) * self.alignment

    def allocate(self, size: int) -> int | None:
        """An offset with room for `size` bytes, or None. Changes nothing when it is None."""
        size = self.rounded(size)
        if size > self.capacity - self.allocated - self.fenced:
            return None  # the usual case of a full segment, without a search
        units = size // self.alignment
        candidates = self._nonempty >> (fit := _class_that_fits(units))
        if candidates:
            extent_class = fit + (candidates & -candidates).bit_length() - 1
            offset = next(reversed(self._classes[extent_class]))
        else:
            # In the class below, some extents may fit. Without this search a full segment could
            # not reuse a free extent of exactly the right size.
            found = self._exact_fit(units, size)
            if found is None:
                return None
            offset = found
        offset = self._carve(offset, size)
        self._sizes[offset] = size
        self.allocated += size
        return offset

    def claim(self, offset: int, size: int) -> bool:
        """Allocate exactly these bytes; False, and nothing has changed, when they are not free.

        For a restart that rebuilds the index from records (design: nvme-format). Extents claimed in
        ascending order cost O(1) each, because the free extent searched first follows the last one.
        """
        size = self.rounded(size)
        hole = self._hole_at(offset)
        if offset % self.alignment or hole is None:
            return False
        end = hole + self._free[hole]
        if offset + size > end:
            return False
        self._take_free(hole)
        if hole < offset:
            self._put_free(hole, offset - hole)
        if offset + size < end:
            self._put_free(offset + size, end - offset - size)
        self._sizes[offset] = size
        self.allocated += size
        return True

    def release(self, offset: int) -> int:
        """Take back an extent and return its size. Raises InvariantViolated on a double free."""
        try:
            size = freed = self._sizes.pop(offset)
        except KeyError:
            raise InvariantViolated(f"no extent is allocated at {offset}: freed twice?") from None
        self.allocated -= size
        start, end = self.fence
        if start <= offset < end:
            self._keep(offset, size)
        else:
            self._join_free(offset, size)
        return freed

    def may_pass_on(self, offset: int, size: int) -> bool:
        """Whether an allocated extent may hold another block of `size` bytes as it is.

        As `release` and then `allocate`, with nothing to join and nothing to search.
        """
        start, end = self.fence
        return self._sizes[offset] == self.rounded(size) and not start <= offset < end

    # --- emptying a range ----------------------------------------------------------------

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

    def extents(self) -> dict[int, int]:
        """Every allocated extent, offset to size, for checks."""
        return self._sizes

    def _hole_at(self, offset: int) -> int | None:
        """The offset of the free extent that contains `offset`."""
        if not 0 <= offset < self.capacity:
            return None
        for hole in reversed(self._free):  # the newest first: it is the one behind the last claim
            if hole <= offset < hole + self._free[hole]:
                return hole
        return None

    def _exact_fit(self, units: int, size: int) -> int | None:
        offsets = self._classes.get(_class_of(units), ())
        for looked_at, offset in enumerate(offsets):
            if self._free[offset] >= size:
                return offset
            if looked_at == 16:  # bounded work: finding none costs one more eviction
                break
        return None

    def _carve(self, offset: int, size: int) -> int:
        """Cut `size` bytes off the end of a free extent and return where they start.

        The end, because the rest then keeps its offset and, mostly, its class.
        """
        whole = self._free[offset]
        rest = whole - size
        if self._from_front:
            self._take_free(offset)
            if rest:
                self._put_free(offset + size, rest)
            return offset
        before = _class_of(whole // self.alignment)
        if not rest or _class_of(rest // self.alignment) != before:
            self._take_free(offset)
            if rest:
                self._put_free(offset, rest)
        else:
            self._free[offset] = rest
            del self._free_ends[offset + whole]
            self._free_ends[offset + rest] = offset
        return offset + rest

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
        """Free bytes that may have free neighbours."""
        right = offset + size
        if right in self._free:
            size += self._take_free(right)
        left = self._free_ends.get(offset)
        if left is not None:
            size += self._take_free(left)
            offset = left
        self._put_free(offset, size)

    def _put_free(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._free_ends[offset + size] = offset
        index = _class_of(size // self.alignment)
        self._classes.setdefault(index, {})[offset] = None
        self._nonempty |= 1 << index

    def _take_free(self, offset: int) -> int:
        size = self._free.pop(offset)
        del self._free_ends[offset + size]
        index = _class_of(size // self.alignment)
        offsets = self._classes[index]
        del offsets[offset]
        if not offsets:
            self._nonempty &= ~(1 << index)
        return size
