"""The extra copies of a store, in the order in which they go (design: movers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpool.protocols.policy import Decision
from kvpool.server.eviction.lru import LRU
from kvpool.server.state.entry import Entry

#: Copies that have become the last ones of which one call hands over so many to the policy.
_STEPS_MAX: Final = 256


class ExtraCopies:
    """Those that may be evicted, least recently used first, and such as have become the last ones:
    `keep` gets these when their turn comes."""

    def __init__(self, keep: Callable[[Entry], None]) -> None:
        self._keep = keep
        self._order: LRU[Entry] = LRU()
        self.listed: set[Entry] = set()

    def add(self, entry: Entry) -> None:
        self.listed.add(entry)
        self._order.add_candidate(entry)

    def discard(self, entry: Entry) -> None:
        if entry in self.listed:
            self.listed.discard(entry)
            self._order.remove(entry)

    def victim_age(self, now: float) -> float:
        return self._order.victim_age(now)

    def take(
        self, newcomer: Entry, evictable: Callable[[Entry], bool], last_used: int
    ) -> Entry | Decision | None:
        """The one that was used least recently, if it may go for `newcomer`: for another extra copy
        only where it was used before `last_used`."""
        for _ in range(_STEPS_MAX):
            oldest = self._order.oldest()
            if not isinstance(oldest, Entry):
                return oldest
            used = oldest.last_used
            if not oldest.copies and not newcomer.copies and used >= last_used:
                return None
            self._order.take()
            if oldest.copies:  # it has become the last one
                self.listed.discard(oldest)
                self._keep(oldest)
            elif evictable(oldest):
                self.listed.discard(oldest)
                return oldest
            elif oldest.last_used != used:  # it has found a later use of another part
                self._order.add_candidate(oldest)
        return Decision.NOT_YET
