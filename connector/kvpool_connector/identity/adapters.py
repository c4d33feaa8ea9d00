"""LoRA adapters: which of them may share blocks, and under which keys. Pure.

vLLM hashes an adapter by its name and path, which say nothing of its weights, and differ between
hosts. Here blocks are hashed anew, with the fingerprint of the adapter's tensors as the workers
have them in memory. (design: namespace)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvpool_connector.records.messages import AdapterInfo

#: Names of adapters that are remembered; beyond it the one that was seen first is forgotten, and
#: with it whether it was replaced since. As many keys; beyond it what waits for a save is dropped.
_NAMES_MAX: Final = 65_536


class Adapter(NamedTuple):
    """The adapter of a request: the number that the engine loads it under, and its name and path,
    which vLLM's hashes contain. `contents(first)`: what else they contain, from a block on."""

    number: int
    name: str
    contents: Callable[[int], Iterator[bytes]]


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
        #: The engine's own hash of a block, by its key in the pool.
        self.engine_hashes: dict[bytes, bytes] = {}

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

    def reset(self) -> None:
        """The engine's own cache is empty: each name may stand for other tensors from here on."""
        for known in (self._first_seen, self._refused, self.engine_hashes):
            known.clear()


class AdapterKeys(Sequence[bytes]):
    """The keys of a request's blocks: as many and as long as the engine's own hashes, with which
    they grow. Ranks with the same tensors count once: keys do not depend on their number."""

    def __init__(self, hashes: Sequence[bytes], adapter: Adapter, known: KnownAdapters) -> None:
        self._hashes, self._contents = hashes, adapter.contents
        salt = "+".join(dict.fromkeys(known.fingerprints(adapter)))
        self._salt = hashlib.sha256(salt.encode()).digest()
        self._engine_hashes = known.engine_hashes
        self._keys: list[bytes] = []
        self._last = b""  # the engine's hash of the last block that has a key

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: Any) -> Any:
        keys, hashes = self._keys, self._hashes
        if keys and (len(hashes) < len(keys) or hashes[len(keys) - 1] != self._last):
            keys.clear()  # a session has taken back the end of its prompt
        if len(keys) < len(hashes):
            if len(self._engine_hashes) > _NAMES_MAX:
                self._engine_hashes.clear()
            key, first = keys[-1] if keys else self._salt, len(keys)
            for own, content in zip(hashes[first:], self._contents(first), strict=False):
                key = hashlib.sha256(key + content).digest()[: len(own)]
                keys.append(key)
                self._engine_hashes[key] = own
            self._last = hashes[-1]
        return keys[index]
