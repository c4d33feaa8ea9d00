"""What is asked of servers about blocks that move, from server to server or between tiers."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from kvpool.types import BATCH_BLOCKS_MAX, Count, Name, Namespace, Seconds
from kvpool.wire.messages import (
    Counts,
    Hashes,
    Keys,
    Message,
    NamespaceName,
    Packed,
    SessionName,
    Small,
    Statuses,
    Tolerant,
    check_part,
    register,
    unpack_batch,
)

#: Changes of the session in the blocks of one offer.
SESSION_RUNS_MAX: Final = 256
#: Blocks in turn, their session, and the seconds until it resumes, if that is known.
SessionRun = tuple[Small, SessionName, Seconds | None]


class Propose(Keys, frozen=True):
    """Another server, the `receiver`, is about to fetch these blocks from this one: what are they?

    From then on this server passes removals of them on to the receiver (design: moves).
    """

    part: Small
    receiver: Name


class Proposed(Tolerant, frozen=True, omit_defaults=True):
    """A status byte per block; of the hits sizes, checksums, parents (packed, as in `Reserve`), the
    seconds since their last use, and a byte each: with how many copies it was written.

    `sessions`: of so many hits in turn the session that alone uses them, and when it resumes. Hits
    without one have an empty name; so have those behind the last entry.
    """

    statuses: Statuses
    sizes: Counts
    checksums: Hashes
    parents: Packed
    ages_s: Annotated[list[Seconds], Meta(max_length=BATCH_BLOCKS_MAX)]
    copies: Statuses
    sessions: Annotated[list[SessionRun], Meta(max_length=SESSION_RUNS_MAX)] = field(
        default_factory=list
    )


class Fetch(Keys, frozen=True, omit_defaults=True):
    """Fetch these blocks, in this order, from the server `source`; answer within `wait_s`. `extra`
    copies are evicted before all others."""

    part: Small
    source: Name
    wait_s: Seconds
    extra: bool = False


class Prefetch(Keys, frozen=True):
    """These blocks are read soon: bring them into memory. Answered before any of them comes."""

    part: Small


class Drain(Message, frozen=True, omit_defaults=True):
    """Hand over all blocks within `within_s` (`begin`), or stay (`cancel`), or only report.

    With `back_in_s` the server will be back so soon: blocks in its file stay there.
    """

    begin: bool = False
    cancel: bool = False
    within_s: Seconds = 0.0
    back_in_s: Seconds = 0.0


class Drained(Tolerant, frozen=True):
    """How far it is. `state`: a `MoveStatus`, or none; `left`: namespace, reason, blocks, bytes."""

    state: Small | None
    total_blocks: Count
    left_blocks: Count
    left_bytes: Count
    moved_blocks: Count
    moved_bytes: Count
    left: Annotated[list[tuple[NamespaceName, Name, Count, Count]], Meta(max_length=64)]


register(
    {Propose: 19, Proposed: 20, Fetch: 21, Drain: 23, Drained: 24, Prefetch: 25},
    requests=(Propose, Fetch, Drain, Prefetch),
)


def unpack_part(keys: Propose | Fetch | Prefetch) -> tuple[Namespace, int, tuple[bytes, ...]]:
    """Namespace, part and digests of a batch about one part. Raises BadMessage."""
    namespace, digests = unpack_batch(keys)
    check_part(namespace, keys.part)
    return namespace, keys.part, digests
