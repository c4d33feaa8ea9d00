"""The tables of `python -m benchmarks.fleet masters`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from rich.table import Table

from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.master_costs import Cost, MasterCosts, measured
from benchmarks.fleet.master_load import SIZES, MasterLoad, large_pools, levers, of_instance
from benchmarks.fleet.options import FleetOptions

#: Blocks in the map while costs are measured.
_BLOCKS: Final = 1_000_000


def masters_report(base: FleetOptions, blocks: int = _BLOCKS) -> tuple[list[Table], dict[str, Any]]:
    """As tables and for programs. The costs are measured now, so two runs differ."""
    costs = asyncio.run(measured(blocks))
    instance = of_instance(Fleet(replace(base, planner="always")).run())
    document = {
        "costs": asdict(costs),
        "instance": asdict(instance),
        "levers": [one._asdict() for one in levers(instance, costs)],
        "pools": [one._asdict() for one in large_pools(costs)],
    }
    return [_costs(costs), _levers(instance, costs), _pools(costs)], document


def _table(title: str, columns: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left")
    return shown


def _costs(costs: MasterCosts) -> Table:
    title = f"one master's CPU, measured with {costs.blocks:,} blocks in its map"
    shown = _table(title, ("message", "us", "us for each block"))
    for name in ("find", "find_again", "place", "stored", "removed"):
        cost: Cost = getattr(costs, name)
        label = name.replace("_", " ")
        shown.add_row(label, f"{cost.message * 1e6:.1f}", f"{cost.block * 1e6:.3f}")
    shown.add_row("heartbeat", f"{costs.heartbeat * 1e6:.1f}", "")
    shown.add_row("its socket, besides", f"{costs.socket * 1e6:.1f}", "")
    shown.add_row("memory", "", f"{costs.bytes:.0f} bytes")
    return shown


def _levers(instance: MasterLoad, costs: MasterCosts) -> Table:
    title = (
        f"share of one core; an instance of 12 GPUs has {instance.finds:.2f} prompts/s of "
        f"{instance.found:.0f} blocks, of which {instance.batch:.0f} are new"
    )
    sizes = [f"{gpus:,} GPUs" for gpus in SIZES]
    shown = _table(title, ("", *sizes, "70 % of a core at"))
    for lever in levers(instance, costs):
        shares = [f"{share:.1%}" for share in lever.shares]
        shown.add_row(lever.name, *shares, f"{lever.saturated_gpus:,.0f} GPUs")
    return shown


def _pools(costs: MasterCosts) -> Table:
    columns = (
        *("servers of 1 TiB", "blocks", "written/s", "matches/s", "blocks/announcement"),
        *("cores: lookups", "announcements", "masters", "memory of each"),
    )
    shown = _table("large pools; a match asks for 2,048 blocks", columns)
    for pool in large_pools(costs):
        shown.add_row(
            *(f"{pool.servers}", f"{pool.blocks / 1e6:.0f} M", f"{pool.writes_s:,.0f}"),
            *(f"{pool.matches_s:,.0f}", f"{pool.batch}", f"{pool.lookups:.1f}"),
            *(f"{pool.announcements:.2f}", f"{pool.masters or 'no number'}"),
            f"{pool.memory / 1e9:.1f} GB",
        )
    return shown
