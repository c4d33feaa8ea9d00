"""The disks below the memory of a pool's servers: what the product's tiered store decides takes
time here.

As `kvpool.server.tier_mover` does it: two batches of writes at a time, blocks that a reader needs
come up a little ahead of it, and what is in memory stays until a reader has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.links import QueuedLink
from kvpool.server.state.tier_transfers import TierTransfer
from kvpool.tools.dry_pool import BLOCK_SIZE, DryPool
from kvpool.types import Namespace

#: As `tier_mover`: bytes and number of the batches that are written at a time.
_WRITTEN_BYTES: Final = 32 << 20
_WRITTEN_BATCHES: Final = 2
#: As `tier_mover`: bytes that come up at a time for readers.
_PROMOTED_BYTES: Final = 64 << 20
#: A reader asks again so soon where other readers hold all of the memory.
_ASK_AGAIN_S: Final = 0.02

_Key = tuple[Namespace, bytes]


class ServerDisk:
    """The disk of one server: reads and writes have a queue each, in the order of their asking. Of
    a disk that works in `turns` they share one: each byte that is written costs reads its time."""

    def __init__(
        self,
        pool: DryPool,
        name: str,
        events: EventQueue,
        constants: Constants,
        block_bytes: float,
        *,
        turns: bool = False,
    ) -> None:
        self.reads = QueuedLink(constants.disk_read_bytes_s)
        self.writes = QueuedLink(constants.disk_write_bytes_s, self.reads if turns else None)
        self._pool = pool
        self._name = name
        self._events = events
        self._latency_s = constants.disk_first_byte_s
        self._block_bytes = block_bytes
        self._promoting: dict[_Key, list[Callable[[], None]]] = {}  # and who waits for it
        self._waiting: list[Callable[[], None]] = []  # for any transfer to end
        self._batches = 0
        self._life = 0  # of the server's process: transfers of an earlier one are no more

    def stopped(self) -> None:
        """The server's process has ended, with the transfers that were under way."""
        self._life += 1
        self._batches = 0
        waiting = [one for waiters in self._promoting.values() for one in waiters]
        self._promoting.clear()
        for waiter in [*waiting, *self._taken_waiting()]:
            self._events.at(self._events.now, waiter)

    def pump(self) -> None:
        """Something has changed: begin the writes that are due."""
        store, now = self._pool.servers[self._name].store, self._events.now
        blocks = max(1, int(_WRITTEN_BYTES / self._block_bytes))
        while self._batches < _WRITTEN_BATCHES:
            copies = store.transfers.next_writebacks(blocks * BLOCK_SIZE, blocks, now)
            if not copies:
                break
            self._batches += 1
            end = self.writes.take(len(copies) * self._block_bytes, now)
            self._events.at(end, self._written, copies, self._life)
        store.erasures.take()
        self._pool.announce(self._name)

    def promote(self, namespace: Namespace, digests: Sequence[bytes]) -> None:
        """Bring blocks up that are not in memory, as many as may come up at a time."""
        blocks = max(1, int(_PROMOTED_BYTES / self._block_bytes)) - len(self._promoting)
        if blocks <= 0:
            return
        store, now = self._pool.servers[self._name].store, self._events.now
        others = [digest for digest in digests if (namespace, digest) not in self._promoting]
        for copy in store.transfers.start_promotions(
            namespace, 0, others, blocks * BLOCK_SIZE, now
        ):
            self._read(copy)
        self.pump()

    def on_end(self, copy: TierTransfer, ended: Callable[[], None]) -> None:
        """Call it when this copy has come up, or its server has ended."""
        self._promoting[_key(copy)].append(ended)

    def _read(self, copy: TierTransfer) -> None:
        self._promoting[_key(copy)] = []
        end = self.reads.take(self._block_bytes, self._events.now) + self._latency_s
        self._events.at(end, self._promoted, copy, self._life)

    def when_promoted(
        self, namespace: Namespace, digest: bytes, waiter: Callable[[], None]
    ) -> bool:
        """Call it when this block has come up. False: it never will, as memory has no room for it
        and nothing is under way that would make some."""
        waiting = self._promoting.get((namespace, digest))
        if waiting is not None:
            waiting.append(waiter)
        elif not self.when_moved(waiter):
            if not self._pool.servers[self._name].store.is_held:
                return False
            self._events.after(_ASK_AGAIN_S, waiter)
        return True

    def when_moved(self, waiter: Callable[[], None]) -> bool:
        """Call it when the next transfer has ended; False: none is under way."""
        if self._promoting or self._batches:
            self._waiting.append(waiter)
            return True
        return False

    def _taken_waiting(self) -> list[Callable[[], None]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _promoted(self, copy: TierTransfer, life: int) -> None:
        if life != self._life:
            return
        self._pool.servers[self._name].store.transfers.done(copy, good=True, now=self._events.now)
        waiting = self._promoting.pop(_key(copy))
        self.pump()
        for waiter in [*waiting, *self._taken_waiting()]:
            waiter()

    def _written(self, copies: Sequence[TierTransfer], life: int) -> None:
        if life != self._life:
            return
        self._batches -= 1
        store = self._pool.servers[self._name].store
        for copy in copies:
            store.transfers.done(copy, good=True, now=self._events.now)
        self.pump()
        for waiter in self._taken_waiting():
            waiter()


def _key(copy: TierTransfer) -> _Key:
    return copy.entry.index.namespace, copy.entry.digest
