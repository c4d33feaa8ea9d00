"""Disks below servers, and where blocks are put: small cases in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.memory import FleetMemory
from benchmarks.fleet.options import Scope
from kvpool.server.eviction.lru import LRU
from kvpool.server.state.entry import Entry
from kvpool.tools.dry_pool import DryPool, Placing
from tests.conftest import NAMESPACE, key
from tests.fleet.test_fleet import run
from tests.support.dry_pools import check_pool

#: A block is 100 bytes; a disk reads two blocks a second and writes one.
_BYTES = 100.0
CONSTANTS = Constants().changed(
    {
        "pool_load_bytes_s": 1e6,
        "local_load_bytes_s": 1e5,
        "disk_read_bytes_s": 200.0,
        "disk_write_bytes_s": 100.0,
        "disk_first_byte_s": 0.0,
        "first_byte_s": 0.0,
    }
)


def chain(name: str, blocks: int = 4) -> list[bytes]:
    return [key(f"{name}{n}") for n in range(blocks)]


class Bench:
    """One server of `memory` and `disk` blocks, and one engine."""

    def __init__(
        self,
        memory: int = 4,
        disk: int = 128,
        *,
        write_back: bool = False,
        turns: bool = False,
        constants: Constants = CONSTANTS,
    ) -> None:
        self.events = EventQueue()
        self.pool = DryPool(1, memory, lambda size: LRU(), disk=disk, write_back=write_back)
        self.memory = FleetMemory(
            *([self.pool], 1, self.events, constants, _BYTES),
            **{"shared": True, "disk_turns": turns},
        )

    def save(self, blocks: Sequence[bytes]) -> None:
        self.memory.save(0, NAMESPACE, blocks, None, self.events.now)

    def load(self, blocks: Sequence[bytes]) -> tuple[float, float]:
        """Seconds, and bytes that came."""
        began, ends = self.events.now, []
        self.memory.start_load(
            0,
            NAMESPACE,
            blocks,
            lambda load: ends.append((self.events.now - began, self.memory.stop_load(load))),
        )
        self.events.run()
        (end,) = ends
        return end

    def held(self, blocks: Sequence[bytes]) -> int:
        return self.pool.match(blocks, NAMESPACE).length


def test_a_block_that_left_memory_is_read_at_the_disks_rate() -> None:
    bench = Bench()
    first, second = chain("first"), chain("second")
    for blocks in (first, second):
        bench.save(blocks)
        bench.events.run()
    assert bench.memory.moved_bytes().disk_written == 800
    assert bench.held(first) == bench.held(second) == 4
    assert bench.load(second) == (pytest.approx(0.0004), 400)
    assert bench.memory.moved_bytes().disk_read == 0
    seconds, size = bench.load(first)
    assert (seconds, size) == (pytest.approx(2.0, abs=0.01), 400)
    assert bench.load(first)[0] < 0.01  # it came up
    assert bench.memory.moved_bytes()[:2] == (1200, 400)
    assert bench.memory.moved_bytes().disk_written == 800  # its copy below is still good
    check_pool(bench.pool)


@pytest.mark.parametrize(("turns", "seconds"), [(False, 2.0), (True, 4.0 + 2.0)])
def test_a_disk_that_works_in_turns_reads_after_what_is_written(
    turns: bool, seconds: float
) -> None:
    """Four blocks are on their way down, one a second, when four others are asked for."""
    bench = Bench(memory=8, turns=turns)
    first = chain("first")
    for blocks in (first, chain("second"), chain("third")):
        bench.save(blocks)
        bench.events.run()
    bench.save(chain("fourth"))
    assert bench.load(first) == (pytest.approx(seconds, abs=0.01), 400)
    assert bench.memory.moved_bytes()[1:] == (400, 1600)
    check_pool(bench.pool)


def test_the_policy_is_that_of_the_disk_as_in_a_server() -> None:
    asked: list[int] = []

    def policy(size: int) -> LRU[Entry]:
        asked.append(size)
        return LRU()

    pool = DryPool(1, 4, policy, disk=64)
    assert asked == [next(iter(pool.servers.values())).store.backing.allocator.capacity]


def test_a_chain_longer_than_memory_comes_through_it_piece_by_piece() -> None:
    bench = Bench(memory=8)
    long = chain("long", 24)
    for last in (8, 16, 24):
        bench.save(long[:last])
        bench.events.run()
    assert bench.held(long) == 24
    seconds, size = bench.load(long)
    assert size == 2400
    assert seconds == pytest.approx(12.0, rel=0.2)
    check_pool(bench.pool)


def test_writers_wait_for_the_disk_when_memory_is_full_of_what_it_must_get() -> None:
    bench = Bench()
    first, second = chain("first"), chain("second")
    bench.save(first)
    bench.save(second)
    seen: dict[float, int] = {}
    for at in (0.5, 3.5, 4.5):
        bench.events.at(at, lambda at=at: seen.setdefault(at, bench.held(second)))
    bench.events.run()
    assert seen[0.5] == 0
    assert seen[4.5] == 4  # first's four blocks took four seconds
    assert bench.held(first) == 4
    given_up = Bench()
    given_up.save(chain("many", 4))
    for number in range(4):
        given_up.save(chain(f"more{number}"))
    given_up.events.run()
    assert given_up.events.now < 60
    assert given_up.held(chain("more3")) < 4  # no longer than for a link: 5 s
    check_pool(given_up.pool)


def test_write_back_loses_with_a_server_what_is_not_down_yet() -> None:
    blocks = chain("some", 5)
    for write_back, left in ((True, 0), (False, 5)):
        bench = Bench(memory=8, write_back=write_back)
        bench.save(blocks)
        bench.events.run()
        assert bench.memory.moved_bytes().disk_written == (0 if write_back else 500)
        bench.memory.restart_server(0)
        assert bench.held(blocks) == left
        if left:
            assert bench.load(blocks) == (pytest.approx(2.5, abs=0.01), 500)
        check_pool(bench.pool)


def test_a_server_that_dies_takes_its_transfers_with_it() -> None:
    bench = Bench()
    bench.save(chain("first"))
    bench.events.at(1.5, bench.memory.restart_server, 0)
    bench.events.run()
    # Batches are whole: none of it was down, and nothing comes down later.
    assert bench.held(chain("first")) == 0
    bench.save(chain("second"))
    bench.events.run()
    check_pool(bench.pool)
    bench.save(chain("third"))
    bench.events.run()
    ends: list[tuple[float, float]] = []
    load = bench.memory.start_load(
        0,
        NAMESPACE,
        chain("second"),
        lambda one: ends.append((bench.events.now, bench.memory.stop_load(one))),
    )
    began = bench.events.now
    bench.events.at(began + 1.2, bench.memory.lose_server, 0)
    bench.events.run()
    ((at, size),) = ends
    assert at - began == pytest.approx(1.2, abs=0.6)
    assert size < 400
    assert not load.running


def test_a_fleet_with_little_memory_lives_on_its_disks() -> None:
    scarce = {"gpus": 12, "memory_tokens": 150_000, "sessions": 20, "concurrent": 15}
    alone = run(**scarce)
    below = run(disk_tokens=1_300_000, **scarce)
    assert below.hit_rate > alone.hit_rate + 0.3
    assert below.disk_read_bytes > 5e11
    assert alone.disk_read_bytes == alone.disk_written_bytes == 0
    slow = {"disk_read_bytes_s": 1e8, "disk_write_bytes_s": 1e8}
    slower = run(disk_tokens=1_300_000, constants=slow, **scarce)
    without = run(scope=Scope.NONE, **scarce)
    assert slower.tokens_s > 0.96 * without.tokens_s  # computing is faster, and chosen


# --- placements --------------------------------------------------------------------------


def placed(placing: Placing) -> tuple[DryPool, list[bytes]]:
    pool = DryPool(4, 400, lambda size: LRU(), placing=placing)
    blocks = chain("chain", 40)
    for last in (20, 40):
        pool.store(blocks[:last], pool.match(blocks, NAMESPACE), "host-002", None, 0.0, NAMESPACE)
    assert pool.match(blocks, NAMESPACE).length == 40
    return pool, blocks


def test_blocks_lie_where_the_placing_says() -> None:
    def stored(pool: DryPool) -> list[int]:
        return [server.store.stored for server in pool.servers.values()]

    pool, _ = placed(Placing.CHAINS)
    assert sorted(stored(pool)) == [0, 0, 0, 40]
    pool, _ = placed(Placing.NEAR)
    assert stored(pool) == [0, 0, 40, 0]
    pool, blocks = placed(Placing.STRIPED)
    assert all(4 <= count <= 18 for count in stored(pool))
    pool.lose("server-001")
    assert pool.match(blocks, NAMESPACE).length < 20
    pool.store(blocks, pool.match(blocks, NAMESPACE), "host-000", None, 1.0, NAMESPACE)
    assert pool.match(blocks, NAMESPACE).length == 40
    check_pool(pool)


def test_near_the_writer_falls_back_when_its_host_is_lost() -> None:
    pool, blocks = placed(Placing.NEAR)
    pool.lose("server-002")
    pool.store(blocks, pool.match(blocks, NAMESPACE), "host-002", None, 1.0, NAMESPACE)
    assert pool.match(blocks, NAMESPACE).length == 40


@pytest.mark.parametrize(("direct", "seconds"), [(False, 0.0004), (True, 0.004)])
def test_an_engine_may_read_its_own_host_without_a_link(direct: bool, seconds: float) -> None:
    events = EventQueue()
    pool = DryPool(2, 64, lambda size: LRU(), placing=Placing.NEAR)
    memory = FleetMemory([pool], 2, events, CONSTANTS, _BYTES, shared=True, direct=direct)
    memory.save(0, NAMESPACE, chain("some"), None, 0.0)
    ends: list[float] = []

    def load(engine: int) -> None:
        memory.start_load(engine, NAMESPACE, chain("some"), lambda load: ends.append(events.now))

    load(1)
    events.run()
    assert ends.pop() == pytest.approx(0.0004)
    began = events.now
    load(0)
    events.run()
    assert ends.pop() - began == pytest.approx(seconds)  # here the host's memory is the slower one
