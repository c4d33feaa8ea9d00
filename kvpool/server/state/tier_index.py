"""The index over all tiers of a server: where readers find a block. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.fingerprint import MapFingerprint
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.server.state.store import Store
from kvpool.types import Namespace


class TierIndex:
    """Finds a block in the first tier that has it: the front tier, then the others in order.

    The fingerprints of the stores count each block once, in the tier where readers find it: so
    their sum is what masters are told. Readers find nothing in an `offline` tier.
    """

    def __init__(self, stores: Sequence[Store], front_tier: int) -> None:
        self.stores = stores
        self.front_tier = front_tier
        self.front = stores[front_tier]
        self.offline: set[int] = set()
        #: Reads that each tier has served, promoted blocks where they came from.
        self.hits = [0] * len(stores)

    @property
    def online(self) -> list[Store]:
        return [store for tier, store in enumerate(self.stores) if tier not in self.offline]

    def below(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The sealed block in another tier, if the front tier does not have it sealed."""
        return self.all_below(namespace, part, (digest,))[0]

    def all_below(
        self, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> list[Entry | None]:
        """The same for each of several blocks, in little more time than for one."""
        found: list[Entry | None] = [None] * len(digests)
        others = [
            blocks
            for tier, store in enumerate(self.stores)
            if tier != self.front_tier and tier not in self.offline
            if (blocks := store.index.blocks(namespace, part))
        ]
        if not others:
            return found
        for at, here in enumerate(self.front.index.blocks(namespace, part).get_all(digests)):
            if here is None or here.state is not State.STORED:
                for blocks in others:
                    entry = blocks.get(digests[at])
                    if entry is not None and entry.state is State.STORED:
                        found[at] = entry
                        break
        return found

    def has_copy(self, entry: Entry) -> bool:
        """Whether another tier than the front tier has the block, too."""
        index = entry.index
        return any(
            store.index.peek(index.namespace, index.part, entry.digest) is not None
            for store in self.online
            if store is not self.front
        )

    def touch_others(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        now: float,
        *,
        counted: int = -1,
    ) -> None:
        """Count a use in every other tier that has the block, or those tiers would evict it; the
        tier `counted` has done it."""
        for tier, store in enumerate(self.stores):
            if tier not in (self.front_tier, counted) and tier not in self.offline:
                blocks = store.index.blocks(namespace, part)
                for digest in digests:
                    entry = blocks.get(digest)
                    if entry is not None and entry.state is State.STORED:
                        store.extents.policy.touch(entry, now)
                        store.extents.policy.answered(entry, now)

    # --- fingerprints -----------------------------------------------------------------------

    @property
    def fingerprint(self) -> MapFingerprint:
        """Of all blocks, each where readers find it."""
        found = [store.index.fingerprint for store in self.stores]
        return MapFingerprint(sum(one.blocks for one in found), sum(one.total for one in found))

    def count(self, entry: Entry, sign: int) -> None:
        """A sealed block has come to one tier (1) or left it (-1): where do readers find it now?"""
        index, rank = entry.index, self._rank(entry.index.tier)
        others = [
            found
            for store in self.stores  # also one that is lost: what it had leaves in steps
            if store.index.tier != index.tier
            and (found := store.index.peek(index.namespace, index.part, entry.digest)) is not None
        ]
        other = min(others, key=lambda one: self._rank(one.index.tier), default=None)
        if other is not None and self._rank(other.index.tier) < rank:
            return
        self._count_in_tier(entry, sign)
        if other is not None:
            self._count_in_tier(other, -sign)

    def _count_in_tier(self, entry: Entry, sign: int) -> None:
        index = entry.index
        self.stores[index.tier].index.fingerprint.count(entry.digest, index.seed, sign)

    def _rank(self, tier: int) -> int:
        return -1 if tier == self.front_tier else tier
