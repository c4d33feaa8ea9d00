"""Writers that wait for space: each keeps its place as long as it waits, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from kvpool import ClientConfig, WriteStatus, dev
from kvpool.protocols import Peer, ReserveRequest
from kvpool.server.state.holdings import Limits
from kvpool.types import ROOT
from tests.conftest import NAMESPACE, eventually, keys, value


@pytest.mark.parametrize("ends", ["deadline", "cancel", "space"])
async def test_a_writer_that_waits_no_more_keeps_no_place(pool_dev: dev.Dev, ends: str) -> None:
    (server,) = pool_dev.servers
    server.store.held.limits = Limits.none()
    chain = keys("full", 16)
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    async with pool_dev.pool() as reader, pool_dev.pool(config) as writer:
        await reader.write(NAMESPACE, chain, [value(digest, 1 << 20) for digest in chain])
        async with reader.read_view(NAMESPACE, chain) as views:
            assert all(view.status.hit for view in views)
            wait_s = 1.0 if ends == "deadline" else 20.0
            write = asyncio.ensure_future(
                writer.write(NAMESPACE, keys("new", 1), [bytes(1 << 20)], timeout=wait_s)
            )
            await eventually(lambda: len(server._context._waiting_for_space) == 1)
            if ends == "cancel":
                write.cancel()
                await asyncio.wait([write])
            elif ends == "deadline":
                assert await write == [WriteStatus.NO_SPACE]
            if ends != "space":  # nothing in the store changes, so nothing else empties the list
                await eventually(lambda: not server._context._waiting_for_space)
        if ends == "space":
            assert await write == [WriteStatus.STORED]
            assert not server._context._waiting_for_space


async def test_masters_hear_of_what_a_writer_has_displaced_before_it_sends(
    pool_dev: dev.Dev,
) -> None:
    """Or readers would go for blocks that are gone, for as long as its bytes take."""
    (server,) = pool_dev.servers
    server.store.held.limits = Limits.none()
    chain, loop = keys("full", 16), asyncio.get_running_loop()
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain, [value(digest, 1 << 20) for digest in chain])
        assert (await pool.match(NAMESPACE, chain)).length == 16
        connection = server.connect(Peer("slow"))
        request = ReserveRequest(NAMESPACE, 0, keys("new", 3), [ROOT] * 3, [1 << 20] * 3)
        answers = await connection.reserve(request, deadline=loop.time() + 5)
        assert {answer.status for answer in answers} == {WriteStatus.RESERVED}
        await eventually(lambda: pool_dev.master.directory.match(NAMESPACE, chain).length == 13)
        connection.close()
