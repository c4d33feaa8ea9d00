"""An engine's own prefix cache: blocks in its device memory, the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class HbmCache:
    """Room for `capacity` blocks. Of a prompt the tail goes before the head."""

    def __init__(self, capacity: int) -> None:
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
        for digest in reversed(chain[: self._capacity]):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
