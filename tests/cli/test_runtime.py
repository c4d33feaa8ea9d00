"""What a process tells others of its surroundings, and what it changes in them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from kvpool import private_files, runtime
from kvpool.cli import other_users
from kvpool.cli import run as commands
from kvpool.config import Config, ServerConfig
from kvpool.errors import Unavailable
from kvpool.ops import process
from tests.support.commands import kvpool

INFINITY = resource.RLIM_INFINITY
UID = os.geteuid()


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 20), (65_536, 1 << 20)),
        ((1024, INFINITY), (65_536, INFINITY)),
        ((65_536, INFINITY), None),
        ((100_000, 1 << 20), None),
        ((INFINITY, INFINITY), None),
        ((4096, 4096), None),
    ],
)
def test_as_many_files_as_a_process_may_open(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None
) -> None:
    """Up to 65,536, and never fewer than before."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: found.append(new))
    commands._raise_file_limit()
    assert found == ([raised] if raised else [])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 16))
    assert "error: this process may open 16 files, and it needs 64" in kvpool("status").all


async def test_a_file_of_a_tier_that_is_gone_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").touch()
    tiers = ["s3://b:1TiB", *(f"nvme:{tmp_path}/{one}:8MiB" for one in ("here", "gone"))]
    own = ServerConfig(id="s", identity_file=str(tmp_path / "id"), tiers=tiers)
    monkeypatch.setattr(commands, "_serve_as", AsyncMock())
    for named in ([], [f"{tmp_path}/gone"]):  # there is none yet when it starts for the first time
        await commands._serve(Config(server=own))
        assert [vars(one)["file"] for one in caplog.records] == named


@pytest.mark.parametrize(
    ("account", "somebody"),
    [
        ("anna:x:4321:4321::/home/anna:/bin/bash", True),
        ("anna:x:4321:4321::/home/anna:/usr/sbin/nologin", False),
        ("anna:x:4321:4321::/home/anna:/bin/false", False),
        (f"daemon:x:{other_users._UID_MIN - 1}:1::/:/bin/sh", False),
        (f"first:x:{other_users._UID_MIN}:1::/:/bin/sh", True),
        (f"self:x:{UID}:1::/:/bin/sh", False),
        ("broken:line", False),
        ("anna:x:many:1::/:/bin/sh", False),
    ],
)
def test_users_who_may_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: str, somebody: bool
) -> None:
    processes, scan = tmp_path / "proc", os.scandir
    processes.mkdir()
    monkeypatch.setattr(os, "scandir", lambda path: scan(processes))
    accounts = tmp_path / "passwd"
    accounts.write_text(f"root:x:0:0::/root:/bin/bash\n\n{account}\n")
    assert other_users.has_other_users(str(accounts)) is somebody
    assert not other_users.has_other_users(str(tmp_path / "nowhere"))


def test_a_private_directory_is_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "own"
    private_files.make_private_directory(directory)
    private_files.make_private_directory(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    for mode in (0o710, 0o701, 0o750, 0o777):
        directory.chmod(mode)
        with pytest.raises(PermissionError):
            private_files.make_private_directory(directory)
    directory.chmod(0o700)
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(PermissionError):
        private_files.make_private_directory(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: UID + 1)
    with pytest.raises(PermissionError):
        private_files.make_private_directory(directory)


def test_files_of_running_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert private_files.runtime_directory() == tmp_path / "kvpool"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert private_files.runtime_directory().name == f"kvpool-{UID}"


def test_a_process_knows_where_it_is() -> None:
    here = runtime.this_host()
    assert here.name == socket.gethostname()
    assert here.process == f"{here.name}/{os.getpid()}"
    code = "from kvpool import runtime; print(runtime.host_id(), runtime.resident_bytes())"
    other, resident = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert here.id == other  # one kernel, one network namespace
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert rss / 8 < here.resident() <= rss * 1.1
    assert 4 << 20 < int(resident) < 1 << 30


def test_old_objects_are_not_visited_again() -> None:
    """In a process of its own: a collection of all generations is as rare as can be."""
    code = (
        "import gc\nfrom kvpool.ops import process\n"
        "kept = [[n] for n in range(1000)]\nprocess.freeze_gc()\n"
        "print(gc.get_freeze_count() > 1000, gc.isenabled(), gc.get_threshold())"
    )
    done = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert done.strip() == "True True (1000, 3, 1000000)"


@pytest.mark.parametrize("name", ["HUP", "QUIT", "USR1", "USR2", "XCPU", "PWR"])
async def test_what_else_would_end_a_process_ends_it_in_order(name: str) -> None:
    before = signal.getsignal(number := signal.Signals[f"SIG{name}"])
    try:
        for other in (signal.SIG_IGN, lambda *_: None):  # under nohup; files are read again
            signal.signal(number, other)
            assert number not in process.stop_signals()
            assert {signal.SIGINT, signal.SIGTERM} <= {*process.stop_signals()}
        signal.signal(number, signal.SIG_DFL)
        waiting = asyncio.create_task(process.wait_for_signal())
        await asyncio.sleep(0)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(waiting, 5)
        os.kill(os.getpid(), number)  # during the hand-over
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("body_waits", [False, True])
async def test_the_first_error_of_a_group_comes_as_it_is(body_waits: bool) -> None:
    """And leaves no trace: a timeout around it is one."""
    task = asyncio.current_task()
    assert task is not None

    async def fail() -> None:
        await asyncio.sleep(0)
        raise Unavailable("gone")

    async def work() -> None:
        async with runtime.task_group() as group:
            group.create_task(asyncio.sleep(60))
            group.create_task(fail())
            await asyncio.sleep(60 * body_waits)

    async def go_on() -> None:
        with pytest.raises(Unavailable, match="gone"):
            await work()
        await asyncio.sleep(60)

    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(go_on(), 0.02)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await go_on()
        assert not task.cancelling()
