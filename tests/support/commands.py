"""Runs a `kvpool` command as a user does, but in this process: Python starts no second time."""

from __future__ import annotations

import asyncio
import gc
from typing import NamedTuple

from typer.testing import CliRunner

from kvpool.cli.app import app


class Said(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


def kvpool(*words: str, stdin: str = "") -> Said:
    """The end of `kvpool WORDS`. What would be a traceback is raised."""
    thresholds = gc.get_threshold()
    try:
        done = CliRunner().invoke(app, words, input=stdin)
    finally:  # what a process changes for the rest of its life
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.exit_code, done.stdout, done.stderr)


async def running_kvpool(*words: str, stdin: str = "") -> Said:
    """The same in a thread: this loop goes on meanwhile."""
    return await asyncio.to_thread(kvpool, *words, stdin=stdin)
