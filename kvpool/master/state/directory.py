"""The master's directory: which server holds which block, and which servers are alive.

Pure, and soft state: all of it can be rebuilt from the servers' inventories, so losing it costs two
heartbeats and no data. Only a server says which blocks it has; the clock only decides which servers
count as reachable, never which bytes are right. (design: announcements, inventory, tombstones)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvpool.errors import InvariantViolated
from kvpool.master.state.locations import (
    BlockLocations,
    Location,
    LocationTable,
    ServerInventory,
)
from kvpool.master.state.placement import Placement, rank_servers
from kvpool.master.state.server_record import Refusal, SequenceCheck, ServerRecord
from kvpool.tombstones import Tombstones
from kvpool.types import (
    ROOT,
    BlockKey,
    Explanation,
    Match,
    Member,
    Namespace,
    ReadStatus,
    Replica,
    Run,
    ServerStats,
)


class Directory:
    """The directory of one master.

    A server is lost after `timeout_s` without a heartbeat, and forgotten after `forget_s`.
    `ServerRecord` has the table of its states.
    """

    def __init__(
        self, *, timeout_s: float = 3.0, forget_s: float = 600.0, tombstones_max: int = 65_536
    ) -> None:
        self.timeout_s = timeout_s
        self.forget_s = forget_s
        self.tombstones = Tombstones(tombstones_max)
        self._servers: dict[str, ServerRecord] = {}
        self._blocks: dict[Namespace, dict[bytes, BlockLocations]] = {}
        self._locations = LocationTable()
        self._version = 0  # grows when an inventory or a server becomes readable, or stops being so
        self._last_tick: float | None = None
        self._to_sweep: list[tuple[Namespace, bytes]] = []
        self._sweep_again = False

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def namespaces(self, after: tuple[str, int], count: int) -> list[tuple[Namespace, int]]:
        """At most `count` namespaces that have blocks, and how many, in order of name and parts."""
        later = (name for name in self._blocks if (name.name, name.parts) > after)
        first = heapq.nsmallest(count, later, key=lambda name: (name.name, name.parts))
        return [(name, len(self._blocks[name])) for name in first]

    # --- servers ---------------------------------------------------------------------

    def register(
        self,
        server: str,
        epoch: int,
        host: str,
        addresses: Sequence[str],
        tiers: Sequence[str],
        capacity: int,
        now: float,
        *,
        token: bytes = b"",
        kept: bool = False,
        sequence: int = 0,
    ) -> Refusal | None:
        """Add a server; the reason when another one has its id. (design: server-identity)

        The same epoch is the same process: it keeps its record and its blocks. A new epoch is a
        restarted server: it has no blocks until its inventory arrives, whose number follows
        `sequence`, the last one that this process has sent.
        """
        record = self._servers.get(server)
        if record is not None:
            refusal = self._refusal(record, epoch, token, now)
            if refusal is not None:
                return refusal
        if record is not None and record.shows(token) and record.epoch == epoch:
            record.last_seen = now
            record.addresses = tuple(addresses)
            # Never back: a second copy of an old registration may arrive late.
            record.sequence = max(record.sequence, sequence)
            self._set_alive(record, True)
            return None
        inventory = ServerInventory(server)
        inventory.current = True
        added = ServerRecord(
            server,
            epoch,
            host,
            tuple(addresses),
            tuple(tiers),
            capacity,
            now,
            inventory,
            token=token,
            kept=kept,
            sequence=sequence,
        )
        if record is not None:
            self._retire(record.inventory)
            added.former_epochs.extend((*record.former_epochs, record.epoch))
        self._servers[server] = added
        self._version += 1
        return None

    def belongs_to(self, server: str, token: bytes) -> bool:
        """False when this id is known, and the server that has it shows another token."""
        record = self._servers.get(server)
        return record is None or record.shows(token)

    def sequence(self, server: str) -> int:
        """The number of the last announcement or inventory that was applied; 0 if unknown."""
        record = self._servers.get(server)
        return record.sequence if record is not None else 0

    def addresses(self, server: str) -> tuple[str, ...]:
        """Where this server is reached; empty if unknown."""
        record = self._servers.get(server)
        return record.addresses if record is not None else ()

    def heartbeat(
        self,
        server: str,
        epoch: int,
        stats: ServerStats,
        now: float,
        sequence: int = 0,
    ) -> bool:
        """Record that a server is alive; False asks it to register (again).

        False also when it has sent announcements up to `sequence` that are not applied here. Then
        this master was restarted: the earlier one received them, and only a delayed registration
        reached this one.
        """
        record = self._servers.get(server)
        if record is None or record.epoch != epoch:
            return False
        record.last_seen = now
        record.stats = stats
        record.bytes_placed = 0
        self._set_alive(record, True)
        return sequence <= record.sequence

    def leave(self, server: str, epoch: int) -> None:
        """Mark a server that shuts down as lost."""
        record = self._servers.get(server)
        if record is not None and record.epoch == epoch:
            self._set_alive(record, False)

    def tick(self, now: float) -> None:
        """Mark servers as lost that sent no heartbeat. Call it several times per `timeout_s`.

        If a tick is late, this master did not run, so it could not receive heartbeats either. The
        missing time does not count against any server.
        """
        if self._last_tick is not None:
            stalled_s = now - self._last_tick - self.timeout_s / 2
            if stalled_s > 0:
                for record in self._servers.values():
                    record.last_seen = min(now, record.last_seen + stalled_s)
        self._last_tick = now
        for record in list(self._servers.values()):
            silent_s = now - record.last_seen
            if silent_s >= self.forget_s:
                del self._servers[record.server]
                self._retire(record.inventory)
            elif silent_s >= self.timeout_s:
                self._set_alive(record, False)

    def members(self, now: float) -> list[Member]:
        """Every server that has a record, the lost ones included."""
        return [
            Member(
                server=record.server,
                epoch=record.epoch,
                host=record.host,
                addresses=record.addresses,
                tiers=record.tiers,
                alive=record.alive,
                heard_s=max(0.0, now - record.last_seen),
                capacity=record.capacity,
                stats=record.stats,
            )
            for record in self._servers.values()
        ]

    # --- announcements ---------------------------------------------------------------

    def check_sequence(self, server: str, epoch: int, sequence: int) -> SequenceCheck:
        """Whether announcement `sequence` is the next one of this server. NEXT: apply it now.

        A server that is unknown, or has another epoch, is a GAP: it has to send its inventory.
        """
        record = self._servers.get(server)
        if record is None or record.epoch != epoch:
            return SequenceCheck.GAP
        return record.check_sequence(sequence)

    def check_piece(self, server: str, epoch: int, sequence: int, piece: int) -> SequenceCheck:
        """Whether this piece of inventory `sequence` is the next one. NEXT: apply it now.

        Piece 0 begins a new inventory; the previous one stays valid until the new one is complete.
        """
        record = self._servers.get(server)
        if record is None or record.epoch != epoch:
            return SequenceCheck.GAP
        unfinished = record.pending
        check = record.check_piece(sequence, piece)
        if unfinished is not None and record.pending is not unfinished:
            self._retire(unfinished)
        return check

    def end_inventory(self, server: str) -> None:
        """The last piece is applied: from now on the server has these blocks and no others."""
        record = self._servers[server]
        if record.pending is not None:
            self._retire(record.inventory)
            record.inventory, record.pending = record.pending, None
            record.inventory.current = True
            self._version += 1

    def stored(
        self, server: str, namespace: Namespace, part: int, tier: int, digests: Sequence[bytes]
    ) -> None:
        """The server has this part of these blocks."""
        if not digests:
            return
        record = self._servers[server]
        inventory = record.pending or record.inventory
        location = Location(inventory, tier, part)
        blocks = self._blocks.setdefault(namespace, {})
        only_here = self._locations.get(namespace.parts, (location,))
        added = 0
        # This loop runs for each of a server's blocks when a master starts: no calls for new ones.
        for digest in digests:
            held = blocks.get(digest)
            if held is None:
                blocks[digest] = only_here
                added += 1
                if self.tombstones:
                    self.tombstones.came_back(namespace, digest)
            else:
                if self.tombstones:
                    self.tombstones.came_back(namespace, digest)
                after = held.after_add.get(location) or self._locations.add(held, location)
                if after is not held:
                    blocks[digest] = after
                    added += not held.has_part(inventory, part)
        inventory.blocks += added

    def removed(
        self,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        reason: ReadStatus,
    ) -> None:
        """The server does not have this part of these blocks (any more).

        Inside an inventory it gives the `reason` for blocks that an earlier inventory had, or that
        this master never knew.
        """
        record = self._servers[server]
        inventory = record.pending or record.inventory
        blocks = self._blocks.get(namespace, {})
        for digest in digests:
            held = blocks.get(digest)
            after = self._locations.remove(held, inventory, part) if held is not None else None
            if held is not None and after is not None and after is not held:
                inventory.blocks -= 1
                self._put(blocks, namespace, digest, after, reason)
            elif reason is not ReadStatus.NEVER_WRITTEN and (
                held is None
                or all(
                    one.inventory.server == server or not self._in_use(one.inventory)
                    for one in held.locations
                )
            ):
                self.tombstones.left(namespace, digest, reason)

    # --- questions -------------------------------------------------------------------

    def match(self, namespace: Namespace, digests: Sequence[bytes]) -> Match:
        """The longest prefix of blocks that can be read. Changes nothing (G9). (design: pins)"""
        runs, reasons = self.find(namespace, digests, prefix=True)
        if reasons:
            first, status = next(iter(reasons.items()))
            return Match(tuple(runs), first, status)
        return Match(tuple(runs), len(digests), ReadStatus.HIT)

    def find(
        self, namespace: Namespace, digests: Sequence[bytes], *, prefix: bool = False
    ) -> tuple[list[Run], dict[int, ReadStatus]]:
        """Runs of blocks with equal locations, and the reason for each block that is a miss.

        With `prefix` it stops at the first miss.
        """
        runs: list[Run] = []
        reasons: dict[int, ReadStatus] = {}
        found = list(map(self._blocks.get(namespace, {}).get, digests))
        count = len(found)
        first = 0
        while first < count:
            held = found[first]
            if not first and found.count(held) == count:
                last = count  # usual: the whole chain in the same locations, and `count` is fast
            else:
                last = first + 1
                while last < count and found[last] is held:
                    last += 1
            if held is None:
                for position in range(first, last):
                    reasons[position] = self.tombstones.reason(namespace, digests[position])
                    if prefix:
                        break
            else:
                self._resolve(held)
                if held.status is ReadStatus.HIT:
                    runs.append(Run(first, last - 1, held.replicas))
                else:
                    for position in range(first, last):
                        reasons[position] = self._reason(namespace, digests[position], held)
            if prefix and reasons:
                break
            first = last
        return runs, reasons

    def place(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        parent: bytes,
        size: int,
        host: str,
        copies: int = 1,
    ) -> Placement:
        """Where to write `copies` copies of blocks with `size` bytes in all, best server first.

        Advice only: nothing is reserved. `rank_servers` explains the order.
        """
        held = self._blocks.get(namespace, {}).get(parent) if parent != ROOT else None
        ranked = rank_servers(
            (record for record in self._servers.values() if record.alive),
            key=digests[0] if digests else b"",
            parent_servers={one.inventory.server for one in held.locations} if held else (),
            size=size,
            host=host,
            copies=copies,
        )
        for record in ranked[:copies]:
            record.bytes_placed += size
        return Placement(
            tuple(record.server for record in ranked), self._complete_replicas(namespace, digests)
        )

    def explain(self, namespace: Namespace, digests: Sequence[bytes]) -> list[Explanation]:
        """For each block: where it is, or why it is a miss, as text."""
        _, reasons = self.find(namespace, digests)
        answers = []
        for position, digest in enumerate(digests):
            held = self._blocks.get(namespace, {}).get(digest)
            status = reasons.get(position, ReadStatus.HIT)
            replicas = held.replicas if held is not None else ()
            text = self._explanation(namespace, held, status)
            answers.append(Explanation(BlockKey(namespace, digest), status, replicas, text))
        return answers

    def check(self) -> None:
        """Check every invariant. Raises InvariantViolated; O(blocks)."""
        counts: dict[ServerInventory, int] = {}
        for namespace, blocks in self._blocks.items():
            if not blocks:
                raise InvariantViolated(f"empty namespace {namespace} was kept")
            for digest, held in blocks.items():
                name = digest.hex()[:12]
                if not held.locations:
                    raise InvariantViolated(f"{name} has no location, but is in the directory")
                if self._locations.get(namespace.parts, held.locations) is not held:
                    raise InvariantViolated(f"{name}: its locations are not shared")
                if len({(one.inventory, one.part) for one in held.locations}) != len(
                    held.locations
                ):
                    raise InvariantViolated(f"{name} is twice on one server")
                for one in held.locations:
                    if not 0 <= one.part < namespace.parts:
                        raise InvariantViolated(f"{name} has part {one.part}")
                    counts[one.inventory] = counts.get(one.inventory, 0) + 1
        for record in self._servers.values():
            for inventory in (record.inventory, record.pending):
                if inventory is not None and inventory.blocks != counts.get(inventory, 0):
                    raise InvariantViolated(
                        f"{record.server}: counted {inventory.blocks} blocks, "
                        f"has {counts.get(inventory, 0)}"
                    )
            if not record.inventory.current:
                raise InvariantViolated(f"{record.server} has no current inventory")

    def sweep(self, limit: int = 1024) -> int:
        """Remove retired locations from at most `limit` blocks; returns how many blocks are left.

        In small steps, so that a lost server with millions of blocks does not stall the loop.
        """
        if not self._to_sweep and self._sweep_again:
            self._sweep_again = False
            self._to_sweep = [
                (namespace, digest)
                for namespace, blocks in self._blocks.items()
                for digest in blocks
            ]
        for _ in range(min(limit, len(self._to_sweep))):
            namespace, digest = self._to_sweep.pop()
            blocks = self._blocks.get(namespace)
            held = blocks.get(digest) if blocks is not None else None
            if blocks is not None and held is not None:
                after = self._locations.keep(held, self._is_in_use)
                if after is not held:
                    reason = self._reason(namespace, digest, held)
                    self._put(blocks, namespace, digest, after, reason)
        if not self._to_sweep and not self._sweep_again:
            self._locations.drop(lambda location: not self._is_in_use(location))
        return len(self._to_sweep)

    # --- inside ----------------------------------------------------------------------

    def _set_alive(self, record: ServerRecord, alive: bool) -> None:
        if record.alive is not alive:
            record.alive = alive
            self._version += 1

    def _refusal(
        self, record: ServerRecord, epoch: int, token: bytes, now: float
    ) -> Refusal | None:
        """Why a process with this token and epoch may not have the id of this record."""
        silent_s = now - record.last_seen
        lives = record.alive and silent_s < self.timeout_s
        where = ", ".join(record.addresses) or record.host
        if record.shows(token):
            if epoch in record.former_epochs and lives:
                return Refusal(
                    f"a later process with this server's identity has registered, at {where}",
                    record.addresses,
                    silent_s,
                    lasting=True,
                )
            return None
        if lives:
            wait_s = (self.forget_s if record.kept else self.timeout_s) - silent_s
            return Refusal(
                f"another server has it, at {where}, and its last message came {silent_s:.1f} s "
                f"ago; without a further one the id is free in {wait_s:.1f} s",
                record.addresses,
                silent_s,
            )
        if record.kept and silent_s < self.forget_s:
            return Refusal(
                f"it is reserved for the server that was at {where}, which keeps its identity in "
                f"a file; without a message of that server the id is free in "
                f"{self.forget_s - silent_s:.0f} s",
                record.addresses,
                silent_s,
                lasting=True,
            )
        return None

    def _retire(self, inventory: ServerInventory) -> None:
        inventory.current = False
        self._version += 1
        self._sweep_again = True

    def _in_use(self, inventory: ServerInventory) -> bool:
        record = self._servers.get(inventory.server)
        return record is not None and inventory in (record.inventory, record.pending)

    def _is_in_use(self, location: Location) -> bool:
        return self._in_use(location.inventory)

    def _put(
        self,
        blocks: dict[bytes, BlockLocations],
        namespace: Namespace,
        digest: bytes,
        after: BlockLocations,
        reason: ReadStatus,
    ) -> None:
        if after.locations:
            blocks[digest] = after
            if not any(map(self._is_in_use, after.locations)):
                self.tombstones.left(namespace, digest, reason)  # the others will be swept
            return
        del blocks[digest]
        if not blocks:
            del self._blocks[namespace]
        self.tombstones.left(namespace, digest, reason)

    def _resolve(self, held: BlockLocations) -> None:
        """Bring the status of `held` up to date: once per change of servers, not per block."""
        if held.version == self._version:
            return
        replicas = []
        for inventory, tier, part in held.locations:
            record = self._servers.get(inventory.server)
            if inventory.current and record is not None and record.alive:
                name = record.tiers[tier] if tier < len(record.tiers) else "?"
                replicas.append(Replica(inventory.server, name, part))
        held.resolve(tuple(replicas), self._version)

    def _complete_replicas(self, namespace: Namespace, digests: Sequence[bytes]) -> list[int]:
        """For each block: the number of servers from which each of its parts can be read."""
        blocks = self._blocks.get(namespace, {})
        counts = []
        for digest in digests:
            held = blocks.get(digest)
            if held is not None:
                self._resolve(held)
            counts.append(held.complete_replicas if held is not None else 0)
        return counts

    def _reason(self, namespace: Namespace, digest: bytes, held: BlockLocations) -> ReadStatus:
        """Why a block that is in the directory cannot be read.

        Its server may be alive, with a new inventory that gave the reason: a tombstone has it.
        """
        self._resolve(held)
        if held.status is ReadStatus.SERVER_LOST:
            recorded = self.tombstones.reason(namespace, digest)
            return held.status if recorded is ReadStatus.NEVER_WRITTEN else recorded
        return held.status

    def _explanation(
        self, namespace: Namespace, held: BlockLocations | None, status: ReadStatus
    ) -> str:
        if status is ReadStatus.HIT and held is not None:
            where = ", ".join(f"{r.server} ({r.tier})" for r in held.replicas)
            return f"present on {where}"
        if status is ReadStatus.PART_MISSING and held is not None:
            present = sorted({one.part for one in held.locations})
            return f"parts {present} of {namespace.parts} are present, the others are missing"
        if status is ReadStatus.SERVER_LOST:
            if held is None:
                return "its server was lost or restarted empty"
            servers = ", ".join(sorted({one.inventory.server for one in held.locations}))
            return f"held by {servers}, which is lost or was restarted"
        if status is ReadStatus.NEVER_WRITTEN:
            if namespace not in self._blocks:
                return self._unknown_namespace(namespace)
            if self.tombstones.forgotten:
                return "no record: never written, or removed so long ago that the reason is lost"
            return "never written (since this master started)"
        return f"{status.label}: it was stored earlier"

    def _unknown_namespace(self, namespace: Namespace) -> str:
        if not self._blocks:
            return "the pool holds no blocks"
        others = ", ".join(sorted(repr(other.name) for other in self._blocks)[:3])
        return (
            f"namespace {namespace.name!r} with {namespace.parts} part(s) has no blocks; "
            f"namespaces with blocks: {others}"
        )
