"""What an eviction policy must do: choose which block goes next.

The store decides what *may* go: leaves only (tails before heads, so what is left of a chain is
always a usable prefix), nothing pinned, nothing reserved. A policy decides the order among those.
It never scans: the store offers a block when it becomes evictable and says when it is used.

A policy is made with the capacity of its store in bytes, and found by its name among the entry
points of `kvpool.policies`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol, TypeVar


class Evictable(Protocol):
    """What a policy sees of a block, and the fields that it keeps there; those belong to it."""

    digest: bytes  # read only
    size: int  # read only

    last_used: int  # when it was last used, in microseconds, made unique
    is_candidate: bool  # it stands in the policy's queue
    policy_data: int  # whatever the policy ranks it by; 0 for a newcomer


B = TypeVar("B", bound=Evictable)


class Decision(enum.Enum):
    """What a policy may answer instead of a victim."""

    #: All that may go is worth more than the newcomer: it is refused, and waiting is of no use.
    BYPASS = enum.auto()


class Policy(Protocol[B]):
    """An order of eviction. Every call is O(log n) at most, amortised."""

    def touch(self, block: B, now: float) -> None:
        """It was reserved, sealed or read. Probing for existence is no use and never comes here.

        So a newcomer's first two touches are one use of it.
        """

    def add_candidate(self, block: B) -> None:
        """It may be evicted from now on. Offering twice is offering once."""

    def remove(self, block: B) -> None:
        """It leaves the store, as a victim or otherwise."""

    def victim(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        """The next to go for a newcomer that has no room, taken from the queue.

        None when nothing may go: room comes when a reader or writer lets go of some. BYPASS only
        as long as what is there was used lately or is announced, and for a bounded time: a full
        pool never freezes on old data (G9). The newcomer has not been touched yet.

        A block that `evictable` rejects is dropped from the queue: whatever made it
        unevictable offers it again when that ends.
        """

    def victim_age(self, now: float) -> float:
        """Seconds since the next victim was used; 0 when there is none."""
