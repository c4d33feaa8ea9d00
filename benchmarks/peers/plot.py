"""The result as a chart. matplotlib is an extra; without it no chart is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.report import Results

_COLOURS = {
    "kvpool": "#12805c",
    "kvpool-tcp": "#7cc2a8",
    "mooncake": "#d98c5f",
    "mooncake-shm": "#f0c3a5",
    "mooncake-scaled": "#c47b9a",
    "mooncake-tuned": "#b0653a",
    "redis": "#62707d",
    "lmcache": "#5b6fb5",
}
_INK, _GRID = "#1b2733", "#e3e8ed"

Whats = dict[str, dict[str, dict[str, Any]]]


def draw(found: Results, path: Path) -> bool:
    """Write an SVG; False without matplotlib, or when there is nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    parts = found.parts()
    panels = [panel for panel in _PANELS if any(map(panel[5], parts.get(panel[1], ())))]
    if not panels:
        return False
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 3.6 * lines), squeeze=False, layout="constrained"
    )
    explained: set[str] = set()  # systems whose colour a legend has named
    for axis, (title, part, figure_name, unit, factor, keep) in zip(
        axes.flat, panels, strict=False
    ):
        whats = {what: rows for what, rows in parts[part].items() if keep(what)}
        _bars(axis, whats, figure_name, factor, explained)
        axis.set_title(title, fontsize=11, color=_INK, loc="left")
        axis.set_ylabel(unit, color=_INK)
        if figure_name in ("read", "write") and part == "reads":
            limit = max(run["limits"]["memcpy"] for run in found.runs.values())
            axis.axhline(limit, color=_INK, linewidth=0.8, linestyle=":")
            axis.annotate("memcpy, one thread", (0, limit), fontsize=7, color=_INK, va="bottom")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _bars(axis: Any, whats: Whats, figure: str, factor: float, explained: set[str]) -> None:
    """Groups of bars: one group for each task, one bar for each system."""
    found = {name for systems in whats.values() for name in systems}
    names = [name for name in _COLOURS if name in found]
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        values = [systems.get(name, {}).get(figure) for systems in whats.values()]
        numbers = [v * factor if isinstance(v, int | float) else 0.0 for v in values]
        at = [group - 0.4 + width * (place + 0.5) for group in range(len(whats))]
        axis.bar(at, numbers, width, label=name, color=_COLOURS[name])
    axis.set_xticks(range(len(whats)), [_short(what) for what in whats], fontsize=8)
    axis.grid(axis="y", color=_GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if not found <= explained:
        axis.legend(fontsize=7, frameon=False)
        explained |= found


def _short(what: str) -> str:
    return what.removesuffix(" x 64").replace(", 4 clients", "").replace(" x 64", "")


def _of_64(what: str) -> bool:
    return what.endswith(" x 64")


def _all(what: str) -> bool:
    return True


def _owner(what: str) -> bool:
    return what.startswith("owner")


_Panel = tuple[str, str, str, str, float, Callable[[str], bool]]
_PANELS: Sequence[_Panel] = (
    ("read, batches of 64", "reads", "read", "GB/s", 1.0, _of_64),
    ("write, batches of 64", "reads", "write", "GB/s", 1.0, _of_64),
    ("CPU for a read, batches of 64", "reads", "read_cpu", "s/GB", 1.0, _of_64),
    ("read of one block, median", "singles", "read_p50", "ms", 1e3, _all),
    ("match, median", "match", "p50", "ms", 1e3, _all),
    ("read, four clients", "clients", "read", "GB/s", 1.0, _all),
    ("agentic replay, p50 of a turn's read", "replay", "turn_p50", "ms", 1e3, _all),
    ("memory beside a block's bytes", "memory", "bytes_per_block", "bytes", 1.0, _all),
    ("longest read after an owner is lost", "failures", "longest_read", "s", 1.0, _owner),
)
