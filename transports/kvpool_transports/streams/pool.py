"""A client's streams to one server: dialled when needed, reused when clean.

The shape is that of an HTTP/1.1 connection pool; httpcore's is the model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final

from kvpool.errors import DeadlineExceeded, KvpoolError, LinkBroken
from kvpool_transports.streams.stream import Stream

#: Streams to one server; more calls wait their turn, until their deadline.
STREAMS_MAX: Final = 64
_IDLE_MAX: Final = 8


class StreamPool:
    """A client's streams to one server: dialled when needed, reused when clean."""

    def __init__(self, dial: Callable[[float], Awaitable[Stream]], limit: int = STREAMS_MAX):
        self._dial = dial
        self._limit = limit
        self._idle: list[Stream] = []
        self._busy: dict[Stream, None] = {}  # ordered, unlike a set
        self._places = asyncio.Semaphore(limit)
        self._closed = False

    def __repr__(self) -> str:
        return f"<StreamPool idle={len(self._idle)} busy={len(self._busy)}>"

    @asynccontextmanager
    async def stream(self, deadline: float) -> AsyncIterator[Stream]:
        """A stream for one exchange. Any exception inside aborts the stream."""
        stream = await self._take(deadline)
        try:
            yield stream
        except BaseException:
            # BaseException: a cancelled exchange leaves half a frame behind just as an error does.
            self._busy.pop(stream, None)
            stream.abort()
            raise
        else:
            self._busy.pop(stream, None)
            if stream.lost or self._closed or len(self._idle) >= _IDLE_MAX:
                stream.abort()
            else:
                stream.owned = False
                self._idle.append(stream)
        finally:
            self._places.release()

    def abort(self) -> None:
        """End every stream, and with them every exchange."""
        self._closed = True
        for stream in (*self._idle, *self._busy):
            stream.abort()
        self._idle.clear()

    async def _take(self, deadline: float) -> Stream:
        if self._closed:
            raise LinkBroken("the channel is closed")
        if not self._places.locked():
            await self._places.acquire()  # at once, and without a timer
        else:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._places.acquire()
            except TimeoutError:
                raise DeadlineExceeded(f"all {self._limit} streams are busy") from None
        try:
            while self._idle:
                stream = self._idle.pop()
                if not stream.lost:
                    stream.owned = True
                    self._busy[stream] = None
                    return stream
            stream = await self._dial(deadline)
            self._busy[stream] = None
            if self._closed:
                stream.abort()
                raise LinkBroken("the channel was closed while it was connecting")
            return stream
        except BaseException:
            self._places.release()
            raise


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
