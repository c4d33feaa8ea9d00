"""What a planner is, and what it wants: blocks of one chain that other servers are to have.

Pure, as each planner: `hand_over.py` asks it what to do next, does it, and says what became of it
(design: movers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.types import Namespace

#: Blocks that one request to another server names.
STRETCH_BLOCKS: Final = 64
STRETCH_BYTES: Final = 16 << 20


class BlockName(NamedTuple):
    """One part of one block."""

    namespace: Namespace
    part: int
    digest: bytes


def name_of(entry: Entry) -> BlockName:
    return BlockName(entry.index.namespace, entry.index.part, entry.digest)


class Want(NamedTuple):
    """Blocks of one namespace, part and size of digest, heads first. They go to server `to`, or
    where placement puts them. Without blocks: so much was looked at that others may run."""

    entries: Sequence[Entry] = ()
    to: str = ""


PAUSE: Final = Want()
Wants: TypeAlias = Iterator[Want]


class Staying(NamedTuple):
    """A server that lives and does not leave, as masters know it."""

    epoch: int
    capacity: int
    used: int
    heard_s: float


@dataclass(slots=True)
class MoveView:
    """What planners see: `hand_over.py` looks again before each want. `staying` may have `server`,
    whose blocks these are."""

    server: str
    now: float = 0.0
    staying: Mapping[str, Staying] = field(default_factory=dict)

    @property
    def others(self) -> set[str]:
        return self.staying.keys() - {self.server}


class MovePlanner:
    """Decides what others are to have of this server's blocks. It does nothing itself."""

    #: Placement is asked for so many copies.
    copies = 1
    #: A server that takes nothing for so long is left alone. 0: it is asked once.
    stalled_s = 10.0
    #: What one server does not take is not offered to the next one, if it has taken some.
    together = True
    #: What was fetched is forgotten here.
    forgets = False

    def due_at(self) -> float:
        """When there is something to want, if it is not saying so already."""
        return math.inf

    def wants(self, view: MoveView) -> Wants:
        """What it wants now, the most important first."""
        raise NotImplementedError

    def missing(
        self,
        entries: Mapping[BlockName, Entry],
        holders: Mapping[BlockName, set[str]],
        view: MoveView,
    ) -> list[BlockName]:
        """Which blocks of a want others are to fetch, now that it is known which of the servers
        that stay have each of them: those that no other one has."""
        return [name for name in entries if not holders[name] & view.others]

    def targets(self, placed: Sequence[str], view: MoveView) -> Sequence[str]:
        """Whom to ask, best first, of what placement or the want has named."""
        return [one for one in placed if one in view.others]

    def came(self, name: BlockName, target: str, *, moved: bool) -> None:
        """`target` has this block; `moved`: because it has just fetched it."""

    def left(self, name: BlockName, reason: str) -> None:
        """A server, or none at all, has not taken this block."""


def in_stretches(chain: Sequence[Entry]) -> Iterator[list[Entry]]:
    """A chain in pieces, each for one request; without blocks that have left meanwhile."""
    piece: list[Entry] = []
    size = 0
    for entry in chain:
        if piece and (len(piece) == STRETCH_BLOCKS or size + entry.size > STRETCH_BYTES):
            yield piece
            piece, size = [], 0
        if entry.state is State.STORED:
            piece.append(entry)
            size += entry.size
    if piece:
        yield piece
