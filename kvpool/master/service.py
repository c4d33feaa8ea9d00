"""The master: a directory behind a socket.

Each request is answered at once, without an `await`, so no request sees a half-applied change. A
master writes no file and knows no other master: after a restart, the servers send it their whole
inventories. (design: announcements)
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from kvpool import logs, spans
from kvpool.config import MasterConfig, check_bind
from kvpool.errors import BadMessage, Forbidden, Overloaded, Unauthenticated
from kvpool.guard import Who, make_guard
from kvpool.master.hints import make_hints
from kvpool.master.state.change_ring import PAGE_SIZE, LoggedChange, size_of
from kvpool.master.state.demand import DemandMeter
from kvpool.master.state.directory import ChainMatch, Directory, MapCursor
from kvpool.master.state.server_record import SequenceCheck
from kvpool.net.announced import reachable
from kvpool.protocols import Caller, CountedListener, Network
from kvpool.spans import MarkedChain
from kvpool.supervision import Supervisor
from kvpool.tenant_names import marker_of
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    Demand,
    Namespace,
    ReadStatus,
    Replica,
    Run,
    ServerStats,
)
from kvpool.wire import messages as wire

log = logs.get("kvpool.master")

#: Copies of one block that an answer names, so that they fit into a message with the longest names.
_REPLICAS_MAX: Final = 256
#: Servers for a write that an answer names.
_PLACES_MAX: Final = 64

#: Pairs of id and caller whose refusal was logged. At the limit all are forgotten, so that a caller
#: that makes up ids costs no memory, only log lines, one for each of its messages.
_REFUSED_MAX: Final = 1024

#: Of so many matches one is looked at behind its first miss: so many blocks, evenly spread.
_HOLES_EVERY: Final = 16
_HOLES_MAX: Final = 128

#: Of one answer about what has changed, and copies of a part of a snapshot: a millisecond or two.
_CHANGES_BLOCKS: Final = 2048
_SNAPSHOT_BLOCKS: Final = 512

M = TypeVar("M", bound=wire.Message)
S = TypeVar("S", bound=wire.ServerMessage)

#: The caller of tests and tools that call a master directly.
_NOBODY: Final = Caller()


class Master:
    """One master. `start`, then `close`; several side by side share nothing."""

    def __init__(
        self,
        config: MasterConfig,
        network: Network,
        *,
        directory: Directory | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._network = network
        if directory is None:
            directory = Directory(
                timeout_s=config.timeout_s,
                forget_s=config.forget_s,
                servers_per_host_max=config.servers_per_host_max,
                blocks_max=config.blocks_max,
            )
        self.directory = directory
        self.hints = make_hints(self._now)
        self._demand = DemandMeter()
        #: Matches of clients by what ended them: the reason of the first miss, or `hit`; and the
        #: blocks that were asked for and found.
        self.matches: Counter[ReadStatus] = Counter()
        self.asked_blocks = 0
        self.found_blocks = 0
        #: Matches that ended at a mark, because the map did not know its span.
        self.unknown_spans = 0
        self._partial = True  # servers may be alive whose blocks are not in the map
        self._listener: CountedListener | None = None
        self._address = ""
        #: The long-lived tasks of this master.
        self.tasks = Supervisor(rng)
        self._ticker: asyncio.Task[None] | None = None
        self._started = 0.0
        #: Requests that were answered, by kind.
        self.requests: Counter[str] = Counter()
        #: Messages of servers that were refused, by reason.
        self.refusals: Counter[str] = Counter()
        #: Heartbeats after which this master's map was not what the server held.
        self.differences = 0
        self._refused: set[tuple[str, str]] = set()
        self._guard = make_guard()
        self._handlers: dict[int, Callable[[bytes, Caller], wire.Message]] = {}
        self._handle(wire.Register, self._register)
        self._handle(wire.Heartbeat, self._from_owner(self._heartbeat))
        self._handle(wire.Leave, self._from_owner(self._leave))
        self._handle(wire.Announce, self._from_owner(self._announce))
        self._handle(wire.Inventory, self._from_owner(self._inventory))
        self._handle(wire.Find, _from_anyone(self._find))
        self._handle(wire.FindChain, _from_anyone(self._match))
        self._handle(wire.Place, _from_anyone(self._place))
        self._handle(wire.Members, self._members)
        self._handle(wire.Explain, _from_anyone(self._explain))
        self._handle(wire.Hint, _from_anyone(self.hints.hint))
        self._handle(wire.ExplainSession, _from_anyone(self.hints.explain))
        self._handle(wire.Namespaces, self._namespaces)
        self._handle(wire.Demands, self._demands)
        self._handle(wire.Changes, _from_anyone(self._changes))
        self._handle(wire.Snapshot, _from_anyone(self._snapshot))
        #: Names this master's numbers of changes: another one, or the next process, has its own.
        self._stream = (rng or random.SystemRandom()).getrandbits(62) + 1

    def __repr__(self) -> str:
        return f"<Master {self.address} {len(self.directory)} blocks>"

    @property
    def address(self) -> str:
        """`host:port`, once started. If it listens on all of this host's, one that others reach."""
        return self._address

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address is taken or not loopback."""
        check_bind(self._config.bind, self._config.insecure or self._network.authenticated)
        self._started = self._now()
        self._listener = await self._network.serve(self._config.bind, self.handle)
        self._address = await reachable(self._listener.address)
        self._ticker = self.tasks.forever("tick", self._tick)
        log.info("master is up", address=self.address)

    async def close(self) -> None:
        """Stop answering. All state is lost: servers send it to the next master."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        if self._listener is not None:
            await self._listener.close()

    def handle(self, type: int, body: bytes, caller: Caller = _NOBODY) -> tuple[int, bytes]:
        """The reply to one request of `caller`.

        Raises PeerError, which the peer receives as an `Error`.
        """
        handler = self._handlers.get(type)
        if handler is None:
            raise BadMessage(f"message type {type} is not a request to a master")
        return wire.encode(handler(body, caller))

    @property
    def refused_connections(self) -> int:
        """Connections that were refused, as they proved nothing."""
        return self._listener.refused if self._listener is not None else 0

    @property
    def callers(self) -> int:
        """Connections on which callers ask now."""
        return self._listener.callers if self._listener is not None else 0

    def uptime_s(self, now: float) -> float:
        return max(0.0, now - self._started)

    def _handle(self, type: type[M], answer: Callable[[M, Caller], wire.Message]) -> None:
        number, name = wire.TYPES[type], type.__name__.lower()

        def handle(body: bytes, caller: Caller) -> wire.Message:
            self.requests[name] += 1
            request = wire.decode(type, number, body)
            try:
                self._guard.check(caller.tenant, request)
            except Forbidden as error:
                self.refusals[f"forbidden {name}"] += 1
                who = Who(caller.tenant, "", caller.address)
                self._guard.refused(self._now(), who, type.__name__, str(error))
                raise
            return answer(request, caller)

        self._handlers[number] = handle

    def _from_owner(
        self, answer: Callable[[S], wire.Message]
    ) -> Callable[[S, Caller], wire.Message]:
        """`answer` for the server that has the id only (design: server-identity)."""

        def checked(message: S, caller: Caller) -> wire.Message:
            server = message.server
            if not self.directory.belongs_to(server, message.token):
                holder = self.directory.addresses(server)
                self._log_refusal("not this server's token", server, caller.address, holder)
                raise Unauthenticated(
                    f"server id {server!r} belongs to the server at {', '.join(holder)}, which "
                    "registered it with another token"
                )
            return answer(message)

        return checked

    def _log_refusal(
        self,
        reason: str,
        server: str,
        caller: str,
        holder: Sequence[str],
        claimed: Sequence[str] = (),
    ) -> None:
        """Count a refusal, and log it once for each id and caller."""
        self.refusals[reason] += 1
        if len(self._refused) >= _REFUSED_MAX:
            self._refused.clear()
        if (server, caller) not in self._refused:
            self._refused.add((server, caller))
            log.warning(
                "a message in the name of a server was refused",
                why=reason,
                server=server,
                caller=caller,
                claimed=list(claimed),
                holder=list(holder),
            )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _tick(self) -> None:
        now = self._now()
        syncing = self.directory.tick(now)
        self._partial &= syncing or self.uptime_s(now) < self._config.timeout_s
        self._guard.flush(now)
        # A sweep runs in small steps between requests: a lost server may have had millions of
        # blocks.
        sweeping = self.directory.sweep()
        await asyncio.sleep(0.001 if sweeping else self._config.timeout_s / 6)

    # --- from servers ------------------------------------------------------------------

    def _register(self, m: wire.Register, caller: Caller) -> wire.Registered:
        for name in (m.server, m.host, *m.addresses, *m.tiers):
            if not name.isprintable():  # they are printed on terminals and in logs
                raise BadMessage(f"{name[:40]!r} is not printable")
        refusal = self.directory.register(
            m.server,
            m.epoch,
            m.host,
            m.addresses,
            m.tiers,
            m.capacity,
            self._now(),
            token=m.token,
            kept=m.kept,
            sequence=m.sequence,
            blocks_max=m.blocks_max,
            caller=caller.address,
        )
        if refusal is not None and refusal.full:
            self._log_refusal("too many servers", "", caller.address, (), m.addresses)
            raise Overloaded(refusal.problem)
        if refusal is not None:
            holder = refusal.holder
            self._log_refusal("server id is taken", m.server, caller.address, holder, m.addresses)
            return wire.Registered(
                False,
                self.address,
                problem=refusal.problem,
                heard_s=refusal.heard_s,
                lasting=refusal.lasting,
            )
        log.info("server registered", server=m.server, caller=caller.address)
        sequence = self.directory.sequence(m.server)
        return wire.Registered(True, self.address, self.hints.last, sequence)

    def _heartbeat(self, m: wire.Heartbeat) -> wire.HeartbeatReply:
        if not self.directory.heartbeat(m.server, m.epoch, m.stats, self._now(), m.sequence):
            return wire.HeartbeatReply(False)
        hints, last = self.hints.heard(m)
        differs = bool(m.fingerprint) and self.directory.differs(
            m.server, m.epoch, m.sequence, m.blocks, m.fingerprint
        )
        listed = self.directory.listed(m.server)
        if differs:
            self.differences += 1
            log.warning(
                "the map differs from a server's blocks",
                server=m.server,
                listed=listed,
                held=m.blocks,
            )
        sequence = self.directory.sequence(m.server)
        room = self.directory.others_have_room(m.server)
        return wire.HeartbeatReply(True, hints, last, sequence, listed, differs, room)

    def _leave(self, m: wire.Leave) -> wire.HeartbeatReply:
        return wire.HeartbeatReply(self.directory.leave(m.server, m.epoch))

    def _announce(self, m: wire.Announce) -> wire.Announced:
        changes = _all_checked(m.changes)
        check = self.directory.check_sequence(m.server, m.epoch, m.sequence)
        unlisted = self._apply(m.server, changes) if check is SequenceCheck.NEXT else 0
        return self._announced(m.server, check, unlisted)

    def _inventory(self, m: wire.Inventory) -> wire.Announced:
        changes = _all_checked(m.changes)
        check = self.directory.check_piece(m.server, m.epoch, m.sequence, m.piece, last=m.last)
        unlisted = 0
        if check is SequenceCheck.NEXT:
            unlisted = self._apply(m.server, changes)
            if m.last:
                gone = self.directory.end_inventory(m.server)
                log.info("inventory is complete", server=m.server, pieces=m.piece + 1, gone=gone)
        return self._announced(m.server, check, unlisted)

    def _apply(self, server: str, changes: Sequence[_Checked]) -> int:
        """Apply changes in order; returns for how many blocks the map has no room."""
        unlisted = 0
        for change, namespace, digests, status in changes:
            if status is ReadStatus.HIT:
                listed = self.directory.within_limits(server, namespace, change.part, digests)
                self.directory.stored(server, namespace, change.part, change.tier, listed)
                unlisted += len(digests) - len(listed)
            else:
                self.directory.removed(server, namespace, change.part, digests, status)
        return unlisted

    def _announced(self, server: str, check: SequenceCheck, unlisted: int) -> wire.Announced:
        problem = self.directory.limit_reached(server) if unlisted else ""
        return wire.Announced(check is not SequenceCheck.GAP, unlisted, problem)

    # --- from clients ------------------------------------------------------------------

    def _find(self, m: wire.Find) -> wire.FindReply:
        if m.prefix:
            return self._match(m)
        if m.session:
            self.hints.asked(m.session)
        namespace, digests = wire.unpack_question(m)
        runs, reasons = self.directory.find(namespace, digests)
        if not m.observes:
            self._demand.asked(namespace, digests, self._now())
        return _found(runs, reasons, partial=self._partial)

    def _match(self, m: wire.Find | wire.FindChain) -> wire.FindReply:
        namespace, chain = wire.unpack_chain(m)
        behind = wire.unpacked_marks(m.behind) if isinstance(m, wire.FindChain) else ()
        if m.session:
            self.hints.asked(m.session)
        match = self.directory.match_chain(namespace, chain)
        missed = {} if match.stopped in (None, ReadStatus.HIT) else {match.length: match.stopped}
        if not m.observes:
            self._demand.asked_chain(namespace, chain, self._now(), behind)
            self._count_match(namespace, chain, match)
        return _found(match.runs, missed, spans.SPAN_BLOCKS, self._partial)

    def _count_match(self, namespace: Namespace, chain: MarkedChain, match: ChainMatch) -> None:
        self._demand.matched(match.runs)
        self.found_blocks += match.length
        if match.stopped is None:  # the client comes again with the keys of what follows
            self.asked_blocks += match.length
            self.unknown_spans += 1
            return
        self.asked_blocks += len(chain)
        self.matches[match.stopped] += 1
        if self.matches[match.stopped] % _HOLES_EVERY == 0:
            first, count = match.length + 1, len(chain)
            step = max(1, -(-(count - first) // _HOLES_MAX))
            behind = chain.digests(first, count, step)
            listed = self.directory.listed_of(namespace, behind) * step
            self._demand.looked_beyond(match.length, listed)

    def _place(self, m: wire.Place) -> wire.PlaceReply:
        namespace, digests = wire.unpack_question(m)
        size = m.size * m.parts * m.copies // max(1, len(digests))
        self._demand.asked(namespace, digests, self._now(), size)
        placement = self.directory.place(
            namespace, digests, m.parent, m.size, m.host, m.copies, m.session
        )
        return wire.PlaceReply(
            list(placement.servers[:_PLACES_MAX]),
            bytes([min(copies, 255) for copies in placement.copies]),
        )

    def _members(self, m: wire.Members, caller: Caller) -> wire.MembersReply:
        """All servers. A tenant sees where they are, and not what others do there: their figures
        count the traffic of all, and name clients."""
        now, hidden = self._now(), bool(caller.tenant)
        members = sorted(self.directory.members(now), key=lambda member: member.server)
        page: list[wire.MemberInfo] = []
        size, more = 0, False
        for member in members:
            if member.server <= m.after:
                continue
            info = wire.MemberInfo(
                **{
                    **member._asdict(),
                    "addresses": list(member.addresses),
                    "tiers": list(member.tiers),
                    "stats": _seen_by_tenant(member.stats) if hidden else member.stats,
                }
            )
            size += wire.encoded_size(info)
            if page and size > PAGE_SIZE:
                more = True
                break
            page.append(info)
        blocks = 0 if hidden else len(self.directory)
        return wire.MembersReply(self.address, self.uptime_s(now), blocks, page, more)

    def _namespaces(self, m: wire.Namespaces, caller: Caller) -> wire.NamespacesReply:
        marker = marker_of(caller.tenant)
        # Names are in order, so those of a tenant follow each other.
        after = max((m.after, m.parts), (marker, 0))
        found = self.directory.namespaces(after, wire.NAMESPACES_MAX + 1)
        found = [one for one in found if one[0].name.startswith(marker)]
        page = found[: wire.NAMESPACES_MAX]
        return wire.NamespacesReply(
            [(namespace.name, namespace.parts, blocks) for namespace, blocks in page],
            len(found) > len(page),
        )

    def demand(self, now: float) -> Demand:
        """What clients ask this master for, as means over its last minutes."""
        demand = self._demand.demand(now)
        return demand._replace(asked_blocks=self.asked_blocks, found_blocks=self.found_blocks)

    def _demands(self, m: wire.Demands, caller: Caller) -> wire.DemandsReply:
        demand = self.demand(self._now())
        if caller.tenant:  # the other figures are means over everybody
            marker = marker_of(caller.tenant)
            own = [one for one in demand.working_sets if one.namespace.name.startswith(marker)]
            demand = Demand(demand.seconds, tuple(own), 0.0, 0.0)
        sets = [
            (one.namespace.name, one.namespace.parts, one.size, one.blocks)
            for one in demand.working_sets
        ]
        return wire.DemandsReply(
            demand.seconds,
            sets,
            min(4096.0, demand.chain_servers),
            demand.beyond_hole,
            demand.asked_blocks,
            demand.found_blocks,
            [one.prompt for one in demand.working_sets],
        )

    def _changes(self, m: wire.Changes) -> wire.ChangesReply:
        log = self.directory.changes
        found = log.since(m.after, _CHANGES_BLOCKS) if m.stream == self._stream else None
        if found is None:
            return wire.ChangesReply(self._stream, log.last, [], False, True)
        changes, last = found
        return wire.ChangesReply(
            self._stream, last, [_map_change(one) for one in changes], last < log.last, False
        )

    def _snapshot(self, m: wire.Snapshot) -> wire.SnapshotReply:
        """All servers come first, in pages, and then their blocks."""
        changes: list[LoggedChange] = []
        at: MapCursor | None = MapCursor(m.namespace, m.parts, m.piece)
        more = False
        if not (m.parts or m.piece):
            changes, more = self.directory.servers(m.namespace)
            at = MapCursor(changes[-1].server) if more else MapCursor()
        if at is not None and not more:
            left = PAGE_SIZE - sum([one.size for one in changes])
            part, at = self.directory.snapshot(at, _SNAPSHOT_BLOCKS, left, self._stream)
            changes += part
        return wire.SnapshotReply(
            self._stream,
            self.directory.changes.last,
            [_map_change(one) for one in changes],
            *(at or MapCursor()),
            at is not None,
        )

    def _explain(self, m: wire.Explain) -> wire.Explained:
        namespace, digests = wire.unpack_question(m)
        answers: list[tuple[int, str, list[tuple[str, str, int]]]] = []
        size, began_s = 0, self.uptime_s(self._now())
        for one in self.directory.explain(namespace, digests[:BATCH_BLOCKS_MAX]):
            if self._partial and one.status is ReadStatus.NEVER_WRITTEN:
                why = f"which began {began_s:.0f} s ago, and has not heard from all servers yet"
                one = one._replace(text=f"as far as this master knows, {why}: ask again")
            size += 64 + size_of(one.text) + _size_of(one.replicas)
            if answers and size > PAGE_SIZE:
                break
            answers.append((one.status, one.text, _replicas(one.replicas)))
        return wire.Explained(answers, len(answers) < len(digests))


def _from_anyone(answer: Callable[[M], wire.Message]) -> Callable[[M, Caller], wire.Message]:
    return lambda message, caller: answer(message)


def _seen_by_tenant(stats: ServerStats) -> ServerStats:
    """Of a server's figures, what a tenant's client needs to choose one."""
    return ServerStats(draining=stats.draining)


#: A change, its namespace, its digests and its status.
_Checked: TypeAlias = tuple[wire.BlockChanges, Namespace, tuple[bytes, ...], ReadStatus]


def _all_checked(changes: Sequence[wire.BlockChanges]) -> list[_Checked]:
    """The changes of one message with all their fields checked, before one of them is applied.

    Otherwise a bad message could leave half of itself in the directory. And not more blocks than
    one message may have, so that applying it never stalls the loop.
    """
    blocks = sum(len(change.digests) // change.digest_size for change in changes)
    if blocks > wire.ANNOUNCED_BLOCKS_MAX:
        raise BadMessage(f"{blocks} blocks in one message, limit {wire.ANNOUNCED_BLOCKS_MAX}")
    return [_checked(change) for change in changes]


def _checked(change: wire.BlockChanges) -> _Checked:
    namespace, digests = wire.unpack_keys(change)
    if change.part >= namespace.parts:
        raise BadMessage(f"part {change.part} of a namespace with {namespace.parts} parts")
    try:
        return change, namespace, digests, ReadStatus(change.status)
    except ValueError as error:
        raise BadMessage(str(error)) from None


def _map_change(change: LoggedChange) -> wire.MapChange:
    namespace = change.namespace
    return wire.MapChange(
        change.kind,
        change.server,
        namespace.name if namespace is not None else "",
        namespace.parts if namespace is not None else 0,
        change.part,
        change.tier,
        change.digest_size,
        change.digests,
        change.host,
    )


def _found(
    runs: Sequence[Run], reasons: Mapping[int, ReadStatus], step: int = 1, partial: bool = False
) -> wire.FindReply:
    """An answer about as many of the blocks as fit into a message; of a chain a multiple of `step`,
    if that is possible."""
    size, more = 0, False
    for run in runs if len(runs) > 1 else ():
        size += 32 + _size_of(run.replicas)
        if size > PAGE_SIZE and run is not runs[0]:
            end = run.first - run.first % step or run.first
            runs = [one._replace(last=min(one.last, end - 1)) for one in runs if one.first < end]
            reasons = {at: reason for at, reason in reasons.items() if at < end}
            more = True
            break
    return wire.FindReply(
        [(run.first, run.last, _replicas(run.replicas)) for run in runs],
        bytes(reasons.values()),
        more,
        partial and bool(reasons),
    )


def _replicas(replicas: tuple[Replica, ...]) -> list[tuple[str, str, int]]:
    if len(replicas) > _REPLICAS_MAX:  # so many of each part
        most = max(1, _REPLICAS_MAX // len({one.part for one in replicas}))
        named: Counter[int] = Counter()
        kept = []
        for one in replicas:
            named[one.part] += 1
            if named[one.part] <= most:
                kept.append(one)
        replicas = tuple(kept)
    return [(replica.server, replica.tier, replica.part) for replica in replicas]


def _size_of(replicas: Sequence[Replica]) -> int:
    return sum([16 + size_of(one.server, one.tier) for one in replicas[:_REPLICAS_MAX]])
