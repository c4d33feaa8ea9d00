"""Lost copies come back and hot blocks get extra ones, while they are read and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool import ClientConfig, Namespace, Pool, dev
from kvpool.config import ServerConfig
from kvpool.server import copy_keeper
from kvpool.server.block_server import BlockServer
from kvpool.server.peer_servers import is_at
from kvpool.server.state import copy_demand
from kvpool.server.state.fetches import FetchBudget
from tests.conftest import NAMESPACE, buffers, eventually, keys, values

CHAIN = keys("chain", 40)
LISTEN = ("inproc://", "tcp://127.0.0.1:0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_keeper, "_ROUND_S", 0.02)
    monkeypatch.setattr(copy_demand, "CHECK_S", 0.1)


@asynccontextmanager
async def cluster(
    servers: int = 4, *, copies_max: int = 3, capacity: str = "8MiB"
) -> AsyncIterator[tuple[dev.Dev, Pool]]:
    async with dev.serve(capacity, servers=servers, listen=LISTEN) as running:
        for server in running.servers:
            server._keeper._copies_max = copies_max
            await server._balancer.close()  # which would make room on a full server
        config = ClientConfig(masters=[running.address], transports=["tcp"], copies_max=1)
        async with running.pool(config) as pool:
            yield running, pool
        for server in running.servers:
            server.stack.check()


async def read(pool: Pool, chain: Sequence[bytes], namespace: Namespace = NAMESPACE) -> None:
    into = buffers(len(chain))
    results = await pool.read(namespace, chain, into)
    assert all(result.status.hit for result in results)
    assert into == values(chain)


async def read_for(pool: Pool, chain: Sequence[bytes], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        await read(pool, chain)
        await asyncio.sleep(0.02)


def holders(running: dev.Dev, digest: bytes) -> list[BlockServer]:
    return [one for one in running.servers if one.stack.peek(NAMESPACE, 0, digest) is not None]


def count(running: dev.Dev, chain: Sequence[bytes]) -> set[int]:
    return {len(holders(running, digest)) for digest in chain}


def counter(running: dev.Dev, name: str) -> int:
    return sum(server._context.counters[name] for server in running.servers)


async def lose(running: dev.Dev, server: BlockServer) -> None:
    await server.close()
    running.servers.remove(server)


async def test_what_is_read_gets_its_copies_back_and_nothing_else() -> None:
    async with cluster(copies_max=1) as (running, pool):
        cold = keys("cold", 40)
        for chain in (CHAIN, cold):
            await pool.write(NAMESPACE, chain, values(chain), copies=2)
        assert count(running, [*CHAIN, *cold]) == {2}
        lost = holders(running, CHAIN[0])[0]
        cold_there = [digest for digest in cold if lost in holders(running, digest)]
        await lose(running, lost)
        assert count(running, CHAIN) == {1}
        await read_for(pool, CHAIN, 1.0)
        assert count(running, CHAIN) == {2}
        assert len({tuple(s.server for s in holders(running, one)) for one in CHAIN}) == 1
        assert counter(running, "repaired_copies") == len(CHAIN)
        assert all(len(holders(running, digest)) == 1 for digest in cold_there)
        assert counter(running, "extra_copies") == 0
        # The new copy is as the lost one: when the other is lost, too, it is copied again.
        await lose(running, holders(running, CHAIN[0])[0])
        await read_for(pool, CHAIN, 1.0)
        assert count(running, CHAIN) == {2}


async def test_over_a_transport_that_fetches_nothing_no_copy_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(copies_max=1) as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN), copies=2)
        await lose(running, holders(running, CHAIN[0])[0])
        (left,) = holders(running, CHAIN[0])
        asked = []

        async def channel(server: str, deadline: float) -> object:
            asked.append(server)
            return object()  # of another package: without `fetch`

        monkeypatch.setattr(left._peers, "channel", channel)
        await read_for(pool, CHAIN, 0.5)
        assert asked
        assert count(running, CHAIN) == {1}
        assert left._keeper._task is None or not left._keeper._task.done(), "it goes on"


async def test_blocks_with_one_copy_are_left_alone() -> None:
    async with cluster(copies_max=1) as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        await read_for(pool, CHAIN, 0.6)
        assert count(running, CHAIN) == {1}
        assert all(len(server._keeper._demand._followed) == 0 for server in running.servers)


async def test_a_repair_keeps_the_budget_of_the_receiver() -> None:
    async with cluster(servers=3, copies_max=1) as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN), copies=2)
        await lose(running, holders(running, CHAIN[0])[0])
        (target,) = [one for one in running.servers if one not in holders(running, CHAIN[0])]
        target._fetcher.budget = FetchBudget(100e3)  # 328 KB take 3.3 s
        loop = asyncio.get_running_loop()
        began = loop.time()
        await read_for(pool, CHAIN, 1.0)
        fetched = target._context.counters["fetched_bytes"]
        assert fetched <= 100e3 * (loop.time() - began) + 64 * 8192
        while count(running, CHAIN) != {2}:
            assert loop.time() < began + 15
            await read_for(pool, CHAIN, 0.2)


async def test_what_other_hosts_read_often_gets_extra_copies_up_to_the_limit() -> None:
    async with cluster(servers=5) as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        (first,) = holders(running, CHAIN[0])
        await read(pool, CHAIN)
        await asyncio.sleep(0.3)
        assert count(running, CHAIN) == {1}  # once is not often
        await read_for(pool, CHAIN, 2.0)
        assert count(running, CHAIN) == {3}
        assert counter(running, "extra_copies") == 2 * len(CHAIN)
        extra = [one for one in holders(running, CHAIN[0]) if one is not first]
        for server in extra:
            assert {server.stack.peek(NAMESPACE, 0, one).copies for one in CHAIN} == {0}  # type: ignore[union-attr]
        assert {first.stack.peek(NAMESPACE, 0, one).copies for one in CHAIN} == {1}  # type: ignore[union-attr]


async def test_reads_on_the_same_host_and_of_servers_are_no_reason() -> None:
    async with dev.serve("8MiB", servers=4, listen=LISTEN) as running, running.pool() as pool:
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        await read_for(pool, CHAIN, 0.5)  # over inproc
        assert count(running, CHAIN) == {1}
        await pool.spread(NAMESPACE, CHAIN, to=4)
        assert counter(running, "extra_copies") == 0


async def test_extra_copies_go_first_and_the_last_one_is_no_extra() -> None:
    async with cluster(servers=2, capacity="1MiB") as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        await pool.spread(NAMESPACE, CHAIN, to=2)
        (first,) = [s for s in running.servers if s.stack.peek(NAMESPACE, 0, CHAIN[0]).copies]  # type: ignore[union-attr]
        (other,) = [server for server in running.servers if server is not first]
        older = keys("older", 20)
        for digest in older:
            await pool.write_to(other.server, NAMESPACE, digest, values([digest])[0])
        await read_for(pool, CHAIN, 0.2)  # used last
        newer = keys("newer", 80)
        for digest in newer:
            await pool.write_to(other.server, NAMESPACE, digest, values([digest])[0])
        assert all(other.stack.peek(NAMESPACE, 0, one) for one in older)
        left = [one for one in CHAIN if other.stack.peek(NAMESPACE, 0, one)]
        assert 0 < len(left) < len(CHAIN)
        assert left == CHAIN[: len(left)]  # tails first
        await lose(running, first)
        await eventually(
            lambda: {other.stack.peek(NAMESPACE, 0, one).copies for one in left} == {1}  # type: ignore[union-attr]
        )
        await read(pool, left)
        for digest in keys("last", 20):
            await pool.write_to(other.server, NAMESPACE, digest, values([digest])[0])
        assert all(other.stack.peek(NAMESPACE, 0, one) for one in left)


async def test_a_removed_block_does_not_come_back_by_a_repair() -> None:
    async with cluster(copies_max=1) as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN), copies=2)
        await lose(running, holders(running, CHAIN[0])[0])
        for server in running.servers:
            server._fetcher.budget = FetchBudget(200e3)
        await read_for(pool, CHAIN, 0.5)
        await pool.remove(NAMESPACE, CHAIN)
        assert count(running, CHAIN) == {0}
        await asyncio.sleep(1.0)
        assert count(running, CHAIN) == {0}
        results = await pool.read(NAMESPACE, CHAIN, buffers(len(CHAIN)))
        assert not any(result.status.hit for result in results)


async def test_it_stays_off_where_it_is_switched_off() -> None:
    async with cluster(copies_max=0) as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN), copies=2)
        await lose(running, holders(running, CHAIN[0])[0])
        await read_for(pool, CHAIN, 0.6)
        assert count(running, CHAIN) == {1}


@asynccontextmanager
async def hosts(
    monkeypatch: pytest.MonkeyPatch, count: int, capacity: str = "8MiB"
) -> AsyncIterator[tuple[dev.Dev, Pool]]:
    """Servers at 127.0.0.1, 127.0.0.2, ...; a client over tcp is at the first of these."""

    def config(**settings: Any) -> ServerConfig:
        number = int(settings["id"].removeprefix("dev-"))
        return ServerConfig(**{**settings, "listen": [f"tcp://127.0.0.{number + 1}:0"]})

    monkeypatch.setattr(dev, "ServerConfig", config)
    async with cluster(servers=count, capacity=capacity) as (running, pool):
        yield running, pool


async def test_extra_copies_go_to_the_host_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(monkeypatch, 5) as (running, pool):
        near, *others = running.servers
        for server in running.servers:
            server._keeper._copies_max = 2
        chains = [keys(f"hot {number}", 4) for number in range(12)]
        for number, chain in enumerate(chains):
            for digest in chain:
                server = others[number % len(others)]
                await pool.write_to(server.server, NAMESPACE, digest, values([digest])[0])
        for chain in chains:
            await read_for(pool, chain, 0.3)
        places = [set(holders(running, digest)) for chain in chains for digest in chain]
        assert {len(found) for found in places} == {2}
        assert all(near in found for found in places)


async def test_what_is_on_its_way_to_a_server_is_not_copied_to_another_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosts(monkeypatch, 4) as (running, pool):
        near, source, *_ = running.servers
        for server in running.servers:
            server._keeper._copies_max = 2
        block = CHAIN[:1]
        await pool.write_to(source.server, NAMESPACE, block[0], values(block)[0])
        async with near._fetcher._transfers, near._fetcher._transfers:  # all are busy
            other = asyncio.create_task(pool.spread(NAMESPACE, block, to=[near.server], timeout=20))
            await read_for(pool, block, 0.6)
            assert counter(running, "fetch_in_progress") > 0  # source has asked near
            assert holders(running, block[0]) == [source]
        await other
        assert holders(running, block[0]) == [near, source]


async def test_a_server_that_has_no_time_for_a_copy_yet_is_asked_again_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_keeper, "_FETCH_S", 0.4)
    async with hosts(monkeypatch, 4) as (running, pool):
        near, source, *_ = running.servers
        block = CHAIN[:1]
        await pool.write_to(source.server, NAMESPACE, block[0], values(block)[0])
        async with near._fetcher._transfers, near._fetcher._transfers:  # all are busy
            await read_for(pool, block, 1.2)
            assert counter(running, "fetch_not_yet") > 0
            assert holders(running, block[0]) == [source]
        async with asyncio.timeout(20):
            while near not in holders(running, block[0]):
                await read_for(pool, block, 0.1)


async def test_without_a_server_on_the_reading_host_or_room_there_any_other_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosts(monkeypatch, 4) as (running, pool):
        near, source, *_ = running.servers
        for server in running.servers:
            server._keeper._copies_max = 2
        near._context.draining = True  # leaves
        await near._context.masters_know(asyncio.get_running_loop().time() + 5)
        chain = CHAIN[:8]
        for digest in chain:
            await pool.write_to(source.server, NAMESPACE, digest, values([digest])[0])
        await read_for(pool, chain, 0.6)
        assert count(running, chain) == {2}
        assert all(near not in holders(running, digest) for digest in chain)


@pytest.mark.parametrize(
    ("addresses", "host", "expected"),
    [
        (["tcp://10.0.0.1:7461"], "10.0.0.1", True),
        (["shm://x", "ucx://10.0.0.1:7461?tls=rc"], "10.0.0.1", True),
        (["tcp://10.0.0.1:7461"], "::ffff:10.0.0.1", True),
        (["tcp://10.0.0.11:7461"], "10.0.0.1", False),
        (["tcp://[2001:db8::5]:7461"], "2001:db8::/64", True),
        (["tcp://[2001:db8:1::5]:7461"], "2001:db8::/64", False),
        (["tcp://gpu-1:7461", "shm://x", "inproc://"], "10.0.0.1", False),
        (["tcp://10.0.0.1:7461"], "", False),
        ([], "10.0.0.1", False),
    ],
)
def test_a_server_is_found_by_its_address(addresses: list[str], host: str, expected: bool) -> None:
    assert is_at(addresses, host) is expected
