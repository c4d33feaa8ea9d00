"""Small worlds: silent about the real code, and not about planted bugs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import guesses, pots
from tests.simulation.planted import Bug
from tests.simulation.planted_guesses import BUGS as OF_GUESSES
from tests.simulation.planted_pots import BUGS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", pots.WORLDS)
def test_who_asks_for_little_gets_it(world: str) -> None:
    assert {pots.WORLDS[world](seed) for seed in range(12)} == {""}


@pytest.mark.parametrize("world", guesses.WORLDS)
def test_a_wrong_guess_costs_hits_alone(world: str) -> None:
    assert {guesses.WORLDS[world](seed) for seed in range(6)} == {""}


@pytest.mark.parametrize("bug", [*BUGS, *OF_GUESSES], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    seed = bug.seed or 0
    worlds = "guesses" if bug in OF_GUESSES else "pots"
    command = [sys.executable, "-m", f"tests.simulation.{worlds}", "--bug", bug.name]
    command += ["--seeds", f"{seed}:{seed + 1}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["seed"] == seed
