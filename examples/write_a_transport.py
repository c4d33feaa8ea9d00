"""Write a transport in an afternoon: `unix:///path`, tcp's frames over a Unix domain socket.

Two halves are shared by all transports over byte streams, and exported by
`kvpool_transports.streams`: what the server does with a client (`Sessions`), and what a channel
sends to its server (`StreamChannel`, over a `StreamPool`). What is left is how to listen and how to
dial.

Run this file: the conformance kit checks the transport, then two clients share a pool over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from secrets import token_hex

from kvpool import ClientConfig, Namespace, dev
from kvpool.errors import ConfigError
from kvpool.protocols import BlockStore, Channel, Listener
from kvpool.testing import TRANSPORT_CHECKS, check_transport
from kvpool.types import Cluster
from kvpool_transports.streams import (
    Sessions,
    Stream,
    StreamChannel,
    StreamPool,
    handshake,
    os_errors,
)


class UnixTransport:
    """`unix:///path`. Who may write to the file may use the pool: the umask decides."""

    scheme = "unix"
    same_host = True
    authenticated = True

    async def listen(self, address: str, store: BlockStore) -> Listener:
        """Serve at `address`; if it is empty, at a new one."""
        listener = _UnixListener(store)
        await listener.start(address)
        return listener

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        path = _path(address)

        async def dial(deadline: float) -> Stream:
            """Open a stream and make the handshake. After any error no stream is left open."""
            loop = asyncio.get_running_loop()
            with os_errors(f"server at {address}"):  # no OSError may reach a caller
                async with asyncio.timeout_at(deadline):
                    _, stream = await loop.create_unix_connection(Stream, path)
            try:
                await handshake(
                    stream, cluster=cluster, client=client, server="", deadline=deadline
                )
            except BaseException:  # cancelled, too
                stream.abort()  # it is useless without a complete handshake
                raise
            return stream

        streams = StreamPool(dial)
        async with streams.stream(deadline):
            pass  # the server answers with our protocol; the stream is kept for the first call
        return StreamChannel(address, streams)


class _UnixListener:
    """The server's half: sockets come from asyncio, everything else from `Sessions`."""

    def __init__(self, store: BlockStore) -> None:
        self._sessions = Sessions(store, mapped=False, scheme="unix")
        self._server: asyncio.Server | None = None
        self._path = ""

    @property
    def address(self) -> str:
        return f"unix://{self._path}"

    async def start(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        path = _path(address) if address else f"{tempfile.gettempdir()}/kvpool-{token_hex(8)}.sock"
        # Not asyncio's `bind`: it removes an existing socket, even one that a server uses.
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(path)
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        self._path = path
        self._server = await loop.create_unix_server(self._accept, sock=sock)

    async def close(self) -> None:
        """Stop accepting, then end every connection. Idempotent, as the contract asks."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        await self._sessions.close()

    def _accept(self) -> Stream:
        return self._sessions.accept(Stream())


def _path(address: str) -> str:
    path = address.removeprefix("unix://")
    if path == address or not path.startswith("/") or len(path) > 100 or "\0" in path:
        raise ConfigError(f"address {address!r}: expected unix:///path of at most 100 characters")
    return path


async def main() -> None:
    logging.disable(logging.ERROR)  # of strangers and damaged blocks, which the checks play
    left_out = await check_transport(UnixTransport)
    logging.disable(logging.NOTSET)
    kept = len(TRANSPORT_CHECKS) - len(left_out)
    print(f"unix:// keeps {kept} promises of a transport; {len(left_out)} are of what it has not")
    model, chain = Namespace("example/model"), [bytes([n]) * 32 for n in range(8)]
    unix = UnixTransport()
    async with dev.serve("64MiB", listen=("unix://",), transports={"unix": unix}) as running:
        config = ClientConfig(masters=[running.address], transports=["unix"])
        async with running.pool(config) as one, running.pool(config) as other:
            await one.write(model, chain, [digest * 4096 for digest in chain])
            buffers = [bytearray(32 * 4096) for _ in chain]
            results = await other.read(model, chain, buffers)
            right = buffers == [digest * 4096 for digest in chain]
            print(f"{sum(r.status.hit for r in results)} of 8 blocks over unix://, right: {right}")


if __name__ == "__main__":
    asyncio.run(main())
