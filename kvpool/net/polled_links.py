"""Links to masters for a program that polls: no event loop, and no call waits unless told to.

The kernel connects, sends and receives meanwhile, which needs no interpreter lock. So a reply is
there when the program looks, also when Python code has held the lock all the time since the request
(design: pool-thread). Names alone are looked up in a thread, as that may wait.
"""

from __future__ import annotations

import contextlib
import errno
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvpool.addresses import numeric
from kvpool.backoff import Backoff
from kvpool.errors import KvpoolError, Unavailable
from kvpool.net.control_listener import HELLO_S
from kvpool.net.control_network import REFUSED_S, RETRY_MAX_S, RETRY_S, master_address
from kvpool.net.control_session import CallerSession, caller_context
from kvpool.net.requests import cluster_id, encode_envelope
from kvpool.types import Cluster

#: What one call takes of one link at most, and what waits to be sent.
_RECEIVE_MAX: Final = 1 << 20
_UNSENT_MAX: Final = 1 << 20


class PolledLinks:
    """One link to each master, named by its position. For one thread at a time."""

    def __init__(self, addresses: Sequence[str], cluster: Cluster) -> None:
        """Begin to connect. Raises ConfigError for an address that is not valid, Unavailable when
        this process can open no socket."""
        self.cluster = cluster_id(cluster.name)
        context = caller_context() if cluster.secret else None
        self._poll = select.poll()
        self._links = [_PolledLink(address, cluster, context, self._poll) for address in addresses]
        try:
            for link in self._links:
                link.begin()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._links)

    def send(self, link: int, type: int, body: bytes, id: int) -> bool:
        """Queue one request; False when the link is not connected, or its queue is full."""
        return self._links[link].send(encode_envelope(type, self.cluster, id, body))

    def receive(self, wait_s: float) -> list[tuple[int, bytes]]:
        """Messages that have arrived, each with its link. Waits for the first one if there is none,
        without the interpreter lock, at most `wait_s` (rounded down to milliseconds)."""
        messages = self._take()
        if not messages and wait_s >= 0.001 and self._poll.poll(int(wait_s * 1e3)):
            messages = self._take()
        return messages

    def take_ended(self) -> list[int]:
        """Links whose connection has ended since the last call, with all requests on it."""
        ended = [number for number, link in enumerate(self._links) if link.ended]
        for number in ended:
            self._links[number].ended = False
        return ended

    def reopen(self, link: int) -> None:
        """Connect anew to a master that is silent.

        Raises Unavailable when this process can open no socket; then the old one stays.
        """
        self._links[link].begin()

    def close(self) -> None:
        """Idempotent."""
        for link in self._links:
            link.close()

    def _take(self) -> list[tuple[int, bytes]]:
        return [
            (number, message) for number, link in enumerate(self._links) for message in link.go_on()
        ]


class _PolledLink:
    """No socket until `_retry_at`; then CONNECTING, with no session; SHAKING hands; OPEN."""

    def __init__(
        self, address: str, cluster: Cluster, context: ssl.SSLContext | None, poll: select.poll
    ) -> None:
        self._host, self._port = master_address(address)
        self._cluster = cluster
        self._context = context
        self._poll = poll
        self._socket: socket.socket | None = None
        self._session: CallerSession | None = None
        self.ended = False
        self._unsent = bytearray()
        #: Replies that came while a request was sent.
        self._arrived: list[bytes] = []
        self._late_at = 0.0
        self._retry = Backoff(RETRY_S, RETRY_MAX_S, rng=random.Random())
        self._retry_at = 0.0
        #: Addresses that are to be tried before the name is looked up again; None while it is.
        self._found: list[str] | None = []
        self._anew = False  # when it has been

    def begin(self) -> None:
        """Begin to connect anew. Raises Unavailable when this process can open no socket, or start
        no thread; then all is as before."""
        if numeric(self._host) is not None:
            self._open(self._host)
        elif self._found is not None:
            self._found, self._anew = None, True
            try:
                threading.Thread(target=self._look_up, name="kvpool-name", daemon=True).start()
            except RuntimeError as error:
                self._found, self._anew = [], False
                raise Unavailable(f"{error}; see `ulimit -u`") from None

    def send(self, message: bytes) -> bool:
        """Whether it is on its way; not if nobody is connected, or what waits is too much."""
        self._go_on()  # it may have been ended meanwhile
        session = self._session
        if session is None or not session.open or len(self._unsent) > _UNSENT_MAX:
            return False
        self._unsent += session.seal(message)
        self._flush()
        return self._socket is not None

    def go_on(self) -> list[bytes]:
        """Do all that can be done without waiting; what has arrived."""
        self._go_on()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Idempotent."""
        self._use(None)

    def _go_on(self) -> None:
        now = time.monotonic()
        opened = self._session is not None and self._session.open
        if self._socket is not None and not opened and now >= self._late_at:
            self._failed()  # nobody has looked for so long: what it has received is of no use
        if self._socket is not None and (self._session is not None or self._is_connected()):
            self._receive()
        if self._found is None or not (self._anew or self._socket is None):
            return
        if self._anew or now >= self._retry_at:
            self._anew = False
            try:
                if self._found:
                    self._open(self._found.pop(0))
                else:
                    self.begin()
            except Unavailable:
                self._retry_at = now + RETRY_MAX_S

    def _look_up(self) -> None:
        found: list[str] = []
        with contextlib.suppress(Exception):  # whatever it is: the name is looked up again
            known = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            known.sort(key=lambda one: one[0] != socket.AF_INET)
            found = [str(one[4][0]) for one in known]
        if not found:
            self._anew, self._retry_at = False, time.monotonic() + RETRY_MAX_S
        self._found = found

    def _open(self, host: str) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            fresh = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"cannot open a socket: {error.strerror}; see `ulimit -n`") from None
        fresh.setblocking(False)
        fresh.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._use(fresh)
        self._late_at = time.monotonic() + HELLO_S / 2  # the master gives up after all of it
        if fresh.connect_ex((host, self._port)) not in (0, errno.EINPROGRESS):
            self._failed()

    def _is_connected(self) -> bool:
        assert self._socket is not None
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed()
            return False
        try:
            self._socket.getpeername()
        except OSError:
            return False
        self._session = CallerSession(self._cluster, lambda: self._context or caller_context())
        self._poll.modify(self._socket, select.POLLIN)
        return True

    def _receive(self) -> None:
        session = self._session
        assert self._socket is not None
        assert session is not None
        was_open = session.open
        try:
            data = self._socket.recv(_RECEIVE_MAX)
            messages = session.feed(data) if data else []
        except BlockingIOError:
            self._flush()
            return
        except KvpoolError:  # it refuses this caller, or breaks the rules
            self._failed(REFUSED_S)
            return
        except OSError:
            data = b""
        if not data:
            self._failed()
            return
        if not was_open:
            self._unsent += session.take()
        if messages:
            self._retry.reset()
            self._arrived += messages
        self._flush()

    def _flush(self) -> None:
        if self._unsent and self._socket is not None:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._failed()

    def _failed(self, pause_s: float = 0.0) -> None:
        # The first time at once: a master ends connections that nobody uses.
        again = self._retry.failures > 0
        self._retry_at = time.monotonic() + max(pause_s, self._retry.next_delay() * again)
        self._use(None)

    def _use(self, fresh: socket.socket | None) -> None:
        """From now on this socket, if it is one."""
        self.ended |= self._session is not None and self._session.open
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket, self._session = fresh, None
        self._unsent.clear()
        if fresh is not None:
            self._poll.register(fresh, select.POLLOUT)
