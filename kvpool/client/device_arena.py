"""Memory that the calls of one client share while blocks for devices pass through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvpool.errors import DeadlineExceeded


class Arena:
    """So many bytes, of which each round takes some; it frees them however it ends."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.taken: dict[int, int] = {}  # sizes of what is allocated, by where it starts
        self._allocating = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def allocate(self, size: int, deadline: float) -> AsyncIterator[int]:
        """Where so many bytes are the caller's. Raises DeadlineExceeded."""
        start: int | None = None
        try:
            # One waits for space at a time, or small rounds would starve a large one.
            async with until(deadline), self._allocating:
                while (start := self._gap(size)) is None:
                    self._freed.clear()
                    await self._freed.wait()
                self.taken[start] = size
            yield start
        finally:
            if start is not None:
                del self.taken[start]
                self._freed.set()

    def _gap(self, size: int) -> int | None:
        """The first place where so many bytes are free; None while there is none."""
        start = 0
        for other, taken in sorted(self.taken.items()):
            if other - start >= size:
                break
            start = other + taken
        return start if start + size <= self._capacity else None


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when what is inside does not end in time."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the device's copies did not end in time") from None
