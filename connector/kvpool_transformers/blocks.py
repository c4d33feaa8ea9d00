"""How the cache of a model is cut into blocks: which bytes are where.

A block has the keys and values of `BLOCK_TOKENS` tokens, layer after layer, keys before values,
each as `[heads, tokens, dimension]`: one contiguous range of bytes, so it is one buffer of a read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvpool import UsageError

#: Tokens of a block. Small models have few bytes a token, and chats have short turns.
BLOCK_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's cache, as the model itself has made it."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def block_bytes(self) -> tuple[int, int]:
        """Bytes of a block's keys, and of its values."""
        values = self.heads * BLOCK_TOKENS * self.dtype.itemsize
        return values * self.key_size, values * self.value_size


class BlockLayout:
    """Converts between a model's cache and rows of bytes, one row for each block."""

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self.layers = tuple(layers)
        self.block_bytes = sum(sum(layer.block_bytes) for layer in self.layers)
        shapes = [f"{s.heads}x{s.key_size}+{s.value_size}{s.dtype}" for s in self.layers]
        text = " ".join(shapes).replace("torch.", ":")
        alike = len(set(shapes)) == 1
        kinds = f"{len(shapes)}x{shapes[0]}" if alike else f"{len(shapes)}:{_digest(text)}"
        #: Equal for equal bytes.
        self.name = f"{kinds.replace('torch.', ':')}/{BLOCK_TOKENS}"

    @classmethod
    def of(cls, past: Any) -> BlockLayout:
        """The layout of a cache that has tokens. Raises UsageError for one that has no blocks."""
        shapes = []
        for number, layer in enumerate(past.layers):
            keys, values = layer.keys, layer.values
            if keys is None or keys.ndim != 4 or values.ndim != 4 or keys.dtype != values.dtype:
                raise UsageError(f"layer {number} keeps no keys and values of one type: not shared")
            shapes.append(
                LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, keys.device)
            )
        return cls(shapes)

    def fits(self, past: Any) -> bool:
        """Whether a cache has this layout, for one text."""
        try:
            same = BlockLayout.of(past).layers == self.layers
        except UsageError:
            return False
        return same and all(
            layer.keys.shape[0] == 1 and layer.keys.shape[-2] == past.get_seq_length()
            for layer in past.layers
        )

    def rows(self, count: int) -> torch.Tensor:
        """Memory for so many blocks."""
        return torch.empty((count, self.block_bytes), dtype=torch.uint8)

    def take(self, past: Any, first: int, last: int) -> torch.Tensor:
        """The blocks `first` to `last` (exclusive) of a cache, copied to memory of their own."""
        rows = self.rows(last - first)
        for target, source in self._pieces(rows, past):
            cut = source[0, :, first * BLOCK_TOKENS : last * BLOCK_TOKENS]
            blocks = cut.reshape(cut.shape[0], last - first, BLOCK_TOKENS, -1)
            target.copy_(blocks.permute(1, 0, 2, 3))
        return rows

    def fill(self, past: Any, rows: torch.Tensor) -> None:
        """Append these blocks to an empty cache."""
        offset, count = 0, len(rows)
        for number, shape in enumerate(self.layers):
            both = []
            for size, width in zip(
                shape.block_bytes, (shape.key_size, shape.value_size), strict=True
            ):
                flat = rows[:, offset : offset + size].view(shape.dtype)
                blocks = flat.reshape(count, shape.heads, BLOCK_TOKENS, width)
                whole = blocks.permute(1, 0, 2, 3).reshape(1, shape.heads, -1, width)
                both.append(whole.to(shape.device))
                offset += size
            past.update(*both, number)

    def _pieces(self, rows: torch.Tensor, past: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pieces, offset = [], 0
        for shape, layer in zip(self.layers, past.layers, strict=True):
            for size, tensor in zip(shape.block_bytes, (layer.keys, layer.values), strict=True):
                flat = rows[:, offset : offset + size].view(shape.dtype)
                pieces.append(
                    (flat.view(len(rows), shape.heads, BLOCK_TOKENS, tensor.shape[-1]), tensor)
                )
                offset += size
        return pieces


def chain(ids: Sequence[int]) -> list[bytes]:
    """The keys of all full blocks: each names its tokens and all before them."""
    packed, keys, parent = np.asarray(ids, "<i8"), [], b""
    for first in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        tokens = packed[first : first + BLOCK_TOKENS].tobytes()
        parent = hashlib.sha256(parent + tokens).digest()
        keys.append(parent)
    return keys


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
