"""The joint of a client: what it can do besides finding, reading, writing and removing blocks.

A client without an extension's file and its line in `EXTENSIONS` works as before, and refuses the
calls that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple, TypeAlias

from kvpool.client.attempts import ReadRates
from kvpool.client.context import ClientContext
from kvpool.errors import UsageError
from kvpool.protocols import WriteOptions

#: What every client has, by the name that `Pool` and `Admin` ask for: `module:class`, made with
#: the `ClientParts`.
EXTENSIONS: Final = {
    "drains": "kvpool.client.drains:Drains",
    "events": "kvpool.client.pool_events:PoolEvents",
    "observation": "kvpool.client.where:Observer",
    "prefetch": "kvpool.client.prefetch:PrefetchCalls",
    "removal": "kvpool.client.namespace_removal:Removals",
    "room": "kvpool.client.room:PoolRoom",
    "score": "kvpool.client.score:Scorer",
    "sessions": "kvpool.client.session:SessionCalls",
    "shared copies": "kvpool.client.shared_copies:SharedCopies",
    "spread": "kvpool.client.spread:Spreader",
}

#: Who is asked in a read, `module:class`; the last one is made for each. Without its line and file
#: large reads are not shared among the servers that hold their blocks.
PLANS: Final = (
    "kvpool.client.attempts:Attempts",
    "kvpool.client.ways:Ways",
)

#: A chain was written to another server than its parent: the options, the digests of the parent
#: and of the last block, and the server. It returns at once and raises nothing.
OnApart: TypeAlias = Callable[[WriteOptions, bytes, bytes, str], None]


class ClientParts(NamedTuple):
    """What an extension may use of its client."""

    context: ClientContext
    rates: ReadRates
    on_apart: list[OnApart]


class ClientExtension:
    """One mechanism of a client, beside the methods that `Pool` and `Admin` call."""

    async def close(self) -> None:
        """The client is about to close its connections: end every task. Idempotent."""


class ClientExtensions:
    """The extensions of one client."""

    def __init__(self, parts: ClientParts) -> None:
        self._made: dict[str, Any] = {}
        for name, where in EXTENSIONS.items():
            self._made[name] = resolve_name(where)(parts)

    def get(self, name: str) -> Any:
        """Raises UsageError for one that this client runs without."""
        if name not in self._made:
            raise UsageError(f"this client runs without the extension for {name}")
        return self._made[name]

    async def close(self) -> None:
        for one in self._made.values():
            await one.close()
