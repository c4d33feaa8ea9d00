"""Keeps one master informed of what this server holds: inventory, then changes, then heartbeats.

Every message has a number. A master that misses one refuses the next, and gets a new inventory
(design: announcements).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool import logs
from kvpool.backoff import Backoff
from kvpool.errors import (
    ConfigError,
    DeadlineExceeded,
    InvariantViolated,
    KvpoolError,
    Unavailable,
)
from kvpool.fingerprint import MapFingerprint
from kvpool.protocols import Link
from kvpool.runtime import task_group
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Change, Stretch
from kvpool.server.state.missed import Missed, MissedBlock
from kvpool.supervision import Supervisor
from kvpool.types import ReadStatus, ServerStats
from kvpool.wire import auth
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: Changes that may wait for one master, and the share of this server's blocks that may. With more,
#: a new inventory is cheaper. The share lets an inventory of millions of blocks end while many of
#: them change (design: announcements).
_PENDING_MAX: Final = 100_000
_PENDING_SHARE: Final = 0.25
#: Blocks in one piece of an inventory.
_PIECE_BLOCKS: Final = wire.ANNOUNCED_BLOCKS_MAX
#: Bytes of the changes in one message, with the longest names: below BODY_SIZE_MAX with one more.
_CHANGES_SIZE: Final = 768 << 10
#: Pieces of an inventory that are sent before the first of them is answered.
_PIECES_IN_FLIGHT: Final = 4
#: Heartbeat intervals after which a message is sent again at the latest, if it is not answered.
_RESEND_INTERVALS_MAX: Final = 4
#: Steps of the index that make one piece, at most: an index of many empty parts has many of them.
_PIECE_STEPS: Final = 8
#: Seconds between two batches of changes that no caller waits for. Batches save work: the fixed
#: cost of a message is higher, at both ends, than that of a few more changes in it.
_NEWS_GAP_S: Final = 0.005
#: Seconds between two messages with blocks that readers missed: whoever makes up keys decides how
#: many there are, and a change that is made meanwhile waits for such a message.
_MISSED_GAP_S: Final = 0.05
#: Seconds between two inventories to a master whose map differs after each of them.
_RESYNC_DELAY_MAX_S: Final = 60.0
#: Seconds after which a master that could not list all blocks gets the inventory again.
_RELIST_AFTER_S: Final = 60.0
_AGE: Final = re.compile(r"[\d.]+ s\b")  # in a reason: with it each attempt would have its own


@dataclass(frozen=True, slots=True)
class Identity:
    """How a server identifies itself.

    `epoch` is random for each start of the process, so that a master notices a restart. `secret`
    proves that the id is this server's (design: server-identity); `kept` says that the next process
    has the same.
    """

    server: str
    epoch: int
    host: str
    addresses: Sequence[str]
    tiers: Sequence[str]
    secret: bytes = field(repr=False)
    kept: bool = False


class _Mark(NamedTuple):
    """What the server held after the first `position` changes; None if it was not known."""

    position: int
    held: MapFingerprint | None


class AnnouncerState(enum.Enum):
    """What a master has of this server's inventory."""

    UNREGISTERED = enum.auto()
    SYNCING = enum.auto()
    STREAMING = enum.auto()


class Announcer:
    """Announces one server to one master: in order, numbered, resynchronised after a gap.

    | state        | the master has                    | changes are | next state, when          |
    |--------------|-----------------------------------|-------------|---------------------------|
    | UNREGISTERED | nothing, or an outdated inventory | dropped     | SYNCING: it accepts us    |
    | SYNCING      | a part of the inventory           | queued      | STREAMING: it has it all  |
    | STREAMING    | all but the queued changes        | queued      | (it stays)                |

    A refused announcement, too many queued changes, and any error but a late answer lead back to
    UNREGISTERED. An announcement or a piece of an inventory that is not answered in time is sent
    again: its number tells the master whether it has it already, so a pause of the master or of the
    network is no gap. Nobody waits for a master that does not answer.

    One announcement is under way at a time, so that the numbers arrive in order; changes made
    during it form the next batch (design: announcements).
    """

    def __init__(
        self,
        identity: Identity,
        store: Blocks,
        link: Link,
        heartbeat_s: float,
        stats: Callable[[float], ServerStats],
        others_have_room: Callable[[], None] = lambda: None,
        tasks: Supervisor | None = None,
    ) -> None:
        self._identity = identity
        self._store = store
        self._link = link
        self._token = auth.server_token(identity.secret, link.address)
        self._heartbeat_s = heartbeat_s
        self._stats = stats
        self._others_have_room = others_have_room
        self._tasks = tasks or Supervisor()
        self._loop = asyncio.get_running_loop()
        self._state = AnnouncerState.UNREGISTERED
        self._answers = False  # the last request was answered
        self._pending: deque[Change] = deque()
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()  # a caller waits, or a block has left
        self._marks: deque[_Mark] = deque()
        self._comparable_from = 0  # what an inventory of a moment says is in no mark before this
        #: Blocks that this master does not list, because its map is full.
        self.unlisted = 0
        self._relist_at = 0.0
        self._resync = Backoff(heartbeat_s, _RESYNC_DELAY_MAX_S)
        self._resync_not_before = 0.0
        #: How often this master's map was not what the server held.
        self.differences = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._wait_for_heartbeat: list[asyncio.Future[None]] = []
        # Both count changes since the last inventory began; a caller waits for a position.
        self._enqueued = 0
        self._acknowledged = 0
        self._sequence = 0
        self._hints_heard = 0
        self._hint_answers: list[wire.WireHintAnswer] = []  # for the next heartbeat
        self._refused_at: float | None = None  # when a master first said that the id is taken
        self._last_batch_at = 0.0
        self._missed = Missed()
        self._missed_due = 0.0  # when they may be told
        self._next_heartbeat = 0.0
        self.problem: KvpoolError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """The master has accepted this server, gets all its changes, and answers."""
        return self._answers and self._state is not AnnouncerState.UNREGISTERED

    def start(self) -> None:
        """Start the task that announces."""
        # However it fails, masters must hear of this server, or they take it for lost.
        self._task = self._tasks.forever(
            f"announce to {self._link.address}", self._announce, pause_max_s=self._heartbeat_s
        )

    async def close(self) -> None:
        """Stop, and send `Leave`, waiting at most 0.2 s for the master's answer."""
        # The task first: a heartbeat after `Leave` would make the server alive again at the master.
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with contextlib.suppress(KvpoolError):
            leave = wire.Leave(self._identity.server, self._identity.epoch, self._token)
            await self._request(leave, wire.HeartbeatReply, within_s=0.2)
        self._link.close()
        self._unregister()

    def enqueue(self, changes: Sequence[Change], held: MapFingerprint | None) -> None:
        """Queue changes for the next batch, unless an inventory is due anyway.

        `held` is what the server holds after them. It is compared with the master's map when they
        are applied there; None: it is not known.
        """
        if self._state is AnnouncerState.UNREGISTERED:
            return
        self._enqueued += len(changes)
        if self._marks and self._marks[-1].position == self._enqueued:
            self._marks.pop()
        self._marks.append(_Mark(self._enqueued, held))
        if not changes:
            return
        self._pending.extend(changes)
        # A reader that is sent to a block that has left loses a round trip: do not wait for more.
        if any(change.status is not ReadStatus.HIT for change in changes):
            self._urgent.set()
        if len(self._pending) > max(_PENDING_MAX, self._store.stored * _PENDING_SHARE):
            self._unregister()
        self._wake.set()

    def correct(self, missed: Sequence[MissedBlock]) -> None:
        """Tell the master, after all changes, that these are not here, if that is so then."""
        if missed and self._state is not AnnouncerState.UNREGISTERED:
            for (namespace, part), group in itertools.groupby(missed, key=lambda one: one[:2]):
                self._missed.add(namespace, part, [digest for _, _, digest in group])
            self._wake.set()

    @property
    def dropped_corrections(self) -> int:
        """Missed blocks that the master was not told about, because too many waited."""
        return self._missed.shares.refused.total()

    def heartbeat_soon(self) -> asyncio.Future[None]:
        """Send a heartbeat at once. Done when the master has answered one that was sent after this
        call."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._wait_for_heartbeat.append(future)
        self._next_heartbeat = 0.0
        self._wake.set()
        return future

    def flushed(self) -> asyncio.Future[None]:
        """Done when the master has acknowledged all that is queued now, or does not answer."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._acknowledged >= self._enqueued or not self.registered:
            future.set_result(None)
        else:
            self._waiting.append((self._enqueued, future))
            self._urgent.set()
        return future

    async def _announce(self) -> None:
        """Register, and send the inventory; then changes, and heartbeats: what is due of these."""
        try:
            if self._state is AnnouncerState.UNREGISTERED:
                await self._register()
                await self._send_inventory()
            await self._send_changes()
            if self._loop.time() >= self._next_heartbeat:
                await self._send_heartbeat()
            if self._answers:
                self.problem = None
            await self._wait()
        except KvpoolError as error:
            self._failed(error)
            soon = 10 if isinstance(error, Unavailable) else 1
            await asyncio.sleep(self._heartbeat_s / soon)
        except Exception as error:  # a bug, of a policy for example: nobody waits for it
            self._failed(InvariantViolated(f"{type(error).__name__}: {error}"))
            raise

    async def _request(
        self, message: wire.Message, answer: type[wire.M], within_s: float | None = None
    ) -> wire.M:
        deadline = self._loop.time() + (within_s or self._heartbeat_s)
        request, hasty = wire.encode(message), self._answers  # then others may wait for it, too
        type, body = await self._link.request(*request, deadline=deadline, hasty=hasty)
        self._answers = True
        return wire.decode_answer(answer, type, body)

    async def _deliver(self, message: wire.Announce | wire.Inventory) -> bool:
        """Send a numbered message until it is answered: whether the master has applied it."""
        within_s = self._heartbeat_s
        while self._state is not AnnouncerState.UNREGISTERED:
            try:
                announced = await self._request(message, wire.Announced, within_s)
                if announced.unlisted:
                    self._not_listed(announced)
                return announced.applied
            except DeadlineExceeded as error:
                self._not_answered(error)
                # A master that is late with many pieces would get more of them at each repetition.
                within_s = min(2 * within_s, _RESEND_INTERVALS_MAX * self._heartbeat_s)
        raise Unavailable("too many changes are queued for this master: it gets an inventory")

    async def _register(self) -> None:
        identity = self._identity
        asked_at = self._loop.time()
        registered = await self._request(
            wire.Register(
                identity.server,
                identity.epoch,
                self._token,
                identity.host,
                list(identity.addresses),
                list(identity.tiers),
                self._store.backing.allocator.capacity,
                self._sequence,
                identity.kept,
                self._store.blocks_max,
            ),
            wire.Registered,
        )
        if not registered.accepted:
            raise self._id_is_taken(registered, asked_at)
        self._refused_at = None
        self._hints_heard = registered.hints_heard
        self.unlisted = 0
        # A master never goes back, so this server has to go on from its number.
        self._sequence = max(self._sequence, registered.sequence)

    def _id_is_taken(self, refused: wire.Registered, asked_at: float) -> KvpoolError:
        """ConfigError if the server that has the id lives, Unavailable if it may be this one.

        After a crash the master takes the process before for alive, until it was silent long
        enough. One that is heard while this process waits is another one.
        """
        if self._refused_at is None:
            self._refused_at = self._loop.time()
        id = f"server id {self._identity.server!r}"
        if refused.lasting:
            return ConfigError(f"{id} is taken: {refused.problem}; or choose another with --id")
        if asked_at - refused.heard_s > self._refused_at:
            return ConfigError(
                f"{id} belongs to another living server: {refused.problem}. That message came "
                "while this server was waiting for the id; choose another with --id"
            )
        return Unavailable(
            f"{id} is not free yet: {refused.problem}. It may be this server before its restart; "
            "this server tries again until then"
        )

    async def _send_inventory(self) -> None:
        """All blocks, in pieces; changes meanwhile are queued and follow."""
        # Queue changes from here on, before the inventory is read: a block that is sealed while the
        # pieces are sent is in none of them. No await between these lines and `inventory`.
        self._pending.clear()
        self._enqueued = self._acknowledged = 0
        self._marks.clear()
        self._marks.append(_Mark(0, self._store.fingerprint))
        self._state = AnnouncerState.SYNCING
        self._sequence += 1
        started = self._loop.time()
        pieces = enumerate(_pieces(self._store.inventory_steps()))
        first, following = next(pieces), next(pieces, None)
        # The first piece begins the inventory, so it must arrive before the others; the last one
        # ends it, so it must arrive after them.
        await self._send_piece(*first, last=following is None)
        if following is not None:
            rest = itertools.chain([following], pieces)
            sent = await self._send_pieces(rest)
            await self._send_piece(sent + 1, [], last=True)
        # Some pieces may be later than changes in the queue, which the others do not have yet.
        self._comparable_from = self._enqueued
        await self._send_heartbeat()
        # Too many changes meanwhile have ended the synchronisation: then a new one begins.
        if self._state is AnnouncerState.SYNCING:
            self._state = AnnouncerState.STREAMING
        took_s = self._loop.time() - started
        log.info(
            "master knows all blocks",
            master=self._link.address,
            blocks=self._store.stored,
            seconds=round(took_s, 3),
        )

    async def _send_pieces(self, pieces: Iterator[tuple[int, list[wire.BlockChanges]]]) -> int:
        """Send pieces, several at a time, each made when its turn comes; the last one's number."""
        number = 0

        async def send() -> None:
            nonlocal number
            for number, changes in pieces:
                await self._send_piece(number, changes)

        async with task_group() as group:
            for _ in range(_PIECES_IN_FLIGHT):
                group.create_task(send())
        return number

    async def _send_piece(
        self, piece: int, changes: list[wire.BlockChanges], *, last: bool = False
    ) -> None:
        identity = self._identity
        message = wire.Inventory(
            identity.server, identity.epoch, self._token, self._sequence, piece, last, changes
        )
        if not await self._deliver(message):
            raise Unavailable("the master does not know this server any more")
        if self._loop.time() >= self._next_heartbeat:
            await self._send_heartbeat()

    async def _send_changes(self) -> None:
        while await self._batch_due():
            count = min(len(self._pending), wire.ANNOUNCED_BLOCKS_MAX)
            batch = [self._pending.popleft() for _ in range(count)]
            batch += self._corrections(wire.ANNOUNCED_BLOCKS_MAX - count)
            if not batch:
                continue
            groups, fitting = _fitting(_grouped(batch))
            # The others go next, but for corrections, which a later reader asks for again.
            self._pending.extendleft(reversed(batch[fitting:count]))
            count = min(count, fitting)
            self._sequence += 1
            identity = self._identity
            message = wire.Announce(
                identity.server, identity.epoch, self._token, self._sequence, groups
            )
            if not await self._deliver(message):
                raise Unavailable("the master missed an announcement")
            self._acknowledge(self._acknowledged + count)
            if self._loop.time() >= self._next_heartbeat:
                await self._send_heartbeat()

    async def _batch_due(self) -> bool:
        """Whether there are changes to send, once `_NEWS_GAP_S` has passed or one is urgent."""
        if self._pending and self._loop.time() < self._last_batch_at + _NEWS_GAP_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._last_batch_at + _NEWS_GAP_S):
                    await self._urgent.wait()
        self._last_batch_at = now = self._loop.time()
        return bool(self._pending) or (bool(self._missed.blocks) and now >= self._missed_due)

    def _corrections(self, room: int) -> list[Change]:
        """That missed blocks are not here; none before they are due, or while there are changes.

        The master's map is compared with what this server held after the last change that is
        applied there. So these must be true of that moment: nothing has changed since.
        """
        now = self._loop.time()
        if now < self._missed_due or not self._missed.blocks:
            return []
        self._missed_due = now + _MISSED_GAP_S
        if self._pending or self._store.change_log.changes or len(self._missed.blocks) > room:
            return []
        reason = self._store.change_log.tombstones.reason
        return [
            Change(namespace, part, digest, reason(namespace, digest))
            for namespace, part, digest in self._missed.take()
            if self._store.peek(namespace, part, digest) is None
        ]

    async def _send_heartbeat(self) -> None:
        now = self._loop.time()
        self._next_heartbeat = now + self._heartbeat_s
        held = self._comparable()
        waiting = list(self._wait_for_heartbeat)
        heartbeat = wire.Heartbeat(
            self._identity.server,
            self._identity.epoch,
            self._token,
            self._stats(now),
            self._hints_heard,
            self._sequence,
            *((held.blocks, held.packed()) if held is not None else (0, b"")),
            self._hint_answers,
        )
        try:
            reply = await self._request(heartbeat, wire.HeartbeatReply)
        except DeadlineExceeded as error:
            self._not_answered(error)
            return
        if not reply.known:
            raise Unavailable("the master has restarted")
        for future in waiting:
            self._wait_for_heartbeat.remove(future)
            if not future.done():
                future.set_result(None)
        self._hints_heard = reply.hints_heard
        self._hint_answers = self._store.hinted(reply.hints, self._loop.time())[
            -wire.HINT_ANSWERS_MAX :
        ]
        if reply.others_have_room:
            self._others_have_room()
        if len(reply.hints) == wire.HINTS_MAX:  # there may be more
            self._next_heartbeat = now
        if reply.sequence > self._sequence:
            raise Unavailable(f"the master counts {reply.sequence} messages of {self._sequence}")
        if self.unlisted and now >= self._relist_at:
            self._unregister()
        elif reply.differs and held is not None:
            self._map_differs(held, reply)
        elif held is not None:
            self._resync.reset()
            self._resync_not_before = 0.0

    def _not_listed(self, announced: wire.Announced) -> None:
        """Readers do not find these blocks through this master: try again after a while."""
        if not self.unlisted:
            self._relist_at = self._loop.time() + _RELIST_AFTER_S
            log.warning(
                "a master does not list all blocks",
                master=self._link.address,
                why=announced.problem,
                again_in_s=_RELIST_AFTER_S,
            )
        self.unlisted += announced.unlisted

    def _comparable(self) -> MapFingerprint | None:
        """What the server held when the last change that the master has applied was made.

        None in the midst of changes that were made in one step, and while the master may have
        later changes from an inventory.
        """
        while len(self._marks) > 1 and self._marks[1].position <= self._acknowledged:
            self._marks.popleft()
        streaming = self._state is AnnouncerState.STREAMING and not self.unlisted
        if not streaming or not self._marks or self._acknowledged < self._comparable_from:
            return None
        mark = self._marks[0]
        return mark.held if mark.position == self._acknowledged else None

    def _map_differs(self, held: MapFingerprint, reply: wire.HeartbeatReply) -> None:
        """Send the inventory: at once the first time, then after growing delays.

        An inventory mends any difference but a wrong count of ours, and that must not become a
        storm of inventories (design: announcements).
        """
        self.differences += 1
        now = self._loop.time()
        if now < self._resync_not_before:
            return
        again = self._resync.failures
        self._resync_not_before = now + self._resync.next_delay()
        log.warning(
            "a master's map differs: sending the inventory again",
            master=self._link.address,
            listed=reply.blocks,
            held=held.blocks,
            again=again,
        )
        self._unregister()

    async def _wait(self) -> None:
        """Until there are changes or a heartbeat is due."""
        # `_wake` may still be set for changes that were sent already: the queue itself decides.
        self._wake.clear()
        if self._pending or self._state is AnnouncerState.UNREGISTERED:
            return
        until = self._next_heartbeat
        if self._missed.blocks:
            until = min(until, self._missed_due)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._wake.wait()

    def _failed(self, error: KvpoolError) -> None:
        self._has_problem(error)
        self._unregister()

    def _not_answered(self, error: DeadlineExceeded) -> None:
        """The master is late. Release the callers that wait for it; the queue is kept."""
        self._has_problem(error)
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_result(None)

    def _has_problem(self, error: KvpoolError) -> None:
        if _AGE.sub("", str(error)) != _AGE.sub("", str(self.problem)):
            log.warning("master cannot be told", master=self._link.address, why=str(error))
        self.problem, self._answers = error, False

    def _unregister(self) -> None:
        """An inventory is due. Callers that wait are released: `flushed` covers living masters."""
        self._state = AnnouncerState.UNREGISTERED
        self._pending.clear()
        self._missed.take()  # an inventory says more
        self._marks.clear()
        self._acknowledge(self._enqueued)

    def _acknowledge(self, position: int) -> None:
        """The master has applied the first `position` changes: release the callers that wait."""
        self._acknowledged = position
        waiting, self._waiting = self._waiting, []
        for awaited, future in waiting:
            if awaited > position:
                self._waiting.append((awaited, future))
            elif not future.done():
                future.set_result(None)
        if not self._waiting and not self._pending:
            self._urgent.clear()


def _pieces(steps: Iterator[list[Stretch]]) -> Iterator[list[wire.BlockChanges]]:
    """The pieces of an inventory, at least one. Each is made when it is asked for, in a time that
    does not depend on the number of blocks: of at most `_PIECE_STEPS` steps."""
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
    """Bytes that it takes in a message; perhaps more, because each namespace that is new to a
    master takes it some 20 us: 192 of them fit."""
    return max(128 + 4 * len(group.namespace), _CHANGES_SIZE // 192) + len(group.digests)


def _grouped(changes: Sequence[Change]) -> list[wire.BlockChanges]:
    """Consecutive changes of one kind become one message; the order is kept."""
    groups: list[wire.BlockChanges] = []
    first = 0
    for position in range(1, len(changes) + 1):
        head = changes[first]
        if position < len(changes):
            change = changes[position]
            if (
                change.status is head.status
                and change.part == head.part
                and change.tier == head.tier
                and change.namespace == head.namespace
                and len(change.digest) == len(head.digest)
            ):
                continue
        packed = b"".join([change.digest for change in changes[first:position]])
        namespace, part, digest, status, tier = head
        groups.append(
            wire.BlockChanges(
                namespace.name, namespace.parts, len(digest), packed, part, tier, status
            )
        )
        first = position
    return groups
