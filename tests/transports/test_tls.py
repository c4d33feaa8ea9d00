"""A `Stream` works over TLS of asyncio: frames and payloads pass both ways, and no wait hangs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool.wire.frame_reader import PayloadReceiver
from kvpool.wire.frames import Frame
from kvpool.wire.messages import TYPES, Hello, Welcome
from kvpool_transports.streams import Stream

SIZES = (1, 17, 65_535, 1 << 20, (3 << 20) + 1)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server with a certificate made for this test, and of a client that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("the certificate of this test is made with the command openssl")
    folder: Path = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    out = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *out], check=True, capture_output=True, timeout=60)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.create_default_context(cafile=str(certificate))
    return server, client


@asynccontextmanager
async def pair(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> AsyncIterator[list[Stream]]:
    """Two streams at the ends of one TLS connection."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Stream] = loop.create_future()

    class Accepted(Stream):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            accepted.set_result(self)

    server = await loop.create_server(Accepted, "127.0.0.1", 0, ssl=contexts[0])
    port = server.sockets[0].getsockname()[1]
    _, dialled = await loop.create_connection(
        Stream, "127.0.0.1", port, ssl=contexts[1], server_hostname="localhost"
    )
    streams = [dialled, await accepted]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.abort()
        server.close()
        await asyncio.sleep(0.01)


async def exchange(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Frames with and without payloads, in turns, several times each way."""
    blocks = [bytes(n % 251 for n in range(size)) for size in SIZES]
    deadline = asyncio.get_running_loop().time() + 20
    async with pair(contexts) as (one, other):
        for source, sink in ((one, other), (other, one)) * 2:
            hello = asyncio.ensure_future(sink.expect(Hello, deadline=deadline))
            await source.send(Hello("default", "tls"), deadline=deadline)
            assert (await hello).client == "tls"
            into = [bytearray(size) for size in SIZES]

            def target(frame: Frame, into: list[bytearray] = into) -> PayloadReceiver:
                assert frame.type == TYPES[Welcome]
                return PayloadReceiver([(memoryview(block),) for block in into])

            receiving = asyncio.ensure_future(sink.receive(target, deadline=deadline))
            payload = [(memoryview(block),) for block in blocks]
            await source.send(Welcome("s"), payload, deadline=deadline)
            # What `send` promises: nothing of the payload is still to be read from its memory.
            assert source._transport is not None
            assert source._transport.get_write_buffer_size() == 0
            await receiving
            assert into == blocks


async def test_frames_and_payloads_pass(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    await exchange(contexts)


def test_on_the_loop_of_production(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(exchange(contexts))


async def test_the_end_of_one_side_is_seen_by_the_other(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with pair(contexts) as (one, other):
        one.abort()
        for _ in range(500):
            if other.lost:
                break
            await asyncio.sleep(0.01)
        assert other.lost
