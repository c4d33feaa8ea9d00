"""Shared memory: one copy from the pool into the caller's buffer, or none at all.

A Unix domain socket carries control. Its name is abstract, so nothing is left behind, not even
after kill -9, unless the operator chooses a path. Each side asks the kernel for the user of the
other one, and refuses another user.

The server passes a descriptor of its segment (SCM_RIGHTS) together with `Welcome`: a client gets it
after it has proved that it knows the cluster's secret, and not before. The descriptor is read-only.
A client that writes dials once more before its first write, as a writer (`Hello.writer`), and gets
a writable descriptor as well (design: shared-memory).

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
import functools
import os
import secrets
import socket
import struct
from array import array
from pkgutil import resolve_name
from typing import Final

from kvpool import logs
from kvpool.errors import BadMessage, ConfigError, KvpoolError, LinkBroken, Unauthenticated
from kvpool.huge_pages import HugePageMapping
from kvpool.protocols import BlockStore, Channel, Listener, Mappable
from kvpool.strangers import Strangers
from kvpool.types import Cluster
from kvpool.wire.frames import Frame, FrameReader, encode_message, no_payload
from kvpool.wire.messages import Error, Hello, M, Message, Welcome, decode_answer
from kvpool_transports.copy_pool import CopyPool
from kvpool_transports.streams import requests
from kvpool_transports.streams.mapped_channel import MappedChannel
from kvpool_transports.streams.pool import StreamPool, dial_patiently, os_errors
from kvpool_transports.streams.server import Sessions, StreamSession
from kvpool_transports.streams.stream import Stream, wait_until

_ACCEPT_AGAIN_S = 0.1  # out of descriptors: let some connections end
_DIAL_AGAIN_S = 0.01  # the server's queue of new connections is full
_UCRED = struct.Struct("iII")
#: Of the name of a Unix socket: the kernel has 108, and ends a path with a zero.
_NAME_BYTES_MAX = 107
#: Of a server's id, in the name of its socket.
_SHOWN_BYTES = 64
#: A writer gets two descriptors; no server passes more.
_DESCRIPTORS_MAX = 2
#: What looks after the paths of sockets: `module:function`. Without its line and file they have
#: abstract names alone.
PATHS: Final = {
    "make_free": "kvpool_transports.shm_paths:make_free",
}
#: Other users whose refusals are logged as a warning, each once.
_WARNED_MAX = 64

log = logs.get("kvpool.shm")


class ShmTransport:
    """`shm://@name` (abstract socket) or `shm:///path`."""

    scheme = "shm"
    same_host = True
    authenticated = True

    async def listen(self, address: str, store: BlockStore) -> Listener:
        if not isinstance(store.tier, Mappable):
            raise ConfigError(
                f"shm: tier {store.tier.name!r} cannot be mapped by other processes: listen "
                "without shm, as in --listen tcp://127.0.0.1:0"
            )
        listener = _ShmListener(store, store.tier)
        listener.start(address or _free_address(store.server))
        return listener

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        segment = _Segment(address, cluster, client)
        streams = StreamPool(segment.dial)
        channel = MappedChannel(address, streams, segment, CopyPool())
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
        self.address = ""
        self._path = ""
        self._warned: set[int] = set()

    def start(self, address: str) -> None:
        try:
            path = "" if "@" in address else _path_to_bind(address)
            # Before `bind`: the socket's file never has another mode.
            os.fchmod(self._socket.fileno(), 0o600)
            self._socket.bind(_socket_name(address))
            self._path = path
            self._socket.listen(128)
            # Opened anew through /proc, because a dup of the memfd would be writable.
            self._read_only = os.open(
                f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError as error:
            self._close_socket()
            raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None
        except BaseException:
            self._close_socket()
            raise
        self.address = address
        self._loop.add_reader(self._socket, self._accept)

    async def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        self._close_socket()
        await self._sessions.close()
        if self._read_only >= 0:
            os.close(self._read_only)
            self._read_only = -1

    def _close_socket(self) -> None:
        if self._path:
            # While the socket still listens: afterwards the file could be that of a successor.
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = ""
        self._socket.close()

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
            pid, uid = _peer(sock)
            if uid not in (os.geteuid(), 0) or uid == _ambiguous_user():
                self._refuse(sock, pid, uid)
                return
            _, stream = await self._loop.connect_accepted_socket(Stream, sock)
        except OSError as error:
            log.info("connection failed", why=str(error))
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        fds = self._read_only, self._memory.fd
        await _ShmSession(stream, self._store, self._sessions.strangers, sock, *fds).run()

    def _refuse(self, sock: socket.socket, pid: int, uid: int) -> None:
        report = log.debug if uid in self._warned else log.warning
        report("refused a client of another user", uid=uid, pid=pid)
        if len(self._warned) < _WARNED_MAX:
            self._warned.add(uid)
        with sock, contextlib.suppress(OSError):
            why = f"shm is for processes of user {os.geteuid()}, this one is of user {uid}"
            error = Error(Unauthenticated.__name__, why)
            sock.send(encode_message(error))  # before its first word


class _ShmSession(StreamSession):
    """Passes the segment to a client that has completed the handshake."""

    def __init__(
        self,
        stream: Stream,
        store: BlockStore,
        strangers: Strangers,
        sock: socket.socket,
        read_only: int,
        writable: int,
    ) -> None:
        super().__init__(stream, store, mapped=True, scheme="shm", strangers=strangers)
        self._socket = sock
        self._read_only = read_only
        self._writable = writable

    async def welcome(self, hello: Hello, welcome: Welcome) -> None:
        fds = [self._read_only, self._writable] if hello.writer else [self._read_only]
        frame = encode_message(welcome)
        # Past the stream, which can send no descriptors, but in order: the client has answered
        # everything that the stream has sent.
        try:
            sent = socket.send_fds(self._socket, [frame], fds)
        except OSError as error:  # also when its buffer is full
            raise LinkBroken(f"cannot pass the segment: {error.strerror or error}") from None
        if sent < len(frame):
            raise LinkBroken("cannot pass the segment: the client does not read")


def _path_to_bind(address: str) -> str:
    """The path of a socket, which no other one is at. Raises ConfigError."""
    if not PATHS:
        raise ConfigError(f"cannot listen on {address}: this program has sockets without a path")
    path = _socket_name(address)
    resolve_name(PATHS["make_free"])(address, path)
    return path


# --- client -------------------------------------------------------------------------------


class _Segment:
    """One server's segment in this process: dials, and maps what the server passes.

    It is mapped once, and a page when it is touched: so this process's resident memory has of it
    only what it has read or written. It lies in huge pages, as far as the server could get them.
    (design: shared-memory)
    """

    def __init__(self, address: str, cluster: Cluster, client: str) -> None:
        self._address = address
        self._cluster = cluster
        self._client = client
        self._inode = 0
        self._size = 0
        self._mapping: HugePageMapping | None = None
        self._writable: memoryview | None = None
        self._becoming_writer = asyncio.Lock()
        self._closed = False

    def readable(self) -> memoryview:
        if self._mapping is None:
            raise LinkBroken("the channel is closed")
        return self._mapping.memory

    async def writable(self, deadline: float) -> memoryview:
        if self._writable is None:
            with os_errors(f"segment of {self._address}"):
                async with asyncio.timeout_at(deadline), self._becoming_writer:
                    self.readable()  # is it open?
                    if self._writable is None:
                        dial = functools.partial(self._dial, deadline, writer=True)
                        (await dial_patiently(dial)).close()  # the mapping stays
        if self._writable is None:
            raise LinkBroken("the channel is closed")
        return self._writable

    def close(self) -> None:
        self._closed = True
        if self._mapping is not None:
            self._mapping.close()
        self._mapping = self._writable = None

    async def dial(self, deadline: float) -> Stream:
        loop = asyncio.get_running_loop()
        sock = await self._dial(deadline, writer=False)
        try:
            with os_errors(f"server at {self._address}"):
                _, stream = await loop.create_connection(Stream, sock=sock)
        except BaseException:
            sock.close()
            raise
        return stream

    async def _dial(self, deadline: float, *, writer: bool) -> socket.socket:
        """A connection after the handshake, the segment mapped."""
        with os_errors(f"server at {self._address}"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        bare = _BareStream(sock)
        try:
            with os_errors(f"server at {self._address}"):
                async with asyncio.timeout_at(deadline):
                    await _connect(sock, _socket_name(self._address))
                _check_server(sock)
                welcome = await requests.handshake(
                    bare,
                    cluster=self._cluster,
                    client=self._client,
                    server="",
                    deadline=deadline,
                    writer=writer,
                )
            with os_errors(f"segment of {self._address}"):
                self._adopt(bare.take_descriptors(2 if writer else 1), welcome.segment_size)
        except BaseException:
            sock.close()
            raise
        finally:
            bare.close()
        return sock

    def _adopt(self, fds: list[int], size: int) -> None:
        """Map the segment on the first connection; on later ones see that it is the same.

        The second descriptor is the writable one.
        """
        try:
            if self._closed:
                raise LinkBroken("the channel was closed while it was connecting")
            status = os.fstat(fds[0])
            if status.st_size < size or size <= 0:
                raise BadMessage(f"a segment of {status.st_size} bytes, announced as {size}")
            if any(not os.path.samestat(status, os.fstat(fd)) for fd in fds):
                raise BadMessage("the two descriptors are of different segments")
            if not fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise BadMessage("the segment could shrink under us: it is not sealed")
            if self._mapping is None:
                # Not inherited: a forked child must not have a writer's mapping.
                self._mapping = HugePageMapping(fds[0], size, own=False)
                self._inode, self._size = status.st_ino, size
            elif (status.st_ino, size) != (self._inode, self._size):
                raise LinkBroken(f"another segment is served at {self._address} now")
            if len(fds) > 1 and self._writable is None:
                self._writable = self._mapping.make_writable(fds[1])
        finally:
            for fd in fds:
                os.close(fd)


class _BareStream:
    """The handshake's half of `Stream`, on a bare socket: asyncio's transports drop descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._descriptors: list[int] = []

    def take_descriptors(self, count: int) -> list[int]:
        """What the server has passed: `count` descriptors, which the caller closes."""
        if self._reader.begun:
            raise BadMessage("the server sent more than Welcome")
        if len(self._descriptors) != count:
            raise LinkBroken(f"the server passed {len(self._descriptors)} descriptors, not {count}")
        fds, self._descriptors = self._descriptors, []
        return fds

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    async def send(self, message: Message, *, deadline: float) -> None:
        # A server that has hung up already may have sent its reason: `receive` has it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            async with asyncio.timeout_at(deadline):
                await self._loop.sock_sendall(self._socket, encode_message(message))

    async def receive(self, *, deadline: float) -> Frame:
        frame = self._reader.ask(no_payload)
        while frame is None:
            await self._wait_until_readable(deadline)
            frame = self._reader.received(self._read())
        return frame

    async def expect(self, type: type[M], *, deadline: float) -> M:
        frame = await self.receive(deadline=deadline)
        return decode_answer(type, frame.type, frame.body)

    async def _wait_until_readable(self, deadline: float) -> None:
        readable: asyncio.Future[KvpoolError | None] = self._loop.create_future()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        self._loop.add_reader(self._socket.fileno(), wake)
        try:
            await wait_until(readable, deadline, "the server did not answer in time")
        finally:
            self._loop.remove_reader(self._socket.fileno())

    def _read(self) -> int:
        size, ancillary, flags, _ = self._socket.recvmsg_into(
            [self._reader.memory], socket.CMSG_SPACE(_DESCRIPTORS_MAX * 4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += array("i", data[: len(data) // 4 * 4])
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > _DESCRIPTORS_MAX:
            raise LinkBroken("the server passed too many descriptors, or this process has too many")
        if not size:
            raise LinkBroken("the server hung up")
        return size


async def _connect(sock: socket.socket, name: str) -> None:
    """Not `sock_connect`: it takes EAGAIN, which here means a full queue, for a connection."""
    while True:
        try:
            return sock.connect(name)
        except BlockingIOError:
            await asyncio.sleep(_DIAL_AGAIN_S)


def _check_server(sock: socket.socket) -> None:
    """A name is free when its server has ended: another user could listen there, with blocks of
    their own. Raises Unauthenticated."""
    _, uid = _peer(sock)
    if os.geteuid() and (uid not in (os.geteuid(), 0) or uid == _ambiguous_user()):
        raise Unauthenticated(f"a process of user {uid} listens there, expected {os.geteuid()}")


# --- both ---------------------------------------------------------------------------------


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and effective user id of the other side, when it connected or listened."""
    size = _UCRED.size
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


@functools.cache
def _ambiguous_user() -> int | None:
    """The user id, `nobody`, as which every user outside of our user namespace shows; None where
    there is no outside."""
    try:
        with open("/proc/self/uid_map") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return None
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except OSError:
        return None


def _free_address(server: str) -> str:
    """An address that nobody has. A long id is cut: the name only helps who lists sockets."""
    shown = server.encode()[:_SHOWN_BYTES].decode(errors="ignore")
    return f"shm://@kvpool-{shown}-{secrets.token_hex(8)}"


def _socket_name(address: str) -> str:
    name = address.removeprefix("shm://")
    if name == address or not name:
        raise ConfigError(f"address {address!r}: expected shm://@name or shm:///path")
    if len(name.encode()) > _NAME_BYTES_MAX:
        raise ConfigError(
            f"address {address!r}: its name has {len(name.encode())} bytes, and that of a Unix "
            f"socket {_NAME_BYTES_MAX} at most: give a shorter one"
        )
    return "\0" + name[1:] if name.startswith("@") else name
