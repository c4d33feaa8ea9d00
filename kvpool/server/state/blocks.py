"""The blocks of one server, as its connections, its masters and its extensions see them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvpool.fingerprint import MapFingerprint
from kvpool.protocols import ReserveRequest
from kvpool.server.state.entry import Entry, Stretch
from kvpool.server.state.holdings import Owner
from kvpool.server.state.store import Store
from kvpool.types import ChainEnd, Namespace, Pin, ReadStatus, Reservation, WriteStatus

#: Departures in one step of an inventory.
_DEPARTURES_STEP: Final = 512


class Blocks:
    """The blocks of a server with one memory; a `TieredStore` has those of several tiers."""

    #: The tier that other servers find blocks in, too, if there is one.
    cold_tier: int | None = None

    def __init__(self, stores: Sequence[Store], front_tier: int = 0) -> None:
        #: One for each tier, the highest first.
        self.stores = list(stores)
        #: Clients write into this one, and read out of it.
        self.front_tier = front_tier
        self.front = self.stores[front_tier]
        #: A block that leaves this one is lost.
        self.backing_tier = front_tier
        self.change_log = self.front.index.change_log

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stores!r}>"

    @property
    def backing(self) -> Store:
        """The store whose evictions remove a block from the pool."""
        return self.stores[self.backing_tier]

    @property
    def online(self) -> list[Store]:
        """The stores of the tiers that are in service."""
        return self.stores

    # --- for connections ------------------------------------------------------------------

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        """As `Store.reserve`: space for blocks that no tier has yet."""
        return self.front.reserve(owner, request, now)

    def seal(
        self, owner: int, id: int, checksum: int, now: float, *, last_used: int | None = None
    ) -> WriteStatus:
        """As `Store.seal`."""
        (status,) = self.seal_all(owner, [id], [checksum], now, last_used=last_used)
        return status

    def seal_all(
        self,
        owner: int,
        ids: Sequence[int],
        checksums: Sequence[int],
        now: float,
        *,
        last_used: int | None = None,
    ) -> list[WriteStatus]:
        """As `Store.seal_all`."""
        return self.front.seal_all(owner, ids, checksums, now, last_used=last_used)

    def pin(
        self,
        owner: int,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        now: float,
        buffer_sizes: Sequence[int],
        *,
        view: bool = False,
        in_place_above: int | None = None,
    ) -> list[Pin]:
        """As `Store.pin`; NOT_YET also for a block of a slower tier, which is brought up first.

        With `in_place_above` a block in another memory that clients reach is pinned there instead,
        if the hits have more bytes than that together (design: device-memory).
        """
        return self.front.pin(owner, namespace, part, digests, now, buffer_sizes, view=view)

    def unpin(self, owner: int, pins: Sequence[Pin]) -> None:
        """Release the hits among these."""
        self.front.unpin_all(owner, [pin.id for pin in pins if pin.extent is not None])

    def holders(self, owner: int) -> list[Owner]:
        """What one connection holds, in each tier that connections reach."""
        held = self.front.held.known(owner)
        return [] if held is None else [held]

    def drop_owner(self, owner: int, *, writer_may_be_alive: bool = False) -> bool:
        """As `Store.drop_owner`."""
        return self.front.drop_owner(owner, writer_may_be_alive=writer_may_be_alive)

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
        checksums: Sequence[int] = (),
    ) -> list[bool]:
        """As `Store.remove`, in every tier."""
        return self.front.remove(namespace, digests, reason, part, checksums)

    @property
    def is_held(self) -> bool:
        """Something keeps memory from being reused, so it is worth a wait. A full store in which
        nothing is held has no room later either: the chain is larger than the server."""
        front = self.front
        held = not front.held.is_empty or bool(front.extents.pending_free)
        return bool(held or front.extents.clearing or self.is_writing_back)

    @property
    def is_writing_back(self) -> bool:
        """Blocks wait for the tier below, or are on their way to it."""
        return False

    # --- for masters ----------------------------------------------------------------------

    def hint(
        self, subject: str | ChainEnd, resume_in: float | None, now: float, *, age_s: float = 0.0
    ) -> bool | None:
        """As `Store.hint`, in every tier."""
        return self.front.hint(subject, resume_in, now, age_s=age_s)

    @property
    def fingerprint(self) -> MapFingerprint | None:
        """Of the blocks that readers find here, and where, when all changes are announced; None
        while that is not known (design: announcements)."""
        found = self.front.index.fingerprint
        return MapFingerprint(found.blocks, found.total)

    def inventory_steps(self) -> Iterator[list[Stretch]]:
        """What a master has to know, in small steps between which the store may change.

        Every block where readers find it, and the reasons of departures, as far back as the
        tombstones reach. Whoever starts this must also pass on each change from then on: a block
        that comes, leaves or moves between two steps may be in none of them.
        """
        for store in self.online:
            for index, entries in store.index.inventory_steps():
                here = [one.digest for one in entries if store is self.front or self.is_first(one)]
                yield [Stretch(index.namespace, index.part, here, ReadStatus.HIT, index.tier)]
        for departures in self.change_log.tombstones.steps(_DEPARTURES_STEP):
            yield [
                Stretch(namespace, 0, [digest], status)
                for (namespace, digest), status in departures
                # Blocks that are being written again are in: if that writer dies, they are still
                # gone.
                if not any(self.peek(namespace, p, digest) for p in range(namespace.parts))
            ]

    @property
    def blocks_max(self) -> int:
        """How many blocks fit, if each is as small as an extent can be."""
        allocators = [store.allocator for store in self.stores]
        return sum(one.capacity // one.rounded(1) for one in allocators)

    # --- looking --------------------------------------------------------------------------

    def peek(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The sealed block in the tier where a reader finds it, or None. Not a use (G9)."""
        return self.front.index.peek(namespace, part, digest)

    def is_first(self, entry: Entry) -> bool:
        """Whether readers find this one, of all copies of a sealed block."""
        return self.peek(entry.index.namespace, entry.index.part, entry.digest) is entry

    @property
    def stored(self) -> int:
        """Approximate number of sealed blocks."""
        return self.backing.index.stored

    @property
    def used_bytes(self) -> int:
        """Of the backing tier's capacity: what it has, and what it must still get."""
        return self.backing.allocator.allocated

    @property
    def figures(self) -> dict[str, int]:
        """Counters for `ServerStats`."""
        return {
            "dirty_bytes": 0,
            "evicted_blocks": sum(store.extents.evicted for store in self.stores),
            "evicted_bytes": sum(store.extents.evicted_bytes for store in self.stores),
        }
