"""TCP: the transport that works everywhere. Verified bytes, straight into the caller's buffers.

What it adds to the shared halves (`streams/`): how to listen and how to dial. ucx
listens the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from kvpool import logs
from kvpool.addresses import is_loopback, join, listening, parse
from kvpool.errors import ConfigError
from kvpool.protocols import BlockStore, Channel, Listener
from kvpool.types import Cluster
from kvpool_transports.streams import requests
from kvpool_transports.streams.pool import StreamPool, os_errors
from kvpool_transports.streams.requests import StreamChannel
from kvpool_transports.streams.server import Sessions
from kvpool_transports.streams.stream import Stream

#: Connections that the kernel keeps until the loop accepts them (at most `somaxconn`), all in one
#: turn. Beyond it an attempt is dropped, and its kernel tries again after a second.
BACKLOG: Final = 256

log = logs.get("kvpool.transport")


class TcpTransport:
    """`tcp://host:port`."""

    scheme = "tcp"
    same_host = False
    authenticated = True

    def __init__(self) -> None:
        self._warned = False

    async def listen(self, address: str, store: BlockStore) -> Listener:
        if address:
            self._warn_once(parse(address, "tcp")[0], store.cluster)
        sessions = Sessions(store, mapped=False, scheme="tcp")
        listener = TcpListener(sessions, "tcp", lambda: sessions.accept(_ServerStream()))
        await listener.start(address)
        return listener

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        host, port = parse(address, self.scheme)

        async def dial(deadline: float) -> Stream:
            with os_errors(f"server at {address}"):
                async with asyncio.timeout_at(deadline):
                    stream, binding = await self._open(host, port, cluster)
            try:
                await requests.handshake(
                    stream,
                    cluster=cluster,
                    client=client,
                    server="",
                    deadline=deadline,
                    binding=binding,
                )
            except BaseException:
                stream.abort()
                raise
            return stream

        streams = StreamPool(dial)
        async with streams.stream(deadline):
            pass  # the server is there and speaks our protocol; the stream stays for later
        return StreamChannel(address, streams)

    def _warn_once(self, host: str, cluster: Cluster) -> None:
        """A secret suggests protection, and here it protects the handshake only."""
        if cluster.secret and not self._warned and not is_loopback(host):
            self._warned = True
            log.warning(
                "blocks are neither encrypted nor authenticated on this link",
                host=host,
                advice="use tls:// unless the network is trusted (docs/security.md)",
            )

    async def _open(self, host: str, port: int, cluster: Cluster) -> tuple[Stream, bytes]:
        """A new connection, and what both ends know of it that a peer in the middle cannot have."""
        self._warn_once(host, cluster)
        transport, stream = await asyncio.get_running_loop().create_connection(Stream, host, port)
        tune(transport)
        return stream, b""


class TcpListener:
    """Accepts connections at a TCP port; each gets its own session."""

    def __init__(
        self, sessions: Sessions, scheme: str, accept: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._sessions = sessions
        self._scheme = scheme
        self._accept = accept
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, address: str) -> None:
        """Raises ConfigError."""
        host, port = parse(address or f"{self._scheme}://127.0.0.1:0", self._scheme)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, **listening(host, port, BACKLOG))
        except (OSError, ValueError) as error:  # ValueError: a name that is none, `a..b`
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(
                f"cannot listen on {address}: {why or error}; choose another address"
            ) from None
        self.address = f"{self._scheme}://{join(*self._server.sockets[0].getsockname()[:2])}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._sessions.close()


class _ServerStream(Stream):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        tune(transport)


def tune(transport: asyncio.BaseTransport) -> None:
    """Small frames go at once, and a peer that lost its power is noticed some day."""
    sock = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):  # the loop may have no sockets (simulation)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
