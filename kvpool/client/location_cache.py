"""Where blocks were lately, so that the next read of a block can go there without a master.

A read without a match takes two round trips: a master names servers, a server sends blocks. For a
block that this client has written or read lately the first one is saved. What is cached is advice,
as a match is: a wrong entry costs one request, never a wrong byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from kvpool.types import Namespace

K = TypeVar("K")
V = TypeVar("V")

#: Blocks that one client remembers; each takes about 200 bytes.
LOCATIONS_MAX: Final = 32_768
#: Spans that one client remembers, 32 blocks and about 100 bytes each.
SPANS_MAX: Final = 32_768


class CachedLocation(NamedTuple):
    """One server had these blocks; no other had them if `sole_replica`. Shared by a batch."""

    namespace: Namespace
    server: str
    sole_replica: bool


class _Remembered(Generic[K, V]):
    """At most `limit` keys, in two generations: when the young one is full, the old one goes.

    So a key is dropped after between half of `limit` and `limit` later ones, and nothing is counted
    or moved when it is used.
    """

    def __init__(self, limit: int) -> None:
        self._generation_max = limit // 2
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _keep(self, keys: Iterable[K], value: V) -> None:
        for key in keys:
            if len(self._young) >= self._generation_max and key not in self._young:
                self._old, self._young = self._young, {}
            self._young[key] = value

    def discard(self, keys: Iterable[K]) -> None:
        """They were not there, or a master does not know them."""
        for key in keys:
            self._young.pop(key, None)
            self._old.pop(key, None)


class LocationCache(_Remembered[bytes, CachedLocation]):
    """Where blocks were lately."""

    def __init__(self, limit: int = LOCATIONS_MAX) -> None:
        super().__init__(limit)

    def put(self, location: CachedLocation, digests: Iterable[bytes]) -> None:
        """These blocks are there, or were a moment ago.

        Blocks of several parts are not kept: only a master knows whether every part is there.
        """
        if location.namespace.parts == 1:
            self._keep(digests, location)

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


class KnownSpans(_Remembered[int, bool]):
    """Which spans a master has found.

    A span that is here is a guess, whatever the namespace and the master that it came from. A
    master that does not know it says so, and is then asked for its blocks. (design: match)
    """

    def __init__(self, limit: int = SPANS_MAX) -> None:
        super().__init__(limit)

    def add(self, marks: Iterable[int]) -> None:
        """A master has found these spans."""
        self._keep(marks, True)

    def count(self, marks: Sequence[int], first: int, last: int) -> int:
        """How many spans from number `first` on, before `last`, are here without a gap."""
        young, old = self._young, self._old
        for number in range(first, last):
            if marks[number] not in young and marks[number] not in old:
                return number - first
        return max(0, last - first)
