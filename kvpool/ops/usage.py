"""Who has what of a pool, and what readers got: the figures of all servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from kvpool.types import OTHERS, Member
from kvpool.units import human

#: What can be asked for: `kvpool usage --by`.
KINDS: Final = ("tenant", "namespace", "program")
#: Lines of a table; `--json` has all.
_ROWS_MAX: Final = 40


@dataclass(slots=True)
class Usage:
    """One consumer, over all living servers. Bytes and blocks; counts since the servers began."""

    name: str
    stored: Counter[str] = field(default_factory=Counter)  # by the name of the tier
    hit_blocks: int = 0
    hit_bytes: int = 0
    missed_blocks: int = 0
    evicted_by: Counter[str] = field(default_factory=Counter)  # by tenant

    @property
    def hit_rate(self) -> float | None:
        """Of the blocks that readers asked servers for; None if there were none."""
        asked = self.hit_blocks + self.missed_blocks
        return self.hit_blocks / asked if asked else None


def usage_by(kind: str, members: Iterable[Member]) -> list[Usage]:
    """The consumers of one kind, those that have most first, what is not listed last.

    A consumer that is among the largest of one server may be among the others of another one: what
    it has there is in the line of the others.
    """
    sums = UsageSums()
    for member in members:
        sums.add(member)
    return sums.of(kind)


class UsageSums:
    """All kinds of consumers at once, server by server: with hundreds of servers it takes a while,
    and who adds them may pause in between."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Usage]] = {kind: {} for kind in KINDS}

    def add(self, member: Member) -> None:
        for one in member.stats.consumers if member.alive else ():
            if (found := self._found.get(one.by)) is None:
                continue
            if (total := found.get(one.name)) is None:
                total = found[one.name] = Usage(one.name)
            total.stored.update(one.tiers)
            total.hit_blocks += one.hit_blocks
            total.hit_bytes += one.hit_bytes
            total.missed_blocks += one.missed_blocks
            total.evicted_by.update(one.evicted_by)

    def of(self, kind: str) -> list[Usage]:
        """Those of one kind, in the order of `usage_by`."""
        return sorted(self._found[kind].values(), key=_order)


def _order(one: Usage) -> tuple[bool, int, int, str]:
    return one.name == OTHERS, -one.stored.total(), -one.hit_bytes, one.name


def usage_table(kind: str, usages: list[Usage]) -> Table:
    """One line for each consumer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(kind)
    tiers = sorted({tier for one in usages for tier in one.stored})
    for name in (*tiers, "hits", "saved", "misses", "hit rate"):
        table.add_column(escape(name), justify="right")
    if kind == "tenant":
        table.add_column("evicted by")
    for one in usages[:_ROWS_MAX]:
        rate = one.hit_rate
        row = [
            escape(one.name) or ("(the pool)" if kind == "tenant" else "-"),
            *(human(one.stored[tier]) for tier in tiers),
            f"{one.hit_blocks:,}",
            human(one.hit_bytes),
            f"{one.missed_blocks:,}",
            "-" if rate is None else f"{rate:.1%}",
        ]
        if kind == "tenant":
            row.append(_evicted(one))
        table.add_row(*row)
    if len(usages) > _ROWS_MAX:
        table.add_row(f"and {len(usages) - _ROWS_MAX} more, see --json")
    return table


def _evicted(usage: Usage) -> str:
    most = usage.evicted_by.most_common(3)
    text = ", ".join(f"{escape(by) or '(the pool)'} {human(size)}" for by, size in most)
    return f"{text}, ..." if len(usage.evicted_by) > len(most) else text or "-"


def as_json_object(usage: Usage) -> dict[str, Any]:
    """For `kvpool usage --json`."""
    return {
        "name": usage.name,
        "used_bytes": dict(usage.stored),
        "hit_blocks": usage.hit_blocks,
        "hit_bytes": usage.hit_bytes,
        "missed_blocks": usage.missed_blocks,
        "evicted_bytes_by_tenant": dict(usage.evicted_by),
    }
