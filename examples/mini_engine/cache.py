"""The paged KV cache: its memory, and the books of which block holds what for whom."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Final

import numpy as np
import torch
from torch import Tensor

from examples.mini_engine.model import Shape

#: Tokens in a block: what is found, shared, loaded and stored as a whole.
BLOCK: Final = 16


def prefix_keys(tokens: Sequence[int]) -> list[bytes]:
    """A key for each full block. It hashes the key before it, too: so it names a whole prefix."""
    packed, keys, parent = np.asarray(tokens, "<i8"), [], b""
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hashlib.sha256(parent + packed[first : first + BLOCK].tobytes()).digest()
        keys.append(parent)
    return keys


class Memory:
    """Keys and values: [block, layer, key or value, token, head, number].

    The block comes first: so it is one run of bytes with all of its layers in it, goes to the pool
    as it lies, and is read from the pool to where attention reads it.
    """

    def __init__(self, shape: Shape, blocks: int) -> None:
        sizes = (blocks, shape.layers, 2, BLOCK, shape.kv_heads, shape.head)
        self._data = torch.empty(sizes).zero_()  # touched now, and not by the first request
        self._bytes = self._data.flatten(1).view(torch.uint8).numpy()

    def buffer(self, block: int) -> memoryview:
        """The block's own bytes, to be read and to be written."""
        return memoryview(self._bytes[block])

    def write(self, layer: int, table: Tensor, first: int, key: Tensor, value: Tensor) -> None:
        """Keep what some tokens of a sequence, from position `first` on, have in one layer."""
        positions = torch.arange(first, first + len(key))
        block, token = table[positions // BLOCK], positions % BLOCK
        self._data[block, layer, 0, token] = key
        self._data[block, layer, 1, token] = value

    def read(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` tokens of a sequence: [length, kv_heads, head]."""
        blocks = table[: -(-length // BLOCK)]
        key, value = (self._data[blocks, layer, i].flatten(0, 1)[:length] for i in (0, 1))
        return key, value


class Books:
    """Who uses each block, and which prefix it holds: the engine's own prefix cache.

    A block that nobody uses is idle: it keeps what it holds until somebody takes it.
    """

    def __init__(self, blocks: int) -> None:
        self._users = [0] * blocks
        self.idle = dict.fromkeys(range(blocks))  # in the order in which they will be taken
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix that is here: hold them before you do anything else."""
        return [self._by_key[key] for key in takewhile(self._by_key.__contains__, keys)]

    def take(self, count: int) -> list[int]:
        """Hold `count` idle blocks, least recently used first. What they held is forgotten."""
        assert count <= len(self.idle), f"{count} blocks of {len(self.idle)}"
        taken = list(islice(self.idle, count))
        for block in taken:
            if (key := self._keys.pop(block, None)) is not None:
                del self._by_key[key]
        self.hold(taken)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] += 1
            self.idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """The last one becomes idle first: a prefix is of use without its tail."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self.idle[block] = None

    def name(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """What these blocks hold is found by these keys, where no other block is already."""
        for block, key in zip(blocks, keys, strict=True):
            if self._by_key.setdefault(key, block) == block:
                self._keys[block] = key
