"""Moves the bytes of one block between memory and another tier, and checks what comes up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvpool.checksum import block_seed, checksum, hasher, namespace_seed
from kvpool.errors import Unavailable
from kvpool.protocols import Addressable, Tier
from kvpool.server.state.entry import Entry
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tier_health import TierHealth
from kvpool.server.tier_traffic import TierTraffic
from kvpool.threads import in_thread
from kvpool.types import Extent, ReadStatus

#: Smaller blocks are hashed on the loop: waking up a thread costs more.
_INLINE_MAX: Final = 128 << 10
#: Read and hashed at once where a block is looked at that readers found corrupt. A multiple of
#: every alignment.
_HASH_STEP: Final = 1 << 20


class TierBytes:
    """What is read is compared with its checksum before anybody gets it; failures are told."""

    def __init__(
        self,
        store: TieredStore,
        tiers: Sequence[Tier],
        traffic: Sequence[TierTraffic],
        health: TierHealth,
    ) -> None:
        memory = tiers[store.front_tier]
        assert isinstance(memory, Addressable)
        self._memory = memory
        self._store = store
        self._tiers = tiers
        self._traffic = traffic
        self._health = health

    async def move(self, copy: TierTransfer) -> bool:
        """Move one block's bytes; True when they have arrived and are the right ones."""
        store, entry, health = self._store, copy.entry, self._health
        up = copy.target == store.front_tier
        other = copy.source if up else copy.target
        tier, traffic = self._tiers[other], self._traffic[other]
        place = health.place(other, entry.offset if up else copy.extent.offset)
        flow = traffic.read if up else traffic.written
        size = store.front.allocator.rounded(entry.size)  # extents of all tiers are rounded alike
        memory = self._memory.view(copy.extent.offset if up else entry.offset, size)
        now = asyncio.get_running_loop().time
        flow.begin(now())
        try:
            with health.calling(place):
                if up:
                    await tier.read_into(entry.offset, memory)
                else:
                    await tier.write_from(copy.extent.offset, memory)
        except Unavailable as error:
            if up:  # this block would fail again; the rest of the tier may be well
                health.read_failed(place, error)
                store.transfers.failed(copy, ReadStatus.TIER_LOST)
            else:
                health.write_failed(place, error)
            return False
        finally:
            flow.end(now())
        flow.size += entry.size
        flow.blocks += 1
        if up:
            health.read_done(place)
        if up and await _checksum(entry, memory[: entry.size]) != entry.checksum:
            traffic.corrupt += 1
            health.read_corrupt(place, entry.digest)
            store.transfers.failed(copy, ReadStatus.CORRUPT)
            return False
        return True

    async def checksum_in(self, tier: int, extent: Extent, seed: int) -> int | None:
        """As `Mover.checksum_in`."""
        digest = hasher(seed)
        buffer = memoryview(bytearray(min(extent.size, _HASH_STEP)))
        place = self._health.place(tier, extent.offset)
        for start in range(0, extent.size, _HASH_STEP):
            part = buffer[: extent.size - start]
            try:
                with self._health.calling(place):
                    await self._tiers[tier].read_into(extent.offset + start, part)
            except Unavailable as error:
                self._health.read_failed(place, error)
                return None
            digest.update(part)
        return digest.intdigest()


async def _checksum(entry: Entry, data: memoryview) -> int:
    seed = block_seed(namespace_seed(entry.index.namespace, entry.index.part), entry.digest)
    if len(data) <= _INLINE_MAX:
        return checksum(data, seed)
    return await in_thread(checksum, data, seed)
