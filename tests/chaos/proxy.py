"""A TCP proxy: it forwards bytes to another address and can delay, chop, stall or cut them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass

#: SO_LINGER with zero seconds: closing resets the connection instead of ending it in order.
_RESET = struct.pack("ii", 1, 0)
_PIECE = 1 << 16


@dataclass(slots=True)
class LinkConditions:
    """What the proxy does to bytes, in both directions."""

    #: Each piece waits this long.
    delay_s: float = 0.0
    #: Connections are accepted, but no byte is forwarded.
    stalled: bool = False
    #: New connections are reset.
    cut: bool = False
    #: Bytes arrive in pieces of 1 to `chop` bytes, if not 0.
    chop: int = 0
    #: Bytes per second of each connection in each direction; 0 means no limit.
    rate: float = 0.0


class Proxy:
    """Forwards `address` to `target`; `conditions` may be changed at any time."""

    def __init__(self, target: str, rng: random.Random | None = None) -> None:
        self.conditions = LinkConditions()
        self.address = ""
        self.moved = 0  # bytes, in both directions
        self._target = target
        self._rng = rng or random.Random(target)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def cut(self) -> None:
        """Reset every connection and refuse new ones, until `heal`."""
        self.conditions.cut = True
        self.reset()

    def reset(self) -> None:
        """Reset every connection; new ones are accepted."""
        for writer in tuple(self._connections):
            _abort(writer)

    def heal(self) -> None:
        """Forward everything at once from now on."""
        self.conditions = LinkConditions()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            if not self.conditions.cut:
                back, onward = await asyncio.open_connection(*self._target.split(":"))
                self._connections.add(onward)
                await self._forward(reader, onward, back, writer)
        except (OSError, asyncio.CancelledError):
            pass  # an error on one side becomes a reset on both sides
        finally:
            for end in (writer, onward):
                if end is not None:
                    self._connections.discard(end)
                    _abort(end)
            self._tasks.discard(task)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        onward: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Both directions, until one of them ends."""
        pumps = [
            asyncio.ensure_future(self._pump(reader, onward)),
            asyncio.ensure_future(self._pump(back, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            await self._wait()
            if self.conditions.rate:
                await asyncio.sleep(len(data) / self.conditions.rate)
            self.moved += len(data)
            if not self.conditions.chop:
                writer.write(data)
            while self.conditions.chop and data:
                # Pieces of random sizes: single bytes only would take too long.
                size = self._rng.randint(1, self.conditions.chop)
                writer.write(data[:size])
                data = data[size:]
                await asyncio.sleep(0)
            await writer.drain()

    async def _wait(self) -> None:
        if self.conditions.delay_s:
            await asyncio.sleep(self._rng.uniform(0, 2 * self.conditions.delay_s))
        while self.conditions.stalled:  # noqa: ASYNC110 (`conditions` has no event to wait for)
            await asyncio.sleep(0.01)


def _abort(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):  # the socket may be closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
