"""The joint of a server: what it can do besides storing, serving and evicting blocks.

An extension answers messages that the kernel does not know, and is called when clients read or
remove blocks. Its tasks are under the server's supervisor. A server without it, that is, without
its folder and its line in `EXTENSIONS`, works as before and refuses those messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from kvpool.addresses import is_everywhere, split
from kvpool.config import ServerConfig
from kvpool.errors import ConfigError, Forbidden
from kvpool.protocols import Network, Peer, ReserveRequest, Transport
from kvpool.runtime import Host
from kvpool.server.context import ServerContext
from kvpool.types import Cluster, Namespace, Pin, Reservation, ServerStats
from kvpool.wire import messages as wire

#: What every server has: `module:class`, made with the `ServerParts`.
EXTENSIONS: Final = (
    "kvpool.server.compactor:Compaction",
    "kvpool.server.tenancy:Tenancy",
    "kvpool.server.namespace_removal:NamespaceRemoval",
    "kvpool.server.moves:Moves",
    "kvpool.server.moves.prefetcher:Prefetcher",
    "kvpool.server.cold:ColdRing",
)

#: By message, who answers it: a coroutine function of the client's `Peer` and the message.
Handlers: TypeAlias = Mapping[type[wire.Message], Callable[..., Any]]
#: Of a removal: the namespace, the digests, and the part (None: every part).
OnRemoved: TypeAlias = Callable[[Namespace, Sequence[bytes], int | None], None]

#: What says where others find a listener: `module:function`; the last one is asked. Without its
#: line and file nothing listens on every address of its host.
ADDRESSES: Final = (
    "kvpool.server.extension:as_it_listens",
    "kvpool.net.announced:announced",
)


class ServerExtension(Protocol):
    """One mechanism of a server. What it does not define, it does not need."""

    @property
    def handlers(self) -> Handlers:
        """Who answers the messages that only this extension knows."""
        return {}

    def check(self) -> None:
        """Nothing is open yet. Raises ConfigError for settings that cannot be kept."""

    def start(self) -> None:
        """The tiers are recovered, and no client is connected yet: start the tasks."""

    async def leave(self) -> None:
        """The server is about to leave its masters: end what needs them. Idempotent."""

    async def close(self) -> None:
        """No client is connected any more: end every task and connection. Idempotent."""

    def completed(self, stats: ServerStats) -> ServerStats:
        """The figures of the server, and those of this extension."""
        return stats


class TenantWrites(Protocol):
    """What connections of tenants' clients ask when they write."""

    async def reserve(
        self, peer: Peer, request: ReserveRequest, until: float, reserve: Callable[..., Any]
    ) -> list[Reservation]:
        """What `reserve(request, until)` answers when it is the client's turn to write."""

    def reserve_now(
        self, peer: Peer, request: ReserveRequest, now: float, reserve: Callable[..., Any]
    ) -> list[Reservation]:
        """What `reserve(request, now)` answers if it is its turn now."""

    def no_space(self, peer: Peer, size: int, blocks: int) -> None:
        """So many of its blocks found no space, not even one of this size."""


class Extensions:
    """The extensions of one server: who answers which message, and who is called when."""

    def __init__(self) -> None:
        self.all: list[ServerExtension] = []
        #: With the namespace, part and digests that a client has asked for, and its name.
        self.on_read: list[Callable[[Namespace, int, Sequence[bytes], str], None]] = []
        #: With what a client has got: the namespace, last block, blocks, bytes; and misses.
        self.on_served: list[Callable[[Namespace, Pin | None, int, int, int], None]] = []
        self.tenant_writes: TenantWrites | None = None
        #: In the step in which a client removes blocks.
        self.on_removed: list[OnRemoved] = []
        #: After it, and awaited before the client is answered. A fourth argument has the checksums
        #: of the versions that were removed, if it were only these.
        self.pass_on: list[Callable[..., Awaitable[None]]] = []
        #: When a master says that this server is full and another one is not.
        self.on_room_elsewhere: list[Callable[[], None]] = []

    def add_all(self, parts: ServerParts) -> None:
        for name in EXTENSIONS:
            self.all.append(resolve_name(name)(parts))

    def handler(self, message: type[wire.Message]) -> Callable[..., Any]:
        """Raises Forbidden for a message that no extension answers."""
        for one in self.all:
            if message in one.handlers:
                return one.handlers[message]
        raise Forbidden(f"{message.__name__}: this server runs without the extension for that")

    def others_have_room(self) -> None:
        for call in self.on_room_elsewhere:
            call()

    def removed(self, namespace: Namespace, digests: Sequence[bytes], part: int | None) -> None:
        for call in self.on_removed:
            call(namespace, digests, part)


async def as_it_listens(address: str, chosen: Sequence[str], masters: Iterable[str]) -> str:
    """The address of a listener as others see it, with `server.announce`. Raises ConfigError."""
    parts = split(address)
    if chosen or (parts is not None and is_everywhere(parts[1])):
        raise ConfigError(f"{address}: this program announces the addresses on which it listens")
    return address


class ServerParts(NamedTuple):
    """What an extension may use of its server."""

    config: ServerConfig
    context: ServerContext
    extensions: Extensions
    host: Host
    cluster: Cluster
    network: Network
    transports: Mapping[str, Transport]
