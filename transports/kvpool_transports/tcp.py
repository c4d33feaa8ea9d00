"""TCP: the transport that works everywhere. Verified bytes, straight into the caller's buffers.

What it adds to the shared halves (`serving.py`, `carried.py`): how to listen and how to dial.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from urllib.parse import urlsplit

from kvpool.errors import ConfigError
from kvpool.protocols import BlockStore, Channel, Listener
from kvpool_transports import exchanges
from kvpool_transports.carried import CarriedChannel
from kvpool_transports.serving import Sessions
from kvpool_transports.streams import Stream, StreamPool, os_errors


class TcpTransport:
    """`tcp://host:port`."""

    scheme = "tcp"
    same_host = False

    async def listen(self, address: str, store: BlockStore) -> Listener:
        host, port = _parse(address or "tcp://127.0.0.1:0")
        listener = _TcpListener(store)
        try:
            await listener.start(host, port)
        except (OSError, ValueError) as error:  # ValueError: a name that is none, `a..b`
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(
                f"cannot listen on {address}: {why or error}; choose another address"
            ) from None
        return listener

    async def connect(self, address: str, *, cluster: str, client: str, deadline: float) -> Channel:
        host, port = _parse(address)

        async def dial(deadline: float) -> Stream:
            loop = asyncio.get_running_loop()
            with os_errors(f"server at {address}"):
                async with asyncio.timeout_at(deadline):
                    transport, stream = await loop.create_connection(Stream, host, port)
            _tune(transport)
            try:
                await exchanges.greet(
                    stream, cluster=cluster, client=client, server="", deadline=deadline
                )
            except BaseException:
                stream.abort()
                raise
            return stream

        streams = StreamPool(dial)
        async with streams.stream(deadline):
            pass  # the server is there and speaks our protocol; the stream stays for later
        return CarriedChannel(address, streams)


class _TcpListener:
    def __init__(self, store: BlockStore) -> None:
        self._sessions = Sessions(store, mapped=False, scheme="tcp")
        self._server: asyncio.Server | None = None
        self._address = ""

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port)
        host, port = self._server.sockets[0].getsockname()[:2]
        self._address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._sessions.close()

    def _accept(self) -> Stream:
        return self._sessions.accept(_ServerStream())


class _ServerStream(Stream):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _tune(transport)


def _tune(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):  # the loop may have no sockets (simulation)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _parse(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ConfigError(f"address {address!r}: expected tcp://host:port")
