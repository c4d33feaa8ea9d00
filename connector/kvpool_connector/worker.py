"""The worker half: moves blocks between the engine's memory and the pool, off the engine's thread.

The engine's thread leaves work behind and collects what has ended; everything else happens in the
thread of the pool. Each load and each save ends once, by its deadline, whatever happens, and is
reported once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kvpool import KvpoolError, Namespace, Pool, WriteStatus
from kvpool_connector.block_memory import BlockMemory
from kvpool_connector.messages import (
    Blocks,
    Hello,
    Load,
    Loaded,
    Probe,
    Probed,
    Report,
    Save,
    Saved,
    Work,
)
from kvpool_connector.pool_thread import PoolThread
from kvpool_connector.settings import Settings

#: A load is at most so many reads, of at least so many bytes. What has come when it is given up is
#: used, in whole reads.
_READS: Final = 8
_READ_BYTES_MIN: Final = 2 << 20
#: A transfer that the pool's client did not end by its deadline is cut off so much later.
_GRACE_S: Final = 1.0
_CLOSE_S: Final = 5.0
#: An engine that has nothing to compute steps on and on until its transfers have ended, and keeps
#: the interpreter from the thread that does them. Such a step waits so long for news instead.
IDLE_S: Final = 0.001


class Rank(NamedTuple):
    """Who this worker is: its number, the part of each block that is its, and whether it saves."""

    number: int
    part: int
    saves: bool


class _Context(NamedTuple):
    """What the transfers of one step have in common; both one for each group."""

    namespaces: Sequence[Namespace]
    marks: Sequence[Any]


class Ended(NamedTuple):
    """What the engine is told once: loads that ended, those that failed, and bad blocks."""

    loaded: set[str]
    failed: set[str]
    bad_blocks: set[int]


class Worker:
    """One rank's transfers. Called by the engine's thread only."""

    def __init__(self, settings: Settings, thread: PoolThread, rank: Rank) -> None:
        self._settings = settings
        self._thread = thread
        self._rank = rank
        self._memory: Sequence[BlockMemory] = ()
        self._kernels: Callable[[], str] = str
        self._greeted = False
        self._step = 0
        self._load_slots = asyncio.Semaphore(settings.transfers_max)
        # Somebody waits for a load, and nobody for a save: these do not take all.
        self._save_slots = asyncio.Semaphore(max(1, settings.transfers_max // 2))
        self._idle = False
        self._news = threading.Event()  # something has ended
        self._lock = threading.Lock()  # guards what follows: two threads
        self._under_way = 0
        self._report = Report(0)  # but for its step
        self._ended = Ended(set(), set(), set())
        self._counters: dict[str, float] = {}

    def register(self, memory: Sequence[BlockMemory], kernels: Callable[[], str]) -> None:
        """The engine's blocks, one memory for each group, and what its kernels make of them."""
        self._memory = memory
        self._kernels = kernels

    def load(self, work: Work) -> None:
        """Start the loads of a step; returns at once."""
        if not work.loads:
            return
        context = self._context(work)
        self._began(len(work.loads))
        for load in work.loads:
            if not self._thread.start(partial(self._load, load, context)):
                self._load_ended(load, 0, [i for blocks in load.blocks for i in blocks.block_ids])

    def save(self, work: Work) -> None:
        """Start the saves of a step, which has been computed; returns at once."""
        self._step = work.step
        self._idle = work.idle
        self._greeted |= bool(work.namespaces)
        if not work.saves and work.probe is None:
            return
        context = self._context(work)
        self._began(len(work.saves) + (work.probe is not None))
        for save in work.saves:
            if not self._thread.start(partial(self._save, save, context)):
                self._save_ended(save, 0, _all_refused(save, WriteStatus.NO_MASTER))
        if work.probe is not None:
            started = self._thread.start(partial(self._probe, work.probe, context))
            if not started:
                self._probe_ended(0, 0.0)

    def ended(self) -> Ended:
        """The loads that have ended since the last call; each is in one answer."""
        if self._idle and self._under_way:
            self._news.wait(IDLE_S)
        self._news.clear()
        with self._lock:
            ended, self._ended = self._ended, Ended(set(), set(), set())
        return ended

    def report(self) -> Report:
        """For the scheduler half: what has ended; and who we are, until it knows."""
        with self._lock:
            report, self._report = self._report, Report(0)
        report.step = self._step
        if not self._greeted and self._memory:
            packing = "|".join([self._kernels(), *(memory.packing for memory in self._memory)])
            sizes = tuple(memory.block_bytes for memory in self._memory)
            report.hellos.append(Hello(self._rank.number, packing, sizes))
        return report

    def counters(self) -> dict[str, float]:
        """What happened since the last call."""
        with self._lock:
            counters, self._counters = self._counters, {}
        return counters

    def close(self) -> None:
        """End everything, by a deadline."""
        self._thread.close(_CLOSE_S)

    def _began(self, transfers: int) -> None:
        with self._lock:
            self._under_way += transfers

    def _context(self, work: Work) -> _Context:
        return _Context(work.namespaces, [memory.mark() for memory in self._memory])

    # --- in the pool's thread ---------------------------------------------------------------

    async def _load(self, load: Load, context: _Context) -> None:
        missing = [block for blocks in load.blocks for block in blocks.block_ids]
        size = 0
        began = time.monotonic()
        try:
            async with asyncio.timeout(load.timeout_s + _GRACE_S):
                pool = self._thread.pool
                for blocks in load.blocks if pool is not None else ():
                    left_s = max(0.0, began + load.timeout_s - time.monotonic())
                    came = await self._read(pool, context, blocks, left_s)
                    size += len(came) * self._memory[blocks.group].block_bytes
                    missing = [block for block in missing if block not in came]
        except (KvpoolError, TimeoutError) as error:
            self._count(f"load_error {type(error).__name__}", 1)
        finally:
            self._load_ended(load, size, missing)

    async def _read(
        self, pool: Pool | None, context: _Context, blocks: Blocks, timeout_s: float
    ) -> set[int]:
        """Read blocks into their places; the ids of those that came."""
        assert pool is not None
        came: set[int] = set()
        memory = self._memory[blocks.group]
        until = time.monotonic() + timeout_s
        size = max(len(blocks.digests) * memory.block_bytes // _READS, _READ_BYTES_MIN)
        step = min(memory.at_once, -(-size // memory.block_bytes))
        for first in range(0, len(blocks.digests), step):
            last = min(first + step, len(blocks.digests))
            ids = blocks.block_ids[first:last]
            async with self._load_slots, memory.target(ids, context.marks[blocks.group]) as target:
                results = await pool.read(
                    context.namespaces[blocks.group],
                    blocks.digests[first:last],
                    target,
                    part=self._rank.part,
                    match=blocks.match.of(first, last) if blocks.match is not None else None,
                    timeout=max(0.0, until - time.monotonic()),
                )
            for block, result in zip(ids, results, strict=True):
                if result.status.hit and result.size == memory.block_bytes:
                    came.add(block)
                else:
                    reason = "wrong size" if result.status.hit else result.status.label
                    self._count(f"load_miss {reason}", 1)
            if len(came) < last:  # nothing behind a miss is of use
                break
        return came

    def _load_ended(self, load: Load, size: int, missing: Sequence[int]) -> None:
        with self._lock:
            self._ended.loaded.add(load.request_id)
            if missing:
                self._ended.failed.add(load.request_id)
                self._ended.bad_blocks.update(missing)
            self._report.loaded.append(Loaded(load.request_id, size, not missing))
            self._under_way -= 1
        self._news.set()
        self._count("load_bytes", size)
        self._count("load_blocks_missing", len(missing))

    async def _save(self, save: Save, context: _Context) -> None:
        refused = _all_refused(save, WriteStatus.NO_MASTER)
        size = 0
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.save_timeout_s + _GRACE_S):
                pool = self._thread.pool
                if not self._rank.saves:  # another rank has the same bytes
                    refused = {}
                elif pool is not None:
                    for blocks in save.blocks:
                        stored = await self._write(pool, context, blocks, save)
                        for digest, status in stored.items():
                            if status.present or status is WriteStatus.IN_PROGRESS:
                                refused.pop((blocks.group, digest), None)
                            else:
                                refused[blocks.group, digest] = status
                            if status is WriteStatus.STORED:
                                size += self._memory[blocks.group].block_bytes
        except (KvpoolError, TimeoutError) as error:
            self._count(f"save_error {type(error).__name__}", 1)
        finally:
            self._count("save_s", time.monotonic() - began)
            self._save_ended(save, size, refused)

    async def _write(
        self, pool: Pool, context: _Context, blocks: Blocks, save: Save
    ) -> dict[bytes, WriteStatus]:
        statuses: dict[bytes, WriteStatus] = {}
        memory = self._memory[blocks.group]
        for first in range(0, len(blocks.digests), memory.at_once):
            digests = blocks.digests[first : first + memory.at_once]
            async with self._save_slots:
                source = await memory.source(
                    blocks.block_ids[first : first + memory.at_once], context.marks[blocks.group]
                )
                written = await pool.write(
                    context.namespaces[blocks.group],
                    digests,
                    source,
                    parents=blocks.parents[first : first + memory.at_once],
                    part=self._rank.part,
                    copies=self._settings.copies,
                    session=save.session,
                    resume_in=save.resume_in_s,
                    timeout=self._settings.save_timeout_s,
                )
            statuses.update(zip(digests, written, strict=True))
        return statuses

    def _save_ended(
        self, save: Save, size: int, refused: dict[tuple[int, bytes], WriteStatus]
    ) -> None:
        rows = tuple((group, digest, status) for (group, digest), status in refused.items())
        with self._lock:
            self._report.saved.append(Saved(save.job, size, rows))
            self._under_way -= 1
        self._news.set()
        self._count("save_bytes", size)

    async def _probe(self, probe: Probe, context: _Context) -> None:
        pool = self._thread.pool
        began = time.monotonic()
        size = 0
        try:
            async with asyncio.timeout(probe.timeout_s + _GRACE_S):
                for blocks in probe.blocks if pool is not None else ():
                    assert pool is not None
                    memory = self._memory[blocks.group]
                    scratch = [bytearray(memory.block_bytes) for _ in blocks.digests]
                    results = await pool.read(
                        context.namespaces[blocks.group],
                        blocks.digests,
                        scratch,
                        part=self._rank.part,
                        match=blocks.match,
                        timeout=probe.timeout_s,
                    )
                    size += sum(result.size for result in results if result.status.hit)
        except (KvpoolError, TimeoutError):
            pass  # then so much came in that time
        finally:
            self._probe_ended(size, time.monotonic() - began)

    def _probe_ended(self, size: int, seconds: float) -> None:
        self._count("probes", 1)
        with self._lock:
            self._report.probed.append(Probed(size, seconds))
            self._under_way -= 1
        self._news.set()

    def _count(self, name: str, amount: float) -> None:
        if amount:
            with self._lock:
                self._counters[name] = self._counters.get(name, 0.0) + amount


def _all_refused(save: Save, status: WriteStatus) -> dict[tuple[int, bytes], WriteStatus]:
    return {(blocks.group, digest): status for blocks in save.blocks for digest in blocks.digests}
