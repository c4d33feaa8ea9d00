"""Estimates of what a load and a prefill will take, from those that were measured: pure.

Both are wanted in seconds before either has begun. Nothing here reads a clock.
(design: load-or-recompute)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Final, NamedTuple

from kvpool.types import MEMORY_TIERS, SHARED_BYTES_MIN, Match, Run

#: Weight of earlier measurements when a new one comes: the last five count for two thirds.
_DECAY: Final = 0.8
#: A load so many times faster than estimated: the pool has changed, earlier measurements go.
_RESET_RATIO: Final = 4.0
#: A load that was aborted without a byte is assumed to take so many times as long as it had.
_ABORTED_FACTOR: Final = 2.0
#: Fewer servers are not so many times faster than more: that was measured before the pool changed.
_FEWER_RATIO: Final = 1.5
_RUNS_MAX: Final = 1024  # of a chain in more pieces the first tell: the engine waits for it.
#: The commonest sets of servers that have a chain say how far its load can be shared.
_GROUPS_MAX: Final = 8
#: Assumed of a pool before anything was measured: a slow local network.
_PRIOR_LATENCY_S: Final = 0.002
_PRIOR_BYTES_S: Final = 1e9
#: In steps with fewer prompt tokens the fixed cost of a step dominates: not measured.
PREFILL_TOKENS_MIN: Final = 32


class Route(NamedTuple):
    """How many servers can share the slowest part of a load, which is such a `share` of its bytes:
    what lies in the own host comes beside it. 0 `ways`: nine tenths lie there."""

    ways: int = 1
    share: float = 1.0


ONE_WAY: Final = Route()
OWN_HOST: Final = Route(ways=0)


class TransferCost:
    """Seconds of a load as latency + bytes / bandwidth, by its route.

    For each number of ways the line through the measured (bytes, seconds) of the latest loads, by
    weighted least squares; each measurement weighs `_DECAY` of the next one. Only sums are kept.
    """

    def __init__(self) -> None:
        #: Loads measured so far; 0: estimates are the prior.
        self.samples = 0
        self.near: Set[str] = frozenset()  # servers in the own host, as far as they are known
        # By ways, the latest last: weighted sums of 1, x (bytes), y (seconds), x * x and x * y.
        self._sums: dict[int, list[float]] = {}

    def route(self, match: Match | None, size: int) -> Route:
        """Of a load of these blocks; None: of some that lie anywhere. Servers share what the own
        host lacks as far as each is busy to the end: where some alone have too many of the blocks,
        the others are done before."""
        if match is None:
            return OWN_HOST if self.near else ONE_WAY  # what is fast there is no fast way
        held: Counter[frozenset[str]] = Counter()
        own = 0
        for run in match.runs[:_RUNS_MAX]:
            if (servers := self._far(run)) is None:
                own += run.last + 1 - run.first
            else:
                held[servers] += run.last + 1 - run.first
        share = held.total() / (own + held.total()) if own else 1.0
        if share < 0.1:
            return OWN_HOST
        if size * share < SHARED_BYTES_MIN:
            return Route(1, share)
        groups = [frozenset[str]().union(*held), *(one for one, _ in held.most_common(_GROUPS_MAX))]
        busy = [sum(n for one, n in held.items() if one <= by) / max(1, len(by)) for by in groups]
        return Route(max(1, int(held.total() / max(1, *busy) + 1e-9)), share)

    def sample(self, match: Match, most: int, route: Route) -> tuple[list[int], Match]:
        """Of these blocks, `most` at most that tell how fast this route is, and where they are:
        from all its servers, and none of the own host, which comes beside them."""
        held = [(run, self._far(run)) for run in match.runs[:_RUNS_MAX]]
        runs = [run for run, servers in held if not route.ways or servers is not None]
        blocks = [(n, run.replicas) for run in runs for n in range(run.first, run.last + 1)]
        count = min(most, len(blocks))
        chosen = [blocks[n * len(blocks) // count] for n in range(count)]
        places = tuple(Run(n, n, replicas) for n, (_, replicas) in enumerate(chosen))
        return [number for number, _ in chosen], Match(places, count, match.stopped)

    def _far(self, run: Run) -> frozenset[str] | None:
        """The servers that share these blocks; None: they lie in memory of the own host."""
        part = min([one.part for one in run.replicas], default=0)  # a rank loads one; all are alike
        alike = [one for one in run.replicas if one.part == part]
        near = any(one.server in self.near and one.tier in MEMORY_TIERS for one in alike)
        return None if near else frozenset([one.server for one in alike])

    def start_over(self, size: int, size_loaded: int, seconds: float, route: Route) -> None:
        """The pool has become slow, all of it: earlier measurements no longer count.

        A load of `size` bytes took `seconds`, or was aborted then; `size_loaded` of them had come.
        When nothing came, all that is known is that the load takes longer than that.
        """
        self._sums.clear()
        factor = 1.0 if size_loaded else _ABORTED_FACTOR
        self.observe(size_loaded or size, factor * seconds, route if route.ways else ONE_WAY)

    def observe(self, size: int, seconds: float, route: Route = ONE_WAY) -> None:
        """A load of `size` bytes took `seconds`."""
        ways, share = route
        x, y = max(size * share, 1.0), max(seconds, 1e-6)
        is_faster = y * _RESET_RATIO < self.seconds(size, route)
        before = self._sums.pop(ways, None)
        if before is None or is_faster:
            before = [0.0] * 5
        self.samples += 1
        new = 1.0, x, y, x * x, x * y
        self._sums[ways] = [a * _DECAY + b for a, b in zip(before, new, strict=True)]
        slow_s = self.seconds(size, route)
        for fewer in [one for one in self._sums if 0 < one < ways]:
            if self.seconds(size, Route(fewer, share)) * _FEWER_RATIO < slow_s:
                del self._sums[fewer]

    def seconds(self, size: int, route: Route = ONE_WAY) -> float:
        """Estimated seconds of a load of `size` bytes."""
        latency_s, per_byte_s = self._line(route.ways)
        return latency_s + size * route.share * per_byte_s

    @property
    def bandwidth(self) -> float:
        """Estimated bytes per second of a load like the latest one, without the latency."""
        return 1 / self._line(next(reversed(self._sums), 1))[1]

    def known(self, ways: int) -> list[int]:
        """What was measured and tells of so many ways: the own host tells of none but itself."""
        return [one for one in self._sums if one or not ways]

    def _line(self, ways: int) -> tuple[float, float]:
        """Latency in seconds, and seconds per byte.

        No faster than was measured: that more ways help, a load or a probe over them has to show.
        Fewer than measured are taken to have their share of the speed, the own host that of one.
        """
        if not (known := self.known(ways)):
            return _PRIOR_LATENCY_S, 1 / _PRIOR_BYTES_S
        nearest = max((one for one in known if one <= ways), default=min(known))
        weight, x, y, xx, xy = self._sums[nearest]
        share = max(1.0, nearest / max(1, ways))
        mean_x, mean_y = x / weight, y / weight * share
        variance = xx / weight - mean_x * mean_x
        through_zero = mean_y / mean_x
        differ = variance >= 0.01 * mean_x * mean_x  # else latency and rate cannot be told apart
        slope = (xy / weight * share - mean_x * mean_y) / variance if differ else 0.0
        if slope <= 0:
            return 0.0, through_zero
        slope = min(slope, through_zero)  # no negative latency
        return max(0.0, mean_y - slope * mean_x), max(slope, 1e-13)


class PrefillCost:
    """Seconds of computing a prompt, by context length: attention makes late tokens dearer."""

    def __init__(self) -> None:
        # For each power of two of context: tokens and seconds, older ones weigh less.
        self._tokens: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    def observe(self, segments: list[tuple[int, int]], seconds: float) -> None:
        """One step of `seconds` computed tokens `first` to `last` (excluded) of some prompts."""
        total = sum(last - first for first, last in segments)
        if total < PREFILL_TOKENS_MIN or seconds <= 0:
            return
        for first, last in segments:
            bucket = _bucket((first + last) // 2)
            share = (last - first) / total
            self._tokens[bucket] = self._tokens.get(bucket, 0.0) * _DECAY + last - first
            self._seconds[bucket] = self._seconds.get(bucket, 0.0) * _DECAY + seconds * share

    def seconds(self, first: int, last: int) -> float | None:
        """Estimated seconds for tokens `first` to `last` (excluded); None before a measurement."""
        if not self._tokens:
            return None
        total = 0.0
        while first < last:
            end = min(last, 1 << _bucket(first))
            total += (end - first) / self._tokens_per_s(_bucket(first))
            first = end
        return total

    def _tokens_per_s(self, bucket: int) -> float:
        """At this context length, or at the nearest one that was measured."""
        nearest = min(self._tokens, key=lambda known: (abs(known - bucket), known))
        return self._tokens[nearest] / max(self._seconds[nearest], 1e-9)


class StepTimer:
    """Times the engine's steps for `PrefillCost`. Steps may overlap, and end in their order."""

    def __init__(self, prefill_cost: PrefillCost) -> None:
        self._prefill_cost = prefill_cost
        self._started: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        self._last_end = 0.0

    def on_start(self, step: int, segments: list[tuple[int, int]], now: float) -> None:
        """This step computes tokens `first` to `last` (excluded) of some prompts, or nothing."""
        if segments:
            self._started[step] = (now, segments)

    def on_end(self, step: int, now: float) -> None:
        """The step has ended, and every step before it."""
        for earlier in [number for number in self._started if number <= step]:
            started_at, segments = self._started.pop(earlier)
            if earlier == step:
                # A step that began while another one ran had the engine only after its end.
                self._prefill_cost.observe(segments, now - max(started_at, self._last_end))
        self._last_end = now


def _bucket(context: int) -> int:
    return max(context, 1).bit_length()
