"""The blocks of one tier: what is here (`index`), who holds it (`held`), where it lies (`extents`).

Pure: a method takes `now`, changes the state, and returns. It moves no bytes and awaits nothing,
so between two calls every invariant holds (`testing.invariants`).

An *owner* is the id of one connection. Its reservations and pins are freed when it is dropped.

`Blocks` is the store of a server with one memory; `TieredStore` joins those of several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, ClassVar, Final

from kvpool.protocols.policy import Policy
from kvpool.protocols.transport import ReserveRequest
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.order import JUST_NOW, Order, Subject, make_order
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.entry import MOVER, UNLIMITED, Entry, Index
from kvpool.server.state.extent_state import Event, State, after
from kvpool.server.state.extents import ASK_AGAIN, MAKING_ROOM, STEPS_MAX, Extents
from kvpool.server.state.holdings import ConnectionHoldings, Owner
from kvpool.server.state.index import BlockIndex
from kvpool.types import ROOT, Extent, Namespace, Pin, ReadStatus, Reservation, WriteStatus

#: `module:class`; the last one is made. Without its line and file no range of a memory can be
#: emptied in steps.
ALLOCATORS: Final = (
    "kvpool.server.state.allocator:Allocator",
    "kvpool.server.state.fenced_allocator:FencedAllocator",
)
_INDEX: Final = attrgetter("index")
#: The states of a block that is in an index.
_HERE: Final = (State.RESERVED, State.STORED)
_SEALED: Final = after(State.RESERVED, Event.SEAL)
_NO_SPACE: Final = Reservation(WriteStatus.NO_SPACE)
_MISSES: Final = {reason: Pin(reason) for reason in ReadStatus}


class Store:
    """What a server calls for one tier's memory.

    An entry's `state` changes as `extent_state.TRANSITIONS` says. By state, and nowhere else:

    | state        | in an index | held by                  | extent                              |
    |--------------|-------------|--------------------------|-------------------------------------|
    | RESERVED     | yes         | one reservation          | allocated                           |
    | STORED       | yes         | `pins` pins, 0 or more   | allocated                           |
    | PENDING_FREE | no          | `pins` pins, 1 or more   | allocated, freed by the last unpin  |
    | QUARANTINED  | no          | the id of a closed owner | allocated, freed by `writer_exited` |
    | FREE         | no          | nothing                  | back in the allocator               |
    """

    extents_type: ClassVar[type[Extents]] = Extents

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
        make: type[Allocator] = resolve_name(ALLOCATORS[-1])
        self.allocator = allocator or make(capacity, alignment)
        #: Bytes that hints may keep.
        self.hint_budget = int(self.allocator.capacity * hint_budget)
        made = policy if isinstance(policy, Order) else None
        rounded = self.allocator.rounded
        order = made or make_order(policy or LRU(), self.hint_budget, rounded)
        self.index = BlockIndex(tombstones_max)
        #: What connections have reserved and pinned.
        self.held = ConnectionHoldings(self.allocator.alignment)
        self.extents = self.extents_type(self.allocator, order, self.index, self.held)

    def __repr__(self) -> str:
        return f"<Store {self.index.stored} blocks, {self.allocator!r}>"

    # --- writing ---------------------------------------------------------------------

    def reserve(self, owner: int, request: ReserveRequest, now: float) -> list[Reservation]:
        """Reserve space for each block that is not here yet, evicting others where needed.

        One writer gets RESERVED, others IN_PROGRESS or ALREADY_STORED. After a NO_SPACE or BYPASSED
        the rest is refused, too: of no use (design: eviction). Who holds as much as it may gets
        NOT_YET until it has sealed (design: budgets); `in_steps`, MAKING_ROOM after some work.
        """
        extents, held, allocator = self.extents, self.held, self.allocator
        policy, blocks_at = extents.policy, extents.blocks_at
        index = self.index.of(request.namespace, request.part, policy.account_of)
        self.index.copied = self.index.copied or max(request.copies or (1,)) > 1
        account, limit, holder = index.account, index.account.limit, held.owner(owner)
        reservations, left = holder.reservations, held.left_to_reserve(holder)
        session = policy.begin_write(index, request, now, moved=owner == MOVER)
        granted, answers = dict[bytes, Entry](), list[Reservation]()
        refusal: Reservation | None = None
        # What is above a lowered limit goes in steps, not all at once for a block that moves.
        in_steps = account.used > limit if owner == MOVER else extents.in_steps
        extents.steps_left = STEPS_MAX if in_steps else UNLIMITED
        fresh, spare = list[Entry](), list[int]()  # to be entered; extents for those that follow
        found, mask = index.blocks.get_all(request.digests), allocator.alignment - 1
        # What is announced counts when it is entered; who waits for a disk does so for each block.
        alike = -1 if policy.in_a_row and not extents.demotes else 0  # -1: it is looked at once
        for known, (digest, parent, size, stamp, copies) in zip(found, _rows(request), strict=True):
            if known is None or known.state not in _HERE:  # it has made room for one before it
                known = granted.get(digest)
            taken = (size + mask) & ~mask
            if known is not None:
                self._enter(index, holder, fresh, now)
                answers.append(self._already_here(known, session, now, copies))
            elif size > allocator.capacity:
                answers.append(Reservation(WriteStatus.TOO_LARGE))
            elif refusal is not None or size > limit:
                answers.append(refusal or _NO_SPACE)
            elif left <= 0:
                answers.append(refusal := ASK_AGAIN if reservations else _NO_SPACE)
            elif extents.steps_left <= 0 and not spare:
                answers.append(MAKING_ROOM)
            else:
                extents.steps_left -= 1
                held.last_id = id = held.last_id + 1
                entry = Entry(index, digest, parent, 0, size, id)
                entry.session, entry.copies, entry.born = session, copies, id
                left -= taken
                if not spare:
                    offset = None if account.used + taken > limit else allocator.allocate(size)
                    if offset is None:
                        self._enter(index, holder, fresh, now)
                        alike = alike if alike >= 0 else _alike_until(request, found, len(answers))
                        more = max(0, alike - len(answers) - 1) if policy.due(entry) is None else 0
                        made = extents.make(entry, owner, now, stamp, min(left, taken * more))
                        if isinstance(made, Reservation):
                            answers.append(refusal := made)
                            continue
                        self.index.keep(index)  # evictions may have emptied it
                        spare = made
                    else:
                        index.used, account.used = index.used + taken, account.used + taken
                        spare.append(offset)
                entry.offset = offset = spare.pop()
                blocks_at[offset] = granted[digest] = reservations[id] = entry
                fresh.append(entry)
                answers.append(Reservation(WriteStatus.RESERVED, id, Extent(offset, size, id)))
        self._enter(index, holder, fresh, now)
        if not granted:
            self.index.drop_if_empty(index)
        elif session is not None:
            promoted = owner == MOVER and extents.demotes
            policy.end_write(session, list(granted.values()), request, promoted=promoted)
        return answers

    def seal(self, owner: int, id: int, checksum: int, now: float) -> WriteStatus:
        """As `seal_all` for one block."""
        return self.seal_all(owner, [id], [checksum], now)[0]

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
        """Make the reserved blocks of a write visible, all at once. Raises BadMessage, and seals
        none, with a foreign id among them.

        With `from_other_tier` another tier of this server has the blocks already, so nothing is
        announced: the caller does it where readers must be sent to this tier (design: promotion).
        """
        entries = self.held.take_reservations(owner, ids)
        self.held.owner(owner).sealed_bytes += self.held.size_of(entries)
        touch = self.extents.policy.touch
        for entry, checksum in zip(entries, checksums, strict=True):
            entry.state = _SEALED
            entry.checksum = checksum
            if entry.index.namespace.parts > 1:
                self.index.raise_copies(entry, max(part.copies for part in self.index.parts(entry)))
            touch(entry, now)
            if last_used is not None:  # it was used elsewhere, and is as old as it was there
                entry.last_used = min(entry.last_used, last_used)
        for index, group in itertools.groupby(entries, _INDEX):
            self.index.came(index, list(group), announced=not from_other_tier)
        for entry in entries:
            if not entry.children:  # most blocks of a chain have one
                self.extents.add_candidate(entry)
        return [WriteStatus.STORED] * len(entries)

    def cancel(self, owner: int, id: int) -> None:
        """Give a reservation back; nothing of it was ever visible."""
        (entry,) = self.held.take_reservations(owner, [id])
        entry.state = after(entry.state, Event.CANCEL)
        self.extents.unlink(entry)
        self.extents.free(entry)

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
        found = self.index.blocks(namespace, part).get_all(digests)
        if not any(found):
            return self._missed(namespace, part, digests)
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
        id = self.held.last_id
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
        self.held.last_id = id
        self.held.count_pins(holder, first_left - left)
        if missed:
            absent = self._missed(namespace, part, [digests[position] for position in missed])
            for at, pin in zip(missed, absent, strict=True):
                answers[at] = pin
        if used:
            order = self.extents.policy.order_of(used[-1].index)
            touch = order.touch
            for entry in used:
                touch(entry, now)
            order.answered(used[-1], now)
        return answers

    def _missed(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> list[Pin]:
        """Why each is not here. A master that has sent the reader here is outdated."""
        log = self.index.change_log
        log.missed.add(namespace, part, digests)
        return [_MISSES[reason] for reason in log.tombstones.reasons(namespace, digests)]

    def unpin(self, owner: int, id: int) -> None:
        """Release one pin. Raises BadMessage when the owner does not hold it."""
        self.unpin_all(owner, [id])

    def unpin_all(self, owner: int, ids: Sequence[int]) -> None:
        """Release the pins of a read. With one that the owner does not hold none is released."""
        self.extents.unpinned(self.held.take_pins(owner, ids))

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
            for position, digest in enumerate(digests):
                entry = self.index.peek(namespace, which, digest)
                if entry is not None:
                    if checksums and entry.checksum != checksums[position]:
                        continue
                    removed[position] = True
                    event = Event.REMOVE_PINNED if entry.pins else Event.REMOVE
                    self.extents.remove(entry, event, reason)
        return removed

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
        self.extents.unlink(entry)
        self.held.quarantine(writer, entry)

    def writer_exited(self, writer: int) -> bool:
        """It has stopped writing, or its process has ended. True if something was in quarantine."""
        for entry in (entries := self.held.release_quarantine(writer)):
            entry.state = after(entry.state, Event.WRITER_EXITED)
            self.extents.free(entry)
        return bool(entries)

    def hint(
        self, subject: Subject, resume_in: float | None, now: float, *, age_s: float = 0.0
    ) -> bool | None:
        """A hint about blocks, for the order of evictions (design: session-hints)."""
        find = self.index.peek
        return self.extents.policy.hint(subject, resume_in, now, age_s=age_s, find=find)

    # --- inside ----------------------------------------------------------------------

    def _already_here(self, entry: Entry, session: Any, now: float, copies: int) -> Reservation:
        self.index.raise_copies(entry, copies)  # an extra copy that a writer relies on is none
        if entry.session is not session:
            self.extents.policy.block_shared(entry)
        if entry.state is State.RESERVED:
            return Reservation(WriteStatus.IN_PROGRESS)
        self.extents.policy.touch(entry, now)
        return Reservation(WriteStatus.ALREADY_STORED)

    def _enter(self, index: Index, holder: Owner, fresh: list[Entry], now: float) -> None:
        """Enter and charge new blocks of one write, each with one touch; then `fresh` is empty."""
        if not fresh:
            return
        policy = self.extents.policy
        self.held.charge_writes(holder, self.held.size_of(fresh))
        touch = policy.touch
        for entry in fresh:
            touch(entry, now)
        index.link_all(fresh)
        if fresh[0].session is not None:
            for entry in fresh:
                policy.block_added(entry)
        fresh.clear()


def _alike_until(request: ReserveRequest, found: Sequence[Entry | None], at: int) -> int:
    """How many blocks there are, if room can be made together for those after number `at`: all are
    new, as large, and children of new ones only. So room for one takes nothing another needs."""
    digests, rest = request.digests, slice(at + 1, None)
    if any(found[rest]) or request.last_used or len({*request.sizes[at:]}) > 1:
        return 0
    new = {ROOT, *(digest for digest, known in zip(digests, found, strict=True) if known is None)}
    return len(found) * (new >= {*request.parents[rest]} and len({*digests}) == len(digests))


def _rows(request: ReserveRequest) -> Iterable[tuple[bytes, bytes, int, int, int]]:
    """Digest, parent, size, last use and copies of each block."""
    _, _, digests, parents, sizes, _, last_used, copies = request
    stamps = last_used or itertools.repeat(JUST_NOW, len(digests))
    return zip(
        digests, parents, sizes, stamps, copies or itertools.repeat(1, len(digests)), strict=True
    )
