"""Small worlds: silent about the real code, and not about planted bugs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation import guesses, pots, streams
from tests.simulation.planted import Bug
from tests.simulation.planted_guesses import BUGS as OF_GUESSES
from tests.simulation.planted_pots import BUGS as OF_POTS
from tests.simulation.planted_streams import BUGS as OF_STREAMS

ROOT = Path(__file__).parents[2]
PLANTED = [
    pytest.param(worlds, bug, id=bug.name)
    for worlds, bugs in (("pots", OF_POTS), ("guesses", OF_GUESSES), ("streams", OF_STREAMS))
    for bug in bugs
]


@pytest.mark.parametrize("world", pots.WORLDS)
def test_who_asks_for_little_gets_it(world: str) -> None:
    assert {pots.WORLDS[world](seed) for seed in range(12)} == {""}


@pytest.mark.parametrize("world", guesses.WORLDS)
def test_a_wrong_guess_costs_hits_alone(world: str) -> None:
    assert {guesses.WORLDS[world](seed) for seed in range(6)} == {""}


@pytest.mark.parametrize("seed", sorted({bug.seed or 0 for bug in OF_STREAMS}))
def test_routers_believe_in_the_end_what_the_pool_has(seed: int) -> None:
    assert streams.play_events(seed) == ""


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_promise_ends_and_none_is_waited_for_too_long(first: int) -> None:
    assert {streams.play_promises(seed) for seed in range(first, first + 20)} == {""}


@pytest.mark.parametrize("play", [streams.play_ways, streams.play_codecs])
def test_a_bad_way_costs_a_hedge_and_another_codec_a_miss(play: Callable[[int], str]) -> None:
    assert {play(seed) for seed in range(100)} == {""}


@pytest.mark.parametrize(("worlds", "bug"), PLANTED)
def test_a_planted_bug_is_found(worlds: str, bug: Bug) -> None:
    seed = bug.seed or 0
    command = [sys.executable, "-m", f"tests.simulation.{worlds}", "--bug", bug.name]
    command += ["--seeds", f"{seed}:{seed + 1}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["seed"] == seed
