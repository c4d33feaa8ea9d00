"""The faults of a history, and when each of them ends.

Each seed draws which kinds of fault exist in its world (swarm testing). Many worlds that lack some
kinds each reach more rare states than one world in which all kinds happen.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulation.platter import DISK_FAULTS, DiskFault
from tests.simulation.reports import REPORTS, meet
from tests.simulation.stranger import Stranger
from tests.simulation.task_faults import TASK_FAULT, strike
from tests.simulation.wrong_maps import MapFaults

if TYPE_CHECKING:
    from tests.simulation.loop import Process
    from tests.simulation.nodes import ServerNode
    from tests.simulation.world import World

#: Kinds of fault; `run(without=...)` and the reducer name them.
FAULTS: Final = (
    "kill server",
    "kill master",
    "kill client",
    "freeze server",
    "freeze master",
    "freeze client",
    "partition",
    "reset",
    "loss",
    "double",
    "tail",
    "chop",
    "narrow",
    "rot",
    "cancel",
    "storm",
    "hurry",
)
#: A tier whose disk takes writes again has taken them after the time that it did not, and this.
_WRITABLE_AFTER_S: Final = 5.0
#: Further kinds in worlds whose servers have disks.
FAULTS_OF_DISKS: Final = (*(fault.name for fault in DISK_FAULTS), "power cut")


#: A further kind, in worlds where strangers come.
HOARD: Final = "hoard"


class Nemesis:
    """Injects faults for a while, then ends all of them."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._net = world.net
        self._scheduled: list[asyncio.Task[None]] = []
        self._over = False
        faults = world.plan.faults
        self._kinds = [
            action
            for name, action in (
                ("kill server", self._kill_server),
                ("kill master", self._kill_master),
                ("kill client", self._kill_client),
                ("freeze server", self._freeze_server),
                ("freeze master", self._freeze_master),
                ("freeze client", self._freeze_client),
                ("partition", self._partition),
                ("reset", self._reset),
                ("loss", self._loss),
                ("double", self._double),
                ("tail", self._tail),
                ("rot", self._rot),
            )
            if name in faults
        ]
        if world.plan.disk:
            disk_faults = [fault for fault in DISK_FAULTS if fault.name in faults]
            self._kinds += [partial(self._harm_disk, fault) for fault in disk_faults]
            self._kinds += [self._cut_power] * ("power cut" in faults)
        if world.shelf is not None:
            self._kinds += [world.shelf.fail] * ("store fails" in faults)
            self._kinds += [world.shelf.forget] * ("store forgets" in faults)
        self._kinds += [self._hoard] * (HOARD in faults)
        self._kinds += [partial(strike, world)] * (TASK_FAULT in faults)
        self._kinds += [partial(meet, world)] * (REPORTS in faults)
        maps = MapFaults(world, world.rng["maps"])
        self._kinds += [maps.wrong_map] * ("wrong map" in faults)
        self._kinds += [maps.impostor] * ("impostor" in faults)
        if "chop" in faults:
            self._net.conditions.piece_max = rng.choice([61, 251, 1021])
        self._net.conditions.delay_s = rng.choice([0.0003, 0.0005, 0.01])
        if "narrow" in faults:
            self._net.conditions.window = rng.choice([200, 1000, 5000])

    async def run(self, seconds: float) -> None:
        """Inject faults, one or several at once, with pauses in between."""
        world = self._world
        until = world.loop.now + seconds
        running: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        while world.loop.now < until and self._kinds:
            if self._rng.random() < 0.12:
                await asyncio.sleep(self._rng.uniform(11, 18))  # long enough for strict judging
            await asyncio.sleep(self._rng.expovariate(1 / 1.5))
            action = self._rng.choice(self._kinds)
            if len(running) < 3 and (not running or self._rng.random() < 0.5):
                task = loop.create_task(action())
                running.add(task)
                task.add_done_callback(running.discard)
        for task in tuple(running):
            await task

    def schedule_fault(self, kind: str, targets: Sequence[str]) -> None:
        """Freeze or kill one of these servers within 16 ms, while it handles the last calls."""
        if self._over:
            return
        node = self._rng.choice([n for n in self._world.servers if n.name in targets])
        delay_s = self._world.rng["strikes"].choice([0.0, 0.001, 0.004, 0.016])

        async def schedule_fault() -> None:
            await asyncio.sleep(delay_s)  # the last call may be halfway to the disk
            await (self._kill(node) if kind == "kill server" else self._freeze(node.process, kind))

        task = self._world.loop.create_task(schedule_fault(), context=contextvars.Context())
        self._scheduled.append(task)

    async def heal(self) -> None:
        """End all faults."""
        world = self._world
        self._over = True
        while self._scheduled:
            await self._scheduled.pop()
        self._net.heal()
        for node in world.servers:
            if node.platter is not None:
                node.platter.heal()
        self._net.conditions.loss = self._net.conditions.double = self._net.conditions.tail = 0.0
        world.note("healed")

    # --- kinds ------------------------------------------------------------------------------

    async def _kill_server(self) -> None:
        node = self._rng.choice(self._world.servers)
        await self._wait_for_disk_write(node)
        await self._kill(node)

    async def _cut_power(self) -> None:
        """Cut the power of a server's machine. Clients and masters run on other machines."""
        node = self._rng.choice(self._world.servers)
        await self._wait_for_disk_write(node)
        await self._kill(node, power_cut=True)

    async def _kill(self, node: ServerNode, *, power_cut: bool = False) -> None:
        if node.process.alive and not node.restarting:
            node.restarting = True  # no other fault may kill the next process before it runs
            with self._world.incident("kill server", node.name):
                if node.is_writing:
                    self._world.truth.probes.add("a server was killed during a write to its disk")
                node.process.kill()
                if power_cut and node.platter is not None:
                    self._world.report.faults["power cut"] += 1
                    self._world.truth.probes.add("the power was cut")
                    node.platter.power_cut()
                await asyncio.sleep(self._rng.choice([0.05, 1, 5, 12]))
                await self._world.start_server(node)
            node.restarting = False

    async def _kill_master(self) -> None:
        node = self._rng.choice(self._world.masters)
        if node.process.alive and not node.restarting:
            node.restarting = True
            with self._world.incident("kill master", node.name):
                node.process.kill()
                await asyncio.sleep(self._rng.choice([0.05, 1, 5, 12]))
                await self._world.start_master(node)
            node.restarting = False

    async def _kill_client(self) -> None:
        client = self._rng.choice(self._world.clients)
        await self._wait_for_copy(client.process)
        if client.process.alive and not client.restarting:
            client.restarting = True
            with self._world.incident("kill client", settle_s=1.0):
                client.process.kill()
                await asyncio.sleep(self._rng.uniform(0, 3))
                await client.start()
                client.resume()
            client.restarting = False

    async def _freeze(self, process: Process, name: str) -> None:
        world = self._world
        if process.frozen or not process.alive:
            return
        with world.incident(name, process.name):
            process.freeze()
            await asyncio.sleep(self._rng.choice([0.05, 0.3, 2, 14, 40]))
            process.thaw()

    async def _freeze_server(self) -> None:
        node = self._rng.choice(self._world.servers)
        await self._wait_for_disk_write(node)
        await self._freeze(node.process, "freeze server")

    async def _freeze_master(self) -> None:
        await self._freeze(self._rng.choice(self._world.masters).process, "freeze master")

    async def _freeze_client(self) -> None:
        client = self._rng.choice(self._world.clients)
        await self._wait_for_copy(client.process)
        await self._freeze(client.process, "freeze client")

    async def _wait_for_copy(self, process: Process) -> None:
        """Often, wait for the worst moment: threads of the process are about to write."""
        if self._rng.random() < 0.8:
            for _ in range(1000):
                if process.writing:
                    return
                await asyncio.sleep(0.007)

    async def _wait_for_disk_write(self, node: ServerNode) -> None:
        """Often, wait until a write to the server's disk has begun."""
        if node.platter is not None and self._rng.random() < 0.8:
            for _ in range(200):
                if node.is_writing:
                    return
                await asyncio.sleep(0.007)

    async def _harm_disk(self, fault: DiskFault) -> None:
        node = self._rng.choice(self._world.servers)
        lasts = [5, 40] if fault.name == "stuck disk" else [0.05, 0.5, 5, 20, 40]
        if fault.name == "full disk" and self._rng.random() < 0.5:
            # Twice: the server must try again as soon after the second time as after the first.
            await self._break_disk(node, fault, 10)
            await asyncio.sleep(_WRITABLE_AFTER_S + 4)
            await self._break_disk(node, fault, 2)
        else:
            await self._break_disk(node, fault, self._rng.choice(lasts))

    async def _break_disk(self, node: ServerNode, fault: DiskFault, lasts_s: float) -> None:
        platter = node.platter
        assert platter is not None
        with self._world.incident(fault.name, node.name):
            fault.begin(platter)
            node.disk_faults += 1
            tiers, number = node.tiers, node.disk_faults
            was_writable = tiers is not None and not tiers.stack.queue.read_only
            if fault.name == "slow disk":
                platter.counts["crawled"] += 1
            process, frozen_s = node.process, node.process.frozen_s
            await asyncio.sleep(lasts_s)
            ran = process.alive and not process.frozen and process.frozen_s == frozen_s
            if ran and node.tiers is not None:
                node.tiers.check_timeout(platter.hung_s)
            platter.heal()

        def check_writable() -> None:
            """Tries come after delays that double: one in the time that the fault has lasted."""
            still = process.alive and not process.frozen and process.frozen_s == frozen_s
            if still and node.disk_faults == number and tiers is not None:
                tiers.check_writable(lasts_s + _WRITABLE_AFTER_S)

        if fault.name == "full disk" and ran and was_writable:
            self._world.loop.call_later(lasts_s + _WRITABLE_AFTER_S, check_writable)
        if fault.silent and self._rng.random() < 0.5:
            await self._kill(node)  # the next process reads what the disk has done

    async def _hoard(self) -> None:
        """A stranger pins or reserves all that it gets; clients must still read and write."""
        world = self._world
        node = self._rng.choice(world.servers)
        if not node.process.alive or node.process.frozen or node.restarting:
            return
        with world.incident(HOARD, node.name):
            stranger = Stranger(world, node, writes=self._rng.random() < 0.5)
            await stranger.take(self._rng.choice([1, 3, 6]))
            await asyncio.sleep(self._rng.choice([0.5, 4, 12]))
            alone = world.only_incident
            if alone is not None and alone.name == HOARD:
                client = self._rng.choice(world.clients)
                if not stranger.writes:
                    await client.read_beside(stranger.process.name, node)
                await client.write_beside(stranger.process.name)
            stranger.process.kill()

    async def _partition(self) -> None:
        world = self._world
        names = [
            *(node.name for node in world.masters),
            *(node.name for node in world.servers),
            *(client.name for client in world.clients),
        ]
        self._rng.shuffle(names)
        one = names[: self._rng.choice([1, len(names) // 2])]
        rest = [name for name in names if name not in one]
        with world.incident("partition"):
            self._net.cut(one, rest)
            if self._rng.random() < 0.5:
                self._net.cut(rest, one)
            await asyncio.sleep(self._rng.choice([0.05, 0.5, 4, 15]))
            self._net.heal()

    async def _reset(self) -> None:
        for _ in range(self._rng.randint(1, 4)):
            connections = self._net.resettable()
            if connections:
                with self._world.incident("reset", settle_s=6.0):
                    self._net.reset(self._rng.choice(connections))
                await asyncio.sleep(self._rng.expovariate(20))

    async def _episode(self, setting: str, value: float) -> None:
        """Change one network condition for a few seconds. Late messages arrive some time later."""
        with self._world.incident(setting, settle_s=14.0):
            setattr(self._net.conditions, setting, value)
            await asyncio.sleep(self._rng.uniform(0.5, 8))
            setattr(self._net.conditions, setting, 0.0)

    async def _loss(self) -> None:
        await self._episode("loss", self._rng.choice([0.05, 0.2, 0.4]))

    async def _double(self) -> None:
        # After losses, servers repeat inventories: these are the messages that matter most twice.
        self._net.conditions.loss = self._rng.choice([0.0, 0.2])
        await self._episode("double", self._rng.choice([0.1, 0.5]))
        self._net.conditions.loss = 0.0

    async def _tail(self) -> None:
        self._net.conditions.tail_s = self._rng.choice([0.05, 0.3, 1.5])
        await self._episode("tail", self._rng.choice([0.05, 0.4]))

    async def _rot(self) -> None:
        """Flip a bit of a block in a server's memory."""
        node = self._rng.choice(self._world.servers)
        entries = node.store.index.inventory() if node.process.alive else []
        if entries:
            entry = self._rng.choice(entries)
            with self._world.incident("rot"):
                key = entry.index.namespace, entry.digest, entry.index.part
                self._world.truth.history(*key).corrupted += 1
                node.store.corrupted.add((entry.offset, entry.generation))
                position = entry.offset + self._rng.randrange(entry.size)
                node.memory[position] ^= 1 << self._rng.randrange(8)
