"""The state of a client process: how it times calls, marks blocks and compares bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.contract import Blocks, Client, Key, Memory
from benchmarks.peers.processes import cpu_s

#: One stamp in every so many bytes makes the bytes of each round different.
_STAMP = 4096


class Timed(NamedTuple):
    """One call: when it began (monotonic), how long it took, CPU seconds of all processes."""

    began: float
    seconds: float
    cpu_s: float


class Bench:
    """The state of a client process between two commands."""

    def __init__(self, client: Client, memory: Memory, pids: list[int]) -> None:
        self.client = client
        self.memory = memory
        self.pids = [os.getpid(), *pids]
        self.replay: Any = None  # the trace that the client plays
        self._next = int.from_bytes(os.urandom(4), "little") << 24

    def keys(self, count: int) -> list[Key]:
        """New keys."""
        self._next += count
        return [self.client.key(number) for number in range(self._next - count, self._next)]

    async def timed(self, call: Awaitable[Any]) -> tuple[Any, Timed]:
        cpu = self._cpu_s()
        began = time.monotonic()
        result = await call
        seconds = time.monotonic() - began
        return result, Timed(began, seconds, self._cpu_s() - cpu)

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids))


def stamp(blocks: Blocks, number: int) -> None:
    """Make every page of every block differ from those of other blocks and of other rounds."""
    width = min(_STAMP, blocks.sizes[0])
    pages = blocks.rows.reshape(len(blocks), -1, width)
    stamps = (np.uint64(number) << np.uint64(24)) + np.arange(len(blocks), dtype=np.uint64)
    pages[:, :, :8] = stamps.view(np.uint8).reshape(len(blocks), 1, 8)


def wrong_bytes(source: Blocks, target: Blocks) -> int:
    """The number of bytes that differ from what was written; all bytes are compared."""
    wrong = 0
    for sent, got in zip(source.rows, target.rows, strict=True):
        if not np.array_equal(sent, got):
            wrong += int(np.count_nonzero(sent != got))
    return wrong
