"""A count and a hash of the blocks that a server holds, cheap to keep up to date on both sides.

A server and a master each keep one of the same map. As long as they are equal, the master lists
what the server holds; if they ever differ, the server sends its inventory again, whatever the
reason. The hash is the sum of the hashes of all entries, so it does not depend on their order, and
an entry that leaves is subtracted: the additive multiset hash of Clarke et al. (ASIACRYPT 2003),
with XXH3, as it finds errors, not lies. (design: announcements)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import xxhash

from kvpool.types import Namespace

FINGERPRINT_SIZE: Final = 16
#: The hash of one entry: of a digest, with the `location_seed` of its place. 128 bits.
entry_hash: Final = xxhash.xxh3_128_intdigest
_MASK: Final = (1 << 8 * FINGERPRINT_SIZE) - 1


class MapFingerprint:
    """The number of entries of a map, and the sum of their hashes."""

    __slots__ = ("blocks", "total")

    def __init__(self, blocks: int = 0, total: int = 0) -> None:
        self.blocks = blocks
        self.total = total

    def __repr__(self) -> str:
        return f"<MapFingerprint {self.blocks} blocks {self.packed().hex()[:12]}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MapFingerprint):
            return NotImplemented
        return self.blocks == other.blocks and self.packed() == other.packed()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def count(self, digest: bytes, seed: int, sign: int) -> None:
        """A block has come (`sign` 1) or left (-1); `seed` is the `location_seed` of its place."""
        self.blocks += sign
        self.total += sign * entry_hash(digest, seed)

    def count_all(self, digests: Sequence[bytes], seed: int, sign: int) -> None:
        """The same for several blocks of one place."""
        self.blocks += sign * len(digests)
        self.total += sign * sum([entry_hash(digest, seed) for digest in digests])

    def packed(self) -> bytes:
        """The sum as it travels in messages."""
        return (self.total & _MASK).to_bytes(FINGERPRINT_SIZE, "little")


@lru_cache(maxsize=4096)
def location_seed(namespace: Namespace, part: int, tier: int) -> int:
    """What distinguishes equal digests in different namespaces, parts and tiers: 64 bits."""
    place = f"{part} {tier} {namespace.parts} {namespace.name}"
    return xxhash.xxh3_64_intdigest(place.encode())
