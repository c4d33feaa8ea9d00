"""The paged KV cache: its memory, and the index of which prefix each block contains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Final

import numpy as np
import torch
from torch import Tensor

from examples.mini_engine.model import Shape

#: Tokens in a block. Blocks are looked up, shared, loaded and stored as a whole.
BLOCK: Final = 16


def prefix_keys(tokens: Sequence[int]) -> list[bytes]:
    """A key for each full block. Each hashes the key before it, so it identifies a whole prefix."""
    packed, keys, parent = np.asarray(tokens, "<i8"), [], b""
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hashlib.sha256(parent + packed[first : first + BLOCK].tobytes()).digest()
        keys.append(parent)
    return keys


class Memory:
    """Keys and values: [block, layer, key or value, token, head, number].

    The block is the first dimension, so a block with all of its layers is contiguous: it is written
    to the pool without a copy, and read from the pool to where attention uses it.
    """

    def __init__(self, shape: Shape, blocks: int) -> None:
        sizes = (blocks, shape.layers, 2, BLOCK, shape.kv_heads, shape.head)
        self._data = torch.empty(sizes).zero_()  # touched now, and not by the first request
        self._bytes = self._data.flatten(1).view(torch.uint8).numpy()

    def buffer(self, block: int) -> memoryview:
        """The bytes of one block, writable."""
        return memoryview(self._bytes[block])

    def write(self, layer: int, table: Tensor, first: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values of one layer for tokens of a sequence, from position `first` on."""
        positions = torch.arange(first, first + len(key))
        block, token = table[positions // BLOCK], positions % BLOCK
        self._data[block, layer, 0, token] = key
        self._data[block, layer, 1, token] = value

    def read(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` tokens of a sequence: [length, kv_heads, head]."""
        blocks = table[: -(-length // BLOCK)]
        key, value = (self._data[blocks, layer, i].flatten(0, 1)[:length] for i in (0, 1))
        return key, value


class PrefixCache:
    """The engine's own prefix cache: how many requests use each block, and which prefix it has.

    A block without a user is idle: it keeps its content until `take` returns it.
    """

    def __init__(self, blocks: int) -> None:
        self._users = [0] * blocks
        self.idle = dict.fromkeys(range(blocks))  # in the order in which they will be taken
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix. Call `hold` on them before any `take`."""
        return [self._by_key[key] for key in takewhile(self._by_key.__contains__, keys)]

    def take(self, count: int) -> list[int]:
        """Hold `count` idle blocks, least recently used first. Their content is dropped."""
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
        """End one use of each. The last becomes idle first: a prefix is useful without its tail."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self.idle[block] = None

    def name(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Make these blocks findable by these keys, unless another block has the key already."""
        for block, key in zip(blocks, keys, strict=True):
            if self._by_key.setdefault(key, block) == block:
                self._keys[block] = key
