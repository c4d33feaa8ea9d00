"""What policies infer, as an operator reads it: per server, in sum, and never without ground."""

from __future__ import annotations

import asyncio

import pytest

from kvpool import Namespace, dev
from kvpool.ops import metrics
from kvpool.ops.inferred import inferred_line, inferred_of, inferred_sum, inferred_table
from kvpool.ops.status_page import StatusPage
from kvpool.ops.top import Top
from kvpool.server.eviction import verdicts
from kvpool.types import ServerStats
from kvpool.wire import messages as wire
from tests.conftest import key
from tests.ops.test_tables import lines, member

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
    assert inferred_table([member(counters={"evicted_blocks": 3})]) is None


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


def test_a_heartbeat_carries_whatever_a_server_counts() -> None:
    counters = {f"counter_{number}": number for number in range(100)}
    beat = wire.Heartbeat("s", 1, bytes(16), ServerStats(counters=counters))
    assert wire.decode(wire.Heartbeat, *wire.encode(beat)).stats.counters == counters


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
