"""A server comes back empty while the others are full: what they hand over, and what must hold.

It is played when all faults have ended, in some worlds. Until then no server hands over anything,
so that the histories of the other worlds stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.errors import Unavailable
from kvpool.server.moves.state import share_plan
from kvpool.server.moves.state.share_plan import SHARED_FROM, BalancePlanner, ChainOwners, is_full
from kvpool.server.moves.state.wants import BlockName, MovePlanner, MoveView, Wants, name_of
from kvpool.server.state.entry import Entry
from tests.simulation.blocks import ONE
from tests.support.moves import moves_of

if TYPE_CHECKING:
    from tests.simulation.nodes import ServerNode
    from tests.simulation.users import SimClient
    from tests.simulation.world import World

#: Chains that are written to fill all servers, at most.
_CHAINS_MAX = 400
_SHARING_S = 25.0


class Joins:
    """The scenario, and the oracles that watch what each server balances."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sharing = False
        self._moved = 0
        self._rng = world.rng["joins/kills"]
        self._killed: ServerNode | None = None
        self._over = False  # a server that is killed now is not started again

    def watch(self, node: ServerNode) -> None:
        """A server's process has begun."""
        assert node.server is not None
        balance, moves = moves_of(node.server).balance, moves_of(node.server).hand_over
        vars(share_plan)["CHAIN_SHARE"] = 1.0  # these servers have room for few chains
        others_have_room, hand_over = balance.others_have_room, balance._hand_over
        offer, forget = moves._offer, moves._forget
        asked: list[tuple[str, float]] = []

        def woken() -> None:
            if self._sharing:
                others_have_room()

        def watched_hand_over(target: str, chain: Sequence[Entry], view: MoveView) -> Wants:
            self._check_chain(node, balance, target, chain)
            return hand_over(target, chain, view)

        async def watched_offer(
            planner: MovePlanner, target: str, wanted: Sequence[BlockName]
        ) -> list[BlockName]:
            if planner is balance:
                asked[:] = [(target, self._world.loop.now)]
            return await offer(planner, target, wanted)

        async def watched_forget(entries: Sequence[Entry]) -> None:
            names = [name_of(entry) for entry in entries]
            for name in names:
                self._check_forgotten(name, *asked[0])
            self._moved += len(names)
            began = self._world.loop.now
            if node.tiers is not None:
                node.tiers.handed_over.update((n.namespace, n.digest, n.part) for n in names)
            await forget(entries)
            self._stay_away(node.name, names, began)
            may_kill = self._world.plan.disk and self._killed is None and not self._over
            if may_kill and self._rng.random() < 0.3:
                self._killed = node  # now: nothing that it has forgotten is on its disk
                self._world.loop.after_this(node.process.kill)

        vars(balance).update(others_have_room=woken, _hand_over=watched_hand_over)
        vars(moves).update(_offer=watched_offer, _forget=watched_forget)

    async def play(self, client: SimClient) -> None:
        """Fill all servers, have one come back empty, and the others hand over to it."""
        world, rng = self._world, self._world.rng["joins"]
        newcomer = rng.choice(world.servers)
        others = [node for node in world.servers if node is not newcomer]
        chains: list[list[bytes]] = []
        while len(chains) < _CHAINS_MAX and not all(self._is_full(node) for node in others):
            chains.append(world.catalog.fresh(rng.randint(1, 8)))
            await client._write_now(ONE, chains[-1], copies=rng.choice([1, 1, 1, 2]))
        if not chains:  # a server that a stranger has filled
            return
        newcomer.process.kill()
        if newcomer.platter is not None:
            newcomer.platter, newcomer.previous_disk = world._new_disk(newcomer.name), None
        await world.start_server(newcomer)
        for node in others * 4 if world.plan.verify else ():
            world.moves.rot(rng, node)
        self._sharing = True
        end = world.loop.now + _SHARING_S
        while world.loop.now < end and any(map(self._is_full, others)) and not self._killed:
            await asyncio.sleep(rng.choice([0.01, 0.3]))
            await self._disturb(client, rng, chains, rng.choice(others))
        self._sharing = False
        if self._moved:
            world.truth.probes.add("a full server handed over chains")
        await asyncio.sleep(1.0)
        self._over = True  # hand-overs that have begun go on for some seconds (seed 358)
        if self._killed is not None:
            await world.start_server(self._killed)

    # --- inside ----------------------------------------------------------------------------------

    async def _disturb(
        self,
        client: SimClient,
        rng: random.Random,
        chains: Sequence[Sequence[bytes]],
        node: ServerNode,
    ) -> None:
        """What clients and memory do meanwhile."""
        chain = rng.choice(chains)
        kind = rng.random()
        if kind < 0.2:
            await client._write_now(ONE, self._world.catalog.fresh(2), parent=chain[-1])
        elif kind < 0.3:
            with contextlib.suppress(Unavailable):  # of a client with little time
                await client._remove_now(ONE, chain[len(chain) // 2 :])
        elif kind < 0.5 and self._world.plan.verify:
            self._world.moves.rot(rng, node)

    def _is_full(self, node: ServerNode) -> bool:
        return node.server is not None and is_full(node.server.stack)

    def _check_chain(
        self, node: ServerNode, balance: BalancePlanner, target: str, chain: Sequence[Entry]
    ) -> None:
        fail = self._world.loop.fail
        if not self._is_full(node):
            fail(f"join: {node.name} is not full, and hands over a chain")
        for above, entry in itertools.pairwise(chain):
            if entry.parent != above.digest:
                fail("join: a chain is not handed over head first")
        if self._killed is not None or any(entry.children >= SHARED_FROM for entry in chain):
            return  # masters do not know yet that a server is lost; it got children since
        names = [one.name for one in self._world.servers if one.process.alive and one.server]
        if not balance._plan._shares._weights.keys() >= set(names):
            return  # the master that was asked had just come back (seed 643593)
        shares = ChainOwners(dict.fromkeys(names, self._world.plan.capacity))
        # The first block that is here decides, also where blocks before it lie elsewhere.
        owner = shares.owner(chain[0].digest, names) if chain else target
        if owner != target:
            fail(f"join: a chain that belongs to {owner} goes to {target}")

    def _stay_away(self, server: str, names: Sequence[BlockName], began: float) -> None:
        """Blocks that were forgotten must not come back from the disk of this server."""
        for name in names:
            history = self._world.truth.history(name.namespace, name.digest, name.part)
            if history.sealed.get(server, -1.0) < began:
                history.erased.add(server)

    def _check_forgotten(self, name: BlockName, target: str, began: float) -> None:
        """The server that was asked has sealed the block since."""
        history = self._world.truth.history(name.namespace, name.digest, name.part)
        if history.sealed.get(target, -1.0) < began:
            self._world.loop.fail(
                f"G15: {name.digest.hex()[:12]} is forgotten, and {target} has not fetched it"
            )
