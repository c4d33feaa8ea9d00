"""Strangers who reach a port and know no secret: python -m tests.attack.strangers KINDS ADDRESS S.

They come from other addresses of loopback, as from other hosts, and give the attacked processes the
processor first, as other hosts do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from kvpool.wire.frames import PROTOCOL_VERSION

#: The longest body of a first message to a server.
FIRST_BODY_MAX = 4 << 10
#: Where they come from.
ADDRESSES = [f"127.{number}.0.9" for number in range(1, 41)]
#: SO_LINGER with zero seconds: closing resets.
_RESET = struct.pack("ii", 1, 0)


class Stranger:
    """One connection."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline

    async def say(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def listen(self) -> bytes:
        """What is said to it; raises ConnectionError at the end."""
        data = await self._loop.sock_recv(self._sock, 1 << 16)
        if not data:
            raise ConnectionResetError
        return data

    async def wait(self, seconds: float = 1e9) -> None:
        """Until then, or until it was thrown out."""
        until = min(self._deadline, self._loop.time() + seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while True:
                    await self.listen()


async def silent(one: Stranger) -> None:
    await one.wait()


async def reset(one: Stranger) -> None:
    """Gone as soon as it has come."""


async def drip(one: Stranger) -> None:
    """A byte from time to time of what could become a request."""
    for byte in _client_hello() + bytes(1000):
        await one.say(bytes([byte]))
        await one.wait(0.02)


async def half_hello(one: Stranger) -> None:
    await one.say(_client_hello()[:-1])
    await one.wait()


async def half_frame(one: Stranger) -> None:
    """A first frame of the greatest size, but for its last byte."""
    await one.say(_header(1, FIRST_BODY_MAX, 0) + bytes(FIRST_BODY_MAX - 1))
    await one.wait()


async def huge(one: Stranger) -> None:
    """Lengths without end, and bytes as long as they are taken."""
    await one.say(_header(1, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF))
    while True:
        await one.say(b"\xff" * (1 << 16))


async def garbage(one: Stranger) -> None:
    await one.say(os.urandom(random.randint(1, 1 << 16)))
    await one.wait(0.2)


async def handshakes(one: Stranger) -> None:
    """All of TLS, which is dear to a master, and then a wrong proof, or a record that is none."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = _context().wrap_bio(incoming, outgoing)
    got = b""
    while len(got) < 8:  # the greeting
        got += await one.listen()
    incoming.write(got[8:])
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            await one.say(outgoing.read())
            incoming.write(await one.listen())
    tls.write(len(b"a guess").to_bytes(4, "little") + b"a guess")
    broken = b"\x17\x03\x03\x00\x40" + os.urandom(64)
    await one.say(outgoing.read() if random.random() < 0.5 else broken)
    await one.wait(1.0)


async def long_head(one: Stranger) -> None:
    """HTTP: headers without end."""
    await one.say(b"GET /metrics HTTP/1.1\r\n")
    while True:
        await one.say(b"x-a: " + b"a" * 4000 + b"\r\n")


async def slow_head(one: Stranger) -> None:
    await one.say(b"GET / HTTP/1.1\r\n")
    while True:
        await one.say(b"x")
        await one.wait(0.05)


async def pages(one: Stranger) -> None:
    """The dearest page, and it is not read."""
    path = random.choice(["/", "/metrics", "/api/v1/pool", "/api/v1/servers", "/" + "a" * 5000])
    await one.say(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    await one.wait(0.5)


async def methods(one: Stranger) -> None:
    method = random.choice([b"POST", b"PUT", b"DELETE", b"TRACE", b"CONNECT", b"\0", b"get"])
    await one.say(method + b" / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + bytes(9999))
    await one.wait(0.5)


#: Those of each kind, and how many come at once.
KINDS: dict[str, tuple[Callable[[Stranger], Awaitable[None]], int]] = {
    "silent": (silent, 1500),
    "reset": (reset, 50),
    "drip": (drip, 300),
    "half_hello": (half_hello, 1500),
    "half_frame": (half_frame, 1200),
    "huge": (huge, 50),
    "garbage": (garbage, 100),
    "handshakes": (handshakes, 50),
    "long_head": (long_head, 50),
    "slow_head": (slow_head, 500),
    "pages": (pages, 100),
    "methods": (methods, 100),
}


def _header(type: int, body: int, payload: int) -> bytes:
    """Of a frame of the data plane: docs/wire.md."""
    return struct.pack("<2sBBIQ", b"kv", PROTOCOL_VERSION, type, body, payload)


@cache
def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@cache
def _client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    tls = _context().wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


async def attack(
    play: Callable[[Stranger], Awaitable[None]], at_once: int, address: str, deadline: float
) -> int:
    """So many connections of one kind, again and again; how many there were."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    connected = 0

    async def come_again() -> None:
        nonlocal connected
        while loop.time() < deadline:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
                if play in (reset, huge):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.bind((random.choice(ADDRESSES), 0))
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await loop.sock_connect(sock, (host, int(port)))
                        connected += 1
                        await play(Stranger(sock, deadline))
            await asyncio.sleep(0)

    await asyncio.gather(*(come_again() for _ in range(at_once)))
    return connected


async def attacks(kinds: str, address: str, seconds: str) -> None:
    chosen = [KINDS[kind] for kind in kinds.split(",")]
    many = [(play, at_once // len(chosen)) for play, at_once in chosen]
    #: A connection takes its time, too.
    lasts = float(seconds) + 0.001 * sum(at_once for _, at_once in many)
    deadline = asyncio.get_running_loop().time() + lasts
    going = [attack(play, at_once, address, deadline) for play, at_once in many]
    connected = sum(await asyncio.gather(*going))
    print(f"connected={connected}", flush=True)


if __name__ == "__main__":
    os.nice(5)
    Path("/proc/self/oom_score_adj").write_text("500")
    asyncio.run(attacks(*sys.argv[1:]))
