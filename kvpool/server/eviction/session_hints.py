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

Of a prompt without a session its lookup tells that it waits. The block at which that ended is then
a session without a name, until it is read or has a child.

Hints are advice: they order evictions and change nothing else, so a wrong hint costs hits, never
bytes. They are bounded: sessions with a hint take space from others only up to a budget of bytes,
and the numbers of sessions and of leaves per session are limited; so is the time of a wait. No call
visits more than LEAVES_MAX leaves.

This file has the order; `session_announcements.py` has what is said of sessions,
`session_branches.py` what their chains show, `session.py` the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Decision, Policy
from kvpool.server.eviction.extra_copies import ExtraCopies
from kvpool.server.eviction.order import JUST_NOW, LONG_S, Find, Order, Subject
from kvpool.server.eviction.session import Session, SessionTable, check_sessions
from kvpool.server.eviction.session_announcements import LEAVES_MAX, Announcements
from kvpool.server.eviction.session_branches import Branches
from kvpool.server.state.entry import Entry, Index
from kvpool.types import ARRIVED, Namespace, SessionHint

#: Assumed seconds from the last use of a block without a hint to its next use.
_UNANNOUNCED_S: Final = 10.0


class SessionAwarePolicy(Order):
    """What the store calls: it applies the hints, and asks the wrapped `policy` for all the rest.

    `budget` is bytes of whole extents; `rounded` gives how many bytes of them a block takes.
    Where a block is recorded while it may be evicted:

    | block                                  | recorded in                                      |
    |----------------------------------------|--------------------------------------------------|
    | leaf of a superseded branch            | `branches.superseded`, and candidate of `policy` |
    | leaf of a session with a resume hint   | `session.leaves` alone                           |
    | leaf of a session without one          | `session.leaves`, and candidate of `policy`      |
    | extra copy (design: movers)            | in `extra` alone                                 |
    | any other, and leaves above LEAVES_MAX | candidate of `policy` alone                      |
    """

    check = check_sessions

    def __init__(
        self, policy: Policy[Entry], budget: int, rounded: Callable[[int], int] = int
    ) -> None:
        super().__init__(policy, budget, rounded)
        self.counters: Counter[str] = Counter()
        self._takes_parent = getattr(policy, "takes_parent", None)
        self.sessions = SessionTable(rounded)
        self.programs = self.sessions.programs
        self.announced = Announcements(policy, budget, self.counters)
        self.branches = Branches(policy.add_candidate, self.counters)
        self.extra = ExtraCopies(policy.add_candidate)

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
            if self.announced.waiting and not moved:
                self.end_wait(index.blocks.get(request.parents[0]))
            return None
        moved = moved or request.last_used is not None
        session = self.sessions.get(hint.session)
        if session is None:
            session, displaced = self.sessions.begin(hint.session)
            if displaced is not None:
                self.announced.withdraw(displaced)
        else:
            self.sessions.move_to_end(hint.session)
            session.ended = 0
        if not moved:
            session.last_use = now
            if session.arrived is not None:
                self.announced.withdraw(session)
        if hint.resume_in is not None and not (moved and session.due is not None):
            self.announced.resume(session, hint.resume_in, now)
        return session

    def block_added(self, entry: Entry) -> None:
        """Count a new block in its session."""
        session = entry.session
        if session is not None:
            self._resize(session, self.sessions.rounded(entry.size))

    def block_shared(self, entry: Entry) -> None:
        """Another session uses the block too: from now on hints of no session apply to it."""
        session = entry.session
        if session is not None and not self.end_wait(entry):
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
        self.sessions.setdefault(session.name, session)  # evictions may have dropped it
        if promoted:
            return
        first, last = granted[0], granted[-1]
        parent = first.index.blocks.get(first.parent)
        if parent is not None:
            session.leaves.pop(parent, None)
            if parent.session is not session:
                self.block_shared(parent)
        self.branches.extend(session, first, last, fetched=request.last_used is not None)

    def answered(self, entry: Entry, now: float) -> None:
        """If it is the last of its chain, no prompt waits for it."""
        session = entry.session
        if session is not None and not self.end_wait(entry) and not entry.children:
            session.last_use = now
            if session.arrived is not None:
                self.announced.withdraw(session)

    # --- hints -----------------------------------------------------------------------------

    def hint(
        self, subject: Subject, resume_in: float | None, now: float, *, age_s: float, find: Find
    ) -> bool | None:
        if not isinstance(subject, str):
            namespace = Namespace(subject.namespace, subject.parts)
            parts = [find(namespace, part, subject.digest) for part in range(subject.parts)]
            _arrived(self, [entry for entry in parts if entry is not None], now, age_s)
            return None
        session = self.sessions.get(subject)
        if session is None:
            if resume_in == ARRIVED:
                self.announced.learn_gap(now - age_s, self.sessions.returns(subject))
            return None
        if resume_in == ARRIVED:
            return self.announced.arrive(session, now, age_s)
        if not session.bytes:
            return None
        if resume_in is None:
            return self.announced.end(session, now)
        return self.announced.resume(session, resume_in, now, age_s)

    def hint_of(self, session: Session | None, now: float) -> SessionHint | None:
        """None when it has ended."""
        if session is None or session.ended or not session.name:
            return None
        due = session.due
        return SessionHint(session.name, None if due is None else max(0.0, due - now))

    def due(self, entry: Entry) -> float | None:
        """When the session of a block resumes."""
        session: Session | None = entry.session
        return session.due if session is not None else None

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
        figures["sessions"] = len(self.sessions)
        figures["announced_bytes"] = self.announced.bytes
        figures["waiting_sessions"] = self.announced.waiting
        return figures

    def bytes_of_programs(self) -> Counter[str]:
        return self.sessions.programs

    # --- the policy ----------------------------------------------------------------------

    def add_candidate(self, entry: Entry) -> None:
        session = entry.session
        if session is not None:
            if entry.superseded_at >= entry.last_used:
                self.branches.superseded[entry] = None
            elif len(session.leaves) < LEAVES_MAX:
                session.leaves[entry] = None
                if session.due is not None:
                    self.announced.leaf_added(session)
                    return
                if session.ended >= entry.last_used:
                    self.announced.ended[session] = None
        if entry.copies:
            self.policy.add_candidate(entry)
        else:
            self.extra.add(entry)

    def remove(self, entry: Entry) -> None:
        if entry in self.extra.listed:
            self.extra.discard(entry)
        self.policy.remove(entry)
        if entry.superseded_at:
            self.branches.superseded.pop(entry, None)
        self.end_wait(entry, stays=False)
        session: Session = entry.session  # or None
        if session is None and not self.sessions:
            return
        parent = entry.index.blocks.get(entry.parent)
        if session is None:
            if parent is not None and parent.session is not None:
                self.block_shared(parent)
            return
        was_end = session.chain_ends.get(entry.index) is entry
        self._disown(session, entry)
        if parent is None:
            pass
        elif parent.session is not session:
            if not session.ended:
                self.block_shared(parent)
        else:
            self.branches.left(session, entry, parent, was_end=was_end)
        if not session.bytes and self.sessions.get(session.name) is session:
            self.announced.withdraw(session)
            self.sessions.forget(session, max(session.last_use, entry.last_used / 1e6))

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
        announced = self.announced
        if announced.expiries:
            announced.expire(now)
        if self.branches.superseded or announced.ended:
            useless = self.next_useless(evictable)
            if useless is not None:
                return useless
        if self.extra.listed:
            found = self.extra.take(newcomer, evictable, last_used)
            if found is not None:
                return found
        nothing_refused = wanted or (owed and foreign)
        found = _unannounced_victim(self, newcomer, evictable, now, wanted=nothing_refused)
        if found is Decision.NOT_YET or not announced.by_next_use:
            return found
        farthest = announced.farthest(evictable)
        if farthest is None:
            return found
        far, due = farthest
        if found is None and not far.session.name:  # a guess refuses nothing
            return far
        if (foreign or wanted) and (found is None or isinstance(found, Decision)):
            return far
        over = announced.over
        if found is not None and not over and _infers(self.policy):
            return found
        if found is None or isinstance(found, Decision):
            unannounced = self.due(newcomer) is None
            is_later = due > self._expected(newcomer, now)
            return far if is_later or (over and unannounced) else Decision.BYPASS
        if found.session is not None and found.session.expired:
            return found
        expected = self._expected(found, found.last_used / 1e6)
        if over or (expected > now and due > expected):
            self.policy.add_candidate(found)
            return far
        return found

    def run_of(
        self, victim: Entry, may_go: Callable[[Entry], bool], now: float, most: int
    ) -> list[Entry]:
        """As the policy has it: hints have let it choose the victim, and a parent of another
        session is shared when that leaves."""
        run, get, takes_parent = [victim], victim.index.blocks.get, self._takes_parent
        while len(run) < most and takes_parent is not None:
            above = get(victim.parent)
            if above is None or not above.copies or not may_go(above):
                break
            if not takes_parent(victim, above, now):
                break
            run.append(victim := above)
        return run

    def reject(self, entry: Entry) -> None:
        """It stays a block of its session."""
        self.branches.superseded.pop(entry, None)
        if entry.session is not None:
            entry.session.leaves.pop(entry, None)
        self.extra.discard(entry)
        self.policy.remove(entry)

    def next_useless(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """A block of a superseded branch or an ended session, tails first; None if none may go."""
        return self.branches.next(evictable) or self.announced.next_ended(evictable)

    def rank(self, now: float) -> tuple[int, float]:
        if self.branches.superseded or self.announced.ended:
            return 0, 0.0
        if self.extra.listed:
            return 1, 0.0
        age = self.policy.victim_age(now)
        announced = self.announced.by_next_use.first() if not age else None
        return 2, announced[1].last_use if announced is not None else now - age

    def victim_age(self, now: float) -> float:
        oldest = next(iter(self.branches.superseded), None)
        if oldest is not None:
            return max(0.0, now - oldest.last_used / 1e6)
        return self.policy.victim_age(now) or self.extra.victim_age(now)

    def holds(self, entry: Entry) -> bool:
        if entry.is_candidate or entry in self.branches.superseded:
            return True
        session = entry.session
        if session is None or entry not in session.leaves:
            return False
        return session.due is not None or session in self.announced.ended

    # --- inside --------------------------------------------------------------------------

    def end_wait(self, entry: Entry | None, *, stays: bool = True) -> bool:
        """No prompt without a session waits for this block any more. False if none did."""
        session: Session | None = entry.session if entry is not None else None
        if session is None or session.name:
            return False
        listed = [one for one in session.leaves if stays or one is not entry]
        for part in session.chain_ends.values():
            part.session = None
        session.leaves.clear()
        self.announced.withdraw(session)
        for part in listed:
            self.add_candidate(part)
        return True

    def _expected(self, entry: Entry, used: float) -> float:
        """The expected time of the next use: by the hint, else `_UNANNOUNCED_S` after `used`."""
        due = self.due(entry)
        return used + _UNANNOUNCED_S if due is None else due

    def _resize(self, session: Session, size: int) -> None:
        self.sessions.resize(session, size)
        if session.due is not None:
            self.announced.bytes += size

    def _disown(self, session: Session, entry: Entry) -> None:
        """The block does not belong to its session any more."""
        session.leaves.pop(entry, None)
        if session.chain_ends.get(entry.index) is entry:
            del session.chain_ends[entry.index]
        self._resize(session, -self.sessions.rounded(entry.size))


def _arrived(order: SessionAwarePolicy, parts: Sequence[Entry], now: float, age_s: float) -> None:
    """A prompt came that goes on behind this block, and waits. A block with a child that child
    keeps; nor is it known to be of its session, which may have ended."""
    leaves = [entry for entry in parts if not entry.children]
    new = Session("")
    for entry in leaves:
        if entry.session is None:
            entry.session = new
            new.chain_ends[entry.index] = entry
            new.bytes += order.sessions.rounded(entry.size)
            if entry.is_candidate:
                new.leaves[entry] = None
    for session, entry in {entry.session: entry for entry in leaves}.items():
        order.announced.arrive(session, now, age_s)
        if session.due is None:
            order.end_wait(entry)


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
    if order.announced.by_next_use:
        protects = order.announced.protects
        may_go = lambda entry: evictable(entry) and not protects(entry)  # noqa: E731
    found = policy.victim(newcomer, may_go, now + LONG_S if wanted else now)
    if found is not Decision.BYPASS or order.due(newcomer) is None:
        return found
    guessed = _infers(policy) and not order.announced.over
    return policy.victim(newcomer, may_go, now + LONG_S) if guessed else found
