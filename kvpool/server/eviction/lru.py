"""Least recently used: the order that the other policies build on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush, heapreplace
from typing import Final, Generic

from kvpool.protocols.policy import B, Decision

#: Entries of the heap that one call moves or drops, at most. Blocks that were read since the last
#: eviction, or are pinned, may be millions, and no client is served meanwhile.
_STEPS_MAX: Final = 512
#: Entries that one removal looks at while those of blocks that have left are dropped.
_TIDIED: Final = 8


class LRU(Generic[B]):
    """Least recently used.

    A heap of (last use, block) with lazy updates: `touch` only sets the block's time, and an entry
    that reaches the top with an old time is pushed again with the new one. So each block is in the
    heap at most once. The parent of an evicted leaf enters it when it becomes a leaf: the order is
    that of a recency list walked from its tail (design: eviction).
    """

    in_a_row: Final = True

    def __init__(self, capacity: int = 0) -> None:
        self._heap: list[tuple[int, B]] = []
        #: A heap, too, while its entries go over into the other one, but for the stale ones: from
        #: its end, so that it stays a heap. To build one anew takes seconds with millions.
        self._rest: list[tuple[int, B]] = []
        self._stale = 0  # entries of blocks that have left
        self._last_stamp = 0

    def touch(self, block: B, now: float) -> None:
        self._last_stamp = block.last_used = max(self._last_stamp + 1, int(now * 1e6))

    def add_candidate(self, block: B) -> None:
        if not block.is_candidate:
            block.is_candidate = True
            heappush(self._heap, (block.last_used, block))

    def remove(self, block: B) -> None:
        if block.is_candidate:
            block.is_candidate = False
            self._stale += 1
            if self._rest:
                for entry in [self._rest.pop() for _ in range(min(_TIDIED, len(self._rest)))]:
                    if entry[1].is_candidate:
                        heappush(self._heap, entry)
            elif self._stale > 1024 and self._stale > len(self._heap) // 2:
                self._heap, self._rest = [], self._heap
                self._stale = 0

    def victim(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        steps = iter(range(_STEPS_MAX))  # of the whole call: blocks that may not go are far apart
        while (block := self.oldest(steps)) is not None and not isinstance(block, Decision):
            last_used = block.last_used
            self.take()
            if evictable(block):
                return block
            if block.last_used != last_used:  # `evictable` learned of a later use of another part
                self.add_candidate(block)
        return block

    def oldest(self, steps: Iterable[int] = range(_STEPS_MAX)) -> B | Decision | None:
        """The least recently used block. It stays in the heap, and may not be evictable.

        NOT_YET when that takes more steps: call again.
        """
        heap = self._heap
        for _ in steps if heap or self._rest else ():
            if self._rest:
                heap = self._first_heap()
            if not heap:
                return None
            last_used, block = heap[0]
            if not block.is_candidate:
                heappop(heap)
                self._stale -= 1
            elif block.last_used != last_used:
                heapreplace(heap, (block.last_used, block))
            else:
                return block
        return Decision.NOT_YET if heap else None

    def take(self) -> None:
        """Remove the block that `oldest` has just returned."""
        heappop(self._first_heap())[1].is_candidate = False

    def victim_age(self, now: float) -> float:
        heap = self._first_heap()
        return max(0.0, now - heap[0][0] / 1e6) if heap else 0.0

    def _first_heap(self) -> list[tuple[int, B]]:
        """That of the two which has the earlier entry."""
        heap, rest = self._heap, self._rest
        return rest if rest and not (heap and heap[0][0] <= rest[0][0]) else heap
