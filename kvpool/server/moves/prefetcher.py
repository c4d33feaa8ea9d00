"""Brings blocks up from a slower tier before a reader comes, on request.

In steps of some MiB, one at a time. Each waits for readers and for the budget, and makes room only
where little is lost; so a prefetch that nobody reads costs a bounded part of the memory and of the
disk's time (design: promotion).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from itertools import islice
from typing import Final

import msgspec

from kvpool import logs
from kvpool.protocols import Peer
from kvpool.server.extension import Handlers, ServerExtension, ServerParts
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.server.moves.state.prefetch_queue import Chain, PrefetchQueue
from kvpool.server.state.prefetches import HOLD_S, PrefetchedBlocks
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tier_mover import TierMover
from kvpool.tenant_names import tenant_of
from kvpool.types import BATCH_BLOCKS_MAX, MoveStatus, ServerStats
from kvpool.wire import messages as wire
from kvpool.wire.moves import Prefetch, unpack_part

log = logs.get("kvpool.server")

#: Bytes of one step, or one block if that is larger; and blocks that one step looks at.
_STEP_BYTES: Final = 4 << 20
_STEP_BLOCKS: Final = 64
#: While nothing can come up, it looks for room again so often.
_TICK_S: Final = 0.1
#: A wait for the budget is a difference of times, and may be next to nothing.
_TURN_MIN_S: Final = 1e-4
#: A step that takes longer is left behind: its disk is stuck, and will be taken out of service.
_STEP_S: Final = 5.0
#: Chains that wait at the same time.
_QUEUE_MAX: Final = 256


class Prefetcher(ServerExtension):
    """Fills one server's memory before readers come, with a quarter of the speed that is measured.
    With one memory nothing is below it: a block is there, or gone."""

    def __init__(self, parts: ServerParts) -> None:
        self._context = parts.context
        self._store = self._context.store
        self.budget = FetchBudget()
        self._queue = PrefetchQueue(_QUEUE_MAX)
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._refused_blocks = 0

    @property
    def handlers(self) -> Handlers:
        return {Prefetch: self._prefetch}

    def completed(self, stats: ServerStats) -> ServerStats:
        """What came up, and what became of it; blocks that wait to come up are in none of them."""
        store = self._store
        found = (
            store.front.extents.prefetched if isinstance(store, TieredStore) else PrefetchedBlocks()
        )
        counters = {
            **stats.counters,
            "prefetched_blocks": found.blocks_came,
            "prefetched_bytes": found.came,
            "prefetch_used_bytes": found.used,
            "prefetch_wasted_bytes": found.wasted,
            "prefetch_unread_bytes": found.bytes,
            "prefetch_refused_blocks": self._refused_blocks,
        }
        return msgspec.structs.replace(stats, counters=counters)

    def start(self) -> None:
        store, mover = self._store, self._context.mover
        if isinstance(store, TieredStore) and isinstance(mover, TierMover):
            bring_up = functools.partial(self._bring_up, store, mover)
            self._task = self._context.tasks.forever("prefetch", bring_up)

    async def close(self) -> None:
        """End at once; transfers under way belong to the mover. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _prefetch(self, peer: Peer, m: Prefetch) -> wire.StatusReply:
        """It is no use of a block, and waits for none."""
        namespace, part, digests = unpack_part(m)
        store, below = self._store, deque[bytes]()
        statuses = []
        for digest in digests:
            if store.front.index.peek(namespace, part, digest) is not None:
                statuses.append(MoveStatus.HERE)
            elif store.peek(namespace, part, digest) is not None:
                below.append(digest)
                statuses.append(MoveStatus.IN_PROGRESS)
            else:
                statuses.append(MoveStatus.GONE)
        if below:
            chain = Chain(namespace, part, below)
            if self._task is not None and self._queue.add(chain, _now() + HOLD_S):
                self._woken.set()
            else:
                self._refused_blocks += len(below)
                refused = MoveStatus.REFUSED
                statuses = [refused if one is MoveStatus.IN_PROGRESS else one for one in statuses]
        return wire.StatusReply(bytes(statuses))

    # --- inside --------------------------------------------------------------------------

    async def _bring_up(self, store: TieredStore, mover: TierMover) -> None:
        self._woken.clear()
        store.front.extents.drop_lapsed(_now())
        if not await self._step(store, mover):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._woken.wait()

    async def _step(self, store: TieredStore, mover: TierMover) -> int:
        """Bring up the next blocks of the chain whose turn it is; how many have begun."""
        chain = self._queue.next(_now())
        if chain is None:
            return 0
        namespace, part, digests = chain
        for _ in range(min(len(digests), BATCH_BLOCKS_MAX)):
            if store.index.below(namespace, part, digests[0]) is not None:
                break
            digests.popleft()  # it is in memory, or gone
        memory, tenant = store.front.allocator.capacity, tenant_of(namespace.name)
        left = store.front.extents.prefetched.room(memory, tenant)
        if not digests or left <= 0:
            return 0
        await mover.promotions.wait_for_readers()
        while (wait_s := self.budget.wait_s(_now())) > 0:
            await asyncio.sleep(max(wait_s, _TURN_MIN_S))  # it may end a moment too early
            await mover.promotions.wait_for_readers()
        began = _now()
        following = list(islice(digests, _STEP_BLOCKS))
        running = mover.prefetch(namespace, part, following, min(left, _STEP_BYTES))
        if running:
            planned = sum(copy.entry.size for copy in running)
            price_s = self.budget.begin(planned, began)
            await asyncio.wait(running.values(), timeout=_STEP_S)
            arrived = [c for c, task in running.items() if task.done() and _is_good(task)]
            moved = sum(copy.entry.size for copy in arrived)
            self.budget.end(price_s, planned, moved, _now() - began)
        return len(running)


def _is_good(task: asyncio.Task[bool]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result()


def _now() -> float:
    return asyncio.get_running_loop().time()
