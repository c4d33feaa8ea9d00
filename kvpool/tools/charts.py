"""Measurements as pictures: one SVG each, written by hand, readable in any browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from kvpool.tools.policy_study import MIN, Study
from kvpool.tools.replay_report import ReplayReport, quantiles
from kvpool.units import human

_WIDTH, _HEIGHT = 960, 560
INK, QUIET, GRID = "#1b2733", "#62707d", "#e3e8ed"
LINE_COLOURS = ("#9db4c7", "#d98c5f", "#12805c", "#7a5aa8", "#c2a83e", "#b0457b", "#3d7fb5")
_POOL, _OTHER, _WEAK = "#12805c", "#9db4c7", "#d98c5f"


class Bar(NamedTuple):
    """A median with the lowest and the highest measurement, in one unit."""

    median: float
    low: float
    high: float


class BarGroup(NamedTuple):
    """Bars that stand side by side over one label, by the name of what was measured."""

    label: str
    bars: Mapping[str, Bar]


def draw(report: ReplayReport) -> str:
    """The picture: hit rates as bars, the hit rate over time, and the headline figures."""
    parts = [
        text(40, 48, "kvpool", 26, INK, weight="bold"),
        text(140, 48, report.name, 16, QUIET),
        *_bars(report),
        *_line(report),
        *_figures(report),
    ]
    return svg(_WIDTH, _HEIGHT, parts)


def curves(study: Study) -> str:
    """A dry replay: hit rate over capacity, a line for each policy."""
    parts = [
        text(60, 36, "blocks found, by capacity in blocks", 18, INK, weight="bold"),
        text(60, 58, study.name, 13, QUIET),
        *_panel(study, 60, 80, 430, 350),
    ]
    return svg(640, 480, parts)


def grouped_bars(title: str, subtitle: str, groups: Sequence[BarGroup]) -> str:
    """Groups of bars from left to right, each with a line from the lowest to the highest.

    A name has one colour in all groups. The scale begins at 0. Raises ValueError without a bar.
    """
    names = list(dict.fromkeys(name for group in groups for name in group.bars))
    colours = dict(zip(names, (_OTHER, _POOL, _WEAK, *LINE_COLOURS), strict=False))
    ceiling = _round_up(max(bar.high for group in groups for bar in group.bars.values()))
    left, top, width, height = 70, 120, _WIDTH - 110, 330
    parts = [
        text(40, 40, title, 20, INK, weight="bold"),
        text(40, 64, subtitle, 13, QUIET),
    ]
    for number, name in enumerate(names):
        key = left + 200 * number
        parts += [
            f'<rect x="{key}" y="84" width="14" height="14" fill="{colours[name]}"/>',
            text(key + 20, 96, name, 13, INK),
        ]
    for step in range(5):
        y = top + height * (1 - step / 4)
        parts += [
            f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="{GRID}"/>',
            text(left - 8, y + 4, f"{ceiling * step / 4:g}", 12, QUIET, "end"),
        ]
    room = width / len(groups)
    thick = min(36.0, room * 0.8 / max(len(group.bars) for group in groups))
    for place, group in enumerate(groups):
        middle = left + room * (place + 0.5)
        parts.append(text(middle, top + height + 24, group.label, 13, INK, "middle"))
        for number, (name, bar) in enumerate(group.bars.items()):
            x = middle + thick * (number - len(group.bars) / 2)
            tall, low, high = (height * value / ceiling for value in bar)
            parts += [
                f'<rect x="{x:.1f}" y="{top + height - tall:.1f}" width="{thick - 2:.1f}" '
                f'height="{tall:.1f}" fill="{colours[name]}"/>',
                f'<line x1="{x + thick / 2 - 1:.1f}" x2="{x + thick / 2 - 1:.1f}" '
                f'y1="{top + height - low:.1f}" y2="{top + height - high:.1f}" stroke="{INK}"/>',
                text(
                    x + thick / 2 - 1,
                    top + height - high - 6,
                    f"{bar.median:.2g}" if bar.median < 100 else f"{bar.median:.0f}",
                    11,
                    QUIET,
                    "middle",
                ),
            ]
    return svg(_WIDTH, _HEIGHT, parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 or 10 times a power of ten; at least something."""
    unit = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(unit * step for step in (1, 2, 4, 6, 8, 10) if value <= unit * step)


def _panel(study: Study, left: int, top: int, width: int, height: int) -> list[str]:
    capacities = sorted({row.capacity for row in study.rows})
    low, high = math.log(capacities[0]), math.log(capacities[-1])
    highest = max(row.hit_rate for row in study.rows) or 1.0
    ceiling = math.ceil(highest * 10) / 10

    def x(capacity: int) -> float:
        return left + width * ((math.log(capacity) - low) / (high - low) if high > low else 0.5)

    parts = []
    for step in range(5):
        y = top + height * (1 - step / 4)
        parts += [
            f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="{GRID}"/>',
            text(left - 6, y + 4, f"{ceiling * step / 4:.0%}", 11, QUIET, "end"),
        ]
    for capacity in capacities:
        parts.append(text(x(capacity), top + height + 18, f"{capacity:,}", 11, QUIET, "middle"))
    policies = list(dict.fromkeys(row.policy for row in study.rows))
    lines = {
        policy: [
            (x(capacity), top + height * (1 - study.rate(policy, capacity) / ceiling))
            for capacity in capacities
        ]
        for policy in policies
    }
    for number, (policy, points) in enumerate(lines.items()):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)] if policy != MIN else INK
        dashes = ' stroke-dasharray="6 4"' if policy == MIN else ""
        # Where lines lie on each other they are nested, the first one widest: none hides another.
        after = [lines[later] for later in policies[number + 1 :]]
        for place, (a, b) in enumerate(points):
            beside = sum(_same(points, one, place, place) for one in after)
            parts.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{3 + 1.5 * beside:g}" fill="{colour}"/>'
            )
            if place:
                above = sum(_same(points, one, place - 1, place) for one in after)
                (c, d), wide = points[place - 1], 2.2 + 3 * above
                parts.append(
                    f'<line x1="{c:.1f}" y1="{d:.1f}" x2="{a:.1f}" y2="{b:.1f}" '
                    f'stroke="{colour}" stroke-width="{wide:.1f}"{dashes}/>'
                )
        key = top + 20 + 20 * number
        parts.append(
            f'<rect x="{left + width + 16}" y="{key - 6}" width="14" height="4" fill="{colour}"/>'
        )
        parts.append(text(left + width + 36, key, policy, 12, colour))
    return parts


def _same(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], first: int, last: int
) -> bool:
    """The two lines lie on each other between these points, as far as can be seen."""
    return all(abs(one[n][1] - other[n][1]) < 2 for n in (first, last))


def _bars(report: ReplayReport) -> list[str]:
    rows = [
        ("the pool", report.hit_rate, _POOL),
        ("same policy, offline", report.offline_policy, _OTHER),
        (f"{report.clients} isolated caches, same memory", report.offline_isolated, _WEAK),
        ("ideal, memory without end", report.offline_ideal, _OTHER),
    ]
    parts = [text(40, 96, "blocks found in the cache", 14, QUIET)]
    for number, (label, rate, colour) in enumerate(rows):
        top = 112 + 42 * number
        parts += [
            text(40, top + 20, label, 15, INK),
            f'<rect x="300" y="{top}" width="520" height="28" rx="3" fill="{GRID}"/>',
            f'<rect x="300" y="{top}" width="{520 * rate:.1f}" height="28" rx="3" '
            f'fill="{colour}"/>',
            text(832, top + 20, f"{rate:.1%}", 16, INK, weight="bold"),
        ]
    return parts


def _line(report: ReplayReport) -> list[str]:
    left, top, width, height = 40, 320, 540, 190
    parts = [text(left, top - 14, "hit rate so far, over time", 14, QUIET)]
    for percent in (0, 50, 100):
        y = top + height * (1 - percent / 100)
        parts += [
            f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="{GRID}"/>',
            text(left + width + 8, y + 4, f"{percent} %", 12, QUIET),
        ]
    if len(report.timeline) > 1:
        end = report.timeline[-1][0] or 1.0
        points = " ".join(
            f"{left + width * seconds / end:.1f},{top + height * (1 - rate):.1f}"
            for seconds, rate in report.timeline
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_POOL}" stroke-width="2.5"/>'
        )
        parts.append(text(left + width, top + height + 20, f"{end:.0f} s", 12, QUIET, "end"))
    return parts


def _figures(report: ReplayReport) -> list[str]:
    read = sum(path.read_bytes for path in report.transports.values())
    rates = [
        f"{name} {human(path.read_bytes / max(path.read_s, 1e-9))}/s"
        for name, path in report.transports.items()
    ]
    figures = [
        ("wrong bytes", f"{report.wrong_bytes:,}"),
        ("bytes read and checked", human(read)),
        ("read speed", ", ".join(rates)),
        ("match p50 / p99", "{:.2f} / {:.2f} ms".format(*_milli(report.match_s))),
        ("read p50 / p99", "{:.2f} / {:.2f} ms".format(*_milli(report.read_s))),
        ("requests", f"{report.requests:,} in {report.seconds:.0f} s"),
    ]
    parts = []
    for number, (label, figure) in enumerate(figures):
        y = 318 + 36 * number
        parts += [
            text(660, y, label, 12, QUIET),
            text(660, y + 17, figure, 15, INK, weight="bold"),
        ]
    return parts


def _milli(values: list[float]) -> tuple[float, float]:
    p50, p99 = quantiles(values)
    return p50 * 1e3, p99 * 1e3


def text(
    x: float,
    y: float,
    text: str,
    size: int,
    colour: str,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    """Text at this place; `anchor` is start, middle or end."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """A picture of this size on white."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>",
        ]
    )
