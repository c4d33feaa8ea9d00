"""The index of each tier of a server."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.protocols import HasParts, PersistentTier, Tier
from kvpool.protocols.policy import Policy
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.divided_allocator import DividedAllocator
from kvpool.server.state.entry import Entry
from kvpool.server.state.store import Store
from kvpool.types import ALIGNMENT


def stores_of(
    tiers: Sequence[Tier], policy: Policy[Entry] | None = None, alignment: int = ALIGNMENT
) -> list[Store]:
    """A store for each tier, their extents rounded alike; the lowest follows the policy."""
    alignment = max(alignment, *(tier.alignment for tier in tiers))
    stores = [Store(tier.capacity, alignment=alignment) for tier in tiers[:-1]]
    capacity, allocator = tiers[-1].capacity, _extents_of(tiers[-1], alignment)
    return [*stores, Store(capacity, alignment=alignment, policy=policy, allocator=allocator)]


def _extents_of(tier: Tier, alignment: int) -> Allocator:
    """A file is filled from its start: it may be made smaller (design: nvme-format)."""
    if isinstance(tier, HasParts):
        return DividedAllocator([part.size for part in tier.parts], alignment)
    return Allocator(tier.capacity, alignment, from_front=isinstance(tier, PersistentTier))
