"""Bars, sparklines and durations for a terminal, in plain ASCII where it has nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

_SPARKS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_SPARKS: Final = " .:-=+*#@"
#: Shares from which on a bar has another colour.
_NEARLY_FULL: Final = 0.9


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """`width` characters, of which this share is full. Anything above nothing is seen."""
    share = min(1.0, max(0.0, share))
    full = min(width, max(round(share * width), 1 if share else 0))
    filled, empty = ("#", ".") if ascii_only else ("█", "░")
    return filled * full + empty * (width - full)


def sparkline(
    values: Sequence[float | None],
    width: int,
    *,
    top: float | None = None,
    ascii_only: bool = False,
) -> str:
    """The last `width` values, the latest on the right; a space where there is none.

    `top` is the value of a full column, by default the largest one that is shown.
    """
    shown = list(values)[-width:] if width > 0 else []
    full = top or max((value for value in shown if value is not None), default=0.0)
    sparks = _ASCII_SPARKS if ascii_only else _SPARKS
    return "".join(_sparks(shown, full, sparks)).rjust(max(0, width))


def _sparks(values: Iterable[float | None], full: float, sparks: str) -> Iterable[str]:
    for value in values:
        if value is None:
            yield " "
        elif full <= 0:
            yield sparks[1]
        else:  # zero has the lowest one: it was measured
            share = min(1.0, max(0.0, value / full))
            yield sparks[1 + round(share * (len(sparks) - 2))]


def age(seconds: float) -> str:
    """A duration for people: `12 s`, `3 min`, `2 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def colour_of(share: float) -> str:
    """Of a bar that shows how full something is. Full is normal for a pool: no alarm."""
    return "cyan" if share < _NEARLY_FULL else "blue"


class FillBar:
    """A bar in a table, in the characters of its console."""

    def __init__(self, share: float, width: int = 10) -> None:
        self._share = share
        self._width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.drawn(options)

    def drawn(self, options: ConsoleOptions) -> Text:
        """The bar itself, in the characters that there are."""
        drawn = bar(self._share, self._width, ascii_only=options.ascii_only)
        return Text(drawn, colour_of(self._share), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self._width, self._width)
