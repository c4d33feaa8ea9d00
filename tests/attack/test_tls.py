"""The data stream over tls: strangers who break their handshakes off, and one in the middle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvpool import ClientConfig, Pool, connect
from kvpool.errors import KvpoolError
from tests.attack.castle import (
    ATTACK_S,
    LINES_MAX,
    MIB,
    MODEL,
    Castle,
    castle,
    private_bytes,
    strangers,
    suffered,
)
from tests.attack.strangers import ADDRESSES
from tests.attack.test_middle import WAYS, Middle
from tests.chaos.cluster import free_ports
from tests.conftest import buffers, keys, patient, value, values
from tests.support.certificates import certificate

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE, TIMEOUT_S = 32 << 10, 1.0
CHAIN = keys("over tls", 8)
KINDS = "silent", "reset", "drip", "half_hello", "garbage"
#: Connections before a proof, all together, with those that are being closed for new ones; and the
#: memory of each.
UNPROVED, EACH = 1024 + 256, 256 << 10


class Enciphered:
    """A castle that speaks tls, and one who stands before its server."""

    def __init__(self, of: Castle, address: str, middle: Middle) -> None:
        self.castle, self.address, self.middle = of, address, middle

    async def client(self, scheme: str = "tls") -> Pool:
        masters = [self.castle.ports["master"]]
        config = ClientConfig(masters=masters, transports=[scheme], timeout_s=TIMEOUT_S)
        return await connect(config=config, cluster=self.castle.cluster("acme"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def enciphered(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Enciphered]:
    mine = certificate("server")
    port, shown, plain = free_ports(3)
    tls = f"tls://127.0.0.1:{port}?cert={mine.cert}&key={mine.key}"
    listen = ("--listen", f"tcp://127.0.0.1:{plain},{tls}")
    options = ("--capacity", "64MiB", *listen, "--announce", f"tls://127.0.0.1:{shown}")
    async with castle(tmp_path_factory.mktemp("castle"), *options) as made:
        middle = Middle(f"127.0.0.1:{port}", shown)
        await middle.start()
        found = Enciphered(made, f"127.0.0.1:{port}", middle)
        async with await found.client() as pool:
            await pool.write(MODEL, CHAIN, values(CHAIN, SIZE))
        yield found
        middle.close()


@pytest.mark.parametrize("kinds", [",".join(KINDS), *(KINDS if ATTACK_S > 1 else ())])
async def test_strangers_who_break_handshakes_off(enciphered: Enciphered, kinds: str) -> None:
    costs = await suffered(enciphered.castle, strangers(kinds, enciphered.address))
    costs.check(private=UNPROVED * EACH, files=UNPROVED, lines=len(ADDRESSES) + 1)


@pytest.mark.parametrize("way", [*WAYS, "all"] if ATTACK_S > 1 else ["all"])
async def test_who_stands_in_the_middle_stops_connections_and_no_more(
    enciphered: Enciphered, way: str
) -> None:
    of = enciphered.castle
    lines = {node: len(of.lines(node)) for node in of.nodes}
    private = {node: private_bytes(node) for node in of.nodes}
    enciphered.middle.way = way
    enciphered.middle.seen.clear()
    try:
        until = time.perf_counter() + 1.5
        while time.perf_counter() < until:
            with contextlib.suppress(KvpoolError):
                async with await enciphered.client() as pool:
                    began = time.perf_counter()
                    got = buffers(len(CHAIN), SIZE)
                    results = await pool.read(MODEL, CHAIN, got)
                    assert time.perf_counter() - began < TIMEOUT_S + patient(0.5)
                    for result, has, right in zip(results, got, values(CHAIN, SIZE), strict=True):
                        assert not result.status.hit or has == right, "wrong bytes"
    finally:
        enciphered.middle.way = ""
    assert value(CHAIN[0], SIZE)[:64] not in enciphered.middle.seen
    assert b"llama" not in enciphered.middle.seen
    for node in of.nodes:
        node.check()
        assert len(of.lines(node)) - lines[node] <= LINES_MAX, of.lines(node)[lines[node] :][:9]
        assert private_bytes(node) - private[node] < 32 * MIB
    async with await enciphered.client() as pool:
        results = await pool.read(MODEL, CHAIN, buffers(len(CHAIN), SIZE))
        assert all(one.status.hit for one in results), results
