"""Nodes of a simulated cluster: names and disks that stay while their processes change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.master.service import Master
from kvpool.server.block_server import BlockServer
from tests.simulation.cold import ColdOracle
from tests.simulation.loop import Process
from tests.simulation.memory import SimTier
from tests.simulation.oracles import WatchedStore
from tests.simulation.platter import Platter
from tests.simulation.tiers import PreviousDisk, TierOracle


class Incident(NamedTuple):
    """One fault that has not ended yet."""

    name: str
    target: str
    since: float


@dataclass(slots=True)
class ServerNode:
    """A block server's node: its name, its host and its disk outlive its processes."""

    name: str
    host: str
    process: Process
    server: BlockServer | None = None
    restarting: bool = False  # killed and not started again yet
    #: `previous_disk` is what the next process must find on the disk.
    platter: Platter | None = None
    previous_disk: PreviousDisk | None = None
    tiers: TierOracle | None = None
    cold: ColdOracle | None = None
    disk_faults: int = 0  # begun so far

    @property
    def is_writing(self) -> bool:
        """A write to the node's disk has begun and not ended."""
        platter = self.platter
        return platter is not None and platter.owner is not None and platter.owner.is_writing

    @property
    def store(self) -> WatchedStore:
        assert self.server is not None
        store = self.server.store
        assert isinstance(store, WatchedStore)
        return store

    @property
    def memory(self) -> memoryview:
        tier = self.store.memory
        assert isinstance(tier, SimTier)
        return tier.memory


@dataclass(slots=True)
class MasterNode:
    name: str
    address: str
    process: Process
    master: Master | None = None
    restarting: bool = False
