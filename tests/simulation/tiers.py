"""What is true of a server with a disk below its memory, and of the disk when the server is dead.

The oracles of `oracles.py` look at one tier each; these look at both, and at the platter itself,
sector by sector. A disk may do the worst (`disk.py`), and it keeps a list of what it has done:
whatever is not on that list must be there, and right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvpool.errors import InvariantViolated
from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Policy
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import Event
from kvpool.types import Namespace, ReadStatus, Record, Reservation, WriteStatus
from kvpool_tiers.nvme.format import GROUP_SIZE, HEADER_SIZE, Geometry, used_places
from tests.simulation.memory import SimTier
from tests.simulation.oracles import BlockPart, Truth, WatchedStore

if TYPE_CHECKING:
    from kvpool.server.block_server import BlockServer
    from tests.simulation.disk import Platter

#: After these a tier may be out of service for good reason.
_BAD_ENOUGH: Final = ("EIO", "ENOSPC", "hung", "crawled")
#: After so long at least a tier must be.
_PATIENCE_S: Final = 33.0


def offset_in(memory: memoryview, part: memoryview) -> int:
    """Where a view of some memory begins in it."""
    base = np.frombuffer(memory, np.uint8).ctypes.data
    return int(np.frombuffer(part, np.uint8).ctypes.data - base)


class DiskMemory:
    """A disk tier's bytes, as they lie on the platter at this moment."""

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
        """The offset in the tier of a position on the disk; None outside of the payload."""
        return position - self._start if position >= self._start else None

    def extent(self, offset: int, size: int) -> tuple[int, int]:
        """Where the bytes of an extent lie."""
        return self._start + offset, self._start + offset + size

    def header(self, offset: int) -> tuple[int, int]:
        """Where the header of an extent lies."""
        start = self._geometry.header(offset)
        return start, start + HEADER_SIZE

    @property
    def head(self) -> tuple[int, int]:
        """Where all lies that is no extent's: superblock and namespaces."""
        return 0, self._geometry.header(0)

    def is_damaged(self, offset: int, size: int) -> bool:
        """An extent there need not be what the tier has made of it."""
        damaged = self.platter.is_damaged
        return damaged(*self.extent(offset, size)) or damaged(*self.header(offset))

    def headers(self) -> set[int]:
        """Offsets at which the disk has a header, whatever is in it."""
        found = set()
        for region in self._geometry.regions():
            stop = region.position + region.size
            places = used_places(memoryview(self.platter.memory)[region.position : stop])
            found |= {region.offset + place * self.alignment for place in places}
        return found


class PreviousDisk(NamedTuple):
    """What a server must find on its disk when it starts."""

    blocks: dict[BlockPart, int]  # and the offset of each
    scars: int  # what the disk had suffered until then


class WatchedBase(WatchedStore):
    """The books of the disk tier, compared with the platter."""

    memory: DiskMemory

    def __init__(
        self,
        life: str,
        memory: DiskMemory,
        truth: Truth,
        previous_disk: PreviousDisk | None,
        *,
        every: int = 1,
        policy: Policy[Entry] | None = None,
    ) -> None:
        """Without a `previous_disk` nobody can say what is on the disk."""
        super().__init__(life, memory, truth, every=every, policy=policy)
        self.above: WatchedStore | None = None
        self.refused: set[BlockPart] = set()  # there was no room for them here
        self._previous_disk = previous_disk
        self.restored = False

    def verify(self, entry: Entry, when: str) -> None:
        """The platter holds the block's bytes, unless it is known to be damaged there."""
        key = entry.index.namespace, entry.digest, entry.index.part
        if self.truth.story(*key).rotten or self.memory.is_damaged(entry.offset, entry.size):
            return
        super().verify(entry, when)

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        answers = super().reserve(owner, request, now)
        for digest, answer in zip(request.digests, answers, strict=True):
            if answer.extent is None:
                self.refused.add((request.namespace, digest, request.part))
            else:
                self.refused.discard((request.namespace, digest, request.part))
        return answers

    def seal(
        self, owner: int, id: int, checksum: int, now: float, *, a_copy: bool = False
    ) -> WriteStatus:
        status = super().seal(owner, id, checksum, now, a_copy=a_copy)
        self.truth.notes.add("a block was copied down")
        return status

    def restore(self, record: Record) -> Entry | None:
        entry = super().restore(record)
        if entry is not None:
            key = record.namespace, record.digest, record.part
            server = self.life.partition("#")[0]
            excused = self._previous_disk is None or self.memory.is_damaged(
                entry.offset, entry.size
            )
            story = self.truth.story(*key)
            if not story.lives:
                self.truth.fail(f"G8: {entry!r} is found on the disk, and nobody has written it")
            if server in story.erased and not excused:
                self.truth.fail(f"G8: {entry!r} was removed, and is back after a restart")
            if self.memory.platter.damages(*self.memory.header(entry.offset)) == {"rot"}:
                self.truth.fail(f"G8: the header of {entry!r} has rotted, and is believed")
            self.truth.sealed(self.life, key)
            self.verify(entry, "found on the disk")
        return entry

    def adopt(self, entries: Sequence[Entry], now: float) -> None:
        super().adopt(entries, now)
        self.restored = True
        if entries:
            self.truth.notes.add("a disk tier came back warm")
        if self._previous_disk is None:
            return
        scars = self.memory.platter.scars[self._previous_disk.scars :]
        for (namespace, digest, part), offset in self._previous_disk.blocks.items():
            if self.peek(namespace, part, digest) is None:
                places = (self.memory.head, self.memory.header(offset))
                hit = [(a, b) for _, a, b in scars for c, d in places if a < d and c < b]
                if not hit:
                    self.truth.fail(f"G8: {digest.hex()[:12]} at {offset} is not on the disk")

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
    ) -> list[bool]:
        if part is not None and reason in (ReadStatus.CORRUPT, ReadStatus.TIER_LOST):
            for digest in digests:
                self._check_spoilt(self.peek(namespace, part, digest), reason)
        return super().remove(namespace, digests, reason, part)

    def _check_spoilt(self, entry: Entry | None, reason: ReadStatus) -> None:
        """A block is given up for the disk's sake: it must be the disk's fault."""
        if entry is None:
            return
        story = self.truth.story(entry.index.namespace, entry.digest, entry.index.part)
        if reason is ReadStatus.TIER_LOST:
            self.truth.notes.add("a block on disk could not be read")
            if not self.memory.platter.counts["EIO"]:
                self.truth.fail(f"G5: {entry!r} could not be read, and no read has failed")
        else:
            self.truth.notes.add("a block on disk was found to be spoilt")
            if not story.rotten and not self.memory.is_damaged(entry.offset, entry.size):
                self.truth.fail(f"G1: {entry!r} of {self.life} is corrupt, and nobody spoilt it")
            story.rotten += 1

    def _leave(self, entry: Entry, event: Event, reason: ReadStatus) -> None:
        index = entry.index
        if entry.pins:
            self.truth.notes.add("a block left while it was on its way")
        if self.above is not None and self.above.peek(index.namespace, index.part, entry.digest):
            self.truth.notes.add("the base evicted what was in reach")
        super()._leave(entry, event, reason)

    def previous_disk(self, *, in_service: bool) -> PreviousDisk | None:
        """What must be found on the disk when this life has ended."""
        if not self.restored:
            return self._previous_disk  # it has not come so far as to change anything
        platter, memory = self.memory.platter, self.memory
        if not in_service or platter.is_damaged(*memory.head):
            return None
        blocks = {
            (entry.index.namespace, entry.digest, entry.index.part): entry.offset
            for entry in self.inventory()
            if not platter.is_damaged(*memory.header(entry.offset))
        }
        return PreviousDisk(blocks, len(platter.scars))


class Tiers:
    """Both tiers of one life of a server, looked at together."""

    def __init__(
        self,
        server: BlockServer,
        top: WatchedStore,
        base: WatchedBase,
        truth: Truth,
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`soon` calls something when the books are whole again."""
        self.server = server
        self.top = top
        self.base = base
        self._truth = truth
        self._soon = soon
        self._due = False
        base.above = top
        top.journal.leaving = base.journal.leaving = self._leaving
        top.inspect = base.inspect = self.inspect
        platter = base.memory.platter
        platter.watch = self._moves
        platter.worth = self._worth

    @property
    def in_service(self) -> bool:
        """The disk tier is not given up."""
        return not self.server.stack.lost_tiers

    def inspect(self) -> None:
        """Both, as soon as the books of both are whole."""
        if not self._due:
            self._due = True
            self._soon(self.check)

    def _leaving(self, key: BlockPart, reason: ReadStatus, tier: int) -> None:
        """The pool loses a block; for want of room only if the disk had none."""
        evicted_above = reason is ReadStatus.EVICTED and tier == self.server.stack.reached
        if evicted_above and self.in_service and key not in self.base.refused:
            self._truth.fail(f"G5: {key[1].hex()[:12]} is evicted, and is not on the disk yet")

    def check(self) -> None:
        """The stack's own invariants; and what it has is what the truth has heard of (G5)."""
        self._due = False
        stack = self.server.stack
        try:
            stack.check()
        except InvariantViolated as error:
            self._truth.fail(f"G3/G4: tiers of {self.top.life}: {error}")
        here = _keys(self.top.inventory())
        below = _keys(self.base.inventory())
        told = self._truth.held_by(self.top.life)
        if self.in_service:
            here |= below
            silent = told - here
        else:
            self._truth.notes.add("a tier was taken out of service")
            silent = told - here - below  # `bury` tells of those, some at a time
        if silent or here - told:
            self._truth.fail(
                f"G5: {self.top.life} has {len(here)} blocks in its tiers, {len(here - told)} of "
                f"which were given up; {len(silent)} have left without a word"
            )

    def check_patience(self, hung_s: float) -> None:
        """Nobody waits for ever for a disk that hangs: its tier is given up, and life goes on."""
        if hung_s > _PATIENCE_S and self.in_service and self.base.restored:
            self._truth.fail(f"G6: its disk has hung for {hung_s:.0f} s and is still waited for")

    def ailing(self) -> str | None:
        """What is still on its way when nothing is wrong any more; None when all is done."""
        stack, platter = self.server.stack, self.base.memory.platter
        if self.base.pins or self.base.reservations:
            return f"{self.base.pins} pins, {self.base.reservations} reservations on the disk"
        if not self.in_service:
            if not any(platter.counts[kind] for kind in _BAD_ENOUGH):
                return "a tier is out of service, and nothing is wrong with its disk"
            return None if self._told_of_all() else "blocks of a lost tier were not told of"
        if stack.waiting:
            return f"{stack.waiting} blocks have yet to be copied down"
        return self._stray_headers()

    def _told_of_all(self) -> bool:
        return self._truth.held_by(self.top.life) == _keys(self.top.inventory())

    def _stray_headers(self) -> str | None:
        """The disk remembers what the books have, and nothing else (or the disk is to blame)."""
        memory = self.base.memory
        wanted = {entry.offset for entry in self.base.inventory()}
        wrong = {
            offset
            for offset in memory.headers() ^ wanted
            if not memory.platter.is_damaged(*memory.header(offset))
        }
        return f"headers on the disk at {sorted(wrong)} are wrong" if wrong else None

    def _worth(self) -> list[tuple[int, int]]:
        """What a fault should hit: extents, and what they mean."""
        memory = self.base.memory
        found = [(0, 1), (8192, 8192 + 4096)]
        for entry in self.base.inventory():
            found += [memory.extent(entry.offset, entry.size), memory.header(entry.offset)]
        return found

    def _moves(self, writes: bool, position: int, data: memoryview) -> None:
        """The flight table of the disk: who owns both ends of what moves (G3, G4)."""
        offset = self.base.memory.offset_at(position)
        memory = self.top.memory
        assert isinstance(memory, SimTier)
        if offset is None:
            return
        if writes and not self.in_service:
            return  # what was on its way is given up, and what arrives there has no record
        if writes and not self.base.may_land(offset, len(data)):
            self._truth.fail(f"G3: {len(data)} bytes are written to {offset}, reserved by nobody")
        if data.obj is not memory.memory.obj:
            return
        there = offset_in(memory.memory, data)
        if writes and not self.top.may_be_taken(there, len(data)):
            self._truth.fail(f"G4: {len(data)} bytes at {there} are copied down, pinned by nobody")
        if not writes and not self.top.may_land(there, len(data)):
            self._truth.fail(f"G4: {len(data)} bytes come up to {there}, reserved by nobody")


def _keys(entries: Sequence[Entry]) -> set[BlockPart]:
    return {(entry.index.namespace, entry.digest, entry.index.part) for entry in entries}
