"""The extents of one tier: what lies in them, and which block makes room for another. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from kvpool.protocols.policy import Decision
from kvpool.server.eviction.order import JUST_NOW, Order
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.entry import MOVER, UNLIMITED, Account, Entry
from kvpool.server.state.extent_state import Event, State, after
from kvpool.server.state.holdings import ConnectionHoldings
from kvpool.server.state.index import BlockIndex
from kvpool.types import ReadStatus, Reservation, WriteStatus

#: Victims that may not be evicted which a policy may choose for one block: then it is refused.
_WRONG_VICTIMS_MAX: Final = 8
#: How often a policy may put off its answer in one turn of the loop.
_ANSWERS_AWAITED: Final = 2
#: How much one `reserve` does `in_steps`, in blocks that are granted: two milliseconds or so. An
#: eviction is as much work as several grants.
STEPS_MAX: Final = 512
STEPS_OF_EVICTION: Final = 4
#: While no range can be emptied, one is searched after each eviction of this part of the size.
_SEARCHES: Final = 8
#: A writer that may hold no more asks again.
ASK_AGAIN: Final = Reservation(WriteStatus.NOT_YET)
#: The answer of a `Store.reserve` that needs more steps, compared with `is`. It never leaves the
#: server: whoever sees it makes the next one (`context.RoomMaker`) and asks again for these blocks.
MAKING_ROOM: Final = Reservation(WriteStatus.NOT_YET)
_EVICTED: Final = after(State.STORED, Event.EVICT)


class EmptiedRange(Protocol):
    """A range whose blocks move elsewhere, for one block of one owner (`state/clearing.py`)."""

    owner: int

    @property
    def is_ready(self) -> bool: ...

    def is_for(self, digest: bytes, size: int) -> bool: ...

    def take(self) -> int: ...

    def abandon(self) -> None: ...


class Extents:
    """The memory of one tier, in extents, and the order in which blocks leave it.

    A STORED block without pins and children *may* be evicted: then it is a candidate of the policy
    (`testing.invariants`), and `evictable` is asked again before it goes.
    """

    #: Blocks sealed here must be copied to another tier before they may go: of `FrontExtents` only.
    demotes = False
    #: What the mover brings, a reader waits for, unless it is prefetched: so, too.
    serves_readers = False
    evicts = True  # one block after the other: not where they leave with their object
    dirty = 0  # those that must still be copied

    def __init__(
        self, allocator: Allocator, policy: Order, index: BlockIndex, held: ConnectionHoldings
    ) -> None:
        self.allocator = allocator
        self.policy = policy
        self.index = index
        self.held = held
        self.blocks_at: dict[int, Entry] = {}  # by offset, in each state but FREE
        self.pending_free: dict[int, Entry] = {}  # removed blocks that are still pinned
        #: `reserve` does bounded work in a call, and may begin a `clearing`: then it answers
        #: NOT_YET. The caller makes the moves, and asks again (design: allocator).
        self.in_steps = False
        self.steps_left = UNLIMITED
        #: The range that is being emptied for one block, and what begins that where blocks can be
        #: moved: the answer to the writer; None while a few more victims may help.
        self.clearing: EmptiedRange | None = None
        self.clear: Callable[[int, bytes, int], Reservation | None] = lambda *block: None
        self.move_targets: dict[int, int] = {}  # offset -> size, of moves that are under way
        self.evicted = 0
        self.evicted_bytes = 0
        self.bypassed = 0  # writes whose rest the policy refused
        #: Is called with each victim that a wrong policy chose although it may not be evicted.
        self.on_rejected_victim: Callable[[Entry], None] | None = None

    def make(
        self, newcomer: Entry, owner: int, now: float, last_used: int, more: int = 0
    ) -> list[int] | Reservation:
        """The extent that `newcomer` gets by `fit`, or the refusal. Before it, in reverse, those
        for up to `more` bytes of blocks like it that come next. They count in its index."""
        made = self.fit(newcomer, owner, now, last_used)
        if isinstance(made, Reservation):
            return made
        newcomer.index.count(self.allocator.rounded(newcomer.size))
        return [made, *self._make_more(newcomer, owner, now, more)][::-1] if more else [made]

    def fit(self, newcomer: Entry, owner: int, now: float, last_used: int) -> int | Reservation:
        """Evict victims, used before `last_used`, until `newcomer` fits: its offset, or the
        refusal.

        Where enough is free, but nowhere together, blocks are moved instead: a `clearing` begins.
        So little more is evicted than is written, whatever sizes are mixed (design: allocator).
        """
        size = self.allocator.rounded(newcomer.size)
        account = newcomer.index.account
        clearing = self.clearing
        if clearing is not None and clearing.owner == owner:
            if clearing.is_for(newcomer.digest, size) and not account.exceeds(size):
                return clearing.take() if clearing.is_ready else MAKING_ROOM
            clearing.abandon()  # its block found a place, or another writer has begun it
            clearing = None
        holder = self.held.owner(owner)
        # The first block always: a writer must be able to show that it sends (design: budgets).
        if holder.reservations and holder.left_to_evict(self.held.limits.writes) <= 0:
            return ASK_AGAIN
        enough = min(2 * size, size + self.allocator.capacity // 16)
        if (gave_up := holder.gave_up) is not None and gave_up[0] == newcomer.digest:
            enough = max(enough, gave_up[1] + 1)
        in_steps = self.in_steps and owner != MOVER
        wanted = owner == MOVER and self.serves_readers and last_used == JUST_NOW  # now
        searched, wrong, asked = False, 0, 0
        while self.steps_left > 0:
            exceeds = account.used + size > account.limit
            if in_steps and not exceeds and self.allocator.available >= enough:
                if searched or clearing is not None:
                    break
                searched = True
                # If no range is emptied after all, the next attempt is made with more free bytes.
                holder.gave_up = newcomer.digest, self.allocator.available
                if (refusal := self.clear(owner, newcomer.digest, size)) is not None:
                    return refusal
                enough = self.allocator.available + size // _SEARCHES
            victim = self._victim_for(newcomer, now, last_used, wanted)
            if victim is None:
                if last_used == JUST_NOW and self._finds_more(account, size):
                    continue
                return Reservation(WriteStatus.NO_SPACE)
            if isinstance(victim, Decision):
                if victim is Decision.BYPASS:
                    if self.dirty:  # what is still to be written back may be a better victim then
                        return Reservation(WriteStatus.NO_SPACE)
                    self.bypassed += 1
                    return Reservation(WriteStatus.BYPASSED)
                asked += 1
                if in_steps or asked == _ANSWERS_AWAITED:
                    break
                continue
            # A policy may be a plug-in. If it ignores `evictable`, a pinned extent must still not
            # go to a writer: a wrong policy costs hits, never bytes (G4).
            if not self.evictable(victim):
                self.reject(victim)
                wrong += 1
                if wrong == _WRONG_VICTIMS_MAX:
                    return Reservation(WriteStatus.NO_SPACE)
                continue
            if self._is_spared(victim, newcomer, owner, last_used, now):
                self.policy.add_candidate(victim)
                return Reservation(WriteStatus.NO_SPACE)
            leaving = self.policy.evicting(victim, account)
            if exceeds and account.used - leaving + size > account.limit:
                self.evict(victim)  # its extent alone does not make enough room within the limit
                continue
            offset = self.evict(victim, newcomer.size)
            if offset is not None:
                return offset
        return MAKING_ROOM

    def _victim_for(
        self, newcomer: Entry, now: float, last_used: int, wanted: bool
    ) -> Entry | Decision | None:
        """As the policy has it, but for the parent: where that ranks lowest, the next one is asked
        for, which may keep the newcomer out, though not for ever (G9)."""
        victim = self.policy.victim(newcomer, self.evictable, now, last_used, wanted=wanted)
        if not isinstance(victim, Entry) or not self._is_parent(victim, newcomer):
            return victim

        def evictable(entry: Entry) -> bool:
            return not self._is_parent(entry, newcomer) and self.evictable(entry)

        other = self.policy.victim(newcomer, evictable, now, last_used, wanted=wanted)
        self.add_candidate(victim)
        return victim if other is None else other

    def _make_more(self, newcomer: Entry, owner: int, now: float, within: int) -> Iterator[int]:
        """As `fit` for blocks like this one that come next, as long as each takes one victim."""
        size, index, made = self.allocator.rounded(newcomer.size), newcomer.index, 0
        within = min(within, self.held.owner(owner).left_to_evict(self.held.limits.writes) - size)
        while made < within and self.steps_left > 0 and self.allocator.available < size:
            if index.account.exceeds(size):  # one of its own has to go, perhaps more
                return
            victim = self.policy.victim(newcomer, self.evictable, now)
            if not isinstance(victim, Entry):
                return
            spared = self._is_spared(victim, newcomer, owner, JUST_NOW, now)
            if spared or not self.evictable(victim):
                self.policy.add_candidate(victim)
                return
            self.policy.evicting(victim, index.account)
            offsets = self._evict_run(victim, newcomer, now, -(-(within - made) // size))
            if not offsets:
                return
            index.count(size * len(offsets))
            made += size * len(offsets)
            yield from offsets

    def _evict_run(self, victim: Entry, newcomer: Entry, now: float, most: int) -> list[int]:
        """As `evict`, and with it blocks above it that go next, each for one like `newcomer`."""
        index, size, may_pass_on = victim.index, newcomer.size, self.allocator.may_pass_on

        def may_go(one: Entry) -> bool:
            free = one.state is State.STORED and not one.pins and may_pass_on(one.offset, size)
            return free and one.children == 1 and not self._is_parent(one, newcomer)

        run, alone = [victim], index.namespace.parts > 1 or self.index.on_leave is not None
        if not alone and may_pass_on(victim.offset, size):
            most = min(most, -(-self.steps_left // STEPS_OF_EVICTION))
            run = self.policy.run_of(victim, may_go, now, most)
        if len(run) == 1:
            return [] if (offset := self.evict(victim, size)) is None else [offset]
        for entry in run:
            entry.state = _EVICTED
            self.unlink(entry, inner=entry is not run[-1])
        self.index.left_all(run, ReadStatus.EVICTED)
        index.count(-self.allocator.rounded(size) * len(run))
        self.steps_left -= STEPS_OF_EVICTION * len(run)
        self.evicted += len(run)
        self.evicted_bytes += sum([entry.size for entry in run])
        return [entry.offset for entry in run]

    def evict(self, victim: Entry, size: int = 0) -> int | None:
        """Remove a block for one of `size` bytes, if any: the offset for that one, if it fits now.

        All parts leave together: a block with a missing part is of no use (design: eviction).
        """
        passed_on = None
        for entry in self.index.parts(victim):
            self.steps_left -= STEPS_OF_EVICTION
            # The usual case, blocks of one size: nothing to free, to join and to search.
            fits = size and passed_on is None and self.allocator.may_pass_on(entry.offset, size)
            if pass_on := bool(fits):
                passed_on = entry.offset
                entry.index.count(-self.allocator.rounded(entry.size))
            self.remove(entry, Event.EVICT, ReadStatus.EVICTED, free=not pass_on)
        if passed_on is not None or not size:
            return passed_on
        return self.allocator.allocate(size)

    def free(self, entry: Entry) -> None:
        del self.blocks_at[entry.offset]
        entry.index.count(-self.allocator.release(entry.offset))

    def relocate(self, entry: Entry, target: int) -> None:
        """The bytes of a block are at `target`, too, which was allocated for it: it lies there."""
        del self.blocks_at[entry.offset]
        self.allocator.release(entry.offset)
        entry.offset = target
        self.blocks_at[target] = entry

    def reject(self, victim: Entry) -> None:
        """Take a victim that may not be evicted out of the candidates (design: eviction).

        It becomes a candidate again when its pin, reservation or last child is gone.
        """
        self.policy.reject(victim)
        if self.on_rejected_victim is not None:
            self.on_rejected_victim(victim)

    def _is_spared(
        self, victim: Entry, newcomer: Entry, owner: int, last_used: int, now: float
    ) -> bool:
        """Whether a block that may be evicted stays, and the newcomer is refused."""
        # A chain that does not fit keeps its head: no block is stored in place of its parent.
        if self._is_parent(victim, newcomer):
            return True
        # An extra copy is worth less than one that another server hands over (design: movers).
        if newcomer.copies and not victim.copies:
            return False
        # A block that is fetched takes the place of less valuable ones only (design: moves).
        return last_used != JUST_NOW and self._last_use(victim) >= last_used

    def _is_parent(self, one: Entry, of: Entry) -> bool:
        return one.digest == of.parent and one.index.namespace == of.index.namespace

    def _last_use(self, entry: Entry) -> int:
        """When a block was used last, by any part that is here; of one whose session has announced
        its return: later than any other."""
        # All parts leave together, and another session may have written one of them, too.
        return max(
            part.last_used if self.policy.due(part) is None else JUST_NOW
            for part in self.index.parts(entry)
        )

    def evictable(self, entry: Entry) -> bool:
        """Sealed, unpinned, no children: for all parts here, which leave together.

        Of parts used at different times the latest use counts; `last_used` is corrected here.
        """
        if entry.index.namespace.parts == 1:
            return entry.state is State.STORED and not entry.pins and not entry.children
        parts = self.index.parts(entry)
        latest = max(part.last_used for part in parts)
        if latest != entry.last_used:
            entry.last_used = latest
            return False
        return all(
            part.state is State.STORED and not part.pins and not part.children for part in parts
        )

    def _finds_more(self, account: Account, size: int) -> bool:
        """No block may be evicted for so many bytes of this tenant: whether one may be now."""
        return False

    def add_candidate(self, entry: Entry) -> None:
        """Make a block that may have become evictable a candidate, with all its parts."""
        if entry.index.namespace.parts == 1:
            if entry.state is State.STORED and not entry.children and not entry.pins:
                self.policy.add_candidate(entry)
        else:
            for part in self.index.parts(entry):
                if part.state is State.STORED:
                    self.policy.add_candidate(part)

    def remove(self, entry: Entry, event: Event, reason: ReadStatus, *, free: bool = True) -> None:
        """Take a sealed block out of the index, announce it, and free its extent or mark it
        pending. Without `free` the caller puts another block there at once."""
        entry.state = after(entry.state, event)
        self.unlink(entry)
        # After `unlink`: no other tier must find the block here any more (design: tiers).
        if self.index.left(entry, event, reason) and event is Event.EVICT:
            self.evicted += 1
            self.evicted_bytes += entry.size
        if entry.state is State.PENDING_FREE:
            self.pending_free[entry.offset] = entry
        elif free:
            self.free(entry)

    def unlink(self, entry: Entry, *, inner: bool = False) -> None:
        """Leave the index; its parent may be evicted now, unless that leaves next (`inner`)."""
        index = entry.index
        self.policy.remove(entry)
        parent = index.unlink(entry)
        if parent is not None and not inner:
            self.add_candidate(parent)
        if not index.blocks:
            self.index.drop_if_empty(index)
        if index.namespace.parts > 1:
            self.add_candidate(entry)  # its other parts: they could not be evicted without it

    def unpinned(self, entries: Sequence[Entry]) -> None:
        """Pins have ended. The last reader of a removed block frees its extent (design: pins)."""
        for entry in entries:
            entry.pins -= 1
            if entry.pins:
                continue
            if entry.state is State.PENDING_FREE:
                entry.state = after(entry.state, Event.LAST_UNPIN)
                del self.pending_free[entry.offset]
                self.free(entry)
            elif not entry.children:
                self.add_candidate(entry)
