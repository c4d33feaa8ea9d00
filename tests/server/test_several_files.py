"""Several files as one level of a server: each disk fails alone, and its blocks only are lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool import Pool, ReadStatus, WriteStatus, dev
from kvpool.config import ServerConfig
from kvpool.errors import ConfigError, Unavailable
from kvpool.ops.tables import problem_of
from kvpool.protocols.persistent_tier import Record
from kvpool.registry import tiers as open_tiers
from kvpool.server import tier_health
from kvpool.server.moves import prefetcher
from kvpool.server.state import tiered_store
from kvpool.server.state.divided_allocator import DividedAllocator
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT
from kvpool_tiers.nvme.several import NvmeFiles
from kvpool_tiers.nvme.tier import Nvme
from tests.conftest import NAMESPACE, eventually, keys, read_back, values
from tests.support.failing_disk import FailingDisk

READ, WRITE = "EIO: Input/output error", "EROFS: Read-only file system"
BLOCK = (64 << 10) - 100  # its extent is larger
FILE = 16 << 20
IN_A_FILE = FILE // BLOCK


class Scene:
    def __init__(self, running: dev.Dev, pool: Pool) -> None:
        self.running, self.pool = running, pool
        (self.server,) = running.servers
        self.stack = self.server.stack
        parts = self.stack.stores[1].allocator
        assert isinstance(parts, DividedAllocator)
        self.parts = parts
        files: Any = self.server.tiers[1]
        self.disks = [FailingDisk.under(file) for file in files.files]

    async def write(self, chain: Sequence[bytes]) -> None:
        for first in range(0, len(chain), 16):
            part = chain[first : first + 16]
            statuses = await self.pool.write(NAMESPACE, part, values(part, BLOCK))
            assert set(statuses) <= {WriteStatus.STORED, WriteStatus.ALREADY_STORED}

    async def written_back(self) -> None:
        await eventually(lambda: not self.stack.front.extents.dirty, within_s=20)

    async def read(self, chain: Sequence[bytes]) -> list[ReadStatus]:
        """One by one."""
        return [one for d in chain for one in await read_back(self.pool, [d], BLOCK)]

    def in_file(self, number: int) -> list[bytes]:
        """Blocks that the file has and memory has not."""
        stack, parts = self.stack, self.parts
        return [
            entry.digest
            for entry in stack.backing.index.inventory()
            if parts.part_of(entry.offset) == number
            and stack.front.index.peek(NAMESPACE, 0, entry.digest) is None
        ]

    @property
    def status_text(self) -> str:
        return self.server.stats(asyncio.get_running_loop().time()).usage[1].status_text


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    tiers = ["dram:2MiB", *(f"nvme:{folder}/{name}:16MiB" for name in "ab")]
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        yield Scene(running, pool)
        check_invariants(running.servers[0].stack)
        check_invariants(running.master.directory)


async def test_they_are_one_level_and_all_are_written_to(tmp_path: Path) -> None:
    chain = keys("chain", IN_A_FILE + 100)
    async with scene(tmp_path) as one:
        await one.write(chain)
        await one.written_back()
        usage = one.server.stats(0.0).usage
        assert [(tier.name, tier.capacity) for tier in usage] == [
            ("dram", 2 << 20),
            ("nvme", 2 * FILE),
        ]
        assert (await one.pool.match(NAMESPACE, chain)).length == len(chain)
        for number in range(2):
            assert len(one.in_file(number)) > 100
        assert set(await one.read(chain)) == {ReadStatus.HIT}
    async with scene(tmp_path) as one:
        assert set(await one.read(chain)) == {ReadStatus.HIT}, "after a restart"


async def test_a_file_may_be_added_and_left_out_again(tmp_path: Path) -> None:
    chain = keys("chain", 200)
    async with scene(tmp_path) as one:
        await one.write(chain)
        await one.written_back()
    kept = []
    for files in ("ab", "ba", "abc", "b"):
        tiers = ["dram:2MiB", *(f"nvme:{tmp_path}/{name}:16MiB" for name in files)]
        async with dev.serve(tiers=tiers) as running:
            stack = running.servers[0].stack
            found = [stack.backing.index.peek(NAMESPACE, 0, digest) for digest in chain]
            kept.append(sum(entry is not None for entry in found))
            check_invariants(stack)
    assert kept[:3] == [200] * 3
    assert 50 < kept[3] < 150


async def test_a_disk_that_takes_no_writes_is_left_out_and_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = keys("old", 100), keys("new", 200)
    async with scene(tmp_path) as one:
        await one.write(old)
        await one.written_back()
        _, bad = one.disks
        bad.write_error = WRITE
        await one.write(new)
        await one.written_back()
        assert not one.stack.queue.read_only
        assert "b takes no writes: EROFS: Read-only file system" in one.status_text
        assert set(await one.read([*old, *new])) == {ReadStatus.HIT}
        gone = one.in_file(1)[:3]
        assert await one.pool.remove(NAMESPACE, gone) == [True] * 3
        assert not await one.server._context.mover.erase(), "their records are still there"
        bad.write_error, before = "", bad.written
        await eventually(lambda: bad.written > before or bool(one.parts.closed), 1)
        more = keys("more", 100)
        for digest in more:  # it is tried again after a second, or two
            await one.write([digest])
            await asyncio.sleep(0.04)
        await one.written_back()
        await eventually(lambda: "takes no writes" not in one.status_text, within_s=10)
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    lines = [line for line in lines if "a file takes" in line]
    assert len(lines) == 2, "once for each change"
    async with scene(tmp_path) as one:
        assert not any(one.stack.backing.index.peek(NAMESPACE, 0, digest) for digest in gone)
        assert set(await one.read(more)) == {ReadStatus.HIT}


async def test_what_is_removed_while_a_file_takes_no_writes_is_gone_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_health, "_RETRY_S", 60.0)
    async with scene(tmp_path) as one:
        await one.write(keys("chain", 100))
        await one.written_back()
        good, bad = one.disks
        bad.write_error = WRITE
        await one.write(keys("until it is closed", 60))
        await one.written_back()
        assert one.parts.closed == {1}
        gone = [*one.in_file(0)[:3], *one.in_file(1)[:3]]
        calls = good.calls
        good.runs.clear()
        removing = asyncio.create_task(one.pool.remove(NAMESPACE, gone))
        await eventually(lambda: good.calls > calls)
        erasing = asyncio.create_task(one.server._context.mover.erase())
        await asyncio.sleep(0)
        one.parts.open(1)
        good.runs.set()
        assert not await erasing, "what opened meanwhile has its records still"
        assert await removing == [True] * 6
        one.parts.open(1)
        assert not await one.server._context.mover.erase(), "it takes no writes"
        one.parts.close(1)
        await asyncio.sleep(0.01)
        bad.write_error = ""  # whoever stops tries it once more
    async with scene(tmp_path) as one:
        assert not any(one.stack.backing.index.peek(NAMESPACE, 0, digest) for digest in gone)


async def test_on_a_full_level_nothing_is_written_to_a_disk_that_takes_no_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not in the place of a block that makes room there."""
    monkeypatch.setattr(tier_health, "_RETRY_S", 60.0)
    tries: list[object] = []
    real = tier_health.TierHealth._reopen

    def reopen(health: tier_health.TierHealth, place: tier_health.Place) -> Any:
        tries.append(place)
        return real(health, place)

    monkeypatch.setattr(tier_health.TierHealth, "_reopen", reopen)
    async with scene(tmp_path) as one:
        await one.write(keys("old", 2 * IN_A_FILE))
        await one.written_back()
        bad = one.disks[1]
        bad.write_error = WRITE
        await one.write(keys("until it is closed", 60))
        await one.written_back()
        assert "b takes no writes" in one.status_text
        calls, before = bad.calls, one.disks[0].written
        new = keys("new", 100)
        await one.write(new)
        await one.written_back()
        assert bad.calls == calls
        assert one.disks[0].written > before
        one.server._context.mover.health.batch_done((1, 1), good=False)  # one that came late
        await asyncio.sleep(0)
        assert tries == [(1, 1)], "it is tried by one task, after the delay that is due"
        assert set(await one.read(new)) == {ReadStatus.HIT}


async def test_when_no_disk_takes_writes_the_level_is_read_only(tmp_path: Path) -> None:
    old, new = keys("old", 100), keys("new", 20)
    async with scene(tmp_path) as one:
        await one.write(old)
        await one.written_back()
        for disk in one.disks:
            disk.write_error = WRITE
        for digest in new:
            await one.write([digest])
        await eventually(lambda: one.stack.queue.read_only, within_s=20)
        assert set(await one.read(old)) == {ReadStatus.HIT}
        for disk in one.disks:
            disk.write_error = ""
        await eventually(lambda: not one.stack.queue.read_only, within_s=20)
        await one.written_back()
        for _ in range(100):
            if "takes no writes" not in one.status_text:
                break
            await one.write(keys("again", 1))
            await one.pool.remove(NAMESPACE, keys("again", 1))
            await asyncio.sleep(0.1)
        assert "takes no writes" not in one.status_text
        assert problem_of(one.server.stats(0.0).usage[1]) == ""


async def test_of_a_dead_disk_its_blocks_only_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_store, "DROPPED_STEP", 7)
    chain, new = keys("chain", 300), keys("new", 60)
    async with scene(tmp_path) as one:
        await one.write(chain)
        await one.written_back()
        good, dead = one.in_file(0), one.in_file(1)
        one.disks[1].write_error = WRITE
        await one.pool.remove(NAMESPACE, dead[-3:])
        await eventually(lambda: len(one.stack.erasures) == 3)
        one.disks[1].read_error = READ
        assert set(await one.read(dead[:10])) == {ReadStatus.TIER_LOST}
        await eventually(lambda: "b is out of service" in one.status_text)
        assert not one.stack.index.offline
        await eventually(lambda: not one.in_file(1))
        assert set(await one.read(dead[10:20])) == {ReadStatus.TIER_LOST}
        assert set(await one.read(good)) == {ReadStatus.HIT}
        await one.write(new)
        await one.written_back()
        assert set(await one.read(new)) == {ReadStatus.HIT}
        assert await one.server._context.mover.erase()
        assert not len(one.stack.erasures)
        health = one.server._context.mover.health
        with pytest.raises(Unavailable, match="b is out of service"), health.calling((1, 1)):
            pass
        match = await one.pool.match(NAMESPACE, dead[10:11])
        assert match.stopped is ReadStatus.TIER_LOST
        usage = one.server.stats(0.0).usage[1]
        assert (usage.capacity, usage.files_out, usage.lost) == (FILE, 1, False)
        assert problem_of(usage) == "does without 1 of its files"
        one.disks[0].read_error = READ
        await one.read(one.in_file(0)[:10])
        await eventually(lambda: one.stack.index.offline == {1})
    assert sum("a file is out of service" in line for line in caplog.messages) == 1


async def test_a_disk_that_hangs_holds_up_nothing_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_health, "_STUCK_S", 0.5)
    monkeypatch.setattr(tier_health, "_CONFIRM_DELAY_S", 0.1)
    chain, new = keys("chain", 300), keys("new", 60)
    async with scene(tmp_path) as one:
        await one.write(chain)
        await one.written_back()
        good, stuck = one.in_file(0), one.in_file(1)
        one.disks[1].runs.clear()
        waiting = asyncio.create_task(one.read(stuck[:1]))
        await eventually(lambda: "b is out of service" in one.status_text, within_s=5)
        assert await waiting == [ReadStatus.TIER_LOST]
        held = one.stack.front.held
        assert held.quarantined == 1  # the memory that the hanging call would fill
        await one.write(stuck[:1])  # but not the block's name
        assert await one.read(stuck[:1]) == [ReadStatus.HIT]
        assert not one.server._context.mover.promotions.size
        calls = one.disks[1].calls
        assert set(await one.read(good)) == {ReadStatus.HIT}
        for digest in new:
            await one.write([digest])
        await one.written_back()
        assert set(await one.read(new)) == {ReadStatus.HIT}
        assert one.disks[1].calls == calls, "nobody waits for it again"
        assert not len(one.stack.erasures)
        one.disks[1].runs.set()  # late: what it reads now is of no use, and its memory is free
        await eventually(lambda: not held.quarantined)
        assert not held.reservations
        assert await one.read(stuck[:1]) == [ReadStatus.HIT]


async def test_what_a_hanging_disk_was_to_bring_takes_no_room_of_what_others_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_health, "_STUCK_S", 0.3)
    monkeypatch.setattr(tier_health, "_CONFIRM_DELAY_S", 0.1)
    monkeypatch.setattr(prefetcher, "_STEP_S", 1.0)
    chain = keys("chain", 300)
    async with scene(tmp_path) as one:
        await one.write(chain)
        await one.written_back()
        good, stuck = one.in_file(0), one.in_file(1)
        one.disks[1].runs.clear()
        await one.pool.prefetch(NAMESPACE, stuck[:64])  # more than may be prefetched at a time
        await eventually(lambda: "b is out of service" in one.status_text, within_s=5)
        await one.pool.prefetch(NAMESPACE, good[:4])
        front = one.stack.front
        await eventually(
            lambda: all(front.index.peek(NAMESPACE, 0, one) for one in good[:4]), within_s=5
        )
        one.disks[1].runs.set()
        await eventually(lambda: not front.held.quarantined)
        assert front.extents.prefetched.coming == 0


@pytest.mark.parametrize("seed", range(6))
async def test_histories_of_faults_lose_no_more_than_the_faults(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never wrong bytes; the books are right at every step; what was removed stays away, also after
    restarts, once its disk takes writes."""
    monkeypatch.setattr(tier_health, "_RETRY_S", 0.05)
    rng = random.Random(seed)
    chains = [keys(f"{seed} {number}", 24) for number in range(30)]
    removed: set[int] = set()
    for _ in range(3):
        async with scene(tmp_path) as one:
            back = [n for n in removed if one.stack.peek(NAMESPACE, 0, chains[n][0])]
            assert not back
            bad = rng.choice(one.disks)
            for _ in range(25):
                number = rng.randrange(len(chains))
                match rng.choice(["write", "write", "read", "remove", "fault", "heal"]):
                    case "write":
                        await one.write(chains[number])
                        removed.discard(number)
                    case "read":
                        await one.read(chains[number][: rng.randrange(24)])
                    case "remove":
                        await one.pool.remove(NAMESPACE, chains[number])
                        removed.add(number)
                    case "fault":
                        bad.write_error, bad.read_error = WRITE, READ * (rng.random() < 0.2)
                    case "heal":
                        bad.write_error = bad.read_error = ""
                check_invariants(one.stack)
            bad.write_error = bad.read_error = ""
            await one.write(keys(f"{seed} last", 1))
            await one.written_back()
            erase = one.server._context.mover.erase
            async with asyncio.timeout(20):
                while not await erase():  # noqa: ASYNC110 - a closed file is tried after a pause
                    await asyncio.sleep(0.02)
            if one.server._context.mover.health.parts(1) != [0, 1]:
                removed.clear()  # from a file that is offline nothing can be erased


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    def opened(*tiers: str) -> None:
        for one in open_tiers(ServerConfig(tiers=["dram:1MiB", *tiers])):
            one.close()

    a, b = f"nvme:{tmp_path}/a:1MiB", f"nvme:{tmp_path}/b:1MiB"
    opened(a, b)
    with pytest.raises(ConfigError, match=r"alignment.*4096.*8192"):
        opened(a, f"nvme:{tmp_path}/c:1MiB?alignment=8192")
    with pytest.raises(ConfigError, match=f"{tmp_path}/a"):
        opened(a, a)
    with pytest.raises(ConfigError, match="put it last"):
        opened(a, "hbm:1MiB?device=cpu", b)
    opened(a, b)  # the first failures have left nothing open


def test_no_extent_crosses_and_every_byte_is_accounted_for() -> None:
    """Against a plain set of bytes, with closed parts, and one that is lost."""
    for seed in range(40):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 40) * 4096 for _ in range(rng.randint(1, 4))]
        one = DividedAllocator(sizes, 4096)
        edges = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        held: dict[int, int] = {}
        lost = set()
        for _ in range(300):
            act = rng.random()
            if act < 0.5:
                size = rng.randint(1, 6 * 4096)
                offset = one.allocate(size)
                if offset is not None:
                    taken = range(offset, offset + one.rounded(size))
                    part = one.part_of(offset)
                    assert edges[part] <= taken.start < taken.stop <= edges[part + 1]
                    assert part not in one.closed
                    assert all(o + s <= taken.start or o >= taken.stop for o, s in held.items())
                    held[offset] = len(taken)
            elif act < 0.85 and held:
                offset = rng.choice(list(held))
                assert one.release(offset) == held.pop(offset)
            elif act < 0.9:
                one.close(rng.randrange(len(sizes)))
            elif act < 0.98:
                one.open(rng.randrange(len(sizes)))
            elif len(lost) < len(sizes) - 1:
                part = rng.choice([n for n in range(len(sizes)) if n not in lost])
                one.retire(part)
                lost.add(part)
            check_invariants(one)
            assert lost <= one.closed < set(range(len(sizes)))
            there = {o: s for o, s in held.items() if one.part_of(o) not in lost}
            assert one.allocated == sum(there.values())
            assert one.capacity == sum(s for n, s in enumerate(sizes) if n not in lost)


async def test_others_have_their_turn_while_what_was_found_is_put_together() -> None:
    """And while what the files have found is given back."""
    freed = 0

    class Found(Record):
        def __del__(self) -> None:
            nonlocal freed
            freed += 1

    def records() -> list[Record]:
        names = enumerate(keys("b", 5000))
        return [Record(NAMESPACE, 0, digest, ROOT, n * 4096, 64, 7, n, 1) for n, digest in names]

    class File:
        path, encrypted, alignment, capacity = Path("any"), False, 4096, 1 << 30

        async def recover(self) -> list[Record]:
            return InPieces(Found(*one) for one in records())

    files = NvmeFiles([File(), File()])  # type: ignore[list-item]
    recovering, turns, most = asyncio.create_task(files.recover()), 0, 0
    while not recovering.done():
        before = freed
        await asyncio.sleep(0)
        turns, most = turns + 1, max(most, freed - before)
    found = await recovering
    assert turns >= 10_000 // 512
    assert (freed, most <= 512) == (10_000, True)
    found.sort(key=lambda one: one.offset)
    assert list(found[:5000]) == records()
    assert [one.offset - (1 << 30) for one in found[5000:]] == [n * 4096 for n in range(5000)]


class InPieces(list[Record]):
    """Records that nobody may go through in one turn of the loop, as if they were a million."""

    def _all(self) -> Any:
        raise AssertionError("all in one turn")

    __iter__ = __reversed__ = _all


async def test_a_start_looks_at_what_is_found_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = ["dram:2MiB", f"nvme:{tmp_path}/file:16MiB"]
    chain = keys("chain", 8)
    async with dev.serve(tiers=tiers) as running, running.pool() as pool:
        await pool.write(NAMESPACE, chain, values(chain, BLOCK))
    recover = Nvme.recover

    async def in_pieces(file: Nvme) -> list[Record]:
        return InPieces(await recover(file))

    monkeypatch.setattr(Nvme, "recover", in_pieces)
    async with dev.serve(tiers=tiers) as running:
        assert running.servers[0].stack.stored == len(chain)
