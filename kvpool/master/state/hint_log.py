"""Session hints on their way from clients to all servers: a numbered ring in each master.

A server's heartbeat carries the number of the last hint that it received; the reply carries the
hints after it. A hint that is lost with a master, or falls off the ring, only costs a worse choice
of victim. (design: session-hints)
"""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from kvpool.shares import Recent, Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import ARRIVED, ChainEnd, SessionReport

#: Hints that are kept for servers to fetch.
KEPT_MAX: Final = 65_536
#: Sessions whose hints can be explained; one more drops the one with the oldest news, of a tenant
#: that has more than its part.
EXPLAINED_MAX: Final = 4096
#: Servers whose answers are kept for one session. Its blocks are on a few.
ANSWERS_MAX: Final = 64
#: Two heartbeats: a server fetches a hint within this time. Until then it is not overwritten.
_FETCHED_S: Final = 2.0
#: That come of age in one call: more than one comes in it.
_AGED_MAX: Final = 64
#: Each server looks at every part of a block: those of so many cost as much as the rest of a hint.
_PARTS: Final = 8


class LoggedHint(NamedTuple):
    """A session resumes in `resume_in` seconds, has ended (None), or its prompt waits (ARRIVED)."""

    subject: str | ChainEnd
    resume_in: float | None
    received_at: float


class _SessionNews:
    """What is known of one session: its last hint of each kind, and each server's last answer."""

    __slots__ = ("answers", "hints")

    def __init__(self) -> None:
        self.hints: dict[str, LoggedHint] = {}
        self.answers: dict[str, tuple[bool, float]] = {}


class HintLog:
    """The last hints of clients, numbered from 1."""

    def __init__(self, kept: int = KEPT_MAX) -> None:
        self.last = 0
        self._ring: list[LoggedHint] = []
        self._kept = kept
        #: Those that may not be overwritten yet, by what each costs a server, and the number of the
        #: first of them.
        self._fresh = Shares(kept)
        self._fresh_from = 1
        self._news: Recent[str, _SessionNews] = Recent(EXPLAINED_MAX)

    def add(self, subject: str | ChainEnd, resume_in: float | None, now: float) -> bool:
        """Append a hint. False when its tenant has its share of the ring, or the ring is full, of
        hints that servers may still fetch."""
        tenant = _tenant_of(subject)
        self._age(now)
        if not self._fresh.take(tenant, _cost(subject)):
            return False
        hint = LoggedHint(subject, resume_in, now)
        if len(self._ring) < self._kept:
            self._ring.append(hint)
        else:
            self._ring[self.last % self._kept] = hint
        self.last += 1
        if isinstance(subject, str):  # nobody asks about others
            kind = "ends" if resume_in is None else "arrived" if resume_in == ARRIVED else "resumes"
            news = self._news.get(tenant, subject) or _SessionNews()
            self._news.put(tenant, subject, news)
            news.hints[kind] = hint
        return True

    def _age(self, now: float) -> None:
        """Hints that servers have had time to fetch may be overwritten; some at a time."""
        for _ in range(min(_AGED_MAX, self.last + 1 - self._fresh_from)):
            hint = self._ring[(self._fresh_from - 1) % self._kept]
            if now - hint.received_at < _FETCHED_S:
                break
            self._fresh.give_back(_tenant_of(hint.subject), _cost(hint.subject))
            self._fresh_from += 1

    def answered(self, server: str, session: str, followed: bool, now: float) -> None:
        """Whether a server follows the last hint about this session as it was given."""
        news = self._news.get(tenant_of(session), session)
        if news is not None and (server in news.answers or len(news.answers) < ANSWERS_MAX):
            news.answers[server] = (followed, now)

    def explain(self, session: str, now: float) -> SessionReport:
        """What became of the hints about a session, as far as this master knows."""
        news = self._news.get(tenant_of(session), session) or _SessionNews()
        return SessionReport(
            [(max(0.0, now - hint.received_at), hint.resume_in) for hint in news.hints.values()],
            [
                (server, followed, max(0.0, now - at))
                for server, (followed, at) in sorted(news.answers.items())
            ],
        )

    def latest(self, count: int) -> list[LoggedHint]:
        """The last hint of each of the `count` sessions that were hinted at last, latest first."""
        news = islice(self._news.values(), count)
        return [max(one.hints.values(), key=lambda hint: hint.received_at) for one in news]

    def since(self, number: int, count: int) -> tuple[list[LoggedHint], int]:
        """At most `count` hints after `number`, oldest first, and the number of the last of them.

        A number that this log has not reached yet comes from another master: nothing is new then.
        """
        first = max(min(number, self.last), self.last - len(self._ring))
        last = min(self.last, first + count)
        return [self._ring[index % self._kept] for index in range(first, last)], last


def _tenant_of(subject: str | ChainEnd) -> str:
    return tenant_of(subject if isinstance(subject, str) else subject.namespace)


def _cost(subject: str | ChainEnd) -> int:
    return 1 if isinstance(subject, str) else 1 + subject.parts // _PARTS
