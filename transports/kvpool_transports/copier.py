"""Moving and checking bytes in memory, off the loop's thread.

Copy and checksum go together in steps that stay in the core's cache: faster than one after the
other, which reads everything twice from memory. numpy's copy and xxhash release the GIL, a
memoryview's slice assignment does not, so several threads really copy at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from kvpool.errors import DeadlineExceeded

#: Bytes copied and then hashed while they are in the cache.
STEP = 256 << 10
#: Below this, a thread's wake-up costs more than the copy.
INLINE_MAX = 384 << 10


class Job(NamedTuple):
    """Copy all of `source` to `target`, or only hash it when there is none.

    A reader hashes what it received (the target), a writer what it meant to send (the source):
    so whatever goes wrong in between shows.
    """

    source: memoryview
    target: memoryview | None
    seed: int | None
    hash_source: bool = False


class Copier:
    """A few threads that copy. One per process is enough; `close` joins them.

    Up to `inline_max` bytes are copied on the spot.
    """

    def __init__(self, threads: int | None = None, *, inline_max: int = INLINE_MAX) -> None:
        self.threads = threads or min(4, os.cpu_count() or 1)
        self._inline_max = inline_max
        self._executor = ThreadPoolExecutor(self.threads, "kvpool-copy")

    async def run(self, jobs: Sequence[Job], *, deadline: float) -> list[int]:
        """Do the jobs and return their checksums (0 without a seed).

        When it returns or raises, cancelled or late, no thread touches the buffers any more:
        that is what makes it safe to give them back. Stopping takes one STEP.
        """
        total = sum(len(job.source) for job in jobs)
        if total <= self._inline_max:
            return [_copy(job, None) for job in jobs]
        loop = asyncio.get_running_loop()
        stop = threading.Event()
        shares = _shares(jobs, min(self.threads, -(-total // max(1, self._inline_max))), total)
        running = [loop.run_in_executor(self._executor, _copy_all, share, stop) for share in shares]
        together = asyncio.gather(*running)
        try:
            async with asyncio.timeout_at(deadline):
                return [sum_ for share in await asyncio.shield(together) for sum_ in share]
        except TimeoutError:
            raise DeadlineExceeded("copying did not end in time") from None
        finally:
            if not together.done():
                stop.set()
                await _settle(together)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _settle(future: asyncio.Future[list[list[int]]]) -> None:
    """Wait for the threads even while being cancelled again; it takes one STEP at most."""
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            continue


def _shares(jobs: Sequence[Job], count: int, total: int) -> list[list[Job]]:
    """Consecutive jobs, split so that each share has about the same number of bytes."""
    shares: list[list[Job]] = [[]]
    taken = 0
    for job in jobs:
        if taken >= total * len(shares) / count:
            shares.append([])
        shares[-1].append(job)
        taken += len(job.source)
    return shares


def _copy_all(jobs: Sequence[Job], stop: threading.Event) -> list[int]:
    return [_copy(job, stop) for job in jobs]


def _copy(job: Job, stop: threading.Event | None) -> int:
    source = np.frombuffer(job.source, np.uint8)
    target = np.frombuffer(job.target, np.uint8) if job.target is not None else None
    if job.seed is None and target is not None and (stop is None or len(source) <= 16 * STEP):
        if stop is None or not stop.is_set():
            np.copyto(target, source)
        return 0
    hasher = xxhash.xxh3_64(seed=job.seed or 0)
    for start in range(0, len(source), STEP):
        if stop is not None and stop.is_set():
            return 0
        piece = source[start : start + STEP]
        if target is not None:
            copied = target[start : start + STEP]
            np.copyto(copied, piece)
            if not job.hash_source:
                piece = copied
        if job.seed is not None:
            hasher.update(piece.data)
    return hasher.intdigest() if job.seed is not None else 0
