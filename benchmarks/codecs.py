"""Codecs for blocks: how much smaller, how fast, and below which rate of the link they pay.

    python -m benchmarks.codecs                  # made-up numbers that are like KV
    python -m benchmarks.codecs --model DIR      # a model's own KV, from the environment of vLLM

On one thread, in GB/s of the engine's bytes, each the best of some rounds. A codec pays where each
way (a block is written once and loaded once) is slower than `pays below`: then coding takes less
time than the bytes that it saves. Without `--model`, or with a model of random weights, ratios are
not those of a real model.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from kvpool import ConfigError
from kvpool_codecs.checks import Sample, encoded, like_kv
from kvpool_codecs.codec import Codec, Flat, codec_of
from kvpool_codecs.lossless import Lossless
from kvpool_engines.comparison import LayerBytes

_ROUNDS: Final = 7
_TOKENS: Final = 16
_PROMPT: Final = 512
#: 2 MiB in bfloat16, as a block of Llama-3.1-8B.
_LAYERS, _HEADS, _CHANNELS = 32, 8, 256


def _best(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        found = call()
        times.append(time.perf_counter() - began)
    return min(times), found


def _lz4() -> Codec | None:
    """The same planes, and a compressor that only finds repetitions."""
    try:
        import lz4.block
    except ImportError:
        return None

    def unpacked(data: Flat, size: int) -> Flat:
        plain: bytes = lz4.block.decompress(data, uncompressed_size=size)
        return plain

    codec = Lossless((lambda data: lz4.block.compress(data, store_size=False), unpacked))
    codec.name = "planes, lz4"
    return codec


def _zlib() -> Codec:
    codec = Lossless((lambda data: zlib.compress(data, 1), lambda data, _: zlib.decompress(data)))
    codec.name = "planes, zlib"
    return codec


def _codecs() -> Iterator[Codec]:
    for spec in ("lossless",):
        try:
            yield codec_of(spec)
        except ConfigError as error:
            print(error)
    yield from filter(None, (_lz4(), _zlib()))


def _of_model(directory: Path) -> Sample:
    """A block of a model's KV: as many of its prompt's blocks as make about 2 MiB."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    torch.manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, (1, _PROMPT))
    with torch.inference_mode():
        cache = model(tokens, use_cache=True).past_key_values
    layers, pieces = [], []
    for first in range(0, _PROMPT, _TOKENS):
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                piece = tensor[0, :, first : first + _TOKENS].float().numpy()
                data = encoded(piece, "bfloat16")
                layers.append(LayerBytes("", len(data), "bfloat16", piece.shape, piece.ndim - 2))
                pieces.append(data)
    return Sample(directory.name, b"".join(pieces), tuple(layers))


def _row(codec: Codec, sample: Sample) -> Sequence[str]:
    into = memoryview(bytearray(len(sample.block)))
    encode_s, data = _best(lambda: codec.encode(sample.block, sample.layers))
    decode_s, _ = _best(lambda: codec.decode(data, sample.layers, into))
    size, saved = len(sample.block), len(sample.block) - len(data)
    if not codec.tolerance:
        assert into == sample.block
    return (
        codec.name,
        sample.name,
        f"{len(data) / size:.3f}",
        f"{size / encode_s / 1e9:.2f}",
        f"{size / decode_s / 1e9:.2f}",
        f"{2 * saved / (encode_s + decode_s) / 1e9:.2f}",
    )


def main() -> None:
    """Print a row for each codec and kind of numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory with a model for transformers")
    arguments = parser.parse_args()
    samples = [_of_model(arguments.model)] if arguments.model else []
    numbers = like_kv(0, _LAYERS, _HEADS, _CHANNELS)
    flat = list(np.random.default_rng(0).normal(0, 1, (_LAYERS, *numbers[0].shape)))
    samples += [
        Sample.of("channels of their own, bfloat16", numbers, "bfloat16"),
        Sample.of("channels of their own, float16", numbers, "float16"),
        Sample.of("one normal distribution, bfloat16", flat, "bfloat16"),
    ]
    table = Table("codec", "KV", "size", "encode GB/s", "decode GB/s", "pays below GB/s")
    for sample in samples:
        for codec in _codecs():
            table.add_row(*_row(codec, sample))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
