"""Write-back: blocks go to the disk when memory is about to need their space, or never."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool import Pool, ReadStatus, WriteStatus, connect, dev
from kvpool.cli.settings import load
from kvpool.config import WRITE_BACK, ClientConfig
from kvpool.errors import ConfigError
from kvpool.protocols import ReserveRequest
from kvpool.testing.invariants import check_invariants
from kvpool.tools.subprocesses import Child, process_of, servers_up
from kvpool.types import ROOT, SessionHint
from tests.conftest import NAMESPACE, eventually, keys, read_back, values
from tests.server.test_tiered_store import ONE, PAGE, TWO, Server

BLOCK = 64 << 10


def talk(
    server: Server, session: str, chain: list[bytes], *, resume_in: float | None = None
) -> None:
    """A session writes the rest of its chain."""
    stack = server.stack
    server.now += 1
    here = sum(stack.peek(ONE, 0, digest) is not None for digest in chain)
    for digest in chain[:here]:
        server.read(8, ONE, 0, [digest])
    server.drop(8)
    rest = chain[here:]
    parents = [ROOT, *chain][here : len(chain)]
    hint = SessionHint(session, resume_in)
    request = ReserveRequest(ONE, 0, rest, parents, [PAGE] * len(rest), hint)
    for digest, answer in zip(rest, stack.reserve(7, request, server.now), strict=True):
        assert answer.extent is not None, answer
        server.memory[0][answer.extent.offset] = (ONE, 0, digest)
        stack.seal(7, answer.id, hash((ONE, 0, digest)) & 0xFFFF, server.now)
    server.look()


def on_disk(server: Server, chain: Sequence[bytes]) -> list[bool]:
    return [server.stack.backing.index.peek(ONE, 0, digest) is not None for digest in chain]


def test_a_quarter_of_the_memory_is_kept_clean_heads_first() -> None:
    server = Server(16, 64, write_back=True)
    chain = keys("chain", 15)
    server.write(1, ONE, 0, chain[:12])
    server.settle()
    assert on_disk(server, chain[:12]) == [False] * 12
    assert (server.stack.queue.waiting, server.stack.front.extents.dirty_bytes) == (0, 12 * PAGE)
    server.write(1, ONE, 0, chain)
    server.settle()
    assert on_disk(server, chain) == [True] * 3 + [False] * 12
    assert server.stack.front.extents.dirty_bytes == 12 * PAGE


def test_what_is_dirty_counts_whole_extents() -> None:
    """Small blocks take a page each, so three quarters of the pages may be dirty, and not all."""
    server = Server(16, 64, write_back=True)
    chain = keys("small", 15)
    request = ReserveRequest(ONE, 0, chain, [ROOT, *chain[:-1]], [100] * 15)
    for digest, answer in zip(chain, server.stack.reserve(1, request, 1.0), strict=True):
        assert answer.extent is not None
        server.memory[0][answer.extent.offset] = (ONE, 0, digest)
        server.stack.seal(1, answer.id, 0, 1.0)
    server.settle()
    assert on_disk(server, chain) == [True] * 3 + [False] * 12
    assert server.stack.front.extents.dirty_bytes == 12 * PAGE


def test_a_writer_does_not_wait_for_the_disk() -> None:
    """For a quarter of the memory at once, whatever was there."""
    server = Server(16, 64, write_back=True)
    for number in range(20):
        assert server.write(1, ONE, 0, keys(f"{number}", 4)) == ["RESERVED"] * 4
        server.settle()


def test_what_a_session_has_ended_or_superseded_is_never_written() -> None:
    server = Server(16, 64, write_back=True)
    ended, old = keys("ended", 4), keys("old", 4)
    new = old[:2] + keys("new", 3)
    talk(server, "a", ended)
    talk(server, "b", old)
    talk(server, "b", new)
    server.stack.hint("a", None, server.now)
    for number in range(4):
        server.write(1, ONE, 0, keys(f"{number}", 4))
        server.settle()
    assert on_disk(server, ended + old[2:]) == [False] * 6
    assert on_disk(server, new) == [True] * 5
    figures = server.stack.figures
    assert (figures["spared_writes"], figures["spared_write_bytes"]) == (6, 6 * PAGE)
    assert server.read(1, ONE, 0, ended) == [ReadStatus.EVICTED] * 4
    check_invariants(server.stack)


def test_an_ended_session_that_goes_on_is_written() -> None:
    server = Server(16, 64, write_back=True)
    chain = keys("chain", 4)
    talk(server, "a", chain[:3])
    assert server.stack.hint("a", None, server.now) is True  # of memory, which alone has it
    talk(server, "a", chain)
    for number in range(4):
        server.write(1, ONE, 0, keys(f"{number}", 4))
        server.settle()
    assert on_disk(server, chain) == [True] * 4


def test_a_block_that_is_read_when_its_session_ends_waits_for_its_reader() -> None:
    server = Server(8, 64, write_back=True)
    chain = keys("chain", 1)
    talk(server, "a", chain)
    server.read(3, ONE, 0, chain)
    server.now += 1
    server.stack.hint("a", None, server.now)
    server.write(1, ONE, 0, keys("other", 7))
    server.settle()
    assert on_disk(server, chain) == [False]
    server.drop(3)
    server.write(1, ONE, 0, keys("others", 4))
    server.settle()
    assert server.stack.figures["spared_writes"] == 1
    check_invariants(server.stack)


def test_a_writer_waits_for_dirty_blocks_where_only_announced_ones_are_clean() -> None:
    """They would stay, and he would be refused for good: nobody would have the others written."""
    server = Server(8, 64, write_back=True)
    talk(server, "a", keys("announced", 2), resume_in=5.0)
    server.write(2, ONE, 0, keys("held", 6))
    server.settle()
    assert on_disk(server, keys("announced", 2)) == [True] * 2
    assert server.stack.front.extents.dirty_bytes == 6 * PAGE
    assert server.write(1, ONE, 0, keys("new", 1)) == ["NO_SPACE"]
    server.settle()
    assert server.write(1, ONE, 0, keys("new", 1)) == ["RESERVED"]
    assert server.stack.front.index.peek(ONE, 0, keys("announced", 2)[1]) is not None
    check_invariants(server.stack)


def test_a_session_that_ends_gives_up_all_parts_of_its_block() -> None:
    """Also one that another wrote, and no victim before, because the first part was dirty."""
    server = Server(4, 64, write_back=True)
    stack = server.stack
    server.write(1, TWO, 1, keys("chain", 1))
    server.copies += stack.transfers.try_writeback(server.now)
    server.settle()
    request = ReserveRequest(TWO, 0, keys("chain", 1), [ROOT], [PAGE], SessionHint("a"))
    (answer,) = stack.reserve(7, request, server.now)
    assert answer.extent is not None
    server.memory[0][answer.extent.offset] = (TWO, 0, keys("chain", 1)[0])
    stack.seal(7, answer.id, 1, server.now)
    held = keys("held", 2)
    server.write(2, ONE, 0, held)
    server.read(2, ONE, 0, held)
    assert server.write(1, ONE, 0, keys("late", 1)) == ["NO_SPACE"]
    server.now += 1
    stack.hint("a", None, server.now)
    server.look()
    assert server.write(1, ONE, 0, keys("late", 2)) == ["RESERVED"] * 2


@pytest.mark.parametrize(("hint", "waits"), [("", True), ("end", False), ("resume", False)])
@pytest.mark.parametrize("write_back", [False, True])
def test_a_writer_waits_for_no_disk_to_keep_what_a_hint_gives_up(
    write_back: bool, hint: str, waits: bool
) -> None:
    """Its session has ended, or comes back much later. Of all blocks it is the one that was read
    last, and the only one with a copy below."""
    server = Server(4, 64, write_back=write_back)
    chain = keys("chain", 1)
    talk(server, "a", chain)
    server.copies += server.stack.transfers.try_writeback(server.now)
    server.settle()
    server.write(1, ONE, 0, keys("flood", 3))
    server.read(2, ONE, 0, chain)
    server.drop(2)
    server.now += 1
    if hint == "end":
        server.stack.hint("a", None, server.now)
    elif hint:
        server.stack.hint("a", 5000.0, server.now)
    written = server.write(1, ONE, 0, keys("late", 1))
    assert written == (["NO_SPACE"] if waits else ["RESERVED"])


def test_a_writer_that_finds_only_dirty_blocks_gets_them_written() -> None:
    """Even below the share that may be dirty; and no more than it needs."""
    server = Server(8, 64, write_back=True)
    server.write(1, ONE, 0, keys("chain", 4))
    held = keys("held", 4)
    server.write(2, ONE, 0, held)
    server.settle()
    server.read(2, ONE, 0, held)  # the rest of the memory is pinned
    before = server.stack.backing.index.stored
    late = keys("late", 2)
    assert server.write(1, ONE, 0, late)[-1] == "NO_SPACE"
    server.start()
    assert 0 < len(server.copies) <= 2
    while server.copies:
        server.finish(server.copies.pop(0))
    for _ in range(4):
        server.write(1, ONE, 0, late)
        server.settle()
    assert server.read(1, ONE, 0, late) == [ReadStatus.HIT] * 2
    assert server.stack.backing.index.stored > before
    assert server.stack.queue.write_back is not None
    assert server.stack.queue.write_back.wanted_bytes == 0


def test_what_the_disk_evicts_stays_in_memory() -> None:
    """It may be the parent of what only memory has: without it, that would be of no use."""
    server = Server(8, 2, write_back=True)
    chain, (other,) = keys("chain", 3), keys("other", 1)
    server.write(1, ONE, 0, chain)
    server.write(1, ONE, 0, [other])
    server.write(1, ONE, 0, keys("more", 4))
    server.settle()
    assert on_disk(server, chain) == [True, True, False]
    # For this writer the next ones are written, and the disk is full.
    assert server.write(1, ONE, 0, keys("late", 2)) == ["NO_SPACE"] * 2
    server.settle()
    assert on_disk(server, [*chain, other]) == [True, False, False, True]
    # The leaf may go at once: its parent waits for the disk again, but cannot go before it.
    assert server.write(1, ONE, 0, keys("late", 1)) == ["RESERVED"]
    assert server.read(1, ONE, 0, chain[:2]) == [ReadStatus.HIT] * 2


def test_two_blocks_that_evict_each_other_from_a_full_disk_do_not_go_on_for_ever() -> None:
    """Nothing else was written, and so nothing in memory could make room."""
    server = Server(4, 1, write_back=True)
    chain = keys("chain", 4)
    for digest_count in range(1, 5):  # the head is the least recently used
        talk(server, "chat", chain[:digest_count])
    server.settle()
    written = 0
    for _ in range(4):
        if server.write(1, ONE, 0, keys("late", 1)) == ["RESERVED"]:
            break
        while True:  # what the mover does: it goes on while a call waits for room
            server.start()
            if not server.copies and not server.stack.queue.waiting:
                break
            written += len(server.copies)
            while server.copies:
                server.finish(server.copies.pop(0))
    assert server.stack.front.index.peek(ONE, 0, keys("late", 1)[0])
    assert 0 < written < 2 * len(chain)


@pytest.mark.parametrize(("are_used", "writes"), [(True, 8), (False, 4)])
def test_what_the_disk_evicts_is_written_again_once_for_each_use(
    are_used: bool, writes: int
) -> None:
    server = Server(16, 1, write_back=True)
    assert server.stack.queue.write_back is not None
    both = [keys("one", 1), keys("other", 1)]
    for chain in both:
        server.write(1, ONE, 0, chain)
    written = 0
    for _ in range(8):  # the disk has one page: each of them evicts the other
        for chain in both * are_used:
            server.read(3, ONE, 0, chain)
            server.drop(3)
        server.stack.queue.write_back.wanted_bytes = PAGE
        server.start()
        written += len(server.copies)
        while server.copies:
            server.finish(server.copies.pop(0))
    assert written == writes
    assert server.stack.front.extents.dirty == are_used


def test_a_parent_that_comes_back_goes_to_the_disk_before_its_children() -> None:
    """What is left of the chain that is being written was chosen without it."""
    server = Server(16, 64, write_back=True)
    chain = keys("chain", 15)
    server.write(1, ONE, 0, chain)
    server.read(3, ONE, 0, chain[:14])  # its tail is the least recently used
    server.drop(3)
    server.settle()
    assert on_disk(server, chain)[:4] == [True, True, True, False]
    server.stack.backing.remove(ONE, [chain[2]], ReadStatus.CORRUPT)
    server.settle()
    assert on_disk(server, chain)[:4] == [True, True, True, False]


def test_a_head_that_only_memory_has_makes_no_room_for_its_tail() -> None:
    """The disk refused it: the tail alone would be of no use."""
    server = Server(3, 8)
    chain = keys("chain", 5)
    list(server.stack.queue.stop_writing())
    server.write(1, ONE, 0, chain[:3])
    assert server.write(1, ONE, 0, chain) == ["ALREADY_STORED"] * 3 + ["NO_SPACE"] * 2
    server.stack.queue.resume_writing()
    server.settle()
    assert server.write(1, ONE, 0, chain) == ["ALREADY_STORED"] * 3 + ["RESERVED"] * 2


def test_a_head_that_comes_up_is_no_new_branch() -> None:
    """The rest of its session's chain was taken for superseded, and dropped."""
    server = Server(16, 64, write_back=True)
    chain = keys("chain", 14)
    talk(server, "a", chain)
    server.settle()
    assert on_disk(server, chain)[:3] == [True, True, False]
    head = server.stack.front.index.peek(ONE, 0, chain[0])
    assert head is not None
    server.stack.front.remove(ONE, chain[:1], ReadStatus.CORRUPT)
    server.look()
    server.stage(ONE, 0, chain[:1])
    server.settle()
    tail = server.stack.front.index.peek(ONE, 0, chain[-1])
    assert tail is not None
    assert not server.stack.front.extents.policy.is_over(tail)


@pytest.mark.parametrize("write_back", [False, True])
def test_when_a_session_resumes_is_known_below_too(write_back: bool) -> None:
    server = Server(8, 64, write_back=write_back)
    talk(server, "a", keys("a", 7), resume_in=60.0)
    server.settle()
    assert on_disk(server, keys("a", 1)) == [True]
    due = server.stack.backing.extents.policy.sessions["a"].due
    assert due == pytest.approx(server.now + 60.0)


def test_a_stop_writes_the_last_used_chain_first_and_nothing_that_has_ended() -> None:
    server = Server(64, 64, write_back=True)
    first, second, over = keys("first", 4), keys("second", 4), keys("over", 4)
    for name, chain in (("a", first), ("b", second), ("c", over)):
        talk(server, name, chain)
    server.read(1, ONE, 0, first)
    server.drop(1)
    server.now += 1
    server.stack.hint("c", None, server.now)
    list(server.stack.queue.flush())
    order = []
    while copies := server.stack.transfers.next_writebacks(PAGE, 1, server.now):
        order += [copy.entry.digest for copy in copies]
        for copy in copies:
            server.finish(copy)
    assert order == first + second
    assert server.stack.queue.waiting == 0


def test_a_stop_writes_no_block_twice() -> None:
    """Where the disk is as small as the memory, each write has it evict what memory still has."""
    server = Server(8, 4, write_back=True)
    for number in range(4):
        server.write(1, ONE, 0, keys(f"{number}", 2))
    list(server.stack.queue.flush())
    written = 0
    while copies := server.stack.transfers.next_writebacks(PAGE, 1, server.now):
        written += len(copies)
        assert written <= 8
        for copy in copies:
            server.finish(copy)
    server.look()


def test_a_stop_takes_steps() -> None:
    server = Server(6000, 6000, write_back=True)
    for number in range(4):
        server.write(1, ONE, 0, keys(f"{number}", 1000))
    assert len(list(server.stack.queue.flush())) > 6
    assert server.stack.queue.waiting == 4000
    (copy,) = server.stack.transfers.next_writebacks(1, 1, server.now)
    assert copy.entry.digest == keys("3", 1)[0]


def test_removed_blocks_leave_the_queue() -> None:
    """What is written and removed again and again must not fill it."""
    server = Server(16, 64, write_back=True)
    for number in range(100):
        chain = keys(f"{number}", 4)
        server.write(1, ONE, 0, chain)
        server.stack.remove(ONE, chain)
    assert len(server.stack.queue.dirty) == 0
    assert server.stack.front.extents.dirty_bytes == 0


def test_without_a_slower_tier_there_is_nothing_to_write_back() -> None:
    server = Server(4, write_back=True)
    assert server.stack.queue.write_back is None
    assert server.write(1, ONE, 0, keys("a", 4)) == ["RESERVED"] * 4
    assert server.write(1, ONE, 0, keys("b", 4)) == ["RESERVED"] * 4


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write_mode.*expected write_through or write_back"):
        load(flags={"server.write_mode": "writeback"})


# --- real servers -----------------------------------------------------------------------


async def write(pool: Pool, chain: Sequence[bytes], session: str = "") -> None:
    statuses = await pool.write(NAMESPACE, chain, values(chain, BLOCK), session=session)
    assert set(statuses) == {WriteStatus.STORED}


async def hits(pool: Pool, chain: Sequence[bytes]) -> int:
    """How many come back."""
    return sum(status.hit for status in await read_back(pool, chain, BLOCK))


async def test_more_than_memory_holds_and_what_status_shows(tmp_path: Path) -> None:
    tiers = ["dram:2MiB", f"nvme:{tmp_path}/tier:16MiB"]
    async with dev.serve(tiers=tiers, write_mode=WRITE_BACK) as running, running.pool() as pool:
        (server,) = running.servers
        chains = [keys(f"{number}", 10) for number in range(12)]
        for number, chain in enumerate(chains):
            await write(pool, chain, f"{number}")
            if number < 4:
                await pool.session(f"{number}").end()
                await eventually(
                    lambda n=number: (
                        server.stack.front.extents.policy.counters["hints_accepted"] > n
                    ),
                    within_s=10,
                )
        assert [await hits(pool, chain) for chain in chains[4:]] == [10] * 8
        stats = server.stats(asyncio.get_running_loop().time())
        assert stats.counters["spared_writes"] > 0
        assert stats.counters["dirty_bytes"] == server.stack.front.extents.dirty_bytes > 0
        assert stats.usage[1].written_blocks < 90
        check_invariants(server.stack)


@asynccontextmanager
async def server_of(master: str, file: Path, flush_s: str = "8s") -> AsyncIterator[Child]:
    tiers = ["--tier", "dram:8MiB", "--tier", f"nvme:{file}:16MiB", "--write-mode", WRITE_BACK]
    arguments = ["server", "--masters", master, "--id", "one", "--log-level", "info", *tiers]
    environment = {"KVPOOL_SERVER_FLUSH_S": flush_s}
    async with process_of("kvpool", *arguments, environment=environment) as server:
        await server.line()
        yield server


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGTERM, 50), (signal.SIGKILL, 0)])
async def test_a_stop_keeps_what_memory_has_and_a_kill_does_not(
    tmp_path: Path, number: signal.Signals, kept: int
) -> None:
    living, over = keys("living", 50), keys("over", 20)
    arguments = ("--bind", "127.0.0.1:0", "--log-level", "error")
    async with process_of("kvpool", "master", *arguments) as running:
        master = (await running.line()).removeprefix("master at ")
        config = ClientConfig(masters=[master], timeout_s=20, attempt_s=10)
        async with await connect(config=config) as pool:
            async with server_of(master, tmp_path / "tier") as server:
                (before,) = await servers_up(master, 1)
                await write(pool, living, "living")
                await write(pool, over, "over")
                await pool.session("over").end()
                async with asyncio.timeout(20):  # a heartbeat brings the hint, the next its answer
                    while not (await pool.session("over").explain()).servers:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                server.signal(number)
                await server.ended()
            async with server_of(master, tmp_path / "tier"):
                for _ in itertools.count():
                    (member,) = await pool.members()
                    if member.epoch != before.epoch and member.alive:
                        break
                    await asyncio.sleep(0.1)
                assert (await hits(pool, living), await hits(pool, over)) == (kept, 0)
