"""Copies between memory of the host and memory of a device, outside the loop's thread.

A device copies from and to *pinned* host memory: pages that the kernel does not move. Other memory
goes in steps of 1 MiB through two pinned halves that take turns: while the device copies one, a
thread copies the other. The thread works on a CUDA stream of its own, so it waits for its own
copies and not for what the device computes; the event loop waits for nothing (design:
device-memory).

It is for HBM tiers: their callers' memory is not pinned and comes one block at a time, so a thread
takes several. What clients and engines stage is pinned, and crosses by `device/lane.py`.

On the device `cpu` the same code runs, with copies that are done when they return. torch is
imported when a copier is made, not before: it takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import Closed, ConfigError, Unavailable
from kvpool.threads import in_thread

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = NDArray[np.uint8]
R = TypeVar("R")

#: Bytes that device and host copy at a time. Large enough that starting a copy costs little beside
#: it, small enough that both are at work on one block of 2 MiB.
STEP: Final = 1 << 20


class DeviceCopier:
    """Copies for one device: `streams` threads, each with a stream and 2 MiB of pinned memory.

    It does not wait for what a device still computes on the memory: the caller does.
    Raises RuntimeError, as torch does, when there is no memory for it.
    """

    def __init__(self, device: torch.device, streams: int) -> None:
        self.device = device
        self._executor = threads_of(device, streams)
        staged = pinned(streams * 2 * STEP, device)
        self._streams: queue.SimpleQueue[CopyStream] = queue.SimpleQueue()
        for part in staged.view(streams, 2 * STEP):
            self._streams.put(CopyStream(device, part))
        self._calls: dict[_Copy, None] = {}  # all that have not ended
        self._not_started: dict[_Copy, None] = {}  # those that no thread has started
        self._unassigned: list[_Copy] = []  # those that no thread was given
        self._closed = False

    async def copy(self, memory: torch.Tensor, array: Bytes, *, to_host: bool) -> None:
        """Copy between bytes on the device and as many of the host.

        When it returns, the bytes are in place: on the device for all of its streams. However it
        ends, neither thread nor device use any of the memory any more. Raises Unavailable when
        the device reports an error, Closed after `close`.
        """
        loop = asyncio.get_running_loop()
        call = _Copy(memory, array, to_host, loop.create_future())
        self._calls[call] = self._not_started[call] = None
        self._unassigned.append(call)
        if len(self._unassigned) == 1:
            loop.call_soon(self._distribute, loop)
        try:
            await ended(call.done, functools.partial(self._give_up, call))
        finally:
            del self._calls[call]
        if call.stopped:
            raise Closed("closed while it copied")

    def close(self) -> None:
        """Running calls end with Closed. Waits for the steps that have begun."""
        self._closed = True
        for call in self._calls:
            call.stopped = True
        self._executor.shutdown(wait=True)
        self._streams = queue.SimpleQueue()

    def _distribute(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the copies that one turn of the loop requested to threads.

        A thread gets several small blocks at a time: to wake it, and then the loop again, takes
        longer than to copy one.
        """
        fresh, self._unassigned = self._unassigned, []
        for share in _shares(fresh):
            if self._closed:
                for call in share:
                    call.stopped = True
                self._finish(share, None)
            else:
                working = in_thread(self._work, share, executor=self._executor)
                working.add_done_callback(functools.partial(self._finish, share))

    def _work(self, share: list[_Copy]) -> None:
        """In a thread."""
        stream = self._streams.get_nowait()  # there are as many as threads
        try:
            stream.copy([call for call in share if self._try_start(call)])
        finally:
            self._streams.put(stream)

    def _give_up(self, call: _Copy) -> None:
        call.stopped = True
        if self._try_start(call):
            call.done.cancel()  # no thread will start it now

    def _try_start(self, call: _Copy) -> bool:
        """True once: for the thread that starts it, or for its caller, if it gave up before."""
        # `pop` is atomic under the GIL, so that not both can win.
        return self._not_started.pop(call, call) is None

    def _finish(self, share: list[_Copy], working: asyncio.Future[None] | None) -> None:
        error = working.exception() if working is not None else None
        for call in share:
            if call.done.done():  # cancelled before it began
                continue
            if error is None:
                call.done.set_result(None)
            elif isinstance(error, RuntimeError):  # any error of CUDA
                why = f"device {self.device}: {first_line(error)}"
                call.done.set_exception(Unavailable(why))
            else:
                call.done.set_exception(error)


async def ended(work: asyncio.Future[R], give_up: Callable[[], object]) -> R:
    """The result of work on the caller's memory, once a thread has ended it or never begins it.

    Also when the caller is cancelled, and cancelled again (its own time, then `close`): `give_up`
    is called each time, and what ends then is not looked at.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
            give_up()
    if cancelled:
        if not work.cancelled():
            work.exception()  # retrieved, or asyncio would log it
        raise asyncio.CancelledError
    return work.result()


def threads_of(device: torch.device, count: int) -> ThreadPoolExecutor:
    """Threads that work with this device alone. Raises ConfigError for one of another kind.

    The current device of a new thread is the first. Whoever leaves a stream of another one makes it
    current again, and CUDA takes half a GB there: of each rank of an engine.
    """
    import torch

    if device.type == "cpu":
        return ThreadPoolExecutor(count, "kvpool-device")
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "of ROCm" if device.type == "cuda" else f"of the kind {device.type!r}"
        raise ConfigError(
            f"device {device} is {kind}: kvpool takes memory of hosts and of CUDA devices; nobody "
            "has run it on others, where a copy that ends late would be wrong bytes"
        )
    return ThreadPoolExecutor(count, "kvpool-device", torch.cuda.set_device, (device,))


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Memory of the host that this device can copy from and to itself. Raises RuntimeError."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def first_line(error: BaseException) -> str:
    """Type and first line of an error: torch adds lines of advice about debugging."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Copy:
    """One copy between the device and the host."""

    __slots__ = ("array", "done", "memory", "stopped", "to_host")

    def __init__(
        self, memory: torch.Tensor, array: Bytes, to_host: bool, done: asyncio.Future[None]
    ) -> None:
        self.memory = memory
        self.array = array  # the host's
        self.to_host = to_host
        self.done = done  # set when neither thread nor device use the memory any more
        self.stopped = False  # cancelled, or closed: no further step is started

    def steps(self) -> Iterator[tuple[torch.Tensor, Bytes]]:
        """Its parts on both sides, up to `STEP` bytes at a time, until it is stopped."""
        for first in range(0, len(self.array), STEP):
            if self.stopped:
                return
            part = slice(first, first + STEP)
            yield self.memory[part], self.array[part]


def _shares(calls: Sequence[_Copy]) -> list[list[_Copy]]:
    """The calls in order, cut where a share has `STEP` bytes or more."""
    shares: list[list[_Copy]] = []
    room = 0
    for call in calls:
        if room <= 0:
            shares.append([])
            room = STEP
        shares[-1].append(call)
        room -= len(call.array)
    return shares


class CopyEvent(Protocol):
    """A point on a stream; a `torch.cuda.Event`."""

    def record(self) -> None:
        """Place it behind all work that was started so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class NullEvent:
    """For a device whose copies are done when they return."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class PinnedHalf:
    """Pinned host memory, and the event behind the device's last copy from or to it."""

    __slots__ = ("array", "event", "tensor")

    def __init__(self, tensor: torch.Tensor, event: CopyEvent) -> None:
        self.tensor = tensor
        self.array: Bytes = tensor.numpy()  # the same memory
        self.event = event


class DeviceStream:
    """A CUDA stream for the work of one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        import torch

        # torch refuses to write into tensors made in inference mode, except in that mode.
        self._inference_mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode
        self.on_stream: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.new_event: Callable[[], CopyEvent] = NullEvent
        if device.type == "cuda":
            self.on_stream = functools.partial(torch.cuda.stream, torch.cuda.Stream(device))
            # Blocking: a waiting thread sleeps. By default it would spin, and use up a core.
            self.new_event = functools.partial(torch.cuda.Event, blocking=True)


class CopyStream(DeviceStream):
    """Two halves that take turns."""

    def __init__(self, device: torch.device, staged: torch.Tensor) -> None:
        super().__init__(device)
        self.halves = [PinnedHalf(half, self.new_event()) for half in staged.split(STEP)]
        self._turns = itertools.cycle(self.halves)

    def copy(self, calls: Sequence[_Copy]) -> None:
        """However this ends, the device uses none of their memory any more."""
        with self._inference_mode(), self.on_stream():
            try:
                self._stage_in([call for call in calls if not call.to_host])
                self._stage_out([call for call in calls if call.to_host])
            finally:
                for half in self.halves:
                    half.event.synchronize()

    def _stage_in(self, calls: Sequence[_Copy]) -> None:
        """The host fills a half while the device empties the other."""
        for memory, array in itertools.chain.from_iterable(call.steps() for call in calls):
            half = next(self._turns)
            half.event.synchronize()
            np.copyto(half.array[: len(array)], array)  # without the GIL
            memory.copy_(half.tensor[: len(array)], non_blocking=True)
            half.event.record()

    def _stage_out(self, calls: Sequence[_Copy]) -> None:
        """The device fills a half while the host empties the other: it is one step ahead."""
        ahead: tuple[PinnedHalf, Bytes] | None = None
        for memory, array in itertools.chain.from_iterable(call.steps() for call in calls):
            half = next(self._turns)
            half.tensor[: len(array)].copy_(memory, non_blocking=True)
            half.event.record()
            if ahead is not None:
                _drain(*ahead)
            ahead = half, array
        if ahead is not None:
            _drain(*ahead)


def _drain(half: PinnedHalf, target: Bytes) -> None:
    half.event.synchronize()
    np.copyto(target, half.array[: len(target)])
