"""A disk under a tier of a server, which fails or hangs when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

from kvpool.errors import Unavailable


class FailingDisk:
    """Calls fail while there is a text for them, and hang while `runs` is clear."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.size, self.mode, self.close = inner.size, inner.mode, inner.close
        self.read_error = self.write_error = ""
        self.runs = asyncio.Event()
        self.runs.set()
        self.written = self.calls = 0

    @classmethod
    def under(cls, tier: Any) -> FailingDisk:
        """Put in between a tier and its disk."""
        tier._disk = tier._payload.disk = made = cls(tier._disk)
        return made

    async def read(self, offset: int, buffer: memoryview) -> None:
        self.calls += 1
        await self.runs.wait()
        if self.read_error:
            raise Unavailable(self.read_error)
        await self._inner.read(offset, buffer)

    async def write(self, offset: int, buffer: memoryview) -> None:
        self.calls += 1
        await self.runs.wait()
        if self.write_error:
            raise Unavailable(self.write_error)
        self.written += 1
        await self._inner.write(offset, buffer)
