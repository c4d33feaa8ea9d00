"""A client's streams to one server: dialled when needed, reused when clean.

The shape is that of an HTTP/1.1 connection pool; httpcore's is the model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from kvpool.errors import DeadlineExceeded, KvpoolError, LinkBroken, Overloaded
from kvpool.protocols import IdleTimeout
from kvpool_transports.streams.stream import Stream

T = TypeVar("T")

#: Streams to one server; more calls wait their turn, until their deadline.
STREAMS_MAX: Final = 64
_IDLE_MAX: Final = 8
#: A client without any stream waits so long between attempts when a server has none left.
_PAUSES_S: Final = (0.005, 0.01, 0.02, 0.04, 0.08)


class StreamPool:
    """A client's streams to one server: dialled when needed, reused when clean."""

    def __init__(self, dial: Callable[[float], Awaitable[Stream]], limit: int = STREAMS_MAX):
        self._dial = dial
        self._limit = limit
        self._idle: list[Stream] = []
        #: With whether it shows views: `abort` leaves it then.
        self._busy: dict[Stream, bool] = {}
        self._places = asyncio.Semaphore(limit)
        self._queued = 0  # calls that wait for a place
        #: Calls for which the server has no further stream.
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __repr__(self) -> str:
        return f"<StreamPool idle={len(self._idle)} busy={len(self._busy)}>"

    @asynccontextmanager
    async def stream(
        self, deadline: float, idle_timeout: IdleTimeout | None = None
    ) -> AsyncIterator[Stream]:
        """A stream for one exchange. Any exception inside aborts the stream.

        While all are busy with other calls of this client the `idle_timeout` rests: if the server
        is silent, those calls notice.
        """
        stream = await self._take(deadline, idle_timeout)
        try:
            yield stream
        except BaseException:
            # BaseException: a cancelled exchange leaves half a frame behind just as an error does.
            stream.abort()
            raise
        else:
            if stream.lost or self._closed:
                stream.abort()
            else:
                stream.owned = False
                self._idle.append(stream)
                # Each call that waits takes one: to dial again costs more than its exchange.
                while len(self._idle) > _IDLE_MAX + self._queued:
                    self._idle.pop(0).abort()
        finally:
            self._busy.pop(stream, None)
            self._places.release()
            self._wake_one()

    def outlive(self, stream: Stream) -> None:
        """`abort` leaves this one to its exchange, whose views need their pins. Raises LinkBroken
        when it is too late."""
        if stream.lost:
            raise LinkBroken("the channel was closed meanwhile")
        self._busy[stream] = True

    def abort(self) -> None:
        """End every stream, and with them every exchange, but for those that `outlive` it."""
        self._closed = True
        for stream in (*self._idle, *(one for one, shows in self._busy.items() if not shows)):
            stream.abort()
        self._idle.clear()
        for _ in range(len(self._waiting)):
            self._wake_one()

    async def _take(self, deadline: float, idle_timeout: IdleTimeout | None) -> Stream:
        if self._closed:
            raise LinkBroken("the channel is closed")
        if not self._places.locked():
            await self._places.acquire()  # at once, and without a timer
        else:
            await self._wait_for_place(deadline, idle_timeout)
        try:
            if self._closed:
                raise LinkBroken("the channel is closed")
            stream = await self._idle_or_new(deadline, idle_timeout)
            self._busy[stream] = False
            if self._closed:
                stream.abort()
                raise LinkBroken("the channel was closed while it was connecting")
            return stream
        except BaseException:
            self._places.release()
            self._wake_one()  # if this call was woken, then in vain
            raise

    async def _wait_for_place(self, deadline: float, idle_timeout: IdleTimeout | None) -> None:
        if idle_timeout is not None:
            idle_timeout.rest()
        self._queued += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"all {self._limit} streams are busy") from None
        finally:
            self._queued -= 1
        if idle_timeout is not None:
            idle_timeout.touch()

    async def _idle_or_new(self, deadline: float, idle_timeout: IdleTimeout | None) -> Stream:
        """A server may refuse a further stream: then those must do that this client has, and a
        client that has none tries again a few times (design: bounds)."""
        pauses = iter(_PAUSES_S)
        while True:
            while self._idle:
                stream = self._idle.pop()
                if not stream.lost:
                    stream.owned = True
                    return stream
            try:
                stream = await self._dial(deadline)
                if idle_timeout is not None:  # the server has answered the handshake
                    idle_timeout.touch()
                return stream
            except Overloaded:
                pause_s = None if self._busy else next(pauses, None)
                if pause_s is None and not self._busy:
                    raise
            if idle_timeout is not None and pause_s is None:
                idle_timeout.rest()
            await self._wait_for_return(deadline, pause_s)
            if idle_timeout is not None:
                idle_timeout.touch()

    async def _wait_for_return(self, deadline: float, pause_s: float | None) -> None:
        """Until an exchange ends, or the pause. Raises DeadlineExceeded at the deadline."""
        loop = asyncio.get_running_loop()
        until = deadline if pause_s is None else min(deadline, loop.time() + pause_s)
        returned = loop.create_future()
        self._waiting.append(returned)
        try:
            await asyncio.wait([returned], timeout=until - loop.time())
        finally:
            if returned in self._waiting:
                self._waiting.remove(returned)
        if self._closed:
            raise LinkBroken("the channel is closed")
        if loop.time() >= deadline:
            raise DeadlineExceeded(
                f"the server has no further stream for this client, and its {len(self._busy)} are "
                "busy"
            )

    def _wake_one(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return


async def dial_patiently(dial: Callable[[], Awaitable[T]]) -> T:
    """`dial`, and again a few times when the server has no connection left for it at the moment."""
    for pause_s in _PAUSES_S:
        try:
            return await dial()
        except Overloaded:
            await asyncio.sleep(pause_s)
    return await dial()


@contextlib.contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Map what sockets raise at the edge: nothing of it may reach a caller."""
    try:
        yield
    except TimeoutError as error:
        if isinstance(error, KvpoolError):
            raise
        raise DeadlineExceeded(f"{what}: no answer in time") from None
    except OSError as error:
        if isinstance(error, KvpoolError):
            raise
        raise LinkBroken(f"{what}: {error.strerror or error}") from None
    except ValueError as error:  # a host name that is none, `a..b`; a file too small to map
        if isinstance(error, KvpoolError):
            raise
        raise LinkBroken(f"{what}: {error}") from None
