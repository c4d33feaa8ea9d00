"""Where blocks were lately, so that the next read of a block can go there without a master.

A read without a match takes two round trips: a master names servers, a server sends blocks. For a
block that this client has written or read lately the first one is saved. What is cached is advice,
as a match is: the server decides what it has, and a block that is not where it was is looked up as
if it had not been cached. A wrong entry costs one request, never a wrong byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvpool.types import Namespace

#: Blocks that one client remembers; each takes about 200 bytes.
LOCATIONS_MAX: Final = 32_768


class CachedLocation(NamedTuple):
    """One server had these blocks; no other had them if `sole_replica`. Shared by a batch."""

    namespace: Namespace
    server: str
    sole_replica: bool


class LocationCache:
    """At most `limit` blocks, in two generations: when the young one is full, the old one goes.

    So an entry is dropped after between half of `limit` and `limit` later ones, and nothing is
    counted or moved when it is used.
    """

    def __init__(self, limit: int = LOCATIONS_MAX) -> None:
        self._generation_max = limit // 2
        self._young: dict[bytes, CachedLocation] = {}
        self._old: dict[bytes, CachedLocation] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def put(self, location: CachedLocation, digests: Iterable[bytes]) -> None:
        """These blocks are there, or were a moment ago.

        Blocks of several parts are not kept: only a master knows whether every part is there.
        """
        if location.namespace.parts > 1:
            return
        for digest in digests:
            if len(self._young) >= self._generation_max:
                self._old, self._young = self._young, {}
            self._young[digest] = location

    def get(self, namespace: Namespace, digests: Sequence[bytes]) -> list[CachedLocation]:
        """Where each block was; an empty list unless all of them are cached."""
        young, old = self._young, self._old
        locations = []
        same: CachedLocation | None = None  # most blocks of a batch share theirs
        for digest in digests:
            location = young.get(digest) or old.get(digest)
            if location is None or (location is not same and location.namespace != namespace):
                return []
            locations.append(location)
            same = location
        return locations

    def discard(self, digests: Iterable[bytes]) -> None:
        """They were not there."""
        for digest in digests:
            self._young.pop(digest, None)
            self._old.pop(digest, None)
