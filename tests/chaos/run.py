"""A whole run: the cluster, its users, the nemesis, and the last questions when all is calm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from kvpool.client.pool import Pool
from kvpool.errors import KvpoolError
from kvpool.types import Match, ReadStatus, Replica, Run, WriteStatus
from tests.chaos.client import ClientNode
from tests.chaos.cluster import Cluster, Node, open_sockets
from tests.chaos.load import TIMEOUT_S, Shelf, shelves
from tests.chaos.nemesis import Nemesis
from tests.chaos.report import Report

#: Half of the blocks that the clients know of fit, with two copies each.
CAPACITY: Final = 32 << 20
SERVERS: Final = 3
MASTERS: Final = 2
#: What a client may use, in turn; its tcp goes through proxies.
TRANSPORTS: Final = (("shm", "tcp"), ("tcp",))
_TOLD_S: Final = 10.0
#: Answers without explanation that are printed at once each time.
_SHOWN: Final = 5
#: Blocks that one question is about.
_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What to do, and for how long."""

    seconds: float
    seed: int
    clients: int = 3
    users: int = 3
    allowance_s: float = 0.5


class Chaos:
    """One run. `run` returns the report, and leaves no process behind, however it ends."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._cluster = Cluster(
            masters=MASTERS, servers=SERVERS, capacity=str(CAPACITY), proxied=True
        )
        self.report = Report(
            options.seed, tuple(self._cluster.masters), allowance_s=options.allowance_s
        )
        self._clients: list[ClientNode] = []
        self._loop = asyncio.get_running_loop()

    async def run(self) -> Report:
        """Chaos for as long as was asked for, then calm and the last questions."""
        shm, began = set(os.listdir("/dev/shm")), self._loop.time()
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._cluster)
                fresh = _open_files(self._cluster)
                await self._work(stack)
                await self._ask_last()
                await self._look_for_leaks(fresh)
        except KvpoolError as error:
            self.report.broken.append(f"liveness: {error}")
        self._look_outside(shm)
        self.report.seconds = self._loop.time() - began
        self.report.conclude()
        return self.report

    async def _work(self, stack: AsyncExitStack) -> None:
        """Clients under load while the nemesis has its time."""
        options = self._options
        for number in range(options.clients):
            client = ClientNode(
                f"client-{number}",
                self._cluster,
                transports=TRANSPORTS[number % len(TRANSPORTS)],
                users=options.users,
                seed=options.seed,
                hear=self.report.add,
            )
            stack.push_async_callback(client.close)
            self._clients.append(client)
            await client.start()
        nemesis = Nemesis(
            self._cluster,
            self._clients,
            self.report,
            rng=random.Random(options.seed),
            storm=SERVERS * CAPACITY,
        )
        telling = self._loop.create_task(self._tell())
        try:
            await nemesis.run(options.seconds)
        finally:
            telling.cancel()
        for client in self._clients:
            files = await client.finish(within_s=10 * TIMEOUT_S)
            self.report.leaks += [f"{client.name}: {name}" for name in files]

    async def _tell(self) -> None:
        """A line now and then for whoever waits."""
        began, shown = self._loop.time(), 0
        while True:
            await asyncio.sleep(_TOLD_S)
            report = self.report
            for line in report.unexplained[shown:][:_SHOWN]:
                self._console.print(escape(line), soft_wrap=True)
            shown = len(report.unexplained)
            self._console.print(
                f"{self._loop.time() - began:5.0f} s  {report.operations.total():,} operations  "
                f"{report.faults.total()} faults  wrong bytes {report.wrong_bytes}  "
                f"unexplained {len(report.unexplained)}"
            )

    # --- when all is calm ------------------------------------------------------------------

    async def _ask_last(self) -> None:
        """Every master's map is what the servers hold, byte for byte; and the pool still works."""
        await self._cluster.well()
        async with AsyncExitStack() as stack:
            masters = {
                name: await stack.enter_async_context(self._cluster.client("tcp", master=name))
                for name in self._cluster.masters
            }
            pool = next(iter(masters.values()))
            for shelf in shelves(self._options.seed):
                for first in range(0, len(shelf.digests), _BATCH):
                    batch = shelf.digests[first : first + _BATCH]
                    held = await self._held(pool, shelf, batch)
                    for name, asked in masters.items():
                        await self._compare(name, asked, shelf, batch, held)
                    self.report.map_checked += len(batch)
                await self._write_and_read(pool, shelf)

    async def _held(self, pool: Pool, shelf: Shelf, batch: list[bytes]) -> list[set[str]]:
        """The servers that have each block, by their own books: no master is asked."""
        held: list[set[str]] = [set() for _ in batch]
        for server in self._cluster.servers:
            run = Run(0, len(batch) - 1, (Replica(server, "dram"),))
            match = Match((run,), len(batch), ReadStatus.HIT)
            hits = await self._read(pool, shelf, batch, match)
            for servers, hit in zip(held, hits, strict=True):
                if hit:
                    servers.add(server)
        return held

    async def _read(
        self, pool: Pool, shelf: Shelf, batch: list[bytes], match: Match | None
    ) -> list[bool]:
        """Read and check; which of the blocks came."""
        blocks = _blocks(shelf, len(batch))
        for digest, block in zip(batch, blocks, strict=True):
            shelf.payload.spoil(digest, block)
        results = await pool.read(
            shelf.namespace, batch, [block.data for block in blocks], match=match
        )
        for digest, block, result in zip(batch, blocks, results, strict=True):
            if result.status.hit:
                self.report.wrong_bytes += shelf.payload.wrong(digest, block)
        return [result.status.hit for result in results]

    async def _compare(
        self, master: str, asked: Pool, shelf: Shelf, batch: list[bytes], held: list[set[str]]
    ) -> None:
        answers = await asked.explain(shelf.namespace, batch)
        for answer, servers in zip(answers, held, strict=True):
            known = {replica.server for replica in answer.replicas}
            if known != servers:
                self.report.broken.append(
                    f"G7: {master} says that {answer.key} is on {sorted(known) or 'no server'}, "
                    f"it is on {sorted(servers) or 'none'}"
                )

    async def _write_and_read(self, pool: Pool, shelf: Shelf) -> None:
        """What is written now is stored, and read at once."""
        fresh = [shelf.payload.digest((1 << 61) + i) for i in range(8)]
        blocks = _blocks(shelf, len(fresh))
        for digest, block in zip(fresh, blocks, strict=True):
            shelf.payload.write(digest, block)
        statuses = await pool.write(
            shelf.namespace, fresh, [block.data for block in blocks], copies=2
        )
        if set(statuses) != {WriteStatus.STORED}:
            told = ", ".join(sorted({status.label for status in statuses}))
            self.report.broken.append(f"liveness: in the end a write was told: {told}")
        elif not all(await self._read(pool, shelf, fresh, None)):
            self.report.broken.append("G5: in the end a block was written and not found")

    # --- leaks ------------------------------------------------------------------------------

    async def _look_for_leaks(self, fresh: dict[str, Counter[str]]) -> None:
        """Nobody is connected any more: nothing may be held or open on anybody's behalf."""
        leaks = ["not looked"]
        until = self._loop.time() + _TOLD_S
        while leaks and self._loop.time() < until:
            await asyncio.sleep(0.5)
            async with self._cluster.client() as pool:
                members = await pool.members()
            leaks = [
                f"{member.server}: {count} {what}"
                for member in members
                for what, count in (
                    ("pins", member.pins),
                    ("reservations", member.reservations),
                    ("extents in quarantine", member.counters.get("quarantined", 0)),
                    ("connections", member.counters.get("connections", 0)),
                )
                if count
            ]
            for name, files in _open_files(self._cluster).items():
                more = files - fresh[name]
                leaks += [f"{name}: {count} more {what}" for what, count in more.items()]
        self.report.leaks += leaks

    def _look_outside(self, shm: set[str]) -> None:
        """After the end: no shared memory, no socket, no process."""
        self.report.leaks += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shm]
        sockets = open_sockets(self._cluster.servers.values())
        self.report.leaks += [f"socket {name}" for name in sockets]
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            self.report.leaks += [f"process {pid}" for pid in file.read().split()]


def _open_files(cluster: Cluster) -> dict[str, Counter[str]]:
    """What masters and servers have open, by kind."""
    return {node.name: _files_of(node) for node in cluster.nodes}


def _files_of(node: Node) -> Counter[str]:
    assert node.process is not None
    folder = f"/proc/{node.process.pid}/fd"
    found: Counter[str] = Counter()
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            found[re.sub(r"\d+", "", os.readlink(f"{folder}/{name}"))] += 1
    return found


def _blocks(shelf: Shelf, count: int) -> npt.NDArray[np.uint8]:
    return np.zeros((count, shelf.payload.size), np.uint8)
