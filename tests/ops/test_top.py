"""The view of `kvpool top`, without a terminal: it fits any size, and keys do what they say."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvpool.ops.bars import bar, sparkline
from kvpool.ops.top import Top
from kvpool.types import ClientUsage, Demand, Member, ServerStats, TierUsage
from tests.support.members import member as usual_member


def member(server: str, used: int = 1 << 20, *, alive: bool = True, **stats: Any) -> Member:
    tiers = [
        TierUsage("dram", capacity=4 << 20, used=used, hits=3, blocks=7),
        TierUsage("nvme", capacity=40 << 20, used=used, hits=1, blocks=9),
    ]
    own = {"addresses": ("tcp://127.0.0.1:1",), "tiers": ("dram", "nvme"), "capacity": 4 << 20}
    own |= {"alive": alive, "heard_s": 0.4 if alive else 17.0}
    return usual_member(server, **{**own, "used": used, "usage": tiers, **stats})


def text(top: Top, width: int = 100, height: int | None = 24) -> str:
    return "\n".join(line.plain for line in top.lines(99.0, width, height))


def names(top: Top) -> list[str]:
    """Of the servers in the table, in its order."""
    rows = [line.plain[2:7] for line in top.lines(99.0, 100, 40)]
    return [row for row in rows if row.startswith("gpu-")]


@pytest.mark.parametrize("width", [1, 10, 40, 80, 300])
@pytest.mark.parametrize("height", [2, 5, 15, 24])
def test_every_screen_fits(width: int, height: int) -> None:
    top = Top()
    clients = [ClientUsage(f"engine-{n}", "shm", 2, 3 << 20) for n in range(30)]
    for now in range(5):
        top.seen(float(now), [member(f"服务器-{n:03}", clients=clients) for n in range(200)], None)
    for key in ("", "enter", "escape", "?", "?", "lost"):
        top.press(key)
        if key == "lost":
            top.lost(5.0, "12:00:00", "no master answers " * 20)
        lines = top.lines(9.0, width, height)
        assert len(lines) <= height
        assert max(line.cell_len for line in lines) <= width, key


def test_the_selected_server_stays_in_view_among_many() -> None:
    top = Top()
    top.seen(0.0, [member(f"gpu-{n:02}") for n in range(60)], None)
    for _ in range(45):
        top.press("down")
    assert "> gpu-45" in text(top)
    top.press("page down")
    top.press("page down")
    assert "> gpu-59" in text(top), "not behind the last one"
    top.seen(1.0, [member(f"gpu-{n:02}") for n in range(60) if n != 59], None)
    assert "> gpu-00" in text(top), "it has gone"


def test_servers_are_sorted_by_what_was_asked_for() -> None:
    top = Top()
    for now in range(3):
        count = {"read_bytes": now << 20}
        top.seen(
            float(now),
            [
                member("gpu-a", 1 << 20, victim_age_s=5.0),
                member("gpu-b", 3 << 20, victim_age_s=9.0, counters=count),
                member("gpu-c", 2 << 20, victim_age_s=1.0, alive=False),
            ],
            None,
        )
    expected = {
        "n": ["gpu-a", "gpu-b", "gpu-c"],
        "u": ["gpu-b", "gpu-c", "gpu-a"],
        "t": ["gpu-b", "gpu-a", "gpu-c"],
        "a": ["gpu-c", "gpu-a", "gpu-b"],
        "p": ["gpu-c", "gpu-a", "gpu-b"],
    }
    for key, order in expected.items():
        top.press(key)
        assert names(top) == order, key
    top.press("n")
    top.press("r")
    assert names(top) == ["gpu-c", "gpu-b", "gpu-a"]
    top.press("s")
    assert names(top) == ["gpu-a", "gpu-c", "gpu-b"], "by use, reversed"


def test_a_name_cannot_control_the_terminal() -> None:
    top = Top()
    hostile = "a\x1b]0;owned\x07\u202egnp\r\n[red]b[/]"
    clients = [ClientUsage("c\x1b[2J", "t\x1b[2J", 1, 5)]
    top.seen(0.0, [member(hostile, clients=clients)], None)
    table = text(top, height=None)
    top.press("enter")
    drawn = table + text(top, height=None)
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(drawn)
    assert "[red]b[/]" in drawn


def test_the_hit_rate_is_that_of_matches_and_a_restarted_master_spoils_nothing() -> None:
    top = Top()

    def shown() -> str:
        (line,) = (line for line in text(top).splitlines() if line.startswith("hit rate"))
        return line.split()[2]

    assert "hit rate" in text(top)
    totals = [(0, 0), (100, 10), (200, 20), (7, 7), (105, 104), (205, 184), (305, 264), (405, 344)]
    for now, (asked, found) in enumerate(totals):
        top.seen(float(now), [member("a")], Demand(1.0, (), 0.0, 0.0, asked, found))
        if now == 2:
            assert shown() == "10.0%"
        if now:
            assert 0 <= float(shown().rstrip("%")) <= 100, now
    assert shown() == "80.0%"


def test_it_tells_since_when_no_master_answers_and_keeps_what_was_there() -> None:
    top = Top()
    top.seen(0.0, [member("gpu-a")], None)
    top.lost(50.0, "12:00:00", "why")
    top.lost(60.0, "12:00:10", "another reason")
    drawn = text(top)
    assert "no master answers since 12:00:00 (49 s): another reason" in drawn
    assert "> gpu-a" in drawn
    top.seen(70.0, [member("gpu-a")], None)
    assert "no master" not in text(top)


def test_a_tier_in_trouble_is_seen_in_the_table_and_inside() -> None:
    broken = [TierUsage("nvme", "EROFS", capacity=1 << 20, read_only=True, failures=3)]
    lost = [TierUsage("nvme", "EIO", capacity=1 << 20, lost=True)]
    top = Top()
    top.seen(0.0, [member("gpu-a", usage=broken), member("gpu-b", usage=lost)], None)
    assert "read-only" in text(top)
    assert "tier lost" in text(top)
    top.press("enter")
    assert "takes no writes: EROFS" in text(top)
    assert "3 failures, 0 corrupt" in text(top)


@pytest.mark.parametrize("width", [40, 100])
def test_what_moves_is_shown_with_the_time_that_is_left(width: int) -> None:
    top = Top()
    for second in range(1, 4):
        left = (5 - second) << 20
        leaving = member("gpu-a", draining=True, drain_left_bytes=left)
        others = [
            member(f"gpu-{name}", counters={"fetched_bytes": second << 20}) for name in "bcdef"
        ]
        top.seen(float(second), [leaving, *others], None)
    shown = text(top, width)
    assert "50%  gpu-a  2 MiB left" in shown
    assert "fetches    gpu-b" in shown
    assert "gpu-e  " not in shown.partition("server")[0], "a few of them"
    if width == 100:
        assert "2 MiB left, 2 s" in shown
        assert "of unknown size" in shown
    top.seen(9.0, [member("gpu-a")], None)
    assert "leaves" not in text(top, width)


def test_bars() -> None:
    assert bar(0.5, 8) == "████░░░░"
    assert bar(0.001, 8) == "█░░░░░░░", "something is there"
    assert bar(0.0, 8, ascii_only=True) == "........"
    assert bar(7.0, 4, ascii_only=True) == "####"


def test_sparklines() -> None:
    assert sparkline([0, 1, None, 2], 6) == "  ▁▅ █"
    assert sparkline([0.0, 0.0], 2) == "▁▁"
    assert sparkline([9, 1, 2], 2) == "▅█", "the last ones"
    assert sparkline([0.5], 1, top=1.0) == "▅"
    assert sparkline([], 3) == "   "
    assert sparkline([1, 2], 2, ascii_only=True).isascii()


@pytest.mark.parametrize("width", [40, 100])
def test_a_tenant_sees_no_zeros_of_what_is_not_told(width: int) -> None:
    top = Top("figures are for operators")
    told = replace(member("gpu-a"), stats=ServerStats())  # all that masters tell a tenant
    top.seen(0.0, [told, replace(told, server="gpu-b", alive=False)], None)
    page = text(top, width)
    assert "1 up 1 lost" in page.replace("  ", " ")
    assert "memory    4 MiB\nfigures are for operators\n" in page
    assert "> gpu-a" in page
    for figure in ("hit rate", "0 B", "0%", "victim", "blocks"):
        assert figure not in page
    top.press("enter")
    page = text(top, width)
    assert "at        tcp://127.0.0.1:1" in page
    assert "evicted" not in page
