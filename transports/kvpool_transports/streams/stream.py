"""Frames over an asyncio connection, shared by every transport over byte streams.

One exchange at a time owns a stream: request, answer, back into the pool. So there are no request
ids to match, no interleaving, no head-of-line blocking, and one rule for everything that can go
wrong: after any exception the stream is aborted, never reused. The server then drops the pins and
reservations of that connection, and no other connection is affected (design: streams).
Concurrency is the number of streams.

This module has the sockets, buffers and timers. `FrameReader` parses the bytes that come. Those of
a payload leave straight from the pieces of memory in which their owner has them: a block has one
checksum over all of its pieces, and is hashed in steps while it is in the cache.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import xxhash

from kvpool.addresses import network_of
from kvpool.errors import DeadlineExceeded, KvpoolError, LinkBroken
from kvpool.wire.frames import (
    STEP,
    ChooseTarget,
    Frame,
    FrameReader,
    Pieces,
    ReaderState,
    encode_message,
    no_payload,
)
from kvpool.wire.messages import M, Message, decode_answer

#: Seconds that a request may take to arrive, from its first byte.
FRAME_S: Final = 30.0
#: Sent at most this much at once, so that hashing a large block never stalls the loop.
SEND_STEP: Final = 1 << 20
#: Pieces smaller than this leave together with their neighbours. Up to here, joining them (which
#: is what asyncio does before Python 3.12) costs less than a system call for each.
SMALL_PIECE: Final = 64 << 10

T = TypeVar("T")

#: Streams whose sockets a child would inherit.
_open: weakref.WeakSet[Stream] = weakref.WeakSet()


def _detach_in_child() -> None:
    """In a forked child: close the child's copies of the parent's connections.

    A child that outlives its parent would keep the parent's pins and reservations alive. The
    descriptor numbers stay in use (they refer to /dev/null): the child's copies of the transports
    still hold them, and would otherwise close other files.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for transport in filter(None, [stream._transport for stream in list(_open)]):
        socket = transport.get_extra_info("socket")
        if socket is not None and socket.fileno() >= 0:
            os.dup2(nothing, socket.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_detach_in_child)


class Stream(asyncio.BufferedProtocol):
    """One connection, either end. `receive` and `send` belong to the exchange that owns the stream.

    Its states, and what ends each:

    | state     | shown by                  | next                                              |
    |-----------|---------------------------|---------------------------------------------------|
    | idle      | nothing                   | `send`: sending; `receive`: receiving             |
    | sending   | `_flushed`, when paused   | the kernel has every byte: idle                   |
    | receiving | `_done`                   | the frame is complete or refused, deadline: idle  |
    | working   | `_work`                   | `while_connected` ends: idle                      |
    | closing   | `_closing`                | the peer has hung up: lost                        |
    | lost      | `lost`, `_why`            | nothing: it is never reused                       |

    `abort`, the end of the connection, and the peer's hanging up lead from every state to lost. An
    owner that waits then gets the error `_why`. It is raised as a copy, and a future has it as its
    result: so a lost stream is freed at once, with its buffer (design: turns).
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.reader = FrameReader()
        self._done: asyncio.Future[Frame | KvpoolError] | None = None
        self._flushed: asyncio.Future[KvpoolError | None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._work: asyncio.Timeout | None = None
        self._write_paused = False
        self._read_paused = False
        self._no_deadline = False
        self._frame_timer: asyncio.TimerHandle | None = None
        #: When the peer hangs up, only the owner closes the connection, after it has stopped its
        #: work on the peer's memory: the close tells the peer that this work has ended.
        self.owned = True
        self.lost = False
        self._deferred_message: Message | None = None
        self._why: KvpoolError | None = None

    # --- for the owner -----------------------------------------------------------------

    async def send(
        self,
        message: Message | None,
        payload: Sequence[Pieces] = (),
        *,
        deadline: float,
        seeds: Sequence[int] | None = None,
    ) -> list[int]:
        """Send one frame (without a message: the payload frame); returns the blocks' checksums.

        It returns when the kernel has all bytes: the caller may reuse the memory and release pins
        on it (design: pins). With `seeds`, each block is hashed while it is sent.
        """
        transport = self._writable()
        size = sum([len(piece) for pieces in payload for piece in pieces])
        head = encode_message(message, size)
        self._deferred_message = None
        checksums: list[int] = []
        if not payload:
            transport.write(head)
            if self._write_paused:
                await self._flush(deadline)
            return checksums
        for number, portion in enumerate(writes(head, payload, seeds, checksums)):
            if number:
                await asyncio.sleep(0)  # a fast peer must not keep other tasks from running
            for together in portion:
                if self.lost:  # since the last write
                    raise self._error()
                if len(together) == 1:
                    transport.write(together[0])
                elif together:
                    transport.writelines(together)
                if self._write_paused:
                    await self._flush(deadline)
        return checksums

    def send_now(self, message: Message) -> None:
        """Queue a small frame without waiting until it is sent."""
        self._writable().write(encode_message(message))

    def send_deferred(self, message: Message) -> None:
        """Queue a small frame for the loop's next turn, unless another one is sent before it.

        For a message that the next request implies (design: pins). Sending it at once would wake
        the peer, which could take this core while the caller waits for its result.
        """

        def send() -> None:
            message, self._deferred_message = self._deferred_message, None
            if message is not None and not self.lost:
                self.send_now(message)

        if self._deferred_message is None:
            self._loop.call_soon(send)
        self._deferred_message = message

    async def receive(
        self, payload_target: ChooseTarget = no_payload, *, deadline: float | None
    ) -> Frame:
        """The next frame, its payload received into the memory that `payload_target` returns.

        Without a deadline (a server waits for the next request as long as the client lives) a
        frame that has begun must still be complete within FRAME_S.
        """
        if self.lost:
            raise self._error()
        done: asyncio.Future[Frame | KvpoolError] = self._loop.create_future()
        self._done = done
        self._no_deadline = deadline is None
        arrived = False
        try:
            self._received(self.reader.ask(payload_target))
            self._resume_reading()
            if done.done():  # a peer that sends ahead must not keep other tasks from running
                await asyncio.sleep(0)
            frame = await wait_until(done, deadline, "the peer did not answer in time")
            arrived = True
            return frame
        finally:
            self._done = None
            if self._frame_timer is not None:
                self._frame_timer.cancel()
                self._frame_timer = None
            if not arrived:  # the memory is its owner's again: no later byte may go there
                self.reader.close()

    async def expect(
        self, type: type[M], payload_target: ChooseTarget = no_payload, *, deadline: float | None
    ) -> M:
        """The next message, of this type. An `Error` from the peer raises what it stands for."""
        frame = await self.receive(payload_target, deadline=deadline)
        return decode_answer(type, frame.type, frame.body)

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this work, and cancel it when the connection is lost: its result has no receiver."""
        if self.lost:
            work.close()
            raise self._error()
        limit = self._work = asyncio.timeout(None)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired() or not self.lost:
                raise
            raise self._error() from None
        finally:
            self._work = None

    async def close_gracefully(self) -> None:
        """Hang up, and wait without a deadline until the peer has hung up too.

        Queued bytes are still sent, received bytes are dropped. Returns at once if the peer has
        gone.
        """
        if not self.lost and self._transport is not None:
            self._closing = self._loop.create_future()
            self.reader.close()
            self._resume_reading()
            self._transport.write_eof()
            await self._closing

    def progress(self) -> object:
        """Equal to an earlier value if since then no byte has moved, and the owner waits for the
        peer."""
        if self._done is not None:
            return self.reader.position
        if self._flushed is not None and self._transport is not None:
            return self._flushed, self._transport.get_write_buffer_size()
        return object()

    def interrupt(self, error: KvpoolError) -> None:
        """End the owner's wait for the peer with a copy of this error. The connection stays open
        for now: the owner may still answer with an error of its own, and then aborts."""
        for future in (self._done, self._flushed):
            if future is not None and not future.done():
                future.set_result(error.fresh())

    def abort(self) -> None:
        """Drop the connection at once. Synchronous, idempotent."""
        self._fail(LinkBroken("the connection was aborted"))
        if self._transport is not None:
            self._transport.abort()

    @property
    def peer_address(self) -> str:
        """Where the peer is, without the port; empty for sockets without addresses."""
        if self._transport is None:
            return ""
        return address_of(self._transport.get_extra_info("peername"))

    # --- asyncio's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and not isinstance: uvloop's transports inherit from nothing of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        # Writing is paused while asyncio still holds one byte. So when `send` does not wait, the
        # kernel has everything, and a pin may be released (design: pins). Sockets compare with `>`,
        # so the limit is 0 (with 1, a last byte would count as sent). The TLS layers of asyncio and
        # uvloop compare with `>=`: with 0 they would pause for ever, and 1 means the same there.
        self._transport.set_write_buffer_limits(high=int(_is_tls(self._transport)))
        _open.add(self)
        if self.lost:  # aborted before it was made
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.memory

    def buffer_updated(self, count: int) -> None:
        try:
            frame = self.reader.received(count)
        except KvpoolError as error:
            self.interrupt(error)
            return
        timed = not self._no_deadline or self._frame_timer is not None
        if timed and self.reader.state is ReaderState.PAYLOAD:
            return  # the hot path: nothing else changes before the last byte
        self._received(frame)
        if self.reader.full and self._transport is not None and not self.lost:
            # The peer sends requests before `receive` asks for them: stop reading (backpressure).
            self._read_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._fail(LinkBroken("the peer went away"))
        return self.owned and not _is_tls(self._transport)  # TLS has no half-closed connections

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

    def _writable(self) -> asyncio.Transport:
        if self.lost or self._transport is None:
            raise self._error()
        return self._transport

    def _error(self) -> KvpoolError:
        """Why the stream is lost, to be raised."""
        return (self._why or LinkBroken("the peer closed the connection")).fresh()

    async def _flush(self, deadline: float) -> None:
        self._flushed = self._loop.create_future()
        try:
            await wait_until(self._flushed, deadline, "the peer does not read")
        finally:
            self._flushed = None

    def _resume_reading(self) -> None:
        if self._read_paused and not self.reader.full and not self.lost:
            assert self._transport is not None
            self._read_paused = False
            self._transport.resume_reading()

    def _received(self, frame: Frame | None) -> None:
        """Bytes have arrived, now or before `receive` was called, and perhaps complete a frame."""
        if self._done is None or self._done.done():
            return
        if frame is not None:
            self._done.set_result(frame)
        elif self._no_deadline and self._frame_timer is None and self.reader.begun:
            late = DeadlineExceeded(f"a frame was not complete within {FRAME_S:g} s")
            self._frame_timer = self._loop.call_later(FRAME_S, self.interrupt, late)

    def _fail(self, error: KvpoolError) -> None:
        if self._why is None:
            self._why = error
        self.lost = True
        for future in (self._done, self._flushed):
            if future is not None and not future.done():
                future.set_result(self._why)
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(None)
        if self._work is not None and not self._work.expired():
            self._work.reschedule(self._loop.time())


async def wait_until(
    future: asyncio.Future[T | KvpoolError], deadline: float | None, otherwise: str
) -> T:
    """The result of a future. Raises a copy of it if it is an error; at the deadline
    DeadlineExceeded with the text `otherwise`. One timer and no task.

    An error is the result and not the exception of the future, because a future that has raised its
    exception is in a cycle with the frame that waited (design: turns).
    """
    timer = None
    if deadline is not None:

        def expire() -> None:
            if not future.done():
                future.set_result(DeadlineExceeded(otherwise))

        timer = future.get_loop().call_at(deadline, expire)
    try:
        result = await future
    finally:
        if timer is not None:
            timer.cancel()
    if isinstance(result, KvpoolError):
        raise result.fresh()
    return result


def _is_tls(transport: asyncio.Transport | None) -> bool:
    return transport is not None and transport.get_extra_info("ssl_object") is not None


def address_of(peername: object) -> str:
    """`network_of` a socket's peer name; empty if it is none."""
    if not isinstance(peername, tuple) or not peername:
        return ""
    return network_of(str(peername[0]))


def writes(
    head: bytes, blocks: Sequence[Pieces], seeds: Sequence[int] | None, checksums: list[int]
) -> Iterator[list[list[bytes | memoryview]]]:
    """The frame in portions of about SEND_STEP, hashed just before; each is some writes in a row.

    Large pieces are written alone and uncopied; small ones together, the head with the first of
    them. A block's checksum is appended to `checksums` when its last byte has been hashed.
    """
    together: list[bytes | memoryview] = [head]  # the write that still grows
    portion, held, size = [together], len(head), len(head)
    for number, pieces in enumerate(blocks):
        hasher = xxhash.xxh3_64(seed=seeds[number]) if seeds else None
        for piece in pieces:
            for start in range(0, len(piece), SEND_STEP):
                part = piece[start : start + SEND_STEP]
                if size + len(part) > SEND_STEP and size:
                    yield portion
                    together = []
                    portion, held, size = [together], 0, 0
                if hasher is not None:
                    hasher.update(part)
                size += len(part)
                if len(part) >= SMALL_PIECE:
                    together = []
                    portion += [[part], together]
                    held = 0
                else:
                    together.append(part)
                    held += len(part)
                    if held >= STEP:
                        together, held = [], 0
                        portion.append(together)
        if hasher is not None:
            checksums.append(hasher.intdigest())
    yield portion
