"""Oracles for a server with a disk below its memory, and for the disk after the server's death.

The oracles of `oracles.py` check one tier each. These check both tiers together, and the platter
itself, sector by sector. A disk keeps a list of the damage that it has done (`platter.py`). All
bytes that are not on that list must be there and be right.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvpool.errors import InvariantViolated
from kvpool.protocols import ReserveRequest
from kvpool.protocols.persistent_tier import Record
from kvpool.protocols.policy import Policy
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.extent_state import Event
from kvpool.server.state.tier_stores import FileStore
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace, ReadStatus, Reservation, WriteStatus
from kvpool_tiers.nvme.format import GROUP_SIZE, HEADER_SIZE, Geometry, used_slots
from kvpool_tiers.nvme.tier import Nvme
from tests.simulation.disk import SimDisk
from tests.simulation.memory import SimTier
from tests.simulation.oracles import WatchedExtents, WatchedFront, WatchedStore
from tests.simulation.platter import PAGE, Damage
from tests.simulation.truth import BlockPart, GroundTruth

if TYPE_CHECKING:
    from kvpool.server.block_server import BlockServer
    from tests.simulation.platter import Platter

#: Faults after which a tier may be out of service.
_FAULTS_THAT_RETIRE: Final = ("failed reads", "hung", "crawled")
#: A tier whose disk has hung for so long must be out of service.
_TIMEOUT_S: Final = 33.0


def offset_in(memory: memoryview, part: memoryview) -> int:
    """The offset at which a view begins in its memory."""
    base = np.frombuffer(memory, np.uint8).ctypes.data
    return int(np.frombuffer(part, np.uint8).ctypes.data - base)


class DiskMemory:
    """The bytes of a disk tier, as they are on the platter now."""

    def __init__(self, platter: Platter, capacity: int, alignment: int) -> None:
        assert capacity <= GROUP_SIZE, "one group: payload and headers are in one piece each"
        self.platter = platter
        self.capacity = capacity
        self.alignment = alignment
        self._geometry = Geometry(capacity, alignment)
        self._start = self._geometry.pieces(0, 1)[0].position

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview(self.platter.memory)[self._start + offset :][:size]

    def offset_at(self, position: int) -> int | None:
        """The offset in the tier of a position on the disk; None outside the payload."""
        return position - self._start if position >= self._start else None

    def extent(self, offset: int, size: int) -> tuple[int, int]:
        """The range of an extent on the disk."""
        return self._start + offset, self._start + offset + size

    def header(self, offset: int) -> tuple[int, int]:
        """The range of an extent's header on the disk."""
        start = self._geometry.header(offset)
        return start, start + HEADER_SIZE

    def head_pages_hit(self, damages: Iterable[Damage]) -> frozenset[int]:
        """The numbers of damaged pages of superblocks and namespaces, which belong to no extent."""
        stop = self._geometry.header(0)
        return frozenset(
            page
            for one in damages
            for page in range(one.start // PAGE, -(-min(one.stop, stop) // PAGE))
        )

    def head_damage(self) -> frozenset[int]:
        """Those of them that are damaged, or cannot be read, now."""
        platter = self.platter
        sectors = sorted(platter.unreadable)
        unreadable = [Damage("", n * platter.sector, (n + 1) * platter.sector) for n in sectors]
        return self.head_pages_hit([*platter.damaged, *unreadable])

    @staticmethod
    def is_head_lost(pages: frozenset[int]) -> bool:
        """Both copies of a superblock or a namespace are among these pages."""
        first = Geometry.namespace(0, 0) // PAGE
        apart = Geometry.namespace(0, 1) // PAGE - first
        return {0, 1} <= pages or any(page >= first and page + apart in pages for page in pages)

    def is_damaged(self, offset: int, size: int) -> bool:
        """A fault has changed the extent or its header."""
        damaged = self.platter.is_damaged
        return damaged(*self.extent(offset, size)) or damaged(*self.header(offset))

    def headers(self) -> set[int]:
        """Offsets at which the disk has a header, valid or not."""
        found = set()
        for region in self._geometry.regions():
            stop = region.position + region.size
            slots = used_slots(memoryview(self.platter.memory)[region.position : stop])
            found |= {region.offset + slot * self.alignment for slot in slots}
        return found


class WatchedNvme(Nvme):
    """The tier, which tells what records it is given; with `circles` over a file in which some
    other program has made blocks their own ancestors."""

    def __init__(self, capacity: int, platter: Platter, circles: random.Random | None) -> None:
        super().__init__(capacity, platter.name, disk=SimDisk(platter))
        self._platter = platter
        self._rng = circles

    async def persist(self, records: Sequence[Record]) -> None:
        self._platter.recorded(records)
        await super().persist(records)

    async def recover(self) -> list[Record]:
        records = list(await super().recover())
        if self._rng is None:
            return records
        places = list(range(len(records)))
        self._rng.shuffle(places)
        while places:
            count = self._rng.randint(1, 6)
            circle, places = places[:count], places[count:]
            names = {(records[n].namespace, records[n].part) for n in circle}
            if len(names) == 1 and self._rng.random() < 0.5:
                parents = [records[n].digest for n in circle]
                for n, parent in zip(circle, parents[-1:] + parents[:-1], strict=True):
                    records[n] = records[n]._replace(parent=parent)
        return records


class PreviousDisk(NamedTuple):
    """What a server must find on its disk when it starts."""

    blocks: dict[BlockPart, int]  # and the offset of each
    damage_log: int  # entries of the damage log at that time
    head_damage: frozenset[int]  # pages, at that time
    #: Headers on it had no namespace: their blocks come back if the disk can be read again.
    hidden: bool
    unerased: frozenset[int]  # offsets of blocks that were removed while the tier was read-only


class WatchedDiskExtents(WatchedExtents):
    """Tells the store of each block that leaves."""

    def remove(self, entry: Entry, event: Event, reason: ReadStatus, *, free: bool = True) -> None:
        assert isinstance(self.watch, WatchedDiskStore)
        self.watch.leaving(entry, event, reason)
        super().remove(entry, event, reason, free=free)


class WatchedDiskStore(WatchedStore, FileStore):
    """The store of the disk tier, compared with the platter."""

    memory: DiskMemory
    extents_type = WatchedDiskExtents

    def __init__(
        self,
        life: str,
        memory: DiskMemory,
        truth: GroundTruth,
        previous_disk: PreviousDisk | None,
        *,
        every: int = 1,
        policy: Policy[Entry] | None = None,
    ) -> None:
        """Without a `previous_disk` the content of the disk is unknown."""
        super().__init__(life, memory, truth, every=every, policy=policy)
        self.above: WatchedStore | None = None
        #: The disk had no space for them, or gave them up for what it had to take.
        self.refused: set[BlockPart] = set()
        self._previous_disk = previous_disk
        self.restored = False
        self.is_read_only: Callable[[], bool] = lambda: False
        self.is_lost: Callable[[], bool] = lambda: False
        #: Evictions of blocks that memory kept, by their last use then: each is written again once.
        self._evicted_below: Counter[tuple[BlockPart, int]] = Counter()
        self.is_about_to_get: Callable[[Namespace, int, bytes], None] = lambda *_: None
        self.unerased: set[int] = set()
        self.dropped: Mapping[str, int] = {}  # what the tier did not find, by reason

    def verify(self, entry: Entry, when: str) -> None:
        """The platter holds the block's bytes, unless a fault has changed them."""
        key = entry.index.namespace, entry.digest, entry.index.part
        if self.truth.history(*key).corrupted or self.memory.is_damaged(entry.offset, entry.size):
            return
        super().verify(entry, when)

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        for digest in request.digests:
            self.is_about_to_get(request.namespace, request.part, digest)
        answers = super().reserve(owner, request, now)
        for digest, answer in zip(request.digests, answers, strict=True):
            if answer.extent is None:
                self.refused.add((request.namespace, digest, request.part))
            else:
                self.refused.discard((request.namespace, digest, request.part))
        return answers

    def seal_all(self, *sealed: Any, **settings: Any) -> list[WriteStatus]:
        statuses = super().seal_all(*sealed, **settings)
        self.truth.probes.add("a block was demoted to the disk")
        return statuses

    def restore(self, record: Record) -> Entry | None:
        entry = super().restore(record)
        if entry is not None:
            key = record.namespace, record.digest, record.part
            server = self.life.partition("#")[0]
            previous = self._previous_disk
            unknown = previous is None or previous.hidden
            unerased = previous is not None and entry.offset in previous.unerased
            excused = unknown or unerased or self.memory.is_damaged(entry.offset, entry.size)
            history = self.truth.history(*key)
            if not history.lives:
                self.truth.fail(f"G8: {entry!r} is found on the disk, but was never written")
            if server in history.erased and not excused:
                self.truth.fail(f"G8: {entry!r} was removed, but is back after a restart")
            if self.memory.platter.damages(*self.memory.header(entry.offset)) == {"rot"}:
                self.truth.fail(f"G8: the header of {entry!r} has flipped bits, but was accepted")
            self.truth.sealed(self.life, key)
            self.verify(entry, "found on the disk")
        return entry

    def cut_circles(self, entries: Sequence[Entry]) -> Iterator[None]:
        before = [entry.parent for entry in entries]
        yield from super().cut_circles(entries)
        if before != [entry.parent for entry in entries]:
            self.truth.probes.add("a circle of parents in a file was cut")

    def activate_restored(self, entries: Sequence[Entry], now: float) -> Iterator[None]:
        yield from super().activate_restored(entries, now)
        self.restored = True
        if entries:
            self.truth.probes.add("a disk tier came back warm")
        if self._previous_disk is None:
            return
        damage_log = self.memory.platter.damage_log[self._previous_disk.damage_log :]
        head = self._previous_disk.head_damage | self.memory.head_pages_hit(damage_log)
        if self.memory.is_head_lost(head) or self.dropped.get("unreadable"):
            self.truth.probes.add("both copies of a page of the disk were lost")
            return
        for (namespace, digest, part), offset in self._previous_disk.blocks.items():
            if self.index.peek(namespace, part, digest) is None:
                start, stop = self.memory.header(offset)
                if not any(one.start < stop and start < one.stop for one in damage_log):
                    self.truth.fail(f"G8: {digest.hex()[:12]} at {offset} is not on the disk")

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
        checksums: Sequence[int] = (),
    ) -> list[bool]:
        if part is not None and reason in (ReadStatus.CORRUPT, ReadStatus.TIER_LOST):
            for digest in digests:
                self._check_damaged(self.index.peek(namespace, part, digest), reason)
        return super().remove(namespace, digests, reason, part, checksums)

    def _check_damaged(self, entry: Entry | None, reason: ReadStatus) -> None:
        """A block that is dropped because of the disk must have been damaged by the disk."""
        if entry is None:
            return
        history = self.truth.history(entry.index.namespace, entry.digest, entry.index.part)
        if reason is ReadStatus.TIER_LOST:
            self.truth.probes.add("a block on disk could not be read")
            if not self.memory.platter.counts["EIO"] and not self.is_lost():
                self.truth.fail(f"G5: {entry!r} is dropped as unreadable, but no read has failed")
        else:
            self.truth.probes.add("a block on disk was found to be corrupt")
            if not history.corrupted and not self.memory.is_damaged(entry.offset, entry.size):
                self.truth.fail(f"G1: {entry!r} of {self.life} is corrupt, but no fault changed it")
            history.corrupted += 1

    def leaving(self, entry: Entry, event: Event, reason: ReadStatus) -> None:
        """A block leaves the disk."""
        index = entry.index
        if self.is_read_only():
            self.unerased.add(entry.offset)
        if entry.pins:
            self.truth.probes.add("a block left the disk while it was copied")
        key = index.namespace, entry.digest, index.part
        kept = self.above and self.above.index.peek(index.namespace, index.part, entry.digest)
        if kept:
            self.truth.probes.add("the disk evicted a block that was also in memory")
        if kept and event is Event.EVICT:
            self._evicted_below[key, kept.last_used] += 1
            if (times := self._evicted_below[key, kept.last_used]) > 1:
                self.refused.add(key)
            if times > 3:
                self.truth.fail(f"G6: {entry!r} is written to the disk again and again")
            if self.above and self.above.tenants and self.above.tenants.keeps(index.namespace):
                self.refused.add(key)  # memory keeps what is guaranteed there

    @property
    def hides_headers(self) -> bool:
        """Headers stay on the disk because both copies of their namespace are lost."""
        return bool(self.dropped.get("unnamed") or self.dropped.get("unreadable"))

    def previous_disk(self, *, in_service: bool) -> PreviousDisk | None:
        """What the next process must find on the disk after this one's death."""
        if not self.restored:
            return self._previous_disk  # it died before it could change anything
        platter, memory = self.memory.platter, self.memory
        head = memory.head_damage()
        if not in_service or memory.is_head_lost(head):
            return None
        blocks = {
            (entry.index.namespace, entry.digest, entry.index.part): entry.offset
            for entry in self.index.inventory()
            if not platter.is_damaged(*memory.header(entry.offset))
        }
        return PreviousDisk(
            blocks, len(platter.damage_log), head, self.hides_headers, frozenset(self.unerased)
        )


class TierOracle:
    """Checks both tiers of one server process together."""

    def __init__(
        self,
        server: BlockServer,
        top: WatchedStore,
        base: WatchedDiskStore,
        truth: GroundTruth,
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`soon` runs a check after the current step, when both stores are consistent again."""
        stack = server.stack
        assert isinstance(stack, TieredStore)
        self.stack = stack
        self.top = top
        self.base = base
        self._truth = truth
        self._soon = soon
        self._due = False
        #: Blocks that left memory while the disk took no writes, or before they were written later.
        self._left_unwritten: set[BlockPart] = set()
        #: Another server has fetched these, and they are about to leave.
        self.handed_over: set[BlockPart] = set()
        top.index.on_leave = self._left_memory
        base.is_about_to_get = self._goes_to_disk
        base.is_read_only = lambda: stack.queue.read_only
        base.is_lost = lambda: not self.in_service
        base.above = top
        top.change_log.leaving = base.change_log.leaving = self._leaving
        top.inspect = base.inspect = self.inspect
        platter = base.memory.platter
        platter.watch = self._moves
        platter.recorded = self._recorded
        platter.targets = self._targets

    @property
    def in_service(self) -> bool:
        """The disk tier has not been taken out of service."""
        return not self.stack.index.offline

    def inspect(self) -> None:
        """Check both stores as soon as both are consistent."""
        if not self._due:
            self._due = True
            self._soon(self.check)

    def _left_memory(self, entry: Entry, event: Event) -> bool:
        stack = self.stack
        key = entry.index.namespace, entry.digest, entry.index.part
        if entry in stack.queue.unwritten:
            self._truth.probes.add("a block left before a read-only disk took it")
            self._left_unwritten.add(key)
        elif stack.queue.write_back is not None and not entry.clean and _is_over(entry):
            self._truth.probes.add("a block of an ended session was not written to the disk")
            self._left_unwritten.add(key)
        return stack._on_leave(entry, event)

    def _goes_to_disk(self, namespace: Namespace, part: int, digest: bytes) -> None:
        """Write-back: with its prefix, and only if it may be of use."""
        stack, index = self.stack, self.top.index.blocks(namespace, part)
        entry = index.get(digest)
        if stack.queue.write_back is None or entry is None:
            return
        parts = self.top.index.parts(entry)
        # All of them leave together, and a block may hang on another part than this (seed 943597).
        if not any(part.children for part in parts) and all(map(_is_over, parts)):
            self._truth.fail(f"G5: {entry!r} of an ended session goes to the disk")
        parent = index.get(entry.parent)
        if parent is None or parent.clean or parent.pins:
            return
        # What comes back into the queue, or loses its copy on a full disk, may be behind.
        if self.base.memory.platter.counts or self.base.extents.evicted:
            return
        self._truth.fail(f"G8: {entry!r} goes to the disk before its parent")

    def _leaving(self, key: BlockPart, reason: ReadStatus, tier: int) -> None:
        """The server loses a block; as evicted only if the disk had no space for it."""
        evicted_above = reason is ReadStatus.EVICTED and tier == self.stack.front_tier
        excused = key in self.base.refused or key in self._left_unwritten
        excused |= key in self.handed_over
        self._left_unwritten.discard(key)
        self.handed_over.discard(key)
        if evicted_above and self.in_service and not excused:
            self._truth.fail(f"G5: {key[1].hex()[:12]} is evicted before it is on the disk")

    def check(self) -> None:
        """Check the stack's invariants, and that it has exactly the recorded blocks (G5)."""
        self._due = False
        if not self._truth.is_living(self.top.life):  # killed since the check was due
            return
        stack = self.stack
        try:
            check_invariants(stack)
        except InvariantViolated as error:
            self._truth.fail(f"G3/G4: tiers of {self.top.life}: {error}")
        if isinstance(self.top, WatchedFront) and self.top.prefetches is not None:
            self.top.prefetches.check(self.top)
        here = _keys(self.top.index.inventory())
        below = _keys(self.base.index.inventory())
        recorded = self._truth.held_by(self.top.life)
        if self.in_service:
            here |= below
            silent = recorded - here
        else:
            self._truth.probes.add("a tier was taken out of service")
            silent = recorded - here - below  # these are dropped in steps
        if silent or here - recorded:
            self._truth.fail(
                f"G5: {self.top.life} has {len(here)} blocks, of which it had reported "
                f"{len(here - recorded)} lost; {len(silent)} have left without a report"
            )

    def check_timeout(self, hung_s: float) -> None:
        """A tier whose disk hangs for too long is taken out of service (G6)."""
        if hung_s > _TIMEOUT_S and self.in_service and self.base.restored:
            self._truth.fail(
                f"G6: the disk has hung for {hung_s:.0f} s and its tier is still in service"
            )

    def first_problem(self) -> str | None:
        """What is not finished some time after the last fault; None when all is."""
        stack, platter = self.stack, self.base.memory.platter
        if self.base.held.pins or self.base.held.reservations:
            return f"{self.base.held!r} on the disk"
        if not self.in_service:
            if not any(platter.counts[kind] for kind in _FAULTS_THAT_RETIRE):
                return "a tier is out of service, but its disk has no fault"
            if self.base.index.stored or stack.fingerprint is None:
                return "a tier is lost, and what it had was not dropped"
            return (
                None if self._all_announced() else "the loss of a tier's blocks was not announced"
            )
        if stack.queue.read_only:
            return "a tier is read-only"
        if unwritten := self._unwritten():
            return f"{unwritten} blocks are in memory only, and in no queue"
        if stack.queue.waiting:
            return f"{stack.queue.waiting} blocks have yet to be demoted"
        return self._stray_headers()

    def _unwritten(self) -> int:
        """Blocks that the disk has not, and has not refused, and that will not be written."""
        stack = self.stack
        if stack.queue.write_back is not None:  # they are written when memory would drop them
            return 0
        if stack.queue.waiting or stack.front.held.pinned_by(MOVER):
            return 0
        here, below = _keys(self.top.index.inventory()), _keys(self.base.index.inventory())
        return len(here - below - self.base.refused)

    def check_writable(self, after_s: float) -> None:
        """A tier whose disk takes writes again is not read-only for long (G6)."""
        self._truth.probes.add("a disk took writes again")
        if self.stack.queue.read_only:
            self._truth.fail(
                f"G6: the disk has taken writes for {after_s:.0f} s and its tier is still read-only"
            )

    def _all_announced(self) -> bool:
        return self._truth.held_by(self.top.life) == _keys(self.top.index.inventory())

    def _stray_headers(self) -> str | None:
        """The disk has exactly the headers of the store's blocks, except damaged ones."""
        memory = self.base.memory
        wanted = {entry.offset for entry in self.base.index.inventory()}
        found = memory.headers()
        if self.base.hides_headers:
            found &= wanted
        wrong = {
            offset
            for offset in found ^ wanted
            if not memory.platter.is_damaged(*memory.header(offset))
        }
        return f"headers on the disk at {sorted(wrong)} are wrong" if wrong else None

    def _targets(self) -> list[tuple[int, int]]:
        """Ranges that a fault should hit: extents, their headers, superblock and namespaces."""
        memory = self.base.memory
        found = [(0, 1), *((at, at + PAGE) for at in (Geometry.namespace(0, n) for n in (0, 1)))]
        for entry in self.base.index.inventory():
            found += [memory.extent(entry.offset, entry.size), memory.header(entry.offset)]
        return found

    def _recorded(self, records: Sequence[Record]) -> None:
        """A record is of a block that is here (G8)."""
        for one in records:
            if self.stack.peek(one.namespace, one.part, one.digest) is None:
                self._truth.fail(f"G8: {one.digest.hex()[:12]} is recorded after it has left")

    def _moves(self, writes: bool, position: int, data: memoryview) -> None:
        """Check that both ends of each piece that moves are pinned or reserved (G3, G4)."""
        offset = self.base.memory.offset_at(position)
        memory = self.top.memory
        assert isinstance(memory, SimTier)
        if offset is None:
            return
        if writes and not self.in_service:
            return  # the tier is given up: what is written now has no header
        if writes and not self.base.may_land(offset, len(data)):
            self._truth.fail(
                f"G3: {len(data)} bytes are written to {offset}, which is not reserved"
            )
        if data.obj is not memory.memory.obj:
            return
        there = offset_in(memory.memory, data)
        if writes and not self.top.may_be_copied(there, len(data)):
            self._truth.fail(f"G4: {len(data)} bytes at {there} are demoted, but not pinned")
        if not writes and not self.top.may_land(there, len(data)):
            self._truth.fail(
                f"G4: {len(data)} bytes are promoted to {there}, which is not reserved"
            )


def _is_over(entry: Entry) -> bool:
    """By the hints no session uses the block again."""
    session = entry.session
    ended = session is not None and session.ended >= entry.last_used
    return ended or entry.superseded_at >= entry.last_used


def _keys(entries: Sequence[Entry]) -> set[BlockPart]:
    return {(entry.index.namespace, entry.digest, entry.index.part) for entry in entries}
