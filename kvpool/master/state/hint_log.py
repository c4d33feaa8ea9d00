"""Hints on their way from clients, over one master, to every server: a numbered ring.

A server says with each heartbeat up to which number it has heard, and the answer brings what came
since. Soft state like all of a master's: what falls off the ring, or with the master, was advice.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvpool.types import HintStatus

#: Hints that are kept for servers to hear of.
KEPT_MAX: Final = 65_536
#: A server hears of hints within this time; until then they do not make way for others.
_HEARD_S: Final = 2.0


class Hint(NamedTuple):
    """A session resumes in so many seconds, or (None) has ended."""

    session: str
    resume_in: float | None
    given: float  # when the master heard of it


class Relay:
    """The last hints that clients gave, by number, from 1."""

    def __init__(self, kept: int = KEPT_MAX) -> None:
        self.last = 0
        self._ring: list[Hint] = []
        self._kept = kept

    def add(self, session: str, resume_in: float | None, now: float) -> HintStatus:
        """Pass it on. REFUSED when so many came lately that the ring holds no more."""
        hint = Hint(session, resume_in, now)
        if len(self._ring) < self._kept:
            self._ring.append(hint)
        else:
            at = self.last % self._kept
            if now - self._ring[at].given < _HEARD_S:
                return HintStatus.REFUSED
            self._ring[at] = hint
        self.last += 1
        return HintStatus.ACCEPTED

    def since(self, heard: int, count: int) -> tuple[list[Hint], int]:
        """At most `count` hints after number `heard`, oldest first, and the number of the last.

        A number that this master has not given out yet is another master's: it counts as all.
        """
        first = max(min(heard, self.last), self.last - len(self._ring))
        last = min(self.last, first + count)
        return [self._ring[number % self._kept] for number in range(first, last)], last
