"""One file as a disk: reads and writes at positions; it does not interpret the bytes.

`Disk` is the contract below the NVMe tier. The tier and its format use no file, thread or OSError,
so the same code runs over a simulated disk, with torn writes, damaged bytes, full and stuck media.
`FileDisk` is the real one: a preallocated file that belongs to one process, read and written
without the page cache (O_DIRECT) where the file system allows it. (design: nvme-format)

Two descriptors share the file. Whole pages go through the direct one, from or to the caller's
memory if that is aligned, else through one aligned buffer per thread. Anything smaller goes through
the page cache, which makes writing 128 bytes cheap. The kernel keeps the two coherent as long as no
page is written both ways at once; the tier ensures that. The file is never mapped: an I/O error
under a mapping kills the process (SIGBUS).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

import numpy as np

from kvpool.errors import Closed, ConfigError, Unavailable
from kvpool_tiers.nvme.opening import (
    PAGE,
    claim,
    error_text,
    grow,
    lock,
    open_direct,
    open_file,
    write_all,
)

#: Small calls of one turn of the loop are one batch for a thread, up to so many bytes and calls:
#: passing a call to a thread costs more than reading a small block.
_BATCH_BYTES: Final = 256 << 10
_BATCH_CALLS: Final = 16
_QUEUE_DEPTH_MAX: Final = 1024
#: Large reads are split into pieces of so many bytes for several threads: then parallel reads end
#: one after the other instead of all late at once, and devices are faster. Writes are not split: no
#: reader waits for them, and more pieces would take the GIL from readers more often.
_PIECE_BYTES: Final = 512 << 10
#: One buffer per thread, made when a caller's memory is not aligned.
_BOUNCE_BYTES: Final = 1 << 20


class Disk(Protocol):
    """One file or device; positions are bytes. Any number of calls at once, never short.

    After a call has returned, failed or been cancelled, it touches neither its buffer nor the
    medium. So on a stuck disk a cancelled call does not end before the disk does. Calls made at the
    same time have no order. After `close` calls raise Closed.
    """

    @property
    def size(self) -> int:
        """Bytes; a multiple of PAGE."""

    @property
    def mode(self) -> str:
        """`O_DIRECT` or `buffered`."""

    async def read(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises Unavailable with the name of the disk's error (EIO)."""

    async def write(self, offset: int, buffer: memoryview) -> None:
        """Store all of `buffer`. Raises Unavailable (ENOSPC, EIO); then any part may be stored."""

    async def truncate(self, size: int) -> None:
        """Cut off what lies behind `size`, when no call uses it. Raises Unavailable."""

    def close(self) -> None:
        """Refuse new calls. Idempotent; never waits, not even for a stuck disk."""


async def read_pages(disk: Disk, position: int, count: int) -> list[bytes | None]:
    """So many pages, None for each that cannot be read. Raises Unavailable when none can."""
    whole = memoryview(bytearray(count * PAGE))
    try:
        await disk.read(position, whole)
    except Unavailable:  # of one page, perhaps
        pages = [memoryview(bytearray(PAGE)) for _ in range(count)]
        calls = [disk.read(position + n * PAGE, page) for n, page in enumerate(pages)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            if len(failures) == count or not isinstance(failure, Unavailable):
                raise failure from None
        return [
            bytes(page) if outcome is None else None
            for page, outcome in zip(pages, outcomes, strict=True)
        ]
    return [bytes(whole[n * PAGE : (n + 1) * PAGE]) for n in range(count)]


class FileDisk:
    """A file that this process owns: preallocated, locked, never mapped."""

    def __init__(
        self,
        path: Path | str,
        size: int,
        *,
        head: bytes = b"",
        accept: Callable[[bytes], object] = lambda _: None,
        queue_depth: int = 16,
        direct: bool = True,
    ) -> None:
        """Open or create `path`, and give it `size` bytes; its directory must exist.

        A new or empty file begins with `head`. For any other file `accept` gets its first
        `len(head)` bytes, or fewer if the file is shorter, and raises ConfigError if the file
        belongs to another program; nothing is changed before that. A smaller file grows; a larger
        one stays as it is, until `truncate`. `queue_depth` threads read and write. Raises
        ConfigError, which names the path and what to do.
        """
        if not 1 <= queue_depth <= _QUEUE_DEPTH_MAX:
            raise ConfigError(f"queue_depth is {queue_depth}, expected 1 to {_QUEUE_DEPTH_MAX}")
        self.path = Path(path)
        self._fd = open_file(self.path)
        try:
            # Lock before looking at the contents: another server may be writing.
            lock(self._fd, self.path)
            empty = not os.fstat(self._fd).st_size
            try:
                claim(self._fd, self.path, head, accept)
                self.size = grow(self._fd, self.path, size)
            except ConfigError:
                if empty:  # it was empty: do not leave a file behind, its capacity is too large
                    os.unlink(self.path)
                raise
        except BaseException:
            os.close(self._fd)
            raise
        self._direct = open_direct(self._fd) if direct else -1
        self.mode = "O_DIRECT" if self._direct >= 0 else "buffered"
        self._threads = _DaemonThreads(queue_depth)
        self._queue_depth = queue_depth
        self._bounce_buffers = threading.local()
        self._waiting: list[_IoRequest] = []
        self._batches: set[_WorkBatch] = set()
        self._closed = False
        self._guard = threading.Lock()  # for the fields below, which loop and threads change
        self._pieces: deque[tuple[_WorkBatch, int]] = deque()
        self._active_threads = 0  # threads that perform a piece, or look for the next
        self._batches_begun = 0  # batches that threads have begun and not ended

    def __repr__(self) -> str:
        return f"<FileDisk {self.path}, {self.size} bytes, {self.mode}>"

    async def read(self, offset: int, buffer: memoryview) -> None:
        await self._call(_IoRequest(self._read, offset, buffer, _PIECE_BYTES))

    async def write(self, offset: int, buffer: memoryview) -> None:
        await self._call(_IoRequest(self._write, offset, buffer, len(buffer)))

    async def truncate(self, size: int) -> None:
        await self._call(_IoRequest(self._truncate, size, _NO_BYTES, PAGE))
        self.size = min(self.size, size)

    def close(self) -> None:
        """Calls that no thread has begun end with Closed; the others keep the file open till then.

        The threads are daemons: one that is stuck in a dead disk does not keep the process alive.
        """
        if self._closed:
            return
        self._closed = True
        waiting, self._waiting = self._waiting, []
        waiting += [request for batch in self._batches for request in batch.requests]
        for request in waiting:
            if request.try_own(_Owner.LOOP):
                request.error = Closed("the disk is closed")
                request.finish()
        self._threads.close()
        with self._guard:
            self._close_files()

    # --- from the loop to a thread and back ----------------------------------------------

    async def _call(self, request: _IoRequest) -> None:
        """One read or write. After it has ended in any way, no thread touches its buffer."""
        if self._closed:
            raise Closed("the disk is closed")
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._dispatch)
        self._waiting.append(request)
        try:
            await request.done
        except asyncio.CancelledError:
            # A thread that owns it may be using the buffer: wait, although this call is cancelled.
            if not request.try_own(_Owner.LOOP):
                await request.wait_finished()
            raise
        finally:
            request.buffer = _NO_BYTES
        if request.error is not None:
            raise request.error

    def _dispatch(self) -> None:
        """Submit all calls of this turn of the loop: small ones together, large reads in pieces."""
        waiting, self._waiting = self._waiting, []
        batches: list[_WorkBatch] = []
        requests: list[_IoRequest] = []
        size = 0
        for request in waiting:
            if request.owner is not None:  # cancelled meanwhile
                continue
            requests.append(request)
            size += len(request.buffer)
            if size >= _BATCH_BYTES or len(requests) >= _BATCH_CALLS:
                batches.append(_WorkBatch(requests))
                requests, size = [], 0
        if requests:
            batches.append(_WorkBatch(requests))
        if batches:
            self._batches.update(batches)
            self._submit([(batch, n) for batch in batches for n in range(batch.pieces_left)])

    def _submit(self, pieces: list[tuple[_WorkBatch, int]]) -> None:
        """Queue pieces. Active threads take them after their own; only idle threads are woken."""
        with self._guard:
            self._pieces.extend(pieces)
            count = min(len(pieces), self._queue_depth - self._active_threads)
        try:
            for _ in range(count):
                self._threads.submit(self._work)
        except RuntimeError as error:
            for batch, _ in pieces:
                for request in batch.requests:
                    request.error = Unavailable(f"{self.path}: {error}; see `ulimit -u`")
            self._work()  # which ends them, and does nothing else

    def _work(self) -> None:
        """In a thread: one piece after the other, until there is none.

        A thread that stops has seen, under the guard, that no piece is left; pieces are added under
        the same guard, so none is left behind.
        """
        with self._guard:
            self._active_threads += 1
        while (piece := self._next()) is not None:
            batch, number = piece
            for request in batch.requests:
                if request.try_own(_Owner.THREADS):
                    self._perform(request, number)
            self._piece_done(batch)

    def _next(self) -> tuple[_WorkBatch, int] | None:
        with self._guard:
            if not self._pieces:
                self._active_threads -= 1
                return None
            batch, number = self._pieces.popleft()
            self._batches_begun += not number
            return batch, number

    def _piece_done(self, batch: _WorkBatch) -> None:
        """With the last piece of the batch, end its calls in their loop."""
        with self._guard:
            batch.pieces_left -= 1
            if batch.pieces_left:
                return
            self._batches_begun -= 1
            self._close_files()
        # Through a callback, not a future that the loop waits for: a loop that shuts down cancels
        # its tasks, and a cancelled call must still learn when its buffer is free.
        with contextlib.suppress(RuntimeError):  # that loop is closed: no call waits
            batch.loop.call_soon_threadsafe(self._end_batch, batch)

    def _perform(self, request: _IoRequest, number: int) -> None:
        """Piece `number` of this call, if it has so many, unless another piece has failed."""
        start = number * request.piece_size
        if number >= request.pieces or request.error is not None:
            return
        piece = request.buffer[start : start + request.piece_size]
        try:
            request.transfer(request.offset + start, piece)
        except OSError as error:
            request.error = Unavailable(f"{self.path}: {error_text(error)}")
        except Exception as error:  # the buffer is not usable; the batch's other calls go on
            request.error = error

    def _end_batch(self, batch: _WorkBatch) -> None:
        self._batches.discard(batch)
        for request in batch.requests:
            request.finish()

    def _close_files(self) -> None:
        """After `close`, close the files when no thread uses their descriptors; under the guard.

        Not earlier: another file may get the number of a closed descriptor a moment later. Later no
        thread uses them, because `close` has ended every call that no thread had begun.
        """
        if self._closed and not self._batches_begun:
            for fd in (self._fd, self._direct):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._direct = -1

    # --- in a thread -----------------------------------------------------------------------

    def _read(self, offset: int, buffer: memoryview) -> None:
        size = len(buffer)
        whole = size - size % PAGE if _is_aligned(buffer) else 0
        if self._direct < 0 or offset % PAGE:
            count = _read(self._fd, offset, buffer)
        elif whole == (count := _read(self._direct, offset, buffer[:whole])):
            # The rest is no whole page, or the caller's memory is not aligned: O_DIRECT needs both.
            while count < size:
                bounce = self._bounce(size - count)
                got = min(_read(self._direct, offset + count, bounce), size - count)
                if not got:
                    break
                _copy(bounce[:got], buffer[count : count + got])
                count += got
        if count < size:  # another process has truncated the file
            raise OSError(errno.EIO, f"the file ends at {offset + count}")

    def _write(self, offset: int, buffer: memoryview) -> None:
        if self._direct < 0 or offset % PAGE or len(buffer) % PAGE:
            write_all(self._fd, offset, buffer)
        elif _is_aligned(buffer):
            write_all(self._direct, offset, buffer)
        else:
            for start in range(0, len(buffer), _BOUNCE_BYTES):
                piece = buffer[start : start + _BOUNCE_BYTES]
                bounce = self._bounce(len(piece))
                _copy(piece, bounce)
                write_all(self._direct, offset + start, bounce)

    def _truncate(self, size: int, _: memoryview) -> None:
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)

    def _bounce(self, size: int) -> memoryview:
        """This thread's own aligned memory: whole pages for `size` bytes, at most _BOUNCE_BYTES."""
        memory: memoryview | None = getattr(self._bounce_buffers, "memory", None)
        if memory is None:
            memory = self._bounce_buffers.memory = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        return memory[: min(-(-size // PAGE) * PAGE, _BOUNCE_BYTES)]


_NO_BYTES: Final = memoryview(b"")


class _Owner(enum.Enum):
    """Which side ends a call: threads, which perform it, or the loop, which drops it."""

    THREADS = "threads"
    LOOP = "loop"


class _IoRequest:
    """One read or write. Its owner, set once under a lock, decides who may touch the buffer.

    | owner   | set by                                    | ends with                          |
    |---------|-------------------------------------------|------------------------------------|
    | none    |                                           | an owner                           |
    | THREADS | the first thread that takes a piece of it | `finish`, after its last piece     |
    | LOOP    | its cancellation, or `close`, before that | at once; no thread touches it      |
    """

    __slots__ = (
        "_claiming",
        "_finished",
        "buffer",
        "done",
        "error",
        "offset",
        "owner",
        "piece_size",
        "pieces",
        "transfer",
    )

    def __init__(
        self,
        transfer: Callable[[int, memoryview], None],
        offset: int,
        buffer: memoryview,
        piece_size: int,
    ) -> None:
        self.transfer = transfer
        self.piece_size = piece_size
        self.pieces = -(-len(buffer) // piece_size) if len(buffer) > piece_size else 1
        self.offset = offset
        self.buffer = buffer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None
        self.owner: _Owner | None = None
        self._claiming = threading.Lock()
        self._finished = False

    def try_own(self, owner: _Owner) -> bool:
        """Become the owner, if there is none. True when `owner` is the owner now."""
        with self._claiming:
            if self.owner is None:
                self.owner = owner
            return self.owner is owner

    def finish(self) -> None:
        """In the loop, when no thread touches the buffer any more."""
        self._finished = True
        if not self.done.done():
            self.done.set_result(None)

    async def wait_finished(self) -> None:
        """Wait for `finish`, however often the waiting task is cancelled."""
        while not self._finished:
            self.done = self.done.get_loop().create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self.done


class _WorkBatch:
    """Calls that go to threads together; as many pieces as the largest of them has."""

    __slots__ = ("loop", "pieces_left", "requests")

    def __init__(self, requests: list[_IoRequest]) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests = requests
        self.pieces_left = max(request.pieces for request in requests)


class _DaemonThreads:
    """Up to `count` daemon threads, started when they are needed, that run what is submitted.

    Not a ThreadPoolExecutor: it joins its threads when the interpreter exits, and with a stuck disk
    the process would never end.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, work: Callable[[], None]) -> None:
        """Run this in a thread. It must not raise. RuntimeError: there is none, and none can be
        started."""
        if self._started < self._count:
            try:
                threading.Thread(target=self._run, name="kvpool-disk", daemon=True).start()
                self._started += 1
            except RuntimeError:  # this process has as many as it may
                if not self._started:
                    raise
        self._queue.put(work)

    def close(self) -> None:
        """End each thread when it has done what was submitted before."""
        for _ in range(self._started):
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # a thread that waits must not keep the disk alive


# --- one system call after the other --------------------------------------------------------


def _read(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill the buffer, as far as the file goes. Returns the number of bytes read."""
    count = 0
    while count < len(buffer) and (step := os.preadv(fd, [buffer[count:]], offset + count)):
        count += step
    return count


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes. With numpy, because it releases the GIL; slice assignment does not."""
    size = min(len(source), len(target))
    np.copyto(np.frombuffer(target, np.uint8, size), np.frombuffer(source, np.uint8, size))


def _is_aligned(buffer: memoryview) -> bool:
    if not len(buffer):
        return True
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0
