"""Density: what earns the fewest hits for the memory and time that it takes goes first.

A block that was last used some time ago will be used again within h with some probability, and
until then, or for h, it takes up memory. Its *density* is the best ratio of hits to time over all
h: Gittins' index; LHD (Beckmann, Chen, Cidon, NSDI 2018) ranks by hit density, too. The newcomer is
ranked as well, as a block that was used just now: when it is the poorest of all, it is not let in.
So no lease need be chosen; one of the right length follows from how soon blocks are used again.

What is learned must not depend on what was kept, or throwing a block out too soon would prove that
it was right to throw it out. So blocks that have left, and those that were not let in, are
remembered for a while: when one is asked for again, it is learned when it would have been a hit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, NamedTuple

from kvpool.protocols.policy import B, Decision
from kvpool.server.eviction.lru import LRU

#: Classes, by how often a block was used: once, twice, three times, more.
_CLASSES: Final = 4
#: Of so many blocks one is learned from: by its digest, so that all its uses are.
_SAMPLE: Final = 4
#: For each block of the sample that is here, so many that have left are remembered.
_GHOSTS: Final = 2
_GHOSTS_MIN: Final = 1024
#: Touches between two lessons.
_RELEARN_EVERY: Final = 20_000
#: Of what is learned the size counts and not the last digit, which is noise: classes whose
#: densities are of the same power of two take turns by age, and a newcomer must be poorer by a
#: little more than nothing to be refused.
_BYPASS_MARGIN: Final = 0.93
#: What was not used for so long keeps no newcomer out, whatever was learned (G9).
_BYPASS_S_MAX: Final = 600.0

#: Refused, and let in after all because an announced session made room: one use, not two.
_SAME_USE_S: Final = 0.001
#: The rank of what is not expected to be used at all.
_POOREST: Final = -10_000

# `policy_data` is the number of uses, in the lowest bits, and the class it was queued in, above
# them; negative while a block is on its way in: it is reserved and sealed, which is one use.
_USES: Final = 7


class Density(Generic[B]):
    """The poorest of the oldest leaves of each class."""

    def __init__(self, capacity: int) -> None:
        self._queues: list[LRU[B]] = [LRU() for _ in range(_CLASSES)]
        self._lives = [LifetimeHistogram() for _ in range(_CLASSES)]
        self._clock: LRU[B] = LRU()  # gives stamps for all of them, and holds nothing
        # By 8 bytes of the digest, the stamp of the last use and the number of uses in one: half
        # of the memory that a tuple of them would take.
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._sampled = 0  # blocks of the sample that are here
        self._touches = 0

    def touch(self, block: B, now: float) -> None:
        policy_data = block.policy_data
        if policy_data > 0:
            uses = policy_data & _USES
            if block.digest[-1] % _SAMPLE == 0:
                self._used_again(uses, now - block.last_used / 1e6)
            if uses < _CLASSES:
                block.policy_data = policy_data + 1
        elif policy_data < 0:
            block.policy_data = -policy_data
        else:
            block.policy_data = -self._arrive(block, now)
        self._clock.touch(block, now)
        self._touches += 1
        if self._touches == _RELEARN_EVERY:
            self._touches = 0
            for lives in self._lives:
                lives.learn()

    def add_candidate(self, block: B) -> None:
        if not block.is_candidate:
            uses = block.policy_data & _USES
            block.policy_data = uses | (uses - 1) * (_USES + 1)
            self._queues[uses - 1].add_candidate(block)

    def remove(self, block: B) -> None:
        policy_data = abs(block.policy_data)
        self._queues[policy_data // (_USES + 1)].remove(block)
        block.policy_data = 0
        if policy_data and block.digest[-1] % _SAMPLE == 0:
            self._sampled -= 1
            self._remember(block.digest, policy_data & _USES, block.last_used)

    def victim(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        while (poorest := self._poorest(now)) is not None:
            age_s = now - poorest.last_used / 1e6
            known = self._ghosts.get(_name(newcomer.digest), 0)
            offered = self._lives[min(known & _USES, _CLASSES - 1)].density(0.0)
            kept = self._lives[poorest.number].density(age_s)
            if offered < kept * _BYPASS_MARGIN and age_s < _BYPASS_S_MAX:
                self._refuse(newcomer, now)
                return Decision.BYPASS
            block = self._queues[poorest.number].victim(newcomer, evictable, now)
            if block is not None:
                return block
        return None

    def victim_age(self, now: float) -> float:
        poorest = self._poorest(now)
        return max(0.0, now - poorest.last_used / 1e6) if poorest is not None else 0.0

    @property
    def ghosts(self) -> int:
        """Blocks that have left and are remembered."""
        return len(self._ghosts)

    def _poorest(self, now: float) -> _Candidate | None:
        """The poorest of the oldest leaves of each class; of equal ones the oldest."""
        found: B | None = None
        lowest = 0
        for number, queue in enumerate(self._queues):
            while (block := queue.oldest()) is not None and (
                block.policy_data & _USES
            ) != number + 1:
                queue.take()  # it was used again while it stood there
                self.add_candidate(block)
            if block is None:
                continue
            rank = self._lives[number].rank(now - block.last_used / 1e6)
            if found is None or (rank, block.last_used) < (lowest, found.last_used):
                found, lowest, chosen = block, rank, number
        return _Candidate(found.last_used, chosen) if found is not None else None

    def _arrive(self, block: B, now: float) -> int:
        """How often a newcomer has been used with this time."""
        if block.digest[-1] % _SAMPLE:
            return 1
        self._sampled += 1
        return self._ask(block.digest, now)

    def _refuse(self, block: B, now: float) -> None:
        if block.digest[-1] % _SAMPLE == 0:
            self._remember(block.digest, self._ask(block.digest, now), int(now * 1e6))

    def _ask(self, digest: bytes, now: float) -> int:
        """A block that is not here is used: the number of its uses with this one."""
        known = self._ghosts.pop(_name(digest), None)
        if known is None:
            self._lives[0].began += 1
            return 1
        uses = known & _USES
        age_s = now - (known // (_USES + 1)) / 1e6
        if age_s < _SAME_USE_S:
            return uses
        self._used_again(uses, age_s)
        return min(uses + 1, _CLASSES)

    def _used_again(self, uses: int, age_s: float) -> None:
        """One life of a block ends with a use, and the next one begins."""
        self._lives[uses - 1].ended(age_s)
        self._lives[min(uses, _CLASSES - 1)].began += 1

    def _remember(self, digest: bytes, uses: int, last_used: int) -> None:
        self._ghosts[_name(digest)] = last_used * (_USES + 1) + uses
        while len(self._ghosts) > max(_GHOSTS_MIN, _GHOSTS * self._sampled):
            self._ghosts.popitem(last=False)


class _Candidate(NamedTuple):
    """A leaf that may go next."""

    last_used: int
    number: int  # of its class


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


class LifetimeHistogram:
    """How long blocks of one class live from one use to the next, if there is one."""

    _SHORTEST_S: Final = 0.25
    _PER_OCTAVE: Final = 4
    _BINS: Final = 64  # up to 4 hours
    _KEPT: Final = 0.9  # of what was learned before, at each lesson

    def __init__(self) -> None:
        self.began = 0.0
        self._ended = [0.0] * self._BINS
        self._densities = [0.0] * self._BINS
        self._ranks = [_POOREST] * self._BINS
        octaves = [(number - 1) / self._PER_OCTAVE for number in range(1, self._BINS + 1)]
        self._edges = [0.0] + [self._SHORTEST_S * 2.0**octave for octave in octaves]

    def ended(self, age_s: float) -> None:
        self._ended[self._bin(age_s)] += 1

    def density(self, age_s: float) -> float:
        """Hits for a block and second; 0 as long as nothing is known."""
        return self._densities[self._bin(age_s)]

    def rank(self, age_s: float) -> int:
        """The power of two of the density."""
        return self._ranks[self._bin(age_s)]

    def learn(self) -> None:
        """Work out the densities anew."""
        alive = [max(self.began, sum(self._ended))]
        for count in self._ended:
            alive.append(alive[-1] - count)
        for start in range(self._BINS):
            best = hits = seconds = 0.0
            for number in range(start, self._BINS - 1):
                width = self._edges[number + 1] - self._edges[number]
                hits += self._ended[number]
                seconds += width * (alive[number] + alive[number + 1]) / 2
                best = max(best, hits / seconds) if seconds > 0 else best
            self._densities[start] = best
        self._ranks = [math.frexp(one)[1] if one else _POOREST for one in self._densities]
        self.began *= self._KEPT
        self._ended = [count * self._KEPT for count in self._ended]

    def _bin(self, age_s: float) -> int:
        if age_s <= self._SHORTEST_S:
            return 0
        return min(self._BINS - 1, 1 + int(self._PER_OCTAVE * math.log2(age_s / self._SHORTEST_S)))
