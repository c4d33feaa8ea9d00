"""What a client remembers of servers and of the paths to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvpool import Match, Member, Pool, ReadStatus, WriteStatus, dev
from kvpool.client import servers as servers_module
from kvpool.config import ClientConfig
from kvpool.errors import LinkBroken, MasterLost
from tests.conftest import NAMESPACE, keys

BACKOFF_S = 0.05


def fail(servers: servers_module.Servers, address: str) -> None:
    """A path to the only server has failed."""
    (record,) = servers.known.values()
    path = servers_module.Path("tcp", address)
    servers._path_failed(record, path, None, LinkBroken("gone"))


async def is_read(pool: Pool, chain: Sequence[bytes], match: Match) -> bool:
    """Whether the block of 100 bytes is found."""
    (result,) = await pool.read(NAMESPACE, chain, [bytearray(100)], match=match)
    return result.status is ReadStatus.HIT


async def test_paths_that_failed_are_forgotten_in_time(
    monkeypatch: pytest.MonkeyPatch, pool_dev: dev.Dev
) -> None:
    """A server has another port after each restart: a client must not keep them all."""
    monkeypatch.setattr(servers_module, "_BACKOFF_S_MAX", BACKOFF_S)
    async with pool_dev.pool() as pool:
        await pool.members()
        servers = pool._servers
        for port in range(3):
            fail(servers, f"tcp://127.0.0.1:{port}")
        assert len(servers._broken_until) == 3
        await asyncio.sleep(2 * BACKOFF_S)
        fail(servers, "tcp://127.0.0.1:9")
        assert list(servers._broken_until) == [("tcp", "tcp://127.0.0.1:9")]


async def test_a_call_that_waited_to_connect_is_not_misled_by_another_path(
    monkeypatch: pytest.MonkeyPatch, pool_dev: dev.Dev
) -> None:
    """That an old failure is forgotten while the call waits is no new failure of its path."""
    monkeypatch.setattr(servers_module, "_BACKOFF_S_MAX", BACKOFF_S)
    async with pool_dev.pool() as pool:
        await pool.members()
        servers = pool._servers
        (record,) = servers.known.values()
        path = record.paths[0]
        servers._path_failed(record, path, None, LinkBroken("gone"))
        deadline = asyncio.get_running_loop().time() + 5
        await record.connecting.acquire()
        waiting = asyncio.create_task(servers._connect(record, path, deadline))
        await asyncio.sleep(2 * BACKOFF_S)
        fail(servers, "tcp://127.0.0.1:9")
        record.connecting.release()
        assert await waiting is record.channels[path]


async def test_a_call_that_waits_to_connect_ends_at_its_deadline(pool_dev: dev.Dev) -> None:
    """Another call of this client is connecting to that server, and takes its time."""
    async with pool_dev.pool() as pool:
        chain = keys("connecting", 2)
        assert await pool.write(NAMESPACE, chain, [b"a" * 100] * 2) == [WriteStatus.STORED] * 2
        servers, match = pool._servers, await pool.match(NAMESPACE, chain)
        (record,) = servers.known.values()
        servers._close_channels(record)
        await record.connecting.acquire()
        memory = [bytearray(100) for _ in chain]
        results = await pool.read(NAMESPACE, chain, memory, match=match, timeout=0.05)
        assert [result.status for result in results] == [ReadStatus.DEADLINE] * 2
        assert not pool.counters["failed_tcp"]  # it says nothing about the path
        record.connecting.release()
        results = await pool.read(NAMESPACE, chain, memory, match=match)
        assert [result.status for result in results] == [ReadStatus.HIT] * 2


async def test_a_server_with_other_addresses_is_called_there_at_once(pool_dev: dev.Dev) -> None:
    """Another process may have had its id for a time: the epoch need not be another one."""
    async with pool_dev.pool() as pool:
        await pool.members()
        (record,) = pool._servers.known.values()
        record.paths = [servers_module.Path("tcp", "tcp://127.0.0.1:1")]
        statuses = await pool.write(NAMESPACE, keys("moved", 1), [b"a" * 100])
        assert statuses == [WriteStatus.STORED]
        assert not record.retry_at


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("best", ["inproc://gone", "shm://@gone", "tcp://127.0.0.1:1", ""])
async def test_addresses_are_renewed_when_one_path_of_several_fails(
    monkeypatch: pytest.MonkeyPatch, pool_dev: dev.Dev, views: bool, best: str
) -> None:
    """The server has restarted with another address for its fastest path; the others still work.
    Or it had none, which is noticed in time."""
    monkeypatch.setattr(servers_module, "REFRESH_S", 0.0)
    scheme = best.partition(":")[0] or "shm"
    order = sorted(("shm", "inproc", "tcp"), key=lambda one: one != scheme)
    async with pool_dev.pool(ClientConfig([pool_dev.address], transports=order)) as pool:
        chain = keys("renewed", 1)
        assert await pool.write(NAMESPACE, chain, [b"a" * 100]) == [WriteStatus.STORED]
        match = await pool.match(NAMESPACE, chain)
        (record,) = pool._servers.known.values()
        paths = record.paths
        record.paths = [servers_module.Path(scheme, best)] * bool(best) + paths[1:]
        if not best:
            monkeypatch.setattr(servers_module, "_RENEW_S", 0.0)
        if views:
            async with pool.read_view(NAMESPACE, chain, match=match):
                pass
        else:
            assert await is_read(pool, chain, match)
        assert pool.counters[f"failed_{scheme}"] == bool(best)
        assert pool._servers._renewal is not None
        await pool._servers._renewal
        assert record.paths == paths
        assert not record.path_failed
        record.channels.clear()
        assert await is_read(pool, chain, match)
        assert list(record.channels) == paths[:1]


async def test_addresses_are_asked_for_once_and_again_when_no_master_answered(
    monkeypatch: pytest.MonkeyPatch, pool_dev: dev.Dev
) -> None:
    monkeypatch.setattr(servers_module, "REFRESH_S", 0.0)
    async with pool_dev.pool() as pool:
        chain = keys("asked once", 1)
        assert await pool.write(NAMESPACE, chain, [b"a" * 100]) == [WriteStatus.STORED]
        match = await pool.match(NAMESPACE, chain)
        servers, asked, answer = pool._servers, 0, asyncio.Event()
        (record,) = servers.known.values()

        async def lost(deadline: float, *, patient: bool = False) -> list[Member]:
            nonlocal asked
            asked += 1
            await answer.wait()
            raise MasterLost("no master answers")

        monkeypatch.setattr(servers, "refresh", lost)
        for round_number in range(1, 3):
            answer.clear()
            for _ in range(3):  # one renewal, however many paths fail while it waits
                fail(servers, "tcp://127.0.0.1:1")
                assert await is_read(pool, chain, match)
                await asyncio.sleep(0)
            assert asked == round_number
            assert record.path_failed  # since that one was asked: it is asked again
            answer.set()
            assert servers._renewal is not None
            await servers._renewal
            fail(servers, "tcp://127.0.0.1:1")
        answer.clear()
        assert await is_read(pool, chain, match)
    assert servers._renewal.cancelled()  # closing the pool ends it
