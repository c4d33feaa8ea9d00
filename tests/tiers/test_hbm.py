"""The HBM tier, on the device `cpu`: staging that is never early or late, and what it refuses.

What only CUDA does, copying later than it was asked to, is done here by `fake_device.py`.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvpool.device_copy import STEP
from kvpool.errors import BadBuffer, ConfigError, Unavailable
from kvpool.testing import TIER_CHECKS, NotDeclared
from kvpool_tiers import hbm
from kvpool_tiers.hbm import Hbm
from tests.conftest import eventually
from tests.support.fake_device import FakeGpu
from tests.support.late_device import Gate, copy_streams

torch = pytest.importorskip("torch", reason="the HBM tier needs torch")

SIZES = [1, 4096, STEP - 1, STEP, STEP + 1, 2 * STEP, 5 * STEP + 3]


@pytest.fixture
def tier() -> Iterator[Hbm]:
    tier = Hbm(8 * STEP, device="cpu")
    yield tier
    tier.close()


def content(name: object, size: int) -> bytes:
    """No two steps of it are alike."""
    return random.Random(str(name)).randbytes(size)


async def read(tier: Hbm, offset: int, size: int) -> bytearray:
    buffer = bytearray(size)
    await tier.read_into(offset, memoryview(buffer))
    return buffer


# --- a device that is as late as it may be ------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_a_device_may_copy_as_late_as_it_likes(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(size, size)
    source = bytearray(data)
    gpu = FakeGpu(monkeypatch)
    with gpu.on_stream(torch.cuda.Stream(torch.device("cuda", 0))):
        tier = Hbm(8 * STEP, device="cuda", staging=2 * STEP)
    await tier.write_from(256, memoryview(source))
    assert gpu.content(tier.device_view(256, size)) == data
    source[:] = bytes(size)  # the call has ended: the memory is the caller's again
    assert await read(tier, 256, size) == data
    tier.close()


async def test_memory_that_was_made_in_inference_mode_is_written() -> None:
    """As a server in the process of an engine may make it."""
    with torch.inference_mode():
        tier = Hbm(8 * STEP, device="cpu")
    data = content("inference", STEP + 1)
    await tier.write_from(256, memoryview(data))
    assert await read(tier, 256, len(data)) == data
    tier.close()


# --- many calls, cancelled calls, and the end ----------------------------------------------


@pytest.fixture
async def gated() -> tuple[Hbm, Gate]:
    """One lane, whose device has stopped."""
    tier = Hbm(8 * STEP, device="cpu", staging=2 * STEP)
    gate = Gate()
    for half in copy_streams(tier._copier)[0].halves:
        half.event = gate
    return tier, gate


async def test_a_cancelled_call_waits_for_the_device(gated: tuple[Hbm, Gate]) -> None:
    tier, gate = gated
    call = asyncio.ensure_future(tier.write_from(0, memoryview(bytes(4 * STEP))))
    await eventually(lambda: gate.waiting)
    for _ in range(3):  # and again: patience is not cancelled either
        call.cancel()
        await asyncio.sleep(0.001)
    assert not call.done()
    gate.open = lambda: True
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tier._copier._streams.qsize() == 1
    tier.close()


async def test_a_call_that_is_cancelled_before_its_turn_waits_for_nobody(
    gated: tuple[Hbm, Gate],
) -> None:
    tier, gate = gated
    first = asyncio.ensure_future(tier.write_from(0, memoryview(bytes(10))))
    await eventually(lambda: gate.waiting)
    second = asyncio.ensure_future(tier.write_from(0, memoryview(b"\1" * 10)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not first.done()
    gate.open = lambda: True
    await first
    assert await read(tier, 0, 10) == bytes(10)
    tier.close()


async def test_an_error_of_the_device_is_unavailable(
    tier: Hbm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA reports them; the tier can be asked again."""
    with monkeypatch.context() as patch:

        def fails() -> None:
            raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might")

        for copy_stream in copy_streams(tier._copier):
            patch.setattr(copy_stream.halves[1].event, "synchronize", fails)
        with pytest.raises(Unavailable, match=r"device cpu: .*unspecified launch failure$"):
            await tier.write_from(0, memoryview(bytes(2 * STEP)))
        with pytest.raises(Unavailable):
            await read(tier, 0, 2 * STEP)
    await tier.write_from(0, memoryview(b"well again"))
    assert await read(tier, 0, 10) == b"well again"


# --- a device with streams, events and an address space of its own --------------------------


@pytest.mark.parametrize("check", TIER_CHECKS)
async def test_the_tier_keeps_its_promises_on_a_fake_device(
    monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """The code for CUDA itself: only the driver is missing."""
    gpu = FakeGpu(monkeypatch)
    with gpu.on_stream(torch.cuda.Stream(torch.device("cuda", 0))), suppress(NotDeclared):
        await TIER_CHECKS[check](lambda capacity: Hbm(capacity, device="cuda"))


# --- what it refuses -------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", "cpu:1", "", "mps"])
def test_a_device_that_is_none(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"device is '{device}': expected 'cuda'"):
        Hbm(4096, device=device)


@pytest.mark.parametrize("device", ["cuda", "cuda:99"])
def test_a_device_that_is_not_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"device is '{device}': torch .* finds 0 CUDA devices"):
        Hbm(4096, device=device)


def test_a_device_with_a_number_that_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="finds 2 CUDA devices"):
        Hbm(4096, device="cuda:2")


def test_more_than_is_free() -> None:
    with pytest.raises(ConfigError, match=r"the device 'cpu' has [\d.]+ [MGT]iB free"):
        Hbm(1 << 60, device="cpu")


def test_what_torch_cannot_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have taken it since it was counted."""
    monkeypatch.setattr(hbm, "memory_available", lambda: 1 << 62)
    with pytest.raises(ConfigError, match="cannot be had: RuntimeError"):
        Hbm(1 << 60, device="cpu")


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": -1}, {"staging": 4096}])
def test_sizes_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))} is"):
        Hbm(**{"capacity": 4096, "device": "cpu"} | options)  # type: ignore[arg-type]


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvpool\[hbm\]'"):
        Hbm(4096, device="cpu")


def test_only_who_makes_one_imports_torch() -> None:
    code = "import sys, kvpool, kvpool_tiers.hbm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def test_buffers_that_are_none(tier: Hbm) -> None:
    with pytest.raises(BadBuffer, match="read-only"):
        await tier.read_into(0, memoryview(bytes(10)))
    for wrong in (memoryview(bytes(10))[::2], memoryview(bytes(16)).cast("I")):
        with pytest.raises(BadBuffer, match="contiguous"):
            await tier.write_from(0, wrong)
    await tier.write_from(0, memoryview(b""))
    await tier.read_into(0, memoryview(bytearray()))
