"""What the policies of servers infer from their blocks, and how often it was right, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from rich.markup import escape
from rich.table import Table

from kvpool.types import Member

_PREFIX: Final = "inferred_"
#: Heading, and how it is read from the figures. A policy without conversations has none of them.
_COUNTS: Final = {
    "conversations": "programs",
    "returning": "returning_programs",
    "dead": "dead_programs",
    "returning blocks": "returning_blocks",
    "dead blocks": "dead_blocks",
    "shared blocks": "shared_blocks",
}


def inferred_of(counters: Mapping[str, int]) -> Counter[str]:
    """The figures of one server, without their prefix."""
    return Counter(
        {name[len(_PREFIX) :]: n for name, n in counters.items() if name.startswith(_PREFIX)}
    )


def inferred_sum(members: Iterable[Member]) -> Counter[str]:
    """The same of all servers that are up."""
    found: Counter[str] = Counter()
    for member in members:
        if member.alive:
            found.update(inferred_of(member.stats.counters))
    return found


def right(figures: Mapping[str, int], what: str) -> str:
    """How often it was right that something was expected to be `what`: returning, or dead."""
    came, left, asked = (figures.get(f"{what}_{end}", 0) for end in ("came", "left", "asked"))
    total, back = came + left, came + min(asked, left)
    if not total:
        return "-"
    return f"{(back if what == 'returning' else total - back) / total:.0%} of {total:,}"


def inferred_line(figures: Mapping[str, int]) -> str:
    """In one line; empty if nothing is inferred."""
    if not figures:
        return ""
    parts = [f"{figures.get('programs', 0):,} conversations"] if "programs" in figures else []
    for what in ("returning", "dead"):
        text = f"{what} {figures.get(f'{what}_blocks', 0):,} blocks"
        rate = right(figures, what)
        parts.append(text if rate == "-" else f"{text} (right {rate})")
    if "shared_blocks" in figures:
        parts.append(f"shared {figures['shared_blocks']:,}")
    return ", ".join(parts)


def inferred_table(members: Iterable[Member]) -> Table | None:
    """A line for each server whose policy infers something, and their sum; None: nothing is."""
    rows = {
        one.server: figures
        for one in sorted(members)
        if one.alive and (figures := inferred_of(one.stats.counters))
    }
    if not any(any(figures.values()) for figures in rows.values()):
        return None
    cells = {escape(server): _cells(figures) for server, figures in rows.items()}
    if len(rows) > 1:
        total: Counter[str] = Counter()
        for figures in rows.values():
            total.update(figures)
        cells[f"{len(rows)} servers"] = _cells(total)
    names = (*_COUNTS, "returning, right", "dead, right")
    known = [n for n in range(len(names)) if any(row[n] != "-" for row in cells.values())]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("inferred by")
    for n in known:
        table.add_column(names[n], justify="right")
    for server, row in cells.items():
        table.add_row(server, *(row[n] for n in known))
    return table


def _cells(figures: Mapping[str, int]) -> list[str]:
    counts = [f"{figures[name]:,}" if name in figures else "-" for name in _COUNTS.values()]
    return [*counts, right(figures, "returning"), right(figures, "dead")]
