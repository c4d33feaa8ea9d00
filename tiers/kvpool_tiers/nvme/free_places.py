"""Where extents that are moved find room when a file becomes smaller. Pure."""

from __future__ import annotations


class FreePlaces:
    """The free ranges of a file, taken from the lowest one that fits; offsets and sizes are bytes.

    Only for a time in which nothing is freed: a range that was once too small for a size stays so,
    so the search for each size goes on where it ended.
    """

    def __init__(self, capacity: int, alignment: int) -> None:
        self._capacity = capacity
        self._alignment = alignment
        self._starts: list[int] = [0]
        self._stops: list[int] = [capacity]
        self._from: dict[int, int] = {}  # size -> the first range that may have room for it

    def add_taken(self, offset: int, size: int) -> None:
        """Before `take`, for each extent that is there, in the order of offsets."""
        if offset > self._starts[-1]:
            self._stops[-1] = offset
            self._starts.append(offset)
            self._stops.append(self._capacity)
        self._starts[-1] = max(self._starts[-1], offset + self._rounded(size))

    def take(self, size: int) -> int | None:
        """The offset of the lowest range with room for `size` bytes, which is taken now."""
        size = self._rounded(size)
        index = self._from.get(size, 0)
        while index < len(self._starts) and self._stops[index] - self._starts[index] < size:
            index += 1
        self._from[size] = index
        if index == len(self._starts):
            return None
        offset = self._starts[index]
        self._starts[index] = offset + size
        return offset

    def _rounded(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment
