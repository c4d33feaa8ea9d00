"""What `make demo-vllm` has measured: medians, a table, a picture, and one honest sentence.

Nothing here starts a process or looks at a clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvpool.tools.charts import Bar, BarGroup, grouped_bars

WITH, WITHOUT, FIRST_ENGINE = "with the pool", "without", "the engine that goes away"


class Turn(NamedTuple):
    """One answer. Times in seconds, the rest in tokens."""

    instance: str
    prompt: int
    own: int
    pool: int
    first_token_s: float
    answer: tuple[int, ...]
    why: str  # the connector's decision, and why the pool had no more blocks


class Pair(NamedTuple):
    """The same prompt, answered by an engine with the pool and by one without."""

    pooled: Turn
    alone: Turn


class Spread(NamedTuple):
    """Seconds: the median, the shortest and the longest."""

    median: float
    low: float
    high: float


class Comparison(NamedTuple):
    """The pairs of one kind: a turn that is taken over, say."""

    label: str
    prompt: int  # tokens; the median
    from_pool: int
    from_own: int
    pooled: Spread
    alone: Spread

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes with the pool."""
        return self.alone.median / self.pooled.median

    @property
    def verdict(self) -> str:
        """A difference counts when the slowest of one side beats the fastest of the other."""
        if self.pooled.high < self.alone.low:
            return f"{self.ratio:.1f} x sooner"
        if self.alone.high < self.pooled.low:
            return f"{1 / self.ratio:.1f} x LATER"
        return "no difference seen"


def spread(seconds: Iterable[float]) -> Spread:
    """Raises ValueError when there is none."""
    ordered = sorted(seconds)
    if not ordered:
        raise ValueError("nothing was measured")
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def compare(label: str, pairs: Sequence[Pair]) -> Comparison:
    """Medians of all pairs. Raises ValueError when there is none."""
    pooled = [pair.pooled for pair in pairs]
    return Comparison(
        label,
        int(statistics.median(turn.prompt for turn in pooled)),
        int(statistics.median(turn.pool for turn in pooled)),
        int(statistics.median(turn.own for turn in pooled)),
        spread(turn.first_token_s for turn in pooled),
        spread(pair.alone.first_token_s for pair in pairs),
    )


def table(comparisons: Sequence[Comparison]) -> str:
    """Seconds to the first token: medians, and from the shortest to the longest."""
    lines = [
        f"{'first token after':20} {'prompt':>7} {'of it own':>10} {'of the pool':>12}   "
        f"{WITH:24} {WITHOUT:24}"
    ]
    lines += [
        f"{one.label:20} {one.prompt:7,} {one.from_own:10,} {one.from_pool:12,}   "
        f"{_text(one.pooled):24} {_text(one.alone):24} {one.verdict}"
        for one in comparisons
    ]
    return "\n".join(lines)


def conclusion(comparisons: Sequence[Comparison]) -> str:
    """Where the pool helps, where it does not, and where it costs, in one sentence."""
    sooner = [one for one in comparisons if "sooner" in one.verdict]
    later = [one for one in comparisons if "LATER" in one.verdict]
    same = [one for one in comparisons if one not in sooner and one not in later]
    parts = [f"{one.label}: the first token comes {one.verdict} with the pool" for one in sooner]
    parts += [f"{one.label}: {one.verdict} with the pool" for one in later]
    if same:
        names = ", ".join(one.label for one in same)
        parts.append(f"{names}: no difference that this run can show")
    return "; ".join(parts) + "."


def why_computed(pairs: Sequence[Pair]) -> list[str]:
    """A line for each session that was taken over without a token of the pool."""
    return [
        f"session {number}: computed, although the pool should have it ({pair.pooled.why})"
        for number, pair in enumerate(pairs, 1)
        if not pair.pooled.pool
    ]


def every_turn(measured: Iterable[Sequence[Pair]]) -> list[str]:
    """A line for each pair, for those who mistrust a median."""
    return [
        f"{pair.pooled.prompt:6} tokens, own {pair.pooled.own:5}, pool {pair.pooled.pool:5}: "
        f"{pair.pooled.first_token_s:.3f} s {WITH}, {pair.alone.first_token_s:.3f} s {WITHOUT} "
        f"({pair.pooled.why})"
        for pairs in measured
        for pair in pairs
    ]


def answers_differ(pairs: Iterable[Pair]) -> bool:
    return any(pair.pooled.answer != pair.alone.answer for pair in pairs)


def picture(
    before: Sequence[Sequence[Turn]], after: Sequence[Sequence[Pair]], new: Sequence[Pair]
) -> str:
    """The turns of a session from left to right, as an SVG.

    `before` and `after` have for each turn the measurements of all sessions: on the engine that
    is lost, and on the two that take over. `new` has sessions that nobody has seen.
    """
    groups = [
        BarGroup(str(number), {FIRST_ENGINE: _bar(turns)}) for number, turns in enumerate(before, 1)
    ]
    groups += [
        BarGroup(str(number), _bars(pairs)) for number, pairs in enumerate(after, len(before) + 1)
    ]
    groups.append(BarGroup("a new one", _bars(new)))
    sessions = len(after[0]) if after else 0
    return grouped_bars(
        "Seconds to the first token, by turn of a session",
        f"medians of {sessions} sessions, shortest and longest; from turn {len(before) + 1} on "
        "another engine, which was just started",
        groups,
    )


def _bars(pairs: Sequence[Pair]) -> dict[str, Bar]:
    return {
        WITH: _bar([pair.pooled for pair in pairs]),
        WITHOUT: _bar([pair.alone for pair in pairs]),
    }


def _bar(turns: Sequence[Turn]) -> Bar:
    return Bar(*spread(turn.first_token_s for turn in turns))


def _text(seconds: Spread) -> str:
    return f"{seconds.median:.2f} s ({seconds.low:.2f} to {seconds.high:.2f})"
