"""What a client sees of the whole pool: where blocks are, and what changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpool import BadKey, Namespace, PoolEvent, PoolEventKind, Replica, dev
from kvpool.client import pool_events
from kvpool.client.pool_events import EventPosition
from kvpool.errors import MasterLost
from kvpool.runtime import this_host
from tests.conftest import NAMESPACE, eventually, keys, patient, values
from tests.support.messages import ChangesReply, Message


async def until(events: AsyncIterator[PoolEvent], kind: PoolEventKind) -> PoolEvent:
    async with asyncio.timeout(10):
        async for event in events:
            if event.kind is kind:
                return event
    raise AssertionError(kind)


async def test_events_begin_with_all_that_is_there_and_go_on(pool_dev: dev.Dev) -> None:
    chain = keys("chain", 4)
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain[:2], values(chain[:2]))
        events = pool.events()
        assert (await anext(events)).kind is PoolEventKind.RESET
        server = await anext(events)
        assert (server.kind, server.host) == (PoolEventKind.BACK, this_host().id)
        stored = await until(events, PoolEventKind.STORED)
        assert set(stored.digests) == set(chain[:2])
        assert (stored.namespace, stored.tier, stored.part) == (NAMESPACE, "dram", 0)
        await until(events, PoolEventKind.LIVE)
        await pool.write(NAMESPACE, chain[2:], values(chain[2:]), parent=chain[1])
        assert (await until(events, PoolEventKind.STORED)).digests == tuple(chain[2:])
        await pool.remove(NAMESPACE, chain[:1])
        gone = await until(events, PoolEventKind.REMOVED)
        assert (gone.digests, gone.server) == ((chain[0],), server.server)
        await pool_dev.servers[0].close()
        left = await until(events, PoolEventKind.LEFT)
        assert left.server == server.server
        assert [one.left for one in await pool.members()] == [True]
        snapshot = pool.events()
        assert (await until(snapshot, PoolEventKind.LEFT)).server == server.server


async def test_events_go_on_behind_a_position(pool_dev: dev.Dev) -> None:
    chain = keys("chain", 2)
    async with pool_dev.pool() as pool:
        live = await until(pool.events(), PoolEventKind.LIVE)
        await pool.write(NAMESPACE, chain, values(chain))
        again = pool.events(live.position)
        async with asyncio.timeout(10):
            stored = await anext(again)
        assert (stored.kind, stored.digests) == (PoolEventKind.STORED, tuple(chain))
        assert stored.position.number > live.position.number


async def test_a_lost_master_and_its_return_are_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who reads the events sees a stream that stands still, and not why."""
    monkeypatch.setattr(pool_events, "_RETRY_S", 0.001)

    class Masters:
        asked = 0

        async def ask(self, message: Message, answer: type[Any], deadline: float) -> Any:
            self.asked += 1
            if self.asked <= 4:
                raise MasterLost("no master answers")
            return ChangesReply(b"s", 7, [], more=False, gap=False)

    masters = Masters()
    reader = pool_events.EventReader(masters, lambda: 0.0, EventPosition(b"s", 7))
    assert reader.behind_s == 0.0
    reading = asyncio.create_task(anext(reader))  # type: ignore[arg-type]
    with caplog.at_level("INFO", "kvpool.client"):
        await eventually(lambda: masters.asked > 8)
    reading.cancel()
    words = [record.getMessage() for record in caplog.records]
    assert [one.split(" why=")[0] for one in words] == [
        "no changes of the map arrive",
        "changes of the map arrive again",
    ]
    assert "no master answers" in words[0]


async def test_a_reader_tells_for_how_long_it_has_known_nothing_new(pool_dev: dev.Dev) -> None:
    async with pool_dev.pool() as pool:
        events = pool.events()
        await anext(events)  # RESET: the snapshot has begun
        await asyncio.sleep(0.2)
        assert events.behind_s >= 0.2
        reading = asyncio.create_task(until(events, PoolEventKind.LOST))
        await eventually(lambda: events.behind_s < 0.2)
        await asyncio.sleep(0.4)
        assert events.behind_s < patient(0.3)
        await pool_dev.master.close()
        await eventually(lambda: events.behind_s > 1)
        reading.cancel()


async def test_where_says_which_blocks_are_there_in_whatever_order(pool_dev: dev.Dev) -> None:
    chain = keys("chain", 3)
    async with pool_dev.pool() as pool:
        server = (await pool.members())[0].server
        await pool.write(NAMESPACE, chain, values(chain))
        await pool.remove(NAMESPACE, [chain[0]])
        first, second, third = await pool.where(NAMESPACE, [chain[2], chain[0], chain[1]])
        assert second is None
        assert first == third
        assert (first.near, first.tier) == (True, "dram")
        assert first.replicas == (Replica(server, "dram"),)
        assert await pool.where(Namespace("nothing"), chain) == [None] * 3
        with pytest.raises(BadKey):
            await pool.where(NAMESPACE, [chain[0], chain[1][:16]])


async def test_a_server_that_no_member_list_has_is_not_asked_for_with_each_call(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, asked = keys("chain", 3), pool_dev.master.requests
    async with pool_dev.pool() as pool:
        await pool.write(NAMESPACE, chain, values(chain))
        monkeypatch.setattr(pool._servers, "_update", lambda member: None)
        pool._servers.known.clear()
        before = asked["members"]
        for _ in range(20):
            (found, *_) = await pool.where(NAMESPACE, chain)
            assert not found.near
        assert asked["members"] <= before + 1


async def test_who_observes_asks_for_nothing(pool_dev: dev.Dev) -> None:
    """Otherwise blocks that routers are told of would count as the working set."""
    chain = keys("chain", 3)
    asked: list[int] = []
    meter = pool_dev.master.clients._demand
    before = meter.asked_chain
    meter.asked_chain = lambda *of: asked.append(len(of[1]))  # type: ignore[method-assign]
    async with pool_dev.pool() as pool:
        await pool.where(NAMESPACE, chain)
        assert not asked
        await pool.match(NAMESPACE, chain)
        assert asked == [3]
    meter.asked_chain = before  # type: ignore[method-assign]
