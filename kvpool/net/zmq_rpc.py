"""Requests and replies over zmq: one ROUTER at the master, one DEALER at each caller.

The sockets are driven straight from the loop (`add_reader` on zmq's descriptor) and not through
zmq.asyncio, which adds futures and a scheduling step to each message. That descriptor is
edge-triggered: after every send the socket must be looked at again, or an answer that arrived
meanwhile is never seen.
zmq reconnects by itself; what it cannot deliver ends with the caller's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from kvpool import logs
from kvpool.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    KvpoolError,
    Overloaded,
    PeerError,
)
from kvpool.protocols import Handler, Link, Listener
from kvpool.types import Cluster
from kvpool.wire import auth
from kvpool.wire.frames import (
    BODY_SIZE_MAX,
    HEADER_SIZE,
    cluster_id,
    decode_envelope,
    encode_envelope,
    envelope_id,
)
from kvpool.wire.messages import Error, encode

log = logs.get("kvpool.link")

#: Requests one caller may have in flight to one master.
PENDING_MAX = 4096
#: A link that has been asked and not heard of for so long is dialled again.
_DEAF_S = 2.0
#: For a master's greeting, when it does not answer.
_GREETING_S = 0.3
_GREETING_SIZE = 64
#: Messages taken from a socket before the loop gets to do something else.
_BURST = 64
#: As plain numbers: each operation on zmq's enums costs microseconds, some for every message.
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
_POLLIN, _NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ZmqNetwork:
    """The control plane in production. One zmq context, closed with the network."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        cluster = cluster or Cluster()
        self._cluster = cluster_id(cluster.name)
        self._keys = _keys(cluster) if cluster.secret else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pid = os.getpid()
        self._links: list[_ZmqLink] = []
        self._listeners: list[_ZmqListener] = []

    @property
    def authenticated(self) -> bool:
        return self._keys is not None

    def connect(self, address: str) -> Link:
        """A link to the master at `host:port`."""
        if os.getpid() != self._pid:
            raise Closed("the pool was opened before a fork: open another one in the child")
        link = _ZmqLink(self._context, address, self._cluster, self._keys)
        self._links.append(link)
        return link

    async def serve(self, address: str, handler: Handler) -> Listener:
        """Answer at `host:port`; port 0 takes a free one. Raises ConfigError when it is taken."""
        socket = self._context.socket(zmq.ROUTER)
        _bound(socket)
        if self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys
        try:
            socket.bind(endpoint(address))
        except ConfigError:
            socket.close(0)
            raise
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(
                f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}; "
                "choose another with --bind"
            ) from None
        listener = _ZmqListener(socket, handler, self._cluster)
        self._listeners.append(listener)
        return listener

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        # First those: a descriptor that is closed while the loop still watches it makes the loop
        # deaf to whatever gets its number next.
        for link in self._links:
            link.close()
        for listener in self._listeners:
            listener.stop()
        self._context.destroy(linger=0)


class _Keys(NamedTuple):
    """The masters' CURVE keys. Who has the public one knows the secret: it is never sent."""

    public: bytes
    secret: bytes


def _keys(cluster: Cluster) -> _Keys:
    secret = z85.encode(auth.master_key(cluster))
    return _Keys(zmq.curve_public(secret), secret)


def endpoint(address: str) -> str:
    """`host:port` as zmq writes it. Raises ConfigError when it is neither that nor an endpoint."""
    if "://" not in address:
        address = f"tcp://{address}"
    try:
        parts = urlsplit(address)
        valid = parts.scheme == "ipc" or (parts.hostname and parts.port is not None)
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"address {address!r}: expected host:port, such as 127.0.0.1:7450")
    return address


async def why_silent(masters: Iterable[str], cluster: Cluster) -> str:
    """What a master's greeting says about why it does not answer us, as the end of a sentence.

    CURVE drops a peer that has another secret without a word; the first 64 bytes of ZMTP, which
    both sides send unasked, at least say whether the other one has any.
    """
    hints = []
    for master in masters:
        mechanism = await _mechanism(master)
        if mechanism == b"CURVE" and not cluster.secret:
            hints.append(f"{master} asks for a secret: give it (setting secret_file)")
        elif mechanism == b"CURVE":
            hints.append(f"{master} has a secret: is it the same, and the cluster's name, too?")
        elif mechanism == b"NULL" and cluster.secret:
            hints.append(f"{master} has no secret, and this side has one")
    return "".join(f"; {hint}" for hint in hints)


async def _mechanism(address: str) -> bytes | None:
    """NULL, CURVE, or None where nobody speaks ZMTP."""
    parts = urlsplit(endpoint(address))
    # Signature and version only: with a mechanism that is not its own it would hang up at once.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_GREETING_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(greeting)
            theirs = await reader.readexactly(_GREETING_SIZE)
    except (OSError, TimeoutError, EOFError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
    return theirs[12:32].rstrip(b"\0") if theirs[:1] == b"\xff" else None


def _bound(socket: zmq.Socket[bytes]) -> None:
    """Limits on everything a peer can make us hold."""
    socket.setsockopt(zmq.MAXMSGSIZE, BODY_SIZE_MAX + HEADER_SIZE)
    socket.setsockopt(zmq.SNDHWM, PENDING_MAX)
    socket.setsockopt(zmq.RCVHWM, PENDING_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    # A peer that vanished without FIN (frozen, cable cut) is noticed and redialled.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)


class _Socket:
    """A zmq socket on the running loop: calls `receive` for each message."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self.closed = False
        self._drain_planned = False

    def _drain(self) -> None:
        self._drain_planned = False
        for _ in range(_BURST):
            # Asking first is cheaper than the exception that an empty queue raises.
            if self.closed or not int(self._socket.get(_EVENTS)) & _POLLIN:
                return
            parts = [self._socket.recv(_NOBLOCK)]
            while self._socket.get(_RCVMORE):
                parts.append(self._socket.recv(_NOBLOCK))
            self._receive(parts)
        self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._drain_planned and not self.closed:
            self._drain_planned = True
            self._loop.call_soon(self._drain)

    def send(self, parts: list[bytes]) -> bool:
        """Hand over one message; False when the peer's queue is full or it is gone."""
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._drain_soon()  # the edge may have been eaten by the send
        return True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(ValueError, OSError, RuntimeError):
                self._loop.remove_reader(self._fd)
            self._socket.close(0)


class Requests:
    """Requests to one master that wait for their answers: ids, deadlines, who waits for what.

    Knows nothing of sockets: whoever owns one sends what `ask` hands it, and passes on what comes.
    """

    def __init__(self, address: str, cluster: int) -> None:
        self._address = address
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._next_id = 0
        self._pending: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, id: int) -> bool:
        return id in self._pending

    async def ask(
        self, type: int, body: bytes, send: Callable[[int, bytes], None], deadline: float
    ) -> tuple[int, bytes]:
        """Send one request, as (id, message), and wait for its answer."""
        if self._closed:
            raise Closed(f"the link to master {self._address} is closed")
        if len(self._pending) >= PENDING_MAX:
            raise Overloaded(f"{PENDING_MAX} requests are pending at master {self._address}")
        id = self._next_id = self._next_id + 1
        future: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()
        self._pending[id] = future
        timer = self._loop.call_at(deadline, self._expire, future)
        try:
            send(id, encode_envelope(type, self._cluster, id, body))
            return await future
        finally:
            timer.cancel()
            del self._pending[id]

    def answered(self, message: bytes) -> None:
        """A message has come; one that nobody waits for (any more) is ignored."""
        try:
            envelope = decode_envelope(message, self._cluster)
        except PeerError as error:
            id = envelope_id(message)
            future = self._pending.get(id) if id is not None else None
            if future is not None and not future.done():
                future.set_exception(error)
            return
        future = self._pending.get(envelope.id)
        if future is not None and not future.done():  # else: answered twice, or given up on
            future.set_result((envelope.type, envelope.body))

    def close(self) -> None:
        self._closed = True
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Closed(f"the link to master {self._address} was closed"))

    def _expire(self, future: asyncio.Future[tuple[int, bytes]]) -> None:
        if not future.done():
            future.set_exception(DeadlineExceeded(f"master {self._address} did not answer in time"))


def answer(handler: Handler, cluster: int, message: bytes) -> bytes | None:
    """What goes back for one request; None for a message too short to be answered."""
    id = envelope_id(message)
    if id is None:
        return None
    try:
        envelope = decode_envelope(message, cluster)
        type, body = handler(envelope.type, envelope.body)
        return encode_envelope(type, cluster, id, body)
    except Exception as error:
        if not isinstance(error, KvpoolError):  # a bug: it costs this peer its answer only
            log.exception("a request failed")
        type, body = encode(Error(error.__class__.__name__, str(error)[:2048]))
        return encode_envelope(type, cluster, id, body)


class _ZmqLink:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        cluster: int,
        keys: _Keys | None,
    ) -> None:
        self._context = context
        self._address = address
        self._keys = keys
        self._requests = Requests(address, cluster)
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._unanswered_since: float | None = None
        self._socket = self._dial()

    def _dial(self) -> _Socket:
        address, socket = self._address, self._context.socket(zmq.DEALER)
        _bound(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # Queue for living connections only: a request for a dead master must not reach its
        # successor seconds after the caller gave up.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.public
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        try:
            socket.connect(endpoint(address))
        except ConfigError:
            socket.close(0)
            raise
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(f"address {address!r}: {zmq.strerror(error.errno or 0)}") from None
        return _Socket(socket, self._answered)

    def __repr__(self) -> str:
        return f"<Link {self._address} pending={len(self._requests)}>"

    @property
    def address(self) -> str:
        return self._address

    async def request(self, type: int, body: bytes, *, deadline: float) -> tuple[int, bytes]:
        if self._unanswered_since is None:
            self._unanswered_since = self._loop.time()
        try:
            return await self._requests.ask(type, body, self._send, deadline)
        except DeadlineExceeded:
            self._dial_again()
            raise

    def _answered(self, parts: list[bytes]) -> None:
        self._unanswered_since = None
        self._requests.answered(parts[-1])

    def _dial_again(self) -> None:
        """Begin anew when nothing has been heard for long.

        After one handshake that makes no sense to it zmq never connects again (libzmq's
        `protocol_error`), and does not say so: the address may have been somebody else's.
        """
        now = self._loop.time()
        since = self._unanswered_since
        if since is not None and now - since >= _DEAF_S and not self._socket.closed:
            self._socket.close()
            self._socket = self._dial()
            self._unanswered_since = now

    def close(self) -> None:
        self._socket.close()
        if self._retry is not None:
            self._retry.cancel()
        self._unsent.clear()
        self._requests.close()

    def _send(self, id: int, message: bytes) -> None:
        if self._unsent or not self._socket.send([message]):
            self._unsent.append((id, message))
            self._retry_soon()

    def _retry_soon(self) -> None:
        if self._retry is None and not self._socket.closed:
            self._retry = self._loop.call_later(0.005, self._send_unsent)

    def _send_unsent(self) -> None:
        self._retry = None
        while self._unsent:
            id, message = self._unsent[0]
            if id in self._requests and not self._socket.send([message]):
                self._retry_soon()
                return
            self._unsent.popleft()


class _ZmqListener:
    def __init__(self, socket: zmq.Socket[bytes], handler: Handler, cluster: int) -> None:
        self._handler = handler
        self._cluster = cluster
        self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._socket = _Socket(socket, self._receive)

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        self._socket.close()

    def _receive(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            return  # no request of ours; a peer that sends such things gets no answer
        identity, message = parts
        reply = answer(self._handler, self._cluster, message)
        if reply is not None:
            # A full queue means that this peer does not read; its answer is dropped, and its
            # deadline tells it so. Nobody else waits.
            self._socket.send([identity, reply])
