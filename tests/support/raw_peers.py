"""Peers that send any bytes: raw sockets, and requests made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec

from kvpool import dev
from kvpool.net.control_session import caller_session
from kvpool.protocols import Link, Transport
from kvpool.types import Cluster
from kvpool.wire import messages as wire
from kvpool.wire.frames import HEADER_SIZE, decode_header, encode_frame
from tests.conftest import CHAIN, NAMESPACE

OPEN = Cluster()


class Raw:
    """A socket to a block server, for any bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the server may have closed the link already
            await self._loop.sock_sendall(self.socket, data)

    async def ask(self, message: wire.Message | None, answer: type[wire.M]) -> wire.M:
        """One correct exchange; without a message, an answer to what was sent before."""
        if message is not None:
            await self.send(frame(message))
        header = await self.exactly(HEADER_SIZE)
        number, body_size, payload_size = decode_header(header)
        body = await self.exactly(body_size)
        await self.exactly(payload_size)
        return wire.decode_answer(answer, number, body)

    async def refusal(self) -> str:
        """The name of the error that the server sent before it closed the link."""
        got = b""
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                while more := await self._loop.sock_recv(self.socket, 1 << 16):
                    got += more
        while got:
            number, body_size, payload_size = decode_header(got)
            if number == wire.TYPES[wire.Error]:
                return wire.decode(wire.Error, number, got[HEADER_SIZE:][:body_size]).code
            got = got[HEADER_SIZE + body_size + payload_size :]
        return "nothing"

    async def exactly(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            more = await self._loop.sock_recv(self.socket, count - len(got))
            assert more, "the server closed the link"
            got += more
        return got


@contextlib.asynccontextmanager
async def raw(running: dev.Dev, scheme: str = "tcp") -> AsyncIterator[Raw]:
    """A new connection, before the handshake."""
    server = running.servers[0]
    address = next(a for a in server.addresses if a.startswith(scheme)).partition("://")[2]
    loop = asyncio.get_running_loop()
    family = socket.AF_UNIX if scheme == "shm" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        if scheme != "shm":
            host, _, port = address.rpartition(":")
            await loop.sock_connect(sock, (host, int(port)))
        else:
            while True:  # not `sock_connect`, for which a full queue is a connection
                try:
                    sock.connect("\0" + address[1:])
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.01)
        yield Raw(sock)


class ControlPeer:
    """A connection to a master, for any bytes; `session` is a caller's end of it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cluster: Cluster,
    ) -> None:
        self.reader, self.writer = reader, writer
        self.session = caller_session(cluster)
        self.messages: list[bytes] = []

    async def shake(self) -> None:
        """Until one may ask. Raises what the session does, and EOFError."""
        while not self.session.open:
            await self._feed()

    async def receive(self) -> bytes:
        """The next message. Raises EOFError."""
        while not self.messages:
            await self._feed()
        return self.messages.pop(0)

    async def _feed(self) -> None:
        async with asyncio.timeout(10):
            data = await self.reader.read(1 << 16)
        if not data:
            raise EOFError
        self.messages += self.session.feed(data)
        self.writer.write(self.session.take())

    def send(self, *messages: bytes) -> None:
        self.writer.write(b"".join(map(self.session.seal, messages)))

    def send_unframed(self, data: bytes) -> None:
        """Bytes of a message, or of none; encrypted where messages are."""
        tls = getattr(self.session, "_tls", None)
        self.writer.write(tls.seal(data) if tls else data)


@contextlib.asynccontextmanager
async def control_peer(address: str, cluster: Cluster = OPEN) -> AsyncIterator[ControlPeer]:
    """A new connection to a master, before the handshake."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield ControlPeer(reader, writer, cluster)
    finally:
        writer.transport.abort()


def frame(message: wire.Message, payload: bytes = b"") -> bytes:
    return encode_frame(*wire.encode(message), len(payload)) + payload


def payload(size: int) -> bytes:
    return encode_frame(wire.PAYLOAD, b"", size) + bytes(size)


def reserve(*digests: bytes, size: int = 64, wait_s: float = 1.0) -> wire.Reserve:
    packed, parents = b"".join(digests), bytes(32 * len(digests))
    return wire.Reserve(NAMESPACE.name, 1, 32, packed, 0, parents, [size] * len(digests), wait_s)


def write(*digests: bytes, size: int = 64, **changed: object) -> wire.Reserve:
    """A small write, whose bytes come with it."""
    message = reserve(*digests, size=size)
    fields = {"checksums": [0] * len(digests), "visible": True, **changed}
    return msgspec.structs.replace(message, **fields)


def read(*digests: bytes) -> wire.Read:
    return wire.Read(NAMESPACE.name, 1, 32, b"".join(digests), 0, [1 << 20] * len(digests))


HELLO = frame(wire.Hello("default", "raw"))


async def connect(
    transport: Transport, address: str, cluster: Cluster, within_s: float = 5.0
) -> None:
    """Prove who we are to a server, and go."""
    deadline = asyncio.get_running_loop().time() + within_s
    channel = await transport.connect(address, cluster=cluster, client="test", deadline=deadline)
    await channel.close()


async def ask(link: Link, message: wire.Message, answer: type[wire.M]) -> wire.M:
    deadline = asyncio.get_running_loop().time() + 2
    return wire.decode_answer(answer, *await link.request(*wire.encode(message), deadline=deadline))


#: The registration of a server that does not exist, and blocks that it may announce.
TOKEN = bytes(range(16))
REGISTER = wire.Register("liar", 7, TOKEN, "host", ["tcp://127.0.0.1:1"], ["dram"], 1 << 20)
KEYS = {"namespace": NAMESPACE.name, "parts": 1, "digest_size": 32, "digests": b"".join(CHAIN)}
