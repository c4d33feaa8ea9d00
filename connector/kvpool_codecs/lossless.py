"""The bytes of numbers sorted by their place: exponents compress, mantissas do not.

A bfloat16 has most of its exponent in its upper byte, and the exponents of KV are few: zstd makes
two fifths of that byte. The lower byte is as good as random, and stays as it is.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool import ConfigError
from kvpool_codecs.codec import BadEncoding, Flat, check_size
from kvpool_engines.comparison import LayerBytes

#: Of a plane, how much is tried first; one whose beginning gets no smaller than this is not tried.
_TRIED_BYTES: Final = 16 << 10
_WORTH: Final = 0.95
_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_LENGTH: Final = struct.Struct("<I")

Bytes = npt.NDArray[np.uint8]
Pack = Callable[[Flat], bytes]
#: The bytes, and how many they must become. Raises ValueError for all else.
Unpack = Callable[[Flat, int], Flat]


def _zstd() -> tuple[Pack, Unpack]:
    """Its entropy coder: there are no repetitions to be found, and to look for them takes longer
    than all else. So the table for that is small, and short ones do not count."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            "the codec 'lossless' needs the package zstandard: pip install 'kvpool[codec]'"
        ) from None

    fast = zstandard.ZstdCompressionParameters.from_level(1, hash_log=8, min_match=7)

    # A compressor is not for several threads at once; to make one costs microseconds.
    def pack(data: Flat) -> bytes:
        packed: bytes = zstandard.ZstdCompressor(compression_params=fast).compress(data)
        return packed

    def unpack(data: Flat, size: int) -> Flat:
        try:
            # Its own limit does not count for a frame that declares a size: this does.
            if zstandard.frame_content_size(data) != size:
                raise ValueError("a frame of another size")
            plain: bytes = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        return plain

    return pack, unpack


class Lossless:
    """Byte planes, each compressed where that makes it smaller.

    Each is preceded by its length, with the highest bit set if it is compressed.
    """

    name = "lossless"
    version = 1
    tolerance = 0.0

    def __init__(self, packing: tuple[Pack, Unpack] | None = None) -> None:
        self._pack, self._unpack = packing or _zstd()

    def encode(self, block: Flat, layers: Sequence[LayerBytes]) -> bytes:
        found: list[Flat] = []
        data, at = np.frombuffer(block, np.uint8), 0
        check_size(block, layers)
        for size, width in _runs(layers):
            for first in range(width):
                plane = np.ascontiguousarray(data[at + first : at + size : width])
                packed = self._packed(plane)
                found += [_LENGTH.pack(len(packed) | (len(packed) < len(plane)) << 31), packed]
            at += size
        return b"".join(found)

    def decode(self, data: Flat, layers: Sequence[LayerBytes], into: memoryview) -> None:
        source, target = memoryview(data), np.frombuffer(into, np.uint8)
        begin, at = 0, 0
        for size, width in _runs(layers):
            for first in range(width):
                if len(source) - at < _LENGTH.size:
                    raise BadEncoding("it ends too early")
                [length] = _LENGTH.unpack_from(source, at)
                at += _LENGTH.size
                packed, length = bool(length >> 31), length & ~(1 << 31)
                piece: Flat = source[at : at + length]
                at += length
                if packed:
                    try:
                        piece = self._unpack(piece, size // width)
                    except ValueError as error:
                        raise BadEncoding(str(error)) from None
                if len(piece) != size // width:
                    raise BadEncoding("a plane of another size")
                target[begin + first : begin + size : width] = np.frombuffer(piece, np.uint8)
            begin += size
        if at != len(source):
            raise BadEncoding("more than the block")

    def _packed(self, plane: Bytes) -> Flat:
        """The plane itself, if it does not get smaller."""
        tried = plane[:_TRIED_BYTES]
        if len(tried) < len(plane) and len(self._pack(tried.data)) > len(tried) * _WORTH:
            return plane.data
        packed = self._pack(plane.data)
        return packed if len(packed) < len(plane) else plane.data


def _runs(layers: Sequence[LayerBytes]) -> Iterator[tuple[int, int]]:
    """Size of layers in a row whose numbers have the same width, and that width."""
    widths = itertools.groupby(layers, key=lambda layer: _ITEM_BYTES.get(layer.dtype, 1))
    for width, group in widths:
        size = sum(layer.size for layer in group)
        if size % width:
            raise ValueError(f"{size} bytes are no numbers of {width}")
        yield size, width
