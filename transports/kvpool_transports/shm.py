"""Shared memory: one copy from the pool into the caller's buffer, or none at all.

A Unix domain socket carries control. Right after accepting a client of the same user, the server
passes two descriptors of its segment (SCM_RIGHTS): one read-only, one writable. Clients map the
first to read and the second only when they write. The socket lives in the abstract namespace, so
nothing is left behind, not even after kill -9.

Pins and reservations belong to the socket. The client closes it only after its own copies have
stopped, and a dead process has no mapping: so EOF means that nobody writes there any more. When it
is *our* side that gives up on a writer, its process may be frozen in mid-copy; its extents then
rest in quarantine until a pidfd says that the process is gone.

A process that may map a segment is trusted with that segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager

import numpy as np

from kvpool import logs
from kvpool.errors import BadMessage, ConfigError, LinkBroken
from kvpool.protocols import (
    BlockStore,
    Channel,
    Connection,
    Listener,
    Mappable,
    Reading,
    View,
    Writing,
)
from kvpool.types import (
    BLOCK_SIZE_MAX,
    Namespace,
    Outgoing,
    ReadResult,
    ReadStatus,
    Wanted,
    WriteStatus,
)
from kvpool.wire.messages import Pinned, Unpin
from kvpool_transports import exchanges
from kvpool_transports.copier import Copier, Job
from kvpool_transports.serving import Session
from kvpool_transports.streams import Stream, StreamPool, os_errors

_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module
_MADV_POPULATE_WRITE = 23
_PREFAULT_STEP = 64 << 20
_UCRED = struct.Struct("iII")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

log = logs.get("kvpool.shm")


class ShmTransport:
    """`shm://@name` (abstract socket) or `shm:///path`."""

    scheme = "shm"
    same_host = True

    def __init__(self, copy_threads: int | None = None) -> None:
        self._copy_threads = copy_threads

    async def listen(self, address: str, store: BlockStore) -> Listener:
        if not isinstance(store.tier, Mappable):
            raise ConfigError(f"tier {store.tier.name!r} cannot be mapped: use tcp")
        listener = _ShmListener(store, store.tier)
        listener.start(address or f"shm://@kvpool-{store.server}-{secrets.token_hex(8)}")
        return listener

    async def connect(self, address: str, *, cluster: str, client: str, deadline: float) -> Channel:
        channel = _ShmChannel(address, cluster, client, self._copy_threads)
        try:
            await channel.open(deadline)
        except BaseException:
            await channel.close()
            raise
        return channel


# --- server -------------------------------------------------------------------------------


class _ShmListener:
    def __init__(self, store: BlockStore, memory: Mappable) -> None:
        self._store = store
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._sessions: set[asyncio.Task[None]] = set()
        self._watched: set[int] = set()
        self._read_only = -1
        self._address = ""
        self._path = ""

    @property
    def address(self) -> str:
        return self._address

    def start(self, address: str) -> None:
        try:
            self._socket.bind(_socket_name(address))
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None
        self._address = address
        self._path = "" if "@" in address else address.removeprefix("shm://")
        # Opened anew through /proc, because a dup of the memfd would be writable.
        self._read_only = os.open(f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._start(self._accept())

    async def close(self) -> None:
        self._socket.close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        for task in self._sessions:
            task.cancel()
        if self._sessions:
            await asyncio.wait(self._sessions)
        for pidfd in self._watched:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()
        if self._read_only >= 0:
            os.close(self._read_only)
            self._read_only = -1

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._sessions.add(task)
        task.add_done_callback(self._sessions.discard)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._socket)
            except OSError as error:
                if self._socket.fileno() < 0:
                    return
                log.warning("cannot accept", why=str(error))
                await asyncio.sleep(0.1)  # out of descriptors: let some connections end
                continue
            self._start(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        try:
            pid, uid, _ = _UCRED.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            if uid not in (os.geteuid(), 0):
                log.warning("refused a client of another user", uid=uid, pid=pid)
                sock.close()
                return
            socket.send_fds(sock, [b"S"], [self._read_only, self._memory.fd])
            _, stream = await self._loop.connect_accepted_socket(Stream, sock)
        except OSError as error:
            log.info("connection failed", why=str(error))
            sock.close()
            return
        session = Session(stream, self._store, mapped=True, scheme="shm")
        await session.run(lambda connection: self._watch(pid, connection))

    def _watch(self, pid: int, connection: Connection) -> None:
        """Tell the books when the process has ended; until then its extents are not reused."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            connection.writer_gone()
            return
        except OSError as error:  # another pid namespace: we cannot know, so never reuse
            log.warning("cannot watch a frozen writer", pid=pid, why=str(error))
            return

        def ended() -> None:
            self._loop.remove_reader(pidfd)
            self._watched.discard(pidfd)
            os.close(pidfd)
            connection.writer_gone()

        self._watched.add(pidfd)
        self._loop.add_reader(pidfd, ended)


# --- client -------------------------------------------------------------------------------


class _Mapping:
    """A server's segment, mapped here; touched in the background so that first reads are fast."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
        self._map.madvise(mmap.MADV_DONTFORK)  # a child must not inherit a writer's mapping
        self.memory = memoryview(self._map)
        self._advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="prefault", daemon=True)
        self._thread.start()

    def view(self, offset: int, size: int) -> memoryview:
        """Raises BadMessage when the server names memory that it has not got."""
        if offset + size > len(self.memory):
            raise BadMessage(f"extent {offset}+{size} in a segment of {len(self.memory)} bytes")
        return self.memory[offset : offset + size]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(BufferError):  # a caller still looks; it goes with that view
            self.memory.release()
            self._map.close()

    def _touch(self) -> None:
        start = np.frombuffer(self.memory, np.uint8).ctypes.data
        for offset in range(0, len(self.memory), _PREFAULT_STEP):
            size = min(_PREFAULT_STEP, len(self.memory) - offset)
            if self._stop.is_set() or _libc.madvise(start + offset, size, self._advice):
                return


class _ShmChannel:
    def __init__(self, address: str, cluster: str, client: str, threads: int | None) -> None:
        self._address = address
        self._cluster = cluster
        self._client = client
        self._copier = Copier(threads)
        self._streams = StreamPool(self._dial)
        self._inode = 0
        self._size = 0
        self._reader: _Mapping | None = None
        self._writer: _Mapping | None = None
        self._writer_fd = -1

    def __repr__(self) -> str:
        return f"<ShmChannel {self._address} {self._streams!r}>"

    async def open(self, deadline: float) -> None:
        async with self._streams.stream(deadline):
            pass

    async def write(
        self, writing: Writing, blocks: Sequence[Outgoing], *, deadline: float
    ) -> list[WriteStatus]:
        async with self._streams.stream(deadline) as stream:
            statuses, granted, reserved = await exchanges.reserve(stream, writing, blocks, deadline)
            if not granted:
                return statuses
            mapping = self._writable()
            seeds = exchanges.seeds(
                writing.namespace, writing.part, [blocks[i].digest for i in granted]
            )
            jobs = [
                Job(
                    blocks[i].buffer,
                    mapping.view(offset, len(blocks[i].buffer)),
                    seed,
                    hash_source=True,
                )
                for i, offset, seed in zip(granted, reserved.offsets, seeds, strict=True)
            ]
            # If this is cancelled, the copies have stopped before the stream is aborted: the
            # server may then reuse the extents at once.
            checksums = await self._copier.run(jobs, deadline=deadline)
            sealed = await exchanges.seal(stream, writing, reserved.ids, checksums, deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
        return statuses

    async def read(
        self, reading: Reading, blocks: Sequence[Wanted], *, deadline: float
    ) -> list[ReadResult]:
        room = [len(block.buffer) for block in blocks]
        async with self._streams.stream(deadline) as stream:
            pinned, hits, sources = await self._pin(stream, reading, blocks, room, deadline)
            if hits:
                seeds: list[int | None] = [None] * len(hits)
                if reading.verify:
                    seeds[:] = exchanges.seeds(
                        reading.namespace, reading.part, [blocks[i].digest for i in hits]
                    )
                jobs = [
                    Job(source, blocks[i].buffer[: len(source)], seed)
                    for i, source, seed in zip(hits, sources, seeds, strict=True)
                ]
                got = await self._copier.run(jobs, deadline=deadline)
                if not stream.lost:  # a server that died meanwhile cannot take the bytes back
                    stream.send_now(Unpin())
        results = [ReadResult(s) for s in exchanges.read_statuses(pinned.statuses, len(blocks))]
        if hits:
            expected = pinned.checksums if reading.verify else [0] * len(hits)
            arrived = exchanges.verified(pinned.sizes, expected, got)
            for position, result in zip(hits, arrived, strict=True):
                results[position] = result
        return results

    @asynccontextmanager
    async def read_view(
        self, reading: Reading, digests: Sequence[bytes], *, deadline: float
    ) -> AsyncIterator[list[View]]:
        nothing = memoryview(b"")
        blocks = [Wanted(digest, nothing) for digest in digests]
        room = [BLOCK_SIZE_MAX] * len(digests)
        async with self._streams.stream(deadline) as stream:
            pinned, hits, sources = await self._pin(stream, reading, blocks, room, deadline)
            views = [View(s) for s in exchanges.read_statuses(pinned.statuses, len(digests))]
            checksums = [0] * len(digests)
            for position, source, checksum in zip(hits, sources, pinned.checksums, strict=True):
                views[position] = View(ReadStatus.HIT, source)
                checksums[position] = checksum
            if reading.verify:
                views = await exchanges.verify_views(
                    self._copier, reading, digests, views, checksums, deadline
                )
            yield views
            if hits and not stream.lost:
                stream.send_now(Unpin())

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
        self._copier.close()
        for mapping in (self._reader, self._writer):
            if mapping is not None:
                mapping.close()
        self._reader = self._writer = None
        if self._writer_fd >= 0:
            os.close(self._writer_fd)
            self._writer_fd = -1

    def abort(self) -> None:
        self._streams.abort()

    async def _pin(
        self,
        stream: Stream,
        reading: Reading,
        blocks: Sequence[Wanted],
        room: list[int],
        deadline: float,
    ) -> tuple[Pinned, list[int], list[memoryview]]:
        await stream.send(exchanges.read_request(reading, blocks, room), deadline=deadline)
        pinned = await stream.expect(Pinned, deadline=deadline)
        statuses = exchanges.read_statuses(pinned.statuses, len(blocks))
        hits = [i for i, status in enumerate(statuses) if status is ReadStatus.HIT]
        if not len(hits) == len(pinned.offsets) == len(pinned.sizes) == len(pinned.checksums):
            raise BadMessage(f"{len(hits)} hits, {len(pinned.offsets)} offsets")
        if any(not 0 < size <= room[i] for i, size in zip(hits, pinned.sizes, strict=True)):
            raise BadMessage("a block larger than the buffer for it")
        if self._reader is None:
            raise LinkBroken("the channel is closed")
        sources = [
            self._reader.view(offset, size)
            for offset, size in zip(pinned.offsets, pinned.sizes, strict=True)
        ]
        return pinned, hits, sources

    def _writable(self) -> _Mapping:
        if self._writer is None:
            if self._writer_fd < 0:
                raise LinkBroken("the channel is closed")
            with os_errors(f"segment of {self._address}"):
                self._writer = _Mapping(self._writer_fd, self._size, writable=True)
        return self._writer

    async def _dial(self, deadline: float) -> Stream:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        fds: list[int] = []
        try:
            with os_errors(f"server at {self._address}"):
                async with asyncio.timeout_at(deadline):
                    await loop.sock_connect(sock, _socket_name(self._address))
                    fds = await _receive_fds(loop, sock)
                    _, stream = await loop.create_connection(Stream, sock=sock)
        except BaseException:
            sock.close()
            _close_all(fds)
            raise
        try:
            welcome = await exchanges.greet(
                stream, cluster=self._cluster, client=self._client, server="", deadline=deadline
            )
            with os_errors(f"segment of {self._address}"):
                self._adopt(fds, welcome.segment_size)
        except BaseException:
            stream.abort()
            raise
        finally:
            _close_all(fds)
        return stream

    def _adopt(self, fds: list[int], size: int) -> None:
        """Map the segment on the first connection; on later ones see that it is the same."""
        status = os.fstat(fds[0])
        if status.st_size < size or size <= 0:
            raise BadMessage(f"a segment of {status.st_size} bytes, announced as {size}")
        if not os.path.samestat(status, os.fstat(fds[1])):
            raise BadMessage("the two descriptors are of different segments")
        if not fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise BadMessage("the segment could shrink under us: it is not sealed")
        if self._reader is None:
            self._reader = _Mapping(fds[0], size, writable=False)
            self._writer_fd = os.dup(fds[1])
            self._inode, self._size = status.st_ino, size
        elif (status.st_ino, size) != (self._inode, self._size):
            raise LinkBroken(f"another segment is served at {self._address} now")


def _socket_name(address: str) -> str:
    name = address.removeprefix("shm://")
    if name == address or not name or len(name) > 100:
        raise ConfigError(f"address {address!r}: expected shm://@name or shm:///path")
    return "\0" + name[1:] if name.startswith("@") else name


async def _receive_fds(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> list[int]:
    """The two descriptors that the server sends before anything else."""
    readable: asyncio.Event = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock.fileno())
    data, fds, flags, _ = socket.recv_fds(sock, 1, 2, socket.MSG_CMSG_CLOEXEC)
    if data != b"S" or len(fds) != 2 or flags & socket.MSG_CTRUNC:
        _close_all(fds)
        raise LinkBroken("the server passed no segment")
    return fds


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
