"""The loads under way, for those who want the same blocks or the same link: pure.

Positions are in tokens.
(design: load-or-recompute)
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool_connector.plan.cost_model import Route
from kvpool_connector.records.messages import LoadResult


@dataclass(slots=True)
class RunningLoad:
    """A load of tokens `first` to `last` (excluded) of a prompt with these hashes.

    It runs until its last rank has reported, or its request has ended or started anew; after that
    `running` is false. `lost` is true when the pool did not have all of its blocks, `awaits` when
    some were only promised. `result` is that of the ranks that have reported; its seconds are also
    for the `size_beside` bytes of loads that ran before it and that the link moved in between.
    """

    hashes: Sequence[bytes]
    first: int
    last: int
    size: int  # bytes that one rank moves
    route: Route
    started_at: float
    expected_s: float
    prefill_s: float | None  # of computing the same tokens; None: nothing was measured
    timeout_s: float
    ranks_left: int
    size_beside: int = 0
    result: LoadResult | None = None
    running: bool = True
    lost: bool = False
    awaits: bool = False

    def on_rank(self, result: LoadResult) -> bool:
        """One rank has ended it; whether that was the last one."""
        self.result = result if self.result is None else self.result.joined(result)
        self.ranks_left -= 1
        return not self.ranks_left

    @property
    def ended(self) -> LoadResult:
        """What its ranks have reported, all of them."""
        assert self.result is not None, "it has not ended"
        return self.result

    @property
    def aborted(self) -> bool:
        """It ended because it took too long."""
        return not self.ended.complete and self.ended.seconds >= self.timeout_s

    def remaining_s(self, now: float) -> float:
        """How much longer it is expected to run; 0 when it is late."""
        return max(0.0, self.started_at + self.expected_s - now)


class SharedLoad(NamedTuple):
    """A load that another prompt waits for, because it brings that prompt's tokens to `last`."""

    load: RunningLoad
    last: int
    since: float


class RunningLoads:
    """All loads of one engine that are under way.

    Prompts are compared by the engine's hashes, each of which names all tokens before it: two
    prompts are equal up to a token when their hashes there are. `tokens_per_hash` of the engine;
    loads begin and end at multiples of `unit`.
    """

    def __init__(self, tokens_per_hash: int, unit: int) -> None:
        self.tokens_per_hash = tokens_per_hash
        self._unit = unit
        self._loads: list[RunningLoad] = []

    def __len__(self) -> int:
        return len(self._loads)

    def start(self, load: RunningLoad) -> None:
        self._loads.append(load)

    def end(self, load: RunningLoad) -> None:
        load.running = False
        self._loads.remove(load)

    @property
    def awaiting(self) -> int:
        """How many of them wait for promised blocks."""
        return sum(load.awaits for load in self._loads)

    def bytes_beside(self, size: int, route: Route) -> int:
        """Bytes that the link moves for others until it has moved `size` bytes for one more.

        Loads take turns at the link, so a long one delays a short one by no more than the short
        one's own size. Those from the own host have nothing to do with it.
        """
        alike = [one for one in self._loads if bool(one.route.ways) is bool(route.ways)]
        most = size * route.share
        return round(sum(min(most, one.size * one.route.share) for one in alike) / route.share)

    def bringing(
        self, hashes: Sequence[bytes], first: int, last: int, *, awaits: bool = False
    ) -> tuple[RunningLoad, int] | None:
        """The load that brings most of tokens `first` to `last` (excluded) of this prompt, and up
        to which token; None when none brings their beginning.

        One that waits for promised blocks counts only for a prompt that `awaits` all the same ones:
        a promise that a client made up must not delay others with the same beginning.
        """
        best: tuple[RunningLoad, int] | None = None
        begin = (first // self._unit + 1) * self._unit
        for load in self._loads:
            ends = range(begin, min(load.last, last) + 1, self._unit)
            if load.awaits and not (
                awaits and load.last >= last and self._equal(hashes, load.hashes, last)
            ):
                continue
            if load.first > first or not ends or not self._equal(hashes, load.hashes, begin):
                continue
            # Equal at first, and different from some token on.
            differ = bisect.bisect_left(
                ends, True, key=lambda end: not self._equal(hashes, load.hashes, end)
            )
            if best is None or ends[differ - 1] > best[1]:
                best = load, ends[differ - 1]
        return best

    def _equal(self, one: Sequence[bytes], other: Sequence[bytes], tokens: int) -> bool:
        """Whether two prompts have equal tokens before this one, and so equal blocks."""
        index = tokens // self.tokens_per_hash - 1
        return one[index] == other[index]
