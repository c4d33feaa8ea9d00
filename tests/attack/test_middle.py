"""Who stands between two processes of a pool with a secret: stops them, and deceives nobody.

Over tcp he can read blocks, and alter them together with their checksums (docs/security.md). What
he does here needs no knowledge of the protocol, and is no hit with wrong bytes on any link.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest
import pytest_asyncio

from kvpool import Pool, WriteStatus
from kvpool.errors import KvpoolError
from tests.attack.castle import ATTACK_S, MIB, MODEL, Castle, castle, cheap, right
from tests.chaos.cluster import free_ports
from tests.conftest import keys, patient, values

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE, TIMEOUT_S = 32 << 10, 1.0
CHAIN = keys("in the middle", 8)
WAYS = "flip", "replay", "cut", "reorder", "delay", "swap"


class Middle:
    """Passes on what goes to `target`, in its own way."""

    def __init__(self, target: str, port: int = 0) -> None:
        self.way = ""
        self.seen = bytearray()
        self._target, self._port = target, port
        self._rng = random.Random(port)
        self._open: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far, onward = await asyncio.open_connection(*self._target.split(":"))
        self._open.append(writer)
        both = [self._pass(reader, onward, False), self._pass(far, writer, True)]
        self._tasks |= {asyncio.create_task(one) for one in both}

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: bool
    ) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.seen += data[: max(0, MIB - len(self.seen))]
                often = self._rng.random() < 0.4
                to = [writer]
                match self._rng.choice(WAYS) if self.way == "all" else self.way:
                    case "flip" if often:
                        at = self._rng.randrange(len(data))
                        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                    case "replay" if often:
                        data += data
                    case "cut" if often:
                        writer.write(data[: len(data) // 2])
                        break
                    case "reorder":
                        data, held = (b"", data) if often and not held else (data + held, b"")
                    case "delay":
                        await asyncio.sleep(self._rng.random())
                    case "swap" if replies and often:
                        to = [self._rng.choice(self._open)]
                    case "strip" if data.startswith(b"kvpool-1"):
                        data = b"kvpool-0" + data[8:]
                to[0].write(data)
                await writer.drain()
        writer.close()


class Besieged(NamedTuple):
    """A castle with one who stands before its master, and one who stands before its server."""

    castle: Castle
    control: Middle
    data: Middle

    async def client(self, master: str) -> Pool:
        return await self.castle.client("acme", masters=[master], timeout_s=TIMEOUT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def besieged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Besieged]:
    (port,) = free_ports(1)
    options = ("--capacity", "64MiB", "--announce", f"tcp://127.0.0.1:{port}")
    async with castle(tmp_path_factory.mktemp("castle"), *options) as made:
        control, data = Middle(made.ports["master"]), Middle(made.ports["server"], port)
        await control.start()
        await data.start()
        found = Besieged(made, control, data)
        async with await found.client(made.ports["master"]) as pool:
            written = await pool.write(MODEL, CHAIN, values(CHAIN, SIZE))
            assert written == [WriteStatus.STORED] * len(CHAIN)
        yield found
        control.close()
        data.close()


async def read(pool: Pool, chain: list[bytes]) -> int:
    """Hits; their bytes are right, and the answer came in time."""
    began = time.perf_counter()
    results = await right(pool, chain, SIZE)
    assert time.perf_counter() - began < TIMEOUT_S + patient(0.5)
    return sum(result.status.hit for result in results)


async def deceived(where: Middle, way: str, client: Callable[[], Awaitable[Pool]]) -> list[bytes]:
    """Play honest clients for some seconds; what they have written, as they believe."""
    written: list[bytes] = []
    where.way = way
    try:
        until = time.perf_counter() + 1.5
        while time.perf_counter() < until:
            with contextlib.suppress(KvpoolError):
                async with await client() as pool:
                    await asyncio.gather(*(read(pool, CHAIN[at : at + 4]) for at in (0, 2, 4)))
                    assert (await pool.match(MODEL, CHAIN)).length <= len(CHAIN)
                    fresh = [secrets.token_bytes(32) for _ in range(2)]
                    statuses = await pool.write(MODEL, fresh, values(fresh, SIZE))
                    written += [
                        one
                        for one, status in zip(fresh, statuses, strict=True)
                        if status is WriteStatus.STORED
                    ]
    finally:
        where.way = ""
    return written


@pytest.mark.parametrize("way", [*WAYS, "all"] if ATTACK_S > 1 else ["all"])
@pytest.mark.parametrize("plane", ["control", "data"])
async def test_who_stands_in_the_middle_deceives_nobody(
    besieged: Besieged, plane: str, way: str
) -> None:
    """And when he lets go, everything is as before."""
    of = besieged.castle
    direct = of.ports["master"]
    where, master = besieged.data, direct
    if plane == "control":
        where, master = besieged.control, besieged.control.address
    with cheap(of):
        written = await deceived(where, way, lambda: besieged.client(master))
    async with await besieged.client(master) as pool:
        assert await read(pool, CHAIN) == len(CHAIN)
        assert await read(pool, written[-64:]) == len(written[-64:]) if written else True


async def test_a_stripped_handshake_tells_nothing(besieged: Besieged) -> None:
    """He says that the master has no secret: the client believes him not, and names nothing."""
    besieged.control.way = "strip"
    besieged.control.seen.clear()
    try:
        with pytest.raises(KvpoolError, match="secret"):
            async with await besieged.client(besieged.control.address) as pool:
                await pool.match(MODEL, CHAIN)
    finally:
        besieged.control.way = ""
    assert besieged.control.seen
    assert b"llama" not in besieged.control.seen


async def test_nothing_on_the_way_to_a_master_can_be_read(besieged: Besieged) -> None:
    besieged.control.seen.clear()
    async with await besieged.client(besieged.control.address) as pool:
        assert (await pool.match(MODEL, CHAIN)).length == len(CHAIN)
    assert len(besieged.control.seen) > 1000
    assert b"llama" not in besieged.control.seen
    assert CHAIN[0] not in besieged.control.seen
