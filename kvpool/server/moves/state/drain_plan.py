"""Which blocks a server hands over before it leaves, and in which order (design: movers).

Pure: `drainer.py` asks masters and other servers, and records here what became of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from typing import Final, NamedTuple

from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.types import Namespace

#: Blocks that one request to another server names.
STRETCH_BLOCKS: Final = 64
STRETCH_BYTES: Final = 16 << 20
#: How far up its chain a block is followed, so that its head goes first. Beyond, a later block of
#: the chain may go before an earlier one, which costs hits at worst.
_ANCESTORS_MAX: Final = 1024

_Find = Callable[[Namespace, int, bytes], Entry | None]


class BlockName(NamedTuple):
    """One part of one block."""

    namespace: Namespace
    part: int
    digest: bytes


def name_of(entry: Entry) -> BlockName:
    return BlockName(entry.index.namespace, entry.index.part, entry.digest)


def _kind(name: BlockName) -> tuple[Namespace, int, int]:
    return name.namespace, name.part, len(name.digest)


class HandedOver:
    """Where the blocks of this server are safe, and why the others are not.

    A block is safe while the server that has taken it lives: if that one evicts it later, the block
    has had room and lost it, as any other. When that server is lost, the block is to be handed over
    again.
    """

    def __init__(self) -> None:
        self.holders: dict[BlockName, str] = {}
        #: Those that another server has only because this one leaves, in the order of their moves.
        self.moved: dict[BlockName, None] = {}
        self.moved_blocks = 0
        self.moved_bytes = 0
        self._problems: dict[BlockName, tuple[str, int]] = {}  # reason, bytes
        self._problems_before: dict[BlockName, tuple[str, int]] = {}
        self._left: dict[tuple[str, str], list[int]] = {}  # namespace and reason: blocks, bytes

    def is_safe(self, name: BlockName, living: set[str]) -> bool:
        return self.holders.get(name) in living

    def is_known(self, name: BlockName, living: set[str]) -> bool:
        """It is safe, or left for a reason."""
        return name in self._problems or self.is_safe(name, living)

    def safe(self, name: BlockName, holder: str, size: int, *, moved: bool) -> None:
        """`holder` has the block; `moved`: because it has just fetched it."""
        self.holders[name] = holder
        self.gone(name)
        if moved:
            self.moved[name] = None
            self.moved_blocks += 1
            self.moved_bytes += size

    def gone(self, name: BlockName) -> None:
        """Nothing of this block is to be handed over any more."""
        reason, size = self._problems.pop(name, ("", 0))
        if size:
            self._count(name, reason, -1, -size)

    def left(self, name: BlockName, reason: str, size: int) -> None:
        """No server took the block; the reason of the last one that was asked."""
        self.gone(name)
        self._problems[name] = reason, size
        self._count(name, reason, 1, size)

    def moved_batches(self, size_max: int) -> Iterator[list[BlockName]]:
        """The moved ones, in batches of one namespace, part and size of digest."""
        batch: list[BlockName] = []
        for name in self.moved:
            if batch and (len(batch) == size_max or _kind(name) != _kind(batch[0])):
                yield batch
                batch = []
            batch.append(name)
        if batch:
            yield batch

    def begin_pass(self) -> None:
        """Every block that is not safe will be looked at again."""
        self._problems_before, self._problems = self._problems, {}
        self._left = {}

    def reason_before(self, name: BlockName) -> str:
        """Why the block was left in the pass before this one; empty if it was not."""
        return self._problems_before.get(name, ("", 0))[0]

    def problems(self) -> list[tuple[str, str, int, int]]:
        """What is left: namespace, reason, blocks, bytes; the most bytes first."""
        lines = [(*key, counts[0], counts[1]) for key, counts in self._left.items() if counts[0]]
        return sorted(lines, key=lambda line: line[3], reverse=True)

    def _count(self, name: BlockName, reason: str, blocks: int, size: int) -> None:
        counts = self._left.setdefault((name.namespace.name, reason), [0, 0])
        counts[0] += blocks
        counts[1] += size


class DrainPlan:
    """The blocks of one pass, the most valuable first: those that were used last, and before each
    block the blocks above it in its chain.

    `add` takes the blocks in small lists and sorts each; `stretches` merges them as it goes. So no
    step of a plan of millions of blocks takes long.
    """

    def __init__(self, find: _Find) -> None:
        self._find = find
        self._runs: list[list[tuple[int, int, Entry]]] = []
        self._planned: set[Entry] = set()
        self.blocks = 0
        self.bytes = 0

    def add(self, entries: Sequence[Entry]) -> None:
        """Some of the blocks that are to be handed over."""
        self._planned.update(entries)
        self._runs.append(sorted((-one.last_used, one.generation, one) for one in entries))
        self.blocks += len(entries)
        self.bytes += sum(one.size for one in entries)

    def stretches(self) -> Iterator[list[Entry]]:
        """The blocks in their order, in pieces of one chain each. Blocks that left are skipped."""
        runs, self._runs = self._runs, []
        for _, _, entry in merge(*runs):
            if entry in self._planned:
                yield from in_stretches(self._with_ancestors(entry))

    def _with_ancestors(self, entry: Entry) -> list[Entry]:
        chain: list[Entry] = []
        above: Entry | None = entry
        while above is not None and above in self._planned and len(chain) < _ANCESTORS_MAX:
            self._planned.discard(above)
            chain.append(above)
            above = self._find(above.index.namespace, above.index.part, above.parent)
        return chain[::-1]


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
