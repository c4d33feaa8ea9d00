"""Density: the block with the fewest expected hits for its memory and time is evicted first.

A block that was last used some time ago will be used again within h seconds with some probability,
and until then, or for h, it takes up memory. Its *density* is the best ratio of hits to time over
all h: Gittins' index. LHD (Beckmann, Chen, Cidon, NSDI 2018) also ranks by hit density. The new
block is ranked too, as a block that was used just now: if its density is the lowest of all, it is
refused. So no lease must be chosen; its length follows from the measured times between uses.
Refusing pays only while memory is short for long: then what is refused would have been evicted. In
a shortage of seconds whole chains would be refused that are missed when memory is ample again. So
nothing is refused unless a good part of all uses comes too late.

The measurement must not depend on what was kept, or evicting blocks too early would look right. So
evicted and refused blocks are kept as *ghosts* for a while (digest and last use): when one is
written again, the time at which it would have been a hit is counted (design: eviction).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Generic

from kvpool.protocols.policy import B, Decision, Inferred
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.verdicts import REFUSED, Departures, Guesses, returning, worth

#: Classes, by how often a block was used: once, twice, three times, more.
_CLASSES: Final = 4
#: One block of so many is measured, chosen by its digest so that all its uses are counted.
_SAMPLE: Final = 4
#: Ghosts kept for each stored block of the sample.
_GHOSTS: Final = 2
_GHOSTS_MIN: Final = 1024
#: Touches between two computations of the densities. The first come sooner, each after twice as
#: many as the one before: one server of many is touched seldom, and until it has learned it is LRU.
_RELEARN_EVERY: Final = 20_000
_RELEARN_FIRST: Final = 1_000
#: Small differences of measured densities are noise: classes with densities of the same power of
#: two are ordered by age, and a new block is refused only if its density is below this fraction of
#: the victim's.
_BYPASS_MARGIN: Final = 0.93
#: Nothing is refused while fewer than this share of the uses of known blocks are of evicted or
#: refused ones.
_LATE_MIN: Final = 0.15
#: After so many seconds without a use, no block keeps a new one out (G9).
_BYPASS_S_MAX: Final = 600.0

#: Seconds within which a refusal and a reservation of one block are one use: another victim was
#: found after the refusal (design: session-hints).
_SAME_USE_S: Final = 0.001
#: Blocks that one call brings into the queue of their class, at most (compare `LRU.oldest`).
_MOVED_MAX: Final = 256
#: Beside the classes: a block that was never stored.
_REFUSED: Final = _CLASSES
#: The rank of blocks that are not expected to be used again.
_POOREST: Final = -10_000

# `policy_data` is the number of uses, in the lowest bits, and above them the class in which the
# block was queued. It is negative between reserve and seal, which touch a block twice for one use.
_USES: Final = 7


class Density(Generic[B]):
    """Evicts the block of lowest density among the oldest leaves of each class."""

    in_a_row: Final = True

    def __init__(self, capacity: int) -> None:
        self._queues: list[LRU[B]] = [LRU() for _ in range(_CLASSES)]
        self._lives = [LifetimeHistogram() for _ in range(_CLASSES)]
        self._last_stamp = 0
        # From 8 bytes of the digest to the time of the last use and the number of uses in one int:
        # half of the memory of a tuple.
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._sampled = 0  # stored blocks of the sample
        self._used = self._late = 0.0  # uses of known blocks of it, and those of ghosts among them
        self._touches, self._learn_at = 0, min(_RELEARN_FIRST, _RELEARN_EVERY)
        self._held = [0] * _CLASSES  # stored blocks
        self._guesses = Guesses(_CLASSES)  # about the sample
        self._departures = Departures(self._words)
        self._found: B | None = None  # the last victim, if it was the poorest of all

    def touch(self, block: B, now: float) -> None:
        policy_data = block.policy_data
        if policy_data > 0:
            uses = policy_data & _USES
            if block.digest[-1] % _SAMPLE == 0:
                self._guesses.came[uses - 1] += 1
                self._used_again(uses, now - block.last_used / 1e6)
            if uses < _CLASSES:
                block.policy_data = policy_data + 1
                self._held[uses - 1] -= 1
                self._held[uses] += 1
        elif policy_data < 0:
            block.policy_data = -policy_data
        else:
            sampled = block.digest[-1] % _SAMPLE == 0
            self._sampled += sampled
            uses = self._ask(block.digest, now) if sampled else 1
            block.policy_data = -uses
            self._held[uses - 1] += 1
        self._last_stamp = block.last_used = max(self._last_stamp + 1, int(now * 1e6))
        self._touches += 1
        if self._touches == self._learn_at:
            self._touches, self._learn_at = 0, min(2 * self._learn_at, _RELEARN_EVERY)
            for lives in self._lives:
                lives.learn()
            self._used *= LifetimeHistogram.KEPT
            self._late *= LifetimeHistogram.KEPT

    def add_candidate(self, block: B) -> None:
        if not block.is_candidate:
            uses = block.policy_data & _USES
            block.policy_data = uses | (uses - 1) * (_USES + 1)
            self._queues[uses - 1].add_candidate(block)

    def remove(self, block: B) -> None:
        policy_data = abs(block.policy_data)
        if block.is_candidate:
            self._queues[policy_data // (_USES + 1)].remove(block)
        block.policy_data = 0
        if policy_data:
            self._held[(policy_data & _USES) - 1] -= 1
            if block.digest[-1] % _SAMPLE == 0:
                self._sampled -= 1
                self._remember(block.digest, policy_data & _USES, block.last_used)

    def victim(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        while (poorest := self._poorest(now)) is not None:
            if isinstance(poorest, Decision):
                return poorest
            number, oldest = poorest
            last_used = oldest.last_used
            age_s = now - last_used / 1e6
            is_short = self._late > self._used * _LATE_MIN
            if is_short and age_s < _BYPASS_S_MAX:  # else nothing is refused for it
                kept = self._lives[number].density(age_s)
                known = self._ghosts.get(_name(newcomer.digest), 0)
                offered = self._lives[min(known & _USES, _CLASSES - 1)].density(0.0)
                if offered < kept * _BYPASS_MARGIN:
                    self._refuse(newcomer, now)
                    self._departures.add(newcomer.digest, _REFUSED, 0.0)
                    return Decision.BYPASS
            queue = self._queues[number]
            queue.take()
            block: B | Decision | None = oldest
            if not evictable(oldest):
                if oldest.last_used != last_used:  # as in `LRU.victim`
                    queue.add_candidate(oldest)
                block = queue.victim(newcomer, evictable, now)
            self._found = oldest if block is oldest else None
            if block is not None:
                if not isinstance(block, Decision):
                    self._departures.add(block.digest, number, age_s)
                return block
        return None

    def takes_parent(self, victim: B, parent: B, now: float) -> bool:
        """Of a victim that was the poorest of all: what was used as often, and just before it."""
        uses, age_s = parent.policy_data & _USES, now - parent.last_used / 1e6
        density, older = self._lives[uses - 1].density, parent.last_used < victim.last_used
        if victim is not self._found or not older or uses != victim.policy_data & _USES:
            return False
        if density(age_s) != density(now - victim.last_used / 1e6):  # its class may not be poorest
            return False
        self._departures.add(parent.digest, uses - 1, age_s)
        self._found = parent
        return True

    def victim_age(self, now: float) -> float:
        poorest = self._poorest(now)
        if isinstance(poorest, Decision):  # near enough: a look must not take long
            return max(queue.victim_age(now) for queue in self._queues)
        return max(0.0, now - poorest[1].last_used / 1e6) if poorest is not None else 0.0

    def inferred(self) -> Inferred:
        expected = [returning(lives) for lives in self._lives]
        held: Counter[bool | None] = Counter()
        for one, blocks in zip(expected, self._held, strict=True):
            held[one] += blocks
        figures = self._guesses.figures(expected)
        figures["inferred_returning_blocks"] = held[True]
        figures["inferred_dead_blocks"] = held[False]
        return Inferred(figures, self._departures.why)

    @property
    def ghosts(self) -> int:
        """Number of evicted and refused blocks that are kept."""
        return len(self._ghosts)

    def _poorest(self, now: float) -> tuple[int, B] | Decision | None:
        """The leaf of lowest rank among the oldest of each class, behind the number of its class;
        of equal ranks the oldest.

        NOT_YET when that takes more steps: call again.
        """
        found: list[tuple[int, B]] = []
        moved = 0
        for number, queue in enumerate(self._queues):
            while (block := queue.oldest()) is not None:
                if isinstance(block, Decision) or moved == _MOVED_MAX:
                    return Decision.NOT_YET
                if block.policy_data & _USES == number + 1:
                    found.append((number, block))
                    break
                queue.take()  # used again since it was queued: it belongs to another class now
                self.add_candidate(block)
                moved += 1
        if len(found) < 2:  # their ranks do not matter
            return found[0] if found else None
        lives = self._lives
        return min(
            found,
            key=lambda one: (lives[one[0]].rank(now - one[1].last_used / 1e6), one[1].last_used),
        )

    def _refuse(self, block: B, now: float) -> None:
        if block.digest[-1] % _SAMPLE == 0:
            self._remember(block.digest, self._ask(block.digest, now), int(now * 1e6))

    def _ask(self, digest: bytes, now: float) -> int:
        """Count a use of a block that is not stored: the number of its uses, this one included."""
        known = self._ghosts.pop(_name(digest), None)
        if known is None:
            self._lives[0].began += 1
            return 1
        uses = known & _USES
        age_s = now - (known // (_USES + 1)) / 1e6
        if age_s < _SAME_USE_S:
            return uses
        self._late += 1
        self._guesses.asked[uses - 1] += 1
        self._used_again(uses, age_s)
        return min(uses + 1, _CLASSES)

    def _used_again(self, uses: int, age_s: float) -> None:
        """Count the time since the last use in its class; the block enters the next class."""
        self._used += 1
        self._lives[uses - 1].ended(age_s)
        self._lives[min(uses, _CLASSES - 1)].began += 1

    def _remember(self, digest: bytes, uses: int, last_used: int) -> None:
        self._guesses.left[uses - 1] += 1
        self._ghosts[_name(digest)] = last_used * (_USES + 1) + uses
        while len(self._ghosts) > max(_GHOSTS_MIN, _GHOSTS * self._sampled):
            self._ghosts.popitem(last=False)

    def _words(self, number: int, age_s: float) -> str:
        if number == _REFUSED:
            return REFUSED
        used = f"used {('once', 'twice', 'three times', 'more often')[number]}"
        return f"{used}, {worth(self._lives[number].share(age_s), age_s, 'blocks')}"


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


class LifetimeHistogram:
    """Times from one use to the next of the blocks of one class, and the densities from them."""

    _SHORTEST_S: Final = 0.25
    _PER_OCTAVE: ClassVar = 4
    _BINS: ClassVar = 64  # up to 4 hours
    KEPT: ClassVar = 0.9  # weight of the old counts after each computation

    def __init__(self) -> None:
        self.began = 0.0
        self.came = 0.0  # of these
        self._ended = [0.0] * self._BINS
        self._densities = [0.0] * self._BINS
        self._ranks = [_POOREST] * self._BINS
        octaves = [number / self._PER_OCTAVE for number in range(self._BINS - 1)]
        self._bounds = [self._SHORTEST_S * 2.0**octave for octave in octaves]

    def ended(self, age_s: float) -> None:
        self.came += 1
        self._ended[bisect_right(self._bounds, age_s)] += 1

    def share(self, age_s: float) -> float:
        """Of those that were not used for so long, how many are used again after all."""
        later = sum(self._ended[bisect_right(self._bounds, age_s) :])
        left = max(self.began, self.came) - self.came + later
        return later / left if left > 0 else 0.0

    def density(self, age_s: float) -> float:
        """Expected hits per block and second at this age; 0 before the first computation."""
        return self._densities[bisect_right(self._bounds, age_s)]

    def rank(self, age_s: float) -> int:
        """The power of two of the density."""
        return self._ranks[bisect_right(self._bounds, age_s)]

    def learn(self) -> None:
        """Compute the densities from the counts, then reduce the counts by `KEPT`."""
        self._compute(max(self.began, sum(self._ended)), self._ended)
        self.fade()

    def _compute(self, began: float, ended: Sequence[float]) -> None:
        seconds, alive, since_s = [], began, 0.0
        for until_s, count in zip(self._bounds, ended, strict=False):  # nobody leaves the last bin
            seconds.append((until_s - since_s) * (alive - count / 2))
            alive, since_s = alive - count, until_s
        best: list[tuple[float, float]] = []  # hits and seconds of the best spans from here on
        for number in range(self._BINS - 2, -1, -1):
            hits, span_s = ended[number], max(0.0, seconds[number])
            while best and best[-1][0] * span_s >= hits * best[-1][1]:  # going on is better
                hits, span_s = hits + best[-1][0], span_s + best.pop()[1]
            best.append((hits, span_s))
            self._densities[number] = hits / span_s if span_s > 0 else 0.0
        self._ranks = [math.frexp(one)[1] if one else _POOREST for one in self._densities]

    def fade(self) -> None:
        """What was counted long ago counts less."""
        self.began *= self.KEPT
        self.came *= self.KEPT
        self._ended = [count * self.KEPT for count in self._ended]
