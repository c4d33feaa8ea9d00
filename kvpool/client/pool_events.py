"""What changes in the pool, as events: first all that is there, then what happens.

A master keeps its last changes; a reader asks for those after the number that it has reached. One
that comes too late, or meets another master, starts anew with a snapshot, and says so: RESET. A
part of a snapshot is the map as it was after a certain change, so the changes up to that one come
before it, and the reader is right at each moment about what it has read of. (design: pool-events)
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvpool import logs
from kvpool.backoff import Backoff
from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.client.lookup import Asks
from kvpool.errors import BadKey, BadMessage, MasterLost, UsageError
from kvpool.types import Namespace
from kvpool.wire import messages as wire
from kvpool.wire.changes import Changes, ChangesReply, MapChange, Snapshot

log = logs.get("kvpool.client")

#: A reader that has read everything asks again after this time.
_POLL_S: Final = 0.05
#: Pauses while no master answers.
_RETRY_S: Final = 0.2
_RETRY_S_MAX: Final = 5.0
#: What the numbers of `MapChange.kind` mean.


class PoolEventKind(enum.Enum):
    """What a `PoolEvent` says."""

    #: Forget everything that earlier events have said: all that is there follows.
    RESET = "reset"
    #: That was all of it: what follows has just happened.
    LIVE = "live"
    #: A server has these blocks in this tier, and in no other one.
    STORED = "stored"
    #: A server has them no more.
    REMOVED = "removed"
    #: A server has no block any more.
    CLEARED = "cleared"
    #: A server does not answer: what it has cannot be read for now.
    LOST = "lost"
    #: A server is there, with what it had before it was lost; or it is new.
    BACK = "back"
    #: The same as LOST, of a server that has ended in order, such as for an upgrade.
    LEFT = "left"


class EventPosition(NamedTuple):
    """Up to where a reader of `Pool.events` has come: a master's stream, and a number in it."""

    stream: int
    number: int


class PoolEvent(NamedTuple):
    """One change of what the pool has, as a master sees it.

    `position` is that behind this event. `server` and `host` are empty for RESET and LIVE, the rest
    for all but STORED and REMOVED; `tier` is of STORED, `host` of BACK.
    """

    kind: PoolEventKind
    position: EventPosition
    server: str = ""
    host: str = ""
    namespace: Namespace | None = None
    part: int = 0
    tier: str = ""
    digests: tuple[bytes, ...] = ()


_KINDS: Final = (
    PoolEventKind.STORED,
    PoolEventKind.REMOVED,
    PoolEventKind.CLEARED,
    PoolEventKind.LOST,
    PoolEventKind.BACK,
    PoolEventKind.LEFT,
)


class PoolEvents(ClientExtension):
    """The extension behind `Pool.events`."""

    def __init__(self, parts: ClientParts) -> None:
        self._context = parts.context

    def reader(self, at: EventPosition | None) -> EventReader:
        """As `Pool.events`."""
        if self._context.tenant:
            raise UsageError("events are of the whole pool: a tenant's client cannot read them")
        return EventReader(self._context.masters, lambda: self._context.begin(None), at)


class EventReader(AsyncIterator[PoolEvent]):
    """Reads one master's changes, for ever: an iterator over events.

    While no master answers it waits, and goes on when one does; the log says so once each.
    `deadline()` is that of a question that is asked now.
    """

    def __init__(
        self, masters: Asks, deadline: Callable[[], float], at: EventPosition | None = None
    ) -> None:
        self._masters = masters
        self._deadline = deadline
        self._at = at  # None: only a snapshot helps
        self._began_at: float | None = None
        self._level_at: float | None = None
        self._events = self._for_ever()

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> PoolEvent:
        return await anext(self._events)

    @property
    def behind_s(self) -> float:
        """Seconds since the reader had read all that a master had; before that, since it began.

        At rest below 0.1 s. It grows while no master answers, while a snapshot is read, and while
        whoever takes the events is slow. For the loop that reads.
        """
        since = self._began_at if self._level_at is None else self._level_at
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    async def _for_ever(self) -> AsyncIterator[PoolEvent]:
        loop = asyncio.get_running_loop()
        self._began_at = loop.time()
        backoff = Backoff(_RETRY_S, _RETRY_S_MAX)
        silent = False
        while True:
            try:
                async for event in self._whole() if self._at is None else self._news(self._at):
                    yield event
            except (MasterLost, BadMessage) as error:
                if not silent:
                    log.warning("no changes of the map arrive", why=str(error))
                silent = True
                await asyncio.sleep(backoff.next_delay())
                continue
            if silent:
                log.info("changes of the map arrive again")
            silent = False
            if self._at is None:  # a gap: the snapshot is always behind, or a master is new
                await asyncio.sleep(backoff.next_delay())
            else:
                self._level_at = loop.time()
                backoff.reset()
                await asyncio.sleep(_POLL_S)

    async def _news(self, at: EventPosition) -> AsyncIterator[PoolEvent]:
        """What has happened since; after a gap `_at` is None."""
        more = True
        while more:
            page = await self._changes(at)
            if page is None:
                self._at = None
                return
            more = page.more
            for event in _parsed(page.changes, at, step=1):
                self._at = at = event.position
                yield event

    async def _whole(self) -> AsyncIterator[PoolEvent]:
        """A snapshot, with the changes that happen meanwhile; after a gap it is not complete."""
        at: EventPosition | None = None
        cursor = Snapshot()
        while True:
            page = await self._masters.ask(cursor, ChangesReply, self._deadline())
            reached = EventPosition(page.stream, page.last)
            if at is None:
                at = reached
                yield PoolEvent(PoolEventKind.RESET, at)
            while at != reached:
                news = await self._changes(at)
                if news is None or not news.changes or at.number > reached.number:
                    return
                # What happened later comes after this part: the part does not know of it.
                changes = news.changes[: reached.number - at.number]
                for event in _parsed(changes, at, step=1):
                    at = event.position
                    yield event
            for event in _parsed(page.changes, at, step=0):
                yield event
            if not page.more:
                self._at = at
                yield PoolEvent(PoolEventKind.LIVE, at)
                return
            cursor = Snapshot(page.namespace, page.parts, page.piece)

    async def _changes(self, at: EventPosition) -> ChangesReply | None:
        """Changes after this position; None: some are missing, or it is of another master."""
        question = Changes(at.stream, at.number)
        page = await self._masters.ask(question, ChangesReply, self._deadline())
        complete = page.last == at.number + len(page.changes) and (page.changes or not page.more)
        return page if complete and page.stream == at.stream and not page.gap else None


def _parsed(changes: Sequence[MapChange], at: EventPosition, step: int) -> Iterator[PoolEvent]:
    """Raises BadMessage for what no master of this version sends."""
    for change in changes:
        at = at._replace(number=at.number + step)
        if change.kind >= len(_KINDS):
            raise BadMessage(f"change {change.kind} of a map")
        namespace: Namespace | None = None
        digests: tuple[bytes, ...] = ()
        if change.digests:
            try:
                namespace = Namespace(change.namespace, change.parts)
            except BadKey as error:
                raise BadMessage(str(error)) from None
            digests = wire.unpack_digests(change.digests, max(1, change.digest_size))
        yield PoolEvent(
            *(_KINDS[change.kind], at, change.server, change.host),
            *(namespace, change.part, change.tier, digests),
        )
