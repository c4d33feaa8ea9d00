"""A pool of real processes that is attacked, and what an attack costs those who are honest."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvpool import ClientConfig, Cluster, Namespace, Pool, WriteStatus, connect, read_cluster
from kvpool.tools.subprocesses import process_of
from kvpool.types import ReadResult
from tests.chaos.cluster import Node, free_ports
from tests.conftest import buffers, keys, patient, value, values
from tests.support.commands import kvpool

#: How long each attack lasts: `make attack` takes more.
ATTACK_S = float(os.environ.get("ATTACK_S", "1"))
#: What an honest client may wait for a small read or write, and for its connection, while others
#: attack: on an idle machine.
SLOWEST_S, CONNECT_S = 0.5, 2.0
#: Lines of log that one attack from one address may cost each process: docs/security.md.
LINES_MAX = 6
MODEL = Namespace("llama")
MIB = 1 << 20

#: The attacks of this run and what they cost, printed at its end.
MEASURED: list[str] = []


@dataclass
class Costs:
    """What honest clients and the attacked processes have paid."""

    reads_s: list[float] = field(default_factory=list)
    writes_s: list[float] = field(default_factory=list)
    connects_s: list[float] = field(default_factory=list)
    #: Reads that were no hits, and writes that were not stored: what became of them.
    lost: list[str] = field(default_factory=list)
    #: By process, at most, and beyond what it had: private bytes, descriptors; lines of its log.
    private: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        slowest = [max(one, default=0.0) for one in (self.reads_s, self.writes_s, self.connects_s)]
        read, write, joined = (f"{1000 * one:.0f} ms" for one in slowest)
        of = [
            f"{name}: {self.private[name] / MIB:.1f} MiB, {self.files[name]} files, "
            f"{len(self.lines[name])} lines"
            for name in self.private
        ]
        return (
            f"{len(self.reads_s)} reads {read}, writes {write}, connect {joined}; {'; '.join(of)}"
        )

    def check(self, *, private: int, files: int, lines: int = LINES_MAX) -> None:
        """Fails for more than the honest may be made to pay; `private` is in bytes."""
        assert not self.lost
        assert max(self.reads_s) < patient(SLOWEST_S), self
        assert max(self.writes_s) < patient(SLOWEST_S), self
        assert max(self.connects_s) < patient(CONNECT_S), self
        assert max(self.private.values()) < private, self
        assert max(self.files.values()) <= files, self
        for name, written in self.lines.items():
            assert len(written) <= lines, (name, written[:20])


class Castle:
    """One master and one server with a secret, and two tenants, `acme` and `blue`."""

    def __init__(self, folder: Path, *server: str, tenant: dict[str, object]) -> None:
        self.folder = folder
        self.plain = True  # its file, if it has one, is not encrypted
        (folder / "cluster.secret").write_text(secrets.token_hex(32))
        (folder / "cluster.secret").chmod(0o600)
        key = ("--secret-file", str(folder / "cluster.secret"))
        entries = []
        for name in ("acme", "blue"):
            secret, out = f"{folder}/{name}.secret", f"{folder}/{name}.key"
            done = kvpool("tenant-key", name, *key, "--tenant-secret", secret, "--out", out)
            assert done.code == 0, done.all
            entries.append({"name": name, "secret_file": f"{name}.secret", **tenant})
        (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": entries}))
        both = (*key, "--tenants", str(folder / "tenants.yaml"))
        here = [f"127.0.0.1:{port}" for port in free_ports(4)]
        self.ports = dict(
            zip(("master", "server", "master-http", "server-http"), here, strict=True)
        )
        self.master = Node(
            "master", "kvpool", "master", "--bind", here[0], "--http", here[2], *both
        )
        listen = ("--listen", f"tcp://{here[1]},shm://", "--masters", here[0], "--id", "s")
        if not server:
            server = ("--capacity", "64MiB")
        self.server = Node("server", "kvpool", "server", *listen, "--http", here[3], *both, *server)

        for node in self.nodes:
            node.log = self.log_of(node).open("ab")

    def cluster(self, tenant: str = "") -> Cluster:
        name = f"{tenant}.key" if tenant else "cluster.secret"
        return read_cluster("default", str(self.folder / name))

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.master, self.server

    async def start(self) -> None:
        for node in self.nodes:
            await node.start()
        async with await self.client():
            pass

    async def close(self) -> None:
        for node in reversed(self.nodes):
            await node.close()
            if node.log is not None:
                node.log.close()

    async def client(self, tenant: str = "", **settings: Any) -> Pool:
        known: dict[str, Any] = {
            "masters": [self.ports["master"]],
            "transports": ["tcp"],
            **settings,
        }
        return await connect(config=ClientConfig(**known), cluster=self.cluster(tenant))

    def log_of(self, node: Node) -> Path:
        return self.folder / f"{node.name}.log"

    def lines(self, node: Node) -> list[str]:
        return self.log_of(node).read_text(errors="replace").splitlines()


@asynccontextmanager
async def castle(
    folder: Path, *server: str, tenant: dict[str, object] | None = None
) -> AsyncIterator[Castle]:
    """A castle that is up; `server` are options instead of its capacity, `tenant` more lines for
    each of its tenants."""
    made = Castle(folder, *server, tenant=tenant or {})
    try:
        await made.start()
        while True:  # until the master knows the server
            async with await made.client() as pool:
                if any(one.alive for one in await pool.members()):
                    break
            await asyncio.sleep(0.02)
        yield made
    finally:
        await made.close()


async def right(pool: Pool, chain: list[bytes], size: int) -> list[ReadResult]:
    """Read some blocks: what is a hit has the right bytes."""
    got = buffers(len(chain), size)
    results = await pool.read(MODEL, chain, got)
    for result, has, wanted in zip(results, got, values(chain, size), strict=True):
        assert not result.status.hit or has == wanted, "wrong bytes"
    return results


@contextmanager
def cheap(of: Castle) -> Iterator[None]:
    """What is done inside costs each process a few lines of log, and no more memory than a read."""
    before = {node: (len(of.lines(node)), private_bytes(node)) for node in of.nodes}
    yield
    for node, (lines, private) in before.items():
        node.check()
        said = of.lines(node)[lines:]
        assert len(said) <= LINES_MAX, said[:9]
        assert private_bytes(node) - private < 32 * MIB


def private_bytes(node: Node) -> int:
    """Anonymous memory of a process. Blocks in a shared segment are not in it, also where no other
    process has mapped their pages, which the kernel calls private."""
    assert node.process is not None
    text = Path(f"/proc/{node.process.pid}/status").read_text()
    (kibibytes,) = re.findall(r"RssAnon:\s+(\d+) kB", text)
    return int(kibibytes) << 10


def open_files(node: Node) -> int:
    assert node.process is not None
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))


async def suffered(of: Castle, *attacks: Awaitable[object], tenant: str = "acme") -> Costs:
    """What an honest client of `tenant` pays while the attacks go on: it was there before, and
    others of it come."""
    costs = Costs()
    async with await of.client(tenant) as honest:
        chain = keys("honest", 4)
        await honest.write(MODEL, chain, values(chain))
        await _take_part(honest, chain, Costs())
        before = {node.name: (private_bytes(node), open_files(node)) for node in of.nodes}
        lines = {node.name: len(of.lines(node)) for node in of.nodes}
        attack = asyncio.gather(*attacks)
        try:
            while not attack.done():
                await _take_part(honest, chain, costs)
                began = time.perf_counter()
                async with await of.client(tenant) as other:
                    await _take_part(other, chain, Costs())
                costs.connects_s.append(time.perf_counter() - began)
                for node in of.nodes:
                    private, files = before[node.name]
                    grown = max(costs.private.get(node.name, 0), private_bytes(node) - private)
                    costs.private[node.name] = grown
                    opened = max(costs.files.get(node.name, 0), open_files(node) - files)
                    costs.files[node.name] = opened
                await asyncio.sleep(0.01)
        finally:
            attack.cancel()
            (outcome,) = await asyncio.gather(attack, return_exceptions=True)
        if isinstance(outcome, BaseException):
            raise outcome
    for node in of.nodes:
        node.check()
        costs.lines[node.name] = of.lines(node)[lines[node.name] :]
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].partition(" ")[0]
    MEASURED.append(f"{test}: {costs}")
    return costs


async def _take_part(honest: Pool, chain: list[bytes], costs: Costs) -> None:
    """Read what was written, and write something new."""
    got = buffers(len(chain))
    began = time.perf_counter()
    results = await honest.read(MODEL, chain, got)
    costs.reads_s.append(time.perf_counter() - began)
    costs.lost += [f"read: {one.status.label}" for one in results if not one.status.hit]
    if not costs.lost:
        assert got == values(chain), "wrong bytes"
    fresh = secrets.token_bytes(32)
    began = time.perf_counter()
    (status,) = await honest.write(MODEL, [fresh], [value(fresh)])
    costs.writes_s.append(time.perf_counter() - began)
    if status is not WriteStatus.STORED:
        costs.lost.append(f"write: {status.name}")


async def actor(module: str, *arguments: object) -> dict[str, int]:
    """Run an attacker of `tests.attack` in a process of its own until it has ended; what it did."""
    words = [str(one) for one in arguments]
    async with process_of(f"tests.attack.{module}", *words) as child:
        line = await asyncio.wait_for(child.line(), 60 + 2 * ATTACK_S)
        return {name: int(count) for name, count in (one.split("=") for one in line.split())}


async def strangers(kinds: str, address: str) -> None:
    """Strangers of these kinds, as `tests.attack.strangers` has them."""
    done = await actor("strangers", kinds, address, ATTACK_S)
    assert done["connected"] > 10, "nobody came"
