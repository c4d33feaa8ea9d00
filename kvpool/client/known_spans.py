"""Which spans a master has found for this client lately: it is asked for their marks alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

#: Spans that one client remembers, 32 blocks and about 100 bytes each.
SPANS_MAX: Final = 32_768


class KnownSpans:
    """At most `limit` spans, in two generations: when the young one is full, the old one goes.

    A span that is here is a guess, whatever the namespace and the master that it came from. A
    master that does not know it says so, and is then asked for its blocks. (design: match)
    """

    def __init__(self, limit: int = SPANS_MAX) -> None:
        self._generation_max = limit // 2
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, marks: Iterable[int]) -> None:
        """A master has found these spans."""
        for mark in marks:
            if mark not in self._young:
                if len(self._young) >= self._generation_max:
                    self._old, self._young = self._young, set()
                self._young.add(mark)

    def discard(self, marks: Iterable[int]) -> None:
        """A master does not know them."""
        for mark in marks:
            self._young.discard(mark)
            self._old.discard(mark)

    def count(self, marks: Sequence[int], first: int, last: int) -> int:
        """How many spans from number `first` on, before `last`, are here without a gap."""
        young, old = self._young, self._old
        for number in range(first, last):
            if marks[number] not in young and marks[number] not in old:
                return number - first
        return max(0, last - first)
