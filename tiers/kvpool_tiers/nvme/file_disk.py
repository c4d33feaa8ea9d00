"""One file as a disk: positions, whole reads and writes, and nothing of what they mean.

`Disk` is the seam below the NVMe tier. What lies above it, the whole format, never sees a file, a
thread or an OSError, so the same code runs over a simulated disk that tears, rots, fills and
hangs. `FileDisk` is the real one: a preallocated file that belongs to one process, read and
written past the page cache (O_DIRECT) where the file system allows it.

Two descriptors share the file. Whole pages go through the direct one, straight from or to the
caller's memory if that is aligned, else through a few aligned buffers. Anything smaller goes
through the page cache, which is what makes writing 128 bytes cheap. The kernel keeps the two
coherent as long as no page is written both ways at once; the tier above takes care of that. The
file is never mapped: a disk that dies under a mapping kills the process (SIGBUS).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol, TypeVar

import numpy as np
from aiofiles.os import wrap

from kvpool.errors import Closed, ConfigError, Unavailable

#: The unit of direct I/O: memory, offset and size are multiples of it.
PAGE: Final = 4096
#: Small calls made together are one piece of work for a thread, up to so many bytes and calls:
#: handing them over costs more than reading a small block.
_SHARE_BYTES: Final = 256 << 10
_SHARE_CALLS: Final = 16
#: Large reads are several, which different threads take: then they end one after the other, instead
#: of all at the same late moment, and devices are faster. Nobody waits for a write, and its pieces
#: would only take the interpreter away from readers.
_PIECE_BYTES: Final = 512 << 10
#: One per thread, made when a caller's memory is not aligned.
_BOUNCE_BYTES: Final = 1 << 20

T = TypeVar("T")


class Disk(Protocol):
    """One file or device; positions are bytes. Any number of calls at once, never short.

    A call that has ended, cancelled or not, touches neither its buffer nor the medium any more. So
    on a disk that is stuck a call does not end, not even by being cancelled. Calls at the same
    time are in no order. After `close` calls raise Closed.
    """

    @property
    def size(self) -> int:
        """Bytes; a multiple of PAGE."""

    @property
    def mode(self) -> str:
        """`O_DIRECT` or `buffered`."""

    async def read(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises Unavailable, which says what the disk said (EIO)."""

    async def write(self, offset: int, buffer: memoryview) -> None:
        """Store all of `buffer`. Raises Unavailable (ENOSPC, EIO): then any of it may be there."""

    def close(self) -> None:
        """Take no more calls. Idempotent; never waits, not for a stuck disk either."""


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
        """Open `path`, or make it: its directory must exist. It has `size` bytes from now on.

        A new or empty file begins with `head`. What any other begins with (as many bytes, or all
        it has) is shown to `accept`, which raises ConfigError if that is no file of ours: until
        then nothing is changed. A larger file is cut, a smaller one grows. `queue_depth` is how
        many threads read and write. Raises ConfigError, which names the path and what to do.
        """
        if queue_depth < 1:
            raise ConfigError(f"queue_depth is {queue_depth}, expected at least 1")
        self.path = Path(path)
        self.size = size
        self._fd = _open(self.path)
        try:
            _lock(self._fd, self.path)
            empty = not os.fstat(self._fd).st_size
            try:
                _claim(self._fd, self.path, head, accept)
                _resize(self._fd, self.path, size)
            except ConfigError:
                if empty:  # nothing was in it, and so it is no trace of a capacity too large
                    os.unlink(self.path)
                raise
        except BaseException:
            os.close(self._fd)
            raise
        self._direct = _open_direct(self._fd) if direct else -1
        self.mode = "O_DIRECT" if self._direct >= 0 else "buffered"
        self._threads = _Threads(queue_depth)
        self._queue_depth = queue_depth
        self._work_in_thread = wrap(self._work)
        self._bounces = threading.local()
        self._waiting: list[_Job] = []
        self._shares: set[_Share] = set()
        self._crossings: set[asyncio.Future[None]] = set()
        self._closed = False
        self._guard = threading.Lock()  # of what follows
        self._pieces: deque[tuple[_Share, int]] = deque()
        self._working = 0  # threads that do so, or look for more
        self._begun = 0  # shares that threads have begun and are not through with

    def __repr__(self) -> str:
        return f"<FileDisk {self.path}, {self.size} bytes, {self.mode}>"

    async def read(self, offset: int, buffer: memoryview) -> None:
        await self._call(_Job(self._read, offset, buffer, _PIECE_BYTES))

    async def write(self, offset: int, buffer: memoryview) -> None:
        await self._call(_Job(self._write, offset, buffer, len(buffer)))

    def close(self) -> None:
        """Calls that no thread has begun end with Closed; the others keep the file until they end.

        The threads are daemons: one that a dead disk never gives back keeps nobody from exiting.
        """
        if self._closed:
            return
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for job in (*waiting, *(job for share in self._shares for job in share.jobs)):
            if job.claim(_Owner.LOOP):
                job.error = Closed("the disk is closed")
                job.end()
        self._threads.close()
        with self._guard:
            self._close_files()

    # --- from the loop to a thread and back ----------------------------------------------

    async def _call(self, job: _Job) -> None:
        """One read or write. When it has ended, however, no thread looks at its buffer."""
        if self._closed:
            raise Closed("the disk is closed")
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._dispatch)
        self._waiting.append(job)
        try:
            await job.done
        except asyncio.CancelledError:
            if not job.claim(_Owner.LOOP):
                await job.ended()
            raise
        finally:
            job.buffer = _NOTHING
        if job.error is not None:
            raise job.error

    def _dispatch(self) -> None:
        """All calls of this turn of the loop: small ones together, large reads in pieces."""
        waiting, self._waiting = self._waiting, []
        shares: list[_Share] = []
        jobs: list[_Job] = []
        size = 0
        for job in waiting:
            if job.owner is not None:  # cancelled meanwhile
                continue
            jobs.append(job)
            size += len(job.buffer)
            if size >= _SHARE_BYTES or len(jobs) >= _SHARE_CALLS:
                shares.append(_Share(jobs))
                jobs, size = [], 0
        if jobs:
            shares.append(_Share(jobs))
        if shares:
            self._shares.update(shares)
            self._cross([(share, number) for share in shares for number in range(share.left)])

    def _cross(self, pieces: list[tuple[_Share, int]]) -> None:
        """Threads that are at work take them when they are through; the others are woken."""
        with self._guard:
            self._pieces.extend(pieces)
            count = min(len(pieces), self._queue_depth - self._working)
        if count > 0:
            crossing = asyncio.ensure_future(self._work_in_thread(executor=self._threads))
            self._crossings.add(crossing)
            crossing.add_done_callback(self._crossings.discard)
            for _ in range(count - 1):
                self._threads.submit(self._work)

    def _work(self) -> None:
        """In a thread: one piece after the other, until there is none.

        Who stops has seen that nothing is left, under the guard under which more would be added.
        """
        with self._guard:
            self._working += 1
        while (piece := self._next()) is not None:
            share, number = piece
            for job in share.jobs:
                if job.claim(_Owner.THREADS):
                    self._perform(job, number)
            self._through(share)
            del share, job, piece  # while it waits for the next, it keeps nothing alive

    def _next(self) -> tuple[_Share, int] | None:
        with self._guard:
            if not self._pieces:
                self._working -= 1
                return None
            share, number = self._pieces.popleft()
            self._begun += not number
            return share, number

    def _through(self, share: _Share) -> None:
        """One more piece is: when it was the last one, whoever waits hears of it."""
        with self._guard:
            share.left -= 1
            if share.left:
                return
            self._begun -= 1
            self._close_files()
        # Not left to a task that waits for this thread: when a loop shuts down, it cancels its
        # tasks, and whoever waits for a buffer must still hear when we are through with it.
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits
            share.loop.call_soon_threadsafe(self._finish, share)

    def _perform(self, job: _Job, number: int) -> None:
        """One piece of this job, if it has so many, unless another one has failed."""
        start = number * job.piece_size
        if number >= job.pieces or job.error is not None:
            return
        piece = job.buffer[start : start + job.piece_size]
        try:
            job.perform(job.offset + start, piece)
        except OSError as error:
            job.error = Unavailable(f"{self.path}: {_said(error)}")
        except Exception as error:  # this buffer is none; the other calls can go on
            job.error = error

    def _finish(self, share: _Share) -> None:
        self._shares.discard(share)
        for job in share.jobs:
            job.end()

    def _close_files(self) -> None:
        """After `close`, when no thread is at work on them; under the guard.

        Not before: a descriptor that is closed may be another file's a moment later. Once closed,
        nobody uses them: `close` has claimed every call that no thread had begun.
        """
        if self._closed and not self._begun:
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
            while count < size:
                bounce = self._bounce(size - count)
                got = min(_read(self._direct, offset + count, bounce), size - count)
                if not got:
                    break
                _copy(bounce[:got], buffer[count : count + got])
                count += got
        if count < size:  # somebody has cut it
            raise OSError(errno.EIO, f"the file ends at {offset + count}")

    def _write(self, offset: int, buffer: memoryview) -> None:
        if self._direct < 0 or offset % PAGE or len(buffer) % PAGE:
            _write(self._fd, offset, buffer)
        elif _is_aligned(buffer):
            _write(self._direct, offset, buffer)
        else:
            for start in range(0, len(buffer), _BOUNCE_BYTES):
                piece = buffer[start : start + _BOUNCE_BYTES]
                bounce = self._bounce(len(piece))
                _copy(piece, bounce)
                _write(self._direct, offset + start, bounce)

    def _bounce(self, size: int) -> memoryview:
        """This thread's own aligned memory: whole pages for `size` bytes, or as many as it has."""
        memory: memoryview | None = getattr(self._bounces, "memory", None)
        if memory is None:
            memory = self._bounces.memory = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        return memory[: min(-(-size // PAGE) * PAGE, _BOUNCE_BYTES)]


_NOTHING: Final = memoryview(b"")


class _Owner(enum.Enum):
    """Who has a job: threads, which perform it, or the loop, and then nobody does."""

    THREADS = "threads"
    LOOP = "loop"


class _Job:
    """One call."""

    __slots__ = (
        "_claiming",
        "_over",
        "buffer",
        "done",
        "error",
        "offset",
        "owner",
        "perform",
        "piece_size",
        "pieces",
    )

    def __init__(
        self,
        perform: Callable[[int, memoryview], None],
        offset: int,
        buffer: memoryview,
        piece_size: int,
    ) -> None:
        self.perform = perform
        self.piece_size = piece_size
        self.pieces = -(-len(buffer) // piece_size) if len(buffer) > piece_size else 1
        self.offset = offset
        self.buffer = buffer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None
        self.owner: _Owner | None = None
        self._claiming = threading.Lock()
        self._over = False

    def claim(self, owner: _Owner) -> bool:
        """True for the first who asks, from then on."""
        with self._claiming:
            if self.owner is None:
                self.owner = owner
            return self.owner is owner

    def end(self) -> None:
        """In the loop, when no thread looks at the buffer any more."""
        self._over = True
        if not self.done.done():
            self.done.set_result(None)

    async def ended(self) -> None:
        """Wait for that, however often whoever waits is cancelled."""
        while not self._over:
            self.done = self.done.get_loop().create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self.done


class _Share:
    """Jobs that go to threads together: one piece of work, or several, where they are large."""

    __slots__ = ("jobs", "left", "loop")

    def __init__(self, jobs: list[_Job]) -> None:
        self.loop = asyncio.get_running_loop()
        self.jobs = jobs
        self.left = max(job.pieces for job in jobs)  # pieces of work that are not through


class _Threads(Executor):
    """Daemon threads that do whatever was submitted, also if nobody waits for it any more.

    ThreadPoolExecutor joins its threads when the interpreter exits: with a stuck disk, never.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._queue: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()

    def submit(self, task: Callable[[], T], /) -> Future[T]:  # type: ignore[override]
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._queue.put((future, task))  # type: ignore[arg-type]
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._work, name="kvpool-disk", daemon=True).start()
        return future

    def close(self) -> None:
        """End each thread when it has done what was submitted before."""
        for _ in range(self._started):
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del item, future, task  # while it waits for the next, it keeps nothing alive


# --- one system call after the other --------------------------------------------------------


def _read(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill the buffer, as far as the file goes; how many bytes that were."""
    count = 0
    while count < len(buffer) and (step := os.preadv(fd, [buffer[count:]], offset + count)):
        count += step
    return count


def _write(fd: int, offset: int, buffer: memoryview) -> None:
    count = 0
    while count < len(buffer):
        count += os.pwrite(fd, buffer[count:], offset + count)


def _copy(source: memoryview, target: memoryview) -> None:
    """numpy releases the GIL for it, slice assignment does not."""
    size = min(len(source), len(target))
    np.copyto(np.frombuffer(target, np.uint8, size), np.frombuffer(source, np.uint8, size))


def _is_aligned(buffer: memoryview) -> bool:
    if not len(buffer):
        return True
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def _said(error: OSError) -> str:
    """`EIO: Input/output error`."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"


# --- opening -----------------------------------------------------------------------------------


def _open(path: Path) -> int:
    """A descriptor of a regular file, which is made where there is none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, expected a file") from None
    except FileNotFoundError:
        raise ConfigError(f"{path} cannot be made: its directory does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened for writing: {_said(error)}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path} is no regular file: a tier needs a file of its own")
    return fd


def _lock(fd: int, path: Path) -> None:
    """For this open file alone; the kernel lets go of it when the process dies, however."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, named = os.fstat(fd), os.stat(path)
    except BlockingIOError:
        raise ConfigError(
            f"{path} is in use by {_owner(fd)}: each server needs a file of its own"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked: {_said(error)}") from None
    if (ours.st_dev, ours.st_ino) != (named.st_dev, named.st_ino):
        raise ConfigError(f"{path} was replaced while it was opened")


def _owner(fd: int) -> str:
    """Who has the lock, as far as the kernel tells."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == device:
                return f"process {fields[4]}"
    return "another process"


def _claim(fd: int, path: Path, head: bytes, accept: Callable[[bytes], object]) -> None:
    """Mark an empty file as ours, on the disk, before it grows; look at any other."""
    try:
        if os.fstat(fd).st_size:
            accept(os.pread(fd, len(head), 0))
        else:
            _write(fd, 0, memoryview(head))
            os.fsync(fd)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {_said(error)}") from None


def _resize(fd: int, path: Path, size: int) -> None:
    """Exactly `size` bytes, all of them set aside: no other file can take them away later.

    What the file system keeps for root stays free; nothing else is kept.
    """
    before = os.fstat(fd).st_size
    try:
        if before > size:
            os.ftruncate(fd, size)
        missing = size - os.fstat(fd).st_blocks * 512
        volume = os.fstatvfs(fd)
        free = volume.f_bavail * volume.f_frsize
        if missing > free:
            raise ConfigError(
                f"{path} needs {missing} bytes more, its file system has {free} free: "
                "lower `capacity`"
            )
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                os.ftruncate(fd, min(before, size))
                raise
            os.ftruncate(fd, size)  # such a file system may still be full one day: ENOSPC
    except OSError as error:
        raise ConfigError(f"{path} cannot have {size} bytes: {_said(error)}") from None


def _open_direct(fd: int) -> int:
    """A second descriptor of the same file, past the page cache; -1 where that is refused."""
    direct = -1
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(direct, [page], 0)  # some file systems refuse only now
    except OSError:
        if direct >= 0:
            os.close(direct)
        return -1
    return direct
