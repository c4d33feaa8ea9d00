"""Tasks that live as long as their process: none of them ends without anybody noticing.

Nobody waits for the result of such a task, so one exception that it does not expect would end it in
silence. Here it is logged, counted, and the task goes on after a pause.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from kvpool import logs
from kvpool.backoff import Backoff

log = logs.get("kvpool")

#: Seconds until a task that has failed goes on: at first, and at most.
PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0
#: A step that has run for so long since the last failure is well, though it has not ended.
WELL_AFTER_S: Final = 5.0
_CANCEL_AGAIN_S: Final = 0.5


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel it, and wait for its end. One cancellation may be lost: to the error of a task that a
    TaskGroup runs (Python before 3.13), and what is supervised goes on after errors."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


class Supervisor:
    """The long-lived tasks of one process. Whoever starts one cancels it.

    | state   | means                        | next state, when                                    |
    |---------|------------------------------|-----------------------------------------------------|
    | well    | it runs                      | failing: it raises an exception                     |
    | failing | it waits, then runs again    | well: a step has ended, or runs for `WELL_AFTER_S`  |

    The pause doubles with each failure in a row; half of it is random.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        #: How often each task has failed, by name; 0 for one that never has.
        self.failures: Counter[str] = Counter()
        #: Those that are failing: why, and until when at the most if they do not fail again.
        self._failing: dict[asyncio.Task[None], tuple[str, float]] = {}

    @property
    def problem(self) -> str:
        """Which task is failing, and why; empty if none is."""
        now = asyncio.get_running_loop().time()
        whys = [why for why, until in self._failing.values() if now < until]
        return "; ".join(whys)

    def forever(
        self,
        name: str,
        step: Callable[[], Coroutine[Any, Any, None]],
        *,
        pause_max_s: float = PAUSE_MAX_S,
    ) -> asyncio.Task[None]:
        """Run `step` again and again, until the task is cancelled."""

        async def work() -> None:
            while True:
                await self._attempt(name, step, backoff)

        backoff = self._backoff(pause_max_s)
        return self._start(name, work())

    def until_done(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        """Run `work` until it returns, again after each exception."""

        async def attempts() -> None:
            while not await self._attempt(name, work, backoff):
                pass

        backoff = self._backoff(PAUSE_MAX_S)
        return self._start(name, attempts())

    def _backoff(self, pause_max_s: float) -> Backoff:
        return Backoff(min(PAUSE_S, pause_max_s), pause_max_s, rng=self._rng)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.failures[name] += 0  # so that a rate sees the first one
        work.__qualname__ = name  # type: ignore[attr-defined]  # tasks are shown with it, too
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(lambda _: self._failing.pop(task, None))
        return task

    async def _attempt(
        self, name: str, step: Callable[[], Coroutine[Any, Any, None]], backoff: Backoff
    ) -> bool:
        """Run it once; if it fails, False after a pause."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        began = loop.time()
        try:
            await step()
        except Exception as error:
            if loop.time() - began > WELL_AFTER_S:
                backoff.reset()
            pause_s = backoff.next_delay()
            self.failures[name] += 1
            # Of the error its name alone: its text may name what tenants have.
            why = f"the task {name!r} is failing: {type(error).__name__}, see the log"
            self._failing[task] = why, loop.time() + pause_s + WELL_AFTER_S
            log.exception("a task has failed and runs again", task=name, pause_s=round(pause_s, 3))
        else:
            if backoff.failures:
                backoff.reset()
                self._failing.pop(task, None)
            return True
        await asyncio.sleep(pause_s)
        return False
