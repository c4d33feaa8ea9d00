"""What a tier can do besides that keeps its bytes when its process ends (design: tiers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvpool.types import Namespace


class Record(NamedTuple):
    """What a persistent tier stores about one sealed extent: all that a restarted server needs.

    `size` bytes at `offset` are one part of a block and have this `checksum`, which covers the key
    as well. If two records overlap, the one with the higher `generation` is valid
    (design: nvme-format). Both numbers are below 2**64. It was written with so many `copies`.
    """

    namespace: Namespace
    part: int
    digest: bytes
    parent: bytes
    offset: int
    size: int
    checksum: int
    generation: int
    copies: int = 1


@runtime_checkable
class PersistentTier(Protocol):
    """A tier that keeps its bytes and their records when its process ends.

    It only stores records. The server decides whether two records are one block, whether a parent
    exists, and what is evicted. Calls for different extents may run at once. For one extent the
    order is: write its bytes, `persist` it, and `erase` it before its bytes are overwritten. If
    that `erase` is missing, a record of overwritten bytes remains. It costs one miss, because each
    read compares the checksum (G1). (design: nvme-format)
    """

    async def persist(self, records: Sequence[Record]) -> None:
        """Store `records`: after the call has returned, `recover` finds them, also after kill -9.

        Called when the bytes have been written. Until it returns, `recover` may find any subset of
        `records`; the same after Unavailable, which it raises when the medium fails. Raises
        UsageError for an extent that is empty, is not aligned or does not fit; then none of the
        records is stored. A tier may have room for a limited number of namespaces, of each tenant
        its share: it leaves out a record of another one without an error, and counts it
        (`KeepsSome`).
        """

    async def erase(self, offsets: Sequence[int]) -> None:
        """Delete the records of the extents that start at these offsets.

        An aligned offset where no extent starts is ignored. Raises Unavailable when the medium
        fails: then `recover` may still find any of them.
        """

    async def recover(self) -> Sequence[Record]:
        """The records that were persisted and still verify, no two overlapping.

        Called once, before anything is written. Damaged contents raise no error: a record that does
        not verify is dropped, and does not come back later. (One that was hidden by damage
        elsewhere, and is whole again, may come back.) Every record returned was persisted in this
        form. Of extents that overlap, the one with the highest generation is returned; the others
        do not come back, also when that one is erased. A list is the caller's, who empties it.
        Raises Unavailable when the medium fails as a whole, and ConfigError when its contents are
        not this tier's.
        """


@runtime_checkable
class BelongsToOwner(Protocol):
    """A persistent tier that keeps for whom it stores, so that nobody else is served from it."""

    def claim(self, owner: bytes) -> None:
        """Before `recover`: these 16 bytes name the cluster of this server, and its secret.

        `recover` then raises ConfigError for contents of another owner.
        """


@runtime_checkable
class Encrypts(Protocol):
    """A persistent tier that can encrypt what it keeps."""

    @property
    def encrypted(self) -> bool:
        """Whether it does; then it needs a key."""

    def use_key(self, key: bytes) -> None:
        """Before `recover`: these 32 bytes, which the same cluster has after each start and nobody
        else has. What the tier encrypts with is derived from them."""


@runtime_checkable
class KeepsSome(Protocol):
    """A persistent tier that may leave out a record of `persist`, and knows which."""

    def keeps(self, offset: int) -> bool:
        """Whether the record of the extent that starts there was stored, and not left out."""


@runtime_checkable
class ReportsDropped(Protocol):
    """A persistent tier that counts what `recover` did not return."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Records that the last `recover` dropped, by reason: a few words, as in `damaged`. For the
        log, `kvpool status` and `/metrics`; empty when it returned everything."""


class TierPart(NamedTuple):
    """One device of a tier: its place, such as a path, and its bytes."""

    place: str
    size: int


@runtime_checkable
class HasParts(Protocol):
    """A tier of several devices that fail one by one. The server lets no extent cross from one part
    into the next, and goes on with the others when one is lost."""

    @property
    def parts(self) -> Sequence[TierPart]:
        """In the order of their offsets, in multiples of `alignment`; together `capacity`."""
