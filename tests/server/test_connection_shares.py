"""A server has a bounded number of connections, and no client is kept out by the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest

from kvpool import ClientConfig, Cluster, Pool, ReadStatus, WriteStatus, dev, registry
from kvpool.net.control_network import TcpNetwork
from kvpool.ops.doctor import crowded
from kvpool.runtime import Host, this_host
from kvpool.server.clients import SHARE_MIN, ConnectionShares
from kvpool.types import Member, ServerStats
from tests.conftest import NAMESPACE, buffers, key, keys, values

LIMIT = 4

Connects = Callable[[str], AbstractAsyncContextManager[Pool]]


@pytest.fixture(params=["tcp", "shm"])
async def clients(request: pytest.FixtureRequest) -> AsyncIterator[tuple[dev.Dev, Connects]]:
    """A server with LIMIT connections, and what makes clients of it in processes of that name."""
    async with dev.serve("32MiB") as running:
        running.servers[0]._context.clients.shares.limit = LIMIT
        config = ClientConfig(masters=[running.address], transports=[request.param])

        @asynccontextmanager
        async def client(name: str) -> AsyncIterator[Pool]:
            network = TcpNetwork(Cluster())
            here = this_host()
            async with Pool(
                config,
                cluster=Cluster(),
                network=network,
                transports=registry.transports(config.transports),
                owns_network=True,
                host=Host(here.id, here.name, name, here.resident),
            ) as pool:
                yield pool

        yield running, client


async def test_more_clients_than_connections_take_turns(
    clients: tuple[dev.Dev, Connects],
) -> None:
    running, client = clients
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(client(f"p/{n}")) for n in range(4 * LIMIT)]
        for round in range(2):  # in the second one all have lost or kept an idle stream
            for number, pool in enumerate(pools):
                name = key(f"{round}-{number}")
                assert await pool.write(NAMESPACE, [name], [b"mine"]) == [WriteStatus.STORED]
        assert not any("failed_" in name for pool in pools for name in pool.counters)
        counters = running.servers[0].stats(0.0).counters
        assert counters["connections"] <= LIMIT
        assert counters["retired_connections"] >= 3 * LIMIT


async def test_a_busy_client_leaves_room_for_others(clients: tuple[dev.Dev, Connects]) -> None:
    """It works with the streams that it gets: every call has an answer, and so has the newcomer."""
    _, client = clients
    chain = keys("busy", 64)
    async with client("busy") as busy, client("new") as new:
        assert set(await busy.write(NAMESPACE, chain, values(chain))) == {WriteStatus.STORED}

        async def read(pool: Pool, number: int) -> ReadStatus:
            (result,) = await pool.read(NAMESPACE, chain[number : number + 1], buffers(1))
            return result.status

        reads = [asyncio.create_task(read(busy, number)) for number in range(64)]
        await asyncio.sleep(0)
        assert await read(new, 5) is ReadStatus.HIT
        assert set(await asyncio.gather(*reads)) == {ReadStatus.HIT}


@pytest.mark.parametrize("clients", ["shm"], indirect=True)
async def test_an_idle_connection_that_holds_memory_is_not_ended(
    clients: tuple[dev.Dev, Connects],
) -> None:
    _, client = clients
    async with AsyncExitStack() as stack:
        holders = [await stack.enter_async_context(client(f"h/{n}")) for n in range(LIMIT)]
        chain = keys("held", LIMIT)
        assert set(await holders[0].write(NAMESPACE, chain, values(chain))) == {WriteStatus.STORED}
        for number, pool in enumerate(holders):
            wanted = chain[number : number + 1]
            (view,) = await stack.enter_async_context(pool.read_view(NAMESPACE, wanted))
            assert view.status is ReadStatus.HIT
        late = await stack.enter_async_context(client("late"))
        (status,) = await late.write(NAMESPACE, [key("late")], [b"x"], timeout=2)
        assert status is WriteStatus.REFUSED
        (result,) = await late.read(NAMESPACE, chain[:1], buffers(1), timeout=2)
        assert result.status is ReadStatus.REFUSED


def test_a_client_has_more_than_its_share_only_while_half_is_free() -> None:
    shares = ConnectionShares(8)
    for _ in range(4):
        assert not shares.problem("first")
        shares.opened("first")
    assert not shares.problem("first")  # alone, it may have all
    shares.opened("second")
    assert "4 of 8" in shares.problem("first")  # 8 // 2 each
    assert not shares.problem("second")
    assert not shares.problem("third")
    for client in ("second", "second", "third"):
        shares.opened(client)
    assert shares.full
    assert not shares.problem("fourth")  # an idle one may end for it
    for client in ("second", "second", "second", "third", *["first"] * 4):
        shares.closed(client)
    assert (shares.total, shares.held("first")) == (0, 0)
    assert ConnectionShares(2).share(newcomers=100) == SHARE_MIN


@pytest.mark.parametrize(("open_now", "findings"), [(79, 0), (80, 1), (100, 1)])
def test_the_doctor_sees_a_crowded_server(open_now: int, findings: int) -> None:
    counters = {"connections": open_now, "connections_max": 100}
    found = crowded([Member("s", 1, "h", (), (), True, 0.0, 1, ServerStats(counters=counters))])
    assert len(found) == findings
    assert all("s has" in one.text for one in found)
