"""What an object store must do to be a cold tier (design: cold).

Servers share it, and the blocks in it outlive them. It is addressed by names, not by offsets; so
the tier itself only says how to reach it, and the server does the rest (`kvpool/server/cold`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from kvpool.errors import Unavailable


class Gone(Unavailable):
    """There is no such object (any more)."""


class Listed(NamedTuple):
    """An object: its name, its bytes, and when it was written, by the clock of the store."""

    name: str
    size: int
    written_at: float


class ObjectStore(Protocol):
    """Objects below one prefix. Every error is Unavailable, in words that are the same for the same
    reason; Gone for what is not there. Any number of calls run at once."""

    async def put(self, name: str, data: bytes | memoryview) -> None:
        """All of it or nothing is there, also after a failure."""

    async def get(self, name: str, start: int, size: int) -> bytes | memoryview:
        """Exactly so many bytes."""

    async def listing(self, prefix: str) -> list[Listed]:
        """All below it; a store may end after some hundred thousand."""

    async def folders(self, prefix: str) -> list[str]:
        """The names one level below, without the prefix."""

    async def delete(self, name: str) -> None:
        """Idempotent."""


class ColdSettings(NamedTuple):
    """How a server uses it. Sizes in bytes, times in seconds."""

    encrypt: bool = False
    #: Written at once, or what has come within `wait_s`.
    object_size: int = 32 << 20
    wait_s: float = 5.0
    #: Objects are deleted after that time.
    keep_s: float = 7 * 24 * 3600.0
    #: So many in an hour; 0: no limit.
    requests: int = 360_000
    #: A read is asked for once more after that time.
    hedge_s: float = 0.5
    #: So often a server shows that it lives. After three times that others answer for its objects.
    beat_s: float = 10.0


#: Fills a buffer with the block at an address; raises as `Tier.read_into`.
ReadInto: TypeAlias = Callable[[int, memoryview], Awaitable[None]]


@runtime_checkable
class ColdTier(Protocol):
    """The last tier of a server, below that of the pool."""

    is_cold: bool
    cold_settings: ColdSettings

    @property
    def capacity(self) -> int:
        """Bytes that one server uses of the store."""

    def objects(self, prefix: str) -> ObjectStore:
        """The objects below a prefix of its own."""

    def begin(self, read_into: ReadInto, status_text: Callable[[], str]) -> None:
        """Before the first read: who does it, and what there is to show."""
