"""A heap whose entries may be out of date, never built anew in one turn of the loop. Pure."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final, Generic, TypeVar

E = TypeVar("E", bound=tuple[Any, ...])

#: Entries that may be out of date, and those that one call looks at then.
_SLACK: Final = 1024
_TIDIED: Final = 8


class LazyHeap(Generic[E]):
    """A heap of entries of which many may be out of date, by `is_current`: for lazy updates.

    They are dropped a few with each `push` and `tidy`, once they are the larger part. To build a
    heap anew would stop the loop when it has a million entries.
    """

    def __init__(self, is_current: Callable[[E], bool]) -> None:
        self._is_current = is_current
        self._heap: list[E] = []
        #: A heap, too, while its entries go over into the other one: from its end, so that it stays
        #: a heap.
        self._rest: list[E] = []

    def __len__(self) -> int:
        return len(self._heap) + len(self._rest)

    def push(self, entry: E, current: int) -> None:
        """Add an entry; so many are `current` now, about."""
        heappush(self._heap, entry)
        self.tidy(current)

    def tidy(self, current: int) -> None:
        """The same without an entry, when one is out of date: so `first` has never many before it
        that are."""
        if not self._rest and len(self._heap) > 2 * current + _SLACK:
            self._heap, self._rest = [], self._heap
        for old in [self._rest.pop() for _ in range(min(_TIDIED, len(self._rest)))]:
            if self._is_current(old):
                heappush(self._heap, old)

    def first(self) -> E | None:
        """The first entry, current or not."""
        heap = self._first_heap()
        return heap[0] if heap else None

    def pop(self) -> None:
        """Remove the one that `first` has just returned."""
        heappop(self._first_heap())

    def _first_heap(self) -> list[E]:
        heap, rest = self._heap, self._rest
        return rest if rest and not (heap and heap[0] < rest[0]) else heap
