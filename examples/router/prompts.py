"""The hashes of a prompt's blocks, as vLLM has them with --prefix-caching-hash-algo sha256_cbor.

SHA-256 of the canonical CBOR of (the hash of the block before, this one's tokens, extra keys). The
default algorithm hashes Python's pickles, which is nobody else's format. The pool's key of a block
is the last hash in it, as the connector's `digest_of`: with one hash for a block, that hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

#: As the name of an engine has it, before the tokens of a hash.
ALGORITHM: Final = "sha256_cbor"
_SEED: Final = b"vllm-none-hash"
_NULL: Final = b"\xf6"


class Rendered(msgspec.Struct):
    """What an engine's `/render` says of a request. `features` are pictures and the like, which
    have hashes that this router does not know."""

    token_ids: list[int]
    features: Any = None
    cache_salt: str | None = None


def block_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """The hashes of all whole blocks; `salt` is the request's `cache_salt`."""
    above = hashlib.sha256(_head(3, len(_SEED)) + _SEED).digest()
    found: list[bytes] = []
    for first in range(0, len(tokens) - block_size + 1, block_size):
        extra = _NULL
        if salt and not first:
            words = [word.encode() for word in ("cache_salt", salt)]
            extra = b"\x81\x82" + b"".join(_head(3, len(word)) + word for word in words)
        block = b"".join([_head(0, token) for token in tokens[first : first + block_size]])
        text = b"\x83\x58\x20" + above + _head(4, block_size) + block + extra
        above = hashlib.sha256(text).digest()
        found.append(above)
    return found


def _head(major: int, value: int) -> bytes:
    """CBOR: a kind in three bits, and a number in as few bytes as it needs."""
    kind = major << 5
    if value < 24:
        return bytes((kind | value,))
    if value < 1 << 8:
        return bytes((kind | 24, value))
    return struct.pack(">BH" if value < 1 << 16 else ">BI", kind | 25 + (value >= 1 << 16), value)
