"""Memory mappings that the kernel can keep in huge pages, and a thread that touches them early.

A segment lies in a memfd that its server maps (the tier `dram`) and that clients on the same host
map as well (the transport `shm`). Both want an address at a multiple of 2 MiB: at any other address
the kernel maps small pages only, and into scattered small pages a disk reads up to a third slower.
The server, whose memory it is, wants two things more:

- huge pages where the administrator reserved none: the kernel is asked to collapse small pages into
  huge ones, which it does also where it would not use any for a memfd by itself (the default);
- pages touched in advance: the first access to a fresh page is several times slower.

All of it is advice. A kernel that refuses any of it gives memory that works, only slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from typing import Final

import numpy as np

HUGE_PAGE: Final = 2 << 20
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in the mmap module
_MADV_COLLAPSE: Final = 25  # Linux 6.1
#: Bytes touched by one call: a few milliseconds, the longest time that `close` waits.
_PREFAULT_STEP: Final = 16 << 20
_NICE: Final = 10
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class HugePageMapping:
    """`size` bytes of a file, shared, from its beginning; `memory` is a view of all of them.

    The address is a multiple of a huge page, whatever the size, which is any above 0.
    """

    def __init__(
        self, fd: int, size: int, *, own: bool = True, prefault: bool = True, collapse: bool = False
    ) -> None:
        """Map `fd`. The caller keeps owning the descriptor. Raises OSError.

        With `prefault` a thread of low priority touches every page, which allocates those that the
        file does not have yet; with `collapse` they become huge ones where possible. Memory that is
        not its `own` but another process's is read-only (see `make_writable`), left as it is, and
        not inherited by a forked child.
        """
        self._own = own
        # `mmap` in Python takes no address: reserve more than is needed, and map the file over the
        # part that is aligned. Closing the reservation unmaps both.
        self._map = _reserve(size)
        reserved = np.frombuffer(self._map, np.uint8).ctypes.data
        offset = -reserved % HUGE_PAGE
        #: Where `memory` begins; a multiple of `HUGE_PAGE`.
        self.address: int = reserved + offset
        self._map_over(fd, size, writable=own)
        if collapse:
            with contextlib.suppress(OSError):  # kernels without huge pages for memfds
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._map)[offset : offset + size]
        self.memory = self._memory if own else self._memory.toreadonly()
        self._collapse = collapse
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if own and prefault:
            thread = threading.Thread(target=self._touch_pages, name="prefault", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread: pages are slower once
                thread.start()
                self._thread = thread

    def wait_until_touched(self) -> None:
        """Return when the thread has touched every page, or has given up. For tests and timings."""
        if self._thread is not None:
            self._thread.join()

    def make_writable(self, fd: int) -> memoryview:
        """Map a writable descriptor of the same file at the same address; a view of it.

        Views of `memory` stay valid, and other threads may read through them meanwhile: the kernel
        replaces the pages in one step. The caller keeps owning the descriptor. Raises OSError.
        """
        size = len(self._memory)
        # First elsewhere: where the kernel refuses it here, it may have removed the old mapping
        # already, and the next read would end the process.
        mmap.mmap(fd, size).close()
        self._map_over(fd, size, writable=True)
        return self._memory

    def close(self) -> None:
        """Stop the thread and unmap. Idempotent. Views that callers hold keep the memory mapped."""
        self._stop.set()
        self.wait_until_touched()  # it must not touch addresses that are mapped to something else
        with contextlib.suppress(BufferError):  # a view is still held; the memory goes with it
            self.memory.release()
            self._memory.release()
            self._map.close()

    def _touch_pages(self) -> None:
        with contextlib.suppress(OSError):  # of this thread only: requests go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        size = len(self.memory)
        for offset in range(0, size, _PREFAULT_STEP):
            start, step = self.address + offset, min(_PREFAULT_STEP, size - offset)
            if self._stop.is_set():
                return
            # Through ctypes, which releases the GIL; the mmap module's own `madvise` does not.
            if self._collapse and step >= HUGE_PAGE:
                # One page of each is enough for the kernel to make all of it huge: no small pages
                # are filled and copied. It may refuse, and then the pages stay small.
                for page in range(start, start + step, HUGE_PAGE):
                    _libc.madvise(page, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
                _libc.madvise(start, step, _MADV_COLLAPSE)
            if _libc.madvise(start, step, _MADV_POPULATE_WRITE):
                return

    def _map_over(self, fd: int, size: int, *, writable: bool) -> None:
        """Replace the memory at `address` by a shared mapping of the file."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(self.address, size, access, flags, fd, 0) != self.address:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if not self._own:
            self._map.madvise(mmap.MADV_DONTFORK)


def _reserve(size: int) -> mmap.mmap:
    """Anonymous memory that contains `size` bytes from a multiple of a huge page on."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
