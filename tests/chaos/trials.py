"""One fault alone, and what it costs: the figures of the report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from kvpool.client.pool import Pool
from kvpool.types import ReadStatus
from tests.chaos.cluster import Cluster, Node
from tests.chaos.load import shelves
from tests.chaos.report import Report, Restart
from tests.chaos.witness import Seen, Witness

#: A restarted master has to know everything after two heartbeats. It is watched for longer.
_WATCHED_S: Final = 10.0
#: What a witness may be told of a block without a promise being broken: the pool is full.
_FINE: Final = (ReadStatus.HIT, ReadStatus.EVICTED)

Reads = list[list[Seen]]


class Trials:
    """Does one thing to a cluster in which nothing else is wrong, and writes down what it cost."""

    def __init__(self, cluster: Cluster, report: Report) -> None:
        self._cluster = cluster
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._shelves = shelves(report.seed)
        self._witnesses = 0

    async def kill_an_owner(self, rng: random.Random) -> None:
        """G6: kill -9 of one owner of two costs no read, and one second at most."""

        async def observe(witness: Witness, struck: float) -> Reads:
            reads = await witness.reads_since(struck)
            first = [next(seen for seen in one if seen.began >= struck) for one in reads]
            self._report.failover_s.append(max(seen.ended for seen in first) - struck)
            return reads

        await self._strike(rng, "kill server", Node.kill, observe, Node.start)

    async def freeze_an_owner(self, rng: random.Random, frozen_s: float) -> None:
        """G6: with one owner of two frozen, the other one is asked after the hedge.

        And when it thaws, it has what it had (G8).
        """

        async def freeze(node: Node) -> None:
            node.freeze()

        async def thaw(node: Node) -> None:
            node.thaw()

        async def observe(witness: Witness, struck: float) -> Reads:
            await asyncio.sleep(frozen_s)
            reads = await witness.reads_since(struck)
            durations = [seen.ended - seen.began for one in reads for seen in one]
            self._report.frozen_read_s.append(max(durations))
            return reads

        await self._strike(rng, "freeze server", freeze, observe, thaw)

    async def _strike(
        self,
        rng: random.Random,
        kind: str,
        harm: Callable[[Node], Awaitable[None]],
        observe: Callable[[Witness, float], Awaitable[Reads]],
        mend: Callable[[Node], Awaitable[None]],
    ) -> None:
        """Harm one of two owners of blocks that are being read, and see what the readers see."""
        self._witnesses += 1
        async with Witness(self._cluster, self._report.seed, self._witnesses) as witness:
            owners = sorted(witness.owners)
            if not owners:
                return  # one of the servers had no room: nothing to be seen
            rng.shuffle(owners)
            victim, other = owners
            await asyncio.sleep(0.2)
            node = self._cluster.servers[victim]
            with self._report.trouble(self._loop.time, kind, victim):
                struck = self._loop.time()
                await harm(node)
                try:
                    reads = await observe(witness, struck)
                except TimeoutError:
                    self._report.broken.append(f"G6: {kind}: no read of its blocks ends")
                    reads = []
                await self._judge(kind, witness, other, reads)
                await mend(node)
            if kind == "freeze server":
                await self._cluster.well()
                statuses = await witness.held_by(victim)
                if any(status not in _FINE for status in statuses):
                    told = ", ".join(sorted({status.label for status in statuses}))
                    self._report.broken.append(f"G8: what was on a frozen server is {told}")

    async def _judge(self, kind: str, witness: Witness, other: str, reads: Reads) -> None:
        report = self._report
        for seen in [seen for one in reads for seen in one]:
            report.operations["read by a witness"] += 1
            report.wrong_bytes += seen.wrong_bytes
            missed = {status.label for status in seen.statuses if status not in _FINE}
            # The other owner may have thrown its copy out: only it can say.
            if missed and all(status.hit for status in await witness.held_by(other)):
                told = ", ".join(sorted(missed))
                report.broken.append(f"G6: {kind}: the other owner was not read: {told}")
                return

    async def restart_a_master(self, name: str, away_s: float) -> None:
        """G7: a master that is killed knows every living block again after two heartbeats."""
        (other,) = [master for master in self._cluster.masters if master != name]
        node = self._cluster.masters[name]
        with self._report.trouble(self._loop.time, "kill master", name):
            await node.kill()
            await asyncio.sleep(away_s)
            await node.start()
            began = self._loop.time()
            async with AsyncExitStack() as stack:
                back = await stack.enter_async_context(self._cluster.client(master=name))
                told = await stack.enter_async_context(self._cluster.client(master=other))
                share = 0.0
                living = await self._known(told)
                while share < 1.0 and self._loop.time() < began + _WATCHED_S:
                    before = living
                    found, living = await asyncio.gather(self._known(back), self._known(told))
                    # News reaches masters one after the other: what is a moment old is not counted.
                    settled = before & living
                    share = len(settled & found) / len(settled) if settled else 1.0
                self._report.restarts.append(Restart(share, self._loop.time() - began))

    async def _known(self, pool: Pool) -> set[tuple[str, bytes]]:
        """The blocks of the load that a master knows to be there."""
        known = set()
        for shelf in self._shelves:
            for answer in await pool.explain(shelf.namespace, shelf.digests):
                if answer.status.hit:
                    known.add((shelf.namespace.name, answer.key.digest))
        return known
