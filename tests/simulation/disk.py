"""A simulated disk below the real format code.

The `Platter` (`platter.py`) belongs to the node: its bytes outlive every process. A `SimDisk` is
the open handle of one process and ends with it. Calls take virtual time. A write takes its bytes
from the caller's buffer in pieces, at times between start and end of the call, so a caller that
changes the buffer before the end writes other bytes. A read fills its buffer in the same way.

After *kill -9* all writes that had returned are there, as in a page cache. Of a write that had not
returned, any sectors may be there. After a *power cut* the same holds for the last writes, too.

    fault                    what it does                                          ends
    slow, stick              calls take longer; calls never end                    heal
    fill                     writes raise ENOSPC, some sectors may be written      heal
    fail                     reads and writes raise EIO, now and then              heal
    spoil                    reads of these sectors raise EIO                      next write
    rot                      bits flip, silently                                   never
    lose, misdirect          writes return, but wrote nothing; wrote elsewhere     heal
    power_cut                see above; called after the kill                      at once

A process that waits for a stuck disk ends at once when it is killed; with a real disk the kernel
may wait for the disk. (Torn, lost and misdirected writes are the fault model of TigerBeetle's
simulator.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from kvpool.errors import Closed, ConfigError, KvpoolError, UsageError
from tests.simulation.loop import PROCESS, Process
from tests.simulation.platter import PAGE, Platter, TransferStep


class SimDisk:
    """One process's open disk (the `Disk` of `kvpool_tiers.nvme`). Made inside that process."""

    def __init__(self, platter: Platter) -> None:
        """Raises ConfigError while another handle is open, because the file is locked."""
        if platter.owner is not None:
            raise ConfigError(f"{platter.name} is in use by {platter.owner._process.name}")
        platter.owner = self
        self._platter = platter
        self._process: Process = PROCESS.get()
        self._process.on_death.append(self._died)
        self._queue: deque[Transfer] = deque()
        self._running: dict[Transfer, None] = {}
        self._closed = False

    @property
    def size(self) -> int:
        return self._platter.size

    @property
    def mode(self) -> str:
        return self._platter.mode

    async def read(self, offset: int, buffer: memoryview) -> None:
        await self._call(Transfer(self, offset, buffer, writes=False))

    async def write(self, offset: int, buffer: memoryview) -> None:
        await self._call(Transfer(self, offset, buffer, writes=True))

    async def truncate(self, size: int) -> None:
        assert size == self.size, "disks of simulated servers keep their size"

    def close(self) -> None:
        """Calls that have not begun raise Closed; the platter is released when the others end."""
        self._closed = True
        while self._queue:
            transfer = self._queue.popleft()
            transfer.error = Closed("the disk is closed")
            transfer.end()
        self._release()

    async def _call(self, transfer: Transfer) -> None:
        if self._closed:
            raise Closed("the disk is closed")
        stop = transfer.offset + len(transfer.buffer)
        if not 0 <= transfer.offset <= stop <= self.size:
            raise UsageError(f"{transfer.offset} to {stop} of a disk of {self.size} bytes")
        self._queue.append(transfer)
        self._start()
        try:
            await asyncio.shield(transfer.done)
        except asyncio.CancelledError:
            if transfer in self._queue:
                self._queue.remove(transfer)
            else:  # even when cancelled again: the disk still uses the buffer
                while not transfer.done.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([transfer.done])
            raise
        if transfer.error is not None:
            raise transfer.error

    def _start(self) -> None:
        while self._queue and len(self._running) < self._platter.queue_depth:
            transfer = self._queue.popleft()
            self._check_coherent(transfer)
            self._running[transfer] = None
            self._platter.begin(transfer)

    def _check_coherent(self, transfer: Transfer) -> None:
        """No page may be written directly and through the page cache at the same time."""
        if self.mode == "O_DIRECT" and transfer.writes:
            for other in self._running:
                if (
                    other.writes
                    and other.is_direct is not transfer.is_direct
                    and other.first_page < transfer.end_page
                    and transfer.first_page < other.end_page
                ):
                    self._platter.loop.fail(
                        f"{self._platter.name}: a page at {transfer.offset} is written directly "
                        f"and through the page cache at the same time ({other.offset})"
                    )

    def finish(self, transfer: Transfer) -> None:
        """The transfer has ended; the caller continues when its process runs."""
        del self._running[transfer]
        self._platter.loop.call_soon(transfer.end, context=self._process.context)
        self._start()
        if self._closed:
            self._release()

    @property
    def is_writing(self) -> bool:
        """A write has begun and not ended."""
        return any(transfer.writes for transfer in self._running)

    def _died(self) -> None:
        self._closed = True
        self._queue.clear()
        for transfer in self._running:
            self._platter.drop(transfer)
        self._running.clear()
        self._release()

    def _release(self) -> None:
        if not self._running and self._platter.owner is self:
            self._platter.owner = None


class Transfer:
    """One read or write, from its start to its end."""

    def __init__(self, disk: SimDisk, offset: int, buffer: memoryview, *, writes: bool) -> None:
        self.disk = disk
        self.offset = offset
        self.buffer = buffer
        self.writes = writes
        self.target: int | None = offset  # None: nowhere
        self.fails = False
        self.began = 0.0
        self.steps: deque[TransferStep] = deque()
        self.error: KvpoolError | None = None
        self.dropped = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_direct(self) -> bool:
        return self.offset % PAGE == len(self.buffer) % PAGE == 0

    @property
    def first_page(self) -> int:
        return self.offset // PAGE

    @property
    def end_page(self) -> int:
        return -(-(self.offset + len(self.buffer)) // PAGE)

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
