"""DRAM: one memfd, mapped here and, through the shm transport, by clients on this host.

A memfd has no name: nothing lies in /dev/shm, no permissions can be wrong, and after kill -9 the
kernel frees it with the last mapping. It is sealed against resizing: a peer that could shrink it
would kill every process that maps it with SIGBUS (design: shared-memory).
"""

from __future__ import annotations

import asyncio
import fcntl
import os

from kvpool.errors import Closed, ConfigError, UsageError
from kvpool.huge_pages import HUGE_PAGE, HugePageMapping
from kvpool.memory_limits import MemoryLimits, tightest
from kvpool.units import human


class Dram:
    """`capacity` bytes of memory, fixed for the life of the server."""

    name = "dram"
    alignment = 4096
    survives_restart = False

    def __init__(
        self, capacity: int, *, prefault: bool = True, limits: MemoryLimits | None = None
    ) -> None:
        """Raises ConfigError when a limit of the machine or this process leaves less memory.

        With `prefault` a thread touches every page in the background: the first write to fresh
        memory is several times slower than later ones. Where the administrator has reserved enough
        huge pages, the memory lies in those; else the kernel is asked for huge pages.
        """
        self.capacity = max(capacity - capacity % self.alignment, self.alignment)
        self.huge_pages = _fits(capacity, self.capacity, limits or MemoryLimits())
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if self.huge_pages:
            flags |= os.MFD_HUGETLB
        self.fd = os.memfd_create("kvpool", flags)
        # A memfd begins with mode 0777: anyone with a read-only descriptor could open it anew.
        os.fchmod(self.fd, 0o400)
        os.ftruncate(self.fd, self.capacity)
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self._mapping = HugePageMapping(
            self.fd, self.capacity, prefault=prefault, collapse=not self.huge_pages
        )

    def __repr__(self) -> str:
        return f"<Dram {self.capacity} bytes>"

    def wait_until_touched(self) -> None:
        """Return when the memory is as fast as it will be."""
        self._mapping.wait_until_touched()

    def view(self, offset: int, size: int) -> memoryview:
        if not 0 <= offset <= offset + size <= self.capacity:
            raise UsageError(f"{size} bytes at {offset}: there are {self.capacity}")
        if self.fd < 0:
            raise Closed("the tier is closed")
        return self._mapping.memory[offset : offset + size]

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.view(offset, len(buffer))
        await asyncio.sleep(0)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        self.view(offset, len(buffer))[:] = buffer
        await asyncio.sleep(0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._mapping.close()


def _fits(wanted: int, capacity: int, limits: MemoryLimits) -> bool:
    """Whether the memory lies in reserved huge pages. Raises ConfigError if it fits nowhere.

    A page beyond a limit would not be refused later: it ends the process.
    """
    reserved = tightest(limits.huge_pages())
    huge = capacity % HUGE_PAGE == 0 and reserved.free >= capacity
    bound = tightest([*([] if huge else limits.memory()), *limits.mapped(), *limits.file_size()])
    if wanted > bound.free:
        more = f" or raise {bound.advice}" if bound.advice else ""
        if not huge and reserved.free > 0:
            more += f"; {reserved.name} have {human(reserved.free)}, too few for all of it"
        there = human(max(0, bound.free))
        what = f"capacity is {human(wanted)}, {bound.name} has {there} available"
        raise ConfigError(f"{what}: lower `capacity`{more}")
    return huge
