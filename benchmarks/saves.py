"""CPU that saving costs an engine's process, beside the least that it can cost: copy and hash.

    python -m benchmarks.saves [--rounds 5]

The connector's planner and worker on a pool over shared memory; this program plays the engine: each
step some requests complete blocks, which are saved, and nothing is ever used again. Counted is the
CPU of all threads of this process, less that of the same steps without saving. The limit is a bare
loop that copies and hashes the same pieces. (design: pool-thread)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import resource
import secrets
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import xxhash
from rich.console import Console

from kvpool import Namespace
from kvpool.tools.bench import Row, serving, table
from kvpool_connector import settings
from kvpool_connector.memory.block_memory import memory_of
from kvpool_connector.plan.planner import Planner
from kvpool_connector.records.messages import StepWork
from kvpool_connector.records.values import (
    CacheGroup,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
)
from kvpool_connector.scheduler.scheduler import SAVE_GATHER_S
from kvpool_connector.worker.rank_model import ModelInMemory
from kvpool_connector.worker.worker import ConnectorWorker, Rank
from kvpool_engines.pool_thread import PoolThread

_TARGET = 1.3
_MEMORY_BYTES = 160 << 20
_POOL_BYTES = 512 << 20
_STEP_S = 0.02


class Shape(NamedTuple):
    """A KV cache in bf16: `heads` with K and V of `head` each; `block` tokens in a block."""

    name: str
    layers: int
    heads: int
    head: int
    block: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.heads * self.block * 2 * self.head * 2


class Load(NamedTuple):
    """Prompts of `tokens` tokens arrive in each of `steps`; or without, as many requests decode."""

    name: str
    requests: int
    tokens: int
    steps: int


SHAPES = (
    Shape("24 KiB a token", 24, 4, 64, 32),
    Shape("8B", 32, 8, 128, 16),
)
LOADS = (
    Load("prompts of 2,048 tokens", 1, 2048, 4),
    Load("prompts of 500 tokens", 1, 500, 12),
    Load("256 requests decode", 256, 0, 24),
    Load("32 requests decode", 32, 0, 96),
)


class _PlayedEngine:
    """Steps with requests whose blocks lie in a KV cache, which are saved or not."""

    def __init__(self, shape: Shape, address: str, *, saves: bool) -> None:
        given = settings.parse({"masters": [address], "transports": ["shm"]})
        self.shape = shape
        blocks = max(1, _MEMORY_BYTES // shape.block_bytes)
        size = (blocks, shape.heads, shape.block, 2 * shape.head)
        caches = {
            f"layers.{layer}": torch.randint(-100, 100, size, dtype=torch.int16)
            for layer in range(shape.layers)
        }
        self.memory = memory_of(caches)
        self.blocks = blocks
        self._planner = Planner(
            (CacheGroup(shape.block, 1),),
            PlannerLimits(load="never", save=saves, save_gather_s=SAVE_GATHER_S),
        )
        self._thread = PoolThread(given.client(), given.member(), lambda line: None)
        self._worker = ConnectorWorker(given, self._thread, Rank(0, 0, saves=True))
        self._worker.register([self.memory], ModelInMemory())
        self._names = (Namespace(f"bench/saves {shape.name} {secrets.token_hex(4)}"),)
        self._ids = itertools.cycle(range(1, blocks))
        self._numbers = itertools.count()
        self._step = 0
        self._digests: list[bytes] = []
        self.saved_blocks = 0

    def play(self, load: Load) -> float:
        """CPU seconds of these steps, until all is saved."""
        assert self._thread.wait(10)
        steps = self._decode(load) if not load.tokens else self._prompts(load)
        began = _cpu_s()
        for scheduled in steps:
            self._run(scheduled)
        until = time.monotonic() + 20
        while self._planner.has_pending_work and time.monotonic() < until:
            self._run([])
        used = _cpu_s() - began
        assert not self._planner.has_pending_work
        self._remove()
        return used

    def close(self) -> None:
        self._worker.close()

    def _remove(self) -> None:
        """The pool must not evict: its policy may refuse new blocks instead."""
        ended = threading.Event()
        digests, self._digests = self._digests, []

        async def remove() -> None:
            assert self._thread.pool is not None
            for first in range(0, len(digests), 256):
                await self._thread.pool.remove(self._names[0], digests[first : first + 256])
            ended.set()

        self._thread.start(remove)
        assert ended.wait(10)

    def _run(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self._step += 1
        plan = self._planner.plan_step(
            scheduled, lambda *block: True, time.monotonic(), idle=not scheduled
        )
        self._worker.start_saves(StepWork(self._step, self._names, saves=plan.saves, serials=(1,)))
        time.sleep(_STEP_S)
        self._worker.take_finished()
        for saved in self._worker.take_report().saves:
            assert not saved.refused, saved.refused[0][2]
            _, stored = self._planner.on_save_result(saved, time.monotonic())
            self._digests += [digest for run in stored for digest in run.digests]
            self.saved_blocks += sum(len(run.digests) for run in stored)

    def _prompts(self, load: Load) -> Iterator[list[ScheduledRequest]]:
        for _ in range(load.steps):
            yield [self._request(load.tokens, 0, load.tokens) for _ in range(load.requests)]

    def _decode(self, load: Load) -> Iterator[list[ScheduledRequest]]:
        """Each request begins elsewhere in a block, so that the steps complete blocks evenly."""
        block = self.shape.block
        running = []
        for number in range(load.requests):
            start = 2 * block + number % block
            running.append((self._request(start, start, start), start))
        for step in range(load.steps):
            yield [
                one._replace(start=start + step, end=start + step + 1)
                for one, start in running
                if not (start + step + 1) % block
            ]

    def _request(self, prompt: int, start: int, end: int) -> ScheduledRequest:
        """A new one; the blocks of its prompt before `start` are stored."""
        name = f"r{next(self._numbers)}"
        count = prompt // self.shape.block + 16
        hashes = [secrets.token_bytes(32) for _ in range(count)]
        self._planner.on_new_request(name, hashes, prompt, RequestHints(), time.monotonic())
        self._planner.requests[name].blocks_saved[0] = start // self.shape.block
        ids = list(itertools.islice(self._ids, count))
        return ScheduledRequest(name, start, end, [ids])


def _floor_s(engine: _PlayedEngine, blocks: int) -> float:
    """CPU seconds of a bare loop that copies and hashes so many blocks."""
    flat = memoryview(bytearray(engine.blocks * engine.memory.block_bytes))
    ids = [number % engine.blocks for number in range(blocks)]
    sources = [asyncio.run(engine.memory.host_source(number, None)) for number in ids]
    began = _cpu_s()
    for number, pieces in zip(ids, sources, strict=True):
        hasher = xxhash.xxh3_64()
        at = number * engine.memory.block_bytes
        for piece in pieces:
            flat[at : at + len(piece)] = piece
            hasher.update(piece)
            at += len(piece)
    return _cpu_s() - began


def _cpu_s() -> float:
    """CPU seconds of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def run(rounds: int) -> list[Row]:
    rows = []
    async with serving(_POOL_BYTES, ("shm",)) as address:
        for shape in SHAPES:
            rows += await asyncio.to_thread(_measure, shape, address, rounds)
    return rows


def _measure(shape: Shape, address: str, rounds: int) -> list[Row]:
    rows = []
    saving = _PlayedEngine(shape, address, saves=True)
    alone = _PlayedEngine(shape, address, saves=False)
    gc.collect()
    gc.freeze()  # as vLLM does when an engine has started
    for load in LOADS:
        ratios, costs, floors = [], [], []
        for number in range(rounds + 1):
            before = saving.saved_blocks
            used = saving.play(load)
            blocks = saving.saved_blocks - before
            used -= alone.play(load)
            floor = _floor_s(saving, blocks)
            if number:  # before, pages of the pool's memory are touched the first time
                size = blocks * shape.block_bytes
                ratios.append(used / floor)
                costs.append(used / size * 1e12)
                floors.append(floor / size * 1e12)
        ratio = statistics.median(ratios)
        rows.append(
            Row(
                f"CPU of saving, {shape.name}, {load.name} ({blocks} blocks)",
                f"{statistics.median(costs):.0f} ms/GB",
                f"copy and hash {statistics.median(floors):.0f} ms/GB",
                ratio,
                f"<= {_TARGET}",
                ratio <= _TARGET,
            )
        )
    saving.close()
    alone.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    Console(width=140).print(table(asyncio.run(run(parser.parse_args().rounds))))


if __name__ == "__main__":
    main()
