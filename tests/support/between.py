"""One who stands between two processes, on the way of their bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable


@contextlib.asynccontextmanager
async def between(
    address: str,
    passes: Callable[[bytes, bool], bytes],
    *,
    shown: ssl.SSLContext | None = None,
    far: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """The address of one who passes on to `address` what `passes` makes of each piece, and back;
    it is told whether the piece is a reply. With `shown` and `far` he ends TLS on both sides."""
    host, _, port = address.rpartition("/")[2].rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(passes(data, reply))
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection(host, int(port), ssl=far)
        await asyncio.gather(copy(reader, onward, False), copy(back, writer, True))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=shown)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
