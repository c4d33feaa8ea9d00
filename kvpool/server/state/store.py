"""The index of one tier: which block lies where, which calls hold it, which one is evicted next.

Pure: a method takes `now`, changes the index, and returns. It moves no bytes and awaits nothing,
so between two calls every invariant holds (`testing.invariants`). What the masters must be
sent (blocks stored, blocks gone) collects in `change_log`, in order.

An *owner* is the id of one connection. Its reservations and pins are freed when it is dropped.

`Blocks` is the store of a server with one memory; `TieredStore` joins those of several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from kvpool.fingerprint import MapFingerprint
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.protocols.policy import Decision, Policy
from kvpool.protocols.transport import ReserveRequest
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.order import JUST_NOW, Order
from kvpool.server.orders import make_order
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.clearing import MAKING_ROOM, Clearing, cheapest_start
from kvpool.server.state.entry import MOVER, UNLIMITED, Account, Change, ChangeLog, Entry, Index
from kvpool.server.state.extent_state import Event, State, after
from kvpool.server.state.holdings import ConnectionHoldings
from kvpool.tombstones import Tombstones
from kvpool.types import (
    ROOT,
    Extent,
    HintStatus,
    Namespace,
    Pin,
    ReadStatus,
    Reservation,
    WriteStatus,
)

#: Victims that may not be evicted which a policy may choose for one block: then it is refused.
_WRONG_VICTIMS_MAX: Final = 8
#: How far up a chain is looked for a circle. Only a block whose children came before it is looked
#: at, so the usual write, head first, never is.
ANCESTORS_MAX: Final = 4096
#: How much one `reserve` does `in_steps`, in blocks that are granted: two milliseconds or so. An
#: eviction is as much work as several grants.
STEPS_MAX: Final = 512
STEPS_OF_EVICTION: Final = 4
#: Free space, in sizes of the new block, with which it is refused if pins lie in every range.
_FREE_MAX: Final = 4
#: While no range can be emptied, one is searched after each eviction of this part of the size.
_SEARCHES: Final = 8
_INDEX: Final = attrgetter("index")
_ASK_AGAIN: Final = Reservation(WriteStatus.NOT_YET)
_NO_SPACE: Final = Reservation(WriteStatus.NO_SPACE)
_MISSES: Final = {reason: Pin(reason) for reason in ReadStatus}
#: Never written to.
_NO_BLOCKS: Final[PiecewiseDict[bytes, Entry]] = PiecewiseDict()


class Store:
    """The index of one tier's memory.

    An entry's `state` changes as `extent_state.TRANSITIONS` says. By state, and nowhere else:

    | state        | in an index | held by                  | extent                              |
    |--------------|-------------|--------------------------|-------------------------------------|
    | RESERVED     | yes         | one reservation          | allocated                           |
    | STORED       | yes         | `pins` pins, 0 or more   | allocated                           |
    | PENDING_FREE | no          | `pins` pins, 1 or more   | allocated, freed by the last unpin  |
    | QUARANTINED  | no          | the id of a closed owner | allocated, freed by `writer_exited` |
    | FREE         | no          | nothing                  | back in the allocator               |

    A STORED block without pins and children *may* be evicted: then it is a candidate of the policy
    (`testing.invariants`), and `_evictable` is asked again before it goes.
    """

    #: Blocks sealed here must be copied to another tier before they may go: in a `FrontStore` only.
    demotes = False
    dirty = 0  # those that must still be copied

    def __init__(
        self,
        capacity: int,
        *,
        alignment: int = 4096,
        policy: Policy[Entry] | None = None,
        hint_budget: float = 0.8,
        tombstones_max: int = 65_536,
        allocator: Allocator | None = None,
    ) -> None:
        self.allocator = allocator or Allocator(capacity, alignment)
        #: Bytes that hints may keep.
        self.hint_budget = int(self.allocator.capacity * hint_budget)
        made = policy if isinstance(policy, Order) else None
        rounded = self.allocator.rounded
        self.policy = made or make_order(policy or LRU(), self.hint_budget, rounded)
        self.change_log = ChangeLog(tombstones_max)
        #: What connections have reserved and pinned.
        self.held = ConnectionHoldings(self.allocator.alignment)
        #: Which tier of its server this is, counted from the top.
        self.tier = 0
        self.sealed_bytes = 0  # of all blocks that were sealed here
        #: `reserve` does bounded work in a call, and may begin a `clearing`: then it answers
        #: NOT_YET. The caller makes the moves, and asks again (design: allocator).
        self.in_steps = False
        #: The range that is being emptied for one block (design: allocator).
        self.clearing: Clearing | None = None
        #: Called when a sealed block leaves; False if another tier has it, so the pool keeps it.
        self.on_leave: Callable[[Entry, Event], bool] | None = None
        #: Of the blocks that readers find in this tier (design: announcements).
        self.fingerprint = MapFingerprint()
        #: Counts a sealed block that has come (1) or left (-1), if other tiers may have it, too.
        self.count_place: Callable[[Entry, int], None] | None = None
        self.stored = 0  # visible blocks (parts count singly)
        self.stored_bytes = 0
        self.evicted = 0
        self.evicted_bytes = 0
        self.bypassed = 0  # writes whose rest the policy refused
        self.circles_cut = 0  # parents left out: blocks would have been their own ancestors
        self.rejected_victims = 0  # that a wrong policy chose although they may not be evicted
        self.on_rejected_victim: Callable[[Entry], None] | None = None  # is called with each
        self._indexes: dict[tuple[Namespace, int], Index] = {}
        self._pending_free: dict[int, Entry] = {}  # by offset
        self.blocks_at: dict[int, Entry] = {}  # by offset, in each state but FREE
        self.move_targets: dict[int, int] = {}  # offset -> size, of moves that are under way
        self.last_id = 1  # of a block (its generation), a reservation or a pin; they only grow
        self._steps_left = UNLIMITED
        self._slack = self.allocator.capacity // 16

    def __repr__(self) -> str:
        return f"<Store {self.stored} blocks, {self.allocator!r}>"

    @property
    def tombstones(self) -> Tombstones:
        """Why blocks are gone."""
        return self.change_log.tombstones

    # --- writing ---------------------------------------------------------------------

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        """Reserve space for each block that is not here yet, evicting others where needed.

        One writer gets `RESERVED`; the others get `IN_PROGRESS` or `ALREADY_STORED`. After the
        first `NO_SPACE` or `BYPASSED` the rest of the batch is refused in the same way: blocks
        behind a missing one are of no use to a reader of the chain (design: eviction). A writer
        that holds as much as it may gets `NOT_YET` for the rest: it asks again for that when it has
        sealed the first blocks (design: budgets). `in_steps`, the rest is MAKING_ROOM when the call
        has worked for long enough.
        """
        index = self._index(request.namespace, request.part)
        account = index.account
        holder = self.held.owner(owner)
        reservations = holder.reservations
        left = self.held.left_to_reserve(holder)
        blocks_at = self.blocks_at
        session = self.policy.begin_write(index, request, now, moved=owner == MOVER)
        granted: list[Entry] = []
        answers: list[Reservation] = []
        # What is above a lowered limit goes in steps, not all at once for a block that moves.
        refusal = _NO_SPACE if owner == MOVER and account.used > account.limit else None
        in_steps = self.in_steps and owner != MOVER
        mask = self.allocator.alignment - 1
        self._steps_left = STEPS_MAX if in_steps else UNLIMITED
        # Granted, and not yet linked. A batch is linked at once, and always before the policy is
        # asked for a victim or touches another block: so its order is that of single calls.
        fresh: dict[bytes, Entry] = {}
        for digest, parent, size, stamp, copies in _rows(request):
            known = index.blocks.get(digest) or fresh.get(digest)
            if known is not None:
                self._link_all(fresh, now)
                answers.append(self._already_here(known, session, now, copies))
            elif size > self.allocator.capacity:
                answers.append(Reservation(WriteStatus.TOO_LARGE))
            elif refusal is not None or size > account.limit:
                answers.append(refusal or _NO_SPACE)
            elif left <= 0:
                refusal = _ASK_AGAIN if reservations else Reservation(WriteStatus.NO_SPACE)
                answers.append(refusal)
            elif self._steps_left <= 0:
                answers.append(MAKING_ROOM)
            else:
                self._steps_left -= 1
                self.last_id = id = self.last_id + 1
                entry = Entry(index, digest, parent, 0, size, id)
                entry.session = session
                entry.copies = copies
                over = account.used + ((size + mask) & ~mask) > account.limit
                offset = None if over else self.allocator.allocate(size)
                if offset is None:
                    self._link_all(fresh, now)
                    made = self._make_room(entry, owner, now, stamp)
                    if isinstance(made, Reservation):
                        answers.append(refusal := made)
                        continue
                    offset = made
                    self._keep(index)  # evictions may have emptied it
                entry.offset = offset
                blocks_at[offset] = fresh[digest] = reservations[id] = entry
                held = self.held.charge_write(holder, size)
                index.count(held)
                left -= held
                granted.append(entry)
                answers.append(Reservation(WriteStatus.RESERVED, id, Extent(offset, size, id)))
        self._link_all(fresh, now)
        self._drop_if_empty(index)  # perhaps nothing was granted
        if session is not None and granted:
            promoted = owner == MOVER and self.demotes
            self.policy.end_write(session, granted, request, promoted=promoted)
        return answers

    def seal(
        self,
        owner: int,
        id: int,
        checksum: int,
        now: float,
        *,
        from_other_tier: bool = False,
        last_used: int | None = None,
    ) -> WriteStatus:
        """Make a reserved block visible, all at once. Raises BadMessage for a foreign id.

        With `from_other_tier` another tier of this server has the block already, so nothing is
        announced: the caller does it where readers must be sent to this tier (design: promotion).
        """
        (status,) = self.seal_all(
            owner, [id], [checksum], now, from_other_tier=from_other_tier, last_used=last_used
        )
        return status

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
        """As `seal` for each block of a write. With a foreign id among them none is sealed."""
        entries = self.held.take_reservations(owner, ids)
        self.held.owner(owner).sealed_bytes += self.held.size_of(entries)
        sealed = after(State.RESERVED, Event.SEAL)
        touch = self.policy.touch
        for entry, checksum in zip(entries, checksums, strict=True):
            entry.state = sealed
            entry.checksum = checksum
            if entry.index.namespace.parts > 1:
                self.raise_copies(entry, max(part.copies for part in self._parts(entry)))
            touch(entry, now)
            if last_used is not None:  # it was used elsewhere, and is as old as it was there
                entry.last_used = min(entry.last_used, last_used)
        size = sum([entry.size for entry in entries])
        self.stored += len(entries)
        self.stored_bytes += size
        self.sealed_bytes += size
        for index, group in itertools.groupby(entries, _INDEX):
            self._became_visible(index, list(group), announced=not from_other_tier)
        return [WriteStatus.STORED] * len(entries)

    def cancel(self, owner: int, id: int) -> None:
        """Give a reservation back; nothing of it was ever visible."""
        (entry,) = self.held.take_reservations(owner, [id])
        entry.state = after(entry.state, Event.CANCEL)
        self._unlink(entry)
        self._free(entry)

    def cancel_rest(self, owner: int) -> None:
        """Give back every reservation that this owner still has."""
        for id in list(self.held.owner(owner).reservations):
            self.cancel(owner, id)

    # --- reading ---------------------------------------------------------------------

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
        """Pin each block that is here until it is unpinned; a reason for each that is not.

        `buffer_sizes` is how many bytes the reader has for each; a larger block is not pinned. A
        reader that has pinned as much as it may gets `NOT_YET` for the rest: it asks again when it
        has released those pins. With `view` it will not do so soon, and gets `REFUSED`
        (design: budgets).
        """
        index = self._indexes.get((namespace, part))
        blocks = index.blocks if index is not None else _NO_BLOCKS
        holder = self.held.owner(owner)
        pins = holder.pins
        if not pins:
            holder.views, holder.pinned_at = view, now
        budget = self.held.pin_budget(holder)
        together = holder.together
        of_tenant = None
        if together is not None:
            of_tenant = together.views if holder.views else together.copies
        left = first_left = budget.left(holder.pinned_bytes, of_tenant)
        over = _MISSES[ReadStatus.REFUSED if holder.views else ReadStatus.NOT_YET]
        mask = self.allocator.alignment - 1  # a budget counts whole extents
        answers: list[Pin] = []
        used: list[Entry] = []
        missed: list[int] = []  # positions
        id = self.last_id
        found = blocks.get_all(digests)
        for position, entry in enumerate(found):
            if entry is None:
                missed.append(position)
                answers.append(over)  # until its reason is known, below
            elif entry.state is not State.STORED:
                answers.append(Pin(ReadStatus.BEING_WRITTEN))
            elif buffer_sizes is not None and buffer_sizes[position] < entry.size:
                answers.append(Pin(ReadStatus.BUFFER_TOO_SMALL))
            elif left <= 0:
                answers.append(over)
            else:
                left -= (entry.size + mask) & ~mask
                entry.pins += 1
                id += 1
                pins[id] = entry
                used.append(entry)
                # No call per block in this loop: it is the path of every read.
                extent = Extent(entry.offset, entry.size, entry.generation)
                answers.append(Pin(ReadStatus.HIT, id, extent, entry.checksum))
        self.last_id = id
        self.held.count_pins(holder, first_left - left)
        if missed:  # a master that has sent the reader here is outdated
            absent = [digests[position] for position in missed]
            self.change_log.missed.add(namespace, part, absent)
            for at, reason in zip(missed, self.tombstones.reasons(namespace, absent), strict=True):
                answers[at] = _MISSES[reason]
        if used:
            order = self.policy.order_of(used[-1].index)
            touch = order.touch
            for entry in used:
                touch(entry, now)
            order.answered(used[-1], now)
        return answers

    def unpin(self, owner: int, id: int) -> None:
        """Release one pin. Raises BadMessage when the owner does not hold it."""
        self.unpin_all(owner, [id])

    def unpin_all(self, owner: int, ids: Sequence[int]) -> None:
        """Release the pins of a read. With one that the owner does not hold none is released."""
        for entry in self.held.take_pins(owner, ids):
            entry.pins -= 1
            if entry.pins:
                continue
            # The last reader decides: a removed block's extent is freed only now (design: pins).
            if entry.state is State.PENDING_FREE:
                entry.state = after(entry.state, Event.LAST_UNPIN)
                del self._pending_free[entry.offset]
                self._free(entry)
            elif not entry.children:
                self._add_candidate(entry)

    # --- removing --------------------------------------------------------------------

    def remove(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        reason: ReadStatus = ReadStatus.REMOVED,
        part: int | None = None,
        checksums: Sequence[int] = (),
    ) -> list[bool]:
        """Remove sealed blocks, every part on this server (or only `part`); True where one was.

        With `checksums`, one per block, only those whose bytes have that checksum. A pinned block
        becomes invisible at once; its extent is freed with the last unpin.
        """
        removed = [False] * len(digests)
        for which in range(namespace.parts) if part is None else (part,):
            index = self._indexes.get((namespace, which))
            for position, digest in enumerate(digests if index is not None else ()):
                entry = index.blocks.get(digest) if index is not None else None
                if entry is not None and entry.state is State.STORED:
                    if checksums and entry.checksum != checksums[position]:
                        continue
                    removed[position] = True
                    event = Event.REMOVE_PINNED if entry.pins else Event.REMOVE
                    self._remove_entry(entry, event, reason)
        return removed

    def held_of(self, namespace: Namespace, part: int) -> tuple[int, int]:
        """Its blocks here, and the bytes of their extents. O(1)."""
        index = self._indexes.get((namespace, part))
        return (len(index.blocks), index.used) if index is not None else (0, 0)

    def drop_owner(self, owner: int, *, writer_may_be_alive: bool = False) -> bool:
        """The connection is closed: release all its pins and reservations.

        With `writer_may_be_alive` the reserved extents are quarantined until `writer_exited`,
        because a process that still has them mapped may write into them. True when there are any
        (design: quarantine).
        """
        held = self.held.known(owner)
        if held is None:
            return False
        self.unpin_all(owner, list(held.pins))
        for id in list(held.reservations):
            if writer_may_be_alive:
                self.quarantine(owner, id, owner)
            else:
                self.cancel(owner, id)
        return self.held.forget(owner)

    def quarantine(self, owner: int, id: int, writer: int) -> None:
        """A reservation ends whose writer may still write. Another one may store the block; the
        extent is not reused until `writer_exited`."""
        (entry,) = self.held.take_reservations(owner, [id])
        entry.state = after(entry.state, Event.WRITER_LOST)
        self._unlink(entry)
        self.held.quarantine(writer, entry)

    def writer_exited(self, writer: int) -> bool:
        """It has stopped writing, or its process has ended. True if something was in quarantine."""
        for entry in (entries := self.held.release_quarantine(writer)):
            entry.state = after(entry.state, Event.WRITER_EXITED)
            self._free(entry)
        return bool(entries)

    def blocks(self, namespace: Namespace, part: int) -> PiecewiseDict[bytes, Entry]:
        """The blocks of one part, reserved or sealed. Live: use it before the next call only."""
        index = self._indexes.get((namespace, part))
        return index.blocks if index is not None else _NO_BLOCKS

    def pin_internal(self, owner: int, entry: Entry) -> int:
        """Pin a sealed block for a transfer, also beyond the budget; the policy does not count it
        as a use."""
        holder = self.held.owner(owner)
        entry.pins += 1
        id = self._new_id()
        holder.pins[id] = entry
        self.held.charge_pins(holder, [entry], 1)
        return id

    def hint(
        self, name: str, resume_in: float | None, now: float, *, age_s: float = 0.0
    ) -> HintStatus:
        """A hint about blocks, for the order of evictions (design: session-hints)."""
        return self.policy.hint(name, resume_in, now, age_s=age_s)

    def raise_copies(self, entry: Entry, copies: int) -> None:
        """The block is written with so many copies, or more. Its parts here are of one kind: they
        leave together, so none of them is extra if one is not (design: movers)."""
        for part in self._parts(entry):
            part.copies = max(part.copies, copies)

    # --- looking ---------------------------------------------------------------------

    def peek(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The sealed block, or None. Not a use: it does not delay the block's eviction (G9)."""
        index = self._indexes.get((namespace, part))
        entry = index.blocks.get(digest) if index is not None else None
        return entry if entry is not None and entry.state is State.STORED else None

    def take_changes(self) -> list[Change]:
        """The changes since the last call, in order (design: announcements)."""
        change_log = self.change_log
        changes, change_log.changes = change_log.changes, []
        return changes

    @property
    def indexes(self) -> Iterable[Index]:
        """One for each namespace and part that has blocks here. Live: do not keep it."""
        return self._indexes.values()

    def inventory_steps(self) -> Iterator[tuple[Index, list[Entry]]]:
        """The sealed blocks, in small steps between which the store may change.

        A block that is here from the first step to the last is in at least one of them.
        """
        for key in list(self._indexes):
            index = self._indexes.get(key)
            if index is not None:
                for piece in index.blocks.pieces():
                    yield index, [e for e in piece.values() if e.state is State.STORED]

    def inventory(self) -> list[Entry]:
        """Every sealed block now. The entries are live: check `state` before using one later."""
        return [entry for _, entries in self.inventory_steps() for entry in entries]

    @property
    def is_releasing(self) -> bool:
        """Extents of removed blocks wait for their readers or for a device."""
        return bool(self._pending_free)

    # --- inside ----------------------------------------------------------------------

    def _index(self, namespace: Namespace, part: int) -> Index:
        index = self._indexes.get((namespace, part))
        if index is None:
            account = self.policy.account_of(namespace.name)
            index = Index(namespace, part, self.tier, account)
            self._keep(index)
        return index

    def _keep(self, index: Index) -> None:
        """Enter an index, unless it is there."""
        key = index.namespace, index.part
        if key not in self._indexes:
            self._indexes[key] = index
            index.account.indexes += 1

    def _new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def _already_here(self, entry: Entry, session: Any, now: float, copies: int) -> Reservation:
        self.raise_copies(entry, copies)  # an extra copy that a writer relies on is none
        if entry.session is not session:
            self.policy.block_shared(entry)
        if entry.state is State.RESERVED:
            return Reservation(WriteStatus.IN_PROGRESS)
        self.policy.touch(entry, now)
        return Reservation(WriteStatus.ALREADY_STORED)

    def _make_room(
        self, newcomer: Entry, owner: int, now: float, last_used: int
    ) -> int | Reservation:
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
        if holder.limited and holder.reservations and not holder.may_evict(self.held.limits.writes):
            return _ASK_AGAIN
        enough = min(2 * size, size + self._slack)
        if (gave_up := holder.gave_up) is not None and gave_up[0] == newcomer.digest:
            enough = max(enough, gave_up[1] + 1)
        in_steps = self.in_steps and owner != MOVER
        wanted = owner == MOVER and self.demotes and last_used == JUST_NOW  # by a reader, now
        searched, wrong = False, 0
        while self._steps_left > 0:
            exceeds = account.used + size > account.limit
            if in_steps and not exceeds and self.allocator.available >= enough:
                if searched or clearing is not None:
                    break
                searched = True
                refusal = self._begin_clearing(owner, newcomer, size)
                if refusal is not None:
                    return refusal
                enough = self.allocator.available + size // _SEARCHES
            victim = self.policy.victim(newcomer, self._evictable, now, last_used, wanted=wanted)
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
                if in_steps:
                    break
                continue
            # A policy may be a plug-in. If it ignores `evictable`, a pinned extent must still not
            # go to a writer: a wrong policy costs hits, never bytes (G4).
            if not self._evictable(victim):
                self._reject(victim)
                wrong += 1
                if wrong == _WRONG_VICTIMS_MAX:
                    return Reservation(WriteStatus.NO_SPACE)
                continue
            if self._is_spared(victim, newcomer, owner, last_used, now):
                self.policy.add_candidate(victim)
                return Reservation(WriteStatus.NO_SPACE)
            leaving = self.policy.evicting(victim, account)
            if exceeds and account.used - leaving + size > account.limit:
                self._evict(victim)  # its extent alone does not make enough room within the limit
                continue
            offset = self._evict(victim, newcomer.size)
            if offset is not None:
                return offset
        return MAKING_ROOM

    def _evict(self, victim: Entry, size: int = 0) -> int | None:
        """Remove a block for one of `size` bytes, if any: the offset for that one, if it fits now.

        All parts leave together: a block with a missing part is of no use (design: eviction).
        """
        passed_on = None
        for entry in self._parts(victim):
            self._steps_left -= STEPS_OF_EVICTION
            # The usual case, blocks of one size: nothing to free, to join and to search.
            pass_on = bool(size) and passed_on is None
            pass_on = pass_on and self.allocator.may_pass_on(entry.offset, size)
            if pass_on:
                passed_on = entry.offset
                entry.index.count(-self.allocator.rounded(entry.size))
            self._remove_entry(entry, Event.EVICT, ReadStatus.EVICTED, free=not pass_on)
        if passed_on is not None or not size:
            return passed_on
        return self.allocator.allocate(size)

    def _begin_clearing(self, owner: int, newcomer: Entry, size: int) -> Reservation | None:
        """Choose a range to empty, if there is one; None when a few more victims may help."""
        # If the range cannot be emptied after all, the next attempt is made with more free bytes.
        self.held.owner(owner).gave_up = newcomer.digest, self.allocator.available
        start, pinned = cheapest_start(self, size)
        if start is not None:
            self.clearing = Clearing(self, owner, newcomer.digest, size, start)
            return MAKING_ROOM
        # Evicting does not help against pins: without this, a few pinned blocks between all others
        # would let one large write empty the pool.
        enough = pinned and self.allocator.available >= _FREE_MAX * size
        return Reservation(WriteStatus.NO_SPACE) if enough else None

    def _free(self, entry: Entry) -> None:
        del self.blocks_at[entry.offset]
        entry.index.count(-self.allocator.release(entry.offset))

    def relocate(self, entry: Entry, target: int) -> None:
        """The bytes of a block are at `target`, too, which was allocated for it: it lies there."""
        del self.blocks_at[entry.offset]
        self.allocator.release(entry.offset)
        entry.offset = target
        self.blocks_at[target] = entry

    def _reject(self, victim: Entry) -> None:
        """Take a victim that may not be evicted out of the candidates (design: eviction).

        It becomes a candidate again when its pin, reservation or last child is gone.
        """
        self.rejected_victims += 1
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
            for part in self._parts(entry)
        )

    def _parts(self, entry: Entry) -> list[Entry]:
        """The parts of the block that are on this server, this one included."""
        namespace = entry.index.namespace
        if namespace.parts == 1:
            return [entry]
        indexes = (self._indexes.get((namespace, part)) for part in range(namespace.parts))
        return [
            found
            for index in indexes
            if index is not None and (found := index.blocks.get(entry.digest)) is not None
        ]

    def _evictable(self, entry: Entry) -> bool:
        """Sealed, unpinned, no children: for all parts here, which leave together.

        Of parts used at different times the latest use counts; `last_used` is corrected here.
        """
        if entry.index.namespace.parts == 1:
            return entry.state is State.STORED and not entry.pins and not entry.children
        parts = self._parts(entry)
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

    def _add_candidate(self, entry: Entry) -> None:
        """Make a block that may have become evictable a candidate, with all its parts."""
        if entry.index.namespace.parts == 1:
            if entry.state is State.STORED and not entry.children and not entry.pins:
                self.policy.add_candidate(entry)
        else:
            for part in self._parts(entry):
                if part.state is State.STORED:
                    self.policy.add_candidate(part)

    def _count(self, entry: Entry, sign: int) -> None:
        """From the state itself, not from the log of changes: one that is missing is noticed."""
        if self.count_place is None:
            self.fingerprint.count(entry.digest, entry.index.seed, sign)
        else:
            self.count_place(entry, sign)

    def _became_visible(self, index: Index, entries: Sequence[Entry], *, announced: bool) -> None:
        """Blocks of one index were sealed: readers find them from now on."""
        digests = [entry.digest for entry in entries]
        if announced:
            self.tombstones.came_back_all(index.namespace, digests)
            self.change_log.append_all(index, digests, ReadStatus.HIT, self.tier)
        if self.count_place is None:
            self.fingerprint.count_all(digests, index.seed, 1)
        for entry in entries:
            if self.count_place is not None:
                self.count_place(entry, 1)
            if not entry.children:  # most blocks of a chain have one
                self._add_candidate(entry)

    def _remove_entry(
        self, entry: Entry, event: Event, reason: ReadStatus, *, free: bool = True
    ) -> None:
        """Take a sealed block out of the index, announce it, and free its extent or mark it
        pending. Without `free` the caller puts another block there at once."""
        entry.state = after(entry.state, event)
        self._unlink(entry)
        self.stored -= 1
        self.stored_bytes -= entry.size
        self._count(entry, -1)
        # After `_unlink`: `on_leave` must not find the block here any more (design: tiers).
        if self.on_leave is None or self.on_leave(entry, event):
            self.change_log.append_departure(entry, reason, self.tier)
            if event is Event.EVICT:
                self.evicted += 1
                self.evicted_bytes += entry.size
        if entry.state is State.PENDING_FREE:
            self._pending_free[entry.offset] = entry
        elif free:
            self._free(entry)

    def _link_all(self, fresh: dict[bytes, Entry], now: float) -> None:
        """Enter new blocks, each with one touch; then `fresh` is empty."""
        touch = self.policy.touch
        for entry in fresh.values():
            touch(entry, now)
        for entry in fresh.values():
            self._link(entry)
        fresh.clear()

    def _link(self, entry: Entry, *, restored: bool = False) -> None:
        """Enter the index and count as a child, also of a parent that is not here (yet).

        Counts, not lists: only *whether* a block has children matters (a chain is evicted from its
        tail), and a count costs one int among millions of entries (design: eviction).
        """
        index = entry.index
        index.blocks[entry.digest] = entry
        if entry.session is not None:
            self.policy.block_added(entry)
        if index.orphans:
            entry.children = index.orphans.pop(entry.digest, 0)
        if entry.parent != ROOT:
            parent = index.blocks.get(entry.parent)
            if parent is None:
                index.orphans[entry.parent] = index.orphans.get(entry.parent, 0) + 1
            else:
                entry.parent = parent.digest  # share the bytes object
                parent.children += 1
                # Only a block whose children came first, or that is its own child, can close one.
                if entry.children and not restored and self._closes_a_circle(entry, parent):
                    self._leave_parent(entry)

    def _leave_parent(self, entry: Entry) -> None:
        """Count as the first block of a chain: the link to the parent would close a circle."""
        parent = entry.index.blocks[entry.parent]
        parent.children -= 1
        entry.parent = ROOT
        self.circles_cut += 1

    def _closes_a_circle(self, entry: Entry, parent: Entry) -> bool:
        """Whether a new block that has children here is an ancestor of its own parent.

        Blocks in a circle all have children, so none could ever be evicted, whoever wrote them
        (G9, design: eviction). So the link that would close the circle is left out, and the block
        counts as the first of a chain. The same holds for a block that joins two stretches of a
        chain below ANCESTORS_MAX ancestors, which bounds the work: its parent may then be evicted
        before it, which costs hits and nothing else.
        """
        blocks = entry.index.blocks
        above: Entry | None = parent
        for _ in range(ANCESTORS_MAX):
            if above is None:  # the first of a chain, or its parent is not here
                return False
            if above is entry:
                return True
            above = blocks.get(above.parent)
        return True

    def _unlink(self, entry: Entry) -> None:
        """Leave the index. Children that stay are counted for a later copy of their parent."""
        index = entry.index
        self.policy.remove(entry)
        del index.blocks[entry.digest]
        if entry.children:
            index.orphans[entry.digest] = entry.children
            entry.children = 0
        if entry.parent != ROOT:
            parent = index.blocks.get(entry.parent)
            if parent is not None:
                parent.children -= 1
                if not parent.children:
                    self._add_candidate(parent)
            else:
                left = index.orphans[entry.parent] - 1
                if left:
                    index.orphans[entry.parent] = left
                else:
                    del index.orphans[entry.parent]
        self._drop_if_empty(index)
        if index.namespace.parts > 1:
            self._add_candidate(entry)  # its other parts: they could not be evicted without it

    def _drop_if_empty(self, index: Index) -> None:
        if index.blocks or index.orphans:
            return
        if self._indexes.pop((index.namespace, index.part), None) is not None:
            index.account.indexes -= 1


def _rows(request: ReserveRequest) -> Iterable[tuple[bytes, bytes, int, int, int]]:
    """Digest, parent, size, last use and copies of each block."""
    _, _, digests, parents, sizes, _, last_used, copies = request
    stamps = last_used or itertools.repeat(JUST_NOW, len(digests))
    return zip(
        digests, parents, sizes, stamps, copies or itertools.repeat(1, len(digests)), strict=True
    )
