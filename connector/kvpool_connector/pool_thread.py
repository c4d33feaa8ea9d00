"""A pool in a thread of its own, for a host that must never wait for it.

The engine's thread hands over coroutines and goes on. The thread connects by itself, and tries
again as long as there is no master; once connected, the pool's client finds its way back alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

import kvpool
from kvpool import ClientConfig, Cluster, KvpoolError, Pool

_RETRY_S: Final = 0.5
_RETRY_S_MAX: Final = 5.0


class PoolThread:
    """Runs calls to one pool in a thread; `state` is told there of changes, in a sentence."""

    def __init__(
        self, config: ClientConfig, cluster: Cluster, state: Callable[[str], None]
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._state = state
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected = threading.Event()
        self._closed = False
        self.pool: Pool | None = None
        self._thread = threading.Thread(target=self._run, name="kvpool", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the pool was reached within that time."""
        return self._connected.wait(timeout_s)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Have the thread run this; False once closed. It must not raise, except when cancelled."""
        if self._closed:
            return False
        try:
            self._loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError:  # closed in between
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Cancel all that runs and wait until it has ended, at most so long. Idempotent."""
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
        """Until a master answers, or the end."""
        wait_s = _RETRY_S
        told = False
        while True:
            try:
                self.pool = await kvpool.connect(config=self._config, cluster=self._cluster)
            except KvpoolError as error:
                if not told:
                    self._state(f"no pool yet, serving without it: {error}")
                    told = True
            else:
                self._connected.set()
                self._state(f"connected to the pool at {', '.join(self._config.masters)}")
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _RETRY_S_MAX)
