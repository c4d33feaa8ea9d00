"""A tenant whose names are no names: nothing of them is run, hidden or told without an end."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import pytest

from kvpool import Namespace
from kvpool.errors import KvpoolError
from tests.attack.castle import MIB, Castle, suffered
from tests.conftest import keys, values
from tests.support.commands import running_kvpool

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT, QUOTE = "<script>alert(1)</script>", 'a"} 1\\n\nkvpool_up{x="'
NAMES = [
    SCRIPT,
    QUOTE,
    "\x1b[2J\x1b[31mred",
    "\r\nfake: line",
    "\u202eright to left",
    "\u0000",
    "x" * 500,
]
PAGES = "/", "/metrics", "/api/v1/pool", "/api/v1/servers"


def page(address: str, path: str) -> tuple[str, str]:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as got:
        return got.headers["Content-Type"], got.read().decode()


async def test_hostile_names_are_shown_as_what_they_are(attacked: Castle) -> None:
    shown: list[str] = []

    async def named() -> None:
        async with await attacked.client("blue") as pool:
            for name in NAMES:
                for session in ("", f"program={name};1"):
                    chain = keys(f"named {name}", 2)
                    try:
                        await pool.write(Namespace(name), chain, values(chain), session=session)
                        await pool.match(Namespace(name), chain, session=session)
                    except (KvpoolError, ValueError):
                        pass  # refused, with a sentence
        await asyncio.sleep(1.2)  # until a heartbeat has told masters
        for port in ("master-http", "server-http"):
            for path in PAGES:
                try:
                    kind, text = await asyncio.to_thread(page, attacked.ports[port], path)
                except OSError:
                    continue  # a server has no status page
                assert len(text) < MIB
                check(kind, text)
                shown.append(text)
        key = ("--secret-file", str(attacked.folder / "cluster.secret"))
        masters = ("--masters", attacked.ports["master"])
        for words in ("usage --by namespace", "usage --by program", "status", "top --refreshes 1"):
            said = await running_kvpool(*words.split(), *masters, *key)
            assert said.code == 0, said.all
            check("text/plain", said.all)
            shown.append(said.all)

    costs = await suffered(attacked, named())
    costs.check(private=32 * MIB, files=64)
    assert any("alert(1)" in text for text in shown), "no page names it"
    for written in costs.lines.values():
        check("text/plain", "\n".join(written))


def check(kind: str, text: str) -> None:
    shown = text.replace("\n", "")
    if "json" in kind:
        json.loads(text)
        return
    assert shown.isprintable(), [one for one in shown if not one.isprintable()][:5]
    if "html" in kind:
        assert SCRIPT not in text
    for line in text.splitlines():
        assert not line.startswith(("fake:", "kvpool_up{x=")), line
