"""TCP: the transport that works everywhere. Verified bytes, straight into the caller's buffers.

A frame's header comes apart from its payload; the payload is received into its destination
(`BufferedProtocol`, no copy in Python) and hashed piece by piece while it is in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from kvpool.errors import BadMessage, ConfigError
from kvpool.protocols import BlockStore, Channel, Listener, Reading, Writing
from kvpool.types import (
    Namespace,
    Outgoing,
    ReadResult,
    ReadStatus,
    Wanted,
    WriteStatus,
)
from kvpool.wire.frames import Frame
from kvpool.wire.messages import Data, decode_answer
from kvpool_transports import exchanges
from kvpool_transports.serving import Session
from kvpool_transports.streams import (
    Landing,
    Stream,
    StreamPool,
    os_errors,
)


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
        return _TcpChannel(address, streams)


class _TcpListener:
    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()
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
        for task in self._sessions:
            task.cancel()
        if self._sessions:
            await asyncio.wait(self._sessions)

    def _accept(self) -> Stream:
        stream = _ServerStream()
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._sessions.add(task)
        task.add_done_callback(self._sessions.discard)
        return stream

    async def _serve(self, stream: Stream) -> None:
        await Session(stream, self._store, mapped=False, scheme="tcp").run()


class _ServerStream(Stream):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _tune(transport)


class _TcpChannel:
    def __init__(self, address: str, streams: StreamPool) -> None:
        self._address = address
        self._streams = streams

    def __repr__(self) -> str:
        return f"<TcpChannel {self._address} {self._streams!r}>"

    async def write(
        self, writing: Writing, blocks: Sequence[Outgoing], *, deadline: float
    ) -> list[WriteStatus]:
        async with self._streams.stream(deadline) as stream:
            statuses, granted, reserved = await exchanges.reserve(stream, writing, blocks, deadline)
            if not granted:
                return statuses
            seeds = exchanges.seeds(
                writing.namespace, writing.part, [blocks[i].digest for i in granted]
            )
            payload = [blocks[i].buffer for i in granted]
            checksums = await stream.send(None, payload, seeds=seeds, deadline=deadline)
            sealed = await exchanges.seal(stream, writing, reserved.ids, checksums, deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses

    async def read(
        self, reading: Reading, blocks: Sequence[Wanted], *, deadline: float
    ) -> list[ReadResult]:
        data: Data | None = None
        landing: Landing | None = None
        hits: list[int] = []
        room = [len(block.buffer) for block in blocks]

        def sink(frame: Frame) -> Landing:
            """Where the bytes go, as soon as the answer says which blocks they are of."""
            nonlocal data, landing
            data = decode_answer(Data, frame.type, frame.body)
            statuses = exchanges.read_statuses(data.statuses, len(blocks))
            hits.extend(i for i, status in enumerate(statuses) if status is ReadStatus.HIT)
            if not len(hits) == len(data.sizes) == len(data.checksums):
                raise BadMessage(f"{len(hits)} hits, {len(data.sizes)} sizes")
            if any(not 0 < size <= room[i] for i, size in zip(hits, data.sizes, strict=True)):
                raise BadMessage("a block larger than the buffer for it")
            buffers = [blocks[i].buffer[:size] for i, size in zip(hits, data.sizes, strict=True)]
            seeds = None
            if reading.verify:
                digests = [blocks[i].digest for i in hits]
                seeds = exchanges.seeds(reading.namespace, reading.part, digests)
            landing = Landing(buffers, seeds)
            return landing

        async with self._streams.stream(deadline) as stream:
            await stream.send(exchanges.read_request(reading, blocks, room), deadline=deadline)
            await stream.receive(sink, deadline=deadline)
        assert data is not None
        assert landing is not None
        results = [ReadResult(s) for s in exchanges.read_statuses(data.statuses, len(blocks))]
        got = landing.checksums if reading.verify else data.checksums
        arrived = exchanges.verified(data.sizes, data.checksums, got)
        for position, result in zip(hits, arrived, strict=True):
            results[position] = result
        return results

    async def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        return await exchanges.remove(self._streams, namespace, digests, deadline)

    async def suspect(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        return await exchanges.suspect(self._streams, namespace, part, digests, deadline)

    async def close(self) -> None:
        self._streams.abort()

    def abort(self) -> None:
        self._streams.abort()


def _tune(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
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
