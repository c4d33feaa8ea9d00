"""Moves blocks inside the memory that clients use, to make room for large ones.

`state.clearing` decides which blocks go where; this file copies the bytes (design: allocator).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from kvpool.protocols import Addressable
from kvpool.server.context import RoomMaker
from kvpool.server.extension import ServerExtension, ServerParts
from kvpool.server.state.clearing import Clearing, Move, let_blocks_move
from kvpool.server.state.store import Store
from kvpool.threads import in_thread
from kvpool.types import ServerStats

#: Moved in one turn of the loop, at most.
_BLOCKS_MAX: Final = 64
_INLINE_MAX: Final = 1 << 20
#: A block that a reader has pinned is tried again after so long.
_PINNED_WAIT_S: Final = 0.001


class Compaction(ServerExtension):
    """Large blocks get room between small ones."""

    def __init__(self, parts: ServerParts) -> None:
        context = parts.context
        self._compactor = Compactor(context.store.front, context.memory, context.on_change)
        context.room_maker = self._compactor

    def completed(self, stats: ServerStats) -> ServerStats:
        moved = self._compactor.moved_blocks, self._compactor.moved_bytes
        counters = dict(zip(("moved_blocks", "moved_bytes"), moved, strict=True))
        return msgspec.structs.replace(stats, counters={**stats.counters, **counters})


class Compactor(RoomMaker):
    """Empties the range of a store's `clearing`; the call that needs the range does the work.

    A block is pinned and its target allocated while its bytes are copied, so neither is used for
    anything else. Readers see the block at its old place until the copy is complete, and if one of
    them holds it then, it stays there. So no reader, also none that has the memory mapped, can see
    a block half moved (design: pins).
    """

    def __init__(self, store: Store, memory: Addressable, on_change: Callable[[], None]) -> None:
        self._store = store
        self._memory = memory
        self._on_change = on_change
        #: Larger blocks are copied by a thread.
        self.inline_max = _INLINE_MAX
        self.moved_blocks = 0
        self.moved_bytes = 0
        let_blocks_move(store.extents)

    async def make_room(self, owner: int, deadline: float) -> bool:
        """As `RoomMaker`; False when the range is being emptied for another call."""
        clearing = self._store.extents.clearing
        if clearing is None:
            return await super().make_room(owner, deadline)
        if clearing.owner != owner:
            return False
        assert isinstance(clearing, Clearing)
        while not (clearing.over or clearing.is_ready) and _now() < deadline:
            await self._step(clearing)
        return True

    def stop(self, owner: int) -> None:
        """The next one that waits for its turn begins."""
        clearing = self._store.extents.clearing
        if clearing is not None and clearing.owner == owner:
            clearing.abandon()
            self._on_change()

    async def _step(self, clearing: Clearing) -> None:
        moves = deque(clearing.next_moves(_BLOCKS_MAX, _INLINE_MAX))
        if not moves:
            await asyncio.sleep(0 if clearing.over or clearing.is_ready else _PINNED_WAIT_S)
            return
        try:
            while moves:
                await self._copy(moves[0])
                clearing.move_done(moves.popleft(), good=True)
        finally:
            for move in moves:
                clearing.move_done(move, good=False)
        await asyncio.sleep(0)

    async def _copy(self, move: Move) -> None:
        """When it returns or raises, nothing is copied any more."""
        size = move.entry.size
        self.moved_blocks += 1
        self.moved_bytes += size
        source = self._memory.view(move.entry.offset, size)
        target = self._memory.view(move.target, size)
        if size <= self.inline_max:
            target[:] = source
            return
        copying = in_thread(_copy, target, source)
        try:
            await asyncio.shield(copying)
        finally:
            # Cancelled: the thread still writes into the target, for some milliseconds.
            while not copying.done():
                try:
                    await asyncio.wait([copying])
                except asyncio.CancelledError:
                    continue


def _copy(target: memoryview, source: memoryview) -> None:
    """numpy's copy releases the GIL, a memoryview's does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _now() -> float:
    return asyncio.get_running_loop().time()
