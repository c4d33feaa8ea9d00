"""What `make demo-fleet` plays and reports; with real engines it runs by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.fleet import demo_results
from examples import fleet_rates, vllm_fleet
from examples.agent_sessions import FAMILIES, Session, long_session, recorded
from examples.fleet_report import HINTS, WITH, WITHOUT, Answered, Row, picture, table, wrong

ROOT = Path(__file__).parents[2]


def test_sessions_are_the_same_in_every_process() -> None:
    program = "from examples.agent_sessions import recorded; print(hash(repr(recorded())))"
    done = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
            env={"PYTHONHASHSEED": "0"},
        ).stdout
        for _ in range(2)
    ]
    assert done[0] == done[1]


def test_sessions_fork_use_tools_and_have_sub_agents() -> None:
    sessions = {one.name: one for one in recorded()}
    assert len(sessions) == 24 == 3 * FAMILIES
    assert len({one.prompt(0)[0]["content"] for one in sessions.values()}) == 1  # the tools
    for number in range(FAMILIES):
        root, child, fork = (sessions[f"{kind}-{number}"] for kind in ("root", "child", "fork"))
        for one in (root, child, fork):
            for turn in range(1, len(one.ends)):
                before = one.prompt(turn - 1)
                assert one.prompt(turn)[: len(before)] == before
                assert one.prompt(turn)[-1]["role"] == "tool"
        assert child.prompt(0)[:-1] == root.prompt(0)
        assert fork.prompt(0)[:-1] == root.prompt(1)
        assert child.headers("p-")["x-codex-parent-thread-id"] == "p-" + root.name
        assert (child.after, fork.after) == ((root.name, 0), (root.name, 1))
        assert not fork.parent
    longs = [long_session(number, 3, 50) for number in (0, 1)]
    assert longs[0].prompt(0) != longs[1].prompt(0)


def answered(number: int, text: str = "right") -> Answered:
    return Answered("s", number, 100, 60 + number, number / 10, text, "http://a")


def test_the_report_is_of_what_was_answered() -> None:
    row = Row("example: session", WITH, [answered(number) for number in range(1, 11)], 3.0)
    assert row.computed == 1000 - 655
    assert row.hit_rate == pytest.approx(0.655)
    assert (row.first_s(0.5), row.first_s(0.9), row.first_s(1.0)) == (0.5, 0.9, 1.0)
    other = row._replace(mode=WITHOUT, answers=[answered(1, "wrong")])
    assert "65.5%       345     0.50s   0.90s       10     3s" in table([row, other])
    expected = {("s", number): "right" for number in range(11)}
    assert wrong([row], expected) == []
    (fault,) = wrong([row, other], expected)
    assert "turn 1 of s by http://a: 'wrong', a plain engine 'right'" in fault
    assert ElementTree.fromstring(picture([row, other])).tag.endswith("svg")


def test_each_run_has_its_own_blocks_and_vllm_takes_its_salt() -> None:
    salts = {f"{policy}-{vllm_fleet._SHORT[mode]}-" for policy, mode, _ in vllm_fleet.CELLS}
    assert len(salts) == len(vllm_fleet.CELLS)
    assert not any(set(salt) & set("@/\\\0") for salt in salts)
    without = vllm_fleet.Cell("", "r", WITHOUT, "salt").body()
    assert without["kv_transfer_params"]["kvpool"] == {"skip_load": True, "skip_save": True}
    assert "kv_transfer_params" not in vllm_fleet.Cell("", "r", HINTS, "salt").body()
    default = {(policy, mode) for policy, mode, extra in vllm_fleet.CELLS if not extra}
    assert {("round_robin", WITHOUT), ("session", WITHOUT), ("precise", HINTS)} <= default


@pytest.mark.parametrize(
    "arguments",
    [
        ["--vllm-router", "/no/such/program"],
        ["--picture", "/no/such/folder/x.svg"],
        ["--results", "/no/such/folder/x.json"],
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        vllm_fleet.parse(arguments)
    assert "no such" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_its_processes_when_it_is_terminated(sent: signal.Signals) -> None:
    """Engines are in process groups of their own: a signal to the demo does not reach them."""
    program = """
import asyncio, contextlib, pathlib
from examples import vllm_fleet as demo

@contextlib.contextmanager
def started(model, logs):
    try:
        yield None, None
    finally:
        print("ended", flush=True)

async def measure(*_):
    print("runs", flush=True)
    await asyncio.sleep(60)

demo.started, demo.measure, demo.tiny, demo.find_spec = started, measure, lambda at: at, bool
demo.main([])
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line == "runs\n":
                running.send_signal(sent)
                break
        rest = running.stdout.read()
    assert rest == "ended\n"
    assert running.returncode == 128 + sent


def test_blocks_have_the_same_number_after_the_same_blocks_only() -> None:
    numbers = fleet_rates.BlockNumbers(4)
    first = numbers.of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(set(first)) == 2
    assert numbers.of([1, 2, 3, 4, 5, 6, 7, 9]) == [first[0], 2]
    assert numbers.of([5, 6, 7, 8]) == [3]  # at another place of a prompt it is another block
    assert numbers.of([1, 2, 3]) == []


async def test_every_engine_is_probed_with_prompts_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is written is what `python -m benchmarks.fleet --demo-results` reads."""
    monkeypatch.setattr(fleet_rates, "_SAVED_S", 0.0)
    seen: dict[tuple[int | None, str, str], int] = {}
    asked: list[tuple[int | None, str, str]] = []

    async def ask(engine: int | None, mode: str, salt: str, session: Session) -> Answered:
        key = (engine, salt, session.name)
        held = seen.get(key, 0) > 0
        seen[key] = seen.get(key, 0) + 1
        asked.append((engine, mode, salt))
        return Answered(session.name, 0, 1000, 992 * held, 0.1, "", "", 0, 5.0, 5.35)

    found = await fleet_rates.probes(ask, 3, 4, 1, 6)
    assert {one.row for one in found} == {1}
    assert all(one.step_s == pytest.approx(0.05) for one in found)
    assert {one.cached for one in found if one.kind == "cold"} == {0}
    assert {one.cached for one in found if one.kind == "held"} == {992}
    assert {engine for engine, _, _ in asked} == {0, 1, 2, None}
    kinds = {one.kind for one in found}
    assert kinds >= set(demo_results.KINDS)
    pooled = {salt for _, mode, salt in asked if mode == WITH}
    assert {salt for _, mode, salt in asked if mode == WITHOUT} & pooled == {"rates-1-routed"}
    assert {one.cached for one in found if one.kind in ("beside", "pool_beside")} == {0}
    assert {one.cached for one in found if one.kind == "pool_crowd"} == {992}
    file = tmp_path / "results.json"
    facts = {
        **{"engines": 3, "engine_bytes": 1, "engine_tokens": 1, "pool_bytes": 1, "block": 32},
        **{"at_once": 4, "output": 6},
    }
    row = Row("example: session", WITH, [answered(1)], 3.0)
    fleet_rates.write(file, facts, [], found, [row])
    assert demo_results.read(file).rows[0].hit_rate == row.hit_rate
