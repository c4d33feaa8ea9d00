"""The memory under a fleet's engines: a pool that they share, or the host memory of each alone.

Either is a `DryPool`, so stores, directory, policy and placement are the product's. Bytes move over
modelled links. Loads share the engine's link, and wait for their turn on that of each server that
sends a part; saves wait on the engine's link, and for what the server's receives besides. What is
on a server's disk comes up into its memory first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.disks import ServerDisk
from benchmarks.fleet.drains import ServerDrain
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.links import QueuedLink, SharedLink
from benchmarks.fleet.loads import DiskRead, PoolLoad
from benchmarks.fleet.results import MovedBytes
from benchmarks.fleet.spreads import ChainSpread, ServerLinks
from kvpool.tools.dry_pool import DryPool, ServerRun
from kvpool.types import ARRIVED, ChainEnd, Match, Namespace, ReadStatus, SessionHint


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
        direct: bool = False,
        disk_turns: bool = False,
    ) -> None:
        """With `direct`, an engine reads what is on its own host at the rate of host memory. With
        `disk_turns` a disk reads and writes in turns."""
        self.saves_dropped = 0
        self.spread_bytes = 0.0
        self.drained_bytes = 0.0  # that others have fetched of servers that leave
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
        near_bytes_s = constants.local_load_bytes_s if direct else load_bytes_s
        self._near = [SharedLink(events, near_bytes_s) for _ in range(engines)] if direct else None
        self._saves = [QueuedLink(constants.save_bytes_s) for _ in range(engines)]
        # One host's memory needs no link of a server.
        server_bytes_s = constants.server_link_bytes_s if shared else load_bytes_s
        self._links = [ServerLinks(list(pool.servers), server_bytes_s) for pool in pools]
        self._disks = [
            {
                name: ServerDisk(pool, name, events, constants, block_bytes, turns=disk_turns)
                for name in (pool.servers if pool.has_disks else ())
            }
            for pool in pools
        ]

    def moved_bytes(self) -> MovedBytes:
        """So far."""
        disks = [disk for group in self._disks for disk in group.values()]
        return MovedBytes(
            sum(link.moved for link in [*self._receives, *(self._near or ())]),
            sum(disk.reads.moved for disk in disks),
            sum(disk.writes.moved for disk in disks),
        )

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
        match: Match | None = None,
    ) -> PoolLoad:
        """Load what is still there of these blocks, and call `ended` when it has come. `match` is
        what is there, if that is known."""
        now = self._events.now
        pool = self._pool(engine)
        if match is None:
            match = pool.match(chain, namespace)
        load = PoolLoad(pool, now, ended)
        self._loads[load] = None
        if not match.length:
            self._events.after(self._constants.first_byte_s, self._ended, load)
        elif pool.has_disks:
            self._read_with_disks(load, engine, namespace, chain, match)
        else:
            self._read_memory(load, engine, namespace, chain, match)
        return load

    def _read_memory(
        self,
        load: PoolLoad,
        engine: int,
        namespace: Namespace,
        chain: Sequence[bytes],
        match: Match,
    ) -> None:
        """All blocks at once, from each server its own."""
        now, host = self._events.now, self._host(engine)
        load.pins = load.pool.pin(match, chain, host, now, namespace)
        sends = self._links[engine % len(self.pools)].sends
        sizes = Counter[str]()
        for run in load.pins:
            sizes[run.server] += len(run.pins)
        by_link = Counter[SharedLink]()
        sent_at = now
        for server, count in sizes.items():
            link = self._link_from(load.pool, server, engine)
            by_link[link] += count
            if link is self._receives[engine]:
                sent_at = max(sent_at, sends[server].take(count * self._block_bytes, now))
        load.parts = len(by_link)
        for link, count in by_link.items():
            load.start(link, count * self._block_bytes, partial(self._part_ended, load, sent_at))

    def _read_with_disks(
        self,
        load: PoolLoad,
        engine: int,
        namespace: Namespace,
        chain: Sequence[bytes],
        match: Match,
    ) -> None:
        """Each run some blocks at a time: of those on a disk no more can be in memory."""
        sources = load.pool.sources(match, self._host(engine))
        load.parts = len(sources)
        number = engine % len(self.pools)

        def read(run: ServerRun) -> DiskRead:
            return DiskRead(
                load,
                run.server,
                self._disks[number][run.server],
                self._events,
                namespace=namespace,
                digests=chain[run.first : run.last + 1],
                block_bytes=self._block_bytes,
                sends=self._links[number].sends[run.server],
                receives=self._link_from(load.pool, run.server, engine),
                ended=partial(self._part_ended, load, 0.0),
            )

        for reading in [read(run) for run in sources]:
            reading.step()

    def _part_ended(self, load: PoolLoad, sent_at: float) -> None:
        load.parts -= 1
        if not load.parts:
            end = max(sent_at, self._events.now) + self._constants.first_byte_s
            self._events.at(end, self._ended, load)

    def _link_from(self, pool: DryPool, server: str, engine: int) -> SharedLink:
        """On which this engine receives what that server sends."""
        near = self._near is not None and pool.servers[server].host == self._host(engine)
        return self._near[engine] if self._near is not None and near else self._receives[engine]

    def near(self, engine: int) -> frozenset[str]:
        """The servers that this engine reads without its link."""
        servers, host = self._pool(engine).servers.items(), self._host(engine)
        return frozenset([name for name, one in servers if self._near and one.host == host])

    def stop_load(self, load: PoolLoad) -> float:
        """Give it up, if it is running. Returns the bytes that have come."""
        self._loads.pop(load, None)
        return load.stop()

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
        """These blocks have arrived: store what is not there yet. Where memory waits for a disk,
        so does the writer, and no longer than for its link."""
        self._save(engine, namespace, chain, hint, now + self._constants.save_wait_s)

    def _save(
        self,
        engine: int,
        namespace: Namespace,
        chain: Sequence[bytes],
        hint: SessionHint | None,
        until: float,
    ) -> None:
        now, pool = self._events.now, self._pool(engine)
        pool.exchange_heartbeats(now)
        match = pool.match(chain, namespace)
        kept = chain[: max(match.length, pool.capacity)]
        pool.written.clear()
        pool.store(kept, match, self._host(engine), hint, now, namespace)
        self._received(engine, pool.written, now)
        if not pool.has_disks:
            return
        disks = self._disks[engine % len(self.pools)]
        for name in pool.servers:
            disks[name].pump()
        if now >= until or pool.match(kept, namespace).length == len(kept):
            return
        again = partial(self._save, engine, namespace, chain, hint, until)
        for name, server in pool.servers.items():
            if server.store.is_writing_back and disks[name].when_moved(again):
                return

    def _received(self, engine: int, written: Mapping[str, int], now: float) -> None:
        """Servers received these blocks while the engine sent them. Where their links were slower,
        the engine's next save waits for that."""
        links = self._links[engine % len(self.pools)].receives
        for name, blocks in written.items():
            size = blocks * self._block_bytes
            began = now - size / self._constants.save_bytes_s
            self._saves[engine].hold(links[name].take(size, began))

    def spread(self, engine: int, namespace: Namespace, chain: Sequence[bytes]) -> None:
        """Bring a chain to every host, before it is read there: what `pool.spread` does."""
        pool = self._pool(engine)
        ChainSpread(
            pool,
            self._links[engine % len(self.pools)],
            self._events,
            namespace=namespace,
            chain=chain,
            receivers=list(pool.servers),
            block_bytes=self._block_bytes,
            latency_s=self._constants.first_byte_s,
            moved=self._spread_bytes,
        ).step()

    def _spread_bytes(self, size: float) -> None:
        self.spread_bytes += size

    def end(self, engine: int, session: str, now: float) -> None:
        """This session has ended; its last prompt was computed by that engine."""
        self._pool(engine).hint(session, None, now)

    def arrived(self, engine: int, session: str, now: float) -> None:
        """A prompt of this session waits at that engine."""
        self._pool(engine).hint(session, ARRIVED, now)

    def looked_up(self, engine: int, chain: Sequence[bytes], namespace: Namespace) -> None:
        """A prompt of which no session is known waits at that engine."""
        pool = self._pool(engine)
        found = pool.match(chain, namespace).length
        if found:
            end = ChainEnd(namespace.name, namespace.parts, chain[found - 1])
            pool.hint(end, ARRIVED, self._events.now)

    def resumes(self, engine: int, session: str, in_s: float, now: float) -> None:
        """That engine expects the session's next prompt then."""
        self._pool(engine).hint(session, in_s, now)

    def drain_server(self, number: int, within_s: float) -> None:
        """Server `number` hands its blocks over to the others, for at most so long, and leaves. The
        host memory of one engine has nobody to hand over to. None has a disk."""
        name = f"server-{number:03}"
        if not self.shared or name not in self.pools[0].servers:
            self.lose_server(number)
            return
        ServerDrain(
            self.pools[0],
            name,
            self._links[0],
            self._events,
            block_bytes=self._block_bytes,
            latency_s=self._constants.first_byte_s,
            within_s=within_s,
            moved=self._drain_bytes,
            over=partial(self.lose_server, number),
        ).begin()

    def _drain_bytes(self, size: float) -> None:
        self.drained_bytes += size

    def lose_server(self, number: int) -> None:
        """Server `number` is gone with its disk, and each load that reads from it ends. The host
        memory of one engine runs again, with what its disk has."""
        if self.shared:
            self._stop_server(number, self._pool_of(number).lose)
        else:
            self.restart_server(number)

    def restart_server(self, number: int) -> None:
        """Server `number` is killed with -9, and runs again at once with what its disk has."""
        pool = self._pool_of(number)
        self._stop_server(number, lambda name: pool.restart(name, self._events.now))

    def _stop_server(self, number: int, stop: Callable[[str], None]) -> None:
        pool = self._pool_of(number)
        name = f"server-{number if self.shared else 0:03}"
        if name not in pool.servers:
            return  # it was lost before
        broken = [one for one in self._loads if one.pool is pool and one.reads_from(name)]
        stop(name)
        if pool.has_disks:
            self._disks[number % len(self.pools)][name].stopped()
        for load in broken:
            self._events.at(self._events.now, self._ended, load)

    def _pool_of(self, server: int) -> DryPool:
        return self.pools[server % len(self.pools)]

    def _pool(self, engine: int) -> DryPool:
        return self.pools[engine % len(self.pools)]

    def _host(self, engine: int) -> str:
        return f"host-{engine if self.shared else 0:03}"
