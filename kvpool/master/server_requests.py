"""What servers ask a master: to be known, and that it lists their blocks.

Each is answered at once, without an `await`, so no request sees a half-applied change. (design:
announcements, server-identity)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

from kvpool import logs
from kvpool.errors import BadMessage, Overloaded, Unauthenticated
from kvpool.master.extension import NoHints
from kvpool.master.state.directory import Directory
from kvpool.master.state.server_record import Registration, SequenceCheck
from kvpool.protocols import Caller
from kvpool.shares import Shares
from kvpool.types import Namespace, ReadStatus
from kvpool.wire import messages as wire

log = logs.get("kvpool.master")

#: So many refusals are logged in so long, of one caller half of them: it may make up ids.
_LINES_MAX: Final = 256
_LINES_S: Final = 600.0

S = TypeVar("S", bound=wire.ServerMessage)


class ServerRequests:
    def __init__(
        self, directory: Directory, hints: NoHints, refusals: Counter[str], now: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._servers = directory.servers
        self._hints = hints
        self._refusals = refusals
        self._now = now
        #: Of this master, as servers reach it.
        self.address = ""
        #: Heartbeats after which this master's map was not what the server held.
        self.differences = 0
        #: Pairs of id and caller whose refusal was logged, and until when that holds.
        self._refused: set[tuple[str, str]] = set()
        self._lines, self._lines_until = Shares(_LINES_MAX), 0.0

    def from_owner(
        self, answer: Callable[[S], wire.Message]
    ) -> Callable[[S, Caller], wire.Message]:
        """`answer` for the server that has the id only (design: server-identity)."""

        def checked(message: S, caller: Caller) -> wire.Message:
            server = message.server
            record = self._servers.records.get(server)
            if record is not None and not record.registration.shows(message.token):
                holder = record.registration.addresses
                self._log_refusal("not this server's token", server, caller.address, holder)
                raise Unauthenticated(
                    f"server id {server!r} belongs to the server at {', '.join(holder)}, which "
                    "registered it with another token"
                )
            return answer(message)

        return checked

    def _log_refusal(
        self, reason: str, server: str, caller: str, holder: Sequence[str], *claimed: str
    ) -> None:
        """Count a refusal, and log it once for each id and caller."""
        self._refusals[reason] += 1
        if (now := self._now()) >= self._lines_until:
            self._refused, self._lines = set(), Shares(_LINES_MAX)
            self._lines_until = now + _LINES_S
        if (server, caller) not in self._refused and self._lines.take(caller):
            self._refused.add((server, caller))
            log.warning(
                "a message in the name of a server was refused",
                why=reason,
                server=server,
                caller=caller,
                claimed=claimed,
                holder=list(holder),
            )

    def register(self, m: wire.Register, caller: Caller) -> wire.Registered:
        for name in (m.server, m.host, *m.addresses, *m.tiers):
            if not name.isprintable():  # they are printed on terminals and in logs
                raise BadMessage(f"{name[:40]!r} is not printable")
        registration = Registration(
            epoch=m.epoch,
            host=m.host,
            addresses=tuple(m.addresses),
            tiers=tuple(m.tiers),
            capacity=m.capacity,
            token=m.token,
            kept=m.kept,
            blocks_max=m.blocks_max,
            caller=caller.address,
        )
        refusal = self._servers.register(m.server, registration, self._now(), sequence=m.sequence)
        if refusal is not None and refusal.full:
            self._log_refusal("too many servers", "", caller.address, (), *m.addresses)
            raise Overloaded(refusal.problem)
        if refusal is not None:
            holder = refusal.holder
            self._log_refusal("server id is taken", m.server, caller.address, holder, *m.addresses)
            return wire.Registered(
                False,
                self.address,
                problem=refusal.problem,
                heard_s=refusal.heard_s,
                lasting=refusal.lasting,
            )
        log.info("server registered", server=m.server, caller=caller.address)
        sequence = self._servers.records[m.server].inventories.sequence
        return wire.Registered(True, self.address, self._hints.last, sequence)

    def heartbeat(self, m: wire.Heartbeat) -> wire.HeartbeatReply:
        if not self._servers.heartbeat(m.server, m.epoch, m.stats, self._now(), m.sequence):
            return wire.HeartbeatReply(False)
        hints, last = self._hints.heard(m)
        own = self._servers.records[m.server].inventories
        differs = bool(m.fingerprint) and own.differs(m.sequence, m.blocks, m.fingerprint)
        listed = own.latest.blocks
        if differs:
            self.differences += 1
            log.warning(
                "the map differs from a server's blocks",
                server=m.server,
                listed=listed,
                held=m.blocks,
            )
        room = self._servers.others_have_room(m.server)
        return wire.HeartbeatReply(True, hints, last, own.sequence, listed, differs, room)

    def leave(self, m: wire.Leave) -> wire.HeartbeatReply:
        return wire.HeartbeatReply(self._servers.leave(m.server, m.epoch))

    def announce(self, m: wire.Announce | wire.Inventory) -> wire.Announced:
        """Changes after the last message, or a piece of all that the server has."""
        changes = _all_checked(m.changes)
        process = (m.server, m.epoch, m.sequence)
        if isinstance(m, wire.Inventory):
            check = self._servers.check_piece(*process, m.piece, last=m.last)
        else:
            check = self._servers.check_sequence(*process)
        is_next = check is SequenceCheck.NEXT
        unlisted, alone = self._apply(m.server, changes) if is_next else (0, False)
        if is_next and isinstance(m, wire.Inventory) and m.last:
            gone = self._servers.end_inventory(m.server)
            log.info("inventory is complete", server=m.server, pieces=m.piece + 1, gone=gone)
        problem = self._directory.limit_reached(m.server) if unlisted else ""
        return wire.Announced(check is not SequenceCheck.GAP, unlisted, problem, alone)

    def _apply(self, server: str, changes: Sequence[_Checked]) -> tuple[int, bool]:
        """Apply changes in order; returns for how many blocks the map has no room, and whether no
        other server has one of those that came."""
        unlisted, alone = 0, True
        for change, namespace, digests, status in changes:
            if status is ReadStatus.HIT:
                listed = self._directory.within_limits(server, namespace, change.part, digests)
                alone &= self._directory.stored(server, namespace, change.part, change.tier, listed)
                unlisted += len(digests) - len(listed)
            else:
                self._directory.removed(server, namespace, change.part, digests, status)
        return unlisted, alone and not unlisted


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
    wire.check_part(namespace, change.part)
    try:
        return change, namespace, digests, ReadStatus(change.status)
    except ValueError as error:
        raise BadMessage(str(error)) from None
