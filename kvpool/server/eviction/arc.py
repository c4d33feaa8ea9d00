"""ARC: it balances recency and frequency by learning from its own wrong evictions.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Here it counts
bytes, because blocks differ in size, and evicts leaves only (design: eviction).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic

from kvpool.protocols.policy import B, Decision
from kvpool.server.eviction.lru import LRU

# Values of `policy_data`: the queue that a block belongs to, `..._NEW` while it was reserved and
# not yet sealed. A new block is touched twice, by both, and that is one use.
_ONCE_NEW: Final = 1
_AGAIN_NEW: Final = 2
_ONCE: Final = 3
_AGAIN: Final = 4

#: Bound on the number of ghosts for stores of many small blocks: about 100 MB of memory.
_GHOSTS_MAX: Final = 1 << 20


class ARC(Generic[B]):
    """Two queues, blocks used once and blocks used again, each least recently used first.

    The share of the first queue is learned from *ghosts*, the digests of evicted blocks: when an
    evicted block is written again, the queue that it left gets more bytes. The ghosts represent no
    more bytes than the store has. A block used once has only children used once, and both queues
    hold leaves only, so a victim is always a leaf.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: LRU[B] = LRU()
        self._again: LRU[B] = LRU()
        self._once_bytes = 0
        self._again_bytes = 0
        self.once_share = 0.0  # target for the bytes of blocks used once
        self._once_gone = _Ghosts()
        self._again_gone = _Ghosts()
        self._leaving = b""  # the last victim; its other parts follow it

    def touch(self, block: B, now: float) -> None:
        # One clock for both queues: a block keeps its time when it moves between them.
        self._once.touch(block, now)
        policy_data = block.policy_data
        if policy_data == _AGAIN:
            return
        if policy_data == _ONCE:
            block.policy_data = _AGAIN
            self._once_bytes -= block.size
            self._again_bytes += block.size
        elif policy_data:
            block.policy_data = _ONCE if policy_data == _ONCE_NEW else _AGAIN
        else:
            self._arrive(block)

    def add_candidate(self, block: B) -> None:
        (self._again if block.policy_data in (_AGAIN, _AGAIN_NEW) else self._once).add_candidate(
            block
        )

    def remove(self, block: B) -> None:
        once = block.policy_data in (_ONCE, _ONCE_NEW)
        if once:
            self._once_bytes -= block.size
        elif block.policy_data:
            self._again_bytes -= block.size
        if block.digest == self._leaving:
            (self._once_gone if once else self._again_gone).add(block.digest, block.size)
            self._trim()
        (self._once if once else self._again).remove(block)
        block.policy_data = 0

    def victim(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        once_first = self._once_bytes > self.once_share or (
            self._once_bytes == self.once_share and newcomer.digest in self._again_gone
        )
        block = self._from_once(newcomer, evictable, now) if once_first else None
        if block is None:
            block = self._again.victim(newcomer, evictable, now)
        if block is None and not once_first:
            block = self._from_once(newcomer, evictable, now)
            if block is None:  # every block of that queue was used again and has moved to the other
                block = self._again.victim(newcomer, evictable, now)
        if block is not None and not isinstance(block, Decision):
            self._leaving = block.digest
        return block

    def victim_age(self, now: float) -> float:
        return max(self._once.victim_age(now), self._again.victim_age(now))

    @property
    def ghosts(self) -> int:
        """Number of evicted blocks whose digests are kept."""
        return len(self._once_gone) + len(self._again_gone)

    def _from_once(
        self, newcomer: B, evictable: Callable[[B], bool], now: float
    ) -> B | Decision | None:
        """The oldest block used once; blocks used again since they were queued change queues."""

        def still(block: B) -> bool:
            if block.policy_data == _AGAIN:
                self._again.add_candidate(block)
                return False
            return evictable(block)

        return self._once.victim(newcomer, still, now)

    def _arrive(self, block: B) -> None:
        """A new block. If it is a ghost, the queue that it was evicted from gets more bytes."""
        once, again = self._once_gone, self._again_gone
        if block.digest in once:
            step = block.size * max(1.0, again.bytes / max(1, once.bytes))
            self.once_share = min(float(self._capacity), self.once_share + step)
            once.take(block.digest, block.size)
            block.policy_data = _AGAIN_NEW
        elif block.digest in again:
            step = block.size * max(1.0, once.bytes / max(1, again.bytes))
            self.once_share = max(0.0, self.once_share - step)
            again.take(block.digest, block.size)
            block.policy_data = _AGAIN_NEW
        else:
            block.policy_data = _ONCE_NEW
        if block.policy_data == _ONCE_NEW:
            self._once_bytes += block.size
        else:
            self._again_bytes += block.size
        self._trim()

    def _trim(self) -> None:
        """Drop old ghosts. Blocks used once and their ghosts represent at most one capacity, all
        blocks and all ghosts at most two."""
        once, again = self._once_gone, self._again_gone
        while once and (
            self._once_bytes + once.bytes > self._capacity or len(once) > _GHOSTS_MAX // 2
        ):
            once.drop_oldest()
        held = self._once_bytes + self._again_bytes
        while again and (
            held + once.bytes + again.bytes > 2 * self._capacity or len(again) > _GHOSTS_MAX // 2
        ):
            again.drop_oldest()


class _Ghosts:
    """Evicted blocks, oldest first, with the bytes of each (all parts together).

    Only 8 bytes of each digest are kept, to save memory. Two blocks with the same 8 bytes make the
    learned share slightly wrong, and nothing else.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: bytes) -> bool:
        return int.from_bytes(digest[:8], "little") in self._sizes

    def add(self, digest: bytes, size: int) -> None:
        name = int.from_bytes(digest[:8], "little")
        self._sizes[name] = self._sizes.get(name, 0) + size
        self._sizes.move_to_end(name)
        self.bytes += size

    def take(self, digest: bytes, size: int) -> None:
        """A part of the block, `size` bytes, was written again."""
        name = int.from_bytes(digest[:8], "little")
        left = self._sizes[name] - size
        self.bytes -= size + min(0, left)
        if left > 0:
            self._sizes[name] = left
        else:
            del self._sizes[name]

    def drop_oldest(self) -> None:
        self.bytes -= self._sizes.popitem(last=False)[1]
