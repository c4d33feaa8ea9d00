"""What one store records about one session, and the order of many by a time. Pure."""

from __future__ import annotations

from kvpool.server.eviction.lazy_heap import LazyHeap
from kvpool.server.state.entry import Entry, Index


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


class Timeline:
    """Sessions ordered by one time each; a heap with lazy updates, so a change costs O(log n)."""

    def __init__(self) -> None:
        self._times: dict[Session, float] = {}
        self._heap: LazyHeap[tuple[float, int, Session]] = LazyHeap(
            lambda entry: self._times.get(entry[2]) == entry[0]
        )
        self._pushed = 0

    def __bool__(self) -> bool:
        return bool(self._times)

    def __contains__(self, session: Session) -> bool:
        return session in self._times

    def set(self, session: Session, time: float) -> None:
        self._times[session] = time
        self._pushed += 1
        self._heap.push((time, self._pushed, session), len(self._times))

    def drop(self, session: Session) -> None:
        self._times.pop(session, None)
        self._heap.tidy(len(self._times))

    def first(self) -> tuple[float, Session] | None:
        while (entry := self._heap.first()) is not None:
            time, _, session = entry
            if self._times.get(session) == time:
                return time, session
            self._heap.pop()
        return None
