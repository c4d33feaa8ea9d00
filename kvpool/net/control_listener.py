"""The master's ends of all its connections: who may have one, and whose turn it is.

What strangers can take is bounded (design: bounds): connections, their bytes and time, and, because
a handshake of TLS costs a hundred times what a question does, half of the processor's time.
(design: control-plane)
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from kvpool import errors, logs
from kvpool.addresses import join, listening_socket, network_of, numeric
from kvpool.errors import ConfigError, KvpoolError, Overloaded, PeerError, Unauthenticated
from kvpool.guard import Guard
from kvpool.net.control_session import MasterSession
from kvpool.net.requests import answer, cluster_id
from kvpool.protocols import Caller, Handler
from kvpool.shares import Shares
from kvpool.strangers import Strangers
from kvpool.types import Cluster
from kvpool.wire.messages import refusal

log = logs.get("kvpool.link")

#: For all of a handshake.
HELLO_S: Final = 5.0
#: New connections that the kernel keeps until they are accepted (at most `somaxconn`). Beyond it an
#: attempt is dropped, and its kernel tries again after a second.
_BACKLOG: Final = 1024
#: Connections of one master, at most; and half of the files that it may open.
_CALLERS_MAX: Final = 8192
#: One that was not used for so long gives way to another one, when there are too many.
_IDLE_S: Final = 1.0
#: After so long in one turn of the loop what else has arrived, of all callers, waits for the next.
_TURN_S: Final = 0.002
#: Bytes that each connection may hold here, of requests in parts or in line and of unread replies.
_HELD_FREE: Final = 32 << 10
#: What they hold beyond that, all together. Each caller has its part (`Shares`), and a connection
#: gives some of what it has back within so long, or brings as many bytes more as each may hold.
_HELD_MAX: Final = 128 << 20
_HELD_S: Final = 10.0


class ControlListener:
    """Answers the requests of all callers at one address."""

    def __init__(
        self,
        handler: Handler,
        cluster: Cluster,
        guard: Guard,
        sessions: Callable[[Callable[[str], None]], MasterSession],
    ) -> None:
        """`sessions` makes that of a caller, with its `admit`."""
        self._sessions = sessions
        #: What a stranger makes this master do is much: it is TLS.
        self._costly = bool(cluster.secret)
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self.address = ""
        self._strangers = Strangers(log, "control plane")
        self._arrived: set[_MasterEnd] = set()
        self._callers: dict[_MasterEnd, str] = {}  # and who holds it
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._shares = Shares(min(_CALLERS_MAX, files_max // 2))
        self._held = Shares(_HELD_MAX)
        self.answers = _Answers(handler, cluster, guard.secrets_of, self._report)
        #: Connections that were refused, as they did not prove that they may ask.
        self.refused = 0

    @property
    def callers(self) -> int:
        """Connections of callers that may ask."""
        return len(self._callers)

    async def listen(self, host: str, port: int) -> None:
        """Accept callers at this host and port; 0 is a free one. Raises ConfigError."""
        try:
            listening = listening_socket(host, port, _BACKLOG)
            self._server = await self._loop.create_server(
                lambda: _MasterEnd(self), sock=listening, backlog=_BACKLOG
            )
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"cannot listen on {join(host, port)}: {getattr(error, 'strerror', '') or error}; "
                "choose another with --bind"
            ) from None
        self.address = join(*listening.getsockname()[:2])

    async def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        """End all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for end in list(self._arrived):
            end.abort()

    # --- strangers ----------------------------------------------------------------------------

    def arrived(self, end: _MasterEnd, host: str) -> MasterSession | None:
        """A connection begins; None if it is refused."""
        self._arrived.add(end)
        try:
            self._strangers.check(network_of(host), self._loop.time())
        except Overloaded as error:
            self._refuse(host, error)
            return None
        if self._strangers.arrived(end, network_of(host)):
            self.refused += 1  # the oldest one
        return self._sessions(lambda tenant: self._admit(end, tenant or host))

    def _admit(self, end: _MasterEnd, holder: str) -> None:
        """This end has proved who it is. Raises Overloaded if there is no room for it."""
        while not self._shares.take(holder):
            if not self._end_idle(holder):
                raise Overloaded(
                    f"{self._shares.held(holder)} of {self._shares.total} connections are in use"
                )
        self._strangers.left(end)
        self._callers[end] = holder

    def _end_idle(self, holder: str) -> bool:
        """End the connection that was not used for the longest time, if that is long enough: of
        this one's while there is room for others."""
        full = self._shares.used >= self._shares.total
        ends = [end for end, of in self._callers.items() if full or of == holder]
        oldest = min(ends, key=lambda end: end.used_at, default=None)
        if oldest is None or oldest.used_at > self._loop.time() - _IDLE_S:
            return False
        oldest.abort()
        return True

    def holds(self, end: _MasterEnd, before: int, now: int) -> None:
        """This end holds so many bytes now, beside those that each may. Raises Overloaded."""
        holder = self._callers[end]
        if now <= before:
            self._held.give_back(holder, before - now)
        elif not self._held.take(holder, now - before):
            raise Overloaded(
                f"{holder} makes this master hold {self._held.held(holder) >> 10} KiB of requests "
                "that are not complete or answered, and of replies that are not read"
            )

    def left(self, end: _MasterEnd, host: str, error: KvpoolError | None, held: int) -> None:
        """It has ended; with an error it was ended from here, by what its other end did."""
        self._arrived.discard(end)
        self._strangers.left(end)
        if held:
            self.holds(end, held, 0)
        holder = self._callers.pop(end, None)
        if holder is not None:
            self._shares.give_back(holder)
            if error is not None:
                self._report(host, error)
        elif error is not None:
            self._refuse(host, error)

    def _refuse(self, host: str, error: KvpoolError) -> None:
        self.refused += 1
        self._report(host, error, costly=self._costly and isinstance(error, PeerError))

    def _report(self, host: str, error: KvpoolError, *, costly: bool = False) -> None:
        self._strangers.refused(network_of(host), error, self._loop.time(), costly=costly)


class _Answers:
    """Answers to requests, of each tenant or host in turn, and of that one's callers in turn."""

    def __init__(
        self,
        handler: Handler,
        cluster: Cluster,
        secrets_of: Callable[[str], tuple[bytes, ...]],
        report: Callable[[str, KvpoolError], None],
    ) -> None:
        self._handler = handler
        self._id = cluster_id(cluster.name)
        self._secrets_of = secrets_of
        self._report = report
        self._loop = asyncio.get_running_loop()
        #: Those with requests that wait, by tenant or host: the next one, and its next one, first.
        self._asking: dict[str, deque[_MasterEnd]] = {}

    def asked(self, end: _MasterEnd, holder: str) -> None:
        """This end has requests, and had none before."""
        if not self._asking:
            self._loop.call_soon(self._work)
        self._asking.setdefault(holder, deque()).append(end)

    def _work(self) -> None:
        """Answer for one turn, one request after the other."""
        until = self._loop.time() + _TURN_S
        try:
            while self._asking:
                line = self._asking.pop(holder := next(iter(self._asking)))
                while (end := line.popleft())._transport is None and line:
                    pass  # it has ended, which is no turn
                self._asking |= {holder: line} if line else {}  # the others first
                if end.answer_one(self._answer):
                    self._asking.setdefault(holder, line).append(end)
                if self._loop.time() > until:
                    break
        finally:  # also when one of them has raised something: the others go on
            if self._asking:
                self._loop.call_soon(self._work)

    def _answer(self, message: bytes, caller: Caller, secret: bytes) -> bytes | None:
        # Looked up for each request: a connection outlives the secret that opened it.
        if caller.tenant and secret not in self._secrets_of(caller.tenant):
            self._report(caller.address, PeerError("its secret is not valid any more"))
            return answer(_revoked, self._id, message, caller)
        return answer(self._handler, self._id, message, caller)


def _revoked(type: int, body: bytes, caller: Caller) -> tuple[int, bytes]:
    """The handler for those whose secret is good no more."""
    raise Unauthenticated("the secret of this connection is not valid any more")


class _MasterEnd(asyncio.Protocol):
    """ARRIVED: a handshake, within HELLO_S. ADMITTED: requests. Ended: `abort`."""

    def __init__(self, listener: ControlListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._session: MasterSession | None = None
        self._caller: Caller | None = None
        self._host = ""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._held = self._held_before = 0  # beyond `_HELD_FREE`; and at the last look
        self._asking = False  # it is in line for answers
        self._reading = True
        self._writing = True  # its other end reads replies
        self._late: asyncio.TimerHandle | None = None
        self.used_at = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        peer = transport.get_extra_info("peername")
        shown = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        self._host = str(numeric(shown) or shown)  # one name for one host, also on `[::]`
        _keep_alive(transport)
        self._session = self._listener.arrived(self, self._host)
        if self._session is None:
            self.abort()
            return
        self._late = self._loop.call_later(HELLO_S, self._too_late)
        self._transport.write(self._session.take())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Unauthenticated("it broke its handshake off") if self._unproved else None)

    def abort(self) -> None:
        """End the connection. What was not sent is lost. Idempotent."""
        self._end(None)

    def data_received(self, data: bytes) -> None:
        session = self._session
        if session is None or self._transport is None:
            return
        self.used_at = self._loop.time()
        shaking = self._caller is None and session.shaking
        self._take(lambda: session.feed(data))
        if shaking:
            self._read(False)
            session.shake_later(self._shake)

    def _shake(self, shake: Callable[[], list[bytes]]) -> None:
        if self._session is not None and self._transport is not None:
            self._take(shake)
            self._read(True)

    def answer_one(self, answer: Callable[[bytes, Caller, bytes], bytes | None]) -> bool:
        """Answer the request that waits for the longest time; whether there is another one."""
        session, transport = self._session, self._transport
        self._asking = False
        if session is None or transport is None or self._caller is None or not self._writing:
            return False
        request = self._waiting.popleft()
        self._waiting_bytes -= len(request)
        reply = answer(request, self._caller, session.secret)
        if reply is not None and not transport.is_closing():
            transport.write(session.seal(reply))
        self._weigh()
        self._asking = bool(self._waiting)
        if not self._asking and not self._reading:
            self._read(True)
        return self._asking

    def pause_writing(self) -> None:
        """Replies are not read: what else it asks for waits."""
        self._writing = False

    def resume_writing(self) -> None:
        self._writing = True
        self._weigh()
        self._ask()

    def _ask(self) -> None:
        if self._waiting and not self._asking and self._caller is not None:
            self._asking = True
            self._listener.answers.asked(self, self._caller.tenant or self._host)

    def _weigh(self) -> None:
        """Count what this connection holds. It is ended if that is too much, or for too long."""
        session, transport = self._session, self._transport
        if session is None or transport is None or self._caller is None:
            return
        in_parts, unread = len(session.reader.rest), transport.get_write_buffer_size()
        held = max(0, in_parts + self._waiting_bytes + unread - _HELD_FREE)
        if held == self._held:
            return
        try:
            self._listener.holds(self, self._held, held)
        except Overloaded as error:
            self._end(error)
            return
        less = held < self._held or not self._held
        self._held = held
        if less:
            self._watch()

    def _watch(self) -> None:
        """See to it that what this connection holds moves on."""
        self._cancel_timer()
        self._held_before = self._held
        if self._held:
            self._late = self._loop.call_later(_HELD_S, self._look_again)

    @property
    def _unproved(self) -> bool:
        """A stranger to a cluster with a secret, which it has cost something."""
        session = self._session
        return self._caller is None and session is not None and session.sealed and session.heard

    def _take(self, feed: Callable[[], list[bytes]]) -> None:
        session, transport = self._session, self._transport
        assert session is not None
        assert transport is not None
        try:
            messages = feed()
        except KvpoolError as error:
            if self._caller is None:
                session.refuse(refusal(error))
                transport.write(session.take())
                transport.close()
            self._end(error)
            return
        if self._caller is None:
            transport.write(session.take())
            if session.open:
                self._caller = Caller(self._host, session.tenant)
                self._cancel_timer()
        if messages:
            if self._waiting:
                # So a caller has two pieces of its requests here at most, and one in parts.
                self._read(False)
            self._waiting.extend(messages)
            self._waiting_bytes += sum(map(len, messages))
            self._ask()
        self._weigh()

    def _too_late(self) -> None:
        late = Unauthenticated if self._unproved else errors.DeadlineExceeded  # no wrong proof
        self._end(late(f"its handshake was not complete after {HELLO_S:g} s"))

    def _look_again(self) -> None:
        self._late = None
        self._weigh()  # some replies may have been read, though not enough for `resume_writing`
        if self._late is not None or self._transport is None:
            return
        if self._held < self._held_before + _HELD_FREE:
            what = "a request in parts, or left replies unread,"
            self._end(PeerError(f"it has sent {what} and little has moved in {_HELD_S:g} s"))
            return
        self._watch()

    def _end(self, error: KvpoolError | None) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._cancel_timer()
        self._waiting.clear()
        session, self._session = self._session, None
        if session is not None:
            session.close()
        if not transport.is_closing():
            transport.abort()
        held, self._held = self._held, 0
        self._listener.left(self, self._host, error, held)

    def _cancel_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _read(self, reading: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or reading is self._reading:
            return
        self._reading = reading
        if reading:
            transport.resume_reading()
        else:
            transport.pause_reading()


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Notice a peer that disappeared without an end of its connection, within a minute."""
    connection: Any = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
