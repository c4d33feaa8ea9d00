"""The benchmark beside the peers: our side of it, and what it prints, without any peer."""

from __future__ import annotations

import io
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.peers import failures, plot, pool_lmcache, report, sessions, targets, work
from benchmarks.peers.contract import Shape
from benchmarks.peers.field import CONTENDERS, HARDENED, Field
from benchmarks.peers.processes import Rig

_MIB = 1 << 20
_EFFORT = work.Effort(rounds=1, rounds_max=1, seconds=0.1)


@pytest.fixture
async def field() -> Any:
    async with AsyncExitStack() as stack:
        field = Field(Rig(sorted(os.sched_getaffinity(0))[:2], stack), 40 * _MIB)
        yield field
        field.close()


async def test_our_side_of_it(
    field: Field, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every kind of work by kvpool; every byte is compared, and nobody is left behind. Who has no
    environment is left out, and the others are measured."""
    monkeypatch.setattr(pool_lmcache, "_PYTHON", tmp_path / "python")
    both = ("lmcache", "kvpool")
    async with field.contenders(both, Shape(64 * _MIB), clients=2) as contenders:
        assert [one.name for one in contenders] == ["kvpool"]
        rows = await work.batches(contenders, 64 << 10, 4, _EFFORT)
        rows += await work.singles(contenders, 64 << 10, _EFFORT, count=2)
        rows += await work.several_clients(contenders, 64 << 10, 4, _EFFORT)
        rows += await work.match(contenders, 64, _EFFORT)
        rows += await sessions.memory(contenders, 256)
        pids = [p.pid for c in contenders for p in c.system.processes.values()]
    assert [row.part for row in rows] == ["reads", "singles", "clients", "match", "memory"]
    assert all(row.figures["read"] > 0 for row in rows if row.part == "reads")
    assert not set(map(str, pids)) & set(os.listdir("/proc"))
    assert "make .venv-lmcache/ready" in field.missing["lmcache"]


async def test_a_failure_of_ours(field: Field) -> None:
    """The script of a failure runs, and loses nothing: the master is killed and comes back."""
    patience = failures.Patience(freeze_s=5.0)
    (row,), abouts = await failures.play(field, "master restarted", ["kvpool"], patience)
    assert row.figures["visible"] == 1.0
    assert row.figures["wrong"] == 0
    assert "version" in abouts["kvpool"]


async def test_who_is_missing_is_left_out(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with field.contenders(("redis",), Shape(64 * _MIB)) as contenders:
        assert contenders == []
    assert "apt-get install redis-server" in field.missing["redis"]


async def test_who_cannot_take_part_is_left_out_of_that_part(field: Field) -> None:
    """With the reason in the report, and nobody is missing elsewhere."""
    names = ["kvpool", "lmcache", "mooncake"]
    assert field.taking_part("pressure", names) == ["kvpool", "mooncake"]
    assert field.taking_part("reads", names) == names
    assert field.missing == {"lmcache, pressure": pool_lmcache.WITHOUT["pressure"]}


def test_every_system_is_in_the_chart() -> None:
    assert {*CONTENDERS, *HARDENED} <= plot._COLOURS.keys()


def _row(part: str, what: str, system: str, **figures: Any) -> work.Row:
    return work.Row(part, what, system, figures)


def test_parts_are_joined_and_shown(tmp_path: Path) -> None:
    """A part that is measured again replaces itself only; ratios and targets come from the rest."""
    path = tmp_path / "peers.json"
    limits = {"memcpy": 5.0, "socket": 2.0, "disk": None}
    run = {**report.machine([0, 1]), "limits": limits}
    found = report.Results.load(path)
    about = {"kvpool": {"version": "1", "settings": "defaults"}}
    found.add([_row("reads", "1 MiB x 64", "kvpool", read=1.0)], run, about, {})
    found.add([_row("match", "640 keys", "kvpool", p50=4e-4)], run, about, {})
    found.add(
        [
            _row("reads", "1 MiB x 64", "kvpool", read=3.0),
            _row("reads", "1 MiB x 64", "mooncake", read=2.0),
        ],
        {**run, "at": "later"},
        about,
        {"redis": "apt-get install redis-server"},
    )
    assert len(json.loads(path.read_text())["rows"]) == 3
    again = report.Results.load(path)
    (verdict,) = targets.judge(again.parts())
    assert (verdict.measured, verdict.met) == ("1.50x", False)
    shown = io.StringIO()
    report.show(again, Console(file=shown, width=200))
    for words in ("3.00 GB/s", "1.50", "400 us", "left out redis", "missed"):
        assert words in shown.getvalue()
