"""`connect` waits for a master as long as `timeout_s` says, whatever one attempt may take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kvpool.sync
from kvpool import (
    ClientConfig,
    Closed,
    Cluster,
    ConfigError,
    MasterLost,
    Pool,
    connect,
    dev,
    read_cluster,
    registry,
)
from kvpool.config import MasterConfig
from kvpool.errors import Unavailable
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from tests.conftest import NAMESPACE, buffers, keys, values
from tests.support.programs import free_address

HERD = 60


async def test_a_master_that_answers_late_is_waited_for() -> None:
    address = free_address()
    config = ClientConfig(masters=[address], timeout_s=10.0, attempt_s=0.1)
    connecting = asyncio.create_task(connect(config=config))
    await asyncio.sleep(0.8)
    network = TcpNetwork()
    master = Master(MasterConfig(bind=address), network)
    await master.start()
    async with await connecting as pool:
        assert await pool.members() == []
    await master.close()
    network.close()


async def test_many_clients_come_at_once() -> None:
    """Each waits longer than one attempt: the master and all of them share this loop."""
    network = TcpNetwork()
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


# --- what everybody needs, without a configuration -----------------------------------------


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """The master of a pool with a secret, and the file that has it."""
    secret = tmp_path / "pool.secret"
    secret.write_text("0123456789abcdef-connect\n")
    async with dev.serve("4MiB", cluster=read_cluster("default", str(secret))) as running:
        yield running.address, secret


async def through(pool: Pool) -> set[str]:
    """The transports over which this client reaches the servers."""
    chain = keys("connect", 1)
    await pool.write(NAMESPACE, chain, values(chain))
    (got,) = await pool.read(NAMESPACE, chain, buffers(1))
    assert got.status.hit
    return {scheme for what, scheme, _ in pool.durations.counts() if what == "read"}


async def test_a_secret_a_transport_and_a_timeout_are_arguments(guarded: tuple[str, Path]) -> None:
    address, secret = guarded
    for file in (secret, str(secret)):
        async with await connect(address, secret_file=file, transports=["tcp"]) as pool:
            assert await through(pool) == {"tcp"}
    sync = await asyncio.to_thread(kvpool.sync.connect, address, secret_file=secret)
    assert len(await asyncio.to_thread(sync.members)) == 1
    await asyncio.to_thread(sync.close)
    with pytest.raises(MasterLost):
        await connect(address, timeout=0.3)


async def test_async_with_closes_it_and_await_leaves_that(guarded: tuple[str, Path]) -> None:
    address, secret = guarded
    with contextlib.suppress(ZeroDivisionError):
        async with connect(address, secret_file=secret) as pool:
            _ = len(await pool.members()) / 0
    with pytest.raises(Closed):
        await pool.members()
    other = await asyncio.create_task(connect(address, secret_file=secret))  # a coroutine as any
    assert len(await other.members()) == 1
    await other.close()
    never = asyncio.create_task(connect(free_address(), timeout=60))
    never.cancel()
    await asyncio.wait([never], timeout=5)
    assert never.cancelled()


@pytest.mark.parametrize("timeout", [0.3, "300ms"])
def test_without_a_master_it_ends_after_its_timeout(timeout: float | str) -> None:
    started = time.monotonic()
    with pytest.raises(MasterLost, match="`kvpool doctor` says what to do"):
        kvpool.sync.connect(free_address(), timeout=timeout)
    assert 0.3 <= time.monotonic() - started < 3.0


async def test_each_master_that_does_not_answer_is_named_once() -> None:
    masters = [free_address(), free_address()]
    with pytest.raises(MasterLost) as lost:
        await connect(*masters, timeout=0.5)
    assert [str(lost.value).count(f"master {one} did not answer: ") for one in masters] == [1, 1]


async def test_arguments_replace_what_the_configuration_says(guarded: tuple[str, Path]) -> None:
    address, secret = guarded
    config = ClientConfig(masters=[free_address()], transports=["shm"], timeout_s=0.3)
    given = {"transports": ["tcp"], "timeout": 5.0, "secret_file": secret}
    async with await connect(address, config=config, **given) as pool:
        assert await through(pool) == {"tcp"}
        assert (await pool.members(timeout=5.0))[0].alive
    with pytest.raises(MasterLost):
        await connect(config=config, secret_file=secret)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"timeout": 0}, "'client.timeout_s' is 0.0: Expected `float` > 0.0"),
        ({"timeout": "5 apples"}, "duration '5 apples'"),
        ({"transports": 7}, "'client.transports' is 7: Expected `array`"),
        ({"transports": []}, r"none of the transports \[\]"),
        ({"transports": "tpc"}, r"none of the transports \['tpc'\] is installed; installed: .*tcp"),
        ({"secret_file": "/nowhere/secret"}, "'/nowhere/secret': No such file"),
        ({"secret_file": 0}, "secret_file is 0, expected a path"),
        (
            {"secret_file": "a.secret", "cluster": Cluster("c", b"0123456789abcdef")},
            "secret_file a.secret: cluster 'c' has a secret already",
        ),
        ({"config": {"timeout_s": 5}}, "config is a dict"),
    ],
)
async def test_a_wrong_argument_is_named_with_its_value(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await connect("127.0.0.1:9", **given)
    with pytest.raises(ConfigError, match=says):
        kvpool.sync.connect("127.0.0.1:9", **given)
