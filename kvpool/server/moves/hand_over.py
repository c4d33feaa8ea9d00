"""Has other servers fetch blocks from here: what drain, repair and balance want (design: movers).

Planners decide, and are pure (`state/`). Here is all that waits: for masters, for the servers that
fetch, and for whose turn it is. The data path, the room and the budget are those of every fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Final

from kvpool import logs
from kvpool.errors import LinkBroken, Overloaded, PeerError, Unavailable
from kvpool.moves import fetch
from kvpool.protocols import Channel
from kvpool.server.context import ServerContext
from kvpool.server.moves.peer_servers import PeerServers
from kvpool.server.moves.state.wants import (
    BlockName,
    MovePlanner,
    MoveView,
    Staying,
    Want,
    Wants,
    name_of,
)
from kvpool.server.state.entry import Entry
from kvpool.types import MoveStatus, ReadStatus
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: One question to masters, or one request to another server to fetch a stretch.
REQUEST_S: Final = 5.0
_ASK_AGAIN_S: Final = 0.02
#: After a failure, and while this server leaves.
PAUSE_S: Final = 0.5

FAILURES: Final = (Unavailable, PeerError, Overloaded)
_FETCHED: Final = MoveStatus.DONE
_AGAIN: Final = (MoveStatus.NOT_YET, MoveStatus.IN_PROGRESS)
_REASONS: Final = {MoveStatus.LOST: "not reached"}


class HandOver:
    """Carries out what the `planners` want, that of the first one first.

    One want at a time; what a drain wants is carried out by its own task, and then nothing else is.
    """

    def __init__(
        self, context: ServerContext, peers: PeerServers, planners: Sequence[MovePlanner]
    ) -> None:
        self._context = context
        self._store = context.store
        self._peers = peers
        self.planners = list(planners)
        self.view = MoveView(peers.server)
        self._running: dict[MovePlanner, Wants] = {}
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._context.tasks.forever("moves", self._step)

    async def close(self) -> None:
        """End the task. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def wake(self) -> None:
        """A planner may want something now."""
        self._woken.set()

    async def look(self) -> MoveView:
        """The view as of now. Raises MasterLost."""
        members = await self._peers.masters.members(_now() + REQUEST_S)
        self.view.now = _now()
        self.view.staying = {
            name: Staying(info.epoch, info.capacity, info.stats.used, info.heard_s)
            for name, info in members.items()
            if info.alive and not info.stats.draining
        }
        return self.view

    async def carry_out(self, planner: MovePlanner, wants: Wants) -> None:
        """All of these, or those until a master fails; several calls may share them."""
        for want in wants:
            try:
                await self._give(planner, want)
            except FAILURES as error:  # a master: the planner wants it, and the rest, again
                for entry in want.entries:
                    planner.left(name_of(entry), "no master answered")
                log.info("blocks wait for a master", why=str(error))
                await asyncio.sleep(PAUSE_S)
                return

    # --- inside ----------------------------------------------------------------------------------

    async def _step(self) -> None:
        """Carry out the next want of the first planner that is due, or wait until one is."""
        self._woken.clear()
        now = _now()
        due = [-math.inf if one in self._running else one.due_at() for one in self.planners]
        leaves = self._context.draining
        until = now + PAUSE_S if leaves else min(due, default=math.inf)
        if until > now:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if until == math.inf else until):
                    await self._woken.wait()
            return
        planner = next(one for one, at in zip(self.planners, due, strict=True) if at <= now)
        try:
            if planner not in self._running:
                self._running[planner] = planner.wants(await self.look())
            self.view.now = now
            want = next(self._running[planner], None)
            if want is not None:
                await self._give(planner, want)
                return
        except FAILURES as error:  # a master: the planner says anew what it wants
            log.info("blocks wait for a master", why=str(error))
            await asyncio.sleep(PAUSE_S)
        self._running.pop(planner, None)

    async def _give(self, planner: MovePlanner, want: Want) -> None:
        """Have others fetch those blocks that the planner misses there. Raises MasterLost."""
        found = [self._store.peek(*name_of(entry)) for entry in want.entries]
        entries = {name_of(entry): entry for entry in found if entry is not None}
        if not entries:
            await asyncio.sleep(0)
            return
        view = await self.look()
        holders = await self._peers.masters.holders(list(entries), view.staying, _now() + REQUEST_S)
        left = planner.missing(entries, holders, view)
        if not left:
            return
        placed: Sequence[str] = [want.to]
        if not want.to:
            placed = await self._place([entries[name] for name in left], planner.copies)
        targets = planner.targets(placed, view)
        for target in targets:
            asked = [name for name in left if target not in holders[name]]
            refused = await self._offer(planner, target, asked) if asked else asked
            if planner.together and len(refused) < len(asked):
                return
            if not planner.together:
                left = [name for name in left if name in refused or target in holders[name]]
            if not left:
                return
        for name in () if targets else left:
            planner.left(name, "no other server")

    async def _place(self, entries: Sequence[Entry], copies: int) -> Sequence[str]:
        """Servers for these blocks, best first: as for a writer who is on no host."""
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
            copies,
        )
        return (await self._peers.masters.ask(request, wire.PlaceReply, _now() + REQUEST_S)).servers

    async def _offer(
        self, planner: MovePlanner, target: str, wanted: Sequence[BlockName]
    ) -> list[BlockName]:
        """Have `target` fetch these blocks, again and again while it makes progress or is at its
        budget. Those for which the next one may be asked."""
        refused: list[BlockName] = []
        left, progress_at, broken = list(wanted), _now(), False
        while True:
            namespace, part, _ = left[0]
            until = _now() + REQUEST_S
            channel: Channel | None = None
            before = [self._store.peek(*name) for name in left]
            try:
                channel = await self._peers.channel(target, until)
                digests = [name.digest for name in left]
                asked = namespace, part, digests, self._peers.server
                statuses = await fetch(channel, *asked, deadline=until)
            except FAILURES as error:
                self._peers.failed(target, channel)
                if isinstance(error, LinkBroken) and not broken:
                    broken = True  # closed while it was idle, or by a restart: on a fresh one
                    continue
                log.info("a server does not fetch", target=target, why=str(error))
                problem = "server lost"
                break
            broken = False
            again: list[BlockName] = []
            for name, status in zip(left, statuses, strict=True):
                if status.present:
                    planner.came(name, target, moved=status is _FETCHED)
                elif self._store.peek(*name) is None:
                    continue  # it has left here, too
                elif status in _AGAIN:
                    again.append(name)
                else:
                    planner.left(name, _REASONS.get(status, status.label))
                    refused.append(name)
            if planner.forgets:
                fetched = [e for e, s in zip(before, statuses, strict=True) if s is _FETCHED]
                await self._forget([entry for entry in fetched if entry is not None])
            if len(again) < len(left):
                progress_at = _now()
            stalled = _now() - progress_at >= planner.stalled_s
            if not again or stalled or (planner.together and refused):
                problem, left = "no time was left", [] if planner.together else again
                break  # of a chain that stays together the rest may come yet
            left = again
            await asyncio.sleep(_ASK_AGAIN_S)
        for name in left:
            planner.left(name, problem)
        return [*refused, *left]

    async def _forget(self, entries: Sequence[Entry]) -> None:
        """Another server has these blocks, and masters know it: readers are sent there from now on.

        What a writer has stored meanwhile under the same name is another version, and stays.
        """
        if not entries:
            return
        namespace, part, _ = name_of(entries[0])
        digests = [entry.digest for entry in entries]
        versions = [entry.checksum for entry in entries]
        self._store.remove(namespace, digests, ReadStatus.EVICTED, part, versions)
        self._context.counters["handed_over_blocks"] += len(entries)
        self._context.counters["handed_over_bytes"] += sum(entry.size for entry in entries)
        self._context.on_change()
        await self._context.mover.erase()


def _now() -> float:
    return asyncio.get_running_loop().time()
