"""One run: the cluster, its users, the nemesis, and the checks after the last fault."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from kvpool import admin
from kvpool.client.pool import Pool
from kvpool.errors import KvpoolError
from kvpool.protocols import Channel, ReadOptions
from kvpool.types import (
    Match,
    Namespace,
    ReadBlock,
    ReadResult,
    ReadStatus,
    Replica,
    Run,
    WriteStatus,
)
from tests.chaos.client import ClientNode
from tests.chaos.cluster import Node, ProcessCluster, open_sockets
from tests.chaos.load import TIMEOUT_S, BlockSet, block_sets
from tests.chaos.nemesis import ProcessNemesis
from tests.chaos.report import ChaosReport

#: Bytes of each server: half of the clients' blocks fit, with two copies each.
CAPACITY: Final = 32 << 20
SERVERS: Final = 3
MASTERS: Final = 2
#: Clients take these lists of transports in turn; their tcp goes through proxies.
TRANSPORTS: Final = (("shm", "tcp"), ("tcp",))
_PROGRESS_S: Final = 10.0
#: After the last call, nothing may be pinned or reserved any more after so long.
_RELEASED_S: Final = 10.0
#: Servers that hand blocks over stay connected with each other and with masters while they do: so
#: much of each process is theirs. What leaks grows with every client, and there are hundreds.
_OF_SERVERS: Final = Counter({"socket:[]": 16, "anon_inode:[eventfd]": 8})
_CONNECTIONS_OF_SERVERS: Final = 8
#: The map is compared so often, if it differs from what servers have.
_LOOKS: Final = 5
_LOOK_AGAIN_S: Final = 1.0
#: Results without explanation that are printed with each line of progress.
_SHOWN: Final = 5
#: Blocks of each size that several clients write at once.
_CONTESTS: Final = 5
#: Blocks of one request of the checks.
_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of the command line."""

    seconds: float
    seed: int
    clients: int = 3
    users: int = 3
    allowance_s: float = 0.5


class Chaos:
    """One run. `run` returns the report; no process outlives it, even after an error."""

    def __init__(self, options: ChaosOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._cluster = ProcessCluster(
            masters=MASTERS, servers=SERVERS, capacity=str(CAPACITY), proxied=True
        )
        self.report = ChaosReport(
            options.seed, tuple(self._cluster.masters), allowance_s=options.allowance_s
        )
        self._clients: list[ClientNode] = []
        self._loop = asyncio.get_running_loop()

    async def run(self) -> ChaosReport:
        """Inject faults for the given time, then end all of them and check the pool."""
        shm, began = _shared_memory(), self._loop.time()
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._cluster)
                fresh = _open_files(self._cluster)
                await self._work(stack)
                await self._final_checks()
                await self._find_leaks(fresh)
        except KvpoolError as error:
            self.report.broken.append(f"liveness: {error}")
        self._find_leaks_outside(shm)
        self.report.seconds = self._loop.time() - began
        self.report.conclude()
        return self.report

    async def _work(self, stack: AsyncExitStack) -> None:
        """Clients work while the nemesis injects faults."""
        options = self._options
        for number in range(options.clients):
            client = ClientNode(
                f"client-{number}",
                self._cluster,
                transports=TRANSPORTS[number % len(TRANSPORTS)],
                users=options.users,
                seed=options.seed,
                on_report=self.report.add,
            )
            stack.push_async_callback(client.close)
            self._clients.append(client)
            await client.start()
        nemesis = ProcessNemesis(
            self._cluster,
            self._clients,
            self.report,
            rng=random.Random(options.seed),
            storm=SERVERS * CAPACITY,
        )
        progress = self._loop.create_task(self._print_progress())
        try:
            await nemesis.run(options.seconds)
        finally:
            progress.cancel()
        for client in self._clients:
            files = await client.finish(within_s=10 * TIMEOUT_S)
            self.report.leaks += [f"{client.name}: {name}" for name in files]

    async def _print_progress(self) -> None:
        """Print a line of progress from time to time."""
        began, shown = self._loop.time(), 0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            report = self.report
            for line in report.unexplained[shown:][:_SHOWN]:
                self._console.print(escape(line), soft_wrap=True)
            shown = len(report.unexplained)
            self._console.print(
                f"{self._loop.time() - began:5.0f} s  {report.operations.total():,} operations  "
                f"{report.faults.total()} faults  wrong bytes {report.wrong_bytes}  "
                f"unexplained {len(report.unexplained)}"
            )

    # --- after the last fault ---------------------------------------------------------------

    async def _final_checks(self) -> None:
        """Every master lists exactly what the servers hold, and the pool still works."""
        await self._cluster.wait_until_healthy()
        async with AsyncExitStack() as stack:
            masters = {
                name: await stack.enter_async_context(self._cluster.client("tcp", master=name))
                for name in self._cluster.masters
            }
            pool = next(iter(masters.values()))
            for block_set in block_sets(self._options.seed):
                for first in range(0, len(block_set.digests), _BATCH):
                    batch = block_set.digests[first : first + _BATCH]
                    self.report.broken += await self._wrong_maps(pool, masters, block_set, batch)
                    self.report.map_checked += len(batch)
                await self._write_and_read(pool, block_set)
                await self._write_versions(list(masters.values()), block_set)
            await self._replace_everything(pool)

    async def _wrong_maps(
        self, pool: Pool, masters: Mapping[str, Pool], block_set: BlockSet, batch: list[bytes]
    ) -> list[str]:
        """What masters list and no server has, or the other way round, each time that one looks.

        Servers hand blocks over, and make lost copies again, of what is read just now.
        """
        wrong: list[str] = []
        for _ in range(_LOOKS):
            held = await self._held(pool, block_set, batch)
            wrong = []
            for name, asked in masters.items():
                wrong += await self._compare(name, asked, block_set, batch, held)
            if not wrong:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        return wrong

    async def _held(self, pool: Pool, block_set: BlockSet, batch: list[bytes]) -> list[set[str]]:
        """The servers that have each block, as reads of each server show; no master is asked.

        Not with `Pool.read`: that one finds what has been handed over (design: movers).
        """
        held: list[set[str]] = [set() for _ in batch]
        options = ReadOptions(block_set.namespace, 0)
        for server in self._cluster.servers:
            memory = _blocks(block_set, len(batch))
            asked = list(range(len(batch)))
            while asked:  # in waves: a server pins so much at a time
                blocks = [ReadBlock(batch[i], (memory[i].data,), memory[i].nbytes) for i in asked]
                deadline = self._loop.time() + TIMEOUT_S
                read = partial(_read_from, options, blocks, deadline)
                results = dict(
                    zip(asked, await pool._servers.call(server, read, deadline), strict=True)
                )
                for i, result in results.items():
                    if result.status.hit:
                        held[i].add(server)
                        self.report.wrong_bytes += block_set.payload.wrong(batch[i], memory[i])
                later = [i for i in asked if results[i].status is ReadStatus.NOT_YET]
                asked = later if len(later) < len(asked) else []
        return held

    async def _read(
        self, pool: Pool, block_set: BlockSet, batch: list[bytes], match: Match | None
    ) -> list[bool]:
        """Read and compare; returns for each block whether it was a hit."""
        blocks = _blocks(block_set, len(batch))
        for digest, block in zip(batch, blocks, strict=True):
            block_set.payload.spoil(digest, block)
        results = await pool.read(
            block_set.namespace, batch, [block.data for block in blocks], match=match
        )
        for digest, block, result in zip(batch, blocks, results, strict=True):
            if result.status.hit:
                self.report.wrong_bytes += block_set.payload.wrong(digest, block)
        return [result.status.hit for result in results]

    async def _compare(
        self,
        master: str,
        asked: Pool,
        block_set: BlockSet,
        batch: list[bytes],
        held: list[set[str]],
    ) -> list[str]:
        wrong = []
        answers = await admin(asked).explain(block_set.namespace, batch)
        for answer, servers in zip(answers, held, strict=True):
            known = {replica.server for replica in answer.replicas}
            if known != servers:
                wrong.append(
                    f"G7: {master} lists {answer.key} on {sorted(known) or 'no server'}, "
                    f"but it is on {sorted(servers) or 'none'}"
                )
        return wrong

    async def _write_and_read(self, pool: Pool, block_set: BlockSet) -> None:
        """A new block is stored, and a read finds it at once."""
        fresh = [block_set.payload.digest((1 << 61) + i) for i in range(8)]
        blocks = _blocks(block_set, len(fresh))
        for digest, block in zip(fresh, blocks, strict=True):
            block_set.payload.write(digest, block)
        statuses = await pool.write(
            block_set.namespace, fresh, [block.data for block in blocks], copies=2
        )
        if set(statuses) != {WriteStatus.STORED}:
            found = ", ".join(sorted({status.label for status in statuses}))
            self.report.broken.append(f"liveness: after the last fault a write returned: {found}")
        elif not all(await self._read(pool, block_set, fresh, None)):
            self.report.broken.append("G5: after the last fault a block was written and not found")

    async def _write_versions(self, pools: list[Pool], block_set: BlockSet) -> None:
        """Clients write other bytes for one block at once: in the end its copies are equal."""
        namespace, size = block_set.namespace, block_set.payload.size
        for number in range(_CONTESTS):
            digest = block_set.payload.digest((1 << 62) + number)
            writes = [
                admin(pools[version % len(pools)]).write_to(
                    server, namespace, digest, bytes([version + 1]) * size
                )
                for version, server in enumerate(self._cluster.servers)
            ]
            copied = pools[0].write(namespace, [digest], [bytes([255]) * size], copies=2)
            await asyncio.gather(copied, *writes)
            versions = set()
            for server in self._cluster.servers:
                match = Match((Run(0, 0, (Replica(server, "dram"),)),), 1, ReadStatus.HIT)
                memory = bytearray(size)
                (result,) = await pools[0].read(namespace, [digest], [memory], match=match)
                if result.status.hit:
                    versions.add(bytes(memory))
            if len(versions) != 1:
                self.report.broken.append(
                    f"G2: several clients wrote a block at once, and {len(versions)} versions stay"
                )

    async def _replace_everything(self, pool: Pool) -> None:
        """Nothing is pinned or reserved: a block as large as a server finds space there (G9)."""
        namespace, data = Namespace("chaos/all"), bytes(CAPACITY)
        for server in self._cluster.servers:
            digest = hashlib.sha256(server.encode()).digest()
            status = await admin(pool).write_to(server, namespace, digest, data, timeout=20.0)
            # A policy may keep a new block out for a while: that it ends has worlds of its own.
            if status not in (WriteStatus.STORED, WriteStatus.BYPASSED):
                self.report.broken.append(
                    f"G9: not every block of {server} could be evicted: a block of its capacity "
                    f"was answered with {status.label}"
                )

    # --- leaks ------------------------------------------------------------------------------

    async def _find_leaks(self, fresh: dict[str, Counter[str]]) -> None:
        """All clients have left: no pin, reservation, connection or file of theirs may remain."""
        leaks = ["not checked"]
        until = self._loop.time() + _RELEASED_S
        while leaks and self._loop.time() < until:
            await asyncio.sleep(0.5)
            async with self._cluster.client() as pool:
                members = await pool.members()
            leaks = [
                f"{member.server}: {count} {what}"
                for member in members
                for what, count in (
                    ("pins", member.stats.pins),
                    ("reservations", member.stats.reservations),
                    ("extents in quarantine", member.stats.counters.get("quarantined", 0)),
                    (
                        "connections",
                        member.stats.counters.get("connections", 0) - _CONNECTIONS_OF_SERVERS,
                    ),
                )
                if count > 0
            ]
            for name, files in _open_files(self._cluster).items():
                more = files - fresh[name] - _OF_SERVERS
                leaks += [f"{name}: {count} more {what}" for what, count in more.items()]
        self.report.leaks += leaks

    def _find_leaks_outside(self, shm: set[str]) -> None:
        """After the end: no shared memory, no socket and no process may remain."""
        self.report.leaks += [f"/dev/shm/{name}" for name in _shared_memory() - shm]
        sockets = open_sockets(self._cluster.servers.values())
        self.report.leaks += [f"socket {name}" for name in sockets]
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            self.report.leaks += [f"process {pid}" for pid in file.read().split()]


def _read_from(
    options: ReadOptions, blocks: list[ReadBlock], deadline: float, channel: Channel
) -> Awaitable[list[ReadResult]]:
    return channel.read(options, blocks, deadline=deadline)


def _shared_memory() -> set[str]:
    """Files that we or UCX may have made; other programs of this machine make theirs, too."""
    names = os.listdir("/dev/shm")
    return {name for name in names if name.startswith(("kvpool", "ucx"))}


def _open_files(cluster: ProcessCluster) -> dict[str, Counter[str]]:
    """The open files of masters and servers, counted by kind."""
    return {node.name: _files_of(node) for node in cluster.nodes}


def _files_of(node: Node) -> Counter[str]:
    assert node.process is not None
    folder = f"/proc/{node.process.pid}/fd"
    found: Counter[str] = Counter()
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the file was closed in between
            found[re.sub(r"\d+", "", os.readlink(f"{folder}/{name}"))] += 1
    return found


def _blocks(block_set: BlockSet, count: int) -> npt.NDArray[np.uint8]:
    return np.zeros((count, block_set.payload.size), np.uint8)
