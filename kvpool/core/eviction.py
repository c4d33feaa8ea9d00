"""Which block goes next.

The store decides what *may* go: leaves only (tails before heads, so what is left of a chain is
always a usable prefix), nothing pinned, nothing reserved. A policy decides the order among those.
It never scans: the store offers a block when it becomes evictable and says when it is used.

A policy is made with the capacity of its store in bytes, and found by its name among the entry
points of `kvpool.policies`. Others: `core/policies/`. What users say of their sessions comes on
top of any of them: `core/hints.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What a policy sees of a block, and the fields that it keeps there; those belong to it."""

    digest: bytes  # read only
    size: int  # read only

    stamp: int  # when it was last used, in microseconds, made unique
    queued: bool  # it stands in the policy's queue
    heat: int  # whatever the policy ranks it by; 0 for a newcomer


B = TypeVar("B", bound=Evictable)


class Verdict(enum.Enum):
    """What a policy may answer instead of a victim."""

    #: All that may go is worth more than the newcomer: it is refused, and waiting is of no use.
    BYPASS = enum.auto()


class Policy(Protocol[B]):
    """An order of eviction. Every call is O(log n) at most, amortised."""

    def touch(self, block: B, now: float) -> None:
        """It was reserved, sealed or read. Probing for existence is no use and never comes here.

        So a newcomer's first two touches are one use of it.
        """

    def offer(self, block: B) -> None:
        """It may be evicted from now on. Offering twice is offering once."""

    def forget(self, block: B) -> None:
        """It leaves the store, as a victim or otherwise."""

    def victim(self, newcomer: B, evictable: Callable[[B], bool], now: float) -> B | Verdict | None:
        """The next to go for a newcomer that has no room, taken from the queue.

        None when nothing may go: room comes when a reader or writer lets go of some. BYPASS only
        as long as what is there was used lately or is announced, and for a bounded time: a full
        pool never freezes on old data (G9). The newcomer has not been touched yet.

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
