"""What a pool looks like, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs
from rich.markup import escape
from rich.table import Table

from kvpool.ops.bars import FillBar
from kvpool.ops.server_state import ServerState, state_of
from kvpool.tenant_names import tenant_of
from kvpool.types import Member, Namespace, TierUsage
from kvpool.units import human

#: In this order in the table of servers.
_HINTS = ("accepted", "clipped", "refused")
#: Of the bars that show how full something is, in cells.
_BAR_WIDTH = 8


def members_table(members: list[Member], *, hidden: bool = False) -> Table:
    """The servers of a pool, one line each. Hints: accepted, clipped, refused.

    `hidden`: without the figures, which a tenant does not see.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("server", "state", "tier"):
        table.add_column(name)
    for name in ("capacity",) if hidden else _FIGURES:
        table.add_column(name, justify="right")
    for m in sorted(members):
        names = (escape(m.server), _state(m, hidden), escape(", ".join(m.tiers)))
        table.add_row(*names, human(m.capacity), *(() if hidden else _figures(m)))
    return table


#: The headings of what a server holds and does.
_FIGURES = (
    "capacity",
    "used",
    "",
    "blocks",
    "evicted",
    "pins",
    "clients",
    "victim age",
    "hints",
    "RSS",
)


def _figures(member: Member) -> tuple[str | FillBar, ...]:
    """What stands under them, after the capacity."""
    stats, counters = member.stats, member.stats.counters
    share = stats.used / member.capacity if member.capacity else 0
    return (
        f"{human(stats.used)} ({share:.0%})",
        FillBar(share, _BAR_WIDTH),
        f"{stats.blocks:,}",
        f"{counters.get('evicted_blocks', 0):,}",
        f"{stats.pins:,}",
        f"{counters.get('connections', 0):,}",
        f"{stats.victim_age_s:.0f} s",
        "/".join(str(counters.get(f"hints_{what}", 0)) for what in _HINTS),
        human(stats.rss),
    )


def _state(member: Member, hidden: bool) -> str:
    state, heard_s = state_of(member), member.heard_s
    if state is ServerState.LEFT:
        return f"[yellow]left {heard_s:.0f} s ago[/]"
    if state is ServerState.LOST:
        return f"[red]lost {heard_s:.0f} s[/]"
    if state is ServerState.LATE:
        return f"[yellow]late {heard_s:.0f} s[/]"
    if state is ServerState.LEAVING:
        left = "" if hidden else f", {member.stats.drain_left_blocks:,} left"
        return f"[yellow]leaving{left}[/]"
    return "[green]up[/]"


def clients_table(members: list[Member]) -> Table:
    """The clients that hold memory at the moment, so that servers cannot reuse it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("server", "client", "transport"):
        table.add_column(name)
    for name in ("connections", "pinned", "oldest pin", "reserved", "quarantine"):
        table.add_column(name, justify="right")
    for m in sorted(members):
        for client in m.stats.clients:
            table.add_row(
                escape(m.server),
                escape(client.name),
                escape(client.transport),
                f"{client.connections:,}",
                human(client.pinned_bytes),
                f"{client.oldest_pin_s:.0f} s" if client.pinned_bytes else "-",
                human(client.reserved_bytes),
                human(client.quarantined_bytes),
            )
    return table


def tenants_table(namespaces: Iterable[tuple[Namespace, int]]) -> Table | None:
    """The tenants that have blocks, from `Admin.namespaces`; None if there are none."""
    counts: dict[str, list[int]] = {}
    for namespace, blocks in namespaces:
        counts.setdefault(tenant_of(namespace.name), []).append(blocks)
    if not counts.keys() - {""}:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tenant")
    for name in ("namespaces", "blocks"):
        table.add_column(name, justify="right")
    for tenant, blocks_of in sorted(counts.items()):
        table.add_row(escape(tenant) or "-", f"{len(blocks_of):,}", f"{sum(blocks_of):,}")
    return table


def tiers_table(members: list[Member]) -> Table:
    """The tiers of every server: how full, who serves the reads, what moves.

    A hit is a block that was read, counted where it lay. `down` and `up` are what went into and
    out of a tier lately; the bandwidths are of the seconds in which anything moved.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("server", "tier"):
        table.add_column(name)
    for name in (
        "capacity",
        "used",
        "",
        "blocks",
        "hits",
        "down",
        "up",
        "writes at",
        "reads at",
        "errors",
    ):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for m in sorted(members):
        hits = sum(tier.hits for tier in m.stats.usage)
        for tier in m.stats.usage:
            table.add_row(
                escape(m.server),
                _tier_name(tier),
                human(tier.capacity),
                f"{human(tier.used)} ({tier.used / max(1, tier.capacity):.0%})",
                FillBar(tier.used / max(1, tier.capacity), _BAR_WIDTH),
                f"{tier.blocks:,}",
                f"{tier.hits:,} ({tier.hits / max(1, hits):.0%})",
                f"{human(tier.write_rate)}/s, {tier.write_block_rate:,.0f} blocks/s",
                f"{human(tier.read_rate)}/s",
                _bandwidth(tier.written_bytes, tier.write_s),
                _bandwidth(tier.read_bytes, tier.read_s),
                f"{tier.failures + tier.corrupt:,}",
                escape(tier.status_text)
                + (_yet_to_write(m) + _prefetched(m) if tier is m.stats.usage[-1] else ""),
            )
    return table


def _yet_to_write(member: Member) -> str:
    """What only memory has: kill -9 would lose it."""
    dirty = member.stats.counters.get("dirty_bytes", 0)
    return f", {human(dirty)} yet to be written" if dirty else ""


def _prefetched(member: Member) -> str:
    """What came up from it before a reader asked, and the share that nobody has read."""
    counters = member.stats.counters
    size = counters.get("prefetched_bytes", 0)
    wasted = counters.get("prefetch_wasted_bytes", 0)
    return f", {human(size)} prefetched ({wasted / size:.0%} in vain)" if size else ""


def _tier_name(tier: TierUsage) -> str:
    if tier.lost:
        return f"[red]{escape(tier.name)}, lost[/]"
    if tier.read_only:
        return f"[yellow]{escape(tier.name)}, read-only[/]"
    if tier.files_out:
        return f"[yellow]{escape(tier.name)}, {tier.files_out} out[/]"
    return escape(tier.name)


def problem_of(tier: TierUsage) -> str:
    """What an operator has to look at, as the end of a sentence; empty if nothing is."""
    if tier.lost:
        return "is out of service"
    if tier.read_only:
        return "takes no writes"
    return f"does without {tier.files_out} of its files" if tier.files_out else ""


def _bandwidth(size: int, seconds: float) -> str:
    return f"{human(size / seconds)}/s" if seconds else "-"


def as_json_object(member: Member, *, hidden: bool = False) -> dict[str, Any]:
    """A member for JSON: every figure by the name of its field, beside what masters know.

    `hidden`: without those that a tenant does not see.
    """
    seen = {name: value for name, value in structs.asdict(member).items() if name != "stats"}
    if hidden:
        return {**seen, "draining": member.stats.draining}
    usage = [structs.asdict(tier) for tier in member.stats.usage]
    clients = [structs.asdict(client) for client in member.stats.clients]
    consumers = [structs.asdict(one) for one in member.stats.consumers]
    lists = {"usage": usage, "clients": clients, "consumers": consumers}
    return {**seen, **structs.asdict(member.stats), **lists}
