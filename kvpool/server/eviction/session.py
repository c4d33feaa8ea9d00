"""What one store records about one session and about all of them, and an order by a time. Pure."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Final

from kvpool.errors import InvariantViolated
from kvpool.server.eviction.lazy_heap import LazyHeap
from kvpool.server.state.entry import Entry, Index
from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import OTHERS

_PROGRAM: Final = re.compile(r"((?:@[^/]*/)?(?:tenant=[^/]*/)?)program=([\w.-]{1,64});")
#: Sessions recorded at once; one more drops the session whose last write is the oldest.
SESSIONS_MAX: Final = 65_536
#: Programs of a store whose bytes are counted apart, at most.
PROGRAMS_MAX: Final = 1024


def program_of(session: str) -> str:
    """The program that a session belongs to: `program=NAME;REST` is one of NAME.

    With the marker of a tenant before it, so that programs of two tenants are two. Empty for all
    other sessions.
    """
    found = _PROGRAM.match(session)
    return found[1] + found[2] if found is not None else ""


class Session:
    """What one store records about one session (design: session-hints)."""

    __slots__ = (
        "arrived",
        "branched",
        "bytes",
        "chain_ends",
        "due",
        "ended",
        "expired",
        "last_use",
        "leaves",
        "name",
        "program",
        "waits_since",
    )

    def __init__(self, name: str) -> None:
        self.name = name  # empty: of a prompt without one, which waits for one block
        self.program = ""  # that its bytes count for
        self.bytes = 0  # whole extents of stored blocks that this session alone uses
        self.chain_ends: dict[Index, Entry] = {}  # the end of its last chain
        self.leaves: dict[Entry, None] = {}  # its evictable leaves, oldest first
        self.due: float | None = None  # the time at which it resumes, by its hint
        self.arrived: float | None = None  # since when its next prompt waits to be served
        self.waits_since = -1.0  # the first arrival after its last use, also when it has lapsed
        self.last_use = 0.0  # its last write, or the last read of the end of one of its chains
        self.expired = False  # its hint expired before it resumed
        self.branched = False  # a superseded branch went on: several conversations have its name
        self.ended = 0  # when it ended: blocks last used up to then (µs) are evicted first

    def last_stamp(self) -> int:
        """The last use of the ends of its chains, in microseconds; 0 when it has none."""
        ends = (*self.chain_ends.values(), *self.leaves)
        return max((entry.last_used for entry in ends), default=0)


class Timeline(dict["Session", float]):
    """Sessions ordered by one time each; a heap with lazy updates, so a change costs O(log n).

    A dict: to ask whether it is empty, for each victim, calls no Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: LazyHeap[tuple[float, int, Session]] = LazyHeap(
            lambda entry: self.get(entry[2]) == entry[0]
        )
        self._pushed = 0

    def set(self, session: Session, time: float) -> None:
        self[session] = time
        self._pushed += 1
        self._heap.push((time, self._pushed, session), len(self))

    def drop(self, session: Session) -> None:
        self.pop(session, None)
        self._heap.tidy(len(self))

    def first(self) -> tuple[float, Session] | None:
        while (entry := self._heap.first()) is not None:
            time, _, session = entry
            if self.get(session) == time:
                return time, session
            self._heap.pop()
        return None


class ProgramBytes(Counter[str]):
    """Bytes of the sessions of each program, in whole extents.

    Orders of one store have the same `names`: of all its programs `PROGRAMS_MAX` are counted apart,
    of each tenant its share, and the others together, as OTHERS.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names = Shares(PROGRAMS_MAX)

    def name_of(self, session: str) -> str:
        """What the bytes of a session count for; empty if it is of no program."""
        program = program_of(session)
        known = not program or program in self or self.names.room(tenant_of(program)) > 0
        return program if known else OTHERS

    def count(self, name: str, size: int) -> None:
        """So many bytes more, or fewer, of what has this name."""
        if name not in self and name != OTHERS:
            self.names.hold(tenant_of(name))
        self[name] += size
        if not self[name]:
            del self[name]
            if name != OTHERS:
                self.names.give_back(tenant_of(name))


class SessionTable(OrderedDict[str, "Session"]):
    """Those of one store by name, the last one that wrote last. `rounded` gives how many bytes of
    whole extents a block takes."""

    def __init__(self, rounded: Callable[[int], int]) -> None:
        super().__init__()
        self.rounded = rounded
        self.programs = ProgramBytes()
        #: Of sessions that have no block left: their last use, until they come back.
        self._gone: OrderedDict[str, float] = OrderedDict()

    def begin(self, name: str) -> tuple[Session, Session | None]:
        """A new session, and the one that it displaces."""
        session = self[name] = Session(name)
        self._gone.pop(name, None)
        return session, self.popitem(last=False)[1] if len(self) > SESSIONS_MAX else None

    def resize(self, session: Session, size: int) -> None:
        """It has so many bytes more, or fewer."""
        if not session.bytes:  # its first block: what it counts for from now on
            session.program = self.programs.name_of(session.name)
        session.bytes += size
        if session.program:
            self.programs.count(session.program, size)

    def forget(self, session: Session, used: float) -> None:
        """It has no block left; it was used last at `used`."""
        del self[session.name]
        self._gone[session.name] = used
        if len(self._gone) > SESSIONS_MAX:
            self._gone.popitem(last=False)

    def returns(self, name: str) -> float | None:
        """When a session that has no block here was used last, if that is known; asked once."""
        return self._gone.pop(name, None)


def check_sessions(policy: Any, entries: Collection[Entry], tenant: str | None = None) -> None:
    """As `Order.check`, of a `SessionAwarePolicy`."""
    sessions, announced = policy.sessions, policy.announced
    sizes: Counter[Session] = Counter()
    programs: Counter[str] = Counter()
    for entry in entries:
        session = entry.session
        if session is not None:
            sizes[session] += sessions.rounded(entry.size)
            if session.program:
                programs[session.program] += sessions.rounded(entry.size)
    if tenant is not None and any(one.name and tenant_of(one.name) != tenant for one in sizes):
        raise InvariantViolated(f"a block of tenant {tenant!r} is in a session of another one")
    here = set(entries)
    for session in {*sessions.values(), *sizes}:
        if session.bytes != sizes[session]:
            raise InvariantViolated(f"session {session.name!r}: {session.bytes} bytes counted")
        if not here.issuperset((*session.leaves, *session.chain_ends.values())):
            raise InvariantViolated(f"session {session.name!r} knows blocks that have left")
    waiting = [s for s in {*sessions.values(), *sizes} if s.arrived is not None]
    if len(waiting) != announced.waiting or any(session.due is None for session in waiting):
        raise InvariantViolated(f"{announced.waiting} sessions wait, there are {len(waiting)}")
    if programs != sessions.programs:
        raise InvariantViolated(f"programs have {programs}, not {sessions.programs}")
    size = sum(session.bytes for session in sizes if session.due is not None)
    if size != announced.bytes:
        raise InvariantViolated(f"{announced.bytes} bytes announced, there are {size}")
    if not here.issuperset(policy.extra.listed):
        raise InvariantViolated("an extra copy has left and is still listed")
    if not here.issuperset(policy.branches.superseded):
        raise InvariantViolated("a superseded block has left and is still listed")
