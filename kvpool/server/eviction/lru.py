"""Least recently used: the order that the other policies build on."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic

from kvpool.protocols.policy import B, Verdict


class LRU(Generic[B]):
    """Least recently used.

    A heap of (stamp, block) with lazy updates: a touch only sets the block's stamp, and an entry
    that comes up with an old stamp goes back with the new one. So a touch costs one store, and
    each block stands in the heap at most once. Parents of evicted leaves enter it when they
    become leaves themselves; since a chain is used from its head, they are never older than what
    just left, and the result is the order of a recency list that is walked tail-first.
    """

    def __init__(self, capacity: int = 0) -> None:
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

    def victim(self, newcomer: B, evictable: Callable[[B], bool], now: float) -> B | Verdict | None:
        while (block := self.oldest()) is not None:
            stamp = block.stamp
            self.take()
            if evictable(block):
                return block
            if block.stamp != stamp:  # `evictable` learned of a later use of another part
                self.offer(block)
        return None

    def oldest(self) -> B | None:
        """The next in line, which stays there; whether it may go is not looked at."""
        heap = self._heap
        while heap:
            stamp, block = heap[0]
            if not block.queued:
                heappop(heap)
                self._stale -= 1
            elif block.stamp != stamp:
                heapreplace(heap, (block.stamp, block))
            else:
                return block
        return None

    def take(self) -> None:
        """Take what `oldest` has just shown out of the line."""
        heappop(self._heap)[1].queued = False

    def victim_age(self, now: float) -> float:
        return max(0.0, now - self._heap[0][0] / 1e6) if self._heap else 0.0
