"""Which of a server's tiers, and of their files, are used: what fails is left out, with one line.

A *place* is a tier, or one of the parts of a tier that has several: what fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeAlias

from kvpool import logs
from kvpool.backoff import Backoff
from kvpool.errors import Unavailable
from kvpool.protocols import Tier
from kvpool.protocols.persistent_tier import HasParts
from kvpool.server.state.divided_allocator import part_of, parts_of
from kvpool.server.state.tier_stores import cold_store
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tier_traffic import TierTraffic
from kvpool.supervision import Supervisor

log = logs.get("kvpool.mover")

#: The number of a tier and of a part of it; 0 where it has no parts.
Place: TypeAlias = tuple[int, int]

#: Reads that fail in a row, after which a place is taken offline; batches of writes of which
#: nothing arrives, after which nothing is written there.
_FAILURES_MAX: Final = 8
#: What takes no writes is tried again after this time, then after twice as long, up to the second.
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 30.0
#: One line in this time says how many blocks of a place were damaged.
_CORRUPT_LOG_S: Final = 60.0
#: One read or write that takes longer means that the device is stuck.
_STUCK_S: Final = 30.0
#: A process that was stopped (SIGSTOP) sees its timers expire before it sees what has ended
#: meanwhile: a place is only taken offline if the call has not ended after this time either.
_CONFIRM_DELAY_S: Final = 1.0


class _PlaceHealth:
    """What failed lately at one place."""

    def __init__(self) -> None:
        self.reads_failed = 0  # in a row
        self.batches_failed = 0  # in a row, of writes of which nothing has arrived
        self.lost = asyncio.Event()
        self.is_closed = False  # from the first batch that closed it to the next that arrives
        self.write_error = ""  # the last one
        self.retry = Backoff(_RETRY_S, _RETRY_MAX_S)
        self.corrupt = 0  # blocks that no line of the log has reported
        self.corrupt_due = 0.0  # when one may


class TierHealth:
    """The states of all places, but for the front tier, which is memory and cannot fail.

    | state     | means                                  | next state, when                       |
    |-----------|----------------------------------------|----------------------------------------|
    | running   | transfers go in and out                | failing: a read or write fails         |
    | failing   | fewer than `_FAILURES_MAX` in a row    | running: one succeeds; closed or       |
    |           |                                        | read-only: more batches of writes;     |
    |           |                                        | offline: more reads                    |
    | closed    | one part of several: it is read, and   | running: a batch arrives, which is     |
    |           | all is written to the others           | tried after growing delays; offline    |
    | read-only | no part of the backing tier is open:   | running: a write succeeds, which is    |
    |           | blocks that it does not have are       | tried after growing delays; offline:   |
    |           | evicted from memory without a copy     | reads fail as above                    |
    | offline   | no transfers; its blocks are removed   | (none until the server is restarted)   |
    |           | as lost, some at a time                |                                        |

    A transfer that takes `_STUCK_S` leads from any state to offline, and batches under way there
    are given up at once (`lost`). A tier whose parts are all offline is offline; when that is the
    backing tier, the front tier becomes the pool. A cache tier that takes no writes goes offline.
    """

    def __init__(
        self,
        store: TieredStore,
        tiers: Sequence[Tier],
        traffic: Sequence[TierTraffic],
        supervisor: Supervisor,
        *,
        own: Callable[[asyncio.Task[None]], object],
        write_one: Callable[[], Awaitable[bool]],
        gave_up: Callable[[Place], None],
        on_change: Callable[[], None],
    ) -> None:
        """`own` keeps the tasks that are started here, and cancels them in the end. `write_one`
        tries a read-only tier: False if it still takes nothing. `gave_up` hears of each place that
        goes offline, `on_change` of each change of the store."""
        self._store = store
        self._tiers = tiers
        self._traffic = traffic
        self._supervisor = supervisor
        self._own = own
        self._write_one = write_one
        self._gave_up = gave_up
        self._on_change = on_change
        self._places = {
            (number, part): _PlaceHealth()
            for number, tier in enumerate(tiers)
            for part in range(len(tier.parts) if isinstance(tier, HasParts) else 1)
        }
        self.retry = Backoff(_RETRY_S, _RETRY_MAX_S)  # of writes to a read-only tier

    def __repr__(self) -> str:
        return f"<TierHealth of {len(self._places)} places>"

    def place(self, tier: int, offset: int) -> Place:
        """Where an extent of a tier lies."""
        return tier, part_of(self._store.stores[tier].allocator, offset)

    def lost(self, place: Place) -> asyncio.Event:
        """Set when the place goes offline."""
        return self._places[place].lost

    def parts(self, tier: int) -> list[int]:
        """The parts of a tier that are not offline."""
        return [
            part
            for (number, part), one in self._places.items()
            if number == tier and not one.lost.is_set()
        ]

    def open_parts(self, tier: int) -> list[int]:
        """Those of them that take writes, as far as is known; all, where the tier is read-only."""
        parts = parts_of(self._store.stores[tier].allocator)
        return [one for one in self.parts(tier) if parts is None or one not in parts.closed]

    def problems(self, tier: int) -> list[str]:
        """What is wrong with parts of a tier, for `kvpool status`: a sentence for each of them."""
        found = []
        for (number, part), one in self._places.items():
            if number == tier and one.lost.is_set():
                found.append(f"{self._name((number, part))} is out of service")
            elif number == tier and one.is_closed:
                found.append(f"{self._name((number, part))} takes no writes: {one.write_error}")
        return found

    # --- what the mover reports ------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, place: Place) -> Iterator[None]:
        """Around each call of a tier; a place where one takes longer than `_STUCK_S` goes offline.

        What a tier may not raise, by its contract, is Unavailable, too: what it failed to do must
        be cleared up in the same way.
        """
        tier = place[0]
        if self.lost(place).is_set():
            raise Unavailable(f"{self._name(place)} is out of service")
        loop = asyncio.get_running_loop()

        def late() -> None:
            why = f"stuck for {_STUCK_S:g} s"
            alarms.append(loop.call_later(_CONFIRM_DELAY_S, self.lose, place, why))

        alarms = [loop.call_later(_STUCK_S, late)]
        try:
            yield
        except Unavailable:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if problem != self._traffic[tier].bug:  # with its traceback, once
                self._traffic[tier].bug = problem
                log.exception("a tier has failed", tier=self._tiers[tier].name)
            raise Unavailable(problem) from error
        finally:
            for alarm in alarms:
                alarm.cancel()

    def read_done(self, place: Place) -> None:
        self._places[place].reads_failed = 0

    def read_corrupt(self, place: Place, digest: bytes) -> None:
        """What was read there is not what was written. A damaged file has many such blocks."""
        one, now = self._places[place], _now()
        one.corrupt += 1
        if now >= one.corrupt_due:
            found = {"file": self._name(place), "block": digest, "count": one.corrupt}
            log.error("block is corrupt", tier=self._tiers[place[0]].name, **found)
            one.corrupt, one.corrupt_due = 0, now + _CORRUPT_LOG_S

    def read_failed(self, place: Place, error: Unavailable) -> None:
        self._traffic[place[0]].failures += 1
        one = self._places[place]
        one.reads_failed += 1
        stores = self._store.stores  # of which a cold one may be back in a while
        if one.reads_failed >= _FAILURES_MAX and stores[place[0]] is not cold_store(stores):
            self.lose(place, str(error))

    def write_failed(self, place: Place, error: Unavailable) -> None:
        self._traffic[place[0]].failures += 1
        self._traffic[place[0]].write_error = self._places[place].write_error = str(error)

    def batch_done(self, place: Place, *, good: bool) -> None:
        """Some of a batch has been written to this place (`good`), or nothing of it."""
        tier, store, one = place[0], self._store, self._places[place]
        if good:
            one.batches_failed = 0
            if one.is_closed:
                one.is_closed = False
                one.retry.reset()
                log.warning("a file takes writes again", file=self._name(place))
            return
        one.batches_failed += 1
        if one.batches_failed < _FAILURES_MAX or one.lost.is_set():
            return
        if tier != store.backing_tier:
            self.take_offline(tier, one.write_error)
        elif not self._close(place) and not store.queue.read_only:
            log.error("tier is read-only", tier=self._tiers[tier].name, why=one.write_error)
            stopping = store.queue.stop_writing()
            next(stopping, None)  # at once, before a writer asks for space
            retry = functools.partial(self._retry_writes, tier, stopping)
            self._own(self._supervisor.until_done("try a read-only tier", retry))

    # --- what follows ----------------------------------------------------------------------------

    def _close(self, place: Place) -> bool:
        """Write to the other parts until this one takes writes. False if no other one is open."""
        one = self._places[place]
        parts = parts_of(self._store.stores[place[0]].allocator)
        if parts is None:
            return False
        if place[1] in parts.closed:  # a batch that was under way when it was closed
            return True
        if not parts.close(place[1]):
            return False
        if not one.is_closed:
            one.is_closed = True
            log.error("a file takes no writes", file=self._name(place), why=one.write_error)
        self._own(self._supervisor.until_done("try a file", functools.partial(self._reopen, place)))
        return True

    async def _reopen(self, place: Place) -> None:
        """Open a part again after a while; the next batch that fails closes it."""
        one = self._places[place]
        parts = parts_of(self._store.stores[place[0]].allocator)
        await asyncio.sleep(one.retry.next_delay())
        assert parts is not None
        parts.open(place[1])
        self._on_change()

    async def _retry_writes(self, tier: int, stopping: Iterator[None]) -> None:
        """Until the tier takes writes again, or goes offline."""
        since = _now()
        for _ in stopping:
            await asyncio.sleep(0)
        self._on_change()
        while self._store.queue.read_only:
            await asyncio.sleep(self.retry.next_delay())
            if self._store.queue.read_only and await self._write_one():
                log.warning(
                    "tier takes writes again",
                    tier=self._tiers[tier].name,
                    after_s=round(_now() - since, 1),
                    blocks_to_write=self._store.queue.resume_writing(),
                )
                self.retry.reset()
                for (number, _), one in self._places.items():
                    one.batches_failed = 0 if number == tier else one.batches_failed
                self._on_change()

    def lose(self, place: Place, why: str) -> None:
        """This place goes offline; the whole tier, if it is all that was left of that."""
        tier, part = place
        parts = parts_of(self._store.stores[tier].allocator)
        if parts is None or self.parts(tier) == [part]:
            self.take_offline(tier, why)
        elif not self.lost(place).is_set():
            log.error("a file is out of service", file=self._name(place), why=why)
            self._leave(place)
            parts.retire(part)
            self._store.erasures.take(part)
            drop = functools.partial(self._drop, tier, part)
            self._own(self._supervisor.until_done("drop what a file had", drop))
            self._on_change()

    def take_offline(self, tier: int, why: str) -> None:
        if tier not in self._store.index.offline and tier != self._store.front_tier:
            log.error("tier is out of service", tier=self._tiers[tier].name, why=why)
            self._store.take_offline(tier)
            for part in self.parts(tier):
                self._leave((tier, part))
            drop = functools.partial(self._drop, tier)
            self._own(self._supervisor.until_done("drop what a tier had", drop))
            self._on_change()

    def _leave(self, place: Place) -> None:
        self.lost(place).set()
        self._gave_up(place)

    async def _drop(self, tier: int, part: int | None = None) -> None:
        """Remove the blocks of a lost place. What memory has of a file is written elsewhere."""
        for _ in self._store.drop_lost(tier, part):
            self._on_change()
            await asyncio.sleep(0)
        self._on_change()

    def _name(self, place: Place) -> str:
        tier = self._tiers[place[0]]
        return tier.parts[place[1]].place if isinstance(tier, HasParts) else tier.name


def _now() -> float:
    return asyncio.get_running_loop().time()
