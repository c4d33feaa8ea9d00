"""A tenants file that is replaced under load: what is not valid changes nothing, and is a line."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from kvpool.errors import KvpoolError
from tests.attack.castle import ATTACK_S, MIB, MODEL, Castle, suffered
from tests.attack.test_files import LAUGHS
from tests.conftest import keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Made of the right text.
BROKEN: dict[str, Callable[[str], str]] = {
    "half written": lambda text: text[: text.index("secret_file")],
    "empty": lambda text: "",
    "no list": lambda text: "tenants: 7\n",
    "no yaml": lambda text: text + "\0\x1b[31m: [",
    "a bomb": lambda text: LAUGHS,
    "a tenant twice": lambda text: text + text.removeprefix("tenants:\n"),
    "no secret": lambda text: text.replace("blue.secret", "nowhere"),
}


async def replace(of: Castle, text: str) -> None:
    """And have both processes read it now."""
    (of.folder / "tenants.yaml").write_text(text)
    for node in of.nodes:
        assert node.process is not None
        os.kill(node.process.pid, signal.SIGHUP)
    await asyncio.sleep(0.1)


async def may_ask(of: Castle, tenant: str) -> bool:
    try:
        async with await of.client(tenant) as pool:
            await pool.contains(MODEL, keys("asked", 1))
    except KvpoolError:
        return False
    return True


async def until(of: Castle, tenant: str, *, may: bool) -> None:
    for _ in range(100):
        if await may_ask(of, tenant) is may:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{tenant} may {'not ' if may else ''}ask")


async def test_a_broken_tenants_file_changes_nothing_and_a_right_one_at_once(
    attacked: Castle,
) -> None:
    right = (attacked.folder / "tenants.yaml").read_text()
    rounds = 1 if ATTACK_S <= 1 else 5

    async def replaced() -> None:
        for _ in range(rounds):
            for name, broken in BROKEN.items():
                await replace(attacked, broken(right))
                assert await may_ask(attacked, "blue"), name
            await replace(attacked, right[: right.index("- name: blue")])
            await until(attacked, "blue", may=False)
            await replace(attacked, right)
            await until(attacked, "blue", may=True)

    # A line for each file, and for blue that asks while it is none: once for each address.
    lines = rounds * (len(BROKEN) + 2) + 2
    costs = await suffered(attacked, replaced())
    costs.check(private=32 * MIB, files=64, lines=lines)
    for node, written in costs.lines.items():
        refused = [line for line in written if "the one before stays" in line]
        assert len(refused) == rounds * len(BROKEN), (node, written)
