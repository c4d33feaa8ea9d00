"""A full server hands over its chains to one that joins, and readers do not notice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool import Pool, dev
from kvpool.config import ServerConfig
from kvpool.protocols import WriteOptions
from kvpool.server.block_server import BlockServer
from kvpool.server.moves.state.share_plan import ChainOwners, RoomOfOthers
from kvpool.server.moves.state.wants import PAUSE, BlockName, MoveView, Wants
from kvpool.server.state.entry import Entry
from kvpool.testing.invariants import check_invariants
from kvpool.types import FULL_SHARE, MoveStatus, WriteBlock
from tests.conftest import NAMESPACE, eventually, keys, values
from tests.support.moves import (
    SIZE,
    assert_readable,
    hand_over_chains,
    keep_chains,
    masters_know,
    movers,
    moves_of,
    now,
    put,
)

CHAINS = 24


@asynccontextmanager
async def joining(servers: int = 3, **more: Any) -> AsyncIterator[dev.Dev]:
    """Servers of which the last one has not joined yet: nobody knows that it has room."""
    async with movers("1MiB", servers, **more) as running:
        for server in running.servers:
            keep_chains(server)  # until one joins
        running.servers[-1]._context.draining = True
        await known(running)
        yield running
        for server in running.servers:
            check_invariants(server.stack)


async def known(running: dev.Dev) -> None:
    """Masters have the figures of now, and have compared the servers."""
    await masters_know(*running.servers)
    running.master.directory.servers.tick(now())


async def fill(pool: Pool, *servers: BlockServer) -> list[list[bytes]]:
    """All of them in turn, so that none is full while another one has room."""
    chains = []
    for number in range(CHAINS):
        for server in servers:
            chains.append(keys(f"{server.server} {number}", 5))
            await put(pool, server, chains[-1])
    return chains


async def join(running: dev.Dev) -> BlockServer:
    running.servers[-1]._context.draining = False
    await known(running)
    for server in running.servers:
        hand_over_chains(server)
    return running.servers[-1]


def fill_of(server: BlockServer) -> float:
    return server.stack.used_bytes / server.stack.backing.allocator.capacity


def handed_over(server: BlockServer) -> int:
    return server.stats(now()).counters["handed_over_blocks"]


async def test_full_servers_hand_over_chains_until_they_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []
    monkeypatch.setattr(RoomOfOthers, "sent", lambda _, server, size: sent.append(size))
    async with joining() as running, running.pool() as pool:
        first, second, newcomer = running.servers
        chains = await fill(pool, first, second)
        matches = [await pool.match(NAMESPACE, chain) for chain in chains]
        assert fill_of(first) >= FULL_SHARE
        await join(running)
        await eventually(lambda: max(fill_of(first), fill_of(second)) < FULL_SHARE, within_s=10)
        assert newcomer.store.index.stored == handed_over(first) + handed_over(second) > 0
        assert sum(sent) == newcomer.store.index.stored * SIZE, (
            "each of them counts what it has sent"
        )
        assert min(fill_of(first), fill_of(second)) > FULL_SHARE - 0.1, "no more than it must"
        for chain, match in zip(chains, matches, strict=True):
            holders = {
                server.server
                for server in running.servers
                for digest in chain
                if server.stack.peek(NAMESPACE, 0, digest)
            }
            assert len(holders) == 1, "a chain stays whole, and there is no second copy"
            into = [bytearray(SIZE) for _ in chain]  # what was matched before is found, too
            results = await pool.read(NAMESPACE, chain, into, match=match)
            assert all(result.status.hit for result in results)
            assert list(map(bytes, into)) == values(chain)


async def test_the_setting_keeps_chains_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "ServerConfig", partial(ServerConfig, balance=False))
    async with joining(servers=2) as running, running.pool() as pool:
        first, newcomer = running.servers
        chains = await fill(pool, first)
        await join(running)
        moves_of(first)._others_have_room()  # as a master says
        await asyncio.sleep(0.4)
        assert handed_over(first) == newcomer.store.index.stored == 0
        for chain in chains:
            await assert_readable(pool, chain)


async def test_as_much_moves_as_is_written_and_then_they_are_alike() -> None:
    async with joining() as running, running.pool() as pool:
        first, second, _ = running.servers
        chains = await fill(pool, first, second)
        await join(running)
        for number in range(CHAINS - 4):  # nearly the traffic of one capacity
            chains.append(keys(f"new {number}", 5))
            statuses = await pool.write(NAMESPACE, chains[-1], values(chains[-1], SIZE))
            assert all(status.present for status in statuses)
            for server in (first, second):
                moves_of(server).balance._plan_not_before = 0.0
            await known(running)
            # A writer is no faster than the moves that it causes.
            await eventually(
                lambda: max(fill_of(first), fill_of(second)) + 5 * SIZE / (1 << 20) <= 1,
                within_s=10,
            )
        evicted = sum(server.store.extents.evicted for server in running.servers)
        assert evicted == 0, "nothing is lost while one has room"

        def alike() -> bool:
            return min(map(fill_of, running.servers)) > 0.8 * max(map(fill_of, running.servers))

        # What was handed over last may be on its way on a machine that is busy.
        await eventually(alike, within_s=20)
        for chain in chains:
            await assert_readable(pool, chain)


def owned(server: BlockServer, running: dev.Dev, count: int, length: int) -> list[list[bytes]]:
    """Chains that belong to this server."""
    names = {one.server: one.stack.backing.allocator.capacity for one in running.servers}
    chains = (keys(f"owned {number}", length) for number in itertools.count())
    mine = (chain for chain in chains if ChainOwners(names).owner(chain[0], names) == server.server)
    return list(itertools.islice(mine, count))


async def test_what_was_sent_since_the_last_heartbeat_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with joining(servers=2) as running, running.pool() as pool:
        first, other = running.servers
        other._context.draining = False
        await put(pool, first, keys("here", 128))
        await put(pool, other, keys("there", 88))
        await known(running)
        info = (await moves_of(first).hand_over.look()).staying[other.server]
        room = RoomOfOthers()
        there = other.server
        assert not room.fits(there, info, 17 * SIZE, first.stack), "a large share of that server"
        monkeypatch.setattr("kvpool.server.moves.state.share_plan.CHAIN_SHARE", 1.0)
        assert room.fits(there, info, 19 * SIZE, first.stack)
        assert not room.fits(there, info, 21 * SIZE, first.stack), "it would be the fuller one"
        room.sent(other.server, 10 * SIZE)
        assert room.fits(there, info, 9 * SIZE, first.stack)
        assert not room.fits(there, info, 19 * SIZE, first.stack)
        newer = info._replace(used=info.used + 1)
        assert room.fits(there, newer, 19 * SIZE, first.stack)


async def test_a_chain_that_is_a_large_share_of_a_server_stays() -> None:
    """Its turn comes again before what it displaces there has been of use."""
    async with joining(servers=2) as running, running.pool() as pool:
        first, newcomer = running.servers
        newcomer._context.draining = False
        large = owned(newcomer, running, 2, 17)  # of 128 blocks
        small = owned(newcomer, running, 8, 15)[2:]
        for chain in [*large, *small]:
            await put(pool, first, chain)
        await join(running)
        await eventually(lambda: bool(handed_over(first)), 20)
        await asyncio.sleep(0.5)
        assert handed_over(first) in (15, 30, 45, 60, 75, 90), (
            "whole chains, of the small ones alone"
        )
        for chain in large:
            assert all(first.stack.peek(NAMESPACE, 0, one) for one in chain)


async def test_copies_stay_two_and_what_is_shared_stays() -> None:
    async with joining() as running, running.pool() as pool:
        first, second, newcomer = running.servers
        for number in range(CHAINS):
            for server in (first, second):
                await put(pool, server, keys(f"both {number}", 5))
        await join(running)
        await asyncio.sleep(0.4)
        assert newcomer.store.index.stored == 0
        assert handed_over(first) == handed_over(second) == 0


def refusing(status: MoveStatus) -> tuple[Any, asyncio.Event]:
    answered = asyncio.Event()

    async def refuse(*args: Any, **more: Any) -> list[MoveStatus]:
        answered.set()
        return [status] * len(args[2])

    return refuse, answered


async def test_a_block_is_forgotten_only_when_it_was_fetched() -> None:
    async with joining() as running, running.pool() as pool:
        first, second, newcomer = running.servers
        chains = await fill(pool, first)
        stays = {MoveStatus.NO_ROOM, MoveStatus.HERE, MoveStatus.CORRUPT}
        for status in stays:
            refuse, answered = refusing(status)

            for other in (second, newcomer):
                moves_of(other).fetcher.fetch = refuse  # type: ignore[method-assign]
            moves_of(first).balance._plan_not_before = 0.0
            await join(running)
            async with asyncio.timeout(5):
                await answered.wait()
            await asyncio.sleep(0.1)
            assert first.store.index.stored == 5 * CHAINS, status
        assert handed_over(first) == 0
        for chain in chains:
            await assert_readable(pool, chain)


async def test_what_is_stored_anew_while_another_one_fetches_stays() -> None:
    """It is another version, which the other one does not have."""
    async with joining(servers=2) as running, running.pool() as pool:
        first, other = running.servers
        other._context.draining = False
        chain = keys("chain", 2)
        await put(pool, first, chain)
        await known(running)
        fetch = moves_of(other).fetcher.fetch

        async def and_meanwhile(*args: Any, **more: Any) -> list[MoveStatus]:
            statuses = await fetch(*args, **more)
            first.stack.remove(NAMESPACE, chain[1:])
            options = WriteOptions(NAMESPACE, 0, visible=False)
            anew = WriteBlock(chain[1], chain[0], (memoryview(bytes(SIZE)),), SIZE)
            await pool._writer.write_on(first.server, options, [anew], now() + 10)
            return statuses

        moves_of(other).fetcher.fetch = and_meanwhile  # type: ignore[method-assign]
        names = [BlockName(NAMESPACE, 0, digest) for digest in chain]
        moves = moves_of(first)
        moves.balance.came = lambda name, *_, **__: came.append(name)  # type: ignore[method-assign]
        came = list[BlockName]()
        assert await moves.hand_over._offer(moves.balance, other.server, names) == []
        assert came == names
        assert [bool(first.stack.peek(*name)) for name in names] == [False, True]


async def test_a_chain_that_begins_elsewhere_by_now_belongs_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first block leaves between the plan and its turn."""
    async with joining(servers=2) as running, running.pool() as pool:
        first, newcomer = running.servers
        chains = await fill(pool, first)
        newcomer._context.draining = False
        await known(running)
        balance, view = moves_of(first).balance, await moves_of(first).hand_over.look()
        assert set(balance._make_plan(view)) <= {PAUSE}
        assert len(balance._plan)
        first.stack.remove(NAMESPACE, [chain[0] for chain in chains])
        handed: list[tuple[str, bytes]] = []

        def hand_over(target: str, chain: Sequence[Entry], view: MoveView) -> Wants:
            handed.append((target, chain[0].digest))
            yield PAUSE

        monkeypatch.setattr(balance, "_hand_over", hand_over)
        monkeypatch.setattr("kvpool.server.moves.state.share_plan.is_full", lambda _: True)
        assert set(balance.wants(view)) == {PAUSE}
        shares = ChainOwners({server.server: 1 for server in running.servers})
        names = [server.server for server in running.servers]
        assert 0 < len(handed) < CHAINS
        for target, head in handed:
            assert shares.owner(head, names) == target


async def test_a_server_that_leaves_is_handed_nothing_and_hands_over_by_its_drain() -> None:
    async with joining() as running, running.pool() as pool:
        first, second, _ = running.servers
        await fill(pool, first, second)
        second._context.draining = True  # both others leave
        await known(running)
        for server in running.servers:
            hand_over_chains(server)
        await asyncio.sleep(0.4)
        assert handed_over(first) == handed_over(second) == 0


async def test_blocks_of_the_disk_move_too_and_stay_away(tmp_path: Path) -> None:
    tiers = ["dram:512KiB", f"nvme:{tmp_path}/{{server}}:2MiB"]
    async with joining(tiers=tiers, servers=2) as running, running.pool() as pool:
        first, newcomer = running.servers
        chains = [keys(f"chain {number}", 5) for number in range(60)]
        for chain in chains:
            await put(pool, first, chain)
        await eventually(lambda: not first.stack.is_writing_back, within_s=10)
        stored = sum(1 for c in chains for d in c if first.stack.peek(NAMESPACE, 0, d))
        if fill_of(first) < FULL_SHARE:
            pytest.fail(f"{fill_of(first)} is not full")
        await join(running)
        await eventually(lambda: fill_of(first) < FULL_SHARE, within_s=10)
        moved = handed_over(first)
        assert newcomer.stack.stored >= moved > 0
        left = sum(1 for c in chains for d in c if first.stack.peek(NAMESPACE, 0, d))
        assert left == stored - moved
        await eventually(lambda: not len(first.stack.erasures))  # after a restart they are not back
