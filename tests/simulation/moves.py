"""Blocks that move: clients have servers fetch blocks and hand them over, and what must hold then.

A fetch moves what a writer has stored, so the oracles of the stores hold for it as for any write.
Here is what they cannot see: order, room, removals, masters, and what a drain has promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvpool import admin, moves, removals
from kvpool.errors import Unavailable
from kvpool.master.state.explanations import explain
from kvpool.protocols import Channel
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.types import MoveStatus, Namespace, ReadStatus, WriteStatus
from tests.simulation.blocks import ONE
from tests.support.moves import moves_of

if TYPE_CHECKING:
    from kvpool.client.pool import Pool
    from kvpool.server.moves.state.wants import BlockName, MovePlanner
    from tests.simulation.nodes import ServerNode
    from tests.simulation.users import SimClient
    from tests.simulation.world import World

#: A head for which there was no room, or no time, keeps its tail away.
_HEAD_IS_MISSING: Final = (MoveStatus.NOT_YET, MoveStatus.NO_ROOM)
#: A drain has so long.
_DRAIN_S: Final = (1.0, 4.0, 8.0)
#: What an operation that was cancelled may take to call off its drain.
_CLEANUP_S: Final = 0.5
#: Masters know of a block that a server has had for so long, and of a server that stays again.
_KNOWN_S: Final = 12.0
#: The last bytes of a write that had no answer arrive so late at most.
_ON_ITS_WAY_S: Final = 5.0


class WatchedBudget(FetchBudget):
    """No transfer begins before those that came before it are paid for."""

    fail: Callable[[str], None]

    def begin(self, size: int, now: float) -> float:
        if self.wait_s(now) > 0:
            self.fail(f"G10: a fetch begins {self.wait_s(now):.6f} s before its budget allows it")
        return super().begin(size, now)


class Moves:
    """What clients do with `Fetch` and `Drain`, and what is checked."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._writing: Counter[bytes] = Counter()
        self._written_at: dict[bytes, float] = {}
        #: Removed on every server, with no write since: nothing may bring them back.
        self._gone: set[tuple[Namespace, bytes]] = set()
        #: When each server that has drained did so last.
        self._drained_at: dict[str, float] = {}
        #: When the last drain of each life of a server began.
        self._drains_began: dict[str, float] = {}

    # --- operations ---------------------------------------------------------------------------

    async def fetch(
        self,
        pool: Pool,
        rng: random.Random,
        namespace: Namespace,
        chain: Sequence[bytes],
        between: Sequence[ServerNode] = (),
    ) -> None:
        """Have one server fetch a chain from another one."""
        world = self._world
        source, target = between or (rng.choice(world.servers), rng.choice(world.servers))
        within_s = rng.choice([0.1, 0.5, 3.0])
        began, deadline = world.loop.now, asyncio.get_running_loop().time() + within_s
        life = self._life(target)

        async def ask(channel: Channel) -> list[MoveStatus]:
            part = rng.randrange(namespace.parts)
            asked = namespace, part, chain, source.name
            statuses = await moves.fetch(channel, *asked, deadline=deadline)
            if world.settled_since(began):
                self._check_masters(namespace, chain, part, statuses, target, life)
            return statuses

        statuses = await pool._servers.call(target.name, ask, deadline)
        world.note(f"fetch {source.name} > {target.name} {[int(status) for status in statuses]}")
        if MoveStatus.DONE in statuses:
            world.truth.probes.add("a server fetched blocks from another one")
        for head, status in itertools.pairwise(statuses):
            if head in _HEAD_IS_MISSING and status is MoveStatus.DONE:
                world.loop.fail("chains: a tail was fetched without its head")

    async def leave(self, pool: Pool, rng: random.Random, node: ServerNode | None = None) -> None:
        """Drain one server; when it has handed over its blocks, look whether that is true."""
        world = self._world
        node = node or rng.choice(world.servers)
        now, life = world.loop.now, self._life(node)
        # One that runs gets a new deadline, and knows what it did before that (seed 940257).
        runs = (
            node.server is not None
            and moves_of(node.server).drainer.report().state is MoveStatus.IN_PROGRESS
        )
        began = self._drains_began[life] = self._drains_began.get(life, now) if runs else now
        await admin(pool).drain(node.name, within_s=rng.choice(_DRAIN_S))
        state: MoveStatus | None = MoveStatus.IN_PROGRESS
        try:
            while state is MoveStatus.IN_PROGRESS and world.loop.now < now + 9.0:
                await asyncio.sleep(0.2)
                report = await admin(pool).drain_report(node.name)
                state = report.state
            if state is MoveStatus.NOT_YET and world.settled_since(began):
                self._check_left(node.name, life, report.left_blocks, began)
            if state is MoveStatus.DONE and world.settled_since(began):
                world.truth.probes.add("a server handed over all of its blocks")
                self._check_handed_over(life, began)
        finally:
            if rng.random() < 0.9:  # else the next one, or the end of the faults
                # After a cancellation it is one more call, and must end in time (seed 997724).
                task = asyncio.current_task()
                is_cancelled = task is not None and task.cancelling() > 0
                await admin(pool).cancel_drain(
                    node.name, timeout=_CLEANUP_S if is_cancelled else None
                )

    async def play(self, client: SimClient) -> None:
        """When all faults have ended: fetches beside removals, and servers that leave together.

        Then every check is strict.
        """
        world, rng = self._world, self._world.rng["moves"]
        await asyncio.sleep(max(0.0, world.settled_from - world.loop.now) + 0.1)
        with contextlib.suppress(Unavailable):  # on a network that loses messages by itself
            await self._play(client, rng)

    async def _play(self, client: SimClient, rng: random.Random) -> None:
        world = self._world
        for _ in range(4):
            chain = world.catalog.fresh(rng.randint(2, 8))
            await client._write_now(ONE, chain, copies=rng.choice([1, 2, 2]))
            between = rng.sample(world.servers, 2)
            if world.plan.verify and rng.random() < 0.3:
                self.rot(rng, between[0])
            calls = [self._fetch_now(client, rng, chain, between) for _ in range(2)]
            if rng.random() < 0.5:
                await asyncio.gather(*calls, self._remove_soon(client, rng, chain[1:]))
            else:
                await asyncio.gather(*calls)
                await self._remove_one_by_one(client, rng, chain[1:], between)
        count = rng.choice([1, len(world.servers) - 1])
        leaving = rng.sample(world.servers, count)
        await asyncio.gather(*(self.leave(client.pool, rng, node) for node in leaving))

    async def _fetch_now(
        self,
        client: SimClient,
        rng: random.Random,
        chain: Sequence[bytes],
        between: Sequence[ServerNode],
    ) -> None:
        with contextlib.suppress(Unavailable):  # its time was too short
            await self.fetch(client.pool, rng, ONE, chain, between)

    async def _remove_soon(
        self, client: SimClient, rng: random.Random, chain: Sequence[bytes]
    ) -> None:
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.003, 0.01, 0.1]))
        await client._remove_now(ONE, chain)

    async def _remove_one_by_one(
        self,
        client: SimClient,
        rng: random.Random,
        chain: Sequence[bytes],
        between: Sequence[ServerNode],
    ) -> None:
        """A removal that reaches the source last, and a fetch that begins in between."""
        world, began = self._world, self._world.loop.now
        source, target = between
        others = [node for node in world.servers if node not in between]
        fetching = None
        for node in (target, *others, source):
            deadline = asyncio.get_running_loop().time() + 3.0

            async def ask(channel: Channel, until: float = deadline) -> list[bool]:
                return await removals.remove(channel, ONE, chain, deadline=until)

            await client.pool._servers.call(node.name, ask, deadline)
            if fetching is None:
                fetching = asyncio.ensure_future(self._fetch_now(client, rng, chain, between))
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.1, 1.0]))
        self.removed(ONE, chain, began)
        if fetching is not None:
            await fetching
        self.removed(ONE, chain, began)

    def rot(self, rng: random.Random, node: ServerNode) -> None:
        """Flip a bit of a block in a server's memory."""
        store = node.store
        if entries := store.index.inventory():
            entry = rng.choice(entries)
            key = entry.index.namespace, entry.digest, entry.index.part
            self._world.truth.history(*key).corrupted += 1
            store.corrupted.add((entry.offset, entry.generation))
            node.memory[entry.offset + rng.randrange(entry.size)] ^= 1 << rng.randrange(8)

    async def end(self) -> None:
        """Every server stays."""
        for node in self._world.servers:
            if node.server is not None and node.process.alive:
                await node.process.spawn(moves_of(node.server).drainer.cancel())

    # --- what must hold -----------------------------------------------------------------------

    def write_begins(self, namespace: Namespace, chain: Sequence[bytes]) -> None:
        self._writing.update(chain)
        self._gone.difference_update([(namespace, digest) for digest in chain])

    def write_ended(self, chain: Sequence[bytes], statuses: Sequence[WriteStatus] = ()) -> None:
        """`statuses` of the blocks, if the call returned. What had no answer is sealed later if its
        bytes were on their way (seed 1033)."""
        now = self._world.loop.now
        self._writing.subtract(chain)
        for digest, status in itertools.zip_longest(chain, statuses):
            answered = status not in (None, WriteStatus.DEADLINE, WriteStatus.SERVER_LOST)
            self._written_at[digest] = now if answered else now + _ON_ITS_WAY_S

    def removed(self, namespace: Namespace, chain: Sequence[bytes], began: float) -> None:
        """A removal that began at `began` has returned: no server may have these blocks, unless
        somebody wrote them meanwhile, or a fault kept a server from receiving it."""
        if not self._world.settled_since(began):
            return
        for digest in chain:
            if self._writing[digest] or self._written_at.get(digest, -1.0) >= began:
                continue
            self._gone.add((namespace, digest))
            for part in range(namespace.parts):
                if holders := self._world.truth.history(namespace, digest, part).holders:
                    self._world.loop.fail(
                        f"G5: {digest.hex()[:12]} was removed, and is on {sorted(holders)}"
                    )

    def sealed(self, namespace: Namespace, digest: bytes) -> None:
        """A fetched block becomes visible. A disk may have it again, where a power cut has undone
        what was erased: `tiers` judges that."""
        parts = [self._world.truth.history(namespace, digest, n) for n in range(namespace.parts)]
        if (namespace, digest) in self._gone and not any(part.holders for part in parts):
            self._world.loop.fail(f"G5: {digest.hex()[:12]} was removed, and a fetch brought it")

    def _check_masters(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        part: int,
        statuses: Sequence[MoveStatus],
        target: ServerNode,
        life: str,
    ) -> None:
        """At the moment of the answer each master lists what the target has fetched."""
        world = self._world
        for digest, status in zip(chain, statuses, strict=True):
            history = world.truth.history(namespace, digest, part)
            if status is not MoveStatus.DONE or life not in history.holders:
                continue
            if history.sealed.get(target.name) != history.changed_at:
                continue  # it has left since, and came back
            for master in world.masters:
                assert master.master is not None
                (found,) = explain(master.master.directory, namespace, [digest])
                if not any(one.server == target.name for one in found.replicas):
                    world.loop.fail(f"G5: {master.name} does not list a block that is fetched")

    def _check_handed_over(self, life: str, began: float) -> None:
        """Each block of a server that is done is on one that does not leave.

        Unless it was evicted or removed there since, as any block.
        """
        world = self._world
        leaving = [node for node in world.servers if node.server and node.server._context.draining]
        drains = [moves_of(node.server).drainer.report().state for node in leaving if node.server]
        if any(state is not MoveStatus.DONE for state in drains):
            return  # of several, the last one checks
        lives = {self._life(node) for node in leaving}
        for key in world.truth.held_by(life):
            history = world.truth.history(*key)
            lost_since = history.lost_at >= began and history.ends & {
                ReadStatus.EVICTED,
                ReadStatus.REMOVED,
                ReadStatus.CORRUPT,
            }
            if not history.holders - lives and not lost_since and not history.corrupted:
                world.loop.fail(f"G15: the drain is done, but only {life} has {key[1].hex()[:12]}")

    def _check_left(self, server: str, life: str, left: int, began: float) -> None:
        """A drain that is not complete counts what only this server has, looked at or not."""
        histories = self._world.truth.histories
        alone = [
            key
            for key in self._world.truth.held_by(life)
            if histories[key].holders == {life}
            and histories[key].sealed[server] < began
            and histories[key].lost_at < began  # else another one had it, and evicted it since
        ]
        if left < len(alone):
            self._world.loop.fail(f"G15: {left} blocks are left, but only {life} has {len(alone)}")
        self._world.truth.probes.add("a server had no time to hand over all of its blocks")

    def check_alone(self, node: ServerNode, names: Iterable[BlockName]) -> None:
        """Blocks are to be moved from here: no other server that stays has had them for a while."""
        world = self._world
        if not world.settled_since(world.loop.now - _KNOWN_S):
            return
        leaving = self.leaving()
        for name in names:
            for other in world.servers:
                if other is node or other.server is None or other.name in leaving:
                    continue
                # Of a block that lacks a part everywhere masters do not say where its parts are:
                # no reader can use it (seed 65).
                parts = range(name.namespace.parts)
                if self._has_long(other, name, name.part) and all(
                    any(self._has_long(one, name, part) for one in world.servers) for part in parts
                ):
                    world.loop.fail(
                        f"moves: {name.digest.hex()[:12]} is moved, and {other.name} has it"
                    )

    def leaving(self) -> set[str]:
        """Servers that drain, or did so shortly: others plan with what they heard then (seeds
        1996, 644116)."""
        now = self._world.loop.now
        for node in self._world.servers:
            if node.server is not None and node.server._context.draining:
                self._drained_at[node.name] = now
        return {name for name, at in self._drained_at.items() if now - at < _KNOWN_S}

    def _has_long(self, node: ServerNode, name: BlockName, part: int) -> bool:
        """Masters know that this server has this part of a block."""
        history = self._world.truth.history(name.namespace, name.digest, part)
        now = self._world.loop.now
        since = history.sealed.get(node.name, now)
        return self._life(node) in history.holders and since < now - _KNOWN_S

    def watch(self, node: ServerNode) -> None:
        """A server's process has begun."""
        assert node.server is not None
        moves = moves_of(node.server)
        offer, cancel = moves.hand_over._offer, moves.drainer.cancel
        masters, view = moves.hand_over._peers.masters, moves.hand_over.view
        ask = masters.holders
        listed: dict[object, set[BlockName]] = {}  # by who asks: what others have, as masters say

        async def watched_cancel() -> None:
            await cancel()
            self._drained_at[node.name] = self._world.loop.now

        async def watched_holders(*question: Any) -> dict[BlockName, set[str]]:
            holders = await ask(*question)
            elsewhere = {name for name, held in holders.items() if held & view.others}
            listed[asyncio.current_task()] = elsewhere
            return holders

        async def watched_offer(
            planner: MovePlanner, target: str, wanted: Sequence[BlockName]
        ) -> list[BlockName]:
            if planner is not moves.repair:
                self.check_alone(node, wanted)
                for name in listed[asyncio.current_task()].intersection(wanted):
                    self._world.loop.fail(f"moves: {name.digest.hex()[:12]} is elsewhere, too")
            return await offer(planner, target, wanted)

        vars(masters)["holders"] = watched_holders
        vars(moves.hand_over)["_offer"] = watched_offer
        vars(moves.drainer)["cancel"] = watched_cancel
        budget = WatchedBudget(self._world.plan.fetch_rate)
        budget.fail = self._world.loop.fail
        moves.fetcher.budget = budget

    def _life(self, node: ServerNode) -> str:
        return node.store.life if node.server is not None else ""
