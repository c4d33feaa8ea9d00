"""One fault alone, and its cost: the figures of the report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from kvpool import admin
from kvpool.client.pool import Pool
from kvpool.types import ReadStatus
from tests.chaos.cluster import Node, ProcessCluster
from tests.chaos.impostor import impersonate
from tests.chaos.load import block_sets
from tests.chaos.report import ChaosReport, Restart
from tests.chaos.witness import NAMESPACE, ObservedRead, Witness

#: A restarted master must know all blocks after two heartbeats. It is observed for longer.
_WATCHED_S: Final = 10.0
#: Results that break no promise: a full pool may evict a block of the witness.
_FINE: Final = (ReadStatus.HIT, ReadStatus.EVICTED)

Reads = list[list[ObservedRead]]


class Trials:
    """Injects one fault into a healthy cluster and records its cost."""

    def __init__(self, cluster: ProcessCluster, report: ChaosReport) -> None:
        self._cluster = cluster
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._block_sets = block_sets(report.seed)
        self._witnesses = 0

    async def kill_an_owner(self, rng: random.Random) -> None:
        """G6: kill -9 of one of two owners fails no read and costs one second at most."""

        async def observe(witness: Witness, struck: float) -> Reads:
            reads = await witness.reads_since(struck)
            first = [next(seen for seen in one if seen.began >= struck) for one in reads]
            self._report.failover_s.append(max(seen.ended for seen in first) - struck)
            return reads

        await self._measure_fault(rng, "kill server", Node.kill, observe, Node.start)

    async def freeze_an_owner(self, rng: random.Random, frozen_s: float) -> None:
        """G6: while one of two owners is frozen, a read asks the other one after `hedge_s`.

        G8: after the thaw the owner still has its blocks.
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

        await self._measure_fault(rng, "freeze server", freeze, observe, thaw)

    async def _measure_fault(
        self,
        rng: random.Random,
        kind: str,
        harm: Callable[[Node], Awaitable[None]],
        observe: Callable[[Witness, float], Awaitable[Reads]],
        mend: Callable[[Node], Awaitable[None]],
    ) -> None:
        """Inject a fault into one of two owners of blocks that are being read; check the reads."""
        self._witnesses += 1
        async with Witness(self._cluster, self._report.seed, self._witnesses) as witness:
            owners = sorted(witness.owners)
            if not owners:
                return  # one of the servers had no space, so nothing can be measured
            rng.shuffle(owners)
            victim, other = owners
            await asyncio.sleep(0.2)
            node = self._cluster.servers[victim]
            with self._report.incident(self._loop.time, kind, victim):
                struck = self._loop.time()
                await harm(node)
                try:
                    reads = await observe(witness, struck)
                except TimeoutError:
                    self._report.broken.append(f"G6: {kind}: reads of its blocks do not end")
                    reads = []
                await self._judge(kind, witness, other, reads)
                await mend(node)
            if kind == "freeze server":
                await self._cluster.wait_until_healthy()
                statuses = await witness.held_by(victim)
                if any(status not in _FINE for status in statuses):
                    found = ", ".join(sorted({status.label for status in statuses}))
                    self._report.broken.append(f"G8: blocks of a thawed server are {found}")

    async def _judge(self, kind: str, witness: Witness, other: str, reads: Reads) -> None:
        report = self._report
        for seen in [seen for one in reads for seen in one]:
            report.operations["read by a witness"] += 1
            report.wrong_bytes += seen.wrong_bytes
            missed = {status.label for status in seen.statuses if status not in _FINE}
            # The other owner may have evicted its copy; only that server knows.
            if missed and all(status.hit for status in await witness.held_by(other)):
                found = ", ".join(sorted(missed))
                report.broken.append(f"G6: {kind}: the other owner was not read: {found}")
                return

    async def impersonate_an_owner(self, rng: random.Random) -> None:
        """G11: a process that speaks in the name of an owner is refused; reads do not notice."""
        self._witnesses += 1
        async with Witness(self._cluster, self._report.seed, self._witnesses) as witness:
            owners = sorted(witness.owners)
            if not owners:
                return  # one of the servers had no space, so nothing can be measured
            victim = rng.choice(owners)
            accepted: list[str] = []
            with self._report.incident(self._loop.time, "impostor", victim):
                struck = self._loop.time()
                for address in self._cluster.masters_of("clients"):
                    digests = witness.digests
                    accepted += await impersonate(address, victim, NAMESPACE, digests)
                await asyncio.sleep(1.5)  # a heartbeat: whatever it has changed has its effect
                await self._judge("impostor", witness, victim, await witness.reads_since(struck))
            if accepted:
                found = ", ".join(accepted)
                self._report.broken.append(f"G11: a master accepted an impostor's {found}")

    async def restart_a_master(self, name: str, away_s: float) -> None:
        """G7: a killed master knows every living block again two heartbeats after its start."""
        (other,) = [master for master in self._cluster.masters if master != name]
        node = self._cluster.masters[name]
        with self._report.incident(self._loop.time, "kill master", name):
            await node.kill()
            await asyncio.sleep(away_s)
            await node.start()
            began = self._loop.time()
            async with AsyncExitStack() as stack:
                back = await stack.enter_async_context(self._cluster.client(master=name))
                steady = await stack.enter_async_context(self._cluster.client(master=other))
                share = 0.0
                living = await self._known_blocks(steady)
                while share < 1.0 and self._loop.time() < began + _WATCHED_S:
                    before = living
                    found, living = await asyncio.gather(
                        self._known_blocks(back), self._known_blocks(steady)
                    )
                    # Announcements reach the masters one after the other, so only blocks that the
                    # other master knew before and after count.
                    settled = before & living
                    share = len(settled & found) / len(settled) if settled else 1.0
                self._report.restarts.append(Restart(share, self._loop.time() - began))

    async def _known_blocks(self, pool: Pool) -> set[tuple[str, bytes]]:
        """The blocks of the load that a master lists."""
        known = set()
        for block_set in self._block_sets:
            for answer in await admin(pool).explain(block_set.namespace, block_set.digests):
                if answer.status.hit:
                    known.add((block_set.namespace.name, answer.key.digest))
        return known
