"""Shared memory: one copy from the pool into the caller's buffer, or none at all.

A Unix domain socket carries control. Right after accepting a client of the same user, the server
passes two descriptors of its segment (SCM_RIGHTS): one read-only, one writable. Clients map the
first to read and the second only when they write. The socket lives in the abstract namespace, so
nothing is left behind, not even after kill -9.

Pins and reservations belong to the socket. The client closes it only after its own copies have
stopped, and a dead process has no mapping: so after EOF no process writes there any more. When
*our* side gives up on a writer, its process may be frozen during a copy. We then hang up, and its
extents are quarantined until it hangs up too (design: quarantine).

A process that may map a segment is trusted with that segment (design: shared-memory).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import struct

from kvpool import logs
from kvpool.errors import BadMessage, ConfigError, LinkBroken
from kvpool.huge_pages import HugePageMapping
from kvpool.protocols import (
    BlockStore,
    Channel,
    Listener,
    Mappable,
)
from kvpool.types import Cluster
from kvpool_transports.copy_pool import CopyPool
from kvpool_transports.streams import requests
from kvpool_transports.streams.mapped_channel import MappedChannel
from kvpool_transports.streams.pool import StreamPool, os_errors
from kvpool_transports.streams.server import Sessions, StreamSession
from kvpool_transports.streams.stream import Stream

_ACCEPT_AGAIN_S = 0.1  # out of descriptors: let some connections end
_UCRED = struct.Struct("iII")

log = logs.get("kvpool.shm")


class ShmTransport:
    """`shm://@name` (abstract socket) or `shm:///path`."""

    scheme = "shm"
    same_host = True
    authenticated = True

    def __init__(self, copy_threads: int | None = None) -> None:
        self._copy_threads = copy_threads

    async def listen(self, address: str, store: BlockStore) -> Listener:
        if not isinstance(store.tier, Mappable):
            raise ConfigError(f"tier {store.tier.name!r} cannot be mapped: use tcp")
        listener = _ShmListener(store, store.tier)
        listener.start(address or f"shm://@kvpool-{store.server}-{secrets.token_hex(8)}")
        return listener

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        segment = _Segment(address, cluster, client)
        streams = StreamPool(segment.dial)
        channel = MappedChannel(address, streams, segment, CopyPool(self._copy_threads))
        try:
            async with streams.stream(deadline):
                pass  # the server is there and its segment is mapped; the stream stays for later
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
        self._sessions = Sessions(store, mapped=True, scheme="shm")
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
        self._loop.add_reader(self._socket, self._accept)

    async def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        await self._sessions.close()
        if self._read_only >= 0:
            os.close(self._read_only)
            self._read_only = -1

    def _accept(self) -> None:
        # Not `sock_accept`: cancelled while a client dials, it drops that client with an error.
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("cannot accept", why=str(error))
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again)
            return
        sock.setblocking(False)
        self._sessions.start(self._serve(sock))

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

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
        except BaseException:
            sock.close()
            raise
        await StreamSession(stream, self._store, mapped=True, scheme="shm").run()


# --- client -------------------------------------------------------------------------------


class _Mapping:
    """A server's segment, mapped here; touched in the background so that first reads are fast.

    It lies in huge pages, as far as the server could get them; at an address that is not aligned
    they would be mapped here as small ones.
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        # Not inherited: a forked child must not have a writer's mapping.
        self._mapping = HugePageMapping(fd, size, writable=writable, inherit=False)

    def view(self, offset: int, size: int) -> memoryview:
        """Raises BadMessage when the server names memory outside of its segment."""
        memory = self._mapping.memory
        if offset + size > len(memory):
            raise BadMessage(f"extent {offset}+{size} in a segment of {len(memory)} bytes")
        return memory[offset : offset + size]

    def close(self) -> None:
        self._mapping.close()


class _Segment:
    """One server's segment in this process: dials, and maps what the server passes."""

    def __init__(self, address: str, cluster: Cluster, client: str) -> None:
        self._address = address
        self._cluster = cluster
        self._client = client
        self._inode = 0
        self._size = 0
        self._reader: _Mapping | None = None
        self._writer: _Mapping | None = None
        self._writer_fd = -1
        self._closed = False

    def readable(self) -> _Mapping:
        if self._reader is None:
            raise LinkBroken("the channel is closed")
        return self._reader

    def writable(self) -> _Mapping:
        if self._writer is None:
            if self._writer_fd < 0:
                raise LinkBroken("the channel is closed")
            with os_errors(f"segment of {self._address}"):
                self._writer = _Mapping(self._writer_fd, self._size, writable=True)
        return self._writer

    def close(self) -> None:
        self._closed = True
        for mapping in (self._reader, self._writer):
            if mapping is not None:
                mapping.close()
        self._reader = self._writer = None
        if self._writer_fd >= 0:
            os.close(self._writer_fd)
            self._writer_fd = -1

    async def dial(self, deadline: float) -> Stream:
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
            welcome = await requests.handshake(
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
        if self._closed:
            raise LinkBroken("the channel was closed while it was connecting")
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
