"""The checksum that travels with every block: XXH3-64 over the bytes, seeded with the key.

The seed makes a checksum say "these are the bytes *of this key*": an index that returned the
wrong extent, intact, would still be caught. XXH3 runs near memory speed and the library
releases the GIL for large inputs. It guards against accidents, not against forgery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import xxhash

from kvpool.types import Buffer, Namespace

#: Hashed at once by `checksum_in_steps`, so that no turn of the loop takes long.
_STEP: Final = 1 << 20


def namespace_seed(namespace: Namespace, part: int) -> int:
    """Half of the seed: equal for all blocks of one part, so hot loops compute it once."""
    return xxhash.xxh3_64_intdigest(f"{namespace.parts}/{part}/{namespace.name}".encode())


def block_seed(namespace_part_seed: int, digest: bytes) -> int:
    """The seed for one block."""
    return xxhash.xxh3_64_intdigest(digest, namespace_part_seed)


def block_seeds(namespace: Namespace, part: int, digests: Sequence[bytes]) -> list[int]:
    """The seeds of a batch, in its order."""
    half = namespace_seed(namespace, part)
    return [xxhash.xxh3_64_intdigest(digest, half) for digest in digests]


def checksums(
    namespace: Namespace, part: int, digests: Sequence[bytes], blocks: Sequence[Sequence[Buffer]]
) -> list[int]:
    """The checksums of a batch of blocks, each of them in pieces."""
    hashers = [xxhash.xxh3_64(seed=seed) for seed in block_seeds(namespace, part, digests)]
    for digest, pieces in zip(hashers, blocks, strict=True):
        for piece in pieces:
            digest.update(piece)
    return [digest.intdigest() for digest in hashers]


def checksum(buffer: Buffer, seed: int) -> int:
    """The checksum of a whole block at once."""
    return xxhash.xxh3_64_intdigest(buffer, seed)


def hasher(seed: int) -> xxhash.xxh3_64:
    """The same checksum, fed piece by piece with `update` and read with `intdigest`."""
    return xxhash.xxh3_64(seed=seed)


async def checksum_in_steps(pieces: Sequence[memoryview], seed: int) -> int:
    """The checksum of a block, while others have their turns of the loop."""
    digest = hasher(seed)
    for piece in pieces:
        for start in range(0, len(piece), _STEP):
            digest.update(piece[start : start + _STEP])
            await asyncio.sleep(0)
    return digest.intdigest()
