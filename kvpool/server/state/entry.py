"""One extent and what is known about it, and what the rest of the pool must learn of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.server.state.extent_state import State
from kvpool.tombstones import Tombstones
from kvpool.types import (
    Extent,
    Namespace,
    ReadStatus,
)


class Session:
    """What one store knows of one session."""

    __slots__ = ("bytes", "chain_ends", "due", "ended", "expired", "leaves", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0  # of blocks here that are used by this session alone
        self.chain_ends: dict[Index, Entry] = {}  # the end of its last chain
        self.leaves: dict[Entry, None] = {}  # that were offered, oldest first
        self.due: float | None = None  # when it resumes
        self.expired = False  # it was announced, and did not come
        self.ended = 0  # blocks with a stamp up to this are dead


class Index:
    """The blocks of one part of one namespace on this server."""

    __slots__ = ("blocks", "namespace", "orphans", "part", "tier")

    def __init__(self, namespace: Namespace, part: int, tier: int) -> None:
        self.namespace = namespace
        self.part = part
        self.tier = tier
        self.blocks: dict[bytes, Entry] = {}  # RESERVED and STORED
        self.orphans: dict[bytes, int] = {}  # absent parent -> how many children are here


class Entry:
    """One extent and what is known about it. Slotted: there are millions."""

    __slots__ = (
        "checksum",
        "children",
        "clean",
        "digest",
        "generation",
        "index",
        "is_candidate",
        "last_used",
        "offset",
        "parent",
        "pins",
        "policy_data",
        "reads",
        "session",
        "size",
        "state",
        "superseded_at",
    )

    def __init__(
        self, index: Index, digest: bytes, parent: bytes, offset: int, size: int, generation: int
    ) -> None:
        self.index = index
        self.digest = digest
        self.parent = parent
        self.offset = offset
        self.size = size
        self.generation = generation
        self.checksum = 0
        self.state = State.RESERVED
        self.pins = 0
        self.children = 0  # blocks on this server that name this one as parent
        self.last_used = 0
        self.is_candidate = False
        self.policy_data = 0
        self.session: Session | None = None  # the only one that uses it, as far as is known
        self.superseded_at = 0  # its stamp when its branch was superseded; a later use revives it
        self.clean = True  # nothing has to be saved from here before it may go
        self.reads = 0

    def __lt__(self, other: Entry) -> bool:
        """Breaks ties in the policy's heap, where parts of one block share a stamp."""
        return self.generation < other.generation

    def __repr__(self) -> str:
        return f"<Entry {self.digest.hex()[:12]} {self.state.name} at {self.offset}+{self.size}>"

    @property
    def extent(self) -> Extent:
        return Extent(self.offset, self.size, self.generation)


@dataclass(slots=True)
class Owner:
    """What one connection holds, by the id that was given out for it."""

    reservations: dict[int, Entry]
    pins: dict[int, Entry]


class Change(NamedTuple):
    """A block of this server became visible (`HIT`) or left, and why."""

    namespace: Namespace
    part: int
    digest: bytes
    status: ReadStatus
    tier: int = 0


class ChangeLog:
    """What the rest of the pool must learn, and what became of what has left."""

    def __init__(self, tombstones_max: int = 65_536) -> None:
        self.tombstones = Tombstones(tombstones_max)
        self.changes: list[Change] = []

    def append(self, entry: Entry, status: ReadStatus, tier: int) -> None:
        """News of a block: `HIT` says that it lies in `tier` now."""
        index = entry.index
        self.changes.append(Change(index.namespace, index.part, entry.digest, status, tier))

    def append_departure(self, entry: Entry, reason: ReadStatus, tier: int) -> None:
        """The pool has lost a block of this server."""
        self.tombstones.left(entry.index.namespace, entry.digest, reason)
        self.append(entry, reason, tier)
