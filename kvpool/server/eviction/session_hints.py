"""Hints about sessions, on top of any policy: a session has ended, or it resumes at some time.

A *session* is a tag on writes. A block belongs to one session while no other session uses it. Three
facts about a session change the order of evictions (design: session-hints):

- It has *ended*: its blocks are evicted first.
- A branch was *superseded*: a newer chain of the session branches off before the end of its last
  one. The blocks of the old branch are evicted first, too. Should it go on all the same, the
  session is several conversations with one name, and none of its branches is superseded again.
- It *resumes* at some time (a resume hint). Until then its blocks stay. Among sessions with a hint
  the one with the latest time is evicted first (KVFlow, arXiv 2507.07400). A hint whose time has
  long passed expires, or its session would keep the best rank for ever.
- Its prompt has *arrived* and waits, perhaps in a long queue: it resumes now, and that does not
  expire while it waits. The first read of its last block, or its next write, ends the wait.

Hints are advice: they order evictions and change nothing else, so a wrong hint costs hits, never
bytes. They are bounded: sessions with a hint take space from others only up to a budget of bytes,
and the numbers of sessions and of leaves per session are limited; so is the time of a wait. Ended
and superseded are recorded at the leaf of a branch only; when that leaf is evicted, its parent
inherits the mark. So most calls visit one leaf, and none visits more than LEAVES_MAX.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Decision, LearnsFromArrivals, Policy
from kvpool.server.eviction.extra_copies import ExtraCopies
from kvpool.server.eviction.order import JUST_NOW, LONG_S, Order
from kvpool.server.eviction.session import Session, Timeline, check_sessions
from kvpool.server.state.entry import Entry, Index
from kvpool.types import ARRIVED, OTHERS, ROOT, SessionHint, program_of

#: Sessions recorded at once; one more drops the session whose last write is the oldest.
SESSIONS_MAX: Final = 65_536
#: Programs whose bytes are counted apart.
PROGRAMS_MAX: Final = 1024
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
#: Assumed seconds from the last use of a block without a hint to its next use.
_UNANNOUNCED_S: Final = 10.0


class SessionAwarePolicy(Order):
    """What the store calls: it applies the hints, and asks the wrapped `policy` for all the rest.

    `budget` is bytes of whole extents; `rounded` gives how many bytes of them a block takes.
    Where a block is recorded while it may be evicted:

    | block                                  | recorded in                                  |
    |----------------------------------------|----------------------------------------------|
    | leaf of a superseded branch            | `_superseded`, and as candidate of `policy`  |
    | leaf of a session with a resume hint   | `session.leaves` alone                       |
    | leaf of a session without one          | `session.leaves`, and candidate of `policy`  |
    | extra copy (design: movers)            | in `_extra` alone                            |
    | any other, and leaves above LEAVES_MAX | candidate of `policy` alone                  |
    """

    check = check_sessions

    def bytes_of_programs(self) -> Counter[str]:
        return self.program_bytes

    def __init__(
        self, policy: Policy[Entry], budget: int, rounded: Callable[[int], int] = int
    ) -> None:
        super().__init__(policy, budget, rounded)
        self.budget = budget
        self._rounded = rounded
        self.announced_bytes = 0
        self.waiting = 0  # sessions whose prompt has arrived and was not served yet
        self.counters: Counter[str] = Counter()
        #: Bytes of the sessions of each program.
        self.program_bytes: Counter[str] = Counter()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._superseded: OrderedDict[Entry, None] = OrderedDict()  # leaves of superseded branches
        self._ended: OrderedDict[Session, None] = OrderedDict()
        self._by_next_use = Timeline()  # sessions with a hint and leaves, latest time first
        self._expiries = Timeline()
        self._extra = ExtraCopies(policy.add_candidate)
        self._extra_listed = self._extra.listed
        #: Of sessions that have no block left: their last use, until they come back.
        self._gone: OrderedDict[str, float] = OrderedDict()
        self._learn = policy.arrived if isinstance(policy, LearnsFromArrivals) else None

    # --- calls of the store ----------------------------------------------------------------

    def begin_write(
        self, index: Index, request: ReserveRequest, now: float, *, moved: bool
    ) -> Session | None:
        """The session of a write. A session that writes has not ended; its resume hint stays.

        A prompt that writes is served: it waits no more. `moved`: only the place of its blocks
        changes, and a hint that is known here stays.
        """
        hint = request.session_hint
        if hint is None:
            return None
        moved = moved or request.last_used is not None
        session = self._sessions.get(hint.session)
        if session is None:
            session = self._sessions[hint.session] = Session(hint.session)
            session.program = self._program_of(session.name)
            self._gone.pop(session.name, None)
            if len(self._sessions) > SESSIONS_MAX:
                self._withdraw(self._sessions.popitem(last=False)[1])
        else:
            self._sessions.move_to_end(hint.session)
            session.ended = 0
        if not moved:
            session.last_use = now
            if session.arrived is not None:
                self._withdraw(session)
        if hint.resume_in is not None and not (moved and session.due is not None):
            self._announce(session, hint.resume_in, now)
        return session

    def block_added(self, entry: Entry) -> None:
        """Count a new block in its session."""
        session = entry.session
        if session is not None:
            size = self._rounded(entry.size)
            session.bytes += size
            if session.program:
                self.program_bytes[session.program] += size
            if session.due is not None:
                self.announced_bytes += size

    def block_shared(self, entry: Entry) -> None:
        """Another session uses the block too: from now on hints of no session apply to it."""
        session = entry.session
        if session is not None:
            listed = entry in session.leaves
            self._disown(session, entry)
            entry.session = None
            if listed:
                self.policy.add_candidate(entry)

    def end_write(
        self, session: Session, granted: Sequence[Entry], request: ReserveRequest, *, promoted: bool
    ) -> None:
        """A chain is as long as it was when blocks of it are `promoted`, in any order: a head that
        comes up is no new branch."""
        if promoted:
            self._sessions.setdefault(session.name, session)  # evictions may have dropped it
        else:
            fetched = request.last_used is not None
            self.chain_extended(session, granted[0], granted[-1], fetched=fetched)

    def chain_extended(
        self, session: Session, first: Entry, last: Entry, *, fetched: bool = False
    ) -> None:
        """A session has written the blocks `first` to `last` of its chain.

        If they branch off before the end of its last chain, the rest of that chain is superseded.
        If the parent of `first` is not stored, or is younger than the old end (which may then be
        one of its ancestors), the place in the chain is unknown, and no branch is superseded.
        Nor does what was `fetched`: it may be older than what is here, or come before it. Nor is a
        branch of a session whose superseded branch goes on: several conversations have its name.
        """
        self._sessions.setdefault(session.name, session)  # evictions may have dropped it
        index = first.index
        old = session.chain_ends.get(index)
        parent = index.blocks.get(first.parent)
        if parent is not None:
            session.leaves.pop(parent, None)
            if parent.session is not session:
                self.block_shared(parent)
        before = first.parent == ROOT or (
            parent is not None and old is not None and parent.generation < old.generation
        )
        if fetched and old not in (None, parent):
            return
        if (
            parent is not None
            and parent.superseded_at
            and parent.session is session
            and parent.children == 1  # not where a newer branch begins
        ):
            session.branched = True
            self.counters["branches_resumed"] += 1
        superseded = before and not session.branched
        if old is not None and old is not parent and superseded and old.session is session:
            old.superseded_at = old.last_used
            if old.is_candidate or old in session.leaves:
                self._superseded[old] = None
        session.chain_ends[index] = last

    def answered(self, entry: Entry, now: float) -> None:
        """If it is the last of its chain, no prompt waits for it."""
        session = entry.session
        if session is not None and not entry.children:
            session.last_use = now
            if session.arrived is not None:
                self._withdraw(session)

    # --- hints -----------------------------------------------------------------------------

    def hint(
        self, name: str, resume_in: float | None, now: float, *, age_s: float = 0.0
    ) -> bool | None:
        if resume_in is None:
            return self.end(name, now)
        if resume_in == ARRIVED:
            return self.arrive(name, now, age_s=age_s)
        return self.resume(name, resume_in, now, age_s=age_s)

    def hint_of(self, session: Session | None, now: float) -> SessionHint | None:
        """None when it has ended."""
        if session is None or session.ended:
            return None
        due = session.due
        return SessionHint(session.name, None if due is None else max(0.0, due - now))

    def end(self, name: str, now: float) -> bool | None:
        """The session is over: its blocks are evicted first, unless it writes again."""
        session = self._sessions.get(name)
        if session is None or not session.bytes:
            return None
        self._withdraw(session)
        session.ended = max(int(now * 1e6), _last_stamp(session))
        if session.leaves:
            self._ended[session] = None
        return self._answer("accepted")

    def resume(self, name: str, resume_in: float, now: float, *, age_s: float = 0.0) -> bool | None:
        """The session resumes `resume_in` seconds after the hint, which is `age_s` seconds old."""
        session = self._sessions.get(name)
        if session is None or not session.bytes:
            return None
        if session.ended and now - age_s < session.ended / 1e6:
            return True  # it has ended since
        return self._announce(session, resume_in, now, age_s)

    def due(self, entry: Entry) -> float | None:
        """When the session of a block resumes."""
        session: Session | None = entry.session
        return session.due if session is not None else None

    def arrive(self, name: str, now: float, *, age_s: float = 0.0) -> bool | None:
        """A prompt of the session arrived `age_s` seconds ago and waits to be served.

        Its blocks stay, within the budget of hints, until they are used or the session writes, at
        most `WAIT_S` after the arrival. An arrival may be repeated while the prompt waits.
        """
        came = now - age_s
        session = self._sessions.get(name)
        if session is None:
            self._learn_gap(came, self._gone.pop(name, None))
            return None
        used = max(session.last_use, _last_stamp(session) / 1e6)
        if came <= used + _SAME_TIME_S or came <= session.ended / 1e6:
            return True  # it was served before the arrival came here
        if session.waits_since <= used:
            session.waits_since = came
            self._learn_gap(came, used)
        session.ended = 0
        self._ended.pop(session, None)
        lapses = min(came + WAIT_S, session.waits_since + WAIT_S_MAX)
        if not session.bytes:
            return None
        if lapses <= now or len(session.leaves) >= LEAVES_MAX:
            return self._answer("refused")
        if session.arrived is None:
            session.arrived = session.waits_since
            self.waiting += 1
            self.counters["arrivals"] += 1
        self._expect(session, session.waits_since, lapses)
        return self._answer("accepted" if self.announced_bytes <= self.budget else "clipped")

    def is_over(self, entry: Entry) -> bool:
        """By the hints no session uses the block again: its session has ended, or it is the leaf
        of a superseded branch."""
        session = entry.session
        return entry.superseded_at >= entry.last_used or (
            session is not None and session.ended >= entry.last_used
        )

    @property
    def figures(self) -> Counter[str]:
        """Hints accepted, clipped and refused; recorded sessions; bytes of sessions with a hint;
        sessions whose prompt waits; and what the policy infers."""
        figures = super().figures
        figures.update(self.counters)
        figures["sessions"] = len(self._sessions)
        figures["announced_bytes"] = self.announced_bytes
        figures["waiting_sessions"] = self.waiting
        return figures

    # --- the policy ----------------------------------------------------------------------

    def add_candidate(self, entry: Entry) -> None:
        session = entry.session
        if session is not None:
            if entry.superseded_at >= entry.last_used:
                self._superseded[entry] = None
            elif len(session.leaves) < LEAVES_MAX:
                session.leaves[entry] = None
                if session.due is not None:
                    if session not in self._by_next_use:
                        self._by_next_use.set(session, -session.due)
                    return
                if session.ended >= entry.last_used:
                    self._ended[session] = None
        if entry.copies:
            self.policy.add_candidate(entry)
        else:
            self._extra.add(entry)

    def remove(self, entry: Entry) -> None:
        if entry in self._extra_listed:
            self._extra.discard(entry)
        self.policy.remove(entry)
        if entry.superseded_at:
            self._superseded.pop(entry, None)
        parent = entry.index.blocks.get(entry.parent)
        session: Session = entry.session  # or None
        if session is None:
            if parent is not None and parent.session is not None:
                self.block_shared(parent)
            return
        was_tip = session.chain_ends.get(entry.index) is entry
        self._disown(session, entry)
        if parent is None:
            pass
        elif parent.session is not session:
            if not session.ended:
                self.block_shared(parent)
        elif was_tip:
            session.chain_ends[entry.index] = parent
        elif (
            entry.superseded_at >= max(entry.last_used, parent.last_used)
            and session.chain_ends.get(entry.index) is not parent
        ):
            parent.superseded_at = parent.last_used
        if not session.bytes and self._sessions.get(session.name) is session:
            used = max(session.last_use, entry.last_used / 1e6)
            self._withdraw(session)
            del self._sessions[session.name]
            self._gone[session.name] = used
            if len(self._gone) > SESSIONS_MAX:
                self._gone.popitem(last=False)

    def victim(
        self,
        newcomer: Entry,
        evictable: Callable[[Entry], bool],
        now: float,
        last_used: int = JUST_NOW,
        *,
        foreign: bool = False,
        owed: bool = False,
        wanted: bool = False,
    ) -> Entry | Decision | None:
        """First leaves of superseded and ended sessions, then extra copies, then those that are
        expected latest.

        An extra copy that is fetched takes the place of those that were used before `last_used`.
        A block without a resume hint is expected `_UNANNOUNCED_S` after its last use. Beyond the
        budget, sessions with a hint are evicted first. BYPASS when `newcomer` is expected later
        than every evictable block. Of a `foreign` one, another tenant's, nothing is expected: the
        hints order what is here, and refuse nothing. A policy that infers may keep old blocks: what
        it gives up goes before sessions with a hint, however young it is.
        """
        if self._expiries:
            self._expire(now)
        if self._superseded or self._ended:
            useless = self.next_useless(evictable)
            if useless is not None:
                return useless
        if self._extra_listed:
            found = self._extra.take(newcomer, evictable, last_used)
            if found is not None:
                return found
        nothing_refused = wanted or (owed and foreign)
        found = _unannounced_victim(self, newcomer, evictable, now, wanted=nothing_refused)
        if found is Decision.NOT_YET or not self._by_next_use:
            return found
        far = self._next_announced(evictable)
        if far is None or far.session is None or far.session.due is None:
            return found
        if (foreign or wanted) and (found is None or isinstance(found, Decision)):
            return far
        over = self.announced_bytes > self.budget
        if found is not None and not over and _infers(self.policy):
            return found
        if found is None or isinstance(found, Decision):
            expected = self._expected(newcomer, now)
            unannounced = newcomer.session is None or newcomer.session.due is None
            return far if far.session.due > expected or (over and unannounced) else Decision.BYPASS
        if found.session is not None and found.session.expired:
            return found
        expected = self._expected(found, found.last_used / 1e6)
        if over or (expected > now and far.session.due > expected):
            self.policy.add_candidate(found)
            return far
        return found

    def reject(self, entry: Entry) -> None:
        """It stays a block of its session."""
        self._superseded.pop(entry, None)
        if entry.session is not None:
            entry.session.leaves.pop(entry, None)
        self._extra.discard(entry)
        self.policy.remove(entry)

    def next_useless(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """A block of a superseded branch or an ended session, tails first; None if none may go."""
        while self._superseded:
            entry = next(iter(self._superseded))
            if entry.superseded_at >= entry.last_used and evictable(entry):
                return entry
            del self._superseded[entry]
            if entry.superseded_at < entry.last_used:  # used again, or another part of it
                self.policy.add_candidate(entry)
        while self._ended:
            session = next(iter(self._ended))
            # All others stay its leaves: a hint that comes later is about them, too.
            for entry in reversed(session.leaves):
                if session.ended >= entry.last_used and evictable(entry):
                    return entry
            del self._ended[session]
        return None

    def rank(self, now: float) -> tuple[int, float]:
        if self._superseded or self._ended:
            return 0, 0.0
        if self._extra_listed:
            return 1, 0.0
        age = self.policy.victim_age(now)
        announced = self._by_next_use.first() if not age else None
        return 2, announced[1].last_use if announced is not None else now - age

    def victim_age(self, now: float) -> float:
        oldest = next(iter(self._superseded), None)
        if oldest is not None:
            return max(0.0, now - oldest.last_used / 1e6)
        return self.policy.victim_age(now) or self._extra.victim_age(now)

    def holds(self, entry: Entry) -> bool:
        if entry.is_candidate or entry in self._superseded or self._protects(entry):
            return True
        session = entry.session
        return session is not None and session in self._ended and entry in session.leaves

    # --- inside --------------------------------------------------------------------------

    def _answer(self, outcome: str) -> bool:
        self.counters[f"hints_{outcome}"] += 1
        return outcome == "accepted"

    def _announce(self, session: Session, resume_in: float, now: float, age_s: float = 0.0) -> bool:
        distance_s = min(resume_in, RESUME_S_MAX)
        lapses = now - age_s + max(_EXPIRE_S_MIN, _EXPIRE_TIMES * distance_s)
        if lapses <= now or len(session.leaves) >= LEAVES_MAX:
            return self._answer("refused")
        if session.arrived is not None:  # its prompt is here already, whatever was expected before
            return self._answer("clipped")
        self._expect(session, now - age_s + distance_s, lapses)
        within = distance_s == resume_in and self.announced_bytes <= self.budget
        return self._answer("accepted" if within else "clipped")

    def _expect(self, session: Session, due: float, lapses: float) -> None:
        if session.due is None:
            self.announced_bytes += session.bytes
        session.due = due
        session.expired = False
        session.ended = 0  # the last word counts
        self._ended.pop(session, None)
        self._expiries.set(session, lapses)
        if session.leaves:
            self._by_next_use.set(session, -due)

    def _learn_gap(self, came: float, used: float | None) -> None:
        """Report how long a session paused, if the policy learns from that."""
        if self._learn is not None and used is not None:
            self._learn(came - used)

    def _expected(self, entry: Entry, used: float) -> float:
        """The expected time of the next use: by the hint, else `_UNANNOUNCED_S` after `used`."""
        session = entry.session
        return (
            session.due
            if session is not None and session.due is not None
            else used + _UNANNOUNCED_S
        )

    def _protects(self, entry: Entry) -> bool:
        session = entry.session
        return session is not None and session.due is not None and entry in session.leaves

    def _program_of(self, session: str) -> str:
        """What the bytes of a session count for: a program, or all those beyond the bound."""
        program = program_of(session)
        known = not program or program in self.program_bytes
        return program if known or len(self.program_bytes) < PROGRAMS_MAX else OTHERS

    def _disown(self, session: Session, entry: Entry) -> None:
        """The block does not belong to its session any more."""
        session.leaves.pop(entry, None)
        if session.chain_ends.get(entry.index) is entry:
            del session.chain_ends[entry.index]
        size = self._rounded(entry.size)
        session.bytes -= size
        if session.program:
            self.program_bytes[session.program] -= size
            if not self.program_bytes[session.program]:
                del self.program_bytes[session.program]
        if session.due is not None:
            self.announced_bytes -= size

    def _withdraw(self, session: Session) -> None:
        """Drop a session's hints: its leaves become candidates of the policy again."""
        self._ended.pop(session, None)
        if session.arrived is not None:
            session.arrived = None
            self.waiting -= 1
        if session.due is not None:
            session.due = None
            self.announced_bytes -= session.bytes
            self._by_next_use.drop(session)
            self._expiries.drop(session)
            for entry in session.leaves:
                self.policy.add_candidate(entry)

    def _expire(self, now: float) -> None:
        while (first := self._expiries.first()) is not None and first[0] <= now:
            self.counters["arrivals_lapsed"] += first[1].arrived is not None
            self._withdraw(first[1])
            first[1].expired = True

    def _next_announced(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        while (first := self._by_next_use.first()) is not None:
            session = first[1]
            while session.leaves:
                entry = next(reversed(session.leaves))
                last_used = entry.last_used
                if evictable(entry):
                    return entry
                if entry.last_used == last_used:  # else it has found a later use of another part
                    del session.leaves[entry]
            self._by_next_use.drop(session)
        return None


def _infers(policy: Policy[Entry]) -> bool:
    """It may keep old blocks rather than young ones. What a client says counts more than that."""
    return hasattr(policy, "inferred")


def _unannounced_victim(
    order: SessionAwarePolicy,
    newcomer: Entry,
    evictable: Callable[[Entry], bool],
    now: float,
    *,
    wanted: bool,
) -> Entry | Decision | None:
    """That of the policy. It refuses nothing that is announced for what it infers."""
    policy, may_go = order.policy, evictable
    if order._by_next_use:
        may_go = lambda entry: evictable(entry) and not order._protects(entry)  # noqa: E731
    found = policy.victim(newcomer, may_go, now + LONG_S if wanted else now)
    session: Session | None = newcomer.session
    if found is not Decision.BYPASS or session is None or session.due is None:
        return found
    guessed = _infers(policy) and order.announced_bytes <= order.budget
    return policy.victim(newcomer, may_go, now + LONG_S) if guessed else found


def _last_stamp(session: Session) -> int:
    """The last use of the ends of its chains, in microseconds; 0 when it has none."""
    ends = (*session.chain_ends.values(), *session.leaves)
    return max((entry.last_used for entry in ends), default=0)
