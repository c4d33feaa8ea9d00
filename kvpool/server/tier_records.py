"""The records of a backing tier that survives a restart: what its extents hold (design: tiers)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from kvpool import logs
from kvpool.errors import Unavailable
from kvpool.protocols import Tier
from kvpool.protocols.persistent_tier import KeepsSome, PersistentTier, Record, ReportsDropped
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tier_health import Place, TierHealth

log = logs.get("kvpool.mover")

#: A start with a large file says so often how far it is.
_SAY_S: Final = 10.0
#: Records of recovered blocks that are given back in one step.
_FREED_AT_ONCE: Final = 4096


class TierRecords:
    """Writes, erases and reads them, of whichever tier is the backing one now.

    `spawn` makes tasks that end although their caller is cancelled.
    """

    def __init__(
        self,
        store: TieredStore,
        tiers: Sequence[Tier],
        health: TierHealth,
        spawn: Callable[[Coroutine[Any, Any, bool]], asyncio.Task[bool]],
    ) -> None:
        self._store = store
        self._health = health
        self._spawn = spawn
        self._durable = {
            n: tier for n, tier in enumerate(tiers) if isinstance(tier, PersistentTier)
        }
        self._keeps = {n: one.keeps for n, one in enumerate(tiers) if isinstance(one, KeepsSome)}
        #: Of each part of the backing tier: keeps `persist` and `erase` of one extent in order.
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    def keeps(self, entry: Entry) -> bool:
        tier = self._store.backing_tier
        return tier in self._durable and (
            tier not in self._keeps or self._keeps[tier](entry.offset)
        )

    async def recover(self, name: str, dropped: dict[str, int]) -> None:
        """Add what the backing tier, of this name, still holds from an earlier life.

        What is lost of it is counted by reason in `dropped`: those of the tier, and `refused`, for
        records of one block or of one place that the store has already. (design: nvme-format)
        """
        durable = self._durable.get(self._store.backing_tier)
        if durable is None:
            return
        found = await durable.recover()
        records = found if isinstance(found, list) else list(found)  # a million is not copied
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
        index = self._store.backing.index
        if isinstance(durable, ReportsDropped):
            dropped.update(durable.dropped)
        if refused := recovered - index.stored:
            dropped["refused"] = refused
        report = log.warning if dropped else log.info
        report(
            "tier is warm",
            tier=name,
            blocks=index.stored,
            bytes=index.stored_bytes,
            dropped=sum(dropped.values()),
            why=", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())),
        )

    async def erase_all(self) -> bool:
        """Return when the backing tier has no record of blocks that left before the call.

        False, soon, when it is read-only, or a disk fails: then the records are erased later. Of
        a server that is restarted before that the blocks are back.
        """
        tier = self._store.backing_tier
        parts = self._health.open_parts(tier)  # one that opens meanwhile has its records still
        if self._store.queue.read_only or not await self.erase(parts):
            return False
        return set(self._health.parts(tier)) <= {*parts}

    async def erase(self, parts: Sequence[int] | None = None) -> bool:
        """As `erase_all`, of these parts or of those that take writes; also while it is
        read-only."""
        backing_tier = self._store.backing_tier
        if backing_tier not in self._durable:
            self._store.erasures.take()
            return True
        if parts is None:
            parts = self._health.open_parts(backing_tier)
        if len(self._store.erasures) or any(self._locks[part].locked() for part in parts):
            # The caller may be cancelled; the records must be erased all the same.
            erasing = [self._spawn(self._erase_part(part)) for part in parts]
            return all([await asyncio.shield(one) for one in erasing])
        return True

    async def _erase_part(self, part: int) -> bool:
        async with self._locks[part]:
            backing_tier = self._store.backing_tier  # after the lock: it may have gone offline
            erasable = self._store.erasures.take(part)
            if erasable and backing_tier in self._durable:
                place = backing_tier, part
                try:
                    with self._health.calling(place):
                        await self._durable[backing_tier].erase(erasable)
                except Unavailable as error:
                    # Nothing may be written into their extents before: this would erase its record.
                    self._store.erasures.failed(erasable)
                    self._health.write_failed(place, error)
                    self._health.batch_done(place, good=False)
                    return False
            return True

    async def persist(self, place: Place, good: dict[TierTransfer, bool]) -> None:
        """Write the records of the copies that are `good`; without one, a copy is not good.

        Such a block would not be found after a restart. A call that removes a block while its
        record is written waits in `erase` for the lock, and has the record erased again.
        """
        async with self._locks[place[1]]:
            backing_tier = self._store.backing_tier
            copies = [
                copy
                for copy, is_good in good.items()
                if is_good and copy.target == backing_tier and copy.entry.state is State.STORED
            ]
            durable = self._durable.get(backing_tier)
            if durable is None or not copies:
                return
            try:
                with self._health.calling((backing_tier, place[1])):
                    await durable.persist([_record(copy) for copy in copies])
            except Unavailable as error:
                self._health.write_failed((backing_tier, place[1]), error)
                good.update(dict.fromkeys(copies, False))


def _record(copy: TierTransfer) -> Record:
    entry, extent, index = copy.entry, copy.extent, copy.entry.index
    return Record(
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


def _now() -> float:
    return asyncio.get_running_loop().time()
