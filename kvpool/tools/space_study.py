"""What blocks of different sizes cost in one segment: `python -m kvpool.tools.space_study`.

The real store is played without bytes, with three ways to make room for a block that fits in no
hole (design: allocator):

    evict    evict in the policy's order until a hole fits
    empty    evict all blocks of the range that costs fewest bytes, with their descendants
    move     evict in order until enough is free, then move the blocks of a range elsewhere

For each workload: bytes evicted per byte written, over all writes and for the worst one; the share
of writes that evict more than twice their size and one block of the largest size; the mean use of
the memory; hits; bytes moved per byte written; the longest call, in milliseconds of CPU time.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from kvpool.protocols import Decision, ReserveRequest
from kvpool.server.state.clearing import Clearing, fenced, let_blocks_move, movable
from kvpool.server.state.entry import Entry, Index
from kvpool.server.state.extent_state import Event, State
from kvpool.server.state.extents import MAKING_ROOM, Extents
from kvpool.server.state.holdings import Owner
from kvpool.server.state.store import Store
from kvpool.types import ROOT, Namespace, ReadStatus, Reservation, WriteStatus

_KIB, _MIB = 1 << 10, 1 << 20
_NAMESPACE = Namespace("space")

T = TypeVar("T")


class ExtentsOfRanges(Extents):
    """The alternative that moves nothing: all blocks of the cheapest range are evicted."""

    def __init__(self, *arguments: Any) -> None:
        """As `Extents`."""
        super().__init__(*arguments)
        self.children: dict[bytes, list[Entry]] = {}

    def fit(self, newcomer: Entry, owner: int, now: float, last_used: int) -> int | Reservation:
        size = self.allocator.rounded(newcomer.size)
        victim: object = Decision.NOT_YET
        while victim is Decision.NOT_YET:
            victim = self.policy.victim(newcomer, self.evictable, now)
        if isinstance(victim, Entry):
            self.remove(victim, Event.EVICT, ReadStatus.EVICTED)
            offset = self.allocator.allocate(size)
            if offset is not None:
                return offset
        inside = min(self._ranges(size), key=_bytes, default=None)
        if inside is None:
            return super().fit(newcomer, owner, now, last_used)
        for entry in inside:
            self._evict_with_descendants(entry)
        offset = self.allocator.allocate(size)
        return offset if offset is not None else Reservation(WriteStatus.NO_SPACE)

    def _ranges(self, size: int) -> Iterator[list[Entry]]:
        """The blocks in each range that begins at one of the largest holes."""
        allocator = fenced(self)
        for hole in allocator.largest_holes(16):
            span = 0
            inside: list[Entry] = []
            for offset, length, is_free in allocator.walk(hole):
                inside += [] if is_free else [self.blocks_at[offset]]
                span += length
                if span >= size:
                    if all(map(movable, inside)):
                        yield inside
                    break

    def _evict_with_descendants(self, entry: Entry) -> None:
        tree = [entry]
        for one in tree:
            tree += self.children.pop(one.digest, [])
        for one in reversed(tree):
            if one.index.blocks.get(one.digest) is one and one.state is State.STORED:
                self.remove(one, Event.EVICT, ReadStatus.EVICTED)


class EmptiesRanges(Store):
    """With the blocks of each parent."""

    extents: ExtentsOfRanges
    extents_type = ExtentsOfRanges

    def _enter(self, index: Index, holder: Owner, fresh: list[Entry], now: float) -> None:
        for entry in fresh:
            self.extents.children.setdefault(entry.parent, []).append(entry)
        super()._enter(index, holder, fresh, now)


class MovesAside(Store):
    """As servers do it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        let_blocks_move(self.extents)


class PlayedStore:
    """One store under one workload, and what was counted."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = 0.0
        self.begin()

    def begin(self) -> None:
        """Forget what was counted while the store was filled."""
        self.costs: list[tuple[int, int]] = []  # bytes written and evicted, per block
        self.use: list[float] = []
        self.moved = self.hits = self.asked = 0
        self.longest_s = 0.0

    def write(self, digest: bytes, size: int, parent: bytes = ROOT) -> bool:
        store = self.store
        self.now += 0.001
        evicted = store.extents.evicted_bytes
        request = ReserveRequest(_NAMESPACE, 0, [digest], [parent], [size])
        while True:
            (answer,) = self._timed(lambda: store.reserve(1, request, self.now))
            if answer is not MAKING_ROOM:
                break
            if store.extents.clearing is not None:
                self._timed(self._move)
        if answer.status is WriteStatus.RESERVED:
            store.seal(1, answer.id, 0, self.now)
        store.index.change_log.take()
        self.costs.append((size, store.extents.evicted_bytes - evicted))
        self.use.append(store.allocator.allocated / store.allocator.capacity)
        return answer.status is WriteStatus.RESERVED

    def read(self, digests: Sequence[bytes]) -> int:
        """How many of them are here."""
        self.now += 0.001
        pins = self.store.pin(1, _NAMESPACE, 0, digests, self.now)
        for pin in pins:
            if pin.id:
                self.store.unpin(1, pin.id)
        self.store.index.change_log.take()
        return sum(bool(pin.id) for pin in pins)

    def row(self, largest: int) -> list[str]:
        """The figures, for a block of at most `largest` bytes."""
        written = sum(size for size, _ in self.costs)
        beyond = sum(evicted > 2 * size + largest for size, evicted in self.costs)
        hits = f"{self.hits / self.asked:.1%}" if self.asked else ""
        return [
            f"{sum(evicted for _, evicted in self.costs) / written:.2f}",
            f"{max(evicted / size for size, evicted in self.costs):,.1f}",
            f"{beyond / len(self.costs):.2%}",
            f"{sum(self.use) / len(self.use):.1%}",
            hits,
            f"{self.moved / written:.2f}",
            f"{self.longest_s * 1e3:,.1f}",
        ]

    def _move(self) -> None:
        clearing = self.store.extents.clearing
        assert isinstance(clearing, Clearing)
        for move in clearing.next_moves(64, _MIB):
            self.moved += move.entry.size
            clearing.move_done(move, good=True)

    def _timed(self, work: Callable[[], T]) -> T:
        began = time.thread_time()
        result = work()
        self.longest_s = max(self.longest_s, time.thread_time() - began)
        return result


def small_then_large(run: PlayedStore, small: int, large: int, writes: int) -> None:
    """A pool of small blocks, used in random order; then a few large ones."""
    digests = [_digest(number) for number in range(run.store.allocator.capacity // small)]
    for digest in digests:
        run.write(digest, small)
    random.Random(1).shuffle(digests)
    for first in range(0, len(digests), 64):
        run.read(digests[first : first + 64])
    run.begin()
    for number in range(writes):
        run.write(_digest(1 << 40 | number), large)


def alternating(run: PlayedStore, small: int, large: int) -> None:
    """One small block, one large block, and so on, until three times the capacity is written."""
    written = number = 0
    while written < 3 * run.store.allocator.capacity:
        if number == len(run.use) and run.store.extents.evicted:  # once: the store has become full
            run.begin()
        size = large if number % 2 else small
        run.write(_digest(number), size)
        number, written = number + 1, written + size


def lognormal(run: PlayedStore) -> None:
    """Independent blocks of 4 KiB to 16 MiB, half of them below 128 KiB; new and known ones."""
    rng, written, number = random.Random(3), 0, 0
    counted = False
    while written < 4 * run.store.allocator.capacity:
        if not counted and written > run.store.allocator.capacity:
            run.begin()
            counted = True
        digest = _digest(int(number * (1 - rng.random() ** 3)))
        run.asked += 1
        found = run.read([digest])
        run.hits += found
        if not found or rng.random() < 0.3:
            number += 1
            size = int(rng.lognormvariate(math.log(128 * _KIB), 1.5))
            size = min(16 * _MIB, max(4 * _KIB, size))
            run.write(digest if not found else _digest(number), size)
            written += size


def models_in_turn(run: PlayedStore, sizes: Sequence[int]) -> None:
    """Conversations of models with blocks of different sizes; each has the pool for a while."""
    rng, number = random.Random(4), 0
    chains: dict[int, list[list[bytes]]] = {size: [] for size in sizes}
    for phase in range(3 * len(sizes)):
        if phase == len(sizes):
            run.begin()
        size, written = sizes[phase % len(sizes)], 0
        while written < 0.7 * run.store.allocator.capacity:
            known = chains[size]
            if len(known) < 8 or rng.random() < 0.15:
                known.append([])
            chain = known[int(len(known) * (1 - rng.random() ** 2))] if known[-1] else known[-1]
            here = run.read(chain)
            run.asked += len(chain)
            run.hits += here
            for _ in range(rng.randint(1, 4)):
                number += 1
                chain.append(_digest(number))
            for position in range(here, len(chain)):
                run.write(chain[position], size, chain[position - 1] if position else ROOT)
                written += size
            if len(chain) > 24:
                known.remove(chain)


WORKLOADS: Sequence[tuple[str, int, Callable[[PlayedStore], None], int]] = (
    (
        "16 KiB, then 20 x 1 MiB",
        256 * _MIB,
        lambda r: small_then_large(r, 16 * _KIB, _MIB, 20),
        _MIB,
    ),
    (
        "4 KiB, then 50 x 64 KiB",
        128 * _MIB,
        lambda r: small_then_large(r, 4 * _KIB, 64 * _KIB, 50),
        64 * _KIB,
    ),
    (
        "4 KiB and 64 KiB in turn",
        32 * _MIB,
        lambda r: alternating(r, 4 * _KIB, 64 * _KIB),
        64 * _KIB,
    ),
    ("lognormal, 4 KiB to 16 MiB", 256 * _MIB, lognormal, 16 * _MIB),
    (
        "models of 16, 256, 1024 KiB",
        128 * _MIB,
        lambda r: models_in_turn(r, [16 * _KIB, 256 * _KIB, _MIB]),
        _MIB,
    ),
    (
        "models of 64 and 124 KiB",
        128 * _MIB,
        lambda r: models_in_turn(r, [64 * _KIB, 124 * _KIB]),
        124 * _KIB,
    ),
)


def main() -> None:
    """Play every workload with every store, and print one table."""
    table = Table(title="evict: until a hole fits; empty: the cheapest range; move: blocks aside")
    for column in ("workload", "way", "evicted", "worst", "beyond", "use", "hits", "moved", "ms"):
        table.add_column(column, justify="left" if column in ("workload", "way") else "right")
    for name, capacity, play, largest in WORKLOADS:
        ways = (("evict", Store), ("empty", EmptiesRanges), ("move", MovesAside))
        for way, make in ways:
            run = PlayedStore(make(capacity))
            play(run)
            table.add_row(name, way, *run.row(largest))
    Console().print(table)


def _bytes(entries: Sequence[Entry]) -> int:
    return sum(entry.size for entry in entries)


def _digest(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


if __name__ == "__main__":
    main()
