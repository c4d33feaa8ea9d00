"""A small transformer in the shape of today's large ones, with random weights.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. It has nothing to say, but takes as long
to say it as a trained one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

#: Attention in one layer, of n new tokens to themselves and all before them: (layer, query, key,
#: value), [n, heads, head] and twice [n, kv_heads, head], to [n, heads, head]. Whoever calls the
#: model says where keys and values are kept; the model itself remembers nothing.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """The sizes of a model. With these, 2,000 tokens take about a second of one core."""

    vocabulary: int = 4096
    width: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head: int = 64
    hidden: int = 1024


class Model:
    """The weights, and the way through them."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self._sizes = [shape.heads * shape.head, *2 * [shape.kv_heads * shape.head]]
        random = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=random).mul(rows**-0.5)

        self._embed = weight(shape.vocabulary, shape.width)
        self._unembed = weight(shape.width, shape.vocabulary)
        inner, width, hidden = self._sizes[0], shape.width, shape.hidden
        matrices = (width, sum(self._sizes)), (inner, width), (width, 2 * hidden), (hidden, width)
        self._layers = [[weight(*size) for size in matrices] for _ in range(shape.layers)]
        self._rates = 10_000.0 ** -torch.linspace(0, 1, shape.head // 2)

    def fingerprint(self) -> str:
        """Equal only where equal tokens give equal bits: weights, sizes, and arithmetic."""
        cpu = torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        digest = hashlib.sha256(repr((self.shape, cpu)).encode())
        for tensor in (self._embed, self._unembed, *(w for layer in self._layers for w in layer)):
            digest.update(tensor.numpy().data)
        return digest.hexdigest()[:32]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The output of the last layer for each of n tokens: [n, width]."""
        angles = positions[:, None, None] * self._rates
        turns = torch.polar(torch.ones_like(angles), angles)
        x = self._embed[tokens]
        for layer, (inward, outward, up, down) in enumerate(self._layers):
            pieces = (_norm(x) @ inward).split(self._sizes, dim=1)
            query, key, value = (piece.unflatten(1, (-1, self.shape.head)) for piece in pieces)
            heard = attend(layer, _turn(query, turns), _turn(key, turns), value)
            x = x + heard.flatten(1) @ outward
            gate, plain = (_norm(x) @ up).chunk(2, dim=1)
            x = x + (F.silu(gate) * plain) @ down
        return x

    def next_token(self, hidden: Tensor) -> int:
        """The most likely next token, from the last layer's output for one token: [1, width]."""
        return int((_norm(hidden) @ self._unembed).argmax())


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last n of m tokens attend to themselves and all earlier tokens: [n, heads, head]."""
    n, m = len(query), len(keys)
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary position embedding: pairs of numbers as complex numbers, rotated by the position."""
    pairs = torch.view_as_complex(x.unflatten(2, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(2)
