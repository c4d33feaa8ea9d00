"""The chains of sessions, and which branch of one was superseded by a newer one. Pure.

That is recorded at the leaf of a branch only; when that leaf is evicted, its parent inherits the
mark. So most calls visit one block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from kvpool.server.eviction.session import Session
from kvpool.server.state.entry import Entry
from kvpool.types import ROOT


class Branches:
    """The end of each session's chain, and the leaves of superseded branches.

    A leaf that was used again goes to `add_candidate`.
    """

    def __init__(self, add_candidate: Callable[[Entry], None], counters: Counter[str]) -> None:
        self.superseded: OrderedDict[Entry, None] = OrderedDict()
        self._add_candidate = add_candidate
        self._counters = counters

    def extend(self, session: Session, first: Entry, last: Entry, *, fetched: bool) -> None:
        """A session has written the blocks `first` to `last` of its chain.

        If they branch off before the end of its last chain, the rest of that chain is superseded.
        If the parent of `first` is not stored, or is younger than the old end (which may then be
        one of its ancestors), the place in the chain is unknown, and no branch is superseded.
        Nor does what was `fetched`: it may be older than what is here, or come before it. Nor is a
        branch of a session whose superseded branch goes on: several conversations have its name.
        """
        index = first.index
        old = session.chain_ends.get(index)
        parent = index.blocks.get(first.parent)
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
            self._counters["branches_resumed"] += 1
        superseded = before and not session.branched
        if old is not None and old is not parent and superseded and old.session is session:
            old.superseded_at = old.last_used
            if old.is_candidate or old in session.leaves:
                self.superseded[old] = None
        if last.session is session:  # else a block of another one, behind it, has just left
            session.chain_ends[index] = last

    def left(self, session: Session, entry: Entry, parent: Entry, *, was_end: bool) -> None:
        """A block of a session has left; its parent, of the same session, is a leaf now."""
        if was_end:
            session.chain_ends[entry.index] = parent
        elif (
            entry.superseded_at >= max(entry.last_used, parent.last_used)
            and session.chain_ends.get(entry.index) is not parent
        ):
            parent.superseded_at = parent.last_used

    def next(self, evictable: Callable[[Entry], bool]) -> Entry | None:
        """A leaf of a superseded branch; None if none may go."""
        while self.superseded:
            entry = next(iter(self.superseded))
            if entry.superseded_at >= entry.last_used and evictable(entry):
                return entry
            del self.superseded[entry]
            if entry.superseded_at < entry.last_used:  # used again, or another part of it
                self._add_candidate(entry)
        return None
