"""The records of a store: blocks, and the changes to announce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeAlias

from kvpool.fingerprint import location_seed
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.server.state.extent_state import State
from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.tombstones import Tombstones
from kvpool.types import ROOT, Extent, Namespace, ReadStatus

#: No limit, in bytes.
UNLIMITED: Final = 1 << 62
#: Departures that wait for their tombstones, at most.
_DEPARTED_MAX: Final = 256
#: Missed blocks that wait to be told, at most.
MISSED_MAX: Final = 1024
#: The owner of pins and reservations for copies inside a server; connections count from 1.
MOVER: Final = 0
#: How far up a chain is looked for a circle. Only a block whose children came before it is looked
#: at, so the usual write, head first, never is.
ANCESTORS_MAX: Final = 4096


class Account:
    """The bytes of whole extents that count together: of all blocks in one tier, or of a tenant's
    (`eviction/order.py`). Compared by identity: an index keeps its account."""

    __slots__ = ("indexes", "limit", "name", "used")

    def __init__(self, name: str = "") -> None:
        self.name = name  # empty: the pool itself
        self.used = 0
        self.indexes = 0  # that count here
        self.limit = UNLIMITED  # above it, it evicts its own

    def owns(self, size: int) -> bool:
        """Whether so many bytes more are guaranteed, too."""
        return False

    def exceeds(self, size: int) -> bool:
        """Whether so many bytes more are above its limit."""
        return self.used + size > self.limit

    def may_take_from(self, other: Account, size: int) -> bool:
        """Whether blocks of that account may make room for so many bytes more."""
        return True


class Index:
    """The blocks of one part of one namespace on this server."""

    __slots__ = ("account", "blocks", "namespace", "orphans", "part", "seed", "tier", "used")

    def __init__(
        self, namespace: Namespace, part: int, tier: int, account: Account | None = None
    ) -> None:
        self.account = account or Account()  # of the tenant whose namespace it is
        self.used = 0  # bytes of whole extents, as the account counts them
        self.namespace = namespace
        self.part = part
        self.tier = tier
        self.seed = location_seed(namespace, part, tier)
        self.blocks: PiecewiseDict[bytes, Entry] = PiecewiseDict()  # RESERVED and STORED
        self.orphans: dict[bytes, int] = {}  # parent that is not stored -> number of its children

    def count(self, size: int) -> None:
        """Blocks have got extents of `size` bytes, or with a negative size given them back."""
        self.used += size
        self.account.used += size

    def link_all(self, entries: Sequence[Entry], *, restored: bool = False) -> None:
        """Enter new blocks in their order, and count each as a child, also of a parent that is not
        here (yet).

        Counts, not lists: only *whether* a block has children matters (design: eviction).
        """
        table, mask, orphans = self.blocks.table, self.blocks.mask, self.orphans
        for entry in entries:
            table[hash(entry.digest) & mask][entry.digest] = entry
            if orphans:
                entry.children = orphans.pop(entry.digest, 0)
            if entry.parent == ROOT:
                continue
            parent = table[hash(entry.parent) & mask].get(entry.parent)
            if parent is None:
                orphans[entry.parent] = orphans.get(entry.parent, 0) + 1
                continue
            entry.parent = parent.digest  # share the bytes object
            parent.children += 1
            # Only a block whose children came first, or that is its own child, can close one.
            if entry.children and not restored and self._closes_a_circle(entry, parent):
                self.leave_parent(entry)
        self.blocks.changed(len(entries))

    def unlink(self, entry: Entry) -> Entry | None:
        """Leave; the parent, if it has no child any more. Children that stay are counted for a
        later copy of theirs."""
        del self.blocks[entry.digest]
        if entry.children:
            self.orphans[entry.digest] = entry.children
            entry.children = 0
        if entry.parent == ROOT:
            return None
        parent = self.blocks.get(entry.parent)
        if parent is not None:
            parent.children -= 1
            return None if parent.children else parent
        left = self.orphans.pop(entry.parent) - 1
        if left:
            self.orphans[entry.parent] = left
        return None

    def leave_parent(self, entry: Entry) -> None:
        """Count as the first block of a chain: the link to the parent would close a circle."""
        self.blocks[entry.parent].children -= 1
        entry.parent = ROOT

    def _closes_a_circle(self, entry: Entry, parent: Entry) -> bool:
        """Whether a new block that has children here is an ancestor of its own parent.

        Blocks in a circle all have children, so none could ever be evicted (G9). So the link that
        would close it is left out, and the block counts as the first of a chain; also one that
        joins two stretches below ANCESTORS_MAX ancestors, which bounds the work and costs hits.
        """
        above: Entry | None = parent
        for _ in range(ANCESTORS_MAX):
            if above is None:  # the first of a chain, or its parent is not here
                return False
            if above is entry:
                return True
            above = self.blocks.get(above.parent)
        return True


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """One block and its extent. Slotted, because there are millions."""

    index: Index
    digest: bytes
    parent: bytes
    offset: int
    size: int
    generation: int
    #: The generation of the block where it was written: copies in other tiers have the same. 0 of
    #: one that is restored: before all that is written from now on.
    born: int = 0
    checksum: int = 0
    state: State = State.RESERVED
    pins: int = 0
    children: int = 0  # blocks on this server that name this one as parent
    last_used: int = 0
    is_candidate: bool = False
    policy_data: int = 0
    session: Any = None  # what the order of evictions records of its user, if that is one
    superseded_at: int = 0  # `last_used` when its branch was superseded; a later use ends that
    clean: bool = True  # it may be evicted without being written to another tier first
    reads: int = 0
    #: With how many copies it was written; 0: an extra copy (design: movers).
    copies: int = 1

    def __lt__(self, other: Entry) -> bool:
        """Breaks ties in the policy's heap, where the parts of one block share `last_used`."""
        return self.generation < other.generation

    def __repr__(self) -> str:
        return f"<Entry {self.digest.hex()[:12]} {self.state.name} at {self.offset}+{self.size}>"

    @property
    def extent(self) -> Extent:
        return Extent(self.offset, self.size, self.generation)


class Stretch(NamedTuple):
    """Blocks of this server that became visible (`HIT`), or left for the reason `status`."""

    namespace: Namespace
    part: int
    digests: list[bytes]
    status: ReadStatus
    tier: int = 0


#: Namespace and part, and of that the digests.
MissedBlocks: TypeAlias = tuple[Namespace, int, list[bytes]]


class Missed:
    """Blocks that readers have asked for and that are not here: a master may be outdated.

    Masters are told after all changes, of each once, of each tenant its share: who asks for such
    keys decides how many there are (design: announcements).
    """

    def __init__(self, limit: int = MISSED_MAX) -> None:
        self.shares = Shares(limit)
        #: By namespace and part; no tuple for each block, as whole prompts are missed.
        self.blocks: dict[tuple[Namespace, int], dict[bytes, None]] = {}

    def add(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """Keep these, too. Those beyond the share of their tenant are dropped, and counted."""
        tenant = tenant_of(namespace.name)
        if kept := digests[: self.shares.room(tenant)]:
            blocks = self.blocks.setdefault((namespace, part), {})
            before = len(blocks)
            blocks.update(dict.fromkeys(kept))
            self.shares.take(tenant, len(blocks) - before)
        if len(kept) < len(digests):
            self.shares.refuse(tenant, len(digests) - len(kept))

    def take(self) -> list[MissedBlocks]:
        """All that wait; none is left."""
        blocks = [(*of, list(digests)) for of, digests in self.blocks.items()]
        self.blocks.clear()
        self.shares.clear()
        return blocks


class ChangeLog:
    """Changes that are still to be announced, and tombstones of the blocks that have left."""

    def __init__(self, tombstones_max: int = 65_536) -> None:
        self._tombstones = Tombstones(tombstones_max)
        self._departed: list[Stretch] = []  # whose tombstones are still to be recorded
        self._departures = 0  # in them
        self.changes: list[Stretch] = []
        self._open: object = None  # what they must be to join the last one
        #: What readers asked for in vain, for masters that have sent them here.
        self.missed = Missed()

    @property
    def tombstones(self) -> Tombstones:
        """Why blocks are gone."""
        if self._departed:
            self._record_departures()
        return self._tombstones

    def take(self) -> list[Stretch]:
        """The changes since the last call, in order (design: announcements)."""
        changes, self.changes, self._open = self.changes, [], None
        return changes

    def append_arrivals(self, index: Index, digests: Sequence[bytes], tier: int) -> None:
        """Record that blocks of one index have come to `tier`: their tombstones are dropped."""
        for _, same in groupby(digests, len):
            self.add(index, list(same), ReadStatus.HIT, tier)
        self.tombstones.came_back_all(index.namespace, digests)

    def append_departures(self, entries: Sequence[Entry], reason: ReadStatus, tier: int) -> None:
        """Record that blocks of one chain have left this server, with their tombstones."""
        stretch = self.add(entries[0].index, [one.digest for one in entries], reason, tier)
        if not self._departed or self._departed[-1] is not stretch:
            self._departed.append(stretch)
        self._departures += len(entries)
        if self._departures >= _DEPARTED_MAX:
            self._record_departures()

    def add(self, index: Index, digests: list[bytes], status: ReadStatus, tier: int) -> Stretch:
        """Record changes of blocks: `HIT` means that they are in `tier` now.

        They join those before them, if these are alike: a record for each block takes longer.
        """
        kind = status, index.part, tier, index.namespace, len(digests[0])
        if kind != self._open:
            self._open = kind
            self.changes.append(Stretch(index.namespace, index.part, [], status, tier))
        self.changes[-1].digests.extend(digests)
        return self.changes[-1]

    def _record_departures(self) -> None:
        departed, self._departed, self._departures = self._departed, [], 0
        self._open = None  # what joined it would be recorded no more
        for namespace, _, digests, reason, _ in departed:
            self._tombstones.left_all(namespace, digests, reason)
