"""A pool for engines whose hooks call and wait, such as transformers.

Whatever happens to the pool, a call returns by its timeout, with a result that means "nothing".
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import kvpool.sync
from kvpool import ClientConfig, Cluster, KvpoolError, ReadStatus, Unavailable, WriteStatus
from kvpool.backoff import Backoff

T = TypeVar("T")

#: Seconds without calls after a failure, so that not every request of the engine waits for it.
PAUSE_S: Final = 5.0
#: Seconds between attempts to connect, at first and at most.
_RETRY_S: Final = 0.5
_RETRY_S_MAX: Final = 5.0
#: Results of single blocks that mean a failure of the pool.
_POOL_FAILED: Final = frozenset({"NO_MASTER", "SERVER_LOST", "DEADLINE"})


class EnginePool:
    """Calls to a pool, from any thread, of which none raises and none lasts longer than asked.

    | state | calls | next |
    |---|---|---|
    | connecting | return `nothing` at once | open, when a master answers |
    | open | ask the pool | paused, when the pool fails |
    | paused | return `nothing` at once | open, `pause_s` later |
    | closed | return `nothing` at once | |

    The log has one warning for each reason, and a line when calls succeed again. An open
    `kvpool.sync.Pool` stays its owner's: `close` does not close it. `counters` counts `calls`,
    `failed_calls`, and `paused_calls`, which did not ask the pool.
    """

    def __init__(
        self,
        pool: kvpool.sync.Pool | ClientConfig | None,
        *,
        cluster: Cluster | None = None,
        log: logging.Logger,
        start_wait_s: float = 1.0,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._log = log
        self._pause_s = pause_s
        self._resume_at = 0.0
        self._problem = ""
        self._closing = threading.Event()
        self._pool = pool if isinstance(pool, kvpool.sync.Pool) else None
        self._owned: kvpool.sync.Pool | None = None
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        if isinstance(pool, ClientConfig):
            connected = threading.Event()
            self._thread = threading.Thread(
                target=self._connect,
                args=(pool, cluster or Cluster(), connected),
                name="kvpool-connect",
                daemon=True,
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # as many as this process may have
                self._thread = None
                self._warn(f"no pool, the engine runs without it: {error}; see `ulimit -u`")
            else:
                connected.wait(start_wait_s)

    @property
    def is_ready(self) -> bool:
        """Whether a call would ask the pool now."""
        return self._pool is not None and time.monotonic() >= self._resume_at

    def call(self, work: Callable[[kvpool.sync.Pool], T], nothing: T) -> T:
        """What `work` returns, or `nothing`. `work` gives each call of the pool a timeout."""
        pool = self._pool
        if pool is None or time.monotonic() < self._resume_at:
            self.counters["paused_calls"] += pool is not None
            return nothing
        self.counters["calls"] += 1
        try:
            return work(pool)
        except Unavailable as error:
            self.counters["failed_calls"] += 1
            self.pause(str(error))
        except KvpoolError as error:  # for example a stored block that is larger than the buffer
            self.counters["failed_calls"] += 1
            self._warn(str(error))
        except Exception as error:  # a mistake of ours is no reason to end the engine
            self.counters["failed_calls"] += 1
            self.pause(f"{type(error).__name__}: {error}")
        return nothing

    def look_at(self, results: Iterable[ReadStatus | WriteStatus]) -> None:
        """Pause if one of these results means that the pool fails."""
        for status in results:
            if status.name in _POOL_FAILED:
                self.pause(status.label)
                return
        if self._problem:
            self._problem = ""
            self._log.info("kvpool: the pool is used again")

    def pause(self, why: str) -> None:
        """Leave the pool alone for `pause_s`."""
        self._resume_at = time.monotonic() + self._pause_s
        self._warn(f"the pool is left alone for {self._pause_s:g} s: {why}")

    def close(self) -> None:
        """End what runs and close the connection, unless it is somebody else's. Idempotent."""
        self._closing.set()
        with self._lock:
            self._pool, owned, self._owned = None, self._owned, None
        if owned is not None:
            owned.close()
        if self._thread is not None:
            self._thread.join(5.0)

    def _connect(self, config: ClientConfig, cluster: Cluster, connected: threading.Event) -> None:
        backoff = Backoff(_RETRY_S, _RETRY_S_MAX)
        while not self._closing.is_set():
            try:
                pool = kvpool.sync.connect(config=config, cluster=cluster)
            except Exception as error:  # whatever it is, it may be over soon
                self._warn(f"no pool yet, the engine runs without it: {error}")
                connected.set()  # who waits for the start has waited for one attempt
                self._closing.wait(backoff.next_delay())
                continue
            with self._lock:
                if not self._closing.is_set():
                    self._pool = self._owned = pool
            if self._closing.is_set():
                pool.close()  # it may take its time, and `close` waits for the lock
                return
            self._problem = ""
            self._log.info("kvpool: connected to the pool at %s", ", ".join(config.masters))
            connected.set()
            return

    def _warn(self, problem: str) -> None:
        same = re.sub(r"[0-9.]+", "", problem)  # seconds and ports differ each time
        if same != self._problem:
            self._problem = same
            self._log.warning("kvpool: %s", problem)
