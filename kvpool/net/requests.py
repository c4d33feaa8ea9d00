"""Requests and replies of the control plane, without sockets.

A message on a stream of bytes:   size u32 | "kM" | version u8 | type u8 | cluster u32 | id u64

The body is one msgspec message of the type that its *envelope* names. All integers are
little-endian. `PendingRequests` is the caller's side: ids, deadlines, and the caller that waits for
each reply. `answer` is the master's side: from the bytes of a request to the bytes of its reply.
TCP carries these bytes in production (`kvpool.net.control_network`), a simulated network in the
simulator. (design: control-plane)
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final, NamedTuple

import xxhash

from kvpool import logs
from kvpool.errors import (
    BadFrame,
    Closed,
    DeadlineExceeded,
    InvariantViolated,
    KvpoolError,
    Overloaded,
    PeerError,
    VersionMismatch,
)
from kvpool.protocols import Caller, Handler
from kvpool.wire.frames import BODY_SIZE_MAX, HEADER_SIZE, PROTOCOL_VERSION, wrong_version
from kvpool.wire.messages import encode, refusal

log = logs.get("kvpool.link")

#: Requests one caller may have in flight to one master.
PENDING_MAX = 4096
#: A link opens a new connection when its requests have had no reply for so long.
RECONNECT_AFTER_S: Final = 2.0
MESSAGE_SIZE_MAX: Final = HEADER_SIZE + BODY_SIZE_MAX

_SIZE: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<2sBBIQ")
_MAGIC: Final = b"kM"


class Envelope(NamedTuple):
    """A control-plane message, still encoded."""

    type: int
    id: int
    body: bytes


def cluster_id(cluster: str) -> int:
    """32 bits that distinguish the messages of different clusters. Not a secret."""
    return xxhash.xxh3_64_intdigest(cluster.encode()) & 0xFFFFFFFF


def encode_envelope(type: int, cluster: int, id: int, body: bytes) -> bytes:
    """One control-plane message."""
    if len(body) > BODY_SIZE_MAX:
        raise BadFrame(f"body of {len(body)} bytes, limit {BODY_SIZE_MAX}")
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, type, cluster, id) + body


def decode_envelope(message: bytes, cluster: int) -> Envelope:
    """A control-plane message of this cluster. Raises PeerError for anything else."""
    if not HEADER_SIZE <= len(message) <= HEADER_SIZE + BODY_SIZE_MAX:
        raise BadFrame(f"message of {len(message)} bytes")
    magic, version, type, theirs, id = _HEADER.unpack_from(message)
    if magic != _MAGIC:
        raise BadFrame(f"message starts with {message[:4]!r}, expected {_MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise wrong_version(version)
    if theirs != cluster:
        raise VersionMismatch("peer belongs to another cluster (setting `cluster`)")
    return Envelope(type, id, message[HEADER_SIZE:])


def envelope_id(message: bytes) -> int | None:
    """The request id of a message that may not decode, so that it can be refused by name."""
    if len(message) >= HEADER_SIZE and message[:2] == _MAGIC:
        id: int = _HEADER.unpack_from(message)[4]
        return id
    return None


def with_size(message: bytes) -> bytes:
    """One message as it travels."""
    return _SIZE.pack(len(message)) + message


class MessageReader:
    """Cuts one stream into its messages. `size_max` may change between two calls of `feed`."""

    def __init__(self, size_max: int = MESSAGE_SIZE_MAX) -> None:
        self.size_max = size_max
        #: Of a message that is not complete.
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order.

        Raises BadFrame for one that is longer than `size_max`; nothing more can be read then.
        """
        rest = self.rest
        if rest:
            rest += data
        source: bytes | bytearray = rest or data
        at, end = 0, len(source)
        messages = []
        while at + _SIZE.size <= end:
            (size,) = _SIZE.unpack_from(source, at)
            if size > self.size_max:
                raise BadFrame(f"message of {size} bytes, limit {self.size_max}")
            begin = at + _SIZE.size
            if begin + size > end:
                break
            at = begin + size
            messages.append(bytes(source[begin:at]))
        if source is rest:
            del rest[:at]
        else:
            rest += data[at:]
        return messages


class PendingRequests:
    """A `Link` without its connection: requests to one master that wait for their replies.

    What has the connection is derived from it, and passes every message that it receives to
    `on_reply`. Every request ends: with its reply, at its deadline, or with `close`.
    """

    def __init__(self, address: str, cluster: int) -> None:
        self.address = address
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._next_id = 0
        # An error is a result, too: a future that raises its exception is in a cycle with the frame
        # that waited (design: turns).
        self._pending: dict[int, asyncio.Future[Envelope | KvpoolError]] = {}
        self._messages: dict[int, bytes] = {}
        self._hasty: set[asyncio.Future[Envelope | KvpoolError]] = set()
        self._closed = False
        #: Why there is no connection, as far as that is known.
        self.problem = ""
        #: Since when the master owes a reply.
        self.silent_since: float | None = None
        #: It has sent one since this was reset.
        self.heard = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address} pending={self.pending}>"

    @property
    def pending(self) -> int:
        return len(self._pending)

    def unanswered(self) -> list[bytes]:
        """The requests that still wait, as they were transmitted."""
        return list(self._messages.values())

    async def request(
        self, type: int, body: bytes, *, deadline: float, hasty: bool = False
    ) -> tuple[int, bytes]:
        """As `Link.request`: a `hasty` one ends as soon as there is a `problem`. Raises PeerError,
        too, for a reply that is not valid."""
        if self._closed:
            raise Closed(f"the link to master {self.address} is closed")
        if len(self._pending) >= PENDING_MAX:
            raise Overloaded(f"{PENDING_MAX} requests are pending at master {self.address}")
        if self.silent_since is None:
            self.silent_since = self._loop.time()
        id = self._next_id = self._next_id + 1
        future: asyncio.Future[Envelope | KvpoolError] = self._loop.create_future()
        self._pending[id] = future
        timer = self._loop.call_at(deadline, self._expire, future)
        try:
            message = encode_envelope(type, self._cluster, id, body)
            self._messages[id] = message
            self._transmit(message)
            if hasty:
                self._hasty.add(future)
                self.broken(self.problem)
            reply = await future
        finally:
            timer.cancel()
            self._hasty.discard(future)
            del self._pending[id]
            self._messages.pop(id, None)
            # Also of a caller that was cancelled: its own patience was shorter.
            since = self.silent_since
            if since is not None and self._loop.time() >= since + RECONNECT_AFTER_S:
                self._reconnect()
        if isinstance(reply, KvpoolError):
            raise reply.fresh()
        return reply.type, reply.body

    def _transmit(self, message: bytes) -> None:
        """Send a request, now or when there is a connection."""
        raise NotImplementedError

    def _reconnect(self) -> None:
        """There was no reply for `RECONNECT_AFTER_S`: open another connection, if there is one."""

    def on_reply(self, message: bytes) -> None:
        """Give a received message to the caller that waits for it, if there still is one."""
        self.silent_since, self.heard = None, True
        try:
            envelope = decode_envelope(message, self._cluster)
        except PeerError as error:
            # The head may still be readable: then only this request fails, not at its deadline.
            id = envelope_id(message)
            future = self._pending.get(id) if id is not None else None
            if future is not None and not future.done():
                future.set_result(error.fresh())
            return
        future = self._pending.get(envelope.id)
        if future is not None and not future.done():  # else: a second reply, or a late one
            future.set_result(envelope)

    def broken(self, problem: str) -> None:
        """Why there is no connection; "": there is one. Hasty requests do not wait for another."""
        self.problem = problem
        for future in self._hasty if problem else ():
            self._expire(future)

    def close(self) -> None:
        """End every pending request with Closed, and refuse new ones."""
        self._closed = True
        self.fail(Closed(f"the link to master {self.address} was closed"))

    def fail(self, error: KvpoolError) -> None:
        """End every pending request with this error."""
        for future in self._pending.values():
            if not future.done():
                future.set_result(error)

    def _expire(self, future: asyncio.Future[Envelope | KvpoolError]) -> None:
        if not future.done():
            why = f": {self.problem}" if self.problem else " in time"
            late = f"master {self.address} did not answer{why}"
            future.set_result(DeadlineExceeded(late))


def answer(handler: Handler, cluster: int, message: bytes, caller: Caller) -> bytes | None:
    """The reply to one request; None for a message too short to have an id.

    An error of the handler becomes an `Error` message. It never raises: a bug in one handler must
    not end the master.
    """
    id = envelope_id(message)
    if id is None:
        return None
    try:
        envelope = decode_envelope(message, cluster)
        type, body = handler(envelope.type, envelope.body, caller)
        return encode_envelope(type, cluster, id, body)
    except Exception as error:
        # A bug: only this request fails.
        if not isinstance(error, KvpoolError) or isinstance(error, InvariantViolated):
            log.exception("a request failed")
        type, body = encode(refusal(error))
        return encode_envelope(type, cluster, id, body)
