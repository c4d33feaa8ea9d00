"""Ends a call when its server has sent nothing for too long; a slow one is not a lost one."""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvpool.errors import DeadlineExceeded


class ServerUnresponsive(DeadlineExceeded):
    """A server has sent nothing for as long as this client waits; another one may answer."""


class InactivityTimer:
    """The client's `IdleTimeout`: the block must receive something at least every `silence_s`.

        async with InactivityTimer(silence_s=1.0) as timer: ...

    Raises ServerUnresponsive otherwise (design: unresponsive-servers). The loop's timer is set
    once and looks at the time of the last `touch` when it fires, so that a touch, which comes with
    every chunk that is received, is one assignment.
    """

    __slots__ = ("_last_touch", "_limit", "_loop", "_silence_s", "_timer")

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._last_touch = 0.0

    def touch(self) -> None:
        self._last_touch = self._loop.time()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def __aenter__(self) -> InactivityTimer:
        await self._limit.__aenter__()
        self._last_touch = self._loop.time()
        self._timer = self._loop.call_at(self._last_touch + self._silence_s, self._on_timer)
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

    def _on_timer(self) -> None:
        due = self._last_touch + self._silence_s
        if self._loop.time() >= due:
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_at(due, self._on_timer)
