"""Write a transport in an afternoon: `unix://name`, on asyncio streams, one connection per call.

A call is: dial, one frame there, one frame back, hang up; the blocks' bytes are in the frames.
Whatever ends a call early hangs up, too, and the server drops what it held for it. That is simple
and has a price: a dial for each call, two more copies, a batch that waits in the server's memory.
Run this file: the conformance kit checks the transport, then two clients share a pool over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from secrets import token_hex
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from kvpool import ClientConfig, dev, errors, protocols, types
from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.testing import TRANSPORT_CHECKS, check_transport
from kvpool.types import Namespace, ReadResult, ReadStatus, WriteStatus

HEADER = struct.Struct("<IQ")  # sizes of the message and of the bytes behind it
MESSAGE_MAX, BYTES_MAX, READ_AHEAD = 1 << 20, 1 << 28, 1 << 20
EXCHANGE_S = 60.0  # a client that takes longer is frozen
M = TypeVar("M")


class Block(NamedTuple):
    """One block of a request. `size` is that of its buffer, to be sent from or to be filled."""

    digest: Annotated[bytes, msgspec.Meta(max_length=types.DIGEST_SIZE_MAX)]
    parent: Annotated[bytes, msgspec.Meta(max_length=types.DIGEST_SIZE_MAX)] = types.ROOT
    size: Annotated[int, msgspec.Meta(ge=1, le=types.BLOCK_SIZE_MAX)] = 1
    checksum: int = 0


class Request(msgspec.Struct):
    """All that a call says. Typed and bounded: what does not fit is refused."""

    call: Literal["hello", "write", "read", "remove", "suspect"]
    namespace: str = "none"
    parts: int = 1
    part: int = 0
    blocks: Annotated[list[Block], msgspec.Meta(max_length=types.BATCH_BLOCKS_MAX)] = []
    visible: bool = True
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=EXCHANGE_S)] = 0.0
    cluster: str = ""
    client: str = ""


class Answer(msgspec.Struct):
    """One entry for each block, in the list of the call's kind; or what went wrong."""

    written: list[WriteStatus] = []
    found: list[tuple[ReadStatus, int, int]] = []  # with size and checksum
    flags: list[bool] = []
    error: str = ""
    text: str = ""


async def send(
    writer: asyncio.StreamWriter, message: msgspec.Struct, data: Sequence[memoryview] = ()
) -> None:
    """One frame. When it returns, the kernel has all of it, and the memory may be reused."""
    writer.transport.set_write_buffer_limits(high=0)
    body = msgspec.msgpack.encode(message)
    head: bytes | memoryview = HEADER.pack(len(body), sum(map(len, data))) + body
    for piece in (head, *data):
        if writer.is_closing():
            raise ConnectionResetError("the connection was closed")
        writer.write(piece)
        await writer.drain()


async def receive(reader: asyncio.StreamReader, kind: type[M]) -> tuple[M, memoryview]:
    """One frame: its message, and the bytes behind it."""
    message_size, data_size = HEADER.unpack(await reader.readexactly(HEADER.size))
    if message_size > MESSAGE_MAX or data_size > BYTES_MAX:
        raise errors.BadFrame(f"a frame of {message_size} + {data_size} bytes")
    try:
        message = msgspec.msgpack.decode(await reader.readexactly(message_size), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise errors.BadMessage(str(error)) from None
    return message, memoryview(await reader.readexactly(data_size))


def path(address: str) -> str:
    """In the abstract namespace: nothing is left behind on disk."""
    name = address.removeprefix("unix://")
    if name == address or not 0 < len(name.encode()) < 90:
        raise errors.ConfigError(f"address {address!r}: expected unix://name")
    return f"\0kvpool/{name}"


class UnixTransport:
    scheme = "unix"
    same_host = True

    async def listen(self, address: str, store: protocols.BlockStore) -> protocols.Listener:
        listener = UnixListener(address or f"unix://{store.server}-{token_hex(4)}", store)
        try:
            await listener.start()
        except OSError as error:
            raise errors.ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        return listener

    async def connect(
        self, address: str, *, cluster: str, client: str, deadline: float
    ) -> protocols.Channel:
        channel = UnixChannel(address, cluster, client)
        await channel.ask(Request("hello"), deadline)
        return channel


class UnixListener:
    """The server's half: a task for each connection, which closes its books however it ends."""

    def __init__(self, address: str, store: protocols.BlockStore) -> None:
        self.address, self._store = address, store
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        name = path(self.address)
        sock = socket.socket(socket.AF_UNIX)  # made here: uvloop takes no abstract names
        try:
            sock.bind(name)
            self._server = await asyncio.start_unix_server(
                self._accept, sock=sock, limit=READ_AHEAD
            )
        except BaseException:
            sock.close()
            raise

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())
        if self._server is None:  # accepted before we closed, and handed to us only now
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):  # hung up, or frozen
            try:
                async with asyncio.timeout(EXCHANGE_S):
                    request, data = await receive(reader, Request)
                    if request.cluster != self._store.cluster:
                        raise errors.VersionMismatch(f"this is cluster {self._store.cluster!r}")
                    connection = self._store.connect(protocols.Peer(request.client, 0, "unix"))
                    with contextlib.closing(connection), hang_up_cancels(reader):
                        await send(writer, *await answer(connection, request, data))
            except errors.KvpoolError as error:
                await send(writer, Answer(error=type(error).__name__, text=str(error)))


@contextlib.contextmanager
def hang_up_cancels(reader: asyncio.StreamReader) -> Iterator[None]:
    """The client says nothing more; when it leaves, nobody waits for this task any more."""
    task = asyncio.current_task()
    assert task is not None
    hang_up = asyncio.ensure_future(reader.read(1))

    def leave(_: asyncio.Future[bytes]) -> None:
        task.cancel()

    hang_up.add_done_callback(leave)
    try:
        yield
    finally:
        hang_up.remove_done_callback(leave)
        hang_up.cancel()


async def answer(
    connection: protocols.Connection, request: Request, data: memoryview
) -> tuple[Answer, list[memoryview]]:
    """What the books say, and the bytes that go with it: they are pinned until it is sent."""
    if request.call == "hello":
        return Answer(), []
    namespace, part = Namespace(request.namespace, request.parts), request.part
    digests, sizes = [b.digest for b in request.blocks], [b.size for b in request.blocks]
    types.check_digests(digests)
    if not 0 <= part < namespace.parts:
        raise errors.BadMessage(f"part {part} of {namespace.parts}")
    if request.call == "read":
        pins = connection.pin(namespace, part, digests, sizes)
        views = [connection.view(pin.extent) if pin.extent else memoryview(b"") for pin in pins]
        found = [
            (pin.status, len(view), pin.checksum) for pin, view in zip(pins, views, strict=True)
        ]
        return Answer(found=found), views
    if request.call == "remove":
        return Answer(flags=await connection.remove(namespace, digests)), []
    if request.call == "suspect":
        return Answer(flags=await connection.suspect(namespace, part, digests)), []
    return Answer(written=await store(connection, request, namespace, data)), []


async def store(
    connection: protocols.Connection, request: Request, namespace: Namespace, data: memoryview
) -> list[WriteStatus]:
    """Reserve, copy what was granted into its place, seal it."""
    blocks, deadline = request.blocks, asyncio.get_running_loop().time() + request.wait_s
    if sum(block.size for block in blocks) != len(data):
        raise errors.BadMessage(f"{len(data)} bytes came with a write")
    if any(block.parent == block.digest for block in blocks):
        raise errors.BadMessage("a block names itself as its parent")
    reserved = await connection.reserve(
        namespace,
        request.part,
        [block.digest for block in blocks],
        [block.parent for block in blocks],
        [block.size for block in blocks],
        deadline=deadline,
    )
    statuses, granted, start = [one.status for one in reserved], [], 0
    for position, (block, one) in enumerate(zip(blocks, reserved, strict=True)):
        if one.extent is not None:
            connection.view(one.extent)[:] = data[start : start + block.size]
            granted.append(position)
        start += block.size
    if granted:
        ids, checksums = [reserved[i].id for i in granted], [blocks[i].checksum for i in granted]
        visible = request.visible
        sealed = await connection.seal(ids, checksums, visible=visible, deadline=deadline)
        for position, status in zip(granted, sealed, strict=True):
            statuses[position] = status
    return statuses


class UnixChannel:
    """The client's half. It keeps no connection, only a list of those that are in use."""

    def __init__(self, address: str, cluster: str, client: str) -> None:
        self._address, self._path = address, path(address)
        self._cluster, self._client = cluster, client
        self._busy: set[asyncio.StreamWriter] = set()
        self._closed = False

    async def ask(
        self, request: Request, deadline: float, data: Sequence[memoryview] = ()
    ) -> tuple[Answer, memoryview]:
        """One call. Whatever goes wrong in it leaves here as one of our errors."""
        request.cluster, request.client = self._cluster, self._client
        left_s = deadline - asyncio.get_running_loop().time()
        request.wait_s = min(max(0.0, left_s), EXCHANGE_S)
        writer: asyncio.StreamWriter | None = None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.get_running_loop().sock_connect(sock, self._path)
                reader, writer = await asyncio.open_connection(sock=sock, limit=READ_AHEAD)
                self._busy.add(writer)
                if self._closed:
                    raise ConnectionResetError("the channel is closed")
                await send(writer, request, data)
                answer, received = await receive(reader, Answer)
        except errors.KvpoolError:
            raise
        except TimeoutError:
            raise errors.DeadlineExceeded(f"{self._address} did not answer in time") from None
        except (OSError, EOFError) as error:
            raise errors.LinkBroken(f"{self._address}: {error}") from None
        finally:
            if writer is not None:
                self._busy.discard(writer)
                writer.transport.abort()
            else:
                sock.close()
        if answer.error:
            known = {"VersionMismatch": errors.VersionMismatch, "Overloaded": errors.Overloaded}
            raise known.get(answer.error, errors.BadMessage)(f"{answer.error}: {answer.text}")
        if len(answer.written + answer.found + answer.flags) != len(request.blocks):
            raise errors.BadMessage(f"an answer for other than {len(request.blocks)} blocks")
        return answer, received

    async def write(
        self, writing: protocols.Writing, blocks: Sequence[types.Outgoing], *, deadline: float
    ) -> list[WriteStatus]:
        (name, parts), part = (writing.namespace.name, writing.namespace.parts), writing.part
        half = namespace_seed(writing.namespace, part)
        described = [
            Block(digest, parent, len(data), checksum(data, block_seed(half, digest)))
            for digest, parent, data in blocks
        ]
        request = Request("write", name, parts, part, described, writing.visible)
        answer, _ = await self.ask(request, deadline, [block.buffer for block in blocks])
        return answer.written

    async def read(
        self, reading: protocols.Reading, blocks: Sequence[types.Wanted], *, deadline: float
    ) -> list[ReadResult]:
        namespace, part, verify = reading
        wanted = [Block(digest, size=len(buffer)) for digest, buffer in blocks]
        request = Request("read", namespace.name, namespace.parts, part, wanted)
        answer, data = await self.ask(request, deadline)
        half, start = namespace_seed(namespace, part), 0
        results = []
        # From here on nothing waits: no cancel can leave a late byte in the caller's buffers.
        for (digest, buffer), (status, size, sum_) in zip(blocks, answer.found, strict=True):
            piece, start = data[start : start + size], start + size
            if len(piece) != size or size > len(buffer):
                raise errors.BadMessage(f"a block of {size} bytes for a buffer of {len(buffer)}")
            if status.hit and verify and checksum(piece, block_seed(half, digest)) != sum_:
                status, size = ReadStatus.CORRUPT, 0
            elif status.hit:
                buffer[:size] = piece
            results.append(ReadResult(status, size))
        return results

    async def remove(
        self, namespace: Namespace, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        named = [Block(digest) for digest in digests]
        request = Request("remove", namespace.name, namespace.parts, 0, named)
        return (await self.ask(request, deadline))[0].flags

    async def suspect(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], *, deadline: float
    ) -> list[bool]:
        named = [Block(digest) for digest in digests]
        request = Request("suspect", namespace.name, namespace.parts, part, named)
        return (await self.ask(request, deadline))[0].flags

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._closed = True
        for writer in self._busy:
            writer.transport.abort()


async def main() -> None:
    await check_transport(UnixTransport)
    print(f"unix:// keeps all {len(TRANSPORT_CHECKS)} promises of a transport")
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
