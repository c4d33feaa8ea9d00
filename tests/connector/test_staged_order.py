"""The connector's default way to a GPU, on a fake one that works as late as it may: what the engine
computes comes before a save, and a load after the blocks' last user. Each omission is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvpool import ConfigError
from kvpool.device.thread import DeviceThread
from kvpool_connector.memory import block_memory
from kvpool_connector.memory.block_memory import (
    DeviceBlockMemory,
    DeviceStage,
    HostBlockMemory,
    device_of_this_thread,
    views_of,
)
from tests.connector.test_connector_parts import LAYOUTS, caches
from tests.connector.test_device_stage import saved
from tests.support.fake_device import FakeEvent, FakeGpu, FakeStream

IDS = [5, 0, 3]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


class Engine:
    """A KV cache on a fake device, and a twin of it on the host, where all is done at once."""

    def __init__(self, gpu: FakeGpu, layout: str, stage_bytes: int, device: int = 0) -> None:
        buffers: list[torch.Tensor] = []
        views = views_of(caches(LAYOUTS[layout]), buffers)
        (self.host,) = buffers
        self.gpu = gpu
        self.device = gpu.tensor(bytes(self.host.numpy()), device)
        stage = DeviceStage(torch.device("cuda", device), stage_bytes)
        self.memory = DeviceBlockMemory(views, [self.device], stage=stage)
        self.twin = HostBlockMemory(views, [self.host])

    async def save_what_a_step_computes(self) -> None:
        """The step is queued on the engine's stream, and has not begun."""
        self.device.mul_(3)
        self.host.mul_(3)
        after = self.memory.record_event()
        assert await saved(self.memory, IDS, after) == await saved(self.twin, IDS)

    async def load_over_what_a_step_reads(self) -> None:
        """The step before still reads and writes the blocks when their new bytes have come."""
        wanted = await saved(self.twin, IDS)
        read = self.gpu.tensor(bytes(len(self.host)), self.device.device.index)
        before = bytes(self.host.numpy())
        read.copy_(self.device)
        self.device.mul_(0)
        targets = [1, 2, 4]
        async with self.memory.target(targets, self.memory.record_event()) as rows:
            for row, block in zip(rows, wanted, strict=True):
                row[:] = block  # type: ignore[index]
        # What the device has at this moment, whatever is still queued.
        now = bytearray(self.gpu.content(self.device))
        self.host.copy_(torch.frombuffer(now, dtype=torch.uint8))
        assert await saved(self.twin, targets) == wanted
        assert self.gpu.content(read) == before

    async def save_twice(self) -> None:
        """The second save has the memory of the host and of the device that the first one had."""
        for _ in range(4):
            await self.save_what_a_step_computes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage_bytes", [1 << 20, 9000])
async def test_a_save_has_what_the_step_computes(
    gpu: FakeGpu, layout: str, stage_bytes: int
) -> None:
    await Engine(gpu, layout, stage_bytes).save_twice()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage_bytes", [1 << 20, 9000])
async def test_a_load_follows_the_blocks_last_user_and_is_there_at_its_end(
    gpu: FakeGpu, layout: str, stage_bytes: int
) -> None:
    engine = Engine(gpu, layout, stage_bytes)
    await engine.load_over_what_a_step_reads()
    await engine.save_twice()


async def test_no_copy_waits_for_the_one_before(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread waits for the end of all."""
    engine, waited = Engine(gpu, "LBHNC", 1 << 20), list[FakeStream]()

    monkeypatch.setattr(FakeStream, "synchronize", waited.append)
    await engine.save_what_a_step_computes()
    assert not waited


async def test_a_rank_has_a_context_on_its_own_device_only(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the threads that copy and in the one that asks events: half a GB for each rank."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device_of_this_thread()()  # as the pool's thread does
    engine = Engine(gpu, "BLHNC", 9000, device=1)
    await engine.load_over_what_a_step_reads()
    await engine.save_twice()
    assert gpu.contexts == {torch.device("cuda", 1)}


@pytest.mark.parametrize("kind", ["xpu", "hpu", "rocm"])
def test_other_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "rocm":  # torch calls its devices cuda
        monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(
        ConfigError, match=f"(?i)is of .*{kind}.*: kvpool takes memory of hosts and of"
    ):
        DeviceStage(torch.device("cuda" if kind == "rocm" else kind, 0))


def nothing_recorded(patch: pytest.MonkeyPatch) -> None:
    """The event that is waited for lies behind no work."""
    patch.setattr(FakeEvent, "record", lambda *_: None)


def recorded_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    """On that of the copies, instead of the engine's."""
    record = FakeEvent.record
    device = torch.device("cuda", 0)
    patch.setattr(
        FakeEvent, "record", lambda event, *_: record(event, FakeStream(event._gpu, device))
    )


def not_waited_for(patch: pytest.MonkeyPatch) -> None:
    async def at_once(after: Any) -> None:
        pass

    patch.setattr(block_memory, "_reached", at_once)


def not_synchronized(patch: pytest.MonkeyPatch) -> None:
    """The call ends when its copies are queued."""
    patch.setattr(FakeEvent, "synchronize", lambda event: None)


def recorded_before_the_copies(patch: pytest.MonkeyPatch) -> None:
    def work(thread: DeviceThread, queue: Callable[[], None], finish: Callable[[None], Any]) -> Any:
        with thread.on_stream():
            thread._event.record()
            queue()
            thread._event.synchronize()

    patch.setattr(DeviceThread, "_work", work)


@pytest.mark.parametrize(
    "omission",
    [
        nothing_recorded,
        recorded_on_another_stream,
        not_waited_for,
        not_synchronized,
        recorded_before_the_copies,
    ],
)
@pytest.mark.parametrize("transfer", ["save_what_a_step_computes", "load_over_what_a_step_reads"])
async def test_each_omission_is_seen(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    omission: Callable[[pytest.MonkeyPatch], None],
    transfer: str,
) -> None:
    engine = Engine(gpu, "LBHNC", 9000)
    with monkeypatch.context() as patch:
        omission(patch)
        with pytest.raises(AssertionError, match=r"assert (b'|\[b')"):  # bytes that differ
            await getattr(engine, transfer)()
