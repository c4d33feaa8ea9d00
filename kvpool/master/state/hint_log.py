"""Session hints on their way from clients to all servers: a numbered ring in each master.

A server's heartbeat carries the number of the last hint that it received; the reply carries the
hints after it. A hint that is lost with a master, or falls off the ring, only costs a worse choice
of victim. (design: session-hints)
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvpool.types import HintStatus

#: Hints that are kept for servers to fetch.
KEPT_MAX: Final = 65_536
#: Two heartbeats: a server fetches a hint within this time. Until then it is not overwritten.
_FETCHED_S: Final = 2.0


class LoggedHint(NamedTuple):
    """A session resumes in `resume_in` seconds, has ended (None), or its prompt waits (ARRIVED)."""

    session: str
    resume_in: float | None
    received_at: float


class HintLog:
    """The last hints of clients, numbered from 1."""

    def __init__(self, kept: int = KEPT_MAX) -> None:
        self.last = 0
        self._ring: list[LoggedHint] = []
        self._kept = kept

    def add(self, session: str, resume_in: float | None, now: float) -> HintStatus:
        """Append a hint. REFUSED when the ring is full of hints that servers may still fetch."""
        hint = LoggedHint(session, resume_in, now)
        if len(self._ring) < self._kept:
            self._ring.append(hint)
        else:
            index = self.last % self._kept
            if now - self._ring[index].received_at < _FETCHED_S:
                return HintStatus.REFUSED
            self._ring[index] = hint
        self.last += 1
        return HintStatus.ACCEPTED

    def since(self, number: int, count: int) -> tuple[list[LoggedHint], int]:
        """At most `count` hints after `number`, oldest first, and the number of the last of them.

        A number that this log has not reached yet comes from another master: nothing is new then.
        """
        first = max(min(number, self.last), self.last - len(self._ring))
        last = min(self.last, first + count)
        return [self._ring[index % self._kept] for index in range(first, last)], last
