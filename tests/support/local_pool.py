"""A pool in a thread of the test's process, for tests that must not run in its loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from kvpool import ClientConfig, Pool, dev
from kvpool_transports.tcp import TcpTransport
from tests.chaos.proxy import LinkConditions
from tests.chaos.shaped_transport import ShapedTransport

T = TypeVar("T")


class LocalPool:
    """A pool in this process, in a thread, whose memory a test can reach."""

    def __init__(self, **options: Any) -> None:
        self.conditions = LinkConditions()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._shaped = ShapedTransport(TcpTransport(), self.conditions)
        self._serving: AbstractAsyncContextManager[dev.Dev] = dev.serve(
            "256MiB",
            listen=("shm://", "tcp://127.0.0.1:0"),
            transports={"tcp": self._shaped},
            **options,
        )
        self.dev: dev.Dev = self.run(self._serving.__aenter__())
        self.master = self.dev.address

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)

    def ask(self, question: Callable[[Pool], Coroutine[Any, Any, T]]) -> T:
        """What a client of it is told."""

        async def ask() -> T:
            config = ClientConfig(masters=[self.master], transports=["shm", "tcp"])
            async with self.dev.pool(config) as pool:
                return await question(pool)

        return self.run(ask())

    @property
    def blocks(self) -> int:
        return sum(member.stats.blocks for member in self.ask(lambda pool: pool.members()))

    def settled(self, within_s: float = 20.0) -> int:
        """Wait until no more blocks come; how many there are."""
        until = time.monotonic() + within_s
        blocks, seen = -1, 0
        while time.monotonic() < until:
            blocks, before = self.blocks, blocks
            seen = seen + 1 if blocks == before else 0
            if seen == 2:  # once is not enough on a busy machine: a save may take longer
                return blocks
            time.sleep(1.5)  # a heartbeat
        raise AssertionError("blocks keep coming")

    def corrupt(self, every: int = 1) -> int:
        """Flip a bit in every n-th block; how many."""

        async def flip() -> int:
            count = 0
            for server in self.dev.servers:
                for number, entry in enumerate(server.store.index.inventory()):
                    if number % every == 0:
                        server.tier.view(entry.offset, entry.size)[entry.size // 2] ^= 1  # type: ignore[attr-defined]
                        count += 1
            return count

        return self.run(flip())

    def close(self) -> None:
        self.run(self._serving.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
