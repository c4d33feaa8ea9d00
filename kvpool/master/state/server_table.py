"""The servers of one pool as a master knows them: who has which id, and who is alive.

Only a server says which blocks it has; the clock only decides which servers count as reachable,
never which bytes are right. Pure. (design: announcements, server-identity)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kvpool.master.state.changes import ChangeKind, LoggedChange, NoFollowers
from kvpool.master.state.locations import BlockLocations, ServerInventory
from kvpool.master.state.placement import Placer
from kvpool.master.state.server_record import (
    Inventories,
    Refusal,
    Registration,
    SequenceCheck,
    ServerRecord,
)
from kvpool.types import FULL_SHARE, ROOM_SHARE, Member, Replica, ServerStats

#: Records, also of lost servers. At the limit the server that has been lost for the longest time is
#: forgotten; if none is lost, a new one is refused.
SERVERS_MAX: Final = 4096
#: A lost server is forgotten after this. A restart is over by then; one that is later begins anew.
FORGET_S: Final = 600.0
#: Of one address: more than run on a host, also where two hosts are behind one address, and so few
#: that made-up servers are a 32nd of the table at most.
SERVERS_PER_HOST_MAX: Final = 128


class ServerTable:
    """The records of the servers, alive or lost, and what follows from a change of one.

    A server is lost after `timeout_s` without a heartbeat, and forgotten after `forget_s`.
    `ServerRecord` has the table of its states.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 3.0,
        forget_s: float = FORGET_S,
        servers_max: int = SERVERS_MAX,
        per_host_max: int = SERVERS_PER_HOST_MAX,
    ) -> None:
        self.timeout_s = timeout_s
        self.forget_s = max(forget_s, timeout_s)  # lost first
        self._servers_max = servers_max
        self._per_host_max = per_host_max
        #: What has changed, of servers and of blocks, for those who follow the map.
        self.changes = NoFollowers()
        #: By id; those are changed here alone.
        self.records: dict[str, ServerRecord] = {}
        self.placer = Placer()  # knows the living ones that will stay
        #: Grows when an inventory or a server becomes readable, or stops being so.
        self.version = 0
        #: Inventories that were retired with blocks, which are to be swept.
        self.retired = 0
        self._last_tick: float | None = None
        self._least_fill = 1.0  # of the servers that live and stay, at the last tick

    def register(
        self, server: str, registration: Registration, now: float, *, sequence: int = 0
    ) -> Refusal | None:
        """Add a server; the reason when another one has its id. (design: server-identity)

        The same epoch is the same process: it keeps its record and its blocks. A new epoch is a
        restarted server: it has no blocks until its inventory arrives, whose number follows
        `sequence`, the last one that this process has sent.
        """
        record = self.records.get(server)
        refusal = (
            self._make_room(registration.caller)
            if record is None
            else self._refusal(record, registration, now)
        )
        if refusal is not None:
            return refusal
        same = record is not None and record.registration.shows(registration.token)
        if record is not None and same and record.registration.epoch == registration.epoch:
            record.last_seen = now
            record.registration = replace(record.registration, addresses=registration.addresses)
            # Never back: a second copy of an old registration may arrive late.
            record.inventories.sequence = max(record.inventories.sequence, sequence)
            self._set_alive(record, True)
            return None
        added = ServerRecord(server, registration, now, Inventories(server, sequence))
        if record is not None:
            self.placer.remove(record)
            self._retire_all(record)
            former = (*record.former_epochs, record.registration.epoch)
            # Not its own, which comes back after a process that had the id in the meantime.
            added.former_epochs.extend(one for one in former if one != registration.epoch)
        self.records[server] = added
        self.changes.add(LoggedChange(ChangeKind.BACK, server, host=registration.host))
        self.placer.add(added)
        self.version += 1
        return None

    def known(self, server: str, epoch: int) -> ServerRecord | None:
        """The record of this process of a server."""
        record = self.records.get(server)
        return record if record is not None and record.registration.epoch == epoch else None

    def heartbeat(
        self, server: str, epoch: int, stats: ServerStats, now: float, sequence: int = 0
    ) -> bool:
        """Record that a server is alive; False asks it to register (again).

        False also when it has sent announcements up to `sequence` that are not applied here. Then
        this master was restarted: the earlier one received them, and only a delayed registration
        reached this one.
        """
        record = self.known(server, epoch)
        if record is None:
            return False
        record.beat(stats, now)
        self._set_draining(record, stats.draining)
        self._set_alive(record, True)
        return sequence <= record.inventories.sequence

    def leave(self, server: str, epoch: int) -> bool:
        """A server shuts down; False when this process of it is not known."""
        record = self.known(server, epoch)
        if record is None:
            return False
        self._set_alive(record, False, left=True)
        return True

    def tick(self, now: float) -> bool:
        """Mark servers as lost that sent no heartbeat; whether a living one sends its inventory.

        Call it several times per `timeout_s`. If a tick is late, this master did not run, so it
        could not receive heartbeats either. The missing time does not count against any server.
        """
        if self._last_tick is not None:
            stalled_s = now - self._last_tick - self.timeout_s / 2
            if stalled_s > 0:
                for record in self.records.values():
                    record.last_seen = min(now, record.last_seen + stalled_s)
        self._last_tick = now
        for record in list(self.records.values()):
            silent_s = now - record.last_seen
            if silent_s >= self.forget_s:
                self._forget(record)
            elif silent_s >= self.timeout_s:
                self._set_alive(record, False)
        living = [one for one in self.records.values() if one.alive]
        self._least_fill = min((one.fill for one in living if not one.draining), default=1.0)
        return any(one.inventories.syncing for one in living)

    def members(self, now: float) -> list[Member]:
        """Every server that has a record, the lost ones included."""
        return [
            Member(
                server=one.server,
                epoch=one.registration.epoch,
                host=one.registration.host,
                addresses=one.registration.addresses,
                tiers=one.registration.tiers,
                alive=one.alive,
                heard_s=max(0.0, now - one.last_seen),
                capacity=one.registration.capacity,
                stats=one.stats,
                left=one.left,
            )
            for one in self.records.values()
        ]

    def others_have_room(self, server: str) -> bool:
        """Whether this server is full, and another one that stays is not (design: movers)."""
        return self.records[server].fill >= FULL_SHARE and self._least_fill < ROOM_SHARE

    def check_sequence(self, server: str, epoch: int, sequence: int) -> SequenceCheck:
        """As `Inventories.check`. NEXT: apply it now. From a process that is not known it is a GAP:
        that has to send its inventory."""
        record = self.known(server, epoch)
        return SequenceCheck.GAP if record is None else record.inventories.check(sequence)

    def check_piece(
        self, server: str, epoch: int, sequence: int, piece: int, *, last: bool = False
    ) -> SequenceCheck:
        """The same for a piece of an inventory; what was known before is valid until its end."""
        record = self.known(server, epoch)
        if record is None:
            return SequenceCheck.GAP
        check = record.inventories.check_piece(sequence, piece, last=last)
        if check is SequenceCheck.NEXT and piece == 0:
            for inventory in record.inventories.surplus():
                self._retire(inventory)
        return check

    def end_inventory(self, server: str) -> int:
        """The last piece is applied: from now on the server has these blocks and no others.

        Returns how many blocks it had before and has no more. If there are none, as after a gap in
        which nothing was lost, nothing has to be swept.
        """
        replaced = self.records[server].inventories.end()
        for inventory in replaced:
            self._retire(inventory)
        return sum(inventory.blocks for inventory in replaced)

    def resolve(self, held: BlockLocations) -> None:
        """Bring the status of `held` up to date: once per change of servers, not per block."""
        if held.version == self.version:
            return
        replicas = []
        lost = set()
        for inventory, tier, part in held.locations:
            record = self.records.get(inventory.server)
            if not inventory.retired and record is not None and record.alive:
                replicas.append(Replica(inventory.server, record.tier_name(tier), part))
            elif inventory.lost or not inventory.retired:
                lost.add(part)
        held.resolve(tuple(replicas), lost, self.version)

    def _set_alive(self, record: ServerRecord, alive: bool, *, left: bool = False) -> None:
        if record.alive is not alive or left > record.left:
            record.alive, record.left = alive, left
            self.version += 1
            kind = ChangeKind.BACK if alive else gone(record)
            host = record.registration.host if alive else ""
            self.changes.add(LoggedChange(kind, record.server, host=host))
            if alive and not record.draining:
                self.placer.add(record)
            else:
                self.placer.remove(record)

    def _set_draining(self, record: ServerRecord, draining: bool) -> None:
        """A server that will leave is read, and not chosen for writes (design: movers)."""
        if record.draining is not draining:
            record.draining = draining
            if draining:
                self.placer.remove(record)
            elif record.alive:
                self.placer.add(record)

    def _refusal(
        self, record: ServerRecord, registration: Registration, now: float
    ) -> Refusal | None:
        """Why a process that registers so may not have the id of this record."""
        holder = record.registration
        silent_s = now - record.last_seen
        lives = record.alive and silent_s < self.timeout_s
        where = ", ".join(holder.addresses) or holder.host
        if holder.shows(registration.token):
            if registration.epoch not in record.former_epochs or not lives:
                return None
            problem = f"a later process with this server's identity has registered, at {where}"
        elif lives:
            wait_s = (self.forget_s if holder.kept else self.timeout_s) - silent_s
            problem = (
                f"another server has it, at {where}, and its last message came {silent_s:.1f} s "
                f"ago; without a further one the id is free in {wait_s:.1f} s"
            )
            return Refusal(problem, holder.addresses, silent_s)
        elif holder.kept and silent_s < self.forget_s:
            problem = (
                f"it is reserved for the server that was at {where}, which keeps its identity in "
                f"a file; without a message of that server the id is free in "
                f"{self.forget_s - silent_s:.0f} s"
            )
        else:
            return None
        return Refusal(problem, holder.addresses, silent_s, lasting=True)

    def _make_room(self, caller: str) -> Refusal | None:
        """Forget a lost server if there are too many; the reason when none is lost."""
        own = [one for one in self.records.values() if one.registration.caller == caller != ""]
        for servers, most, where in (
            (own, self._per_host_max, f" from {caller}"),
            (list(self.records.values()), self._servers_max, ""),
        ):
            if len(servers) >= most and not self._forget_lost(servers):
                problem = f"{len(servers)} servers are registered{where}, the limit"
                return Refusal(problem, (), 0.0, full=True)
        return None

    def forget_lost_blocks(self) -> None:
        """Forget the server that has been lost for the longest time, of those that had blocks."""
        self._forget_lost([one for one in self.records.values() if one.inventories.latest.blocks])

    def _forget_lost(self, servers: Iterable[ServerRecord]) -> bool:
        """Forget the one of these that has been lost for the longest time, if there is one."""
        lost = [one for one in servers if not one.alive]
        if lost:
            self._forget(min(lost, key=lambda record: record.last_seen))
        return bool(lost)

    def _forget(self, record: ServerRecord) -> None:
        del self.records[record.server]
        self.placer.remove(record)
        self._retire_all(record)

    def blocks_of(self, caller: str) -> int:
        """Blocks that the servers at one address have in this map."""
        own = [one for one in self.records.values() if one.registration.caller == caller]
        return sum(one.inventories.latest.blocks for one in own)

    def _retire(self, inventory: ServerInventory) -> None:
        """Its blocks are not readable any more, and are to be swept if there are any."""
        inventory.retired = True
        self.version += 1
        self.retired += inventory.blocks > 0

    def _retire_all(self, record: ServerRecord) -> None:
        """The process that had these blocks is lost, or a later one has taken its place."""
        self.changes.add(LoggedChange(ChangeKind.CLEARED, record.server))
        for inventory in record.inventories:
            inventory.lost = True
            self._retire(inventory)


def gone(record: ServerRecord) -> ChangeKind:
    """What is told of a server that is not alive."""
    return ChangeKind.LEFT if record.left else ChangeKind.LOST
