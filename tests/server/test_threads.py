"""What a process does that may start no more threads, as under `ulimit -u`."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import pytest
import torch

from kvpool import sync
from kvpool.device.thread import DeviceFailed, DeviceThread
from kvpool.errors import Unavailable
from kvpool.threads import in_thread, submit
from kvpool.types import MoveStatus
from kvpool_tiers.dram import Dram
from tests.conftest import NAMESPACE, keys, values
from tests.support.moves import movers, moves_of, now
from tests.support.raising import no_thread

KIB = 1 << 10


class Busy:
    """An executor with one thread, which works, and calls that say that they have run."""

    def __init__(self, threads: int) -> None:
        self.executor = ThreadPoolExecutor(2)
        self.ran: list[str] = []
        self._go_on = threading.Event()
        if threads:
            self.executor.submit(self._go_on.wait)

    def call(self, name: str) -> str:
        self.ran.append(name)
        return name

    def rest(self) -> list[str]:
        """All that has run, when its queue is empty."""
        self._go_on.set()
        self.executor.submit(lambda: None).result(10)
        return self.ran


@pytest.fixture(params=[0, 1])
def busy(request: pytest.FixtureRequest) -> Iterator[Busy]:
    one = Busy(request.param)
    yield one
    one.rest()
    one.executor.shutdown()


async def test_without_a_thread_a_call_runs_at_once_and_once(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", no_thread)
        assert await in_thread(busy.call, "first", executor=busy.executor) == "first"
        with pytest.raises(ZeroDivisionError):
            await in_thread(divmod, 1, 0, executor=busy.executor)
    assert busy.rest() == ["first"]


async def test_what_was_refused_for_want_of_a_thread_never_runs(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory has another use by then."""
    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            submit(busy.executor, busy.call, "refused")
    later = submit(busy.executor, busy.call, "later")
    assert busy.rest() == ["later"]
    assert later.result() == "later"


async def test_threads_that_fail_at_their_start_fail_what_they_were_given() -> None:
    """As a device's whose context cannot be had: nobody waits, and nobody else does it."""

    def fails() -> None:
        raise MemoryError

    first, second = (ThreadPoolExecutor(1, initializer=fails) for _ in range(2))
    async with asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(BrokenExecutor):
                await in_thread(threading.get_ident, executor=first)
    with pytest.raises(BrokenExecutor):
        submit(second, threading.get_ident).result(10)


async def test_the_queue_of_an_executor_without_threads_keeps_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    executor, block = ThreadPoolExecutor(1), memoryview(bytearray(8))
    await in_thread(bytes, block, executor=executor)
    with pytest.raises(RuntimeError, match="new thread"):
        submit(executor, bytes, block)
    gc.collect()
    assert sys.getrefcount(block) == 2


async def test_large_blocks_are_fetched_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with movers("16MiB", servers=2) as running, running.pool() as pool:
        chain = keys("chain", 8)
        await pool.write(NAMESPACE, chain, values(chain, 512 * KIB))
        source, target = sorted(running.servers, key=lambda one: -one.store.index.stored)
        fetch = moves_of(target).fetcher.fetch
        with monkeypatch.context() as limit:
            limit.setattr(threading.Thread, "start", no_thread)
            fetched = await fetch(NAMESPACE, 0, chain, source.server, deadline=now() + 20)
        assert fetched == [MoveStatus.DONE] * 8


def test_a_pool_for_threads_and_pages_in_advance_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(Unavailable, match="cannot open a pool: can't start new thread"):
        sync.connect("127.0.0.1:1")
    pages = Dram(4096)
    pages.view(0, 1)[0] = 1
    pages.wait_until_touched()
    pages.close()


async def test_a_device_without_a_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ran = DeviceThread(torch.device("cpu")), list[int]()
    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", no_thread)
        for _ in range(2):
            with pytest.raises(DeviceFailed, match="can't start new thread"):
                await device.run(lambda: ran.append(1), lambda queued: queued)
    await device.run(lambda: ran.append(2), lambda queued: queued)
    device.close()
    assert ran == [2]
