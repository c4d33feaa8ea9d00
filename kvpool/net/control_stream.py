"""Streams beside zmq: requests to a master and their replies, without zmq's threads.

A caller that asks often asks the master for a stream, over zmq, and is offered a port, a token that
is good once, and, in a cluster with a secret, two keys. So who may use a stream, and as whom, is
decided by CURVE as before, and only those two know the keys. What travels is sealed with them:
AES-256-GCM, a key for each direction, the number of the message as its nonce, so that none can be
read, changed, left out, repeated or put elsewhere. When a stream ends for any reason, zmq carries
on. (design: control-plane)
"""

from __future__ import annotations

import asyncio
import functools
import resource
import secrets
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

from kvpool import logs
from kvpool.addresses import join, listening, split
from kvpool.errors import BadFrame, ConfigError, PeerError, Unavailable
from kvpool.protocols import Caller
from kvpool.shares import Shares
from kvpool.wire.auth import STREAM_KEY_SIZE, TOKEN_SIZE
from kvpool.wire.message_stream import MESSAGE_SIZE_MAX, MessageReader, with_size
from kvpool.wire.messages import StreamOffer

log = logs.get("kvpool.link")

_ENDED: Final = "a stream of control messages is ended"
#: Seconds between two lines about callers that break the rules.
_LOG_EVERY_S: Final = 60.0
#: An offer is good for so long, and a stream has to be opened within it.
OFFER_S: Final = 2.0
#: Connections that have not shown a token yet; the oldest one is ended for one more.
_UNOPENED_MAX: Final = 256
#: Streams of one master and offers of some, at most; and a quarter of the files that it may open.
_STREAMS_MAX: Final = 4096
#: A stream that was not used for so long gives way to another one, when there are too many.
_IDLE_S: Final = 10.0
#: After so long in one turn of the loop what else has arrived, on all streams, waits for the next.
_TURN_S: Final = 0.002
#: Bytes of replies that a caller has not read yet; with more its stream is ended.
_UNREAD_MAX: Final = 8 << 20


@functools.cache
def can_seal() -> bool:
    """Whether this process has what streams of a cluster with a secret need. It loads that, which
    takes some 30 ms the first time."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError:
        return False
    return True


class StreamCipher:
    """One end's keys for one stream."""

    def __init__(self, own: bytes, theirs: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._own, self._theirs = AESGCM(own), AESGCM(theirs)
        self._wrong = (InvalidTag, ValueError)  # ValueError: too short to have a tag
        self._sent = self._received = 0

    def seal(self, message: bytes) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        sealed: bytes = self._own.encrypt(_nonce(number), message, None)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        """Raises BadFrame for anything but the next message of the other end."""
        try:
            message: bytes = self._theirs.decrypt(_nonce(self._received), sealed, None)
        except self._wrong:
            raise BadFrame("a message on a stream that was not sealed by its other end") from None
        self._received += 1
        return message


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


class _End(asyncio.Protocol):
    """What both ends of a stream do: cut it into messages, seal them, end it once."""

    def __init__(self, reader: MessageReader) -> None:
        self._reader = reader
        self._cipher: StreamCipher | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it

    def send(self, message: bytes) -> None:
        """Send one message. On a stream that ends it is lost, as what is on its way."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            sealed = message if self._cipher is None else self._cipher.seal(message)
            transport.write(with_size(sealed))

    @property
    def ended(self) -> bool:
        return self._transport is None

    def abort(self) -> None:
        """End the stream. What was not sent is lost. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _messages(self, data: bytes) -> list[bytes]:
        """The messages that are complete now, still sealed. None at the end of the stream, or when
        the other end has broken its rules, which is the end, too."""
        if self._transport is None:
            return []
        try:
            return self._reader.feed(data)
        except BadFrame as error:
            self._break(error)
            return []

    def _open(self, message: bytes) -> bytes:
        return message if self._cipher is None else self._cipher.open(message)

    def _break(self, error: PeerError) -> None:
        """End the stream, because the other end has broken its rules."""
        self.abort()

    @property
    def peer(self) -> str:
        """The address of the other end's host; empty if it is not known."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if isinstance(name, tuple) and name else ""


# --- the caller's end --------------------------------------------------------------------------


class CallerStream(_End):
    """The end of who asks. `on_message` gets each reply; `on_end` is called once, when the stream
    ends and `abort` was not called here. It is in `connected` while its socket is open."""

    def __init__(
        self,
        offer: StreamOffer,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
        connected: set[CallerStream],
    ) -> None:
        super().__init__(MessageReader())
        self._token = offer.token
        if offer.keys:
            self._cipher = StreamCipher(offer.keys[:STREAM_KEY_SIZE], offer.keys[STREAM_KEY_SIZE:])
        self._on_message = on_message
        self._on_end = on_end
        self._connected = connected
        loop = asyncio.get_running_loop()
        #: Whether the master has accepted it.
        self.opened: asyncio.Future[bool] = loop.create_future()
        #: Done when its socket is closed.
        self.disconnected: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connected.add(self)
        cast("asyncio.Transport", transport).write(with_size(self._token))

    def data_received(self, data: bytes) -> None:
        for sealed in self._messages(data):
            try:
                message = self._open(sealed)
            except BadFrame as error:
                self._break(error)
                break
            if self.opened.done():
                self._on_message(message)
            else:
                self.opened.set_result(not message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_result(False)
        self._connected.discard(self)
        self.disconnected.set_result(None)  # those who wait go on when the loop has closed it
        if self._transport is not None:
            self._transport = None
            self._on_end()

    def _break(self, error: PeerError) -> None:
        # A link waits longer after each stream, so this is no line each second.
        log.warning(_ENDED, why=str(error), master=self.peer)
        super()._break(error)
        self._on_end()


async def open_stream(
    address: str,
    offer: StreamOffer,
    on_message: Callable[[bytes], None],
    on_end: Callable[[], None],
    connected: set[CallerStream],
) -> CallerStream:
    """The stream that the master at `address` offers.

    Raises Unavailable when there is none, or it is not open after OFFER_S.
    """
    parts = split(address)
    host = parts[1] if parts is not None else ""
    if not offer.port or not host:
        raise Unavailable(f"the master at {address} offers no stream: {offer.problem}")
    if len(offer.keys) not in (0, 2 * STREAM_KEY_SIZE) or len(offer.token) != TOKEN_SIZE:
        raise Unavailable(f"the master at {address} offers a stream that is none")
    stream: CallerStream | None = None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(OFFER_S):
            _, stream = await loop.create_connection(
                lambda: CallerStream(offer, on_message, on_end, connected), host, offer.port
            )
            if await stream.opened and not stream.ended:
                return stream
        why = "its master does not know the token"
    except TimeoutError:
        why = f"no answer within {OFFER_S:g} s; does a firewall close that port?"
    except OSError as error:
        why = error.strerror or str(error)
    except BaseException:
        if stream is not None:
            stream.abort()
        raise
    if stream is not None:
        stream.abort()
    raise Unavailable(f"the stream at {join(host, offer.port)} cannot be opened: {why}")


# --- the master's end --------------------------------------------------------------------------


class _Offer(NamedTuple):
    caller: Caller
    keys: bytes
    until: float


def _holder(caller: Caller) -> str:
    return caller.tenant or caller.address


class MasterStreams:
    """The streams of one master: offers them, and answers on them."""

    def __init__(self, answer: Callable[[bytes, Caller], bytes | None], *, sealed: bool) -> None:
        """`answer` makes the reply to one message, or None; it never raises."""
        self._answer = answer
        self._sealed = sealed
        self._offers: dict[bytes, _Offer] = {}
        self._unopened: dict[_MasterEnd, None] = {}
        self._streams: dict[_MasterEnd, str] = {}  # and who has it
        #: Those with messages that wait for their answer, the next one first.
        self._asking: deque[_MasterEnd] = deque()
        self._planned = False
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._shares = Shares(min(_STREAMS_MAX, files_max // 4))
        self._server: asyncio.Server | None = None
        self._port = 0
        self._broken = 0  # since the last line
        self._log_at = 0.0
        #: Connections that showed no valid token.
        self.refused = 0

    def __len__(self) -> int:
        return len(self._streams)

    async def listen(self, host: str, port: int) -> None:
        """Accept streams at this host and port; 0 is a free one. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _MasterEnd(self), **listening(host, port)
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {join(host, port)} for streams: {error.strerror or error}; "
                "choose another master.stream_port"
            ) from None
        self._port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """End all streams. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for end in [*self._unopened, *self._streams]:
            end.abort()

    def offer(self, caller: Caller) -> StreamOffer:
        """A stream for this caller, who has asked for one over zmq."""
        now, holder = asyncio.get_running_loop().time(), _holder(caller)
        for token in [one for one, offer in self._offers.items() if offer.until <= now]:
            self._shares.give_back(_holder(self._offers.pop(token).caller))
        if problem := self._problem(holder):
            return StreamOffer(0, b"", b"", problem)
        self._shares.hold(holder)
        token = secrets.token_bytes(TOKEN_SIZE)
        keys = secrets.token_bytes(2 * STREAM_KEY_SIZE) if self._sealed else b""
        self._offers[token] = _Offer(caller, keys, now + OFFER_S)
        return StreamOffer(self._port, token, keys, "")

    def _problem(self, holder: str) -> str:
        if self._server is None:
            return "it is told to have none"
        if self._sealed and not can_seal():
            return "it lacks the package cryptography: pip install 'kvpool[encryption]'"
        while not self._shares.room(holder):
            if not self._end_idle(holder):
                self._shares.refuse(holder)
                return f"{self._shares.held(holder)} of {self._shares.total} streams are in use"
        return ""

    def _end_idle(self, holder: str) -> bool:
        """End the stream that was not used for the longest time, if that is long enough: of this
        one's while there is room for others."""
        full = self._shares.used >= self._shares.total
        ends = [end for end, of in self._streams.items() if full or of == holder]
        oldest = min(ends, key=lambda end: end.used_at, default=None)
        if oldest is None or oldest.used_at > asyncio.get_running_loop().time() - _IDLE_S:
            return False
        oldest.abort()
        return True

    # --- of the ends --------------------------------------------------------------------------

    def asked(self, end: _MasterEnd) -> None:
        """This end has messages, and had none before."""
        self._asking.append(end)
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Answer for one turn: a message of each stream, again and again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _TURN_S
        try:
            while self._asking:
                end = self._asking.popleft()
                if end.answer_one(self._answer):
                    self._asking.append(end)
                if loop.time() > until:
                    break
        finally:  # also when one stream has raised something: the others go on
            self._planned = bool(self._asking)
            if self._planned:
                loop.call_soon(self._work)

    def connected(self, end: _MasterEnd) -> None:
        if len(self._unopened) >= _UNOPENED_MAX:
            next(iter(self._unopened)).abort()
        self._unopened[end] = None

    def redeem(self, end: _MasterEnd, token: bytes) -> _Offer | None:
        """What was offered with this token, once."""
        offer = self._offers.get(token)
        if offer is None or offer.until < end.used_at:
            return None
        del self._offers[token], self._unopened[end]
        self._streams[end] = _holder(offer.caller)
        return offer

    def broken(self, end: _MasterEnd, error: PeerError) -> None:
        """A caller has broken the rules: one line a minute, for all of them."""
        self._broken += 1
        now = asyncio.get_running_loop().time()
        if now >= self._log_at:
            log.warning(_ENDED, why=str(error), caller=end.peer, count=self._broken)
            self._broken, self._log_at = 0, now + _LOG_EVERY_S

    def ended(self, end: _MasterEnd) -> None:
        if end in self._unopened:
            self.refused += 1
        self._unopened.pop(end, None)
        holder = self._streams.pop(end, None)
        if holder is not None:
            self._shares.give_back(holder)


class _MasterEnd(_End):
    """UNOPENED: only a token may come, within OFFER_S. OPEN: requests. Ended: `abort`."""

    def __init__(self, streams: MasterStreams) -> None:
        super().__init__(MessageReader(TOKEN_SIZE))
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._caller: Caller | None = None
        self._waiting: deque[bytes] = deque()
        self._reading = True
        self.used_at = self._loop.time()
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _keep_alive(transport)
        self._streams.connected(self)
        self._late = self._loop.call_later(OFFER_S, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()

    def _break(self, error: PeerError) -> None:
        if self._caller is not None:  # else a stranger, who is counted, and gets no line
            self._streams.broken(self, error)
        super()._break(error)

    def abort(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._streams.ended(self)
        super().abort()

    def data_received(self, data: bytes) -> None:
        self.used_at = self._loop.time()
        messages = self._messages(data)
        if not messages:
            return
        if self._caller is None:
            self._open_with(messages[0])
        elif self._waiting:
            # So a caller has two pieces of its stream here at most, and one message in parts.
            self._waiting.extend(messages)
            self._read(False)
        else:
            self._waiting.extend(messages)
            self._streams.asked(self)

    def _read(self, reading: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if reading is not self._reading:
            self._reading = reading
            if reading:
                transport.resume_reading()
            else:
                transport.pause_reading()

    def _open_with(self, token: bytes) -> None:
        offer = self._streams.redeem(self, token)
        if offer is None:
            self.abort()
            return
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._caller = offer.caller
        if offer.keys:
            self._cipher = StreamCipher(offer.keys[STREAM_KEY_SIZE:], offer.keys[:STREAM_KEY_SIZE])
        self._reader.size_max = MESSAGE_SIZE_MAX
        self.send(b"")

    def answer_one(self, answer: Callable[[bytes, Caller], bytes | None]) -> bool:
        """Answer the message that waits for the longest time; whether there is another one."""
        if self._caller is None or self._transport is None or not self._waiting:
            return False
        try:
            reply = answer(self._open(self._waiting.popleft()), self._caller)
        except BadFrame as error:
            self._break(error)
            return False
        if reply is not None:
            self.send(reply)
            if self._transport.get_write_buffer_size() > _UNREAD_MAX:
                text = f"its caller has left {_UNREAD_MAX} bytes of replies unread"
                self._break(PeerError(text))
                return False
        if not self._waiting:
            self._read(True)
        return bool(self._waiting)


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Notice a peer that disappeared without an end of its stream, within a minute."""
    connection: Any = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
