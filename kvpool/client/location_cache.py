"""Where blocks were last seen, so that the next read of one can go there straight away.

A read without a match is two round trips: a master says where, a server gives what. For a block
that this client has written or read lately the first one is spared. A sighting is advice, as a
match is: the server decides what it has, and whoever is not found where it was last is looked for
as if nothing had been known. So it can be wrong at the cost of one question, and never of a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvpool.types import Namespace

#: Blocks that one client remembers; each takes about 200 bytes.
SIGHTINGS_MAX: Final = 32_768


class Sighting(NamedTuple):
    """One server had these blocks, and nobody else if `alone`; shared by all of a batch."""

    namespace: Namespace
    server: str
    alone: bool


class Sightings:
    """A bounded memory in two halves: when the younger is full, the older is forgotten."""

    def __init__(self, limit: int = SIGHTINGS_MAX) -> None:
        self._half = limit // 2
        self._young: dict[bytes, Sighting] = {}
        self._old: dict[bytes, Sighting] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def saw(self, sighting: Sighting, digests: Iterable[bytes]) -> None:
        """These blocks are there, or were a moment ago.

        Those of several parts are not remembered: only a master knows whether all of them are.
        """
        if sighting.namespace.parts > 1:
            return
        for digest in digests:
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            self._young[digest] = sighting

    def of(self, namespace: Namespace, digests: Sequence[bytes]) -> list[Sighting]:
        """Where each block was; nothing unless every one of them was seen."""
        sightings = []
        for digest in digests:
            seen = self._young.get(digest) or self._old.get(digest)
            if seen is None or seen.namespace != namespace:
                return []
            sightings.append(seen)
        return sightings

    def lost(self, digests: Iterable[bytes]) -> None:
        """They were not where they had been seen."""
        for digest in digests:
            self._young.pop(digest, None)
            self._old.pop(digest, None)
