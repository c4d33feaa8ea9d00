"""Blocks in pieces are copied and hashed like blocks in one."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time

import numpy as np
import pytest
import xxhash

from kvpool.errors import DeadlineExceeded, LinkBroken, Overloaded
from kvpool_transports import copy_pool
from kvpool_transports.copy_pool import (
    INLINE_MAX,
    SMALL_PIECE_MAX,
    STEP,
    TURN_MAX,
    CopyJob,
    CopyPool,
    StopFlag,
)


def pieces_of(data: bytearray, sizes: list[int]) -> tuple[memoryview, ...]:
    view, at, pieces = memoryview(data), 0, []
    for size in sizes:
        pieces.append(view[at : at + size])
        at += size
    return tuple(pieces)


def cut(chance: random.Random, total: int, largest: int) -> list[int]:
    sizes = []
    while total:
        sizes.append(min(total, chance.randrange(1, largest + 1)))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_any_size_on_both_sides(seed: int) -> None:
    """One block to one, gathered, scattered, and both; small pieces, large ones, and a mixture."""
    chance = random.Random(seed)
    size = chance.choice([1, 5000, STEP, STEP + 1, 3 * STEP + 77])
    room = size + chance.choice([0, 0, 1, 70_000])  # a target may be larger
    data, target = bytearray(chance.randbytes(size)), bytearray(room)
    largest = chance.choice([1000, SMALL_PIECE_MAX, SMALL_PIECE_MAX + 1, 4 * STEP])
    source_sizes = chance.choice([[size], cut(chance, size, largest)])
    target_sizes = chance.choice([[room], cut(chance, room, largest)])
    for flag in (None, StopFlag()):
        target[:] = bytes(room)
        job = CopyJob(
            pieces_of(data, source_sizes),
            pieces_of(target, target_sizes),
            7,
            hash_source=chance.random() < 0.5,
        )
        assert copy_pool._copy(job, flag) == xxhash.xxh3_64_intdigest(bytes(data), 7)
        assert target == data + bytes(room - size)


@pytest.mark.parametrize(
    ("sizes", "count", "shares"),
    [
        ([10] * 4, 2, [2, 2]),
        ([10] * 4, 4, [1, 1, 1, 1]),
        ([10, 10, 40], 2, [3]),
        ([40, 10, 10], 2, [1, 2]),
        ([30, 29, 1, 30], 3, [1, 2, 1]),
    ],
)
def test_each_thread_has_about_the_same_number_of_bytes(
    sizes: list[int], count: int, shares: list[int]
) -> None:
    jobs = [CopyJob((memoryview(bytes(size)),), (), None) for size in sizes]
    found = copy_pool._shares(jobs, sizes, count, sum(sizes))
    assert [len(share) for share in found] == shares
    assert [job for share in found for job in share] == jobs


@pytest.mark.parametrize("sizes", [[300], [100, 100, 100], [30_000] * 12, [2 * STEP]])
def test_a_writer_hashes_what_it_meant_and_a_reader_what_it_received(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that was copied to has other bytes afterwards: another writer's."""
    copyto = np.copyto

    def torn(target: copy_pool.Bytes, source: copy_pool.Bytes) -> None:
        copyto(target, source)
        target[50] = 0

    monkeypatch.setattr(copy_pool.np, "copyto", torn)
    size = sum(sizes)
    data, target = bytearray(b"a" * size), bytearray(size)
    right = xxhash.xxh3_64_intdigest(bytes(data), 7)
    gathered = CopyJob(pieces_of(data, sizes), (memoryview(target),), 7, hash_source=True)
    assert copy_pool._copy(gathered, StopFlag()) == right
    assert target != data
    scattered = CopyJob((memoryview(data),), pieces_of(target, sizes), 7)
    assert copy_pool._copy(scattered, StopFlag()) != right


@pytest.mark.parametrize("scatter", [False, True])
def test_nothing_is_copied_after_the_stop(scatter: bool) -> None:
    piece = STEP // 4
    data, target = bytearray(b"a" * (12 * piece)), bytearray(12 * piece)
    flag = StopFlag()

    class Counting:
        """A lock whose third holder finds the flag set."""

        def __init__(self) -> None:
            self.lock, self.times = threading.Lock(), 0

        def __enter__(self) -> None:
            self.times += 1
            flag.is_set = self.times == 3

        def __exit__(self, *exc_info: object) -> None: ...

    flag.lock = Counting()  # type: ignore[assignment]
    parts = [piece] * 12
    job = CopyJob((memoryview(data),), pieces_of(target, parts), 7)
    if not scatter:
        job = CopyJob(pieces_of(data, parts), (memoryview(target),), 7, hash_source=True)
    assert copy_pool._copy(job, flag) == 0
    assert target == b"a" * (8 * piece) + bytes(4 * piece)


def test_other_threads_run_while_small_pieces_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only numpy's copy gives up the GIL, which xxhash keeps for pieces like these."""
    copied: list[int] = []
    copyto = np.copyto

    def watched(target: copy_pool.Bytes, source: copy_pool.Bytes) -> None:
        copied.append(len(source))
        copyto(target, source)

    monkeypatch.setattr(copy_pool.np, "copyto", watched)
    size = 8 * STEP
    data, target = bytearray(size), bytearray(size)
    sizes = [4096] * (size // 4096)
    copy_pool._copy(CopyJob(pieces_of(data, sizes), (memoryview(target),), 7, True), StopFlag())
    assert 8 <= len(copied) <= 10


BLOCK = 256 << 10


def whole(data: bytes, target: bytearray) -> list[CopyJob]:
    """The data in blocks of 256 KiB, each with a seed."""
    view, room = memoryview(data), memoryview(target)
    return [
        CopyJob((view[at : at + BLOCK],), (room[at : at + BLOCK],), at)
        for at in range(0, len(data), BLOCK)
    ]


def sums(data: bytes) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(data[at : at + BLOCK], at) for at in range(0, len(data), BLOCK)
    ]


async def test_a_batch_is_copied_in_turns_between_which_others_run() -> None:
    pool, data = CopyPool(2), random.Random(1).randbytes(INLINE_MAX)
    target, seen = bytearray(len(data)), []
    here = threading.get_ident()

    async def look() -> None:
        while not seen or seen[-1] < len(data):
            seen.append(len(target.rstrip(b"\0")))
            await asyncio.sleep(0)

    looking = asyncio.ensure_future(look())
    await asyncio.sleep(0)
    checksums = await pool.run(whole(data, target), deadline=asyncio.get_running_loop().time() + 9)
    assert (checksums, bytes(target)) == (sums(data), data)
    await looking
    turns = sorted(set(seen))
    assert len(turns) == 1 + INLINE_MAX // TURN_MAX
    assert max(b - a for a, b in itertools.pairwise(turns)) <= TURN_MAX + BLOCK
    assert threading.get_ident() == here
    pool.close()


@pytest.mark.parametrize("how", ["cancelled", "stopped", "late"])
async def test_a_batch_that_ends_between_two_turns_copies_no_more(how: str) -> None:
    pool, data = CopyPool(2), b"x" * INLINE_MAX
    target, loop = bytearray(len(data)), asyncio.get_running_loop()
    deadline = loop.time() + (0 if how == "late" else 9)
    running = asyncio.ensure_future(pool.run(whole(data, target), deadline=deadline))
    await asyncio.sleep(0)
    if how == "cancelled":
        running.cancel()
    elif how == "stopped":
        pool.stop()
    error = {"cancelled": asyncio.CancelledError, "stopped": LinkBroken, "late": DeadlineExceeded}
    with pytest.raises(error[how]):
        await running
    assert target.count(b"x") == TURN_MAX
    if how != "stopped":  # the next batch has turns again, too
        again = whole(data, target)
        assert await pool.run(again, deadline=loop.time() + 9) == sums(data)
    pool.close()


async def test_threads_that_are_late_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has its memory back with the error: a thread that went on would write into it."""
    flags: list[StopFlag] = []

    def endless(jobs: list[CopyJob], flag: StopFlag) -> list[int]:
        flags.append(flag)
        until = time.monotonic() + 5
        while not flag.is_set and time.monotonic() < until:
            time.sleep(0.001)
        return []

    monkeypatch.setattr(copy_pool, "_copy_all", endless)
    pool, data = CopyPool(2), bytes(INLINE_MAX + BLOCK)
    loop = asyncio.get_running_loop()
    with pytest.raises(DeadlineExceeded, match="copying did not end in time"):
        await pool.run(whole(data, bytearray(len(data))), deadline=loop.time() + 0.05)
    assert [flag.is_set for flag in flags] == [True, True]
    pool.close()


async def test_where_no_thread_can_be_started_a_call_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit of the system (`ulimit -u`) is no error of its caller. Later there may be one."""

    class Unable:
        def __init__(self, *_: object, **__: object) -> None:
            self.daemon = True

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    pool, data = CopyPool(2), bytes(INLINE_MAX + BLOCK)
    deadline, target = asyncio.get_running_loop().time() + 9, bytearray(len(data))
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Unable)
        with pytest.raises(Overloaded, match="cannot copy: can't start new thread"):
            await pool.run(whole(data, target), deadline=deadline)
    assert not pool._flags
    assert await pool.run(whole(data, target), deadline=deadline) == sums(data)
    pool.close()


async def test_batches_side_by_side_have_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread copies for one of them; the other ones do not wait for it."""
    pool, data = CopyPool(2), random.Random(1).randbytes(INLINE_MAX)
    threads, copy = [], copy_pool._copy_all

    def noted(jobs: list[CopyJob], flag: StopFlag) -> list[int]:
        threads.append(threading.current_thread().name)
        return copy(jobs, flag)

    monkeypatch.setattr(copy_pool, "_copy_all", noted)
    targets = [bytearray(len(data)) for _ in range(3)]
    deadline = asyncio.get_running_loop().time() + 9
    found = await asyncio.gather(
        *(pool.run(whole(data, target), deadline=deadline) for target in targets)
    )
    assert found == [sums(data)] * 3
    assert all(target == data for target in targets)
    assert len(threads) == 4  # two for each batch but the first
    pool.close()
