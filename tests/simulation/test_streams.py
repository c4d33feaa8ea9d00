"""The worlds of what leaves the pool: silent about the real code, and not about planted bugs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import streams
from tests.simulation.planted import Bug
from tests.simulation.planted_streams import BUGS

ROOT = Path(__file__).parents[2]
#: With these seeds the bugs are found; the real code passes all of them.
FOUND = {bug.name: bug.seed or 0 for bug in BUGS}


@pytest.mark.parametrize("seed", sorted(set(FOUND.values())))
def test_routers_believe_in_the_end_what_the_pool_has(seed: int) -> None:
    assert streams.play_events(seed) == ""


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_promise_ends_and_none_is_waited_for_too_long(first: int) -> None:
    assert {streams.play_promises(seed) for seed in range(first, first + 20)} == {""}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    seed = FOUND[bug.name]
    command = [sys.executable, "-m", "tests.simulation.streams", "--bug", bug.name]
    command += ["--seeds", f"{seed}:{seed + 1}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["seed"] == seed
