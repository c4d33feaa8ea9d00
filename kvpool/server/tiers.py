"""The joint of tiers: what moves the blocks of a server between its memories.

With one memory nothing moves. A server whose program lacks the last line and its file refuses to
start with more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Final

from kvpool.config import ServerConfig
from kvpool.errors import ConfigError
from kvpool.protocols import Tier
from kvpool.protocols.policy import Policy
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.server.state.store import Store
from kvpool.supervision import Supervisor
from kvpool.types import ALIGNMENT, Cluster, Extent, Namespace, TierUsage

#: `module:class`; the last one is for several tiers.
MOVERS: Final = (
    "kvpool.server.tiers:Mover",
    "kvpool.server.tier_mover:TierMover",
)


class Mover:
    """Of a server with one memory."""

    def __init__(
        self,
        store: Blocks,
        tiers: Sequence[Tier],
        on_change: Callable[[], None],
        supervisor: Supervisor,
    ) -> None:
        """`on_change` is called after each change of the store."""
        self._store = store
        self._tiers = tiers

    @classmethod
    def blocks_of(
        cls,
        tiers: Sequence[Tier],
        stores: Sequence[Store],
        policy: Policy[Entry] | None,
        config: ServerConfig,
    ) -> Blocks:
        """The index of these tiers; its stores are those given, if there are any."""
        (memory,) = tiers
        alignment = max(ALIGNMENT, memory.alignment)
        return Blocks(stores or [Store(memory.capacity, alignment=alignment, policy=policy)])

    async def recover(self, cluster: Cluster) -> None:
        """Add what a tier still holds of an earlier life in this cluster. Raises Unavailable,
        ConfigError."""

    def start(self) -> None:
        """Start the tasks."""

    async def close(self, flush_s: float) -> None:
        """Stop when what would be lost is in a tier that keeps it, or after so many seconds."""

    #: Whether there is ever anything to move, so that it is to be woken.
    moves = False

    def wake(self) -> None:
        """The store has changed: there may be something to move."""

    def keeps(self, entry: Entry) -> bool:
        """Whether a block of the backing tier is there again after a restart."""
        return False

    def promote(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """Start to bring blocks of slower tiers into memory for a reader (design: promotion)."""

    async def promote_and_wait(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], until: float
    ) -> bool:
        """`promote`, and wait until a good part of them is in memory, or `until`; False, at once,
        where memory will have no room for any of them."""
        return True

    async def erase(self) -> bool:
        """Return when no tier will bring back what left before the call. False: it may."""
        return True

    async def checksum_in(self, tier: int, extent: Extent, seed: int) -> int | None:
        """The checksum of what a tier has in a pinned extent; None if it cannot be read."""
        return None

    def usage(self, now: float, reads: int = 0) -> list[TierUsage]:
        """How full each tier is and what goes through it; a single one has served all `reads`."""
        (memory,), store = self._tiers, self._store.front
        text: str = getattr(memory, "status_text", "")
        room, used = store.allocator.capacity, store.allocator.allocated
        blocks = store.index.stored
        return [TierUsage(memory.name, text, False, room, used, blocks, hits=reads)]


def mover_for(tiers: Sequence[Tier]) -> type[Mover]:
    """Raises ConfigError where this program cannot have such tiers."""
    if len(tiers) == 1 and not tiers[0].survives_restart:
        return Mover
    if len(MOVERS) == 1:
        raise ConfigError("this program has blocks in memory alone (setting server.tiers)")
    made: type[Mover] = resolve_name(MOVERS[-1])
    return made
