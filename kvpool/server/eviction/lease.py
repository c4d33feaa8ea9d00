"""Lease: least recently used, but what was used a moment ago stays, and the newcomer goes instead.

When more sessions take turns than fit, LRU throws out each one just before it comes back, and
nobody hits. A short lease keeps those that fit, and the tails of the others are not let in. A
lease is a bias and no pin: it ends by itself, and after it LRU rules. Long ones lose to plain LRU.

The idea is the time-to-live of Continuum (arXiv 2511.02230), without a price model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Generic

from kvpool.protocols.policy import B, Decision
from kvpool.server.eviction.lru import LRU

#: The lease in median times between two uses of a block. That time contains the model's answer:
#: 2.2 of it are about four median pauses after the answer.
_LEASE_IN_MEDIANS: Final = 2.2
#: Never for longer: a block that is used every few minutes is no reason to refuse others.
_LEASE_S_MAX: Final = 30.0
#: A newcomer is reserved and sealed before its first use again.
_TOUCHES_OF_ARRIVAL: Final = 2


class Lease(Generic[B]):
    """LRU with a lease that is learned from how soon blocks are used again."""

    def __init__(self, capacity: int) -> None:
        self._order: LRU[B] = LRU()
        self._gaps = ReuseHistogram()
        self.add_candidate = self._order.add_candidate
        self.remove = self._order.remove
        self.victim_age = self._order.victim_age

    @property
    def lease_s(self) -> float:
        """How long a block stays after each use. 0 until something has been learned."""
        return min(_LEASE_S_MAX, _LEASE_IN_MEDIANS * self._gaps.median_s)

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
    """The median of the times between uses lately, in 1 KB whatever comes.

    A histogram over the logarithm, halved now and then so that it follows the traffic.
    """

    _SHORTEST_S: Final = 0.01
    _PER_OCTAVE: Final = 4
    _BINS: Final = 88  # up to 12 hours
    _EVERY: Final = 1024  # the median is worked out
    _KEPT: Final = 65_536

    def __init__(self) -> None:
        self.median_s = 0.0
        self._counts = [0.0] * self._BINS
        self._total = 0.0
        self._added = 0

    def add(self, gap_s: float) -> None:
        """Shorter ones are one use in several steps, and none between two."""
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
