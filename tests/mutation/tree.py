"""Copies of the tree, in which mistakes are planted, and commands that run in one of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Where Python looks for the packages of a tree.
_SOURCE_FOLDERS: Final = ("", "transports", "tiers", "connector")


def environment(root: Path, **more: str) -> dict[str, str]:
    """Variables with which Python, and what it starts, imports the packages of this tree."""
    path = os.pathsep.join(str(root / folder) for folder in _SOURCE_FOLDERS)
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}


def copy_tree(root: Path, target: Path) -> Path:
    """A copy of the files that git knows, in a new folder."""
    shutil.rmtree(target, ignore_errors=True)
    known = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, known.stdout.split("\0")):
        if (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


def run(tree: Path, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run Python in the tree: its exit code, and the end of what it printed.

    None for a program that did not end in time; it and all its children are killed.
    """
    program = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment(tree),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = program.communicate(timeout=seconds)
        return program.returncode, output[-2000:]
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        try:
            os.killpg(program.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        program.wait()
