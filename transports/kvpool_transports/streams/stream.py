"""Frames over a byte stream, shared by tcp and shm.

One exchange at a time owns a stream: request, answer, back into the pool. So there are no request
ids to match, no interleaving, no head-of-line blocking, and one rule for everything that can go
wrong: after any exception the stream is aborted, never reused. The server then drops the pins and
reservations of that connection, and nobody else notices. Concurrency is the number of streams.
(The shape is that of an HTTP/1.1 connection pool; httpcore's is the model.)

Payload bytes are received straight into their destination, which a `Sink` names as soon as the
frame's header and body are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import xxhash

from kvpool.errors import (
    BadFrame,
    DeadlineExceeded,
    KvpoolError,
    LinkBroken,
)
from kvpool.protocols import IdleTimeout
from kvpool.wire.frames import HEADER_SIZE, Frame, decode_header, encode_frame
from kvpool.wire.messages import PAYLOAD, TYPES, Error, M, Message, decode_answer, encode

#: Received at most this much at once: the piece is then hashed while it is in the cache.
STEP = 256 << 10
#: Sent at most this much at once, so that hashing a large block never stalls the loop.
SEND_STEP = 1 << 20
#: Streams to one server; more calls wait their turn, until their deadline.
STREAMS_MAX = 64
_IDLE_MAX = 8
#: Received ahead of the request that is being answered; what is more waits in the kernel.
STASH = 64 << 10
#: Seconds that a request may take to arrive, from its first byte.
FRAME_S = 30.0


#: Streams whose sockets a child would inherit.
_open: weakref.WeakSet[Stream] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child: what is connected is the parent's, and ends with it.

    A socket is closed when nobody has it open any more. Without this a child that lives on would
    keep its parent's pins and reservations, which end with the connection. The numbers stay taken,
    because the child's copies of the transports still hold them.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for stream in list(_open):
        number = stream.fileno()
        if number >= 0:
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


class Landing:
    """Where a payload goes: buffers one after the other, each hashed on the way if it has a seed.

    `checksums` grows by one for each buffer that is full; `idle_timeout` hears of every piece.
    """

    __slots__ = (
        "_at",
        "_buffers",
        "_hasher",
        "_idle_timeout",
        "_index",
        "_seeds",
        "checksums",
        "missing",
    )

    def __init__(
        self,
        buffers: Sequence[memoryview],
        seeds: Sequence[int] | None = None,
        idle_timeout: IdleTimeout | None = None,
    ) -> None:
        self._idle_timeout = idle_timeout
        self._buffers = buffers
        self._seeds = seeds
        self._index = 0
        self._at = 0
        self._hasher = xxhash.xxh3_64(seed=seeds[0]) if seeds else None
        self.missing = sum(map(len, buffers))
        self.checksums: list[int] = []

    def next(self) -> memoryview:
        """Where the next bytes go."""
        buffer = self._buffers[self._index]
        return buffer[self._at : self._at + STEP]

    def received(self, count: int) -> None:
        """`count` bytes have arrived in what `next` gave."""
        if self._idle_timeout is not None:
            self._idle_timeout.touch()
        buffer = self._buffers[self._index]
        if self._hasher is not None:
            self._hasher.update(buffer[self._at : self._at + count])
        self._at += count
        self.missing -= count
        if self._at == len(buffer):
            self._at = 0
            self._index += 1
            if self._hasher is not None and self._seeds is not None:
                self.checksums.append(self._hasher.intdigest())
                if self._index < len(self._seeds):
                    self._hasher = xxhash.xxh3_64(seed=self._seeds[self._index])

    def pieces(self, size: int) -> list[memoryview]:
        """All that is missing, in order and cut at `size`, for who fetches it some other way."""
        return [
            buffer[start : start + size]
            for buffer in self._buffers
            for start in range(0, len(buffer), size)
        ]

    def filled(self, count: int) -> None:
        """`count` bytes of one buffer are in place, however they came there."""
        while count:
            step = min(count, len(self.next()))
            self.received(step)
            count -= step

    def put(self, data: memoryview) -> int:
        """Copy bytes that came in one piece with the header; returns how many."""
        taken = 0
        while taken < len(data) and self.missing:
            target = self.next()
            count = min(len(target), len(data) - taken)
            target[:count] = data[taken : taken + count]
            self.received(count)
            taken += count
        return taken


Sink = Callable[[Frame], Landing]


def no_payload(frame: Frame) -> Landing:
    """The sink of an exchange that expects none."""
    return Landing(())


class Stream(asyncio.BufferedProtocol):
    """One connection, either end. `receive` and `send` belong to whoever owns the stream."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._stash = memoryview(bytearray(STASH))  # headers, bodies, what comes with them
        self._filled = 0
        self._frame: Frame | None = None
        self._sink: Sink | None = None
        self._landing: Landing | None = None
        self._done: asyncio.Future[None] | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._parted: asyncio.Future[None] | None = None
        self._work: asyncio.Timeout | None = None
        self._write_paused = False
        self._read_paused = False
        self._impatient = False
        self._slow: asyncio.TimerHandle | None = None
        #: When the peer hangs up, the connection is closed by its owner and not before: what the
        #: owner still does with the peer's memory must have ended by then.
        self.owned = True
        self.lost = False
        self._last_word: Message | None = None
        self._why: KvpoolError | None = None

    def __repr__(self) -> str:
        state = "lost" if self.lost else "receiving" if self._sink else "idle"
        return f"<Stream {state}>"

    # --- for the owner -----------------------------------------------------------------

    async def send(
        self,
        message: Message | None,
        payload: Sequence[memoryview] = (),
        *,
        deadline: float,
        seeds: Sequence[int] | None = None,
    ) -> list[int]:
        """Send one frame (without a message: the payload frame); returns payload checksums.

        It returns when the kernel has all of it: the buffers are the caller's again, and pins on
        them may be released. With `seeds`, each buffer is hashed piece by piece as it leaves.
        """
        type, body = encode(message) if message is not None else (PAYLOAD, b"")
        self._last_word = None
        self._writable().write(encode_frame(type, body, sum(map(len, payload))))
        checksums: list[int] = []
        for index, buffer in enumerate(payload):
            hasher = xxhash.xxh3_64(seed=seeds[index]) if seeds else None
            for start in range(0, len(buffer), SEND_STEP):
                piece = buffer[start : start + SEND_STEP]
                if hasher is not None:
                    hasher.update(piece)
                self._writable().write(piece)  # it may have been lost since the last piece
                if self._write_paused:
                    await self._flush(deadline)
                else:  # a peer that keeps up must not keep the loop from everybody else
                    await asyncio.sleep(0)
            if hasher is not None:
                checksums.append(hasher.intdigest())
        if self._write_paused:
            await self._flush(deadline)
        return checksums

    def send_now(self, message: Message) -> None:
        """Queue a small frame that nobody waits for."""
        self._writable().write(encode_frame(*encode(message)))

    def send_if_idle(self, message: Message) -> None:
        """Queue a small frame for when the loop comes round, unless another one goes before it.

        For what the next request says, too: sending wakes the peer, and it may take our core while
        our caller waits for what has just arrived.
        """
        if self._last_word is None:
            self._loop.call_soon(self._send_last_word)
        self._last_word = message

    async def receive(self, sink: Sink = no_payload, *, deadline: float | None) -> Frame:
        """The next frame, with its payload in place.

        Without a deadline (a server waits for the next request as long as the client lives) a
        frame that has begun must still be complete within FRAME_S.
        """
        if self.lost:
            raise self._why or LinkBroken("the peer closed the connection")
        self._sink = sink
        self._done = self._loop.create_future()
        self._impatient = deadline is None
        try:
            if self._filled:
                self._parse()
                self._hurry()
            self._resume()
            if self._done.done():  # a peer that sends ahead must not keep the loop to itself
                await asyncio.sleep(0)
            else:
                await by(self._done, deadline, "the peer did not answer in time")
            self._done.result()
            frame = self._frame
            assert frame is not None
            return frame
        finally:
            self._sink = self._done = self._frame = self._landing = None
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None

    async def expect(self, type: type[M], sink: Sink = no_payload, *, deadline: float | None) -> M:
        """The next message, of this type. An `Error` from the peer raises BadMessage."""
        frame = await self.receive(sink, deadline=deadline)
        return decode_answer(type, frame.type, frame.body)

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[None]:
        """Ends what is awaited inside when the connection is lost: nobody waits for it any more."""
        if self.lost:
            raise self._why or LinkBroken("the peer closed the connection")
        work = self._work = asyncio.timeout(None)
        try:
            async with work:
                yield
        except TimeoutError:
            if not work.expired() or self._why is None:
                raise
            raise self._why from None
        finally:
            self._work = None

    async def part(self) -> None:
        """Hang up, and wait, however long it takes, until the peer has done so, too.

        What is queued is still sent, what comes is dropped. Returns at once if the peer has gone.
        """
        if not self.lost and self._transport is not None:
            self._parted = self._loop.create_future()
            self._filled = 0
            self._resume()
            self._transport.write_eof()
            await self._parted

    def abort(self) -> None:
        """Drop the connection at once. Synchronous, idempotent."""
        self._fail(LinkBroken("the connection was aborted"))
        if self._transport is not None:
            self._transport.abort()

    def fileno(self) -> int:
        """Its socket's descriptor; -1 when there is none."""
        socket = self._transport.get_extra_info("socket") if self._transport is not None else None
        return int(socket.fileno()) if socket is not None else -1

    # --- asyncio's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and not isinstance: uvloop's transports inherit from nothing of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        # Paused until the kernel has everything: that is when a pin may be released.
        self._transport.set_write_buffer_limits(high=0)
        _open.add(self)
        if self.lost:  # aborted before it was made
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._landing is not None and self._landing.missing:
            return self._landing.next()
        return self._stash[self._filled :]

    def buffer_updated(self, count: int) -> None:
        landing = self._landing
        if landing is not None and landing.missing:
            landing.received(count)
            if not landing.missing:
                self._complete()
            return
        if self._parted is not None:
            return
        self._filled += count
        if self._sink is not None:
            self._parse()
            self._hurry()
        if self._filled == len(self._stash) and self._transport is not None and not self.lost:
            # Requests that nobody has asked for yet: let the peer wait.
            self._read_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._fail(LinkBroken("the peer went away"))
        return self.owned

    def connection_lost(self, error: Exception | None) -> None:
        _open.discard(self)
        self._fail(LinkBroken(f"connection lost: {error}" if error else "the peer went away"))

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)

    # --- inside ----------------------------------------------------------------------------

    def _send_last_word(self) -> None:
        message, self._last_word = self._last_word, None
        if message is not None and not self.lost:
            self.send_now(message)

    def _writable(self) -> asyncio.Transport:
        if self.lost or self._transport is None:
            raise self._why or LinkBroken("the peer closed the connection")
        return self._transport

    async def _flush(self, deadline: float) -> None:
        self._flushed = self._loop.create_future()
        try:
            await by(self._flushed, deadline, "the peer does not read")
        finally:
            self._flushed = None

    def _resume(self) -> None:
        full = self._filled == len(self._stash)
        if self._read_paused and not full and self._transport is not None and not self.lost:
            self._read_paused = False
            self._transport.resume_reading()

    def _parse(self) -> None:
        """Make a frame of what is in the stash, and hand the rest of it to the landing."""
        if self._filled < HEADER_SIZE or self._sink is None or self._frame is not None:
            return
        if self._done is not None and self._done.done():  # broken: what follows means nothing
            return
        try:
            type, body_size, payload_size = decode_header(self._stash)
            whole = HEADER_SIZE + body_size
            if self._filled < whole:
                if self._filled == len(self._stash):
                    self._grow(min(whole, 2 * self._filled))
                return
            self._frame = Frame(type, bytes(self._stash[HEADER_SIZE:whole]), payload_size)
            landing = self._sink(self._frame)
            if landing.missing != payload_size and type != TYPES[Error]:
                raise BadFrame(f"payload of {payload_size} bytes, expected {landing.missing}")
        except KvpoolError as error:
            self._break(error)
            return
        taken = landing.put(self._stash[whole : self._filled]) if payload_size else 0
        rest = bytes(self._stash[whole + taken : self._filled])
        if len(self._stash) > STASH:
            self._stash = memoryview(bytearray(STASH))
        self._stash[: len(rest)] = rest
        self._filled = len(rest)
        if landing.missing:
            self._landing = landing
        else:
            self._complete()

    def _grow(self, size: int) -> None:
        """For one body: as much as has arrived already, not as much as its header claims."""
        larger = memoryview(bytearray(size))
        larger[: self._filled] = self._stash[: self._filled]
        self._stash = larger

    def _hurry(self) -> None:
        """A frame that has begun must be complete within FRAME_S, unless a deadline says more."""
        begun = self._done is not None and not self._done.done()
        if begun and self._impatient and self._slow is None:
            late = DeadlineExceeded(f"a frame was not complete within {FRAME_S:g} s")
            self._slow = self._loop.call_later(FRAME_S, self._break, late)

    def _complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _break(self, error: KvpoolError) -> None:
        """The owner gets the error; it may still answer with one of its own, and then aborts."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _fail(self, error: KvpoolError) -> None:
        if self._why is None:
            self._why = error
        self.lost = True
        for future in (self._done, self._flushed):
            if future is not None and not future.done():
                future.set_exception(self._why)
        if self._parted is not None and not self._parted.done():
            self._parted.set_result(None)
        if self._work is not None and not self._work.expired():
            self._work.reschedule(self._loop.time())


async def by(future: asyncio.Future[None], deadline: float | None, otherwise: str) -> None:
    """Wait for a future until a deadline, with one timer and no task."""
    if deadline is None:
        await future
        return
    loop = future.get_loop()

    def expire() -> None:
        if not future.done():
            future.set_exception(DeadlineExceeded(otherwise))

    timer = loop.call_at(deadline, expire)
    try:
        await future
    finally:
        timer.cancel()


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
        """A stream for one exchange. Whatever is raised inside aborts it."""
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
