"""An engine's own prefix cache: blocks in its device memory, the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class HbmCache:
    """Room for `capacity` blocks. Of a prompt the tail goes before the head.

    `changed`, if there is one, receives the blocks that were added and removed: the KV events of
    an engine.
    """

    def __init__(self, capacity: int) -> None:
        self.changed: Callable[[Sequence[bytes], Sequence[bytes]], None] | None = None
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # the next victim first

    def __len__(self) -> int:
        return len(self._blocks)

    def held(self, chain: Sequence[bytes]) -> int:
        """How many blocks of the chain's beginning are here."""
        for position, digest in enumerate(chain):
            if digest not in self._blocks:
                return position
        return len(chain)

    def add(self, chain: Sequence[bytes]) -> None:
        """This prompt is computed: all of its blocks are here, as far as they fit, and used now."""
        added, removed = [], []
        for digest in reversed(chain[: self._capacity]):
            if digest not in self._blocks:
                added.append(digest)
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._capacity:
            removed.append(self._blocks.popitem(last=False)[0])
        if self.changed is not None:
            self.changed(added, removed)
