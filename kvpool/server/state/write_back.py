"""Write-back: when blocks go to the backing tier, and which never do (design: tiers).

With write-through every block is written as soon as it is sealed. Here it waits in memory until
more than a part of the memory is *dirty*, that is, has not been written. Blocks of sessions that
end before their turn comes are never written. The price: what is dirty is lost with the process.

Pure, a part of `tiered_store.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import Final

from kvpool.errors import InvariantViolated
from kvpool.server.eviction.lazy_heap import LazyHeap
from kvpool.server.state.entry import ANCESTORS_MAX, Entry
from kvpool.server.state.front_store import FrontExtents

#: The share of the memory that may be dirty. The rest can be given to writers at once.
DIRTY_SHARE: Final = 3 / 4
#: Blocks of ended sessions that are dropped in one call: a millisecond or so.
_DROPPED_MAX: Final = 128
_STEP: Final = 1024


class WriteBack:
    """Which dirty block is written next, and how many must be now.

    The chain that was used least recently goes first, because memory would drop it first: then a
    writer finds clean blocks, and need not wait for the disk before it has filled a quarter of the
    memory. One that does fill it asks for more (`wanted_bytes`). Of a chain the head goes first, so
    the backing tier has no block without its prefix, also after kill -9 (but for chains of which
    more than ANCESTORS_MAX blocks are dirty, which go in stretches).
    """

    def __init__(self, front: FrontExtents, queue: OrderedDict[Entry, None]) -> None:
        """`queue` has the dirty blocks that are not on their way; it is kept by the caller, who
        calls `queued` for each that enters it."""
        self._front = front
        self._queue = queue
        #: (last use, block), with lazy updates, as in `eviction.lru`; and the blocks in it.
        self._by_use: LazyHeap[tuple[int, Entry]] = LazyHeap(self._is_queued)
        self._listed: set[Entry] = set()
        self._chain: list[Entry] = []  # that is being written, its next block last
        self.dirty_max = int(front.allocator.capacity * DIRTY_SHARE)
        #: For which a call found no space, since the last block was written that made room.
        self.wanted_bytes = 0
        #: The server stops: all that is dirty must be written.
        self.is_flushing = False
        front.drops_useless = True

    def due_bytes(self, moving_bytes: int) -> int:
        """How much to write now, if so much is on its way already."""
        dirty = self._front.dirty_bytes - moving_bytes
        if self.is_flushing:
            return dirty
        return min(dirty, max(dirty - self.dirty_max, self.wanted_bytes - moving_bytes))

    @property
    def is_late(self) -> bool:
        """Half of what should be clean is dirty: writers must soon wait for the backing tier."""
        return 2 * self._front.dirty_bytes > self.dirty_max + self._front.allocator.capacity

    def queued(self, entry: Entry) -> None:
        """A block has entered the queue."""
        if entry not in self._listed:  # else it was there before, and its time is put right there
            self._listed.add(entry)
            self._by_use.push((entry.last_used, entry), len(self._queue))

    def next(self) -> Entry:
        """The block of the queue, which is not empty, that is written next; it leaves it."""
        while self._chain:
            entry = self._chain.pop()
            if entry.index.blocks.get(entry.parent) in self._queue:
                self._chain.clear()  # its parent has come back since, and goes first
            elif entry in self._queue:
                del self._queue[entry]
                return entry
        if self.is_flushing:
            return self._queue.popitem(last=False)[0]
        above: Entry | None = self.least_recently_used()
        while above is not None and above in self._queue and len(self._chain) < ANCESTORS_MAX:
            self._chain.append(above)
            above = above.index.blocks.get(above.parent)
        entry = self._chain.pop()
        del self._queue[entry]
        return entry

    def least_recently_used(self) -> Entry:
        """Of the queue, which is not empty.

        Nearly: after many uses of others the order is put right in several calls.
        """
        heap, steps = self._by_use, 0
        while (first := heap.first()) is not None:
            last_used, entry = first
            if self._is_queued(first):
                if entry.last_used == last_used or steps >= _STEP:
                    return entry
                heap.pop()
                heap.push((entry.last_used, entry), len(self._queue))
            else:
                heap.pop()
            steps += 1
        raise InvariantViolated("a dirty block is in no order")

    def _is_queued(self, listed: tuple[int, Entry]) -> bool:
        """Whether this is of a block in the queue; if not, it leaves the heap."""
        queued = listed[1] in self._queue
        if not queued:
            self._listed.discard(listed[1])
        return queued

    def drop_useless(self) -> None:
        """Evict some of the blocks that no session uses again, before others are written."""
        for _ in range(_DROPPED_MAX):
            victim = self._front.policy.next_useless(self._front.evictable)
            if victim is None:
                return
            self._front.evict(victim)

    def is_useless(self, entry: Entry) -> bool:
        """No session uses the block again, and no block hangs on it: for all parts here."""
        parts = self._front.index.parts(entry)
        is_over = self._front.policy.is_over
        return not any(part.children for part in parts) and all(map(is_over, parts))

    def evict_if_useless(self, entry: Entry) -> bool:
        """Evict the block if no session uses it again and it may go now."""
        if not (self.is_useless(entry) and self._front.evictable(entry)):
            return False
        self._front.evict(entry)
        return True

    def forget(self) -> Iterator[None]:
        """The tier below is lost, and the queue is empty: drop the rest, in steps."""
        while (first := self._by_use.first()) is not None:
            self._by_use.pop()
            self._listed.discard(first[1])
            if len(self._by_use) % _DROPPED_MAX == 0:
                yield

    def flush(self) -> Iterator[None]:
        """From now on all of it is due: the chain that was used last first, heads before tails.

        In steps. Of a chain with more than ANCESTORS_MAX dirty blocks the lower stretch goes first.
        """
        runs: list[list[Entry]] = []
        queue = self._queue
        entries = list(queue)
        for first in range(0, len(entries), _STEP):
            runs.append(sorted(entries[first : first + _STEP], key=_last_used, reverse=True))
            yield
        moved: set[Entry] = set()
        for number, entry in enumerate(merge(*runs, key=_last_used, reverse=True)):
            chain: list[Entry] = []
            above: Entry | None = entry
            while above is not None and above in queue and above not in moved:
                chain.append(above)
                above = above.index.blocks.get(above.parent) if len(chain) < ANCESTORS_MAX else None
            for one in reversed(chain):
                queue.move_to_end(one)
            moved.update(chain)
            if number % _STEP == 0:
                yield
        self.is_flushing = True


def _last_used(entry: Entry) -> int:
    return entry.last_used
