"""A master's cost is measured, and what follows from it is arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.master_costs import Cost, MasterCosts, measured
from benchmarks.fleet.master_load import MasterLoad, large_pools, levers, of_instance
from benchmarks.fleet.options import FleetOptions

COSTS = MasterCosts(
    blocks=1_000,
    find=Cost(10e-6, 1e-6),
    find_again=Cost(10e-6, 0.1e-6),
    place=Cost(20e-6, 0.0),
    stored=Cost(5e-6, 2e-6),
    removed=Cost(5e-6, 3e-6),
    heartbeat=5e-6,
    socket=50e-6,
    bytes=150,
)
#: 100 lookups of 1,000 blocks, as many placements of 10 new ones.
LOAD = MasterLoad(100, 1_000, 100, 1_000, 10, 4)


def test_a_masters_share_is_messages_times_their_cost() -> None:
    assert LOAD.lookups_s(COSTS) == pytest.approx(100 * (60 + 99 + 10) * 1e-6 + 100 * 70e-6)
    assert LOAD.announcements_s(COSTS) == pytest.approx(100 * (110e-6 + 50e-6) + 4 * 55e-6)
    assert LOAD.times(3).share(COSTS) == pytest.approx(3 * LOAD.share(COSTS))
    # Servers tell every master, clients ask one.
    assert LOAD.share(COSTS, 2) == pytest.approx(
        LOAD.lookups_s(COSTS) / 2 + LOAD.announcements_s(COSTS)
    )


def test_more_masters_do_not_help_against_announcements() -> None:
    assert LOAD.masters(COSTS) == 1
    assert LOAD.times(40).masters(COSTS) == math.ceil(40 * 0.0239 / (0.7 - 40 * 0.01622))
    assert LOAD.times(50).masters(COSTS) is None
    assert replace(LOAD, batch=100).times(50).masters(COSTS) is not None


def test_each_lever_relieves_a_master() -> None:
    one, *others, together = levers(LOAD, COSTS)
    assert all(lever.saturated_gpus > one.saturated_gpus for lever in others)
    assert together.saturated_gpus > max(lever.saturated_gpus for lever in others)
    share = LOAD.times(one.saturated_gpus / 12).share(COSTS)
    assert share == pytest.approx(0.7)
    largest = list(large_pools(COSTS))[-1]
    assert (largest.servers, largest.blocks, largest.writes_s) == (128, 64e6, 200e3)
    assert largest.memory == 64e6 * 150


def test_the_messages_of_an_instance_are_those_of_its_prompts() -> None:
    result = Fleet(FleetOptions(sessions=12, concurrent=6, block=4096)).run()
    load = of_instance(result)
    assert load.finds == pytest.approx(result.prompts / result.seconds)
    asked = result.tokens_s / 64
    assert load.finds * load.found == pytest.approx(asked)
    assert load.stored == pytest.approx(asked * (1 - result.hit_rate), rel=0.01)


async def test_a_real_master_is_measured() -> None:
    costs = await measured(1 << 16, lookups=50)
    for cost in (costs.find, costs.find_again, costs.place, costs.stored, costs.removed):
        assert 0 < cost.of(256) < 0.1
    assert costs.stored.block > 0
    assert 0 < costs.heartbeat < 0.01
    assert 0 <= costs.socket < 0.1
