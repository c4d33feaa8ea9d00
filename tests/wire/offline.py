"""A server, a stream and a loop without a network: time jumps, bytes come from the test.

`Loop.time` stands still while there is something to do and jumps to the next timer when there is
not: a minute's deadline costs nothing, and each run is like the last one.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Sequence
from typing import Any

from kvpool.config import ServerConfig
from kvpool.protocols import Handler, Link, Listener
from kvpool.server.block_server import BlockServer
from kvpool.types import Cluster
from kvpool_tiers.dram import Dram
from kvpool_transports.streams.server import StreamSession
from kvpool_transports.streams.stream import Stream


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if not timeout:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps."""

    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class Wire(asyncio.Transport):
    """The peer's end of a stream: `deliver` what it sends, read `sent` to see what it gets."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closed = False
        self._stream = stream
        self._reading = True
        stream.connection_made(self)

    async def deliver(self, data: bytes) -> None:
        """Bytes arrive, as many at a time as the stream has room for; stops at a closed link."""
        left = memoryview(data)
        while left and not self.closed:
            if self._reading:
                room = self._stream.get_buffer(-1)
                count = min(len(room), len(left))
                assert count, "a stream that is being read has room"
                room[:count] = left[:count]
                left = left[count:]
                self._stream.buffer_updated(count)
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(1)

    async def hang_up(self) -> None:
        """The peer is gone."""
        self.abort()
        await asyncio.sleep(0)

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._stream.connection_lost, None)

    def write_eof(self) -> None:
        pass

    def write(self, data: Any) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class NoNetwork:
    """A network that reaches nobody."""

    def connect(self, address: str) -> Link:
        raise AssertionError("nobody is dialled")

    async def serve(self, address: str, handler: Handler) -> Listener:
        raise AssertionError("nobody listens")

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


def server(capacity: int = 64 << 10) -> BlockServer:
    """A block server that nobody has told of any master."""
    return BlockServer(
        ServerConfig(id="s", masters=[], capacity=capacity),
        cluster=Cluster(),
        network=NoNetwork(),
        transports={},
        tiers=[Dram(capacity, prefault=False)],
        rng=random.Random(1),
    )


async def converse(serving: BlockServer, chunks: Sequence[bytes], *, mapped: bool) -> bytes:
    """One client's whole life: it connects, sends `chunks`, and goes. Returns what it was sent."""
    stream = Stream()
    wire = Wire(stream)
    session = StreamSession(stream, serving, mapped=mapped, scheme="shm" if mapped else "tcp")
    task = asyncio.create_task(session.run())
    for chunk in chunks:
        await wire.deliver(chunk)
    await asyncio.sleep(0)
    await wire.hang_up()
    await task
    return bytes(wire.sent)
