"""Extents of a file, and of a tier of several files: none crosses from one into the next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from kvpool.server.state.allocator import Allocator


class FileAllocator(Allocator):
    """Fills from the start, so that the file may be cut at its end, and knows where blocks lay."""

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

    def _hole_at(self, offset: int) -> int | None:
        """The offset of the free extent that contains `offset`."""
        if not 0 <= offset < self.capacity:
            return None
        for hole in reversed(self._free):  # the newest first: it is the one behind the last claim
            if hole <= offset < hole + self._free[hole]:
                return hole
        return None

    def _carve(self, offset: int, size: int) -> int:
        """Cut `size` bytes off the start of a free extent."""
        rest = self._take_free(offset) - size
        if rest:
            self._put_free(offset + size, rest)
        return offset


class DividedAllocator(FileAllocator):
    """One allocator for each part of an address space, each filled from its start.

    A new extent lies in the part with the most room, so that all devices are written to. What lies
    in a part of `closed` stays, and is given back, but nothing new comes there.
    """

    def __init__(self, sizes: Sequence[int], alignment: int) -> None:
        """`sizes` are the bytes of the parts, in the order of their offsets."""
        self.alignment = alignment
        self.parts = [FileAllocator(size, alignment) for size in sizes]
        self.capacity = sum(part.capacity for part in self.parts)
        self.allocated = 0
        #: Numbers of parts in which nothing is allocated.
        self.closed: set[int] = set()
        #: Those that are lost.
        self.retired: set[int] = set()
        self._starts = [0, *accumulate(sizes)][:-1]

    def __repr__(self) -> str:
        closed = f", {len(self.closed)} closed" if self.closed else ""
        return (
            f"<DividedAllocator {self.allocated}/{self.capacity} bytes in "
            f"{len(self.parts)} parts{closed}>"
        )

    def part_of(self, offset: int) -> int:
        """The number of the part in which an offset lies."""
        return bisect_right(self._starts, offset) - 1

    @property
    def available(self) -> int:
        return sum(self.parts[number].free for number in self._open())

    def allocate(self, size: int) -> int | None:
        for number in sorted(self._open(), key=lambda number: -self.parts[number].free):
            offset = self.parts[number].allocate(size)
            if offset is not None:
                self.allocated += self.rounded(size)
                return self._starts[number] + offset
        return None

    def claim(self, offset: int, size: int) -> bool:
        number = self.part_of(offset)
        done = self.parts[number].claim(offset - self._starts[number], size)
        self.allocated += self.rounded(size) if done else 0
        return done

    def release(self, offset: int) -> int:
        number = self.part_of(offset)
        size = self.parts[number].release(offset - self._starts[number])
        self.allocated -= 0 if number in self.retired else size
        return size

    def may_pass_on(self, offset: int, size: int) -> bool:
        number = self.part_of(offset)
        local = offset - self._starts[number]
        return number not in self.closed and self.parts[number].may_pass_on(local, size)

    def close(self, number: int) -> bool:
        """Allocate nothing in this part. False, and nothing has changed, if no other is open."""
        if self._open() in ([], [number]):
            return False
        self.closed.add(number)
        return True

    def open(self, number: int) -> None:
        """Allocate in this part again, unless it is retired."""
        if number not in self.retired:
            self.closed.discard(number)

    def retire(self, number: int) -> None:
        """This part is lost: closed for good, and no part of `capacity` and `allocated` any more.
        What lies in it is released as always. Where it was the last open one, the others open."""
        self.closed.add(number)
        self.retired.add(number)
        self.capacity -= self.parts[number].capacity
        self.allocated -= self.parts[number].allocated
        if not self._open():
            self.closed &= self.retired

    def extents(self) -> dict[int, int]:
        return {
            start + offset: size
            for start, part in zip(self._starts, self.parts, strict=True)
            for offset, size in part.extents().items()
        }

    def _open(self) -> list[int]:
        return [number for number in range(len(self.parts)) if number not in self.closed]


def parts_of(allocator: Allocator) -> DividedAllocator | None:
    """The extents of a tier that has parts; None if it is one."""
    return allocator if isinstance(allocator, DividedAllocator) else None


def part_of(allocator: Allocator, offset: int) -> int:
    """The number of the part of a tier in which an extent lies; 0 where there is only one."""
    return allocator.part_of(offset) if isinstance(allocator, DividedAllocator) else 0
