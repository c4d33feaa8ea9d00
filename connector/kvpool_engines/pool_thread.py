"""A pool in a thread of its own, for an engine that must never wait for it.

The engine's thread submits coroutines and goes on. The pool's thread connects by itself, and tries
again as long as there is no master; once connected, the pool's client reconnects by itself.
(design: pool-thread)
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import kvpool
from kvpool import ClientConfig, Cluster, KvpoolError, Namespace, Pool, ReadStatus
from kvpool.backoff import Backoff
from kvpool.types import Duration

_RETRY_S: Final = 0.5
_RETRY_S_MAX: Final = 5.0
#: While connected, the masters are asked so often whether they are there; after a failure once more
#: after `_RETRY_S`, and the second failure in a row counts.
_LOOK_EVERY_S: Final = 5.0
_LOOK_TIMEOUT_S: Final = 2.0
#: How often engines ask for the list of servers, which costs a master more than that question.
_SERVERS_EVERY_S: Final = 15.0
#: How often durations are taken for metrics.
_DURATIONS_EVERY_S: Final = 1.0
#: How long an engine's start waits for the pool (without it the engine serves alone), and a first
#: request for the workers' first message.
START_WAIT_S: Final = 1.0
#: Prompts are looked up elsewhere (`Lookups`); this pool only looks whether masters are there.
_OPERATIONS: Final = frozenset({"read", "write"})
_NOWHERE: Final = Namespace("kvpool/look")


class PoolThread:
    """Runs calls to one pool in a thread of its own; `log_line` is called there.

    With `warn_line` it also looks whether the pool is there all the time, and says once when it is
    lost, why, when the reason is another one, and when it is back; and when a master answers and no
    server is left. `on_start` comes first in the thread: it makes an engine's device its own, say.
    """

    def __init__(
        self,
        config: ClientConfig,
        cluster: Cluster,
        log_line: Callable[[str], None],
        warn_line: Callable[[str], None] | None = None,
        on_start: Callable[[], object] = tuple,
    ) -> None:
        self._on_start = on_start
        self._config = config
        self._cluster = cluster
        self._log_line = log_line
        self._warn_line = warn_line
        if warn_line is not None:  # then the client need not log the same
            logging.getLogger("kvpool.client.masters").setLevel(logging.ERROR)
        self._problem = ""  # what was logged last, without numbers; empty while the pool is there
        self._loop = _new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected = threading.Event()
        self._closed = False
        self.pool: Pool | None = None
        #: The servers in this host; with `warn_line` only.
        self.near: frozenset[str] = frozenset()
        self._counted: dict[Duration, int] = {}
        self._counted_at = -_DURATIONS_EVERY_S
        self._thread = threading.Thread(target=self._run, name="kvpool", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # as many as this process may have
            self._closed = True
            self._loop.close()
            log_line(f"no pool, the engine runs without it: {error}; see `ulimit -u`")

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first connection. False when there is none within that time."""
        return not self._closed and self._connected.wait(timeout_s)

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

    def take_durations(self) -> dict[str, float]:
        """How often reads and writes took so long since the last call, as the connector's other
        durations: `"read_duration tcp 0.0012"`. Once a second; in between it is empty."""
        pool, now = self.pool, time.monotonic()
        if pool is None or now - self._counted_at < _DURATIONS_EVERY_S:
            return {}
        self._counted_at = now
        before, self._counted = self._counted, pool.durations.counts()
        return {
            f"{one.operation}_duration {one.transport} {one.seconds:.2g}": new
            for one, count in self._counted.items()
            if (new := count - before.get(one, 0)) and one.operation in _OPERATIONS
        }

    def close(self, timeout_s: float) -> None:
        """Cancel everything that runs and wait until it has ended, at most so long. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._on_start()
            self._begin(self._connect)
            self._loop.run_forever()
            self._loop.run_until_complete(self._finish())
        finally:
            self._loop.close()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._report(f"work of the pool's thread has failed: {_text(error)}")

    async def _finish(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.pool is not None:
            await self.pool.close()
            self.pool = None

    async def _connect(self) -> None:
        """Try until a master answers, or until `close` cancels it. Then look after the pool."""
        backoff = Backoff(_RETRY_S, _RETRY_S_MAX)
        while True:
            try:
                self.pool = pool = await kvpool.connect(config=self._config, cluster=self._cluster)
            except Exception as error:  # whatever it is, it may be over soon
                self._report(f"no pool yet, the engine runs without it: {_text(error)}")
            else:
                self._connected.set()
                self._problem = ""
                self._log_line(f"connected to the pool at {', '.join(self._config.masters)}")
                break
            await asyncio.sleep(backoff.next_delay())
        if self._warn_line is not None:
            self._begin(lambda: self._look_after_servers(pool))
            await self._look_after(pool)

    async def _look_after(self, pool: Pool) -> None:
        """The client reconnects by itself; this is for those who read the log."""
        failed = False
        while True:
            await asyncio.sleep(_RETRY_S if failed else _LOOK_EVERY_S)
            problem = await _problem_of(pool)
            if problem and failed:
                self._report(f"the pool is lost, the engine runs without it: {problem}")
            elif not problem and self._problem:
                self._problem = ""
                self._log_line(f"the pool at {', '.join(self._config.masters)} is back")
            failed = bool(problem)

    async def _look_after_servers(self, pool: Pool) -> None:
        """None at two looks in a row counts: a master that has just started knows none yet. The
        first look, at once, is only for those that are near."""
        looks_without, pause_s, own_host = -1, 0.0, kvpool.host_id()
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _LOOK_EVERY_S if looks_without > 0 else _SERVERS_EVERY_S
            try:
                members = await pool.members(timeout=_LOOK_TIMEOUT_S)
            except Exception:  # the other look says that
                continue
            if members:  # a master that has just started knows none, and they are where they were
                self.near = frozenset([one.server for one in members if one.host == own_host])
            masters = ", ".join(self._config.masters)
            if alive := sum(member.alive for member in members):
                if looks_without > 1:
                    self._log_line(f"the pool at {masters} has servers again: {alive}")
                looks_without = 0
                continue
            looks_without += 1
            if looks_without == 2:
                (self._warn_line or self._log_line)(
                    f"the pool at {masters} has no server left, the engine runs without it: a "
                    f"master answers and knows {len(members)} lost ones; look at their logs, or "
                    f"start one with kvpool server --masters {self._config.masters[0]}"
                )

    def _report(self, problem: str) -> None:
        """Once for each reason: a later one may be what an operator has to mend."""
        same = re.sub(r"[0-9.]+", "", problem)  # seconds and ports differ each time
        if same != self._problem:
            self._problem = same
            (self._warn_line or self._log_line)(problem)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Of uvloop, where it is installed: a small save takes a third less of the engine's CPU."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _problem_of(pool: Pool) -> str:
    """Why no master answers now; empty if one does."""
    try:
        # The cheapest question, because all engines ask it: for one block that nobody writes.
        match = await pool.match(_NOWHERE, [bytes(32)], timeout=_LOOK_TIMEOUT_S)
        if match.stopped is not ReadStatus.NO_MASTER:
            return ""
        await pool.members(timeout=_LOOK_TIMEOUT_S)  # the error says why
    except Exception as error:
        return _text(error)
    return ""


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, KvpoolError) else f"{type(error).__name__}: {error}"
