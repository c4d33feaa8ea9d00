"""Codecs keep the promises of `Codec`, and the checks find those that do not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvpool.testing import ConformanceError
from kvpool_codecs.checks import CODEC_CHECKS, MakeCodec, Sample, like_kv
from kvpool_codecs.codec import BadEncoding, Codec, Flat, codec_of
from kvpool_codecs.lossless import Lossless
from kvpool_engines.comparison import LayerBytes

KV = Sample.of("like KV", like_kv(0), "bfloat16")


def unpacked(data: Flat, size: int) -> bytes:
    machine = zlib.decompressobj()
    try:
        plain = machine.decompress(data, size)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not machine.eof or machine.unused_data:
        raise ValueError("not one whole stream")
    return plain


def planes() -> Lossless:
    """With a compressor that every Python has."""
    return Lossless((lambda data: zlib.compress(data, 1), unpacked))


def zstd() -> Codec:
    pytest.importorskip("zstandard")
    return codec_of("lossless")


@pytest.mark.parametrize("check", CODEC_CHECKS.values(), ids=CODEC_CHECKS)
@pytest.mark.parametrize("make", [planes, zstd])
def test_a_codec_keeps_its_promises(make: MakeCodec, check: Callable[[MakeCodec], None]) -> None:
    check(make)


def test_of_a_number_the_exponent_gets_smaller_and_the_rest_stays() -> None:
    size = len(planes().encode(KV.block, KV.layers))
    assert 0.5 < size / len(KV.block) < 0.8


class Broken(Lossless):
    """Lossless, but for one mistake."""

    def __init__(self) -> None:
        super().__init__((lambda data: zlib.compress(data, 1), unpacked))


class TrustsTheLength(Broken):
    """A stream may become as large as it likes."""

    def __init__(self) -> None:
        Lossless.__init__(self, (lambda data: zlib.compress(data, 1), self._any))

    def _any(self, data: Flat, size: int) -> bytes:
        if data[0] != 0x78:
            return bytes(int.from_bytes(data[:3], "big") * 8)  # "declared"
        return unpacked(data, size)


class IgnoresTheRest(Broken):
    """What follows the block is not looked at."""

    def decode(self, data: Flat, layers: Sequence[LayerBytes], into: memoryview) -> None:
        try:
            super().decode(data, layers, into)
        except BadEncoding as error:
            if "more than" not in str(error):
                raise


class LeavesZeros(Broken):
    """Memory is thought to be zero."""

    def decode(self, data: Flat, layers: Sequence[LayerBytes], into: memoryview) -> None:
        found = bytearray(len(into))
        super().decode(data, layers, memoryview(found))
        for at, byte in enumerate(found):
            if byte:
                into[at] = byte


class RemembersAScale(Broken):
    """Something of a block is kept in the codec, not in the encoding."""

    _first = 0

    def encode(self, block: Flat, layers: Sequence[LayerBytes]) -> bytes:
        self._first = block[0]
        return super().encode(block, layers)

    def decode(self, data: Flat, layers: Sequence[LayerBytes], into: memoryview) -> None:
        super().decode(data, layers, into)
        into[0] = self._first


class FailsInItsWay(Broken):
    """The compressor's own error comes through."""

    def __init__(self) -> None:
        Lossless.__init__(self, (lambda data: zlib.compress(data, 1), self._raw))

    def _raw(self, data: Flat, size: int) -> bytes:
        return zlib.decompress(data)


class WritesBeyond(Broken):
    """One number too many, where there is room for it."""

    def decode(self, data: Flat, layers: Sequence[LayerBytes], into: memoryview) -> None:
        super().decode(data, layers, into)
        assert isinstance(into.obj, bytearray)
        into.obj[64 + len(into)] = 0


class LosesMore(Broken):
    """It claims to be exact, and drops the last bits."""

    def encode(self, block: Flat, layers: Sequence[LayerBytes]) -> bytes:
        if layers[0].dtype == "bfloat16":
            block = (np.frombuffer(block, np.uint16) & 0xFFFE).tobytes()
        return super().encode(block, layers)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (TrustsTheLength, "bears_any_bytes"),
        (IgnoresTheRest, "refuses_what_is_cut"),
        (LeavesZeros, "depends_on_the_block_alone"),
        (RemembersAScale, "depends_on_the_block_alone"),
        (FailsInItsWay, "bears_any_bytes"),
        (WritesBeyond, "gives_back_what_it_was_given"),
        (LosesMore, "gives_back_what_it_was_given"),
    ],
)
def test_the_checks_find_a_broken_codec(broken: type[Broken], check: str) -> None:
    with pytest.raises(ConformanceError):
        CODEC_CHECKS[check](broken)


def test_a_frame_that_declares_another_size_is_bad_before_it_is_decoded() -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    half = len(KV.block) // 2
    upper = len(bomb) | 1 << 31
    data = half.to_bytes(4, "little") + bytes(half) + upper.to_bytes(4, "little") + bomb
    with pytest.raises(BadEncoding, match="another size"):
        zstd().decode(data, KV.layers, memoryview(bytearray(len(KV.block))))
