"""The pictures of a study: an SVG each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.fleet.cases import Case, FleetStudy
from benchmarks.fleet.results import FleetResult, TurnParts
from kvpool.tools.charts import GRID, INK, LINE_COLOURS, QUIET, svg, text

_LEFT, _TOP, _WIDTH, _HEIGHT = 80, 90, 600, 360
_PARTS: Final = ("until it is ready", "waits for the engine", "computed", "to decode", "answered")
_PARTS_MAX: Final = 12  # rows


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one colour, joined."""

    name: str
    points: Sequence[tuple[float, float]]


def pictures(study: FleetStudy) -> Iterator[tuple[str, str]]:
    """Name and SVG of each picture that the study's rows make."""
    if study.x:
        yield f"{study.name}-throughput", throughput(study)
        yield f"{study.name}-hits", hit_rates(study)
    else:
        yield f"{study.name}-first-token", first_tokens(study)
        yield f"{study.name}-time", times(study)


def throughput(study: FleetStudy) -> str:
    """Tokens a second of all GPUs, ours beside what was published."""
    lines = _lines(study, lambda result: result.tokens_s)
    published = [(c.x, c.published.tokens_s) for c, _ in study.rows if c.published.tokens_s]
    if published:
        lines.append(Line("published", published))
    return lines_chart(f"tokens per second: {study.title}", study.x, lines, "{:,.0f}")


def hit_rates(study: FleetStudy) -> str:
    """The share of prompt tokens that were not computed."""
    lines = _lines(study, lambda result: result.hit_rate)
    return lines_chart(f"hits: {study.title}", study.x, lines, "{:.0%}", ceiling=1.0)


def first_tokens(study: FleetStudy) -> str:
    """The distribution of the time to the first token, on a scale of powers of ten."""
    lines = [
        Line(case.name, [(max(0.1, s), n / 20) for n, s in enumerate(result.first_tokens)])
        for case, result in study.rows[:_PARTS_MAX]
    ]
    title = "share of prompts whose first token came within so many seconds"
    return lines_chart(title, "seconds", lines, "{:.0%}", ceiling=1.0, powers=True)


def times(study: FleetStudy) -> str:
    """Where the time of a turn goes: mean seconds of each part, a bar for each case."""
    rows = study.rows[:_PARTS_MAX]
    longest = max(sum(result.parts) for _, result in rows)
    parts = [text(40, 40, f"mean seconds of a turn: {study.title}", 18, INK, weight="bold")]
    for number, name in enumerate(_PARTS):
        left = 40 + 170 * number
        parts.append(_box(left, 56, 14, 14, LINE_COLOURS[number]))
        parts.append(text(left + 20, 68, name, 13, QUIET))
    for row, (case, result) in enumerate(rows):
        top = 96 + 38 * row
        parts.append(text(300, top + 18, case.name, 13, INK, "end"))
        parts += _stacked(result.parts, 310, top, 520 / longest)
        parts.append(text(840, top + 18, f"{sum(result.parts):.1f} s", 13, INK))
    return svg(920, 110 + 38 * len(rows), parts)


def _stacked(seconds: TurnParts, left: float, top: float, scale: float) -> Iterator[str]:
    for number, part in enumerate(seconds):
        yield _box(left, top, part * scale, 26, LINE_COLOURS[number])
        left += part * scale


def _lines(study: FleetStudy, value: Callable[[FleetResult], float]) -> list[Line]:
    by_series: dict[str, list[tuple[Case, FleetResult]]] = {}
    for case, result in study.rows:
        if case.series:
            by_series.setdefault(case.series, []).append((case, result))
    return [
        Line(name, [(case.x, value(result)) for case, result in rows])
        for name, rows in by_series.items()
    ]


def lines_chart(
    title: str,
    x_name: str,
    lines: Sequence[Line],
    form: str,
    *,
    ceiling: float | None = None,
    powers: bool = False,
) -> str:
    """Lines over one scale that begins at 0; `form` writes its figures. With `powers` the other
    scale is of powers of ten."""
    xs = sorted({x for line in lines for x, _ in line.points})
    top = ceiling or 1.1 * max(y for line in lines for _, y in line.points)
    scaled = math.log10 if powers else float
    first, last = scaled(xs[0]), scaled(xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (scaled(x) - first) / ((last - first) or 1.0)
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1 - y / top)

    marks = [10.0**n for n in range(math.ceil(first), int(last) + 1)] if powers else xs
    parts = [text(40, 44, title, 18, INK, weight="bold")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        _, y = place(xs[0], share * top)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="{GRID}"/>')
        parts.append(text(_LEFT - 8, y + 4, form.format(share * top), 12, QUIET, "end"))
    for mark in marks:
        x, y = place(mark, 0)
        parts.append(text(x, y + 20, f"{mark:g}", 12, QUIET, "middle"))
    parts.append(text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 42, x_name, 13, QUIET, "middle"))
    for number, line in enumerate(lines):
        parts += _line(line, number, place)
    return svg(980, _TOP + _HEIGHT + 60, parts)


def _line(
    line: Line, number: int, place: Callable[[float, float], tuple[float, float]]
) -> Iterator[str]:
    colour = LINE_COLOURS[number % len(LINE_COLOURS)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
    top = _TOP + 22 * number
    yield _box(_LEFT + _WIDTH + 14, top - 5, 14, 5, colour)
    yield text(_LEFT + _WIDTH + 34, top, line.name, 12, INK)


def _box(left: float, top: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"/>'
    )
