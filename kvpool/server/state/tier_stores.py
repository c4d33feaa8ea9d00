"""The index of each tier of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from operator import attrgetter
from typing import Any, Final

from kvpool.piecewise_dict import PiecewiseDict
from kvpool.protocols import Addressable, DeviceAddressable, Tier
from kvpool.protocols.cold_tier import ColdTier
from kvpool.protocols.persistent_tier import HasParts, Record
from kvpool.protocols.policy import Policy
from kvpool.server.state.divided_allocator import DividedAllocator, FileAllocator
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.extents import Extents
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.store import Store
from kvpool.sorting import sorted_runs
from kvpool.types import ALIGNMENT, ReadStatus

#: Blocks of a file that are added in one step: two milliseconds.
RESTORED_AT_ONCE: Final = 256
#: The first byte of object n has the address n * SPAN.
SPAN: Final = 1 << 36
_DLPACK_CPU: Final = 1
_GENERATION: Final = attrgetter("generation")


class FileStore(Store):
    """The index of a tier whose blocks may be there before the process is (design: nvme-format)."""

    allocator: FileAllocator

    def __init__(
        self,
        capacity: int,
        *,
        alignment: int = 4096,
        allocator: FileAllocator | None = None,
        **options: Any,
    ) -> None:
        """As `Store`."""
        extents = allocator or FileAllocator(capacity, alignment)
        super().__init__(capacity, alignment=alignment, allocator=extents, **options)

    def restore(self, record: Record) -> Entry | None:
        """Add a sealed block that was found in this tier's memory (design: nvme-format).

        It cannot be evicted before `activate_restored`. None when the record overlaps another
        extent, lies outside the memory, or is of a block that is stored already.
        """
        namespace, part, digest, parent, offset, size, checksum, generation, copies = record
        if digest in self.index.blocks(namespace, part):
            return None
        if not self.allocator.claim(offset, size):
            return None
        index = self.index.of(namespace, part, self.extents.policy.account_of)
        self.held.last_id = max(self.held.last_id, generation)
        entry = Entry(index, digest, parent, offset, size, generation)
        entry.checksum = checksum
        entry.copies = copies
        entry.state = State.STORED
        self.extents.blocks_at[offset] = entry
        index.count(self.allocator.rounded(size))
        index.link_all([entry], restored=True)
        self.index.copied = self.index.copied or copies > 1
        self.index.count(entry, 1)
        return entry

    def cut_circles(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Once for restored blocks, whose order is any: in linear time, in steps.

        What the file says of parents is not believed, either (design: nvme-format).
        """
        checked: PiecewiseDict[Entry, None] = PiecewiseDict()  # blocks whose ancestors end
        for number, entry in enumerate(entries, 1):
            walked: set[Entry] = set()
            above: Entry | None = entry
            while above is not None and above not in checked:
                walked.add(above)
                parent = above.index.blocks.get(above.parent)
                if parent in walked:
                    above.index.leave_parent(above)
                    parent = None
                above = parent
            for one in walked:
                checked[one] = None
            if number % RESTORED_AT_ONCE == 0:
                yield

    def activate_restored(self, entries: Sequence[Entry], now: float) -> Iterator[None]:
        """Restored blocks may be evicted when this has ended, the oldest first. In steps."""
        runs: list[list[Entry]] = []
        for run in sorted_runs(entries, _GENERATION):
            runs.append(run)
            yield
        ordered: list[Entry] = []
        for number, entry in enumerate(merge(*runs, key=_GENERATION), 1):
            self.extents.policy.touch(entry, now)
            # Twice, as for a new block, which is reserved and sealed: policies rely on it
            self.extents.policy.touch(entry, now)
            ordered.append(entry)
            if number % RESTORED_AT_ONCE == 0:
                yield
        for number, entry in enumerate(ordered, 1):
            self.extents.add_candidate(entry)
            if number % RESTORED_AT_ONCE == 0:
                yield


class Addresses(FileAllocator):
    """Extents at any address: the objects are as many as they are. It only counts."""

    def claim(self, offset: int, size: int) -> bool:
        if offset in self._sizes:
            return False
        self._sizes[offset] = size = self.rounded(size)
        self.allocated += size
        return True

    def release(self, offset: int) -> int:
        size = self._sizes.pop(offset)
        self.allocated -= size
        return size


class ColdExtents(Extents):
    """Nothing is evicted here one by one."""

    evicts = False

    def __init__(self, *arguments: Any) -> None:
        """As `Extents`."""
        super().__init__(*arguments)
        #: A block has left, with its address and the reason.
        self.on_left: Callable[[int, ReadStatus], None] = lambda offset, reason: None

    def evictable(self, entry: Entry) -> bool:
        return False

    def add_candidate(self, entry: Entry) -> None:
        """None is."""

    def remove(self, entry: Entry, event: Event, reason: ReadStatus, *, free: bool = True) -> None:
        super().remove(entry, event, reason, free=free)
        self.on_left(entry.offset, reason)


class ColdStore(FileStore):
    """The index of a cold tier: blocks in objects that servers share (design: cold).

    Nothing is reserved or evicted here one by one, so there is no policy: blocks come when an
    object has been written or found, and leave with it, or because they are removed.
    """

    extents: ColdExtents
    extents_type = ColdExtents

    def __init__(self, capacity: int, alignment: int) -> None:
        super().__init__(
            capacity,
            alignment=alignment,
            allocator=Addresses(capacity, alignment),
            tombstones_max=1,
        )
        #: A block has come to another tier of this server, and is not here.
        self.offer: Callable[[Entry], None] = lambda entry: None

    def add(self, record: Record, born: int) -> Entry | None:
        """As `restore`, at any time. None also where its tenant's limit has no room for it."""
        account = self.extents.policy.account_of(record.namespace.name)
        if account.exceeds(self.allocator.rounded(record.size)):
            return None
        self.held.last_id += 1
        entry = self.restore(record._replace(generation=self.held.last_id))
        if entry is not None:
            entry.born = born
        return entry

    def count_with(self, count: Callable[[Entry, int], None]) -> Callable[[Entry, int], None]:
        """`count` for every tier, and then a look at what has come: a block has one version on one
        server, that which was written last."""

        def counted(entry: Entry, sign: int) -> None:
            count(entry, sign)
            if sign > 0 and entry.index.tier != self.index.tier:
                self.look_at(entry)

        return counted

    def look_at(self, entry: Entry) -> None:
        """Offer a block of another tier, or forget another version of it that is here."""
        index = entry.index
        here = self.index.peek(index.namespace, index.part, entry.digest)
        if here is None:
            self.offer(entry)
        elif here.checksum != entry.checksum:
            self.remove(index.namespace, [entry.digest], ReadStatus.REMOVED, index.part)


def cold_store(stores: Sequence[Store]) -> ColdStore | None:
    """The cold tier of a server, if it has one."""
    return last if isinstance(last := stores[-1], ColdStore) else None


def stores_of(
    tiers: Sequence[Tier], policy: Policy[Entry] | None = None, alignment: int = ALIGNMENT
) -> list[Store]:
    """A store for each tier, their extents rounded alike; that of the pool follows the policy."""
    alignment = max(alignment, *(tier.alignment for tier in tiers))
    cold = [ColdStore(one.capacity, alignment) for one in tiers if isinstance(one, ColdTier)]
    *above, pool = tiers[: len(tiers) - len(cold)]
    front = front_tier(tiers)
    stores: list[Store] = [
        (FrontStore if number == front else Store)(tier.capacity, alignment=alignment)
        for number, tier in enumerate(above)
    ]
    if pool is tiers[front]:
        lowest: Store = FrontStore(pool.capacity, alignment=alignment, policy=policy)
    else:
        allocator = _extents_of(pool, alignment)
        lowest = FileStore(pool.capacity, alignment=alignment, policy=policy, allocator=allocator)
    return [*stores, lowest, *cold]


def is_on_a_device(tier: Tier) -> bool:
    """Whether its memory is not the host's, as that of `hbm?device=cpu` is."""
    return (
        isinstance(tier, DeviceAddressable)
        and tier.device_view(0, 1).__dlpack_device__()[0] != _DLPACK_CPU
    )


def front_tier(tiers: Sequence[Tier]) -> int:
    """Which tier clients write into and read out of: the first whose memory can be looked at."""
    return next(n for n, tier in enumerate(tiers) if isinstance(tier, Addressable))


def _extents_of(tier: Tier, alignment: int) -> FileAllocator:
    """A file is filled from its start: it may be made smaller (design: nvme-format)."""
    if isinstance(tier, HasParts):
        return DividedAllocator([part.size for part in tier.parts], alignment)
    return FileAllocator(tier.capacity, alignment)
