"""Long work says how far it is: a bar on a terminal, lines elsewhere, nothing beside JSON."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvpool.cli.progress import blocks, progress
from kvpool.tools.replay_report import ReplayReport, tables
from kvpool.tools.replay_report import progress as replay_progress
from kvpool_tiers.nvme import recovery_log
from kvpool_tiers.nvme.recovery_log import RecoveryLog

GIB = 1 << 30
Steps = list[tuple[float, int, int | None]]


def drawn(steps: Steps, *, quiet: bool = False, terminal: bool = False, width: int = 100) -> str:
    out, now = io.StringIO(), [0.0]
    console = Console(
        file=out, force_terminal=terminal, width=width, color_system=None, get_time=lambda: now[0]
    )
    with progress("draining [gpu-1]", quiet=quiet, console=console) as show:
        for seconds, done, total in steps:
            now[0] = seconds
            show(done, total)
        if terminal and not quiet:
            console.print("end")  # draws the bar once more
    return out.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    steps: Steps = [(float(second), second * GIB, (80 + second) * GIB) for second in range(41)]
    lines = drawn(steps).splitlines()
    assert lines[1] == "draining [gpu-1]: 20 of 100 GiB, 80 s left, 1 GiB/s"
    assert len(lines) == 4
    assert drawn(steps[:9]) == "", "it was quick"


@pytest.mark.parametrize(("width", "name"), [(100, "draining [gpu-1] "), (44, "draining… ")])
def test_a_terminal_gets_a_bar_with_the_time_that_is_left(width: int, name: str) -> None:
    steps: Steps = [(float(second), second * GIB, 200 * GIB) for second in range(3)]
    text = drawn(steps, terminal=True, width=width)
    assert "\u2501" in text
    assert name in next(one for one in text.splitlines() if "2 of 200 GiB, 3 min left, 1" in one)


def test_what_nobody_knows_is_logged_at() -> None:
    steps: Steps = [(0.0, 0, None), (20.0, 5 * GIB, None), (40.0, 10 * GIB, None)]
    line = drawn(steps).splitlines()[-1]
    assert line.startswith("draining [gpu-1]: 10 GiB of an unknown size")
    assert "left" not in line


def test_what_is_counted_in_blocks_is_shown_in_blocks() -> None:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, width=100, color_system=None, get_time=lambda: now[0])
    with progress("spreading", quiet=False, console=console, amount=blocks) as show:
        for second in range(12):
            now[0] = float(second)
            show(second * 100, 3200)
    assert out.getvalue() == "spreading: 1,000 of 3,200 blocks, 22 s left, 100 blocks/s\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_stands_beside_json(terminal: bool) -> None:
    steps: Steps = [(float(second), second * GIB, 100 * GIB) for second in range(41)]
    assert drawn(steps, quiet=True, terminal=terminal) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_replay_says_how_long_it_will_take(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    report = ReplayReport("x[/b]", 100, 1, 1, 1 << 20, 1 << 10, transports={})
    with replay_progress(console, report) as show:
        show(0.0)
        report.match_s += [0.001] * 20
        show(30.0)
    console.print(*tables(report))
    assert "2 min left" in out.getvalue()
    assert "wrong bytes 0" in out.getvalue(), "no word is cut"
    if not terminal:
        assert "30 s  20 of 100 requests, 2 min left  hit rate" in out.getvalue()


async def test_a_large_file_says_how_far_its_recovery_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(recovery_log.log, "info", lambda event, **more: said.append(more))
    told = RecoveryLog(Path("/data/kvpool"), 8 * GIB)
    told.at(GIB)
    assert said == [], "it is quick"
    told._began -= 20
    told._logged_at -= 20
    told.at(0)
    told.at(2 * GIB)
    told.at(3 * GIB)
    assert said == [{"path": "/data/kvpool", "done": "2 GiB of 8 GiB", "left_s": 60}]
