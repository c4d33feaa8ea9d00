"""What is said of sessions: that they have ended, that they resume, that a prompt waits. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from kvpool.protocols.policy import LearnsFromArrivals, Policy
from kvpool.server.eviction.session import Session, Timeline
from kvpool.server.state.entry import Entry

#: Leaves of one session to which hints apply. A session is one conversation, with a few branches.
LEAVES_MAX: Final = 256
#: Seconds. Hints further ahead are cut to this: nobody can predict a prompt more than an hour away.
RESUME_S_MAX: Final = 3600.0
#: A hint expires after this many times its `resume_in`, but not before `_EXPIRE_S_MIN` seconds.
_EXPIRE_TIMES: Final = 3.0
_EXPIRE_S_MIN: Final = 10.0
#: Seconds for which a prompt is taken to wait after its arrival. Who looks after its queue repeats
#: the arrival in time; a prompt that was aborted, or whose engine is gone, is believed so long.
WAIT_S: Final = 120.0
#: No prompt is taken to wait longer than this, however often it is repeated: the usual time limit
#: of a client's request.
WAIT_S_MAX: Final = 600.0
#: A use so shortly before an arrival is the use that the prompt had come for: on its way from the
#: master the arrival becomes later than it was.
_SAME_TIME_S: Final = 0.1


class Announcements:
    """The hints that hold. Of one session the last one does, but an arrival is no guess: a hint of
    a later time does not end the wait.

    A session with a hint to resume is *announced*: its leaves are no candidates of `policy`. Hints
    answer True where they are followed as they were given, None where they are about nothing here.
    """

    def __init__(self, policy: Policy[Entry], budget: int, counters: Counter[str]) -> None:
        self.budget = budget
        self.bytes = 0  # of all announced sessions
        self.waiting = 0  # sessions whose prompt has arrived and was not served yet
        self.by_next_use = Timeline()  # announced sessions with leaves, latest time first
        self.expiries = Timeline()
        self.ended: OrderedDict[Session, None] = OrderedDict()  # with leaves
        self._policy = policy
        self._counters = counters
        self._learn = policy.arrived if isinstance(policy, LearnsFromArrivals) else None

    # --- hints -----------------------------------------------------------------------------

    def end(self, session: Session, now: float) -> bool:
        """The session is over: its blocks are evicted first, unless it writes again."""
        self.withdraw(session)
        session.ended = max(int(now * 1e6), session.last_stamp())
        if session.leaves:
            self.ended[session] = None
        return self._answer("accepted")

    def resume(self, session: Session, resume_in: float, now: float, age_s: float = 0.0) -> bool:
        """The session resumes `resume_in` seconds after the hint, which is `age_s` seconds old."""
        if session.ended and now - age_s < session.ended / 1e6:
            return True  # it has ended since
        distance_s = min(resume_in, RESUME_S_MAX)
        lapses = now - age_s + max(_EXPIRE_S_MIN, _EXPIRE_TIMES * distance_s)
        if lapses <= now or len(session.leaves) >= LEAVES_MAX:
            return self._answer("refused")
        if session.arrived is not None:  # its prompt is here already, whatever was expected before
            return self._answer("clipped")
        self._expect(session, now - age_s + distance_s, lapses)
        return self._answer("accepted" if distance_s == resume_in and not self.over else "clipped")

    def arrive(self, session: Session, now: float, age_s: float) -> bool | None:
        """A prompt of the session arrived `age_s` seconds ago and waits to be served.

        Its blocks stay, within the budget of hints, until they are used or the session writes, at
        most `WAIT_S` after the arrival. An arrival may be repeated while the prompt waits.
        """
        came = now - age_s
        used = max(session.last_use, session.last_stamp() / 1e6)
        if came <= used + _SAME_TIME_S or came <= session.ended / 1e6:
            return True  # it was served before the arrival came here
        if session.waits_since <= used:
            session.waits_since = came
            self.learn_gap(came, used)
        session.ended = 0
        self.ended.pop(session, None)
        lapses = min(came + WAIT_S, session.waits_since + WAIT_S_MAX)
        if not session.name:  # nobody knows that it has lapsed before, and is looked up once more
            lapses = min(lapses, used + RESUME_S_MAX)
        if not session.bytes:
            return None
        if lapses <= now or len(session.leaves) >= LEAVES_MAX:
            return self._answer("refused")
        if session.arrived is None:
            session.arrived = session.waits_since
            self.waiting += 1
            self._counters["arrivals"] += 1
        self._expect(session, session.waits_since, lapses)
        return self._answer("clipped" if self.over else "accepted")

    def learn_gap(self, came: float, used: float | None) -> None:
        """Report how long a session paused, if the policy learns from that."""
        if self._learn is not None and used is not None:
            self._learn(came - used)

    def withdraw(self, session: Session) -> None:
        """Drop a session's hints: its leaves become candidates of the policy again."""
        self.ended.pop(session, None)
        if session.arrived is not None:
            session.arrived = None
            self.waiting -= 1
        if session.due is not None:
            session.due = None
            self.bytes -= session.bytes
            self.by_next_use.drop(session)
            self.expiries.drop(session)
            for entry in session.leaves:
                self._policy.add_candidate(entry)

    def expire(self, now: float) -> None:
        while (first := self.expiries.first()) is not None and first[0] <= now:
            self._counters["arrivals_lapsed"] += first[1].arrived is not None
            self.withdraw(first[1])
            first[1].expired = True

    # --- what follows of them --------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Sessions with a hint have more than the budget."""
        return self.bytes > self.budget

    def protects(self, entry: Entry) -> bool:
        session = entry.session
        return session is not None and session.due is not None and entry in session.leaves

    def leaf_added(self, session: Session) -> None:
        """A leaf of an announced session may be evicted."""
        if session.due is not None and session not in self.by_next_use:
            self.by_next_use.set(session, -session.due)

    def next_ended(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """A leaf of an ended session, the last one first; None if none may go."""
        while self.ended:
            session = next(iter(self.ended))
            # All others stay its leaves: a hint that comes later is about them, too.
            for entry in reversed(session.leaves):
                if session.ended >= entry.last_used and evictable(entry):
                    return entry
            del self.ended[session]
        return None

    def farthest(self, evictable: Callable[[Entry], bool]) -> tuple[Entry, float] | None:
        """A leaf of the session that resumes last, and when that is; None if none may go."""
        while (first := self.by_next_use.first()) is not None:
            session = first[1]
            while session.leaves:
                entry = next(reversed(session.leaves))
                last_used = entry.last_used
                if evictable(entry):
                    return entry, -first[0]
                if entry.last_used == last_used:  # else it has found a later use of another part
                    del session.leaves[entry]
            self.by_next_use.drop(session)
        return None

    def _answer(self, outcome: str) -> bool:
        self._counters[f"hints_{outcome}"] += 1
        return outcome == "accepted"

    def _expect(self, session: Session, due: float, lapses: float) -> None:
        if session.due is None:
            self.bytes += session.bytes
        session.due = due
        session.expired = False
        session.ended = 0  # the last word counts
        self.ended.pop(session, None)
        self.expiries.set(session, lapses)
        if session.leaves or session in self.by_next_use:  # it may write just now
            self.by_next_use.set(session, -due)
