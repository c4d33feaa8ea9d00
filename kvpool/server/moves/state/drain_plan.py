"""Which blocks a server hands over before it leaves, and in which order (design: movers).

Pure: `hand_over.py` carries it out, and `drainer.py` says when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from typing import Final

from kvpool.operators import DrainReport, Left
from kvpool.server.moves.state.wants import (
    BlockName,
    MovePlanner,
    MoveView,
    Want,
    Wants,
    in_stretches,
    name_of,
)
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.types import MoveStatus, Namespace, ReadStatus

#: How far up its chain a block is followed, so that its head goes first. Beyond, a later block of
#: the chain may go before an earlier one, which costs hits at worst.
_ANCESTORS_MAX: Final = 1024
#: Servers that are asked when those that placement names have no room.
_OTHERS_MAX: Final = 8
#: Lines of a report; those with the fewest bytes are left out.
_LINES_MAX: Final = 64

_Find = Callable[[Namespace, int, bytes], Entry | None]


def _kind(name: BlockName) -> tuple[Namespace, int, int]:
    return name.namespace, name.part, len(name.digest)


class HandedOver:
    """Where the blocks of this server are safe, and why the others are not.

    A block is safe while the server that has taken it lives. When that server is lost, the block is
    to be handed over again. If it evicts the block meanwhile, the block is `evicted`, and is left.
    """

    def __init__(self) -> None:
        self.holders: dict[BlockName, str] = {}
        #: Those that another server has only because this one leaves, in the order of their moves.
        self.moved: dict[BlockName, None] = {}
        self.moved_blocks = 0
        self.moved_bytes = 0
        self._problems: dict[BlockName, tuple[str, int]] = {}  # reason, bytes
        self._left: dict[tuple[str, str], list[int]] = {}  # namespace and reason: blocks, bytes

    def is_safe(self, name: BlockName, living: set[str]) -> bool:
        return self.holders.get(name) in living

    def safe(self, name: BlockName, holder: str, size: int, *, moved: bool) -> None:
        """`holder` has the block; `moved`: because it has just fetched it."""
        self.holders[name] = holder
        self.gone(name)
        if moved:
            self.moved[name] = None
            self.moved_blocks += 1
            self.moved_bytes += size

    def evicted(self, name: BlockName, size: int) -> None:
        """It was moved, and no server has it any more."""
        del self.moved[name], self.holders[name]
        self.moved_blocks -= 1
        self.moved_bytes -= size
        self.left(name, "evicted there", size)

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

    def take_problems(self) -> dict[BlockName, str]:
        """Why blocks were left, by name; they are to be counted anew."""
        problems, self._problems, self._left = self._problems, {}, {}
        return {name: reason for name, (reason, _) in problems.items()}

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


class DrainPlanner(MovePlanner):
    """What a server that leaves wants others to have, and how far that is. `stays` tells blocks
    that this server brings back."""

    together = False

    def __init__(self, store: Blocks, stays: Callable[[Entry], bool]) -> None:
        self._store = store
        self._stays = stays
        self.handed = HandedOver()
        #: What the last look has found, as far as it is not safe, with its bytes.
        self.waiting: dict[BlockName, int] = {}
        self._waiting_bytes = 0
        self._total = 0
        self._plan = DrainPlan(store.peek)

    def look(self, view: MoveView) -> Iterator[None]:
        """Look for blocks that are here and nowhere safe, in steps that leave others time."""
        self._plan = DrainPlan(self._store.peek)
        self.waiting, self._waiting_bytes = {}, 0
        for step in self._unsafe(view.others):
            self._plan.add(new := [one for one in step if name_of(one) not in self.waiting])
            self.waiting.update((name_of(entry), entry.size) for entry in new)
            self._waiting_bytes += sum(entry.size for entry in new)
            yield
        self._total = max(self._total, self.handed.moved_blocks + self._plan.blocks)

    def wants(self, view: MoveView) -> Wants:
        """What the last look has found."""
        return map(Want, self._plan.stretches())

    def count_left(self, view: MoveView) -> Iterator[None]:
        """Every block of the index that is not safe is left, also what no look has found."""
        before = self.handed.take_problems()
        for step in self._unsafe(view.others):
            for entry in step:
                name = name_of(entry)
                why = "no time was left" if name in self.waiting else "not looked at"
                self.handed.left(name, before.get(name, why), entry.size)
            yield
        left = sum(blocks for _, _, blocks, _ in self.handed.problems())
        self._total = max(self._total, self.handed.moved_blocks + left)

    def missing(
        self,
        entries: Mapping[BlockName, Entry],
        holders: Mapping[BlockName, set[str]],
        view: MoveView,
    ) -> list[BlockName]:
        for name, held in holders.items():
            if held := held & view.others:
                self.came(name, min(held), moved=False)
        return super().missing(entries, holders, view)

    def targets(self, placed: Sequence[str], view: MoveView) -> Sequence[str]:
        """Also some servers that placement has not named, because it draws a few of many."""

        def used(server: str) -> int:
            return view.staying[server].used - view.staying[server].capacity

        others = sorted(sorted(view.others - set(placed)), key=used)
        return [*super().targets(placed, view), *others[:_OTHERS_MAX]]

    def came(self, name: BlockName, target: str, *, moved: bool) -> None:
        size = self.waiting.pop(name, 0)
        self._waiting_bytes -= size
        self.handed.safe(name, target, size, moved=moved)

    def left(self, name: BlockName, reason: str) -> None:
        if name in self.waiting:
            self.handed.left(name, reason, self.waiting[name])

    def report(self, state: MoveStatus | None) -> DrainReport:
        """How far it is, and what is left by reason."""
        lines = [Left(*line) for line in self.handed.problems()]
        running = state is MoveStatus.IN_PROGRESS
        return DrainReport(
            state,
            self._total,
            len(self.waiting) if running else sum(line.blocks for line in lines),
            self._waiting_bytes if running else sum(line.bytes for line in lines),
            self.handed.moved_blocks,
            self.handed.moved_bytes,
            tuple(lines[:_LINES_MAX]),
        )

    def _unsafe(self, living: set[str]) -> Iterator[list[Entry]]:
        """The blocks of each step through the index that are to be handed over."""
        for step in self._store.inventory_steps():
            found = (
                self._store.peek(stretch.namespace, stretch.part, digest)
                for stretch in step
                if stretch.status is ReadStatus.HIT
                for digest in stretch.digests
            )
            yield [
                entry
                for entry in found
                if entry is not None
                and not self._stays(entry)
                and not self.handed.is_safe(name_of(entry), living)
            ]
