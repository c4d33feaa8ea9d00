"""Oracles: subclasses of the real state that check each change against the ground truth.

Checksums hide half of the bugs, because they turn wrong bytes into misses. So the oracles look at
the state and the memory directly, in the step in which something changes. The bytes of a block are
a function of its key (`blocks.value`), so every byte can be checked at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from kvpool.client.attempts import Attempt
from kvpool.client.ways import Ways
from kvpool.errors import InvariantViolated
from kvpool.master.state.directory import Directory
from kvpool.master.state.explanations import explain
from kvpool.master.state.placement import SHARED_FROM, Placement
from kvpool.master.state.server_record import EARLIER_MAX, Refusal, Registration, SequenceCheck
from kvpool.master.state.server_table import ServerTable
from kvpool.master.state.sweeper import Sweeper
from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Policy
from kvpool.server.eviction.session import Session
from kvpool.server.eviction.session_hints import SessionAwarePolicy
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.divided_allocator import FileAllocator
from kvpool.server.state.entry import MOVER, Account, ChangeLog, Entry, Index
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.extents import Extents
from kvpool.server.state.fenced_allocator import FencedAllocator
from kvpool.server.state.front_store import FrontExtents, FrontStore
from kvpool.server.state.holdings import ConnectionHoldings
from kvpool.server.state.prefetches import HOLD_S
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import (
    ARRIVED,
    ROOT,
    ChainEnd,
    Namespace,
    Pin,
    ReadStatus,
    Reservation,
    WriteStatus,
)
from tests.simulation.arrivals import ArrivalOracle
from tests.simulation.blocks import values
from tests.simulation.memory import SimTier
from tests.simulation.tenants import TenantOracle
from tests.simulation.truth import BlockPart, GroundTruth

#: The owner of the block that takes the place of all others.
EVERYTHING: Final = -17
#: A hint, which is at most an hour ahead, expires after three times that.
_HINTS_EXPIRE_S: Final = 4 * 3600.0


class WatchedAllocator(FencedAllocator, FileAllocator):
    """No extent that is pinned, reserved or in quarantine is freed or allocated again (G3, G4)."""

    _carve = Allocator._carve
    watched: dict[tuple[str, int, int], tuple[int, int]]
    fail: Callable[[str], None]

    def allocate(self, size: int) -> int | None:
        offset = super().allocate(size)
        if offset is not None:
            for holder, (start, length) in self.watched.items():
                if start < offset + self.rounded(size) and offset < start + self.rounded(length):
                    self.fail(f"G3: extent at {offset} allocated while held as {holder}")
        return offset

    def release(self, offset: int) -> int:
        for holder, (start, _) in self.watched.items():
            if start == offset:
                self.fail(f"G4: extent at {offset} freed while held as {holder}")
        return super().release(offset)


class WatchedChangeLog(ChangeLog):
    """Records in the ground truth what a server has lost. A copy in another tier is no loss."""

    def __init__(self, life: str, truth: GroundTruth) -> None:
        super().__init__()
        self._life = life
        self._truth = truth
        self.true_reason: ReadStatus | None = None  # even if the pool records another one
        self.leaving: Callable[[BlockPart, ReadStatus, int], None] = lambda *_: None

    def append_departures(self, entries: Sequence[Entry], reason: ReadStatus, tier: int) -> None:
        super().append_departures(entries, reason, tier)
        for entry in entries:
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


class Victim(NamedTuple):
    """A block at the moment of its eviction: what its session had announced, whether it was of no
    use by the hints, and whether it was prefetched and waits for its reader."""

    entry: Entry
    due: float | None
    over: bool
    unread: bool


class PrefetchOracle(Protocol):
    """What is checked of blocks that come up before they are read."""

    def evicted(self, now: float, victim: Victim, newcomer: Session | None) -> None: ...

    def came(self, store: WatchedStore, entry: Entry, now: float) -> None: ...

    def check(self, store: WatchedFront) -> None: ...


class CopyOracle(Protocol):
    """What a store reports in worlds whose servers make copies."""

    def evicted(self, store: WatchedStore, victim: Entry) -> None:
        """A block makes room for one that is no extra copy."""


class MoveOracle(Protocol):
    """What is checked of blocks that move, as the stores see it."""

    def sealed(self, namespace: Namespace, digest: bytes) -> None: ...


class WatchedWays(Ways):
    """A block is asked of one server at a time, and of none once it is read: its buffer, which the
    caller may use then, has one writer."""

    fail: Callable[[str], None]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked_for: set[int] = set()

    def begin(self, positions: Sequence[int], now: float) -> list[Attempt]:
        attempts = super().begin(positions, now)
        for position in [i for attempt in attempts for i in attempt.positions]:
            if position in self.asked_for or self.results[position].status.hit:
                type(self).fail("G1: a block is asked for twice: its buffer has two writers")
            self.asked_for.add(position)
        return attempts

    def ended(self, attempt: Attempt, now: float) -> list[Attempt]:
        self.asked_for -= set(attempt.positions)
        return super().ended(attempt, now)


class WatchedHoldings(ConnectionHoldings):
    """The real pins, with those of a second list."""

    def __init__(self, alignment: int, watch: WatchedStore) -> None:
        super().__init__(alignment)
        self._watch = watch

    def pin(self, owner: int, entry: Entry) -> int:
        id, watch = super().pin(owner, entry), self._watch
        watch.watched["pin", owner, id] = (entry.offset, entry.size)
        watch.entries["pin", owner, id] = entry
        if entry.state is not State.STORED:
            watch.truth.fail(f"G1: {entry!r} is copied before it is sealed")
        return id

    def take_pins(self, owner: int, ids: Sequence[int]) -> list[Entry]:
        watch = self._watch
        for entry in filter(None, [watch.forget("pin", owner, id) for id in ids]):
            watch.verify(entry, "unpinned")
            if entry.state is State.PENDING_FREE and owner != MOVER:
                watch.truth.probes.add("removed while it was read")
            last = entry.pins == 1  # otherwise the pin of another reader protects the bytes
            for offset, size in watch.unsent() if last else ():
                if offset < entry.offset + entry.size and entry.offset < offset + size:
                    watch.truth.fail(f"G4: {entry!r} was unpinned before its bytes were sent")
        return super().take_pins(owner, ids)


class WatchedExtents(Extents):
    """The real evictions, each of them checked."""

    watch: WatchedStore

    def make(
        self, newcomer: Entry, owner: int, now: float, last_used: int, more: int = 0
    ) -> list[int] | Reservation:
        self.watch.newcomer = newcomer
        try:
            return super().make(newcomer, owner, now, last_used, more)
        finally:
            self.watch.newcomer = None

    def evict(self, victim: Entry, size: int = 0) -> int | None:
        if (
            self.watch.copies is not None
            and self.watch.newcomer is not None
            and self.watch.newcomer.copies
        ):
            self.watch.copies.evicted(self.watch, victim)
        if self.watch.tenants is not None:
            self.watch.tenants.evicting(victim, self.watch.newcomer)
        return super().evict(victim, size)

    def relocate(self, entry: Entry, target: int) -> None:
        if (entry.offset, entry.generation) in self.watch.corrupted:
            self.watch.corrupted.add(
                (target, entry.generation)
            )  # what a fault has changed was copied
        if entry.pins:
            self.watch.truth.fail(f"G4: {entry!r} was moved under {entry.pins} pins")
        super().relocate(entry, target)
        self.watch.verify(entry, "moved")
        self.watch.truth.probes.add("a block was moved to make room")

    def remove(self, entry: Entry, event: Event, reason: ReadStatus, *, free: bool = True) -> None:
        unread = self.watch.unread.pop(entry, -1.0) > self.watch.reserved_at
        if event is Event.EVICT:
            self.watch.evicted_now.append(entry)
            session = entry.session
            due = session.due if session is not None else None
            self.watch.victims.append(Victim(entry, due, self.policy.is_over(entry), unread))
            if self.watch.arrivals is not None:
                self.watch.arrivals.evicted(entry)
            if entry.pins:
                self.watch.truth.fail(f"G4: {entry!r} was evicted under {entry.pins} pins")
            if entry.children:
                self.watch.truth.fail(
                    f"chains: {entry!r} was evicted before its {entry.children} children"
                )
        before, self.watch.change_log.true_reason = self.watch.change_log.true_reason, reason
        super().remove(entry, event, reason, free=free)
        self.watch.change_log.true_reason = before
        if self.watch.arrivals is not None:
            self.watch.arrivals.left(entry)


class WatchedStore(Store):
    """The real store, with a second list of all holds that is kept independently."""

    extents_type: ClassVar[type[Extents]] = WatchedExtents

    def __init__(
        self,
        life: str,
        memory: Memory,
        truth: GroundTruth,
        *,
        every: int = 1,
        policy: Policy[Entry] | None = None,
    ) -> None:
        allocator = WatchedAllocator(memory.capacity, memory.alignment)
        super().__init__(memory.capacity, policy=policy, allocator=allocator)
        assert isinstance(self.extents, WatchedExtents)
        self.extents.watch = self
        self.held = self.extents.held = WatchedHoldings(memory.alignment, self)
        self.index.change_log = WatchedChangeLog(life, truth)
        self.life = life
        self.memory = memory
        self.truth = truth
        #: Checks the invariants after a change.
        self.inspect: Callable[[], None] = self.check_alone
        self.moves: MoveOracle | None = None
        self.prefetches: PrefetchOracle | None = None
        #: Blocks that came up before they were read, and are still unread: until when they stay.
        self.unread: dict[Entry, float] = {}
        self.prefetch_reads = 0  # bytes of those that were read in time
        self.reserved_at = 0.0
        self.copies: CopyOracle | None = None
        self.tenants: TenantOracle | None = None
        self.newcomer: Entry | None = None
        self.corrupted: set[tuple[int, int]] = (
            set()
        )  # (offset, generation) that a fault has changed
        self.is_memory = isinstance(memory, SimTier)
        #: (kind, owner, id) -> (offset, size): pins, reservations, and extents in quarantine.
        self.watched: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.entries: dict[tuple[str, int, int], Entry] = {}
        #: The (offset, size) in memory of bytes that still wait to be sent.
        self.unsent: Callable[[], list[tuple[int, int]]] = list
        self.evicted_now: list[Entry] = []
        self.victims: list[Victim] = []
        self._every = every
        self._calls = 0
        #: In worlds with sessions, whose servers have one tier.
        self.arrivals: ArrivalOracle | None = None
        allocator.watched, allocator.fail = self.watched, truth.fail

    @property
    def change_log(self) -> WatchedChangeLog:
        """That of all tiers."""
        assert isinstance(self.index.change_log, WatchedChangeLog)
        return self.index.change_log

    def order_of(self, entry: Entry) -> SessionAwarePolicy:
        """The order in which a block is evicted."""
        return self._order(entry.index)

    def _order(self, index: Index) -> SessionAwarePolicy:
        order = self.extents.policy.order_of(index)
        assert isinstance(order, SessionAwarePolicy)
        return order

    def verify(self, entry: Entry, when: str) -> None:
        """The extent of a block holds exactly the block's bytes (G1)."""
        if (entry.offset, entry.generation) in self.corrupted:
            return
        expected = values(entry.index.namespace, entry.digest, entry.index.part)
        if self.memory.view(entry.offset, entry.size) not in expected:
            self.truth.fail(f"G1: {entry!r} of {self.life} holds wrong bytes when {when}")

    def may_land(self, offset: int, size: int) -> bool:
        """Bytes may be written there: the extent is reserved or in quarantine."""
        return any(
            kind != "pin" and self._covers(extent, offset, size)
            for (kind, _, _), extent in self.watched.items()
        )

    def may_be_copied(self, offset: int, size: int) -> bool:
        """Bytes may be copied from there: the extent is pinned."""
        return any(
            kind == "pin" and self._covers(extent, offset, size)
            for (kind, _, _), extent in self.watched.items()
        )

    def _covers(self, extent: tuple[int, int], offset: int, size: int) -> bool:
        start, length = extent
        return start <= offset and offset + size <= start + self.allocator.rounded(length)

    def verify_all(self, when: str) -> None:
        for entry in self.index.inventory():
            self.verify(entry, when)

    def inspect_now_and_then(self) -> None:
        """Check the invariants after each call, or after every n-th."""
        self._calls += 1
        if self._calls % self._every == 0:
            self.inspect()

    def check_alone(self) -> None:
        try:
            check_invariants(self)
        except InvariantViolated as error:
            self.truth.fail(f"G3/G4: store of {self.life}: {error}")

    def check_evictable(self) -> None:
        """If nothing were pinned or reserved, every block could be evicted, tails first (G9)."""
        entries = [
            entry for index in self.index.by_part.values() for entry in index.blocks.values()
        ]
        children = {entry: entry.children for entry in entries}
        tails = [entry for entry in entries if not entry.children]
        while tails:
            tail = tails.pop()
            del children[tail]
            parent = tail.index.blocks.get(tail.parent)
            if parent is not None:
                children[parent] -= 1
                if not children[parent]:
                    tails.append(parent)
        if children:
            self.truth.fail(
                f"G9: {len(children)} blocks of {self.life} can never be evicted: "
                f"they are their own ancestors, as {next(iter(children))!r}"
            )

    def check_all_can_go(self, now: float) -> None:
        """When nothing is pinned or reserved, a block as large as the store finds space (G9), at
        the latest when all hints have expired (seed 403146)."""
        self.check_evictable()
        self.arrivals = None  # its prompts may wait
        size = self.allocator.capacity
        request = ReserveRequest(Namespace("sim/all"), 0, [b"all" * 6], [ROOT], [size])
        (answer,) = self.reserve(EVERYTHING, request, now + _HINTS_EXPIRE_S)
        if answer.status is not WriteStatus.RESERVED:
            self.truth.fail(
                f"G9: {self.allocator.allocated} of {size} bytes of {self.life} are in use by "
                f"blocks that cannot be evicted: {answer.status.label}"
            )
        self.drop_owner(EVERYTHING)

    # --- the calls --------------------------------------------------------------------------

    def fits_beside_quarantine(self, size: int) -> bool:
        """Whether a block of `size` bytes has room between the extents that cannot be moved."""
        at = 0
        for offset, entry in sorted(self.extents.blocks_at.items()):
            if entry.state is State.QUARANTINED:
                if offset - at >= self.allocator.rounded(size):
                    return True
                at = offset + self.allocator.rounded(entry.size)
        return self.memory.capacity - at >= self.allocator.rounded(size)

    def is_kept_below(self, entry: Entry) -> bool:
        """Another tier has the block, too."""
        return False

    def hint(
        self, subject: str | ChainEnd, resume_in: float | None, now: float, *, age_s: float = 0.0
    ) -> bool | None:
        arrivals = self.arrivals
        if arrivals is not None and isinstance(subject, str):
            if resume_in is None:
                arrivals.ended(subject, now)
            elif resume_in != ARRIVED:
                arrivals.expected(subject, resume_in, now)
        status = super().hint(subject, resume_in, now, age_s=age_s)
        if not isinstance(subject, str):
            self.truth.probes.add("a prompt without a session waited")
        elif resume_in == ARRIVED:
            if arrivals is not None:
                arrivals.arrived(subject, now, age_s)
            self.inspect_now_and_then()
        return status

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        self.evicted_now.clear()
        self.victims.clear()
        self.reserved_at = now
        hint, arrivals = request.session_hint, self.arrivals
        if request.last_used is not None:  # no session writes: a server fetches its blocks
            if arrivals is not None and hint is not None and hint.resume_in is not None:
                arrivals.expected(hint.session, hint.resume_in, now)
            hint = None
        if arrivals is not None:
            arrivals.writes(hint.session if hint is not None else "", now)
            if hint is not None and hint.resume_in is not None:
                arrivals.expected(hint.session, hint.resume_in, now)
        answers = super().reserve(owner, request, now)
        if self.tenants is not None:
            self.tenants.answered(request.namespace, answers)
        if arrivals is not None and hint is not None:
            arrivals.written(hint.session)
        if arrivals is not None:
            if any(answer.status is WriteStatus.BYPASSED for answer in answers):
                named = request.session_hint
                arrivals.bypassed(named.session if named is not None else "")
            if arrivals.kept:
                self.truth.probes.add("room was made while a session's prompt waited")
        for answer, parent in zip(answers, request.parents, strict=True):
            if answer.extent is not None:
                hold = ("reservation", owner, answer.id)
                self.watched[hold] = (answer.extent.offset, answer.extent.size)
                entry = self.held._owners[owner].reservations[answer.id]
                self.entries[hold] = entry
                if entry.parent != parent:
                    self.truth.probes.add("a circle of parents was cut")
            elif answer.status is WriteStatus.NO_SPACE:
                self.truth.probes.add("a full server refused")
            elif answer.status is WriteStatus.IN_PROGRESS:
                self.truth.probes.add("two writers met")
        if (
            self.prefetches is not None
            and owner == MOVER
            and self.extents.demotes
            and request.last_used
        ):
            named = request.session_hint
            index = self.index.by_part.get((request.namespace, request.part))
            orders = self._order(index).sessions if index is not None else {}
            session = orders.get(named.session) if named is not None else None
            for victim in self.victims:
                self.prefetches.evicted(now, victim, session)
        newest = max(request.last_used) if request.last_used and not self.extents.demotes else None
        brings_extra = request.copies is not None and not all(request.copies)
        for entry in self.evicted_now:
            is_newer = newest is not None and entry.last_used >= newest
            if is_newer and (entry.copies or brings_extra) and not self.is_kept_below(entry):
                self.truth.fail(f"G9: {entry!r} was evicted for a fetched block that is older")
            self.truth.probes.add("made room by evicting")
            for sibling in range(entry.index.namespace.parts):
                if self.index.peek(entry.index.namespace, sibling, entry.digest) is not None:
                    self.truth.fail(f"parts: {entry!r} was evicted, but its part {sibling} was not")
        self.inspect_now_and_then()
        return answers

    def seal_all(
        self,
        owner: int,
        ids: Sequence[int],
        checksums: Sequence[int],
        now: float,
        *,
        from_other_tier: bool = False,
        last_used: int | None = None,
    ) -> list[WriteStatus]:
        entries = [self.forget("reservation", owner, id) for id in ids]
        statuses = super().seal_all(
            owner, ids, checksums, now, from_other_tier=from_other_tier, last_used=last_used
        )
        for entry in filter(None, entries):
            if self.arrivals is not None:
                self.arrivals.used(entry, now, last=False)
            self.verify(entry, "sealed")
            key = entry.index.namespace, entry.digest, entry.index.part
            if last_used is not None and self.moves is not None:
                self.moves.sealed(entry.index.namespace, entry.digest)
            if from_other_tier and last_used is not None and self.prefetches is not None:
                self.unread[entry] = now + HOLD_S
                self.prefetches.came(self, entry, now)
            if not from_other_tier:
                self.truth.sealed(self.life, key)
            elif not self.index.tier:
                self.truth.probes.add("a block was promoted from the disk")
        self.inspect_now_and_then()
        return statuses

    def cancel(self, owner: int, id: int) -> None:
        self.forget("reservation", owner, id)
        super().cancel(owner, id)
        if owner != MOVER:
            self.truth.probes.add("a reservation was given back")
        self.inspect_now_and_then()

    def pin(
        self,
        owner: int,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        now: float,
        buffer_sizes: Sequence[int] | None = None,
        *,
        view: bool = False,
    ) -> list[Pin]:
        pins = super().pin(owner, namespace, part, digests, now, buffer_sizes, view=view)
        if self.arrivals is not None:
            read = [self.held._owners[owner].pins[pin.id] for pin in pins if pin.extent is not None]
            for entry in read:
                self.arrivals.used(entry, now, last=entry is read[-1])
        for pin in pins:
            if pin.extent is not None:
                hold = ("pin", owner, pin.id)
                entry = self.held._owners[owner].pins[pin.id]
                if self.unread.pop(entry, None) is not None:
                    self.prefetch_reads += entry.size
                self.watched[hold] = (pin.extent.offset, pin.extent.size)
                self.entries[hold] = entry
                if entry.state is not State.STORED:
                    self.truth.fail(f"G1: {entry!r} was pinned before it was sealed")
                self.verify(entry, "pinned")
            elif pin.status is ReadStatus.BEING_WRITTEN:
                self.truth.probes.add("read of a block that is being written")
        self.inspect_now_and_then()
        return pins

    def unpin_all(self, owner: int, ids: Sequence[int]) -> None:
        super().unpin_all(owner, ids)
        self.inspect_now_and_then()

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
        checksums: Sequence[int] = (),
    ) -> list[bool]:
        if self.tenants is not None:
            self.tenants.removing(namespace)
        if reason is ReadStatus.CORRUPT and part is not None and self.is_memory:
            for digest in digests:
                here = self.index.peek(namespace, part, digest)
                if here is not None and (here.offset, here.generation) not in self.corrupted:
                    self.truth.fail(f"G1: {here!r} leaves as corrupt, but no fault changed it")
        removed = super().remove(namespace, digests, reason, part, checksums)
        self.inspect_now_and_then()
        return removed

    def drop_owner(self, owner: int, *, writer_may_be_alive: bool = False) -> bool:
        quarantined = super().drop_owner(owner, writer_may_be_alive=writer_may_be_alive)
        for kind, of, id in list(self.watched):
            if of == owner and kind != "quarantine":
                self.truth.fail(f"G4: {kind} {id} outlives its connection")
        self.inspect_now_and_then()
        return quarantined

    def quarantine(self, owner: int, id: int, writer: int) -> None:
        hold = self.watched.pop(("reservation", owner, id))
        self.entries.pop(("reservation", owner, id))
        self.watched["quarantine", writer, id] = hold
        if writer == owner:
            self.truth.probes.add("a frozen writer was put in quarantine")
        super().quarantine(owner, id, writer)

    def writer_exited(self, writer: int) -> bool:
        for hold in [hold for hold in self.watched if hold[:2] == ("quarantine", writer)]:
            del self.watched[hold]
            if writer > 0:
                self.truth.probes.add("quarantine ended")
        ended = super().writer_exited(writer)
        self.inspect_now_and_then()
        return ended

    def forget(self, kind: str, owner: int, id: int) -> Entry | None:
        self.watched.pop((kind, owner, id), None)
        return self.entries.pop((kind, owner, id), None)


class WatchedFrontExtents(WatchedExtents, FrontExtents):
    """Also of what came up before it was read."""

    def drop_lapsed(self, now: float) -> None:
        before = set(self.prefetched)
        super().drop_lapsed(now)
        for entry in before.difference(self.prefetched):
            if now < self.watch.unread.pop(entry, now):
                self.watch.truth.fail(f"advice: {entry!r} was prefetched, and is let go too early")

    def _finds_more(self, account: Account, size: int) -> bool:
        before = set(self.prefetched)
        given_up = super()._finds_more(account, size)
        for entry in before.difference(self.prefetched):
            self.watch.unread.pop(entry, None)
            self.watch.truth.probes.add("a prefetched block made room for a writer or a reader")
        return given_up


class WatchedServers(ServerTable):
    """What a master knows of its servers, checked after each change."""

    truth: GroundTruth

    def register(
        self, server: str, registration: Registration, now: float, *, sequence: int = 0
    ) -> Refusal | None:
        known = self.records.get(server)
        before = known.registration if known is not None else None
        refusal = super().register(server, registration, now, sequence=sequence)
        process = (registration.token, registration.epoch)
        own = before is not None and process == (before.token, before.epoch)
        if refusal is not None and own:
            self.truth.fail(f"G11: {server} was refused the id that it has: {refusal.problem}")
        if (
            refusal is None
            and known is not None
            and before is not None
            and process[0] != before.token
        ):
            silent_s = now - known.last_seen
            if before.kept and silent_s < self.forget_s:
                self.truth.fail(f"an impostor got {server}, which is reserved for its identity")
            if known.alive and silent_s < self.timeout_s:
                self.truth.fail(f"an impostor got {server} {silent_s:.3f} s after its last message")
            self.truth.probes.add("the id of a lost server was taken")
        return refusal

    def holds(self, server: str, token: bytes) -> bool:
        """Whether the id is registered with this token."""
        known = self.records.get(server)
        return known is not None and known.registration.token == token

    def check_piece(
        self, server: str, epoch: int, sequence: int, piece: int, *, last: bool = False
    ) -> SequenceCheck:
        known = self.records.get(server)
        before = known.inventories.sequence if known is not None else 0
        readable = self._readable(server)
        check = super().check_piece(server, epoch, sequence, piece, last=last)
        if known is not None and known.inventories.sequence < before:
            self.truth.fail(
                f"G7: the directory went back from {before} to {known.inventories.sequence}"
            )
        if known is not None and known.inventories.sequence > before + 1:
            self.truth.fail(
                f"G7: the directory jumped from {before} to {known.inventories.sequence}"
            )
        few = known is None or len(known.inventories.earlier) < EARLIER_MAX
        if few and self._readable(server) != readable:
            self.truth.fail("G7: an inventory that has only begun took blocks away")
        if check is SequenceCheck.DUPLICATE:
            self.truth.probes.add("a piece of an inventory came twice")
        elif check is SequenceCheck.GAP:
            self.truth.probes.add("a piece of an inventory came out of order")
        elif piece == 0 and self.records[server].inventories.earlier:
            self.truth.probes.add("an inventory replaced another")
        return check

    def _readable(self, server: str) -> int:
        """How many blocks of this server are in inventories that are in force."""
        record = self.records.get(server)
        if record is None:
            return 0
        return sum(one.blocks for one in record.inventories if not one.retired)

    def check_sequence(self, server: str, epoch: int, sequence: int) -> SequenceCheck:
        known = self.records.get(server)
        before = known.inventories.sequence if known is not None else 0
        check = super().check_sequence(server, epoch, sequence)
        if check is SequenceCheck.NEXT and sequence != before + 1:
            self.truth.fail(f"G7: announcement {sequence} was applied after {before}")
        if check is SequenceCheck.DUPLICATE:
            self.truth.probes.add("an announcement came twice")
        elif check is SequenceCheck.GAP:
            self.truth.probes.add("an announcement came out of order")
        return check

    def tick(self, now: float) -> bool:
        late = self._last_tick is not None and now - self._last_tick > self.timeout_s
        before = [known for known in self.records.values() if known.alive]
        # Servers with a heartbeat shortly before the pause; others may rightly count as lost.
        fresh = {
            known.server
            for known in before
            if self._last_tick is not None
            and self._last_tick - known.last_seen < self.timeout_s / 2
        }
        syncing = super().tick(now)
        given_up = [known.server for known in before if not known.alive]
        if given_up:
            self.truth.probes.add("a silent server was noticed")
        for known in self.records.values():
            if known.last_seen > now:
                self.truth.fail(f"G7: the last heartbeat of {known.server} is in the future")
            if known.alive and now - known.last_seen >= self.timeout_s:
                self.truth.fail(f"G7: {known.server} is silent and counts as alive")
        if late:
            self.truth.probes.add("a master noticed that it had slept")
            for server in given_up:
                if server in fresh and self.truth.lives_now(server):
                    self.truth.fail(
                        f"G7: after a pause of its own a master counted {server} as lost"
                    )
        return syncing


class WatchedFront(WatchedStore, FrontStore):
    """The memory of a server with several tiers."""

    extents: FrontExtents
    extents_type = WatchedFrontExtents

    def is_kept_below(self, entry: Entry) -> bool:
        return self.extents.has_copy(entry)


class WatchedDirectory(Directory):
    """The real map of a master, checked after each change."""

    truth: GroundTruth
    every = 1
    _calls = 0

    @cached_property
    def branches(self) -> dict[bytes, set[bytes]]:
        """How chains went on from each block, as writers asked."""
        return {}

    def inspect_now_and_then(self) -> None:
        self._calls += 1
        if self._calls % self.every == 0:
            try:
                check_invariants(self)
            except InvariantViolated as error:
                self.truth.fail(f"G7: directory: {error}")

    def place(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        parent: bytes,
        size: int,
        host: str,
        copies: int = 1,
        session: str = "",
    ) -> Placement:
        placement = super().place(namespace, digests, parent, size, host, copies, session)
        for server in placement.servers:
            if self.servers.records[server].stats.draining:
                self.truth.fail(f"G15: {server}, which will leave, is chosen for a write")
        living = {name for name, record in self.servers.records.items() if record.alive}
        if not set(placement.servers) <= living:
            self.truth.fail("a writer is sent to a server that is lost")
        stay = {name for name in living if not self.servers.records[name].stats.draining}
        if stay and not placement.servers:
            self.truth.fail("a writer is sent nowhere, although servers live")
        if parent == ROOT or not digests:
            return placement
        branches = self.branches.setdefault(parent, set())
        branches.add(digests[0])
        (explained,) = explain(self, namespace, [parent])
        having = {replica.server for replica in explained.replicas}
        having = {name for name in having if not self.servers.records[name].draining}
        if having and placement.servers[0] not in having:
            if len(branches) < SHARED_FROM:
                self.truth.fail(f"a chain is cut: {having} have its parent, {placement.servers[0]}")
            self.truth.probes.add("a chain began away from what it shares")
        return placement

    def stored(
        self, server: str, namespace: Namespace, part: int, tier: int, digests: Sequence[bytes]
    ) -> bool:
        alone = super().stored(server, namespace, part, tier, digests)
        self.inspect_now_and_then()
        return alone

    def removed(
        self,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        reason: ReadStatus,
    ) -> None:
        super().removed(server, namespace, part, digests, reason)
        self.inspect_now_and_then()


class WatchedSweeper(Sweeper):
    """The same after each of its steps."""

    def step(self, limit: int = 512) -> bool:
        goes_on = super().step(limit)
        assert isinstance(self._directory, WatchedDirectory)
        self._directory.inspect_now_and_then()
        return goes_on
