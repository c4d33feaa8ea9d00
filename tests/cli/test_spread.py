"""`kvpool spread`, with real processes: what it copies, and what it says of each server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool import Pool, admin
from kvpool.cli.progress import Show
from kvpool.cli.spread import _print
from kvpool.client.spread import SpreadReport, SpreadTo
from kvpool.protocols import WriteOptions
from kvpool.types import ROOT, ReadStatus, WriteBlock
from tests.chaos.cluster import ProcessCluster
from tests.conftest import NAMESPACE, keys, value
from tests.support.commands import running_kvpool

BLOCK = 256 << 10
CHAIN = keys("spread", 160)


async def put(pool: Pool, server: str, chain: Sequence[bytes]) -> None:
    """Store a chain on one server."""
    options = WriteOptions(NAMESPACE, 0, visible=True)
    deadline = asyncio.get_running_loop().time() + 20
    for first in range(0, len(chain), 16):
        blocks = [
            WriteBlock(chain[i], chain[i - 1] if i else ROOT, (memoryview(data),), BLOCK)
            for i in range(first, first + 16)
            if (data := value(chain[i], BLOCK))
        ]
        statuses = await pool._writer.write_on(server, options, blocks, deadline)
        assert all(status.present for status in statuses), statuses


async def holders(pool: Pool, chain: Sequence[bytes]) -> set[str]:
    """The servers that live and have all of the chain."""
    living = {one.server for one in await pool.members() if one.alive}
    found = [
        {one.server for one in each.replicas}
        for each in await admin(pool).explain(NAMESPACE, chain)
    ]
    return set.intersection(living, *found)


async def spread(cluster: ProcessCluster, *arguments: str, stdin: str = "") -> tuple[int, str]:
    """Run `kvpool spread`; its exit code and output."""
    masters = ",".join(cluster.masters_of("clients"))
    common = ("--namespace", NAMESPACE.name, "--masters", masters, "--transport", "tcp")
    said = await running_kvpool("spread", *arguments, *common, stdin=stdin)
    return said.code, said.all


def recorder(shown: list[tuple[int, int | None]]) -> Callable[..., Any]:
    """Instead of a bar."""

    @contextmanager
    def recorded(what: str, *, quiet: bool, amount: Callable[[float], str]) -> Iterator[Show]:
        assert (what, quiet, amount(2)) == ("spreading", False, "2 blocks")
        yield lambda done, total: shown.append((done, total))

    return recorded


async def test_the_command_spreads_a_chain_and_says_what_each_server_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ProcessCluster(servers=4) as cluster, cluster.client("tcp") as pool:
        chain = CHAIN[:32]
        await put(pool, "server-0", chain)
        keys_ = [digest.hex() for digest in chain]
        shown: list[tuple[int, int | None]] = []
        with monkeypatch.context() as patch:
            patch.setattr("kvpool.cli.spread.progress", recorder(shown))
            code, output = await spread(cluster, *keys_, "--to", "server-1", "--to", "server-2")
        assert code == 0, output
        assert shown == sorted(shown), "in blocks"
        assert (shown[0], shown[-1]) == ((0, 64), (64, 64))
        rows = [line.split() for line in output.splitlines()]
        assert sorted(rows[1:]) == [["server-1", "32", "32"], ["server-2", "32", "32"]]
        assert await holders(pool, chain) == {"server-0", "server-1", "server-2"}
        code, output = await spread(cluster, "-", "--to", "4", "--json", stdin="\n".join(keys_))
        report = json.loads(output)
        assert (code, report["complete"], report["length"]) == (0, True, 32), output
        assert {one["server"]: one["fetched"] for one in report["servers"]}["server-3"] == 32
        # What the pool does not have, and a name that no server has, are no success.
        code, output = await spread(cluster, *keys_, keys("none", 1)[0].hex(), "--to", "1")
        assert (code, "32 of 33 blocks: never written" in output) == (1, True), output
        code, output = await spread(cluster, *keys_, "--to", "server-1,sever-3")
        assert code == 1, output
        line = next(line for line in output.splitlines() if line.startswith("no server or host"))
        assert "'sever-3': there are server-3, server-" in line, "the likeliest one first"
        assert "kvpool status" in line
        rows = [line.split(maxsplit=3) for line in output.splitlines()]
        assert ["sever-3", "0", "0", "no such name"] in rows, output
        assert ["server-1", "32", "0"] in rows, "the others get it"
        for wrong in (("not-hex", "--to", "1"), (*keys_, "--to", "0"), (*keys_, "--to", ",")):
            code, output = await spread(cluster, *wrong)
            assert code == 2, output


def test_what_each_server_has_is_a_row_under_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (SpreadTo("[red]one", 5, 3, ""), SpreadTo("two", 2, 0, "no room"))
    _print(SpreadReport(5, ReadStatus.EVICTED, rows), 7)
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("the pool has 5 of 7 blocks: ")
    assert [line.split(maxsplit=3) for line in table] == [
        ["server", "blocks", "fetched", "problem"],
        ["[red]one", "5", "3"],
        ["two", "2", "0", "no room"],
    ]
    _print(SpreadReport(7, ReadStatus.HIT, ()), 7)
    assert capsys.readouterr().out == "nothing is to be copied: so many servers have it\n"
    _print(SpreadReport(7, ReadStatus.HIT, rows), 7)
    assert "of 7 blocks" not in capsys.readouterr().out
