"""Lease: LRU, but a block that was used a moment ago stays, and the new block is refused instead.

When more sessions take turns than fit, LRU evicts each session just before its next turn, and no
session hits. A short lease keeps the sessions that fit and refuses the last blocks of the others. A
lease is a bias and no pin: it ends by itself, and then LRU decides. Long leases are worse than
plain LRU.

The idea is the time-to-live of Continuum (arXiv 2511.02230), without a price model
(design: eviction).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Generic

from kvpool.protocols.policy import B, Decision
from kvpool.server.eviction.lru import LRU

#: The length of a lease, in median times between two uses of a block. Such a time includes the
#: model's answer: 2.2 of them are about four median pauses between an answer and the next prompt.
_LEASE_IN_MEDIANS: Final = 2.2
#: The longest lease, in seconds: blocks that are used every few minutes must not keep others out.
_LEASE_S_MAX: Final = 30.0
#: The longest one where sessions show how long they pause, and that they do come back.
_LEARNED_S_MAX: Final = 600.0
#: Calls of `touch` for a new block before its first reuse: it is reserved and sealed.
_TOUCHES_OF_ARRIVAL: Final = 2


class Lease(Generic[B]):
    """LRU with a lease that is learned from how soon blocks are used again.

    Where sessions report arrivals, it is learned from their pauses instead: a store that is too
    small sees only those blocks used again that came back before they were evicted.
    """

    def __init__(self, capacity: int) -> None:
        self._order: LRU[B] = LRU()
        self._gaps = ReuseHistogram()
        self._pauses = PauseHistogram()
        self.add_candidate = self._order.add_candidate
        self.remove = self._order.remove
        self.victim_age = self._order.victim_age

    @property
    def lease_s(self) -> float:
        """Seconds for which a block stays after each use. 0 until enough reuses were counted."""
        if self._pauses.median_s:
            return min(_LEARNED_S_MAX, _LEASE_IN_MEDIANS * self._pauses.median_s)
        return min(_LEASE_S_MAX, _LEASE_IN_MEDIANS * self._gaps.median_s)

    def arrived(self, pause_s: float) -> None:
        self._pauses.add(pause_s)

    def touch(self, block: B, now: float) -> None:
        if block.policy_data < _TOUCHES_OF_ARRIVAL:
            block.policy_data += 1
        else:
            self._gaps.add(now - block.last_used / 1e6)
        self._order.touch(block, now)

    def victim(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        block = self._order.victim(newcomer, evictable, now)
        if block is None or isinstance(block, Decision):
            return block
        if now - block.last_used / 1e6 < self.lease_s:
            self._order.add_candidate(block)
            return Decision.BYPASS
        return block


class ReuseHistogram:
    """The median of the recent times between two uses, in 1 KB of memory.

    A histogram over the logarithm of the time. Its counts are halved when they sum to `_KEPT`, so
    that the median follows the traffic.
    """

    _SHORTEST_S: Final = 0.01
    _PER_OCTAVE: Final = 4
    _BINS: Final = 88  # up to 12 hours
    _EVERY = 1024  # times added between two computations of the median
    _KEPT = 65_536

    def __init__(self) -> None:
        self.median_s = 0.0
        self._counts = [0.0] * self._BINS
        self._total = 0.0
        self._added = 0

    def add(self, gap_s: float) -> None:
        """Count one time between two uses. Times below `_SHORTEST_S` are steps of one use."""
        if gap_s < self._SHORTEST_S:
            return
        octaves = math.log2(gap_s / self._SHORTEST_S)
        self._counts[min(int(self._PER_OCTAVE * octaves), self._BINS - 1)] += 1
        self._total += 1
        self._added += 1
        if self._added == self._EVERY:
            self._added = 0
            self._learn()

    def _learn(self) -> None:
        below = 0.0
        for number, count in enumerate(self._counts):
            if below + count >= self._total / 2:
                middle = number + (self._total / 2 - below) / count
                self.median_s = self._SHORTEST_S * float(2 ** (middle / self._PER_OCTAVE))
                break
            below += count
        if self._total > self._KEPT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2


class PauseHistogram(ReuseHistogram):
    """The same for pauses of sessions, which are fewer than uses of blocks."""

    _EVERY = 64
    _KEPT = 4096
