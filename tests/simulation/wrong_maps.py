"""Faults of maps and identities: a master's map is changed at random, and an impostor speaks.

A map that was changed must be right again after two heartbeats and the delivery of an inventory
(design: announcements). What an impostor sends is refused, except a registration for an id that is
free (design: server-identity): `WatchedServers.register` judges that.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final, TypeAlias

from kvpool.errors import KvpoolError
from kvpool.master.state.explanations import explain
from kvpool.server.announcer import Identity
from kvpool.testing.invariants import inventory
from kvpool.types import Namespace, ReadStatus, ServerStats
from kvpool.wire import messages as wire
from tests.simulation.control_plane import SimNetwork
from tests.simulation.oracles import WatchedServers

if TYPE_CHECKING:
    from tests.simulation.loop import Process
    from tests.simulation.nodes import MasterNode, ServerNode
    from tests.simulation.world import World

FAULTS_OF_MAPS: Final = ("wrong map", "impostor")
#: Two heartbeats, and an inventory that is delivered over the slowest network without a fault.
HEALED_S: Final = 2 * 1.0 + 1.0
#: An impostor that got an id is silent for so long; then the owner's heartbeat asks for it.
_TAKEN_S: Final = 3.0 + 2 * 1.0
#: A number that no server reaches.
_FAR_AHEAD: Final = 2**62


Parts: TypeAlias = list[tuple[Namespace, int, bytes]]


class MapFaults:
    """Changes maps, and judges whether they heal."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        #: Blocks that a master has listed for a server which did not have them.
        self._made_up: set[tuple[Namespace, bytes]] = set()

    async def wrong_map(self) -> None:
        """Some entries of one server are dropped, added or moved in the map of one master."""
        world, rng = self._world, self._rng
        master, node = rng.choice(world.masters), rng.choice(world.servers)
        if not self._is_quiet(master, node):
            return
        assert master.master is not None
        with world.incident("wrong map", node.name, settle_s=3.0):
            calm = world.only_incident
            lives = master.process, node.process, node.process.frozen_s, master.process.frozen_s
            kind = rng.choice(["drop", "add", "move", "swap", "number"])
            world.wrong_maps += 1
            for _ in range(rng.randint(1, 4)):
                self._change(master, node, kind)
            struck = world.loop.now
            while world.loop.now < struck + HEALED_S:
                await asyncio.sleep(0.05)
                if self._problem(master, node) is None:
                    world.wrong_maps -= 1
                    world.maps_right_from = world.loop.now
                    world.truth.probes.add("a wrong map was mended")
                    self._check_reasons(master)
                    return
            same = (
                master.process,
                node.process,
                node.process.frozen_s,
                master.process.frozen_s,
            ) == lives
            if calm is not None and world.only_incident is calm and same:
                problem = self._problem(master, node)
                world.loop.fail(f"G7: {HEALED_S:g} s after the map was changed: {problem}")

    def _check_reasons(self, master: MasterNode) -> None:
        """A block that no server has lost is not reported as lost with its server (G5)."""
        truth = self._world.truth
        if master.master is None:
            return
        directory = master.master.directory
        if not all(member.alive for member in directory.servers.members(0.0)):
            return
        for namespace, digest in sorted(self._made_up, key=repr):
            histories = [truth.history(namespace, digest, part) for part in range(namespace.parts)]
            lives = set().union(*(history.lives | history.made_up for history in histories))
            (answer,) = explain(directory, namespace, [digest])
            lost = answer.status is ReadStatus.SERVER_LOST
            if lost and all(map(truth.is_living, lives)):
                self._world.loop.fail(
                    f"G5: {digest.hex()[:12]} was made up, and its reason is: {answer.text}"
                )

    def _is_quiet(self, master: MasterNode, node: ServerNode) -> bool:
        """Both run, and the master has all of the server's blocks, so that a change is one."""
        processes = (master.process, node.process)
        runs = all(process.alive and not process.frozen for process in processes)
        starting = master.restarting or node.restarting or node.server is None
        return runs and not starting and self._problem(master, node) is None

    def _problem(self, master: MasterNode, node: ServerNode) -> str | None:
        """How the map differs from the server; changes on their way differ, too, for a moment."""
        if master.master is None or node.server is None:
            return None
        held = node.server.stack.fingerprint
        record = master.master.directory.servers.records.get(node.name)
        if held is None or record is None:
            return "the server is not known"
        listed = record.inventories
        for announcer in node.server._context.announcers:
            sent = announcer._sequence
            if announcer.master.link.address == master.address and listed.sequence > sent:
                return f"it counts {listed.sequence} messages, the server has sent {sent}"
        if record.registration.epoch == node.server.epoch and listed.differs(
            listed.sequence, held.blocks, held.packed()
        ):
            return f"it lists {listed.latest.blocks} blocks, the server holds {held.blocks}"
        return None

    def _change(self, master: MasterNode, node: ServerNode, kind: str) -> None:
        world, rng = self._world, self._rng
        assert master.master is not None
        assert node.server is not None
        directory, stack = master.master.directory, node.server.stack
        here = sorted(
            {(one.index.namespace, one.index.part, one.digest) for one in inventory(stack)},
            key=repr,
        )
        if kind == "number":
            directory.servers.records[node.name].inventories.sequence += rng.randint(1, 1000)
        elif kind == "add" or not here:
            kind = "add"
            self._make_up(master, node, here)
        else:
            namespace, part, digest = rng.choice(here)
            if kind == "move":  # to a tier in which it is not
                entry = stack.peek(namespace, part, digest)
                assert entry is not None
                tier = (entry.index.tier + 1) % 2
                directory.stored(node.name, namespace, part, tier, [digest])
            else:
                unknown = ReadStatus.NEVER_WRITTEN
                directory.removed(node.name, namespace, part, [digest], unknown)
            if kind == "swap":  # the number of blocks stays right
                self._make_up(master, node, here)
        world.note(f"map of {master.name} for {node.name}: {kind}")

    def _make_up(self, master: MasterNode, node: ServerNode, here: Parts) -> None:
        """The master lists one block that some server has had, and this one has not.

        So it drops the reason for which that block has left, if it has; no inventory of this server
        brings it back.
        """
        truth = self._world.truth
        written = {key for key, history in truth.histories.items() if history.lives}
        absent = sorted({(n, part, digest) for n, digest, part in written} - set(here), key=repr)
        if absent:
            namespace, part, digest = self._rng.choice(absent)
            assert master.master is not None
            master.master.directory.stored(node.name, namespace, part, 0, [digest])
            truth.history(namespace, digest, part).made_up.add(node.store.life)
            self._made_up.add((namespace, digest))

    # --- an impostor -----------------------------------------------------------------------------

    async def impostor(self) -> None:
        """A process speaks in the name of a server; of one that is lost, if there is one soon."""
        world, rng = self._world, self._rng
        master, node = rng.choice(world.masters), rng.choice(world.servers)
        for _ in range(20):  # servers are away for seconds
            if (lost := self._lost(master)) and not master.restarting:
                node = rng.choice(lost)
                break
            await asyncio.sleep(0.5)
        else:
            if not self._is_quiet(master, node):
                return
        process = world.process("impostor", "host-0")
        assert node.server is not None
        secret = node.server._secret
        with world.incident("impostor", node.name, settle_s=3.0):
            # With the server's own token, too: a server that is confused makes up numbers.
            own = Identity("", 0, "", (), (), secret).token_for(master.address)
            tokens = [bytes(wire.TOKEN_SIZE), own]
            taken = await process.spawn(self._speak(process, master, node, tokens))
            process.kill()
            if taken:  # until the master counts the impostor as lost, and the owner registers
                await asyncio.sleep(_TAKEN_S)

    def _lost(self, master: MasterNode) -> list[ServerNode]:
        """The servers that this master counts as lost."""
        if master.master is None:
            return []
        members = master.master.directory.servers.members(0.0)
        lost = {member.server for member in members if not member.alive}
        return [one for one in self._world.servers if one.name in lost and one.server is not None]

    async def _speak(
        self, process: Process, master: MasterNode, node: ServerNode, tokens: list[bytes]
    ) -> bool:
        """Returns whether the impostor has the id now, or may have it soon."""
        world = self._world
        link = SimNetwork(world.net).connect(master.address)
        assert node.server is not None
        foreign = (node.name, node.server.epoch, tokens[0])
        own = (node.name, node.server.epoch, tokens[1])
        assert master.master is not None
        number = master.master.directory.servers.records[node.name].inventories.sequence + 1
        gone = [
            wire.BlockChanges(n.name, n.parts, len(digest), digest, 0, 0, ReadStatus.REMOVED)
            for n, digest in world.catalog.every_key()[:4]
        ]
        said: list[wire.Message] = [
            wire.Register(*foreign, "host-0", ["tcp://127.0.0.1:1"], ["dram"], 4096),
            wire.Announce(*foreign, number, gone),
            wire.Inventory(*foreign, number, 0, True, []),
            wire.Heartbeat(*foreign, ServerStats()),
            wire.Inventory(*own, _FAR_AHEAD, 0, True, []),
            wire.Announce(*own, _FAR_AHEAD, gone),
            wire.Leave(*foreign),
        ]
        for message in said:
            try:
                deadline = asyncio.get_running_loop().time() + 0.5
                answer = await link.request(*wire.encode(message), deadline=deadline)
            except KvpoolError:
                if isinstance(message, wire.Register):
                    return True  # it may still arrive; to speak as its owner then proves nothing
                continue
            if isinstance(message, wire.Register) and self._holds(master, foreign):
                return True
            world.truth.probes.add("an impostor was refused")
            if self._is_accepted(message, answer):
                world.loop.fail(f"an impostor's {type(message).__name__} was accepted")
        return False

    @staticmethod
    def _holds(master: MasterNode, identity: tuple[str, int, bytes]) -> bool:
        assert master.master is not None
        directory = master.master.directory
        assert isinstance(directory.servers, WatchedServers)
        return directory.servers.holds(identity[0], identity[2])

    @staticmethod
    def _is_accepted(message: wire.Message, answer: tuple[int, bytes]) -> bool:
        if answer[0] == wire.TYPES[wire.Error]:
            return False
        if isinstance(message, wire.Register):
            return wire.decode_answer(wire.Registered, *answer).accepted
        if isinstance(message, wire.Heartbeat | wire.Leave):
            return wire.decode_answer(wire.HeartbeatReply, *answer).known
        return wire.decode_answer(wire.Announced, *answer).applied
