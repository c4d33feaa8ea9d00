"""The life of an extent, as a table.

    FREE --reserve--> RESERVED --seal--> STORED --evict, remove--> FREE
                         |                  \\--remove while pinned--> PENDING_FREE
                         |--cancel--> FREE                                |--last unpin--> FREE
                         \\--writer lost--> QUARANTINED --writer exited--> FREE

Only STORED is visible to readers. A PENDING_FREE block has left the index, but a reader still has
it pinned. QUARANTINED belongs to a writer whose connection was closed while its process may be
alive: with shared memory that process can still store into the extent, which is therefore not
reused before the process has exited (design: quarantine). A pair that is not in the table is a bug
or a hostile peer; `after` refuses it.
"""

from __future__ import annotations

import enum
from typing import Final

from kvpool.errors import InvariantViolated


class State(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    STORED = 2
    PENDING_FREE = 3
    QUARANTINED = 4


class Event(enum.IntEnum):
    RESERVE = 0
    SEAL = 1
    CANCEL = 2
    WRITER_LOST = 3
    WRITER_EXITED = 4
    EVICT = 5
    REMOVE = 6
    REMOVE_PINNED = 7
    LAST_UNPIN = 8


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.FREE, Event.RESERVE): State.RESERVED,
    (State.RESERVED, Event.SEAL): State.STORED,
    (State.RESERVED, Event.CANCEL): State.FREE,
    (State.RESERVED, Event.WRITER_LOST): State.QUARANTINED,
    (State.QUARANTINED, Event.WRITER_EXITED): State.FREE,
    (State.STORED, Event.EVICT): State.FREE,
    (State.STORED, Event.REMOVE): State.FREE,
    (State.STORED, Event.REMOVE_PINNED): State.PENDING_FREE,
    (State.PENDING_FREE, Event.LAST_UNPIN): State.FREE,
}


def after(state: State, event: Event) -> State:
    """The next state. Raises InvariantViolated when the table has no such transition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvariantViolated(f"{event.name} in state {state.name}") from None
