"""The index of each tier of a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from operator import attrgetter
from typing import Final

from kvpool.piecewise_dict import PiecewiseDict
from kvpool.protocols import HasParts, PersistentTier, Tier
from kvpool.protocols.policy import Policy
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.divided_allocator import DividedAllocator
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.server.state.store import Store
from kvpool.sorting import sorted_runs
from kvpool.types import ALIGNMENT, Record

#: Blocks of a file that are added in one step: two milliseconds.
RESTORED_AT_ONCE: Final = 256
_GENERATION: Final = attrgetter("generation")


class FileStore(Store):
    """The index of a tier whose blocks may be there before the process is (design: nvme-format)."""

    def restore(self, record: Record) -> Entry | None:
        """Add a sealed block that was found in this tier's memory (design: nvme-format).

        It cannot be evicted before `activate_restored`. None when the record overlaps another
        extent, lies outside the memory, or is of a block that is stored already.
        """
        namespace, part, digest, parent, offset, size, checksum, generation, copies = record
        index = self._indexes.get((namespace, part))
        if index is not None and digest in index.blocks:
            return None
        if not self.allocator.claim(offset, size):
            return None
        index = self._index(namespace, part)
        self.last_id = max(self.last_id, generation)
        entry = Entry(index, digest, parent, offset, size, generation)
        entry.checksum = checksum
        entry.copies = copies
        entry.born = 0  # before all that is written from now on
        entry.state = State.STORED
        self.blocks_at[offset] = entry
        index.count(self.allocator.rounded(size))
        self._link(entry, restored=True)
        self.stored += 1
        self.stored_bytes += size
        self._count(entry, 1)
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
                    self._leave_parent(above)
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
            self.policy.touch(entry, now)
            # Twice, as for a new block, which is reserved and sealed: policies rely on it (seed 53)
            self.policy.touch(entry, now)
            ordered.append(entry)
            if number % RESTORED_AT_ONCE == 0:
                yield
        for number, entry in enumerate(ordered, 1):
            self._add_candidate(entry)
            if number % RESTORED_AT_ONCE == 0:
                yield


def stores_of(
    tiers: Sequence[Tier], policy: Policy[Entry] | None = None, alignment: int = ALIGNMENT
) -> list[Store]:
    """A store for each tier, their extents rounded alike; the lowest follows the policy."""
    alignment = max(alignment, *(tier.alignment for tier in tiers))
    stores = [Store(tier.capacity, alignment=alignment) for tier in tiers[:-1]]
    capacity, allocator = tiers[-1].capacity, _extents_of(tiers[-1], alignment)
    return [*stores, FileStore(capacity, alignment=alignment, policy=policy, allocator=allocator)]


def _extents_of(tier: Tier, alignment: int) -> Allocator:
    """A file is filled from its start: it may be made smaller (design: nvme-format)."""
    if isinstance(tier, HasParts):
        return DividedAllocator([part.size for part in tier.parts], alignment)
    return Allocator(tier.capacity, alignment, from_front=isinstance(tier, PersistentTier))
