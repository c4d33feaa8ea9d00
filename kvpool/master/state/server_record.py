"""What a master knows of one block server."""

from __future__ import annotations

import enum
import hmac
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.master.state.locations import ServerInventory
from kvpool.tenant_names import TENANTS_MAX
from kvpool.types import ServerStats

#: Assumed size of the smallest block of a server that says nothing about it.
_BLOCK_SIZE: Final = 4096
#: Pieces of one inventory that a server may have sent ahead of one that has not arrived yet.
PIECES_AHEAD_MAX: Final = 64
#: Unfinished inventories of one server whose blocks stay readable. Each attempt that ends early
#: leaves one, but the next attempt takes its blocks over in the same order.
EARLIER_MAX: Final = 4
#: Epochs that a record remembers after restarts: a server does not restart more often while one
#: message is on its way.
_FORMER_EPOCHS: Final = 8
#: A conversation has several turns in this time, so that each server's share of them shows.
_OFFERED_HALVES_S: Final = 60.0
#: Below it claims are counted in bytes again: then those that are forgotten cost no memory.
_UNIT_MIN: Final = 2.0**-32


class Refusal(NamedTuple):
    """Why a server may not have an id.

    `holder` are the addresses of the server that has it, `heard_s` is the age of that server's
    last message, and `lasting` is True when it does not help to wait.
    """

    problem: str
    holder: tuple[str, ...]
    heard_s: float
    lasting: bool = False
    full: bool = False  # the id is free, but there is no room for another server


class SequenceCheck(enum.Enum):
    """What an announcement, or a piece of an inventory, is to the ones before it."""

    NEXT = "next"  # apply it
    DUPLICATE = "duplicate"  # it was applied: acknowledge it again
    GAP = "gap"  # one before it is missing, or the server is unknown: ask for an inventory


class Claims:
    """Bytes that writers were sent to one server with, by tenant. Pure, O(1) but for `keep` now and
    then.

    Whoever asks says how many, and nobody has seen them: one tenant's claims decide little about
    where the blocks of others go (`believed`).
    """

    __slots__ = ("_parts", "_total", "_unit")

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}  # in units
        self._total = 0.0  # in units
        self._unit = 1.0  # bytes

    def add(self, tenant: str, size: int) -> None:
        """A writer of this tenant was sent here with so many bytes."""
        if tenant not in self._parts and len(self._parts) > TENANTS_MAX:
            tenant = ""  # such names are made up
        units = size / self._unit
        self._parts[tenant] = self._parts.get(tenant, 0.0) + units
        self._total += units

    def of(self, tenant: str) -> float:
        """The bytes of this tenant."""
        return self._parts.get(tenant, 0.0) * self._unit

    def believed(self, tenant: str, others_max: float) -> float:
        """As this tenant sees them: all of its own, and at most `others_max` bytes of others."""
        own = self.of(tenant)
        return own + min(max(0.0, self._total * self._unit - own), others_max)

    def keep(self, share: float) -> None:
        """Forget all but this share of each tenant's bytes."""
        self._unit *= share
        if self._unit < _UNIT_MIN:
            sizes = {tenant: units * self._unit for tenant, units in self._parts.items()}
            self._parts = {tenant: size for tenant, size in sizes.items() if size >= 1.0}
            self._total = sum(self._parts.values())
            self._unit = 1.0


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process of a server says of itself. `blocks_max` is how many blocks its memory can
    hold; 0: as many of 4 KiB as `capacity` has room for."""

    epoch: int
    host: str
    addresses: tuple[str, ...]
    tiers: tuple[str, ...]
    capacity: int
    token: bytes = field(default=b"", repr=False)
    kept: bool = False  # the next process of this server will have the same token
    blocks_max: int = 0
    caller: str = ""  # the address of the host that it registered from

    def __post_init__(self) -> None:
        if not self.blocks_max:
            object.__setattr__(self, "blocks_max", max(1, self.capacity // _BLOCK_SIZE))

    def shows(self, token: bytes) -> bool:
        """Whether this is the token of this server. In constant time."""
        return hmac.compare_digest(token, self.token)


@dataclass(slots=True)
class Inventories:
    """What a process of a server has announced, in order: its latest inventory, and those before it
    until that is complete."""

    server: str
    sequence: int = 0  # of the last announcement or inventory that was applied
    pieces: int = 1  # of inventory `sequence` that have arrived without a gap
    ahead: set[int] = field(default_factory=set)  # pieces that have arrived before others
    syncing: bool = False  # pieces of inventory `sequence` are missing
    earlier: list[ServerInventory] = field(default_factory=list)  # replaced by the arriving one
    latest: ServerInventory = field(init=False)

    def __post_init__(self) -> None:
        self.latest = ServerInventory(self.server)

    def __iter__(self) -> Iterator[ServerInventory]:
        """All that are in force."""
        return iter((self.latest, *self.earlier))

    def differs(self, sequence: int, blocks: int, fingerprint: bytes) -> bool:
        """Whether this master lists other blocks than the server had after message `sequence`.

        False if it cannot know: that message is older, or newer, than the last one here.
        (design: announcements)
        """
        if self.sequence != sequence:
            return False
        listed = self.latest.listed
        return self.syncing or listed.blocks != blocks or listed.packed() != fingerprint

    def check(self, sequence: int) -> SequenceCheck:
        """Whether announcement `sequence` is the next one. NEXT counts it as applied."""
        if sequence <= self.sequence:
            return SequenceCheck.DUPLICATE
        if sequence != self.sequence + 1 or self.syncing:
            return SequenceCheck.GAP
        self.sequence = sequence
        return SequenceCheck.NEXT

    def check_piece(self, sequence: int, piece: int, *, last: bool) -> SequenceCheck:
        """Whether this piece of inventory `sequence` is a new one. NEXT counts it as applied.

        Piece 0 of the next number begins a new inventory: `latest` is then a new one, and the
        one before it is the last of `earlier`. A number further ahead is a GAP, as for
        announcements: one that is made up would make every later message a DUPLICATE. The other
        pieces may come in any order, except that the last one must come when no other is missing.
        """
        if sequence < self.sequence:
            return SequenceCheck.DUPLICATE
        if sequence > self.sequence:
            if piece or sequence != self.sequence + 1:
                return SequenceCheck.GAP
            self.sequence = sequence
            self.pieces = 1
            self.ahead.clear()
            self.syncing = True
            self.earlier.append(self.latest)
            self.latest = ServerInventory(self.server)
            return SequenceCheck.NEXT
        if piece < self.pieces or piece in self.ahead:
            return SequenceCheck.DUPLICATE
        missing = last and piece > self.pieces
        if not self.syncing or missing or piece >= self.pieces + PIECES_AHEAD_MAX:
            return SequenceCheck.GAP
        self.ahead.add(piece)
        while self.pieces in self.ahead:
            self.ahead.remove(self.pieces)
            self.pieces += 1
        return SequenceCheck.NEXT

    def surplus(self) -> list[ServerInventory]:
        """Take inventories that are not needed out of `earlier`: empty ones, and too many."""
        largest_first = sorted(self.earlier, key=lambda one: one.blocks, reverse=True)
        surplus = [one for one in largest_first if not one.blocks]
        surplus += largest_first[EARLIER_MAX : len(largest_first) - len(surplus)]
        self.earlier = [one for one in self.earlier if one not in surplus]
        return surplus

    def end(self) -> list[ServerInventory]:
        """The last piece has arrived. Returns the inventories that are replaced."""
        replaced, self.earlier = self.earlier, []
        self.syncing = False
        return replaced


@dataclass(slots=True)
class ServerRecord:
    """A block server as this master knows it.

    | state      | fields                         | its blocks                                  |
    |------------|--------------------------------|---------------------------------------------|
    | unknown    | no record                      | none                                        |
    | registered | alive, `latest` is empty       | none                                        |
    | syncing    | alive, `syncing`               | readable: those that have arrived, and those |
    |            |                                | of `earlier` until the last piece           |
    | live       | alive, `latest` is complete    | readable                                    |
    | lost       | not `alive`, the rest is kept  | not readable: SERVER_LOST                   |
    | left       | the same, and `left`           | the same                                    |

    | from                | event                                        | to             |
    |---------------------|----------------------------------------------|----------------|
    | unknown             | register                                     | registered     |
    | registered          | announcement 1                               | live           |
    | registered, live    | piece 0 of an inventory (also after a GAP)   | syncing        |
    | syncing             | last piece                                   | live           |
    | any of these three  | no heartbeat for `timeout_s`                 | lost           |
    | any but unknown     | it says that it ends                         | left           |
    | lost, left          | heartbeat or register with the same epoch    | as it was      |
    | any but unknown     | register with a new epoch: it was restarted  | registered     |
    | lost, left          | nothing for `forget_s`                       | unknown        |

    A process that shows `token` is this server. With another token nothing is changed, and the id
    may be registered only when the server is lost, or forgotten if its token is `kept` over
    restarts.
    (design: server-identity, announcements)
    """

    server: str
    registration: Registration
    last_seen: float
    inventories: Inventories
    #: Of earlier processes of this server, whose last messages may still arrive.
    former_epochs: deque[int] = field(default_factory=lambda: deque(maxlen=_FORMER_EPOCHS))
    alive: bool = True
    left: bool = False  # it is not alive because it has ended in order
    draining: bool = False  # it will leave: no new blocks are placed there
    stats: ServerStats = field(default_factory=ServerStats)
    placed: Claims = field(default_factory=Claims)  # since the last heartbeat
    beats: int = 0  # heartbeats that came
    beat_at: float = 0.0  # when the last heartbeat came
    #: The same, of which each minute half is forgotten (design: placement).
    offered: Claims = field(default_factory=Claims)

    @property
    def fill(self) -> float:
        """The share of its memory in use, by its last heartbeat; 1 before the first one."""
        return self.stats.used / max(1, self.registration.capacity) if self.beats else 1.0

    def offer(self, tenant: str, size: int) -> None:
        """A writer of this tenant was sent here with so many bytes."""
        self.placed.add(tenant, size)
        self.offered.add(tenant, size)

    def beat(self, stats: ServerStats, now: float) -> None:
        """A heartbeat has come: what was placed until now is in its figures."""
        self.offered.keep(0.5 ** (max(0.0, now - self.beat_at) / _OFFERED_HALVES_S))
        self.beats += 1
        self.beat_at = self.last_seen = now
        self.stats = stats
        self.placed.keep(0.0)

    def tier_name(self, tier: int) -> str:
        tiers = self.registration.tiers
        return tiers[tier] if tier < len(tiers) else "?"
