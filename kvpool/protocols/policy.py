"""What an eviction policy must do: choose the block that is evicted next.

The store decides which blocks *may* be evicted: leaves only (tails before heads, so the rest of a
chain is always a usable prefix), and no pinned or reserved block. A policy decides the order among
those. It never scans: the store calls `add_candidate` when a block becomes evictable and `touch`
when a block is used (design: eviction).

A policy is constructed with the capacity of its store in bytes, and found by its name among the
entry points of `kvpool.policies`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable


class Evictable(Protocol):
    """What a policy sees of a block. The last three fields belong to the policy: other code
    only corrects `last_used`, of blocks that were used elsewhere."""

    digest: bytes  # read only
    size: int  # bytes, read only

    last_used: int  # the time of the last use in microseconds, made unique
    is_candidate: bool  # the block is in the policy's queue
    policy_data: int  # a number by which the policy ranks the block; 0 for a new block


B = TypeVar("B", bound=Evictable)


class Decision(enum.Enum):
    """What a policy may return instead of a victim."""

    #: Every evictable block ranks above the new one: the write is refused, and waiting is useless.
    BYPASS = enum.auto()
    #: The order is not up to date yet, and no more work is done in this call: ask again, after
    #: others had their turn. Each such call makes progress.
    NOT_YET = enum.auto()


class Policy(Protocol[B]):
    """An order of eviction. Every call is O(log n), amortised, and takes 5 ms at most."""

    def touch(self, block: B, now: float) -> None:
        """The block was reserved, sealed or read. A lookup is not a use and does not call this.

        A new block is touched twice, when it is reserved and when it is sealed: count both as one
        use.
        """

    def add_candidate(self, block: B) -> None:
        """The block may be evicted from now on. Idempotent."""

    def remove(self, block: B) -> None:
        """The block leaves the store, as a victim or for another reason."""

    def victim(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        """The block to evict for `newcomer`, which has no space; it leaves the policy's queue.

        None when no block may be evicted: space becomes free when a reader or writer releases a
        block. BYPASS only while the stored blocks were used recently or their session has a resume
        hint, and only for a bounded time: a full pool must not keep old blocks for ever (G9).
        `newcomer` has not been touched yet. Where the policy has `in_a_row = True`, nor have others
        that came before it: the first of a batch stands for the rest. A call that would take more
        than a few hundred steps returns NOT_YET instead: the loop serves no client meanwhile.
        Its `takes_parent`, if it has one, says that the victim's parent goes next (`Density`).

        A block for which `evictable` returns False leaves the queue too. The store adds it again
        when the pin or reservation that protects it ends.
        """

    def victim_age(self, now: float) -> float:
        """Seconds since the last use of the block that is next; 0 when there is none."""


class Inferred(NamedTuple):
    """What the method `inferred()` of a policy returns, if it has one: what it infers from the
    blocks, for people. `figures` by name, at most 16; `why` says why a block went, "" if unknown.
    """

    figures: Mapping[str, int] = MappingProxyType({})
    why: Callable[[bytes], str] = lambda digest: ""


@runtime_checkable
class LearnsFromArrivals(Protocol):
    """A policy that is given how long sessions pause, also those whose blocks were evicted.

    The times between uses of stored blocks do not show that: blocks that come back late are gone.
    """

    def arrived(self, pause_s: float) -> None:
        """A session's prompt arrived so many seconds after its last use; its wait comes on top."""
