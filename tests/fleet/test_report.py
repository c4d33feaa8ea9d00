"""What a run prints and draws."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from benchmarks.fleet.__main__ import app
from benchmarks.fleet.options import FleetOptions
from benchmarks.fleet.tables import DEFAULT, TABLES, studies

#: Small enough for a second.
SMALL = ("--sessions", "6", "--concurrent", "3", "--block-tokens", "4096", "--jobs", "1")


def test_one_command_makes_a_page_with_tables_and_pictures(tmp_path: Path) -> None:
    page = tmp_path / "fleet.html"
    arguments = ["headline", "memory", "--gpus", "12", *SMALL, "--page", str(page)]
    arguments += ["--pictures", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "first token" in text
    assert "measured by others" in text  # the constants
    names = {file.stem for file in tmp_path.glob("*.svg")}
    assert names == {"headline-first-token", "headline-time", "memory-throughput", "memory-hits"}
    for file in tmp_path.glob("*.svg"):
        drawn = ElementTree.parse(file)
        for line in drawn.iter("{http://www.w3.org/2000/svg}polyline"):
            points = [tuple(map(float, one.split(","))) for one in line.get("points", "").split()]
            assert all(80 <= x <= 680 and 89 <= y <= 451 for x, y in points), file
    again = tmp_path / "again.html"
    CliRunner().invoke(app, [*arguments[:-4], "--page", str(again)], catch_exceptions=False)
    assert _figures(again.read_text()) == _figures(text)


def _figures(page: str) -> list[str]:
    """Without the line that names the command."""
    return re.findall(r"<td>[^<]*", page)


def test_a_page_that_cannot_be_written_is_an_error_before_the_run(tmp_path: Path) -> None:
    for option in ("--page", "--pictures"):
        missing = str(tmp_path / "missing" / "fleet.html")
        done = CliRunner().invoke(app, ["headline", option, missing])
        assert done.exit_code != 0
        assert "no such directory" in done.output.replace("\n", " ")


def test_a_table_has_a_fleet_of_its_own_size() -> None:
    assert TABLES["memory"].options({}).gpus == 24
    larger = TABLES["memory"].options({"gpus": 48})
    assert (larger.sessions, larger.concurrent) == (300, 200)
    assert TABLES["memory"].options({"gpus": 48, "concurrent": 7}).concurrent == 7
    assert set(DEFAULT) <= set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_the_cases_of_each_table_have_names_of_their_own(name: str) -> None:
    trace = {"trace": "any"} if name == "trace" else {}
    cases = TABLES[name].cases(TABLES[name].options(trace))
    assert cases
    assert len({case.name for case in cases}) == len(cases)
    assert all(bool(case.series) == bool(TABLES[name].x) for case in cases if case.x)


def test_a_pool_and_local_memory_lose_the_same() -> None:
    table = TABLES["failures"]
    lost = {case.name: case.options.incidents for case in table.cases(table.options({}))}
    engines, hosts = lost["a third of the engines"], lost["local, sticky: a third of the hosts"]
    servers = lost["a third of the servers"]
    assert {one.kind for one in servers} == {"restart"}  # as a host, it runs again
    assert sorted([*engines, *servers]) == sorted(hosts)
    assert lost["each host in turn"] == lost["local, sticky: each host in turn"]
    assert {one.kind for one in lost["a server, for good"]} == {"server"}


def test_json_has_every_row() -> None:
    arguments = ["one", *SMALL, "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    (study,) = json.loads(done.stdout)["studies"]
    (row,) = study["rows"]
    assert len(row["first_tokens"]) == 21
    assert row["first_tokens"] == sorted(row["first_tokens"])
    mean = sum(row["parts"])
    assert 0 < mean < 1000


def test_rows_stand_in_their_order_however_many_run_at_a_time() -> None:
    """Those that begin first are the largest, and none of another table's."""
    small = FleetOptions(sessions=4, concurrent=2, block=4096)
    fleets = {"one": small, "headline": replace(small, sessions=8)}
    said: list[str] = []
    alone = studies(fleets, 1, said.append)
    assert said[0].startswith("headline: ")
    assert said[-1].startswith("one: ")
    assert len(said) == len({*said}) == sum(len(one.rows) for one in alone)
    assert [one.name for one in alone] == [*fleets]
    assert [one.rows for one in studies(fleets, 2, said.append)] == [one.rows for one in alone]
    assert alone[0].rows[0][1].prompts < alone[1].rows[0][1].prompts
