"""Blocks that come up from a server's disk before the prompt of their session, by its hint.

As `kvpool.server.prefetcher` does it: which session is next, which blocks are below, how much of
the memory and of the disk's time it may take, and what makes room is the product's code.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from kvpool.fleet.disks import ServerDisk
from kvpool.fleet.events import EventQueue
from kvpool.server.state.fetches import FetchBudget
from kvpool.server.state.prefetches import HOLD_S, SHARE, PrefetchQueue
from kvpool.server.state.tiered_store import TieredStore, TierTransfer
from kvpool.tools.dry_pool import BLOCK_SIZE, DryPool

#: As `kvpool.server.prefetcher`.
_STEP_BYTES: Final = 4 << 20
_STEP_BLOCKS: Final = 64
_TICK_S: Final = 0.1
_TURN_MIN_S: Final = 1e-4
_LEAD_S: Final = 2.0
_LEAD_S_MAX: Final = 10.0
_RETURNS_MAX: Final = 16
#: As `tier_mover`: while readers wait for the disk, it yields to them, at most this long.
_YIELD_S: Final = 0.05
#: A hint has come with a heartbeat by then.
_HEARTBEAT_S: Final = 1.0


class ReturnPrefetcher:
    """Of one server. It looks for sessions that return while there are some that have announced
    it, and as long as there is something to bring up."""

    def __init__(
        self,
        pool: DryPool,
        name: str,
        disk: ServerDisk,
        events: EventQueue,
        block_bytes: float,
    ) -> None:
        self._pool = pool
        self._name = name
        self._disk = disk
        self._events = events
        self._block_bytes = block_bytes
        self._budget = FetchBudget()  # a quarter of the speed that is measured
        self._returns = PrefetchQueue(_RETURNS_MAX)
        self._awake = False
        self._until = 0.0  # sessions return that have announced it
        self._has_yielded = False  # to readers, since the last step

    def expect(self, in_s: float) -> None:
        """A session has announced its return."""
        self._until = max(self._until, self._events.now + max(_HEARTBEAT_S, in_s))
        self._events.after(max(_HEARTBEAT_S, in_s - _LEAD_S_MAX), self._wake)

    def _lead_s(self, store: TieredStore) -> float:
        blocks = store.front.allocator.capacity // BLOCK_SIZE
        needed_s = blocks * self._block_bytes / SHARE / self._budget.rate
        return min(_LEAD_S + needed_s, _LEAD_S_MAX)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._run()

    def _run(self) -> None:
        server, now = self._pool.servers.get(self._name), self._events.now
        if server is None:
            return  # it is lost
        self._pool.exchange_heartbeats(now)
        server.store.front.drop_lapsed(now)
        found = self._find_return(server.store, now)
        wait_s = self._step(server.store, now)
        if wait_s is None:
            return  # the end of the step goes on
        if wait_s or found or len(self._returns) or now <= self._until:
            self._events.after(wait_s or _TICK_S, self._run)
        else:
            self._awake = False

    def _find_return(self, store: TieredStore, now: float) -> bool:
        if self._returns.is_full:
            return False
        found = store.next_return(now + self._lead_s(store))
        for chain in found.chains if found is not None else ():
            assert found is not None
            self._returns.add(chain, max(found.due, now) + HOLD_S)
        return found is not None

    def _step(self, store: TieredStore, now: float) -> float | None:
        """Begin to bring up the next blocks of the chain whose turn it is. Returns in how many
        seconds to look again, 0 if nothing can come up; None: some have begun, whose end calls
        `_run`."""
        if (wait_s := self._budget.wait_s(now)) > 0:
            return max(wait_s, _TURN_MIN_S) if len(self._returns) else 0.0
        if self._disk.has_readers and len(self._returns) and not self._has_yielded:
            self._has_yielded = True
            return _YIELD_S
        self._has_yielded = False
        chain = self._returns.next(now)
        if chain is None:
            return 0.0
        namespace, part, digests = chain
        while digests and not store.is_below(namespace, part, digests[0]):
            digests.popleft()  # it is in memory, or gone
        front = store.front
        left = front.prefetched.room(front.allocator.capacity) // BLOCK_SIZE
        if not digests or left <= 0:
            return 0.0
        blocks = max(1, min(left, int(_STEP_BYTES / self._block_bytes)))
        following = list(islice(digests, _STEP_BLOCKS))
        copies = self._disk.prefetch(namespace, following, blocks)
        if not copies:
            return 0.0
        self._begin(copies, now)
        return None

    def _begin(self, copies: list[TierTransfer], now: float) -> None:
        size = int(len(copies) * self._block_bytes)
        price_s = self._budget.begin(size, now)
        running = len(copies)

        def ended() -> None:
            nonlocal running
            running -= 1
            if not running:
                self._budget.end(price_s, size, size, self._events.now - now)
                self._run()

        for copy in copies:
            self._disk.on_end(copy, ended)
