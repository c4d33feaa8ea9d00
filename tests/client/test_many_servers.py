"""One chain that several servers hold, over real connections, each of its own speed."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import pytest

from kvpool import ClientConfig, Namespace, Pool, ReadStatus, admin, dev
from kvpool.client.servers import Servers
from kvpool.protocols import Channel
from kvpool.runtime import Host, this_host
from kvpool.server.block_server import BlockServer
from kvpool_connector.records.provenance import BlockWriter
from tests.conftest import NAMESPACE, keys
from tests.connector.test_halves import Engine

SIZE = 512 << 10
RATE = 100e6
CHAIN = keys("many", 24)


class Links:
    """What each server sends passes its link one message after the other, at `RATE`."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()
        self.frozen = ""
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def carry(self, server: str, size: int) -> None:
        self.moved[server] += size
        async with self._busy[server]:
            await asyncio.sleep(size / RATE)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    links, call = Links(), Servers.call

    async def slow_call(
        self: Servers,
        server: str,
        operation: Callable[[Channel], Awaitable[Any]],
        deadline: float,
        counted_as: str = "",
    ) -> Any:
        if counted_as == "read" and server == links.frozen:
            await asyncio.sleep(60)
        results = await call(self, server, operation, deadline, counted_as)
        if counted_as == "read":
            await links.carry(server, sum(result.size for result in results))
        return results

    monkeypatch.setattr(Servers, "call", slow_call)
    return links


@pytest.fixture
async def pool(links: Links, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    """dev-0 is on the reader's host, the others are elsewhere."""

    def on_its_host(config: Any, **others: Any) -> BlockServer:
        own = config.id == "dev-0"
        host = this_host() if own else Host(config.id, config.id, config.id, lambda: 0)
        return BlockServer(config, host=host, **others)

    monkeypatch.setattr(dev, "BlockServer", on_its_host)
    async with dev.serve("64MiB", servers=4, listen=("tcp://127.0.0.1:0",)) as running:
        config = ClientConfig(masters=[running.address], transports=["tcp"], attempt_s=5.0)
        async with running.pool(config) as pool:
            yield pool


def value(digest: bytes) -> bytes:
    return digest * (SIZE // len(digest))


async def write(
    pool: Pool, chain: Sequence[bytes], *servers: int, name: Namespace = NAMESPACE, end: bytes = b""
) -> None:
    for digest in chain:
        for server in servers:
            await admin(pool).write_to(f"dev-{server}", name, digest, value(digest) + end)


async def load(pool: Pool, links: Links) -> float:
    """Seconds of a load; every byte of it is right."""
    memory = [bytearray(SIZE) for _ in CHAIN]
    links.moved.clear()
    match = await pool.match(NAMESPACE, CHAIN)
    began = asyncio.get_running_loop().time()
    results = await pool.read(NAMESPACE, CHAIN, memory, match=match)
    took = asyncio.get_running_loop().time() - began
    assert {result.status for result in results} == {ReadStatus.HIT}
    assert memory == [value(digest) for digest in CHAIN]
    return took


async def test_all_servers_of_a_chain_bring_it(pool: Pool, links: Links) -> None:
    await write(pool, CHAIN, 1, 2, 3)
    await load(pool, links)
    assert set(links.moved) == {"dev-1", "dev-2", "dev-3"}
    assert links.moved.total() == len(CHAIN) * SIZE
    await load(pool, links)
    assert min(links.moved.values()) > links.moved.total() // 6  # a third, and the machine is busy


async def test_a_frozen_one_of_them_is_left(pool: Pool, links: Links) -> None:
    await write(pool, CHAIN, 1, 2, 3)
    await load(pool, links)
    links.frozen = "dev-2"
    assert await load(pool, links) < 4.0  # not `attempt_s`
    assert set(links.moved) == {"dev-1", "dev-3"}
    assert links.moved.total() == len(CHAIN) * SIZE
    assert pool.counters["hedged"] == 1


async def test_what_lies_on_an_engines_host_is_read_there(
    pool: Pool, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the rest from all that have it, in the same load."""
    monkeypatch.setattr("tests.connector.test_halves.BYTES", SIZE)
    end = BlockWriter(b"w" * 8, "somebody").mark()
    with closing(Engine(*pool._config.masters)) as engine:
        await asyncio.to_thread(lambda: engine.connected().named())
        name = engine.scheduler.namespaces[0]
        await write(pool, CHAIN[:6], 0, 1, 2, name=name, end=end)
        await write(pool, CHAIN[6:], 1, 2, name=name, end=end)
        links.moved.clear()
        await asyncio.to_thread(engine.load, "r", CHAIN, range(1, 25))
    assert engine.scheduler.planner.counters["loads"] == 1
    assert not engine.bad_blocks
    assert [bytes(block.numpy()) for block in engine.memory[0][1:25]] == [*map(value, CHAIN)]
    own, *others = (size // (SIZE + len(end)) for _, size in sorted(links.moved.items()))
    assert (own, sum(others)) == (6, 18)
    assert min(others) >= 6
