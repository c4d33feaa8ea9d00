"""The simulated disk: what the histories of `test_nvme_torture.py` do not show of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kvpool.errors import Closed, ConfigError, Unavailable, UsageError
from tests.simulation.disk import SimDisk
from tests.simulation.loop import Process, SimLoop, Violation
from tests.simulation.platter import DISK_FAULTS, PAGE, Platter
from tests.simulation.sandbox import sandbox

SIZE = 64 * PAGE


class Bench:
    """A loop, a platter, and processes that open it."""

    def __init__(self, seed: int) -> None:
        self.loop = SimLoop(random.Random(f"{seed}/threads"), 0.001)  # type: ignore[abstract]
        self.platter = Platter(self.loop, SIZE, random.Random(f"{seed}/disk"))
        self.rng = random.Random(f"{seed}/test")
        self.process: Process

    def spawn(self, work: Callable[[SimDisk], Awaitable[object]]) -> asyncio.Task[object]:
        """In a new process, with a handle of its own."""
        self.process = Process(self.loop, "server", "host", self.rng)

        async def run() -> object:
            return await work(SimDisk(self.platter))

        return self.process.spawn(run())


Test = Callable[[Bench], Coroutine[Any, Any, None]]
#: What one process does with its handle.
Work = Callable[[Bench, SimDisk], Awaitable[object]]


def play(test: Test, seed: int = 1) -> Bench:
    bench = Bench(seed)
    with sandbox(bench.loop.fail):
        bench.loop.run(test(bench))
    return bench


def seeds(test: Test, count: int = 30) -> list[Bench]:
    return [play(test, seed) for seed in range(count)]


def alone(work: Work) -> Test:
    """The history of one process."""

    async def test(bench: Bench) -> None:
        await bench.spawn(lambda disk: work(bench, disk))

    return test


def in_a_process(count: int = 30) -> Callable[[Work], Callable[[], None]]:
    """The test is what one process does, in so many histories."""

    def test_of(work: Work) -> Callable[[], None]:
        def test() -> None:
            seeds(alone(work), count)

        return test

    return test_of


async def read(disk: SimDisk, offset: int, size: int) -> bytearray:
    buffer = bytearray(size)
    await disk.read(offset, memoryview(buffer))
    return buffer


@in_a_process()
async def test_calls_take_time_by_their_size_and_a_slow_disk_more(
    bench: Bench, disk: SimDisk
) -> None:
    took = []
    for _ in range(2):
        before = bench.loop.now
        for _ in range(20):
            await read(disk, 0, SIZE)
        took.append(bench.loop.now - before)
        bench.platter.slow(100)
    assert took[0] >= 20 * SIZE / bench.platter.bytes_per_s
    assert took[1] > 20 * took[0]


@in_a_process(1)
async def test_no_more_calls_at_once_than_its_queue_is_deep(bench: Bench, disk: SimDisk) -> None:
    bench.platter.queue_depth = 4
    calls = [asyncio.ensure_future(read(disk, 0, PAGE)) for _ in range(10)]
    await asyncio.sleep(0)
    assert (len(disk._running), len(disk._queue)) == (4, 6)
    await asyncio.gather(*calls)


def test_who_reuses_a_buffer_too_early_has_written_something_else() -> None:
    async def work(bench: Bench, disk: SimDisk) -> None:
        buffer = bytearray(b"\1" * 8 * PAGE)
        call = asyncio.ensure_future(disk.write(0, memoryview(buffer)))
        await asyncio.sleep(bench.platter.latency_s / 2)
        buffer[:] = bytes(len(buffer))
        await call

    found = [set(bench.platter.memory[: 8 * PAGE]) for bench in seeds(alone(work))]
    assert all(one in found for one in ({0}, {1}, {0, 1})), "some of it before, some after"


def test_one_handle_at_a_time() -> None:
    async def test(bench: Bench) -> None:
        async def idle(disk: SimDisk) -> None:
            await asyncio.sleep(1e6)

        bench.spawn(idle)
        await asyncio.sleep(1)
        first = bench.process
        with pytest.raises(ConfigError, match="disk is in use by server"):
            await bench.spawn(idle)
        first.kill()
        await bench.spawn(lambda disk: read(disk, 0, 1))

    play(test)


@in_a_process(1)
async def test_a_closed_handle_gives_the_platter_free_when_its_calls_have_ended(
    bench: Bench, disk: SimDisk
) -> None:
    bench.platter.queue_depth = 1
    calls = [asyncio.ensure_future(read(disk, 0, PAGE)) for _ in range(2)]
    await asyncio.sleep(0)
    disk.close()
    disk.close()
    assert bench.platter.owner is disk
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(ended[0], bytearray)
    assert isinstance(ended[1], Closed)
    assert bench.platter.owner is None
    with pytest.raises(Closed):
        await read(disk, 0, 1)


@in_a_process(1)
async def test_calls_outside_of_it_are_refused(bench: Bench, disk: SimDisk) -> None:
    for offset, size in ((SIZE, 1), (-1, 1), (0, SIZE + 1)):
        with pytest.raises(UsageError):
            await read(disk, offset, size)


def test_a_power_cut_takes_only_what_was_written_last() -> None:
    async def test(bench: Bench) -> None:
        async def work(disk: SimDisk) -> None:
            await disk.write(0, memoryview(b"\1" * 4 * PAGE))
            await asyncio.sleep(6)  # longer than anything stays unsynced
            await disk.write(PAGE, memoryview(b"\2" * 2 * PAGE))
            await disk.write(PAGE, memoryview(b"\3" * 2 * PAGE))

        await bench.spawn(work)
        with pytest.raises(UsageError, match="kill its process first"):
            bench.platter.power_cut()
        bench.process.kill()
        bench.platter.power_cut()
        memory = bench.platter.memory
        assert set(memory[:PAGE]) == {1}
        assert set(memory[3 * PAGE : 4 * PAGE]) == {1}
        wrong = any(one.what == "power cut" for one in bench.platter.damaged)
        assert wrong is (set(memory[PAGE : 3 * PAGE]) != {3})

    found = [set(bench.platter.memory[PAGE : 3 * PAGE]) for bench in seeds(test, 60)]
    assert all({one} in found for one in (1, 2, 3))
    assert any(len(one) > 1 for one in found)


@in_a_process()
async def test_a_full_disk_says_so_and_can_still_be_read(bench: Bench, disk: SimDisk) -> None:
    await disk.write(0, memoryview(b"\1" * PAGE))
    bench.platter.fill()
    with pytest.raises(Unavailable, match="disk: ENOSPC: No space left on device"):
        await disk.write(PAGE, memoryview(b"\2" * PAGE))
    assert await read(disk, 0, PAGE) == b"\1" * PAGE
    bench.platter.heal()
    await disk.write(PAGE, memoryview(b"\2" * PAGE))


def test_a_page_that_is_written_both_ways_at_once_is_a_violation() -> None:
    """The kernel promises nothing then: what was written through the cache may win, or not."""

    async def work(bench: Bench, disk: SimDisk) -> None:
        bench.platter.mode = "O_DIRECT"
        bench.platter.queue_depth = 4
        whole, part = memoryview(bytes(PAGE)), memoryview(bytes(128))
        await asyncio.gather(disk.write(PAGE, whole), disk.write(PAGE + 256, part))

    with pytest.raises(Violation, match="directly and through the page cache"):
        play(alone(work))


def test_after_a_kill_nothing_lands_any_more() -> None:
    async def test(bench: Bench) -> None:
        async def work(disk: SimDisk) -> None:
            await asyncio.gather(*(disk.write(0, memoryview(bytes([n]) * PAGE)) for n in range(9)))

        bench.spawn(work)
        await asyncio.sleep(bench.platter.latency_s)
        bench.process.kill()
        before = bytes(bench.platter.memory)
        await asyncio.sleep(60)
        assert bench.platter.memory == before

    seeds(test)


@in_a_process()
async def test_a_stuck_disk_holds_calls_until_it_is_healed_cancelled_ones_too(
    bench: Bench, disk: SimDisk
) -> None:
    buffer = bytearray(PAGE)
    bench.platter.memory[:PAGE] = b"\1" * PAGE
    bench.platter.stick()
    call = asyncio.ensure_future(disk.read(0, memoryview(buffer)))
    for _ in range(3):
        await asyncio.sleep(1000)
        call.cancel()
    assert not call.done()
    bench.platter.heal()
    with pytest.raises(asyncio.CancelledError):
        await call
    left = bytes(buffer)
    await asyncio.sleep(1000)
    assert bytes(buffer) == left


@in_a_process()
async def test_spoilt_sectors_cannot_be_read_until_they_are_written_to(
    bench: Bench, disk: SimDisk
) -> None:
    bench.platter.make_unreadable(PAGE, PAGE + 1)
    with pytest.raises(Unavailable, match="EIO"):
        await read(disk, 0, 3 * PAGE)
    await read(disk, 2 * PAGE, PAGE)
    bench.platter.heal()
    with pytest.raises(Unavailable, match="EIO"):
        await read(disk, PAGE, 1)
    await disk.write(PAGE, memoryview(bytes(PAGE)))
    await read(disk, 0, 3 * PAGE)


@in_a_process(1)
async def test_a_failing_disk_fails_now_and_then(bench: Bench, disk: SimDisk) -> None:
    bench.platter.fail(0.3)
    calls = [read(disk, 0, PAGE) for _ in range(100)]
    calls += [disk.write(0, memoryview(bytes(PAGE))) for _ in range(100)]  # type: ignore[misc]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    failed = [isinstance(one, Unavailable) for one in ended]
    assert 10 < sum(failed[:100]) < 60
    assert 10 < sum(failed[100:]) < 60


@in_a_process(1)
async def test_rot_flips_bits_where_it_says(bench: Bench, disk: SimDisk) -> None:
    bench.platter.rot(100, 200, bits=3)
    assert any(bench.platter.memory[100:200])
    assert not any(bench.platter.memory[:100] + bench.platter.memory[200:])


@in_a_process()
async def test_a_lost_write_went_nowhere_and_a_misdirected_one_elsewhere(
    bench: Bench, disk: SimDisk
) -> None:
    bench.platter.lose(1.0)
    await disk.write(0, memoryview(b"\1" * PAGE))
    assert not any(bench.platter.memory)
    bench.platter.heal()
    bench.platter.misdirect(1.0)
    await disk.write(0, memoryview(b"\2" * PAGE))
    assert bench.platter.memory.count(b"\2") == PAGE
    *_, elsewhere = bench.platter.damaged
    assert set(bench.platter.memory[elsewhere.start : elsewhere.stop]) == {2}


@pytest.mark.parametrize("fault", DISK_FAULTS, ids=lambda fault: fault.name)
def test_what_the_nemesis_begins_can_be_healed(fault: Any) -> None:
    async def work(bench: Bench, disk: SimDisk) -> None:
        fault.begin(bench.platter)
        calls = [disk.write(n * PAGE, memoryview(b"\1" * PAGE)) for n in range(64)]
        running = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(1)
        bench.platter.heal()
        await running
        for n in range(64):
            await disk.write(n * PAGE, memoryview(b"\1" * PAGE))
        assert set(await read(disk, 0, SIZE)) == {1}

    play(alone(work))
