"""Which sessions' prompts wait at one store, by a second list that is kept independently.

An arrival's blocks are no victims while its prompt waits, within the budget of hints; and the wait
ends with the first use. (design: session-hints)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.session_hints import SessionAwarePolicy
from kvpool.server.state.entry import Entry

#: An arrival is believed for this long after it came.
WAIT_S: Final = 120.0
#: An arrival so soon after a use may count as that use.
_SAME_TIME_S: Final = 0.1
#: A hint expires after so many times its distance, and not before so many seconds.
_HINT_TIMES: Final = 3.0
_HINT_S: Final = 10.0


class ArrivalOracle:
    """What a store must keep, from the calls that it got."""

    def __init__(self, policy: SessionAwarePolicy, fail: Callable[[str], None]) -> None:
        self._policy = policy
        self._fail = fail
        self._until: dict[str, float] = {}  # its prompt waits
        self._perhaps_until: dict[str, float] = {}  # it may: something was read at about that time
        self._expected_until: dict[str, float] = {}  # it returns soon, as a hint said
        self._used: Counter[str] = Counter()  # the last use, in microseconds
        self._answered: Counter[str] = Counter()  # the last use that ends a wait
        self.now = 0.0
        self.kept = False  # a victim was looked for while a session waited

    def arrived(self, name: str, now: float, age_s: float) -> None:
        """After the store was told."""
        self.now = now
        came = now - age_s
        if came <= self._answered[name] / 1e6:
            if self._perhaps_until.get(name, 0.0) < now:  # for no other prompt (seed 601240)
                self._expect_no_wait(name, "its prompt was served before its arrival was heard")
            return
        session = self._policy.sessions.get(name)
        used = self._used[name] / 1e6 + _SAME_TIME_S
        if session is not None and session.bytes and age_s < WAIT_S:
            self._perhaps_until[name] = came + WAIT_S
            if came > used:
                self._until[name] = came + WAIT_S

    def expected(self, name: str, resume_in: float, now: float) -> None:
        """A session returns soon; also by a block that is fetched from a server where it does, or
        where its prompt waits (seeds 403419, 702131)."""
        lapses = now + max(_HINT_S, _HINT_TIMES * resume_in)
        self._expected_until[name] = max(self._expected_until.get(name, 0.0), lapses)

    def ended(self, name: str, now: float) -> None:
        self._drop(name)
        self._expected_until.pop(name, None)
        self._used[name] = max(self._used[name], int(now * 1e6))

    def writes(self, name: str, now: float) -> None:
        """Before the store makes room; without a name, no session does."""
        self.now = now
        if name:
            self._drop(name)
            self._used[name] = self._answered[name] = int(now * 1e6)

    def written(self, name: str) -> None:
        self._expect_no_wait(name, "it has written")

    def used(self, entry: Entry, now: float, *, last: bool) -> None:
        """A read, or the end of a write; `last`: of a read's blocks."""
        self.now = now
        if entry.session is None:
            return
        name = entry.session.name
        if not name and last:
            self._fail(f"arrivals: a prompt waits for {entry!r}, which was read")
        self._used[name] = int(now * 1e6)
        if last and not entry.children:
            self._drop(name)
            self._answered[name] = int(now * 1e6)
            self._expect_no_wait(name, "its last block was read")

    def evicted(self, entry: Entry) -> None:
        session = entry.session
        self.kept |= bool(self._until)
        if session is None or entry.index.namespace.parts > 1:
            return
        superseded = entry.superseded_at >= entry.last_used
        if not self._over() and not superseded and self.now < self._until.get(session.name, 0.0):
            self._fail(f"arrivals: {entry!r} was evicted while a prompt of its session waits")

    def left(self, entry: Entry) -> None:
        """It has left. With its last block the store forgets a session, and what it waits for."""
        if entry.session is not None and entry.session.name not in self._policy.sessions:
            self._drop(entry.session.name)

    def bypassed(self, name: str) -> None:
        """The store has refused a block of this session, or of none; its policy alone refuses none.

        A block whose own session is announced, as one that is fetched may be, has no right to the
        place of others in the same budget, nor of its own session's (seed 54, 120 operations; seed
        701571).
        """
        session = self._policy.sessions.get(name)
        if session is not None and session.due is not None:
            return
        if not isinstance(self._policy.policy, LRU):
            return  # it may refuse a block for what it infers
        waits = [*self._perhaps_until.values(), *self._expected_until.values()]
        if not any(self.now < until for until in waits):
            self._fail("arrivals: a write is refused, but no prompt waits, and none is expected")
        if self._over():
            self._fail("arrivals: a write finds no room beside sessions beyond their budget")

    def _over(self) -> bool:
        """Announced sessions have more than the budget of hints, by their own figures."""
        announced = [one for one in self._policy.sessions.values() if one.due is not None]
        return sum(one.bytes for one in announced) > self._policy.announced.budget

    def _drop(self, name: str) -> None:
        self._until.pop(name, None)
        self._perhaps_until.pop(name, None)

    def _expect_no_wait(self, name: str, why: str) -> None:
        session = self._policy.sessions.get(name)
        if session is not None and session.arrived is not None:
            self._fail(f"arrivals: session {name!r} still waits, although {why}")
