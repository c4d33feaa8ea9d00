"""An engine's own prefix cache: blocks in its device memory, the least recently used go first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from itertools import islice


def length_held(chain: Sequence[bytes], blocks: Container[bytes]) -> int:
    """How many blocks of the chain's beginning are among `blocks`, of which no block is without
    those before it in its chain. In a few looks, not one for each block."""
    return bisect_left(range(len(chain)), True, key=lambda position: chain[position] not in blocks)


class HbmCache:
    """Room for `capacity` blocks. Of a prompt the tail goes before the head.

    `changed`, if there is one, receives the blocks that were added and removed: the KV events of
    an engine.
    """

    def __init__(self, capacity: int) -> None:
        self.changed: Callable[[Sequence[bytes], Sequence[bytes]], None] | None = None
        self._capacity = capacity
        self._blocks: dict[bytes, None] = {}  # the next victim first

    def __len__(self) -> int:
        return len(self._blocks)

    def held(self, chain: Sequence[bytes]) -> int:
        """How many blocks of the chain's beginning are here."""
        return length_held(chain, self._blocks)

    def add(self, chain: Sequence[bytes]) -> None:
        """This prompt is computed: all of its blocks are here, as far as they fit, and used now."""
        blocks, held = self._blocks, self.held(chain)
        for digest in chain[:held]:
            del blocks[digest]
        blocks.update(dict.fromkeys(reversed(chain[: self._capacity])))
        removed = list(islice(blocks, max(0, len(blocks) - self._capacity)))
        for digest in removed:
            del blocks[digest]
        if self.changed is not None:
            self.changed(chain[held : self._capacity], removed)
