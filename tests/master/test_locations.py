"""Sets of locations: shared by blocks, and gone when no block has them, also where no server ever
restarts."""

from __future__ import annotations

import random

import pytest

from kvpool.master.state import locations
from kvpool.master.state.directory import Directory
from kvpool.master.state.explanations import explain
from kvpool.master.state.server_record import Registration
from kvpool.master.state.sweeper import Sweeper
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace, ReadStatus
from tests.conftest import keys
from tests.support.sweeping import sweep_all

ONE, TWO = Namespace("one"), Namespace("two", 2)
BLOCKS = keys("locations", 60)
SERVERS = [f"s{number}" for number in range(24)]


def fleet() -> Directory:
    directory = Directory()
    own = Registration(1, "h", ("tcp://1",), ("dram", "nvme"), 1 << 40)
    for server in SERVERS:
        directory.servers.register(server, own, 0.0)
    return directory


@pytest.mark.parametrize("seed", range(6))
def test_a_map_in_which_nothing_restarts_keeps_what_it_uses(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks come and go in more combinations of servers than there are blocks. A walk is under
    way nearly always, and blocks change before and behind it."""
    monkeypatch.setattr(locations, "_SLACK", 30)
    rng = random.Random(seed)
    directory = fleet()
    sweeper = Sweeper(directory)
    held: dict[tuple[Namespace, bytes], dict[tuple[str, int], int]] = {}
    largest = 0
    for number in range(6000):
        namespace, digest = rng.choice((ONE, TWO)), rng.choice(BLOCKS)
        part = rng.randrange(namespace.parts)
        places = held.setdefault((namespace, digest), {})
        if len(places) > rng.randrange(5):
            server, part = rng.choice(list(places))
            del places[server, part]
            directory.removed(server, namespace, part, [digest], ReadStatus.EVICTED)
        else:
            server, tier = rng.choice(SERVERS), rng.randrange(2)
            places[server, part] = tier
            directory.stored(server, namespace, part, tier, [digest])
        if rng.random() < 0.1:
            directory.servers.tick(0.0)
        if rng.random() < 0.5:
            sweeper.step(rng.choice((1, 8, 64)))
        largest = max(largest, len(directory.locations))
        if number % 1000 == 0:
            check_invariants(directory)
    check_invariants(directory)
    for (namespace, digest), places in held.items():
        found = explain(directory, namespace, [digest])[0].replicas
        wanted = {(s, part, ("dram", "nvme")[tier]) for (s, part), tier in places.items()}
        assert {(one.server, one.part, one.tier) for one in found} == wanted
    assert largest < 1000, "there were thousands of combinations"


def test_all_sets_go_that_no_block_has() -> None:
    directory = fleet()
    sweeper = Sweeper(directory)
    directory.stored("s0", ONE, 0, 0, BLOCKS)
    for first in SERVERS[1:]:
        for second in SERVERS[1:]:
            for third in SERVERS[1:8]:
                for server in {first, second, third}:
                    directory.stored(server, ONE, 0, 0, BLOCKS[:1])
                for server in {first, second, third}:
                    directory.removed(server, ONE, 0, BLOCKS[:1], ReadStatus.EVICTED)
    before = len(directory.locations)
    directory.servers.tick(0.0)
    steps = 0
    while sweeper.step(64):
        steps += 1
    assert before > 1024
    assert len(directory.locations) == 1
    assert steps > before / 2000, "in small steps"
    assert not sweeper.step(1), "nothing has grown since"
    directory.servers.tick(0.0)
    assert not sweeper.step(1)


def test_what_is_used_is_no_reason_to_walk_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_SLACK", 8)
    directory = fleet()
    sweeper = Sweeper(directory)
    for server, digest in zip(SERVERS, BLOCKS, strict=False):
        directory.stored(server, ONE, 0, 0, [digest])
    directory.servers.tick(0.0)
    sweep_all(directory)
    assert len(directory.locations) == len(SERVERS)
    directory.servers.tick(0.0)
    assert not sweeper.step(1)


def test_a_lost_server_is_forgotten_with_its_sets() -> None:
    directory = fleet()
    directory.stored("s0", ONE, 0, 0, BLOCKS)
    directory.stored("s1", ONE, 0, 0, BLOCKS[:30])
    later = Registration(2, "h", ("tcp://1",), ("dram",), 1 << 40)
    assert directory.servers.register("s1", later, 1.0) is None
    sweep_all(directory)
    check_invariants(directory)
    assert len(directory.locations) == 1
