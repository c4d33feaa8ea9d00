"""The simulator itself: its histories pass, repeat exactly, and find planted bugs.

`make sim` plays thousands of seeds. Here are a few, and proof that the simulator can fail.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.simulation import __main__ as program_of_histories
from tests.simulation import plant, planted
from tests.simulation.__main__ import main
from tests.simulation.loop import Forbidden, SimLoop, Violation
from tests.simulation.plan import WorldPlan
from tests.simulation.planted_devices import DEVICE_BUGS
from tests.simulation.planted_guesses import BUGS as OF_GUESSES
from tests.simulation.planted_pots import BUGS as OF_POTS
from tests.simulation.planted_streams import BUGS as OF_STREAMS
from tests.simulation.sandbox import sandbox
from tests.simulation.world import World, run

#: Left out: all that servers can do beside memory and disk, and with SMALL the disk, too.
DISK = frozenset(
    {
        "circles", "cold", "contests", "crowds", "guesses", "hoard", "joins", "moves",
        "one-request", "prefetches", "reports meet", "sessions", "task fails", "tenants",
    }
)  # fmt: skip
SMALL = DISK | {"disk", "write-back"}


@pytest.mark.parametrize("without", [frozenset(), DISK, SMALL], ids=["all", "disk", "small"])
@pytest.mark.parametrize("seed", range(4))
def test_a_history_ends_well(seed: int, without: frozenset[str]) -> None:
    report = run(seed, without=without)
    assert report.failure is None
    assert report.ops > 40


def test_what_servers_have_lost_is_found_in_their_object_store() -> None:
    report = run(36, ops=40)
    assert report.failure is None
    assert "a block was found in the object store" in report.probes


def test_a_history_leaves_the_product_as_it_was() -> None:
    """Tests that run later in this process rely on it."""

    def product() -> dict[tuple[str, str], int]:
        modules = {name: one for name, one in sys.modules.items() if name.startswith("kvpool")}
        return {(name, key): id(v) for name, one in modules.items() for key, v in vars(one).items()}

    before = product()
    seeds = (seed for seed in range(1000) if plan_has_all(seed))
    assert run(next(seeds), ops=4).failure is None
    after = product()
    assert [name for name, value in before.items() if after[name] != value] == []


def plan_has_all(seed: int) -> bool:
    plan = WorldPlan.draw(seed, 4, frozenset())
    return plan.prefetches and plan.copies and plan.fresh_s != 2.0 and plan.step_blocks != 64


def test_half_of_the_worlds_have_disks_and_they_are_used() -> None:
    plans = [WorldPlan.draw(seed, 120, frozenset()) for seed in range(1000)]
    assert 400 < sum(plan.disk > 0 for plan in plans) < 600
    assert any(0 < plan.disk < plan.capacity for plan in plans)
    played = (run(seed, without=DISK).probes for seed in range(20))
    assert any("a block was demoted to the disk" in probes for probes in played)
    assert not any(WorldPlan.draw(seed, 120, SMALL).disk for seed in range(20))


def played(seed: int, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--ops", "40"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return str(json.loads(done.stdout)["trace_hash"])


def test_a_seed_is_one_history_in_every_process() -> None:
    here = run(7, ops=40).trace_hash  # with another order of sets of strings
    assert here == played(7, "4711")
    assert here != run(8, ops=40).trace_hash


@pytest.mark.parametrize(
    "bug",
    [*planted.BUGS, *DEVICE_BUGS, *OF_STREAMS, *OF_POTS, *OF_GUESSES],
    ids=lambda bug: bug.name,
)
def test_a_planted_bug_is_in_step_with_the_source(bug: planted.Bug) -> None:
    spec = importlib.util.find_spec(bug.module)
    assert spec is not None
    assert spec.origin is not None
    compile(plant.with_bug(bug, Path(spec.origin).read_text()), bug.module, "exec")


def test_planted_bugs_use_names_that_exist(tmp_path: Path) -> None:
    """Else a NameError is what the simulator finds, and the mistake itself is never looked for."""
    for bug in planted.BUGS:
        spec = importlib.util.find_spec(bug.module)
        assert spec is not None
        assert spec.origin is not None
        buggy = plant.with_bug(bug, Path(spec.origin).read_text())
        (tmp_path / f"{bug.name}.py").write_text(buggy)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", str(tmp_path)]
    checked = subprocess.run(ruff, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", ["leak-on-cancel", "beyond-the-match-is-a-hit", "wall-clock"])
def test_a_planted_bug_is_found(name: str) -> None:
    done = subprocess.run(
        [sys.executable, plant.__file__, "--bug", name, "--seeds", "0:20"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["caught"] is not None


def test_bugs_that_are_not_found_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_of_histories, "_child", lambda _: {"caught": None})
    program = typer.Typer()
    program.command()(main)
    done = CliRunner().invoke(program, ["--bugs", "--only", "wall-clock,evict-pinned"])
    assert done.exit_code == 1
    assert re.findall("^not found: ([a-z-]+)", done.output, re.M) == ["evict-pinned", "wall-clock"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--seeds abc",
        "--seeds 5",
        "--seeds 9:3",
        "--jobs -1",
        "--without rain --seed 1",
        "--trace",
        "--bugs --only none-of-this-name",
        "--bugs --seed 1",
    ],
)
def test_a_wrong_command_is_exit_2(arguments: str) -> None:
    program = typer.Typer()
    program.command()(main)
    done = CliRunner().invoke(program, arguments.split())
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit), "in a sentence"


@pytest.mark.parametrize("program", ["simulation", "chaos"])
def test_a_program_that_is_started_by_its_path_says_how_to_start_it(
    program: str, tmp_path: Path
) -> None:
    folder = Path(__file__).parents[1] / program
    done = subprocess.run(
        [sys.executable, str(folder)], cwd=tmp_path, capture_output=True, text=True
    )
    sentence = f"start this program from the repository root: python -m tests.{program}\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.parametrize("arguments", ["--bug none-of-this-name", "--bug wall-clock --seeds 9:3"])
def test_the_planter_refuses_wrong_arguments_in_one_sentence(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["plant", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        plant.main()


def in_a_world(action: Callable[[], object]) -> SimLoop:
    """Call `action` in a simulated process."""
    world = World(WorldPlan.draw(1, 10, frozenset()))

    async def act() -> None:
        action()

    async def main() -> None:
        await world.process("p", "h").spawn(act())

    with sandbox(world.loop.fail):
        world.loop.run(main())
    return world.loop


@pytest.mark.parametrize(
    "action",
    [
        lambda: time.monotonic(),
        lambda: os.urandom(4),
        lambda: __import__("random").random(),
        lambda: __import__("socket").socket(),
        lambda: __import__("threading").Thread(target=print).start(),
    ],
    ids=["clock", "entropy", "random", "socket", "thread"],
)
def test_the_real_world_is_out_of_reach(action: Callable[[], object]) -> None:
    with pytest.raises((Violation, Forbidden), match="called"):
        in_a_world(action)


def test_a_cluster_that_can_only_wait_is_a_failure() -> None:
    world = World(WorldPlan.draw(1, 10, frozenset()))

    async def main() -> None:
        await world.loop.create_future()

    with pytest.raises(Violation, match="every task waits"):
        world.loop.run(main())
