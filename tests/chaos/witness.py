"""Witnesses: readers of blocks with two copies, which record the time of each read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import numpy as np

from kvpool import admin
from kvpool.client.pool import Pool
from kvpool.tools.workloads import Payload
from kvpool.types import Explanation, Match, Namespace, ReadStatus, Replica, Run
from tests.chaos.cluster import ProcessCluster

NAMESPACE: Final = Namespace("chaos/witness")
#: Each reader prefers a replica at random: of three readers, one likely prefers the victim.
_READERS: Final = 3
_BLOCKS: Final = 6
_SIZE: Final = 65_536


class ObservedRead(NamedTuple):
    """One read of all the blocks."""

    began: float
    ended: float
    statuses: list[ReadStatus]
    wrong_bytes: int


class Witness:
    """Writes blocks with two copies, then reads them in a loop. Use as `async with`."""

    def __init__(self, cluster: ProcessCluster, seed: int, number: int = 0) -> None:
        self.seen: list[list[ObservedRead]] = [[] for _ in range(_READERS)]
        self.where: list[Explanation] = []
        self._payload = Payload(_SIZE, seed)
        self.digests = [self._payload.digest((number << 40) + i) for i in range(_BLOCKS)]
        self._cluster = cluster
        self._pools: list[Pool] = []
        self._stack = AsyncExitStack()
        self._reading: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Witness:
        try:
            for _ in range(_READERS):
                self._pools.append(await self._stack.enter_async_context(self._cluster.client()))
            blocks = np.empty((_BLOCKS, _SIZE), np.uint8)
            for digest, block in zip(self.digests, blocks, strict=True):
                self._payload.write(digest, block)
            pool, buffers = self._pools[0], [block.data for block in blocks]
            await pool.write(NAMESPACE, self.digests, buffers, copies=2)
            self.where = await admin(pool).explain(NAMESPACE, self.digests)
            loop = asyncio.get_running_loop()
            self._reading = [
                loop.create_task(self._read(reader, seen))
                for reader, seen in zip(self._pools, self.seen, strict=True)
            ]
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.wait(self._reading)
        await self._stack.aclose()
        for task in self._reading:
            if not task.cancelled():
                task.result()

    @property
    def owners(self) -> set[str]:
        """The two servers that hold all of the blocks; empty if not all are on the same two."""
        holders = [{replica.server for replica in answer.replicas} for answer in self.where]
        alike = all(servers == holders[0] for servers in holders)
        return holders[0] if alike and len(holders[0]) == 2 else set()

    async def reads_since(self, when: float, within_s: float = 10.0) -> list[list[ObservedRead]]:
        """Each reader's reads that ended after `when`, once one of them also began after it.

        Raises TimeoutError when a reader has none.
        """
        async with asyncio.timeout(within_s):
            while not all(seen and seen[-1].began >= when for seen in self.seen):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return [[read for read in seen if read.ended >= when] for seen in self.seen]

    async def held_by(self, server: str) -> list[ReadStatus]:
        """The status of each block when only this server is read; no master is asked."""
        run = Run(0, _BLOCKS - 1, (Replica(server, "dram"),))
        match = Match((run,), _BLOCKS, ReadStatus.HIT)
        buffers = [bytearray(_SIZE) for _ in self.digests]
        async with self._cluster.client() as pool:
            results = await pool.read(NAMESPACE, self.digests, buffers, match=match)
        return [result.status for result in results]

    async def _read(self, pool: Pool, seen: list[ObservedRead]) -> None:
        loop = asyncio.get_running_loop()
        blocks = np.empty((_BLOCKS, _SIZE), np.uint8)
        while True:
            for digest, block in zip(self.digests, blocks, strict=True):
                self._payload.spoil(digest, block)
            began = loop.time()
            results = await pool.read(NAMESPACE, self.digests, [block.data for block in blocks])
            ended = loop.time()
            wrong = sum(
                self._payload.wrong(digest, block)
                for digest, block, result in zip(self.digests, blocks, results, strict=True)
                if result.status.hit
            )
            seen.append(ObservedRead(began, ended, [result.status for result in results], wrong))
            await asyncio.sleep(0.005)
