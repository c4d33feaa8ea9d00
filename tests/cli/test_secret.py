"""`kvpool secret`: a file that only its owner can read, and that nothing overwrites."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvpool import read_secret
from kvpool.cli import tenant
from kvpool.cli.app import app


def make(path: Path) -> Result:
    return CliRunner().invoke(app, ["secret", str(path)])


def test_only_its_owner_can_read_it_whatever_the_umask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(0)
    try:
        done = make(tmp_path / "pool.secret")
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    assert f"--secret-file {tmp_path}/pool.secret" in done.output.replace("\n", "")
    assert stat.S_IMODE((tmp_path / "pool.secret").stat().st_mode) == 0o600
    with caplog.at_level(logging.WARNING):
        made = read_secret(str(tmp_path / "pool.secret"))
    assert len(made) == 64
    assert not caplog.records
    assert made.decode() not in done.output
    make(tmp_path / "other")
    assert read_secret(str(tmp_path / "other")) != made


def test_what_is_there_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "pool.secret", tmp_path / "link"
    path.write_bytes(b"0123456789abcdef-old")
    link.symlink_to(tmp_path / "nowhere")
    for there in (path, link):
        done = make(there)
        assert done.exit_code == 2
        assert f"{there} is there already" in done.stderr.replace("\n", "")
    assert path.read_bytes() == b"0123456789abcdef-old"
    assert not (tmp_path / "nowhere").exists()


def test_what_cannot_be_written_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = make(tmp_path / "no" / "secret")
    assert (done.exit_code, "No such file or directory" in done.stderr) == (2, True)
    monkeypatch.setattr(tenant, "open", full_disk, raising=False)
    done = make(tmp_path / "secret")
    assert (done.exit_code, "No space left" in done.stderr) == (2, True)
    assert not list(tmp_path.iterdir())


def full_disk(descriptor: int, mode: str) -> object:
    os.close(descriptor)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
