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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import xxhash

from kvpool.errors import DeadlineExceeded, LinkBroken

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
    """A few threads that copy for one channel; `close` joins them."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(4, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self.threads, "kvpool-copy")
        self._running: dict[threading.Event, list[Future[list[int]]]] = {}
        self._stopped = False

    async def run(self, jobs: Sequence[Job], *, deadline: float) -> list[int]:
        """Do the jobs and return their checksums (0 without a seed).

        When it returns or raises, cancelled or late, no thread touches the buffers any more:
        that is what makes it safe to give them back. Stopping takes one STEP. Raises LinkBroken
        after `stop`.
        """
        if self._stopped:
            raise LinkBroken("the channel is closed")
        total = sum(len(job.source) for job in jobs)
        if total <= INLINE_MAX:
            return [_copy(job, None) for job in jobs]
        stop = threading.Event()
        shares = _shares(jobs, min(self.threads, -(-total // INLINE_MAX)), total)
        running = [self._executor.submit(_copy_all, share, stop) for share in shares]
        self._running[stop] = running
        together = asyncio.gather(*map(asyncio.wrap_future, running))
        try:
            async with asyncio.timeout_at(deadline):
                done = await asyncio.shield(together)
        except TimeoutError:
            raise DeadlineExceeded("copying did not end in time") from None
        finally:
            if not together.done():
                stop.set()
                await _settle(together)
            del self._running[stop]
        if self._stopped:
            raise LinkBroken("the channel was closed while it copied")
        return [sum_ for share in done for sum_ in share]

    def stop(self) -> None:
        """End every run: when this returns, no thread touches their buffers any more.

        It blocks until each thread is through with its STEP. That is what makes it safe to tell the
        other side, after it, that nobody writes any more.
        """
        self._stopped = True
        for stop in self._running:
            stop.set()
        wait([future for running in self._running.values() for future in running])

    def close(self) -> None:
        self.stop()
        self._executor.shutdown(wait=True)


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
