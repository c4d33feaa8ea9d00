"""One seed, one history: a whole cluster, its faults, its users, and the result.

A history has two phases, as in TigerBeetle's VOPR. First *safety*: clients work while the nemesis
injects faults. No client may get wrong bytes, an untrue reason, or a result after its deadline.
Then all faults end, and *liveness* is checked: within 60 virtual seconds the cluster must be
healthy again, and clients must find every block that a server still holds (design: simulation).
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

import xxhash

from kvpool import registry, spans
from kvpool.client import reader, shared_copies, spread, ways
from kvpool.config import WRITE_BACK, WRITE_THROUGH, ClientConfig, MasterConfig, ServerConfig
from kvpool.errors import ConfigError, Unavailable
from kvpool.master import service
from kvpool.master.service import Master
from kvpool.master.state.explanations import explain
from kvpool.protocols import Tier, Transport
from kvpool.runtime import Host
from kvpool.server import block_server, outbox
from kvpool.server.block_server import BlockServer
from kvpool.server.cold import writer as cold_writer
from kvpool.server.cold.bucket import LONG_S
from kvpool.server.compactor import Compactor
from kvpool.server.eviction.session_hints import SessionAwarePolicy
from kvpool.server.moves import fetcher, prefetcher
from kvpool.server.moves.state import share_plan
from kvpool.server.state import tier_transfers
from kvpool.server.state.store import Store
from kvpool.testing.invariants import inventory
from kvpool.types import Cluster, Namespace
from kvpool_tiers.nvme.format import pack_superblock
from kvpool_tiers.nvme.tier import Nvme
from kvpool_transports.streams import requests
from kvpool_transports.tcp import TcpTransport
from tests.simulation.arrivals import WAIT_S, ArrivalOracle
from tests.simulation.blocks import OF_TENANTS, BlockCatalog
from tests.simulation.cold import ColdOracle, Shelf, SimCold, WatchedColdStore
from tests.simulation.control_plane import SimNetwork
from tests.simulation.copies import Copies
from tests.simulation.joins import Joins
from tests.simulation.loop import Process, SimLoop, Violation
from tests.simulation.memory import SimShm, SimTier
from tests.simulation.moves import Moves
from tests.simulation.nemesis import Nemesis
from tests.simulation.network import Net
from tests.simulation.nodes import Incident, MasterNode, ServerNode
from tests.simulation.oracles import (
    WatchedDirectory,
    WatchedFront,
    WatchedServers,
    WatchedStore,
    WatchedSweeper,
    WatchedWays,
)
from tests.simulation.plan import WorldPlan
from tests.simulation.platter import PAGE, Platter
from tests.simulation.prefetches import Prefetches
from tests.simulation.random_streams import RandomStreams
from tests.simulation.sandbox import sandbox
from tests.simulation.task_faults import FaultySupervisor, TaskFault
from tests.simulation.tenants import Tenants
from tests.simulation.tiers import DiskMemory, TierOracle, WatchedDiskStore, WatchedNvme, offset_in
from tests.simulation.truth import GroundTruth
from tests.simulation.users import SimClient
from tests.support.moves import moves_of

HEARTBEAT_S: Final = 1.0
SILENT_AFTER_S: Final = 3.0
#: The cluster must be healthy again so long after the end of the last fault.
RECOVERY_S: Final = 60.0


@dataclass(slots=True)
class HistoryReport:
    """The result of one history; `failure` is None when no promise was broken."""

    seed: int
    ops: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    trace_hash: str = ""
    failure: str | None = None
    faults: Counter[str] = field(default_factory=Counter)
    probes: set[str] = field(default_factory=set)


#: Fetches between servers that begin before the end take so long at most, in seconds.
_FETCHED_S: Final = 10


class World:
    """A cluster in one thread."""

    def __init__(self, plan: WorldPlan, trace: bool = False) -> None:
        self.plan = plan
        self.rng = RandomStreams(plan.seed)
        self.report = HistoryReport(plan.seed)
        self.loop = SimLoop(self.rng["threads"], plan.copy_s)  # type: ignore[abstract]
        self.net = Net(self.loop, self.rng["net"], self.report.faults)
        self.loop.network = self.net
        self.loop.writes_to_pool = self._landing_checks
        self.net.note = self.note
        self.truth = GroundTruth(lambda: self.loop.now, self.loop.fail)
        self.catalog = BlockCatalog(plan.seed, large=plan.large, shared=plan.crowds)
        self.masters: list[MasterNode] = []
        self.servers: list[ServerNode] = []
        self.clients: list[SimClient] = []
        self.open_incidents = 0  # number of faults that have not ended
        self.settled_from = 0.0  # until then, ended faults may still have effects
        self.open_other_incidents = 0  # the same without kills
        self.only_kills_from = 0.0
        self.only_incident: Incident | None = (
            None  # the fault that is going on, if it is the only one
        )
        #: Maps that a fault has changed and that are not right yet, and since when all are right.
        self.wrong_maps = 0
        self.maps_right_from = 0.0
        self.moves = Moves(self)
        self.joins = Joins(self)
        self.prefetches = Prefetches(self)
        self.copies = Copies(self) if plan.copies else None
        self.tenants = Tenants(self) if plan.tenants else None
        self.shelf = Shelf(self) if plan.cold else None
        if plan.tenants:
            self.catalog.others = OF_TENANTS
        self.nemesis: Nemesis
        self._hash = xxhash.xxh3_64()
        self._trace = trace
        self._lives = 0
        self._processes: list[Process] = []  # with the dead ones, whose tasks must not be collected

    # --- for all parts ------------------------------------------------------------------------

    def note(self, event: str) -> None:
        """Add one line to the history. Two runs are equal if these lines are."""
        line = f"{self.loop.now:.9f} {event}\n"
        self._hash.update(line.encode())
        if self._trace:
            print(line, end="")

    @contextmanager
    def incident(self, name: str, target: str = "", settle_s: float = 10.0) -> Iterator[None]:
        """A fault lasts as long as the block. Results are judged strictly `settle_s` after it."""
        self.report.faults[name] += 1
        self.note(f"fault {name} {target}")
        calm = self.settled_since(self.loop.now + 7.0)  # earlier faults may have some effects left
        self.only_incident = Incident(name, target, self.loop.now) if calm else None
        self.open_incidents += 1
        self.open_other_incidents += not name.startswith("kill")
        try:
            yield
        finally:
            self.open_incidents -= 1
            self.only_incident = None
            if not name.startswith("kill"):
                self.open_other_incidents -= 1
                self.only_kills_from = max(self.only_kills_from, self.loop.now + settle_s)
            self.note(f"end of {name}")
            self.settled_from = max(self.settled_from, self.loop.now + settle_s)

    def settled_since(self, when: float) -> bool:
        """No fault and no after-effects of one from `when` until now."""
        return not self.open_incidents and self.settled_from <= when

    def only_kills_since(self, when: float) -> bool:
        """The same, except for kills of processes."""
        return not self.open_other_incidents and self.only_kills_from <= when

    def _landing_checks(self, job: tuple[object, ...]) -> list[Callable[[], None]]:
        """A check for each write of a copy pool's job into a server's memory (G4)."""
        share, flag = job if len(job) == 2 else ((), None)
        checks: list[Callable[[], None]] = []
        for node in self.servers:
            memory = node.memory.obj if node.server is not None else None
            checks += [
                partial(self._check_landing, node.store, node.memory, piece, flag)
                for copy in (share if isinstance(share, list) else ())
                for piece in copy.target
                if piece.obj is memory
            ]
        return checks

    def _check_landing(
        self, store: WatchedStore, memory: memoryview, target: memoryview, flag: Any
    ) -> None:
        if flag.is_set:
            return  # cancelled: nothing is written, and the view may be released
        offset = offset_in(memory, target)
        if not store.may_land(offset, len(target)):
            self.loop.fail(
                f"G4: bytes are written to {offset} of {store.life}, which is not reserved"
            )

    def held_bytes(self, namespace: Namespace, digest: bytes, part: int) -> list[bytes]:
        """What each living server holds under one key, where no fault has changed it."""
        held = []
        for node in self.servers:
            stores = [node.store] if node.tiers is None else [node.store, node.tiers.base]
            entries = [(store, store.index.peek(namespace, part, digest)) for store in stores]
            held += [
                bytes(store.memory.view(entry.offset, entry.size))
                for store, entry in entries
                if entry is not None and (entry.offset, entry.generation) not in store.corrupted
            ]
        return held

    def disk_s(self, blocks: int) -> float:
        """Limit, in seconds, for promoting so many blocks from a disk without any fault."""
        if not self.plan.disk:
            return 0.0
        slowest = max(node.platter.latency_s for node in self.servers if node.platter is not None)
        under_way = blocks + self.plan.capacity // PAGE  # demotions are in the same queue
        return 5 * under_way * slowest

    def shelf_s(self, blocks: int) -> float:
        """Limit, in seconds, for bringing so many blocks from the object store, if there is one."""
        return self.shelf.slow_s(blocks) if self.shelf is not None else 0.0

    def process(self, name: str, host: str) -> Process:
        self._lives += 1
        process = Process(self.loop, name, host, self.rng[f"clock/{name}/{self._lives}"])
        self._processes.append(process)
        return process

    def host_of(self, process: Process) -> Host:
        return Host(process.host, process.host, process.name, lambda: 0)

    def transports(self) -> dict[str, Transport]:
        transports: dict[str, Transport] = {"tcp": TcpTransport()}
        if self.plan.shm:
            transports = {"shm": SimShm(self.net), **transports}
        return transports

    @property
    def master_addresses(self) -> list[str]:
        return [node.address for node in self.masters]

    # --- starting things ------------------------------------------------------------------------

    async def start_master(self, node: MasterNode) -> None:
        async def run() -> None:
            servers = WatchedServers(timeout_s=SILENT_AFTER_S)
            directory = WatchedDirectory(servers)
            servers.truth = directory.truth = self.truth
            directory.every = self.plan.check_every * 4
            node.master = Master(
                MasterConfig(bind=node.address, timeout_s=SILENT_AFTER_S),
                SimNetwork(self.net),
                directory=directory,
                rng=self.rng[f"master/{node.name}/{self._lives}"],
            )
            node.master.sweeper = WatchedSweeper(directory)
            await node.master.start()

        node.process = self.process(node.name, "host-0")
        await node.process.spawn(run())

    async def start_server(self, node: ServerNode) -> None:
        """Start a process; try again each second as long as its disk cannot be read."""
        while True:
            node.process = self.process(node.name, node.host)
            try:
                await node.process.spawn(self._serve(node, f"{node.name}#{self._lives}"))
            except (Unavailable, ConfigError) as error:
                self.note(f"{node.name} cannot start: {error}")
                node.process.kill()
                await asyncio.sleep(1)
                platter = node.platter
                if (
                    platter is not None
                    and not platter.condition.failing
                    and not platter.condition.full
                ):
                    self.truth.probes.add("a disk had to be replaced")
                    node.platter, node.previous_disk = self._new_disk(node.name), None
            else:
                return

    async def _serve(self, node: ServerNode, life: str) -> None:
        plan, truth = self.plan, self.truth
        tier = SimTier(plan.capacity, plan.alignment)
        kind = WatchedStore if self.shelf is None and node.platter is None else WatchedFront
        memory_is_pool = node.platter is None
        policy = registry.policy(plan.policy, tier.capacity) if memory_is_pool else None
        store = kind(life, tier, truth, every=plan.check_every, policy=policy)
        if plan.sessions:
            assert isinstance(store.extents.policy, SessionAwarePolicy)
            store.arrivals = ArrivalOracle(store.extents.policy, truth.fail)
        store.moves = self.moves
        store.copies = self.copies
        store.unsent = lambda: self.net.unsent(node.process, tier.memory)
        transports = self.transports()
        config = ServerConfig(
            id=node.name,
            masters=self.master_addresses,
            capacity=tier.capacity,
            listen=[f"{scheme}://127.0.0.1:0" for scheme in transports],
            heartbeat_s=HEARTBEAT_S,
            write_mode=WRITE_BACK if plan.write_back else WRITE_THROUGH,
        )
        tiers: list[Tier] = [tier]
        stores: list[Store] = [store]
        if self.shelf is not None:
            tiers.append(SimCold(self.shelf, node.name, plan))
            stores.append(WatchedColdStore(life, tiers[-1].capacity, plan.alignment, truth))
        if node.platter is not None:
            nvme = self._nvme(life, node.platter)
            tiers.append(nvme)
            below = self._base(node, life, node.platter)
            below.dropped = nvme.dropped
            stores.append(below)
        server = node.server = BlockServer(
            config,
            cluster=Cluster(),
            network=SimNetwork(self.net),
            transports=transports,
            tiers=tiers,
            stores=stores,
            host=self.host_of(node.process),
            rng=self.rng[f"server/{life}"],
            secret=node.name.encode() if plan.kept_secrets else b"",
            keeps_secret=plan.kept_secrets,
        )
        if self.copies is None:  # with fetches between servers two runs of a seed may differ
            moves_of(server).hand_over.planners.remove(moves_of(server).repair)
        self.moves.watch(node)
        self.joins.watch(node)
        self.prefetches.watch(node)
        if plan.copy_s > 0.001:
            compactor = server._context.room_maker
            assert isinstance(compactor, Compactor)
            compactor.inline_max = 0  # moves take time, as those of large blocks
        truth.life_began(life)
        base = stores[-1]
        if isinstance(base, WatchedDiskStore):
            both = node.tiers = TierOracle(server, store, base, truth, self.loop.after_this)
            node.process.on_death.append(lambda: self._save_disk(node, base, both))
        elif isinstance(base, WatchedColdStore) and self.shelf is not None:
            node.cold = ColdOracle(server, store, base, self.shelf)
        if self.tenants is not None:
            self.tenants.watch(node)
        node.process.on_death.append(lambda: truth.life_ended(life))
        await server.start()

    def _nvme(self, life: str, platter: Platter) -> Nvme:
        circles = self.rng[f"circles/{life}"] if self.plan.circles else None
        return WatchedNvme(self.plan.disk, platter, circles)

    def _new_disk(self, name: str) -> Platter:
        size = Nvme.disk_size(self.plan.disk)
        rng = self.rng[f"disk/{name}"]
        head = pack_superblock(self.plan.alignment)
        return Platter(self.loop, size, rng, name=f"disk of {name}", head=head)

    def _base(self, node: ServerNode, life: str, platter: Platter) -> WatchedDiskStore:
        return WatchedDiskStore(
            life,
            DiskMemory(platter, self.plan.disk, self.plan.alignment),
            self.truth,
            node.previous_disk,
            every=self.plan.check_every,
            policy=registry.policy(self.plan.policy, self.plan.disk),
        )

    def _save_disk(self, node: ServerNode, base: WatchedDiskStore, tiers: TierOracle) -> None:
        node.previous_disk = base.previous_disk(in_service=tiers.in_service)

    def client_config(self) -> ClientConfig:
        masters = self.master_addresses
        self.rng["plan"].shuffle(masters)
        return ClientConfig(
            masters=masters,
            transports=list(self.transports()),
            verify=self.plan.verify,
        )

    # --- the history ------------------------------------------------------------------------------

    async def history(self) -> None:
        await self._build()
        self.nemesis = nemesis = Nemesis(self, self.rng["faults"])
        chaos = asyncio.get_running_loop().create_task(nemesis.run(self.plan.chaos_s))
        for client in self.clients:
            client.begin(self.plan.ops // len(self.clients), self.plan.chaos_s)
        await chaos
        await nemesis.heal()
        await self.moves.end()
        for client in self.clients:
            await client.finish()
        await self.moves.end()
        living = [client for client in self.clients if client.process.alive]
        if self.plan.moves and living:
            client = living[0]
            await client.process.spawn(self.moves.play(client))
            await self.moves.end()
            if self.copies is not None:
                await client.process.spawn(self.copies.play(client))
        if self.plan.joins and living:
            await living[0].process.spawn(self.joins.play(living[0]))
        await self._recover()
        await self._close()

    async def _build(self) -> None:
        plan = self.plan
        for number in range(plan.masters):
            process = self.process(f"master-{number}", "host-0")
            node = MasterNode(process.name, f"127.0.0.1:{7450 + number}", process)
            self.masters.append(node)
            await self.start_master(node)
        for number in range(plan.servers):
            host = f"host-{number % plan.hosts}"
            process = self.process(f"server-{number}", host)
            node_of_server = ServerNode(process.name, host, process)
            if plan.disk:
                node_of_server.platter = self._new_disk(process.name)
            self.servers.append(node_of_server)
            await self.start_server(node_of_server)
        for number in range(plan.clients):
            self.clients.append(SimClient(self, f"client-{number}", f"host-{number % plan.hosts}"))
            await self.clients[-1].start()
        await asyncio.sleep(2)

    async def _recover(self) -> None:
        """Liveness: the cluster is healthy again in time."""
        # What an object store was asked last before it worked again may hang for so long.
        within_s = RECOVERY_S + LONG_S * (self.shelf is not None)
        deadline = self.loop.now + within_s
        while (problem := self._first_problem()) is not None:
            if self.loop.now >= deadline:
                raise Violation(f"liveness: {within_s:g} s after the last fault: {problem}")
            await asyncio.sleep(0.5)
        self.settled_from = min(self.settled_from, self.loop.now)
        if self.tenants is not None:
            self.tenants.remove_all()
        # Prompts that nobody serves keep their blocks for so long, and then no longer.
        await asyncio.sleep(3 + WAIT_S * self.plan.sessions)
        for node in self.servers:
            node.store.verify_all("everything is well again")
            node.store.check_evictable()
            if node.tiers is not None:
                node.tiers.base.check_evictable()
                node.tiers.check()
                node.tiers.base.verify_all("everything is well again")
        for number, client in enumerate(self.clients):
            await client.final_check(self.catalog.chains[number :: len(self.clients)])

    def _first_problem(self) -> str | None:
        """The first sign that the cluster is not healthy; None when it is."""
        for node in self.servers:
            store = node.store
            if store.held.pins or store.held.reservations or store.held.quarantined:
                return (
                    f"{store.held.pins} pins, {store.held.reservations} reservations, "
                    f"{store.held.quarantined} extents in quarantine remain"
                )
            if store.extents.clearing is not None or store.extents.move_targets:
                return f"{node.name}: {store.extents.clearing!r} is left, and nobody needs it"
            if node.tiers is not None and (problem := node.tiers.first_problem()) is not None:
                return f"{node.name}: {problem}"
        if self.shelf is not None and (problem := self.shelf.first_problem()) is not None:
            return problem
        for master in self.masters:
            assert master.master is not None
            directory = master.master.directory
            members = {member.server: member for member in directory.servers.members(self.loop.now)}
            for node in self.servers:
                member = members.get(node.name)
                assert node.server is not None
                if member is None or not member.alive or member.epoch != node.server.epoch:
                    return f"{master.name} does not list {node.name} as alive"
                problem = self._missing(master, node)
                if problem is not None:
                    return problem
        return None

    def _missing(self, master: MasterNode, node: ServerNode) -> str | None:
        """How a master's directory differs from the blocks that a server holds."""
        assert master.master is not None
        assert node.server is not None
        here = {
            (entry.index.namespace, entry.digest, entry.index.part, entry.index.tier)
            for entry in inventory(node.server.stack)
        }
        ranks = {tier.name: rank for rank, tier in enumerate(node.server.tiers)}
        keys: dict[Namespace, list[bytes]] = {}
        for namespace, digest in self.catalog.every_key():
            keys.setdefault(namespace, []).append(digest)
        known = {
            (namespace, digest, replica.part, ranks.get(replica.tier))
            for namespace, digests in keys.items()
            for digest, found in zip(
                digests, explain(master.master.directory, namespace, digests), strict=True
            )
            for replica in found.replicas
            if replica.server == node.name
        }
        if here != known:
            return (
                f"{master.name} lists {len(known)} blocks of {node.name}, which holds {len(here)}: "
                f"{len(here - known)} missing, {len(known - here)} too many"
            )
        return None

    async def _close(self) -> None:
        """Shut down in order; nothing may remain."""
        for client in self.clients:
            await client.close()
        await asyncio.sleep(1)
        for _ in range(_FETCHED_S):  # a copy that a server makes of what was read last
            if any(node.store.held.pins or node.store.held.reservations for node in self.servers):
                await asyncio.sleep(1)
        # Of all, before any is closed: the others copy what leaves with that one (seed 903395).
        for node in self.servers:
            store = node.store
            if store.held.pins or store.held.reservations:
                raise Violation("pins or reservations outlive their clients")
            if node.tiers is None and not store.held.quarantined:
                store.check_all_can_go(node.process.clock(self.loop.now))
        for node in self.servers:
            assert node.server is not None
            await node.process.spawn(node.server.close())
        for master in self.masters:
            assert master.master is not None
            await master.process.spawn(master.master.close())
        # Transfers of a very slow disk end later than their server (seed 1047).
        platters = [node.platter for node in self.servers if node.platter is not None]
        await asyncio.sleep(60 if any(p.counts["crawled"] for p in platters) else 5)
        for process in (
            *(node.process for node in self.servers),
            *(node.process for node in self.masters),
            *(client.process for client in self.clients),
        ):
            if process.tasks:
                left = sorted(str(task.get_coro()) for task in process.tasks.values())
                raise Violation(f"{process.name}: tasks outlive their owner: {left}")
        for client in self.clients:  # the end of a writer ends its quarantine
            client.process.kill()
        await asyncio.sleep(1)
        for node in self.servers:
            if node.store.held.quarantined:
                raise Violation(f"{node.name}: quarantine outlives the writers")

    def finish(self) -> HistoryReport:
        report = self.report
        report.steps = self.loop.steps
        report.virtual_s = self.loop.now
        report.trace_hash = self._hash.hexdigest()
        report.probes = set(self.truth.probes)
        for process in self._processes:
            process.discard_tasks()
        return report


@contextmanager
def _errors_reported(loop: SimLoop) -> Iterator[None]:
    """An exception that the pool logs is unexpected: it fails the run."""

    class Reporter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info is not None else None
            if error is not None and not isinstance(error, TaskFault):
                loop.fail(f"{record.getMessage()}: {type(error).__name__}: {error}")

    logger = logging.getLogger("kvpool")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [Reporter()], False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: its times, and so those of finalizers, do not depend on the seed.

    Then one of what is young: the whole world, which else stays until everything is looked at.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)


#: What is installed is looked up on the disk once, not for each server.
_installed: Final = cache(registry.installed)


@contextmanager
def _small_pool(plan: WorldPlan) -> Iterator[None]:
    """Spans of two blocks: chains of 16 blocks have many, and a master learns and forgets them.

    What a world changes in the product stays its own: later tests run in this process, too.
    """
    changed = (
        (registry, "installed"),
        (outbox, "_PIECE_BLOCKS"),
        (fetcher, "_STEP_BLOCKS"),
        (prefetcher, "_STEP_BLOCKS"),
        (tier_transfers, "FRESH_S"),
        (spans, "SPAN_BLOCKS"),
        (share_plan, "CHAIN_SHARE"),
        (spread, "SpreadPlan"),
        (shared_copies, "SHARED_COPIES_MAX"),
        (reader, "PLANS"),
        (ways, "SHARED_BYTES_MIN"),
        (ways, "_PIECE_BYTES_MIN"),
        (ways, "_PIECE_S"),
        (block_server, "Supervisor"),
        (service, "Supervisor"),
        (cold_writer, "os"),
        (requests, "ONE_REQUEST_MAX"),
        (requests, "ONE_REQUEST_MAPPED_MAX"),
    )
    before = [(module, name, vars(module)[name]) for module, name in changed]
    vars(registry)["installed"] = _installed
    vars(spans)["SPAN_BLOCKS"] = 2
    vars(cold_writer)["os"] = SimpleNamespace(urandom=bytes)  # salts, of which nothing depends
    vars(shared_copies)["SHARED_COPIES_MAX"] = 1  # with fetches of others two runs may differ
    vars(reader)["PLANS"] = (f"{WatchedWays.__module__}:WatchedWays",)
    if plan.piece_bytes:
        vars(ways)["SHARED_BYTES_MIN"] = vars(ways)["_PIECE_BYTES_MIN"] = plan.piece_bytes
        vars(ways)["_PIECE_S"] = 0.0
    vars(block_server)["Supervisor"] = vars(service)["Supervisor"] = FaultySupervisor
    vars(outbox)["_PIECE_BLOCKS"] = plan.piece_blocks  # a `Final` of the module
    vars(fetcher)["_STEP_BLOCKS"] = vars(prefetcher)["_STEP_BLOCKS"] = plan.step_blocks
    vars(tier_transfers)["FRESH_S"] = plan.fresh_s  # a memory that is seldom too busy
    vars(requests)["ONE_REQUEST_MAX"] = plan.one_request_max
    vars(requests)["ONE_REQUEST_MAPPED_MAX"] = plan.one_request_max
    try:
        yield
    finally:
        for module, name, value in before:
            vars(module)[name] = value


def run(
    seed: int, *, ops: int = 120, without: frozenset[str] = frozenset(), trace: bool = False
) -> HistoryReport:
    """Play one history. `failure` of the report is None when no promise was broken."""
    plan = WorldPlan.draw(seed, ops, without)
    with _small_pool(plan), _no_collection():
        try:
            return _play(plan, trace)
        finally:
            del FaultySupervisor.fail, WatchedWays.fail


def _play(plan: WorldPlan, trace: bool) -> HistoryReport:
    world = World(plan, trace)
    FaultySupervisor.fail = WatchedWays.fail = world.loop.fail
    with _errors_reported(world.loop), sandbox(world.loop.fail):
        try:
            world.loop.run(world.history())
        except Violation as violation:
            world.report.failure = str(violation)
        except Exception as error:  # an error that the pool must not raise
            world.report.failure = f"{type(error).__name__}: {error}"
        return world.finish()
