"""A pool in one process: as many servers as are asked for."""

from __future__ import annotations

from functools import partial

import pytest

from kvpool import admin, dev
from kvpool.config import ServerConfig
from kvpool.master.state.server_table import SERVERS_PER_HOST_MAX
from kvpool.types import WriteStatus
from tests.conftest import NAMESPACE, buffers, keys


async def test_more_servers_than_a_master_takes_from_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dev, "ServerConfig", partial(ServerConfig, heartbeat_s=20.0))
    count = SERVERS_PER_HOST_MAX + 1
    async with (
        dev.serve("64KiB", servers=count, listen=("inproc://",)) as running,
        running.pool() as pool,
    ):
        chain = keys("many", count)
        status = await admin(pool).write_to(f"dev-{count - 1}", NAMESPACE, chain[0], b"block")
        assert status is WriteStatus.STORED
        await pool.read(NAMESPACE, chain[:1], buffers(1))
        assert [one.hits for one in running.servers[-1].stats(0.0).usage] == [1]
