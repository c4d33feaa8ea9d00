"""What `make demo-fleet` has measured: a table, a picture, and what went wrong. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvpool.tools.charts import Bar, BarGroup, grouped_bars

WITHOUT, WITH, HINTS = "without the pool", "with the pool", "with the pool and hints"


#: Names of rows that are too long below a group of bars.
_SHORT = {
    "vllm-router: kv_aware": "vllm-router",
    "an engine is killed": "engine killed",
    "a cold engine takes over": "cold take-over",
    "and a server is killed": "server killed",
    "one engine that keeps all": "one engine",
}


class Answered(NamedTuple):
    """One answer, as the client saw it. Tokens; `first_s` is seconds to the first one. It was asked
    for at `began_s` of a clock, and had come at `done_s`."""

    session: str
    turn: int
    prompt: int
    cached: int
    first_s: float
    text: str
    engine: str
    retries: int = 0
    began_s: float = 0.0
    done_s: float = 0.0


class Row(NamedTuple):
    """One way to route, with one way to use the pool."""

    router: str
    mode: str
    answers: Sequence[Answered]
    seconds: float

    @property
    def computed(self) -> int:
        return sum(one.prompt - one.cached for one in self.answers)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / max(1, sum(one.prompt for one in self.answers))

    def first_s(self, share: float) -> float:
        """Seconds to the first token that this share of the answers did not exceed."""
        ordered = sorted(one.first_s for one in self.answers)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def bar(self) -> Bar:
        return Bar(self.first_s(0.5), self.first_s(0.1), self.first_s(0.9))


Expected = Mapping[tuple[str, int], str]


def wrong(rows: Sequence[Row], expected: Expected) -> list[str]:
    """Answers that are not those of the plain engine."""
    return [
        f"{row.router}, {row.mode}: turn {one.turn} of {one.session} by {one.engine}: "
        f"{one.text!r}, a plain engine {expected[one.session, one.turn]!r}"
        for row in rows
        for one in row.answers
        if one.text != expected[one.session, one.turn]
    ]


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'router':34} {'':24} {'hit':>6} {'computed':>9} {'TTFT p50':>9} {'p90':>7} "
        f"{'answers':>8} {'took':>6}"
    ]
    lines += [
        f"{row.router:34} {row.mode:24} {row.hit_rate:6.1%} {row.computed:9,} "
        f"{row.first_s(0.5):8.2f}s {row.first_s(0.9):6.2f}s {len(row.answers):8} "
        f"{row.seconds:5.0f}s"
        for row in rows
    ]
    return "\n".join(lines)


def picture(rows: Sequence[Row]) -> str:
    """Seconds to the first token by router, as an SVG."""
    groups: dict[str, dict[str, Bar]] = {}
    for row in rows:
        groups.setdefault(row.router, {})[row.mode] = row.bar()
    return grouped_bars(
        "Seconds to the first token, by router",
        "medians, with lines from the 10th to the 90th percentile; three engines on a CPU, "
        "24 recorded agent sessions",
        [
            BarGroup(_SHORT.get(name, name.removeprefix("example: ")), bars)
            for name, bars in groups.items()
        ],
    )
