"""Staging takes a device's memory once: 16 MiB, whatever is copied. On the device `cpu`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpool import ConfigError, Unavailable
from kvpool.device import lane
from kvpool_connector.memory import block_memory
from kvpool_connector.memory.block_memory import (
    DEVICE_BYTES,
    STAGING_BYTES,
    BlockMemory,
    DeviceBlockMemory,
    DeviceStage,
    HostBlockMemory,
    stage_of,
    views_of,
)
from kvpool_engines import fingerprint
from tests.connector.test_connector_parts import LAYOUTS, caches
from tests.support.fake_device import FakeGpu

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


BLOCK_BYTES = 3 * 2 * 4 * 8 * 2


class Allocations(TorchDispatchMode):
    """Bytes of the largest memory that an operation of torch has allocated for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in [*args, *(kwargs or {}).values()]:
            if isinstance(given, torch.Tensor):
                self.known.add(given.untyped_storage()._cdata)
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage()._cdata not in self.known:
            self.largest = max(self.largest, found.untyped_storage().nbytes())
        return found


def staged(layers: dict[str, torch.Tensor], size: int) -> DeviceBlockMemory:
    buffers: list[torch.Tensor] = []
    return DeviceBlockMemory(views_of(layers, buffers), buffers, stage=DeviceStage(CPU, size))


def in_place(layers: dict[str, torch.Tensor]) -> HostBlockMemory:
    buffers: list[torch.Tensor] = []
    return HostBlockMemory(views_of(layers, buffers), buffers)


async def saved(memory: BlockMemory, ids: Sequence[int], after: Any = None) -> list[bytes]:
    """What a save of these blocks would send."""
    async with memory.source(ids, after) as source:
        return [b"".join(one if isinstance(one, list) else [one]) for one in source]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [16, 100, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 1, 4096])
async def test_a_buffer_of_any_size_moves_the_same_bytes(layout: str, size: int) -> None:
    """Smaller than a piece of a layer, than a block, than a transfer: in more rounds."""
    layers = caches(LAYOUTS[layout])
    before = {layer: cache.clone() for layer, cache in layers.items()}
    memory, ids = staged(layers, size), [4, 1, 3]
    source = await saved(memory, ids)
    assert source == await saved(in_place(layers), ids)
    async with memory.target([0, 5, 2], None) as target:
        for place, block in zip(target, source, strict=True):
            place[:] = block  # type: ignore[index]
    for layer, cache in layers.items():
        for block, was in ((0, 4), (5, 1), (2, 3), (4, 4), (1, 1), (3, 3)):
            assert torch.equal(cache[block], before[layer][was])


def copied(memory: DeviceBlockMemory, ids: Sequence[int]) -> int:
    """Bytes of the largest memory that was allocated."""
    host = torch.empty(len(ids), memory.block_bytes, dtype=torch.uint8)
    with Allocations() as seen:
        for to_host in (True, False):
            memory._stage._queue(memory._moves(ids, 0, host), to_host)
    return seen.largest


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [100, 1000, 1 << 20])
def test_a_copy_allocates_nothing_on_the_device(layout: str, size: int) -> None:
    assert not copied(staged(caches(LAYOUTS[layout]), size), [1, 4, 2, 0])


def test_what_is_gathered_crosses_the_bus_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start a copy takes longer than a small block."""
    memory, crossed = staged(caches(LAYOUTS["LBHNC"]), 2 * 5 * BLOCK_BYTES), list[int]()
    host = torch.empty(6, BLOCK_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(
        lane, "_copy", lambda row, *_: crossed.append(len(row)) if row.ndim == 1 else None
    )
    for to_host in (True, False):
        memory._stage._queue(memory._moves(range(6), 0, host), to_host)
    assert crossed == [5 * BLOCK_BYTES, BLOCK_BYTES] * 2


def test_the_detector_of_allocations_detects() -> None:
    rows = torch.zeros(100, 8)
    with Allocations() as seen:
        rows.index_select(0, torch.tensor([1, 2]))
    assert seen.largest == 2 * 8 * 4


def bytes_of(stage: DeviceStage) -> int:
    return sum(lane.scratch.nbytes for lane in (stage, stage.saves) if lane.scratch is not None)


def test_all_groups_of_a_worker_share_one_buffer() -> None:
    assert bytes_of(stage_of(CPU)) == DEVICE_BYTES
    assert DEVICE_BYTES == 16 << 20
    stages = set()
    for layout in ("LBHNC", "BLHNC"):
        buffers: list[torch.Tensor] = []
        views = views_of(caches(LAYOUTS[layout]), buffers)
        stages.add(DeviceBlockMemory(views, buffers)._stage)
    assert stages == {stage_of(CPU)}


def test_what_one_transfer_takes_of_the_host_is_bounded() -> None:
    memory = staged(caches(LAYOUTS["LBHNC"]), 4096)
    assert memory.blocks_per_transfer * memory.block_bytes <= STAGING_BYTES


async def hold(memory: DeviceBlockMemory, go_on: asyncio.Event, places: list[int]) -> None:
    """A load that has its memory of the host until it may go on."""
    async with memory.target([1], None) as (place,):
        places.append(np.frombuffer(place, np.uint8).ctypes.data)  # type: ignore[call-overload]
        await go_on.wait()


async def test_transfers_take_no_memory_of_the_host_and_wait_for_what_is_there() -> None:
    """Locking pages takes longer than a copy; so it was done at the start."""
    memory = staged(caches(LAYOUTS["LBHNC"]), 4096)
    places: list[int] = []
    for _ in range(2):
        go_on = asyncio.Event()
        loads = [asyncio.create_task(hold(memory, go_on, places)) for _ in range(5)]
        await asyncio.sleep(0.02)
        assert len(set(places)) == len(places) == 4  # the fifth waits
        assert await saved(memory, [2])  # a save has its own
        loads[0].cancel()  # what it had is the next one's
        await asyncio.wait(loads[:1])
        await asyncio.sleep(0.02)
        assert len(places) == 5
        assert len(set(places)) == 4
        go_on.set()
        await asyncio.wait(loads)
        places.clear()


async def test_a_block_larger_than_a_transfer_has_memory_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_memory, "STAGING_BYTES", BLOCK_BYTES - 1)
    layers = caches(LAYOUTS["LBHNC"])
    memory = staged(layers, 4096)
    assert memory.blocks_per_transfer == 1
    monkeypatch.setattr(block_memory, "STAGING_BYTES", 0)
    assert await saved(memory, [3]) == await saved(in_place(layers), [3])
    await load(memory, 2, Step(ended=True))
    assert not any(cache[2].any() for cache in layers.values())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            "torch.empty",
            r"^8 MiB of cuda:1 cannot be had: RuntimeError: CUDA error: out of memory$",
        ),
        (
            "kvpool.device.lane.pinned",
            r"^128 MiB of pinned host memory for cuda:1 cannot be had: RuntimeError: CUDA error: "
            r"out of memory; see the limits of this container's memory "
            r"and of locked memory \(ulimit -l\)$",
        ),
    ],
)
def test_memory_that_cannot_be_had_is_one_sentence_at_the_start(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, call: str, sentence: str
) -> None:
    fails = Mock(side_effect=RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"))
    monkeypatch.setattr(call, fails)
    with pytest.raises(ConfigError, match=sentence):
        DeviceStage(torch.device("cuda", 1))


async def test_caches_that_were_made_in_inference_mode_are_written() -> None:
    """As vLLM may make them."""
    with torch.inference_mode():
        layers = caches(LAYOUTS["LBHNC"])
        memory = staged(layers, 1000)
    async with memory.target([1], None) as (place,):
        place[:] = bytes(BLOCK_BYTES)
    assert not any(cache[1].any() for cache in layers.values())


def test_a_fingerprint_needs_little_memory_beside_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums are made of some rows at a time, and come out the same."""
    weights = [
        ("embeddings", torch.arange(70_000, dtype=torch.int16).view(7000, 10)),
        ("experts", torch.arange(60_000, dtype=torch.int16).view(30, 200, 10)),
        ("norm", torch.arange(5000, dtype=torch.int16)),
    ]
    expected = fingerprint.memory(weights)
    monkeypatch.setattr(fingerprint, "_SUMS_AT_ONCE", 512)
    assert fingerprint.memory(weights) == expected
    with Allocations() as seen:
        fingerprint._summed(weights[0][1], 1)
        fingerprint._summed(weights[1][1], 1)
        fingerprint._summed(weights[2][1], 1)
    assert seen.largest <= 8 * 512


@pytest.mark.parametrize("begun", [True, False])
async def test_a_call_that_is_cancelled_again_has_left_its_memory(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """By a load's own timeout, and then by `close`. What has not begun never does."""
    memory = staged(caches(LAYOUTS["LBHNC"]), 4096)
    go_on, running = threading.Event(), threading.Event()
    at_work: list[Sequence[int]] = []
    moves = memory._moves

    def slow(ids: Sequence[int], part: int, host: torch.Tensor) -> Any:
        at_work.append(ids)  # in the thread
        running.set()
        assert go_on.wait(10)
        yield from moves(ids, part, host)

    monkeypatch.setattr(memory, "_moves", slow)
    first = asyncio.create_task(saved(memory, [1]))
    assert await asyncio.to_thread(running.wait, 10)
    cancelled = first if begun else asyncio.create_task(saved(memory, [2]))
    for _ in range(3):
        await asyncio.sleep(0)
        cancelled.cancel()
    await asyncio.sleep(0.01)
    assert not first.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert at_work == [[1]]
    await asyncio.wait([first])
    assert len(memory._stage.saves._free) == 2


class Step:
    """The event behind a step of the engine, as CUDA's."""

    def __init__(self, *, ended: bool = False) -> None:
        self.ended = ended
        self.asked = asyncio.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.ended

    async def was_asked(self) -> None:
        async with asyncio.timeout(10):
            await self.asked.wait()
        self.asked.clear()


async def load(memory: DeviceBlockMemory, block: int, after: Step) -> None:
    async with memory.target([block], after) as (place,):
        place[:] = bytes(BLOCK_BYTES)  # type: ignore[index]


async def test_a_copy_waits_for_its_own_step_and_for_no_later_one() -> None:
    """A load whose step has ended, beside a save and a load of the next step, a long prefill."""
    layers = caches(LAYOUTS["LBHNC"])
    memory = staged(layers, 4096)
    this, next_one = Step(ended=True), Step()
    saving = asyncio.create_task(saved(memory, [2], next_one))
    await next_one.was_asked()
    loading = asyncio.create_task(load(memory, 4, next_one))
    await next_one.was_asked()
    async with asyncio.timeout(10):
        await load(memory, 1, this)
        await memory.host_source(3, this)
    assert not any(cache[1].any() for cache in layers.values())
    # Their step has not ended: it may still write the one, and read the other.
    assert all(cache[4].any() for cache in layers.values())
    for cache in layers.values():
        cache[2] = 7
    expected = await saved(in_place(layers), [2])
    next_one.ended = True
    assert await saving == expected
    await loading
    assert not any(cache[4].any() for cache in layers.values())


async def test_a_step_that_failed_is_an_error_of_the_pool_and_nothing_is_copied() -> None:
    """CUDA tells who asks next; the worker counts errors of the pool, and the request computes."""
    layers = caches(LAYOUTS["LBHNC"])
    memory = staged(layers, 4096)
    broken: Any = Step()
    broken.query = Mock(side_effect=RuntimeError("CUDA error: device-side assert\nCompile with"))
    for call in (load(memory, 1, broken), saved(memory, [1], broken)):
        with pytest.raises(Unavailable, match=r"device-side assert$"):
            await call
    assert all(cache[1].any() for cache in layers.values())
    assert len(memory._stage._free) == 4
    assert len(memory._stage.saves._free) == 2


async def test_a_load_is_not_behind_a_save_in_its_thread() -> None:
    """Nobody waits for a save, and a request for a load."""
    memory = staged(caches(LAYOUTS["LBHNC"]), 4096)
    go_on, step = threading.Event(), Step(ended=True)
    saves = memory._stage.saves
    saves._executor.submit(go_on.wait, 10)
    saving = asyncio.create_task(saved(memory, [2]))
    async with asyncio.timeout(10):
        await load(memory, 1, step)
    assert not saving.done()
    go_on.set()
    await saving
    assert memory._stage.scratch is not saves.scratch
    assert bytes_of(memory._stage) == 4096
