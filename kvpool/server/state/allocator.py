"""Extents inside one segment, with exact accounting (design: allocator).

Two-level segregated fit (Masmano et al., TLSF, ECRTS 2004): free extents are kept in size
classes, eight to each power of two, and a bit mask tells which classes are not empty, so finding
room takes no search. Neighbours are joined when an extent is freed. Everything is a multiple of
`alignment`, and `free + allocated == capacity` holds after each call.
"""

from __future__ import annotations

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

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise UsageError(f"alignment is {alignment}, expected a power of two")
        if capacity < alignment:
            raise UsageError(f"capacity is {capacity} bytes, expected at least {alignment}")
        self.alignment = alignment
        self.capacity = capacity - capacity % alignment
        self.allocated = 0
        self._sizes: dict[int, int] = {}  # offset -> size of each allocated extent
        self._free: dict[int, int] = {}  # offset -> size of each free extent
        self._free_ends: dict[int, int] = {}  # end -> offset, to join with the left neighbour
        self._classes: dict[int, dict[int, None]] = {}  # class -> offsets, newest last
        self._nonempty = 0  # bit i is set when class i has an extent
        self._put_free(0, self.capacity)

    def __repr__(self) -> str:
        return f"<Allocator {self.allocated}/{self.capacity} bytes, {len(self._free)} free extents>"

    @property
    def free(self) -> int:
        return self.capacity - self.allocated

    @property
    def available(self) -> int:
        """Free bytes that `allocate` may use, if they lie together."""
        return self.capacity - self.allocated

    def rounded(self, size: int) -> int:
        """The bytes that an extent for `size` bytes takes: the next multiple of `alignment`."""
        return -(-size // self.alignment) * self.alignment

    def allocate(self, size: int) -> int | None:
        """An offset with room for `size` bytes, or None. Changes nothing when it is None."""
        size = self.rounded(size)
        if size > self.capacity - self.allocated:
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

    def release(self, offset: int) -> int:
        """Take back an extent and return its size. Raises InvariantViolated on a double free."""
        try:
            size = self._sizes.pop(offset)
        except KeyError:
            raise InvariantViolated(f"no extent is allocated at {offset}: freed twice?") from None
        self.allocated -= size
        self._join_free(offset, size)
        return size

    def may_pass_on(self, offset: int, size: int) -> bool:
        """Whether an allocated extent may hold another block of `size` bytes as it is: as `release`
        and then `allocate`, with nothing to join and nothing to search."""
        return self._sizes[offset] == self.rounded(size)

    def extents(self) -> dict[int, int]:
        """Every allocated extent, offset to size, for checks."""
        return self._sizes

    def _exact_fit(self, units: int, size: int) -> int | None:
        offsets = self._classes.get(_class_of(units), ())
        for looked_at, offset in enumerate(offsets):
            if self._free[offset] >= size:
                return offset
            if looked_at == 16:  # bounded work: finding none costs one more eviction
                break
        return None

    def _carve(self, offset: int, size: int) -> int:
        """Cut `size` bytes off a free extent and return where they start: off its end, so that the
        rest keeps its offset and, mostly, its class."""
        whole = self._free[offset]
        rest = whole - size
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
