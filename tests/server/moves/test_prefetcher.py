"""Blocks that come up from a slower tier before they are read: in time, bounded, and counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool import MoveStatus, Pool, ReadStatus, WriteStatus, dev
from kvpool.errors import InvariantViolated
from kvpool.moves import moved
from kvpool.protocols import Peer, ReserveRequest
from kvpool.server.block_server import BlockServer
from kvpool.server.moves import prefetcher
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.server.moves.state.prefetch_queue import Chain, PrefetchQueue
from kvpool.server.promotions import Promotions
from kvpool.server.state import prefetches, tier_transfers, writeback_queue
from kvpool.server.state.entry import Entry, Index
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.prefetches import PrefetchedBlocks
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.server.tier_bytes import TierBytes
from kvpool.testing.invariants import check_invariants
from kvpool.types import ARRIVED, ROOT, Namespace, SessionHint
from tests.conftest import NAMESPACE, buffers, eventually, key, keys, values
from tests.server.test_tier_stack import spoil
from tests.server.test_tiered_store import ONE, PAGE, Server
from tests.support import messages as wire
from tests.support.moves import prefetcher_of

BLOCK = 64 << 10
IN_MEMORY, COMING = MoveStatus.HERE, MoveStatus.IN_PROGRESS
GONE, REFUSED = MoveStatus.GONE, MoveStatus.REFUSED


# --- the queue ---------------------------------------------------------------------------


def chain_of(name: str, count: int = 3) -> Chain:
    return Chain(NAMESPACE, 0, deque(keys(name, count)))


def test_chains_take_turns_until_they_are_empty_or_their_time_is_over() -> None:
    queue = PrefetchQueue(3)
    a, b, c = chain_of("a"), chain_of("b"), chain_of("c")
    assert queue.add(a, 10.0)
    assert queue.add(b, 20.0)
    assert queue.add(c, 30.0)
    assert not queue.add(chain_of("d"), 30.0), "it has a bound"
    assert [queue.next(1.0) for _ in range(4)] == [a, b, c, a]
    b.digests.clear()
    assert [queue.next(1.0) for _ in range(3)] == [c, a, c]
    assert queue.next(10.0) is c, "the time of a is over"
    assert queue.next(30.0) is None
    assert len(queue) == 0


def test_chains_of_one_tenant_leave_room_for_those_of_others() -> None:
    queue = PrefetchQueue(8)

    def ask(tenant: str, until: float) -> bool:
        return queue.add(Chain(Namespace(f"@{tenant}/m"), 0, deque(keys(tenant, 2))), until)

    for now in (0.0, 10.0, 20.0):
        assert [ask("acme", now + 10) for _ in range(9)] == [True] * 4 + [False] * 5
        assert ask("globex", now + 10)
        turns = [queue.next(now + 9) for _ in range(4)]
        assert [one.namespace.name for one in turns if one] == ["@acme/m", "@globex/m"] * 2
        assert queue.next(now + 10) is None, "their time is over: there is room again"


# --- the blocks --------------------------------------------------------------------------


class Tiers(Server):
    """Eight blocks of memory above a file, whose other blocks are all older than `FRESH_S`."""

    def __init__(self, memory: int = 8) -> None:
        super().__init__(memory, 64)

    def store(self, chain: list[bytes], session: str = "") -> None:
        self.now += 10
        hint = SessionHint(session) if session else None
        parents, sizes = [ROOT, *chain[:-1]], [PAGE] * len(chain)
        request = ReserveRequest(ONE, 0, chain, parents, sizes, hint)
        for digest, answer in zip(chain, self.stack.reserve(7, request, self.now), strict=True):
            assert answer.extent is not None
            self.memory[0][answer.extent.offset] = (ONE, 0, digest)
            self.stack.seal(7, answer.id, hash((ONE, 0, digest)) & 0xFFFF, self.now)
        self.settle()
        self.now += 10

    def prefetch(self, chain: list[bytes], size: int = 1 << 30) -> int:
        """How many of the blocks have come up."""
        copies = self.stack.transfers.start_promotions(ONE, 0, chain, size, self.now, prefetch=True)
        for copy in copies:
            self.finish(copy)
        return len(copies)

    @property
    def blocks(self) -> PrefetchedBlocks:
        return self.stack.front.extents.prefetched

    def in_memory(self, chain: Sequence[bytes]) -> list[bool]:
        return [self.stack.front.index.peek(ONE, 0, digest) is not None for digest in chain]


def filled() -> tuple[Tiers, list[bytes], list[bytes]]:
    """Memory is full of the second chain; the first is below."""
    tiers = Tiers()
    old, new = keys("old", 4), keys("new", 8)
    tiers.store(old)
    tiers.store(new)
    assert not any(tiers.in_memory(old))
    return tiers, old, new


def test_a_block_that_is_read_is_used_and_one_that_is_removed_is_wasted() -> None:
    tiers, old, _ = filled()
    assert tiers.prefetch(old) == 4
    blocks = tiers.blocks
    assert (len(blocks), blocks.came, blocks.bytes) == (4, 4 * PAGE, 4 * PAGE)
    assert tiers.read(1, ONE, 0, old[:2]) == [ReadStatus.HIT] * 2
    assert (blocks.used, blocks.wasted, blocks.bytes) == (2 * PAGE, 0, 2 * PAGE)
    tiers.stack.remove(ONE, old[3:])
    assert (blocks.used, blocks.wasted, blocks.bytes) == (2 * PAGE, PAGE, PAGE)
    tiers.read(1, ONE, 0, old[:3])
    assert (blocks.came, blocks.used, blocks.wasted) == (4 * PAGE, 3 * PAGE, PAGE)
    check_invariants(tiers.stack)


def test_what_nobody_reads_is_evicted_next() -> None:
    """Of what a stranger brings up, nothing stays for longer than the blocks that it displaced."""
    tiers, old, new = filled()
    tiers.prefetch(old[:2])
    assert tiers.in_memory(new) == [True] * 6 + [False] * 2
    tiers.now += prefetches.HOLD_S
    tiers.stack.front.extents.drop_lapsed(tiers.now)
    assert (tiers.blocks.wasted, tiers.blocks.bytes) == (2 * PAGE, 0)
    tiers.store(keys("more", 2))
    assert tiers.in_memory(old[:2]) == [False, False]
    assert tiers.in_memory(new) == [True] * 6 + [False] * 2


def test_while_it_waits_for_its_reader_other_blocks_are_evicted() -> None:
    tiers, old, new = filled()
    tiers.prefetch(old[:2])
    tiers.store(keys("more", 4))
    assert tiers.in_memory(old[:2]) == [True, True]
    assert tiers.in_memory(new) == [True] * 2 + [False] * 6


def test_a_writer_for_whom_nothing_else_can_go_takes_its_place_tail_first() -> None:
    tiers, old, _ = filled()
    tiers.prefetch(old[:3])
    tiers.store(keys("more", 6))
    assert tiers.in_memory(old) == [True, True, False, False]
    assert (tiers.blocks.wasted, tiers.blocks.bytes) == (3 * PAGE, 0)
    check_invariants(tiers.stack)


def test_it_evicts_nothing_that_was_used_a_moment_ago() -> None:
    tiers, old, new = filled()
    tiers.read(1, ONE, 0, new)
    tiers.drop(1)
    tiers.now += prefetches.FRESH_S - 0.1
    assert tiers.prefetch(old) == 0
    assert all(tiers.in_memory(new))
    tiers.now += 0.2
    assert tiers.prefetch(old) == 4


@pytest.mark.parametrize("announced", ["sooner", "later", "waits", "ended"])
def test_it_evicts_no_block_of_a_session_that_is_needed_sooner(announced: str) -> None:
    tiers = Tiers()
    old, new = keys("old", 4), keys("new", 8)
    tiers.store(old, "returns")
    tiers.store(new, "other")
    tiers.stack.hint("returns", 5.0, tiers.now)
    match announced:
        case "sooner":
            tiers.stack.hint("other", 2.0, tiers.now)
        case "later":
            tiers.stack.hint("other", 60.0, tiers.now)
        case "waits":
            tiers.stack.hint("other", ARRIVED, tiers.now)
        case "ended":
            tiers.stack.hint("other", None, tiers.now)
    evicts = announced in ("later", "ended")
    assert tiers.prefetch(old) == (4 if evicts else 0)
    assert all(tiers.in_memory(new)) is not evicts


def test_parts_leave_together_so_a_hint_about_one_of_them_keeps_all() -> None:
    """Another session wrote one part, too: hints are about the other parts only."""
    tiers = Tiers()
    tiers.store(keys("old", 4), "returns")
    tiers.stack.hint("returns", 60.0, tiers.now)
    two, chain = Namespace("two", parts=2), keys("new", 4)
    for part, session in ((0, "one"), (1, "other"), (0, "other")):
        hint = SessionHint(session)
        request = ReserveRequest(two, part, chain, [ROOT, *chain[:-1]], [PAGE] * 4, hint)
        for digest, answer in zip(chain, tiers.stack.reserve(7, request, tiers.now), strict=True):
            if answer.extent is not None:
                tiers.memory[0][answer.extent.offset] = (two, part, digest)
                tiers.stack.seal(7, answer.id, hash((two, part, digest)) & 0xFFFF, tiers.now)
    tiers.settle()
    tiers.stack.hint("other", 5.0, tiers.now)
    assert tiers.prefetch(keys("old", 4)) == 0
    tiers.stack.hint("other", None, tiers.now)
    assert tiers.prefetch(keys("old", 4)) == 0, "the part that no session owns was just used"
    tiers.now += prefetches.FRESH_S + 0.1
    assert tiers.prefetch(keys("old", 4)) == 4
    check_invariants(tiers.stack)


def test_blocks_on_their_way_take_room_until_they_are_read_or_have_failed() -> None:
    tiers, old, _ = filled()
    memory = prefetches.SHARE * 4 * PAGE
    copies = tiers.stack.transfers.start_promotions(
        ONE, 0, old[:3], 1 << 30, tiers.now, prefetch=True
    )
    assert tiers.blocks.room(memory, "") == PAGE
    tiers.finish(copies[0])
    assert tiers.blocks.room(memory, "") == PAGE, "what has come takes the room that it took before"
    tiers.finish(copies[1], good=False)
    assert tiers.blocks.room(memory, "") == 2 * PAGE
    tiers.stack.remove(ONE, old[2:3])
    tiers.finish(copies[2])
    assert tiers.blocks.room(memory, "") == 3 * PAGE
    tiers.read(1, ONE, 0, old[:1])
    assert tiers.blocks.room(memory, "") == 4 * PAGE


def test_what_comes_up_of_one_tenant_leaves_room_for_others() -> None:
    blocks, memory = PrefetchedBlocks(), prefetches.SHARE * 8 * PAGE
    mine = Entry(Index(Namespace("@acme/m"), 0, 0), b"", ROOT, 0, PAGE, 1)
    blocks.add(mine, 7 * PAGE, 1.0)
    assert (blocks.room(memory, "acme"), blocks.room(memory, "")) == (0, PAGE)
    blocks.read(mine)
    assert blocks.room(memory, "acme") == 4 * PAGE


def test_the_check_finds_a_wrong_account() -> None:
    tiers, old, _ = filled()
    tiers.prefetch(old)
    tiers.blocks.bytes += 1
    with pytest.raises(InvariantViolated, match="count of prefetched bytes"):
        check_invariants(tiers.stack.front)


def test_giving_up_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "_STEP", 3)
    tiers, old, _ = filled()
    tiers.prefetch(old)
    assert len(tiers.blocks.give_up(lambda entry: True)) == 3
    assert [entry.digest for entry in tiers.blocks] == old[:1], "tails first"
    assert len(FrontStore(PAGE).extents.prefetched.give_up(lambda entry: True)) == 0


# --- a server ----------------------------------------------------------------------------


@asynccontextmanager
async def serving(
    tmp_path: Path, *below: Sequence[bytes], rate: int = 0
) -> AsyncIterator[tuple[BlockServer, Pool]]:
    """With these chains, which other blocks have displaced from memory."""
    tiers = ["dram:4MiB", f"nvme:{tmp_path}/tier:32MiB"]
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        (server,) = running.servers
        prefetcher_of(server).budget = FetchBudget(rate)
        for chain in below:
            await put(server, pool, chain)
        for number in range(3 * bool(below)):
            await put(server, pool, keys(f"filler {number}", 30))
        yield server, pool
        check_invariants(server.stack)


async def put(server: BlockServer, pool: Pool, chain: Sequence[bytes]) -> None:
    statuses = await pool.write(NAMESPACE, chain, values(chain, BLOCK))
    assert set(statuses) == {WriteStatus.STORED}
    await eventually(lambda: not server.stack.queue.waiting and not server.stack.front.held.pins)


def in_memory(server: BlockServer, chain: Sequence[bytes]) -> int:
    return sum(server.store.index.peek(NAMESPACE, 0, digest) is not None for digest in chain)


def counters(server: BlockServer) -> dict[str, int]:
    found = server.stats(asyncio.get_running_loop().time()).counters
    return {name.removeprefix("prefetch_"): count for name, count in found.items()}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory has may go at once."""
    monkeypatch.setattr(tier_transfers, "FRESH_S", 0.0)


@pytest.mark.usefixtures("soon")
async def test_a_chain_comes_up_and_is_read_from_memory(tmp_path: Path) -> None:
    chain = keys("chain", 6)
    async with serving(tmp_path, chain) as (server, pool):
        assert in_memory(server, chain) == 0
        asked = [*chain, key("never")]
        assert await pool.prefetch(NAMESPACE, asked) == [COMING] * 6 + [GONE]
        await eventually(lambda: in_memory(server, chain) == 6)
        assert await pool.prefetch(NAMESPACE, chain) == [IN_MEMORY] * 6
        hits = server.stack.index.hits[1]
        got = buffers(6, BLOCK)
        results = await pool.read(NAMESPACE, chain, got)
        assert {result.status for result in results} == {ReadStatus.HIT}
        assert got == values(chain, BLOCK)
        assert server.stack.index.hits[1] == hits, "no disk was read for it"
        found = counters(server)
        size = 6 * BLOCK
        assert (found["prefetched_blocks"], found["prefetched_bytes"]) == (6, size)
        assert (found["used_bytes"], found["wasted_bytes"], found["unread_bytes"]) == (size, 0, 0)
        assert pool.counters["prefetch_coming"] == 6
        assert pool.counters["prefetch_gone"] == 1


async def test_each_block_of_a_request_has_its_own_answer(tmp_path: Path) -> None:
    """Some may have come up, or left, since the client asked a master where they are."""
    chain = keys("chain", 4)
    async with serving(tmp_path, chain) as (server, pool):
        await pool.read(NAMESPACE, chain[:1], buffers(1, BLOCK))
        await pool.read(NAMESPACE, chain[2:3], buffers(1, BLOCK))
        asked = [*chain, key("never")]
        connection = server.connect(Peer("client"))
        answer = await connection.answer(wire.Prefetch(*wire.keys_of(NAMESPACE, asked), 0))
        assert moved(answer, len(asked)) == [IN_MEMORY, COMING, IN_MEMORY, COMING, GONE]
        connection.close()


@pytest.mark.usefixtures("soon")
async def test_an_eighth_of_the_memory_comes_up_and_the_rest_when_that_is_read(
    tmp_path: Path,
) -> None:
    chain = keys("chain", 40)
    async with serving(tmp_path, chain) as (server, pool):
        await pool.prefetch(NAMESPACE, chain)
        await eventually(lambda: in_memory(server, chain) == 8)
        await asyncio.sleep(0.3)
        assert in_memory(server, chain) == in_memory(server, chain[:8]) == 8, "the head first"
        await pool.read(NAMESPACE, chain[:5], buffers(5, BLOCK))
        await eventually(lambda: in_memory(server, chain) == 13)


@pytest.mark.usefixtures("soon")
async def test_no_more_comes_up_when_the_disk_is_slower_than_a_step_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a step that is left behind still come: they take their part of the eighth."""
    monkeypatch.setattr(prefetcher, "_STEP_S", 0.05)
    moves, disk = TierBytes.move, asyncio.Event()

    async def slow(mover: TierBytes, copy: TierTransfer) -> bool:
        await disk.wait()
        return await moves(mover, copy)

    chain = keys("chain", 40)
    async with serving(tmp_path, chain) as (server, pool):
        monkeypatch.setattr(TierBytes, "move", slow)
        await pool.prefetch(NAMESPACE, chain)
        await asyncio.sleep(0.5)
        assert in_memory(server, chain) == 0
        disk.set()
        await eventually(lambda: in_memory(server, chain) == 8)
        await asyncio.sleep(0.3)
        assert counters(server)["prefetched_blocks"] == 8


@pytest.mark.usefixtures("soon")
async def test_what_comes_up_is_paid_for(tmp_path: Path) -> None:
    """At 5 blocks per second, three need 0.4 s: each is paid for before the next one begins."""
    chains = [keys(f"chain {number}", 1) for number in range(3)]
    async with serving(tmp_path, *chains, rate=5 * BLOCK) as (server, pool):
        began = asyncio.get_running_loop().time()
        for chain in chains:
            await pool.prefetch(NAMESPACE, chain)
        await eventually(lambda: all(in_memory(server, chain) for chain in chains))
        assert 0.39 < asyncio.get_running_loop().time() - began < 3.0


class NotedBudget(FetchBudget):
    """Notes the bytes that have moved."""

    def __init__(self) -> None:
        super().__init__(0)
        self.moved = 0

    def end(self, price_s: float, planned: int, moved: int, seconds: float) -> None:
        self.moved += moved
        super().end(price_s, planned, moved, seconds)


@pytest.mark.usefixtures("soon")
async def test_a_damaged_block_is_no_sign_of_a_fast_disk(tmp_path: Path) -> None:
    """What did not come up must not raise the rate at which further blocks come up."""
    chain = keys("chain", 6)
    async with serving(tmp_path, chain) as (server, pool):
        spoil(tmp_path / "tier", values(chain[5:], BLOCK)[0])
        budget = prefetcher_of(server).budget = NotedBudget()
        await pool.prefetch(NAMESPACE, chain)
        await eventually(lambda: in_memory(server, chain) == 5)
        await eventually(lambda: server.stack.backing.index.peek(NAMESPACE, 0, chain[5]) is None)
        await eventually(lambda: budget.moved >= 5 * BLOCK)
        assert budget.moved == 5 * BLOCK


@pytest.mark.parametrize("writers_wait", [False, True])
async def test_writing_back_lets_readers_go_first_unless_writers_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers_wait: bool
) -> None:
    waited: list[Promotions] = []
    wait = Promotions.wait_for_readers

    async def noted(mover: Promotions) -> None:
        waited.append(mover)
        await wait(mover)

    monkeypatch.setattr(Promotions, "wait_for_readers", noted)
    pressure = property(lambda _: writers_wait)
    monkeypatch.setattr(writeback_queue.WritebackQueue, "is_under_pressure", pressure)
    async with serving(tmp_path) as (server, pool):
        for number in range(2):
            await put(server, pool, keys(f"chain {number}", 60))
        assert (len(waited) > 0) is not writers_wait


async def test_what_was_used_a_moment_ago_stays(tmp_path: Path) -> None:
    chain = keys("chain", 6)
    async with serving(tmp_path, chain) as (server, pool):
        assert await pool.prefetch(NAMESPACE, chain) == [COMING] * 6
        await asyncio.sleep(0.5)
        assert in_memory(server, chain) == 0
        assert counters(server)["prefetched_blocks"] == 0
        await eventually(lambda: in_memory(server, chain) == 6, within_s=5), "two seconds later"


@pytest.mark.usefixtures("soon")
async def test_a_prefetch_that_nobody_reads_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetches, "HOLD_S", 0.3)
    chain = keys("chain", 4)
    async with serving(tmp_path, chain) as (server, pool):
        await pool.prefetch(NAMESPACE, chain)
        await eventually(lambda: in_memory(server, chain) == 4)
        await eventually(lambda: counters(server)["wasted_bytes"] == 4 * BLOCK)
        assert counters(server)["unread_bytes"] == counters(server)["used_bytes"] == 0


@pytest.mark.usefixtures("soon")
async def test_beyond_the_bound_of_the_queue_requests_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "_QUEUE_MAX", 2)
    chains = [keys(f"chain {number}", 3) for number in range(4)]
    async with serving(tmp_path, *chains, rate=1) as (server, pool):  # nothing is ever paid for
        await pool.prefetch(NAMESPACE, chains[0][:1])
        await eventually(lambda: in_memory(server, chains[0]) == 1)
        statuses = [await pool.prefetch(NAMESPACE, chain) for chain in chains[1:]]
        assert statuses == [[COMING] * 3, [COMING] * 3, [REFUSED] * 3]
        assert counters(server)["refused_blocks"] >= 3


@pytest.mark.usefixtures("soon")
async def test_a_chain_is_copied_near_its_reader(tmp_path: Path) -> None:
    async with dev.serve(servers=2) as running, running.pool() as pool:
        chain = keys("chain", 5)
        await pool.write(NAMESPACE, chain, values(chain, BLOCK))
        here = [in_memory(server, chain) for server in running.servers]
        source, target = (running.servers[here.index(count)] for count in (5, 0))
        assert await pool.prefetch(NAMESPACE, chain, near=source.server) == [IN_MEMORY] * 5
        assert await pool.prefetch(NAMESPACE, chain, near=target.server) == [COMING] * 5
        await eventually(lambda: in_memory(target, chain) == 5)
        async with asyncio.timeout(5):  # until a master knows it, too
            while await pool.prefetch(NAMESPACE, chain, near=target.server) != [IN_MEMORY] * 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await pool.prefetch(NAMESPACE, chain, near=target.host.id) == [IN_MEMORY] * 5
        assert await pool.prefetch(NAMESPACE, chain, near="nobody") == [IN_MEMORY] * 5


async def test_a_server_with_memory_alone_has_everything_there() -> None:
    async with dev.serve() as running, running.pool() as pool:
        chain = keys("chain", 3)
        await pool.write(NAMESPACE, chain, values(chain, BLOCK))
        assert await pool.prefetch(NAMESPACE, [*chain, key("x")]) == [IN_MEMORY] * 3 + [GONE]
