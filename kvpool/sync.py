"""The pool for programs without asyncio, such as an engine's worker.

    with kvpool.sync.connect("127.0.0.1:7450") as pool:
        match = pool.match(namespace, chain)

An event loop runs in a thread of its own; any thread may call, several at the same time. A call
that is interrupted (KeyboardInterrupt) cancels what it started before it raises.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvpool.arguments import as_float
from kvpool.client import opening
from kvpool.client.buffers import BufferLike, with_device_blocks
from kvpool.config import ClientConfig, checked_client
from kvpool.errors import Closed, DeadlineExceeded
from kvpool.protocols import View
from kvpool.types import (
    ROOT,
    Cluster,
    Demand,
    Explanation,
    HintStatus,
    HostScore,
    Match,
    Member,
    Namespace,
    PrefetchStatus,
    Presence,
    ReadResult,
    SessionReport,
    SpreadReport,
    WriteStatus,
)

T = TypeVar("T")

#: Seconds after a call's own deadline until the pool's loop counts as stuck.
_GRACE_S = 5.0


def connect(
    *masters: str, config: ClientConfig | None = None, cluster: str | Cluster = "default"
) -> Pool:
    """Open a pool, as `kvpool.connect` does. Raises MasterLost when no master answers."""
    return Pool(*masters, config=config, cluster=cluster)


class Pool:
    """The methods of `kvpool.Pool`, for threads. See there for what each guarantees.

    `timeout` is seconds (default: `ClientConfig.timeout_s`). Every method raises Closed after
    `close`, after a fork, and in the pool's own thread, and DeadlineExceeded if that thread does
    not answer in time.
    """

    def __init__(
        self, *masters: str, config: ClientConfig | None = None, cluster: str | Cluster = "default"
    ) -> None:
        self._pid = os.getpid()
        self._timeout_s = checked_client(config or ClientConfig()).timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool", daemon=True)
        self._closed = False
        self._lock = threading.Lock()
        self._thread.start()
        try:
            self._pool = self._run(
                opening.connect(*masters, config=config, cluster=cluster), self._timeout_s
            )
        except BaseException:
            self._stop()
            raise

    def __repr__(self) -> str:
        return f"<sync.Pool {'closed' if self._closed else 'open'}>"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def match(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        session: str = "",
        timeout: float | None = None,
    ) -> Match:
        """The longest prefix of `chain` that the pool holds, and why it ends there.

        With a `session` it is an arrival as well. Raises BadKey or UsageError. See
        `kvpool.Pool.match`.
        """
        matching = self._pool.match(namespace, chain, session=session, timeout=timeout)
        return self._run(matching, timeout)

    def read(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[BufferLike],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> list[ReadResult]:
        """Fill each buffer with its block: one result per digest; sizes are bytes.

        Raises BadKey, BadBuffer, TooLarge or Unavailable. See `kvpool.Pool.read`.
        """
        buffers = with_device_blocks(buffers)  # here: a current stream belongs to its thread
        return self._run(
            self._pool.read(namespace, digests, buffers, part=part, match=match, timeout=timeout),
            timeout,
        )

    def prefetch(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        near: str = "",
        match: Match | None = None,
        timeout: float | None = None,
    ) -> list[PrefetchStatus]:
        """Have servers bring the blocks of a chain into memory, without waiting for them.

        One status per block. Raises BadKey. See `kvpool.Pool.prefetch`.
        """
        call = self._pool.prefetch(namespace, chain, near=near, match=match, timeout=timeout)
        return self._run(call, timeout)

    def write(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        buffers: Sequence[BufferLike],
        *,
        parent: bytes = ROOT,
        parents: Sequence[bytes] | None = None,
        part: int = 0,
        copies: int = 1,
        visible: bool = True,
        session: str = "",
        resume_in: float | None = None,
        timeout: float | None = None,
    ) -> list[WriteStatus]:
        """Store blocks: one status per digest; `resume_in` is seconds.

        Raises BadKey, BadBuffer, TooLarge, UsageError or Unavailable. See `kvpool.Pool.write`.
        """
        buffers = with_device_blocks(buffers)  # here, as for `read`
        return self._run(
            self._pool.write(
                namespace,
                digests,
                buffers,
                parent=parent,
                parents=parents,
                part=part,
                copies=copies,
                visible=visible,
                session=session,
                resume_in=resume_in,
                timeout=timeout,
            ),
            timeout,
        )

    def spread(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        *,
        to: int | Sequence[str],
        timeout: float | None = None,
    ) -> SpreadReport:
        """Put copies of a chain where it will be read, before its readers come.

        Raises BadKey, UsageError or MasterLost. See `kvpool.Pool.spread`.
        """
        return self._run(self._pool.spread(namespace, chain, to=to, timeout=timeout), timeout)

    def end(self, session: str, *, timeout: float | None = None) -> HintStatus:
        """Hint that a conversation is over. Raises UsageError. See `kvpool.Pool.end`."""
        return self._run(self._pool.end(session, timeout=timeout), timeout)

    def hint(self, session: str, *, resume_in: float, timeout: float | None = None) -> HintStatus:
        """Hint that a conversation goes on in `resume_in` seconds.

        Raises UsageError. See `kvpool.Pool.hint`.
        """
        hint = self._pool.hint(session, resume_in=resume_in, timeout=timeout)
        return self._run(hint, timeout)

    def arrived(self, session: str, *, timeout: float | None = None) -> HintStatus:
        """Hint that a prompt waits. Raises UsageError. See `kvpool.Pool.arrived`."""
        return self._run(self._pool.arrived(session, timeout=timeout), timeout)

    @contextmanager
    def read_view(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        *,
        part: int = 0,
        match: Match | None = None,
        timeout: float | None = None,
    ) -> Iterator[list[View]]:
        """Read-only views of the pool's own memory, valid inside the `with`.

        Raises BadKey. See `kvpool.Pool.read_view`.
        """
        view = self._pool.read_view(namespace, digests, part=part, match=match, timeout=timeout)
        shown = self._run(view.__aenter__(), timeout)
        try:
            yield shown
        finally:
            self._run(view.__aexit__(None, None, None), timeout)

    def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[bool]:
        """Remove blocks, every part and copy; True where the pool had one.

        Raises BadKey or MasterLost. See `kvpool.Pool.remove`.
        """
        return self._run(self._pool.remove(namespace, digests, timeout=timeout), timeout)

    def explain(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[Explanation]:
        """Where each block is, or why it is not there.

        Raises BadKey or MasterLost. See `kvpool.Pool.explain`.
        """
        return self._run(self._pool.explain(namespace, digests, timeout=timeout), timeout)

    def contains(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[bool]:
        """Which of these blocks the pool has. Raises BadKey or MasterLost.

        See `kvpool.Pool.contains`.
        """
        return self._run(self._pool.contains(namespace, digests, timeout=timeout), timeout)

    def where(
        self, namespace: Namespace, digests: Sequence[bytes], *, timeout: float | None = None
    ) -> list[Presence | None]:
        """Where each block is, or None. Raises BadKey or MasterLost. See `kvpool.Pool.where`."""
        return self._run(self._pool.where(namespace, digests, timeout=timeout), timeout)

    def score(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        hosts: Sequence[str],
        *,
        block_bytes: int | None = None,
        timeout: float | None = None,
    ) -> list[HostScore]:
        """What an engine on each of these hosts would load of a chain, in bytes and seconds.

        Raises BadKey, UsageError or MasterLost. See `kvpool.Pool.score`.
        """
        scoring = self._pool.score(
            namespace, chain, hosts, block_bytes=block_bytes, timeout=timeout
        )
        return self._run(scoring, timeout)

    def demand(self, *, timeout: float | None = None) -> Demand:
        """What clients ask for: live working sets. Raises MasterLost. See `kvpool.Pool.demand`."""
        return self._run(self._pool.demand(timeout=timeout), timeout)

    def namespaces(self, *, timeout: float | None = None) -> list[tuple[Namespace, int]]:
        """The namespaces that have blocks, with their numbers of blocks.

        Raises MasterLost. See `kvpool.Pool.namespaces`.
        """
        return self._run(self._pool.namespaces(timeout=timeout), timeout)

    def explain_session(self, session: str, *, timeout: float | None = None) -> SessionReport:
        """What became of the hints about a session. Raises UsageError or MasterLost.

        See `kvpool.Pool.explain_session`.
        """
        return self._run(self._pool.explain_session(session, timeout=timeout), timeout)

    def members(self, *, timeout: float | None = None) -> list[Member]:
        """Every server that a master knows, with its statistics (bytes, counts, seconds).

        Raises MasterLost. See `kvpool.Pool.members`.
        """
        return self._run(self._pool.members(timeout=timeout), timeout)

    def close(self) -> None:
        """End every running call, with Closed or as a miss, then the thread. Idempotent."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._run(self._end(), None)
            self._stop()

    async def _end(self) -> None:
        """Close the pool and let every other thread's call end: as a miss, or as Closed."""
        await self._pool.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, T], timeout: float | None) -> T:
        try:
            self._check()
        except Closed:
            call.close()
            raise
        ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(call))
            tasks[0].add_done_callback(lambda task: _hand_over(task, ended))

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:  # another thread has closed the pool, and the loop, since the check
            call.close()
            raise Closed("the pool is closed") from None
        try:
            # A timeout that is no number is refused by the call itself.
            seconds = self._timeout_s if timeout is None else as_float(timeout) or 0.0
            return ended.result(seconds + _GRACE_S)
        except concurrent.futures.TimeoutError as error:
            if ended.done():
                raise  # the call's own
            self._cancel(tasks, ended)
            raise DeadlineExceeded("the pool's thread did not answer") from error
        except concurrent.futures.CancelledError:
            raise Closed("the pool was closed during this call") from None
        except BaseException:
            # An error of the call itself: there is nothing to cancel, and the loop may be closed.
            if not ended.done():
                self._cancel(tasks, ended)
            raise

    def _cancel(self, tasks: list[asyncio.Task[T]], ended: concurrent.futures.Future[T]) -> None:
        """Also wait until the call has ended: until then it may write into the caller's buffers."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        while self._thread.is_alive() and not concurrent.futures.wait([ended], 0.1).done:
            pass

    def _check(self) -> None:
        if self._closed:
            raise Closed("the pool is closed")
        if os.getpid() != self._pid:
            raise Closed("the pool was opened before a fork: open another one in the child")
        if threading.current_thread() is self._thread:
            raise Closed("a call from the pool's own thread would wait for itself")


def _hand_over(task: asyncio.Task[T], ended: concurrent.futures.Future[T]) -> None:
    """Pass the outcome of a task to the thread that waits for it."""
    if task.cancelled():
        ended.cancel()
        ended.set_running_or_notify_cancel()
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())
