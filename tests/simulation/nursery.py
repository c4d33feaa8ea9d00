"""Plays planted bugs of devices, each in a fork of one process in which torch is warm already.

Most of the time of such a bug was the import of torch, and what that does at its first use. A fork
forgets the product, and imports it with the bug in it. One line of JSON in for each bug, one out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.simulation import plant
from tests.simulation.planted import Bug

_ROOT: Final = Path(__file__).parents[2]
#: Each of these bugs is found in so many seeds.
_SEEDS: Final = 40
#: What a fork forgets: the product, and all of the tests that may have looked at it.
_FORGOTTEN: Final = ("kvpool", "tests")


class Nursery:
    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program

    def play(self, bug: Bug) -> tuple[int, str]:
        """The first seed that fails with this bug, and how; -1 if none does."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        print(bug.name, file=self._program.stdin, flush=True)
        seed, failure = json.loads(self._program.stdout.readline())
        return seed, failure


@contextmanager
def nursery() -> Iterator[Nursery]:
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # a fork has no threads
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        yield Nursery(program)  # the end of its input ends it


def _play(name: str) -> tuple[int, str]:
    bug = plant._bug(name)
    for module in [module for module in sys.modules if module.startswith(_FORGOTTEN)]:
        del sys.modules[module]
    sys.meta_path.insert(0, plant.Planter(bug))
    from tests.simulation import devices

    failures = ((seed, devices.play(seed)) for seed in range(_SEEDS))
    return next((found for found in failures if found[1]), (-1, ""))


def main() -> None:
    from tests.simulation import devices

    devices.play(0)
    out: Any = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        child = os.fork()
        if not child:
            answer: tuple[int, str] = -1, "the fork ended"
            try:
                answer = _play(line.strip())
            finally:
                os.write(out, f"{json.dumps(answer)}\n".encode())
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
