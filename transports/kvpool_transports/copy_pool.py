"""Moving and checking bytes in memory, off the loop's thread.

Copy and checksum go together in steps that stay in the core's cache: faster than one after the
other, which reads everything twice from memory. numpy's copy and xxhash release the GIL, a
memoryview's slice assignment does not, so several threads really copy at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import DeadlineExceeded, LinkBroken, Overloaded

#: Bytes copied and then hashed while they are in the cache.
STEP = 256 << 10
#: A piece up to this size is copied without giving up the GIL, because that takes longer than the
#: copy. xxhash keeps the GIL for such a piece, too. (design: turns)
SMALL_PIECE_MAX = 64 << 10
#: Up to this, the loop's thread copies: to wake others takes longer (design: turns).
INLINE_MAX = 8 << 20
#: Bytes that it copies in one turn of the loop: a third of a millisecond, a whole one at worst.
TURN_MAX = 2 << 20
_LATE: Final = "copying did not end in time"
#: Bytes for which one more thread is woken.
_SHARE_MIN = 4 << 20

Bytes: TypeAlias = npt.NDArray[np.uint8]


class CopyJob(NamedTuple):
    """Copy all of `source` to `target`, or only hash it when there is none.

    Either may be in several pieces; the target has room for the source. A reader hashes what it
    received (the target), a writer what it meant to send (the source): so any error in between is
    noticed (design: checksums).
    """

    source: tuple[memoryview, ...]
    target: tuple[memoryview, ...]
    seed: int | None
    hash_source: bool = False


class StopFlag:
    """Stops one thread: a step of its copy goes on under the lock, or not at all."""

    __slots__ = ("is_set", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_set = False

    def set(self) -> None:
        """When this returns, the thread is through with its last step; that takes microseconds."""
        with self.lock:
            self.is_set = True


class CopyPool:
    """A few threads that copy for one channel.

    Up to `inline_max` bytes are copied by the loop's thread, in turns; one call at a time, so that
    calls side by side have the threads.
    """

    def __init__(self, threads: int | None = None, *, inline_max: int = INLINE_MAX) -> None:
        self.threads = threads or min(4, os.cpu_count() or 1)
        self._inline_max = inline_max
        self._executor = ThreadPoolExecutor(self.threads, "kvpool-copy")
        self._flags: dict[StopFlag, None] = {}
        self._in_turns = False
        self._stopped = False

    async def run(self, jobs: Sequence[CopyJob], *, deadline: float) -> list[int]:
        """Do the jobs and return their checksums (0 without a seed).

        When it returns or raises, cancelled or late, no thread touches the buffers any more:
        that is what makes it safe to give them back. Raises LinkBroken after `stop`.
        """
        if self._stopped:
            raise LinkBroken("the channel is closed")
        sizes = [_size(job.source) for job in jobs]
        total = sum(sizes)
        if total <= min(TURN_MAX, self._inline_max):
            return [_copy(job, None) for job in jobs]
        if total <= self._inline_max and max(sizes) <= TURN_MAX and not self._in_turns:
            return await self._run_in_turns(jobs, sizes, deadline)
        return await self._run_in_threads(jobs, sizes, deadline)

    async def _run_in_turns(
        self, jobs: Sequence[CopyJob], sizes: Sequence[int], deadline: float
    ) -> list[int]:
        """On the loop's thread; other tasks run after each TURN_MAX bytes."""
        loop = asyncio.get_running_loop()
        checksums: list[int] = []
        left = TURN_MAX
        self._in_turns = True
        try:
            for job, size in zip(jobs, sizes, strict=True):
                if size > left:
                    await asyncio.sleep(0)
                    self._check_not_stopped()
                    if loop.time() >= deadline:
                        raise DeadlineExceeded(_LATE)
                    left = TURN_MAX
                left -= size
                checksums.append(_copy(job, None))
        finally:
            self._in_turns = False
        return checksums

    async def _run_in_threads(
        self, jobs: Sequence[CopyJob], sizes: Sequence[int], deadline: float
    ) -> list[int]:
        loop = asyncio.get_running_loop()
        total = sum(sizes)
        share_min = max(1, min(_SHARE_MIN, self._inline_max))
        shares = _shares(jobs, sizes, min(self.threads, -(-total // share_min)), total)
        flags = [StopFlag() for _ in shares]
        self._flags.update(dict.fromkeys(flags))
        try:
            async with asyncio.timeout_at(deadline):
                runs = [
                    loop.run_in_executor(self._executor, _copy_all, share, flag)
                    for share, flag in zip(shares, flags, strict=True)
                ]
                await asyncio.gather(*runs, return_exceptions=True)
        except TimeoutError:
            raise DeadlineExceeded(_LATE) from None
        except RuntimeError as error:  # no thread can be started, as of `ulimit -u`
            raise Overloaded(f"cannot copy: {error}") from None
        finally:
            for flag, share in zip(flags, shares, strict=True):
                flag.set()
                del self._flags[flag]
                share.clear()  # an exception may keep this frame, and must not keep the memory
        self._check_not_stopped()
        return [sum_ for run in runs for sum_ in run.result()]

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise LinkBroken("the channel was closed while it copied")

    def stop(self) -> None:
        """End every run: when this returns, no thread touches their buffers any more.

        Call it before closing the stream: the server then reuses extents (design: quarantine).
        """
        self._stopped = True
        for flag in self._flags:
            flag.set()

    def close(self) -> None:
        self.stop()
        self._executor.shutdown(wait=True)


def _size(pieces: Sequence[memoryview]) -> int:
    return len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))


def _shares(
    jobs: Sequence[CopyJob], sizes: Sequence[int], count: int, total: int
) -> list[list[CopyJob]]:
    """Consecutive jobs, split so that each share has about the same number of bytes."""
    shares: list[list[CopyJob]] = [[]]
    taken = 0
    full = total / count
    for job, size in zip(jobs, sizes, strict=True):
        if taken >= full * len(shares):
            shares.append([])
        shares[-1].append(job)
        taken += size
    return shares


def _copy_all(jobs: Sequence[CopyJob], flag: StopFlag) -> list[int]:
    return [_copy(job, flag) for job in jobs]


def _copy(job: CopyJob, flag: StopFlag | None) -> int:
    """Copy and hash piece by piece; the sum means nothing once the brake was pulled."""
    source, target, seed, hash_source = job
    if len(source) == len(target) == 1 and len(source[0]) <= STEP:
        return _copy_one(source[0], target[0], seed, hash_source, flag)
    hasher = xxhash.xxh3_64(seed=seed) if seed is not None else None
    if len(target) == 1 and max(map(len, source)) <= SMALL_PIECE_MAX:
        complete = _copy_small(source, _parts(target[0], source), hasher, hash_source, flag)
        return hasher.intdigest() if hasher is not None and complete else 0
    if len(source) == 1 and target and max(map(len, target)) <= SMALL_PIECE_MAX:
        rooms = first_bytes(target, len(source[0]))
        complete = _copy_small(_parts(source[0], rooms), rooms, hasher, hash_source, flag)
        return hasher.intdigest() if hasher is not None and complete else 0
    step = STEP if hasher is not None else 16 * STEP
    for piece, copied in _steps(source, target, step):
        if copied is not None:
            if flag is None:
                np.copyto(copied, piece)
            else:
                with flag.lock:
                    if flag.is_set:
                        return 0
                    np.copyto(copied, piece)
            if not hash_source:
                piece = copied
        if hasher is not None:
            hasher.update(piece.data)
    return hasher.intdigest() if hasher is not None else 0


def _copy_one(
    source: memoryview,
    target: memoryview,
    seed: int | None,
    hash_source: bool,
    flag: StopFlag | None,
) -> int:
    """The same for a block that is one step: most time of a small one goes into Python."""
    if len(source) < len(target):
        target = target[: len(source)]
    if flag is None:
        target[:] = source  # it keeps the GIL, but nobody else copies
    else:
        with flag.lock:
            if flag.is_set:
                return 0
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    if seed is None:
        return 0
    return xxhash.xxh3_64_intdigest(source if hash_source else target, seed)


def _copy_small(
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    hasher: xxhash.xxh3_64 | None,
    hash_source: bool,
    flag: StopFlag | None,
) -> bool:
    """Copy each small piece to its target and hash it; false when it was stopped.

    A step is as many pieces as fit into `STEP` bytes. Numpy copies the first of them, and gives up
    the GIL: else an engine's thread would wait for the interpreter's switch interval of 5 ms.
    """
    lock = flag.lock if flag is not None else contextlib.nullcontext()
    update = hasher.update if hasher is not None else _ignore
    hashed = sources if hash_source else targets
    count = max(1, STEP // max(map(len, sources)))
    triples = zip(sources, targets, hashed, strict=True)
    for source, target, piece in triples:
        with lock:
            if flag is not None and flag.is_set:
                return False
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            update(piece)
            for source, target, piece in itertools.islice(triples, count - 1):
                target[:] = source
                update(piece)
    return True


def _ignore(_: memoryview) -> None:
    """Instead of a hash."""


def _parts(whole: memoryview, pieces: Sequence[memoryview]) -> list[memoryview]:
    """`whole` in parts of the pieces' lengths. It is at least as long as all of them."""
    ends = list(itertools.accumulate(map(len, pieces)))
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def first_bytes(pieces: Sequence[memoryview], size: int) -> list[memoryview]:
    """The pieces up to so many bytes; together they have at least that many."""
    kept: list[memoryview] = []
    for piece in pieces:
        if size <= len(piece):
            return [*kept, piece[:size]]
        kept.append(piece)
        size -= len(piece)
    return kept


def _steps(
    source: tuple[memoryview, ...], target: tuple[memoryview, ...], step: int
) -> Iterator[tuple[Bytes, Bytes | None]]:
    """What is copied to where, in steps that lie in one piece on both sides."""
    targets = iter(target)
    room: Bytes | None = None
    used = 0
    for piece in source:
        array = np.frombuffer(piece, np.uint8)
        taken = 0
        while taken < len(array):
            count = min(step, len(array) - taken)
            if target:
                while room is None or used == len(room):
                    room = np.frombuffer(next(targets), np.uint8)
                    used = 0
                count = min(count, len(room) - used)
            yield array[taken : taken + count], None if room is None else room[used : used + count]
            taken += count
            used += count
