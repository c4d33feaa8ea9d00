"""The books of a server with several tiers, as one.

One tier is *reached*: clients write into its memory and read out of it. The lowest one is the
*base*: what it evicts, the pool has lost. Every other copy only makes things faster and may go at
any time without a word; all else follows from that rule.

    write   into the reached tier; copied to the base in the background, in the order of writing
    read    from the reached tier; what is not there is staged into it first
    full    a block that has been copied is dropped, which is a matter of books: nobody waits

Whoever writes faster than the base can take waits in the end, for a bounded time: when all that
the reached tier holds has yet to be copied. Tiers that are neither (HBM) take copies of what is
read repeatedly, and are asked before the base when the reached tier has dropped a block.

Pure, like `store.py`: it hands out `Copy`s, the server moves the bytes and reports back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.errors import InvariantViolated
from kvpool.protocols import ReserveRequest
from kvpool.server.state.entry import Change, Entry
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.store import Store
from kvpool.types import (
    Extent,
    HintStatus,
    Namespace,
    Pin,
    ReadStatus,
    Record,
    Reservation,
    SessionHint,
    WriteStatus,
)

#: Owns what is held for copies between tiers; connections count from 1.
MOVER: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One block on its way from one tier to another. Both ends are held until `Stack.copied`."""

    source: int
    target: int
    entry: Entry  # at the source, pinned
    pin: int
    id: int  # of the reservation at the target
    extent: Extent  # at the target

    def __repr__(self) -> str:
        return f"<Copy {self.entry!r} tier {self.source} to {self.target}>"


class Stack:
    """A server's stores, the highest tier first; `reached` is the one that clients see."""

    def __init__(
        self, stores: Sequence[Store], *, reached: int = 0, promote_after: int = 1
    ) -> None:
        self.stores = list(stores)
        self.reached = reached
        self.base = len(self.stores) - 1
        self.promote_after = promote_after
        self.lost_tiers: set[int] = set()
        #: Reads that each tier has served, staged ones where they came from.
        self.hits = [0] * len(self.stores)
        self._sides = [t for t in range(self.base) if t != reached]
        self._freed: list[int] = []
        self._to_copy: deque[Entry] = deque()
        self._waiting_bytes = 0
        self._to_promote: deque[Entry] = deque()
        self._silent = False  # what leaves now is announced by whoever makes it leave
        self.journal = self.top.journal
        if len(self.stores) > 1:
            for tier, store in enumerate(self.stores):
                store.rank = tier
                store.journal = self.journal
                store.is_lost = self._is_lost
            self.top.unsettled_first = self.reached != self.base

    def __repr__(self) -> str:
        return f"<Stack {self.stores!r}>"

    @property
    def top(self) -> Store:
        """The books of the tier that clients reach."""
        return self.stores[self.reached]

    @property
    def bottom(self) -> Store:
        """The books of the tier that decides what the pool loses."""
        return self.stores[self.base]

    # --- for connections ------------------------------------------------------------------

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        """As `Store.reserve`: room in the reached tier for what no tier has yet."""
        top = self.top
        if len(self.stores) == 1:
            return top.reserve(owner, request, now)
        namespace, part, digests, *_ = request
        below = [self._only_elsewhere(namespace, part, digest) for digest in digests]
        if not any(below):
            answers = top.reserve(owner, request, now)
        else:
            new = [position for position, entry in enumerate(below) if entry is None]
            granted = iter(top.reserve(owner, request.subset(new), now))
            here = Reservation(WriteStatus.ALREADY_STORED)
            answers = [here if entry is not None else next(granted) for entry in below]
        known = [
            digest
            for digest, answer in zip(digests, answers, strict=True)
            if answer.status is WriteStatus.ALREADY_STORED
        ]
        if known:
            self._touch_others(namespace, part, known, now)
        return answers

    def seal(self, owner: int, id: int, checksum: int, now: float) -> WriteStatus:
        """As `Store.seal`; the block is copied down when its turn comes."""
        entry = self.top.reserved(owner, id)
        status = self.top.seal(owner, id, checksum, now)
        if not entry.settled:
            self._queue(entry)
        return status

    def pin(
        self,
        owner: int,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        now: float,
        buffer_sizes: Sequence[int],
    ) -> list[Pin]:
        """As `Store.pin`; NOT_YET for a block that another tier has: `stage` brings it."""
        top = self.top
        if len(self.stores) == 1:
            return top.pin(owner, namespace, part, digests, now, buffer_sizes)
        below = [self._only_elsewhere(namespace, part, digest) for digest in digests]
        if any(below):
            here = [position for position, entry in enumerate(below) if entry is None]
            found = iter(
                top.pin(
                    owner,
                    namespace,
                    part,
                    [digests[i] for i in here],
                    now,
                    [buffer_sizes[i] for i in here],
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
            pins = top.pin(owner, namespace, part, digests, now, buffer_sizes)
        hits = [digest for digest, pin in zip(digests, pins, strict=True) if pin.id]
        self.hits[self.reached] += len(hits)
        self._touch_others(namespace, part, hits, now)
        if self._sides:
            self._count_reads(namespace, part, hits)
        return pins

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
    ) -> list[bool]:
        """As `Store.remove`, in every tier."""
        removed = [False] * len(digests)
        for store in self._alive():
            for position, was_here in enumerate(store.remove(namespace, digests, reason, part)):
                removed[position] |= was_here
        return removed

    def end(self, session: str, now: float) -> HintStatus:
        """As `Store.end`, in every tier."""
        return [store.end(session, now) for store in self.stores][self.base]

    def resume(
        self, session: str, resume_in: float, now: float, *, age_s: float = 0.0
    ) -> HintStatus:
        """As `Store.resume`, in every tier."""
        answers = [store.resume(session, resume_in, now, age_s=age_s) for store in self.stores]
        return answers[self.base]

    # --- for whoever moves the bytes --------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Blocks that have yet to be copied down, those that have left meanwhile included."""
        return len(self._to_copy)

    def take_copies(self, size_max: int, count_max: int, now: float) -> list[Copy]:
        """The next blocks to be copied to the base and to other tiers.

        About `size_max` bytes and `count_max` copies; fewer only where there are no more.
        Room is made for them there. A block that the base has no room for, because its policy
        would rather keep what it has, stays where it is until it is evicted.
        """
        copies: list[Copy] = []
        taken = 0
        for _ in range(len(self._to_copy)):
            if taken >= size_max or len(copies) >= count_max:
                return copies
            entry = self._to_copy.popleft()
            self._waiting_bytes -= entry.size
            if entry.state is not State.STORED or entry.settled:
                continue
            answer = self._start(copies, entry, self.reached, self.base, now)
            if answer is WriteStatus.IN_PROGRESS:  # what is under way there will be given up
                self._queue(entry)
            elif answer is not WriteStatus.RESERVED:
                self.top.settle(entry)
            taken += entry.size
        while self._to_promote and taken < size_max and len(copies) < count_max:
            entry = self._to_promote.popleft()
            if entry.state is State.STORED:
                for tier in self._sides:
                    if tier not in self.lost_tiers:
                        self._start(copies, entry, self.reached, tier, now)
                taken += entry.size
        return copies

    def stage(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], size_max: int, now: float
    ) -> list[Copy]:
        """Copies that bring blocks up to the reached tier, about `size_max` bytes, in that order.

        Ends early where the reached tier has no room. Blocks that are on their way already, or
        nowhere, are passed over.
        """
        copies: list[Copy] = []
        taken = 0
        for digest in digests:
            entry = self._only_elsewhere(namespace, part, digest)
            if entry is None:
                continue
            if taken >= size_max:
                break
            answer = self._start(copies, entry, entry.index.tier, self.reached, now)
            if answer is WriteStatus.NO_SPACE:
                break
            if answer is WriteStatus.RESERVED:
                self.hits[entry.index.tier] += 1
                taken += entry.size
        return copies

    def copied(self, copy: Copy, *, good: bool, now: float) -> None:
        """The bytes are there (`good`), or will never be: both ends are let go."""
        source, target = self.stores[copy.source], self.stores[copy.target]
        entry = copy.entry
        if self.lost_tiers.intersection((copy.source, copy.target)):
            good = False  # what was in a lost tier has been given up already
        if good and entry.state is State.STORED:
            target.seal(MOVER, copy.id, entry.checksum, now, a_copy=True)
            if copy.target == self.reached:
                self.journal.tell(entry, ReadStatus.HIT, self.reached)
            elif copy.target == self.base:
                self.top.settle(entry)
        else:
            target.cancel(MOVER, copy.id)
            if copy.target == self.base != self.reached:
                self._freed.append(copy.extent.offset)  # it may have been remembered already
            if copy.target == self.base and entry.state is State.STORED and not entry.settled:
                self._queue(entry)  # once more; after `retire` it is settled
        source.unpin(MOVER, copy.pin)

    def spoilt(self, copy: Copy, reason: ReadStatus) -> None:
        """What was read for a copy is wrong, or cannot be read: the source drops it."""
        index = copy.entry.index
        self.stores[copy.source].remove(index.namespace, [copy.entry.digest], reason, index.part)

    def retire(self, tier: int) -> list[Entry]:
        """A tier is out of service; what was in it is for `bury`, some at a time.

        When it was the base, the reached tier is the base from now on.
        """
        self.lost_tiers.add(tier)
        if tier == self.base:
            self.base = self.reached
            self.top.unsettled_first = False
            for entry in self.top.inventory():
                self.top.settle(entry)
            self._to_copy.clear()
            self._waiting_bytes = 0
        return self.stores[tier].inventory()

    def bury(self, entries: Sequence[Entry]) -> None:
        """Say of blocks of a lost tier that the pool has lost them, where that is so."""
        for entry in entries:
            if entry.state is State.STORED and self._elsewhere(entry) is None:
                self.journal.left(entry, ReadStatus.TIER_LOST, entry.index.tier)

    @property
    def freed(self) -> int:
        """How many offsets `take_freed` would return."""
        return len(self._freed)

    def take_freed(self) -> list[int]:
        """Offsets in the base that hold nothing any more since the last call."""
        freed, self._freed = self._freed, []
        return freed

    # --- starting -----------------------------------------------------------------------------

    def restore(self, records: Sequence[Record], now: float) -> Iterator[None]:
        """What the base was found to hold, entered in steps; what cannot be is for `take_freed`.

        Between two steps the books are whole but the blocks entered
        so far cannot be evicted.
        """
        store = self.bottom
        entries: list[Entry] = []
        for number, record in enumerate(sorted(records, key=lambda record: record.offset)):
            entry = store.restore(record)
            if entry is None:
                self._freed.append(record.offset)
            else:
                entries.append(entry)
            if number % 1024 == 1023:
                yield
        entries.sort(key=lambda entry: entry.generation)
        store.adopt(entries, now)
        yield

    # --- looking --------------------------------------------------------------------------------

    def peek(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The sealed block in the tier where a reader would find it. Touches nothing (G9)."""
        entry = self.top.peek(namespace, part, digest)
        return entry or self._only_elsewhere(namespace, part, digest)

    def place(self, entry: Entry) -> int | None:
        """The tier where a reader would find the block of this entry now; None if none has it."""
        index = entry.index
        found = self.peek(index.namespace, index.part, entry.digest)
        return found.index.tier if found is not None else None

    def inventory(self) -> list[Entry]:
        """One entry for every sealed block of any tier. Live: ask `place` before using one."""
        base = self.bottom
        entries = base.inventory()
        for store in self._alive():
            if store is not base:
                entries += [
                    entry
                    for entry in store.inventory()
                    if base.peek(entry.index.namespace, entry.index.part, entry.digest) is None
                ]
        return entries

    def take_changes(self) -> list[Change]:
        """As `Store.take_changes`, of all tiers, in order."""
        journal = self.journal
        changes, journal.changes = journal.changes, []
        return changes

    def departures(self) -> list[Change]:
        """As `Store.departures`, for blocks that no tier has."""
        return [
            change
            for change in self.top.departures()
            if len(self.stores) == 1
            or not any(
                self._only_elsewhere(change.namespace, part, change.digest)
                for part in range(change.namespace.parts)
            )
        ]

    @property
    def has_room_below(self) -> bool:
        """What is sealed in the reached tier can be copied down and make room there."""
        return self.base != self.reached

    @property
    def stored(self) -> int:
        """Sealed blocks, about: those that have yet to be copied may be counted twice or not."""
        return self.bottom.stored + self.waiting

    @property
    def evicted(self) -> int:
        """Blocks that the pool has lost for want of room."""
        return sum(store.evicted for store in self.stores)

    @property
    def evicted_bytes(self) -> int:
        return sum(store.evicted_bytes for store in self.stores)

    @property
    def is_pressed(self) -> bool:
        """Much of the reached tier has yet to be copied down: writers will soon wait for it."""
        top = self.top
        return self._waiting_bytes * 4 > top.allocator.capacity

    def check(self) -> None:
        """Every invariant of the books. Raises InvariantViolated; O(blocks)."""
        for tier, store in enumerate(self.stores):
            if tier not in self.lost_tiers:
                store.check()
        waiting = set(map(id, self._to_copy))
        moving = {id(entry) for entry in self.top.pinned_by(MOVER)}
        for entry in self.top.inventory():
            if not entry.settled and id(entry) not in waiting and id(entry) not in moving:
                raise InvariantViolated(f"{entry!r} is never going to be copied: a leak")

    # --- inside -----------------------------------------------------------------------------------

    def _queue(self, entry: Entry) -> None:
        """It is to be copied to the base, after all that came before it."""
        self._to_copy.append(entry)
        self._waiting_bytes += entry.size

    def _alive(self) -> list[Store]:
        return [store for tier, store in enumerate(self.stores) if tier not in self.lost_tiers]

    def _only_elsewhere(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The block, sealed in another tier, where the reached one does not have it sealed."""
        if self.top.peek(namespace, part, digest) is not None:
            return None
        for tier, store in enumerate(self.stores):
            if tier != self.reached and tier not in self.lost_tiers:
                entry = store.peek(namespace, part, digest)
                if entry is not None:
                    return entry
        return None

    def _elsewhere(self, entry: Entry) -> Entry | None:
        """Another sealed copy of the same block, the reached tier's first."""
        index = entry.index
        found = self.peek(index.namespace, index.part, entry.digest)
        return found if found is not entry else None

    def _touch_others(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], now: float
    ) -> None:
        """A use of a block is one for every tier that has it."""
        for tier, store in enumerate(self.stores):
            if tier != self.reached and tier not in self.lost_tiers:
                blocks = store.blocks(namespace, part)
                for digest in digests:
                    entry = blocks.get(digest)
                    if entry is not None and entry.state is State.STORED:
                        store.policy.touch(entry, now)

    def _count_reads(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        blocks = self.top.blocks(namespace, part)
        for digest in digests:
            entry = blocks[digest]
            entry.reads += 1
            if entry.reads == self.promote_after:
                self._to_promote.append(entry)

    def _start(
        self, copies: list[Copy], entry: Entry, source: int, target: int, now: float
    ) -> WriteStatus:
        """Hold both ends of a copy, if the target has room."""
        index = entry.index
        store = self.stores[target]
        session = entry.session
        session_hint = (
            SessionHint(session.name) if session is not None and not session.ended else None
        )
        pin = self.stores[source].hold(MOVER, entry)  # first: making room must not evict it
        (answer,) = store.reserve(
            MOVER,
            ReserveRequest(
                index.namespace,
                index.part,
                [entry.digest],
                [entry.parent],
                [entry.size],
                session_hint,
            ),
            now,
        )
        if answer.extent is None:
            self.stores[source].unpin(MOVER, pin)
        else:
            copies.append(Copy(source, target, entry, pin, answer.id, answer.extent))
        return answer.status

    def _is_lost(self, entry: Entry, event: Event) -> bool:
        """Asked by a store that a sealed block has just left: does no other tier have it?"""
        tier, namespace, part = entry.index.tier, entry.index.namespace, entry.index.part
        if tier == self.base:
            self._freed.append(entry.offset)
        if self._silent:
            return False
        others = [
            store
            for store in self._alive()
            if store.rank != tier and store.peek(namespace, part, entry.digest) is not None
        ]
        if tier == self.base and event is Event.EVICT:
            self._silent = True
            for store in others:
                store.remove(namespace, [entry.digest], ReadStatus.EVICTED, part)
            self._silent = False
            return True
        found = self.peek(namespace, part, entry.digest)
        if found is None:
            return True
        place = found.index.tier
        if tier == self.reached or (place != self.reached and tier < place):
            self.journal.tell(found, ReadStatus.HIT, place)
        if tier == self.base and place == self.reached:  # it was rotten there: copy it again
            found.settled = False
            self._queue(found)
        return False
