"""Makes lost copies of what is read again, and looks after extra copies.

The server that is read knows with how many copies a block was written. It asks a
master who has the block, and has another server fetch it: the data path, the room and the budget
are those of every fetch (design: movers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from kvpool import logs
from kvpool.errors import Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, SupportsFetch
from kvpool.server.context import ServerContext
from kvpool.server.moves.peer_servers import PeerServers
from kvpool.server.moves.state.copy_demand import CopyDemand
from kvpool.server.moves.state.drain_plan import BlockName, DrainPlan, name_of
from kvpool.server.state.entry import Entry
from kvpool.types import FetchStatus, Namespace
from kvpool.wire import messages as wire

log = logs.get("kvpool.server")

#: What was read is looked at so often.
_ROUND_S: Final = 1.0
#: Stretches of one round: more wait until they are read again.
_STRETCHES_MAX: Final = 16
#: One request to another server to fetch a stretch.
_FETCH_S: Final = 5.0
#: Extra copies here of which masters are asked in one round whether they are the last ones.
_EXTRAS: Final = 512
#: Names of servers that fetch here: their reads are no use of a block.
_SERVERS_MAX: Final = 4096

_FAILURES: Final = (Unavailable, PeerError, Overloaded)
#: The block may be on its way there, also from another holder: one elsewhere would be too many.
_COMING: Final = (FetchStatus.NOT_YET, FetchStatus.IN_PROGRESS)


class CopyKeeper:
    """Looks after the copies of one server's blocks, while they are read."""

    def __init__(self, context: ServerContext, peers: PeerServers) -> None:
        self._context = context
        self._store = context.store
        self._peers = peers
        self._demand = CopyDemand()
        self._servers: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def read(self, namespace: Namespace, part: int, digests: Sequence[bytes], client: str) -> None:
        """A client, by its name, has read these blocks."""
        if client not in self._servers:
            self._demand.read(namespace, part, digests)
            self._wake()

    def server_fetches(self, server: str) -> None:
        """This client is a server that fetches blocks."""
        if len(self._servers) < _SERVERS_MAX:
            self._servers.add(server)

    def brought_extra(self, namespace: Namespace, part: int, digests: Sequence[bytes]) -> None:
        """This server has fetched extra copies."""
        for digest in digests:
            forgotten = self._demand.brought_extra(BlockName(namespace, part, digest))
            if forgotten is not None:
                self._keep(forgotten)
        self._wake()

    async def close(self) -> None:
        """End the task. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- inside ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._task is None and not self._closed:
            self._task = self._context.tasks.until_done("copies", self._run)
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None

    async def _run(self) -> None:
        """One round, a second after the first read; and more while extra copies are here."""
        extras = True
        while extras:
            await asyncio.sleep(_ROUND_S)
            try:
                if not self._context.draining:
                    await self._round()
                extras = await self._look_at_extras()
            except _FAILURES as error:
                log.debug("copies wait for a master", why=str(error))
                return  # the next read begins again

    async def _round(self) -> None:
        plan = DrainPlan(self._store.peek)
        now = _now()
        for due in self._demand.read_since(self._store.peek, now):
            plan.add(due)
            await asyncio.sleep(0)
        for number, stretch in enumerate(plan.stretches()):
            if number == _STRETCHES_MAX:
                break
            await self._look_after(stretch)

    async def _look_after(self, stretch: Sequence[Entry]) -> None:
        """Make one more copy of those blocks of one chain that have lost one."""
        members = await self._members()
        entries = {name_of(entry): entry for entry in stretch}
        holders = await self._holders(list(entries), members)
        lost = self._lost(entries, holders)
        for target in await self._targets([entries[name] for name in lost], members):
            new = [name for name in lost if target not in holders[name]]
            if new and await self._copy(new, target):
                break

    def _lost(
        self, entries: Mapping[BlockName, Entry], holders: Mapping[BlockName, set[str]]
    ) -> list[BlockName]:
        """The blocks that have too few copies, and get one more from here now."""
        lost: list[BlockName] = []
        here = self._peers.server
        for name, entry in entries.items():
            if here not in holders[name]:
                continue  # masters do not know of it any more, or not yet
            count, rank = len(holders[name]), sorted(holders[name]).index(here)
            if self._demand.may_copy(name, rank, short=count < entry.copies):
                lost.append(name)
        return lost

    async def _copy(self, names: Sequence[BlockName], target: str) -> bool:
        """Have `target` fetch these blocks from here; False if none of them comes there."""
        namespace, part, _ = names[0]
        until = _now() + _FETCH_S
        channel: Channel | None = None
        try:
            channel = await self._peers.channel(target, until)
            if not isinstance(channel, SupportsFetch):
                return False
            statuses = await channel.fetch(
                namespace,
                part,
                [name.digest for name in names],
                self._peers.server,
                deadline=until,
            )
        except _FAILURES as error:
            self._peers.failed(target, channel)
            log.info("a copy was not made", target=target, why=str(error))
            return False
        for name, status in zip(names, statuses, strict=True):
            if status.present:
                self._demand.copied(name)
        self._context.counters["repaired_copies"] += statuses.count(FetchStatus.FETCHED)
        return any(status.present or status in _COMING for status in statuses)

    async def _look_at_extras(self) -> bool:
        """Extra copies that are the last ones are extra no more; whether there are others."""
        names = self._demand.extras(_EXTRAS)
        by_part: dict[tuple[Namespace, int, int], list[BlockName]] = {}
        for name in names:
            entry = self._store.peek(*name)
            if entry is None or entry.copies:
                self._demand.drop_extra(name)
            else:
                key = name.namespace, name.part, len(name.digest)
                by_part.setdefault(key, []).append(name)
        for group in by_part.values():
            members = await self._members()
            for name, held in (await self._holders(group, members)).items():
                if held <= {self._peers.server}:
                    self._keep(name)
                    self._demand.drop_extra(name)
        return bool(by_part)

    def _keep(self, name: BlockName) -> None:
        """From now on it counts as any other block, in each tier."""
        self._store.keep(*name)

    async def _members(self) -> Mapping[str, wire.MemberInfo]:
        return await self._peers.members(_now() + _FETCH_S)

    async def _holders(
        self, names: Sequence[BlockName], members: Mapping[str, wire.MemberInfo]
    ) -> dict[BlockName, set[str]]:
        """Who has each block: servers that live and do not leave."""
        part = names[0].part
        holders: dict[BlockName, set[str]] = {name: set() for name in names}
        for start, last, replicas in await self._peers.find(names, _now() + _FETCH_S):
            here = {s for s, _, p in replicas if p == part and _stays(members.get(s))}
            for name in names[start : last + 1]:
                holders[name] = set(here)
        return holders

    async def _targets(
        self, entries: Sequence[Entry], members: Mapping[str, wire.MemberInfo]
    ) -> list[str]:
        """Servers for a copy of these blocks, best first: as for a writer, who is on no host."""
        if not entries:
            return []
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
            2,
        )
        placed = await self._peers.ask(request, wire.PlaceReply, _now() + _FETCH_S)
        others = dict.fromkeys(placed.servers)
        return [s for s in others if s != self._peers.server and _stays(members.get(s))]


def _stays(member: wire.MemberInfo | None) -> bool:
    return member is not None and member.alive and not member.stats.draining


def _now() -> float:
    return asyncio.get_running_loop().time()
