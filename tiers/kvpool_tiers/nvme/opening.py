"""Opening the file of a disk: its own, locked, claimed, and as large as asked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError
from kvpool.memory_limits import MemoryLimits, tightest
from kvpool.units import human

#: The unit of direct I/O: memory, offset and size are multiples of it.
PAGE: Final = 4096


def open_file(path: Path) -> int:
    """A descriptor of a regular file, which is created where there is none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, expected a file") from None
    except FileNotFoundError:
        raise ConfigError(f"{path} cannot be created: its directory does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened for writing: {error_text(error)}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path} is not a regular file: a tier needs a file of its own")
    return fd


def lock(fd: int, path: Path) -> None:
    """Lock this open file; the kernel unlocks it when the process ends, also after kill -9."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, named = os.fstat(fd), os.stat(path)
    except BlockingIOError:
        raise ConfigError(
            f"{path} is in use by {_owner(fd)}: each server needs a file of its own"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked: {error_text(error)}") from None
    if (ours.st_dev, ours.st_ino) != (named.st_dev, named.st_ino):
        raise ConfigError(f"{path} was replaced while it was opened")


def _owner(fd: int) -> str:
    """The process that has the lock as text, if the kernel shows it."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == device:
                return f"process {fields[4]}"
    return "another process"


def claim(fd: int, path: Path, head: bytes, accept: Callable[[bytes], object]) -> None:
    """Write our mark into an empty file, to the disk, before it grows; check any other file."""
    try:
        if os.fstat(fd).st_size:
            accept(_read_head(fd, len(head)))
        else:
            write_all(fd, 0, memoryview(head))
            os.fsync(fd)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error_text(error)}") from None


def _read_head(fd: int, size: int) -> bytes:
    """The first bytes of the file, with zeros for pages that cannot be read; OSError if none can.

    Page by page: `accept` may be content with one of them.
    """
    head = bytearray()
    problem: OSError | None = None
    read_any = False
    for offset in range(0, size, PAGE):
        try:
            piece = os.pread(fd, min(PAGE, size - offset), offset)
        except OSError as error:
            problem, piece = error, bytes(PAGE)
        else:
            read_any = True
        head += piece
    if problem is not None and not read_any:
        raise problem
    return bytes(head)


def grow(fd: int, path: Path, size: int) -> int:
    """Give the file at least `size` bytes, all allocated: no other file can use them up later.

    Returns its size in whole pages. Raises ConfigError instead of using space that the file system
    reserves for root.
    """
    before = os.fstat(fd).st_size
    bound = tightest(MemoryLimits().file_size())
    if size > bound.free:
        raise ConfigError(
            f"{path} is to have {human(size)}, {bound.name} allows {human(bound.free)}: lower "
            f"`capacity` or raise {bound.advice}"
        )
    try:
        missing = size - os.fstat(fd).st_blocks * 512
        volume = os.fstatvfs(fd)
        free = volume.f_bavail * volume.f_frsize
        if missing > free:
            problem = f"needs {human(missing)} more, its file system has {human(free)} free"
            raise ConfigError(f"{path} {problem}: lower `capacity`")
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                os.ftruncate(fd, min(before, size))
                raise
            os.ftruncate(fd, max(before, size))  # it may still run full later: ENOSPC
    except OSError as error:
        raise ConfigError(f"{path} cannot have {human(size)}: {error_text(error)}") from None
    return max(size, before - before % PAGE)


def open_direct(fd: int) -> int:
    """A second descriptor of the same file, with O_DIRECT; -1 where that is refused."""
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


def write_all(fd: int, offset: int, buffer: memoryview) -> None:
    count = 0
    while count < len(buffer):
        count += os.pwrite(fd, buffer[count:], offset + count)


def error_text(error: OSError) -> str:
    """`EIO: Input/output error`."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"
