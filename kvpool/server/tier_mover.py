"""Moves blocks between a server's tiers, as `state.tiered_store` decides (design: tiers).

Demotion runs in the background, in batches; no client waits for it. Promotion starts when a reader
asks, a little ahead of what it can take. What comes from a slower tier is compared with its
checksum before a reader gets it. What keeps failing, or is stuck, is left out (`tier_health.py`).

promotions.py    what comes up, and the readers that wait for it
tier_bytes.py    the bytes of one block
tier_records.py  what a tier that survives a restart is to know of its blocks
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvpool import logs
from kvpool.config import WRITE_BACK, ServerConfig
from kvpool.protocols import Tier
from kvpool.protocols.persistent_tier import BelongsToOwner, Encrypts
from kvpool.protocols.policy import Policy
from kvpool.server import tier_traffic
from kvpool.server.promotions import Promotions
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.holdings import Limits
from kvpool.server.state.store import Store
from kvpool.server.state.tier_stores import front_tier, is_on_a_device, stores_of
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tier_bytes import TierBytes
from kvpool.server.tier_health import Place, TierHealth
from kvpool.server.tier_keys import file_owner, storage_key
from kvpool.server.tier_records import TierRecords
from kvpool.server.tiers import Mover
from kvpool.supervision import Supervisor
from kvpool.threads import wait_for_all
from kvpool.types import Cluster, Extent, Namespace, TierUsage

log = logs.get("kvpool.mover")

#: Written in one batch; two batches are under way at a time. The number of blocks is bounded, too:
#: beginning a batch of many small blocks takes time in which the loop serves no reader.
_DEMOTE_BYTES: Final = 32 << 20
_DEMOTE_BLOCKS: Final = 32
_DEMOTE_BATCHES: Final = 2
#: A batch of which nothing has arrived is followed by a pause, so that a bad place costs no CPU.
_AFTER_FAILURE_S: Final = 0.1
#: So often in a row a policy may put off what is to be written back, while others have their turn:
#: enough for an order of ten million blocks. One that never answers must not take a core for ever.
_PUT_OFF_MAX: Final = 1 << 16
#: `close` gives dirty blocks this long to be written back, where they will be found again; service
#: managers and tests allow a process about a second to stop.
_DRAIN_S: Final = 0.5
#: So often it looks whether they are.
_POLL_S: Final = 0.01
#: `close` waits this long for the last read or write.
_CLOSE_S: Final = 5.0

_T = TypeVar("_T")


class TierMover(Mover):
    """Carries out the transfers of a `TieredStore`."""

    moves = True

    def __init__(
        self,
        store: Blocks,
        tiers: Sequence[Tier],
        on_change: Callable[[], None],
        supervisor: Supervisor,
    ) -> None:
        assert isinstance(store, TieredStore)
        super().__init__(store, tiers, on_change, supervisor)
        self._store: TieredStore = store
        self._supervisor = supervisor
        self._on_change = on_change
        self._traffic = [tier_traffic.TierTraffic() for _ in tiers]
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._put_off = 0  # steps of write-back in a row that had to
        # Enough to keep a device busy, and no more.
        front = tiers[store.front_tier].capacity
        self.promotions = Promotions(min(64 << 20, max(front // 4, 1)))
        self.health = TierHealth(
            store,
            tiers,
            self._traffic,
            supervisor,
            own=self._own,
            write_one=self._write_one,
            gave_up=self._promotions_lost,
            on_change=on_change,
        )
        self.records = TierRecords(store, tiers, self.health, self._spawn)
        self._bytes = TierBytes(store, tiers, self._traffic, self.health)

    @classmethod
    def blocks_of(
        cls,
        tiers: Sequence[Tier],
        stores: Sequence[Store],
        policy: Policy[Entry] | None,
        config: ServerConfig,
    ) -> TieredStore:
        store = TieredStore(
            stores or stores_of(tiers, policy),
            front_tier=front_tier(tiers),
            write_back=config.write_mode == WRITE_BACK,
            in_place_tiers=[number for number, tier in enumerate(tiers) if is_on_a_device(tier)],
        )
        for tier in store.in_place_tiers:  # a quarter of such a tier may be pinned
            room = store.stores[tier].allocator.capacity
            store.stores[tier].held.limits = Limits.of(room // 4, room)
        return store

    async def recover(self, cluster: Cluster) -> None:
        for one in self._tiers:
            if isinstance(one, BelongsToOwner):
                one.claim(file_owner(cluster))
            if isinstance(one, Encrypts) and one.encrypted:
                one.use_key(storage_key(cluster))
        tier = self._store.backing_tier
        await self.records.recover(self._tiers[tier].name, self._traffic[tier].dropped)

    def keeps(self, entry: Entry) -> bool:
        return self.records.keeps(entry)

    async def erase(self) -> bool:
        return await self.records.erase_all()

    async def checksum_in(self, tier: int, extent: Extent, seed: int) -> int | None:
        return await self._bytes.checksum_in(tier, extent, seed)

    def start(self) -> None:
        if len(self._tiers) > 1:
            for _ in range(_DEMOTE_BATCHES):
                self._own(self._supervisor.forever("write-back", self._write_back))

    async def close(self, flush_s: float) -> None:
        """All dirty blocks that are of use are written back; with write-through little is dirty,
        and half a second is enough. What was removed is erased.

        Waits for the transfers under way, but not for ever: a stuck device is left behind.
        """
        lazy = self._store.queue.write_back is not None
        await self._flush(_now() + (flush_s if lazy else _DRAIN_S))
        with contextlib.suppress(TimeoutError):  # also of a file that took no writes a while ago
            async with asyncio.timeout(_DRAIN_S):
                await self.records.erase(self.health.parts(self._store.backing_tier))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    async def _flush(self, until: float) -> None:
        """Write back what would be lost with the process, the most valuable first."""
        store, began = self._store, _now()
        dirty, size = store.front.extents.dirty, store.front.extents.dirty_bytes
        for _ in store.queue.flush():
            if _now() >= until:
                break
            await asyncio.sleep(0)
        self.wake()
        for _ in range(int((until - _now()) / _POLL_S)):
            if not store.queue.waiting and not store.front.held.pinned_by(MOVER):
                break
            await asyncio.sleep(_POLL_S)
        if store.queue.write_back is not None and dirty:
            left = store.front.extents.dirty_bytes
            report = log.warning if store.queue.waiting else log.info
            report(
                "memory is written back",
                blocks=dirty - store.front.extents.dirty,
                bytes=size - left,
                not_written_bytes=left,
                seconds=round(_now() - began, 2),
            )

    def wake(self) -> None:
        self._wake.set()

    def usage(self, now: float, reads: int = 0) -> list[TierUsage]:
        problems = [self.health.problems(number) for number in range(len(self._tiers))]
        return tier_traffic.usage(self._tiers, self._store, self._traffic, problems, now)

    # --- promotion -------------------------------------------------------------------------------

    def promote(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """As many as may be under way at a time (design: promotion)."""
        if (left := self.promotions.left(namespace)) > 0:
            self._start_promotions(namespace, part, digests, left)

    def prefetch(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], size_max: int
    ) -> Mapping[TierTransfer, asyncio.Task[bool]]:
        """Start to promote about `size_max` bytes for which no reader has asked yet: what is under
        way now, each with the task that ends with whether it has arrived (design: promotion)."""
        return self._start_promotions(namespace, part, digests, size_max, prefetch=True)

    def _start_promotions(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        size_max: int,
        *,
        prefetch: bool = False,
    ) -> Mapping[TierTransfer, asyncio.Task[bool]]:
        others = self.promotions.missing(namespace, part, digests)
        start = self._store.transfers.start_promotions
        copies = start(namespace, part, others, size_max, _now(), prefetch=prefetch)
        tasks = {}
        for copy in copies:
            self.promotions.begin(copy)
            tasks[copy] = self._spawn(self._promote(copy))
        if self._store.change_log.changes:  # their reservations have evicted blocks
            self._on_change()
        return tasks

    async def promote_and_wait(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], until: float
    ) -> bool:
        """False also where nothing is under way that would free room (design: promotion)."""
        self.promote(namespace, part, digests)
        # Where no more may come up, what is behind is another call.
        while (
            self._store.transfers.behind and self.promotions.left(namespace) > 0 and _now() < until
        ):
            await asyncio.sleep(0)
            self.promote(namespace, part, digests)
        waiter = self.promotions.waiter(namespace, part, digests)
        if not waiter.remaining and not self._store.is_held:
            return False
        await asyncio.wait([waiter.ready], timeout=max(0.0, until - _now()))
        return True

    async def _promote(self, copy: TierTransfer) -> bool:
        good = False
        try:
            good = await self._bytes.move(copy)
        finally:
            self._store.transfers.done(copy, good=good, now=_now())
            self.promotions.end(copy)
            self._on_change()
        return good

    def _promotions_lost(self, place: Place) -> None:
        """Nobody waits for what a lost device still reads. It may write into our memory until the
        call ends, so that is not reused before."""
        front, at = self._store.front, self.health.place
        for copy in self.promotions.of(lambda one: at(one.source, one.entry.offset) == place):
            front.quarantine(MOVER, copy.id, -copy.id)
            if copy.prefetch:  # it comes no more
                extent = front.allocator.rounded(copy.entry.size)
                front.extents.prefetched.ended(copy.entry, extent)
            self.promotions.end(copy)

    # --- demotion -------------------------------------------------------------------------------

    async def _write_back(self) -> None:
        """The next batch, or the wait for one."""
        waited = self._store.queue.waiting
        copies = self._store.transfers.next_writebacks(_DEMOTE_BYTES, _DEMOTE_BLOCKS, _now())
        if self._store.change_log.changes:  # the reservations below have evicted blocks
            self._on_change()
        if not self._store.transfers.behind:
            self._put_off = 0
        if copies:
            if not await self._demote(copies):
                await asyncio.sleep(_AFTER_FAILURE_S)
        elif self._store.transfers.behind or 0 < self._store.queue.waiting < waited:  # refused
            self._put_off += self._store.transfers.behind
            await asyncio.sleep(_AFTER_FAILURE_S if self._put_off > _PUT_OFF_MAX else 0)
        else:
            self._wake.clear()
            if self._store.queue.read_only or await self.records.erase():
                await self._wake.wait()
            else:
                await asyncio.sleep(_AFTER_FAILURE_S)
        if not self._store.queue.is_under_pressure:
            await self.promotions.wait_for_readers()

    async def _demote(self, copies: list[TierTransfer]) -> bool:
        """A batch for each place. True if some of each arrived."""
        batches: dict[Place, list[TierTransfer]] = {}
        for copy in copies:
            place = self.health.place(copy.target, copy.extent.offset)
            batches.setdefault(place, []).append(copy)
        return all(await wait_for_all(itertools.starmap(self._demote_to, batches.items())))

    async def _demote_to(self, place: Place, copies: list[TierTransfer]) -> bool:
        """One batch; one for the backing tier is given up when its place goes offline meanwhile.

        A stuck device may still read from our memory afterwards. That does no harm: what it then
        writes has no record, and nothing is written to that place any more. (Memory that it may
        still write into, by a promotion, is in quarantine until then.)
        """
        waiting = dict.fromkeys(copies, False)
        ends = [lost := asyncio.ensure_future(self.health.lost(place).wait())]
        if place[0] != self._store.backing_tier:  # another batch may get its extents
            ends.clear()
        writing: asyncio.Task[bool] = self._spawn(self._write_batch(place, waiting))
        try:
            await asyncio.wait([writing, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            self._report(waiting, waiting)
        return writing.done() and not writing.cancelled() and writing.result()

    async def _write_batch(self, place: Place, waiting: dict[TierTransfer, bool]) -> bool:
        """Write the bytes, then the records, and report at once, unless the batch was given up.

        A call that removes a block meanwhile must find its copy either without a record, or in the
        backing store: so nothing is awaited between the record and the report.
        """
        copies = list(waiting)
        # Before their old extents are written over:
        if place[0] == self._store.backing_tier and not await self.records.erase([place[1]]):
            return False
        moved = await wait_for_all(map(self._bytes.move, copies))
        done = dict(zip(copies, moved, strict=True))
        await self.records.persist(place, done)
        arrived = any(done.values())
        self._report(waiting, done)
        self.health.batch_done(place, good=arrived)
        return arrived

    def _report(self, waiting: dict[TierTransfer, bool], good: dict[TierTransfer, bool]) -> None:
        """Report the transfers in `waiting` to the store, once."""
        now = _now()
        for copy in waiting:
            self._store.transfers.done(copy, good=good[copy], now=now)
        waiting.clear()
        self._on_change()

    async def _write_one(self) -> bool:
        """Try the tier: erase what is to be erased, and write back one block, if there is one."""
        if not await self.records.erase():
            return False
        copies = self._store.transfers.try_writeback(_now())
        if not copies:  # nothing to write, or not yet
            return not self._store.transfers.behind
        return await self._demote(copies)

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return self._own(asyncio.get_running_loop().create_task(work))

    def _own(self, task: asyncio.Task[_T]) -> asyncio.Task[_T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    return asyncio.get_running_loop().time()
