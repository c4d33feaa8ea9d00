"""Which block goes next.

The store decides what *may* go: leaves only (tails before heads, so what is left of a chain is
always a usable prefix), nothing pinned, nothing reserved. A policy decides the order among those.
It never scans: the store offers a block when it becomes evictable and says when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """The two fields a policy keeps on a block; they belong to the policy."""

    stamp: int  # when it was last used, in microseconds, made unique
    queued: bool  # it stands in the policy's queue


B = TypeVar("B", bound=Evictable)


class Policy(Protocol[B]):
    """An order of eviction. Every call is O(log n) at most, amortised."""

    def touch(self, block: B, now: float) -> None:
        """It was written or read. Probing for existence is no use and never comes here."""

    def offer(self, block: B) -> None:
        """It may be evicted from now on. Offering twice is offering once."""

    def forget(self, block: B) -> None:
        """It has left the store by another way than `victim`."""

    def victim(self, evictable: Callable[[B], bool]) -> B | None:
        """The next to go, taken from the queue; None when nothing may go.

        A block that `evictable` rejects is dropped from the queue: whatever made it
        unevictable offers it again when that ends.
        """

    def victim_age(self, now: float) -> float:
        """Seconds since the next victim was used; 0 when there is none."""


class LRU(Generic[B]):
    """Least recently used.

    A heap of (stamp, block) with lazy updates: a touch only sets the block's stamp, and an entry
    that comes up with an old stamp goes back with the new one. So a touch costs one store, and
    each block stands in the heap at most once. Parents of evicted leaves enter it when they
    become leaves themselves; since a chain is used from its head, they are never older than what
    just left, and the result is the order of a recency list that is walked tail-first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, B]] = []
        self._stale = 0  # entries of blocks that have left
        self._last_stamp = 0

    def touch(self, block: B, now: float) -> None:
        self._last_stamp = block.stamp = max(self._last_stamp + 1, int(now * 1e6))

    def offer(self, block: B) -> None:
        if not block.queued:
            block.queued = True
            heappush(self._heap, (block.stamp, block))

    def forget(self, block: B) -> None:
        if block.queued:
            block.queued = False
            self._stale += 1
            if self._stale > 1024 and self._stale > len(self._heap) // 2:
                self._heap = [entry for entry in self._heap if entry[1].queued]
                heapify(self._heap)
                self._stale = 0

    def victim(self, evictable: Callable[[B], bool]) -> B | None:
        heap = self._heap
        while heap:
            stamp, block = heappop(heap)
            if not block.queued:
                self._stale -= 1
            elif block.stamp != stamp:
                heappush(heap, (block.stamp, block))
            else:
                block.queued = False
                if evictable(block):
                    return block
                if block.stamp != stamp:  # `evictable` learned of a later use of another part
                    self.offer(block)
        return None

    def victim_age(self, now: float) -> float:
        return max(0.0, now - self._heap[0][0] / 1e6) if self._heap else 0.0
