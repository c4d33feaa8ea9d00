"""What moves between servers, and what they receive: small cases in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.memory import FleetMemory
from kvpool.server.eviction.lru import LRU
from kvpool.tools.dry_pool import DryPool
from kvpool.types import ROOT
from tests.conftest import NAMESPACE, key
from tests.fleet.test_fleet import run
from tests.support.dry_pools import check_pool

#: A block is 100 bytes.
_BYTES = 100.0
CONSTANTS = Constants().changed(
    {
        "pool_load_bytes_s": 100.0,
        "local_load_bytes_s": 1e6,
        "save_bytes_s": 1000.0,
        "server_link_bytes_s": 400.0,
        "first_byte_s": 0.0,
    }
)


def chain(name: str, blocks: int = 8) -> list[bytes]:
    return [key(f"{name}{n}") for n in range(blocks)]


class Bench:
    """`servers` of `each` blocks, an engine on the host of each."""

    def __init__(self, servers: int = 3, each: int = 64) -> None:
        self.events = EventQueue()
        self.pool = DryPool(servers, servers * each, lambda size: LRU())
        self.memory = FleetMemory(
            [self.pool], servers, self.events, CONSTANTS, _BYTES, shared=True, direct=True
        )

    def blocks(self) -> list[int]:
        return [one.store.stored for one in self.pool.servers.values()]

    def load_s(self, engine: int, blocks: list[bytes]) -> float:
        began, ends = self.events.now, []
        self.memory.start_load(
            engine,
            NAMESPACE,
            blocks,
            lambda load: ends.append((self.events.now, self.memory.stop_load(load))),
        )
        self.events.run()
        ((ended, size),) = ends
        assert size == len(blocks) * _BYTES
        return ended - began


def test_a_chain_that_was_spread_is_read_on_every_host() -> None:
    bench = Bench()
    shared = chain("shared")
    bench.memory.save(0, NAMESPACE, shared, None, 0.0)
    assert sorted(bench.blocks()) == [0, 0, 8]
    reader = bench.blocks().index(0)
    assert bench.load_s(reader, shared) == pytest.approx(8.0)  # over its link
    bench.memory.spread(0, NAMESPACE, shared)
    bench.events.run()
    assert bench.blocks() == [8, 8, 8]
    assert bench.memory.spread_bytes == 2 * 800
    assert bench.load_s(reader, shared) < 0.01
    check_pool(bench.pool)
    bench.memory.spread(1, NAMESPACE, shared)  # again: nothing moves
    bench.events.run()
    assert bench.memory.spread_bytes == 2 * 800


def test_what_is_spread_takes_the_links_of_both_servers() -> None:
    """800 bytes at 400 a second; the holder feeds both others at once, so each has half of it."""
    bench = Bench()
    shared = chain("shared")
    bench.memory.save(0, NAMESPACE, shared, None, 0.0)
    bench.memory.spread(0, NAMESPACE, shared)
    bench.events.run()
    seconds = bench.events.now
    # The rate that a server fetches at is a quarter of what it measures, after the first piece.
    assert seconds > 2 * 800 / 400
    alone = Bench(servers=2)
    alone.memory.save(0, NAMESPACE, shared, None, 0.0)
    alone.memory.spread(0, NAMESPACE, shared)
    alone.events.run()
    assert 800 / 400 < alone.events.now < seconds


def test_a_receiver_waits_while_its_link_has_something_else() -> None:
    bench = Bench(servers=2)
    shared = chain("shared")
    bench.memory.save(0, NAMESPACE, shared, None, 0.0)
    bench.memory.save(1, NAMESPACE, chain("other", 40), None, 0.0)  # ten seconds of the other link
    assert sorted(bench.blocks()) == [8, 40]
    bench.memory.spread(0, NAMESPACE, shared)
    bench.events.run()
    assert sorted(bench.blocks()) == [8, 48]
    assert bench.events.now > 10 + 800 / 400


@pytest.mark.parametrize("lost_at", [0.1, 0.3])  # it receives; it waits for its budget
def test_a_receiver_that_is_lost_holds_nobody_up(lost_at: float) -> None:
    """It would feed others, which turn to somebody else."""
    bench = Bench(servers=5)
    shared = chain("shared")
    bench.memory.save(0, NAMESPACE, shared, None, 0.0)
    lost = bench.blocks().index(0)
    bench.memory.spread(0, NAMESPACE, shared)
    bench.events.at(lost_at, bench.memory.lose_server, lost)
    bench.events.run()
    assert bench.blocks() == [8] * 4
    check_pool(bench.pool)


def test_extra_copies_make_no_room_for_themselves_among_what_is_used_later() -> None:
    bench = Bench(servers=2, each=8)
    shared = chain("shared")
    bench.memory.save(0, NAMESPACE, shared, None, 0.0)
    bench.memory.save(0, NAMESPACE, chain("newer"), None, 5.0)
    assert bench.blocks() == [8, 8]
    bench.memory.spread(0, NAMESPACE, shared)
    bench.events.run()
    assert bench.pool.match(chain("newer"), NAMESPACE).length == 8
    assert bench.pool.match(shared, NAMESPACE).length == 8


def test_a_servers_link_holds_up_engines_that_write_to_it_together() -> None:
    """800 bytes leave an engine in 0.8 s; one server receives 400 bytes a second."""
    bench = Bench(servers=1)
    ends = [bench.memory.save_ends_at(0, NAMESPACE, chain("a"), 0.0)]
    bench.events.at(0.8, bench.memory.save, 0, NAMESPACE, chain("a"), None, 0.8)
    bench.events.run()
    ends.append(bench.memory.save_ends_at(0, NAMESPACE, chain("b"), 0.8))
    assert ends == [pytest.approx(0.8), pytest.approx(2.0 + 0.8)]


def test_a_server_that_is_drained_leaves_when_others_have_its_blocks() -> None:
    bench = Bench(each=256)
    chains = [chain(name, 20) for name in "abcdef"]
    for number, one in enumerate(chains):
        bench.memory.save(number % 3, NAMESPACE, one, None, 0.0)
    before = bench.blocks()
    drained = before.index(max(before))
    bench.memory.drain_server(drained, 1000.0)
    bench.memory.save(drained, NAMESPACE, late := chain("late"), None, 0.0)  # on another server
    assert bench.blocks()[drained] == before[drained]
    bench.events.run()
    assert len(bench.pool.servers) == 2
    assert sum(bench.blocks()) == 6 * 20 + len(late)
    assert bench.memory.drained_bytes == before[drained] * _BYTES
    for one in chains:
        (holder,) = bench.pool.holders(NAMESPACE, one[-1])
        entries = (bench.pool.servers[holder].store.peek(NAMESPACE, 0, digest) for digest in one)
        assert [entry and entry.parent for entry in entries] == [ROOT, *one[:-1]]
    # The links of both servers have 400 bytes a second.
    assert before[drained] * _BYTES / 400 < bench.events.now
    assert all(bench.pool.match(one, NAMESPACE).length == len(one) for one in [*chains, late])
    check_pool(bench.pool)


def test_a_drain_ends_in_its_time_with_what_nobody_had_room_for() -> None:
    """Two servers of 8 blocks, both full: what is as new as theirs stays, and is lost."""
    bench = Bench(servers=2, each=8)
    chains = [chain("a"), chain("b")]
    for one in chains:
        bench.memory.save(0, NAMESPACE, one, None, 0.0)
    assert bench.blocks() == [8, 8]
    bench.memory.drain_server(1, 30.0)
    at_29_s: list[int] = []
    bench.events.at(29.0, lambda: at_29_s.append(len(bench.pool.servers)))
    bench.events.run()
    assert at_29_s == [2]
    assert bench.blocks() == [8]
    assert sum(bench.pool.match(one, NAMESPACE).length for one in chains) == 8


def test_a_receiver_of_a_drain_that_is_lost_is_replaced() -> None:
    """What it had taken goes to another server, too."""
    bench = Bench(servers=4)
    chains = [chain(name, 16) for name in "abcd"]
    for number, one in enumerate(chains):
        bench.memory.save(number, NAMESPACE, one, None, 0.0)
    drained = bench.blocks().index(max(bench.blocks()))
    kept = [
        one for one in chains if bench.pool.holders(NAMESPACE, one[0]) == {f"server-{drained:03}"}
    ]
    bench.memory.drain_server(drained, 1000.0)
    (first, *_) = kept
    lost: list[str] = []

    def lose() -> None:
        """As soon as it has some."""
        lost.extend(bench.pool.holders(NAMESPACE, first[0]) - {f"server-{drained:03}"})
        if lost:
            bench.memory.lose_server(int(lost[0][-3:]))
        else:
            bench.events.after(0.5, lose)

    lose()
    bench.events.run()
    assert len(lost) == 1
    assert len(bench.pool.servers) == 2
    assert all(bench.pool.match(one, NAMESPACE).length == 16 for one in kept)
    check_pool(bench.pool)


def test_a_fleet_spreads_contexts_before_children_read_them() -> None:
    few = {"load": "fan-out", "gpus": 24, "sessions": 3, "concurrent": 2, "block": 2048}
    base = {**few, "router": "least-loaded", "direct": True}
    without, spread = run(**base), run(**base, spread=True)
    assert spread.hit_rate == pytest.approx(without.hit_rate, abs=0.03)
    assert spread.first_token.p50 < without.first_token.p50
