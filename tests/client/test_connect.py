"""`connect` waits for a master as long as `timeout_s` says, whatever one attempt may take."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from kvpool import ClientConfig, MasterLost, connect, registry
from kvpool.config import MasterConfig
from kvpool.errors import Unavailable
from kvpool.master.service import Master
from kvpool.net.zmq_rpc import ZmqNetwork

HERD = 200


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        host, port = sock.getsockname()
        return f"{host}:{port}"


async def test_a_master_that_answers_late_is_waited_for() -> None:
    address = free_address()
    config = ClientConfig(masters=[address], timeout_s=10.0, attempt_s=0.1)
    connecting = asyncio.create_task(connect(config=config))
    await asyncio.sleep(0.8)
    network = ZmqNetwork()
    master = Master(MasterConfig(bind=address), network)
    await master.start()
    async with await connecting as pool:
        assert await pool.members() == []
    await master.close()
    network.close()


async def test_without_a_master_it_ends_after_its_timeout() -> None:
    config = ClientConfig(masters=[free_address()], timeout_s=0.5, attempt_s=0.1)
    started = time.monotonic()
    with pytest.raises(MasterLost, match="is `kvpool master` running"):
        await connect(config=config)
    assert 0.5 <= time.monotonic() - started < 3.0


async def test_two_hundred_clients_come_at_once() -> None:
    """Each waits longer than one attempt: the master and all of them share this loop."""
    network = ZmqNetwork()
    master = Master(MasterConfig(bind="127.0.0.1:0"), network)
    await master.start()
    config = ClientConfig(masters=[master.address], timeout_s=120.0, attempt_s=0.05)
    pools = await asyncio.gather(*[connect(config=config) for _ in range(HERD)])
    assert len(pools) == HERD
    assert master.requests["members"] >= HERD
    for pool in pools:
        await pool.close()
    await master.close()
    network.close()


async def test_what_the_system_refuses_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a file of a transport, where the process has no descriptors left."""

    def refuse(names: object) -> object:
        raise OSError(24, "Too many open files", "importlib")

    monkeypatch.setattr(registry, "transports", refuse)
    with pytest.raises(Unavailable, match="Too many open files"):
        await connect("127.0.0.1:9")
