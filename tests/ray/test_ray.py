"""deploy/ray/pool.py on a Ray cluster of three nodes, one of them killed (make test WITH=ray)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import ClientConfig, Cluster, Member, Pool, ReadStatus, WriteStatus, connect
from tests.conftest import NAMESPACE, buffers, keys, soon, values
from tests.support.programs import module_at

ray = pytest.importorskip("ray", reason="needs ray: make test WITH=ray")
from ray.cluster_utils import Cluster as RayCluster  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "deploy" / "ray" / "pool.py"
SECRET = Cluster("default", b"0123456789abcdef0123456789abcdef")
CHAINS, BLOCKS = 24, 4
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 256 << 20}

pytestmark = pytest.mark.timeout(300)


class Nodes:
    """A Ray cluster of three nodes, and the command on it."""

    def __init__(self, folder: Path) -> None:
        os.environ["NODES_OF"] = str(folder)  # what they start has it, too
        self.cluster = RayCluster()
        for _ in range(3):
            self.cluster.add_node(**NODE, include_dashboard=False)
        self.cluster.connect(namespace="kvpool")
        self.secret = folder / "secret"
        self.secret.write_bytes(SECRET.secret)
        self.port = free_ports(2)
        self.mark = f"NODES_OF={folder}".encode()

    def command(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr of the script."""
        cut = words.index("--") if "--" in words else len(words)
        words = (*words[:cut], "--address", self.cluster.address, *words[cut:])
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=150
        )
        return done.returncode, done.stdout, done.stderr

    def up(self, *words: str) -> tuple[int, str, str]:
        mine = ["--port", str(self.port), "--secret-file", str(self.secret)]
        return self.command("up", "--capacity", "32MiB", "--masters", "2", *mine, *words)

    def masters(self) -> list[str]:
        code, out, error = self.command("masters")
        assert code == 0, error
        return out.strip().split(",")

    def children(self, pattern: str) -> list[int]:
        """Their processes of kvpool whose command line has this: others may test beside us."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                ours = self.mark in (entry / "environ").read_bytes().split(b"\0")
                if ours and b"kvpool" in words and any(pattern.encode() in one for one in words):
                    found.append(int(entry.name))
        return found

    def node_of(self, actor: str) -> Any:
        """Where it is."""
        (line,) = [one for one in self.command("status")[1].splitlines() if one.startswith(actor)]
        return next(n for n in self.cluster.list_all_nodes() if f"node {n.node_id[:8]}" in line)


def free_ports(count: int) -> int:
    """The first of so many free ones in a row."""
    for first in range(21450, 29000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
            return first
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("ray"))
    yield made
    ray.shutdown()
    made.cluster.shutdown()


@pytest.fixture
def pool_nodes(nodes: Nodes) -> Iterator[Nodes]:
    code, _, error = nodes.up()
    assert code == 0, error
    yield nodes
    code, _, error = nodes.command("down", "--within", "10")
    assert (code, nodes.command("status")[0]) == (0, 1), error


@asynccontextmanager
async def client(masters: list[str]) -> AsyncIterator[Pool]:
    async with await connect(config=ClientConfig(masters=masters), cluster=SECRET) as pool:
        yield pool


async def write(pool: Pool, name: str) -> None:
    for number in range(CHAINS):
        chain = keys(f"{name}/{number}", BLOCKS)
        statuses = await pool.write(NAMESPACE, chain, values(chain))
        assert set(statuses) == {WriteStatus.STORED}


async def hits(pool: Pool, name: str) -> int:
    """Number of blocks that are hits; each of them has the right bytes."""
    found = 0
    for number in range(CHAINS):
        chain = keys(f"{name}/{number}", BLOCKS)
        got = buffers(BLOCKS)
        for result, has, right in zip(
            await pool.read(NAMESPACE, chain, got), got, values(chain), strict=True
        ):
            assert result.status is not ReadStatus.HIT or has == right
            found += result.status is ReadStatus.HIT
    return found


async def alive(pool: Pool, count: int, within_s: float = 60.0) -> dict[str, Member]:
    """Wait until so many servers are."""
    until = time.monotonic() + within_s
    while True:
        living = {member.server: member for member in await pool.members() if member.alive}
        if len(living) == count:
            return living
        assert time.monotonic() < until, living
        await asyncio.sleep(0.2)


async def test_the_rest_serves_when_a_node_is_lost_and_another_one_takes_its_place(
    pool_nodes: Nodes,
) -> None:
    masters = pool_nodes.masters()
    assert len(masters) == 2
    async with client(masters) as pool:
        before = await alive(pool, 3)
        await write(pool, "before")
        assert await hits(pool, "before") == CHAINS * BLOCKS

        lost = pool_nodes.node_of("kvpool-master-1")
        assert not lost.head
        server = next(name for name in before if name.endswith(f"-{lost.node_id[:8]}"))
        assert pool_nodes.children(server)
        pool_nodes.cluster.remove_node(lost, allow_graceful=False)
        soon(lambda: not pool_nodes.children(server), 30)  # the process went with its node
        assert server not in await alive(pool, 2)
        began = time.monotonic()
        left = await hits(pool, "before")
        assert 0 < left < CHAINS * BLOCKS
        assert time.monotonic() - began < 20
        await write(pool, "between")
        assert await hits(pool, "between") == CHAINS * BLOCKS

        pool_nodes.cluster.add_node(**NODE)
        after = await alive(pool, 3)
        (new,) = after.keys() - before.keys()
        await write(pool, "after")
        assert await hits(pool, "after") == CHAINS * BLOCKS
        assert await hits(pool, "between") == CHAINS * BLOCKS
        soon(lambda: new in pool_nodes.command("status")[1], 30)
        until = time.monotonic() + 10
        while not (await alive(pool, 3))[new].stats.blocks:  # it takes its share of new chains
            assert time.monotonic() < until
            await asyncio.sleep(0.2)
    assert pool_nodes.masters() == masters[:1]  # a master is bound to its node
    code, out, _ = pool_nodes.up()
    assert code == 0
    assert "3 servers run already" in out
    assert len(pool_nodes.masters()) == 2


async def test_a_server_that_is_killed_is_started_again_with_its_id(pool_nodes: Nodes) -> None:
    masters = pool_nodes.masters()
    async with client(masters) as pool:
        before = await alive(pool, 3)
        victim = sorted(before)[0]
        (pid,) = pool_nodes.children(victim)
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while True:
            now = await alive(pool, 3)
            if victim in now and now[victim].epoch != before[victim].epoch:
                break
            assert time.monotonic() < until
            await asyncio.sleep(0.2)
        await write(pool, "again")
        assert await hits(pool, "again") == CHAINS * BLOCKS
    (line,) = [line for line in pool_nodes.command("status")[1].splitlines() if victim in line]
    assert "starts 2" in line


class NoRay:
    """What an actor asks of Ray."""

    @staticmethod
    def get_runtime_context() -> Any:
        return SimpleNamespace(get_node_id=lambda: "0123456789")


def test_what_goes_wrong_on_a_node_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can be started; the second one is ready, after a line that is no text."""
    module = module_at(SCRIPT)
    says = [None, r"\xff\nserver s\n"]

    def start(command: list[str], **how: Any) -> Any:
        if (text := says.pop(0)) is None:
            raise OSError("Resource temporarily unavailable")
        return subprocess.Popen(["bash", "-c", f"printf '{text}'; exec sleep 60"], **how)

    ends = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    for name, value in {
        "subprocess": ends,
        "ray": NoRay,
        "get_node_ip_address": lambda: "10.0.0.1",
        "AGAIN_S": 0.01,
        "AGAIN_S_MAX": 0.02,
    }.items():
        monkeypatch.setattr(module, name, value)
    process = module.Process(["server"], [])
    soon(lambda: process.describe()[2:] == ("server s", 2), 30)
    assert process.stop(5.0)


def test_a_task_on_each_node_reads_what_the_driver_has_written(pool_nodes: Nodes) -> None:
    """Drivers and tasks find the masters by the names of their actors."""
    secret = str(pool_nodes.secret)

    @ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
    def read(prompts: list[list[bytes]]) -> tuple[str, list[list[bytes]]]:
        import asyncio

        import kvpool

        actors = [ray.get_actor(f"kvpool-master-{n}", namespace="kvpool") for n in (0, 1)]
        masters = ray.get([actor.address.remote() for actor in actors])

        async def main() -> list[list[bytes]]:
            cluster = kvpool.read_cluster("default", secret)
            found = []
            async with await kvpool.connect(*masters, cluster=cluster) as pool:
                for chain in prompts:
                    got = [bytearray(8192) for _ in chain]
                    results = await pool.read(kvpool.Namespace("test/model"), chain, got)
                    assert all(result.status.hit for result in results)
                    found.append([bytes(block) for block in got])
            return found

        return ray.get_runtime_context().get_node_id(), asyncio.run(main())

    prompts = [keys(f"task/{number}", BLOCKS) for number in range(4)]

    async def fill() -> None:
        async with client(pool_nodes.masters()) as pool:
            for chain in prompts:
                await pool.write(NAMESPACE, chain, values(chain))

    asyncio.run(fill())
    answers = ray.get([read.remote(prompts) for _ in range(3)], timeout=120)
    for _, found in answers:
        assert found == [values(chain) for chain in prompts]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--servers", "4"], "--servers 4: expected 1 to 3, the nodes of this Ray cluster"),
        (["--masters", "0"], "--masters 0: expected 1 to 3"),
        (["--capacity", "1GB"], "--capacity: size '1GB': unit 'GB' is not one of KiB, MiB"),
        (["--secret-file", "/nowhere/secret"], "/nowhere/secret"),
        (["--", "--policy", "newest"], "kvpool-server-0 does not start: no policy 'newest'"),
        (["--", "--tier", "tape:1MiB"], "kvpool-server-0 does not start: no tier 'tape'"),
        (["--cpus", "7"], "no place for 3 servers, each on a node of its own with 7 CPU"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_leaves_nothing(
    nodes: Nodes, words: list[str], problem: str
) -> None:
    code, out, error = nodes.up(*words)
    assert code == 1, out
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert problem in line
    assert error.strip() == line  # and nothing else
    assert nodes.command("status")[0] == 1
    soon(lambda: not nodes.children("--die-with-parent"), 30)
    assert not [
        one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"
    ]


def test_without_a_cluster_or_a_pool_that_is_said(nodes: Nodes) -> None:
    for command in ("down", "status", "masters"):
        code, _, error = nodes.command(command)
        assert code == 1
        assert "in this Ray cluster" in error
