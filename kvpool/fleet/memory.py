"""The memory under a fleet's engines: a pool that they share, or the host memory of each alone.

Either is a `DryPool`, so stores, directory, policy and placement are the product's. Bytes move over
modelled links. Loads share the engine's link, and wait for their turn on that of each server that
sends a part; saves wait on the engine's: what servers receive is not queued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.fleet.constants import Constants
from kvpool.fleet.events import EventQueue
from kvpool.fleet.links import LinkTransfer, QueuedLink, SharedLink
from kvpool.tools.dry_pool import DryPool, HeldRun, PolicyOf
from kvpool.types import ARRIVED, Match, Namespace, ReadStatus, SessionHint


@dataclass(slots=True, eq=False)
class PoolLoad:
    """Blocks on their way to an engine; they stay in the pool until it has ended."""

    pool: DryPool
    pins: list[HeldRun]
    began: float
    receives: SharedLink
    ended: Callable[[PoolLoad], None]
    running: bool = True
    transfer: LinkTransfer | None = None  # None: nothing was there


class FleetMemory:
    """`pools` are one that all `engines` have `shared`, or one for each. Each of their
    blocks has `block_bytes`."""

    def __init__(
        self,
        pools: Sequence[DryPool],
        engines: int,
        events: EventQueue,
        constants: Constants,
        block_bytes: float,
        *,
        shared: bool,
    ) -> None:
        self.saves_dropped = 0
        self.pools = pools
        self.shared = shared
        #: Until then no master answers.
        self.masters_out_until = 0.0
        self._loads: dict[PoolLoad, None] = {}
        self._events = events
        self._constants = constants
        self._block_bytes = block_bytes
        load_bytes_s = constants.pool_load_bytes_s if shared else constants.local_load_bytes_s
        self._receives = [SharedLink(events, load_bytes_s) for _ in range(engines)]
        self._saves = [QueuedLink(constants.save_bytes_s) for _ in range(engines)]
        # One host's memory needs no link of a server.
        server_bytes_s = constants.server_link_bytes_s if shared else load_bytes_s
        self._sends = [
            {name: QueuedLink(server_bytes_s) for name in pool.servers} for pool in pools
        ]

    @property
    def moved(self) -> float:
        """Bytes that were loaded so far."""
        return sum(link.moved for link in self._receives)

    def match(self, engine: int, namespace: Namespace, chain: Sequence[bytes], now: float) -> Match:
        """The longest prefix of the chain that this engine can load."""
        if now < self.masters_out_until:
            return Match((), 0, ReadStatus.NO_MASTER)
        pool = self._pool(engine)
        pool.exchange_heartbeats(now)
        return pool.match(chain, namespace)

    def load_s(self, engine: int, blocks: int) -> float:
        """How long a load of so many blocks would take that begins now."""
        rate = self._receives[engine].bytes_s
        left = self._receives[engine].left + blocks * self._block_bytes
        return self._constants.first_byte_s + left / rate

    def start_load(
        self,
        engine: int,
        namespace: Namespace,
        chain: Sequence[bytes],
        ended: Callable[[PoolLoad], None],
    ) -> PoolLoad:
        """Load what is still there of these blocks, and call `ended` when it has come."""
        now = self._events.now
        pool = self._pool(engine)
        match = pool.match(chain, namespace)
        pins = pool.pin(match, chain, self._host(engine), now, namespace)
        load = PoolLoad(pool, pins, now, self._receives[engine], ended)
        self._loads[load] = None
        if not pins:
            self._events.after(self._constants.first_byte_s, self._ended, load)
            return load
        sends = self._sends[engine % len(self.pools)]
        parts = Counter[str]()
        for run in pins:
            parts[run.server] += len(run.pins)
        sent_at = max(
            sends[server].take(count * self._block_bytes, now) for server, count in parts.items()
        )

        def received() -> None:
            end = max(sent_at, self._events.now) + self._constants.first_byte_s
            self._events.at(end, self._ended, load)

        load.transfer = load.receives.start(parts.total() * self._block_bytes, received)
        return load

    def stop_load(self, load: PoolLoad) -> float:
        """Give it up, if it is running. Returns the bytes that have come."""
        if load.running:
            load.running = False
            del self._loads[load]
            load.pool.unpin(load.pins)
        return load.receives.stop(load.transfer) if load.transfer is not None else 0.0

    def _ended(self, load: PoolLoad) -> None:
        if load.running:
            load.ended(load)

    def save_ends_at(
        self, engine: int, namespace: Namespace, chain: Sequence[bytes], now: float
    ) -> float | None:
        """When the engine has sent what the pool does not have; None: its link is too busy, or
        no master answers."""
        if now < self.masters_out_until:
            return None
        blocks = len(chain) - self._pool(engine).match(chain, namespace).length
        link = self._saves[engine]
        if blocks and link.wait_s(now) > self._constants.save_wait_s:
            self.saves_dropped += 1
            return None
        return link.take(blocks * self._block_bytes, now)

    def save(
        self,
        engine: int,
        namespace: Namespace,
        chain: Sequence[bytes],
        hint: SessionHint | None,
        now: float,
    ) -> None:
        """These blocks have arrived: store what is not there yet."""
        pool = self._pool(engine)
        pool.exchange_heartbeats(now)
        match = pool.match(chain, namespace)
        kept = chain[: max(match.length, pool.capacity)]
        pool.store(kept, match, self._host(engine), hint, now, namespace)

    def end(self, engine: int, session: str, now: float) -> None:
        """This session has ended; its last prompt was computed by that engine."""
        self._pool(engine).hint(session, None, now)

    def arrived(self, engine: int, session: str, now: float) -> None:
        """A prompt of this session waits at that engine."""
        self._pool(engine).hint(session, ARRIVED, now)

    def resumes(self, engine: int, session: str, in_s: float, now: float) -> None:
        """That engine expects the session's next prompt then."""
        self._pool(engine).hint(session, in_s, now)

    def lose_server(self, number: int) -> None:
        """Server `number` is gone, and each load that reads from it ends. The host memory of one
        engine runs again, empty."""
        pool = self.pools[number % len(self.pools)]
        name = f"server-{number if self.shared else 0:03}"
        if name not in pool.servers:
            return  # it was lost before
        broken = [
            load
            for load in self._loads
            if load.pool is pool and any(run.server == name for run in load.pins)
        ]
        if self.shared:
            pool.lose(name)
        else:
            pool.restart(name)
        for load in broken:
            self._events.at(self._events.now, self._ended, load)

    def _pool(self, engine: int) -> DryPool:
        return self.pools[engine % len(self.pools)]

    def _host(self, engine: int) -> str:
        return f"host-{engine if self.shared else 0:03}"


def shared_pool(
    servers: int, blocks: int, policy: PolicyOf, guaranteed: Mapping[str, float] | None = None
) -> list[DryPool]:
    """One pool of so many servers, with room for `blocks` together."""
    return [DryPool(servers, blocks, policy, guaranteed=guaranteed)]


def local_memories(
    engines: int, blocks: int, policy: PolicyOf, guaranteed: Mapping[str, float] | None = None
) -> list[DryPool]:
    """The same room, divided: each engine has its own and reads no other."""
    return [DryPool(1, blocks // engines, policy, guaranteed=guaranteed) for _ in range(engines)]
