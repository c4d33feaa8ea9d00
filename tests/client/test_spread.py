"""Copies of a chain are where they will be read before the readers come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from kvpool import MasterLost, Namespace, Pool, ServerConfig, UsageError, admin, dev
from kvpool.client import spread as spread_module
from kvpool.client.spread import SpreadTo
from kvpool.errors import BadMessage
from kvpool.server.block_server import BlockServer
from kvpool.server.moves.fetcher import Fetcher
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.testing.invariants import check_invariants
from kvpool.types import MoveStatus, ReadStatus, WriteStatus
from tests.conftest import NAMESPACE, buffers, keys, values
from tests.support.moves import moves_of

CHAIN = keys("shared", 100)
LISTEN = ("inproc://",)


def holding(running: dev.Dev, digests: Sequence[bytes]) -> list[BlockServer]:
    return [
        server
        for server in running.servers
        if all(server.stack.peek(NAMESPACE, 0, digest) for digest in digests)
    ]


def check(running: dev.Dev) -> None:
    for server in running.servers:
        check_invariants(server.stack)
        assert not server.store.held.reservations
        assert len(moves_of(server).fetcher.fetches) == 0


async def write(pool: Pool, chain: Sequence[bytes] = CHAIN) -> None:
    assert all(one.present for one in await pool.write(NAMESPACE, chain, values(chain)))


async def test_a_chain_is_on_as_many_servers_as_asked_and_is_not_moved_twice() -> None:
    async with dev.serve("8MiB", servers=5, listen=LISTEN) as running, running.pool() as pool:
        await write(pool)
        (first,) = holding(running, CHAIN)
        report = await admin(pool).spread(NAMESPACE, CHAIN, to=4)
        assert (report.length, report.stopped, report.complete) == (100, ReadStatus.HIT, True)
        assert [(one.blocks, one.fetched, one.problem) for one in report.servers] == [
            (100, 100, "")
        ] * 3
        entries = [one.store.index.peek(NAMESPACE, 0, CHAIN[0]) for one in holding(running, CHAIN)]
        assert sorted(one.copies for one in entries if one) == [0, 0, 0, 1], "extra ones go first"
        assert pool.counters["spread_blocks"] == 300
        again = await admin(pool).spread(NAMESPACE, CHAIN, to=4)
        assert (again.servers, again.complete) == ((), True)
        everywhere = await admin(pool).spread(
            NAMESPACE, CHAIN, to=[one.server for one in running.servers]
        )
        assert sorted(one.fetched for one in everywhere.servers) == [0, 0, 0, 0, 100]
        await first.close()
        into = buffers(100)
        assert all(one.status.hit for one in await pool.read(NAMESPACE, CHAIN, into))
        assert into == values(CHAIN)
        check(running)


async def test_what_has_no_room_or_is_lost_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "ServerConfig", partial(ServerConfig, balance=False))
    async with dev.serve("2MiB", servers=4, listen=LISTEN) as running, running.pool() as pool:
        await write(pool)
        (first,) = holding(running, CHAIN)
        full, gone, good = [one for one in running.servers if one is not first]
        busy = keys("busy", 200)  # used after the chain, and nearly all of that server
        for one in busy:
            status = await admin(pool).write_to(full.server, NAMESPACE, one, values([one])[0])
            assert status is WriteStatus.STORED
        await gone.close()
        report = await admin(pool).spread(NAMESPACE, CHAIN, to=[full.server, gone.server, "?"])
        assert not report.complete
        rest = await admin(pool).spread(NAMESPACE, CHAIN, to=[good.server])  # its reads are uses
        found = {one.server: one for one in (*report.servers, *rest.servers)}
        assert found[full.server].problem == "no room"
        assert 0 < found[full.server].blocks < 100
        assert found[gone.server] == SpreadTo(gone.server, 0, 0, "server lost")
        assert found["?"] == SpreadTo("?", 0, 0, "no such name")
        assert found[good.server] == SpreadTo(good.server, 100, 100, "")
        count = found[full.server].blocks
        here = [full.stack.peek(NAMESPACE, 0, one) is not None for one in CHAIN]
        assert here == [True] * count + [False] * (100 - count)
        assert all(holding(running, [one]) for one in busy)
        check(running)


async def test_it_ends_by_its_timeout_and_goes_on_later() -> None:
    async with dev.serve("8MiB", servers=3, listen=LISTEN) as running, running.pool() as pool:
        await write(pool)
        for server in running.servers:
            moves_of(server).fetcher.budget = FetchBudget(200e3)  # 800 KB takes 4 s
        loop = asyncio.get_running_loop()
        began = loop.time()
        report = await admin(pool).spread(NAMESPACE, CHAIN, to=3, timeout=1.0)
        assert loop.time() - began < 1.5
        assert {one.problem for one in report.servers} == {"no time was left"}
        await asyncio.sleep(0.5)
        check(running)  # nothing of the call is left
        for server in running.servers:
            moves_of(server).fetcher.budget = FetchBudget(1e9)
        report = await admin(pool).spread(NAMESPACE, CHAIN, to=3)
        assert report.complete
        assert sum(one.fetched for one in report.servers) < 200
        check(running)


async def test_all_parts_are_brought() -> None:
    halves = Namespace("halves", 2)
    async with dev.serve("8MiB", servers=4, listen=LISTEN) as running, running.pool() as pool:
        for part in range(2):
            await pool.write(halves, CHAIN, values(CHAIN), part=part)
        report = await admin(pool).spread(halves, CHAIN, to=4)
        assert report.complete
        for server in running.servers:
            for part in range(2):
                assert all(server.stack.peek(halves, part, digest) for digest in CHAIN)


async def test_a_server_that_breaks_the_protocol_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*arguments: object, **more: object) -> list[MoveStatus]:
        raise BadMessage("message type 21 is not a request")

    async with dev.serve("8MiB", servers=2, listen=LISTEN) as running, running.pool() as pool:
        await write(pool)
        monkeypatch.setattr(Fetcher, "fetch", refuse)
        (one,) = (await admin(pool).spread(NAMESPACE, CHAIN, to=2)).servers
        assert (one.blocks, one.problem) == (0, "server lost")


async def test_wrong_calls() -> None:
    async with dev.serve("8MiB", listen=LISTEN) as running, running.pool() as pool:
        for wrong in (0, -1, [], "dev-0", 257):
            with pytest.raises(UsageError, match="to is"):
                await admin(pool).spread(NAMESPACE, CHAIN, to=wrong)
        await running.master.close()
        with pytest.raises(MasterLost):
            await admin(pool).spread(NAMESPACE, CHAIN, to=1, timeout=0.3)


async def test_a_cancelled_spread_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_module, "_FETCH_S", 30.0)
    async with dev.serve("8MiB", servers=4, listen=LISTEN) as running, running.pool() as pool:
        await write(pool)
        for server in running.servers:
            moves_of(server).fetcher.budget = FetchBudget(100e3)
        for delay_s in (0.0, 0.003, 0.05, 0.3):
            task = asyncio.create_task(admin(pool).spread(NAMESPACE, CHAIN, to=4, timeout=30))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(0.1)
            check(running)
            assert asyncio.all_tasks().isdisjoint({task})
