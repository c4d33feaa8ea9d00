"""Copies between memory of the host and memory of a device, off the loop's thread.

A device copies from and to *pinned* host memory: pages that the kernel will not move. Memory that
is pinned already (somebody registered it with CUDA) is copied from and to directly. Any other
goes in steps of 1 MiB through two pinned halves that take turns: while the device copies one, a
thread copies the other. The thread works on a CUDA stream of its own, so it waits for its own
copies and not for what the device computes; the event loop waits for nothing.

On the device `cpu` the same code runs, with copies that are done when they return. torch is
imported by whoever makes a copier, not before: it takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import Closed, Unavailable

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = NDArray[np.uint8]

#: Bytes that device and host copy at a time. Large enough that starting a copy costs little beside
#: it, small enough that both are at work on one block of 2 MiB.
STEP: Final = 1 << 20
#: The same where nothing is staged. A cancelled call waits for two of them at most.
DIRECT_STEP: Final = 16 << 20


class DeviceCopier:
    """Copies for one device: `lanes` threads, each with a stream and 2 MiB of pinned memory.

    What a device is still computing on the memory is not waited for: that is the caller's to do.
    Raises RuntimeError, as torch does, when it cannot have its memory.
    """

    def __init__(self, device: torch.device, lanes: int) -> None:
        self.device = device
        staged = pinned(lanes * 2 * STEP, device)
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for part in staged.view(lanes, 2 * STEP):
            self._lanes.put(Lane(device, part))
        self._executor = ThreadPoolExecutor(lanes, "kvpool-device")
        self._calls: dict[_Call, None] = {}  # that have not ended
        self._waiting: dict[_Call, None] = {}  # those of them that no thread has begun
        self._fresh: list[_Call] = []  # those of them that no thread has been told of
        self._closed = False

    async def copy(self, memory: Sequence[torch.Tensor], array: Bytes, *, to_host: bool) -> None:
        """Copy between rows of bytes on the device, one after the other, and as many of the host.

        When it returns, the bytes are there: on the device for all of its streams. However it
        ends, neither thread nor device touch any of the memory any more. Raises Unavailable for
        what the device reports, Closed after `close`.
        """
        loop = asyncio.get_running_loop()
        call = _Call(memory, array, to_host, loop.create_future())
        self._calls[call] = self._waiting[call] = None
        self._fresh.append(call)
        if len(self._fresh) == 1:
            loop.call_soon(self._hand_over, loop)
        try:
            await asyncio.shield(call.done)
        except asyncio.CancelledError:
            call.stopped = True
            if self._begins(call):
                call.done.cancel()  # no thread will begin it now
            while not call.done.done():
                with contextlib.suppress(asyncio.CancelledError):  # cancelled once more: it waits
                    await asyncio.wait([call.done])
            if not call.done.cancelled():
                call.done.exception()  # nobody else will ask for it
            raise
        finally:
            del self._calls[call]
        if call.stopped:
            raise Closed("closed while it copied")

    def close(self) -> None:
        """Running calls end with Closed; waits for the steps that their copies are at."""
        self._closed = True
        for call in self._calls:
            call.stopped = True
        self._executor.shutdown(wait=True)
        self._lanes = queue.SimpleQueue()

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Share out what was asked for in one turn of the loop.

        A thread gets several small blocks at a time: to wake it, and then the loop again, takes
        longer than to copy one.
        """
        fresh, self._fresh = self._fresh, []
        for share in _shares(fresh):
            if self._closed:
                for call in share:
                    call.stopped = True
                self._ended(share, None)
            else:
                working = loop.run_in_executor(self._executor, self._work, share)
                working.add_done_callback(functools.partial(self._ended, share))

    def _work(self, share: list[_Call]) -> None:
        """In a thread."""
        lane = self._lanes.get_nowait()  # there are as many as threads
        try:
            lane.copy([call for call in share if self._begins(call)])
        finally:
            self._lanes.put(lane)

    def _begins(self, call: _Call) -> bool:
        """True once: for the thread that begins it, or for its caller, who gave up before."""
        return self._waiting.pop(call, call) is None

    def _ended(self, share: list[_Call], working: asyncio.Future[None] | None) -> None:
        error = working.exception() if working is not None else None
        for call in share:
            if call.done.done():  # cancelled before it began
                continue
            if error is None:
                call.done.set_result(None)
            elif isinstance(error, RuntimeError):  # whatever CUDA reports
                why = f"device {self.device}: {first_line(error)}"
                call.done.set_exception(Unavailable(why))
            else:
                call.done.set_exception(error)


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Memory of the host that this device copies from and to by itself. Raises RuntimeError."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def first_line(error: BaseException) -> str:
    """torch's messages go on with advice about debugging it."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Call:
    """One copy between the device and the host."""

    __slots__ = ("array", "done", "memory", "stopped", "to_host")

    def __init__(
        self,
        memory: Sequence[torch.Tensor],
        array: Bytes,
        to_host: bool,
        done: asyncio.Future[None],
    ) -> None:
        self.memory = memory
        self.array = array  # the host's
        self.to_host = to_host
        self.done = done  # set when neither thread nor device touch the memory any more
        self.stopped = False  # cancelled, or all was closed: not one more step

    def steps(self, size: int) -> Iterator[tuple[list[torch.Tensor], Bytes]]:
        """The rest of it, up to `size` bytes at a time, until it is stopped."""
        rows: list[torch.Tensor] = []
        begun = held = 0
        for row in self.memory:
            taken = 0
            while taken < len(row):
                count = min(len(row) - taken, size - held)
                rows.append(row[taken : taken + count])
                taken += count
                held += count
                if held == size or begun + held == len(self.array):
                    if self.stopped:
                        return
                    yield rows, self.array[begun : begun + held]
                    rows, begun, held = [], begun + held, 0


def _shares(calls: Sequence[_Call]) -> list[list[_Call]]:
    """Cut where a step's worth of bytes is together."""
    shares: list[list[_Call]] = []
    room = 0
    for call in calls:
        if room <= 0:
            shares.append([])
            room = STEP
        shares[-1].append(call)
        room -= len(call.array)
    return shares


class Mark(Protocol):
    """A point on a stream; a `torch.cuda.Event`."""

    def record(self) -> None:
        """Put it behind all that was started so far."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""


class _Past:
    """The mark of a device whose copies are done when they return."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Half:
    """Pinned host memory, and the mark behind the device's last copy from or to it."""

    __slots__ = ("array", "mark", "tensor")

    def __init__(self, tensor: torch.Tensor, mark: Mark) -> None:
        self.tensor = tensor
        self.array: Bytes = tensor.numpy()  # the same memory
        self.mark = mark


class Lane:
    """What one thread at a time copies with: a stream, and two halves that take turns."""

    def __init__(self, device: torch.device, staged: torch.Tensor) -> None:
        import torch

        # Also into tensors that were made in it: elsewhere torch refuses to.
        self._unwatched: Callable[[], AbstractContextManager[object]] = torch.inference_mode
        self._on_stream: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        marks: list[Mark] = [_Past(), _Past()]
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            self._on_stream = lambda: torch.cuda.stream(stream)
            # Blocking: a thread that waits sleeps. By default it would spin, on a core.
            marks = [torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)]
        parts = (staged[:STEP], staged[STEP:])
        self.halves = [Half(part, mark) for part, mark in zip(parts, marks, strict=True)]
        self._turns = itertools.cycle(self.halves)

    def copy(self, calls: Sequence[_Call]) -> None:
        """However this ends, the device touches none of their memory any more."""
        with self._unwatched(), self._on_stream():
            try:
                staged = [call for call in calls if not self._direct(call)]
                self._stage_in([call for call in staged if not call.to_host])
                self._stage_out([call for call in staged if call.to_host])
            finally:
                for half in self.halves:
                    half.mark.synchronize()

    def _direct(self, call: _Call) -> bool:
        """Let the device copy from or to the host's memory itself. False if it cannot."""
        host = _pinned(call.array)
        if host is None:
            return False
        taken = 0
        for rows, array in call.steps(DIRECT_STEP):
            half = next(self._turns)
            half.mark.synchronize()  # two steps are under way, so that the device never idles
            if call.stopped:
                break
            _copy(rows, host[taken : taken + len(array)], to_host=call.to_host)
            taken += len(array)
            half.mark.record()
        return True

    def _stage_in(self, calls: Sequence[_Call]) -> None:
        """The host fills a half while the device empties the other."""
        for rows, array in itertools.chain.from_iterable(call.steps(STEP) for call in calls):
            half = next(self._turns)
            half.mark.synchronize()
            np.copyto(half.array[: len(array)], array)  # without the GIL
            _copy(rows, half.tensor[: len(array)], to_host=False)
            half.mark.record()

    def _stage_out(self, calls: Sequence[_Call]) -> None:
        """The device fills a half while the host empties the other: it is one step ahead."""
        ahead: tuple[Half, Bytes] | None = None
        for rows, array in itertools.chain.from_iterable(call.steps(STEP) for call in calls):
            half = next(self._turns)
            _copy(rows, half.tensor[: len(array)], to_host=True)
            half.mark.record()
            if ahead is not None:
                _empty(*ahead)
            ahead = half, array
        if ahead is not None:
            _empty(*ahead)


def _copy(rows: Sequence[torch.Tensor], host: torch.Tensor, *, to_host: bool) -> None:
    """Start the copies of rows, one after the other, from or to the host."""
    taken = 0
    for row in rows:
        part = host[taken : taken + len(row)]
        taken += len(row)
        if to_host:
            part.copy_(row, non_blocking=True)
        else:
            row.copy_(part, non_blocking=True)


def _empty(half: Half, target: Bytes) -> None:
    half.mark.synchronize()
    np.copyto(target, half.array[: len(target)])


def _pinned(array: Bytes) -> torch.Tensor | None:
    """The host's memory itself, if the device can reach all of it; None if it must be staged."""
    address, size = array.ctypes.data, len(array)
    # torch asks about the first byte only: memory may begin in a registered range and end outside.
    if _is_pinned(address) and _is_pinned(address + size - 1):
        return _tensor_at(address, size)
    return None


def _is_pinned(address: int) -> bool:
    return _tensor_at(address, 1).is_pinned()


def _tensor_at(address: int, size: int) -> torch.Tensor:
    """By its address: torch has no tensors over read-only buffers. Keeps nothing alive."""
    import torch

    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
