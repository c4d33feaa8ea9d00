"""A pool for one user of a host: what that user types, and what another user gets."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvpool
from kvpool import ClientConfig, Cluster, WriteStatus, local_secret
from kvpool.cli import other_users
from kvpool.cli.settings import load
from kvpool.errors import ConfigError
from kvpool.secret_file import local_secret_file
from kvpool.tools.subprocesses import process_of
from tests.conftest import NAMESPACE, buffers, key, keys, values
from tests.support.commands import running_kvpool
from tests.support.programs import free_address, pool_of_commands

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
SOMEBODY = 65534


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kvpool"


def pool_of_one_user() -> AbstractAsyncContextManager[str]:
    """A master and a server; the master's address."""
    return pool_of_commands("--local-only")


async def test_processes_of_this_user_share_a_pool() -> None:
    async with pool_of_one_user() as address:
        code, said, _ = await running_kvpool("status", "--masters", address, "--local-only")
        assert code == 0, said
        chain = keys("own", 3)
        cluster = Cluster("default", local_secret())
        for transport in ("shm", "tcp"):
            config = ClientConfig(masters=[address], transports=[transport])
            async with await kvpool.connect(config=config, cluster=cluster) as pool:
                await pool.write(NAMESPACE, chain, values(chain))
                got = buffers(3)
                await pool.read(NAMESPACE, chain, got)
                assert got == values(chain)


def test_the_secret_is_made_once_and_is_nobody_elses(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = local_secret()
    assert len(first) == 64
    assert local_secret() == first
    assert [path.name for path in directory.iterdir()] == ["secret"]
    assert stat.S_IMODE(local_secret_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(directory.parent / "of another user"))
    assert local_secret() != first


def test_the_secret_outlives_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last one of a user `$XDG_RUNTIME_DIR` is emptied; other sessions have none."""
    monkeypatch.delenv("XDG_STATE_HOME")
    account = SimpleNamespace(pw_dir=str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr("pwd.getpwuid", lambda uid: account)
    session = tmp_path / "session"
    session.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    secret = local_secret()
    shutil.rmtree(session)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert local_secret() == secret
    assert local_secret_file() == tmp_path / "home/.local/state/kvpool/secret"


@pytest.mark.parametrize("home", ["/proc", None])
def test_without_a_home_it_is_kept_with_temporary_files(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    refused = ["/proc"]

    def account(uid: int) -> SimpleNamespace:
        if home is None:
            raise KeyError(uid)
        return SimpleNamespace(pw_dir=home)

    def access(path: object, *_: object, **__: object) -> bool:
        return str(path) not in refused

    monkeypatch.setattr("pwd.getpwuid", account)
    monkeypatch.setattr(os, "access", access)
    for place in ("/var/tmp", "/tmp"):
        assert str(local_secret_file()) == f"{place}/kvpool-{os.geteuid()}/secret"
        refused.append(place)


def test_processes_that_start_together_have_one_secret(directory: Path) -> None:
    program = "import kvpool, sys; sys.stdin.read(); print(kvpool.local_secret().hex())"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    said = {process.communicate()[0] for process in running}
    assert len(said) == 1
    assert said != {b""}
    assert [path.name for path in directory.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="directory of this user alone"):
        local_secret()
    assert not list(directory.iterdir())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"secret_file": "secret"}, "one secret"),
        ({"server.insecure": True}, "contradict"),
        ({"master.insecure": True}, "contradict"),
        ({"master.bind": "0.0.0.0:7450"}, "127.0.0.1"),
        ({"server.listen": "shm://,tcp://10.0.0.1:7460"}, "10.0.0.1"),
        ({"server.listen": "tcp://[2001:db8::1]:7460"}, "2001:db8"),
    ],
)
def test_what_contradicts_it_is_a_sentence(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(flags={**flags, "local_only": True})


def test_what_goes_with_it() -> None:
    listen = "inproc://,shm:///run/x.sock,tcp://127.0.0.1:0,tcp://[::1]:0,tcp://localhost:0"
    assert load(flags={"server.listen": listen, "local_only": True}).local_only
    assert load(environment={"KVPOOL_LOCAL_ONLY": "1"}).local_only


async def test_a_transport_that_asks_for_no_secret_is_refused() -> None:
    pytest.importorskip("ucxx", reason="needs ucxx: pip install kvpool[ucx]")
    code, _, why = await running_kvpool("server", "--local-only", "--listen", "ucx://127.0.0.1:0")
    assert code == 2
    assert "'ucx' does not ask" in why


# --- without it ------------------------------------------------------------------------------


@needs_root
async def test_a_host_with_several_users_is_told_once() -> None:
    other = await asyncio.create_subprocess_exec("/bin/sleep", "60", user=SOMEBODY)
    try:
        assert other_users.has_other_users("/dev/null")
        for extra in ([], ["--local-only"], ["--die-with-parent"]):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvpool", "master", "--bind", "127.0.0.1:0", *extra),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), 60)
            process.terminate()
            _, said = await process.communicate()
            assert said.count(b"every user of this host") == (0 if extra else 1)
    finally:
        other.kill()
        await other.wait()


async def test_a_server_says_that_it_is_there_when_a_master_knows_it() -> None:
    """Who waits for its line writes next: without a known server, that is SERVER_LOST."""
    address = free_address()
    async with process_of("kvpool", "server", "--masters", address, "--capacity", "4MiB") as server:
        starting = asyncio.create_task(server.line())
        await asyncio.sleep(1.0)  # time enough for a line that would be too early
        async with process_of("kvpool", "master", "--bind", address):
            assert (await starting).startswith("server ")
            async with await kvpool.connect(address) as pool:
                assert await pool.write(NAMESPACE, [key("first")], [b"x"]) == [WriteStatus.STORED]
