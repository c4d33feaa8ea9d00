"""What is true, kept apart from what the pool believes.

End-to-end checksums hide half of the bugs: they turn wrong bytes into misses. So these look at the
books and the memory directly, at the step where something happens. The value of a block is a
function of its key: whoever has the key can check every byte, anywhere, at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvpool.errors import InvariantViolated
from kvpool.master.state.directory import Directory
from kvpool.master.state.server_record import SequenceCheck
from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Policy
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.entry import Entry, Journal
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.store import Store
from kvpool.server.state.tiered_store import MOVER
from kvpool.types import Namespace, Pin, ReadStatus, Reservation, WriteStatus
from tests.simulation.blocks import value

#: Rare events that a batch of seeds must reach, or its worlds are too tame.
PROBES: Final = (
    "made room by evicting",
    "a full server refused",
    "two writers met",
    "read of a block that is being written",
    "removed while it was read",
    "a reservation was given back",
    "memory was viewed in place",
    "a frozen writer was put in quarantine",
    "quarantine ended",
    "a lost server's blocks were read elsewhere",
    "a silent server was noticed",
    "a master noticed that it had slept",
    "an inventory replaced another",
    "an announcement came twice",
    "an announcement came out of order",
    "a piece of an inventory came twice",
    "a block was copied down",
    "a block came up from the disk",
    "a block left while it was on its way",
    "the base evicted what was in reach",
    "a disk tier came back warm",
    "a server was killed while its disk wrote",
    "the power was cut",
    "a block on disk was found to be spoilt",
    "a block on disk could not be read",
    "a tier was taken out of service",
    "a disk had to be replaced",
)

BlockPart = tuple[Namespace, bytes, int]


@dataclass(slots=True)
class Story:
    """What ever happened to one part of one block."""

    holders: set[str] = field(default_factory=set)  # lives of servers that have it sealed now
    lives: set[str] = field(default_factory=set)  # all that ever had it
    changed_at: float = 0.0
    lost_at: float = 0.0  # when a copy went, whatever became of the others
    ends: set[ReadStatus] = field(default_factory=set)  # every way in which a copy went
    rotten: int = 0  # copies that were spoilt on purpose
    removed: dict[str, float] = field(default_factory=dict)  # server -> when it was there last
    erased: set[str] = field(default_factory=set)  # where it must not come back to by itself


class Truth:
    """The stories of all blocks, told by the servers' own books as it happens."""

    def __init__(self, now: Callable[[], float], fail: Callable[[str], None]) -> None:
        self.stories: dict[BlockPart, Story] = {}
        self.now = now
        self.fail = fail
        self.notes: set[str] = set()  # names of rare events that have happened
        self._living: dict[str, set[BlockPart]] = {}  # and what each holds

    def story(self, namespace: Namespace, digest: bytes, part: int) -> Story:
        key = namespace, digest, part
        story = self.stories.get(key)
        if story is None:
            story = self.stories[key] = Story()
        return story

    def sealed(self, life: str, key: BlockPart) -> None:
        """A server has the block: it was written there, or found on its disk."""
        story = self.story(*key)
        story.holders.add(life)
        story.lives.add(life)
        story.changed_at = self.now()
        story.erased.discard(life.partition("#")[0])
        self._living[life].add(key)

    def gone(self, life: str, key: BlockPart, status: ReadStatus) -> None:
        """A server does not have it any more, in none of its tiers."""
        story = self.story(*key)
        story.holders.discard(life)
        story.ends.add(status)
        story.changed_at = story.lost_at = self.now()
        if status is ReadStatus.REMOVED:
            story.removed[life.partition("#")[0]] = self.now()
        self._living[life].discard(key)

    def erased(self, namespace: Namespace, digest: bytes, began: float) -> set[str]:
        """A call that began then has returned, and said that it removed the block somewhere.

        The server where, or none if nobody can tell.
        """
        stories = [self.story(namespace, digest, part) for part in range(namespace.parts)]
        if not any(ReadStatus.REMOVED in story.ends for story in stories):
            self.fail(f"G5: {digest.hex()[:12]} was removed, says the pool, and no server lost it")
        servers = {
            server for story in stories for server, when in story.removed.items() if when >= began
        }
        if len(servers) != 1:  # any of them may have answered
            return set()
        for story in stories:
            written_again = {life.partition("#")[0] for life in story.holders}
            story.erased |= (servers & story.removed.keys()) - written_again
        return servers

    def held_by(self, life: str) -> set[BlockPart]:
        return self._living.get(life, set())

    def life_began(self, life: str) -> None:
        self._living[life] = set()

    def is_living(self, life: str) -> bool:
        return life in self._living

    def lives_now(self, server: str) -> bool:
        return any(life.startswith(f"{server}#") for life in self._living)

    def life_ended(self, life: str) -> None:
        """A server has died, with all that it held."""
        for key in self._living.pop(life, ()):
            story = self.stories[key]
            story.holders.discard(life)
            story.ends.add(ReadStatus.SERVER_LOST)
            story.changed_at = story.lost_at = self.now()


class WatchedAllocator(Allocator):
    """Nothing that somebody holds is freed or given out again (G3, G4)."""

    held: dict[tuple[str, int, int], tuple[int, int]]
    fail: Callable[[str], None]

    def allocate(self, size: int) -> int | None:
        offset = super().allocate(size)
        if offset is not None:
            for holder, (start, length) in self.held.items():
                if start < offset + self.rounded(size) and offset < start + self.rounded(length):
                    self.fail(f"G3: extent at {offset} given out while held as {holder}")
        return offset

    def release(self, offset: int) -> int:
        for holder, (start, _) in self.held.items():
            if start == offset:
                self.fail(f"G4: extent at {offset} freed while held as {holder}")
        return super().release(offset)


class WatchedJournal(Journal):
    """Tells the truth what a server has lost. A tier that drops a copy loses nothing."""

    def __init__(self, life: str, truth: Truth) -> None:
        super().__init__()
        self._life = life
        self._truth = truth
        self.true_reason: ReadStatus | None = None  # whatever the pool says
        self.leaving: Callable[[BlockPart, ReadStatus, int], None] = lambda *_: None

    def left(self, entry: Entry, reason: ReadStatus, tier: int) -> None:
        super().left(entry, reason, tier)
        key = entry.index.namespace, entry.digest, entry.index.part
        self.leaving(key, reason, tier)
        self._truth.gone(self._life, key, self.true_reason or reason)


class Memory(Protocol):
    """The bytes of a tier, as the oracles see them."""

    @property
    def capacity(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    def view(self, offset: int, size: int) -> memoryview: ...


class WatchedStore(Store):
    """The real books, with a second book-keeper who trusts nothing of them."""

    journal: WatchedJournal

    def __init__(
        self,
        life: str,
        memory: Memory,
        truth: Truth,
        *,
        every: int = 1,
        policy: Policy[Entry] | None = None,
    ) -> None:
        super().__init__(memory.capacity, alignment=memory.alignment, policy=policy)
        self.journal = WatchedJournal(life, truth)
        self.life = life
        self.memory = memory
        self.truth = truth
        #: Looks at these books when something has happened to them.
        self.inspect: Callable[[], None] = self.inspect_alone
        self.rotten: set[tuple[int, int]] = set()  # (offset, generation) spoilt on purpose
        #: (kind, owner, id) -> (offset, size): pins, reservations, and extents in quarantine.
        self.held: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._entries: dict[tuple[str, int, int], Entry] = {}
        #: What of the memory still waits to be sent.
        self.unsent: Callable[[], list[tuple[int, int]]] = list
        self._evicted_now: list[Entry] = []
        self._every = every
        self._calls = 0
        allocator = WatchedAllocator(memory.capacity, memory.alignment)
        allocator.held, allocator.fail = self.held, truth.fail
        self.allocator = allocator

    def verify(self, entry: Entry, when: str) -> None:
        """The memory of a block holds exactly the block's bytes (G1)."""
        if (entry.offset, entry.generation) in self.rotten:
            return
        expected = value(entry.index.namespace, entry.digest, entry.index.part)
        if entry.size != len(expected) or self.memory.view(entry.offset, entry.size) != expected:
            self.truth.fail(f"G1: {entry!r} of {self.life} holds wrong bytes when {when}")

    def may_land(self, offset: int, size: int) -> bool:
        """Bytes from outside may arrive there: somebody has it reserved, or it is in quarantine."""
        return any(
            kind != "pin" and self._covers(extent, offset, size)
            for (kind, _, _), extent in self.held.items()
        )

    def may_be_taken(self, offset: int, size: int) -> bool:
        """Bytes may be copied from there: somebody has it pinned."""
        return any(
            kind == "pin" and self._covers(extent, offset, size)
            for (kind, _, _), extent in self.held.items()
        )

    def _covers(self, extent: tuple[int, int], offset: int, size: int) -> bool:
        start, length = extent
        return start <= offset and offset + size <= start + self.allocator.rounded(length)

    def verify_all(self, when: str) -> None:
        for entry in self.inventory():
            self.verify(entry, when)

    def look(self) -> None:
        """Every invariant, after each call (or every n-th)."""
        self._calls += 1
        if self._calls % self._every == 0:
            self.inspect()

    def inspect_alone(self) -> None:
        try:
            self.check()
        except InvariantViolated as error:
            self.truth.fail(f"G3/G4: books of {self.life}: {error}")

    # --- the calls --------------------------------------------------------------------------

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        self._evicted_now.clear()
        answers = super().reserve(owner, request, now)
        for answer in answers:
            if answer.extent is not None:
                hold = ("reservation", owner, answer.id)
                self.held[hold] = (answer.extent.offset, answer.extent.size)
                self._entries[hold] = self._owners[owner].reservations[answer.id]
            elif answer.status is WriteStatus.NO_SPACE:
                self.truth.notes.add("a full server refused")
            elif answer.status is WriteStatus.IN_PROGRESS:
                self.truth.notes.add("two writers met")
        for entry in self._evicted_now:
            self.truth.notes.add("made room by evicting")
            for sibling in range(entry.index.namespace.parts):
                if self.peek(entry.index.namespace, sibling, entry.digest) is not None:
                    self.truth.fail(f"{entry!r} was evicted, and its part {sibling} was not")
        self.look()
        return answers

    def seal(
        self, owner: int, id: int, checksum: int, now: float, *, a_copy: bool = False
    ) -> WriteStatus:
        entry = self._forget("reservation", owner, id)
        status = super().seal(owner, id, checksum, now, a_copy=a_copy)
        if entry is not None:
            self.verify(entry, "sealed")
            key = entry.index.namespace, entry.digest, entry.index.part
            if not a_copy:
                self.truth.sealed(self.life, key)
            elif not self.rank:
                self.truth.notes.add("a block came up from the disk")
        self.look()
        return status

    def cancel(self, owner: int, id: int) -> None:
        self._forget("reservation", owner, id)
        super().cancel(owner, id)
        if owner != MOVER:
            self.truth.notes.add("a reservation was given back")
        self.look()

    def pin(
        self,
        owner: int,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        now: float,
        room: Sequence[int] | None = None,
    ) -> list[Pin]:
        pins = super().pin(owner, namespace, part, digests, now, room)
        for pin in pins:
            if pin.extent is not None:
                hold = ("pin", owner, pin.id)
                entry = self._owners[owner].pins[pin.id]
                self.held[hold] = (pin.extent.offset, pin.extent.size)
                self._entries[hold] = entry
                if entry.state is not State.STORED:
                    self.truth.fail(f"G1: {entry!r} was shown before it was sealed")
                self.verify(entry, "pinned")
            elif pin.status is ReadStatus.BEING_WRITTEN:
                self.truth.notes.add("read of a block that is being written")
        self.look()
        return pins

    def hold(self, owner: int, entry: Entry) -> int:
        id = super().hold(owner, entry)
        self.held["pin", owner, id] = (entry.offset, entry.size)
        self._entries["pin", owner, id] = entry
        if entry.state is not State.STORED:
            self.truth.fail(f"G1: {entry!r} is copied before it is sealed")
        return id

    def unpin(self, owner: int, id: int) -> None:
        entry = self._forget("pin", owner, id)
        if entry is not None:
            self.verify(entry, "unpinned")
            if entry.state is State.DOOMED and owner != MOVER:
                self.truth.notes.add("removed while it was read")
            last = entry.pins == 1  # else another reader's pin holds what that one is sent
            for offset, size in self.unsent() if last else ():
                if offset < entry.offset + entry.size and entry.offset < offset + size:
                    self.truth.fail(f"G4: {entry!r} was unpinned before its bytes were sent")
        super().unpin(owner, id)
        self.look()

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
    ) -> list[bool]:
        removed = super().remove(namespace, digests, reason, part)
        self.look()
        return removed

    def drop_owner(self, owner: int, *, writer_may_be_alive: bool = False) -> bool:
        held = self._owners.get(owner)
        if held is not None and writer_may_be_alive:
            for id in held.reservations:
                hold = self.held.pop(("reservation", owner, id))
                self._entries.pop(("reservation", owner, id))
                self.held["quarantine", owner, id] = hold
                self.truth.notes.add("a frozen writer was put in quarantine")
        quarantined = super().drop_owner(owner, writer_may_be_alive=writer_may_be_alive)
        for kind, of, id in list(self.held):
            if of == owner and kind != "quarantine":
                self.truth.fail(f"G4: {kind} {id} outlives its connection")
        self.look()
        return quarantined

    def writer_exited(self, owner: int) -> None:
        for hold in [hold for hold in self.held if hold[:2] == ("quarantine", owner)]:
            del self.held[hold]
            self.truth.notes.add("quarantine ended")
        super().writer_exited(owner)
        self.look()

    def _forget(self, kind: str, owner: int, id: int) -> Entry | None:
        self.held.pop((kind, owner, id), None)
        return self._entries.pop((kind, owner, id), None)

    def _leave(self, entry: Entry, event: Event, reason: ReadStatus) -> None:
        if event is Event.EVICT:
            self._evicted_now.append(entry)
            if entry.pins:
                self.truth.fail(f"G4: {entry!r} was evicted under {entry.pins} pins")
            if entry.children:
                self.truth.fail(f"{entry!r} was evicted before its {entry.children} children")
        before, self.journal.true_reason = self.journal.true_reason, reason
        super()._leave(entry, event, reason)
        self.journal.true_reason = before


class WatchedDirectory(Directory):
    """The real map, checked after everything that changes it."""

    truth: Truth
    every = 1
    _calls = 0

    def look(self) -> None:
        self._calls += 1
        if self._calls % self.every == 0:
            try:
                self.check()
            except InvariantViolated as error:
                self.truth.fail(f"map: {error}")

    def check_piece(self, server: str, epoch: int, sequence: int, piece: int) -> SequenceCheck:
        known = self._servers.get(server)
        before = known.sequence if known is not None else 0
        check = super().check_piece(server, epoch, sequence, piece)
        if known is not None and known.sequence < before:
            self.truth.fail(f"G7: the map went back from {before} to {known.sequence}")
        if check is SequenceCheck.DUPLICATE:
            self.truth.notes.add("a piece of an inventory came twice")
        elif check is SequenceCheck.GAP:
            self.truth.notes.add("a piece of an inventory came out of order")
        elif piece == 0 and self._servers[server].inventory.blocks:
            self.truth.notes.add("an inventory replaced another")
        return check

    def end_inventory(self, server: str) -> None:
        super().end_inventory(server)
        self.look()

    def check_sequence(self, server: str, epoch: int, sequence: int) -> SequenceCheck:
        check = super().check_sequence(server, epoch, sequence)
        if check is SequenceCheck.DUPLICATE:
            self.truth.notes.add("an announcement came twice")
        elif check is SequenceCheck.GAP:
            self.truth.notes.add("an announcement came out of order")
        return check

    def stored(
        self, server: str, namespace: Namespace, part: int, tier: int, digests: Sequence[bytes]
    ) -> None:
        super().stored(server, namespace, part, tier, digests)
        self.look()

    def removed(
        self,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        reason: ReadStatus,
    ) -> None:
        super().removed(server, namespace, part, digests, reason)
        self.look()

    def tick(self, now: float) -> None:
        late = self._last_tick is not None and now - self._last_tick > self.timeout_s
        before = [known for known in self._servers.values() if known.alive]
        # Those that were heard of shortly before it fell asleep; others may be given up rightly.
        fresh = {
            known.server
            for known in before
            if self._last_tick is not None
            and self._last_tick - known.last_seen < self.timeout_s / 2
        }
        super().tick(now)
        given_up = [known.server for known in before if not known.alive]
        if given_up:
            self.truth.notes.add("a silent server was noticed")
        for known in self._servers.values():
            if known.last_seen > now:
                self.truth.fail(f"G7: {known.server} is to be heard of in the future")
        if late:
            self.truth.notes.add("a master noticed that it had slept")
            for server in given_up:
                if server in fresh and self.truth.lives_now(server):
                    self.truth.fail(f"G7: a master slept, and then gave up {server}")

    def sweep(self, limit: int = 1024) -> int:
        left = super().sweep(limit)
        self.look()
        return left
