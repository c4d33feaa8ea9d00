"""Places in a simulated cluster, where processes come and go, and the faults that are going on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.master.service import Master
from kvpool.server.block_server import BlockServer
from tests.simulation.disk import Platter
from tests.simulation.loop import Process
from tests.simulation.memory import SimTier
from tests.simulation.oracles import WatchedStore
from tests.simulation.tiers import PreviousDisk, Tiers


class Incident(NamedTuple):
    """One fault that is going on."""

    name: str
    target: str
    since: float


@dataclass(slots=True)
class ServerNode:
    """A block server's place in the cluster; processes come and go there."""

    name: str
    host: str
    process: Process
    server: BlockServer | None = None
    falling: bool = False  # killed, and not started again yet
    #: The disk outlives its servers; `previous_disk` is what the next one must find there.
    platter: Platter | None = None
    previous_disk: PreviousDisk | None = None
    tiers: Tiers | None = None

    @property
    def is_writing(self) -> bool:
        """A write to its disk is under way."""
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
    falling: bool = False
