"""Hands over a server's blocks before it leaves: other servers fetch them (design: movers)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Final

from kvpool import logs
from kvpool.operators import DrainReport
from kvpool.runtime import task_group
from kvpool.server.context import ServerContext
from kvpool.server.moves.asked_masters import REFRESH_S
from kvpool.server.moves.hand_over import FAILURES, PAUSE_S, REQUEST_S, HandOver
from kvpool.server.moves.peer_servers import PeerServers
from kvpool.server.moves.state.drain_plan import DrainPlanner
from kvpool.server.moves.state.wants import name_of
from kvpool.server.state.entry import Entry
from kvpool.supervision import stop
from kvpool.types import MoveStatus, ReadStatus

log = logs.get("kvpool.server")

#: Stretches that are handed over at the same time: one is read while the next is placed.
_STRETCHES: Final = 2
#: Masters that do not answer so long need not know that this server leaves. At the end they have as
#: long, also behind the deadline, to say what has become of the moved blocks.
_MASTERS_S: Final = 5.0
#: Of what others have taken over, removed at once, and in all before the process ends.
_FORGET_STEP: Final = 256
_FORGET_S: Final = 30.0
#: Of what was moved, asked for at once whether it is still there.
_CHECK_STEP: Final = 1024


class Drainer:
    """Whether this server leaves, and what of its blocks others have.

    | state       | takes blocks | means                                    | next state           |
    |-------------|--------------|------------------------------------------|----------------------|
    | None        | yes          | it does not leave                        | IN_PROGRESS: `begin` |
    | IN_PROGRESS | no           | others fetch its blocks                  | DONE, NOT_YET;       |
    |             |              |                                          | None: `cancel`       |
    | DONE        | no           | a living server has each of its blocks   | None: `cancel`       |
    | NOT_YET     | no           | the time was over, or a receiver has     | IN_PROGRESS: `begin` |
    |             |              | evicted some again: these are left       | None: `cancel`       |

    In each of them blocks are served and removed as ever. With `durable`, the lowest tier keeps its
    blocks when this process ends.
    """

    def __init__(
        self, context: ServerContext, peers: PeerServers, hand_over: HandOver, *, durable: bool
    ) -> None:
        self._context = context
        self._store = context.store
        self._peers = peers
        self._hand_over = hand_over
        self._durable = durable
        self._state: MoveStatus | None = None
        self._planner = DrainPlanner(self._store, self._stays)
        self._deadline = 0.0
        self._keeps_file = False
        self._task: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None

    def begin(self, within_s: float, *, back_in_s: float = 0.0) -> None:
        """Hand over all blocks, until `within_s` from now. While it runs, a new deadline.

        With `back_in_s` the server will be back so soon, so blocks in its file stay there.
        """
        self._deadline = _now() + within_s
        if self._state is MoveStatus.IN_PROGRESS:
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(self._deadline)
            return
        self._keeps_file = back_in_s > 0 and self._durable
        self._limit = None  # that of one that was cancelled cannot be moved any more
        self._state = MoveStatus.IN_PROGRESS
        self._context.draining = True
        self._planner = DrainPlanner(self._store, self._stays)
        log.warning("drain begins", within_s=within_s, keeps_file=self._keeps_file)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="drain")

    async def cancel(self) -> None:
        """Stay: take writes again. Copies that others have made already remain theirs."""
        task, self._task = self._task, None
        if self._state is not None:
            log.warning("drain is cancelled", moved_blocks=self._planner.handed.moved_blocks)
            self._state = None
            self._context.draining = False
            self._tell_masters()
        if task is not None:  # last: a drain that begins while this one ends is another one
            await stop(task)

    async def wait(self) -> DrainReport:
        """Until it is over; the result."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self.report()

    async def close(self) -> None:
        """End the task; forget what others have taken over. Idempotent."""
        if self._task is not None:
            await stop(self._task)
        over, self._task = self._state in (MoveStatus.DONE, MoveStatus.NOT_YET), None
        moved = self._planner.handed.moved
        if over and self._durable and moved:
            try:
                async with asyncio.timeout(_FORGET_S):
                    await self._forget_moved()
            except (TimeoutError, *FAILURES) as error:
                log.warning("blocks stay here that others have now", why=str(error) or "no time")
            moved.clear()

    def report(self) -> DrainReport:
        """How far it is, and what is left by reason."""
        return self._planner.report(self._state)

    # --- inside ----------------------------------------------------------------------------------

    def _tell_masters(self) -> list[asyncio.Future[None]]:
        """Send every master the figures of now; one future each, done when it has them."""
        return [announcer.heartbeat_soon() for announcer in self._context.announcers]

    async def _run(self) -> None:
        complete = False
        while True:
            deadline = self._deadline
            try:
                complete = await self._until_deadline()
                self._limit = None
                complete = await self._still_there() and complete
                if not complete or self._planner.handed.problems():  # of what has left since, too
                    await self._count_left()
            except Exception:
                log.exception("drain failed")
                complete, deadline = False, math.inf  # it would fail again
            self._limit = None
            if complete or self._deadline <= max(deadline, _now()):
                break  # no new deadline was set meanwhile
        if self._task is not asyncio.current_task():
            return  # it was called off, in the moment of an error
        self._state = MoveStatus.DONE if complete else MoveStatus.NOT_YET
        left = self.report()
        (log.warning if complete else log.error)(
            "drain is over",
            moved_blocks=left.moved_blocks,
            moved_bytes=left.moved_bytes,
            left_blocks=left.left_blocks,
            left_bytes=left.left_bytes,
        )

    async def _until_deadline(self) -> bool:
        """Hand over until nothing is left (True), or until the time is over."""
        # First: of two servers that leave at the same time, each must see the other one leave
        # before it counts the other's copy as safe.
        if sent := self._tell_masters():
            await asyncio.wait(sent, timeout=max(0.0, min(self._deadline - _now(), _MASTERS_S)))
        complete = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline) as self._limit:
                while not complete:
                    try:
                        complete = await self._pass()
                    except FAILURES as error:  # until a master answers, nothing can be handed over
                        log.info("drain waits for a master", why=str(error))
                    await asyncio.sleep(0 if complete else PAUSE_S)
        return complete

    async def _still_there(self) -> bool:
        """Whether others have all that was moved. A receiver that is nearly full evicts for what
        comes later; that is not moved once more, as something else would have to go for it."""
        handed, evicted, asked = self._planner.handed, [], True
        try:
            async with asyncio.timeout_at(max(self._deadline, _now() + _MASTERS_S)):
                view = await self._hand_over.look()
                for names in handed.moved_batches(_CHECK_STEP):
                    held = await self._peers.masters.holders(names, view.others, _now() + REQUEST_S)
                    evicted += [name for name in names if not held[name]]
        except (TimeoutError, *FAILURES) as error:
            why = str(error) or "no time was left"
            log.warning("nobody says whether what was moved is still there", why=why)
            asked = False
        here = 0
        for number, name in enumerate(evicted):
            if (entry := self._store.peek(*name)) is not None:
                handed.evicted(name, entry.size)
                here += 1
            if number % _CHECK_STEP == 0:
                await asyncio.sleep(0)
        return asked and not here

    async def _count_left(self) -> None:
        for _ in self._planner.count_left(self._hand_over.view):
            await asyncio.sleep(0)

    async def _pass(self) -> bool:
        """Hand over every block that is not safe; True when there was none, and none is written."""
        if self._keeps_file and self._store.is_writing_back:
            return False
        planner, view = self._planner, await self._hand_over.look()
        for _ in planner.look(view):
            await asyncio.sleep(0)
        if not planner.waiting:
            busy = self._store.front.held.reservations or self._store.is_writing_back
            return not busy and await self._live(set(planner.handed.holders.values()))
        wants = planner.wants(view)
        async with task_group() as group:
            for _ in range(_STRETCHES):
                group.create_task(self._hand_over.carry_out(planner, wants))
        return False

    async def _forget_moved(self) -> None:
        """Remove the blocks that others have because of this drain, and still have. The next
        process would bring them back from the file: each drain would double them.

        Nobody can tell here whether there is a next one, so they are handed over first.
        """
        handed, view = self._planner.handed, await self._hand_over.look()
        holders = set(handed.holders.values()) & view.others
        if not await self._live(holders):
            return  # each may be the last copy
        forgotten = 0
        for names in handed.moved_batches(_FORGET_STEP):
            namespace, part, _ = names[0]
            held = await self._peers.masters.holders(names, holders, _now() + REQUEST_S)
            digests = [name.digest for name in names if held[name]]
            removed = self._store.remove(namespace, digests, ReadStatus.EVICTED, part)
            forgotten += sum(removed)
            self._context.on_change()
            await self._context.mover.erase()
        log.info("what others have taken over is removed", blocks=forgotten)

    async def _live(self, holders: set[str]) -> bool:
        """Wait until each of these servers has sent a heartbeat from now on.

        Masters take seconds to see that a server is lost: one that was killed before the last block
        went to another would still count. False: one is lost, and its share is handed over again.
        """
        since = _now()
        while holders:
            view = await self._hand_over.look()
            if not holders <= view.others:
                return False
            age_s = view.now - since - REFRESH_S  # what is known of them is as old, at most
            holders = {one for one in holders if view.staying[one].heard_s >= age_s}
            await asyncio.sleep(PAUSE_S if holders else 0)
        return True

    def _stays(self, entry: Entry) -> bool:
        """Whether its file brings the block back. Not if that had no room for what tells its
        namespace. Others find what is cold."""
        if entry.index.tier == self._store.cold_tier:
            return True
        if not self._keeps_file:
            return False
        in_file = self._store.backing.index.peek(*name_of(entry))
        return in_file is not None and self._context.mover.keeps(in_file)


def _now() -> float:
    return asyncio.get_running_loop().time()
