"""What engines on several hosts would load of a chain, for routers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpool import BadKey, Closed, HostScore, MasterLost, Member, Namespace, UsageError, admin, dev
from kvpool.client.attempts import PRIOR_FAR_RATE, PRIOR_NEAR_RATE, ReadRates
from kvpool.client.load_estimate import LoadEstimate
from kvpool.config import ClientConfig
from kvpool.protocols.network import Caller
from kvpool.runtime import Host, this_host
from kvpool.server.block_server import BlockServer
from kvpool.types import Replica, ServerStats, TierUsage
from kvpool.wire import messages as wire
from tests.conftest import NAMESPACE, buffers, eventually, keys, value, values

CHAIN = keys("scored", 8)
RATES = ReadRates()


@pytest.fixture
async def hosts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dev.Dev]:
    """Servers dev-0, dev-1 and dev-2 on the hosts host-0, host-1 and host-2."""

    def on_its_host(config: Any, **others: Any) -> BlockServer:
        host = config.id.replace("dev", "host")
        return BlockServer(config, host=Host(host, host, host, lambda: 0), **others)

    monkeypatch.setattr(dev, "BlockServer", on_its_host)
    async with dev.serve("16MiB", servers=3, listen=("tcp://127.0.0.1:0",)) as running:
        yield running


def tcp(running: dev.Dev) -> ClientConfig:
    return ClientConfig(masters=[running.address], transports=["tcp"])


async def test_each_host_has_its_own_near_blocks_and_the_rest_is_far(hosts: dev.Dev) -> None:
    async with hosts.pool(tcp(hosts)) as pool:
        for number, server in enumerate(["dev-0", "dev-0", "dev-0", "dev-0", "dev-1", "dev-1"]):
            await admin(pool).write_to(server, NAMESPACE, CHAIN[number], value(CHAIN[number]))
        await admin(pool).write_to("dev-2", NAMESPACE, CHAIN[7], value(CHAIN[7]))  # behind a hole
        await eventually(lambda: all(one.blocks for one in stats(hosts)))
        names = ["host-0", "host-1", "host-2", "no such host"]
        scores = await pool.score(NAMESPACE, CHAIN, names)
        assert [(one.host, one.near, one.far) for one in scores] == [
            ("host-0", 4, 2),
            ("host-1", 2, 4),
            ("host-2", 0, 6),
            ("no such host", 0, 6),
        ]
        assert (scores[0].near_tiers, scores[0].far_tiers) == ({"dram": 4}, {"dram": 2})
        assert {one.size for one in scores} == {6 * 8192}
        assert scores[0].seconds < scores[1].seconds < scores[2].seconds == scores[3].seconds
        assert not scores[0].measured
        # A copy on each host: then everything is near for all who have it.
        for digest in CHAIN[:4]:
            await admin(pool).write_to("dev-1", NAMESPACE, digest, value(digest))
        (second,) = await pool.score(NAMESPACE, CHAIN, ["host-1"], block_bytes=1_000_000)
        assert (second.near, second.far, second.size) == (6, 0, 6_000_000)


def stats(running: dev.Dev) -> list[TierUsage]:
    """Of each server, as the master knows it."""
    members = running.master._members(wire.Members(), Caller()).members
    listed = [info.stats.usage for info in members]
    return [usage[0] if usage else TierUsage("dram") for usage in listed]


async def test_one_question_for_all_hosts_and_no_demand(
    hosts: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    demand: list[object] = []
    async with hosts.pool(tcp(hosts)) as pool:
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        ask = pool._context.masters.ask

        async def counted(message: wire.Message, *rest: Any, **others: Any) -> Any:
            asked.append(type(message).__name__)
            return await ask(message, *rest, **others)

        monkeypatch.setattr(pool._context.masters, "ask", counted)
        monkeypatch.setattr(
            hosts.master.clients._demand, "asked_chain", lambda *of: demand.append(of)
        )
        for _ in range(3):
            await pool.score(NAMESPACE, CHAIN, [f"host-{number}" for number in range(1000)])
    assert asked.count("Find") == 3
    assert asked.count("Members") == 1
    assert not demand


async def test_rates_are_those_of_this_clients_own_reads(pool_dev: dev.Dev) -> None:
    chain = keys("large", 4)
    here = this_host().id
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain, values(chain, 1 << 20))
        (before,) = await pool.score(NAMESPACE, chain, [here], block_bytes=1 << 20)
        assert (before.near, before.measured) == (4, False)
        assert before.seconds == (4 << 20) / PRIOR_NEAR_RATE
        began = time.perf_counter()
        await pool.read(NAMESPACE, chain, buffers(4, 1 << 20))
        took = time.perf_counter() - began
        (after,) = await pool.score(NAMESPACE, chain, [here], block_bytes=1 << 20)
        assert after.measured
        assert 0 < after.seconds <= took
        (elsewhere,) = await pool.score(NAMESPACE, chain, ["elsewhere"], block_bytes=1 << 20)
        assert (elsewhere.far, elsewhere.measured) == (4, False)
        # A small read, and one that is no whole hit, say nothing of the rate.
        await pool.read(NAMESPACE, chain[:1], buffers(1, 1 << 20))
        small = keys("small", 2)
        await pool.write(NAMESPACE, small, values(small))
        kept = pool._extensions.get("score")._rates.rate(True)
        await pool.read(NAMESPACE, small, buffers(2))
        assert pool._extensions.get("score")._rates.rate(True) == kept


def member(server: str, host: str, *usage: TierUsage) -> tuple[str, Member]:
    known = ServerStats(usage=list(usage))
    return server, Member(server, 1, host, (), (), True, 0.0, 0, known)


#: Blocks of 1 MiB in both tiers; the disk was read at 2 GB/s.
MEMBERS = dict(
    member(
        f"{host}{number}",
        host,
        TierUsage("dram", used=10 << 20, blocks=10),
        TierUsage("nvme", used=10 << 20, blocks=10, read_bytes=4 * 10**9, read_s=2.0),
    )
    for host in "ab"
    for number in (1, 2)
)


@pytest.mark.parametrize(
    ("replicas", "near", "tiers", "seconds"),
    [
        ([Replica("a1", "dram")], 1, {"dram": 1}, 2**20 / PRIOR_NEAR_RATE),
        ([Replica("b1", "dram")], 0, {"dram": 1}, 2**20 / PRIOR_FAR_RATE),
        ([Replica("a1", "nvme")], 1, {"nvme": 1}, 2**20 / PRIOR_NEAR_RATE + 2**20 / 2e9),
        ([Replica("b1", "nvme")], 0, {"nvme": 1}, 2**20 / PRIOR_FAR_RATE + 2**20 / 2e9),
        ([Replica("b1", "nvme"), Replica("b2", "dram")], 0, {"dram": 1}, 2**20 / PRIOR_FAR_RATE),
        ([Replica("b1", "dram"), Replica("a2", "dram")], 1, {"dram": 1}, 2**20 / PRIOR_NEAR_RATE),
        ([Replica("stranger", "dram")], 0, {"dram": 1}, 2**20 / PRIOR_FAR_RATE),
    ],
)
def test_a_block_is_read_where_a_reader_would_read_it(
    replicas: list[Replica], near: int, tiers: dict[str, int], seconds: float
) -> None:
    estimate = LoadEstimate(1, MEMBERS)
    estimate.add(replicas, 1)
    score = estimate.score("a", RATES, None)
    assert (score.near, score.far) == (near, 1 - near)
    assert (score.near_tiers if near else score.far_tiers) == tiers
    assert score.seconds == pytest.approx(seconds)


def test_a_block_is_near_when_all_of_its_parts_are() -> None:
    estimate = LoadEstimate(2, MEMBERS)
    estimate.add([Replica("a1", "dram", 0), Replica("a2", "dram", 1)], 3)
    estimate.add([Replica("a1", "dram", 0), Replica("b2", "nvme", 1)], 2)
    estimate.add([Replica("a1", "dram", 0)], 1)  # no block: the other part is missing
    here, there = (estimate.score(host, RATES, None) for host in "ab")
    assert (here.near, here.far, here.far_tiers) == (3, 2, {"nvme": 2})
    assert (there.near, there.far, there.far_tiers) == (0, 5, {"dram": 3, "nvme": 2})
    assert here.size == 5 * 2 << 20


def test_a_server_that_has_reported_no_block_yet_counts_with_the_mean_of_all() -> None:
    fresh = dict([member("new", "a", TierUsage("dram"))])
    estimate = LoadEstimate(1, {**MEMBERS, **fresh})
    estimate.add([Replica("new", "dram")], 2)
    assert estimate.score("a", RATES, None).size == 2 << 20
    alone = LoadEstimate(1, fresh)
    alone.add([Replica("new", "dram")], 2)
    score = alone.score("a", RATES, None)
    assert (score.near, score.size, score.measured) == (2, 0, False)


async def test_wrong_calls(pool_dev: dev.Dev) -> None:
    async with pool_dev.pool() as pool:
        for chain in ([], [b"short"], [CHAIN[0], CHAIN[1][:16]]):
            with pytest.raises(BadKey):
                await pool.score(NAMESPACE, chain, ["a"])
        wrong: list[Any] = [[], "host", [""], [5], ["a"] * 1025]
        for hosts in wrong:
            with pytest.raises(UsageError):
                await pool.score(NAMESPACE, CHAIN, hosts)
        for size in (0, -1, 1 << 40):
            with pytest.raises(UsageError):
                await pool.score(NAMESPACE, CHAIN, ["a"], block_bytes=size)
        empty = HostScore("a", 0, 0, {}, {}, 0, 0.0, False)
        assert await pool.score(Namespace("nothing"), CHAIN, ["a"]) == [empty]
        await pool_dev.master.close()
        with pytest.raises(MasterLost):
            await pool.score(NAMESPACE, CHAIN, ["a"], timeout=0.5)
    with pytest.raises(Closed):
        await pool.score(NAMESPACE, CHAIN, ["a"])
