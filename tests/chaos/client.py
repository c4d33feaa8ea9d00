"""A client process of the cluster: the load that runs in it, and the reports that it prints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.errors import ServerLost
from tests.chaos.cluster import Node, ProcessCluster

OnReport = Callable[[str, dict[str, Any]], None]


class ClientNode(Node):
    """Starts `tests.chaos.load` and passes its reports to `on_report`."""

    def __init__(
        self,
        name: str,
        cluster: ProcessCluster,
        *,
        transports: Sequence[str],
        users: int,
        seed: int,
        on_report: OnReport,
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
        self._on_report = on_report
        self._reading: asyncio.Task[list[str]] | None = None

    async def start(self) -> None:
        """Start the process and read its reports."""
        self._lives += 1
        self.setup = json.dumps({**self._settings, "life": self._lives})
        await super().start()
        self._reading = asyncio.get_running_loop().create_task(self._read_reports())

    def storm(self, size: int) -> None:
        """Make the client write `size` bytes of new blocks as fast as it can."""
        if self.process is not None:
            self.process.write_line(f"storm {size}")

    async def finish(self, within_s: float) -> list[str]:
        """Let the client end its calls and close its pool; returns the files that it left open.

        Raises ServerLost when that takes longer than `within_s`.
        """
        assert self.process is not None
        assert self._reading is not None
        self.process.write_line("stop")
        try:
            files = await asyncio.wait_for(self._reading, within_s)
        except TimeoutError:
            raise ServerLost(f"{self.name} did not end its calls in {within_s:g} s") from None
        await self.close()
        return files

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await super().close()

    async def _read_reports(self) -> list[str]:
        """Read all reports; the last one lists the files that the client left open."""
        assert self.process is not None
        process = self.process
        while True:
            try:
                report = json.loads(await process.line())
            except ServerLost:
                if self.process is process:
                    raise
                return []  # the process was killed on purpose
            files: list[str] | None = report.pop("files")
            self._on_report(self.name, report)
            if files is not None:
                return files
