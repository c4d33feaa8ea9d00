"""The pool for programs without asyncio, such as an engine's worker.

    with kvpool.sync.connect("127.0.0.1:7450") as pool:
        match = pool.match(namespace, chain)

An event loop runs in a thread of its own; any thread may call, also from a signal's handler. A call
that is interrupted (KeyboardInterrupt) cancels what it started before it raises.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from kvpool import client
from kvpool.arguments import as_float
from kvpool.client import admin as administration
from kvpool.client import opening, session
from kvpool.client.buffers import BufferLike, DeviceBlock, with_device_blocks
from kvpool.client.context import TIMEOUT_S_MAX
from kvpool.config import ClientConfig
from kvpool.errors import Closed, DeadlineExceeded, Unavailable
from kvpool.protocols import View
from kvpool.types import Cluster, Match, Namespace

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds after a call's own deadline until the pool's loop counts as stuck.
_GRACE_S = 5.0


def connect(
    *masters: str,
    transports: Sequence[str] | None = None,
    timeout: float | str | None = None,
    secret_file: str | Path = "",
    config: ClientConfig | None = None,
    cluster: str | Cluster = "default",
) -> Pool:
    """Open a pool, as `kvpool.connect` does, with the same arguments and errors."""
    config = opening.client_config(config, masters, transports, timeout)
    cluster = opening.checked_cluster(cluster, secret_file)
    return Pool(config, cluster)


def admin(pool: Pool) -> Admin:
    """What an operator asks of this pool and has it do, as `kvpool.admin`."""
    return Admin(pool)


class _InThread(Protocol):
    """Something of `kvpool.client`, and how its calls are made in the pool's thread."""

    _inner: Any

    def _run(self, call: Coroutine[Any, Any, T], timeout: float | None) -> T: ...

    def _resolve(self, buffers: Sequence[BufferLike]) -> Sequence[BufferLike]: ...


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_InThread, P], T]:
    """The same method for threads: its arguments, its docstring, and its result instead of a wait.

    Buffers on a device are resolved in the calling thread, whose current stream is its own.
    """
    parameters = list(inspect.signature(method).parameters)
    where = parameters.index("buffers") - 1 if "buffers" in parameters else None

    def call(self: _InThread, *args: P.args, **kwargs: P.kwargs) -> T:
        given: list[Any] = list(args)
        named = cast("dict[str, Any]", dict(kwargs))
        if where is not None and len(given) > where:
            given[where] = self._resolve(given[where])
        elif where is not None and "buffers" in named:
            named["buffers"] = self._resolve(named["buffers"])
        return self._run(method(self._inner, *given, **named), named.get("timeout"))

    return cast("Callable[Concatenate[_InThread, P], T]", functools.wraps(method)(call))


class Pool:
    """The methods of `kvpool.Pool`, for threads. See there for what each guarantees.

    `timeout` is seconds (default: `ClientConfig.timeout_s`). Every method raises Closed after
    `close`, after a fork, and in the pool's own thread, and DeadlineExceeded if that thread does
    not answer in time.
    """

    def __init__(self, config: ClientConfig, cluster: Cluster) -> None:
        self._pid = os.getpid()
        self._timeout_s = config.timeout_s
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            raise Unavailable(f"cannot open a pool: {error}; see `ulimit -n`") from None
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool", daemon=True)
        self._closed = self._has_device = False
        self._lock = threading.RLock()
        self._begin = threading.RLock()  # no call begins when the pool is closed
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise Unavailable(f"cannot open a pool: {error}; see `ulimit -u`") from None
        try:
            opened = opening.connect(config=config, cluster=cluster)
            self._inner = self._run(opened, self._timeout_s)
        except BaseException:
            self._stop()
            raise

    def __repr__(self) -> str:
        return f"<sync.Pool {'closed' if self._closed else 'open'}>"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    match = _blocking(client.Pool.match)
    contains = _blocking(client.Pool.contains)
    where = _blocking(client.Pool.where)
    score = _blocking(client.Pool.score)
    read = _blocking(client.Pool.read)
    write = _blocking(client.Pool.write)
    prefetch = _blocking(client.Pool.prefetch)
    remove = _blocking(client.Pool.remove)
    members = _blocking(client.Pool.members)

    def session(self, name: str) -> ClientSession:
        """The conversation of this name. Raises UsageError. See `kvpool.Pool.session`."""
        return ClientSession(self, self._inner.session(name))

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
        view = self._inner.read_view(namespace, digests, part=part, match=match, timeout=timeout)
        shown = self._run(view.__aenter__(), timeout)
        try:
            yield shown
        finally:
            with suppress(Closed):  # the pool was closed inside the `with`: it has no pins any more
                self._run(view.__aexit__(None, None, None), timeout)

    def close(self) -> None:
        """End every running call, with Closed or as a miss, then the thread. Idempotent.

        A signal's handler may call it. At the interpreter's end it does nothing, as in the child of
        a fork: the thread runs no more, and the process ends its connections.
        """
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        with self._lock:
            if self._closed:
                return
            self._check()
            try:
                with suppress(Closed):  # a signal's handler has closed it in between
                    self._run(self._inner.close(), None)
            finally:
                self._stop()

    def _stop(self) -> None:
        with self._begin:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._loop.call_soon_threadsafe(self._loop.create_task, self._end_loop())
        self._thread.join()
        self._loop.close()

    async def _end_loop(self) -> None:
        """Let every other thread's call end, as a miss or as Closed, and stop the loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_GRACE_S)
        self._loop.call_soon(self._loop.stop)  # behind what hands their results over

    def _resolve(self, buffers: Sequence[BufferLike]) -> Sequence[BufferLike]:
        """As `with_device_blocks`. The pool's thread gets the context of the first device: to ask
        an event, or UCX, in a thread without one takes half a GB of another device, or fails."""
        found = with_device_blocks(buffers)
        devices = (one.device for one in found if isinstance(one, DeviceBlock))
        if found is not buffers and not self._has_device and (device := next(devices, None)):
            import torch  # whoever has such memory has imported it

            self._has_device = True
            with suppress(RuntimeError):  # closed: as the call is about to say
                self._loop.call_soon_threadsafe(torch.cuda.set_device, device)
        return found

    def _run(self, call: Coroutine[Any, Any, T], timeout: float | None) -> T:
        tasks: list[asyncio.Task[T]] = []
        # Given back when the call has ended. No other lock is held while this thread waits: it may
        # run a signal's handler meanwhile, which calls the pool as well, or closes it.
        ended = threading.Lock()
        ended.acquire()

        def end(task: asyncio.Task[T]) -> None:
            _ = task.cancelled() or task.exception()  # asked for by nobody after an interrupt
            ended.release()

        def start() -> None:
            tasks.append(self._loop.create_task(call))
            tasks[0].add_done_callback(end)

        try:
            self._check()  # before the lock: a forked child has one that nobody gives back
        except Closed:
            call.close()
            raise
        try:
            with self._begin:
                if not self._closed:
                    self._loop.call_soon_threadsafe(start)
                if self._closed:  # also by a signal's handler, in the middle of the line above
                    raise Closed("the pool is closed")
            # A timeout that is no bound is refused by the call itself.
            seconds = self._timeout_s if timeout is None else as_float(timeout) or 0.0
            seconds = seconds if seconds <= TIMEOUT_S_MAX else 0.0
            if not ended.acquire(timeout=max(seconds + _GRACE_S, 0.0)):
                raise DeadlineExceeded("the pool's thread did not answer")
        except BaseException as error:
            if not (tasks and tasks[0].done()):
                self._cancel(tasks, ended)
            if not tasks:
                call.close()
            if isinstance(error, RuntimeError):  # a signal's handler has closed the loop
                raise Closed("the pool is closed") from None
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise Closed("the pool was closed during this call") from None

    def _cancel(self, tasks: list[asyncio.Task[Any]], ended: threading.Lock) -> None:
        """Also wait until the call has ended: until then it may write into the caller's buffers."""
        with suppress(RuntimeError):  # the loop is closed, and the call has ended
            # Behind what starts it. It has not begun if this thread was interrupted before that.
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel() if tasks else ended.release())
        while self._thread.is_alive() and not ended.acquire(timeout=0.1):
            pass

    def _check(self) -> None:
        if self._closed or sys.is_finalizing():
            raise Closed("the pool is closed")
        if os.getpid() != self._pid:
            raise Closed("the pool was opened before a fork: open another one in the child")
        if threading.current_thread() is self._thread:
            raise Closed("a call from the pool's own thread would wait for itself")


class ClientSession:
    """The methods of what `kvpool.Pool.session` returns, for threads."""

    def __init__(self, pool: Pool, inner: session.ClientSession) -> None:
        self._inner = inner
        self._run = pool._run
        self.name = inner.name

    def __repr__(self) -> str:
        return repr(self._inner)

    hint = _blocking(session.ClientSession.hint)
    end = _blocking(session.ClientSession.end)
    arrived = _blocking(session.ClientSession.arrived)
    explain = _blocking(session.ClientSession.explain)


class Admin:
    """The methods of what `kvpool.admin` returns, for threads, but for those of tools."""

    def __init__(self, pool: Pool) -> None:
        self._inner = administration.Admin(pool._inner)
        self._run = pool._run

    def __repr__(self) -> str:
        return repr(self._inner)

    namespaces = _blocking(administration.Admin.namespaces)
    demand = _blocking(administration.Admin.demand)
    room = _blocking(administration.Admin.room)
    explain = _blocking(administration.Admin.explain)
    spread = _blocking(administration.Admin.spread)
    drain = _blocking(administration.Admin.drain)
    drain_report = _blocking(administration.Admin.drain_report)
    cancel_drain = _blocking(administration.Admin.cancel_drain)
