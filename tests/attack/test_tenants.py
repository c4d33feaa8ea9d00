"""A tenant with a right key of its own costs others their share, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.attack.castle import ATTACK_S, MIB, Castle, actor, castle, suffered
from tests.conftest import keys
from tests.support.commands import running_kvpool

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = "fill", "ask", "names", "removals", "reservations", "pins", "bad", "forbidden"
#: One tenant alone has half of `server.connections_max`, beside those before a proof; for each of
#: them what is read ahead, and a request.
CONNECTIONS, EACH = 512 + 16, 224 << 10
#: What it fills elsewhere: bytes that arrive, names that are remembered.
MEMORY = 48 * MIB
#: Of the logger of a transport, and of the audit for each kind of request: one in a minute.
LINES = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Castle]:
    """Others are guaranteed what they need, and no tenant may have everything."""
    shares = {"guaranteed": "25%", "limit": "60%"}
    async with castle(tmp_path_factory.mktemp("castle"), tenant=shares) as made:
        yield made


async def blue(attacked: Castle, kinds: str, name: str = "blue") -> None:
    """The hostile one does all these; the honest one is acme."""
    key, ports = attacked.folder / f"{name}.key", attacked.ports
    did = await actor("tenants", kinds, key, ports["master"], ports["server"], ATTACK_S)
    assert did["done"] > 5


async def test_a_hostile_tenant_that_does_everything_at_once(attacked: Castle) -> None:
    costs = await suffered(attacked, blue(attacked, ",".join(KINDS)))
    costs.check(private=MEMORY, files=128, lines=LINES)


async def test_a_tenant_that_has_all_connections(attacked: Castle) -> None:
    """Each in the middle of the longest request, or with a reservation."""
    costs = await suffered(attacked, blue(attacked, "connections,open_write"))
    costs.check(private=CONNECTIONS * EACH, files=CONNECTIONS + 1024, lines=64)


async def test_a_tenant_that_asks_a_master_in_parts(attacked: Castle) -> None:
    """200 connections with TLS, and a MiB of each."""
    costs = await suffered(attacked, blue(attacked, "questions"))
    costs.check(private=128 * MIB, files=200 + 128, lines=LINES)


@pytest.mark.skipif(ATTACK_S <= 1, reason="make attack")
@pytest.mark.parametrize("kind", [*KINDS, "open_write"])
async def test_a_hostile_tenant(attacked: Castle, kind: str) -> None:
    """Each connection that is cut off, as others wait for what it holds, is a line."""
    costs = await suffered(attacked, blue(attacked, kind))
    costs.check(private=MEMORY, files=128, lines=64 if kind == "open_write" else LINES)


async def test_a_hostile_engine_of_the_same_tenant_alters_no_block(attacked: Castle) -> None:
    """It may remove blocks, and be first to write them. What is stored stays as it is."""
    costs = await suffered(attacked, blue(attacked, "overwrite", "acme"))
    costs.check(private=MEMORY, files=128, lines=LINES)


FIRST = keys("honest", 1)[0].hex()
COMMANDS = {
    f"explain {FIRST} --namespace @acme/llama": (0, "never written"),
    "remove --namespace @acme/llama --yes": (0, "nothing to remove"),
    "remove --tenant acme --yes": (2, "only operators, with the cluster's secret"),
    "drain s": (1, "Drain is for operators and servers"),
    "usage": (0, "what servers hold and do is for operators"),
}


async def test_a_tenants_commands_reach_nothing_of_others(attacked: Castle) -> None:
    key = ("--secret-file", str(attacked.folder / "blue.key"))
    masters = ("--masters", attacked.ports["master"])

    async def commands() -> None:
        for words, (code, says) in COMMANDS.items():
            said = await running_kvpool(*words.split(), *masters, *key)
            assert (said.code, says in said.all) == (code, True), said

    costs = await suffered(attacked, commands())
    assert not costs.lost
