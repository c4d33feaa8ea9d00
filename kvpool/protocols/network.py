"""How control messages travel: over TCP in production, a simulated network in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvpool.protocols.transport import Listener


class Caller(NamedTuple):
    """Who sent a request: the address of its host, without a port (empty if the network does not
    know it), and the tenant whose secret it knows; no tenant: a server, an operator, or a client of
    a pool without tenants."""

    address: str = ""
    tenant: str = ""


#: Answers one request: (type, body, caller) to (type, body). Synchronous, so no other request can
#: run while a master's state is half changed. A KvpoolError becomes an `Error` message to that
#: peer.
Handler = Callable[[int, bytes, Caller], tuple[int, bytes]]


class Link(Protocol):
    """Requests to one master. Any number at once, each with its own deadline."""

    @property
    def address(self) -> str:
        """The master's `host:port`, as it was passed to `Network.connect`."""

    async def request(
        self, type: int, body: bytes, *, deadline: float, hasty: bool = False
    ) -> tuple[int, bytes]:
        """Send one message and return the answer: its type and body.

        Raises DeadlineExceeded when no answer arrives by `deadline`, and if it is `hasty` as soon
        as no connection can be made; Overloaded when too many requests are pending, Closed after
        `close`.
        """

    def close(self) -> None:
        """End every pending request with Closed. Idempotent."""


class CountedListener(Listener, Protocol):
    """What answers callers at an address, and counts their connections."""

    @property
    def callers(self) -> int:
        """Those on which callers ask now (design: control-plane)."""

    @property
    def refused(self) -> int:
        """Those that were refused, because they proved nothing."""


class Network(Protocol):
    """Connections for control messages: over TCP in production, simulated in tests
    (design: control-plane)."""

    @property
    def authenticated(self) -> bool:
        """True when a peer must prove that it knows the cluster's secret."""

    def connect(self, address: str) -> Link:
        """A link to the master at `address` (`host:port`). It connects, and reconnects, by itself;
        an address that does not answer is no error here."""

    async def serve(self, address: str, handler: Handler) -> CountedListener:
        """Answer requests at `address` with `handler`. Raises ConfigError when the address is in
        use."""

    def close(self) -> None:
        """Close every link."""

    async def wait_closed(self) -> None:
        """Return when no link has a file open any more; a turn or two of the loop after `close`."""
