"""The worlds of direct transfers: silent about the real code, and not about planted bugs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.nursery import Nursery, nursery
from tests.simulation.planted import Bug
from tests.simulation.planted_devices import DEVICE_BUGS

pytest.importorskip("torch", reason="devices need torch")

ROOT = Path(__file__).parents[2]
#: Seeds in which nothing fails.
SILENT = range(16)


@pytest.mark.parametrize("first", SILENT[::4])
def test_no_byte_is_wrong_early_or_late(first: int) -> None:
    from tests.simulation import devices

    assert {devices.play(seed) for seed in range(first, first + 4)} == {""}


def test_a_world_does_not_know_what_was_played_before() -> None:
    """Else a seed that fails among others would not fail alone."""
    from tests.simulation import devices

    alone = "from tests.simulation import devices; import json; print(json.dumps(devices.marks(5)))"
    done = subprocess.run(
        [sys.executable, "-c", alone],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    for seed in (3, 4):
        devices.play(seed)
    assert devices.marks(5) == json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    with nursery() as running:
        yield running


@pytest.mark.parametrize("bug", DEVICE_BUGS[::3], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, forks: Nursery) -> None:
    """`make sim` looks for all of them."""
    from tests.simulation import devices

    seed, failure = forks.play(bug)
    assert failure.startswith(f"{bug.promise}: ")
    assert seed in SILENT or not devices.play(seed), "it fails without the bug, too"
