"""Hands over a server's blocks before it leaves: other servers fetch them (design: movers)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvpool import logs
from kvpool.errors import Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, SupportsFetch
from kvpool.runtime import task_group
from kvpool.server.context import ServerContext
from kvpool.server.moves.peer_servers import REFRESH_S, PeerServers
from kvpool.server.moves.state.drain_plan import BlockName, DrainPlan, HandedOver, name_of
from kvpool.server.state.entry import Entry, Stretch
from kvpool.server.state.tier_stores import cold_store
from kvpool.types import DrainReport, DrainState, FetchStatus, Left, ReadStatus
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: Stretches that are handed over at the same time: one is read while the next is placed.
_STRETCHES: Final = 2
#: One request to another server to fetch a stretch.
_FETCH_S: Final = 5.0
_ASK_AGAIN_S: Final = 0.02
#: Between two passes over what is left: other servers may have room then, or be back.
_PASS_GAP_S: Final = 0.5
#: Masters that do not answer so long need not know that this server leaves.
_MASTERS_S: Final = 5.0
#: A server that takes nothing for so long is not asked further in this pass.
_STALLED_S: Final = 10.0
#: Servers that are asked when those that placement names have no room.
_OTHERS_MAX: Final = 8
#: Of what others have taken over, removed at once, and in all before the process ends.
_FORGET_STEP: Final = 256
_FORGET_S: Final = 30.0
#: Lines of a report; those with the fewest bytes are left out.
_LINES_MAX: Final = 64

_FAILURES: Final = (Unavailable, PeerError, Overloaded)
_AGAIN: Final = (FetchStatus.NOT_YET, FetchStatus.IN_PROGRESS)


class Drainer:
    """Whether this server leaves, and what of its blocks others have.

    | state      | takes blocks | means                                     | next state           |
    |------------|--------------|-------------------------------------------|----------------------|
    | OFF        | yes          | it does not leave                         | RUNNING: `begin`     |
    | RUNNING    | no           | others fetch its blocks                   | DONE, INCOMPLETE;    |
    |            |              |                                           | OFF: `cancel`        |
    | DONE       | no           | a living server has each of its blocks    | OFF: `cancel`        |
    | INCOMPLETE | no           | the time was over, and some are left      | RUNNING: `begin`;    |
    |            |              |                                           | OFF: `cancel`        |

    In each of them blocks are served and removed as ever. With `durable`, the lowest tier keeps its
    blocks when this process ends.
    """

    def __init__(self, context: ServerContext, peers: PeerServers, *, durable: bool) -> None:
        self._context = context
        self._store = context.store
        self._peers = peers
        self._durable = durable
        self._state = DrainState.OFF
        self._handed = HandedOver()
        self._total = 0
        self._deadline = 0.0
        self._keeps_file = False
        self._waiting: set[BlockName] = set()
        self._waiting_bytes = 0
        self._living_seen: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None

    def begin(self, within_s: float, *, back_in_s: float = 0.0) -> None:
        """Hand over all blocks, until `within_s` from now. While it runs, a new deadline.

        With `back_in_s` the server will be back so soon, so blocks in its file stay there.
        """
        self._deadline = _now() + within_s
        if self._state is DrainState.RUNNING:
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(self._deadline)
            return
        self._keeps_file = back_in_s > 0 and self._durable
        self._state = DrainState.RUNNING
        self._context.draining = True
        self._handed = HandedOver()
        log.warning("drain begins", within_s=within_s, keeps_file=self._keeps_file)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="drain")

    async def cancel(self) -> None:
        """Stay: take writes again. Copies that others have made already remain theirs."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self._state is not DrainState.OFF:
            log.warning("drain is cancelled", moved_blocks=self._handed.moved_blocks)
            self._state = DrainState.OFF
            self._context.draining = False
            self._context.heartbeat_soon()

    async def wait(self) -> DrainReport:
        """Until it is over; the result."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self.report()

    async def close(self) -> None:
        """End the task; forget what others have taken over. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        over, self._task = self._state in (DrainState.DONE, DrainState.INCOMPLETE), None
        if over and self._durable and self._handed.moved:
            try:
                async with asyncio.timeout(_FORGET_S):
                    await self._forget_moved()
            except (TimeoutError, *_FAILURES) as error:
                log.warning("blocks stay here that others have now", why=str(error) or "no time")
            self._handed.moved.clear()

    def report(self) -> DrainReport:
        """How far it is, and what is left by reason."""
        lines = [Left(*line) for line in self._handed.problems()]
        running = self._state is DrainState.RUNNING
        return DrainReport(
            self._state,
            self._total,
            len(self._waiting) if running else sum(line.blocks for line in lines),
            self._waiting_bytes if running else sum(line.bytes for line in lines),
            self._handed.moved_blocks,
            self._handed.moved_bytes,
            tuple(lines[:_LINES_MAX]),
        )

    # --- inside ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        complete = False
        while True:
            deadline = self._deadline
            try:
                complete = await self._until_deadline()
                self._limit = None
                if not complete:
                    await self._count_left()
            except Exception:
                log.exception("drain failed")
                complete, deadline = False, math.inf  # it would fail again
            self._limit = None
            if complete or self._deadline <= max(deadline, _now()):
                break  # no new deadline was set meanwhile
        self._state = DrainState.DONE if complete else DrainState.INCOMPLETE
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
        await self._context.masters_know(min(self._deadline, _now() + _MASTERS_S))
        complete = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline) as self._limit:
                while not complete:
                    complete = await self._pass()
                    await asyncio.sleep(0 if complete else _PASS_GAP_S)
        return complete

    async def _count_left(self) -> None:
        """Every block of the index that is not safe is left, also what no pass has looked at."""
        for step in self._store.inventory_steps():
            for entry in self._sealed(step):
                name = name_of(entry)
                if not self._handed.is_known(name, self._living_seen):
                    planned = name in self._waiting
                    why = "no time was left" if planned else "not looked at"
                    self._handed.left(name, self._handed.reason_before(name) or why, entry.size)
            await asyncio.sleep(0)
        left = sum(blocks for _, _, blocks, _ in self._handed.problems())
        self._total = max(self._total, self._handed.moved_blocks + left)
        self._waiting = set()
        self._waiting_bytes = 0

    async def _pass(self) -> bool:
        """Hand over every block that is not safe; True when there was none, and none is written."""
        if self._keeps_file and self._store.is_writing_back:
            return False
        self._handed.begin_pass()
        plan = await self._plan()
        if not plan.blocks:
            busy = self._store.front.held.reservations or self._store.is_writing_back
            return not busy and await self._live(set(self._handed.holders.values()))
        stretches = plan.stretches()
        async with task_group() as group:
            for _ in range(_STRETCHES):
                group.create_task(self._hand_over_all(stretches))
        return False

    async def _forget_moved(self) -> None:
        """Remove the blocks that others have because of this drain, and still have. The next
        process would bring them back from the file: each drain would double them.

        Nobody can tell here whether there is a next one, so they are handed over first.
        """
        members = await self._peers.members(_now() + _FETCH_S)
        holders = set(self._handed.holders.values()) & await self._living(members)
        if not await self._live(holders):
            return  # each may be the last copy
        forgotten = 0
        for names in self._handed.moved_batches(_FORGET_STEP):
            namespace, part, _ = names[0]
            held = await self._peers.holders(names, holders, _now() + _FETCH_S)
            digests = [name.digest for name in held]
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
            members = await self._members()
            if not holders <= await self._living(members):
                return False
            age_s = _now() - since - REFRESH_S  # what is known of them is as old, at most
            holders = {holder for holder in holders if members[holder].heard_s >= age_s}
            await asyncio.sleep(_PASS_GAP_S if holders else 0)
        return True

    async def _plan(self) -> DrainPlan:
        """The blocks that are here and nowhere safe, in steps that leave the loop to others."""
        living = await self._living()
        plan = DrainPlan(self._store.peek)
        self._waiting = set()
        self._waiting_bytes = 0
        for step in self._store.inventory_steps():
            new = [
                entry
                for entry in self._sealed(step)
                if not self._handed.is_safe(name_of(entry), living)
                and name_of(entry) not in self._waiting
            ]
            if new:
                plan.add(new)
                self._waiting.update(map(name_of, new))
                self._waiting_bytes += sum(entry.size for entry in new)
            await asyncio.sleep(0)
        self._total = max(self._total, self._handed.moved_blocks + plan.blocks)
        return plan

    def _sealed(self, step: Sequence[Stretch]) -> Iterator[Entry]:
        """The blocks of one step through the index that are to be handed over."""
        for stretch in step:
            if stretch.status is ReadStatus.HIT:
                for digest in stretch.digests:
                    entry = self._store.peek(stretch.namespace, stretch.part, digest)
                    if entry is not None and not self._stays_in_file(entry):
                        yield entry

    def _stays_in_file(self, entry: Entry) -> bool:
        """Not if the file had no room for what tells its namespace. Others find what is cold."""
        if self._store.stores[entry.index.tier] is cold_store(self._store.stores):
            return True
        if not self._keeps_file:
            return False
        in_file = self._store.backing.peek(*name_of(entry))
        return in_file is not None and self._context.mover.keeps(in_file)

    async def _living(self, members: Mapping[str, wire.MemberInfo] | None = None) -> set[str]:
        """The servers whose copies count: they live, and do not leave themselves."""
        members = members or await self._members()
        self._living_seen = {
            info.server
            for info in members.values()
            if info.alive and not info.stats.draining and info.server != self._peers.server
        }
        return self._living_seen

    async def _members(self) -> Mapping[str, wire.MemberInfo]:
        while True:
            try:
                return await self._peers.members(_now() + _FETCH_S)
            except _FAILURES as error:  # until a master answers, nothing can be handed over
                log.info("drain waits for a master", why=str(error))
                await asyncio.sleep(_PASS_GAP_S)

    async def _hand_over_all(self, stretches: Iterator[list[Entry]]) -> None:
        for stretch in stretches:
            try:
                await self._hand_over(stretch)
            except _FAILURES as error:  # a master: the next pass tries again
                for entry in stretch:
                    self._handed.left(name_of(entry), "no master answered", entry.size)
                log.info("drain waits for a master", why=str(error))
                await asyncio.sleep(_PASS_GAP_S)
            for entry in stretch:
                self._waiting.discard(name_of(entry))
                self._waiting_bytes -= entry.size

    async def _hand_over(self, stretch: Sequence[Entry]) -> None:
        """Have the blocks of one chain fetched by the servers that placement names, best first."""
        living = await self._living()
        entries = {name_of(entry): entry for entry in stretch}
        held = await self._peers.holders(list(entries), living, _now() + _FETCH_S)
        for name, holder in held.items():
            self._handed.safe(name, holder, entries.pop(name).size, moved=False)
        if not entries:
            return
        placed = [one for one in await self._place(list(entries.values())) if one in living]
        targets = [*placed, *(await self._with_most_room(living - set(placed)))]
        reasons = dict.fromkeys(entries, "no other server" if not targets else "")
        for target in targets:
            await self._offer_to(target, entries, reasons)
            if not entries:
                return
        for name, entry in entries.items():
            self._handed.left(name, reasons[name], entry.size)

    async def _with_most_room(self, others: set[str]) -> list[str]:
        """Some servers that placement has not named, because it draws a few of many."""
        members = await self._members()
        rooms = sorted((m.stats.used - m.capacity, m.server) for m in members.values())
        return [server for _, server in rooms if server in others][:_OTHERS_MAX]

    async def _place(self, entries: Sequence[Entry]) -> Sequence[str]:
        """Servers for these blocks, as for a writer who is on no host."""
        first = entries[0]
        namespace = first.index.namespace
        request = wire.Place(
            namespace.name,
            namespace.parts,
            len(first.digest),
            b"".join(entry.digest for entry in entries),
            first.parent,
            sum(entry.size for entry in entries),
            "",
            1,
        )
        return (await self._peers.ask(request, wire.PlaceReply, _now() + _FETCH_S)).servers

    async def _offer_to(
        self, target: str, entries: dict[BlockName, Entry], reasons: dict[BlockName, str]
    ) -> None:
        """Have `target` fetch the `entries`, again and again while it makes progress or is at its
        budget. Those that it has then, or that left, are taken out."""
        wanted, progress_at = list(entries), _now()
        while wanted and _now() - progress_at < _STALLED_S:
            namespace, part, _ = wanted[0]
            channel: Channel | None = None
            try:
                until = _now() + _FETCH_S
                channel = await self._peers.channel(target, until)
                if not isinstance(channel, SupportsFetch):
                    reasons.update(dict.fromkeys(wanted, "it cannot fetch"))
                    return
                digests = [name.digest for name in wanted]
                statuses = await channel.fetch(
                    namespace, part, digests, self._peers.server, deadline=until
                )
            except _FAILURES as error:
                self._peers.failed(target, channel)
                log.info("drain: a server does not fetch", target=target, why=str(error))
                reasons.update(dict.fromkeys(wanted, "server lost"))
                return
            again = []
            for name, status in zip(wanted, statuses, strict=True):
                if status.present:
                    moved = status is FetchStatus.FETCHED
                    self._handed.safe(name, target, entries.pop(name).size, moved=moved)
                elif self._store.peek(*name) is None:
                    self._handed.gone(name)
                    del entries[name]
                elif status in _AGAIN:
                    reasons[name] = "no time was left"
                    again.append(name)
                else:
                    reasons[name] = _reason(status)
            if len(again) < len(wanted):
                progress_at = _now()
            wanted = again
            await asyncio.sleep(_ASK_AGAIN_S if wanted else 0)


def _reason(status: FetchStatus) -> str:
    return {FetchStatus.SOURCE_LOST: "not reached"}.get(status, status.label)


def _now() -> float:
    return asyncio.get_running_loop().time()
