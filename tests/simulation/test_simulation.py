"""The simulator itself: its histories pass, repeat exactly, and find planted bugs.

`make sim` plays thousands of seeds. Here are a few, the seeds that once failed, and proof that the
simulator can fail.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

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

#: Seeds that failed once, and the cause. A change of the simulator changes their histories, so
#: each cause has a test of its own, too.
PINNED = {
    26: "ALREADY_STORED was returned before any master had the block",
    65: "a call that failed at a server's old address made clients avoid its new one",
    158: "a master moved the heartbeats of servers into the future after a pause of its own",
    212: "a duplicated piece of an inventory restarted it, and blocks were lost from the directory",
    288: "connections to a server that vanished without a reset were kept for ever",
    306: "clients did not look up the new address of a restarted server",
    11515: "the loss of one part of a block was announced for another part",
}
#: The same, of histories of 40 operations.
PINNED_SHORT = {
    22923: "the judge: on slow networks healthy servers, too, reply later than the hedge",
    28456: "the judge: a read in small pieces is slow without any fault",
    30742: "a master lost the reason of a miss while the block was written again",
}
#: The same, in worlds whose servers have a disk below their memory.
PINNED_WITH_DISKS = {
    2: "a block was removed during its demotion, but its record was written",
    53: "a policy that expects two touches of a new block got one for a block from disk",
    52: "a server that had been stopped for 40 s took its disk out of service as stuck",
    124: "a server waited without limit for a disk that was stuck while it erased headers",
    160: "(an oracle:) recovery erased a header with flipped bits, which is right",
    453: "a block was removed during its demotion, and its old record stayed on the disk",
    1436: "(an oracle:) which server reported a removal is not always known",
    577: "a block was removed after its record was written and before the store had the copy",
}
#: The same, in worlds with all that can be drawn.
PINNED_WITH_CONTESTS = {
    97287: "(an oracle:) a writer ran out of time during its look, and two versions stay",
    98062: "(an oracle:) a full server evicted a writer's copy and took the other version",
    97199: "(an oracle:) an impostor's registration while the server was cut off",
}
#: The same, of 40 operations in worlds with all that can be drawn now.
PINNED_AS_DRAWN = {
    358: "(an oracle:) a server was killed after the scenario that starts it again had ended",
    200505: "(an oracle:) a reason is one of the block, also where another part was corrupt",
    200524: "a head that the disk had refused was evicted to make room for its own tail",
    201035: "the budget of hints did not count whole extents: waiting prompts had 88 % of a store",
    201273: "(an oracle:) prompts that waited kept their share of a store, as they may for 120 s",
    201654: "two blocks evicted each other from a full disk, and a read waited behind them",
    201746: "(an oracle:) it asked a server about prompts that wait by another clock than its own",
    300004: "a block went to the disk before its parent, which had come back meanwhile",
    967285: "a slow disk brought prefetched blocks after their step, beyond the share for them",
    968430: "two holders made an extra copy each: the second one while the first was on its way",
}
_LATER = (
    "moves",
    "joins",
    "prefetches",
    "tenants",
    "one-request",
    "task fails",
    "reports meet",
    "guesses",
)
#: Without write-back and moves, a seed gives the same world as before servers could do that.
NO_WRITE_BACK = frozenset(("write-back", "cold", *_LATER))
#: Without contests, crowds and circles, the same as before they were added.
NO_CONTESTS = NO_WRITE_BACK | {"contests", "crowds", "circles", "hoard", "sessions"}
#: The same of disks.
NO_DISK = NO_CONTESTS - {"write-back"} | {"disk"}


@pytest.mark.parametrize("seed", PINNED)
def test_a_history_that_failed_once_ends_well(seed: int) -> None:
    report = run(seed, ops=60, without=NO_DISK)
    assert report.failure is None, PINNED[seed]
    assert report.ops > 20


@pytest.mark.parametrize("seed", PINNED_SHORT)
def test_a_short_history_ends_well(seed: int) -> None:
    assert run(seed, ops=40, without=NO_DISK).failure is None, PINNED_SHORT[seed]


@pytest.mark.parametrize("seed", PINNED_WITH_CONTESTS)
def test_a_history_with_contests_and_impostors_ends_well(seed: int) -> None:
    assert run(seed, ops=40, without=NO_WRITE_BACK).failure is None, PINNED_WITH_CONTESTS[seed]


@pytest.mark.parametrize("seed", PINNED_AS_DRAWN)
def test_a_history_as_it_is_drawn_ends_well(seed: int) -> None:
    without = frozenset({"cold", "guesses"})
    assert run(seed, ops=40, without=without).failure is None, PINNED_AS_DRAWN[seed]


def test_what_servers_have_lost_is_found_in_their_object_store() -> None:
    report = run(36, ops=40)
    assert report.failure is None
    assert "a block was found in the object store" in report.probes


@pytest.mark.parametrize("seed", [*range(6), *PINNED_WITH_DISKS])
def test_a_history_ends_well(seed: int) -> None:
    report = run(seed, without=NO_CONTESTS if seed in PINNED_WITH_DISKS else frozenset())
    assert report.failure is None, PINNED_WITH_DISKS.get(seed)
    assert report.ops > 40


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
    played = (run(seed, without=NO_CONTESTS).probes for seed in PINNED_WITH_DISKS)
    assert any("a block was demoted to the disk" in probes for probes in played)
    assert not WorldPlan.draw(52, 120, NO_DISK).disk


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
