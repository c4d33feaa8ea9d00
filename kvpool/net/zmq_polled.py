"""Links to masters for a program that polls: no event loop, and no call waits unless told to.

zmq connects, sends and receives in a thread of its own, which needs no interpreter lock. So a reply
is there when the program looks, also when Python code has held the lock all the time since the
request (design: pool-thread).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zmq

from kvpool.net.zmq_rpc import curve_keys, open_dealer
from kvpool.types import Cluster
from kvpool.wire.frames import cluster_id, encode_envelope

_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_RCVMORE: Final = int(zmq.RCVMORE)
#: Messages that one call takes at most.
_BURST: Final = 64


class PolledLinks:
    """One link to each master, named by its position. For one thread at a time."""

    def __init__(self, addresses: Sequence[str], cluster: Cluster) -> None:
        """Begin to connect. Raises ConfigError for an address that is not valid, Unavailable when
        this process can open no socket."""
        self.cluster = cluster_id(cluster.name)
        self._addresses = list(addresses)
        self._keys = curve_keys(cluster) if cluster.secret else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        try:
            for address in self._addresses:
                self._sockets.append(self._open(address))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._addresses)

    def send(self, link: int, type: int, body: bytes, id: int) -> bool:
        """Queue one request; False when the link is not connected, or its queue is full."""
        message = encode_envelope(type, self.cluster, id, body)
        try:
            self._sockets[link].send(message, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, wait_s: float) -> list[tuple[int, bytes]]:
        """Messages that have arrived, each with its link. Waits for the first one if there is none,
        without the interpreter lock, at most `wait_s` (rounded down to milliseconds)."""
        messages = self._take()
        if not messages and wait_s >= 0.001 and self._poller.poll(int(wait_s * 1e3)):
            messages = self._take()
        return messages

    def reopen(self, link: int) -> None:
        """Replace the socket: zmq gives a connection up after an invalid handshake, silently.

        Raises Unavailable when this process can open none; then the old one stays.
        """
        old, self._sockets[link] = self._sockets[link], self._open(self._addresses[link])
        self._poller.unregister(old)
        old.close(0)

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)

    def _open(self, address: str) -> zmq.Socket[bytes]:
        socket = open_dealer(self._context, address, self._keys)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _take(self) -> list[tuple[int, bytes]]:
        messages: list[tuple[int, bytes]] = []
        for link, socket in enumerate(self._sockets):
            # The check is cheaper than the exception that an empty queue raises.
            while len(messages) < _BURST and int(socket.get(_EVENTS)) & _POLLIN:
                parts = [socket.recv(_NOBLOCK)]
                while socket.get(_RCVMORE):
                    parts.append(socket.recv(_NOBLOCK))
                messages.append((link, parts[-1]))
        return messages
