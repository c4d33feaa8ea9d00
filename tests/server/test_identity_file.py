"""The file that proves the id of a server: one process, one user, the same after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvpool.cli.settings import load
from kvpool.config import ServerConfig
from kvpool.errors import ConfigError
from kvpool.server.identity_file import IdentityFile

CONFIG = ServerConfig(id="gpu-17")


@pytest.fixture(autouse=True)
def state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home/state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "home/state/kvpool"


def with_file(path: Path) -> ServerConfig:
    return msgspec.structs.replace(CONFIG, identity_file=str(path))


def crashed(config: ServerConfig) -> bytes:
    """The secret of a process that was killed while it held the file."""
    program = (
        "import os, signal, sys\n"
        "from kvpool.config import ServerConfig\n"
        "from kvpool.server.identity_file import IdentityFile\n"
        "with IdentityFile(ServerConfig(id=sys.argv[1], identity_file=sys.argv[2]), 'c') as one:\n"
        "    print(one.secret.hex(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, config.id, config.identity_file], capture_output=True
    )
    assert done.returncode == -9
    return bytes.fromhex(done.stdout.decode())


@pytest.mark.parametrize("kept", [True, False])
def test_a_secret_outlives_a_crash(tmp_path: Path, kept: bool) -> None:
    config = with_file(tmp_path / "own") if kept else CONFIG
    secret = crashed(config)
    assert len(secret) == 32
    with IdentityFile(config, "c") as again:
        assert (again.secret, again.kept, again.has_run) == (secret, kept, True)


def test_a_secret_in_the_state_directory_ends_with_its_server(state_directory: Path) -> None:
    with IdentityFile(CONFIG, "c") as first:
        (file,) = state_directory.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert state_directory.stat().st_mode & 0o777 == 0o700
    assert not list(state_directory.iterdir())
    with IdentityFile(CONFIG, "c") as second:
        assert second.secret != first.secret


def test_a_logout_takes_no_secret_away(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    secret = crashed(CONFIG)
    shutil.rmtree(tmp_path / "run")
    with IdentityFile(CONFIG, "c") as again:
        assert again.secret == secret


@pytest.mark.parametrize("where", ["earlier", "both", "somebody else's"])
def test_a_secret_that_an_earlier_release_left_is_found(
    tmp_path: Path, state_directory: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has its id back after an upgrade; what it has made since comes first."""
    secret = crashed(CONFIG)
    (file,) = state_directory.iterdir()
    earlier = tmp_path / "run/kvpool" / file.name
    earlier.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(file, earlier)
    if where == "both":
        earlier.write_text("of another server")
    else:
        file.unlink()
    if where == "somebody else's":
        lstat = Path.lstat

        def of_another(path: Path) -> os.stat_result:
            found = lstat(path)
            return os.stat_result([*found[:4], found.st_uid + (path == earlier.parent), *found[5:]])

        monkeypatch.setattr(Path, "lstat", of_another)
    with IdentityFile(CONFIG, "c") as again:
        assert (again.secret == secret) is (where != "somebody else's")
        assert len(again.secret) == 32
    assert earlier.exists() is (where != "earlier")


def test_a_kept_secret_stays(tmp_path: Path) -> None:
    config = with_file(tmp_path / "own")
    with IdentityFile(config, "c") as first:
        pass
    with IdentityFile(config, "another cluster") as second:
        assert second.secret == first.secret


def test_two_processes_cannot_be_one_server(tmp_path: Path) -> None:
    for config in (CONFIG, with_file(tmp_path / "own")):
        with (
            IdentityFile(config, "c"),
            pytest.raises(ConfigError, match="'gpu-17' belongs to another living server"),
            IdentityFile(config, "c"),
        ):
            pass
        with IdentityFile(config, "c"):
            pass  # it is free again


@pytest.mark.parametrize(
    ("cluster", "config"),
    [
        ("other", CONFIG),
        ("c", ServerConfig(id="gpu-18")),
        ("c", ServerConfig(id="gpu-17", masters=["10.0.0.1:7450"])),
    ],
    ids=["cluster", "id", "masters"],
)
def test_servers_of_different_names_have_different_secrets(
    cluster: str, config: ServerConfig
) -> None:
    with IdentityFile(CONFIG, "c") as one, IdentityFile(config, cluster) as other:
        assert one.secret != other.secret


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_is_removed_while_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last owner ends at that moment. The lock must be on the file that has the name."""
    path, flock, calls = tmp_path / "own", fcntl.flock, []

    def removed_first(fd: int, operation: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    before = descriptors()
    with IdentityFile(with_file(path), "c") as one:
        assert path.read_text().strip() == one.secret.hex()
        assert descriptors() == before + 1
    assert len(calls) == 2
    assert descriptors() == before


def test_a_file_that_cannot_be_locked_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    before = descriptors()
    with pytest.raises(ConfigError, match="no locks"), IdentityFile(with_file(tmp_path / "x"), "c"):
        pass
    assert descriptors() == before


def test_a_file_needs_an_id() -> None:
    with pytest.raises(ConfigError, match=r"server\.id"):
        load(flags={"server.identity_file": "own"})


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own"
    with IdentityFile(with_file(file), "c"):
        pass
    for mode in (0o644, 0o620, 0o666):
        file.chmod(mode)
        with (
            pytest.raises(ConfigError, match="open to other users"),
            IdentityFile(with_file(file), "c"),
        ):
            pass
    file.chmod(0o600)
    with IdentityFile(with_file(file), "c"):
        pass


@pytest.mark.parametrize("content", ["abc", "00" * 31, "00" * 33, "zz" * 32])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "own"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"), IdentityFile(with_file(file), "c"):
        pass
    assert file.read_text() == content


def test_a_file_that_cannot_be_made_is_an_error_only_if_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state_directory: Path
) -> None:
    with (
        pytest.raises(ConfigError, match="No such file"),
        IdentityFile(with_file(tmp_path / "missing" / "own"), "c"),
    ):
        pass
    state_directory.mkdir(mode=0o755, parents=True)  # as another user could, in /tmp
    state_directory.chmod(0o755)
    with IdentityFile(CONFIG, "c") as without:
        assert without.secret == b""
    assert "waits for its id" in caplog.text
    assert not os.listdir(state_directory)
