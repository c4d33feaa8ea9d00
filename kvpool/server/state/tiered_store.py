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

Pure, like `store.py`: this file hands out `TierTransfer`s, `TierMover` moves the bytes and reports.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import compress
from operator import attrgetter
from typing import Final

from kvpool.fingerprint import MapFingerprint
from kvpool.protocols import ReserveRequest
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.divided_allocator import DividedAllocator
from kvpool.server.state.entry import MOVER, Account, Entry, Owner
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.prefetches import FRESH_S
from kvpool.server.state.store import Store
from kvpool.server.state.tier_stores import RESTORED_AT_ONCE, FileStore, cold_store
from kvpool.server.state.write_back import WriteBack
from kvpool.sorting import sorted_runs
from kvpool.types import (
    Extent,
    Namespace,
    Pin,
    ReadStatus,
    Record,
    Reservation,
    WriteStatus,
)

#: Blocks that are not written because they are of no use, in one call.
_USELESS_MAX: Final = 256
#: Blocks of a lost tier that are removed in one step: a millisecond or two.
_DROPPED_STEP: Final = 64
#: More bytes than any queue has.
_ALL: Final = 1 << 62
#: The blocks of one write are used within this time: none of them is older than its parent.
_ONE_USE_US: Final = 10_000
_OFFSET: Final = attrgetter("offset")


@dataclass(frozen=True, slots=True, eq=False)
class TierTransfer:
    """A copy of one block from one tier to another. Neither extent is reused before
    `transfer_done`."""

    source: int
    target: int
    entry: Entry  # at the source, pinned
    pin: int
    id: int  # of the reservation at the target
    extent: Extent  # at the target
    prefetch: bool = False  # it comes up before a reader has asked for it

    def __repr__(self) -> str:
        return f"<Copy {self.entry!r} tier {self.source} to {self.target}>"


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
        self.offline_tiers: set[int] = set()
        #: Reads that each tier has served, promoted blocks where they came from.
        self.hits = [0] * len(self.stores)
        self._cache_tiers = [t for t in range(self.backing_tier) if t != front_tier]
        #: For each part of the backing tier the offsets whose records must go.
        self._erasable: defaultdict[int, list[int]] = defaultdict(list)
        #: Dirty blocks, in the order of writing. Not a dict, see `_unwritten`.
        self._writeback_queue: OrderedDict[Entry, None] = OrderedDict()
        self._moving_bytes = 0  # whole extents on their way to the backing tier
        #: The backing tier takes no writes: `stop_writing` and `resume_writing` change it.
        self.read_only = False
        #: Clean without a copy since then, in the order of writing. Not a dict, which takes linear
        #: time to find its first entry when those before it are gone.
        self._unwritten: OrderedDict[Entry, None] = OrderedDict()
        #: Fetched from another server and not written back: they make room there by their age.
        self._fetched: set[Entry] = set()
        #: Evicted by the backing tier and kept by memory: their last use at that time.
        self._written_again: dict[Entry, int] = {}
        self._to_promote: deque[Entry] = deque()  # from the front tier to cache tiers
        self._dropping: dict[int, WriteBack | None] = {}  # offline tiers that still have blocks
        self._evicting = False  # copies in other tiers leave with their block: announced once
        count = self._count_place if cold is None else cold.count_with(self._count_place)
        for tier, store in enumerate(self.stores):
            store.index.tier = tier
            store.index.change_log = self.change_log
            store.index.on_leave = self._on_leave
            store.index.count_place = count
        # Sealed blocks of the front tier can be written back, which makes them evictable.
        front.room.has_copy = lambda entry: self._elsewhere_than_in_front(entry) is not None
        front.room.older_waits = self._older_waits
        front.room.demotes = self.backing_tier != front_tier
        #: None: write-through. What is in the queue is written as soon as possible.
        self.write_back = (
            WriteBack(self.front.room, self._writeback_queue)
            if write_back and self.front.room.demotes
            else None
        )

    # --- for connections ------------------------------------------------------------------

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        front = self.front
        namespace, part, digests, *_ = request
        below = [self._in_slower_tier(namespace, part, digest) for digest in digests]
        if request.last_used is not None and not self._has_room_below(request, now):
            return [Reservation(WriteStatus.NO_SPACE)] * len(digests)
        if not any(below):
            answers = front.reserve(owner, request, now)
        else:
            new = [position for position, entry in enumerate(below) if entry is None]
            granted = iter(front.reserve(owner, request.subset(new), now))
            here = Reservation(WriteStatus.ALREADY_STORED)
            answers = [here if entry is not None else next(granted) for entry in below]
        if self.write_back is not None:
            refused = [a.status is WriteStatus.NO_SPACE for a in answers]
            if any(refused):
                self._refused(sum(map(front.allocator.rounded, compress(request.sizes, refused))))
        known = [
            digest
            for digest, answer in zip(digests, answers, strict=True)
            if answer.status is WriteStatus.ALREADY_STORED
        ]
        if known:
            self._touch_others(namespace, part, known, now)
        return answers

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
        if front.room.demotes:
            reserved = front.held.owner(owner).reservations
            entries = [reserved[id] for id in ids if id in reserved]
        statuses = front.seal_all(owner, ids, checksums, now, last_used=last_used)
        for entry in entries:  # no other tier has it
            front.room.mark_dirty(entry)
            self._queue(entry)
            if last_used is not None:
                self._fetched.add(entry)
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
        """NOT_YET for a block of a slower tier, which `start_promotions` copies."""
        front = self.front
        below = [self._in_slower_tier(namespace, part, digest) for digest in digests]
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
        if front.room.prefetched:
            for entry in front.index.blocks(namespace, part).get_all(hits):
                if entry is not None:
                    front.room.prefetched.read(entry)
        self.hits[self.front_tier] += len(hits)
        self._touch_others(namespace, part, hits, now)
        if self._cache_tiers:
            self._count_reads(namespace, part, hits)
        if in_place_above is not None and any(below):
            self._pin_in_place(owner, below, pins, now, in_place_above)
        return pins

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
        self, name: str, resume_in: float | None, now: float, *, age_s: float = 0.0
    ) -> bool | None:
        """The answer is that of the backing tier, where it counts most; of memory, if only that
        has blocks."""
        answers = [store.hint(name, resume_in, now, age_s=age_s) for store in self.stores]
        below = answers[self.backing_tier]
        return answers[self.front_tier] if below is None else below

    # --- for the mover -----------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Blocks that wait to be written back. None while the backing tier is read-only, and, with
        write-back, while little enough is dirty."""
        if self.read_only or self._due_bytes <= 0:
            return 0
        return len(self._writeback_queue) + len(self._unwritten)

    @property
    def _due_bytes(self) -> int:
        """How much is to be written back now; blocks of a tier that was read-only are overdue."""
        if not self.front.room.demotes:
            return 0
        if self.write_back is None or self._unwritten:
            return _ALL
        return self.write_back.due_bytes(self._moving_bytes)

    def flush(self) -> Iterator[None]:
        """The server stops: from now on all that is dirty is due, the most valuable first.

        In steps between which the loop may run.
        """
        if self.write_back is not None:
            yield from self.write_back.flush()

    @property
    def is_writing_back(self) -> bool:
        if not self.front.room.demotes:  # the tier below is lost: soon all of it may be evicted
            return bool(self.front.room.dirty)
        return bool(self.waiting or self.front.held.pinned_by(MOVER))

    def next_writebacks(self, size_max: int, count_max: int, now: float) -> list[TierTransfer]:
        """The next blocks to copy to the backing tier, then those for the cache tiers.

        About `size_max` bytes and `count_max` copies; fewer only where there are no more. Space is
        reserved for them. A block that the backing tier refuses, because its policy keeps what it
        has, stays in the front tier until it is evicted. While the backing tier is read-only, those
        for the cache tiers.
        """
        copies: list[TierTransfer] = []
        taken = 0
        if not self.read_only and self._due_bytes > 0:
            if self.write_back is not None:
                self.write_back.drop_useless()
            taken = self._start_writebacks(copies, min(size_max, self._due_bytes), count_max, now)
        while self._to_promote and taken < size_max and len(copies) < count_max:
            entry = self._to_promote.popleft()
            if entry.state is State.STORED:
                for tier in self._cache_tiers:
                    if tier not in self.offline_tiers:
                        self._start(copies, entry, self.front_tier, tier, now)
                taken += entry.size
        return copies

    def try_writeback(self, now: float) -> list[TierTransfer]:
        """One block to copy to a read-only backing tier, to see if it takes writes again."""
        copies: list[TierTransfer] = []
        self._start_writebacks(copies, 1, 1, now)
        return copies

    def start_promotions(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        size_max: int,
        now: float,
        *,
        prefetch: bool = False,
    ) -> list[TierTransfer]:
        """Transfers that promote blocks to the front tier, about `size_max` bytes, in that order.

        Ends early where the front tier has no space. Skips blocks that are in no slower tier, and
        those that are being promoted already. A `prefetch` evicts nothing that was used in the last
        `FRESH_S`, or whose session is expected sooner.
        """
        copies: list[TierTransfer] = []
        taken = 0
        for digest in digests:
            entry = self._in_slower_tier(namespace, part, digest)
            if entry is None:
                continue
            if taken >= size_max:
                break
            source = entry.index.tier
            answer = self._start(copies, entry, source, self.front_tier, now, prefetch=prefetch)
            if answer is WriteStatus.NO_SPACE:
                if not prefetch:
                    self._refused(self.front.allocator.rounded(entry.size))
                break
            if answer is WriteStatus.RESERVED:
                self.hits[entry.index.tier] += 1
                taken += self.front.allocator.rounded(entry.size)
        return copies

    def is_below(self, namespace: Namespace, part: int, digest: bytes) -> bool:
        """Whether the block would have to be promoted for a reader."""
        return self._in_slower_tier(namespace, part, digest) is not None

    def transfer_done(self, copy: TierTransfer, *, good: bool, now: float) -> None:
        """The bytes were moved (`good`) or not: seal or cancel the target, unpin the source."""
        source, target = self.stores[copy.source], self.stores[copy.target]
        entry = copy.entry
        if copy.target > self.front_tier:
            self._moving_bytes -= self.front.allocator.rounded(entry.size)
            # A block with children in memory makes no room there before they are written, too.
            if not good or not entry.children:
                self._refused(0)
        lost = target.writer_exited(-copy.id)  # with its device: it is counted no more
        if copy.prefetch and not lost:
            self.front.room.prefetched.coming -= self.front.allocator.rounded(entry.size)
        if self.offline_tiers.intersection((copy.source, copy.target)):
            good = False  # `take_offline` has already removed these blocks from the pool
        # The source block may have been removed during the transfer: then no copy may appear.
        if good and not lost and entry.state is State.STORED:
            down = copy.target == self.backing_tier != self.front_tier
            # A prefetched block is as old as it was: if nobody reads it, it is the next victim.
            last_used = entry.last_used if down or copy.prefetch else None
            ids, sums = [copy.id], [entry.checksum]
            target.seal_all(MOVER, ids, sums, now, from_other_tier=True, last_used=last_used)
            if copy.target == self.front_tier:
                self.change_log.append(entry, ReadStatus.HIT, self.front_tier)
                index, front = entry.index, self.front
                came = front.index.blocks(index.namespace, index.part)[entry.digest]
                if copy.prefetch:
                    front.room.prefetched.add(came, front.allocator.rounded(came.size), now)
                if front.room.demotes and source is cold_store(self.stores):
                    front.room.mark_dirty(came)  # the disk is to have it again
                    self._queue(came)
            elif down:
                self._fetched.discard(entry)
                self.front.room.mark_clean(entry)
        elif not lost:
            target.cancel(MOVER, copy.id)
            if copy.target == self.backing_tier != self.front_tier:
                self._to_erase(copy.extent.offset)  # its record may be written already
            waits = entry.state is State.STORED and not entry.clean
            if waits and not self.front.room.demotes:
                self.front.room.mark_clean(entry)  # its tier is lost
            elif waits and copy.target == self.backing_tier:
                self._queue(entry)  # once more
        source.unpin(MOVER, copy.pin)

    def transfer_failed(self, copy: TierTransfer, reason: ReadStatus) -> None:
        """The source could not be read, or its bytes are corrupt: remove the block there."""
        index = copy.entry.index
        self.stores[copy.source].remove(index.namespace, [copy.entry.digest], reason, index.part)

    def stop_writing(self) -> Iterator[None]:
        """The backing tier takes no writes: evict as if it had every block, until it does again.

        In steps between which the loop may run. Ends early after `resume_writing`.
        """
        self.read_only = True
        number = 0
        while self.read_only and self._writeback_queue:
            entry = self._next_in_queue()
            if entry.state is State.STORED and not entry.clean:
                self._queue(entry)
            number += 1
            if number % 1024 == 0:
                yield

    def resume_writing(self) -> int:
        """The backing tier takes writes again. How many blocks `next_writebacks` returns late."""
        self.read_only = False
        return len(self._unwritten)

    def take_offline(self, tier: int) -> None:
        """A tier is out of service: no reader finds its blocks, which the caller must drop.

        When it was the backing tier, the front tier is the backing tier from now on.
        """
        self.offline_tiers.add(tier)
        self._dropping[tier] = None
        if tier == self.backing_tier:
            self.backing_tier = self.front_tier
            self.front.room.demotes = self.front.room.drops_useless = False
            self._dropping[tier], self.write_back = self.write_back, None
            self.read_only = False

    def drop_lost(self, tier: int, part: int | None = None) -> Iterator[None]:
        """Remove and announce what an offline tier or a lost part has, in steps; may begin anew."""
        if part is None and not self.front.room.demotes:
            yield from self._forget_dirty(self._dropping.get(tier))
        store = self.stores[tier]
        for index, entries in store.index.inventory_steps():
            if part is not None:
                entries = [one for one in entries if self.part_of(tier, one.offset) == part]
            for first in range(0, len(entries) or 1, _DROPPED_STEP):
                # By then some have left, and a block of the same name may lie in another part.
                step = entries[first : first + _DROPPED_STEP]
                digests = [one.digest for one in step if one.state is State.STORED]
                store.remove(index.namespace, digests, ReadStatus.TIER_LOST, index.part)
                yield
        if part is None:
            self._dropping.pop(tier, None)

    def _forget_dirty(self, write_back: WriteBack | None) -> Iterator[None]:
        """Without a tier below no block can be written back: each may be evicted as it is."""
        for queue in (self._writeback_queue, self._unwritten):
            while queue:
                for _ in range(min(_DROPPED_STEP, len(queue))):
                    self.front.room.mark_clean(queue.popitem(last=False)[0])
                yield
        if write_back is not None:
            yield from write_back.forget()

    def part_of(self, tier: int, offset: int) -> int:
        """The number of the part of a tier in which an extent lies; 0 where there is only one."""
        parts = self.parts_of(tier)
        return parts.part_of(offset) if parts is not None else 0

    def parts_of(self, tier: int) -> DividedAllocator | None:
        """The extents of a tier that has parts; None if it is one."""
        allocator = self.stores[tier].allocator
        return allocator if isinstance(allocator, DividedAllocator) else None

    @property
    def erasable(self) -> int:
        """How many offsets `take_erasable` would return."""
        return sum(map(len, self._erasable.values()))

    def take_erasable(self, part: int | None = None) -> list[int]:
        """Offsets in the backing tier, or that part of it, that were freed since the last call:
        erase their records."""
        if part is not None:
            return self._erasable.pop(part, [])
        found, self._erasable = self._erasable, defaultdict(list)
        return [offset for offsets in found.values() for offset in offsets]

    def erase_failed(self, offsets: Sequence[int]) -> None:
        """Their records may still be there: `take_erasable` returns them once more."""
        for offset in offsets:
            self._to_erase(offset)

    def _to_erase(self, offset: int) -> None:
        parts = self.parts_of(self.backing_tier)
        part = parts.part_of(offset) if parts is not None else 0
        if parts is None or part not in parts.retired:
            self._erasable[part].append(offset)

    # --- starting -----------------------------------------------------------------------------

    def restore(self, records: Sequence[Record], now: float) -> Iterator[None]:
        """Add the blocks that the backing tier recovered, in steps between which the loop may run.

        `take_erasable` returns the records that do not fit. Between two steps the store is
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
                self._to_erase(record.offset)
            else:
                entries.append(entry)
            if number % RESTORED_AT_ONCE == 0:
                yield
        yield from store.cut_circles(entries)
        yield from store.activate_restored(entries, now)

    # --- looking --------------------------------------------------------------------------------

    def peek(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        entry = self.front.index.peek(namespace, part, digest)
        return entry or self._in_slower_tier(namespace, part, digest)

    @property
    def fingerprint(self) -> MapFingerprint | None:
        """None while the blocks of a lost tier are announced step by step."""
        if self._dropping:
            return None
        found = [store.index.fingerprint for store in self.stores]
        return MapFingerprint(sum(one.blocks for one in found), sum(one.total for one in found))

    @property
    def stored(self) -> int:
        """Approximate number of sealed blocks: one that waits for writing back may count twice."""
        return self.backing.index.stored + self.front.room.dirty + len(self._unwritten)

    @property
    def used_bytes(self) -> int:
        backing = self.backing.allocator
        return min(backing.allocated + self.front.room.dirty_bytes, backing.capacity)

    @property
    def figures(self) -> dict[str, int]:
        """With write-back also what memory dropped without writing it to the backing tier, because
        its session had ended or its branch was superseded."""
        room = self.front.room
        found = {**super().figures, "dirty_bytes": room.dirty_bytes}
        if self.write_back is not None:
            found |= {"spared_writes": room.spared, "spared_write_bytes": room.spared_bytes}
        return found

    @property
    def is_under_pressure(self) -> bool:
        """True when writers must soon wait for the backing tier: too much of memory is dirty."""
        if self.write_back is not None:
            return self.write_back.is_late
        return self.front.room.dirty_bytes * 4 > self.front.allocator.capacity

    # --- inside -----------------------------------------------------------------------------------

    def _queue(self, entry: Entry) -> None:
        """Add a dirty block to the queue for writing back."""
        if self.read_only:
            self._unwritten[entry] = None
            self.front.room.mark_clean(entry)
        else:
            self._writeback_queue[entry] = None
            if self.write_back is not None:
                self.write_back.queued(entry)

    def _refused(self, size: int) -> None:
        """Memory had no space for so many bytes: what is dirty must be written for them."""
        if self.write_back is not None:
            self.write_back.wanted_bytes = max(size, self.write_back.wanted_bytes) if size else 0

    def _next_in_queue(self) -> Entry:
        """The block whose turn it is; those that had to wait for a read-only tier come last."""
        if self._writeback_queue and self.write_back is not None:
            entry = self.write_back.next()
        elif self._writeback_queue:
            entry, _ = self._writeback_queue.popitem(last=False)
        else:
            entry, _ = self._unwritten.popitem(last=False)
            self.front.room.mark_dirty(entry)
        return entry

    def _older_waits(self, entry: Entry, of: Callable[[Account], bool]) -> bool:
        """Whether a block of such tenants that was used before this one is on its way to the
        backing tier, or the next that goes there."""
        if self.read_only:
            return False
        moving = (one for one in self.front.held.pinned_by(MOVER) if not one.clean)
        waiting = (next(moving, None), self._head_of_queue)
        before = entry.last_used - _ONE_USE_US
        return any(
            one is not None and one.last_used < before and of(one.index.account) for one in waiting
        )

    @property
    def _head_of_queue(self) -> Entry | None:
        if not self._writeback_queue:
            return None
        if self.write_back is not None:
            return self.write_back.least_recently_used()
        return next(iter(self._writeback_queue))

    @property
    def online(self) -> list[Store]:
        return [store for tier, store in enumerate(self.stores) if tier not in self.offline_tiers]

    def _in_slower_tier(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The sealed block in another tier, if the front tier does not have it sealed."""
        if self.front.index.peek(namespace, part, digest) is not None:
            return None
        for tier, store in enumerate(self.stores):
            if tier != self.front_tier and tier not in self.offline_tiers:
                entry = store.index.peek(namespace, part, digest)
                if entry is not None:
                    return entry
        return None

    def _has_room_below(self, request: ReserveRequest, now: float) -> bool:
        """Whether the backing tier can take blocks that are fetched, for older ones if it is full.

        Else they would be written to memory, and then refused below (design: moves).
        """
        if not self.front.room.demotes or self.read_only:
            return True
        backing, last_used = self.backing, request.last_used or ()
        free = backing.allocator.available - self.front.room.dirty_bytes
        oldest = int((now - backing.room.policy.victim_age(now)) * 1e6)
        size = sum(map(backing.allocator.rounded, request.sizes))
        return size <= free or min(last_used, default=oldest) >= oldest

    def _elsewhere_than_in_front(self, entry: Entry) -> Entry | None:
        index = entry.index
        stores = (store for store in self.online if store is not self.front)
        found = (store.index.peek(index.namespace, index.part, entry.digest) for store in stores)
        return next((one for one in found if one is not None), None)

    def _rank(self, tier: int) -> int:
        """Where readers look first: the front tier, then the others in order."""
        return -1 if tier == self.front_tier else tier

    def _count_place(self, entry: Entry, sign: int) -> None:
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
            self.hits[tier] += 1
            self._touch_others(index.namespace, index.part, [entry.digest], now, counted=tier)

    def _touch_others(
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
            if tier not in (self.front_tier, counted) and tier not in self.offline_tiers:
                blocks = store.index.blocks(namespace, part)
                for digest in digests:
                    entry = blocks.get(digest)
                    if entry is not None and entry.state is State.STORED:
                        store.room.policy.touch(entry, now)
                        store.room.policy.answered(entry, now)

    def _count_reads(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        blocks = self.front.index.blocks(namespace, part)
        for digest in digests:
            entry = blocks[digest]
            entry.reads += 1
            if entry.reads == 1:
                self._to_promote.append(entry)

    def _start_writebacks(
        self, copies: list[TierTransfer], size_max: int, count_max: int, now: float
    ) -> int:
        """Add transfers to the backing tier; the bytes of the blocks that were looked at."""
        taken = 0
        useless: list[Entry] = []
        for _ in range(len(self._writeback_queue) + len(self._unwritten)):
            if not self._writeback_queue and not self._unwritten:
                break  # room on the disk for one block may have taken others out of the queue
            if taken >= size_max or len(copies) >= count_max:
                break
            entry = self._next_in_queue()
            if entry.state is not State.STORED or entry.clean:
                continue
            if self.write_back is not None and self.write_back.is_useless(entry):
                useless.append(entry)
                if len(useless) == _USELESS_MAX:
                    break
                continue
            answer = self._start(copies, entry, self.front_tier, self.backing_tier, now)
            # An older transfer of a block with the same key still has its reservation.
            if answer is WriteStatus.IN_PROGRESS:
                self._queue(entry)
            elif answer is not WriteStatus.RESERVED:
                self.front.room.mark_clean(entry)
                self._fetched.discard(entry)
            taken += self.front.allocator.rounded(entry.size)
        for entry in useless:
            if self.write_back is not None and not self.write_back.evict_if_useless(entry):
                self._queue(entry)  # it is pinned, and its session may go on
        return taken

    def _start(
        self,
        copies: list[TierTransfer],
        entry: Entry,
        source: int,
        target: int,
        now: float,
        *,
        prefetch: bool = False,
    ) -> WriteStatus:
        """Pin the source and reserve the target, if it has space; the status of the target."""
        index = entry.index
        store = self.stores[target]
        evicts_before = None
        if prefetch:
            evicts_before = [int((now - FRESH_S) * 1e6)]
        elif entry in self._fetched:
            evicts_before = [entry.last_used]
        # First pin: the reservation below may evict blocks, and this one must not be among them.
        pin = self.stores[source].held.pin(MOVER, entry)
        (answer,) = store.reserve(
            MOVER,
            ReserveRequest(
                index.namespace,
                index.part,
                [entry.digest],
                [entry.parent],
                [entry.size],
                self.front.room.policy.hint_of(entry.session, now),
                evicts_before,
                [entry.copies],
            ),
            now,
        )
        if answer.extent is None:
            self.stores[source].unpin(MOVER, pin)
        else:
            if target > self.front_tier:
                self._moving_bytes += self.front.allocator.rounded(entry.size)
            if prefetch:
                self.front.room.prefetched.coming += self.front.allocator.rounded(entry.size)
            store.room.blocks_at[answer.extent.offset].born = entry.born
            copy = TierTransfer(source, target, entry, pin, answer.id, answer.extent, prefetch)
            copies.append(copy)
        return answer.status

    def _on_leave(self, entry: Entry, event: Event) -> bool:
        """A sealed block has just left a store: True when no tier has it any more.

        The order of these four steps matters (design: tiers): a block that
        the backing tier evicts leaves every tier, so that the pool never serves what its policy
        has given up, and each departure is announced exactly once.
        """
        tier, namespace, part = entry.index.tier, entry.index.namespace, entry.index.part
        if tier == self.backing_tier:
            self._to_erase(entry.offset)
        self._unwritten.pop(entry, None)
        self._written_again.pop(entry, None)
        self._fetched.discard(entry)
        self._writeback_queue.pop(entry, None)
        if self._evicting:
            return False
        if tier == self.backing_tier and event is Event.EVICT and self.write_back is None:
            others = (self.backing, cold_store(self.stores))
            above = [one for one in self.online if one not in others]
            found_in = [(one, one.index.peek(namespace, part, entry.digest)) for one in above]
            copies = [(store, copy) for store, copy in found_in if copy is not None]
            if any(copy.index.account.owns(0) for _, copy in copies):
                return False  # its tenant is guaranteed the memory (design: quotas)
            self._evicting = True  # their `_on_leave` must not announce
            for store, _ in copies:
                store.remove(namespace, [entry.digest], ReadStatus.EVICTED, part)
            self._evicting = False
        found = self.peek(namespace, part, entry.digest)
        if found is None:
            return True
        # Masters send readers to this tier: announce the tier that has the block now.
        place = found.index.tier
        if tier == self.front_tier or (place != self.front_tier and tier < place):
            self.change_log.append(found, ReadStatus.HIT, place)
        kept = tier == self.backing_tier and place == self.front_tier
        if kept and not (event is Event.EVICT and self._is_given_up(found)):
            # The backing tier lost its copy because that was corrupt: write it again. Or, with
            # write-back, it evicted what memory still uses, perhaps below blocks that are dirty.
            self.front.room.mark_dirty(found)
            self._queue(found)
        return False

    def _is_given_up(self, entry: Entry) -> bool:
        """Whether a block of the front tier that the backing tier has evicted stays without a copy.

        It is written again once for each use. Two blocks that take each other's place on a full
        disk would be written for ever; and those that wait behind them would stay dirty, so that
        nothing in memory could make room for a reader.
        """
        if self.write_back is not None and self.write_back.is_flushing:
            return True
        given_up = self._written_again.get(entry) == entry.last_used
        self._written_again[entry] = entry.last_used
        return given_up
