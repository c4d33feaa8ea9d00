"""A server that will leave hands over what it has, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool import MasterLost, Namespace, Pool, WriteStatus, admin, moves
from kvpool.cli import run
from kvpool.cli.progress import Show
from kvpool.config import ServerConfig
from kvpool.operators import Left
from kvpool.server.block_server import BlockServer
from kvpool.server.moves import drainer
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.shares import Shares
from kvpool.types import MoveStatus, ReadStatus
from tests.conftest import NAMESPACE, key, keys, patient, value, values
from tests.support.moves import (
    SIZE,
    assert_readable,
    drain,
    keep_chains,
    masters_know,
    movers,
    moves_of,
    put,
)

TWO = Namespace("test/two", parts=2)


async def test_a_server_that_leaves_is_read_and_gets_no_writes() -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        blocks = keys("block", 50)
        await put(pool, leaving, blocks, apart=True)
        await pool.match(NAMESPACE, blocks[:1])
        await drain(leaving, 30.0)
        assert (await admin(pool).demand()).working_sets == (), "nobody has asked for them again"
        assert [m.server for m in await pool.members() if m.stats.draining] == [leaving.server]
        for number in range(20):
            digest = key(f"new {number}")
            assert await pool.write(NAMESPACE, [digest], [b"x" * SIZE]) == [WriteStatus.STORED]
            assert leaving.stack.peek(NAMESPACE, 0, digest) is None
        status = await admin(pool).write_to(leaving.server, NAMESPACE, key("there"), b"x")
        assert status is WriteStatus.NO_SPACE
        assert set(await fetch_into(pool, leaving, other, [key("new 1")])) == {MoveStatus.REFUSED}
        await assert_readable(pool, blocks)


async def fetch_into(
    pool: Pool, target: BlockServer, source: BlockServer, digests: Sequence[bytes]
) -> list[MoveStatus]:
    end = asyncio.get_running_loop().time() + 5
    return await pool._servers.call(
        target.server,
        lambda channel: moves.fetch(channel, NAMESPACE, 0, digests, source.server, deadline=end),
        end,
    )


async def test_parts_of_a_block_are_handed_over_each() -> None:
    async with movers() as running, running.pool() as pool:
        leaving = running.servers[0]
        for other in running.servers[1:]:  # placement has no choice
            other._context.draining = True
        await masters_know(*running.servers)
        chain = keys("chain", 10)
        for part in range(2):
            await pool.write(TWO, chain, values(chain, SIZE), part=part)
        assert leaving.store.index.stored == 20
        for other in running.servers[1:]:
            other._context.draining = False
        await masters_know(*running.servers)
        report = await drain(leaving, 30.0)
        assert (report.state, report.moved_blocks) == (MoveStatus.DONE, 20)
        await leaving.close()
        assert (await pool.match(TWO, chain)).length == 10


async def test_what_no_server_takes_is_left_with_its_reason_and_the_best_is_saved() -> None:
    async with movers("1MiB", servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        blocks, theirs = keys("block", 100), keys("theirs", 98)
        await put(pool, leaving, blocks, apart=True)
        await asyncio.sleep(0.05)
        await put(pool, other, theirs, apart=True)
        room = other.store.allocator.available // SIZE
        await asyncio.sleep(0.05)
        into = [bytearray(SIZE) for _ in range(10)]
        await pool.read(NAMESPACE, blocks[40:50], into)  # the only ones that are newer
        report = await drain(leaving, patient(1.0))
        assert report.state is MoveStatus.NOT_YET
        assert report.moved_blocks >= max(room, 10)
        assert report.moved_blocks == sum(
            other.stack.peek(NAMESPACE, 0, digest) is not None for digest in blocks
        )
        assert report.left_blocks == 100 - report.moved_blocks
        # With two stretches at a time, one may take the place of what the other has just brought.
        assert {one.reason for one in report.left} - {"evicted there"} == {"no room"}
        assert sum(one.blocks for one in report.left) == report.left_blocks
        assert sum(one.bytes for one in report.left) == report.left_blocks * SIZE
        assert all(other.stack.peek(NAMESPACE, 0, digest) for digest in blocks[40:50])
        stats = leaving.stats(0.0)
        assert (stats.draining, stats.drain_left_blocks) == (True, report.left_blocks)


async def test_what_a_receiver_has_evicted_again_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no block that was moved; a second drain asks anew."""
    monkeypatch.setattr(drainer, "_CHECK_STEP", 2)  # several questions
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        blocks = keys("block", 20)
        await put(pool, leaving, blocks)
        moves, gone = moves_of(leaving), blocks[:3]
        carry_out = moves.hand_over.carry_out

        async def carry_out_and_evict(*all: Any) -> None:
            await carry_out(*all)
            other.stack.remove(NAMESPACE, gone, ReadStatus.EVICTED, 0)
            other._context.on_change()
            await masters_know(other)

        moves.hand_over.carry_out = carry_out_and_evict  # type: ignore[method-assign]
        leaving.stack.remove(NAMESPACE, gone[2:], ReadStatus.REMOVED, 0)  # nobody misses it
        report = await drain(leaving, 30.0)
        assert report.state is MoveStatus.NOT_YET
        assert (report.moved_blocks, report.moved_bytes) == (17, 17 * SIZE)
        assert (report.left_blocks, report.total_blocks) == (2, 19)
        assert report.left == (Left(NAMESPACE.name, "evicted there", 2, 2 * SIZE),)
        moves.hand_over.carry_out = carry_out  # type: ignore[method-assign]
        report = await drain(leaving, 30.0)
        assert (report.state, report.left_blocks, report.moved_blocks) == (MoveStatus.DONE, 0, 2)
        await leaving.close()
        await assert_readable(pool, [one for one in blocks if one != gone[2]])


@pytest.mark.parametrize(("evicted", "within_s"), [(1, 1.0), (0, 30.0)])
async def test_a_master_that_does_not_say_at_the_end_what_is_there_holds_no_drain_up(
    monkeypatch: pytest.MonkeyPatch, evicted: int, within_s: float
) -> None:
    """What is known by then is told, and that not all is known."""
    monkeypatch.setattr(drainer, "_CHECK_STEP", 10)
    monkeypatch.setattr(drainer, "_MASTERS_S", 0.3)
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        await put(pool, leaving, keys("block", 20))
        masters, asked = moves_of(leaving).peers.masters, 0
        planned = masters.holders

        async def holders(names: Sequence[Any], *rest: Any) -> dict[Any, set[str]]:
            nonlocal asked
            if len(names) != 10:  # before the moves
                return await planned(names, *rest)
            asked += 1
            if asked == 2 and evicted:
                await asyncio.Event().wait()
            elif asked == 2:
                raise MasterLost("none answers")
            return {name: {other.server} if n >= evicted else set() for n, name in enumerate(names)}

        monkeypatch.setattr(masters, "holders", holders)
        begun = asyncio.get_running_loop().time()
        report = await drain(leaving, within_s)
        assert asyncio.get_running_loop().time() - begun < patient(5)
        assert report.state is MoveStatus.NOT_YET
        assert report.left == (Left(NAMESPACE.name, "evicted there", 1, SIZE),)[:evicted]


@pytest.mark.parametrize(
    ("servers", "count", "within_s", "why"),
    [(1, 5, 0.6, "no other server"), (2, 600, 1e-6, "not looked at")],
)
async def test_all_that_is_left_has_its_reason(
    servers: int, count: int, within_s: float, why: str
) -> None:
    async with movers(servers=servers) as running, running.pool() as pool:
        await put(pool, running.servers[0], keys("block", count), apart=True)
        report = await drain(running.servers[0], within_s)
        assert report.state is MoveStatus.NOT_YET
        assert report.left == (Left(NAMESPACE.name, why, count, count * SIZE),)
        assert (report.total_blocks, report.left_blocks) == (count, count)


async def test_a_reason_stays_when_the_time_ends_in_the_next_look() -> None:
    async with movers(servers=1) as running, running.pool() as pool:
        (server,) = running.servers
        await put(pool, server, keys("block", 5), apart=True)
        drainer, looked = moves_of(server).drainer, asyncio.Event()
        look = drainer._pass

        async def look_once() -> bool:
            await look()
            looked.set()
            for _ in drainer._planner.look(moves_of(server).hand_over.view):
                pass
            await asyncio.Event().wait()  # as if the plan took long
            return False

        drainer._pass = look_once  # type: ignore[method-assign]
        report = await drain(server, 0.6)
        assert looked.is_set()
        assert report.left == (Left(NAMESPACE.name, "no other server", 5, 5 * SIZE),)


async def test_a_new_deadline_while_the_rest_is_counted_is_kept() -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        blocks = keys("block", 20)
        await put(pool, leaving, blocks, apart=True)
        count = moves_of(leaving).drainer._count_left

        async def more_time() -> None:
            await count()
            moves_of(leaving).drainer.begin(30.0)

        moves_of(leaving).drainer._count_left = more_time  # type: ignore[method-assign]
        report = await drain(leaving, 1e-6)
        assert (report.state, report.left) == (MoveStatus.DONE, ())
        assert other.store.index.stored == 20


async def test_a_new_deadline_while_the_old_one_ends_is_kept() -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        await put(pool, leaving, keys("block", 20), apart=True)
        drainer = moves_of(leaving).drainer
        real_pass, deadlines = drainer._pass, [30.0]

        async def slow_pass() -> bool:
            try:
                return await real_pass() if not deadlines else await asyncio.Event().wait()
            finally:
                while deadlines:
                    drainer.begin(deadlines.pop())

        drainer._pass = slow_pass  # type: ignore[method-assign]
        report = await drain(leaving, 0.2)
        assert (report.state, other.store.index.stored) == (MoveStatus.DONE, 20)


async def test_two_servers_that_leave_do_not_count_on_each_other() -> None:
    async with movers() as running, running.pool() as pool:
        first, second, stays = running.servers
        blocks = keys("block", 60)
        await put(pool, first, blocks, apart=True)
        await put(pool, second, blocks, apart=True)
        reports = await asyncio.gather(drain(first, 30.0), drain(second, 30.0))
        assert {report.state for report in reports} == {MoveStatus.DONE}
        await first.close()
        await second.close()
        assert stays.store.index.stored == 60
        await assert_readable(pool, blocks)


async def test_a_copy_on_a_server_that_is_lost_meanwhile_is_made_again() -> None:
    async with movers() as running, running.pool() as pool:
        leaving, *others = running.servers
        blocks = keys("block", 100)
        await put(pool, leaving, blocks, apart=True)
        hand_over, give = moves_of(leaving).hand_over, moves_of(leaving).hand_over._give
        closed: list[BlockServer] = []

        async def lose_one(planner: Any, want: Any) -> None:
            await give(planner, want)
            holders = planner.handed.holders
            if not closed and len(holders) > 50:
                closed.append(next(one for one in others if one.server in holders.values()))
                await closed[0].close()

        hand_over._give = lose_one  # type: ignore[method-assign]
        report = await drain(leaving, 30.0)
        assert (report.state, len(closed)) == (MoveStatus.DONE, 1)
        await leaving.close()
        await assert_readable(pool, blocks)


async def test_a_drain_that_is_cancelled_leaves_an_ordinary_server() -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        moves_of(other).fetcher.budget = FetchBudget(1e5)  # slow: 100 blocks take 8 s
        blocks = keys("block", 200)
        await put(pool, leaving, blocks, apart=True)
        report = await admin(pool).drain(leaving.server, within_s=60.0)
        assert report.state is MoveStatus.IN_PROGRESS
        while (report := await admin(pool).drain_report(leaving.server)).moved_blocks == 0:
            assert report.state is MoveStatus.IN_PROGRESS
            await asyncio.sleep(0.02)
        assert 0 < report.left_blocks < 200
        report = await admin(pool).cancel_drain(leaving.server)
        assert report.state is None
        moved = moves_of(leaving).drainer._planner.handed.moved_blocks
        await asyncio.sleep(0.3)
        assert moves_of(leaving).drainer._planner.handed.moved_blocks == moved
        (member,) = [m for m in await pool.members() if m.server == leaving.server]
        assert (await admin(pool).write_to(leaving.server, NAMESPACE, key("new"), b"x")).present
        await masters_know(leaving)
        (member,) = [m for m in await pool.members() if m.server == leaving.server]
        assert not member.stats.draining
        await assert_readable(pool, blocks)


@pytest.mark.parametrize("canceller", ["waits", "is gone", "has its answer"])
async def test_a_drain_that_begins_when_another_one_is_cancelled_goes_on(canceller: str) -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, other = running.servers
        await put(pool, leaving, keys("block", 20), apart=True)
        drainer = moves_of(leaving).drainer
        real_pass, waits = drainer._pass, asyncio.Event()

        async def ends_slowly() -> bool:
            try:
                waits.set()
                return await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)

        drainer._pass = ends_slowly  # type: ignore[method-assign]
        drainer.begin(30.0)
        await waits.wait()
        cancelling = asyncio.create_task(drainer.cancel())
        await asyncio.sleep(0.01)
        drainer._pass = real_pass  # type: ignore[method-assign]
        if canceller == "is gone":
            cancelling.cancel()
        if canceller != "waits":
            await asyncio.wait([cancelling])
        drainer.begin(60.0)
        drainer.begin(30.0)  # the deadline of the second one, and not of the one that ends
        await asyncio.wait([cancelling])
        assert (await drainer.wait()).state is MoveStatus.DONE
        assert other.store.index.stored == 20
        assert leaving._context.draining


@pytest.mark.parametrize("how", ["a request", "a stop"])
async def test_a_server_that_comes_back_with_its_file_keeps_what_is_in_it(
    tmp_path: Path, how: str
) -> None:
    tiers = ["dram:256KiB", f"nvme:{tmp_path}/{{server}}:4MiB"]
    async with movers(servers=2, tiers=tiers) as running, running.pool() as pool:
        leaving, _ = running.servers
        blocks = keys("block", 80)
        await put(pool, leaving, blocks, apart=True)
        if how == "a stop":  # where a setting says so
            await run._drain(leaving, ServerConfig(drain_s=30.0, back_in_s=60.0))
        else:
            await admin(pool).drain(leaving.server, within_s=30.0, back_in_s=60.0)
        report = await moves_of(leaving).drainer.wait()
        assert (report.state, report.moved_blocks) == (MoveStatus.DONE, 0)
        assert leaving.stack.backing.index.stored == 80
        await admin(pool).cancel_drain(leaving.server)
        report = await drain(leaving, 30.0)
        assert (report.state, report.moved_blocks) == (MoveStatus.DONE, 80)
        await leaving.close()
        await assert_readable(pool, blocks)


async def test_what_others_took_over_does_not_come_back_from_the_file(tmp_path: Path) -> None:
    """Else each upgrade of a server doubles what the pool holds of its blocks."""
    tiers = ["dram:256KiB", f"nvme:{tmp_path}/{{server}}:4MiB"]
    async with movers(servers=2, tiers=tiers) as running, running.pool() as pool:
        leaving, other = running.servers
        blocks, copied = keys("block", 80), keys("copied", 20)
        await put(pool, leaving, [*blocks, *copied], apart=True)
        await put(pool, other, copied, apart=True)
        assert (await drain(leaving, 30.0)).moved_blocks == 80
        other.stack.remove(NAMESPACE, blocks[:7], ReadStatus.EVICTED)
        other._context.on_change()
        await other._context.wait_until_announced(asyncio.get_running_loop().time() + 5)
        await leaving.close()
        assert len(leaving.stack.erasures) == 0, "the file has forgotten them, too"
        kept = {entry.digest for entry in leaving.stack.backing.index.inventory()}
        assert kept == {*blocks[:7], *copied}, "what this drain has not copied, or others lack"
        await assert_readable(pool, [*blocks[7:], *copied])


@pytest.mark.parametrize(
    "why", ["it stays", "the time was over", "the other one has left", "the other one is silent"]
)
async def test_a_file_keeps_what_may_have_no_other_copy(tmp_path: Path, why: str) -> None:
    tiers = ["dram:1MiB", f"nvme:{tmp_path}/{{server}}:8MiB"]
    async with movers(servers=2, tiers=tiers) as running, running.pool() as pool:
        leaving, other = running.servers
        blocks = keys("block", 60)
        await put(pool, leaving, blocks, apart=True)
        if why == "the time was over":
            moves_of(other).fetcher.budget = FetchBudget(4 * SIZE)
            assert (await drain(leaving, 0.5)).state is MoveStatus.NOT_YET
            moved = moves_of(leaving).drainer.report().moved_blocks
            assert 0 < moved < 60
        else:
            assert (await drain(leaving, 30.0)).moved_blocks == 60
            moved = 0
        if why == "it stays":
            await admin(pool).cancel_drain(leaving.server)
        elif why == "the other one has left":
            await other.close()
        elif why == "the other one is silent":  # killed just now: masters do not know it yet
            directory = running.master.directory
            directory.servers.timeout_s, beat = 1.6, directory.servers.heartbeat
            directory.servers.heartbeat = lambda server, *rest: (  # type: ignore[method-assign]
                server == other.server or beat(server, *rest)
            )
        await leaving.close()
        assert leaving.stack.backing.index.stored == 60 - moved


async def test_what_the_file_could_not_keep_is_handed_over_although_the_server_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table of namespaces has room for two of this tenant."""
    monkeypatch.setattr("kvpool_tiers.nvme.namespaces.Shares", lambda total: Shares(4))
    tiers = ["dram:1MiB", f"nvme:{tmp_path}/{{server}}:8MiB"]
    async with movers(servers=2, tiers=tiers) as running, running.pool() as pool:
        leaving, other = running.servers
        blocks = {Namespace(f"@acme/{n}"): keys(f"b{n}", 5) for n in range(6)}
        for namespace, digests in blocks.items():
            for digest in digests:
                await admin(pool).write_to(leaving.server, namespace, digest, value(digest, SIZE))
        await admin(pool).drain(leaving.server, within_s=30.0, back_in_s=60.0)
        report = await moves_of(leaving).drainer.wait()
        assert (report.state, report.moved_blocks) == (MoveStatus.DONE, 4 * 5)
        await leaving.close()
        there = [len(other.stack.front.index.blocks(one, 0)) for one in blocks]
        assert sorted(there) == [0, 0, 5, 5, 5, 5]


async def test_a_block_that_is_written_when_the_drain_begins_is_handed_over() -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, _ = running.servers
        blocks = keys("block", 1)
        writing = asyncio.create_task(put(pool, leaving, blocks, apart=True))
        await asyncio.sleep(0)
        draining = asyncio.create_task(drain(leaving, 20.0))
        await asyncio.wait([writing])
        assert (await draining).state is MoveStatus.DONE
        await leaving.close()
        if writing.exception() is None:
            await assert_readable(pool, blocks)


async def test_a_server_that_is_stopped_shows_how_far_its_drain_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[tuple[int, int | None]] = []

    @contextmanager
    def recorded(what: str, *, quiet: bool) -> Iterator[Show]:
        assert (what, quiet) == (f"draining {leaving.server}", False)
        yield lambda done, total: shown.append((done, total))

    monkeypatch.setattr(run, "progress", recorded)
    monkeypatch.setattr(run, "_SHOW_S", 0.001)
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, _ = running.servers
        await put(pool, leaving, keys("block", 60), apart=True)
        await run._drain(leaving, ServerConfig(drain_s=30.0))
    assert shown[-1] == (60 * SIZE, 60 * SIZE)
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert len(shown) > 1


async def test_without_a_file_nothing_stays_here_although_the_server_comes_back() -> None:
    async with movers(servers=2) as running, running.pool() as pool:
        leaving, _ = running.servers
        await put(pool, leaving, keys("block", 20), apart=True)
        assert (await drain(leaving, 30.0, back_in_s=60.0)).moved_blocks == 20


async def test_servers_that_placement_does_not_draw_are_asked_when_others_are_full() -> None:
    async with movers("1MiB") as running, running.pool() as pool:
        leaving, full, roomy = running.servers
        keep_chains(full)
        blocks = keys("block", 50)
        await put(pool, leaving, blocks, apart=True)
        theirs = keys("theirs", full.store.allocator.capacity // SIZE)
        await put(pool, full, theirs, apart=True)
        full.store.pin(7, NAMESPACE, 0, theirs, asyncio.get_running_loop().time())

        async def draw(entries: Sequence[Any], copies: int) -> list[str]:
            return [full.server]

        moves_of(leaving).hand_over._place = draw  # type: ignore[method-assign]
        report = await drain(leaving, 30.0)
        assert (report.state, report.left_blocks) == (MoveStatus.DONE, 0)
        assert all(roomy.store.index.peek(NAMESPACE, 0, digest) for digest in blocks)
        await leaving.close()
        await assert_readable(pool, blocks)
