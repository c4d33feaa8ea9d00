"""The adapter: LMCache's controllers submit tasks and poll event descriptors, the pool answers.

Bytes travel between LMCache's own memory and the pool, without a buffer in between.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvpool import ROOT, KvpoolError, Namespace, Pool, Unavailable, WriteStatus
from kvpool_engines.adapter_settings import AdapterSettings, check_release
from kvpool_engines.pool_thread import PoolThread
from kvpool_lmcache.object_names import ObjectNames, digest

#: The release whose interface this is. Others may have another one.
_SUPPORTED: Final = "0.5.6"
#: Results of writes after which the pool has the block, or will have it, or has better ones.
_STORED: Final = frozenset({"STORED", "ALREADY_STORED", "IN_PROGRESS", "BYPASSED"})
#: Results of single blocks that mean that the pool fails.
_POOL_FAILED: Final = frozenset({"NO_MASTER", "SERVER_LOST", "DEADLINE"})
_CLOSE_S: Final = 10.0
#: Results that wait to be asked for. Those of requests that have ended are never asked for.
_RESULTS_MAX: Final = 16_384
#: Kinds of tasks, and what becomes of their objects.
_DONE: Final = {"lookups": "found", "loads": "loaded", "stores": "stored"}
_COUNTERS: Final = (
    *(name for kind in _DONE for name in (kind, f"{kind}_failed", f"objects_{_DONE[kind]}")),
    "paused_tasks",
)

log = logging.getLogger(__name__)


class Task(NamedTuple):
    """What LMCache has submitted, and what is to be done with the positions that succeed."""

    kind: str
    fd: int
    named: Mapping[Namespace, list[int]]
    #: One call to the pool, for the positions of one namespace. Raises KvpoolError.
    work: Callable[[Pool, Namespace, list[int]], Coroutine[Any, Any, list[int]]]
    #: Leaves the result where LMCache asks for it by the task's number, under the lock.
    keep: Callable[[int, list[int]], None]
    #: Tells LMCache's listeners.
    announce: Callable[[list[int]], None] | None = None


class KVPoolL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """LMCache's objects in a pool: one block for each, named by LMCache's key.

    No method raises or waits because of the pool. Without it lookups and loads find nothing, stores
    fail, and LMCache computes with what it has; the pool is used again when it is back. Nothing is
    locked: an object that is evicted between its lookup and its load is a miss of the load. Raises
    ConfigError for wrong `adapter_params` and for another release of LMCache.
    """

    def __init__(self, adapter_params: Mapping[str, object], **_: object) -> None:
        check_release("LMCache", importlib.metadata.version("lmcache"), _SUPPORTED, log)
        self._settings = settings = AdapterSettings.parse(adapter_params, "adapter_params")
        super().__init__()
        self._names = ObjectNames(settings.tenant, settings.revision)
        self._store_fd, self._lookup_fd, self._load_fd = (_event_fd() for _ in range(3))
        self._lock = threading.Lock()
        self._closed = False
        self._task = 0
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._resume_at = 0.0
        #: Tasks, those of them that failed, and the objects that were found, loaded and stored.
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._pool = PoolThread(settings.client(), settings.member(), log.info, log.warning)
        self._pool.wait(settings.start_wait_s)

    # --- what LMCache calls --------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        return self._load_fd

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects. Their memory is read until the task is done.

        As LMCache's own adapters do, it counts bytes and announces keys that are new in the pool.
        """
        views = [memoryview(one.byte_array).cast("B") for one in objects]
        named = self._named(self._names.of_objects, keys, objects)
        new: list[int] = []
        work = partial(self._write, keys, views, new)

        def announce(_: list[int]) -> None:
            if new:
                sizes = [views[position].nbytes for position in new]
                self._notify_keys_stored([keys[position] for position in new], sizes)

        def keep(task: int, stored: list[int]) -> None:
            size = sum(views[position].nbytes for position in new)
            self._stored[task] = L2StoreResult(len(stored) == len(keys), size)

        return self._submit(Task("stores", self._store_fd, named, work, keep, announce))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Which of these objects the pool has: one message for each model, rank and salt."""
        named = self._named(self._names.of_lookup, keys, group_layout_descs or {})
        work, keep = partial(self._contains, keys), self._keep(len(keys))
        return self._submit(Task("lookups", self._lookup_fd, named, work, keep))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fill objects. Their memory is written to until the task is done, also on a miss."""
        views = [memoryview(one.byte_array).cast("B") for one in objects]
        named = self._named(self._names.of_objects, keys, objects)
        work, keep = partial(self._read, keys, views), self._keep(len(keys))

        def announce(loaded: list[int]) -> None:
            if loaded:
                self._notify_keys_accessed([keys[position] for position in loaded])

        return self._submit(Task("loads", self._load_fd, named, work, keep, announce))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self.query_lookup_and_lock_result(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Remove objects from the pool, for everybody; only those whose layout is known here."""
        with self._lock:
            named, sizes = self._names.of_removal(keys), self._names.sizes(keys)

        async def work() -> None:
            pool = self._pool.pool
            if pool is None:
                return
            for space, at in named.items():
                try:
                    await pool.remove(space, _unique(keys, at))
                except Exception as error:
                    known = isinstance(error, KvpoolError)
                    self._pause(str(error) if known else f"a removal failed with {error!r}")
                else:  # also of those that the pool has evicted: LMCache counts bytes
                    self._tell(
                        self._notify_keys_deleted,
                        [keys[position] for position in at],
                        [sizes[position] for position in at],
                    )

        self._pool.start(work)

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            counters = dict(self.counters)
        connected = self._pool.pool is not None
        paused = time.monotonic() < self._resume_at
        return {
            "is_healthy": connected and not paused,
            "type": "kvpool",
            "connected": connected,
            "paused": paused,
            "masters": self._settings.masters,
            **counters,
        }

    def close(self) -> None:
        """End all tasks, then the connection, then the descriptors. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.close(_CLOSE_S)
        with self._lock:
            for fd in (self._store_fd, self._lookup_fd, self._load_fd):
                os.close(fd)

    # --- inside --------------------------------------------------------------------------

    def _named(
        self, names: Callable[..., Mapping[Namespace, list[int]]], *of: Any
    ) -> Mapping[Namespace, list[int]]:
        """The positions by namespace; none, which is a miss, for what has no name."""
        try:
            with self._lock:
                return names(*of)
        except Exception as error:
            log.warning("kvpool: objects that cannot be named are not shared: %r", error)
            return {}

    def _submit(self, task: Task) -> int:
        """Run it in the pool's thread. Whatever happens it ends, and its event is set."""
        with self._lock:
            self._task += 1
            number = self._task
            self.counters[task.kind] += 1

        def finish(done: list[int], failed: bool = False) -> None:
            if task.announce is not None:
                self._tell(task.announce, done)
            with self._lock:
                self.counters[f"objects_{_DONE[task.kind]}"] += len(done)
                self.counters[f"{task.kind}_failed"] += failed
                if not self._closed:
                    task.keep(number, done)
                    os.eventfd_write(task.fd, 1)

        async def run() -> None:
            done: list[int] = []
            failed = False
            try:
                if (pool := self._pool.pool) is not None:
                    done, failed = await self._all(pool, task)
            finally:
                finish(done, failed)

        if time.monotonic() < self._resume_at or self._pool.pool is None:
            with self._lock:
                self.counters["paused_tasks"] += 1
            finish([])
        elif not self._pool.start(run):
            finish([])
        return number

    def _tell(self, listeners: Callable[..., None], *what: object) -> None:
        """Without the lock: LMCache's listeners may call us. What they raise is theirs."""
        try:
            listeners(*what)
        except Exception as error:
            log.warning("kvpool: a listener of LMCache's failed with %r", error)

    async def _all(self, pool: Pool, task: Task) -> tuple[list[int], bool]:
        """The calls for all namespaces at the same time, as a rule it is one; and whether one
        failed. One that fails takes nothing from the others."""

        async def attempt(space: Namespace, at: list[int]) -> list[int] | None:
            try:
                return await task.work(pool, space, at)
            except Unavailable as error:
                self._pause(str(error))
            except KvpoolError as error:
                log.warning("kvpool: %s", error)
            except Exception as error:  # a mistake of ours must not take the others' answers
                self._pause(f"{task.kind} failed with {error!r}")
            return None

        if len(task.named) == 1:
            answers = [await attempt(*one) for one in task.named.items()]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(attempt(*one)) for one in task.named.items()]
            answers = [one.result() for one in tasks]
        done = [position for answer in answers for position in answer or ()]
        return done, None in answers

    async def _contains(
        self, keys: Sequence[Any], pool: Pool, space: Namespace, at: list[int]
    ) -> list[int]:
        digests = [digest(keys[position]) for position in at]
        there = await pool.contains(space, digests, timeout=self._settings.lookup_timeout_s)
        return [position for position, found in zip(at, there, strict=True) if found]

    async def _read(
        self,
        keys: Sequence[Any],
        views: Sequence[memoryview],
        pool: Pool,
        space: Namespace,
        at: list[int],
    ) -> list[int]:
        results = await pool.read(
            space,
            [digest(keys[position]) for position in at],
            [views[position] for position in at],
            timeout=self._settings.load_timeout_s,
        )
        self._look_at([result.status.name for result in results])
        return [
            position
            for position, result in zip(at, results, strict=True)
            if result.status.hit and result.size == views[position].nbytes
        ]

    async def _write(
        self,
        keys: Sequence[Any],
        views: Sequence[memoryview],
        new: list[int],
        pool: Pool,
        space: Namespace,
        at: list[int],
    ) -> list[int]:
        """The positions of what the pool has now; those that it did not have before go to `new`."""
        of: dict[bytes, list[int]] = {}  # each key once
        for position in at:
            of.setdefault(digest(keys[position]), []).append(position)
        statuses = await pool.write(
            space,
            list(of),
            [views[positions[0]] for positions in of.values()],
            parents=[ROOT] * len(of),
            timeout=self._settings.store_timeout_s,
        )
        self._look_at([status.name for status in statuses])
        stored: list[int] = []
        for positions, status in zip(of.values(), statuses, strict=True):
            if status.name in _STORED:
                stored += positions
            if status is WriteStatus.STORED:
                new.append(positions[0])
        return stored

    def _keep(self, count: int) -> Callable[[int, list[int]], None]:
        def keep(task: int, positions: list[int]) -> None:
            bitmap = Bitmap(count)
            for position in positions:
                bitmap.set(position)
            self._found[task] = bitmap
            if len(self._found) > _RESULTS_MAX:
                self._found.pop(next(iter(self._found)))

        return keep

    def _look_at(self, statuses: list[str]) -> None:
        for name in sorted(_POOL_FAILED.intersection(statuses))[:1]:
            self._pause(name.lower())

    def _pause(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._resume_at:
            log.warning("kvpool: left alone for %g s: %s", self._settings.pause_s, why)
        self._resume_at = now + self._settings.pause_s


def _event_fd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _unique(keys: Sequence[Any], at: Sequence[int]) -> list[bytes]:
    return list(dict.fromkeys(digest(keys[position]) for position in at))
