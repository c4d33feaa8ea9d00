"""How control messages travel: zmq in production, a simulated network in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvpool.protocols.transport import Listener

#: Answers one request: (type, body) to (type, body). Synchronous, so a master's state is never
#: seen half changed. A KvpoolError becomes an `Error` message to that peer alone.
Handler = Callable[[int, bytes], tuple[int, bytes]]


class Link(Protocol):
    """Requests to one master. Any number at once, each with its own deadline."""

    @property
    def address(self) -> str: ...

    async def request(self, type: int, body: bytes, *, deadline: float) -> tuple[int, bytes]:
        """The answer. Raises DeadlineExceeded, Overloaded or Closed."""

    def close(self) -> None:
        """Fail what is pending. Idempotent."""


class Network(Protocol):
    """How control messages travel; zmq in production, a simulated one in tests."""

    @property
    def authenticated(self) -> bool:
        """Whether only who knows the cluster's secret gets through."""

    def connect(self, address: str) -> Link:
        """A link that connects, and reconnects, by itself."""

    async def serve(self, address: str, handler: Handler) -> Listener:
        """Answer requests at `address`. Raises ConfigError when it is taken."""

    def close(self) -> None:
        """Close every link."""
