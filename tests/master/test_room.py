"""How many sessions fit: what a pool says, to whom, and what it does not say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvpool import Namespace, Pool, admin, dev
from kvpool.client.room import OBSERVED_S, Room, TenantRoom, room_of
from kvpool.master.state.demand import DemandMeter
from kvpool.ops.demand import demand_text
from kvpool.ops.metrics import pages_of_master
from kvpool.spans import MarkedChain
from kvpool.types import Demand, Member, ServerStats, TierUsage, WorkingSet
from kvpool_transports.tcp import TcpTransport
from tests.conftest import NAMESPACE, keys, values
from tests.support.tenant_pool import tenant, tenant_pool

GIB = 1 << 30


def server(capacity: int = 10 * GIB, *tiers: TierUsage, alive: bool = True) -> Member:
    stats = ServerStats(usage=list(tiers))
    return Member("s", 1, "h", (), (), alive, 0.0, capacity, stats)


def demand(*sets: tuple[str, int, int], seconds: float = 600.0) -> Demand:
    found = tuple(WorkingSet(Namespace(name), size, 10, prompt) for name, size, prompt in sets)
    return Demand(seconds, found, 1.0, 0.0)


def test_what_is_free_divided_by_the_mean_prompt() -> None:
    room = room_of(demand(("m", 6 * GIB, GIB)), [server(), server(), server(alive=False)])
    assert room == Room(20 * GIB, 6 * GIB, GIB, 20 / 6, 14, (TenantRoom("", 6 * GIB, GIB, 14),))
    full = room_of(demand(("m", 40 * GIB, GIB)), [server(), server()])
    assert (full.share, full.more) == (0.5, 0)


@pytest.mark.parametrize(
    ("asked", "members"),
    [
        (demand(("m", GIB, GIB), seconds=OBSERVED_S - 1), [server()]),
        (demand(), [server()]),  # no data yet
        (demand(("m", GIB, GIB)), []),
        (demand(("m", GIB, GIB)), [server(alive=False)]),
    ],
)
def test_without_figures_nothing_is_said(asked: Demand, members: list[Member]) -> None:
    room = room_of(asked, members)
    assert (room.share, room.more) == (None, None)
    assert "sessions fit" not in demand_text(asked, members).plain


def test_a_master_that_tells_no_prompts_leaves_the_number_open() -> None:
    room = room_of(demand(("m", 20 * GIB, 0)), [server()])
    assert (room.share, room.prompt, room.more) == (0.5, 0, None)


def test_a_disk_holds_what_memory_does_not_unless_it_is_lost() -> None:
    disk = TierUsage("nvme", capacity=100 * GIB)
    lost = TierUsage("nvme", capacity=100 * GIB, lost=True)
    asked = demand(("m", 20 * GIB, GIB))
    assert room_of(asked, [server(10 * GIB, disk)]).share == 5.0
    assert room_of(asked, [server(10 * GIB, lost)]).share == 0.5


def test_each_tenant_s_own_prompts_count() -> None:
    asked = demand(("@a/m", GIB, GIB), ("@a/n", GIB, 3 * GIB), ("m tenant=b x", 4 * GIB, GIB))
    room = room_of(asked, [server()])
    assert room.tenants == (TenantRoom("b", 4 * GIB, GIB, 4), TenantRoom("a", 2 * GIB, 2 * GIB, 2))
    assert room.prompt == (GIB + 3 * GIB + 4 * GIB) // 6


def test_a_master_measures_the_mean_prompt_of_the_last_minutes() -> None:
    meter = DemandMeter()

    def ask(blocks: int, now: float, behind: int = 0) -> None:
        chain = MarkedChain(16, b"".join(one[:16] for one in keys("p", blocks)))
        meter.asked_chain(NAMESPACE, chain, now, list(range(behind)))

    meter.asked(NAMESPACE, keys("p", 5), 0.0, 1000)  # a write: no prompt, but a size
    for second in (0.0, 1.0):
        ask(10, second)
        ask(30, second)
    (found,) = meter.demand(1.0).working_sets
    assert found.prompt == pytest.approx(20 * 1000, rel=0.01)
    for second in range(3000, 3100):
        ask(64, float(second), behind=2)  # chains that are longer than their keys
    (found,) = meter.demand(3100.0).working_sets
    assert found.prompt == pytest.approx((64 + 2 * 32) * 1000, rel=0.02)


async def test_a_pool_says_it_and_an_operator_reads_why_sessions_wait(
    pool: Pool, pool_dev: dev.Dev
) -> None:
    chain = keys("chain", 6)
    await pool.write(NAMESPACE, chain, values(chain, 4096))
    for _ in range(3):
        await pool.match(NAMESPACE, chain)
        await asyncio.sleep(0.05)  # or less than a byte of it is live, in the mean of minutes
    room = await admin(pool).room()
    assert (room.memory, room.prompt, room.share) == (16 << 20, 6 * 4096, None)
    assert "kvpool_master_room_sessions{" not in _page(pool_dev)  # nothing is known yet
    for _, figures in pool_dev.master.clients._demand._figures.values():
        figures.began -= 2 * OBSERVED_S
    later = await admin(pool).room()
    assert later.more == (later.memory - later.working_set) // later.prompt
    assert f'kvpool_master_room_sessions{{tenant=""}} {later.more}' in _page(pool_dev)
    asked = demand(("m", 20 * GIB, GIB))
    text = demand_text(asked, [server()]).plain
    assert "0 more sessions fit, of 1 GiB each; who admits by room serves 50% of the live" in text
    assert "others wait" not in demand_text(asked, [server(30 * GIB)]).plain


def _page(running: dev.Dev) -> str:
    return pages_of_master(running.master)["/metrics"]().body.decode()


async def test_a_tenant_learns_of_its_own_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"listen": ["tcp://127.0.0.1:0"]}
    async with (
        tenant_pool(tmp_path, {"tcp": TcpTransport()}, **options) as running,
        await running.client(tenant("blue")) as blue,
        await running.client(tenant("acme")) as acme,
    ):
        for client, count in ((blue, 4), (acme, 2)):
            chain = keys("chain", count)
            await client.write(NAMESPACE, chain, values(chain))
            for _ in range(3):
                await client.match(NAMESPACE, chain)
        for client, name in ((blue, "blue"), (acme, "acme")):
            room = await admin(client).room()
            assert [one.tenant for one in room.tenants] == [name]
            assert room.working_set == room.tenants[0].working_set
        both = (await admin(blue).room()).prompt, (await admin(acme).room()).prompt
        assert both[0] == 2 * both[1]
