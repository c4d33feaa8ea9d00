"""LoRA adapters: which of them may share blocks, and under which keys. Pure.

vLLM hashes an adapter by its name and path, so a block's key alone does not say which weights the
adapter had. Here each key is hashed once more, with the fingerprint of the adapter's tensors as the
workers have them in memory. (design: namespace)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvpool_connector.records.messages import AdapterInfo

#: Names of adapters that are remembered; beyond it the one that was seen first is forgotten, and
#: with it whether it was replaced since.
_NAMES_MAX: Final = 65_536


class Adapter(NamedTuple):
    """The adapter of a request: the number that the engine loads it under, and its name and path,
    which vLLM's hashes contain."""

    number: int
    name: str


class KnownAdapters:
    """The adapters that the workers of one engine have loaded.

    An adapter that comes back with other tensors under the same name is refused: the engine's own
    cache may still have blocks of the former one, and cannot tell them apart. `reset` ends that.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._loaded: dict[int, dict[int, str]] = {}  # by rank and number
        self._first_seen: dict[str, tuple[str, ...]] = {}  # by name
        self._refused: set[str] = set()

    def on_info(self, info: AdapterInfo) -> None:
        """Take what one rank has loaded now."""
        self._loaded[info.rank] = dict(info.fingerprints)

    def fingerprints(self, adapter: Adapter) -> tuple[str, ...]:
        """Of the adapter's tensors on every rank; empty while one of them has not loaded it."""
        found = tuple(
            self._loaded.get(rank, {}).get(adapter.number, "") for rank in range(self._ranks)
        )
        if not all(found):
            return ()
        if self._first_seen.setdefault(adapter.name, found) != found:
            self._refused.add(adapter.name)
        if len(self._first_seen) > _NAMES_MAX:
            forgotten = next(iter(self._first_seen))
            del self._first_seen[forgotten]
            self._refused.discard(forgotten)
        return found

    def refused(self, adapter: Adapter) -> bool:
        """Whether other tensors were seen under this name."""
        return adapter.name in self._refused

    @property
    def in_use(self) -> frozenset[tuple[str, ...]]:
        """Fingerprints that keys are made of."""
        return frozenset(self._first_seen.values())

    def reset(self) -> None:
        """The engine's own cache is empty: each name may stand for other tensors from here on."""
        self._first_seen.clear()
        self._refused.clear()


class SaltedHashes(Sequence[bytes]):
    """The engine's hashes of a request's blocks, hashed once more with an adapter's fingerprint.

    A view: it grows with them.
    """

    def __init__(self, hashes: Sequence[bytes], fingerprints: tuple[str, ...]) -> None:
        self._hashes = hashes
        self._fingerprints = fingerprints

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [salted(one, self._fingerprints) for one in self._hashes[index]]
        return salted(self._hashes[index], self._fingerprints)

    def __iter__(self) -> Iterator[bytes]:
        return (salted(one, self._fingerprints) for one in self._hashes)


def salted(digest: bytes, fingerprints: tuple[str, ...]) -> bytes:
    """The key of a block that was computed with this adapter; as long as the engine's hash.

    Ranks with the same tensors count once: the key does not depend on their number.
    """
    salt = "+".join(dict.fromkeys(fingerprints))
    return hashlib.sha256(salt.encode() + digest).digest()[: len(digest)]
