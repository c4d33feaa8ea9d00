"""What a codec is, and how one is named.

A third party writes a class with these members, declares it under `kvpool.codecs` in its own
`pyproject.toml`, and runs `codecs.checks.CODEC_CHECKS` over it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final, Protocol, TypeAlias

from kvpool import ConfigError
from kvpool_engines.comparison import LayerBytes

#: Bytes that lie in one piece.
Flat: TypeAlias = bytes | bytearray | memoryview

GROUP: Final = "kvpool.codecs"
#: Those that come with the connector.
_OWN: Final = {"lossless": "kvpool_codecs.lossless:Lossless"}


class BadEncoding(ValueError):
    """These bytes are not what this codec makes of such a block."""


class Codec(Protocol):
    """Makes a block smaller, and the same block of it again: pure, and called by several threads.

    A block is its layers, one after the other (`LayerBytes`: their sizes, types and shapes).
    """

    #: One word, and a number that is another one whenever `decode` cannot read what an older
    #: `encode` has written, or reads other numbers in it.
    name: str
    version: int
    #: How far a layer may be from what it was, as `comparison.difference`; 0: it is equal, bit by
    #: bit.
    tolerance: float

    def encode(self, block: Flat, layers: Sequence[LayerBytes]) -> bytes:
        """The block in fewer bytes, the same ones for the same block.

        Raises ValueError for a block that it cannot encode: that one is stored as it is.
        """

    def decode(self, data: Flat, layers: Sequence[LayerBytes], into: memoryview) -> None:
        """Fill `into`, which is as large as the block, with what `data` was made of.

        Raises BadEncoding for what is no encoding of such a block. Whatever `data` says, it takes
        memory in proportion to the block, and writes nowhere else.
        """


def check_size(block: Flat, layers: Sequence[LayerBytes]) -> None:
    """Raises ValueError unless the block has the size of all layers."""
    size = sum(layer.size for layer in layers)
    if len(block) != size:
        raise ValueError(f"a block of {len(block)} bytes, its layers have {size}")


def full_name(codec: Codec) -> str:
    """What engines must have equal to read each other's blocks."""
    exact = f"{codec.name}/{codec.version}"
    return f"{exact}/{codec.tolerance:g}" if codec.tolerance else exact


def codec_id(codec: Codec) -> bytes:
    """The full name in eight bytes, which stand behind every block."""
    return hashlib.blake2b(full_name(codec).encode(), digest_size=8).digest()


def codec_of(spec: str) -> Codec:
    """A codec from its name, or from `name?tolerance=0.02`, as one that loses something needs it.

    Raises ConfigError when it is not installed, lacks a package, or has no such tolerance.
    """
    name, _, setting = spec.partition("?")
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in _OWN and name not in others:
        raise ConfigError(f"no codec {name!r} is installed; installed: {sorted({*_OWN, *others})}")
    try:
        if name in _OWN:
            module, _, kind = _OWN[name].partition(":")
            make: Any = getattr(importlib.import_module(module), kind)
        else:
            make = others[name].load()
    except ImportError as error:
        raise ConfigError(f"codec {name!r} cannot be loaded: {error}") from None
    loses = "tolerance" in inspect.signature(make).parameters
    if not loses and setting:
        raise ConfigError(f"codec {name!r} loses nothing, and has no setting {setting!r}")
    codec: Codec = make(tolerance=_tolerance(name, setting)) if loses else make()
    return codec


def _tolerance(name: str, setting: str) -> float:
    """How much a codec may lose: nobody but the user can say that."""
    key, _, text = setting.partition("=")
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = 0.0
    if key != "tolerance" or not 0 < tolerance < 1:
        raise ConfigError(
            f"codec {name!r} loses something: expected the largest difference of a layer that is "
            f"stored, above 0 and below 1, as in {name}?tolerance=0.02"
        )
    return tolerance
