"""The copies of blocks from one tier to another: which begin, and what follows when they end. Pure.

This file hands out `TierTransfer`s; `TierMover` moves the bytes and reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.protocols import ReserveRequest
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.erasures import Erasures
from kvpool.server.state.extent_state import State
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.prefetches import FRESH_S
from kvpool.server.state.tier_index import TierIndex
from kvpool.server.state.tier_stores import cold_store
from kvpool.server.state.writeback_queue import WritebackQueue
from kvpool.types import Extent, Namespace, ReadStatus, WriteStatus

#: Blocks that are not written because they are of no use, in one call.
_USELESS_MAX: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class TierTransfer:
    """A copy of one block from one tier to another. Neither extent is reused before `done`."""

    source: int
    target: int
    entry: Entry  # at the source, pinned
    pin: int
    id: int  # of the reservation at the target
    extent: Extent  # at the target
    prefetch: bool = False  # it comes up before a reader has asked for it

    def __repr__(self) -> str:
        return f"<Copy {self.entry!r} tier {self.source} to {self.target}>"


class TierTransfers:
    """Begins and ends the copies of a server's blocks between its tiers.

    From its beginning to `done` a transfer holds a pin at its source and a reservation at its
    target, both as MOVER; a block has at most one on its way to each tier.
    """

    def __init__(
        self,
        blocks: Blocks,
        front: FrontStore,
        index: TierIndex,
        queue: WritebackQueue,
        erasures: Erasures,
    ) -> None:
        self._blocks = blocks
        self._stores = blocks.stores
        self._front = front
        self._front_tier = blocks.front_tier
        self._index = index
        self._queue = queue
        self._erasures = erasures
        #: They get copies of blocks that are read.
        self.cache_tiers = [t for t in range(blocks.backing_tier) if t != blocks.front_tier]
        self._to_promote: deque[Entry] = deque()  # from the front tier to cache tiers
        #: The last call ended early, because a policy brings its order up to date: call again,
        #: after others had their turn.
        self.behind = False

    def were_read(self, entries: Iterable[Entry | None]) -> None:
        """Blocks of the front tier: the cache tiers get them."""
        for entry in entries:
            if entry is not None:
                entry.reads += 1
                if entry.reads == 1:
                    self._to_promote.append(entry)

    # --- down ----------------------------------------------------------------------------

    def next_writebacks(self, size_max: int, count_max: int, now: float) -> list[TierTransfer]:
        """The next blocks to copy to the backing tier, then those for the cache tiers.

        About `size_max` bytes and `count_max` copies; fewer only where there are no more. Space is
        reserved for them. A block that the backing tier refuses, because its policy keeps what it
        has, stays in the front tier until it is evicted. While the backing tier is read-only, those
        for the cache tiers.
        """
        copies: list[TierTransfer] = []
        self.behind = False
        taken, queue = 0, self._queue
        if not queue.read_only and queue.due_bytes > 0:
            if queue.write_back is not None:
                queue.write_back.drop_useless()
            taken = self._start_writebacks(copies, min(size_max, queue.due_bytes), count_max, now)
        while self._to_promote and taken < size_max and len(copies) < count_max:
            entry = self._to_promote.popleft()
            if entry.state is State.STORED:
                tiers = [tier for tier in self.cache_tiers if tier not in self._index.offline]
                starts = [self._start(copies, entry, self._front_tier, one, now) for one in tiers]
                if WriteStatus.NOT_YET in starts:
                    self._to_promote.appendleft(entry)
                    self.behind = True
                    break
                taken += entry.size
        return copies

    def try_writeback(self, now: float) -> list[TierTransfer]:
        """One block to copy to a read-only backing tier, to see if it takes writes again."""
        copies: list[TierTransfer] = []
        self.behind = False
        self._start_writebacks(copies, 1, 1, now)
        return copies

    def _start_writebacks(
        self, copies: list[TierTransfer], size_max: int, count_max: int, now: float
    ) -> int:
        """Add transfers to the backing tier; the bytes of the blocks that were looked at."""
        taken, queue = 0, self._queue
        useless: list[Entry] = []
        for _ in range(len(queue)):
            if not queue.dirty and not queue.unwritten:
                break  # room on the disk for one block may have taken others out of the queue
            if taken >= size_max or len(copies) >= count_max:
                break
            entry = queue.next()
            if entry.state is not State.STORED or entry.clean:
                continue
            if queue.write_back is not None and queue.write_back.is_useless(entry):
                useless.append(entry)
                if len(useless) == _USELESS_MAX:
                    break
                continue
            answer = self._start(copies, entry, self._front_tier, self._blocks.backing_tier, now)
            # An older transfer of a block with the same key still has its reservation.
            if answer is WriteStatus.IN_PROGRESS:
                queue.add(entry)
            elif answer is WriteStatus.NOT_YET:
                queue.add(entry)
                self.behind = True
                break
            elif answer is not WriteStatus.RESERVED:
                queue.done(entry)
            taken += self._front.allocator.rounded(entry.size)
        for entry in useless:
            if queue.write_back is not None and not queue.write_back.evict_if_useless(entry):
                queue.add(entry)  # it is pinned, and its session may go on
        return taken

    # --- up ------------------------------------------------------------------------------

    def start_promotions(
        self,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        size_max: int,
        now: float,
        *,
        prefetch: bool = False,
    ) -> list[TierTransfer]:
        """Transfers that promote blocks to the front tier, about `size_max` bytes, in that order.

        Ends early where the front tier has no space. Skips blocks that are in no slower tier, and
        those that are being promoted already. A `prefetch` evicts nothing that was used in the last
        `FRESH_S`, or whose session is expected sooner.
        """
        copies: list[TierTransfer] = []
        self.behind = False
        taken = 0
        for digest in digests:
            entry = self._index.below(namespace, part, digest)
            if entry is None:
                continue
            if taken >= size_max:
                break
            source = entry.index.tier
            answer = self._start(copies, entry, source, self._front_tier, now, prefetch=prefetch)
            if answer is WriteStatus.NOT_YET:
                self.behind = True
                break
            if answer is WriteStatus.NO_SPACE:
                if not prefetch:
                    self._queue.refused(self._front.allocator.rounded(entry.size))
                break
            if answer is WriteStatus.RESERVED:
                self._index.hits[source] += 1
                taken += self._front.allocator.rounded(entry.size)
        return copies

    # --- one transfer --------------------------------------------------------------------

    def _start(
        self,
        copies: list[TierTransfer],
        entry: Entry,
        source: int,
        target: int,
        now: float,
        *,
        prefetch: bool = False,
    ) -> WriteStatus:
        """Pin the source and reserve the target, if it has space; the status of the target."""
        index = entry.index
        store = self._stores[target]
        evicts_before = None
        if prefetch:
            evicts_before = [int((now - FRESH_S) * 1e6)]
        elif entry in self._queue.fetched:
            evicts_before = [entry.last_used]
        # First pin: the reservation below may evict blocks, and this one must not be among them.
        pin = self._stores[source].held.pin(MOVER, entry)
        (answer,) = store.reserve(
            MOVER,
            ReserveRequest(
                index.namespace,
                index.part,
                [entry.digest],
                [entry.parent],
                [entry.size],
                self._front.extents.policy.hint_of(entry.session, now),
                evicts_before,
                [entry.copies],
            ),
            now,
        )
        if answer.extent is None:
            self._stores[source].unpin(MOVER, pin)
        else:
            if target > self._front_tier:
                self._queue.moving_bytes += self._front.allocator.rounded(entry.size)
            if prefetch:
                self._front.extents.prefetched.begins(entry, store.allocator.rounded(entry.size))
            store.extents.blocks_at[answer.extent.offset].born = entry.born
            copy = TierTransfer(source, target, entry, pin, answer.id, answer.extent, prefetch)
            copies.append(copy)
        return answer.status

    def done(self, copy: TierTransfer, *, good: bool, now: float) -> None:
        """The bytes were moved (`good`) or not: seal or cancel the target, unpin the source."""
        source, target = self._stores[copy.source], self._stores[copy.target]
        entry, queue, extents = copy.entry, self._queue, self._front.extents
        if copy.target > self._front_tier:
            queue.moving_bytes -= extents.allocator.rounded(entry.size)
            # A block with children in memory makes no room there before they are written, too.
            if not good or not entry.children:
                queue.refused(0)
        lost = target.writer_exited(-copy.id)  # with its device: it is counted no more
        if copy.prefetch and not lost:
            extents.prefetched.ended(entry, extents.allocator.rounded(entry.size))
        if self._index.offline.intersection((copy.source, copy.target)):
            good = False  # `take_offline` has already removed these blocks from the pool
        down = copy.target == self._blocks.backing_tier != self._front_tier
        # The source block may have been removed during the transfer: then no copy may appear.
        if good and not lost and entry.state is State.STORED:
            # A prefetched block is as old as it was: if nobody reads it, it is the next victim.
            last_used = entry.last_used if down or copy.prefetch else None
            ids, sums = [copy.id], [entry.checksum]
            target.seal_all(MOVER, ids, sums, now, from_other_tier=True, last_used=last_used)
            if copy.target == self._front_tier:
                self._came_up(copy, now)
            elif down:
                queue.done(entry)
        elif not lost:
            target.cancel(MOVER, copy.id)
            if down:
                self._erasures.add(copy.extent.offset)  # its record may be written already
            waits = entry.state is State.STORED and not entry.clean
            if waits and not extents.demotes:
                extents.mark_clean(entry)  # its tier is lost
            elif waits and copy.target == self._blocks.backing_tier:
                queue.add(entry)  # once more
        source.unpin(MOVER, copy.pin)

    def _came_up(self, copy: TierTransfer, now: float) -> None:
        """The front tier has a block that was below: masters send readers there."""
        entry, front = copy.entry, self._front
        self._blocks.change_log.add(entry.index, [entry.digest], ReadStatus.HIT, self._front_tier)
        index = entry.index
        came = front.index.blocks(index.namespace, index.part)[entry.digest]
        if copy.prefetch:
            front.extents.prefetched.add(came, front.allocator.rounded(came.size), now)
        if front.extents.demotes and self._stores[copy.source] is cold_store(self._stores):
            front.extents.mark_dirty(came)  # the disk is to have it again
            self._queue.add(came)

    def failed(self, copy: TierTransfer, reason: ReadStatus) -> None:
        """The source could not be read, or its bytes are corrupt: remove the block there."""
        index = copy.entry.index
        self._stores[copy.source].remove(index.namespace, [copy.entry.digest], reason, index.part)
