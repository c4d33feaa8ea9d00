"""Moves blocks between a server's tiers, as `core.stack` decides.

Down in the background, in batches, while nobody waits for a slow tier; up when a reader asks, a
little ahead of what it can take. What comes from a tier below is checked before anybody sees it.
A tier that keeps failing, or is stuck, is taken out of service with one line, and the server goes
on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from kvpool import logs
from kvpool.checksum import block_seed, checksum, namespace_seed
from kvpool.errors import Unavailable
from kvpool.protocols import Addressable, PersistentTier, Tier
from kvpool.server import tier_traffic
from kvpool.server.state.extent_state import State
from kvpool.server.state.tiered_store import MOVER, Copy, Stack
from kvpool.types import Namespace, ReadStatus, Record, TierUsage

log = logs.get("kvpool.mover")

#: Written down in one batch; two batches are under way at a time. Many small blocks are no batch:
#: readers wait while one is begun.
_DOWN_BYTES: Final = 32 << 20
_DOWN_BLOCKS: Final = 32
_DOWN_BATCHES: Final = 2
#: Staged blocks are handed to their reader when there are so many, or all.
WAVE_BYTES: Final = 8 << 20
#: Failures in a row after which a tier is out of service.
_FAILURES_MAX: Final = 8
#: One read or write that takes longer means that the device is stuck.
_STUCK_S: Final = 30.0
#: A process that was stopped hears of its timers before it hears of what has ended meanwhile.
_SECOND_LOOK_S: Final = 1.0
#: `close` gives blocks this long to get from memory to where they will be found again; a process
#: that is told to stop has a second.
_DRAIN_S: Final = 0.5
#: `close` waits this long for the last read or write.
_CLOSE_S: Final = 5.0
#: While readers wait for a slow tier, the next batch down waits for them, at most this long.
_GIVE_WAY_S: Final = 0.05
#: Smaller blocks are hashed on the spot: a thread's wake-up costs more.
_INLINE_MAX: Final = 128 << 10
#: Blocks of a lost tier that are announced as lost at once.
_BURY_STEP: Final = 1024

_Key = tuple[Namespace, int, bytes]


class _Wave:
    """A reader that waits for staged blocks."""

    __slots__ = ("left", "ready", "size")

    def __init__(self, ready: asyncio.Future[None]) -> None:
        self.ready = ready
        self.left = 0
        self.size = 0

    def arrived(self, size: int) -> None:
        self.left -= 1
        self.size += size
        if (self.left <= 0 or self.size >= WAVE_BYTES) and not self.ready.done():
            self.ready.set_result(None)


class Mover:
    """Carries out a stack's copies. `changed` is called when its books have changed."""

    def __init__(self, stack: Stack, tiers: Sequence[Tier], changed: Callable[[], None]) -> None:
        self._stack = stack
        self._tiers = tiers
        self._changed = changed
        self._durable = {
            n: tier for n, tier in enumerate(tiers) if isinstance(tier, PersistentTier)
        }
        self._traffic = [tier_traffic.TierTraffic() for _ in tiers]
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._staging: dict[_Key, list[_Wave]] = {}
        self._staging_bytes = 0
        self._nobody_waits = asyncio.Event()
        self._nobody_waits.set()
        self._base_lost = asyncio.Event()
        self._records = asyncio.Lock()  # `erase` and `persist` for one extent keep their order
        top = tiers[stack.reached]
        assert isinstance(top, Addressable)
        self._memory = top
        #: Bytes on their way up at a time: enough to keep a device busy, no more.
        self._ahead = min(64 << 20, max(top.capacity // 4, 1))

    async def recover(self) -> None:
        """Enter into the books what the base still holds from an earlier life."""
        durable = self._durable.get(self._stack.base)
        if durable is None:
            return
        records = await durable.recover()
        for _ in self._stack.restore(records, _now()):
            await asyncio.sleep(0)
        await self.erase()
        found = self._stack.bottom
        log.info(
            "tier is warm",
            tier=self._tiers[self._stack.base].name,
            blocks=found.stored,
            bytes=found.stored_bytes,
            dropped=len(records) - found.stored,
        )

    def start(self) -> None:
        if len(self._tiers) > 1:
            for _ in range(_DOWN_BATCHES):
                self._spawn(self._carry_down())

    async def close(self) -> None:
        """Stop, when what has yet to be copied down is there, or after half a second.

        Waits for what a device is doing, but not for ever: one that is stuck is left behind.
        """
        for _ in range(50):
            if not self._stack.waiting and not self._stack.top.pinned_by(MOVER):
                break
            await asyncio.sleep(_DRAIN_S / 50)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    def wake(self) -> None:
        """There may be something to copy down, or an extent to forget."""
        self._wake.set()

    def usage(self, now: float) -> list[TierUsage]:
        """How full each tier is and what goes through it, for `kvpool status`."""
        return tier_traffic.usage(self._tiers, self._stack, self._traffic, now)

    # --- up ------------------------------------------------------------------------------------

    def begin(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """Bring blocks up, as many as may be on their way at a time."""
        room = self._ahead - self._staging_bytes
        if room <= 0:
            return
        staging = self._staging
        others = [digest for digest in digests if (namespace, part, digest) not in staging]
        copies = self._stack.stage(namespace, part, others, room, _now())
        for copy in copies:
            self._staging[_key(copy)] = []
            self._staging_bytes += copy.entry.size
            self._spawn(self._carry_up(copy))
        if copies:
            self._nobody_waits.clear()
            self._changed()  # room was made for them

    async def stage(
        self, namespace: Namespace, part: int, digests: Sequence[bytes], until: float
    ) -> None:
        """`begin`, and wait until a good part of them is there, or `until`."""
        self.begin(namespace, part, digests)
        wave = _Wave(asyncio.get_running_loop().create_future())
        for digest in digests:
            waiting = self._staging.get((namespace, part, digest))
            if waiting is not None:
                waiting.append(wave)
                wave.left += 1
        await asyncio.wait([wave.ready], timeout=max(0.0, until - _now()))

    async def _carry_up(self, copy: Copy) -> None:
        good = False
        try:
            good = await self._move(copy)
        finally:
            self._stack.copied(copy, good=good, now=_now())
            self._staging_bytes -= copy.entry.size
            if not self._staging_bytes:
                self._nobody_waits.set()
            for wave in self._staging.pop(_key(copy)):
                wave.arrived(copy.entry.size)
            self._changed()

    # --- down ------------------------------------------------------------------------------------

    async def _carry_down(self) -> None:
        while True:
            copies = self._stack.take_copies(_DOWN_BYTES, _DOWN_BLOCKS, _now())
            if copies:
                await self._copy_down(copies)
            else:
                self._wake.clear()
                await self.erase()
                await self._wake.wait()
            if not self._stack.is_pressed:  # readers first
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GIVE_WAY_S):
                        await self._nobody_waits.wait()

    async def _copy_down(self, copies: list[Copy]) -> None:
        """One batch; given up when the base is lost meanwhile.

        A device that is stuck may then still read from our memory, which harms nobody: what it
        writes has no record. (What it may still write into our memory stays reserved.)
        """
        waiting = dict.fromkeys(copies, False)
        writing = self._spawn(self._write_down(waiting))
        lost = asyncio.ensure_future(self._base_lost.wait())
        try:
            await asyncio.wait([writing, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            self._report(waiting, waiting)

    async def _write_down(self, waiting: dict[Copy, bool]) -> None:
        """Write the bytes, then the records, and report at once, unless the batch was given up.

        Whoever removes a block meanwhile must find its copy either not recorded or in the books.
        """
        copies = list(waiting)
        await self.erase()  # before their old extents are written over
        moved = await asyncio.gather(*map(self._move, copies))
        done = dict(zip(copies, moved, strict=True))
        await self._remember(done)
        self._report(waiting, done)

    def _report(self, waiting: dict[Copy, bool], good: dict[Copy, bool]) -> None:
        """What became of the copies that wait to be reported."""
        now = _now()
        for copy in waiting:
            self._stack.copied(copy, good=good[copy], now=now)
        waiting.clear()
        self._changed()

    # --- what a durable base remembers -----------------------------------------------------------

    async def erase(self) -> None:
        """Return when the base has no record any more of what has left the books so far."""
        if self._stack.base not in self._durable:
            self._stack.take_freed()
        elif self._stack.freed or self._records.locked():
            # Whoever asks may be cancelled; what has left the books must be forgotten all the same.
            await asyncio.shield(self._spawn(self._forget()))

    async def _forget(self) -> None:
        async with self._records:
            base = self._stack.base  # which may have changed: then there is nothing to forget
            freed = self._stack.take_freed()
            if freed and base in self._durable:
                try:
                    with self._alarmed(base):
                        await self._durable[base].erase(freed)
                except Unavailable as error:  # a record too many is a miss at worst
                    self._failed(base, error)

    async def _remember(self, good: dict[Copy, bool]) -> None:
        """Without a record a block would not be found after a restart: it counts as not copied.

        Who removes a block while its record is written waits in `erase`, and has it erased again.
        """
        base = self._stack.base
        async with self._records:
            copies = [
                copy
                for copy, is_good in good.items()
                if is_good and copy.target == base and copy.entry.state is State.STORED
            ]
            if not await self._record(base, copies):
                good.update(dict.fromkeys(copies, False))

    async def _record(self, base: int, copies: Sequence[Copy]) -> bool:
        durable = self._durable.get(base)
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
                )
            )
        try:
            with self._alarmed(base):
                await durable.persist(records)
        except Unavailable as error:
            self._failed(base, error)
            return False
        return True

    # --- one block ------------------------------------------------------------------------------

    async def _move(self, copy: Copy) -> bool:
        """Carry one block's bytes; True when they are there and are the right ones."""
        stack, entry = self._stack, copy.entry
        up = copy.target == stack.reached
        other = copy.source if up else copy.target
        tier, traffic = self._tiers[other], self._traffic[other]
        flow = traffic.read if up else traffic.written
        size = stack.top.allocator.rounded(entry.size)  # extents of all tiers are rounded alike
        memory = self._memory.view(copy.extent.offset if up else entry.offset, size)
        try:
            flow.begin(_now())
            with self._alarmed(other):
                if up:
                    await tier.read_into(entry.offset, memory)
                else:
                    await tier.write_from(copy.extent.offset, memory)
        except Unavailable as error:
            self._failed(other, error)
            if up:  # the rest of the tier may be well; this block would fail again
                stack.spoilt(copy, ReadStatus.TIER_LOST)
            return False
        finally:
            flow.end(_now())
        flow.size += entry.size
        flow.blocks += 1
        traffic.failures_in_a_row = 0
        if up and await self._checksum(entry, memory[: entry.size]) != entry.checksum:
            traffic.corrupt += 1
            log.error("block is corrupt", tier=tier.name, block=entry.digest)
            stack.spoilt(copy, ReadStatus.CORRUPT)
            return False
        return True

    async def _checksum(self, entry: Any, data: memoryview) -> int:
        seed = block_seed(namespace_seed(entry.index.namespace, entry.index.part), entry.digest)
        if len(data) <= _INLINE_MAX:
            return checksum(data, seed)
        return await asyncio.get_running_loop().run_in_executor(None, checksum, data, seed)

    # --- failures -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alarmed(self, tier: int) -> Iterator[None]:
        """A tier that takes too long for what is done inside is out of service."""
        loop = asyncio.get_running_loop()

        def late() -> None:
            why = f"stuck for {_STUCK_S:g} s"
            alarms.append(loop.call_later(_SECOND_LOOK_S, self._retire, tier, why))

        alarms = [loop.call_later(_STUCK_S, late)]
        try:
            yield
        finally:
            for alarm in alarms:
                alarm.cancel()

    def _failed(self, tier: int, error: Unavailable) -> None:
        traffic = self._traffic[tier]
        traffic.failures += 1
        traffic.failures_in_a_row += 1
        if traffic.failures_in_a_row >= _FAILURES_MAX:
            self._retire(tier, str(error))

    def _retire(self, tier: int, why: str) -> None:
        if tier not in self._stack.lost_tiers and tier != self._stack.reached:
            log.error("tier is out of service", tier=self._tiers[tier].name, why=why)
            if tier == self._stack.base:
                self._base_lost.set()
            self._spawn(self._bury(self._stack.retire(tier)))
            self._changed()

    async def _bury(self, entries: list[Any]) -> None:
        for first in range(0, len(entries), _BURY_STEP):
            self._stack.bury(entries[first : first + _BURY_STEP])
            self._changed()
            await asyncio.sleep(0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    return asyncio.get_running_loop().time()


def _key(copy: Copy) -> _Key:
    index = copy.entry.index
    return index.namespace, index.part, copy.entry.digest
