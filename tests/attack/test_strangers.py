"""Who reaches a port and knows no secret costs others next to nothing."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.wire.frames import PROTOCOL_VERSION
from tests.attack.castle import ATTACK_S, Castle, Costs, strangers, suffered
from tests.attack.strangers import ADDRESSES

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = {
    "master": "silent,reset,drip,half_hello,huge,garbage,handshakes",
    "server": "silent,reset,drip,half_frame,huge,garbage",
    "master-http": "silent,long_head,slow_head,pages,methods,garbage",
    "server-http": "silent,long_head,slow_head,pages,methods,garbage",
}
ALONE = [(port, kind) for port, kinds in KINDS.items() for kind in kinds.split(",")]
#: Connections before a proof, all together, with those that the honest ones open; and the memory
#: of each: what is read ahead, and what TLS has.
UNPROVED, EACH = 1024 + 16, 224 << 10


def check(costs: Costs) -> None:
    """Of log lines: one for each address, and one for those whose connection is gone already."""
    costs.check(private=UNPROVED * EACH, files=UNPROVED, lines=len(ADDRESSES) + 1)


@pytest.mark.parametrize("port", KINDS)
async def test_strangers_of_all_kinds_at_once(attacked: Castle, port: str) -> None:
    check(await suffered(attacked, strangers(KINDS[port], attacked.ports[port])))


@pytest.mark.skipif(ATTACK_S <= 1, reason="make attack")
@pytest.mark.parametrize(("port", "kind"), ALONE)
async def test_strangers_of_one_kind(attacked: Castle, port: str, kind: str) -> None:
    check(await suffered(attacked, strangers(kind, attacked.ports[port])))


async def test_a_first_message_has_no_long_body(attacked: Castle) -> None:
    """So 1024 strangers cannot make a server hold a MiB each."""
    reader, writer = await asyncio.open_connection(*attacked.ports["server"].split(":"))
    version = bytes([PROTOCOL_VERSION])
    writer.write(b"kv" + version + b"\x02" + (1 << 20).to_bytes(4, "little") + bytes(8))
    assert b"BadFrame" in await asyncio.wait_for(reader.read(), 2)
    writer.close()
