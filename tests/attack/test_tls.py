"""The data stream over tls: strangers who break their handshakes off, and one in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from kvpool import Pool
from tests.attack.castle import ATTACK_S, MODEL, Castle, castle, cheap, strangers, suffered
from tests.attack.strangers import ADDRESSES
from tests.attack.test_middle import CHAIN, SIZE, TIMEOUT_S, WAYS, Middle, deceived, read
from tests.chaos.cluster import free_ports
from tests.conftest import value, values
from tests.support.certificates import certificate

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = "silent", "reset", "drip", "half_hello", "garbage"
#: Connections before a proof, all together, with those that are being closed for new ones; and the
#: memory of each.
UNPROVED, EACH = 1024 + 256, 256 << 10


class Enciphered(NamedTuple):
    """A castle that speaks tls, and one who stands before its server."""

    castle: Castle
    address: str
    middle: Middle

    async def client(self) -> Pool:
        return await self.castle.client("acme", transports=["tls"], timeout_s=TIMEOUT_S)


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
    enciphered.middle.seen.clear()
    with cheap(enciphered.castle):
        written = await deceived(enciphered.middle, way, enciphered.client)
    for digest in (CHAIN[0], *written):
        assert value(digest, SIZE)[:64] not in enciphered.middle.seen
    assert b"llama" not in enciphered.middle.seen
    async with await enciphered.client() as pool:
        assert await read(pool, CHAIN) == len(CHAIN)
