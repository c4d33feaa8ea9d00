"""What connections leave behind: nothing, however they end, and without a garbage collection.

Servers hardly ever collect garbage (design: turns), so a cycle that holds a buffer of 64 KiB would
be lost memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType, TracebackType

import pytest

from kvpool import ClientConfig, dev
from kvpool.errors import KvpoolError
from kvpool.protocols import ReadOptions, Transport
from kvpool.types import Cluster, Consumer, ReadBlock
from kvpool_transports.inproc import InprocTransport
from kvpool_transports.shm import ShmTransport
from kvpool_transports.tcp import TcpTransport
from tests.conftest import NAMESPACE, buffers, eventually, keys, values
from tests.support.processes import script
from tests.support.raw_peers import HELLO, frame, payload, raw, reserve

CONNECTIONS = 40
CHAIN = keys("memory", 64)


class Client:
    """One client of a server in this process, over one transport."""

    def __init__(self, running: dev.Dev, scheme: str, transport: Transport) -> None:
        (server,) = running.servers
        self.running = running
        self.scheme = scheme
        self.server = server
        self._transport = transport
        (self._address,) = [a for a in server.addresses if a.startswith(scheme)]

    async def read_once(self, *, cluster: Cluster | None = None, within_s: float = 5.0) -> None:
        """Connect, read two blocks of which one is missing, close."""
        deadline = asyncio.get_running_loop().time() + within_s
        channel = await self._transport.connect(
            self._address, cluster=cluster or Cluster(), client="memory", deadline=deadline
        )
        try:
            blocks = [
                ReadBlock(digest, (memoryview(bytearray(8192)),), 8192)
                for digest in (CHAIN[0], bytes(32))
            ]
            await channel.read(ReadOptions(NAMESPACE, 0, True), blocks, deadline=deadline)
        finally:
            await channel.close()

    async def send(self, data: bytes, *, reset: bool = False) -> None:
        """Connect, send any bytes, and go before the answer."""
        async with raw(self.running, self.scheme) as peer:
            await peer.send(data)
            await asyncio.sleep(0)
            if reset:
                now = struct.pack("ii", 1, 0)
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)


async def ends_well(client: Client) -> None:
    await client.read_once()


async def is_refused(client: Client) -> None:
    with contextlib.suppress(KvpoolError):
        await client.read_once(cluster=Cluster("another"))


async def times_out(client: Client) -> None:
    with contextlib.suppress(KvpoolError):
        await client.read_once(within_s=0.0005)


async def is_cancelled(client: Client) -> None:
    call = asyncio.get_running_loop().create_task(client.read_once())
    await asyncio.sleep(0.0005)
    call.cancel()
    await asyncio.wait([call])


async def is_silent(client: Client) -> None:
    await client.send(b"")


async def is_reset(client: Client) -> None:
    await client.send(HELLO, reset=True)


async def goes_in_a_frame(client: Client) -> None:
    await client.send(HELLO + HELLO[:20])


async def goes_in_a_payload(client: Client) -> None:
    write = frame(reserve(keys("half", 1)[0], size=4096))
    await client.send(HELLO + write + payload(4096)[:2000])


async def sends_no_frame(client: Client) -> None:
    await client.send(b"GET / HTTP/1.1\r\n\r\n")


async def is_no_request(client: Client) -> None:
    await client.send(HELLO + HELLO)


ENDS = [ends_well, is_refused, times_out, is_cancelled]
RAW = [is_silent, is_reset, goes_in_a_frame, goes_in_a_payload, sends_no_frame, is_no_request]
WAYS = [
    *[(scheme, end) for scheme in ("inproc", "shm", "tcp") for end in ENDS],
    *[(scheme, end) for scheme in ("shm", "tcp") for end in RAW],
]


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.freeze()  # what was there before is not looked at
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


#: What a server keeps until its next heartbeat, however many connections there are.
UNTIL_HEARTBEAT = ("kvpool.server.announcer", "kvpool.fingerprint")


def ours() -> Counter[str]:
    """The objects that connections are made of, by type."""
    return Counter(
        type(one).__qualname__
        for one in gc.get_objects()
        if (
            str(type(one).__module__).startswith("kvpool")
            and type(one).__module__ not in UNTIL_HEARTBEAT
            and not isinstance(one, Consumer)  # of which the master has those of the last one
        )
        or isinstance(one, FrameType | TracebackType | memoryview | BaseException)
    )


@pytest.mark.parametrize(
    ("scheme", "end"), WAYS, ids=[f"{scheme}-{end.__name__}" for scheme, end in WAYS]
)
async def test_a_connection_leaves_nothing(
    scheme: str, end: Callable[[Client], Awaitable[None]], no_collections: None
) -> None:
    transports: dict[str, Transport] = {
        "inproc": InprocTransport(),
        "shm": ShmTransport(),
        "tcp": TcpTransport(),
    }
    listen = ("inproc://", "shm://", "tcp://127.0.0.1:0")
    async with dev.serve("16MiB", listen=listen, transports=transports) as running:
        async with running.pool() as pool:
            await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        client = Client(running, scheme, transports[scheme])

        async def flushed() -> None:
            await eventually(lambda: client.server.stats(0.0).counters["connections"] == 0)
            await asyncio.sleep(0.05)  # the last ones have been closed, too
            # What is missing is announced again for each read, when the master has time: it may be
            # so busy, in this loop, that the server gives up waiting for it in between.
            (announcer,) = client.server._context.announcers
            await eventually(lambda: announcer.outbox.acknowledged >= announcer.outbox.enqueued, 60)

        async def after(connections: int) -> Counter[str]:
            for _ in range(connections):
                await end(client)
            await flushed()
            await end(client)  # what was sent last is kept: after a late answer, that is much
            await flushed()
            return ours()

        before = await after(10)
        grown = await after(CONNECTIONS) - before
        assert {name: more for name, more in grown.items() if more > CONNECTIONS // 20} == {}


async def test_a_burst_of_reads_goes_back_to_eight_streams(
    pool_dev: dev.Dev, no_collections: None
) -> None:
    """64 reads at once have 64 streams; of them those stay that the next call may use."""
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    (server,) = pool_dev.servers

    kinds = {"Stream": 8, "_ServerStream": 8, "FrameReader": 16}

    def streams() -> Counter[str]:
        names = (type(one).__qualname__ for one in gc.get_objects())
        return Counter(name for name in names if name in kinds)

    async with pool_dev.pool(config) as pool:
        await pool.write(NAMESPACE, CHAIN, values(CHAIN))
        for _ in range(3):
            await asyncio.gather(*[pool.read(NAMESPACE, [digest], buffers(1)) for digest in CHAIN])
            await eventually(lambda: server.stats(0.0).counters["connections"] == 8)
        # Both ends: a stream that was closed is gone when its tasks have ended, too.
        await eventually(lambda: streams() == kinds)


#: Of connections that ended, the objects of asyncio that are left in a process as masters and
#: servers are: three kinds of strangers at each of its ports.
LEFT_BEHIND = """
import asyncio, gc, os, socket, ssl, sys
from collections import Counter
from kvpool import Cluster, dev
from kvpool.ops import process
from kvpool_transports.tls import TlsTransport
from tests.attack.strangers import _client_hello
from tests.support.certificates import certificate

HELLO = _client_hello()
SAID = (b"", HELLO[:-1], HELLO, HELLO[:9] + os.urandom(len(HELLO) - 9))

async def stranger(address, said):
    host, port = address.rpartition("//")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    await asyncio.sleep(0.2)
    writer.transport.abort()

def left():
    kinds = Counter(type(one).__name__ for one in gc.get_objects())
    names = "_SelectorSocketTransport", "SSLProtocol", "socket", "Task"
    return {one: kinds[one] for one in names}

async def main():
    mine = certificate("server")
    tls = {"tls": TlsTransport(cert=mine.cert, key=mine.key)}
    listen = ("tcp://127.0.0.1:0", "tls://127.0.0.1:0")
    secret = Cluster("default", b"s" * 32)
    async with dev.serve("8MiB", listen=listen, transports=tls, cluster=secret) as running:
        ports = [running.address, *running.servers[0].addresses]
        for said in SAID:
            await asyncio.gather(*(stranger(port, said) for port in ports))
        process.freeze_gc()
        gc.disable()
        await asyncio.sleep(0.2)
        before = left()
        for _ in range(5):
            for said in SAID:
                await asyncio.gather(*(stranger(port, said) for port in ports))
        await asyncio.sleep(0.5)
        after = left()
        print(max(after[one] - before[one] for one in after), flush=True)

asyncio.run(main())
"""


async def test_handshakes_that_are_broken_off_leave_nothing_behind() -> None:
    async with script(LEFT_BEHIND) as child:
        assert int(await asyncio.wait_for(child.line(), 30)) <= 3
