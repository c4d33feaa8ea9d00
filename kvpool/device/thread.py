"""A thread with a stream of its own on one device, for work that an event loop waits for.

CUDA cannot wake a loop, and a loop that waits for a device does nothing else. The thread sleeps on
an event behind its work (design: device-memory).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

from kvpool.device_copy import DeviceStream, ended, first_line, threads_of
from kvpool.errors import Closed, KvpoolError, Unavailable
from kvpool.threads import submit
from kvpool.types import DeviceEvent

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
S = TypeVar("S")

#: How often to ask whether a device has reached its caller's events.
_POLL_S: Final = 0.0005


async def reached(events: Iterable[DeviceEvent]) -> None:
    """Wait until a device has reached these. Raises Unavailable when the work before them failed.

    Polled, and not waited for in a thread: the caller's copies have not begun, so this can be
    cancelled at any time, however long the device is busy. CUDA cannot wake a loop.
    """
    try:
        for event in events:
            while not event.query():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except RuntimeError as error:
        raise Unavailable(f"device: {first_line(error)}") from None


class DeviceFailed(Unavailable):
    """Work on a device could not be done; the servers and the ways to them may be well."""


class DeviceThread(DeviceStream):
    """Work on `device`, one call after the other. On the device `cpu` the same code runs.

    `prepare` comes before all other work, and again after it has failed. Making one raises
    DeviceFailed when the device has no stream for it.
    """

    def __init__(self, device: torch.device, prepare: Callable[[], object] = tuple) -> None:
        self.device = device
        self._executor = threads_of(device, 1)
        try:
            super().__init__(device)
            self._event = self.new_event()
        except RuntimeError as error:
            raise self._failed(error) from None
        self._prepare = prepare
        self._preparing: Future[Exception | None] | None = None
        self._closed = False

    async def run(self, queue: Callable[[], R], finish: Callable[[R], S]) -> S:
        """Have `queue` queue work on the stream; when the device has done it, what `finish` makes
        of the result.

        However it ends, also when it is cancelled, the device has ended the work, or never begins
        it. Raises DeviceFailed for an error of the device or of its compiler, Closed after `close`.
        """
        await self.prepared()
        try:
            job = submit(self._executor, self._work, queue, finish)
            return await ended(asyncio.wrap_future(job), job.cancel)
        except Exception as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Waits for work that has begun, but not for `prepare`, which has no caller's memory."""
        self._closed = True
        self._executor.shutdown(wait=self._preparing is None or self._preparing.done())

    def is_prepared(self) -> bool:
        """Whether work would begin at once. If not, `prepare` begins. Raises Closed."""
        return self._start_to_prepare().done()

    async def prepared(self) -> None:
        """Wait until `prepare` has ended; who is cancelled leaves it to those that follow.

        Raises its KvpoolError, DeviceFailed for any other error, and Closed.
        """
        job = self._start_to_prepare()
        if not job.done():
            await asyncio.wait([asyncio.wrap_future(job)])
        # Of CUDA, or of what compiles kernels: it may lack a C compiler.
        if (error := job.result()) is not None:
            if self._preparing is job:
                self._preparing = None
            raise error.fresh() if isinstance(error, KvpoolError) else self._failed(error)
        if self._closed:
            raise Closed("the pool is closed")

    def _start_to_prepare(self) -> Future[Exception | None]:
        if self._closed:
            raise Closed("the pool is closed")
        if self._preparing is None:
            try:
                self._preparing = submit(self._executor, self._try_to_prepare)
            except RuntimeError as error:  # no thread can be started
                raise self._failed(error) from None
        return self._preparing

    def _try_to_prepare(self) -> Exception | None:
        try:
            self._work(self._prepare, lambda _: None)
        except Exception as error:
            return error
        return None

    def _failed(self, error: Exception) -> DeviceFailed:
        return DeviceFailed(f"device {self.device}: {first_line(error)}")

    def _work(self, queue: Callable[[], R], finish: Callable[[R], S]) -> S:
        with self._inference_mode(), self.on_stream():
            try:
                queued = queue()
            finally:  # whatever was queued before an error runs, too
                self._event.record()
                self._event.synchronize()
            return finish(queued)
