"""Is the memory enough? The live working set against the memory of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvpool.client.room import OBSERVED_S, labelled_tenant, room_of
from kvpool.types import Demand, Member
from kvpool.units import human

#: Memory in live working sets: with less than the first prompts miss what they could hit; with the
#: second any policy hits nearly all.
SCARCE: Final = 1.0
ENOUGH: Final = 1.25
_ROWS_MAX: Final = 8
#: Above it the ratio says no more than that there is far more memory than is used.
_RATIO_MAX: Final = 100


def memory_of(members: Iterable[Member]) -> int:
    """Bytes that living servers hold: their memory, or a larger tier below it."""
    return sum(member.capacity for member in members if member.alive)


def judged(demand: Demand, memory: int) -> tuple[str, str]:
    """Verdict and sentence: ok, warn, or fail when there is too little memory for what is live."""
    size = demand.size
    if not size:
        return "ok", "no prompt has come back yet: nothing is known of the live working set"
    if not memory:
        return "ok", f"no server is up, and the live working set is {human(size)}"
    if demand.seconds < OBSERVED_S:
        return "ok", (
            f"{human(memory)} of capacity; the live working set is known after {OBSERVED_S:.0f} s, "
            f"and clients have asked for {demand.seconds:.0f} s"
        )
    ratio = memory / size
    times = f"{ratio:.2f}" if ratio <= _RATIO_MAX else f"more than {_RATIO_MAX}"
    text = f"{human(memory)} of capacity, {times} times the live working set of {human(size)}"
    by_tenant: Counter[str] = Counter()
    for one in demand.working_sets:
        by_tenant[labelled_tenant(one.namespace.name)] += one.size
    if len(by_tenant) > 1:
        tenant, most = by_tenant.most_common(1)[0]
        text += f" ({most / size:.0%} of it: {f'tenant {tenant}' if tenant else 'no tenant'})"
    if ratio < ENOUGH:
        return "warn", f"{text}: expect {'many ' if ratio < SCARCE else ''}misses; 1.25 is enough"
    return "ok", text


def demand_table(demand: Demand) -> Table:
    """The live working sets of the largest namespaces."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("live working set of", overflow="fold")
    for name in ("tenant", "bytes", "blocks"):
        table.add_column(name, justify="right")
    asked_again = [one for one in demand.working_sets if one.blocks]
    for one in asked_again[:_ROWS_MAX]:
        table.add_row(
            escape(one.namespace.name),
            escape(labelled_tenant(one.namespace.name)) or "-",
            human(one.size),
            f"{one.blocks:,}",
        )
    rest = asked_again[_ROWS_MAX:]
    if rest:
        size, blocks = sum(one.size for one in rest), sum(one.blocks for one in rest)
        table.add_row(f"{len(rest)} others", "-", human(size), f"{blocks:,}")
    return table


def demand_text(demand: Demand, members: Iterable[Member]) -> Text:
    """Whether there is memory enough for them, and how prompts lie on the servers."""
    members = list(members)
    verdict, text = judged(demand, memory_of(members))
    room = room_of(demand, members)
    if room.more is not None:
        text += f". {room.more:,} more sessions fit, of {human(room.prompt)} each"
        if room.share is not None and room.share < SCARCE:
            text += f"; who admits by room serves {room.share:.0%} of the live ones, others wait"
    if demand.chain_servers:  # a tenant is not told
        text += (
            f". A prompt is read from {demand.chain_servers:.1f} servers; "
            f"{demand.beyond_hole:.1%} of the blocks lie behind a missing one"
        )
    return Text(f"{text}.", "yellow" if verdict == "warn" else "")
