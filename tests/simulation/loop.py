"""Virtual time: an event loop that runs a whole cluster in one thread, in a repeatable order.

Each simulated process has its own clock, with its own zero and rate. It can be frozen, like
SIGSTOP, or killed, like SIGKILL: after a kill no `finally` runs and its callbacks are dropped. A
context variable says which process a callback belongs to, so tasks and timers inherit it.

Ordinary asyncio cannot be replayed, because sets of tasks iterate by address. Here tasks hash by
the order of their creation. `call_soon` stays first in, first out, as asyncio promises; the delays
of the network make the order random. (Real code in a simulated world is FoundationDB's method.)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: A run that takes more steps than this is in an endless loop.
STEPS_MAX: Final = 3_000_000


class Violation(AssertionError):
    """The pool broke a promise."""


class Forbidden(RuntimeError):
    """Code under simulation called the real world: a clock, a socket, a thread or entropy."""


class Process:
    """One simulated process: its host, its clock, and whether it is running, frozen or dead."""

    def __init__(self, loop: SimLoop, name: str, host: str, rng: random.Random) -> None:
        self.name = name
        self.host = host
        self.alive = True
        self.frozen = False
        self.frozen_s = 0.0  # true seconds spent frozen, in all
        self.writing = 0  # copies into the pool that its threads have not made yet
        self.parked: list[SimHandle] = []
        self.tasks: dict[int, SimTask[Any]] = {}
        self.on_death: list[Callable[[], None]] = []
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self._loop = loop
        self._zero = rng.uniform(0, 1e5)
        self._rate = 1 + rng.uniform(-2e-4, 2e-4)
        self._frozen_at = 0.0

    def __repr__(self) -> str:
        state = "dead" if not self.alive else "frozen" if self.frozen else "running"
        return f"<Process {self.name} {state}>"

    def clock(self, now: float) -> float:
        """The time of this process's monotonic clock at true time `now`."""
        return self._zero + now * self._rate

    def true_time(self, clock: float) -> float:
        return (clock - self._zero) / self._rate

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        context = self.context.copy()
        return self._loop.create_task(coroutine, name=name or self.name, context=context)

    def freeze(self) -> None:
        if self.alive and not self.frozen:
            self.frozen = True
            self._frozen_at = self._loop.now

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            self.frozen_s += self._loop.now - self._frozen_at
            self._loop.resume(self.parked)
            self.parked = []

    def kill(self) -> None:
        """End the process at once: its kernel closes its files, no code of it runs."""
        self.thaw()
        if self.alive:
            self.alive = False
            for notify in self.on_death:
                notify()

    def discard_tasks(self) -> None:
        """After the run: close the coroutines of its tasks, because no loop will run them again."""
        for task in list(self.tasks.values()):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()
        self.tasks.clear()


PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class SimHandle:
    """A callback that waits for its turn, with the methods that asyncio calls on a handle."""

    __slots__ = ("_when", "args", "callback", "context", "off")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context if context is not None else contextvars.copy_context()
        self.off = False
        self._when = when

    def cancel(self) -> None:
        self.off = True
        self.args = ()

    def cancelled(self) -> bool:
        return self.off

    def when(self) -> float:
        return self._when


class SimTask(asyncio.Task[T]):
    """A task that hashes by the order of creation, so that sets of tasks iterate alike."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: SimLoop, **kwargs: Any) -> None:
        self.birth = next(loop.births)
        super().__init__(coroutine, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self.birth


class SimLoop(asyncio.AbstractEventLoop):
    """The loop. `now` is true time; `time()` is the clock of the process that calls it."""

    def __init__(self, delays: random.Random, copy_s: float) -> None:
        self.now = 0.0
        self.steps = 0
        self.births = itertools.count(1)
        self.failure: str | None = None
        #: Gives, for the arguments of a thread's job, one check for each write into the pool. The
        #: checks run at the time of the writes.
        self.writes_to_pool: Callable[[tuple[Any, ...]], list[Callable[[], None]]] = lambda _: []
        #: Dials and listens for the process that asks.
        self.network: Any = None
        self._delays = delays
        self._copy_s = copy_s
        self._ready: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._order = itertools.count()
        self._after: list[Callable[[], None]] = []

    # --- what the world calls -------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run until `main` has ended. Raises Violation as soon as one is reported."""
        asyncio.events._set_running_loop(self)
        try:
            task = self.create_task(main)
            self._work(task.done)
            return task.result()
        finally:
            asyncio.events._set_running_loop(None)

    def fail(self, what: str) -> None:
        """Report a violation. It raises nothing, so the code under test cannot hide it."""
        if self.failure is None:
            process = PROCESS.get(None)
            where = f" in {process.name}" if process is not None else ""
            self.failure = f"{what}{where} at t={self.now:.6f}"

    def at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        """Call at a true time, outside of any process: for simulated kernels and networks."""
        heappush(
            self._timers, (when, next(self._order), SimHandle(callback, args, _NO_PROCESS, when))
        )

    def after_this(self, callback: Callable[[], None]) -> None:
        """Call outside of any process, when the callback that runs now has ended."""
        self._after.append(callback)

    def resume(self, handles: list[SimHandle]) -> None:
        self._ready.extend(handles)

    def _work(self, is_done: Callable[[], bool]) -> None:
        """One step after the other. Most of a history's time is here: no call without need."""
        ready, timers, after = self._ready, self._timers, self._after
        while not is_done():
            while not ready:
                if not timers:
                    raise Violation("deadlock: every task waits and no timer is set")
                due, _, timer = heappop(timers)
                if not timer.off:
                    self.now = max(self.now, due)
                    ready.append(timer)
            handle = ready.popleft()
            if handle.off:
                continue
            context = handle.context
            process = context.get(PROCESS)
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen:
                    process.parked.append(handle)
                    continue
            self.steps += 1
            try:
                context.run(handle.callback, *handle.args)
            except Exception as error:
                self.call_exception_handler({"message": "a callback raised", "exception": error})
            while after:
                after.pop()()
            if self.failure is not None:
                raise Violation(self.failure)
            if self.steps > STEPS_MAX:
                raise Violation(f"{STEPS_MAX} steps: an endless loop")

    # --- what asyncio calls ---------------------------------------------------------------

    def time(self) -> float:
        process = PROCESS.get(None)
        return self.now if process is None else process.clock(self.now)

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        handle = SimHandle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        return self.call_soon(callback, *args, context=context)  # threads are simulated, too

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        handle = SimHandle(callback, args, context, when)
        process = PROCESS.get(None)
        # A little later: rounding must not fire a timer before its own clock reaches the time.
        due = when if process is None else process.true_time(when) + 1e-9
        heappush(self._timers, (due, next(self._order), handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task = SimTask(coroutine, self, name=name, context=context)
        process = (context or contextvars.copy_context()).get(PROCESS)
        if process is not None:
            process.tasks[task.birth] = task
            task.add_done_callback(
                lambda _: process.tasks.pop(task.birth, None), context=_NO_PROCESS
            )
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """A thread: it does its work at once, some time later, if its process is still alive."""
        future: asyncio.Future[T] = self.create_future()

        process = PROCESS.get()
        writes = self.writes_to_pool(args)
        process.writing += len(writes)

        stopped_s = process.frozen_s

        def work() -> None:
            nonlocal stopped_s
            if process.frozen_s > stopped_s:
                stopped_s = process.frozen_s
                if self._delays.random() < 0.5:  # stopped in the middle: the copy takes longer
                    self.call_later(self._delays.expovariate(1 / self._copy_s), work)
                    return
            process.writing -= len(writes)
            for check in writes:
                check()
            try:
                done = function(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(done)

        self.call_later(self._delays.expovariate(1 / self._copy_s), work)
        return future

    async def create_connection(  # type: ignore[override]
        self, factory: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return await self.network.dial(factory, *args, **kwargs)

    async def create_server(  # type: ignore[override]
        self, factory: Any, host: str, port: int, *, backlog: int = 100
    ) -> Any:
        return self.network.listen(factory, host, port)  # nobody waits to be accepted

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.fail(f"{context.get('message')}: {type(error).__name__}: {error}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False


#: The context of simulated kernels and networks: no process.
_NO_PROCESS: Final = contextvars.Context()
