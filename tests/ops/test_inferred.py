"""What policies infer, as an operator reads it: per server, in sum, and never without ground."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Mapping

import pytest

from kvpool import Namespace, dev
from kvpool.errors import UsageError
from kvpool.net.http_server import Page, PageView, pages
from kvpool.ops import metrics
from kvpool.ops.inferred import inferred_line, inferred_of, inferred_sum, inferred_table
from kvpool.ops.status_page import StatusPage
from kvpool.ops.top import Top
from kvpool.ops.why import ask_why, why_page
from kvpool.server.eviction import verdicts
from kvpool.types import Cluster
from tests.conftest import key
from tests.ops.test_tables import lines, member
from tests.support.commands import running_kvpool

NAMES = (
    "programs", "returning_programs", "dead_programs",
    "returning_blocks", "dead_blocks", "shared_blocks",
    "returning_came", "returning_left", "returning_asked", "dead_came", "dead_left", "dead_asked",
)  # fmt: skip
OF_PROGRAMS = {
    f"inferred_{name}": number
    for name, number in zip(NAMES, (1, 2, 3, 4, 5, 6, 7, 3, 1, 2, 8, 1), strict=True)
}
OF_DENSITY = {
    name: 100 * count
    for name, count in OF_PROGRAMS.items()
    if "programs" not in name and "shared" not in name
}


def test_a_line_for_each_server_that_infers_something_and_their_sum() -> None:
    servers = [
        member("b", counters=OF_DENSITY),
        member("a", counters=OF_PROGRAMS),
        member("lru", counters={"evicted_blocks": 3}),
        member("lost", counters=OF_PROGRAMS, alive=False),
    ]
    table = inferred_table(servers)
    assert table is not None
    _, *rows = [" ".join(line) for line in lines(table)]
    assert rows == [
        "a 1 2 3 4 5 6 80% of 10 70% of 10",
        "b - - - 400 500 - 80% of 1,000 70% of 1,000",
        "2 servers 1 2 3 404 505 6 80% of 1,010 70% of 1,010",
    ]
    table = inferred_table(servers[:1])
    assert table is not None
    _, row = lines(table)
    assert " ".join(row) == "b 400 500 80% of 1,000 70% of 1,000", "no column of dashes"
    assert inferred_table([member(counters={"evicted_blocks": 3})]) is None
    nothing = dict.fromkeys(OF_DENSITY, 0)
    assert inferred_table([member(counters=nothing)]) is None, "a table of zeros tells nothing"
    assert inferred_table([member("a", counters=nothing), servers[0]]) is not None


def test_nothing_is_right_before_anything_was_expected() -> None:
    counters = dict.fromkeys(OF_DENSITY, 0)
    assert inferred_line(inferred_of(counters)) == "returning 0 blocks, dead 0 blocks"
    assert inferred_line(inferred_of({})) == ""


def test_top_has_them_of_the_pool_and_of_one_server() -> None:
    top = Top()
    top.seen(0.0, [member("a", counters=OF_PROGRAMS), member("b", counters=OF_PROGRAMS)], None)

    def shown() -> list[str]:
        drawn = [line.plain for line in top.lines(0.0, 120, 24)]
        return [line for line in drawn if line.startswith("inferred")]

    of_pool = (
        "inferred  2 conversations, returning 8 blocks (right 80% of 20), dead 10 blocks (right "
        "70% of 20), shared 12"
    )
    assert shown() == [of_pool]
    top.press("enter")
    assert shown()[1].startswith("inferred  1 conversations, returning 4 blocks (right 80% of 10)")


def test_levels_are_gauges_and_outcomes_counters() -> None:
    page = "".join(
        one.decode()
        for one in metrics._text_of(metrics._of_members([member("s", counters=OF_PROGRAMS)]))
    )
    for name in NAMES:
        total = "_total" if name.endswith(("came", "left", "asked")) else ""
        assert f'kvpool_server_inferred_{name}{total}{{server="s"}} ' in page, name


async def test_a_server_tells_what_its_policy_infers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_SEEN_MIN", 1)
    monkeypatch.setattr("kvpool.server.eviction.density._SAMPLE", 1)
    async with dev.serve("4MiB", listen=("inproc://",)) as served, served.pool() as pool:
        page = StatusPage(served.master, 1.5)
        await pool.write(Namespace("n"), [key("a")], [b"x" * 4096])
        assert served.servers[0].stats(0.0).counters["inferred_dead_blocks"] == 1
        members = await pool.members()
        while not inferred_sum(members)["dead_blocks"]:  # the next heartbeat
            await asyncio.sleep(0.02)
            members = await pool.members()
        await asyncio.wait([watching := asyncio.ensure_future(page.watch())], timeout=0.1)
        watching.cancel()
        assert page._pool(named=True)["inferred"]["dead_blocks"] == 1


async def test_a_server_says_why_a_block_went_on_its_own_host() -> None:
    async with dev.serve("1MiB", listen=("inproc://",)) as served, served.pool() as pool:
        for number in range(20):
            await pool.write(Namespace("n"), [key(f"{number}")], [bytes(65536)])
        (answer,) = why_page(served.servers[0], Cluster()).values()
        page = answer.answer({"key": key("0").hex()}, True)
        assert page.body.decode() == (
            "used once, quiet for 0 s: 0% of such blocks come back after that, and all else was "
            "expected to bring more hits\n"
        )
        for present in ("19", "never"):
            page = answer.answer({"key": key(present).hex()}, True)
            assert page.body.startswith(b"not known")
        assert answer.answer({"key": key("0").hex()}, False).status == 403
        for wrong in ({}, {"key": ""}, {"key": "xyz"}, {"key": "00" * 33}, {"key": "00", "a": ""}):
            with pytest.raises(UsageError):
                answer.answer(wrong, True)


async def test_from_another_host_it_is_for_who_knows_the_clusters_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator far away proves it, for one key and a minute; a tenant and a stranger cannot."""
    secret = b"of the whole cluster"
    mine = Cluster("c", secret)
    asked: list[dict[str, str]] = []
    async with dev.serve("1MiB", listen=("inproc://",)) as served:
        (view,) = why_page(served.servers[0], mine).values()

        def far(query: Mapping[str, str], _: bool) -> Page:
            asked.append(dict(query))
            return view.answer(query, False)

        async with pages({"/why": PageView(far)}, "127.0.0.1:0") as serving:
            assert serving is not None

            async def said(cluster: Cluster) -> str:
                return (await ask_why(serving.address, [key("a")], 5.0, cluster))[0]

            assert await said(mine) == "not known: it is here, never was, or left long ago"
            (proven,) = asked
            others = (
                Cluster(),
                Cluster("c", secret + b"!"),
                Cluster("other", secret),
                Cluster("c", secret, "a tenant"),
            )
            for one in others:
                assert "with the cluster's secret and the right time" in await said(one), one
        for change in ({"key": key("b").hex()}, {"at": "1"}, {"proof": "é"}, {"at": "9" * 99}):
            assert view.answer({**proven, **change}, False).status == 403, change
        monkeypatch.setattr(time, "time", lambda: int(proven["at"]) + 61.0)
        assert view.answer(proven, False).status == 403
        (view,) = why_page(served.servers[0], Cluster("c")).values()
        no_secret = hmac.digest(b"", b"x", "sha256").hex()
        assert view.answer({**proven, "proof": no_secret}, False).status == 403


async def test_explain_shows_what_is_inferred_where_a_block_was_evicted() -> None:
    async with dev.serve("1MiB") as served, served.pool() as pool:
        for number in range(20):
            await pool.write(Namespace("n"), [key(f"{number}")], [bytes(65536)])
        where = ("--namespace", "n", "--masters", served.address)
        said = await running_kvpool("explain", key("0").hex(), *where)
        assert "evicted" in said.out
        assert "what the policy infers: returning 0 blocks, dead " in said.out
        said = await running_kvpool("explain", key("19").hex(), *where)
        assert said.out
        assert "infers" not in said.out
        async with pages(why_page(served.servers[0], Cluster()), "127.0.0.1:0") as serving:
            assert serving is not None
            asked = (*where, "--server-http", serving.address)
            said = await running_kvpool("explain", key("0").hex(), *asked)
            shown = " ".join(said.out.split())
            assert " evicted: it was stored earlier; used once, quiet for " in shown
            both = (key("0").hex(), key("19").hex())
            said = await running_kvpool("explain", *both, *asked, "--json")
            evicted, present = json.loads(said.out)
            assert evicted["why"].startswith("used once, ")
            assert "why" not in present
        said = await running_kvpool("explain", key("0").hex(), *asked)
        assert "not known: 127.0.0.1:" in " ".join(said.out.split()), "it is gone"
        said = await running_kvpool("explain", key("0").hex(), *where, "--server-http", "x")
        assert (said.code, "expected HOST:PORT" in said.err) == (2, True)


async def test_a_strange_answer_is_bounded_and_cannot_write_on_the_terminal() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n\x1b[31mred\n" + b"x" * 9000)
        await writer.drain()
        await reader.read()  # it says no end
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as stranger:
        host, port = stranger.sockets[0].getsockname()
        (text,) = await ask_why(f"{host}:{port}", [key("a")], 5.0, Cluster())
        assert text.startswith(" [31mred xxx")
        assert len(text) == 400

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as stranger:
        host, port = stranger.sockets[0].getsockname()
        found = await ask_why(f"{host}:{port}", [key("a"), key("b")], 0.1, Cluster())
        assert found == [f"not known: {host}:{port} does not answer"] * 2
