"""Views of a server's memory, and what its client forgets and closes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvpool import ClientConfig, Pool, ReadStatus, WriteStatus, dev, registry, removals
from kvpool.config import ServerConfig
from kvpool.errors import LinkBroken
from kvpool.protocols import ReadOptions, SupportsZeroCopyView
from kvpool.server.block_server import BlockServer
from kvpool.types import Cluster
from tests.conftest import NAMESPACE, eventually, keys

SIZE = 1 << 20
#: More than the 16 MiB of the pool.
OTHERS = keys("others", 40)


@asynccontextmanager
async def view_held(pool: Pool) -> AsyncIterator[memoryview]:
    """A view of a block in the pool's memory, which is whole until the end."""
    chain = keys("viewed", 1)
    assert await pool.write(NAMESPACE, chain, [b"v" * SIZE]) == [WriteStatus.STORED]
    async with pool.read_view(NAMESPACE, chain) as [view]:
        assert view.status is ReadStatus.HIT
        assert view.data is not None
        yield view.data
        assert bytes(view.data) == b"v" * SIZE


async def fill(pool: Pool) -> None:
    """Write so much that all memory that nobody holds is used for other blocks."""
    for digest in OTHERS:
        assert await pool.write(NAMESPACE, [digest], [b"o" * SIZE]) == [WriteStatus.STORED]


def given_up(pool: Pool) -> None:
    pool._servers.mark_unresponsive("dev-0", "it is silent", given_up=True)


def broken(pool: Pool) -> None:
    record = pool._servers.known["dev-0"]
    ((path, channel),) = record.channels.items()
    pool._servers._path_failed(record, path, channel, LinkBroken("reset"))


def restarted(pool: Pool) -> None:
    pool._servers.known["dev-0"].epoch += 1  # the next answer of a master tells of another one


@pytest.mark.parametrize("event", [given_up, broken, restarted])
@pytest.mark.parametrize("scheme", ["shm", "inproc"])
async def test_a_view_shows_its_block_whatever_its_client_learns(
    event: Callable[[Pool], None], scheme: str, pool_dev: dev.Dev
) -> None:
    config = ClientConfig(masters=[pool_dev.address], transports=[scheme])
    async with pool_dev.pool(config) as pool:
        servers, (server,) = pool._servers, pool_dev.servers
        async with view_held(pool):
            (held,) = servers.known["dev-0"].channels.values()
            event(pool)
            await pool.members()
            assert servers.known["dev-0"].channels.get(servers.known["dev-0"].paths[0]) is not held
            await fill(pool)
        await eventually(lambda: not server.store.held.pins)
        deadline = asyncio.get_running_loop().time() + 5
        with pytest.raises(LinkBroken):  # closed with its last view
            await removals.remove(held, NAMESPACE, OTHERS[:1], deadline=deadline)


async def test_a_view_outlives_its_server_and_the_next_one_of_that_name() -> None:
    """The old one's memory stays mapped, and the client goes on with the new one."""
    async with dev.serve("16MiB", listen=("shm://",)) as running:
        config = ClientConfig(masters=[running.address], transports=["shm"])
        async with running.pool(config) as pool, view_held(pool):
            (before,) = running.servers
            await before.close()
            where = ServerConfig(
                id="dev-0", masters=[running.address], capacity=16 << 20, listen=["shm://"]
            )
            tiers = registry.tiers(where, prefault=False)
            parts = {"cluster": Cluster(), "network": before._parts.network, "tiers": tiers}
            after = BlockServer(where, transports=running._transports, **parts)
            await after.start()
            try:
                await after.wait_until_registered(asyncio.get_running_loop().time() + 10)
                await pool.members()
                await fill(pool)
            finally:
                await after.close()


@pytest.mark.parametrize("scheme", ["shm", "inproc"])
async def test_a_view_of_a_channel_that_ends_is_pinned_or_none(
    scheme: str, pool_dev: dev.Dev
) -> None:
    config = ClientConfig(masters=[pool_dev.address], transports=[scheme])
    (server,) = pool_dev.servers
    async with pool_dev.pool(config) as pool:
        chain, shown = keys("viewed", 1), 0
        assert await pool.write(NAMESPACE, chain, [b"v" * SIZE]) == [WriteStatus.STORED]
        transport, record = pool._servers.transports[scheme], pool._servers.known["dev-0"]
        for steps in range(40):
            deadline = asyncio.get_running_loop().time() + 5
            channel = await transport.connect(
                record.paths[0].address, cluster=Cluster(), client="c", deadline=deadline
            )
            assert isinstance(channel, SupportsZeroCopyView)
            options = ReadOptions(NAMESPACE, 0, verify=False)
            view = channel.read_view(options, chain, deadline=deadline)
            looking = asyncio.ensure_future(view.__aenter__())
            for _ in range(steps):
                await asyncio.sleep(0)
            channel.abort()
            with contextlib.suppress(LinkBroken):
                await looking
                shown += 1
                await asyncio.sleep(0.001)  # the server notices an end
                assert server.store.held.pins == 1
                await view.__aexit__(None, None, None)
            await eventually(lambda: not server.store.held.pins)
            await channel.close()
        assert 0 < shown < 40
