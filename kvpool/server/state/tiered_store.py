"""The index of a server with several tiers: where each block is, and which copy must be made next.

Clients write into the memory of the *front tier* and read out of it. The *backing tier*, the
lowest, is the pool: a block that it evicts is lost. Every other copy only makes reads faster and
may be dropped at any time without an announcement; all other rules follow (design: tiers).

    write   into the front tier; written back in the background, in the order of writing
    read    from the front tier; a block that is only in a slower tier is promoted first
    full    a block that has been written back is dropped from the front tier at once: no copy

A client that writes faster than the backing tier can take waits in the end, for a bounded time:
when all blocks of the front tier have yet to be written back. The other tiers (HBM) are *cache
tiers*: they get copies of blocks that are read repeatedly, and are looked at before the backing
tier when the front tier has dropped a block.

Pure, like `store.py`. The parts: where readers find a block (`TierIndex`), what must be written
back (`WritebackQueue`), which copies are under way (`TierTransfers`), and whose records must go
(`Erasures`). `TierMover` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableSequence, Sequence
from heapq import merge
from itertools import compress
from operator import attrgetter
from typing import Final

from kvpool.fingerprint import MapFingerprint
from kvpool.protocols import ReserveRequest
from kvpool.protocols.persistent_tier import Record
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.divided_allocator import part_of
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.erasures import Erasures
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.holdings import Owner
from kvpool.server.state.store import Store
from kvpool.server.state.tier_index import TierIndex
from kvpool.server.state.tier_stores import RESTORED_AT_ONCE, FileStore, cold_store
from kvpool.server.state.tier_transfers import TierTransfers
from kvpool.server.state.write_back import WriteBack
from kvpool.server.state.writeback_queue import DROPPED_STEP, WritebackQueue
from kvpool.sorting import sorted_runs
from kvpool.types import ChainEnd, Namespace, Pin, ReadStatus, Reservation, WriteStatus

_OFFSET: Final = attrgetter("offset")


class TieredStore(Blocks):
    """A server's stores, the highest tier first; clients see the one of `front_tier`.

    Where a block is, with a front and a backing tier (`Entry.clean` is of the entry in front):

    | place         | front    | backing  | next                                                  |
    |---------------|----------|----------|-------------------------------------------------------|
    | front only    | dirty    | -        | writing back, when its turn in the queue comes        |
    | writing back  | dirty, pinned | reserved | both; front only again if the write failed       |
    | both          | clean    | stored   | backing only, when the front tier evicts it           |
    | backing only  | -        | stored   | promoting, when a reader asks; lost, when evicted     |
    | promoting     | reserved | stored, pinned | both; backing only or lost if the read failed   |

    A dirty block is never evicted from the front tier, nor for a writer a clean one that was used
    after one that is next to become clean (design: tiers). A block that the backing tier refuses
    (its policy keeps what it has) becomes clean without a copy: `front only`, and lost when
    evicted. While the backing tier is read-only, the same holds for every block that it does not
    have; those that are still there when it takes writes again are written back then
    (design: tiers).
    A cache tier adds a clean copy to any of these places, and so does the cold tier, which keeps it
    when the block has left the others. `take_offline` removes a tier; without
    a backing tier the front tier is the pool: every block is clean, and lost when evicted.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        front_tier: int = 0,
        write_back: bool = False,
        in_place_tiers: Collection[int] = (),
    ) -> None:
        super().__init__(stores, front_tier)
        #: Tiers below the front tier whose memory transports can send from (design: device-memory).
        self.in_place_tiers = tuple(sorted(set(in_place_tiers) - {front_tier}))
        front = self.stores[front_tier]
        assert isinstance(front, FrontStore)
        self.front: FrontStore = front
        cold = cold_store(self.stores)  # what leaves the pool is still there (design: cold)
        self.cold_tier = None if cold is None else len(self.stores) - 1
        self.backing_tier = len(self.stores) - 1 - (cold is not None)
        #: Where readers find a block.
        self.index = TierIndex(self.stores, front_tier)
        front.extents.demotes = self.backing_tier != front_tier
        #: What the backing tier has yet to get. With `write_back` it waits until memory is full.
        self.queue = WritebackQueue(front, write_back=write_back and front.extents.demotes)
        #: Whose records must go.
        self.erasures = Erasures(self)
        #: What is on its way from tier to tier.
        self.transfers = TierTransfers(self, front, self.index, self.queue, self.erasures)
        #: Offline tiers that still have blocks, and what is still to be written to them.
        self._dropping: dict[int, WriteBack | None] = {}
        #: Copies in other tiers leave with their block: announced once.
        self.is_evicting = False
        count = self.index.count if cold is None else cold.count_with(self.index.count)
        for tier, store in enumerate(self.stores):
            store.index.tier = tier
            store.index.change_log = self.change_log
            store.index.on_leave = self._on_leave
            store.index.count_place = count
        # Sealed blocks of the front tier can be written back, which makes them evictable.
        front.extents.has_copy = self.index.has_copy
        front.extents.older_waits = self.queue.older_waits

    # --- for connections ------------------------------------------------------------------

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        front = self.front
        namespace, part, digests, *_ = request
        below = self.index.all_below(namespace, part, digests)
        if request.last_used is not None and not self._has_room_below(request, now):
            return [Reservation(WriteStatus.NO_SPACE)] * len(digests)
        if not any(below):
            answers = front.reserve(owner, request, now)
        else:
            new = [position for position, entry in enumerate(below) if entry is None]
            granted = iter(front.reserve(owner, request.subset(new), now))
            here = Reservation(WriteStatus.ALREADY_STORED)
            answers = [here if entry is not None else next(granted) for entry in below]
        if self.queue.write_back is not None:
            refused = [a.status is WriteStatus.NO_SPACE for a in answers]
            if any(refused):
                sizes = compress(request.sizes, refused)
                self.queue.refused(sum(map(front.allocator.rounded, sizes)))
        known = [
            digest
            for digest, answer in zip(digests, answers, strict=True)
            if answer.status is WriteStatus.ALREADY_STORED
        ]
        if known:
            self.index.touch_others(namespace, part, known, now)
        return answers

    def _has_room_below(self, request: ReserveRequest, now: float) -> bool:
        """Whether the backing tier can take blocks that are fetched, for older ones if it is full.

        Else they would be written to memory, and then refused below (design: moves).
        """
        if not self.front.extents.demotes or self.queue.read_only:
            return True
        backing, last_used = self.backing, request.last_used or ()
        free = backing.allocator.available - self.front.extents.dirty_bytes
        oldest = int((now - backing.extents.policy.victim_age(now)) * 1e6)
        size = sum(map(backing.allocator.rounded, request.sizes))
        return size <= free or min(last_used, default=oldest) >= oldest

    def seal_all(
        self,
        owner: int,
        ids: Sequence[int],
        checksums: Sequence[int],
        now: float,
        *,
        last_used: int | None = None,
    ) -> list[WriteStatus]:
        """The blocks are written back when their turn comes."""
        front = self.front
        entries: list[Entry] = []
        if front.extents.demotes:
            reserved = front.held.owner(owner).reservations
            entries = [reserved[id] for id in ids if id in reserved]
        statuses = front.seal_all(owner, ids, checksums, now, last_used=last_used)
        for entry in entries:  # no other tier has it
            front.extents.mark_dirty(entry)
            self.queue.add(entry)
            if last_used is not None:
                self.queue.fetched.add(entry)
        return statuses

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
        """NOT_YET for a block of a slower tier, which `transfers` brings up."""
        front = self.front
        below = self.index.all_below(namespace, part, digests)
        if any(below):
            here = [position for position, entry in enumerate(below) if entry is None]
            found = iter(
                front.pin(
                    owner,
                    namespace,
                    part,
                    [digests[i] for i in here],
                    now,
                    [buffer_sizes[i] for i in here],
                    view=view,
                )
            )
            pins = [
                next(found)
                if entry is None
                else Pin(
                    ReadStatus.NOT_YET
                    if buffer_sizes[i] >= entry.size
                    else ReadStatus.BUFFER_TOO_SMALL
                )
                for i, entry in enumerate(below)
            ]
        else:
            pins = front.pin(owner, namespace, part, digests, now, buffer_sizes, view=view)
        hits = [digest for digest, pin in zip(digests, pins, strict=True) if pin.id]
        if front.extents.prefetched:
            for entry in front.index.blocks(namespace, part).get_all(hits):
                if entry is not None:
                    front.extents.prefetched.read(entry)
        self.index.hits[self.front_tier] += len(hits)
        self.index.touch_others(namespace, part, hits, now)
        if self.transfers.cache_tiers:
            self.transfers.were_read(front.index.blocks(namespace, part).get_all(hits))
        if in_place_above is not None and any(below):
            self._pin_in_place(owner, below, pins, now, in_place_above)
        return pins

    def _pin_in_place(
        self,
        owner: int,
        below: Sequence[Entry | None],
        pins: MutableSequence[Pin],
        now: float,
        above: int,
    ) -> None:
        """Pin those of the blocks `below` that can be sent from where they are; their answers in
        `pins` change from NOT_YET to HIT, all or none."""
        found = {
            position: entry
            for position, entry in enumerate(below)
            if entry is not None
            and entry.index.tier in self.in_place_tiers
            and pins[position].status is ReadStatus.NOT_YET
        }
        size = sum([pin.extent.size for pin in pins if pin.extent is not None])
        if size + sum([entry.size for entry in found.values()]) <= above:
            return
        taken: dict[int, Pin] = {}
        for position, entry in found.items():
            index, tier = entry.index, entry.index.tier
            store = self.stores[tier]
            (pin,) = store.pin(owner, index.namespace, index.part, [entry.digest], now)
            if pin.extent is not None:
                size += entry.size
                taken[position] = pin._replace(tier=tier)
        if size <= above:  # this connection may not pin enough there
            self.unpin(owner, list(taken.values()))
            return
        for position, pin in taken.items():
            pins[position] = pin
            entry = found[position]
            index, tier = entry.index, entry.index.tier
            self.index.hits[tier] += 1
            self.index.touch_others(index.namespace, index.part, [entry.digest], now, counted=tier)

    def unpin(self, owner: int, pins: Sequence[Pin]) -> None:
        """Each where it lies."""
        if self.in_place_tiers:
            for pin in pins:
                if pin.tier is not None:
                    self.stores[pin.tier].unpin(owner, pin.id)
        here = [pin.id for pin in pins if pin.extent is not None and pin.tier is None]
        self.front.unpin_all(owner, here)

    def holders(self, owner: int) -> list[Owner]:
        stores = (self.front, *(self.stores[tier] for tier in self.in_place_tiers))
        return [held for store in stores if (held := store.held.known(owner)) is not None]

    def drop_owner(self, owner: int, *, writer_may_be_alive: bool = False) -> bool:
        for tier in self.in_place_tiers:
            self.stores[tier].drop_owner(owner)
        return self.front.drop_owner(owner, writer_may_be_alive=writer_may_be_alive)

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
        checksums: Sequence[int] = (),
    ) -> list[bool]:
        removed = [False] * len(digests)
        for store in self.online:
            of_tier = store.remove(namespace, digests, reason, part, checksums)
            for position, was_here in enumerate(of_tier):
                removed[position] |= was_here
        return removed

    def hint(
        self, subject: str | ChainEnd, resume_in: float | None, now: float, *, age_s: float = 0.0
    ) -> bool | None:
        """The answer is that of the backing tier, where it counts most; of memory, if only that
        has blocks."""
        answers = [store.hint(subject, resume_in, now, age_s=age_s) for store in self.stores]
        below = answers[self.backing_tier]
        return answers[self.front_tier] if below is None else below

    @property
    def is_writing_back(self) -> bool:
        if not self.front.extents.demotes:  # the tier below is lost: soon all of it may be evicted
            return bool(self.front.extents.dirty)
        return bool(self.queue.waiting or self.front.held.pinned_by(MOVER))

    # --- tiers that fail --------------------------------------------------------------------

    def take_offline(self, tier: int) -> None:
        """A tier is out of service: no reader finds its blocks, which the caller must drop.

        When it was the backing tier, the front tier is the backing tier from now on.
        """
        self.index.offline.add(tier)
        self._dropping[tier] = None
        if tier == self.backing_tier:
            self.backing_tier = self.front_tier
            self._dropping[tier] = self.queue.end()

    def drop_lost(self, tier: int, part: int | None = None) -> Iterator[None]:
        """Remove and announce what an offline tier or a lost part has, in steps; may begin anew."""
        if part is None and not self.front.extents.demotes:
            yield from self.queue.forget(self._dropping.get(tier))
        store = self.stores[tier]
        for index, entries in store.index.inventory_steps():
            if part is not None:
                entries = [one for one in entries if part_of(store.allocator, one.offset) == part]
            for first in range(0, len(entries) or 1, DROPPED_STEP):
                # By then some have left, and a block of the same name may lie in another part.
                step = entries[first : first + DROPPED_STEP]
                digests = [one.digest for one in step if one.state is State.STORED]
                store.remove(index.namespace, digests, ReadStatus.TIER_LOST, index.part)
                yield
        if part is None:
            self._dropping.pop(tier, None)

    # --- starting -----------------------------------------------------------------------------

    def restore(self, records: Sequence[Record], now: float) -> Iterator[None]:
        """Add the blocks that the backing tier recovered, in steps between which the loop may run.

        `erasures` gets the records that do not fit. Between two steps the store is
        consistent, but the blocks added so far cannot be evicted yet (design: nvme-format).
        """
        store = self.backing
        assert isinstance(store, FileStore)
        found: list[list[Record]] = []
        for run in sorted_runs(records, _OFFSET):
            found.append(run)
            yield
        entries: list[Entry] = []
        for number, record in enumerate(merge(*found, key=_OFFSET), 1):
            entry = store.restore(record)
            if entry is None:
                self.erasures.add(record.offset)
            else:
                entries.append(entry)
            if number % RESTORED_AT_ONCE == 0:
                yield
        yield from store.cut_circles(entries)
        yield from store.activate_restored(entries, now)

    # --- looking --------------------------------------------------------------------------------

    def peek(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        entry = self.front.index.peek(namespace, part, digest)
        return entry or self.index.below(namespace, part, digest)

    @property
    def fingerprint(self) -> MapFingerprint | None:
        """None while the blocks of a lost tier are announced step by step."""
        return None if self._dropping else self.index.fingerprint

    @property
    def stored(self) -> int:
        """Approximate number of sealed blocks: one that waits for writing back may count twice."""
        return self.backing.index.stored + self.front.extents.dirty + len(self.queue.unwritten)

    @property
    def used_bytes(self) -> int:
        backing = self.backing.allocator
        return min(backing.allocated + self.front.extents.dirty_bytes, backing.capacity)

    @property
    def figures(self) -> dict[str, int]:
        """With write-back also what memory dropped without writing it to the backing tier, because
        its session had ended or its branch was superseded."""
        extents = self.front.extents
        found = {**super().figures, "dirty_bytes": extents.dirty_bytes}
        if self.queue.write_back is not None:
            found |= {"spared_writes": extents.spared, "spared_write_bytes": extents.spared_bytes}
        return found

    @property
    def online(self) -> list[Store]:
        return self.index.online

    # --- inside -----------------------------------------------------------------------------------

    def _on_leave(self, entry: Entry, event: Event) -> bool:
        """A sealed block has just left a store: True when no tier has it any more.

        The order of these four steps matters (design: tiers): a block that
        the backing tier evicts leaves every tier, so that the pool never serves what its policy
        has given up, and each departure is announced exactly once.
        """
        tier, namespace, part = entry.index.tier, entry.index.namespace, entry.index.part
        if tier == self.backing_tier:
            self.erasures.add(entry.offset)
        self.queue.left(entry)
        if self.is_evicting:
            return False
        if tier == self.backing_tier and event is Event.EVICT and self.queue.write_back is None:
            others = (self.backing, cold_store(self.stores))
            above = [one for one in self.index.online if one not in others]
            found_in = [(one, one.index.peek(namespace, part, entry.digest)) for one in above]
            copies = [(store, copy) for store, copy in found_in if copy is not None]
            if any(copy.index.account.owns(0) for _, copy in copies):
                return False  # its tenant is guaranteed the memory (design: quotas)
            self.is_evicting = True  # their `_on_leave` must not announce
            for store, _ in copies:
                store.remove(namespace, [entry.digest], ReadStatus.EVICTED, part)
            self.is_evicting = False
        found = self.peek(namespace, part, entry.digest)
        if found is None:
            return True
        # Masters send readers to this tier: announce the tier that has the block now.
        place = found.index.tier
        if tier == self.front_tier or (place != self.front_tier and tier < place):
            self.change_log.add(found.index, [found.digest], ReadStatus.HIT, place)
        kept = tier == self.backing_tier and place == self.front_tier
        if kept and not (event is Event.EVICT and self.queue.is_given_up(found)):
            # The backing tier lost its copy because that was corrupt: write it again. Or, with
            # write-back, it evicted what memory still uses, perhaps below blocks that are dirty.
            self.front.extents.mark_dirty(found)
            self.queue.add(found)
        return False
