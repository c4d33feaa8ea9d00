"""Inproc: client and server in one process and one loop. The dev mode, and the plainest example.

There is no wire, but the rules are the same, and so are the messages beside reads and writes: each
call has a connection of its own in the server's books, and whatever it pinned or reserved goes with
it. A call ends by its deadline, and when either side closes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvpool.checksum import block_seeds
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    LinkBroken,
    Unauthenticated,
    VersionMismatch,
)
from kvpool.protocols import (
    BlockStore,
    Channel,
    Connection,
    Listener,
    Peer,
    ReadOptions,
    ReserveRequest,
    View,
    WriteOptions,
)
from kvpool.types import Cluster, ReadBlock, ReadResult, WriteBlock, WriteStatus
from kvpool.wire.messages import M, Message
from kvpool_transports.copy_pool import CopyJob, CopyPool
from kvpool_transports.streams import requests


class InprocTransport:
    """`inproc://name`. Servers and clients that share one instance can reach each other."""

    scheme = "inproc"
    same_host = True
    authenticated = True

    def __init__(self) -> None:
        self._listeners: dict[str, _InprocListener] = {}
        self._numbers = itertools.count(2)

    def can_reach(self, address: str) -> bool:
        """Its server is in this process."""
        return address in self._listeners

    async def listen(self, address: str, store: BlockStore) -> Listener:
        if not address:
            address = name = f"inproc://{store.server}"
            while address in self._listeners:
                address = f"{name}-{next(self._numbers)}"
        _check(address)
        if address in self._listeners:
            raise ConfigError(f"cannot listen on {address}: it is taken")
        listener = self._listeners[address] = _InprocListener(address, store, self._listeners)
        return listener

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        _check(address)
        listener = self._listeners.get(address)
        if listener is None:
            raise LinkBroken(f"no server at {address} in this process")
        theirs = listener.store.cluster
        if theirs.name != cluster.name:
            raise VersionMismatch(
                f"client belongs to cluster {cluster.name!r}, this server to another one"
            )
        if theirs.secret != cluster.secret:
            raise Unauthenticated("client and server do not have the same secret")
        channel = _InprocChannel(listener, client)
        listener.channels.add(channel)
        return channel


class _InprocListener:
    def __init__(
        self, address: str, store: BlockStore, listeners: dict[str, _InprocListener]
    ) -> None:
        self.address = address
        self.store = store
        self.channels: set[_InprocChannel] = set()
        self.looks: set[Connection] = set()  # of views: they outlive their channel
        self._listeners = listeners

    async def close(self) -> None:
        if self._listeners.get(self.address) is self:  # another listener may have the address now
            del self._listeners[self.address]
        channels = list(self.channels)
        for channel in channels:
            channel.abort()
        for connection in self.looks:
            connection.close()
        for channel in channels:
            await channel.ended()


class _InprocChannel:
    def __init__(self, listener: _InprocListener, client: str) -> None:
        self._listener = listener
        self._client = client
        self._copies = CopyPool()
        self._calls: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<InprocChannel {self._listener.address}>"

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        if self._closed:
            raise LinkBroken(f"{self._listener.address} is closed")
        connection = self._listener.store.connect(Peer(self._client, "inproc"))
        try:
            yield connection
        finally:
            connection.close()

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Cancel the work inside at the deadline, and when either side closes."""
        call = asyncio.timeout_at(deadline)
        try:
            async with call:
                self._calls.add(call)
                self._idle.clear()
                yield
        except TimeoutError:
            if not call.expired():
                raise
            if self._closed:
                raise LinkBroken(f"{self._listener.address} was closed during the call") from None
            raise DeadlineExceeded(f"{self._listener.address} did not answer in time") from None
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    async def write(
        self, options: WriteOptions, blocks: Sequence[WriteBlock], *, deadline: float
    ) -> list[WriteStatus]:
        async with self._connection() as connection, self._until(deadline):
            reservations = await connection.reserve(
                ReserveRequest(
                    options.namespace,
                    options.part,
                    [block.digest for block in blocks],
                    [block.parent for block in blocks],
                    [block.size for block in blocks],
                    options.session_hint,
                    copies=[options.copies] * len(blocks) if options.copies > 1 else None,
                ),
                deadline=deadline,
            )
            statuses = [reservation.status for reservation in reservations]
            granted = [i for i, r in enumerate(reservations) if r.extent is not None]
            if not granted:
                return statuses
            seeds = block_seeds(
                options.namespace, options.part, [blocks[i].digest for i in granted]
            )
            targets = connection.views(reservations)
            jobs = [
                CopyJob(blocks[i].pieces, (target,), seed, hash_source=True)
                for i, target, seed in zip(granted, targets, seeds, strict=True)
            ]
            checksums = await self._copies.run(jobs, deadline=deadline)
            ids = [reservations[i].id for i in granted]
            sealed = await connection.seal(
                ids, checksums, visible=options.visible, deadline=deadline
            )
            if options.on_alone is not None and WriteStatus.STORED in sealed:
                options.on_alone(connection.alone)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses

    async def read(
        self, options: ReadOptions, blocks: Sequence[ReadBlock], *, deadline: float
    ) -> list[ReadResult]:
        digests = [block.digest for block in blocks]
        buffer_sizes = [block.size for block in blocks]
        if options.idle_timeout is not None:
            options.idle_timeout.disarm()
        async with self._connection() as connection, self._until(deadline):
            pins = await connection.pin(options.namespace, options.part, digests, buffer_sizes)
            results = [ReadResult(pin.status) for pin in pins]
            hits = [i for i, pin in enumerate(pins) if pin.extent is not None]
            seeds: Sequence[int | None] = [None] * len(hits)
            if options.verify:
                seeds = block_seeds(options.namespace, options.part, [digests[i] for i in hits])
            sources = connection.views(pins)
            jobs = [
                CopyJob((source,), blocks[i].pieces, seed)
                for i, source, seed in zip(hits, sources, seeds, strict=True)
            ]
            got = await self._copies.run(jobs, deadline=deadline)
        expected = [pins[i].checksum if options.verify else 0 for i in hits]
        arrived = requests.verified([len(s) for s in sources], expected, got)
        for position, result in zip(hits, arrived, strict=True):
            results[position] = result
        return results

    @asynccontextmanager
    async def read_view(
        self, options: ReadOptions, digests: Sequence[bytes], *, deadline: float
    ) -> AsyncIterator[list[View]]:
        async with self._connection() as connection:
            async with self._until(deadline):
                buffer_sizes = [1 << 62] * len(digests)
                pins = await connection.pin(
                    options.namespace, options.part, digests, buffer_sizes, view=True
                )
                memory = iter(connection.views(pins))
                views = [
                    View(pin.status, next(memory).toreadonly())
                    if pin.extent is not None
                    else View(pin.status)
                    for pin in pins
                ]
                if options.verify:
                    checksums = [pin.checksum for pin in pins]
                    views = await requests.verify_views(
                        self._copies, options, digests, views, checksums, deadline
                    )
            if self._closed:
                raise LinkBroken(f"{self._listener.address} is closed")
            self._listener.looks.add(connection)
            try:
                yield views
            finally:
                self._listener.looks.discard(connection)

    async def request(self, message: Message, answer: type[M], *, deadline: float) -> M:
        async with self._connection() as connection, self._until(deadline):
            answered = await connection.answer(message)
        assert isinstance(answered, answer)
        return answered

    async def close(self) -> None:
        self.abort()
        self._copies.close()

    def abort(self) -> None:
        self._closed = True
        self._listener.channels.discard(self)
        self._copies.stop()
        for call in self._calls:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())

    async def ended(self) -> None:
        """After `abort`: wait until the last call has stopped, which is a matter of loop steps."""
        await self._idle.wait()


def _check(address: str) -> None:
    if not address.removeprefix("inproc://") or not address.startswith("inproc://"):
        raise ConfigError(f"address {address!r}: expected inproc://name")
