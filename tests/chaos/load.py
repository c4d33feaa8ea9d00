"""A client under load: `python -m tests.chaos.load`, driven by JSON lines.

The first line of stdin is the set-up. After that the client works by itself, several calls at a
time, until it reads the line `stop`. The line `storm` makes it write far more than the pool holds.
It checks every byte that it reads. Twice a second it prints its operations and their results.
Suspicious results carry their time, so that the parent, which knows the faults, can judge them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import xxhash

from kvpool import admin, registry
from kvpool.cli import log_lines
from kvpool.client.pool import Pool
from kvpool.config import ClientConfig
from kvpool.errors import Unavailable
from kvpool.net.control_network import TcpNetwork
from kvpool.ops import process
from kvpool.protocols import BlockStore, Channel, Listener, Transport
from kvpool.tools.workloads import Payload
from kvpool.types import ROOT, Cluster, Match, Namespace, ReadStatus, WriteStatus

T = TypeVar("T")

#: The sizes of blocks; each has a namespace of its own.
SIZES: Final = (4096, 65_536, 300_000)
CHAINS: Final = 60
CHAIN_BLOCKS: Final = 12
#: One of so many chains may be removed by any user. Blocks of the other chains are never removed.
_REMOVABLE: Final = 5
TIMEOUT_S: Final = 3.0
_REPORT_S: Final = 0.5
#: A call that ends this much after its deadline is reported; the reader of the report decides.
_LATE_S: Final = 0.001
#: After this time a master may have forgotten why an acknowledged block is gone.
_ACKED_S: Final = 60.0


class BlockSet(NamedTuple):
    """All blocks of one size: chains that share their first half with a neighbour."""

    namespace: Namespace
    payload: Payload
    chains: list[list[bytes]]

    @classmethod
    def of(cls, size: int, seed: int) -> BlockSet:
        payload = Payload(size, seed + size)  # other keys, too
        half = CHAIN_BLOCKS // 2
        chains = []
        for number in range(CHAINS):
            heads = [payload.digest(number // 2 * CHAIN_BLOCKS + i) for i in range(half)]
            tails = [payload.digest((CHAINS + number) * CHAIN_BLOCKS + i) for i in range(half)]
            chains.append(heads + tails)
        return cls(Namespace(f"chaos/{size}"), payload, chains)

    @property
    def digests(self) -> list[bytes]:
        """Every block, once."""
        return list(dict.fromkeys(digest for chain in self.chains for digest in chain))


def block_sets(seed: int) -> list[BlockSet]:
    """The blocks that all clients of one run use."""
    return [BlockSet.of(size, seed) for size in SIZES]


class RoutedTcp:
    """The tcp transport through proxies: `routes` maps a server's address to its proxy's."""

    scheme = "tcp"
    same_host = False
    authenticated = True

    def __init__(self, routes: Mapping[str, str]) -> None:
        self._routes = routes
        self._direct = registry.transport("tcp")

    async def listen(self, address: str, store: BlockStore) -> Listener:
        return await self._direct.listen(address, store)

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        return await self._direct.connect(
            self._routes.get(address, address), cluster=cluster, client=client, deadline=deadline
        )


class Load:
    """What the users of one client process did and saw since the last `report`."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self.block_sets = block_sets(seed)
        self.stopped = False
        self.acked: dict[bytes, float] = {}  # when this client last knew a block to be there
        self._clear()

    def _clear(self) -> None:
        self.operations: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.wrong = 0
        self.events: list[dict[str, Any]] = []
        self.hedged_s: list[float] = []

    def report(self) -> dict[str, Any]:
        """Everything since the last report."""
        report = {
            "operations": self.operations,
            "statuses": self.statuses,
            "wrong": self.wrong,
            "events": self.events,
            "hedged_s": self.hedged_s,
        }
        self._clear()
        return report

    def record_event(self, what: str, began: float, **details: Any) -> None:
        """Record a result that only a fault can explain; the report decides whether one does."""
        now = asyncio.get_running_loop().time()
        self.events.append({"what": what, "began": began, "ended": now, **details})

    def miss(
        self,
        block_set: BlockSet,
        chain: int,
        digest: bytes,
        status: ReadStatus,
        began: float,
        patient: bool,
    ) -> None:
        """Count a miss; record an event if its reason may be untrue."""
        self.statuses[f"read: {status.label}"] += 1
        since = self.acked.get(digest, 0.0)
        known = since > began - _ACKED_S
        if status in (ReadStatus.CORRUPT, ReadStatus.PART_MISSING) or (
            status is ReadStatus.REMOVED and not removable(chain)
        ):
            self.record_event("lie", began, status=status.label)
        elif status in (ReadStatus.NEVER_WRITTEN, ReadStatus.SERVER_LOST) and known:
            self.record_event("miss", began, status=status.label, since=since)
        elif status is ReadStatus.NO_MASTER and patient:
            self.record_event("no master", began, status=status.label)
        elif status is ReadStatus.DEADLINE and patient:
            self.record_event("miss", began, status=status.label, since=began)


def removable(chain: int) -> bool:
    """Whether blocks of this chain may be removed: the same for chains that share a head."""
    return chain // 2 % _REMOVABLE == 0


class User:
    """One of the concurrent users. It owns its buffers, and checks them after each call (G1)."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load = load
        self._pool = load.pool
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._memory = np.zeros((CHAIN_BLOCKS, max(SIZES)), np.uint8)
        self._ended = self._digest()
        self._timeout_s = TIMEOUT_S

    async def work(self) -> None:
        """One operation after the other, until the load is stopped."""
        kinds = [
            (0.56, self._probe),
            (0.18, self._read),
            (0.16, self._write),
            (0.05, self._view),
            (0.03, self._remove),
            (0.02, self._explain),
            (0.01, self._circle),
        ]
        operations, weights = [kind for _, kind in kinds], [weight for weight, _ in kinds]
        while not self._load.stopped:
            await asyncio.sleep(self._rng.expovariate(1 / 0.02))
            (operation,) = self._rng.choices(operations, weights)
            hurried = self._rng.random() < 0.03
            self._timeout_s = self._rng.choice([0.005, 0.05, 0.3]) if hurried else TIMEOUT_S
            if self._digest() != self._ended:
                self._load.record_event("late bytes", self._loop.time())
            task = asyncio.ensure_future(operation())
            if self._rng.random() < 0.02:
                await asyncio.sleep(self._rng.expovariate(200))
                task.cancel()
                self._load.operations["cancelled"] += 1
            with contextlib.suppress(Unavailable, asyncio.CancelledError):
                await task
            self._ended = self._digest()

    async def storm(self, total: int) -> None:
        """Write `total` bytes of new blocks."""
        block_set = self._load.block_sets[1]
        for _ in range(0, total // block_set.payload.size, CHAIN_BLOCKS):
            if self._load.stopped:
                return
            fresh = [
                block_set.payload.digest(self._rng.getrandbits(60)) for _ in range(CHAIN_BLOCKS)
            ]
            with contextlib.suppress(Unavailable):
                await self._store(block_set, fresh, copies=1)

    # --- operations -------------------------------------------------------------------------

    def _chosen(self) -> tuple[BlockSet, int, list[bytes]]:
        """A chain, some more often than others, or the head of one."""
        block_set = self._rng.choices(self._load.block_sets, [5, 4, 1])[0]
        number = min(int(self._rng.paretovariate(0.4)) - 1, CHAINS - 1)
        chain = block_set.chains[number]
        return block_set, number, chain[: self._rng.randint(1, len(chain))]

    async def _probe(self) -> None:
        for _ in range(self._rng.randint(1, 6)):
            await self._match(*self._chosen())

    async def _match(self, block_set: BlockSet, number: int, chain: Sequence[bytes]) -> Match:
        began = self._loop.time()
        match = await self._timed(
            "match", self._pool.match(block_set.namespace, chain, timeout=self._timeout_s)
        )
        if match.length < len(chain):
            missed = chain[match.length]
            self._load.miss(block_set, number, missed, match.stopped, began, self._patient)
        return match

    async def _read(self) -> None:
        block_set, number, chain = self._chosen()
        match = None
        if self._rng.random() < 0.7:
            match = await self._match(block_set, number, chain)
            chain = chain[: match.length]
        if not chain:
            return
        blocks = self._blocks(block_set, len(chain))
        for digest, block in zip(chain, blocks, strict=True):
            block_set.payload.spoil(digest, block)
        hedged = self._pool.counters["hedged"]
        began = self._loop.time()
        results = await self._timed(
            "read",
            self._pool.read(
                block_set.namespace,
                chain,
                [block.data for block in blocks],
                match=match,
                timeout=self._timeout_s,
            ),
        )
        if self._pool.counters["hedged"] > hedged:
            self._load.hedged_s.append(self._loop.time() - began)
        for digest, block, result in zip(chain, blocks, results, strict=True):
            if result.status.hit:
                self._load.statuses["read: hit"] += 1
                self._load.wrong += block_set.payload.wrong(digest, block)
                self._load.acked[digest] = began
            else:
                self._load.miss(block_set, number, digest, result.status, began, self._patient)

    async def _view(self) -> None:
        """read_view: look at the pool's own memory for a while."""
        block_set, _, chain = self._chosen()
        self._load.operations["read_view"] += 1
        call = self._pool.read_view(block_set.namespace, chain, timeout=self._timeout_s)
        async with call as views:
            for _ in range(2):
                for digest, view in zip(chain, views, strict=True):
                    if view.data is not None:
                        block = np.frombuffer(view.data, np.uint8)
                        self._load.wrong += block_set.payload.wrong(digest, block)
                await asyncio.sleep(self._rng.choice([0, 0.01, 0.2]))

    async def _write(self) -> None:
        block_set, _, chain = self._chosen()
        await self._store(block_set, chain, copies=self._rng.choice([2, 2, 2, 1]))

    async def _circle(self) -> None:
        """Blocks that are their own ancestors, one write each, in any order (G9)."""
        block_set = self._load.block_sets[0]
        count = self._rng.randint(2, 6)
        circle = [block_set.payload.digest(self._rng.getrandbits(60)) for _ in range(count)]
        for place in self._rng.sample(range(count), count):
            parent, block = circle[place - 1], circle[place]
            await self._store(block_set, [block], copies=2, parent=parent)

    async def _store(
        self, block_set: BlockSet, chain: Sequence[bytes], copies: int, parent: bytes = ROOT
    ) -> None:
        buffers = []
        for digest in chain:
            buffer = np.empty(block_set.payload.size, np.uint8)
            block_set.payload.write(digest, buffer)
            buffers.append(buffer.data)
        began = self._loop.time()
        statuses = await self._timed(
            "write",
            self._pool.write(
                block_set.namespace,
                chain,
                buffers,
                parent=parent,
                copies=copies,
                timeout=self._timeout_s,
            ),
        )
        ended = self._loop.time()
        for digest, status in zip(chain, statuses, strict=True):
            self._load.statuses[f"write: {status.label}"] += 1
            if status.present:
                self._load.acked[digest] = ended
            elif status is WriteStatus.NO_MASTER and self._patient:
                self._load.record_event("no master", began, status=status.label)
            elif status in (WriteStatus.DEADLINE, WriteStatus.SERVER_LOST) and self._patient:
                self._load.record_event("write", began, status=status.label, since=began)

    async def _remove(self) -> None:
        block_set, number, chain = self._chosen()
        if removable(number):
            # Forget the blocks before the call, because another user may read REMOVED during it.
            for digest in chain:
                self._load.acked.pop(digest, None)
            await self._timed(
                "remove", self._pool.remove(block_set.namespace, chain, timeout=self._timeout_s)
            )

    async def _explain(self) -> None:
        block_set, _, chain = self._chosen()
        await self._timed(
            "explain",
            admin(self._pool).explain(block_set.namespace, chain, timeout=self._timeout_s),
        )

    # --- inside -----------------------------------------------------------------------------

    @property
    def _patient(self) -> bool:
        return self._timeout_s >= TIMEOUT_S

    def _blocks(self, block_set: BlockSet, count: int) -> list[Any]:
        return [self._memory[i, : block_set.payload.size] for i in range(count)]

    def _digest(self) -> int:
        return xxhash.xxh3_64_intdigest(self._memory.data)

    async def _timed(self, name: str, call: Awaitable[T]) -> T:
        """Await one call; record an event if it ends after its deadline."""
        self._load.operations[name] += 1
        began = self._loop.time()
        try:
            return await call
        finally:
            late_s = self._loop.time() - began - self._timeout_s
            if late_s > _LATE_S:
                self._load.record_event("late", began, call=name, late_s=late_s)


async def main() -> None:
    """Work until `stop` comes or stdin ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = json.loads(await reader.readline())
    files = _open_files()
    network = TcpNetwork()
    transports: dict[str, Transport] = {
        scheme: RoutedTcp(setup["routes"]) if scheme == "tcp" else registry.transport(scheme)
        for scheme in setup["transports"]
    }
    config = ClientConfig(masters=setup["masters"], transports=list(transports))
    pool = Pool(
        config, cluster=Cluster(), network=network, transports=transports, owns_network=True
    )
    load = Load(pool, setup["seed"])
    print("ready", flush=True)
    life = f"{setup['seed']}/{setup['name']}/{setup['life']}"
    users = [User(load, random.Random(f"{life}/{number}")) for number in range(setup["users"])]
    storms = (User(load, random.Random(f"{life}/storm {number}")) for number in itertools.count())
    async with asyncio.TaskGroup() as group:  # an unexpected error of one user ends the process
        reporting = group.create_task(_report(load))
        async with asyncio.TaskGroup() as working:
            for user in users:
                working.create_task(user.work())
            while (line := (await reader.readline()).decode().split()) and line[0] != "stop":
                working.create_task(next(storms).storm(int(line[1])))
            load.stopped = True
        reporting.cancel()
    await pool.close()
    last = {**load.report(), "files": sorted(_open_files() - files)}
    print(json.dumps(last), flush=True)


async def _report(load: Load) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        print(json.dumps({**load.report(), "files": None}), flush=True)


def _open_files() -> set[str]:
    """The open files of this process, as text."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


if __name__ == "__main__":
    process.die_with_parent()
    log_lines.configure("error")
    process.run(main())
