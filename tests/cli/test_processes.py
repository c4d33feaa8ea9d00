"""Real processes on loopback: started, stopped and asked as an operator would.

What is done to them while they work is in test_chaos.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ProcessCluster, open_sockets
from tests.conftest import patient
from tests.support.commands import kvpool, running_kvpool


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    """A master and two servers."""
    async with ProcessCluster() as running:
        yield running


async def test_everything_ends_within_a_second() -> None:
    async with ProcessCluster(masters=2) as cluster:
        servers, masters = list(cluster.servers.values()), list(cluster.masters.values())
        assert len(open_sockets(servers)) == 2
        for nodes in (servers, masters):
            for node, number in zip(nodes, (signal.SIGINT, signal.SIGTERM), strict=True):
                seconds, code = await node.stop(number)
                assert seconds < patient(1.0), number
                assert code == 0, number
        assert not open_sockets(servers)


async def test_kill_9_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    async with ProcessCluster() as running:
        for node in running.nodes:
            await node.kill()
        assert set(os.listdir("/dev/shm")) == before
        assert not open_sockets(running.servers.values())


@pytest.mark.parametrize("options", ["", "--dry --sessions 9 --capacity 0.1ws,0.2ws,0.5ws"])
def test_process_1_of_a_container_ends_when_it_is_asked_to(options: str) -> None:
    """The kernel spares it what ends others; and its children are no orphans."""
    new = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    if subprocess.run([*new, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    command = [*new, sys.executable, "-m", "kvpool", "replay", "--json"]
    with subprocess.Popen([*command, *options.split()], stderr=subprocess.PIPE) as outer:
        assert outer.stderr is not None
        try:
            assert outer.stderr.read(1), "it has ended"
            (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            os.kill(int(inner), signal.SIGTERM)
            assert outer.wait(20) == 143
        finally:
            outer.kill()


# --- the command line -------------------------------------------------------------------


def test_no_master_is_said_within_two_seconds() -> None:
    started = time.monotonic()
    done = kvpool("status", "--masters", "127.0.0.1:9")
    assert done.code == 1
    assert "127.0.0.1:9" in done.err
    assert time.monotonic() - started < patient(2.0 + 1.0)  # and what it imports


async def test_a_port_or_an_id_in_use_is_named(cluster: ProcessCluster) -> None:
    (address,) = cluster.masters_of("clients")
    done = await running_kvpool("master", "--bind", address)
    assert done.code == 2
    assert address in done.err
    assert "in use" in done.err
    where = ("--masters", address, "--capacity", "1MiB")
    done = await running_kvpool("server", "--id", "server-0", *where)
    assert done.code == 2
    assert "'server-0' belongs to another living server" in done.err


@pytest.mark.parametrize("part", ["master", "server"])
@pytest.mark.parametrize(
    ("http", "said"),
    [("a..b:9", "expected host:port"), ("10.0.0.1:9", "reachable from other machines")],
)
def test_wrong_pages_end_it_before_anything_is_up(part: str, http: str, said: str) -> None:
    done = kvpool(part, "--http", http)
    assert done.code == 2
    assert f"--http (setting {part}.http)" in done.err
    assert said in done.err
    assert "is up" not in done.err


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", ""])
def test_a_command_runs_also_with_its_streams_closed_or_in_ascii(closed: str) -> None:
    """As some that start daemons do; the name of a namespace may be in any script."""
    exe = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "kvpool", "config"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*exe, "--show", "server.id=\u4e2d"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert closed or b"\\u4e2d" in done.stdout


def test_what_is_printed_with_the_streams_closed_lands_in_no_file(tmp_path: Path) -> None:
    source = """
        import os, sys
        from kvpool.cli import app
        def command():
            file = os.open(os.environ["DISK"], os.O_RDWR | os.O_CREAT)
            print("printed", flush=True)
            print("an error", file=sys.stderr, flush=True)
            os.write(1, b"by a library in C")
            os.write(2, b"by a library in C")
            assert sys.stdin.read() == ""
            os.execv("/bin/sh", ["sh", "-c", "echo by a child >&2 && exit 7"])
        app.app = command
        app.main()
    """
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c"]
    command = [*closed, textwrap.dedent(source)]
    environment = {**os.environ, "DISK": str(tmp_path / "disk")}
    done = subprocess.run(command, env=environment, check=False, timeout=60)
    assert done.returncode == 7
    assert (tmp_path / "disk").read_bytes() == b""
