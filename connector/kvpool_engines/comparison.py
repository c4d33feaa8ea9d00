"""How different two blocks of KV are: pure arithmetic on their bytes.

Two engines that compute the same never compute the same bits: batches, kernels and the order of
sums differ. Two that do not compute the same differ by far more. (design: namespace)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: Elements that are one vector: they belong to one token and one head in every layout, and are
#: either a part of a key or a part of a value.
_VECTOR: Final = 32
#: Bytes that are decoded at once: what lies in a core's cache.
_STEP_BYTES: Final = 128 << 10
#: What rounding explains at most, by type of the elements; a larger `difference` is a mismatch.
#: Types that are not here cannot be compared.
TOLERANCES: Final[Mapping[str, float]] = {
    "float32": 0.05,
    "float16": 0.05,
    "bfloat16": 0.15,
    "float8_e4m3fn": 0.15,
    "float8_e5m2": 0.15,
}


class LayerBytes(NamedTuple):
    """The bytes of one layer in a block, and the type of the numbers in them.

    `shape` is how they lie in memory, outermost first, and `tokens` which of these dimensions
    counts tokens; without it -1.
    """

    layer: str
    size: int
    dtype: str
    shape: tuple[int, ...] = ()
    tokens: int = -1


def segments(
    layers: Sequence[LayerBytes], ours: Sequence[Any], theirs: Any
) -> Iterator[tuple[LayerBytes, list[tuple[memoryview, memoryview]]]]:
    """The bytes of each layer in both blocks, in pairs of equal length.

    `ours` are the pieces of a block, `theirs` is the block in one buffer. Raises ValueError when
    they have not the size of all layers.
    """
    pieces = [memoryview(piece).cast("B") for piece in ours]
    whole = memoryview(theirs).cast("B")
    size = sum(layer.size for layer in layers)
    if sum(len(piece) for piece in pieces) != size or len(whole) != size:
        raise ValueError(f"blocks of another size than {size} bytes")
    rest = iter(pieces)
    piece, at = memoryview(b""), 0
    for layer in layers:
        pairs, end = [], at + layer.size
        while at < end:
            if not piece:
                piece = next(rest)
            taken = min(len(piece), end - at)
            pairs.append((piece[:taken], whole[at : at + taken]))
            piece, at = piece[taken:], at + taken
        yield layer, pairs


def difference(pairs: Iterable[tuple[memoryview, memoryview]], dtype: str) -> float:
    """How far the numbers of one layer are from each other: 0 is equal, 2 is opposite.

    It is the median over short vectors of the length of their difference, relative to the mean of
    their lengths. A few large numbers do not hide the others, and a few tokens that rounding has
    sent to other experts do not make a mismatch. Raises KeyError for a type that is not in
    `TOLERANCES`.
    """
    decode = _DECODERS[dtype]
    found = []
    for ours, theirs in pairs:
        for first in range(0, len(ours), _STEP_BYTES):
            part = slice(first, first + _STEP_BYTES)
            if ours[part] == theirs[part]:
                vectors = -(-len(ours[part]) // (_VECTOR * _SIZES[dtype]))
                found.append(np.zeros(vectors, np.float32))
            else:
                found.append(_of_vectors(decode(ours[part]), decode(theirs[part])))
    return float(np.median(np.concatenate(found))) if found else 0.0


def spread(first: int, stop: int, count: int) -> list[int]:
    """At most `count` numbers from `first` to `stop` (excluded), the last and the first of them."""
    available = stop - first
    if available <= count:
        return list(range(first, stop))
    if count == 1:
        return [stop - 1]
    return [first + (available - 1) * n // (count - 1) for n in range(count)]


Floats = npt.NDArray[np.float32]


def _of_vectors(ours: Floats, theirs: Floats) -> Floats:
    if padding := -len(ours) % _VECTOR:
        ours, theirs = np.pad(ours, (0, padding)), np.pad(theirs, (0, padding))
    with np.errstate(all="ignore"):  # what is no number is handled below
        a, b = ours.reshape(-1, _VECTOR), theirs.reshape(-1, _VECTOR)
        apart = np.sqrt(np.einsum("ij,ij->i", a - b, a - b))
        lengths = [np.sqrt(np.einsum("ij,ij->i", one, one)) for one in (a, b)]
        relative = 2 * apart / (lengths[0] + lengths[1])
    # Both are zero, or one is no number: equal if they are equal.
    same = np.array((a == b) | (np.isnan(a) & np.isnan(b))).all(axis=1)
    return np.where(np.isfinite(relative), relative, np.where(same, 0, 2)).astype(np.float32)


def _bfloat16(data: memoryview) -> Floats:
    bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def _float8(exponent_bits: int, bias: int) -> Floats:
    """The 256 numbers of a type of 8 bits; codes that are no number are the largest ones."""
    mantissa_bits = 7 - exponent_bits
    table = np.zeros(256, np.float32)
    for sign, code in itertools.product((0, 1), range(128)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        if exponent:
            value = (1 + fraction) * 2.0 ** (exponent - bias)
        else:
            value = fraction * 2.0 ** (1 - bias)
        table[sign << 7 | code] = -value if sign else value
    return table


_E4M3, _E5M2 = _float8(4, 7), _float8(5, 15)
_SIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_DECODERS: Final[Mapping[str, Any]] = {
    "float32": lambda data: np.frombuffer(data, np.float32),
    "float16": lambda data: np.frombuffer(data, np.float16).astype(np.float32),
    "bfloat16": _bfloat16,
    "float8_e4m3fn": lambda data: _E4M3[np.frombuffer(data, np.uint8)],
    "float8_e5m2": lambda data: _E5M2[np.frombuffer(data, np.uint8)],
}
