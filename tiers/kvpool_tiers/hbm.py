"""HBM: one buffer on a CUDA device, reached from host memory through pinned staging.

A device copies from and to *pinned* host memory: pages that the kernel will not move. Memory that
is pinned already (the caller registered it with CUDA) is copied from and to directly. Any other
goes in steps of 1 MiB through two pinned slots that take turns: while the device copies one, a
thread copies the other. The thread works on a CUDA stream of its own, so it waits for its own
copies and not for what the device computes; the event loop waits for nothing.

On the device `cpu` the same code runs, with copies that are done when they return.
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

from kvpool.errors import BadBuffer, Closed, ConfigError, Unavailable, UsageError
from kvpool_tiers.dram import memory_available

if TYPE_CHECKING:  # torch takes seconds to import, and only those who make an Hbm need it
    import torch

Bytes: TypeAlias = NDArray[np.uint8]

#: Bytes that device and host copy at a time. Large enough that starting a copy costs little beside
#: it, small enough that both are at work on one block of 2 MiB.
STEP: Final = 1 << 20
#: The same where nothing is staged. A cancelled call waits for two of them at most.
DIRECT_STEP: Final = 16 << 20


class Hbm:
    """`capacity` bytes of a device's memory, fixed for the life of the server.

    When `write_from` returns, the bytes are in the device's memory for all of its streams; when
    `read_into` returns, they are in the caller's.
    """

    name = "hbm"
    alignment = 256  # that of CUDA's own allocations
    survives_restart = False

    def __init__(self, capacity: int, *, device: str = "cuda", staging: int = 8 * STEP) -> None:
        """Pins `staging` bytes of host memory: 2 MiB, and a thread, for each call that copies.

        Calls beyond those wait. Raises ConfigError: no torch, no such device, or less memory free
        than is asked for.
        """
        self.device = _usable(device)
        import torch

        if capacity < 1:
            raise ConfigError(f"capacity is {capacity} bytes: it must be positive")
        if staging < 2 * STEP:
            raise ConfigError(f"staging is {staging} bytes: it must be {2 * STEP} or more")
        self.capacity = max(capacity - capacity % self.alignment, self.alignment)
        self._cuda = self.device.type == "cuda"
        at_once = staging // (2 * STEP)
        try:
            free = torch.cuda.mem_get_info(self.device)[0] if self._cuda else memory_available()
            if self.capacity > free:
                raise ConfigError(
                    f"capacity is {capacity} bytes, the device {device!r} has {free} free: "
                    "lower `capacity`"
                )
            memory = torch.empty(self.capacity, dtype=torch.uint8, device=self.device)
            staged = torch.empty(at_once * 2 * STEP, dtype=torch.uint8, pin_memory=self._cuda)
            lanes = [_Lane(self.device, part) for part in staged.view(at_once, 2 * STEP)]
        except RuntimeError as error:  # torch's out of memory is one
            raise ConfigError(
                f"{capacity} bytes on the device {device!r} and {staging} of pinned host memory "
                f"cannot be had: {_first_line(error)}"
            ) from None
        self._memory: torch.Tensor | None = memory
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for lane in lanes:
            self._lanes.put(lane)
        self._executor = ThreadPoolExecutor(at_once, "kvpool-hbm")
        self._calls: dict[_Call, None] = {}  # that have not ended
        self._waiting: dict[_Call, None] = {}  # those of them that no thread has begun
        self._fresh: list[_Call] = []  # those of them that no thread has been told of

    def __repr__(self) -> str:
        return f"<Hbm {self.capacity} bytes on {self.device}>"

    def device_view(self, offset: int, size: int) -> torch.Tensor:
        if not 0 <= offset <= offset + size <= self.capacity:
            raise UsageError(f"{size} bytes at {offset}: there are {self.capacity}")
        if self._memory is None:
            raise Closed("the tier is closed")
        return self._memory[offset : offset + size]

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        if buffer.readonly:
            raise BadBuffer("the buffer is read-only: nothing can be read into it")
        await self._copy(offset, buffer, reads=True)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        await self._copy(offset, buffer, reads=False)

    def close(self) -> None:
        """Running calls end with Closed; waits for the steps that their copies are at."""
        for call in self._calls:
            call.stopped = True
        self._executor.shutdown(wait=True)
        if self._memory is not None:
            self._memory = None
            self._lanes = queue.SimpleQueue()
            if self._cuda:
                import torch

                torch.cuda.empty_cache()  # else torch keeps the memory, for this process only

    async def _copy(self, offset: int, buffer: memoryview, *, reads: bool) -> None:
        """Let a thread copy. However this ends, the thread and the device are through by then."""
        memory = self.device_view(offset, len(buffer))
        if not buffer.c_contiguous or buffer.nbytes != len(buffer):
            raise BadBuffer("the buffer is not a contiguous row of bytes")
        if not len(buffer):
            return
        loop = asyncio.get_running_loop()
        call = _Call(memory, np.frombuffer(buffer, np.uint8), reads, loop.create_future())
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
            raise Closed("the tier was closed while it copied")

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Share out what was asked for in one turn of the loop.

        A thread gets several small blocks at a time: to wake it, and then the loop again, takes
        longer than to copy one.
        """
        fresh, self._fresh = self._fresh, []
        for share in _shares(fresh):
            if self._memory is None:
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
                why = f"device {self.device}: {_first_line(error)}"
                call.done.set_exception(Unavailable(why))
            else:
                call.done.set_exception(error)


class _Call:
    """One copy between the device and a caller's buffer."""

    __slots__ = ("array", "done", "memory", "reads", "stopped")

    def __init__(
        self, memory: torch.Tensor, array: Bytes, reads: bool, done: asyncio.Future[None]
    ) -> None:
        self.memory = memory
        self.array = array  # the caller's buffer
        self.reads = reads
        self.done = done  # set when neither thread nor device touch the buffer any more
        self.stopped = False  # cancelled, or the tier was closed: not one more step


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


def _steps(calls: Sequence[_Call], *, reads: bool) -> Iterator[tuple[torch.Tensor, Bytes]]:
    """What to copy one after the other; nothing more of a call that was stopped meanwhile."""
    for call in calls:
        if call.reads is reads:
            for start in range(0, len(call.array), STEP):
                if call.stopped:
                    break
                yield call.memory[start : start + STEP], call.array[start : start + STEP]


class _Mark(Protocol):
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


class _Slot:
    """Pinned host memory, and the mark behind the device's last copy from or to it."""

    __slots__ = ("array", "mark", "tensor")

    def __init__(self, tensor: torch.Tensor, mark: _Mark) -> None:
        self.tensor = tensor
        self.array: Bytes = tensor.numpy()  # the same memory
        self.mark = mark


class _Lane:
    """What one thread at a time copies with: a stream, and two slots that take turns."""

    def __init__(self, device: torch.device, staged: torch.Tensor) -> None:
        import torch

        self._on_stream: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        marks: list[_Mark] = [_Past(), _Past()]
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            self._on_stream = lambda: torch.cuda.stream(stream)
            # Blocking: a thread that waits sleeps. By default it would spin, on a core.
            marks = [torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)]
        halves = (staged[:STEP], staged[STEP:])
        self._slots = [_Slot(half, mark) for half, mark in zip(halves, marks, strict=True)]
        self._turns = itertools.cycle(self._slots)

    def copy(self, calls: Sequence[_Call]) -> None:
        """However this ends, the device touches none of their memory any more."""
        with self._on_stream():
            try:
                staged = [call for call in calls if not self._direct(call)]
                self._stage_in(_steps(staged, reads=False))
                self._stage_out(_steps(staged, reads=True))
            finally:
                for slot in self._slots:
                    slot.mark.synchronize()

    def _direct(self, call: _Call) -> bool:
        """Let the device copy from or to the caller's memory itself. False if it cannot."""
        pinned = _pinned(call.array)
        if pinned is None:
            return False
        target, source = (pinned, call.memory) if call.reads else (call.memory, pinned)
        for start in range(0, len(call.array), DIRECT_STEP):
            slot = next(self._turns)
            slot.mark.synchronize()  # two steps are under way, so that the device never idles
            if call.stopped:
                break
            piece = slice(start, start + DIRECT_STEP)
            target[piece].copy_(source[piece], non_blocking=True)
            slot.mark.record()
        return True

    def _stage_in(self, steps: Iterator[tuple[torch.Tensor, Bytes]]) -> None:
        """The host fills a slot while the device empties the other."""
        for memory, array in steps:
            slot = next(self._turns)
            slot.mark.synchronize()
            np.copyto(slot.array[: len(array)], array)  # without the GIL
            memory.copy_(slot.tensor[: len(array)], non_blocking=True)
            slot.mark.record()

    def _stage_out(self, steps: Iterator[tuple[torch.Tensor, Bytes]]) -> None:
        """The device fills a slot while the host empties the other: it is one step ahead."""
        ahead: tuple[_Slot, Bytes] | None = None
        for memory, array in steps:
            slot = next(self._turns)
            slot.tensor[: len(array)].copy_(memory, non_blocking=True)
            slot.mark.record()
            if ahead is not None:
                _empty(*ahead)
            ahead = slot, array
        if ahead is not None:
            _empty(*ahead)


def _empty(slot: _Slot, target: Bytes) -> None:
    slot.mark.synchronize()
    np.copyto(target, slot.array[: len(target)])


def _pinned(array: Bytes) -> torch.Tensor | None:
    """The caller's memory itself, if the device can reach all of it; None if it must be staged."""
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


def _usable(device: str) -> torch.device:
    """Raises ConfigError: torch is missing, or has no such device."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        raise ConfigError(
            f"the tier 'hbm' needs torch: pip install 'kvpool[hbm]' ({_first_line(error)})"
        ) from None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cuda", "cpu") or (found.type == "cpu" and found.index):
        raise ConfigError(f"device is {device!r}: expected 'cuda', 'cuda:0', ..., or 'cpu'")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= (found.index or 0):
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            raise ConfigError(
                f"device is {device!r}: torch {torch.__version__} ({built}) finds {count} "
                "CUDA devices"
            )
    return found


def _first_line(error: BaseException) -> str:
    """torch's messages go on with advice about debugging it."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
