"""What users say of their sessions, on top of any policy: this one is over, that one comes back.

A *session* is a tag on writes. Three things can be known of one:

- It has *ended*: its blocks that no other session uses go first.
- Its history was *superseded*: a newer chain of it branches off before the end of the last one.
  What was left behind goes first, too.
- It *resumes* at some time. Until then its blocks stay, except for those that resume later still:
  of announced sessions the one that is furthest away goes first (KVFlow, arXiv 2507.07400). An
  announcement that is long overdue lapses; without that it would keep the best rank for ever.

All of it is advice. It orders evictions and nothing else; a wrong hint costs hits, never bytes. It
is bounded: announced sessions take room from others only up to a budget of bytes, a session may
have only so many leaves, and only so many sessions are known. No call looks at more than that many
leaves, and most look at one: whatever is said of a branch is worked out at its leaf, and handed to
the parent when the leaf goes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from kvpool.errors import InvariantViolated
from kvpool.protocols.policy import Decision, Policy
from kvpool.server.state.entry import Session
from kvpool.types import ROOT, HintStatus, SessionHint

if TYPE_CHECKING:
    from kvpool.server.state.entry import Entry

#: Sessions that are known at once; beyond it the one that wrote longest ago is forgotten.
SESSIONS_MAX: Final = 65_536
#: Leaves of one session that hints apply to. A session is one conversation, with a branch or two.
LEAVES_MAX: Final = 256
#: Nobody knows what is further away.
RESUME_S_MAX: Final = 3600.0
#: An announcement lapses this many times its distance after it was made.
_EXPIRE_TIMES: Final = 3.0
_EXPIRE_S_MIN: Final = 10.0
#: When what nothing is announced of is taken to be used again.
_UNANNOUNCED_S: Final = 10.0


class SessionAwarePolicy:
    """A policy that knows sessions, round one that does not. It is what the store calls."""

    def __init__(self, policy: Policy[Entry], budget: int) -> None:
        self.policy = policy
        self.budget = budget
        self.announced_bytes = 0
        self.counters: Counter[str] = Counter()
        self.touch: Callable[[Entry, float], None] = policy.touch  # nothing is added to reads
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._superseded: OrderedDict[Entry, None] = OrderedDict()  # leaves of superseded branches
        self._ended: OrderedDict[Session, None] = OrderedDict()
        self._by_next_use = _Timeline()  # announced sessions with leaves, by -due
        self._expiries = _Timeline()

    # --- what the store tells ------------------------------------------------------------

    def open_session(self, session_hint: SessionHint, now: float) -> Session:
        """The session of a write. One that writes has not ended; what was announced holds."""
        session = self._sessions.get(session_hint.session)
        if session is None:
            session = self._sessions[session_hint.session] = Session(session_hint.session)
            if len(self._sessions) > SESSIONS_MAX:
                self._withdraw(self._sessions.popitem(last=False)[1])
        else:
            self._sessions.move_to_end(session_hint.session)
            session.ended = 0
        if session_hint.resume_in is not None:
            self._announce(session, session_hint.resume_in, now)
        return session

    def block_added(self, entry: Entry) -> None:
        """A new block carries its session's tag."""
        session = entry.session
        if session is not None:
            session.bytes += entry.size
            if session.due is not None:
                self.announced_bytes += entry.size

    def block_shared(self, entry: Entry) -> None:
        """Somebody else uses it, too: from now on it is nobody's."""
        session = entry.session
        if session is not None:
            listed = entry in session.leaves
            self._disown(session, entry)
            entry.session = None
            if listed:
                self.policy.add_candidate(entry)

    def chain_extended(self, session: Session, first: Entry, last: Entry) -> None:
        """A session wrote a stretch of its chain.

        If that begins before the end of what it wrote last, the rest of it is superseded. When
        the stretch hangs on a block that is not here, its place in the chain is not known, and
        nothing is concluded; nor when that block is younger than the old end, which may then be
        among its ancestors.
        """
        self._sessions.setdefault(session.name, session)  # making room may have emptied it
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
        if old is not None and old is not parent and before and old.session is session:
            old.superseded_at = old.last_used
            if self._listed(old):
                self._superseded[old] = None
        session.chain_ends[index] = last

    # --- what users tell -----------------------------------------------------------------

    def end(self, name: str, now: float) -> HintStatus:
        """The session is over. If it writes again, it is not."""
        session = self._sessions.get(name)
        if session is None or not session.bytes:
            return HintStatus.UNKNOWN
        self._withdraw(session)
        stamps = [entry.last_used for entry in (*session.chain_ends.values(), *session.leaves)]
        session.ended = max(int(now * 1e6), *stamps) if stamps else int(now * 1e6)
        if session.leaves:
            self._ended[session] = None
        return self._answer(HintStatus.ACCEPTED)

    def resume(self, name: str, resume_in: float, now: float, *, age_s: float = 0.0) -> HintStatus:
        """It resumes `resume_in` seconds after the hint was given, which was `age_s` ago."""
        session = self._sessions.get(name)
        if session is None or not session.bytes:
            return HintStatus.UNKNOWN
        return self._announce(session, resume_in, now, age_s)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

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
        self.policy.add_candidate(entry)

    def remove(self, entry: Entry) -> None:
        self.policy.remove(entry)
        if entry.superseded_at:
            self._superseded.pop(entry, None)
        parent = entry.index.blocks.get(entry.parent)
        session = entry.session
        if session is None:
            if parent is not None:
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
            self._withdraw(session)
            del self._sessions[session.name]

    def victim(
        self, newcomer: Entry, evictable: Callable[[Entry], bool], now: float
    ) -> Entry | Decision | None:
        """The dead; what nothing is announced of; what is announced furthest away."""
        self._expire(now)
        if self._superseded or self._ended:
            useless = self._next_superseded(evictable)
            if useless is not None:
                return useless
        if not self._by_next_use:
            return self.policy.victim(newcomer, evictable, now)
        found = self.policy.victim(
            newcomer, lambda entry: evictable(entry) and not self._protects(entry), now
        )
        far = self._next_announced(evictable)
        if far is None or far.session is None or far.session.due is None:
            return found
        over = self.announced_bytes > self.budget
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
        """The store refuses a victim: it is no candidate any more, here or in the policy.

        It has not left, so its session keeps it.
        """
        self._superseded.pop(entry, None)
        if entry.session is not None:
            entry.session.leaves.pop(entry, None)
        self.policy.remove(entry)

    def victim_age(self, now: float) -> float:
        oldest = next(iter(self._superseded), None)
        return max(0.0, now - oldest.last_used / 1e6) if oldest else self.policy.victim_age(now)

    def holds(self, entry: Entry) -> bool:
        """It is offered somewhere: the store's `check` asks."""
        return entry.is_candidate or entry in self._superseded or self._protects(entry)

    def check(self, entries: Collection[Entry]) -> None:
        """Every invariant, for the blocks that are here. Raises InvariantViolated."""
        sizes: Counter[Session] = Counter()
        for entry in entries:
            if entry.session is not None:
                sizes[entry.session] += entry.size
        here = set(entries)
        for session in {*self._sessions.values(), *sizes}:
            if session.bytes != sizes[session]:
                raise InvariantViolated(f"session {session.name!r}: {session.bytes} bytes counted")
            if not here.issuperset((*session.leaves, *session.chain_ends.values())):
                raise InvariantViolated(f"session {session.name!r} knows blocks that have left")
        announced = sum(session.bytes for session in sizes if session.due is not None)
        if announced != self.announced_bytes:
            raise InvariantViolated(
                f"{self.announced_bytes} bytes announced, there are {announced}"
            )
        if not here.issuperset(self._superseded):
            raise InvariantViolated("a dead block has left and is still listed")

    # --- inside --------------------------------------------------------------------------

    def _answer(self, status: HintStatus) -> HintStatus:
        self.counters[f"hints_{status.name.lower()}"] += 1
        return status

    def _announce(
        self, session: Session, resume_in: float, now: float, age_s: float = 0.0
    ) -> HintStatus:
        distance_s = min(resume_in, RESUME_S_MAX)
        lapses = now - age_s + max(_EXPIRE_S_MIN, _EXPIRE_TIMES * distance_s)
        if lapses <= now or len(session.leaves) >= LEAVES_MAX:
            return self._answer(HintStatus.REFUSED)
        if session.due is None:
            self.announced_bytes += session.bytes
        session.due = now - age_s + distance_s
        session.expired = False
        self._expiries.set(session, lapses)
        if session.leaves:
            self._by_next_use.set(session, -session.due)
        within = distance_s == resume_in and self.announced_bytes <= self.budget
        return self._answer(HintStatus.ACCEPTED if within else HintStatus.CLIPPED)

    def _expected(self, entry: Entry, used: float) -> float:
        """When it is used again, as far as anybody knows."""
        session = entry.session
        return (
            session.due
            if session is not None and session.due is not None
            else used + _UNANNOUNCED_S
        )

    def _protects(self, entry: Entry) -> bool:
        session = entry.session
        return session is not None and session.due is not None and entry in session.leaves

    def _listed(self, entry: Entry) -> bool:
        return entry.is_candidate or (entry.session is not None and entry in entry.session.leaves)

    def _disown(self, session: Session, entry: Entry) -> None:
        """A block is no more its session's own."""
        session.leaves.pop(entry, None)
        if session.chain_ends.get(entry.index) is entry:
            del session.chain_ends[entry.index]
        session.bytes -= entry.size
        if session.due is not None:
            self.announced_bytes -= entry.size

    def _withdraw(self, session: Session) -> None:
        """Nothing is announced of it any more: its leaves go back to the policy."""
        self._ended.pop(session, None)
        if session.due is not None:
            session.due = None
            self.announced_bytes -= session.bytes
            self._by_next_use.drop(session)
            self._expiries.drop(session)
            for entry in session.leaves:
                self.policy.add_candidate(entry)

    def _expire(self, now: float) -> None:
        while (first := self._expiries.first()) is not None and first[0] <= now:
            self._withdraw(first[1])
            first[1].expired = True

    def _next_superseded(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        while self._superseded:
            entry = next(iter(self._superseded))
            if entry.superseded_at >= entry.last_used and evictable(entry):
                return entry
            del self._superseded[entry]
            if entry.superseded_at < entry.last_used:  # used again, or another part of it
                self.policy.add_candidate(entry)
        while self._ended:
            session = next(iter(self._ended))
            while session.leaves:
                entry, _ = session.leaves.popitem()
                if session.ended >= entry.last_used and evictable(entry):
                    session.leaves[entry] = None
                    return entry
            del self._ended[session]
        return None

    def _next_announced(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        while (first := self._by_next_use.first()) is not None:
            session = first[1]
            while session.leaves:
                entry, _ = session.leaves.popitem()
                last_used = entry.last_used
                if evictable(entry):
                    session.leaves[entry] = None
                    return entry
                if (
                    entry.last_used != last_used
                ):  # `evictable` learned of a later use of another part
                    session.leaves[entry] = None
            self._by_next_use.drop(session)
        return None


class _Timeline:
    """Sessions in the order of a time that each has; a heap with lazy updates."""

    def __init__(self) -> None:
        self._times: dict[Session, float] = {}
        self._heap: list[tuple[float, int, Session]] = []
        self._pushed = 0

    def __bool__(self) -> bool:
        return bool(self._times)

    def __contains__(self, session: Session) -> bool:
        return session in self._times

    def set(self, session: Session, time: float) -> None:
        self._times[session] = time
        self._pushed += 1
        heappush(self._heap, (time, self._pushed, session))
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [entry for entry in self._heap if self._times.get(entry[2]) == entry[0]]
            heapify(self._heap)

    def drop(self, session: Session) -> None:
        self._times.pop(session, None)

    def first(self) -> tuple[float, Session] | None:
        while self._heap:
            time, _, session = self._heap[0]
            if self._times.get(session) == time:
                return time, session
            heappop(self._heap)
        return None
