"""A pool in a thread of its own, for an engine that must never wait for it.

The engine's thread submits coroutines and goes on. The pool's thread connects by itself, and tries
again as long as there is no master; once connected, the pool's client reconnects by itself.
(design: pool-thread)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

import kvpool
from kvpool import ClientConfig, Cluster, KvpoolError, Pool
from kvpool.backoff import Backoff

_RETRY_S: Final = 0.5
_RETRY_S_MAX: Final = 5.0


class PoolThread:
    """Runs calls to one pool in a thread of its own; `log_line` is called there."""

    def __init__(
        self, config: ClientConfig, cluster: Cluster, log_line: Callable[[str], None]
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._log_line = log_line
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected = threading.Event()
        self._closed = False
        self.pool: Pool | None = None
        self._thread = threading.Thread(target=self._run, name="kvpool", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first connection. False when there is none within that time."""
        return self._connected.wait(timeout_s)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run this coroutine in the thread; False once closed.

        It must not raise, except when it is cancelled.
        """
        if self._closed:
            return False
        try:
            self._loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError:  # closed in between
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Cancel everything that runs and wait until it has ended, at most so long. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._begin(self._connect)
            self._loop.run_forever()
            self._loop.run_until_complete(self._finish())
        finally:
            self._loop.close()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        self._loop.stop()

    async def _finish(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.pool is not None:
            await self.pool.close()
            self.pool = None

    async def _connect(self) -> None:
        """Try until a master answers, or until `close` cancels it."""
        backoff = Backoff(_RETRY_S, _RETRY_S_MAX)
        logged = False
        while True:
            try:
                self.pool = await kvpool.connect(config=self._config, cluster=self._cluster)
            except KvpoolError as error:
                if not logged:
                    self._log_line(f"no pool yet, the engine runs without it: {error}")
                    logged = True
            else:
                self._connected.set()
                self._log_line(f"connected to the pool at {', '.join(self._config.masters)}")
                return
            await asyncio.sleep(backoff.next_delay())
