"""Ends a call when its server has sent nothing for too long; a slow one is not a lost one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final

from kvpool.errors import DeadlineExceeded

#: The silence is counted in so many parts. While this client's own loop is busy nothing is read, so
#: a part counts once, however late its timer fires: the client's silence is not the server's.
_PARTS: Final = 4
#: A timer that fires so much later than it should tells of a busy loop.
_LATE_S: Final = 0.02


class ServerUnresponsive(DeadlineExceeded):
    """A server has sent nothing for as long as this client waits; another one may answer.

    `left_early`: the wait ended before its time, because another one is known.
    """

    def __init__(self, text: str, *, left_early: bool = False) -> None:
        super().__init__(text)
        self.left_early = left_early


class InactivityTimer:
    """The client's `IdleTimeout`: the block must receive something at least every `silence_s`.

        async with InactivityTimer(silence_s=1.0) as timer: ...

    Raises ServerUnresponsive otherwise (design: hedging). A touch, which comes with every chunk
    that is received, is one assignment: the loop's timer looks for it when it fires.

    With `overdue` it also ends when that says so, which is asked as often.

    With `may_leave` that is asked, once, when nothing was received for `ask_s`, while the block
    goes on. If its answer is True, and there is still silence, the block ends then.
    """

    def __init__(
        self,
        silence_s: float,
        overdue: Callable[[float], bool] | None = None,
        *,
        ask_s: float = 0.0,
        may_leave: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._silence_s = silence_s
        self._overdue = overdue
        self._ask_s = ask_s
        self._may_leave = may_leave if ask_s < silence_s else None
        self._asking: asyncio.Task[None] | None = None
        self._left_early = False
        self._part_s = (silence_s if self._may_leave is None else ask_s) / _PARTS
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._last_touch = 0.0
        self._seen = 0.0  # the touch from which parts are counted
        self._parts = 0
        self._due = 0.0

    def touch(self) -> None:
        self._last_touch = self._loop.time()

    def rest(self) -> None:
        self._last_touch = math.inf

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    async def __aenter__(self) -> InactivityTimer:
        await self._limit.__aenter__()
        self._last_touch = self._seen = self._loop.time()
        self._look_at(self._seen + self._part_s)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disarm()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            silence_s = self._ask_s if self._left_early else self._silence_s
            why = f"nothing was received for {silence_s:g} s"
            if self._left_early and self._overdue is not None:
                why = "another server would have brought it by now"
            raise ServerUnresponsive(why, left_early=self._left_early) from None
        finally:
            if self._asking is not None:
                await asyncio.wait([self._asking])

    def _look_at(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        if self._last_touch == math.inf:
            self._seen = math.inf
            self._look_at(now + self._part_s)
        elif self._overdue is not None and self._overdue(now):
            self._end(now, early=True)
        elif self._last_touch != self._seen:
            self._seen, self._parts = self._last_touch, 0
            if self._asking is not None:
                self._part_s = self._silence_s / _PARTS
            self._look_at(max(self._seen + self._part_s, now))
        elif self._parts + 1 < _PARTS:
            self._parts += 1
            self._look_at((now if now - self._due > _LATE_S else self._due) + self._part_s)
        elif self._may_leave is not None:
            self._asking = self._loop.create_task(self._ask(self._may_leave))
            self._may_leave, self._parts = None, 0
            self._part_s = (self._silence_s - self._ask_s) / _PARTS
            self._look_at(now + self._part_s)
        else:
            self._end(now)

    def _end(self, now: float, *, early: bool = False) -> None:
        self._left_early = early
        self.disarm()
        self._limit.reschedule(now)

    async def _ask(self, may_leave: Callable[[], Awaitable[bool]]) -> None:
        silent_since = self._last_touch
        if await may_leave() and self._last_touch == silent_since:
            self._asking = None  # it ends here: `disarm` is not to cancel it
            self._end(self._loop.time(), early=True)
