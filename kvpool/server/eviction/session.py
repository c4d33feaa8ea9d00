"""What one store records about one session, and the order of many by a time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from kvpool.errors import InvariantViolated
from kvpool.server.eviction.lazy_heap import LazyHeap
from kvpool.server.state.entry import Entry, Index
from kvpool.tenant_names import tenant_of


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
        self.name = name
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


def check_sessions(policy: Any, entries: Collection[Entry], tenant: str | None = None) -> None:
    """As `Order.check`, of a `SessionAwarePolicy`."""
    sizes: Counter[Session] = Counter()
    for entry in entries:
        if entry.session is not None:
            sizes[entry.session] += policy._rounded(entry.size)
    if tenant is not None and any(tenant_of(one.name) != tenant for one in sizes):
        raise InvariantViolated(f"a block of tenant {tenant!r} is in a session of another one")
    here = set(entries)
    for session in {*policy._sessions.values(), *sizes}:
        if session.bytes != sizes[session]:
            raise InvariantViolated(f"session {session.name!r}: {session.bytes} bytes counted")
        if not here.issuperset((*session.leaves, *session.chain_ends.values())):
            raise InvariantViolated(f"session {session.name!r} knows blocks that have left")
    waiting = [s for s in {*policy._sessions.values(), *sizes} if s.arrived is not None]
    if len(waiting) != policy.waiting or any(session.due is None for session in waiting):
        raise InvariantViolated(f"{policy.waiting} sessions wait, there are {len(waiting)}")
    programs: Counter[str] = Counter()
    for session, size in sizes.items():
        programs[session.program] += size
    del programs[""]
    if programs != policy.program_bytes:
        raise InvariantViolated(f"programs have {programs}, not {policy.program_bytes}")
    announced = sum(session.bytes for session in sizes if session.due is not None)
    if announced != policy.announced_bytes:
        raise InvariantViolated(f"{policy.announced_bytes} bytes announced, there are {announced}")
    if not here.issuperset(policy._extra_listed):
        raise InvariantViolated("an extra copy has left and is still listed")
    if not here.issuperset(policy._superseded):
        raise InvariantViolated("a superseded block has left and is still listed")
