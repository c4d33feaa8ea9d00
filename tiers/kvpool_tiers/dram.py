"""DRAM: one memfd, mapped here and, through the shm transport, by clients on this host.

A memfd has no name: nothing lies in /dev/shm, no permissions can be wrong, and after kill -9 the
kernel frees it with the last mapping. It is sealed against resizing, because a peer that could
shrink it would kill every process that maps it with SIGBUS.

Its memory should lie in large pieces: into scattered pages, a disk reads up to a third slower.
Where no huge pages were set aside, the kernel is asked to put some together afterwards, which it
does also where it would not use any for a memfd by itself (the default).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import threading

from kvpool.errors import Closed, ConfigError, UsageError

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_MADV_COLLAPSE = 25  # Linux 6.1
_PREFAULT_STEP = 16 << 20
_HUGE_PAGE = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Dram:
    """`capacity` bytes of memory, fixed for the life of the server."""

    name = "dram"
    alignment = 4096
    survives_restart = False

    def __init__(self, capacity: int, *, prefault: bool = True) -> None:
        """Raises ConfigError when the machine does not have that much memory.

        With `prefault` a thread touches every page in the background, and has the kernel make huge
        ones of them: the first write to fresh memory is several times slower than later ones.
        """
        available = memory_available()
        if capacity > available:
            raise ConfigError(
                f"capacity is {capacity} bytes, the machine has {available} available: "
                "lower `capacity`"
            )
        self.capacity = max(capacity - capacity % self.alignment, self.alignment)
        self.huge_pages = (
            _free_huge_pages() * _HUGE_PAGE >= self.capacity > 0 == (self.capacity % _HUGE_PAGE)
        )
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if self.huge_pages:
            flags |= os.MFD_HUGETLB
        self.fd = os.memfd_create("kvpool", flags)
        os.ftruncate(self.fd, self.capacity)
        fcntl.fcntl(
            self.fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        self._map = _mapped(self.fd, self.capacity)
        with contextlib.suppress(OSError):  # only advice; kernels without THP for shmem refuse
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._map)
        self._stop = threading.Event()
        self._prefault: threading.Thread | None = None
        if prefault:
            self._prefault = threading.Thread(target=self._touch_pages, name="prefault")
            self._prefault.daemon = True
            self._prefault.start()

    def __repr__(self) -> str:
        return f"<Dram {self.capacity} bytes>"

    def wait_until_touched(self) -> None:
        """Until the memory is as fast as it will be."""
        if self._prefault is not None:
            self._prefault.join()

    def view(self, offset: int, size: int) -> memoryview:
        if not 0 <= offset <= offset + size <= self.capacity:
            raise UsageError(f"{size} bytes at {offset}: there are {self.capacity}")
        if self.fd < 0:
            raise Closed("the tier is closed")
        return self._memory[offset : offset + size]

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.view(offset, len(buffer))
        await asyncio.sleep(0)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        self.view(offset, len(buffer))[:] = buffer
        await asyncio.sleep(0)

    def close(self) -> None:
        self._stop.set()
        self.wait_until_touched()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # a view is still held; it goes with that
                self._memory.release()
                self._map.close()

    def _touch_pages(self) -> None:
        with contextlib.suppress(OSError):  # of this thread only: who is served comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        start = _address(self._map)
        for offset in range(0, self.capacity, _PREFAULT_STEP):
            size = min(_PREFAULT_STEP, self.capacity - offset)
            # ctypes releases the GIL; the mmap module's own madvise does not.
            if self._stop.is_set() or _libc.madvise(start + offset, size, _MADV_POPULATE_WRITE):
                return
            if not self.huge_pages and size >= _HUGE_PAGE:  # it may fail, which harms nothing
                _libc.madvise(start + offset, size, _MADV_COLLAPSE)


def _mapped(fd: int, size: int) -> mmap.mmap:
    """The whole file, in our memory; at a multiple of a huge page where that can be had.

    Kernels fill the address space from above, and `mmap` cannot ask for an address: so what is too
    much is filled first.
    """
    mapped = mmap.mmap(fd, size)
    if too_high := _address(mapped) % _HUGE_PAGE:
        mapped.close()
        with mmap.mmap(-1, too_high):
            mapped = mmap.mmap(fd, size)
    return mapped


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def memory_available() -> int:
    """Bytes that can be had without swapping, within the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) for line in lines if "MemAvailable" in line) << 10
    with (
        contextlib.suppress(OSError, ValueError),
        open("/sys/fs/cgroup/memory.max") as limit,
        open("/sys/fs/cgroup/memory.current") as used,
    ):
        available = min(available, int(limit.read()) - int(used.read()))
    return available


def _free_huge_pages() -> int:
    try:
        with open("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") as count:
            return int(count.read())
    except (OSError, ValueError):
        return 0
