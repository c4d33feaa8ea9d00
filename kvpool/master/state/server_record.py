"""What a master knows of one block server."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvpool.master.state.locations import ServerInventory
from kvpool.types import ServerStats


class SequenceCheck(enum.Enum):
    """What an announcement, or a piece of an inventory, is to the ones before it."""

    NEXT = "next"  # apply it
    DUPLICATE = "duplicate"  # it was applied: acknowledge it again
    GAP = "gap"  # one before it is missing, or the server is unknown: ask for an inventory


@dataclass(slots=True)
class ServerRecord:
    """A block server as this master knows it.

    | state      | fields                         | its blocks                          |
    |------------|--------------------------------|-------------------------------------|
    | unknown    | no record                      | none                                |
    | registered | alive, `inventory` is empty    | none                                |
    | syncing    | alive, `pending` is arriving   | readable, as in the old `inventory` |
    | live       | alive, `inventory` is complete | readable                            |
    | lost       | not `alive`, the rest is kept  | not readable: SERVER_LOST           |

    | from                | event                                        | to             |
    |---------------------|----------------------------------------------|----------------|
    | unknown             | register                                     | registered     |
    | registered          | announcement 1                               | live           |
    | registered, live    | piece 0 of an inventory (also after a GAP)   | syncing        |
    | syncing             | last piece                                   | live           |
    | any of these three  | it leaves, or no heartbeat for `timeout_s`   | lost           |
    | lost                | heartbeat or register with the same epoch    | as it was      |
    | lost                | register with a new epoch: it was restarted  | registered     |
    | lost                | nothing for `forget_s`                       | unknown        |

    While it is alive, no other process may register its id. (design: announcements, inventory)
    """

    server: str
    epoch: int
    host: str
    addresses: tuple[str, ...]
    tiers: tuple[str, ...]
    capacity: int
    last_seen: float
    inventory: ServerInventory
    alive: bool = True
    sequence: int = 0  # of the last announcement or inventory that was applied
    pieces: int = 1  # that have arrived of inventory `sequence`; an announcement has one
    pending: ServerInventory | None = None  # the inventory that is arriving
    stats: ServerStats = field(default_factory=ServerStats)
    bytes_placed: int = 0  # that writers were sent here with, since the last heartbeat

    def check_sequence(self, sequence: int) -> SequenceCheck:
        """Whether announcement `sequence` is the next one. NEXT counts it as applied."""
        if sequence <= self.sequence:
            return SequenceCheck.DUPLICATE
        if sequence != self.sequence + 1:
            return SequenceCheck.GAP
        self.sequence = sequence
        self.pieces = 1
        return SequenceCheck.NEXT

    def check_piece(self, sequence: int, piece: int) -> SequenceCheck:
        """Whether this piece of inventory `sequence` is the next one. NEXT counts it as applied.

        Piece 0 begins a new inventory: `pending` is then a new one, and the caller has to retire
        the previous one.
        """
        if sequence < self.sequence or (sequence == self.sequence and piece < self.pieces):
            return SequenceCheck.DUPLICATE
        if piece == 0:
            self.pending = ServerInventory(self.server)
            self.sequence = sequence
            self.pieces = 1
            return SequenceCheck.NEXT
        if sequence != self.sequence or piece != self.pieces or self.pending is None:
            return SequenceCheck.GAP
        self.pieces += 1
        return SequenceCheck.NEXT
