"""The cold tier: blocks in an object store that all servers share (design: cold).

writer.py   what comes to this server, into objects of its own
search.py   who lives, and the objects that lost servers have left
index.py    the blocks of both, and what was removed of them; reads
bucket.py   requests: deadlines, budget, reasons
state/      pure: the bytes of an object; which objects there are, and which of them go

Everything runs in the background. What clients wait for is one read, and that a removal is known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from kvpool.backoff import Backoff
from kvpool.errors import Unavailable
from kvpool.protocols.cold_tier import ColdTier
from kvpool.server.cold.bucket import Bucket
from kvpool.server.cold.index import ColdIndex
from kvpool.server.cold.search import Searcher
from kvpool.server.cold.state.format import ObjectKeys
from kvpool.server.cold.writer import ObjectWriter
from kvpool.server.extension import ServerExtension, ServerParts
from kvpool.server.state.tier_stores import cold_store
from kvpool.server.tier_keys import file_owner, storage_key
from kvpool.types import ServerStats
from kvpool.units import human

#: Objects that are written at a time. Each is in memory once.
_WRITERS: Final = 2
#: First pause after a sign of life that failed. They grow to half of the usual one: a store that
#: refuses for weeks is asked as often as one that works, and one that is back is seen soon.
_AFTER_FAILURE_S: Final = 1.0
#: A removal waits so long for the object store, and `leave` for each of its two steps.
_REMOVAL_S: Final = 2.0
_LEAVE_S: Final = 2.0


class ColdRing(ServerExtension):
    """The cold tier of one server; nothing, where it has none."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts
        self._tasks: list[asyncio.Task[None]] = []
        #: What earlier lives and lost servers have left was looked for.
        self.found = asyncio.Event()
        self._leaving = False
        store, tier = cold_store(parts.context.store.stores), parts.context.tiers[-1]
        self._has_tier = store is not None and isinstance(tier, ColdTier)
        if store is None or not isinstance(tier, ColdTier):
            return
        cluster, settings = parts.cluster, tier.cold_settings
        if settings.encrypt:
            storage_key(cluster)  # raises ConfigError without a secret
        # Below it lies what is this cluster's: one with another secret finds nothing.
        objects = tier.objects(f"kvpool-{file_owner(cluster).hex()}")
        self._bucket = Bucket(objects, requests=settings.requests, hedge_s=settings.hedge_s)
        keys = ObjectKeys(storage_key(cluster) if cluster.secret else b"")
        self._index = ColdIndex(parts.context, store, self._bucket, keys)
        self._counters = Counter(
            cold_written_blocks=0, cold_written_bytes=0, cold_not_written=0, cold_damaged=0
        )
        self._writer = ObjectWriter(parts.context, self._index, settings, self._counters)
        me, epoch = parts.context.server, parts.context.epoch
        drafts = self._writer.drafts
        self._searcher = Searcher(me, epoch, self._index, settings, self._counters, drafts)
        self._beat_s = settings.beat_s
        self._failing = Backoff(min(_AFTER_FAILURE_S, self._beat_s / 2), self._beat_s / 2)
        store.offer = self._writer.offer
        tier.begin(self._index.read_into, self._status_text)

    def start(self) -> None:
        if self._has_tier:
            self._parts.extensions.on_removed.append(self._writer.removed)
            self._parts.extensions.pass_on.append(self._save_removed)
            tasks = self._parts.context.tasks
            self._tasks = [tasks.forever("cold beat", self._beat)]
            self._tasks += [tasks.forever("cold search", self._search)]
            self._tasks += [tasks.forever("cold write", self._writer.step) for _ in range(_WRITERS)]

    async def leave(self) -> None:
        """Write what waits; then another server may answer for the objects at once."""
        if self._has_tier and not self._leaving:
            self._leaving = True
            await _tried(self._writer.finish, _LEAVE_S)
            await _tried(self._writer.save_removed, _LEAVE_S)
            self._stop()
            await _tried(self._searcher.end, _LEAVE_S)

    async def close(self) -> None:
        self._stop()
        tasks, self._tasks = self._tasks, []
        if tasks:
            await asyncio.wait(tasks)

    def completed(self, stats: ServerStats) -> ServerStats:
        if not self._has_tier:
            return stats
        counters = {
            **dict.fromkeys(("cold_failures", "cold_hedged", "cold_over_budget"), 0),
            **stats.counters,
            **self._counters,
            **self._bucket.counters,
            "cold_left_out": self._writer.waiting.left_out,
            "cold_outdated": self._index.to_delete,
        }
        return msgspec.structs.replace(stats, counters=counters)

    def _status_text(self) -> str:
        book, me = self._index.book, self._parts.context.server
        text = f"{human(book.size)} in {len(book.by_name)} objects"
        if others := len(book.by_name) - book.written_by[me]:
            text += f", {others} of lost servers"
        if waiting := self._writer.waiting.size:
            text += f", {human(waiting)} to write"
        if outdated := self._index.to_delete:
            text += f", {outdated:,} outdated to delete"
        return text + f"; failing: {self._bucket.problem}" * bool(self._bucket.problem)

    async def _beat(self) -> None:
        """Once, and the pause after it."""
        try:
            await self._searcher.beat()
        except Unavailable:
            await asyncio.sleep(self._failing.next_delay())
        else:
            self._failing.reset()
            await _tried(self._writer.save_removed, self._beat_s)
            await asyncio.sleep(self._beat_s)

    async def _search(self) -> None:
        """Once after a beat, if it is due."""
        with contextlib.suppress(Unavailable):
            await self._searcher.step()
            self.found.set()
            self._writer.start()  # before, what is there would be written once more
            await self._searcher.delete_outdated()

    async def _save_removed(self, *removal: object) -> None:
        """What the object store cannot be told now it is told later."""
        await _tried(self._writer.save_removed, _REMOVAL_S)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _tried(call: Callable[[], Awaitable[None]], within_s: float) -> None:
    with contextlib.suppress(Unavailable, TimeoutError):
        async with asyncio.timeout(within_s):
            await call()
