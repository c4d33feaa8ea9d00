"""The blocks of one tier by their keys, and what readers and masters are told of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvpool.fingerprint import MapFingerprint
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.server.state.entry import Account, ChangeLog, Entry, Index
from kvpool.server.state.extent_state import Event, State
from kvpool.types import Namespace, ReadStatus

#: Never written to.
_NO_BLOCKS: Final[PiecewiseDict[bytes, Entry]] = PiecewiseDict()


class BlockIndex:
    """An `Index` for each namespace and part that has blocks here."""

    def __init__(self, tombstones_max: int = 65_536) -> None:
        #: Which tier of its server this is, counted from the top.
        self.tier = 0
        #: What the masters must be sent (blocks stored, blocks gone), in order.
        self.change_log = ChangeLog(tombstones_max)
        #: Called when a sealed block leaves; False if another tier has it, so the pool keeps it.
        self.on_leave: Callable[[Entry, Event], bool] | None = None
        #: Of the blocks that readers find in this tier (design: announcements).
        self.fingerprint = MapFingerprint()
        #: Counts a sealed block that has come (1) or left (-1), if other tiers may have it, too.
        self.count_place: Callable[[Entry, int], None] | None = None
        self.stored = 0  # visible blocks (parts count singly)
        self.stored_bytes = 0
        self.sealed_bytes = 0  # of all blocks that were sealed here
        self.copied = False  # some block was written with copies
        self.by_part: dict[tuple[Namespace, int], Index] = {}

    def peek(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The sealed block, or None. Not a use: it does not delay the block's eviction (G9)."""
        index = self.by_part.get((namespace, part))
        entry = index.blocks.get(digest) if index is not None else None
        return entry if entry is not None and entry.state is State.STORED else None

    def blocks(self, namespace: Namespace, part: int) -> PiecewiseDict[bytes, Entry]:
        """The blocks of one part, reserved or sealed. Live: use it before the next call only."""
        index = self.by_part.get((namespace, part))
        return index.blocks if index is not None else _NO_BLOCKS

    def parts(self, entry: Entry) -> list[Entry]:
        """The parts of the block that are on this server, this one included."""
        namespace = entry.index.namespace
        if namespace.parts == 1:
            return [entry]
        found = [self.blocks(namespace, part).get(entry.digest) for part in range(namespace.parts)]
        return [part for part in found if part is not None]

    def inventory_steps(self) -> Iterator[tuple[Index, list[Entry]]]:
        """The sealed blocks, in small steps between which the store may change.

        A block that is here from the first step to the last is in at least one of them.
        """
        for key in list(self.by_part):
            index = self.by_part.get(key)
            if index is not None:
                for piece in index.blocks.pieces():
                    yield index, [e for e in piece.values() if e.state is State.STORED]

    def inventory(self) -> list[Entry]:
        """Every sealed block now. The entries are live: check `state` before using one later."""
        return [entry for _, entries in self.inventory_steps() for entry in entries]

    def of(self, namespace: Namespace, part: int, account_of: Callable[[str], Account]) -> Index:
        """The index of one part, which is made if it has no block yet."""
        index = self.by_part.get((namespace, part))
        if index is None:
            index = Index(namespace, part, self.tier, account_of(namespace.name))
            self.keep(index)
        return index

    def keep(self, index: Index) -> None:
        """Enter an index, unless it is there."""
        key = index.namespace, index.part
        if key not in self.by_part:
            self.by_part[key] = index
            index.account.indexes += 1

    def drop_if_empty(self, index: Index) -> None:
        if index.blocks or index.orphans:
            return
        if self.by_part.pop((index.namespace, index.part), None) is not None:
            index.account.indexes -= 1

    def raise_copies(self, entry: Entry, copies: int) -> None:
        """The block is written with so many copies, or more. Its parts here are of one kind: they
        leave together, so none of them is extra if one is not (design: movers)."""
        for part in self.parts(entry):
            part.copies = max(part.copies, copies)

    def came(self, index: Index, entries: Sequence[Entry], *, announced: bool) -> None:
        """Blocks of one index were sealed: readers find them from now on."""
        size = sum([entry.size for entry in entries])
        self.stored += len(entries)
        self.stored_bytes += size
        self.sealed_bytes += size
        digests = [entry.digest for entry in entries]
        if announced:
            self.change_log.append_arrivals(index, digests, self.tier)
        if self.count_place is None:
            self.fingerprint.count_all(digests, index.seed, 1)
        else:
            for entry in entries:
                self.count_place(entry, 1)

    def left(self, entry: Entry, event: Event, reason: ReadStatus) -> bool:
        """A sealed block is here no more; False if the pool keeps it, so that nothing is told."""
        self.count(entry, -1)
        if self.on_leave is not None and not self.on_leave(entry, event):
            return False
        self.change_log.append_departures([entry], reason, self.tier)
        return True

    def left_all(self, entries: Sequence[Entry], reason: ReadStatus) -> None:
        """Sealed blocks of one chain are here no more, and no other tier has them."""
        digests = [entry.digest for entry in entries]
        self.stored -= len(entries)
        self.stored_bytes -= sum([entry.size for entry in entries])
        self.fingerprint.count_all(digests, entries[0].index.seed, -1)
        self.change_log.append_departures(entries, reason, self.tier)

    def count(self, entry: Entry, sign: int) -> None:
        """From the state itself, not from the log of changes: one that is missing is noticed."""
        self.stored += sign
        self.stored_bytes += sign * entry.size
        if self.count_place is None:
            self.fingerprint.count(entry.digest, entry.index.seed, sign)
        else:
            self.count_place(entry, sign)
