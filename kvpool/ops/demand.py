"""Is the memory enough? The live working set against the memory of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from rich.markup import escape
from rich.table import Table

from kvpool.tenant_names import tenant_of
from kvpool.types import Demand, Member
from kvpool.units import human

#: Memory in live working sets: with less than the first prompts miss what they could hit; with the
#: second any policy hits nearly all.
SCARCE: Final = 1.0
ENOUGH: Final = 1.25
#: Before so many seconds of observation a session may not have come back once.
OBSERVED_S: Final = 120.0
_ROWS_MAX: Final = 8


def labelled_tenant(name: str) -> str:
    """The tenant of a namespace: the one with a secret whose it is, or that which an engine has
    written into the name, `... tenant=NAME ...`; empty if it has none."""
    if tenant := tenant_of(name):
        return tenant
    pairs = (word.partition("=") for word in name.split(" "))
    return next((value for field, _, value in pairs if field == "tenant"), "")


def memory_of(members: Iterable[Member]) -> int:
    """Bytes of the living servers' memory."""
    return sum(member.capacity for member in members if member.alive)


def judged(demand: Demand, memory: int) -> tuple[str, str]:
    """Verdict and sentence: ok, warn, or fail when there is too little memory for what is live."""
    size = demand.size
    if not size or not memory:
        return "ok", "no prompt has come back yet: nothing is known of the live working set"
    ratio = memory / size
    text = f"{human(memory)} of memory, {ratio:.2f} times the live working set of {human(size)}"
    by_tenant: Counter[str] = Counter()
    for one in demand.working_sets:
        by_tenant[labelled_tenant(one.namespace.name)] += one.size
    if len(by_tenant) > 1:
        tenant, most = by_tenant.most_common(1)[0]
        text += f" ({most / size:.0%} of it: {f'tenant {tenant}' if tenant else 'no tenant'})"
    if demand.seconds < OBSERVED_S:
        return "ok", f"{text}, after {demand.seconds:.0f} s only"
    if ratio < ENOUGH:
        return "warn", f"{text}: expect {'many ' if ratio < SCARCE else ''}misses; 1.25 is enough"
    return "ok", text


def demand_table(demand: Demand, members: Iterable[Member]) -> Table:
    """The live working sets of the largest namespaces, and the memory that there is for them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("live working set of", overflow="fold")
    for name in ("tenant", "bytes", "blocks"):
        table.add_column(name, justify="right")
    for one in demand.working_sets[:_ROWS_MAX]:
        table.add_row(
            escape(one.namespace.name),
            escape(labelled_tenant(one.namespace.name)) or "-",
            human(one.size),
            f"{one.blocks:,}",
        )
    rest = demand.working_sets[_ROWS_MAX:]
    if rest:
        size, blocks = sum(one.size for one in rest), sum(one.blocks for one in rest)
        table.add_row(f"{len(rest)} others", "-", human(size), f"{blocks:,}")
    verdict, text = judged(demand, memory_of(members))
    table.caption = escape(
        f"{text}. A prompt is read from {demand.chain_servers:.1f} servers; "
        f"{demand.beyond_hole:.1%} of the blocks lie behind a missing one."
    )
    table.caption_style = "yellow" if verdict == "warn" else ""
    table.caption_justify = "left"
    return table
