"""A block that was seen lately is asked for where it was; whatever has become of it is noticed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpool import ClientConfig, Namespace, ReadStatus, admin, dev
from kvpool.client.location_cache import CachedLocation, LocationCache
from kvpool.server.connection import ServerConnection
from tests.conftest import NAMESPACE, key, keys, read_back, value, values

HERE = CachedLocation(NAMESPACE, "here", sole_replica=True)


async def test_what_was_written_or_read_is_read_again_without_a_master(pool_dev: dev.Dev) -> None:
    chain, other = keys("chain", 8), keys("other", 4)
    async with pool_dev.pool() as writer, pool_dev.pool() as reader, pool_dev.pool() as third:
        await writer.write(NAMESPACE, chain, values(chain))
        assert set(await read_back(reader, chain[:5])) == {ReadStatus.HIT}
        await third.write(NAMESPACE, other, values(other))
        await pool_dev.master.close()
        assert set(await read_back(writer, chain)) == {ReadStatus.HIT}
        assert set(await read_back(reader, chain[:5])) == {ReadStatus.HIT}
        # Of these nobody has told it anything.
        assert set(await read_back(reader, chain[5:])) == {ReadStatus.NO_MASTER}


def test_blocks_of_several_parts_are_not_cached() -> None:
    """Only a master knows whether every part is there."""
    cache, halves = LocationCache(), Namespace("halves", parts=2)
    cache.put(CachedLocation(halves, "here", sole_replica=True), keys("half", 2))
    assert cache.get(halves, keys("half", 2)) == []
    assert len(cache) == 0


async def test_what_has_moved_is_found_where_it_is_now(two_servers: dev.Dev) -> None:
    chain = keys("chain", 6)
    first, second = (server.server for server in two_servers.servers)
    async with two_servers.pool() as pool, two_servers.pool() as other:
        for digest in chain:
            await admin(pool).write_to(first, NAMESPACE, digest, value(digest))
        assert set(await read_back(pool, chain)) == {ReadStatus.HIT}
        await other.remove(NAMESPACE, chain)
        for digest in chain[:4]:
            await admin(other).write_to(second, NAMESPACE, digest, value(digest))
        assert await read_back(pool, chain) == [ReadStatus.HIT] * 4 + [ReadStatus.REMOVED] * 2


def fall_silent(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The server of this name answers no reads any more; how often it was asked."""
    asked: list[str] = []
    pin = ServerConnection.pin

    async def never(self: ServerConnection, *question: Any, **options: Any) -> Any:
        if self._context.server != name:
            return await pin(self, *question, **options)
        asked.append(name)
        await asyncio.Event().wait()

    monkeypatch.setattr(ServerConnection, "pin", never)
    return asked


def impatient(running: dev.Dev) -> ClientConfig:
    return ClientConfig(
        masters=[running.address], transports=["tcp"], hedge_s=0.1, attempt_s=0.4, timeout_s=20
    )


async def test_a_silent_server_that_is_not_alone_is_left_for_another(
    two_servers: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = keys("chain", 4)
    async with two_servers.pool(impatient(two_servers)) as pool:
        await pool.write(NAMESPACE, chain, values(chain), copies=2)
        seen = {s.server for s in pool._reader._locations.get(NAMESPACE, chain)}
        asked = fall_silent(monkeypatch, *seen)
        assert set(await read_back(pool, chain)) == {ReadStatus.HIT}
        assert len(asked) == 1
        assert pool.counters["hedged"] == 1  # after hedge_s, not given up after attempt_s


def test_all_or_nothing() -> None:
    locations = LocationCache()
    locations.put(HERE, keys("a", 3))
    assert locations.get(NAMESPACE, keys("a", 3)) == [HERE] * 3
    assert locations.get(NAMESPACE, [*keys("a", 3), key("b")]) == []
    assert locations.get(Namespace("another"), keys("a", 3)) == []
    locations.discard(keys("a", 1))
    assert locations.get(NAMESPACE, keys("a", 1)) == []
    assert locations.get(NAMESPACE, keys("a", 3)[1:]) == [HERE] * 2


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    locations = LocationCache(limit=100)
    chain = keys("chain", 1000)
    locations.put(HERE, chain)
    assert 50 <= len(locations) <= 100
    assert locations.get(NAMESPACE, chain[-50:]) == [HERE] * 50
    assert locations.get(NAMESPACE, chain[:1]) == []
