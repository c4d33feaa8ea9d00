"""Memory mappings that the kernel can keep in huge pages, and a thread that touches them early.

A segment lies in a memfd that its server maps (the tier `dram`) and that clients on the same host
map as well (the transport `shm`). Both want the same three things:

- an address at a multiple of 2 MiB: at any other address the kernel maps small pages only, and into
  scattered small pages a disk reads up to a third slower;
- huge pages where the administrator reserved none: the kernel is asked to collapse small pages into
  huge ones, which it does also where it would not use any for a memfd by itself (the default);
- pages touched in advance: the first access to a fresh page is several times slower.

All of it is advice. A kernel that refuses any of it gives memory that works, only slower.
(design: huge-pages)
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
_MADV_POPULATE_READ: Final = 22  # Linux 5.14; not in the mmap module
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
#: Bytes touched by one call: a few milliseconds, the longest time that `close` waits.
_PREFAULT_STEP: Final = 16 << 20
_NICE: Final = 10
_FILLERS_MAX: Final = 16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HugePageMapping:
    """`size` bytes of a file, shared, from its beginning; `memory` is a view of all of them."""

    def __init__(
        self,
        fd: int,
        size: int,
        *,
        writable: bool = True,
        prefault: bool = True,
        collapse: bool = False,
        inherit: bool = True,
    ) -> None:
        """Map `fd` (-1: anonymous memory). The caller keeps owning the descriptor.

        `size` is any number of bytes above 0. With `prefault` a thread of low priority touches
        every page; where the mapping is `writable`, that allocates the pages which the file does
        not have yet. With `collapse` the pages become huge ones where possible. Without `inherit` a
        forked child does not have the mapping. Raises OSError when the memory cannot be mapped.
        """
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = _map_aligned(fd, size, access)
        if not inherit:
            self._map.madvise(mmap.MADV_DONTFORK)
        if collapse:
            with contextlib.suppress(OSError):  # kernels without huge pages for memfds
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._map)
        self._populate = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        self._collapse = collapse
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if prefault:
            self._thread = threading.Thread(target=self._touch_pages, name="prefault", daemon=True)
            self._thread.start()

    @property
    def address(self) -> int:
        """Where the mapping begins, in this process's memory."""
        return _address(self._map)

    def wait_until_touched(self) -> None:
        """Return when the thread has touched every page, or has given up. For tests and timings."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop the thread and unmap. Idempotent. Views that callers hold keep the memory mapped."""
        self._stop.set()
        self.wait_until_touched()  # it must not touch addresses that are mapped to something else
        with contextlib.suppress(BufferError):  # a view is still held; the memory goes with it
            self.memory.release()
            self._map.close()

    def _touch_pages(self) -> None:
        with contextlib.suppress(OSError):  # of this thread only: requests go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        size = len(self.memory)
        start = self.address
        for offset in range(0, size, _PREFAULT_STEP):
            step = min(_PREFAULT_STEP, size - offset)
            # Through ctypes, which releases the GIL; the mmap module's own `madvise` does not.
            if self._stop.is_set() or _libc.madvise(start + offset, step, self._populate):
                return
            if self._collapse and step >= HUGE_PAGE:  # may fail, and then the pages stay small
                _libc.madvise(start + offset, step, _MADV_COLLAPSE)


def _map_aligned(fd: int, size: int, access: int) -> mmap.mmap:
    """Map at a multiple of a huge page, if the mapping can contain one.

    `mmap` in Python takes no address. But kernels fill the address space downwards, each mapping
    just below the last one: so a filler of the bytes that are too many comes first. A filler may
    also land in a hole elsewhere. Then it stays there, so that the next one does not, and another
    is tried. When none helps, the address is not aligned, which costs speed only.
    """
    with contextlib.ExitStack() as fillers:
        for _ in range(_FILLERS_MAX):
            mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
            excess = _address(mapped) % HUGE_PAGE
            if not excess or size < HUGE_PAGE:
                return mapped
            mapped.close()
            fillers.enter_context(mmap.mmap(-1, excess))
        return mmap.mmap(fd, size, mmap.MAP_SHARED, access)


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)
