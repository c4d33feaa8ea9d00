"""The examples run, and say what the README says they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("hello.py", ["8 of 9 blocks are in the pool", "hits: 8 equal: True"]),
        ("two_engines.py", ["engine B: 10 of 14 blocks from the pool, right: True"]),
        ("write_a_transport.py", ["promises of a transport", "8 of 8 blocks over unix://, right"]),
        ("threads.py", ["thread 1: hit, right: True", "thread 3: hit, right: True"]),
    ],
)
def test_example(name: str, lines: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    for line in lines:
        assert line in done.stdout
