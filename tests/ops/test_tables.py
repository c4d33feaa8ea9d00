"""What an operator reads in a terminal: sizes, shares, rates."""

from __future__ import annotations

from functools import partial
from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.ops.demand import demand_table
from kvpool.ops.folding import Fitted
from kvpool.ops.tables import as_json_object, clients_table, members_table, tiers_table
from kvpool.types import ClientUsage, Demand, Namespace, TierUsage, WorkingSet
from kvpool.units import human, parse_size
from tests.support.members import member as usual_member

member = partial(usual_member, capacity=4 << 30, heard_s=0.4)


def lines(table: Table) -> list[list[str]]:
    console = Console(width=300, file=StringIO(), record=True)
    console.print(table)
    return [line.split() for line in console.export_text().splitlines()]


def test_one_line_for_each_client_that_holds_memory() -> None:
    clients = [
        ClientUsage("engine-7", "shm", 2, 3 << 20, 12.4, 0),
        ClientUsage("writer", "tcp", 1, 0, 0.0, 5 << 10),
    ]
    table = clients_table([member("b"), member("a", clients=clients)])
    heading, *rows = [" ".join(line) for line in lines(table)]
    assert heading == "server client transport connections pinned oldest pin reserved quarantine"
    assert rows == ["a engine-7 shm 2 3 MiB 12 s 0 B 0 B", "a writer tcp 1 0 B - 5 KiB 0 B"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5 MiB"),
        (1 << 30, "1 GiB"),
        ((1 << 40) - 1, "1024 GiB"),
        (3 << 40, "3 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert human(size) == text


@pytest.mark.parametrize("size", [1, 1536, 70 << 20, 3 << 30, 5 << 40])
def test_a_size_that_is_printed_can_be_a_setting(size: int) -> None:
    assert parse_size(human(size)) == size


def test_one_line_for_each_server_sorted() -> None:
    counters = {
        "evicted_blocks": 12345,
        "connections": 3,
        "hints_accepted": 5,
        "hints_clipped": 6,
        "hints_refused": 7,
    }
    stats = {"used": 1 << 30, "blocks": 1000, "pins": 4, "victim_age_s": 61.6, "rss": 2 << 20}
    table = members_table(
        [member("b", alive=False, heard_s=7.4), member("a", counters=counters, **stats)]
    )
    _, first, second = lines(table)
    assert (
        " ".join(first) == "a up dram 4 GiB 1 GiB (25%) ██░░░░░░ 1,000 12,345 4 3 62 s 5/6/7 2 MiB"
    )
    assert second[:4] == ["b", "lost", "7", "s"]


def test_a_server_that_leaves_says_how_much_is_left() -> None:
    leaving = member(draining=True, drain_left_blocks=1234)
    assert "a leaving, 1,234 left dram" in " ".join(lines(members_table([leaving]))[1])
    lost = member(alive=False, draining=True)
    assert "a lost" in " ".join(lines(members_table([lost]))[1])


def test_a_frozen_server_is_late_before_masters_give_it_up() -> None:
    assert "a late 2 s dram" in " ".join(lines(members_table([member(heard_s=2.2)]))[1])
    assert "a up dram" in " ".join(lines(members_table([member(heard_s=1.1)]))[1])


def test_a_server_without_memory() -> None:
    assert "(0%)" in " ".join(lines(members_table([replace(member(), capacity=0)]))[1])


def test_tiers_share_the_hits_and_add_up_their_errors() -> None:
    dram = TierUsage(name="dram", capacity=100 << 20, used=50 << 20, blocks=1200, hits=30)
    nvme = TierUsage(
        name="nvme",
        capacity=1 << 30,
        used=1 << 28,
        blocks=5,
        hits=10,
        written_bytes=4 << 20,
        write_s=2.0,
        failures=2,
        corrupt=3,
        lost=True,
        status_text="no more errors accepted",
    )
    _, first, second = (" ".join(line) for line in lines(tiers_table([member(usage=[dram, nvme])])))
    assert first.startswith("a dram 100 MiB 50 MiB (50%) ████░░░░ 1,200 30 (75%)")
    assert second.startswith("a nvme, lost 1 GiB 256 MiB (25%) ██░░░░░░ 5 10 (25%)")
    assert "2 MiB/s - 5 no more errors accepted" in second


def shown(fitted: Fitted, width: int) -> list[str]:
    console = Console(width=width, file=StringIO(), record=True, emoji=False)
    console.print(fitted)
    return [line.rstrip() for line in console.export_text().splitlines()]


BUSY = {
    "used": 900 << 20,
    "blocks": 1_234_567,
    "pins": 64,
    "victim_age_s": 86_400.0,
    "rss": 1300 << 20,
    "counters": {"evicted_blocks": 98_765_432, "connections": 512, "hints_accepted": 77},
    "usage": [
        TierUsage("dram", capacity=4 << 30, used=1 << 30, blocks=1_234_567, hits=9_999),
        TierUsage("nvme", "io_uring, direct", capacity=9 << 40, written_bytes=5 << 30, write_s=3.0),
    ],
}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("server", ["gpu-17", "gpu-node-17.rack-3.eu-central-1.example.internal"])
def test_nothing_is_cut_at_any_width(width: int, server: str) -> None:
    rows = [member(server, **BUSY), member("other", alive=False)]
    for table, names in ((members_table(rows), 3), (tiers_table(rows), 2)):
        lines = shown(Fitted(table, names), width)
        text = " ".join(" ".join(lines).split())
        assert "\u2026" not in text
        assert max(map(len, lines)) <= width
        for column in table.columns:
            for cell in column.cells:
                assert str(cell).startswith("<") or Text.from_markup(str(cell)).plain in text, cell
        assert len(lines) <= 5 * table.row_count + 1


def test_a_table_that_fits_is_one_line_for_each_row() -> None:
    table = members_table([member("a", **BUSY), member("b")])
    assert len(shown(Fitted(table, 3), 200)) == 3
    at = max(map(len, shown(Fitted(table, 3), 200)))
    assert len(shown(Fitted(table, 3), at)) == 3
    heading, first, *_ = folded = shown(Fitted(table, 3), at - 1)
    assert heading == "server  state  tier"
    assert first.startswith("a  up  dram   capacity 4 GiB   used 900 MiB (22%) \u2588\u2588")
    assert [line[:2] for line in folded if line[:1] != " "] == ["se", "a ", "b "]


def test_a_namespace_that_nobody_asks_for_again_has_no_line() -> None:
    sets = [WorkingSet(Namespace(f"n{n:02}"), (9 - n) << 20, 9 - n) for n in range(10)]
    _, *rows = lines(demand_table(Demand(600.0, tuple(sets), 1.0, 0.0)))
    assert [row[0] for row in rows] == [*(f"n{n:02}" for n in range(8)), "1"]
    assert rows[-1] == ["1", "others", "-", "1", "MiB", "1"]


def test_what_is_longer_than_a_line_goes_on_indented() -> None:
    table = Table("check", "", "", "what to do")
    table.add_row("secret", "warn", "word " * 30, "x" * 100)
    _, first, *rest = shown(Fitted(table, 2), 60)
    assert first == "secret  warn"
    assert all(line.startswith("  ") for line in rest)
    assert "".join(rest).count("x") == 100
    assert " ".join(rest).count("word") == 30
    assert "  what to do" in rest


def test_a_tenant_sees_no_zeros_where_it_may_not_see() -> None:
    leaving = member("a", draining=True)  # all that a tenant is told of the figures
    heading, row = shown(Fitted(members_table([leaving], hidden=True), 3), 80)
    assert heading.split() == ["server", "state", "tier", "capacity"]
    assert row.split() == ["a", "leaving", "dram", "4", "GiB"]
    told = as_json_object(leaving, hidden=True)
    assert told["draining"] is True
    assert {"server", "alive", "capacity"} <= told.keys()
    assert told.keys().isdisjoint({"used", "blocks", "rss", "usage", "clients"})
