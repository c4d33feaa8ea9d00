"""Whether others have their turn while something long is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Of the others, and the most steps between two of them."""

    def __init__(self) -> None:
        self.count = self.longest = self._steps = 0

    def step(self) -> None:
        self._steps += 1

    async def go_round(self) -> None:
        while True:
            self.count += 1
            self.longest, self._steps = max(self.longest, self._steps), 0
            await asyncio.sleep(0)


@asynccontextmanager
async def others() -> AsyncIterator[Turns]:
    """They are there inside, and at the end have a turn once more."""
    turns = Turns()
    going = asyncio.create_task(turns.go_round())
    try:
        yield turns
        await asyncio.sleep(0)
    finally:
        going.cancel()
