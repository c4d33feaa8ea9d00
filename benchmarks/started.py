"""What benchmarks with processes of a pool share."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def started(*module: str, says: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """`python -m` with these words, ended afterwards: the last word of the line that it `says`."""
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )
    try:
        assert process.stdout is not None
        yield next(line for line in process.stdout if says in line).split()[-1]
    finally:
        process.terminate()
        process.wait()


def at_least(least: int) -> type[int]:
    """A type for argparse: a whole number from this one on."""

    class _Number(int):
        def __new__(cls, text: str) -> _Number:
            if (number := int(text)) < least:
                raise argparse.ArgumentTypeError(f"{text}: expected {least} or more")
            return super().__new__(cls, number)

    _Number.__name__ = "whole number"
    return _Number
