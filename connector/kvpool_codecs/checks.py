"""What a codec must do, one check for each promise of `Codec`.

    @pytest.mark.parametrize("check", CODEC_CHECKS.values(), ids=CODEC_CHECKS)
    def test_mine(check):
        check(MyCodec)

A check that fails raises ConformanceError, which says what was expected and what happened instead.
Nothing here needs a test runner.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from kvpool.testing import ConformanceError
from kvpool_codecs.codec import BadEncoding, Codec, Flat
from kvpool_engines.comparison import LayerBytes, difference, segments

MakeCodec: TypeAlias = Callable[[], Codec]
Check: TypeAlias = Callable[[MakeCodec], None]

#: Of a call, beside that of the block: a few copies of it, and what libraries take.
_MEMORY_FACTOR: Final = 16
_MEMORY_BYTES: Final = 1 << 20
_TOKENS: Final = 16


class Sample(NamedTuple):
    """A block of made-up numbers, and its layers."""

    name: str
    block: bytes
    layers: tuple[LayerBytes, ...]
    finite: bool = True

    @classmethod
    def of(cls, name: str, numbers: Sequence[np.ndarray], dtype: str) -> Sample:
        """Layers of heads, tokens and channels."""
        blocks = [encoded(one, dtype) for one in numbers]
        layers = [
            LayerBytes(f"layer.{number}", len(block), dtype, one.shape, one.ndim - 2)
            for number, (block, one) in enumerate(zip(blocks, numbers, strict=True))
        ]
        finite = all(np.isfinite(one).all() for one in numbers)
        return cls(name, b"".join(blocks), tuple(layers), finite)


def encoded(numbers: np.ndarray, dtype: str) -> bytes:
    """Numbers as an engine has them in memory."""
    single = np.ascontiguousarray(numbers, np.float32)
    if dtype == "bfloat16":
        return (single.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if dtype == "float16":
        return single.astype(np.float16).tobytes()
    return single.tobytes()


def like_kv(seed: int, layers: int = 2, heads: int = 2, channels: int = 64) -> list[np.ndarray]:
    """Made-up keys and values: channels have sizes and means of their own."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(layers):
        sizes = np.exp(draw.normal(0, 1, (heads, 1, channels)))
        means = draw.normal(0, 1, (heads, 1, channels))
        found.append((draw.normal(0, 1, (heads, _TOKENS, channels)) + means) * sizes)
    return found


def samples() -> Iterator[Sample]:
    """Blocks as engines have them, and some that are at the edge."""
    for dtype in ("bfloat16", "float16", "float32"):
        yield Sample.of(f"{dtype}, like KV", like_kv(1), dtype)
    one = like_kv(2)[0]
    yield Sample.of("zeros", [np.zeros_like(one)], "bfloat16")
    yield Sample.of("one number", [one[:1, :1, :1]], "bfloat16")
    yield Sample.of("one channel a thousand times larger", [one * ([1000] + [1] * 63)], "bfloat16")
    yield Sample.of("the largest numbers", [np.sign(one) * 3e38], "bfloat16")
    yield Sample.of("not a number", [np.where(one > 2, np.nan, one)], "bfloat16")
    yield Sample.of("infinite", [np.where(one > 2, np.inf, one)], "float16")
    noise = random.Random(3).randbytes(2048)
    yield Sample("noise", noise, (LayerBytes("layer.0", 2048, "bfloat16", (16, 64), 0),), False)
    yield Sample("without a shape", noise[:998], (LayerBytes("layer.0", 998, "float16"),), False)
    packed = (LayerBytes("layer.0", 99, "uint8", (3, 33), 0), LayerBytes("layer.1", 20, "float32"))
    yield Sample("types that nobody knows, and odd sizes", noise[:119], packed, False)


def _expect(check: str, condition: bool, expected: str, happened: str) -> None:
    if not condition:
        raise ConformanceError(check, expected, happened)


def _encode(codec: Codec, sample: Sample) -> bytes | None:
    """None: it refuses such blocks, which it may."""
    try:
        return codec.encode(sample.block, sample.layers)
    except ValueError:
        return None


def _decode(codec: Codec, data: Flat, sample: Sample, before: int = 0xAA) -> bytes | None:
    """What it makes of this data, in memory that was full of `before`; None: it says that this is
    bad. Bytes around the block must stay as they are."""
    size, edge = len(sample.block), bytes([before]) * 64
    whole = bytearray(edge + bytes([before]) * size + edge)
    try:
        codec.decode(data, sample.layers, memoryview(whole)[64 : 64 + size])
    except BadEncoding:
        return None
    except Exception as error:
        happened = f"{sample.name}: {type(error).__name__}: {error}"
        raise ConformanceError("decode", "BadEncoding or a block", happened) from error
    kept = whole[:64] == edge and whole[64 + size :] == edge
    _expect("decode", kept, "bytes around the block as they were", f"{sample.name}: others")
    return bytes(whole[64 : 64 + size])


def has_a_name(make: MakeCodec) -> None:
    """The name is one word, the version a number, the tolerance a share."""
    codec = make()
    word = codec.name.isascii() and codec.name.replace("-", "").replace("_", "").isalnum()
    _expect("has_a_name", word, "a name of one word", repr(codec.name))
    _expect("has_a_name", codec.version >= 1, "a version from 1", repr(codec.version))
    share = math.isfinite(codec.tolerance) and 0 <= codec.tolerance < 1
    _expect("has_a_name", share, "a tolerance from 0 to 1", repr(codec.tolerance))


def gives_back_what_it_was_given(make: MakeCodec) -> None:
    """Equal, bit by bit, or within the tolerance; and smaller where numbers are like KV."""
    codec, check = make(), "gives_back_what_it_was_given"
    for sample in samples():
        data = _encode(codec, sample)
        like = "like KV" in sample.name
        _expect(check, data is not None or not like, "an encoding", f"{sample.name}: none")
        if data is None:
            continue
        smaller = len(data) < len(sample.block)
        happened = f"{sample.name}: {len(data)} bytes of {len(sample.block)}"
        _expect(check, smaller or not like, "fewer bytes than the block", happened)
        found = _decode(codec, data, sample)
        _expect(check, found is not None, "its own encoding decoded", f"{sample.name}: refused")
        assert found is not None
        if not codec.tolerance:
            _expect(check, found == sample.block, "the same bytes", f"{sample.name}: others")
        elif like:
            for layer, pairs in segments(sample.layers, [sample.block], found):
                apart = difference(pairs, layer.dtype)
                happened = f"{sample.name}: {apart:.4f}"
                _expect(check, apart <= codec.tolerance, f"at most {codec.tolerance}", happened)


def depends_on_the_block_alone(make: MakeCodec) -> None:
    """Not on what was there before, on other calls, or on other threads."""
    codec, check = make(), "depends_on_the_block_alone"
    known = list(samples())
    alone = [_encode(make(), sample) for sample in known]
    for sample, first in zip(known, alone, strict=True):
        if first is not None:
            one, other = (_decode(codec, first, sample, before) for before in (0xAA, 0x55))
            _expect(check, one == other, "all of `into` filled", f"{sample.name}: some of it")
            own = _decode(make(), first, sample)
            _expect(check, own == one, "the same from a new codec", f"{sample.name}: another")

    def both(sample: Sample) -> tuple[bytes | None, bytes | None]:
        data = _encode(codec, sample)
        return data, None if data is None else _decode(codec, data, sample)

    expected = [
        (data, None if data is None else _decode(make(), data, sample))
        for sample, data in zip(known, alone, strict=True)
    ]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            same = list(threads.map(both, known)) == expected
            _expect(check, same, "the same in several threads", "another encoding or block")


def refuses_what_is_cut(make: MakeCodec) -> None:
    """An encoding that lacks bytes, or has more, is bad."""
    codec, check = make(), "refuses_what_is_cut"
    for sample in samples():
        data = _encode(codec, sample)
        if data is None:
            continue
        step = max(1, len(data) // 64)
        cuts = {0, 1, len(data) - 1, *range(0, len(data), step)} - {len(data)}
        for size in (size for size in cuts if size >= 0):
            found = _decode(codec, data[:size], sample)
            happened = f"{sample.name}: {size} of {len(data)} bytes decoded"
            _expect(check, found is None, "BadEncoding", happened)
        found = _decode(codec, data + b"\0", sample)
        _expect(check, found is None, "BadEncoding", f"{sample.name}: one byte more decoded")


def bears_any_bytes(make: MakeCodec) -> None:
    """Flipped bits, other blocks' encodings, noise: a block or BadEncoding, in bounded memory."""
    codec, check, draws = make(), "bears_any_bytes", random.Random(4)
    known = [(sample, data) for sample in samples() if (data := _encode(codec, sample)) is not None]
    for sample, data in known:
        bad = [draws.randbytes(size) for size in (1, 7, 64, len(data))]
        bad += [other for _, other in known if other is not data]
        bad += [bytes([value]) * len(data) for value in (0, 0x7F, 0xFF)]
        for bit in [*range(min(128, 8 * len(data))), *draws.sample(range(8 * len(data)), 8)]:
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            bad.append(bytes(flipped))
        limit = _MEMORY_FACTOR * len(sample.block) + _MEMORY_BYTES
        tracemalloc.start()
        try:
            for one in bad:
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                _decode(codec, one, sample)
                _, peak = tracemalloc.get_traced_memory()
                happened = f"{sample.name}: {peak - before}"
                _expect(check, peak - before <= limit, f"at most {limit} bytes taken", happened)
        finally:
            tracemalloc.stop()


#: Every check, by name.
CODEC_CHECKS: Final[dict[str, Check]] = {
    check.__name__: check
    for check in (
        has_a_name,
        gives_back_what_it_was_given,
        depends_on_the_block_alone,
        refuses_what_is_cut,
        bears_any_bytes,
    )
}
