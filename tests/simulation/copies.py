"""Copies that are made: spread by clients, lost and made again, and what must hold.

A copy comes by a fetch, so the oracles of moves hold for it. Here is what they cannot see: who
fetches from whom in a spread, the number of copies, and which of them goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvpool import admin
from kvpool.client import spread as spread_module
from kvpool.client.spread_plan import (
    FETCHES_MAX,
    LEAVING,
    NO_SUCH_NAME,
    NO_TIME,
    SERVER_LOST,
    Call,
    SpreadPlan,
)
from kvpool.errors import Unavailable
from kvpool.types import Namespace, ReadStatus
from tests.simulation.blocks import ONE, value

if TYPE_CHECKING:
    from kvpool.client.pool import Pool
    from kvpool.server.state.entry import Entry
    from tests.simulation.nodes import ServerNode
    from tests.simulation.oracles import WatchedStore
    from tests.simulation.users import SimClient
    from tests.simulation.world import World

#: So long a chain is read after one of its servers was lost.
_READ_S: Final = 30.0
_GONE: Final = {ReadStatus.EVICTED, ReadStatus.REMOVED, ReadStatus.CORRUPT}


class Copies:
    """What clients do with copies, and what is checked."""

    def __init__(self, world: World) -> None:
        self._world = world
        outer = self

        class WatchedPlan(SpreadPlan):
            """A receiver serves what it has sealed, and two others at a time."""

            def ready(self) -> list[Call]:
                calls = super().ready()
                for call in calls:
                    outer.begins(call)
                if max(self._serving.values(), default=0) > FETCHES_MAX:
                    world.loop.fail(f"G10: more than {FETCHES_MAX} servers fetch from one")
                return calls

        vars(spread_module)["SpreadPlan"] = WatchedPlan
        #: Of the spreads that are under way; several clients may spread at the same time.
        self._chains: list[tuple[Namespace, Sequence[bytes]]] = []

    # --- operations ---------------------------------------------------------------------------

    async def spread(
        self, pool: Pool, rng: random.Random, namespace: Namespace, chain: Sequence[bytes]
    ) -> None:
        """Have some servers fetch a chain from each other."""
        world = self._world
        count = rng.randint(1, len(world.servers))
        to = count if rng.random() < 0.5 else [s.name for s in rng.sample(world.servers, count)]
        began, timeout_s = world.loop.now, rng.choice([0.5, 3.0])
        self._chains.append((namespace, chain))
        try:
            report = await admin(pool).spread(namespace, chain, to=to, timeout=timeout_s)
        finally:
            self._chains.remove((namespace, chain))
        world.note(f"spread {[(one.server, one.blocks, one.problem) for one in report.servers]}")
        for one in report.servers:
            # Such a server is not asked, even for a chain that has no blocks.
            asked = one.problem not in (LEAVING, NO_SUCH_NAME, SERVER_LOST)
            if asked and bool(one.problem) != (one.blocks < report.length):
                world.loop.fail(f"spread: {one} of a chain of {report.length}")
            if one.fetched and not one.problem:
                world.truth.probes.add("a chain was spread")
            node = next(node for node in world.servers if node.name == one.server)
            if world.settled_since(began):
                self._check_has(namespace, chain[: one.blocks], node, began)

    async def play(self, client: SimClient) -> None:
        """When all faults have ended: a spread in which a receiver dies, and lost copies."""
        world, rng = self._world, self._world.rng["copies"]
        await asyncio.sleep(max(0.0, world.settled_from - world.loop.now) + 0.1)
        with contextlib.suppress(Unavailable):  # on a network that loses messages by itself
            await self._lose_a_copy(client, rng)
        with contextlib.suppress(Unavailable):
            await self._lose_a_receiver(client, rng)

    # --- what must hold -----------------------------------------------------------------------

    def begins(self, call: Call) -> None:
        """A receiver is about to fetch a piece from a server that has, or had, each of its blocks.

        Of servers that a master named nothing is known: a fault may have changed its map.
        """
        if call.source in call.piece.holders:
            return
        if not any(self._had(call, namespace, chain) for namespace, chain in self._chains):
            self._world.loop.fail(f"spread: {call.source} is to serve what it never had")

    def _had(self, call: Call, namespace: Namespace, chain: Sequence[bytes]) -> bool:
        """Whether the source of a call, if it is of the spread of this chain, had the blocks."""
        piece = call.piece
        histories = [
            self._world.truth.history(namespace, digest, piece.part)
            for digest in chain[piece.first : piece.end]
        ]
        return all(
            any(life.partition("#")[0] == call.source for life in history.lives)
            for history in histories
        )

    def evicted(self, store: WatchedStore, victim: Entry) -> None:
        """An extra copy goes before any other, also one that became unpinned just now."""
        if not victim.copies or store.extents.policy.is_over(victim):
            return
        for extra in list(store.order_of(victim).extra.listed):
            if store.newcomer is not None and store.extents._is_parent(extra, store.newcomer):
                continue  # no block goes for its own child
            if not extra.copies and extra.is_candidate and store.extents.evictable(extra):
                self._world.loop.fail(f"copies: {victim!r} goes, and {extra!r} is extra")

    def _check_has(
        self, namespace: Namespace, chain: Sequence[bytes], node: ServerNode, began: float
    ) -> None:
        for digest in chain:
            for part in range(namespace.parts):
                history = self._world.truth.history(namespace, digest, part)
                lost_since = history.lost_at >= began and history.ends & _GONE
                if node.store.life not in history.holders and not lost_since:
                    self._world.loop.fail(f"spread: {node.name} has not got {digest.hex()[:12]}")

    # --- inside -------------------------------------------------------------------------------

    async def _write(self, client: SimClient, rng: random.Random, copies: int) -> list[bytes]:
        """A new chain; empty where there is no room for it."""
        chain = self._world.catalog.fresh(rng.randint(1, 4))
        buffers = [value(ONE, digest, 0) for digest in chain]
        statuses = await client.pool.write(ONE, chain, buffers, copies=copies, timeout=5.0)
        whole = all(status.present for status in statuses)
        return chain if whole and len(self._holders(chain)) == copies else []

    def _holders(self, chain: Sequence[bytes]) -> set[str]:
        """The living servers that have all blocks."""
        sets = [self._world.truth.history(ONE, digest, 0).holders for digest in chain]
        return {life.partition("#")[0] for life in set.intersection(*sets)}

    async def _read(self, client: SimClient, chain: Sequence[bytes], seconds: float) -> None:
        world = self._world
        until = world.loop.now + seconds
        while world.loop.now < until:
            into = [bytearray(len(value(ONE, digest, 0))) for digest in chain]
            await client.pool.read(ONE, chain, into, timeout=5.0)
            await asyncio.sleep(1.0)

    async def _lose_a_copy(self, client: SimClient, rng: random.Random) -> None:
        """Of two copies one is lost: the chain that is read has two again, the other one not."""
        world = self._world
        if len(world.servers) < 2:
            return
        read, cold = [await self._write(client, rng, 2) for _ in range(2)]
        if not read or not cold or len(self._holders(read)) < 2:
            return
        lost = rng.choice(sorted(self._holders(read)))
        node = next(node for node in world.servers if node.name == lost)
        if node.server is None:
            return
        node.store.remove(ONE, [*read, *cold])  # as if its process had begun anew
        node.server._context.on_change()
        began = world.loop.now
        refused = self._refused()
        reading = asyncio.ensure_future(self._read(client, read, _READ_S))
        removes, removed = rng.random() < 0.3, False
        if removes:
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            removed = await client._remove_now(ONE, read)  # or it had no time (seed 969155)
        await asyncio.wait([reading])
        world.moves.removed(ONE, read if removed else (), began)
        if removes or not world.settled_since(began):
            return
        histories = [world.truth.history(ONE, digest, 0) for digest in read]
        evicted = any(ReadStatus.EVICTED in history.ends for history in histories)
        if not evicted and self._refused() == refused:
            # Of each block, on any servers: parts of a chain may be fetched by different ones.
            if any(len(history.holders) < 2 for history in histories):
                world.loop.fail("copies: a lost copy of what is read has not come back")
            world.truth.probes.add("a lost copy came back")
        if any(world.truth.history(ONE, one, 0).sealed.get(lost, 0.0) > began for one in cold):
            world.loop.fail("copies: a lost copy of what nobody reads was made again")

    def _refused(self) -> int:
        servers = [node.server for node in self._world.servers if node.server is not None]
        return sum(one._context.counters["fetch_no_room"] for one in servers)

    async def _lose_a_receiver(self, client: SimClient, rng: random.Random) -> None:
        """A receiver dies in the middle of a spread: the others get the chain all the same."""
        world = self._world
        chain = await self._write(client, rng, 1)
        others = sorted({node.name for node in world.servers} - self._holders(chain or [b""]))
        if not chain or len(others) < 3:
            return
        rng.shuffle(others)
        victim = next(node for node in world.servers if node.name == others[0])
        if victim.process.alive and not victim.restarting:
            self._chains.append((ONE, chain))
            spreading = asyncio.ensure_future(
                admin(client.pool).spread(ONE, chain, to=others, timeout=30)
            )
            await asyncio.sleep(rng.choice([0.0, 0.002, 0.01, 0.05]))
            await world.nemesis._kill(victim)
            report = await spreading
            for one in report.servers:
                if one.problem == NO_TIME:
                    world.loop.fail(f"spread: {one.server} waits for a receiver that is lost")
