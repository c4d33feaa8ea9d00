"""Where the output goes may be closed, full, or read by somebody who leaves."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvpool.cli import app
from tests.support.commands import kvpool
from tests.support.local_pool import LocalPool

KVPOOL = [sys.executable, "-m", "kvpool"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["config", "--show"], ["--version"]])
def test_output_that_cannot_be_written_is_a_sentence(words: list[str], unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KVPOOL, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_server_starts_and_stays_where_its_log_cannot_be_written() -> None:
    """Nobody has a secret here, nor is there a master: both are told on stderr."""
    words = [*KVPOOL, "server", "--masters", "127.0.0.1:9", "--capacity", "1MiB"]
    environment = os.environ | {"KVPOOL_MASTER_TIMEOUT_S": "100ms"}
    with Path("/dev/full").open("w") as full, pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(words, stderr=full, timeout=6, env=environment)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/data/blocks", "/data/blocks: No space left on device$"),
        # Memory in /dev/shm and a disk's file have no name in their error.
        (None, "a file cannot be written: No space left on"),
    ],
)
def test_a_file_that_cannot_be_written_is_not_taken_for_the_output(
    monkeypatch: pytest.MonkeyPatch, name: str | None, said: str
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    monkeypatch.setattr(app, "app", full)
    with pytest.raises(SystemExit, match=f"^error: {said}"):
        app.main()


def test_an_interrupt_before_a_command_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "app", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match=r"^130$"):
        app.main()


def test_a_picture_is_whole_or_none(tmp_path: Path) -> None:
    """The figures are printed also where the picture cannot be written."""
    play = ["--dry", "--sessions", "1", "--limit", "3"]
    for wrong in (tmp_path, tmp_path / "none" / "p.svg"):
        done = kvpool("replay", *play, "--picture", str(wrong))
        assert (done.code, done.out) == (2, "")  # before it plays
        assert f"--picture {wrong}: expected a file" in done.err
    full, before = tmp_path / "p.svg", "<svg>of the last time</svg>"
    full.write_text(before)
    command = [*KVPOOL, "replay", *play, "--json", "--picture", str(full)]
    limit = (512, resource.RLIM_INFINITY)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 1
    assert f"--picture {full}: File too large" in done.stderr
    assert json.loads(done.stdout)["requests"] == 3
    assert [one.read_text() for one in tmp_path.iterdir()] == [before]


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
