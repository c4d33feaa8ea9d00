"""What an operator calls a server: one word, the same in every view of a pool."""

from __future__ import annotations

from enum import Enum
from typing import Final

from kvpool.types import Member


class ServerState(Enum):
    """What an operator calls a server. LATE: heartbeats are missing, and it still counts as up.
    LEFT: it has ended in order, and may come back."""

    UP = "up"
    LATE = "late"
    LEAVING = "leaving"
    LEFT = "left"
    LOST = "lost"


#: A heartbeat comes once a second by default; after this one and a half are missing.
LATE_S: Final = 1.5


def state_of(member: Member, late_s: float = LATE_S) -> ServerState:
    """The state of a server, as masters know it."""
    if not member.alive:
        return ServerState.LEFT if member.left else ServerState.LOST
    if member.heard_s > late_s:
        return ServerState.LATE
    return ServerState.LEAVING if member.stats.draining else ServerState.UP
