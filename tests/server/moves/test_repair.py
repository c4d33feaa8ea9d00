"""Lost copies come back while they are read, and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvpool import ClientConfig, Namespace, Pool, admin, dev
from kvpool.client import shared_copies
from kvpool.server.block_server import BlockServer
from kvpool.server.moves.state import copy_demand
from kvpool.testing.invariants import check_invariants
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.support.moves import keep_chains, moves_of

CHAIN = keys("chain", 40)
LISTEN = ("inproc://", "tcp://127.0.0.1:0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_demand, "_ROUND_S", 0.02)
    monkeypatch.setattr(copy_demand, "CHECK_S", 0.1)


@asynccontextmanager
async def cluster(
    servers: int = 4, *, capacity: str = "8MiB"
) -> AsyncIterator[tuple[dev.Dev, Pool]]:
    async with dev.serve(capacity, servers=servers, listen=LISTEN) as running:
        for server in running.servers:
            keep_chains(server)  # which would make room on a full server
        config = ClientConfig(masters=[running.address], transports=["tcp"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_copies, "SHARED_COPIES_MAX", 1)
            async with running.pool(config) as pool:
                yield running, pool
        for server in running.servers:
            check_invariants(server.stack)


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
    return sum(server.stats(0.0).counters[name] for server in running.servers)


async def lose(running: dev.Dev, server: BlockServer) -> None:
    await server.close()
    running.servers.remove(server)


async def test_what_is_read_gets_its_copies_back_and_nothing_else() -> None:
    async with cluster() as (running, pool):
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
        # The new copy is as the lost one: when the other is lost, too, it is copied again.
        await lose(running, holders(running, CHAIN[0])[0])
        await read_for(pool, CHAIN, 1.0)
        assert count(running, CHAIN) == {2}


async def test_over_a_transport_that_fetches_nothing_no_copy_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN), copies=2)
        await lose(running, holders(running, CHAIN[0])[0])
        (left,) = holders(running, CHAIN[0])
        asked = []

        async def channel(server: str, deadline: float) -> object:
            asked.append(server)
            return object()  # of another package: without `fetch`

        monkeypatch.setattr(moves_of(left).peers, "channel", channel)
        await read_for(pool, CHAIN, 0.5)
        assert asked
        assert count(running, CHAIN) == {1}
        count_before = len(asked)
        await read_for(pool, CHAIN, 0.5)
        assert len(asked) > count_before, "it goes on"


async def test_extra_copies_go_first_and_the_last_one_is_no_extra() -> None:
    async with cluster(servers=2, capacity="1MiB") as (running, pool):
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        await admin(pool).spread(NAMESPACE, CHAIN, to=2)
        (first,) = [s for s in running.servers if s.stack.peek(NAMESPACE, 0, CHAIN[0]).copies]  # type: ignore[union-attr]
        (other,) = [server for server in running.servers if server is not first]
        older = keys("older", 20)
        for digest in older:
            await admin(pool).write_to(other.server, NAMESPACE, digest, values([digest])[0])
        await read_for(pool, CHAIN, 0.2)  # used last
        newer = keys("newer", 80)
        for digest in newer:
            await admin(pool).write_to(other.server, NAMESPACE, digest, values([digest])[0])
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
            await admin(pool).write_to(other.server, NAMESPACE, digest, values([digest])[0])
        assert all(other.stack.peek(NAMESPACE, 0, one) for one in left)
