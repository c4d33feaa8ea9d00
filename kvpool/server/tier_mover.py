"""Moves blocks between a server's tiers, as `state.tiered_store` decides (design: tiers).

Demotion runs in the background, in batches; no client waits for it. Promotion starts when a reader
asks, a little ahead of what it can take. What comes from a slower tier is compared with its
checksum before a reader gets it. What keeps failing, or is stuck, is left out (`tier_health.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvpool import logs
from kvpool.checksum import block_seed, checksum, hasher, namespace_seed
from kvpool.config import WRITE_BACK, ServerConfig
from kvpool.errors import Unavailable
from kvpool.protocols import Addressable, KeepsSome, PersistentTier, ReportsDropped, Tier
from kvpool.protocols.policy import Policy
from kvpool.runtime import wait_for_all
from kvpool.server import tier_traffic
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.budget import Limits
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.extent_state import State
from kvpool.server.state.store import Store
from kvpool.server.state.tier_stores import front_tier, is_on_a_device, stores_of
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tier_health import Place, TierHealth
from kvpool.server.tiers import Mover
from kvpool.supervision import Supervisor
from kvpool.types import Extent, Namespace, ReadStatus, Record, TierUsage

log = logs.get("kvpool.mover")

#: Written in one batch; two batches are under way at a time. The number of blocks is bounded, too:
#: beginning a batch of many small blocks takes time in which the loop serves no reader.
_DEMOTE_BYTES: Final = 32 << 20
_DEMOTE_BLOCKS: Final = 32
_DEMOTE_BATCHES: Final = 2
#: A reader is answered when so many bytes have been promoted for it, or all of its blocks.
PROMOTED_BYTES_MIN: Final = 8 << 20
#: A batch of which nothing has arrived is followed by a pause, so that a bad place costs no CPU.
_AFTER_FAILURE_S: Final = 0.1
#: A start with a large file says so often how far it is.
_SAY_S: Final = 10.0
#: Records of recovered blocks that are given back in one step.
_FREED_AT_ONCE: Final = 4096
#: `close` gives dirty blocks this long to be written back, where they will be found again; service
#: managers and tests allow a process about a second to stop.
_DRAIN_S: Final = 0.5
#: So often it looks whether they are.
_POLL_S: Final = 0.01
#: `close` waits this long for the last read or write.
_CLOSE_S: Final = 5.0
#: While readers wait for a slow tier, what nobody waits for yields to them, at most this long.
_YIELD_S: Final = 0.05
#: Smaller blocks are hashed on the loop: waking up a thread costs more.
_INLINE_MAX: Final = 128 << 10
#: Read and hashed at once where a block is looked at that readers found corrupt. A multiple of
#: every alignment.
_HASH_STEP: Final = 1 << 20


_Key = tuple[Namespace, int, bytes]
_T = TypeVar("_T")


class _Promotion:
    """A block that comes up, and the readers that wait for it."""

    __slots__ = ("copy", "waiters")

    def __init__(self, copy: TierTransfer) -> None:
        self.copy = copy
        self.waiters: list[_PromotionWaiter] = []


class _PromotionWaiter:
    """A reader that waits until enough of its blocks have been promoted."""

    __slots__ = ("ready", "remaining", "size")

    def __init__(self, ready: asyncio.Future[None]) -> None:
        self.ready = ready
        self.remaining = 0
        self.size = 0

    def arrived(self, size: int) -> None:
        """One promotion has ended, well or not: the reader looks again by itself."""
        self.remaining -= 1
        self.size += size
        if (self.remaining <= 0 or self.size >= PROMOTED_BYTES_MIN) and not self.ready.done():
            self.ready.set_result(None)


class TierMover(Mover):
    """Carries out the transfers of a `TieredStore`."""

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
        self._durable = {
            n: tier for n, tier in enumerate(tiers) if isinstance(tier, PersistentTier)
        }
        self._keeps = {n: one.keeps for n, one in enumerate(tiers) if isinstance(one, KeepsSome)}
        self._traffic = [tier_traffic.TierTraffic() for _ in tiers]
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._promoting: dict[_Key, _Promotion] = {}
        self._promoting_bytes = 0
        self._no_promotions = asyncio.Event()
        self._no_promotions.set()
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
        #: Of each part of the backing tier: keeps `persist` and `erase` of one extent in order.
        self._records_locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        front = tiers[store.front_tier]
        assert isinstance(front, Addressable)
        self._memory = front
        #: Bytes that are promoted at a time: enough to keep a device busy, no more.
        self._promoting_max = min(64 << 20, max(front.capacity // 4, 1))

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

    async def recover(self) -> None:
        """Add what the backing tier still holds from an earlier life (design: nvme-format).

        What is lost of it is counted by reason: those of the tier, and `refused`, for records of
        one block or of one place that the store has already.
        """
        durable = self._durable.get(self._store.backing_tier)
        if durable is None:
            return
        records = list(await durable.recover())
        recovered = len(records)
        logged_at = _now()
        for _ in self._store.restore(records, logged_at):
            await asyncio.sleep(0)
            if _now() - logged_at >= _SAY_S:
                logged_at = _now()
                log.info("blocks are found", blocks=self._store.backing.index.stored, of=recovered)
        while records:  # to give back a million of them takes a while, too
            del records[-_FREED_AT_ONCE:]
            await asyncio.sleep(0)
        await self.erase()
        found = self._store.backing
        dropped = self._traffic[self._store.backing_tier].dropped
        if isinstance(durable, ReportsDropped):
            dropped.update(durable.dropped)
        if refused := recovered - found.index.stored:
            dropped["refused"] = refused
        report = log.warning if dropped else log.info
        report(
            "tier is warm",
            tier=self._tiers[self._store.backing_tier].name,
            blocks=found.index.stored,
            bytes=found.index.stored_bytes,
            dropped=sum(dropped.values()),
            why=", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())),
        )

    def keeps(self, entry: Entry) -> bool:
        tier = self._store.backing_tier
        return tier in self._durable and (
            tier not in self._keeps or self._keeps[tier](entry.offset)
        )

    def start(self) -> None:
        if len(self._tiers) > 1:
            for _ in range(_DEMOTE_BATCHES):
                self._own(self._supervisor.forever("write-back", self._write_back))

    async def close(self, flush_s: float) -> None:
        """All dirty blocks that are of use are written back; with write-through little is dirty,
        and half a second is enough.

        Waits for the transfers under way, but not for ever: a stuck device is left behind.
        """
        lazy = self._store.queue.write_back is not None
        await self._flush(_now() + (flush_s if lazy else _DRAIN_S))
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

    def usage(self, now: float) -> list[TierUsage]:
        problems = [self.health.problems(number) for number in range(len(self._tiers))]
        return tier_traffic.usage(self._tiers, self._store, self._traffic, problems, now)

    # --- promotion -------------------------------------------------------------------------------

    def promote(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """As many as may be under way at a time (design: promotion)."""
        size_max = self._promoting_max - self._promoting_bytes
        if size_max > 0:
            self._start_promotions(namespace, part, digests, size_max)

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
        promoting = self._promoting
        others = [digest for digest in digests if (namespace, part, digest) not in promoting]
        copies = self._store.transfers.start_promotions(
            namespace, part, others, size_max, _now(), prefetch=prefetch
        )
        tasks = {}
        for copy in copies:
            self._promoting[_key(copy)] = _Promotion(copy)
            if not prefetch:
                self._promoting_bytes += copy.entry.size
                self._no_promotions.clear()
            tasks[copy] = self._spawn(self._promote(copy))
        if self._store.change_log.changes:  # their reservations have evicted blocks
            self._on_change()
        return tasks

    async def wait_for_readers(self) -> None:
        """Return when no reader waits for a slow tier, or after a moment: readers come first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_YIELD_S):
                await self._no_promotions.wait()

    async def promote_and_wait(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], until: float
    ) -> bool:
        """False also where nothing is under way that would free room (design: promotion)."""
        self.promote(namespace, part, digests)
        waiter = _PromotionWaiter(asyncio.get_running_loop().create_future())
        for digest in digests:
            waiting = self._promoting.get((namespace, part, digest))
            if waiting is not None:
                waiting.waiters.append(waiter)
                waiter.remaining += 1
        if not waiter.remaining and not self._store.is_held:
            return False
        await asyncio.wait([waiter.ready], timeout=max(0.0, until - _now()))
        return True

    async def _promote(self, copy: TierTransfer) -> bool:
        good = False
        try:
            good = await self._move(copy)
        finally:
            self._store.transfers.done(copy, good=good, now=_now())
            self._promotion_ended(copy)
            self._on_change()
        return good

    def _promotion_ended(self, copy: TierTransfer) -> None:
        """Let its readers look again, once."""
        promotion = self._promoting.get(_key(copy))
        if promotion is None or promotion.copy is not copy:
            return  # of a place that was lost meanwhile
        del self._promoting[_key(copy)]
        self._promoting_bytes -= 0 if copy.prefetch else copy.entry.size
        if not self._promoting_bytes:
            self._no_promotions.set()
        for waiter in promotion.waiters:
            waiter.arrived(copy.entry.size)

    def _promotions_lost(self, place: Place) -> None:
        """Nobody waits for what a lost device still reads. It may write into our memory until the
        call ends, so that is not reused before."""
        for one in list(self._promoting.values()):
            if self.health.place(one.copy.source, one.copy.entry.offset) == place:
                front = self._store.front
                front.quarantine(MOVER, one.copy.id, -one.copy.id)
                if one.copy.prefetch:  # it comes no more
                    front.extents.prefetched.coming -= front.allocator.rounded(one.copy.entry.size)
                self._promotion_ended(one.copy)

    # --- demotion -------------------------------------------------------------------------------

    async def _write_back(self) -> None:
        """The next batch, or the wait for one."""
        waited = self._store.queue.waiting
        copies = self._store.transfers.next_writebacks(_DEMOTE_BYTES, _DEMOTE_BLOCKS, _now())
        if self._store.change_log.changes:  # the reservations below have evicted blocks
            self._on_change()
        if copies:
            if not await self._demote(copies):
                await asyncio.sleep(_AFTER_FAILURE_S)
        elif 0 < self._store.queue.waiting < waited:  # the disk has refused those that were next
            await asyncio.sleep(0)
        else:
            self._wake.clear()
            if self._store.queue.read_only or await self._erase():
                await self._wake.wait()
            else:
                await asyncio.sleep(_AFTER_FAILURE_S)
        if not self._store.queue.is_under_pressure:
            await self.wait_for_readers()

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
        if place[0] == self._store.backing_tier and not await self._erase([place[1]]):
            return False
        moved = await wait_for_all(map(self._move, copies))
        done = dict(zip(copies, moved, strict=True))
        await self._persist(place, done)
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

    # --- records of a persistent backing tier -----------------------------------------------------

    async def erase(self) -> bool:
        """Return when the backing tier has no record of blocks that left before the call.

        False, soon, when it is read-only, or a disk fails: then the records are erased later. Of
        a server that is restarted before that the blocks are back.
        """
        if self._store.queue.read_only or not await self._erase():
            return False
        tier = self._store.backing_tier
        return self.health.open_parts(tier) == self.health.parts(tier)

    async def _erase(self, parts: Sequence[int] | None = None) -> bool:
        """As `erase`, of these parts or of those that take writes; also while it is read-only."""
        backing_tier = self._store.backing_tier
        if backing_tier not in self._durable:
            self._store.erasures.take()
            return True
        if parts is None:
            parts = self.health.open_parts(backing_tier)
        if len(self._store.erasures) or any(self._records_locks[part].locked() for part in parts):
            # The caller may be cancelled; the records must be erased all the same.
            erasing = [self._spawn(self._erase_part(part)) for part in parts]
            return all([await asyncio.shield(one) for one in erasing])
        return True

    async def _erase_part(self, part: int) -> bool:
        async with self._records_locks[part]:
            backing_tier = self._store.backing_tier  # after the lock: it may have gone offline
            erasable = self._store.erasures.take(part)
            if erasable and backing_tier in self._durable:
                place = backing_tier, part
                try:
                    with self.health.calling(place):
                        await self._durable[backing_tier].erase(erasable)
                except Unavailable as error:
                    # Nothing may be written into their extents before: this would erase its record.
                    self._store.erasures.failed(erasable)
                    self.health.write_failed(place, error)
                    self.health.batch_done(place, good=False)
                    return False
            return True

    async def _persist(self, place: Place, good: dict[TierTransfer, bool]) -> None:
        """Write the records of the copies that are `good`; without one, a copy is not good.

        Such a block would not be found after a restart. A call that removes a block while its
        record is written waits in `erase` for the lock, and has the record erased again.
        """
        async with self._records_locks[place[1]]:
            backing_tier = self._store.backing_tier
            copies = [
                copy
                for copy, is_good in good.items()
                if is_good and copy.target == backing_tier and copy.entry.state is State.STORED
            ]
            if not await self._persist_records((backing_tier, place[1]), copies):
                good.update(dict.fromkeys(copies, False))

    async def _persist_records(self, place: Place, copies: Sequence[TierTransfer]) -> bool:
        durable = self._durable.get(place[0])
        if durable is None or not copies:
            return True
        records = []
        for copy in copies:
            entry, extent = copy.entry, copy.extent
            index = entry.index
            records.append(
                Record(
                    index.namespace,
                    index.part,
                    entry.digest,
                    entry.parent,
                    extent.offset,
                    entry.size,
                    entry.checksum,
                    extent.generation,
                    max(1, entry.copies),
                )
            )
        try:
            with self.health.calling(place):
                await durable.persist(records)
        except Unavailable as error:
            self.health.write_failed(place, error)
            return False
        return True

    # --- one block ------------------------------------------------------------------------------

    async def _move(self, copy: TierTransfer) -> bool:
        """Move one block's bytes; True when they have arrived and are the right ones."""
        store, entry = self._store, copy.entry
        up = copy.target == store.front_tier
        other = copy.source if up else copy.target
        tier, traffic = self._tiers[other], self._traffic[other]
        place = self.health.place(other, entry.offset if up else copy.extent.offset)
        flow = traffic.read if up else traffic.written
        size = store.front.allocator.rounded(entry.size)  # extents of all tiers are rounded alike
        memory = self._memory.view(copy.extent.offset if up else entry.offset, size)
        flow.begin(_now())
        try:
            with self.health.calling(place):
                if up:
                    await tier.read_into(entry.offset, memory)
                else:
                    await tier.write_from(copy.extent.offset, memory)
        except Unavailable as error:
            if up:  # this block would fail again; the rest of the tier may be well
                self.health.read_failed(place, error)
                store.transfers.failed(copy, ReadStatus.TIER_LOST)
            else:
                self.health.write_failed(place, error)
            return False
        finally:
            flow.end(_now())
        flow.size += entry.size
        flow.blocks += 1
        if up:
            self.health.read_done(place)
        if up and await _checksum(entry, memory[: entry.size]) != entry.checksum:
            traffic.corrupt += 1
            self.health.read_corrupt(place, entry.digest)
            store.transfers.failed(copy, ReadStatus.CORRUPT)
            return False
        return True

    async def checksum_in(self, tier: int, extent: Extent, seed: int) -> int | None:
        digest = hasher(seed)
        buffer = memoryview(bytearray(min(extent.size, _HASH_STEP)))
        place = self.health.place(tier, extent.offset)
        for start in range(0, extent.size, _HASH_STEP):
            part = buffer[: extent.size - start]
            try:
                with self.health.calling(place):
                    await self._tiers[tier].read_into(extent.offset + start, part)
            except Unavailable as error:
                self.health.read_failed(place, error)
                return None
            digest.update(part)
        return digest.intdigest()

    async def _write_one(self) -> bool:
        """Try the tier: erase what is to be erased, and write back one block, if there is one."""
        if not await self._erase():
            return False
        copies = self._store.transfers.try_writeback(_now())
        return not copies or await self._demote(copies)

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return self._own(asyncio.get_running_loop().create_task(work))

    def _own(self, task: asyncio.Task[_T]) -> asyncio.Task[_T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _checksum(entry: Entry, data: memoryview) -> int:
    seed = block_seed(namespace_seed(entry.index.namespace, entry.index.part), entry.digest)
    if len(data) <= _INLINE_MAX:
        return checksum(data, seed)
    return await asyncio.get_running_loop().run_in_executor(None, checksum, data, seed)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _key(copy: TierTransfer) -> _Key:
    index = copy.entry.index
    return index.namespace, index.part, copy.entry.digest
