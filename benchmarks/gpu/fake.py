"""The fake device of the tests in the place of a GPU: claims that no processor can take run to
their end. That shows that they can be asked; figures mean nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch

from benchmarks import device as plain
from benchmarks.gpu import (
    checks,
    direct,
    direct_writes,
    hbm_reads,
    machine,
    overlap,
    perftest,
    questions,
    stage,
)
from kvpool_transports import ucx
from tests.support.fake_device import FakeGpu, FakeStream

#: Its name for the product.
DEVICE: Final = "cuda:0"
#: Bytes per second of what brings a load: a round takes 40 ms, and little of a processor.
_PACE: Final = 0.1e9
#: What takes its time on a processor: a hash of 1 MiB takes half a second.
_SMALL: Final[tuple[tuple[Any, str, object], ...]] = (
    (plain, "_SIZE", 64 << 10),
    (checks, "_SIZE", 64 << 10),
    (checks, "_GEMM", 32),
    (checks, "_EVERY", 50),
    (stage, "_ROUNDS", 2),
    (overlap, "_LOADS", 2),
    (stage, "_WORK", 1 << 10),
    (questions, "_MESSAGES", 20),
    (direct, "_SIZES", (1, 241, 5000, 9001)),
    (direct, "_BATCH", 4),
    (direct, "_SIZE", 512 << 10),
    (direct, "_READS", 20),
    (direct_writes, "_WRITES", 6),
    (hbm_reads, "_ROUNDS", 2),
    (perftest, "INTO", "host"),
    (ucx, "SMALL", 4096),  # larger blocks do not come with their frames
)


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """This process has a fake device, until `patch` is undone."""
    gpu = FakeGpu(patch)
    for module, name, value in _SMALL:
        patch.setattr(module, name, value)
    _take_time(patch)
    patch.setattr(machine, "writes_ordering", lambda _: "the fake device: writes are seen at once")
    with gpu.on_stream(FakeStream(gpu, torch.device(DEVICE))):
        yield gpu


def _take_time(patch: pytest.MonkeyPatch) -> None:
    """As a network and a bus do, which no processor waits for: each brings one round at a time."""
    bring, make, link = overlap._bring, overlap._stage, asyncio.Lock()

    async def by_the_network(pool: Any, keys: Any, span: Any, into: Any) -> None:
        async with link:
            due = time.monotonic() + sum(map(len, into)) / _PACE
            await bring(pool, keys, span, into)
            await asyncio.sleep(due - time.monotonic())

    def over_the_bus(device: torch.device) -> Any:
        nonlocal link
        link = asyncio.Lock()  # of the loop that is about to use it
        stage = make(device)
        queue = stage._queue

        def paced(moves: Any, to_host: bool) -> None:
            chosen = [*moves]
            queue(chosen, to_host)
            time.sleep(sum(len(place) for _, place in chosen) / _PACE)

        stage._queue = paced
        return stage

    patch.setattr(overlap, "_bring", by_the_network)
    patch.setattr(overlap, "_stage", over_the_bus)
