"""The faults that are injected into the cluster, and when each of them ends.

Rounds come from a shuffled deck. In some rounds one fault happens alone and witnesses measure its
cost (`trials.py`). In the others several faults happen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from kvpool.errors import KvpoolError
from kvpool.types import BATCH_BLOCKS_MAX, Cluster
from kvpool.wire.messages import Read, Reserve, pack_parents
from kvpool_transports.streams import Stream, requests
from tests.chaos.client import ClientNode
from tests.chaos.cluster import Node, ProcessCluster
from tests.chaos.load import BlockSet, block_sets
from tests.chaos.proxy import Proxy
from tests.chaos.report import SETTLE_S, ChaosReport
from tests.chaos.trials import Trials

T = TypeVar("T")

#: How long a process stays stopped, or a link degraded.
_FREEZES_S: Final = (0.05, 0.3, 0.3, 1.0, 1.0, 3.0, 10.0)
#: How long after a kill the next process is started.
_AWAY_S: Final = (0.0, 0.5, 3.0)
#: A server that was stopped for so long must still have all of its blocks (G8).
_LONG_S: Final = 60.0


class ProcessNemesis:
    """Injects faults until its time is over, and ends each of them."""

    def __init__(
        self,
        cluster: ProcessCluster,
        clients: Sequence[ClientNode],
        report: ChaosReport,
        *,
        rng: random.Random,
        storm: int,
    ) -> None:
        self._cluster = cluster
        self._clients = clients
        self._report = report
        self._rng = rng
        self._storm_size = storm
        self._loop = asyncio.get_running_loop()
        self._trials = Trials(cluster, report)
        self._busy: set[str] = set()
        self._lone_faults: list[Callable[[], Awaitable[None]]] = [
            self._kill_an_owner,
            self._freeze_an_owner,
            self._restart_a_master,
            self._impersonate_an_owner,
        ]
        self._faults: list[Callable[[], Awaitable[None]]] = [
            self._kill_node,
            self._kill_client,
            self._freeze_node,
            self._freeze_client,
            self._degrade_link,
            self._cut_link,
            self._storm,
            self._hoard,
        ]

    async def run(self, seconds: float) -> None:
        """Rounds of faults; each begins with a healthy cluster. Raises ServerLost."""
        until = self._loop.time() + seconds
        deck = list(self._lone_faults)  # first, so that a short run has every figure
        if seconds > 4 * _LONG_S:
            deck.append(self._freeze_for_long)
        while (left_s := until - self._loop.time()) > 0:
            if not deck:
                deck = [*self._lone_faults, *8 * [self._several_faults]]
                self._rng.shuffle(deck)
                if left_s > 4 * SETTLE_S:
                    deck.append(self._quiet_round)
            await deck.pop()()
            for client in self._clients:
                client.check()
            await self._cluster.wait_until_healthy()
            await asyncio.sleep(self._rng.uniform(0.2, 1.0))

    # --- rounds -------------------------------------------------------------------------------

    async def _kill_an_owner(self) -> None:
        await self._trials.kill_an_owner(self._rng)

    async def _freeze_an_owner(self) -> None:
        frozen_s = self._rng.choice(_FREEZES_S[1:])
        await self._trials.freeze_an_owner(self._rng, frozen_s)

    async def _impersonate_an_owner(self) -> None:
        await self._trials.impersonate_an_owner(self._rng)

    async def _freeze_for_long(self) -> None:
        await self._trials.freeze_an_owner(self._rng, _LONG_S)

    async def _restart_a_master(self) -> None:
        name = self._rng.choice(sorted(self._cluster.masters))
        await self._trials.restart_a_master(name, self._rng.choice(_AWAY_S))

    async def _quiet_round(self) -> None:
        """No fault for so long that in the second part of it no fault explains a miss."""
        await asyncio.sleep(SETTLE_S + 10)

    async def _several_faults(self) -> None:
        count = self._rng.choice([1, 2, 3, 4])
        faults = [self._rng.choice(self._faults)() for _ in range(count)]
        for outcome in await asyncio.gather(*faults, return_exceptions=True):
            if outcome is not None:
                raise outcome

    # --- faults -------------------------------------------------------------------------------

    def _victim(self, nodes: Sequence[T], name: Callable[[T], str]) -> T | None:
        """A node or link that has no fault at the moment, or None."""
        idle = [node for node in nodes if name(node) not in self._busy]
        return self._rng.choice(idle) if idle else None

    async def _harm_node(
        self, node: Node | None, kind: str, harm: Callable[[Node], Awaitable[None]]
    ) -> None:
        if node is None:
            return
        role = node.name.partition("-")[0]
        self._busy.add(node.name)
        with self._report.incident(self._loop.time, f"{kind} {role}", node.name):
            await harm(node)
        self._busy.discard(node.name)

    async def _kill(self, node: Node) -> None:
        await node.kill()
        await asyncio.sleep(self._rng.choice(_AWAY_S))
        await node.start()

    async def _freeze(self, node: Node) -> None:
        node.freeze()
        await asyncio.sleep(self._rng.choice(_FREEZES_S))
        node.thaw()

    async def _kill_node(self) -> None:
        await self._harm_node(self._victim(self._cluster.nodes, _name), "kill", self._kill)

    async def _kill_client(self) -> None:
        await self._harm_node(self._victim(self._clients, _name), "kill", self._kill)

    async def _freeze_node(self) -> None:
        await self._harm_node(self._victim(self._cluster.nodes, _name), "freeze", self._freeze)

    async def _freeze_client(self) -> None:
        await self._harm_node(self._victim(self._clients, _name), "freeze", self._freeze)

    async def _degrade_link(self) -> None:
        """A link is slow, or forwards small pieces, or forwards nothing."""
        kind = self._rng.choice(["delay", "chop", "stall"])

        def spoil(proxy: Proxy) -> None:
            if kind == "delay":
                proxy.conditions.delay_s = self._rng.choice([0.005, 0.05, 0.3])
            elif kind == "chop":
                proxy.conditions.chop = self._rng.choice([50, 500, 4000])
            else:
                proxy.conditions.stalled = True

        await self._harm_link(kind, spoil)

    async def _cut_link(self) -> None:
        """A link is reset once, or refuses all connections for a while."""
        if self._rng.random() < 0.5:
            await self._harm_link("reset", Proxy.reset)
        else:
            await self._harm_link("cut", Proxy.cut)

    async def _harm_link(self, kind: str, harm: Callable[[Proxy], None]) -> None:
        name = self._victim(sorted(self._cluster.proxies), str)
        if name is None:
            return
        proxy = self._cluster.proxies[name]
        plane = "control" if "master" in name else "data"
        self._busy.add(name)
        with self._report.incident(self._loop.time, f"{kind} {plane} link", name):
            harm(proxy)
            await asyncio.sleep(self._rng.choice(_FREEZES_S))
            proxy.heal()
        self._busy.discard(name)

    async def _storm(self) -> None:
        """Clients write far more than the pool holds."""
        self._report.faults["write storm"] += 1
        for client in self._clients:
            client.storm(int(self._storm_size / len(self._clients) * self._rng.uniform(1, 3)))
        await asyncio.sleep(2)

    async def _hoard(self) -> None:
        """Strangers pin or reserve all that a server gives them, and do nothing more."""
        name = self._rng.choice(sorted(self._cluster.servers))
        writes = self._rng.random() < 0.5
        block_set = self._rng.choice(block_sets(self._report.seed))
        streams: list[Stream] = []
        with self._report.incident(self._loop.time, "hoard", name):
            for number in range(self._rng.choice([1, 4, 16])):
                with contextlib.suppress(KvpoolError, OSError):  # the server may be frozen or dead
                    digests = block_set.digests[:BATCH_BLOCKS_MAX]
                    if writes:
                        digests = [digest[:-1] + bytes([number]) for digest in digests]
                    streams.append(await self._stranger(name, block_set, digests, writes=writes))
            await asyncio.sleep(self._rng.choice(_FREEZES_S))
            for stream in streams:
                stream.abort()

    async def _stranger(
        self, name: str, block_set: BlockSet, digests: Sequence[bytes], *, writes: bool
    ) -> Stream:
        host, _, port = self._cluster.addresses[name].rpartition(":")
        deadline = self._loop.time() + 1
        async with asyncio.timeout_at(deadline):
            _, stream = await self._loop.create_connection(Stream, host, int(port))
        try:
            await requests.handshake(
                stream, cluster=Cluster(), client="stranger", server="", deadline=deadline
            )
            keys = (block_set.namespace.name, 1, len(digests[0]), b"".join(digests), 0)
            sizes = [block_set.payload.size] * len(digests)
            message = (
                Reserve(*keys, pack_parents([b""] * len(digests), len(digests[0])), sizes, 60.0)
                if writes
                else Read(*keys, sizes)
            )
            await stream.send(message, deadline=deadline)
        except BaseException:
            stream.abort()
            raise
        return stream


def _name(node: Node) -> str:
    return node.name
