"""Plants one bug and plays seeds until the simulator finds it; prints one JSON line.

A seed that fails without the bug, too, does not count.

    python -m tests.simulation.plant --bug evict-pinned --seeds 0:200

This is a program of its own because its import hook must be installed before any module of the
pool is imported. Until then it imports nothing but the standard library and the list of bugs.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

if __name__ == "__main__" and not __package__:
    # Started by its path: Python put this folder first, where `network.py` and others would hide
    # modules of the same name. The repository root takes its place.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.simulation.planted import BUGS, Bug
from tests.simulation.planted_devices import DEVICE_BUGS

_ROOT: Final = Path(__file__).resolve().parents[2]
#: Operations of each history.
OPS: Final = 120
#: What is left out of the worlds that the seed of a bug may be of: nothing, or what could not
#: be drawn yet when it was found.
_WORLDS: Final = (
    frozenset[str](),
    frozenset({"guesses"}),
    frozenset({"cold", "guesses"}),
    frozenset({"one-request", "task fails", "reports meet", "cold", "guesses"}),
)


class Planter(importlib.abc.MetaPathFinder):
    """Imports one module with one bug in it."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._bug.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            raise ImportError(f"no source of {name}")
        spec.loader = _BuggyLoader(name, spec.origin, self._bug)
        return spec


class _BuggyLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, bug: Bug) -> None:
        super().__init__(name, path)
        self._bug = bug

    def path_stats(self, path: str) -> dict[str, int]:
        # Without the file's time the loader uses no cached bytecode, which has no bug in it, and
        # writes none, which would plant the bug in later processes, too.
        raise OSError("the source is changed: no bytecode cache")

    def get_data(self, path: str) -> bytes:
        return with_bug(self._bug, super().get_data(path).decode()).encode()


def with_bug(bug: Bug, source: str) -> str:
    """The source with the bug in it. Raises ValueError unless `before` occurs exactly once."""
    if source.count(bug.before) != 1:
        raise ValueError(f"{bug.name}: found {source.count(bug.before)} times in {bug.module}")
    return source.replace(bug.before, bug.after)


def _bug(name: str) -> Bug:
    for bug in (*BUGS, *DEVICE_BUGS):
        if bug.name == name:
            return bug
    raise argparse.ArgumentTypeError(
        f"no planted bug {name!r}; tests/simulation/planted.py and planted_devices.py have all"
    )


def _seeds(text: str) -> range:
    found = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected first:last, such as 0:200")
    return range(int(found[1]), int(found[2]))


def _player(bug: Bug) -> Callable[[int, frozenset[str]], str | None]:
    """What plays a seed of the worlds that this bug is for: what went wrong, or None."""
    # Imported here, and not above: by then the hook changes what is imported.
    if bug in DEVICE_BUGS:
        from tests.simulation.devices import play

        return lambda seed, _: play(seed) or None
    from tests.simulation.world import run

    return lambda seed, without: run(seed, ops=OPS, without=without).failure


def _fails_without(bug: Bug, seed: int, without: frozenset[str]) -> bool:
    """Whether this history fails without the bug, too, so that it proves nothing."""
    module = ["tests.simulation", "--ops", str(OPS)]
    if bug in DEVICE_BUGS:
        module = ["tests.simulation.devices"]
    command = [sys.executable, "-m", *module, "--seed", str(seed)]
    command += ["--without", ",".join(without)] if without else []
    played = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    return json.loads(played.stdout)["failure"] is not None


def main() -> None:
    """Plant the bug, then play seeds until one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.plant",
        description="Plant one bug and play seeds until the simulator finds it.",
    )
    parser.add_argument("--bug", required=True, type=_bug, help="its name in planted.py")
    parser.add_argument(
        "--seeds", default="0:200", type=_seeds, help="first:last, the last one excluded"
    )
    arguments = parser.parse_args()
    bug: Bug = arguments.bug
    sys.meta_path.insert(0, Planter(bug))
    play = _player(bug)
    caught = None
    seeds: range = arguments.seeds
    known = [] if bug.seed is None else [(bug.seed, without) for without in _WORLDS]
    for seed, without in (*known, *((seed, frozenset[str]()) for seed in seeds)):
        failure = play(seed, without)
        if failure is not None and not _fails_without(bug, seed, without):
            caught = {"seed": seed, "failure": failure}
            break
    print(json.dumps({"bug": bug.name, "promise": bug.promise, "caught": caught}))


if __name__ == "__main__":
    main()
