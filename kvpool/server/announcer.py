"""Keeps one master informed of what this server holds: inventory, then changes, then heartbeats.

Every message has a number. A master that misses one refuses the next, and gets a new inventory
(design: announcements).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hmac
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool import logs
from kvpool.backoff import Backoff
from kvpool.errors import ConfigError, DeadlineExceeded, InvariantViolated, KvpoolError, Unavailable
from kvpool.fingerprint import MapFingerprint
from kvpool.protocols import Link
from kvpool.runtime import task_group
from kvpool.server.outbox import Outbox, loop_time, pieces
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import MissedBlocks, Stretch
from kvpool.supervision import Supervisor, stop
from kvpool.types import ServerStats
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: Pieces of an inventory that are sent before the first of them is answered.
_PIECES_IN_FLIGHT: Final = 4
#: Heartbeat intervals after which a message is sent again at the latest, if it is not answered.
_RESEND_INTERVALS_MAX: Final = 4
#: Seconds between two inventories to a master whose map differs after each of them.
_RESYNC_DELAY_MAX_S: Final = 60.0
#: Seconds after which a master that could not list all blocks gets the inventory again.
_RELIST_AFTER_S: Final = 60.0
_HINTS_STEP: Final = 8  # applied in one turn of the loop: each may be about 256 parts
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

    def token_for(self, master: str) -> bytes:
        """What it shows to the master at this address, so that no other process has its id. One
        that is no real master learns nothing that it could show to the others."""
        token = hmac.digest(self.secret, b"kvpool server token 1" + master.encode(), "sha256")
        return token[: wire.TOKEN_SIZE]


class AnnouncerState(enum.Enum):
    """What a master has of this server's inventory."""

    UNREGISTERED = enum.auto()
    SYNCING = enum.auto()
    STREAMING = enum.auto()


class MasterContact:
    """Requests of one server to one master: as whom they are made, and whether it answers."""

    def __init__(self, identity: Identity, link: Link, heartbeat_s: float) -> None:
        self._identity = identity
        #: With these each message begins.
        self.sender = (identity.server, identity.epoch, identity.token_for(link.address))
        self.link = link
        self.heartbeat_s = heartbeat_s
        self.answers = False  # the last request was answered
        self.problem: KvpoolError | None = None
        self._refused_at: float | None = None  # when a master first said that the id is taken

    async def request(
        self, message: wire.Message, answer: type[wire.M], within_s: float | None = None
    ) -> wire.M:
        deadline = asyncio.get_running_loop().time() + (within_s or self.heartbeat_s)
        request, hasty = wire.encode(message), self.answers  # then others may wait for it, too
        type, body = await self.link.request(*request, deadline=deadline, hasty=hasty)
        self.answers = True
        return wire.decode_answer(answer, type, body)

    async def register(self, capacity: int, blocks_max: int, sequence: int) -> wire.Registered:
        """Say who this server is. Raises ConfigError or Unavailable where that is not accepted."""
        identity = self._identity
        asked_at = loop_time()
        addresses, tiers = list(identity.addresses), list(identity.tiers)
        where = (*self.sender, identity.host, addresses, tiers)
        message = wire.Register(*where, capacity, sequence, identity.kept, blocks_max)
        registered = await self.request(message, wire.Registered)
        if not registered.accepted:
            raise self._id_is_taken(registered, asked_at)
        self._refused_at = None
        return registered

    def _id_is_taken(self, refused: wire.Registered, asked_at: float) -> KvpoolError:
        """ConfigError if the server that has the id lives, Unavailable if it may be this one.

        After a crash the master takes the process before for alive, until it was silent long
        enough. One that is heard while this process waits is another one.
        """
        if self._refused_at is None:
            self._refused_at = loop_time()
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

    def has_problem(self, error: KvpoolError) -> None:
        if _AGE.sub("", str(error)) != _AGE.sub("", str(self.problem)):
            log.warning("master cannot be told", master=self.link.address, why=str(error))
        self.problem, self.answers = error, False


class MapCheck:
    """Whether a master's map has all that is here, and when it gets the inventory for it again."""

    def __init__(self, master: str, heartbeat_s: float) -> None:
        self._master = master
        #: Blocks that this master does not list, because its map is full.
        self.unlisted = 0
        self.relist_at = 0.0
        self._resync = Backoff(heartbeat_s, _RESYNC_DELAY_MAX_S)
        self._resync_not_before = 0.0
        #: How often this master's map was not what the server held.
        self.differences = 0

    def not_listed(self, announced: wire.Announced) -> None:
        """Readers do not find these blocks through this master: try again after a while."""
        if not self.unlisted:
            self.relist_at = loop_time() + _RELIST_AFTER_S
            facts = {"why": announced.problem, "again_in_s": _RELIST_AFTER_S}
            log.warning("a master does not list all blocks", master=self._master, **facts)
        self.unlisted += announced.unlisted

    def must_resend(self, held: MapFingerprint, reply: wire.HeartbeatReply) -> bool:
        """Whether the inventory must go again: at once the first time, then after growing delays.

        An inventory mends any difference but a wrong count of ours, and that must not become a
        storm of inventories (design: announcements).
        """
        if not reply.differs:
            self._resync.reset()
            self._resync_not_before = 0.0
            return False
        self.differences += 1
        if loop_time() < self._resync_not_before:
            return False
        again = self._resync.failures
        self._resync_not_before = loop_time() + self._resync.next_delay()
        facts = {"listed": reply.blocks, "held": held.blocks, "again": again}
        log.warning("a master's map differs: inventory sent again", master=self._master, **facts)
        return True


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
        self.master = MasterContact(identity, link, heartbeat_s)
        self.map = MapCheck(link.address, heartbeat_s)
        self.outbox = Outbox(store)
        self._store = store
        self._stats = stats
        self._others_have_room = others_have_room
        self._tasks = tasks or Supervisor()
        self._state = AnnouncerState.UNREGISTERED
        self._wait_for_heartbeat: list[asyncio.Future[None]] = []
        self._sequence = 0
        self._hints_heard = 0
        self._hint_answers: list[wire.WireHintAnswer] = []  # for the next heartbeat
        self._next_heartbeat = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """The master has accepted this server, gets all its changes, and answers."""
        return self.master.answers and self._state is not AnnouncerState.UNREGISTERED

    def start(self) -> None:
        """Start the task that announces."""
        # However it fails, masters must hear of this server, or they take it for lost.
        self._task = self._tasks.forever(
            f"announce to {self.master.link.address}",
            self._announce,
            pause_max_s=self.master.heartbeat_s,
        )

    async def close(self) -> None:
        """Stop, and send `Leave`, waiting at most 0.2 s for the master's answer."""
        # The task first: a heartbeat after `Leave` would make the server alive again at the master.
        if self._task is not None:
            await stop(self._task)
        with contextlib.suppress(KvpoolError):
            await self.master.request(wire.Leave(*self.master.sender), wire.HeartbeatReply, 0.2)
        self.master.link.close()
        self._unregister()

    def enqueue(self, changes: Sequence[Stretch], held: MapFingerprint | None) -> None:
        """Queue changes for the next batch, unless an inventory is due anyway.

        `held` is what the server holds after them. It is compared with the master's map when they
        are applied there; None: it is not known.
        """
        registered = self._state is not AnnouncerState.UNREGISTERED
        if registered and not self.outbox.add(changes, held):
            self._unregister()

    def correct(self, missed: Sequence[MissedBlocks]) -> None:
        """Tell the master, after all changes, that these are not here, if that is so then."""
        if self._state is not AnnouncerState.UNREGISTERED:
            for one in missed:
                self.outbox.missed.add(*one)
            self.outbox.wake.set()

    def heartbeat_soon(self) -> asyncio.Future[None]:
        """Send a heartbeat at once. Done when the master has answered one that was sent after this
        call."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wait_for_heartbeat.append(future)
        self._next_heartbeat = 0.0
        self.outbox.wake.set()
        return future

    def flushed(self) -> asyncio.Future[bool]:
        """Done when the master has acknowledged all that is queued now, or does not answer. The
        result is that of `Outbox.is_flushed`."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if not self.registered or self.outbox.is_flushed(future):
            future.set_result(False)
        return future

    async def _announce(self) -> None:
        """Register, and send the inventory; then changes, and heartbeats: what is due of these."""
        try:
            if self._state is AnnouncerState.UNREGISTERED:
                await self._register()
                await self._send_inventory()
            await self._send_changes()
            if loop_time() >= self._next_heartbeat:
                await self._send_heartbeat()
            if self.master.answers:
                self.master.problem = None
            await self._wait()
        except KvpoolError as error:
            self._failed(error)
            soon = 10 if isinstance(error, Unavailable) else 1
            await asyncio.sleep(self.master.heartbeat_s / soon)
        except Exception as error:  # a bug, of a policy for example: nobody waits for it
            self._failed(InvariantViolated(f"{type(error).__name__}: {error}"))
            raise

    async def _deliver(self, message: wire.Announce | wire.Inventory, otherwise: str) -> bool:
        """Send a numbered message until the master has applied it: whether this server is `alone`
        with these blocks. Raises Unavailable, `otherwise`, where it has not."""
        within_s = self.master.heartbeat_s
        while self._state is not AnnouncerState.UNREGISTERED:
            try:
                announced = await self.master.request(message, wire.Announced, within_s)
                if announced.unlisted:
                    self.map.not_listed(announced)
                if not announced.applied:
                    raise Unavailable(otherwise)
                return announced.alone
            except DeadlineExceeded as error:
                self._not_answered(error)
                # A master that is late with many pieces would get more of them at each repetition.
                within_s = min(2 * within_s, _RESEND_INTERVALS_MAX * self.master.heartbeat_s)
        raise Unavailable("too many changes are queued for this master: it gets an inventory")

    async def _register(self) -> None:
        capacity = self._store.backing.allocator.capacity
        registered = await self.master.register(capacity, self._store.blocks_max, self._sequence)
        self._hints_heard = registered.hints_heard
        self.map.unlisted = 0
        # A master never goes back, so this server has to go on from its number.
        self._sequence = max(self._sequence, registered.sequence)

    async def _send_inventory(self) -> None:
        """All blocks, in pieces; changes meanwhile are queued and follow."""
        # Queue changes from here on, before the inventory is read: a block that is sealed while the
        # pieces are sent is in none of them. No await before `inventory_steps`.
        self.outbox.begin()
        self._state = AnnouncerState.SYNCING
        self._sequence += 1
        started = loop_time()
        numbered = enumerate(pieces(self._store.inventory_steps()))
        first, following = next(numbered), next(numbered, None)
        # The first piece begins the inventory, so it must arrive before the others; the last one
        # ends it, so it must arrive after them.
        await self._send_piece(*first, last=following is None)
        if following is not None:
            sent = await self._send_pieces(itertools.chain([following], numbered))
            await self._send_piece(sent + 1, [], last=True)
        # Some pieces may be later than changes in the queue, which the others do not have yet.
        self.outbox.comparable_from = self.outbox.enqueued
        await self._send_heartbeat()
        # Too many changes meanwhile have ended the synchronisation: then a new one begins.
        if self._state is AnnouncerState.SYNCING:
            self._state = AnnouncerState.STREAMING
        facts = {"blocks": self._store.stored, "seconds": round(loop_time() - started, 3)}
        log.info("master knows all blocks", master=self.master.link.address, **facts)

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
        message = wire.Inventory(*self.master.sender, self._sequence, piece, last, changes)
        await self._deliver(message, "the master does not know this server any more")
        if loop_time() >= self._next_heartbeat:
            await self._send_heartbeat()

    async def _send_changes(self) -> None:
        while await self.outbox.batch_due():
            await self._send_batch()
            if loop_time() >= self._next_heartbeat:
                await self._send_heartbeat()

    async def _send_batch(self) -> None:
        changes, count = self.outbox.take()
        if changes:
            self._sequence += 1
            message = wire.Announce(*self.master.sender, self._sequence, changes)
            alone = await self._deliver(message, "the master missed an announcement")
            self.outbox.acknowledge(self.outbox.acknowledged + count, alone=alone)

    async def _send_heartbeat(self) -> None:
        now = loop_time()
        self._next_heartbeat = now + self.master.heartbeat_s
        held = self.outbox.comparable()  # which also forgets what was before
        if self._state is not AnnouncerState.STREAMING or self.map.unlisted:
            held = None
        waiting = list(self._wait_for_heartbeat)
        heartbeat = wire.Heartbeat(
            *self.master.sender,
            self._stats(now),
            self._hints_heard,
            self._sequence,
            *((held.blocks, held.packed()) if held is not None else (0, b"")),
            self._hint_answers,
        )
        try:
            reply = await self.master.request(heartbeat, wire.HeartbeatReply)
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
        heard_at, answers = loop_time(), list[wire.WireHintAnswer]()
        for number, (subject, age_s, resume_in) in enumerate(reply.hints, 1):
            followed = self._store.hint(subject, resume_in, heard_at, age_s=age_s)
            if followed is not None:
                answers.append((str(subject), followed))
            if number % _HINTS_STEP == 0:
                await asyncio.sleep(0)
                # Callers wait for changes: who hints often, or looks up, must not delay them.
                if self._state is AnnouncerState.STREAMING and loop_time() < self._next_heartbeat:
                    await self._send_batch()
        self._hint_answers = answers[-wire.HINT_ANSWERS_MAX :]
        if reply.others_have_room:
            self._others_have_room()
        if len(reply.hints) == wire.HINTS_MAX:  # there may be more
            self._next_heartbeat = now
        if reply.sequence > self._sequence:
            raise Unavailable(f"the master counts {reply.sequence} messages of {self._sequence}")
        relist = bool(self.map.unlisted) and now >= self.map.relist_at
        if relist or (held is not None and self.map.must_resend(held, reply)):
            self._unregister()

    async def _wait(self) -> None:
        """Until there are changes or a heartbeat is due."""
        # `wake` may still be set for changes that were sent already: the queue itself decides.
        self.outbox.wake.clear()
        if self.outbox.pending or self._state is AnnouncerState.UNREGISTERED:
            return
        due = self._next_heartbeat
        if self.outbox.missed.blocks:
            due = min(due, self.outbox.missed_due)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await self.outbox.wake.wait()

    def _failed(self, error: KvpoolError) -> None:
        self.master.has_problem(error)
        self._unregister()

    def _not_answered(self, error: DeadlineExceeded) -> None:
        """The master is late. Release the callers that wait for it; the queue is kept."""
        self.master.has_problem(error)
        self.outbox.release(self.outbox.enqueued)

    def _unregister(self) -> None:
        """An inventory is due. Callers that wait are released: `flushed` covers living masters."""
        self._state = AnnouncerState.UNREGISTERED
        self.outbox.clear()
