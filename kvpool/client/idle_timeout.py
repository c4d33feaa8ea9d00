"""Ends a call when its server has sent nothing for too long."""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvpool.errors import (
    DeadlineExceeded,
)


class ServerUnresponsive(DeadlineExceeded):
    """A server has said nothing for as long as we care to wait; another one may know more."""


class InactivityTimer:
    """Waits as long as the server talks: `async with InactivityTimer(1.0): ...` raises Silent.

    The timer is armed once and looks back when it fires, so that hearing costs one assignment.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0

    def touch(self) -> None:
        self._heard = self._loop.time()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def __aenter__(self) -> InactivityTimer:
        await self._limit.__aenter__()
        self.touch()
        self._timer = self._loop.call_at(self._heard + self._silence_s, self._look)
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
            raise ServerUnresponsive(f"nothing was heard for {self._silence_s:g} s") from None

    def _look(self) -> None:
        due = self._heard + self._silence_s
        if self._loop.time() >= due:
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_at(due, self._look)
