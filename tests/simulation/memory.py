"""Simulated memory: a tier of bytes, and a transport whose clients write directly into it.

The transport is shared memory without the mapping: sessions, streams, copy pool and channel are
the real ones. Copies happen some time after the call, share by share, as with threads. If the
client is frozen in between, they happen after the thaw.
"""

from __future__ import annotations

import asyncio

from kvpool.errors import LinkBroken
from kvpool.protocols import BlockStore, Channel, Listener
from kvpool.types import Cluster
from kvpool_transports.copy_pool import CopyPool
from kvpool_transports.streams import requests
from kvpool_transports.streams.mapped_channel import MappedChannel
from kvpool_transports.streams.pool import StreamPool, os_errors
from kvpool_transports.streams.server import Sessions
from kvpool_transports.streams.stream import Stream
from tests.simulation.network import LOCAL, Net


class SimTier:
    """`capacity` bytes of memory, which are lost with the process."""

    name = "dram"
    survives_restart = False

    def __init__(self, capacity: int, alignment: int) -> None:
        self.capacity = capacity
        self.alignment = alignment
        self.memory = memoryview(bytearray(capacity))

    def view(self, offset: int, size: int) -> memoryview:
        return self.memory[offset : offset + size]

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.view(offset, len(buffer))

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        self.view(offset, len(buffer))[:] = buffer

    def close(self) -> None:
        pass


class SimShm:
    """`shm://host:port`: a stream for messages; clients copy to and from the server's memory."""

    scheme = "shm"
    same_host = True
    authenticated = True

    def __init__(self, net: Net) -> None:
        self._net = net

    async def listen(self, address: str, store: BlockStore) -> Listener:
        listener = _SimShmListener(self._net, store)
        await listener.start()
        return listener

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        segment = _SimSegment(self._net, address, cluster, client)
        streams = StreamPool(segment.dial)
        channel = MappedChannel(address, streams, segment, CopyPool(3, inline_max=0))
        try:
            async with streams.stream(deadline):
                pass
        except BaseException:
            await channel.close()
            raise
        return channel


class _SimShmListener:
    def __init__(self, net: Net, store: BlockStore) -> None:
        self._net = net
        self._store = store
        self._sessions = Sessions(store, mapped=True, scheme="shm")
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, LOCAL, 0)
        _, port = self._server.sockets[0].getsockname()
        self.address = f"shm://{LOCAL}:{port}"
        tier = self._store.tier
        assert isinstance(tier, SimTier)
        self._net.segments[self.address] = tier.memory

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._sessions.close()

    def _accept(self) -> Stream:
        return self._sessions.accept(Stream())


class _SimSegment:
    """One server's memory as a client has it mapped. It stays valid after the server's end."""

    def __init__(self, net: Net, address: str, cluster: Cluster, client: str) -> None:
        self._net = net
        self._address = address
        self._cluster = cluster
        self._client = client
        self._memory: memoryview | None = None

    def readable(self) -> memoryview:
        if self._memory is None:
            raise LinkBroken("the channel is closed")
        return self._memory

    async def writable(self, deadline: float) -> memoryview:
        return self.readable()

    def close(self) -> None:
        self._memory = None

    async def dial(self, deadline: float) -> Stream:
        loop = asyncio.get_running_loop()
        host, _, port = self._address.removeprefix("shm://").partition(":")
        with os_errors(f"server at {self._address}"):
            async with asyncio.timeout_at(deadline):
                _, stream = await loop.create_connection(Stream, host, int(port))
        try:
            await requests.handshake(
                stream, cluster=self._cluster, client=self._client, server="", deadline=deadline
            )
            if self._memory is None:
                self._memory = self._net.segments[self._address]
        except BaseException:
            stream.abort()
            raise
        return stream
