"""The command line of a module with small worlds: plant a bug, play seeds until one fails."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence

from tests.simulation.plant import Planter
from tests.simulation.planted import Bug


def plant_chosen(module: str, bugs: Sequence[Bug]) -> range:
    """The seeds to play. Called before any module of the pool is imported: `--bug` changes it."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--bug", choices=[bug.name for bug in bugs])
    parser.add_argument("--seeds", default="0:40", help="first:last, the last one excluded")
    chosen = parser.parse_args()
    for bug in bugs:
        if bug.name == chosen.bug:
            sys.meta_path.insert(0, Planter(bug))
    first, _, last = chosen.seeds.partition(":")
    return range(int(first), int(last))


def play_worlds(worlds: Mapping[str, Callable[[int], str]], seeds: range) -> None:
    """Play seeds of all worlds until one fails, and print it."""
    for seed in seeds:
        for world, play in worlds.items():
            try:
                problem = play(seed)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                print(json.dumps({"world": world, "seed": seed, "problem": problem}))
                return
    print(json.dumps({"world": "", "seed": None, "problem": ""}))
