"""Where the output goes may be closed, full, or read by somebody who leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.local_pool import LocalPool

KVPOOL = [sys.executable, "-m", "kvpool"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["config", "--show"], ["--version"]])
def test_output_that_cannot_be_written_is_a_sentence(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KVPOOL, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_closed_streams_are_replaced_before_a_socket_takes_their_place() -> None:
    """A program prints which descriptor a socket gets when the three of the standard are closed."""
    program = (
        "import os, socket, sys; from kvpool.cli import app;"
        "app.app = lambda: os.write(int(sys.argv[1]), str(socket.socket().fileno()).encode());"
        "app.main()"
    )
    reading, writing = os.pipe()
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, str(writing)],
        pass_fds=[writing],
        timeout=60,
    )
    os.close(writing)
    with os.fdopen(reading) as told:
        assert int(told.read()) > 2
    assert done.returncode == 0


def test_top_ends_with_its_reader() -> None:
    pool = LocalPool()
    try:
        top = [*KVPOOL, "top", "--masters", pool.master, "--every", "10ms"]
        running = subprocess.Popen(top, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout is not None
        assert running.stderr is not None
        assert "1 up" in running.stdout.readline()
        running.stdout.close()
        assert (running.wait(30), running.stderr.read()) == (1, "")
        running.stderr.close()
    finally:
        pool.close()
