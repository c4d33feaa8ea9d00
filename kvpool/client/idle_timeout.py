"""Ends a call when its server has sent nothing for too long; a slow one is not a lost one."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Final

from kvpool.errors import DeadlineExceeded

#: The silence is counted in so many parts. While this client's own loop is busy nothing is read, so
#: a part counts once, however late its timer fires: the client's silence is not the server's.
_PARTS: Final = 4
#: A timer that fires so much later than it should tells of a busy loop.
_LATE_S: Final = 0.02


class ServerUnresponsive(DeadlineExceeded):
    """A server has sent nothing for as long as this client waits; another one may answer."""


class InactivityTimer:
    """The client's `IdleTimeout`: the block must receive something at least every `silence_s`.

        async with InactivityTimer(silence_s=1.0) as timer: ...

    Raises ServerUnresponsive otherwise (design: unresponsive-servers). A touch, which comes with
    every chunk that is received, is one assignment: the loop's timer looks for it when it fires.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
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

    async def __aenter__(self) -> InactivityTimer:
        await self._limit.__aenter__()
        self._last_touch = self._seen = self._loop.time()
        self._look_at(self._seen + self._silence_s / _PARTS)
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
            raise ServerUnresponsive(f"nothing was received for {self._silence_s:g} s") from None

    def _look_at(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        now, part_s = self._loop.time(), self._silence_s / _PARTS
        if self._last_touch == math.inf:
            self._seen = math.inf
            self._look_at(now + part_s)
        elif self._last_touch != self._seen:
            self._seen, self._parts = self._last_touch, 0
            self._look_at(max(self._seen + part_s, now))
        elif self._parts + 1 < _PARTS:
            self._parts += 1
            self._look_at((now if now - self._due > _LATE_S else self._due) + part_s)
        else:
            self._limit.reschedule(now)
