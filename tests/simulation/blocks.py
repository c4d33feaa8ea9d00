"""The blocks of a history: their keys, and the bytes that belong to each key."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import Final

from kvpool.types import Namespace

ONE: Final = Namespace("sim/one")


TWO: Final = Namespace("sim/two", 2)


#: Namespaces of tenants, in worlds with tenants.
OF_TENANTS: Final = (Namespace("@a/one"), Namespace("@b/one"), Namespace("@b/halves", 2))


#: Namespaces in which writers disagree about the bytes of a block.
CONTESTED: Final = (Namespace("sim/contested"), Namespace("sim/contested halves", 2))


#: Writers with other bytes for one key.
VERSIONS: Final = 3


#: The keys of large blocks end with these bytes.
LARGE: Final = b"more than one page"


@lru_cache(maxsize=16_384)
def value(namespace: Namespace, digest: bytes, part: int, version: int = 0) -> bytes:
    """The bytes of one part of a block: 40 to 600 bytes, or two to three pages.

    They are a function of the key, so the bytes of any block can be checked at any time. In a
    contested namespace each writer has a `version` of its own.
    """
    key = f"{namespace.name}/{part}/{version}" if version else f"{namespace.name}/{part}"
    seed = hashlib.blake2b(digest, key=key.encode()[:64]).digest()
    size = 40 + int.from_bytes(digest[:4], "little") % 561
    if digest.endswith(LARGE):
        size = 4097 + size * 13
    return (seed * (size // len(seed) + 1))[:size]


def values(namespace: Namespace, digest: bytes, part: int) -> list[bytes]:
    """Every version of the block that some writer may have written."""
    count = VERSIONS if namespace in CONTESTED else 1
    return [value(namespace, digest, part, version) for version in range(count)]


#: What all chains begin with in a world with a shared prompt.
PROMPT: Final = tuple(
    hashlib.blake2b(f"prompt/{i}".encode(), digest_size=32).digest() for i in range(3)
)


class BlockCatalog:
    """The prompts of the users: chains of blocks that share prefixes, as conversations do."""

    def __init__(self, seed: int, *, large: bool = False, shared: bool = False) -> None:
        """With `large`, about every third block is larger than a page; `shared`, every chain begins
        with the same prompt."""
        rng = random.Random(f"{seed}/library")
        sizes = random.Random(f"{seed}/sizes")
        self.chains: list[list[bytes]] = []
        for number in range(rng.randint(8, 16)):
            prefix = list(PROMPT) if shared else []
            if self.chains and rng.random() < 0.6:
                other = rng.choice(self.chains)
                prefix = other[: rng.randint(1, len(other))]
            fresh = [
                hashlib.blake2b(f"{seed}/{number}/{i}".encode(), digest_size=32).digest()
                for i in range(rng.randint(2, 14))
            ]
            if large:
                fresh = [
                    digest[: -len(LARGE)] + LARGE if sizes.random() < 0.3 else digest
                    for digest in fresh
                ]
            self.chains.append(prefix + fresh)
        self.last_written: tuple[Namespace, list[bytes]] = ONE, self.chains[0]
        self.others: tuple[Namespace, ...] = ()  # besides ONE and TWO
        self.extra: list[bytes] = []  # what write storms and the final check write
        self._contested: list[bytes] = []

    def every_key(self) -> list[tuple[Namespace, bytes]]:
        digests = dict.fromkeys(digest for chain in self.chains for digest in chain)
        return (
            [(namespace, digest) for namespace in (ONE, TWO, *self.others) for digest in digests]
            + [(ONE, digest) for digest in self.extra]
            + [(namespace, digest) for namespace in CONTESTED for digest in self._contested]
        )

    def fresh(self, count: int) -> list[bytes]:
        """A chain of `count` new blocks."""
        first = len(self.extra)
        self.extra += [
            hashlib.blake2b(f"extra/{first + i}".encode(), digest_size=16).digest() * 2
            for i in range(count)
        ]
        return self.extra[first:]

    def contested(self, count: int) -> list[bytes]:
        """A chain of `count` new blocks of a contested namespace."""
        first = len(self._contested)
        self._contested += [
            hashlib.blake2b(f"contested/{first + i}".encode(), digest_size=16).digest() * 2
            for i in range(count)
        ]
        return self._contested[first:]
