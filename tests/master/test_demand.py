"""The live working set that a master measures, against the exact figure; what a stranger costs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import pytest

from kvpool import Namespace, Pool, admin, dev
from kvpool.client.room import labelled_tenant
from kvpool.master.state import demand as demand_module
from kvpool.master.state.demand import FOLLOWED_MAX, NAMESPACES_MAX, DemandMeter
from kvpool.ops import doctor
from kvpool.ops.demand import demand_table, demand_text, judged, memory_of
from kvpool.ops.metrics import pages_of_master
from kvpool.spans import MarkedChain
from kvpool.tenant_names import TENANTS_MAX
from kvpool.tools import workloads
from kvpool.tools.traces import Request
from kvpool.types import Demand, ReadStatus, Replica, Run, WorkingSet
from tests.conftest import NAMESPACE, keys, values

SIZE = 4096
ONE = Namespace("one")


def digest(id: int) -> bytes:
    return hashlib.blake2b(id.to_bytes(8, "little"), digest_size=16).digest()


def play(meter: DemandMeter, requests: Sequence[Request], namespace: Namespace = ONE) -> Demand:
    for request in requests:
        meter.asked(namespace, [digest(id) for id in request.chain], request.time_s, SIZE)
    return meter.demand(requests[-1].time_s)


def followed(meter: DemandMeter) -> int:
    return sum(len(sample.asked) for sample in meter._samples.values())


def exact(requests: Sequence[Request], first_s: float, last_s: float) -> float:
    """Blocks that had been asked for and were asked for again later: the mean of that time."""
    before: dict[int, float] = {}
    block_s = 0.0
    for request in requests:
        for id in request.chain:
            since = max(before.get(id, request.time_s), first_s)
            block_s += max(0.0, min(request.time_s, last_s) - since)
            before[id] = request.time_s
    return block_s / (last_s - first_s)


def test_it_is_the_exact_figure_where_traffic_is_steady() -> None:
    """Agents' sessions, of whose blocks a part is followed."""
    requests = workloads.codex(150, 48)
    now = 1400.0
    until = [request for request in requests if request.time_s <= now]
    meter = DemandMeter()
    (found,) = play(meter, until).working_sets
    truth = exact(requests, now - 600.0, now)
    assert len({id for request in until for id in request.chain}) > 3 * followed(meter)
    assert found.size == pytest.approx(truth * SIZE, rel=0.2)
    assert found.blocks == pytest.approx(truth, rel=0.2)


@pytest.mark.parametrize("blocks", [1, 8])
def test_a_span_that_is_followed_stands_for_its_blocks(blocks: int) -> None:
    """The same traffic, as matches: with chains of some 90 blocks, and of some 700."""
    requests = workloads.codex(150, 48)
    now = 1400.0
    until = [request for request in requests if request.time_s <= now]
    meter = DemandMeter()
    for request in until:
        ids = [id * blocks + number for id in request.chain for number in range(blocks)]
        meter.asked(ONE, [], request.time_s, SIZE)  # its blocks are of this size
        packed = b"".join(map(digest, ids))
        meter.asked_chain(ONE, MarkedChain(16, packed), request.time_s)
    (found,) = meter.demand(now).working_sets
    truth = exact(requests, now - 600.0, now) * blocks
    assert found.blocks == pytest.approx(truth, rel=0.2)


def test_following_a_few_blocks_gives_the_figure_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = workloads.codex(60, 48)[:2500]
    few = play(DemandMeter(), requests)
    monkeypatch.setattr(demand_module, "FOLLOWED_MAX", 10**9)
    assert few.size == pytest.approx(play(DemandMeter(), requests).size, rel=0.12)


def test_what_does_not_come_back_needs_no_memory() -> None:
    """A scan, one-shot prompts, and a conversation that has ended."""
    meter = DemandMeter()
    for second in range(2000):
        meter.asked(ONE, [digest(10**6 + 100 * second + n) for n in range(100)], second, SIZE)
    assert meter.demand(2000.0).size == 0
    for second in range(2000, 2600, 10):
        meter.asked(ONE, [digest(n) for n in range(2000)], second, SIZE)
    during = meter.demand(2600.0).size
    assert 500 * SIZE < during < 2300 * SIZE  # the mean fades in
    assert meter.demand(2600.0 + 2400.0).size < during / 40


def test_blocks_that_are_missed_every_time_count() -> None:
    """A cycle of prompts that no memory of half the size ever hits, under LRU."""
    meter = DemandMeter()
    for turn in range(400):
        session = turn % 20
        chain = [digest(100 * session + n) for n in range(50)]
        meter.asked(ONE, chain, turn * 5.0, SIZE)  # the lookup: nothing of it is here
        meter.asked(ONE, chain, turn * 5.0 + 1.0, SIZE)  # it is written again
    assert meter.demand(2000.0).size == pytest.approx(20 * 50 * SIZE, rel=0.1)


def test_namespaces_are_told_apart_and_the_largest_comes_first() -> None:
    meter = DemandMeter()
    for second in range(0, 1200, 10):
        for name, count in (("small", 20), ("large", 60)):
            chain = [digest(n) for n in range(count)]  # the same keys
            meter.asked(Namespace(name), chain, float(second), SIZE)
    sets = meter.demand(1200.0).working_sets
    assert [one.namespace.name for one in sets] == ["large", "small"]
    assert [one.blocks for one in sets] == pytest.approx([60, 20], rel=0.05)


def test_a_stranger_fills_no_memory_and_its_flood_is_forgotten() -> None:
    meter = DemandMeter()
    for number in range(400):
        name = Namespace(f"made up {number}")
        meter.asked(name, [digest(number * 5000 + n) for n in range(5000)], 1.0, 1 << 48)
    assert followed(meter) <= FOLLOWED_MAX
    demand = meter.demand(2.0)
    assert len(demand.working_sets) <= NAMESPACES_MAX
    chain = [digest(n) for n in range(2000)]
    for second in range(0, 20_000, 30):
        meter.asked(ONE, chain, 2.0 + second, SIZE)
    sets = {one.namespace: one for one in meter.demand(20_002.0).working_sets}
    assert sets[ONE].blocks == pytest.approx(2000, rel=0.25)
    assert followed(meter) > 500  # the threshold has come back


def test_a_flood_of_one_tenant_makes_the_figures_of_another_no_coarser() -> None:
    """Two hundred blocks are too few for a sample; all of them are followed, beside any flood."""
    mine, theirs = Namespace("@globex/m"), Namespace("@acme/m")
    meter, alone = DemandMeter(), DemandMeter()
    chain = [digest(n) for n in range(200)]
    for second in range(0, 600, 10):
        meter.asked(mine, chain, float(second), SIZE)
        alone.asked(mine, chain, float(second), SIZE)
        first = 10_000 * (second + 1)
        meter.asked(theirs, [digest(first + n) for n in range(4096)], float(second), SIZE)
    found = {one.namespace: one for one in meter.demand(600.0).working_sets}
    assert found[mine] == alone.demand(600.0).working_sets[0]


def test_of_many_tenants_each_follows_a_part_and_who_is_quiet_none() -> None:
    meter = DemandMeter()
    for tenant in range(20):
        chain = [digest(10_000 * tenant + n) for n in range(4096)]
        meter.asked(Namespace(f"@t{tenant}/m"), chain, 0.0)
    for _ in range(10):  # the first ones gave way to those that came later
        for tenant in range(20):
            meter.asked(Namespace(f"@t{tenant}/m"), [], 1.0)
    assert 20 * 100 < followed(meter) <= FOLLOWED_MAX
    for _ in range(20):
        meter.asked(ONE, [], 4000.0)
    assert len(meter._samples) == 1
    for tenant in range(2000):
        meter.asked(Namespace(f"@made-up-{tenant}/m"), [digest(tenant)], 4000.0)
    assert len(meter._samples) <= TENANTS_MAX


def test_sizes_that_a_writer_makes_up_fit_into_a_message() -> None:
    meter = DemandMeter()
    for second in range(100):
        meter.asked(ONE, keys("a", 1000), float(second), 1 << 60)
    assert meter.demand(100.0).size == 1 << 62


def test_servers_of_a_chain_and_blocks_behind_a_hole() -> None:
    meter = DemandMeter()
    first, second = (Replica("a", "dram"),), (Replica("b", "dram"), Replica("a", "dram"))
    for _ in range(200):
        meter.matched([Run(0, 1, first)])
        meter.matched([Run(0, 1, first), Run(2, 3, second), Run(4, 5, first)])
        meter.matched([])
        meter.looked_beyond(6, 2)
    found = meter.demand(1.0)
    assert found.chain_servers == pytest.approx(1.5, abs=0.01)
    assert found.beyond_hole == pytest.approx(0.25)


def test_the_mean_of_the_last_minutes_is_exact() -> None:
    """A block that is asked for every 100 s is live all the time: the mean of the time seen."""
    meter = DemandMeter()
    size = 1 << 40  # so large that rounding is seen
    for second in (0.0, 100.0, 300.0):
        meter.asked(ONE, [digest(1)], second, size)
    seen = 600 * (1 - math.exp(-0.5))
    waited = 100 * math.exp(-200 / 600) + 200
    assert meter.demand(300.0).size == pytest.approx(waited / seen * size, rel=1e-9)
    later = 600 * (1 - math.exp(-1.0))  # nobody has asked since
    assert meter.demand(600.0).size == pytest.approx(
        waited * math.exp(-0.5) / later * size, rel=1e-9
    )
    assert meter.demand(600.0).seconds == 600.0
    assert DemandMeter().demand(5.0) == Demand(0.0, (), 0.0, 0.0)


def test_the_size_of_a_block_is_what_its_last_writer_said() -> None:
    meter = DemandMeter()
    for second, size in ((0, 100), (1, 0), (2, 300), (3, 0)):
        meter.asked(ONE, [digest(n) for n in range(1000)], float(second), size)
    (found,) = meter.demand(3.0).working_sets
    assert found.size == pytest.approx(300 * found.blocks, rel=0.01)


def test_a_call_has_a_bounded_number_of_steps() -> None:
    meter = DemandMeter()
    meter.asked(ONE, [digest(n) for n in range(5000)], 0.0)
    assert followed(meter) == 4096
    meter.asked(ONE, [], 3599.0)
    assert followed(meter) == 4096
    meter.asked(ONE, [], 3600.0)
    assert followed(meter) == 4096 - 64
    for _ in range(63):
        meter.asked(ONE, [], 3600.0)
    assert followed(meter) == 0


def test_fewer_blocks_are_followed_while_there_are_many_and_more_again_later() -> None:
    meter = DemandMeter()
    chains = [[digest(10_000 * number + n) for n in range(4096)] for number in range(4)]
    for number, chain in enumerate(chains[:3]):
        meter.asked(ONE, chain, float(number))
    assert followed(meter) == pytest.approx(6144, rel=0.05)  # every second of 12,288
    meter.asked(ONE, [], 700.0)
    meter.asked(ONE, chains[3][:2048], 701.0)
    assert followed(meter) == pytest.approx(7168, rel=0.05)  # as long as they are there
    for _ in range(200):
        meter.asked(ONE, [], 5000.0)
    assert followed(meter) == 0
    meter.asked(ONE, chains[0], 5001.0)
    assert followed(meter) == 4096  # all of them


def test_the_namespace_that_was_asked_for_longest_ago_loses_its_figures() -> None:
    meter = DemandMeter()
    for second in (0.0, 10.0):
        for number in range(NAMESPACES_MAX):
            meter.asked(Namespace(str(number)), keys("x", 50), second, SIZE)
    meter.asked(Namespace("0"), keys("x", 50), 11.0, SIZE)
    meter.asked(Namespace("new"), keys("x", 50), 12.0, SIZE)
    meter.asked(Namespace("new"), keys("x", 50), 13.0, SIZE)
    kept = {one.namespace.name for one in meter.demand(14.0).working_sets}
    assert kept == {*map(str, range(NAMESPACES_MAX)), "new"} - {"1"}


# --- what operators see ------------------------------------------------------------------


def of(*sizes: int, seconds: float = 600.0) -> Demand:
    names = ("vllm model=m tenant=a", "vllm model=m tenant=b", "other")
    sets = tuple(
        WorkingSet(Namespace(name), size, 10)
        for name, size in zip(names, sizes, strict=False)
        if size
    )
    return Demand(seconds, sets, 1.0, 0.0)


@pytest.mark.parametrize(
    ("demand", "memory", "verdict", "words"),
    [
        (of(1000), 900, "warn", "0.90 times the live working set of 1000 B: expect many misses"),
        (of(1000), 1100, "warn", "1.10 times the live working set of 1000 B: expect misses; 1.25"),
        (of(1000), 1250, "ok", "1.221 KiB of capacity, 1.25 times"),
        (of(1000, seconds=30.0), 900, "ok", "known after 120 s, and clients have asked for 30 s"),
        (of(1000), 100_000, "ok", "100.00 times"),
        (of(1000), 100_001, "ok", "more than 100 times the live working set of 1000 B"),
        (of(), 900, "ok", "nothing is known"),
        (of(1000), 0, "ok", "no server is up, and the live working set is 1000 B"),
        (of(300, 700), 900, "warn", "(70% of it: tenant b)"),
        (of(300, 0, 700), 900, "warn", "(70% of it: no tenant)"),
    ],
)
def test_the_number_that_decides(demand: Demand, memory: int, verdict: str, words: str) -> None:
    assert judged(demand, memory)[0] == verdict
    assert words in judged(demand, memory)[1]


@pytest.mark.parametrize(
    ("name", "tenant"), [("vllm model=m tenant=a x=1", "a"), ("tenant", ""), ("", ""), ("a=b", "")]
)
def test_the_tenant_of_a_name(name: str, tenant: str) -> None:
    assert labelled_tenant(name) == tenant


async def test_a_pool_says_how_much_is_asked_for(pool: Pool, pool_dev: dev.Dev) -> None:
    chain = keys("chain", 6)
    assert (await admin(pool).demand()).working_sets == ()
    await pool.write(NAMESPACE, chain, values(chain, SIZE))
    for _ in range(24):
        assert (await pool.match(NAMESPACE, chain)).stopped is ReadStatus.HIT
    await pool.remove(NAMESPACE, chain[2:3])
    for _ in range(24):
        assert (await pool.match(NAMESPACE, chain)).length == 2
    demand = await admin(pool).demand()
    (found,) = demand.working_sets
    assert found.namespace == NAMESPACE
    assert 0 < found.size <= 6 * SIZE * 1.01
    assert demand.chain_servers == 1.0
    assert 0.1 < demand.beyond_hole < 0.6  # three of five, since a block of the chain is gone
    members = await pool.members()
    assert demand_table(demand).row_count == 1
    assert "times the live working set" not in demand_text(demand, members).plain  # after seconds
    assert "read from 1.0 servers" in demand_text(demand, members).plain
    of_a_tenant = Demand(600.0, demand.working_sets, 0.0, 0.0)  # means over all are not for it
    assert "servers" not in demand_text(of_a_tenant, members).plain
    assert memory_of(members) == 16 << 20
    page = pages_of_master(pool_dev.master)["/metrics"]().body.decode()
    assert 'kvpool_master_working_set_bytes{namespace="' in page
    assert "kvpool_master_chain_servers 1.0" in page
    memory, chains = await doctor._memory(pool, members)
    assert (memory.check, memory.verdict) == ("memory", "ok")
    assert (chains.check, chains.verdict) == ("chains", "warn")
