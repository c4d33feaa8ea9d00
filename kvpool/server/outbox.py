"""What one master has yet to hear of the blocks here, as messages, and who waits for that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvpool.fingerprint import MapFingerprint
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Missed, Stretch
from kvpool.types import ReadStatus
from kvpool.wire import messages as wire

#: Changes that may wait for one master, and the share of this server's blocks that may: so that an
#: inventory of millions ends while many change. With more a new one is cheaper.
_PENDING_MAX: Final = 100_000
_PENDING_SHARE: Final = 0.25
#: Seconds between two batches of changes that no caller waits for. Batches save work: the fixed
#: cost of a message is higher, at both ends, than that of a few more changes in it.
_NEWS_GAP_S: Final = 0.005
#: Seconds between two messages with blocks that readers missed: whoever makes up keys decides how
#: many there are, and a change that is made meanwhile waits for such a message.
_MISSED_GAP_S: Final = 0.05
#: Blocks in one piece of an inventory.
_PIECE_BLOCKS: Final = wire.ANNOUNCED_BLOCKS_MAX
#: Bytes of the changes in one message, with the longest names: below BODY_SIZE_MAX with one more.
_CHANGES_SIZE: Final = 768 << 10
#: Steps of the index that make one piece, at most: an index of many empty parts has many of them.
_PIECE_STEPS: Final = 8


class _Mark(NamedTuple):
    """What the server held after the first `position` changes; None if it was not known."""

    position: int
    held: MapFingerprint | None


class Outbox:
    """Changes in order, and blocks that readers missed, which go when no change waits.

    Positions count changes since the last inventory began: `acknowledged` of them are applied at
    the master, those up to `enqueued` are `pending` or on their way. Whoever waits for a position
    is released when it is acknowledged, or when the master is not waited for any more.
    """

    def __init__(self, store: Blocks) -> None:
        self._store = store
        self.pending: deque[Stretch] = deque()
        self.wake = asyncio.Event()
        self._urgent = asyncio.Event()  # a caller waits, or a block has left
        self._marks: deque[_Mark] = deque()
        self.comparable_from = 0  # what an inventory of a moment says is in no mark before this
        self._waiting: list[tuple[int, int, asyncio.Future[bool]]] = []
        self._alone_from = 0  # no other server has what came behind this position
        self.enqueued = 0
        self.acknowledged = 0
        self._last_batch_at = 0.0
        self.missed = Missed()
        self.missed_due = 0.0  # when they may be told

    def begin(self) -> None:
        """An inventory begins: it has all that is here now."""
        self.pending.clear()
        self.enqueued = self.acknowledged = self._alone_from = 0
        self._marks.clear()
        self._marks.append(_Mark(0, self._store.fingerprint))

    def clear(self) -> None:
        """An inventory is due, and says more. Callers that wait are released."""
        self.pending.clear()
        self.missed.take()
        self._marks.clear()
        self.acknowledge(self.enqueued)

    def add(self, changes: Sequence[Stretch], held: MapFingerprint | None) -> bool:
        """Changes, and what the server holds after them; False if too many wait now."""
        self.enqueued += sum([len(one.digests) for one in changes])
        if self._marks and self._marks[-1].position == self.enqueued:
            self._marks.pop()
        self._marks.append(_Mark(self.enqueued, held))
        if not changes:
            return True
        for one in changes:
            for first in range(0, len(one.digests), most := wire.ANNOUNCED_BLOCKS_MAX):
                self.pending.append(one._replace(digests=one.digests[first : first + most]))
        # A reader that is sent to a block that has left loses a round trip: do not wait for more.
        if any(change.status is not ReadStatus.HIT for change in changes):
            self._urgent.set()
        self.wake.set()
        waiting = self.enqueued - self.acknowledged
        return waiting <= _PENDING_MAX or waiting <= self._store.stored * _PENDING_SHARE

    def is_flushed(self, future: asyncio.Future[bool]) -> bool:
        """The master has all that is queued now. Else `future` is done when it has: with True, if
        it says that no other server has any of these blocks."""
        if self.acknowledged < self.enqueued:
            self._waiting.append((self.enqueued, self.acknowledged, future))
            self._urgent.set()
        return self.acknowledged >= self.enqueued

    async def batch_due(self) -> bool:
        """Whether there are changes to send, once `_NEWS_GAP_S` has passed or one is urgent."""
        waits = self.pending and not self._urgent.is_set()
        if waits and loop_time() < self._last_batch_at + _NEWS_GAP_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._last_batch_at + _NEWS_GAP_S):
                    await self._urgent.wait()
        self._last_batch_at = loop_time()
        return bool(self.pending) or (
            bool(self.missed.blocks) and self._last_batch_at >= self.missed_due
        )

    def take(self) -> tuple[list[wire.BlockChanges], int]:
        """The next message, which may have nothing, and how many changes it acknowledges."""
        batch, count = list[Stretch](), 0
        while self.pending and count + len(self.pending[0].digests) <= wire.ANNOUNCED_BLOCKS_MAX:
            batch.append(self.pending.popleft())
            count += len(batch[-1].digests)
        corrections = self._corrections(wire.ANNOUNCED_BLOCKS_MAX - count)
        groups, fits = _fitting(_grouped([*batch, *corrections]))
        # The others go next, but for corrections, which a later reader asks for again.
        while count > fits:
            self.pending.appendleft(batch.pop())
            count -= len(self.pending[0].digests)
        return groups, count

    def _corrections(self, room: int) -> list[Stretch]:
        """That missed blocks are not here; none before they are due, or while there are changes.

        The master's map is compared with what was held after the last change that it has applied:
        these must be true of that moment.
        """
        if loop_time() < self.missed_due or not self.missed.blocks:
            return []
        self.missed_due = loop_time() + _MISSED_GAP_S
        if self.pending or self._store.change_log.changes or self.missed.shares.used > room:
            return []
        reasons, found = self._store.change_log.tombstones.reasons, list[Stretch]()
        for namespace, part, missed in self.missed.take():
            gone = [one for one in missed if self._store.peek(namespace, part, one) is None]
            alike = dict[tuple[ReadStatus, int], list[bytes]]()  # digests of one size
            for digest, reason in zip(gone, reasons(namespace, gone), strict=True):
                alike.setdefault((reason, len(digest)), []).append(digest)
            found += [Stretch(namespace, part, same, why) for (why, _), same in alike.items()]
        return found

    def acknowledge(self, position: int, *, alone: bool = False) -> None:
        """The master has applied the first `position` changes: release the callers that wait.
        `alone`: it says that no other server has the blocks of those that were not yet applied."""
        self.acknowledged = position
        if not alone:
            self._alone_from = position
        self.release(position)
        if not self._waiting and not self.pending:
            self._urgent.clear()

    def release(self, position: int) -> None:
        """Nobody waits for the first `position` changes any more."""
        waiting, self._waiting = self._waiting, []
        for awaited, begun, future in waiting:
            if awaited > position:
                self._waiting.append((awaited, begun, future))
            elif not future.done():
                future.set_result(awaited <= self.acknowledged and begun >= self._alone_from)

    def comparable(self) -> MapFingerprint | None:
        """What the server held when the last change that the master has applied was made.

        None in the midst of changes that were made in one step, and while the master may have
        later changes from an inventory.
        """
        while len(self._marks) > 1 and self._marks[1].position <= self.acknowledged:
            self._marks.popleft()
        if not self._marks or self.acknowledged < self.comparable_from:
            return None
        mark = self._marks[0]
        return mark.held if mark.position == self.acknowledged else None


def pieces(steps: Iterator[list[Stretch]]) -> Iterator[list[wire.BlockChanges]]:
    """The pieces of an inventory, at least one, each of at most `_PIECE_STEPS` steps."""
    piece: list[wire.BlockChanges] = []
    blocks = size = taken = sent = 0
    for stretches in steps:
        for group in itertools.chain.from_iterable(map(_packed, stretches)):
            count = _blocks_of(group)
            if blocks + count > _PIECE_BLOCKS or size > _CHANGES_SIZE:
                yield piece
                sent += 1
                piece, blocks, size, taken = [], 0, 0, 0
            piece.append(group)
            blocks += count
            size += _size_of(group)
        taken += 1
        if taken >= _PIECE_STEPS:
            yield piece
            sent += 1
            piece, blocks, size, taken = [], 0, 0, 0
    if piece or not sent:
        yield piece


def _packed(stretch: Stretch) -> Iterator[wire.BlockChanges]:
    """A stretch as messages: each of one size of digests, and of blocks that one piece may have."""
    namespace, part, digests, status, tier = stretch
    by_size: dict[int, list[bytes]] = {}
    for digest in digests:
        by_size.setdefault(len(digest), []).append(digest)
    for size, same in by_size.items():
        for first in range(0, len(same), _PIECE_BLOCKS):
            packed = b"".join(same[first : first + _PIECE_BLOCKS])
            yield wire.BlockChanges(
                namespace.name, namespace.parts, size, packed, part, tier, status
            )


def _fitting(groups: list[wire.BlockChanges]) -> tuple[list[wire.BlockChanges], int]:
    """Those that fit into one message, from the first on, and how many blocks they have."""
    size = blocks = 0
    for number, group in enumerate(groups):
        if size > _CHANGES_SIZE:
            return groups[:number], blocks
        size += _size_of(group)
        blocks += _blocks_of(group)
    return groups, blocks


def _blocks_of(group: wire.BlockChanges) -> int:
    return len(group.digests) // group.digest_size


def _size_of(group: wire.BlockChanges) -> int:
    """Bytes of it in a message; more, where a new namespace takes a master 25 us: 128 fit."""
    return max(128 + 4 * len(group.namespace), _CHANGES_SIZE // 128) + len(group.digests)


def _grouped(changes: Sequence[Stretch]) -> list[wire.BlockChanges]:
    """Consecutive changes of one kind become one message; the order is kept."""
    groups: list[wire.BlockChanges] = []
    kind = lambda one: (one.status, one.part, one.tier, one.namespace, len(one.digests[0]))  # noqa: E731
    for (status, part, tier, of, size), same in itertools.groupby(changes, kind):
        packed = b"".join(itertools.chain.from_iterable([change.digests for change in same]))
        groups.append(wire.BlockChanges(of.name, of.parts, size, packed, part, tier, status))
    return groups


def loop_time() -> float:
    """The time of the loop."""
    return asyncio.get_running_loop().time()
