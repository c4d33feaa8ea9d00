"""Requests and replies over zmq: one ROUTER at the master, one DEALER at each caller.

A caller that asks often gets a stream beside it, on which its requests travel from then on
(`kvpool.net.control_stream`); whatever happens to that, zmq is there.

The sockets are driven straight from the loop (`add_reader` on zmq's descriptor) and not through
zmq.asyncio, which adds futures and a scheduling step to each message. That descriptor is
edge-triggered: after every send the socket must be checked again, or a reply that arrived during
the send is never received. zmq reconnects by itself; a request that it cannot deliver ends at the
caller's deadline. (design: control-plane)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvpool import logs
from kvpool.addresses import numeric
from kvpool.audit import LOG_EVERY_S, AuditLog
from kvpool.backoff import Backoff
from kvpool.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    KvpoolError,
    Unauthenticated,
    Unavailable,
)
from kvpool.net.control_stream import (
    OFFER_S,
    CallerStream,
    MasterStreams,
    can_seal,
    open_stream,
)
from kvpool.net.requests import PENDING_MAX, PendingRequests, answer
from kvpool.net.zmq_address import answers_on_ipv6, bind, endpoint, host_of, is_ipv6, is_named
from kvpool.protocols import Caller, Handler, Link, Listener
from kvpool.tenants import TenantKeys
from kvpool.types import Cluster
from kvpool.wire import auth
from kvpool.wire.frames import (
    BODY_SIZE_MAX,
    HEADER_SIZE,
    cluster_id,
)
from kvpool.wire.messages import TYPES, AskStream, StreamOffer, decode, decode_answer, encode

log = logs.get("kvpool.link")

#: A link opens a new socket when its requests have had no reply for so long.
RECONNECT_AFTER_S = 2.0
#: Messages that are taken from a socket before the loop does something else, and the time after
#: which no other one is: a piece of an inventory takes a master up to a millisecond.
_BURST = 64
_BURST_S = 0.002
#: New connections that the kernel keeps until zmq accepts them (at most `somaxconn`). Beyond it an
#: attempt is dropped, and its kernel tries again after a second.
_BACKLOG = 1024
#: As plain numbers: each operation on zmq's enums costs microseconds, some for every message.
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
_POLLIN, _NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

#: Replies after which a link asks its master for a stream. A command that asks twice needs none.
STREAM_AFTER = 8
#: Seconds after which it asks again when there was none, or it has ended: the first time, and at
#: most. A stream that has lived longer than that is a new beginning.
_ASK_AGAIN_S, _ASK_AGAIN_MAX_S = 1.0, 60.0
#: A master's setting for its port of streams: there is none.
NO_STREAMS = -1
_ASK_STREAM = TYPES[AskStream]

#: Where libzmq asks who may connect (ZeroMQ RFC 27, ZAP), and for which sockets.
_GATE_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvpool"


class ZmqNetwork:
    """The control plane in production. One zmq context, closed with the network."""

    def __init__(
        self,
        cluster: Cluster | None = None,
        tenants: TenantKeys | None = None,
        *,
        stream_port: int = 0,
    ) -> None:
        """With `tenants`, callers are asked for a key of their own: of the cluster or a tenant.

        `stream_port` is where `serve` offers streams: 0 takes a free port, NO_STREAMS offers none.
        """
        cluster = cluster or Cluster()
        self._cluster = cluster_id(cluster.name)
        self._tenant = cluster.tenant
        self._keys = curve_keys(cluster) if cluster.secret else None
        self._callers = None
        if tenants is not None:
            if self._keys is None or self._keys.masters_secret is None:
                raise ConfigError("tenants need a cluster with a secret (setting secret_file)")
            self._callers = KnownCallers(self._keys.public, tenants)
        self._stream_port = stream_port
        self._gate: Gate | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pid = os.getpid()
        self._links: list[_ZmqLink] = []
        self._listeners: list[_ZmqListener] = []

    @property
    def authenticated(self) -> bool:
        return self._keys is not None

    @property
    def streams(self) -> int:
        """As `CountsConnections`."""
        return sum(len(listener.streams) for listener in self._listeners)

    @property
    def refused_connections(self) -> int:
        """As `CountsConnections`. Of zmq's only with tenants: else libzmq drops who has no key."""
        at_gate = self._gate.refused if self._gate is not None else 0
        return at_gate + sum(listener.streams.refused for listener in self._listeners)

    def connect(self, address: str) -> Link:
        """A link to the master at `host:port`."""
        if os.getpid() != self._pid:
            raise Closed("the pool was opened before a fork: open another one in the child")
        link = _ZmqLink(self._context, address, self._cluster, self._keys)
        self._links.append(link)
        return link

    async def serve(self, address: str, handler: Handler) -> Listener:
        """Answer at `host:port`; port 0 takes a free one. Raises ConfigError when it is taken."""
        where = endpoint(address)
        if self._tenant:
            raise ConfigError(
                f"a tenant's key makes no master: give the cluster's secret, not the key of tenant "
                f"{self._tenant!r} (setting secret_file)"
            )
        if self._callers is not None and self._gate is None:
            # Before the first socket that needs it: without it, libzmq would admit everybody who
            # knows the masters' public key.
            self._gate = Gate(self._context, self._callers)
        socket = new_socket(self._context, zmq.ROUTER)
        _limit(socket)
        if self._keys is not None:
            assert self._keys.masters_secret is not None
            socket.curve_server = True
            socket.curve_secretkey = self._keys.masters_secret
            socket.curve_publickey = self._keys.masters_public
        if self._callers is not None:
            socket.zap_domain = ZAP_DOMAIN
        try:
            bind(socket, where)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(
                f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}; "
                "choose another with --bind"
            ) from None
        listener = _ZmqListener(
            socket, handler, self._cluster, self._callers, sealed=self._keys is not None
        )
        self._listeners.append(listener)
        host = host_of(listener.address)  # as zmq understood it; an ipc: none
        if host and self._stream_port != NO_STREAMS:
            try:
                await listener.streams.listen(host, self._stream_port)
            except BaseException:
                await listener.close()
                raise
        return listener

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        # Links and listeners first: if a descriptor is closed while the loop still watches it, the
        # loop misses the events of the next socket that gets the same number.
        for link in self._links:
            link.close()
        for listener in self._listeners:
            listener.stop()
        if self._gate is not None and self._callers is not None:
            self._gate.close()
            self._callers.close()
        self._context.destroy(linger=0)

    async def wait_closed(self) -> None:
        """As `Network.wait_closed`."""
        for link in self._links:
            await link.wait_closed()


async def stream_problem(cluster: Cluster, address: str) -> str:
    """Why callers in this process get no stream from the master; empty if they do."""
    if cluster.secret and not can_seal():
        return "this process lacks the package cryptography: pip install 'kvpool[encryption]'"
    network = ZmqNetwork(cluster)
    link = _ZmqLink(network._context, address, network._cluster, network._keys)
    try:
        (await link.ask_stream()).abort()
    except KvpoolError as error:
        return str(error)
    finally:
        link.close()
        network.close()
    return ""


class CurveKeys(NamedTuple):
    """Keys for CURVE, in Z85: those of the masters as far as this process may know them, and its
    own (`public`, `secret`) as a caller.

    In a cluster without tenants the masters' public key is never sent, so a peer that has it knows
    the secret (design: authentication). A tenant's client has it, and no `masters_secret`.
    """

    masters_public: bytes
    masters_secret: bytes | None
    public: bytes
    secret: bytes


def curve_keys(cluster: Cluster) -> CurveKeys:
    """The keys that are made from a cluster's secret, or a tenant's."""
    own = z85.encode(auth.client_key(cluster))
    if cluster.tenant:
        return CurveKeys(cluster.masters_key, None, zmq.curve_public(own), own)
    masters = z85.encode(auth.master_key(cluster))
    return CurveKeys(zmq.curve_public(masters), masters, zmq.curve_public(own), own)


def _limit(socket: zmq.Socket[bytes]) -> None:
    """Set a limit on everything that a peer can make this process store."""
    socket.setsockopt(zmq.MAXMSGSIZE, BODY_SIZE_MAX + HEADER_SIZE)
    socket.setsockopt(zmq.SNDHWM, PENDING_MAX)
    socket.setsockopt(zmq.RCVHWM, PENDING_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    # Detects a peer that disappeared without FIN (frozen, cable cut), and reconnects.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Raises Unavailable when this process can open none."""
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        why = zmq.strerror(error.errno or 0)
        raise Unavailable(f"cannot open a socket: {why}; see `ulimit -n`") from None


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    keys: CurveKeys | None,
    *,
    ipv6: bool = False,
) -> zmq.Socket[bytes]:
    """A caller's socket to the master at `address`, which connects and reconnects by itself; to a
    name over IPv4, or over `ipv6`.

    Raises ConfigError for an address that is not valid, Unavailable when this process can open no
    socket.
    """
    where = endpoint(address)
    socket = new_socket(context, zmq.DEALER)
    _limit(socket)
    socket.setsockopt(zmq.IPV6, ipv6 or is_ipv6(where))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # Queue for established connections only: a request to a master that ended must not reach
    # the next master at that address, seconds after the caller's deadline.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    if keys is not None:
        socket.curve_serverkey = keys.masters_public
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    try:
        socket.connect(where)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"address {address!r}: {zmq.strerror(error.errno or 0)}") from None
    return socket


class _Socket:
    """A zmq socket on the running loop: calls `receive` for each message, and with `with_caller`
    passes its first frame, too, which knows who sent it."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[list[bytes], zmq.Frame | None], None],
        *,
        with_caller: bool = False,
    ) -> None:
        self._socket = socket
        self._receive = receive
        self._with_caller = with_caller
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._readable)
        self.closed = False
        self._drain_planned = False

    def _readable(self) -> None:
        if not self._drain_planned:  # else it is done in this turn anyway: not twice in one
            self._drain()

    def _drain(self) -> None:
        self._drain_planned = True  # replies that are sent meanwhile plan no other one
        more = True  # also after an error: no other edge tells of the messages behind that one
        try:
            more = self._take_messages()
        finally:
            self._drain_planned = False
            if more:
                self._drain_soon()

    def _take_messages(self) -> bool:
        """Receive a burst of messages; True if there may be more."""
        until = self._loop.time() + _BURST_S
        for _ in range(_BURST):
            # The check is cheaper than the exception that an empty queue raises.
            if self.closed or not int(self._socket.get(_EVENTS)) & _POLLIN:
                return False
            frame = None
            if self._with_caller:
                # Only a frame has the peer's address. It costs 1.5 µs more than plain bytes.
                frame = self._socket.recv(_NOBLOCK, copy=False)
                parts = [frame.bytes]
            else:
                parts = [self._socket.recv(_NOBLOCK)]
            while self._socket.get(_RCVMORE):
                parts.append(self._socket.recv(_NOBLOCK))
            self._receive(parts, frame)
            if self._loop.time() > until:
                break
        return True

    def _drain_soon(self) -> None:
        if not self._drain_planned and not self.closed:
            self._drain_planned = True
            self._loop.call_soon(self._drain)

    def send(self, parts: list[bytes]) -> bool:
        """Queue one message; False when the peer's queue is full or the peer is gone."""
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._drain_soon()  # the send may have consumed the edge of a message that arrived
        return True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(ValueError, OSError, RuntimeError):
                self._loop.remove_reader(self._fd)
            self._socket.close(0)


class _ZmqLink:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        cluster: int,
        keys: CurveKeys | None,
    ) -> None:
        self._context = context
        self._address = address
        self._keys = keys
        self._requests = PendingRequests(address, cluster)
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._unanswered_since: float | None = None
        self._ipv6 = False
        self._socket = self._open_socket()
        self._choosing: asyncio.Task[None] | None = None
        self._choose_family()
        # Opened after STREAM_AFTER replies, if this process can have one.
        self._stream: CallerStream | None = None
        self._connected: set[CallerStream] = set()
        self._before_stream = 0  # the last request that went by zmq
        self._opening: asyncio.Task[None] | None = None
        self._may_open = keys is None or can_seal()
        self._replies = 0  # since the last stream, by zmq
        self._opened_at = 0.0
        self._ask_at = 0.0
        self._ask_again = Backoff(_ASK_AGAIN_S, _ASK_AGAIN_MAX_S)

    def _open_socket(self) -> _Socket:
        dealer = open_dealer(self._context, self._address, self._keys, ipv6=self._ipv6)
        return _Socket(dealer, self._on_message)

    def _choose_family(self) -> None:
        """Where the master is a name: begin to ask it, unless that is under way."""
        if is_named(endpoint(self._address)) and (self._choosing is None or self._choosing.done()):
            self._choosing = self._loop.create_task(
                self._use_family_that_answers(), name=f"family of master {self._address}"
            )

    async def _use_family_that_answers(self) -> None:
        ipv6 = await answers_on_ipv6(self._address)
        if ipv6 is not self._ipv6 and not self._socket.closed:
            self._ipv6 = ipv6
            self._open_anew()

    def __repr__(self) -> str:
        return f"<Link {self._address} pending={len(self._requests)}>"

    @property
    def address(self) -> str:
        return self._address

    async def request(self, type: int, body: bytes, *, deadline: float) -> tuple[int, bytes]:
        if self._unanswered_since is None:
            self._unanswered_since = self._loop.time()
        try:
            return await self._requests.send(type, body, self._send, deadline)
        except DeadlineExceeded:
            self._reconnect()
            raise

    def _on_message(self, parts: list[bytes], _: zmq.Frame | None) -> None:
        self._on_reply(parts[-1])
        self._replies += 1
        if self._replies >= STREAM_AFTER and self._may_open and self._stream is None:
            now = self._loop.time()
            if self._opening is None and now >= self._ask_at and not self._socket.closed:
                self._opening = self._loop.create_task(
                    self._open_stream(), name=f"stream to master {self._address}"
                )

    def _on_reply(self, message: bytes) -> None:
        self._unanswered_since = None
        self._requests.on_reply(message)

    async def ask_stream(self) -> CallerStream:
        """A stream from the master, which nobody uses yet. Raises KvpoolError."""
        type, body = encode(AskStream())
        deadline = self._loop.time() + OFFER_S
        reply = await self._requests.send(type, body, self._send_by_zmq, deadline)
        offer = decode_answer(StreamOffer, *reply)
        return await open_stream(
            self._address, offer, self._on_reply, self._on_stream_end, self._connected
        )

    async def _open_stream(self) -> None:
        try:
            stream = await self.ask_stream()
        except Exception as error:  # whatever it is, nobody waits for it, and zmq goes on
            self._ask_at = self._loop.time() + self._ask_again.next_delay()
            report = log.debug if isinstance(error, KvpoolError) else log.exception
            report("requests to a master stay with zmq", master=self._address, why=str(error))
        else:
            self._before_stream, self._stream = self._requests.last_id, stream
            self._opened_at = self._loop.time()
        finally:
            self._opening = None

    def _on_stream_end(self) -> None:
        """Zmq carries on, also with what was asked on the stream: a master may get that twice."""
        if self._stream is not None:
            self._drop_stream()
            for id, message in self._requests.unanswered(self._before_stream):
                self._send_by_zmq(id, message)

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.abort()
            self._stream = None
            self._replies = 0
            now = self._loop.time()
            if now - self._opened_at >= _ASK_AGAIN_MAX_S:
                self._ask_again.reset()
            self._ask_at = now + self._ask_again.next_delay()

    def _reconnect(self) -> None:
        """Open a new socket when no reply has come for RECONNECT_AFTER_S.

        After one invalid handshake (libzmq's `protocol_error`) zmq never connects again, and
        reports nothing. It happens when another program has had the master's address for a while.
        """
        now = self._loop.time()
        since = self._unanswered_since
        if since is not None and now - since >= RECONNECT_AFTER_S and not self._socket.closed:
            self._unanswered_since = now
            if self._open_anew():
                self._drop_stream()
                self._choose_family()

    def _open_anew(self) -> bool:
        """Replace the socket. Where this process can open none, the old one stays."""
        try:
            fresh = self._open_socket()
        except Unavailable as error:
            log.warning("cannot connect anew", master=self._address, why=str(error))
            return False
        self._socket.close()
        self._socket = fresh
        return True

    def close(self) -> None:
        self._socket.close()
        for task in (self._opening, self._choosing):
            if task is not None:
                task.cancel()
        self._drop_stream()
        if self._retry is not None:
            self._retry.cancel()
        self._unsent.clear()
        self._requests.close()

    async def wait_closed(self) -> None:
        for task in (self._opening, self._choosing):
            if task is not None:
                await asyncio.wait([task])
        for stream in list(self._connected):
            await stream.disconnected

    def _send(self, id: int, message: bytes) -> None:
        if self._stream is not None:
            self._stream.send(message)
        else:
            self._send_by_zmq(id, message)

    def _send_by_zmq(self, id: int, message: bytes) -> None:
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
    def __init__(
        self,
        socket: zmq.Socket[bytes],
        handler: Handler,
        cluster: int,
        callers: KnownCallers | None,
        *,
        sealed: bool,
    ) -> None:
        self._handler = handler
        self._cluster = cluster
        self._callers = callers
        self.streams = MasterStreams(self._answer, sealed=sealed)
        self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._socket = _Socket(socket, self._receive, with_caller=True)

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        self._socket.close()
        self.streams.stop()

    def _receive(self, parts: list[bytes], frame: zmq.Frame | None) -> None:
        if len(parts) != 2:
            return  # not a request of this protocol: no reply
        identity, message = parts
        key = _property(frame, "User-Id") if self._callers is not None else ""
        reply = self._answer(message, Caller(_peer_address(frame), key=key))
        if reply is not None:
            # A full queue means that this peer does not read. Its reply is dropped and its request
            # ends at its deadline; other peers do not wait.
            self._socket.send([identity, reply])

    def _answer(self, message: bytes, caller: Caller) -> bytes | None:
        handler = self._handle
        if self._callers is not None:
            # Looked up for each message: a connection outlives the secret that opened it.
            tenant = self._callers.tenant_of_user(caller.key)
            if tenant is None:
                handler = _revoked
                self._callers.refused(caller.address, "any", "its secret is not valid any more")
            caller = caller._replace(tenant=tenant or "")
        return answer(handler, self._cluster, message, caller)

    def _handle(self, type: int, body: bytes, caller: Caller) -> tuple[int, bytes]:
        if type == _ASK_STREAM:
            decode(AskStream, type, body)
            return encode(self.streams.offer(caller))
        return self._handler(type, body, caller)


def _property(frame: zmq.Frame | None, name: str) -> str:
    """What zmq knows of the peer that sent a frame; empty if it does not know that."""
    with contextlib.suppress(zmq.ZMQError):  # an ipc peer has no address
        return str(frame.get(name)) if frame is not None else ""
    return ""


def _peer_address(frame: zmq.Frame | None) -> str:
    """One name for one host: who comes over IPv4 to `[::]` is shown as IPv6."""
    shown = _property(frame, "Peer-Address")
    return str(numeric(shown) or shown)


def _revoked(type: int, body: bytes, caller: Caller) -> tuple[int, bytes]:
    """The handler for those whose secret is good no more."""
    raise Unauthenticated("the secret of this connection is not valid any more")


class KnownCallers:
    """Whose key for CURVE is whose: servers, operators and masters have one, made from the
    cluster's secret; the clients of a tenant have that of their tenant.

    What libzmq keeps of a connection and shows with each message, the User-Id, is that key, so a
    key that is revoked is good for nothing from then on.
    """

    def __init__(self, ours: bytes, tenants: TenantKeys) -> None:
        self._ours = ours
        self._tenants = tenants
        self._audit = AuditLog()
        self._flush: asyncio.TimerHandle | None = None

    def tenant_of_user(self, user: str) -> str | None:
        """The tenant; empty for the cluster's own; None: nobody who may say anything."""
        key = user.encode()
        return "" if key == self._ours else self._tenants.tenant_of_key(key)

    def refused(self, address: str, request: str, why: str) -> None:
        """Record that a key is not good, or not any more."""
        loop = asyncio.get_running_loop()
        now, who = loop.time(), {"tenant": "unknown", "client": "", "address": address}
        self._audit.refused(now, **who, request=request, why=why)
        if self._flush is None:
            self._flush = loop.call_later(LOG_EVERY_S, self._write_rest)

    def close(self) -> None:
        if self._flush is not None:
            self._flush.cancel()

    def _write_rest(self) -> None:
        loop, self._flush = asyncio.get_running_loop(), None
        self._audit.flush(loop.time())
        if len(self._audit):
            self._flush = loop.call_later(LOG_EVERY_S, self._write_rest)


class Gate:
    """Answers libzmq, for each new connection, whether its key is known (ZAP, on this loop)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], callers: KnownCallers) -> None:
        self._callers = callers
        self.refused = 0
        socket = new_socket(context, zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_GATE_ADDRESS)
        self._socket = _Socket(socket, self._receive)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, parts: list[bytes], _: zmq.Frame | None) -> None:
        if len(parts) < 8:
            return  # not of libzmq
        identity, _empty, version, request, _domain, address, _routing, mechanism = parts[:8]
        credentials = parts[8:]
        user = b""
        if version == b"1.0" and mechanism == b"CURVE" and len(credentials) == 1:
            user = z85.encode(credentials[0])
        admitted = bool(user) and self._callers.tenant_of_user(user.decode()) is not None
        if not admitted:
            self.refused += 1
            why = "its key is made from no secret that is valid here"
            self._callers.refused(address.decode("ascii", "replace"), "connect", why)
        status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        answer = [version, request, status, text, user if admitted else b"", b""]
        self._socket.send([identity, b"", *answer])
