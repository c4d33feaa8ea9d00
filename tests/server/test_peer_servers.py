"""Servers that call each other keep no connection that they do not use."""

from __future__ import annotations

import asyncio

import pytest

from kvpool import ClientConfig, dev
from kvpool.server import peer_servers
from tests.conftest import NAMESPACE, eventually, keys, values


async def test_what_is_not_used_is_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_servers, "_IDLE_S", 0.3)
    async with dev.serve("16MiB", servers=3, listen=("tcp://127.0.0.1:0",)) as running:
        config = ClientConfig(masters=[running.address], transports=["tcp"])

        def connections() -> int:
            return sum(server.stats(0.0).counters["connections"] for server in running.servers)

        for name in ("first", "second"):
            chain = keys(name, 8)
            async with running.pool(config) as pool:
                await pool.write(NAMESPACE, chain, values(chain))
                await pool.spread(NAMESPACE, chain, to=3)
                assert [server.store.stored > 0 for server in running.servers] == [True] * 3
            await asyncio.sleep(0.05)
            assert connections() > 0  # between the servers: the client has left
            await eventually(lambda: not any(server._peers._channels for server in running.servers))
            await eventually(lambda: not any(server._peers._links for server in running.servers))
            await eventually(lambda: connections() == 0)  # the other side notices a moment later
