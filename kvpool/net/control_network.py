"""The control plane in production: links to masters over TCP, and what masters listen with.

A link connects when it has something to ask, and again when its connection has ended meanwhile: a
master may end those that nobody uses. What was asked on one that has ended is asked on the next, so
a master may get a request twice. (design: control-plane)
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from kvpool import logs
from kvpool.addresses import numeric, split
from kvpool.backoff import Backoff
from kvpool.errors import (
    Closed,
    ConfigError,
    KvpoolError,
    PeerError,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvpool.guard import TenantSecrets, make_guard, of_secrets
from kvpool.net.control_listener import HELLO_S, ControlListener
from kvpool.net.control_session import CallerSession, MasterSession, caller_session
from kvpool.net.requests import PendingRequests, cluster_id
from kvpool.protocols import Handler
from kvpool.types import Cluster

log = logs.get("kvpool.link")

#: Between two attempts to connect: at first, and at most; and after a refusal.
RETRY_S, RETRY_MAX_S, REFUSED_S = 0.05, 1.0, 2.0
#: For a connection that is neither made nor refused, to each address of a name.
_CONNECT_S: Final = 2.0


def master_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `tcp://host:port`. Raises ConfigError."""
    parts = split(address)
    if parts is None or parts[0] not in ("", "tcp"):
        raise ConfigError(
            f"address {address!r}: expected host:port, such as 127.0.0.1:7450 or [::1]:7450"
        )
    return parts[1:]


class TcpNetwork:
    """The control plane of one process."""

    def __init__(
        self, cluster: Cluster | None = None, tenants: TenantSecrets | None = None
    ) -> None:
        """With `tenants`, what it serves has callers that know the cluster's secret or theirs."""
        self._cluster = cluster or Cluster()
        self._tenants = tenants
        if tenants is not None and not self._cluster.secret:
            raise ConfigError("tenants need a cluster with a secret (setting secret_file)")
        self._pid = os.getpid()
        self._links: list[MasterLink] = []
        self._listeners: list[ControlListener] = []

    @property
    def authenticated(self) -> bool:
        return bool(self._cluster.secret)

    def connect(self, address: str) -> MasterLink:
        """A link to the master at `host:port`."""
        if os.getpid() != self._pid:
            raise Closed("the pool was opened before a fork: open another one in the child")
        link = MasterLink(address, self._cluster)
        self._links = [one for one in self._links if one._connected or not one._closed]
        self._links.append(link)
        return link

    async def serve(self, address: str, handler: Handler) -> ControlListener:
        """Answer at `host:port`; port 0 takes a free one. Raises ConfigError when it is
        taken."""
        host, port = master_address(address)
        if self._cluster.tenant:
            raise ConfigError(
                f"a tenant's key makes no master: give the cluster's secret, not the key of tenant "
                f"{self._cluster.tenant!r} (setting secret_file)"
            )
        cluster, tenants, guard = self._cluster, self._tenants, make_guard(self._tenants)
        sessions: Callable[[Callable[[str], None]], MasterSession] = partial(MasterSession, cluster)
        if cluster.secret:
            make = of_secrets("master_sessions")
            sessions = make(cluster, guard.secrets_of, tenants=tenants is not None)
        listener = ControlListener(handler, cluster, guard, sessions)
        await listener.listen(host, port)
        self._listeners.append(listener)
        return listener

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        for link in self._links:
            link.close()
        for listener in self._listeners:
            listener.stop()

    async def wait_closed(self) -> None:
        """As `Network.wait_closed`."""
        for link in self._links:
            await link.wait_closed()


class MasterLink(PendingRequests):
    """As `Link`, over TCP."""

    def __init__(self, address: str, cluster: Cluster) -> None:
        super().__init__(address, cluster_id(cluster.name))
        self._host, self._port = master_address(address)
        self._caller = cluster
        self._end: _CallerEnd | None = None
        self._connected: set[_CallerEnd] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._retry = Backoff(RETRY_S, RETRY_MAX_S, rng=random.Random())
        self._retry_at = 0.0

    def close(self) -> None:
        super().close()
        if self._connecting is not None:
            self._connecting.cancel()
        for end in list(self._connected):
            end.abort()

    async def wait_closed(self) -> None:
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        for end in list(self._connected):
            await end.disconnected

    def _transmit(self, message: bytes) -> None:
        if self._end is not None:
            self._end.send(message)
        else:
            self._connect()  # and then all that waits is sent

    def _reconnect(self) -> None:
        self._connect()  # the connection of now stays until there is another one

    def _next_delay(self) -> float:
        """Longer after each failure since the last reply."""
        if self.heard:
            self.heard = False
            self._retry.reset()
        return self._retry.next_delay()

    def _on_end(self, end: _CallerEnd) -> None:
        if self._end is end:
            self._end = None
            # The first time at once: a master ends connections that nobody uses.
            again = self._retry.failures > 0 and not self.heard
            self._retry_at = self._loop.time() + self._next_delay() * again
            if self.pending:
                self._connect()

    def _connect(self) -> None:
        """Begin to connect, unless that is under way."""
        if not self._closed and (self._connecting is None or self._connecting.done()):
            self._connecting = self._loop.create_task(
                self._connect_patiently(), name=f"link to master {self.address}"
            )

    async def _connect_patiently(self) -> None:
        """Try until there is a connection, or nobody waits for one."""
        while True:
            await asyncio.sleep(max(0.0, self._retry_at - self._loop.time()))
            if not self.pending and self._end is None:
                return
            try:
                end = await self.open()
            except Exception as error:  # whatever it is: those who wait are told, and wait on
                self._failed(error)
                if self._end is not None:
                    return
                continue
            before, self._end = self._end, end
            if before is not None:
                before.abort()
            self.silent_since = self._loop.time() if self.pending else None
            self.broken("")
            for message in self.unanswered():
                end.send(message)
            return

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, KvpoolError):
            log.exception("a connection to a master failed", master=self.address)
        if self._end is None:
            self.broken(str(error))
        pause_s = self._next_delay()
        if isinstance(error, Unauthenticated | VersionMismatch):
            # It is there, and will say the same again: nobody waits for his deadline.
            self.fail(type(error)(f"master {self.address}: {error}"))
            pause_s = REFUSED_S
        self._retry_at = self._loop.time() + pause_s

    async def open(self) -> _CallerEnd:
        """A connection on which one may ask, over IPv4 if the name has both and both answer.

        Raises KvpoolError: what the master says of it, or Unavailable.
        """
        families = [socket.AF_INET, socket.AF_INET6] if numeric(self._host) is None else [0]
        why = ""
        for family in families:
            end = _CallerEnd(
                caller_session(self._caller),
                self.on_reply,
                self._on_end,
                self._connected,
            )
            try:
                await self._dial(end, family)
                async with asyncio.timeout(HELLO_S):
                    return await end.opened()
            except TimeoutError:
                why = "it accepts connections, and says nothing" if end.made else "nobody answers"
            except OSError as error:
                if isinstance(error, KvpoolError):
                    raise
                why = why or _why(error)
            except ValueError as error:  # a name that is none
                why = str(error)
            finally:
                if not end.is_open:
                    end.abort()
        raise Unavailable(why)

    async def _dial(self, end: _CallerEnd, family: int) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._loop.create_connection(
                    lambda: end, self._host, self._port, family=family
                )
        except BaseException:
            # uvloop closes one that is cancelled while it is made, and does not tell.
            self._connected.discard(end)
            raise


def _why(error: OSError) -> str:
    """As the system says it: loops have words of their own."""
    known = error.errno and not isinstance(error, socket.gaierror)
    return os.strerror(cast("int", error.errno)) if known else error.strerror or str(error)


class _CallerEnd(asyncio.Protocol):
    """The end of who asks. `on_message` gets each reply, `on_end` this end when it has ended and
    `abort` was not called here. It is in `connected` while its socket is open."""

    def __init__(
        self,
        session: CallerSession,
        on_message: Callable[[bytes], None],
        on_end: Callable[[_CallerEnd], None],
        connected: set[_CallerEnd],
    ) -> None:
        self._session = session
        self._on_message = on_message
        self._on_end = on_end
        self._connected = connected
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        #: Done when its handshake is complete, or with the reason why it never is.
        self._result: asyncio.Future[KvpoolError | None] = loop.create_future()
        #: Done when its socket is closed.
        self.disconnected: asyncio.Future[None] = loop.create_future()

    @property
    def made(self) -> bool:
        """There was a connection."""
        return self in self._connected

    @property
    def is_open(self) -> bool:
        return self._session.open and self._transport is not None

    async def opened(self) -> _CallerEnd:
        """This end, when one may ask on it. Raises KvpoolError if that is never."""
        error = await self._result
        if error is not None:
            raise error.fresh()
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        self._connected.add(self)

    def send(self, message: bytes) -> None:
        """Send one request. On a connection that ends it is lost, as what is on its way."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(self._session.seal(message))

    def data_received(self, data: bytes) -> None:
        transport, session = self._transport, self._session
        if transport is None:
            return
        try:
            messages = session.feed(data)
        except KvpoolError as error:
            self._broken(error)
            return
        if not self._result.done():
            transport.write(session.take())
            if session.open:
                self._result.set_result(None)
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connected.discard(self)
        self.disconnected.set_result(None)
        if self._transport is not None:
            self._ended(Unavailable("it ended the connection"))

    def abort(self) -> None:
        """End the connection. What was not sent is lost. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            self._session.close()
            transport.abort()

    def _broken(self, error: KvpoolError) -> None:
        """The master has refused this caller, or broken the rules."""
        if self._result.done() and isinstance(error, PeerError):
            # A link waits longer after each connection, so this is no line each second.
            log.warning("a connection to a master is ended", why=str(error))
        self._ended(error)

    def _ended(self, error: KvpoolError) -> None:
        self.abort()
        if not self._result.done():
            self._result.set_result(error)
        self._on_end(self)
