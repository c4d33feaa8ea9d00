"""The connector: this engine's side of a kvpool, on the public API alone.

docs/write-a-connector.md explains it. A request waits for `load`, but no longer than computing
would take; `save` runs in the background. Neither raises: without a pool the engine computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias

import kvpool.sync
from kvpool import ClientConfig, KvpoolError, Namespace, ReadStatus, Unavailable

#: Seconds that the start of an engine waits for the pool, at most.
CONNECT_S: Final = 1.0
#: Seconds that a request waits for the pool, at most, even if computing would take longer.
LOAD_S: Final = 0.25
#: If computing takes fewer seconds than this, the pool is not asked: asking alone takes about 1 ms.
WORTH_S: Final = 0.01
#: Seconds without requests to the pool after a failure, so that not every prompt waits for it.
PAUSE_S: Final = 5.0
#: Seconds that a save holds its blocks, at most.
SAVE_S: Final = 2.0
#: Saves that may be pending; further prompts are not saved.
SAVES_MAX: Final = 4
#: Results of reads and writes that mean a failure of the pool and not of a single block.
_TROUBLE: Final = frozenset({"NO_MASTER", "SERVER_LOST", "DEADLINE"})

Keys: TypeAlias = Sequence[bytes]
Buffers: TypeAlias = Sequence[memoryview]
log = logging.getLogger(__name__)


class Connector:
    """Loads prefixes from a pool and saves them there. Belongs to the engine's thread."""

    def __init__(self, master: str, namespace: Namespace) -> None:
        self._config = ClientConfig(masters=[master], timeout_s=CONNECT_S, attempt_s=LOAD_S)
        self._namespace = namespace
        self._load_s = 0.0  # recent seconds per loaded block; 0 before the first load
        self._resume_at = 0.0
        self._saves: list[Future[None]] = []
        self._saver = ThreadPoolExecutor(1, "saver")
        self._pool: kvpool.sync.Pool | None = None
        self._connect()

    def load(self, keys: Keys, buffers: Buffers, compute_s: float) -> int:
        """Fill the first buffers with the longest prefix that the pool has; the number filled.

        It waits no longer than computing would take, `compute_s` seconds for each block.
        """
        if self._pool is None or time.monotonic() < self._resume_at:
            return 0
        if self._load_s > compute_s or len(keys) * compute_s < WORTH_S:
            self._load_s *= 0.9  # it may be faster again: so it is asked again, now and then
            return 0
        try:
            return self._fetch(self._pool, keys, buffers, compute_s)
        except Unavailable as error:
            self._pause(str(error))
        except KvpoolError as error:  # for example a stored block that is larger than our buffer
            log.warning("a prefix was not loaded: %s", error)
        return 0

    def save(self, keys: Keys, buffers: Buffers) -> Future[None] | None:
        """Store the blocks of a prompt, from its first on, in the background.

        Do not write to the buffers before the future is done. None when nothing is saved now.
        """
        self._saves = [save for save in self._saves if not save.done()]
        if len(self._saves) >= SAVES_MAX or time.monotonic() < self._resume_at:
            return None
        self._saves.append(self._saver.submit(self._store, keys, buffers))
        return self._saves[-1]

    def close(self) -> None:
        """Wait for the running save, drop those that wait, close the pool."""
        self._saver.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def _fetch(self, pool: kvpool.sync.Pool, keys: Keys, buffers: Buffers, compute_s: float) -> int:
        began = time.monotonic()
        budget_s = min(LOAD_S, len(keys) * compute_s)
        match = pool.match(self._namespace, keys, timeout=budget_s)
        if match.stopped is ReadStatus.NO_MASTER:
            self._pause(match.stopped.label)
        found = match.length
        budget_s = min(budget_s, found * compute_s) - (time.monotonic() - began)
        if budget_s <= 0:
            if found:
                self._pause("it took too long to look")
            return 0
        results = pool.read(
            self._namespace, keys[:found], buffers[:found], match=match, timeout=budget_s
        )
        self._load_s += ((time.monotonic() - began) / found - self._load_s) / 2
        for loaded, (result, buffer) in enumerate(zip(results, buffers, strict=False)):
            if not result.status.hit or result.size != len(buffer):
                if result.status.name in _TROUBLE:
                    self._pause(result.status.label)
                return loaded  # a prefix ends at its first miss
        return found

    def _store(self, keys: Keys, buffers: Buffers) -> None:
        try:
            if self._pool is None:
                self._connect()
            if self._pool is not None:
                statuses = self._pool.write(self._namespace, keys, buffers, timeout=SAVE_S)
                if trouble := [s.label for s in statuses if s.name in _TROUBLE]:
                    self._pause(trouble[0])
        except KvpoolError as error:
            self._pause(str(error))

    def _connect(self) -> None:
        """At the start or in the thread that saves: no request waits for it."""
        try:
            self._pool = kvpool.sync.connect(config=self._config)
        except KvpoolError as error:
            self._pause(str(error))

    def _pause(self, why: str) -> None:
        log.warning("the pool is left alone for %s s: %s", PAUSE_S, why)
        self._resume_at = time.monotonic() + PAUSE_S
