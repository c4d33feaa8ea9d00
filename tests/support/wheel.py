"""The project's wheel, built from this checkout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def build(target: Path) -> Path:
    """Build the wheel into a directory; its path. Skips the test where that needs a download which
    does not come."""
    here = importlib.util.find_spec("hatchling") is not None
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(target)]
    done = subprocess.run(
        [*command, *(["--no-build-isolation"] if here else []), str(_ROOT)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode and not here:
        pytest.skip("hatchling is not installed and cannot be downloaded")
    assert done.returncode == 0, done.stderr
    (found,) = target.glob("kvpool-*.whl")
    return found
