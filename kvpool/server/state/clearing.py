"""Empty one range of a segment, for a block that fits in no hole (design: allocator).

In a full segment the free bytes lie in pieces between the blocks. A `Clearing` chooses a range that
is cheap to empty, fences it, and hands out moves: blocks of the range that must be copied to other
holes. When the range is empty, the block that it was made for gets it.

Pure, as the store is: whoever called `next_moves` copies the bytes, and then calls `move_done`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.server.state.allocator import Allocator
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.extent_state import State
from kvpool.server.state.extents import MAKING_ROOM, EmptiedRange, Extents
from kvpool.server.state.fenced_allocator import FencedAllocator
from kvpool.server.state.holdings import ConnectionHoldings
from kvpool.types import Reservation, WriteStatus

#: Holes at which a range may begin that are compared with each other.
_STARTS: Final = 16
#: Extents that are looked at for it in one call: a few milliseconds at most.
_EXTENTS_MAX: Final = 4096
#: What moving a block costs besides its bytes, in bytes that could be copied in that time.
_MOVE_COST: Final = 64 << 10
#: Free space, in sizes of the new block, with which it is refused if pins lie in every range.
_FREE_MAX: Final = 4
#: Calls of `next_moves` in a row that find only pinned blocks, after which the range is given up.
_STUCK_MAX: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A block to copy to another place of the same memory. It is pinned until `move_done`."""

    entry: Entry  # at the source
    pin: int
    target: int  # offset

    def __repr__(self) -> str:
        return f"<Move {self.entry!r} to {self.target}>"


class MovableBlocks(Protocol):
    """What a clearing uses of its store."""

    allocator: Allocator
    held: ConnectionHoldings
    clearing: EmptiedRange | None
    blocks_at: dict[int, Entry]
    move_targets: dict[int, int]

    def unpinned(self, entries: Sequence[Entry]) -> None: ...

    def relocate(self, entry: Entry, target: int) -> None: ...


class Clearing:
    """One range that is being emptied for the block `digest` of `owner`.

    | state   | fence                      | next                                               |
    |---------|----------------------------|----------------------------------------------------|
    | working | grows up to `size`         | ready: all in it is free; over: a block cannot go  |
    | ready   | `size` bytes or more, free | over: `take`, or `abandon`                         |
    | over    | lifted                     | (none; moves that are under way still end)         |
    """

    def __init__(
        self, store: MovableBlocks, owner: int, digest: bytes, size: int, start: int
    ) -> None:
        self.owner = owner
        self.digest = digest
        self.size = size
        self.over = False
        self._store = store
        self._allocator = fenced(store)
        self._waiting: deque[int] = deque()  # offsets of blocks in the range that must still move
        self._moving = 0
        self._stuck = 0
        self._allocator.open_fence(start)

    def __repr__(self) -> str:
        return f"<Clearing {self._allocator.fence} for {self.size} bytes>"

    def is_for(self, digest: bytes, size: int) -> bool:
        """The range is emptied for this block of its owner."""
        return (digest, size) == (self.digest, self.size)

    @property
    def is_ready(self) -> bool:
        """The range is empty and large enough: `take` may be called."""
        start, end = self._allocator.fence
        return not self.over and end - start >= self.size and self._allocator.fenced == end - start

    def next_moves(self, count_max: int, size_max: int) -> list[Move]:
        """The next blocks to copy, each pinned, with a free target.

        None are left when the range `is_ready`, or while those under way have not ended. Gives the
        range up when a block in it can go nowhere, or stays pinned.
        """
        moves: list[Move] = []
        self._extend()  # first: targets must not lie in the range
        taken = 0
        for _ in range(len(self._waiting)):
            if self.over or len(moves) == count_max or taken >= size_max:
                break
            offset = self._waiting.popleft()
            entry = self._store.blocks_at.get(offset)
            if entry is None and offset not in self._store.move_targets:
                continue  # it has left: its bytes are in the fence
            if entry is None or not movable(entry):
                self._waiting.append(offset)
                continue
            target = self._allocator.allocate(entry.size)
            if target is None:
                self.abandon()
                break
            pin = self._store.held.pin(MOVER, entry)
            self._store.move_targets[target] = entry.size
            moves.append(Move(entry, pin, target))
            taken += entry.size
        self._moving += len(moves)
        self._stuck = 0 if moves or self._moving else self._stuck + 1
        if self._stuck == _STUCK_MAX and not self.is_ready:
            self.abandon()
        return moves

    def move_done(self, move: Move, *, good: bool) -> None:
        """The bytes were copied, or not. If a reader has pinned the block meanwhile, it stays.

        Readers that pin it from now on get the new place; nobody can still look at the old one.
        """
        store, entry = self._store, move.entry
        self._moving -= 1
        good = good and entry.state is State.STORED and entry.pins == 1
        source = entry.offset
        store.unpinned(
            store.held.take_pins(MOVER, [move.pin])
        )  # frees the source, if the block was removed
        if good:
            store.relocate(entry, move.target)
        else:
            self._allocator.release(move.target)
            if not self.over and entry.state is State.STORED:
                self._waiting.append(source)
        del store.move_targets[move.target]

    def take(self) -> int:
        """The offset of the emptied range, allocated for the block."""
        self.over = True
        self._store.clearing = None
        return self._allocator.take_fenced(self.size)

    def abandon(self) -> None:
        """Nobody needs the range any more: what is free in it is free for all. Idempotent."""
        if not self.over:
            self.over = True
            self._store.clearing = None
            self._allocator.lift_fence()

    def _extend(self) -> None:
        """Make the range longer, by a bounded number of extents."""
        for _ in range(_EXTENTS_MAX):
            start, end = self._allocator.fence
            if self.over or end - start >= self.size:
                return
            offset = self._allocator.extend_fence(self.size - (end - start))
            if offset is None:
                self.abandon()
            elif offset >= 0:
                self._waiting.append(offset)


def let_blocks_move(extents: Extents) -> None:
    """From now on a range is emptied for a block that fits in no hole."""

    def clear(owner: int, digest: bytes, size: int) -> Reservation | None:
        start, pinned = cheapest_start(extents, size)
        if start is not None:
            extents.clearing = Clearing(extents, owner, digest, size, start)
            return MAKING_ROOM
        # Evicting does not help against pins: without this, a few pinned blocks between all others
        # would let one large write empty the pool.
        enough = pinned and extents.allocator.available >= _FREE_MAX * size
        return Reservation(WriteStatus.NO_SPACE) if enough else None

    extents.in_steps, extents.clear = True, clear


def fenced(store: MovableBlocks) -> FencedAllocator:
    """Its allocator, as only memory has it."""
    assert isinstance(store.allocator, FencedAllocator)
    return store.allocator


def movable(entry: Entry) -> bool:
    """Nobody looks at the block's bytes: the rule is that of evicting it (design: pins)."""
    return entry.state is State.STORED and not entry.pins


def cheapest_start(store: MovableBlocks, size: int) -> tuple[int | None, bool]:
    """Where to begin a range of `size` bytes so that little must be moved; None if nowhere.

    And whether pins were in the way. A block in the range must fit in a hole that lies elsewhere,
    so it is smaller than `size`.
    """
    allocator = fenced(store)
    best, best_cost, pinned = None, math.inf, False
    looked_at = 0
    holes = allocator.largest_holes(_STARTS)
    for hole in holes:
        span = cost = largest = 0
        for offset, length, is_free in allocator.walk(hole):
            looked_at += 1
            if not is_free:
                entry = store.blocks_at.get(offset)
                if entry is None or not movable(entry):
                    pinned = True
                    break
                largest = max(largest, length)
                cost += length + _MOVE_COST
            span += length
            if span < size and looked_at < _EXTENTS_MAX:
                continue
            end = hole + span
            elsewhere = (other for other in holes if not hole <= other < end)
            if cost < best_cost * min(span, size) and any(
                allocator.hole_size(other) >= largest for other in elsewhere
            ):
                best, best_cost = hole, cost / min(span, size)
            break
        if looked_at >= _EXTENTS_MAX:
            break
    return best, pinned
