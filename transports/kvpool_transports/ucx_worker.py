"""UCX on an asyncio loop: one worker, asleep on its descriptor, and the transfers it makes.

A UCX worker does nothing by itself: the program must call `progress`. Here the loop does, when the
worker's epoll descriptor is readable (after the worker was *armed*) and after each new request. An
idle worker costs nothing, and there is no thread and no lock.

UCX moves bytes during any progress, so it must never have a buffer whose owner uses it again. A
`Transfer` therefore ends in one of two ways only: every request has completed, or its endpoint was
closed by force and every request has completed after that. `stop` waits until this is true
(design: ucx).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvpool import logs
from kvpool.errors import BadMessage, KvpoolError, LinkBroken
from kvpool.wire.frames import Pieces
from kvpool_transports.copy_pool import CopyPool
from kvpool_transports.streams.stream import wait_until

if TYPE_CHECKING:
    from ucxx._lib.libucxx import UCXContext, UCXEndpoint, UCXRequest

#: Steps of progress in a row; then the loop runs other tasks.
_STEPS = 32
#: Steps of progress after an endpoint was closed, before waiting for its requests with pauses.
_LOOKS = 100
#: Messages dropped by `drain_unexpected`, each of which leaks memory, until the worker is replaced.
_PURGED_MAX = 4096
_PAUSE_S: Final = 0.001
_WARN_S: Final = 1.0
#: Between attempts of a worker that has failed.
_FAILED_S: Final = 0.1
#: A tag is the receiving side's number and the number of the piece.
_PIECE_BITS = 24

log = logs.get("kvpool.ucx")


class Worker:
    """One UCX worker, driven by the running loop. It ends when it and its last path are closed."""

    def __init__(self, context: UCXContext) -> None:
        from ucxx._lib.libucxx import UCXWorker

        self._loop = asyncio.get_running_loop()
        self._paths: dict[int, UcxPath] = {}
        self._moving: dict[Transfer, None] = {}
        self._scheduled = False
        self._closed = False
        self._last = False
        self._failing = False
        self._purged = 0
        with ucx_errors("worker"):
            self._worker: UCXWorker | None = UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            self.address = bytes(memoryview(self._worker.address))
            self._fd: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._drive)
        self.kick()  # only an armed worker makes its descriptor readable, and `_drive` arms it

    def __repr__(self) -> str:
        return f"<Worker paths={len(self._paths)} moving={len(self._moving)}>"

    def path(self) -> UcxPath:
        """A new path; `UcxPath.meet` names its peer. Raises LinkBroken after `close`."""
        if self._closed or self._worker is None:
            raise LinkBroken("the channel is closed")
        number = secrets.randbits(64 - _PIECE_BITS)
        while number in self._paths:
            number = secrets.randbits(64 - _PIECE_BITS)
        path = self._paths[number] = UcxPath(self, number)
        return path

    @property
    def needs_replacement(self) -> bool:
        """True when abandoned transfers have leaked so much memory here that a new worker should
        be used."""
        return self._purged >= _PURGED_MAX

    def retire(self) -> None:
        """End as soon as the last path has ended."""
        self._last = True
        self._end()

    def close(self) -> None:
        """`retire`, and refuse new paths. Idempotent."""
        self._closed = True
        self.retire()

    def kick(self) -> None:
        """Make progress in the loop's next turn: not now, so that one progress serves several
        requests."""
        if not self._scheduled and self._worker is not None:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    # --- for paths and transfers -----------------------------------------------------------

    def endpoint(self, address: bytes) -> UCXEndpoint:
        from ucxx._lib.libucxx import UCXAddress, UCXEndpoint

        with ucx_errors("endpoint"):
            theirs = UCXAddress.create_from_buffer(bytearray(address))
            return UCXEndpoint.create_from_worker_address(self._worker, theirs, True)

    def progress(self) -> None:
        """Make progress until UCX has nothing to do."""
        if self._worker is not None:
            self._worker.progress()

    def drain_unexpected(self) -> None:
        """Drop messages without a receive: their receives were cancelled.

        Receives are posted before the peer may send, so there are no other such messages. UCX would
        keep them, and at the end of the worker ucxx would wait for their bytes for ever. A dropped
        message stays allocated, about 200 bytes, until the worker ends.
        """
        from ucxx._lib.libucxx import UCXXTag, UCXXTagMask

        anything = UCXXTag(0), UCXXTagMask(0)
        while self._worker is not None and self._worker.tag_probe(*anything, True).matched:
            self._purged += 1

    def watch(self, transfer: Transfer) -> None:
        self._moving[transfer] = None

    def forget(self, transfer: Transfer) -> None:
        self._moving.pop(transfer, None)

    def ended(self, number: int) -> None:
        """The path with this number has closed."""
        self._paths.pop(number, None)
        self._end()

    # --- inside ----------------------------------------------------------------------------

    def _end(self) -> None:
        if self._last and not self._paths and self._worker is not None:
            # In this order: the reader before its descriptor closes, and an empty queue of messages
            # before the worker ends (see `drain_unexpected`).
            self._loop.remove_reader(self._fd)
            worker, self._failing = self._worker, False
            try:
                worker.progress()
                self.drain_unexpected()
            except Exception as error:  # it ends all the same
                log.error("UCX makes no progress", why=repr(error))
            self._worker = None  # its descriptors close with it

    def _turn(self) -> None:
        self._scheduled = False
        self._drive()

    def _drive(self) -> None:
        worker = self._worker
        if worker is None:
            return
        rest = True
        try:
            for _ in range(_STEPS):
                if not worker.progress_once():
                    worker.progress()  # cancels the requests of endpoints that have failed, too
                    rest = not worker.arm()
                    break
            for transfer in tuple(self._moving):
                transfer.look()
        except Exception as error:
            # Nobody has called this: without a word its transfers would wait, and it would sleep.
            self._failed(error)
            return
        if self._failing:
            self._failing = False
            self._loop.add_reader(self._fd, self._drive)
        # There is more to do: the steps ran out, or events arrived before `arm`, which then fails.
        if rest:
            self.kick()

    def _failed(self, error: Exception) -> None:
        """End the transfers that wait, have new paths on another worker, and try again later."""
        if not self._failing:
            log.error("UCX makes no progress", why=repr(error))
            self._failing = True
            self._loop.remove_reader(self._fd)  # it may be readable all the time
        self._purged = _PURGED_MAX
        for transfer in tuple(self._moving):
            transfer.fail(LinkBroken(f"UCX makes no progress: {error}"))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_later(_FAILED_S, self._turn)


class Workers:
    """The current worker of a channel or listener; `renew` replaces it."""

    def __init__(self, context: UCXContext) -> None:
        self._context = context
        self._worker = Worker(context)
        self._closed = False
        #: Joins payloads in several pieces, because UCX sends contiguous memory. Its threads start
        #: with the first such payload.
        self.copies = CopyPool(inline_max=0)
        #: Held while a client's stream meets its server's: see `UcxPath.meet`.
        self.pairing = asyncio.Lock()

    def current(self) -> Worker:
        if self._worker.needs_replacement:
            self.renew()
        return self._worker

    def renew(self) -> None:
        """Use a new worker for new paths; existing paths keep the old one."""
        if not self._closed:
            worn, self._worker = self._worker, Worker(self._context)
            worn.retire()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._worker.close()


class UcxPath:
    """The UCX side of one stream: its end of an endpoint, and both sides' tags."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._endpoint: UCXEndpoint | None = None
        self._received = itertools.count()
        self._sent = itertools.count()
        self.number = number
        self.theirs = 0
        self.closed = False

    def meet(self, address: bytes, theirs: int) -> None:
        """Connect to the peer's worker at `address`; `theirs` is the number of its receives.

        UCX joins the ends that two workers make for each other in the order in which they are made:
        both sides must call `meet` for their paths in the same order. Raises LinkBroken,
        BadMessage.
        """
        if self.closed:
            raise LinkBroken("the connection was aborted")
        self.theirs = theirs
        self._endpoint = self._worker.endpoint(address)

    def endpoint(self) -> UCXEndpoint:
        """Raises LinkBroken when the path is closed."""
        if self._endpoint is None:
            raise LinkBroken("the connection was aborted")
        return self._endpoint

    def transfer(self) -> Transfer:
        return Transfer(self, self._worker)

    def close(self) -> None:
        """Close by force: requests under way are cancelled; does not wait for the peer.
        Idempotent."""
        if self.closed:
            return
        self.closed = True
        endpoint, self._endpoint = self._endpoint, None
        try:
            if endpoint is not None:
                endpoint.close_blocking()
                self._worker.progress()
                self._worker.drain_unexpected()
                self._worker.kick()
        finally:
            self._worker.ended(self.number)

    def sending_tag(self) -> int:
        return _tag(self.theirs, self._sent)

    def receiving_tag(self) -> int:
        return _tag(self.number, self._received)


class Transfer:
    """Requests on one path. `until` waits for them in the order in which they were made."""

    def __init__(self, path: UcxPath, worker: Worker) -> None:
        self._path = path
        self._worker = worker
        self._requests: deque[UCXRequest] = deque()
        self._keep: deque[object] = deque()
        self._room = 0
        self._waiter: asyncio.Future[KvpoolError | None] | None = None
        self._why: KvpoolError | None = None
        self.completed = 0
        worker.watch(self)

    def __repr__(self) -> str:
        return f"<Transfer requests={len(self._requests)}>"

    def send(self, buffer: memoryview) -> bool:
        """Send `buffer`. UCX uses it until `until` has passed this request or the transfer ended.

        True when the request completed at once: UCX did not wait for the receiver, so it sent
        without a rendezvous.
        """
        from ucxx._lib.arr import Array
        from ucxx._lib.libucxx import UCXXTag

        array = Array(buffer)
        with ucx_errors("send"):
            tag = UCXXTag(self._path.sending_tag())
            request = self._path.endpoint().tag_send(array, tag)
        self._requests.append(request)
        self._keep.append(array)  # keeps the memory alive: UCX has only its address
        self._worker.kick()
        return bool(request.completed)

    def receive(self, buffer: memoryview) -> None:
        """Fill `buffer` with the peer's next message. UCX uses it as long as `send` does."""
        from ucxx._lib.arr import Array
        from ucxx._lib.libucxx import UCXXTag

        array = Array(buffer)
        with ucx_errors("receive"):
            tag = UCXXTag(self._path.receiving_tag())
            self._requests.append(self._path.endpoint().tag_recv(array, tag))
        self._keep.append(array)
        self._worker.kick()

    async def until(self, left: int, deadline: float | None) -> None:
        """Wait until at most `left` requests are under way. Raises LinkBroken, DeadlineExceeded."""
        self._room = left
        self.look()
        if self._why is not None:
            raise self._why.fresh()
        if len(self._requests) <= left:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            late = "the peer did not move its bytes in time"
            await wait_until(self._waiter, deadline, late)
        finally:
            self._waiter = None

    def look(self) -> None:
        """Remove completed requests; the first error fails the transfer."""
        while self._requests and self._requests[0].completed:
            request = self._requests.popleft()
            self._keep.popleft()
            self.completed += 1
            if self._why is None:
                try:
                    with ucx_errors("transfer"):
                        request.check_error()
                except KvpoolError as error:
                    self.fail(error)
        waiter = self._waiter
        if waiter is not None and not waiter.done() and len(self._requests) <= self._room:
            waiter.set_result(None)

    def fail(self, error: KvpoolError) -> None:
        """End the wait with `error`; the task that waited must then call `stop`."""
        if self._why is None:
            self._why = error.fresh()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._why)

    async def stop(self) -> None:
        """Close the path; when it returns, UCX neither reads nor writes our buffers any more.

        It waits without a deadline, also when it is cancelled: returning earlier could let UCX
        write into memory that is used again. In practice UCX has cancelled every request when the
        endpoint is closed, which takes a fraction of a millisecond and does not depend on the peer.
        """
        self._path.close()
        for _ in range(_LOOKS):
            if self._over():
                return
            self._worker.progress()
        loop = asyncio.get_running_loop()
        late = loop.time() + _WARN_S
        cancelled = False
        while not self._over():
            try:
                await asyncio.sleep(_PAUSE_S)
            except asyncio.CancelledError:
                cancelled = True
            self._worker.progress()
            if loop.time() > late:
                log.error("UCX does not let go of buffers", requests=len(self._requests))
                late += 60.0
        if cancelled:
            raise asyncio.CancelledError

    def end(self) -> None:
        """Every request has completed: the worker need not look at the transfer any more."""
        self._worker.forget(self)

    def _over(self) -> bool:
        """True when every request has completed, in any order."""
        left = [r for r in self._requests if not r.completed]
        if left:
            return False
        self._requests.clear()
        self._keep.clear()
        self._worker.forget(self)
        return True


@contextlib.contextmanager
def ucx_errors(what: str) -> Iterator[None]:
    """Map UCX's exceptions to kvpool's: none of them may reach a caller."""
    from ucxx.exceptions import UCXError, UCXInvalidAddrError

    try:
        yield
    except UCXInvalidAddrError as error:
        raise BadMessage(f"UCX {what}: {error}") from None
    except UCXError as error:
        raise LinkBroken(f"UCX {what}: {error}") from None


def _tag(number: int, pieces: itertools.count[int]) -> int:
    return number << _PIECE_BITS | next(pieces) & ((1 << _PIECE_BITS) - 1)


def cut(pieces: Pieces, size: int) -> Iterator[Pieces]:
    """The same bytes in portions of `size`, the last perhaps smaller; each in pieces again."""
    portion: list[memoryview] = []
    room = size
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + room]
            portion.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield portion
                portion, room = [], size
    if portion:
        yield portion
