"""Links to masters for a program that polls: no event loop, and no call waits unless told to.

The kernel sends and receives meanwhile, which needs no interpreter lock. So a reply is there when
the program looks, also when Python code has held the lock all the time since the request (design:
pool-thread). A thread connects and shakes hands: an engine that computes or idles does not look,
and masters give up on those who do not answer.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvpool.backoff import Backoff
from kvpool.errors import KvpoolError
from kvpool.net.control_listener import HELLO_S
from kvpool.net.control_network import REFUSED_S, RETRY_MAX_S, RETRY_S, master_address
from kvpool.net.control_session import CallerSession, caller_session
from kvpool.net.requests import cluster_id, encode_envelope
from kvpool.types import Cluster

#: What one call takes of one link at most, and what waits to be sent.
_RECEIVE_MAX: Final = 1 << 20
_UNSENT_MAX: Final = 1 << 20


class PolledLinks:
    """One link to each master, named by its position. For one thread at a time."""

    def __init__(self, addresses: Sequence[str], cluster: Cluster) -> None:
        """Begin to connect. Raises ConfigError for an address that is not valid."""
        self.cluster = cluster_id(cluster.name)
        self._poll = select.poll()
        self._links = [_PolledLink(address, cluster, self._poll) for address in addresses]
        for link in self._links:
            link.go_on()

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

    @property
    def promising(self) -> bool:
        """A link is open, or may be in a moment: no attempt has failed since it was."""
        return any(link.promising for link in self._links)

    def reopen(self, link: int) -> None:
        """Connect anew to a master that is silent; unless this process can start no thread."""
        self._links[link].reopen()

    def close(self) -> None:
        """Idempotent."""
        for link in self._links:
            link.close()

    def _take(self) -> list[tuple[int, bytes]]:
        return [
            (number, message) for number, link in enumerate(self._links) for message in link.go_on()
        ]


class _Opened(NamedTuple):
    socket: socket.socket
    session: CallerSession


class _PolledLink:
    """A thread connects, and leaves in `_outcome` what it has made, or for how many seconds at
    least nobody need try again. All else is done by the thread that polls."""

    def __init__(self, address: str, cluster: Cluster, poll: select.poll) -> None:
        self._host, self._port = master_address(address)
        self._cluster = cluster
        self._poll = poll
        self._opened: _Opened | None = None
        self._outcome: _Opened | float | None = None
        self._connecting = self._closed = False
        self._promising = True
        self.ended = False
        self._unsent = bytearray()
        #: Replies that came while a request was sent.
        self._arrived: list[bytes] = []
        self._retry = Backoff(RETRY_S, RETRY_MAX_S, rng=random.Random())
        self._retry_at = 0.0

    @property
    def promising(self) -> bool:
        return self._opened is not None or (self._connecting and self._promising)

    def reopen(self) -> None:
        self._begin()
        if self._connecting:
            self._promising = False
            self._use(None)

    def send(self, message: bytes) -> bool:
        """Whether it is on its way; not if nobody is connected, or what waits is too much."""
        self._go_on()  # it may have been ended meanwhile
        if self._opened is None or len(self._unsent) > _UNSENT_MAX:
            return False
        self._unsent += self._opened.session.seal(message)
        self._flush()
        return self._opened is not None

    def go_on(self) -> list[bytes]:
        """Do all that can be done without waiting; what has arrived."""
        self._go_on()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._drop_outcome()
        self._use(None)

    def _go_on(self) -> None:
        if (outcome := self._outcome) is not None:
            self._outcome, self._connecting = None, False
            if isinstance(outcome, _Opened):
                self._use(outcome)
            else:
                self._failed(outcome)
        if self._opened is not None:
            self._receive(*self._opened)
        if self._opened is None and time.monotonic() >= self._retry_at:
            self._begin()

    def _begin(self) -> None:
        """Begin to connect, unless that is under way."""
        if not self._connecting:
            try:
                threading.Thread(target=self._connect, name="kvpool-link", daemon=True).start()
                self._connecting = True
            except RuntimeError:  # as many as this process may have
                self._retry_at = time.monotonic() + RETRY_MAX_S

    def _connect(self) -> None:
        """In the thread."""
        outcome: _Opened | float = 0.0  # nobody answers
        try:
            # Over IPv4, if the name has both and both answer.
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            for family, *_, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
                with contextlib.suppress(OSError):
                    outcome = self._shake_hands(family, address)
                    break
        except KvpoolError:  # it refuses this caller, or breaks the rules
            outcome = REFUSED_S
        except Exception:  # whatever it is: it may be over soon
            outcome = 0.0
        self._outcome = outcome
        if self._closed:
            self._drop_outcome()

    def _shake_hands(self, family: int, address: Any) -> _Opened:
        until = time.monotonic() + HELLO_S / 2  # the master gives up after all of it
        session = caller_session(self._cluster)
        fresh = socket.socket(family, socket.SOCK_STREAM)
        try:
            fresh.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fresh.settimeout(HELLO_S / 2)
            fresh.connect(address)
            while not session.open:
                fresh.settimeout(max(0.0, until - time.monotonic()))
                data = fresh.recv(_RECEIVE_MAX)
                if not data:
                    raise ConnectionError
                session.feed(data)
                fresh.sendall(session.take())
            fresh.setblocking(False)
        except BaseException:
            fresh.close()
            raise
        return _Opened(fresh, session)

    def _drop_outcome(self) -> None:
        if isinstance(self._outcome, _Opened):
            self._outcome.socket.close()

    def _receive(self, link: socket.socket, session: CallerSession) -> None:
        try:
            data = link.recv(_RECEIVE_MAX)
            messages = session.feed(data) if data else []
        except BlockingIOError:
            self._flush()
            return
        except KvpoolError:  # it breaks the rules
            self._failed(REFUSED_S)
            return
        except OSError:
            data = b""
        if not data:
            self._failed()
            return
        if messages:
            self._retry.reset()
            self._arrived += messages
        self._flush()

    def _flush(self) -> None:
        if self._unsent and self._opened is not None:
            try:
                del self._unsent[: self._opened.socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._failed()

    def _failed(self, pause_s: float = 0.0) -> None:
        # The first time at once: a master ends connections that nobody uses.
        again = self._retry.failures > 0
        self._promising = not (again or pause_s)
        self._retry_at = time.monotonic() + max(pause_s, self._retry.next_delay() * again)
        self._use(None)

    def _use(self, fresh: _Opened | None) -> None:
        """From now on this connection, if it is one."""
        if self._opened is not None:
            self.ended = True
            self._poll.unregister(self._opened.socket)
            self._opened.socket.close()
        self._opened = fresh
        self._unsent.clear()
        if fresh is not None:
            self._poll.register(fresh.socket, select.POLLIN)
