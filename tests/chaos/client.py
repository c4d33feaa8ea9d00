"""A client's place in the cluster: the load that runs there, and what it reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.errors import ServerLost
from tests.chaos.cluster import Cluster, Node

Hear = Callable[[str, dict[str, Any]], None]


class ClientNode(Node):
    """Starts `tests.chaos.load` and hands on what it prints."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        *,
        transports: Sequence[str],
        users: int,
        seed: int,
        hear: Hear,
    ) -> None:
        super().__init__(name, "tests.chaos.load")
        self._settings = {
            "name": name,
            "masters": cluster.masters_of("clients"),
            "routes": cluster.routes(),
            "transports": list(transports),
            "users": users,
            "seed": seed,
        }
        self._lives = 0
        self._hear = hear
        self._listening: asyncio.Task[list[str]] | None = None

    async def start(self) -> None:
        """Start it, and listen to it."""
        self._lives += 1
        self.setup = json.dumps({**self._settings, "life": self._lives})
        await super().start()
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    def storm(self, size: int) -> None:
        """Have it write `size` bytes of new blocks, as fast as it can."""
        if self.process is not None:
            self.process.tell(f"storm {size}")

    async def finish(self, within_s: float) -> list[str]:
        """Let it end its calls and close its pool; what it has left open. Raises ServerLost."""
        assert self.process is not None
        assert self._listening is not None
        self.process.tell("stop")
        try:
            files = await asyncio.wait_for(self._listening, within_s)
        except TimeoutError:
            raise ServerLost(f"{self.name} did not end its calls in {within_s:g} s") from None
        await self.close()
        return files

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        await super().close()

    async def _listen(self) -> list[str]:
        """Hear all its reports; the last one says what it has left open."""
        assert self.process is not None
        process = self.process
        while True:
            try:
                said = json.loads(await process.line())
            except ServerLost:
                if self.process is process:
                    raise
                return []  # it was killed
            files: list[str] | None = said.pop("files")
            self._hear(self.name, said)
            if files is not None:
                return files
