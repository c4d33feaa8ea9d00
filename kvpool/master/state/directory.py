"""The master's directory: which server holds which block, and which servers are alive.

Pure, and soft state: all of it can be rebuilt from the servers' inventories, so losing it costs two
heartbeats and no data. Only a server says which blocks it has; the clock only decides which servers
count as reachable, never which bytes are right. (design: announcements)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple

import xxhash

from kvpool import spans
from kvpool.fingerprint import entry_hash, location_seed
from kvpool.master.state.block_map import MARK_BITS, BlockMap, NamespaceMap
from kvpool.master.state.change_ring import PAGE_SIZE, ChangeKind, ChangeRing, LoggedChange, size_of
from kvpool.master.state.locations import (
    BlockLocations,
    Location,
    LocationTable,
    ServerInventory,
    Step,
)
from kvpool.master.state.placement import Placement, Placer
from kvpool.master.state.server_record import Refusal, SequenceCheck, ServerRecord
from kvpool.piecewise_dict import compact
from kvpool.spans import MarkedChain
from kvpool.tenant_names import marker_of, tenant_of
from kvpool.tombstones import Tombstones
from kvpool.types import (
    FULL_SHARE,
    ROOM_SHARE,
    ROOT,
    TEXT_MAX,
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

#: Assumed size of the smallest block of a server that says nothing about it.
_BLOCK_SIZE: Final = 4096


#: Spans that are looked up at once.
_SPANS_STEP: Final = 128
#: Of the number in a `MapCursor`: below the number of a piece the place of a copy in it, which has
#: bits of the hash of the block, and below them of its server and part.
_RANK_BITS: Final = 16
_RANK_MASK: Final = (1 << _RANK_BITS) - 1
_HASH_MASK: Final = (1 << 12) - 1
_PLACE_BITS: Final = 12 + _RANK_BITS
_PLACE_MASK: Final = (1 << _PLACE_BITS) - 1


class ChainMatch(NamedTuple):
    """As `Match`. `stopped` is None where this map cannot tell without the keys of the next span:
    it does not know the span, or its blocks cannot be read, and a reason belongs to a block."""

    runs: list[Run]
    length: int
    stopped: ReadStatus | None


class MapCursor(NamedTuple):
    """How far a snapshot has come: a namespace, and its next piece and place in that."""

    name: str = ""
    parts: int = 0
    piece: int = 0


class Directory:
    """The directory of one master.

    A server is lost after `timeout_s` without a heartbeat, and forgotten after `forget_s`.
    `ServerRecord` has the table of its states.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 3.0,
        forget_s: float = 600.0,
        tombstones_max: int = 65_536,
        servers_max: int = 4096,
        servers_per_host_max: int = 64,
        blocks_max: int = 50_000_000,
    ) -> None:
        self.timeout_s = timeout_s
        self.forget_s = forget_s
        self.servers_max = servers_max
        self.servers_per_host_max = servers_per_host_max
        self.blocks_max = blocks_max
        self.tombstones = Tombstones(tombstones_max)
        #: What has changed, for those who follow the map.
        self.changes = ChangeRing()
        self._servers: dict[str, ServerRecord] = {}
        self._placer = Placer()  # knows the living ones that will stay
        self._blocks = NamespaceMap()
        self._count = 0  # blocks of all namespaces
        self._locations = LocationTable()
        self._version = 0  # grows when an inventory or a server becomes readable, or stops being so
        self._last_tick: float | None = None
        self._least_fill = 1.0  # of the servers that live and stay, at the last tick
        self._walk: Iterator[int] | None = None
        self._walk_again = False  # an inventory was retired after the walk of `sweep` began

    def __len__(self) -> int:
        return self._count

    def namespaces(self, after: tuple[str, int], count: int) -> list[tuple[Namespace, int]]:
        """At most `count` namespaces that have blocks, and how many, in order of name and parts."""
        return [(one, len(self._blocks[one])) for one in islice(self._blocks.after(*after), count)]

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
        blocks_max: int = 0,
        caller: str = "",
    ) -> Refusal | None:
        """Add a server; the reason when another one has its id. (design: server-identity)

        The same epoch is the same process: it keeps its record and its blocks. A new epoch is a
        restarted server: it has no blocks until its inventory arrives, whose number follows
        `sequence`, the last one that this process has sent. `blocks_max` is how many blocks its
        memory can hold; 0: as many of 4 KiB as `capacity` has room for.
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
        if record is None:
            refusal = self._make_room_for_server(caller)
            if refusal is not None:
                return refusal
        inventory = ServerInventory(server)
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
            blocks_max=blocks_max or max(1, capacity // _BLOCK_SIZE),
            caller=caller,
        )
        if record is not None:
            self._placer.remove(record)
            self._retire_all(record)
            former = (*record.former_epochs, record.epoch)
            # Not its own, which comes back after a process that had the id in the meantime.
            added.former_epochs.extend(one for one in former if one != epoch)
        self._servers[server] = added
        self.changes.add(LoggedChange(ChangeKind.BACK, server, host=host))
        self._placer.add(added)
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
        record.beat(stats, now)
        self._set_draining(record, stats.draining)
        self._set_alive(record, True)
        return sequence <= record.sequence

    def differs(
        self, server: str, epoch: int, sequence: int, blocks: int, fingerprint: bytes
    ) -> bool:
        """Whether this master lists other blocks than the server had after message `sequence`.

        False if it cannot know: this message is older, or newer, than the last one.
        (design: announcements)
        """
        record = self._servers.get(server)
        if record is None or record.epoch != epoch or record.sequence != sequence:
            return False
        listed = record.inventory.listed
        return record.syncing or listed.blocks != blocks or listed.packed() != fingerprint

    def listed(self, server: str) -> int:
        """The number of blocks that this master lists for a server; 0 if unknown."""
        record = self._servers.get(server)
        return record.inventory.blocks if record is not None else 0

    def others_have_room(self, server: str) -> bool:
        """Whether this server is full, and another one that stays is not (design: movers)."""
        record = self._servers.get(server)
        return record is not None and record.fill >= FULL_SHARE and self._least_fill < ROOM_SHARE

    def leave(self, server: str, epoch: int) -> bool:
        """A server shuts down; False when this process of it is not known."""
        record = self._servers.get(server)
        if record is None or record.epoch != epoch:
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
                for record in self._servers.values():
                    record.last_seen = min(now, record.last_seen + stalled_s)
        self._last_tick = now
        for record in list(self._servers.values()):
            silent_s = now - record.last_seen
            if silent_s >= self.forget_s:
                self._forget(record)
            elif silent_s >= self.timeout_s:
                self._set_alive(record, False)
        self._walk_again |= self._walk is None and self._locations.has_grown
        living = [one for one in self._servers.values() if one.alive]
        self._least_fill = min((one.fill for one in living if not one.draining), default=1.0)
        return any(one.syncing for one in living)

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
                left=record.left,
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

    def check_piece(
        self, server: str, epoch: int, sequence: int, piece: int, *, last: bool = False
    ) -> SequenceCheck:
        """Whether this piece of inventory `sequence` is a new one. NEXT: apply it now.

        Piece 0 begins a new inventory; what was known before stays valid until it is complete.
        """
        record = self._servers.get(server)
        if record is None or record.epoch != epoch:
            return SequenceCheck.GAP
        check = record.check_piece(sequence, piece, last=last)
        if check is SequenceCheck.NEXT and piece == 0:
            for inventory in record.surplus():
                self._retire(inventory)
        return check

    def end_inventory(self, server: str) -> int:
        """The last piece is applied: from now on the server has these blocks and no others.

        Returns how many blocks it had before and has no more. If there are none, as after a gap in
        which nothing was lost, nothing has to be swept.
        """
        replaced = self._servers[server].end_inventory()
        for inventory in replaced:
            self._retire(inventory)
        return sum(inventory.blocks for inventory in replaced)

    def within_limits(
        self, server: str, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> Sequence[bytes]:
        """The first of the `digests` for which there is room, and those that are listed already.

        Where there is none, servers that are lost make room: their blocks are swept step by step,
        so it is there a little later. (design: bounds)
        """
        record = self._servers[server]
        room = self._room(record, len(digests))
        if room >= len(digests):
            return digests
        if self._count >= self.blocks_max // 2:
            self._forget_lost(lambda one: one.inventory.blocks > 0)
        blocks = self._blocks.get(namespace)
        listed = []
        for digest in digests:
            held = self._held(blocks, digest)
            if held is not None and any(
                one.inventory.server == server and one.part == part for one in held.locations
            ):
                listed.append(digest)
            elif room > 0:
                room -= 1
                listed.append(digest)
        return listed

    def limit_reached(self, server: str) -> str:
        """Why blocks of this server are not listed: the limit, and its setting."""
        record = self._servers[server]
        if record.inventory.blocks >= record.blocks_max:
            return (
                f"{server!r} has {record.blocks_max} blocks in this map, as many as fit into the "
                "memory that it registered"
            )
        if self._count < self.blocks_max:
            return (
                f"the servers at {record.caller} have {self._blocks_of(record.caller)} blocks in "
                f"this map, and half of master.blocks_max ({self.blocks_max}) is the limit"
            )
        return f"this map has {self._count} blocks, the limit (master.blocks_max)"

    def stored(
        self, server: str, namespace: Namespace, part: int, tier: int, digests: Sequence[bytes]
    ) -> None:
        """The server has this part of these blocks. Raises TypeError unless all are bytes."""
        if not digests:
            return
        if set(map(type, digests)) != {bytes}:
            raise TypeError("a digest is not bytes")
        inventory = self._servers[server].inventory
        location = Location(inventory, tier, part)
        blocks = self._blocks.get(namespace)
        if blocks is None:
            blocks = self._blocks[namespace] = BlockMap()
        table, mask, by_id = blocks.table, blocks.mask, self._locations.by_id
        only_here = self._locations.get(namespace.parts, (location,)).tag
        seed, hashed = location_seed(namespace, part, tier), entry_hash
        new = moved = total = 0
        # This loop runs for each of a server's blocks when a master starts: no calls for new ones.
        for digest in digests:
            piece = table[hash(digest) & mask]
            tag = piece.get(digest)
            if tag is None:
                piece[digest] = only_here
                new += 1
                total += hashed(digest, seed)
            elif tag != only_here:
                held = by_id[tag >> MARK_BITS]
                step = held.after_add.get(location) or self._locations.add(held, location)
                if step.after is not held:
                    blocks.split(tag)
                    piece[digest] = step.after.tag
                    moved += 1
                    total += hashed(digest, seed)
                    if step.left is not None:
                        lost, old_tier, old_part = step.left
                        _uncount(digest, lost, location_seed(namespace, old_part, old_tier))
        inventory.listed.blocks += new + moved
        inventory.listed.total += total
        self._count += new
        blocks.changed(new)
        if new or moved:
            name = self._tier_name(server, tier)
            self.changes.add_blocks(ChangeKind.STORED, server, namespace, part, digests, name)
        self.tombstones.came_back_all(namespace, digests)

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
        gone: list[bytes] = []
        explained: list[bytes] = []
        blocks = self._blocks.get(namespace)
        if blocks is None:
            explained = list(digests)
        else:
            self._remove_from(blocks, server, namespace, part, digests, gone, explained)
        if reason is not ReadStatus.NEVER_WRITTEN:
            self.tombstones.left_all(namespace, explained, reason)
        self.changes.add_blocks(ChangeKind.REMOVED, server, namespace, part, gone)

    def _remove_from(
        self,
        blocks: BlockMap,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        gone: list[bytes],
        explained: list[bytes],
    ) -> None:
        """Add the blocks that this map had there to `gone`, and to `explained` those whose reason
        is to be kept."""
        table, mask, by_id = blocks.table, blocks.mask, self._locations.by_id
        removals: dict[int, _Removal] = {}  # once for each set of locations, not for each block
        left = 0
        # A full pool removes a block for each that it stores: as few calls as in `stored`.
        for digest in digests:
            piece = table[hash(digest) & mask]
            tag = piece.get(digest)
            if tag is None:
                explained.append(digest)
                continue
            removal = removals.get(tag >> MARK_BITS)
            if removal is None:
                step = self._locations.remove(by_id[tag >> MARK_BITS], server, part)
                removal = removals[tag >> MARK_BITS] = _Removal.of(step, server, namespace)
            if removal.inventory is not None:
                _uncount(digest, removal.inventory, removal.seed)
                blocks.split(tag)
                if removal.after is None:
                    del piece[digest]
                    left += 1
                else:
                    piece[digest] = removal.after
                gone.append(digest)
            if removal.explains:
                explained.append(digest)
        blocks.changed(-left)
        self._count -= left
        if not len(blocks):
            del self._blocks[namespace]

    # --- questions -------------------------------------------------------------------

    def match(self, namespace: Namespace, digests: Sequence[bytes]) -> Match:
        """The longest prefix of blocks that can be read. It is no use of them (G9). (design: pins)

        All digests have the same size. Without any, everything asked for is here.
        """
        chain = MarkedChain(len(digests[0]) if digests else 1, b"".join(digests))
        runs, length, stopped = self.match_chain(namespace, chain)
        assert stopped is not None  # all keys are here
        return Match(tuple(runs), length, stopped)

    def match_chain(self, namespace: Namespace, chain: MarkedChain) -> ChainMatch:
        """The same for a chain whose first keys may not be here."""
        blocks = self._blocks.get(namespace)
        marks, count = chain.marks, len(chain)
        runs: list[Run] = []
        number = 0  # of the span
        while (position := number * spans.SPAN_BLOCKS) < count:
            last = self._known_spans(blocks, marks, number, runs) if blocks is not None else number
            if last > number:
                number = last
                continue
            if number < chain.unsent:
                return ChainMatch(runs, position, None)
            digests = chain.digests(position, min(position + spans.SPAN_BLOCKS, count))
            if blocks is None or digests[0] not in blocks:  # usual: where a prompt is new
                return ChainMatch(runs, position, self.tombstones.reason(namespace, digests[0]))
            tags = blocks.get_all(digests)
            reasons = self._look_at(namespace, digests, tags, position, runs, prefix=True)
            if reasons:
                return ChainMatch(runs, *next(iter(reasons.items())))
            if number < len(marks):
                blocks.join(marks[number], digests, tags)
            number += 1
        return ChainMatch(runs, count, ReadStatus.HIT)

    def find(
        self, namespace: Namespace, digests: Sequence[bytes]
    ) -> tuple[list[Run], dict[int, ReadStatus]]:
        """Runs of blocks with equal locations, and the reason for each block that is a miss."""
        runs: list[Run] = []
        blocks = self._blocks.get(namespace)
        tags = blocks.get_all(digests) if blocks is not None else [None] * len(digests)
        return runs, self._look_at(namespace, digests, tags, 0, runs)

    def place(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        parent: bytes,
        size: int,
        host: str,
        copies: int = 1,
        session: str = "",
    ) -> Placement:
        """Where to write `copies` copies of blocks with `size` bytes in all, best server first.

        Advice only: nothing is reserved. To `Placer.rank` a namespace of no tenant is a tenant.
        """
        held = self._held(self._blocks.get(namespace), parent) if parent != ROOT else None
        if held is not None:
            self._resolve(held)
        holders = [self._servers[one.server] for one in held.replicas] if held else []
        tenant = tenant_of(namespace.name) or namespace.name
        ranked = self._placer.rank(
            key=digests[0] if digests else b"",
            parent=parent,
            holders=[one for one in holders if not one.draining],
            size=size,
            host=host,
            copies=copies,
            session=session,
            tenant=tenant,
        )
        for record in ranked[:copies]:
            record.offer(tenant, size)
        return Placement(
            tuple(record.server for record in ranked), self._complete_replicas(namespace, digests)
        )

    def listed_of(self, namespace: Namespace, digests: Sequence[bytes]) -> int:
        """How many of these blocks some server has, in whatever order."""
        blocks = self._blocks.get(namespace)
        found = blocks.get_all(digests) if blocks is not None else []
        return len(found) - found.count(None)

    def explain(self, namespace: Namespace, digests: Sequence[bytes]) -> list[Explanation]:
        """For each block: where it is, or why it is a miss, as text of TEXT_MAX characters at most.

        It names no namespace of another tenant than that of `namespace`.
        """
        _, reasons = self.find(namespace, digests)
        blocks = self._blocks.get(namespace)
        texts: dict[tuple[BlockLocations | None, ReadStatus], str] = {}  # not one for each block
        answers = []
        for position, digest in enumerate(digests):
            held = self._held(blocks, digest)
            status = reasons.get(position, ReadStatus.HIT)
            replicas = held.replicas if held is not None else ()
            text = texts.get((held, status))
            if text is None:
                text = self._explanation(namespace, held, status)[:TEXT_MAX]
                texts[held, status] = text
            answers.append(Explanation(BlockKey(namespace, digest), status, replicas, text))
        return answers

    def servers(self, after: str = "", size: int = PAGE_SIZE) -> tuple[list[LoggedChange], bool]:
        """The servers that have a record and whose names come behind `after`, in order, as changes:
        BACK, and LOST or LEFT if it is gone. About `size` bytes; and whether there are more."""
        found: list[LoggedChange] = []
        for name in sorted(name for name in self._servers if name > after):
            if size <= 0:
                return found, True
            record = self._servers[name]
            found.append(LoggedChange(ChangeKind.BACK, name, host=record.host))
            if not record.alive:
                found.append(LoggedChange(_gone(record), name))
            size -= 256 + 2 * size_of(name, record.host)
        return found, False

    def snapshot(
        self, after: MapCursor, blocks: int, size: int = PAGE_SIZE, seed: int = 0
    ) -> tuple[list[LoggedChange], MapCursor | None]:
        """What the map has behind `after`, as changes, and where to go on; None: that was all.

        About so many copies of blocks, and bytes of a message. A copy that is here during the whole
        walk is met, perhaps twice (`PiecewiseDict.pieces`). The `seed` is the same for the whole
        walk, and not known to those who choose keys.
        """
        found: dict[tuple[Namespace, Location, int], list[bytes]] = {}
        at: MapCursor | None = None
        for namespace, number, piece, first in self._pieces_after(after):
            at = MapCursor(namespace.name, namespace.parts, number << _PLACE_BITS)
            if blocks <= 0 or size <= 0:
                break
            blocks -= 1
            for place, one, digest in self._copies(piece, first, seed):
                if blocks <= 0 or size <= 0:
                    at = at._replace(piece=number << _PLACE_BITS | place)
                    break
                blocks -= 1
                if one.inventory.retired:
                    continue
                digests = found.setdefault((namespace, one, len(digest)), [])
                size -= len(digest)
                if not digests:
                    tier = self._tier_of(one)
                    size -= 128 + size_of(namespace.name, one.inventory.server, tier)
                digests.append(digest)
            else:
                at = None
                continue
            break
        return [
            LoggedChange(
                *(ChangeKind.STORED, one.inventory.server, namespace, one.part),
                *(self._tier_of(one), length, b"".join(digests)),
            )
            for (namespace, one, length), digests in found.items()
        ], at

    def sweep(self, limit: int = 512) -> bool:
        """Remove retired locations from some of the blocks, and sets of locations that no block
        has; False when none are left.

        A step visits at least `limit` blocks, if there are as many, and at most one piece of the
        map more. So a lost server with millions of blocks does not stall the loop.
        """
        if self._walk is None:
            if not self._walk_again:
                return False
            self._walk_again = False
            self._walk = self._sweep_all()
        while limit > 0:
            visited = next(self._walk, 0)
            if not visited:
                self._walk = None
                return self._walk_again
            limit -= visited
        return True

    # --- inside ----------------------------------------------------------------------

    def _set_alive(self, record: ServerRecord, alive: bool, *, left: bool = False) -> None:
        if record.alive is not alive or left > record.left:
            record.alive, record.left = alive, left
            self._version += 1
            kind = ChangeKind.BACK if alive else _gone(record)
            self.changes.add(LoggedChange(kind, record.server, host=record.host if alive else ""))
            if alive and not record.draining:
                self._placer.add(record)
            else:
                self._placer.remove(record)

    def _set_draining(self, record: ServerRecord, draining: bool) -> None:
        """A server that will leave is read, and not chosen for writes (design: movers)."""
        if record.draining is not draining:
            record.draining = draining
            if draining:
                self._placer.remove(record)
            elif record.alive:
                self._placer.add(record)

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

    def _make_room_for_server(self, caller: str) -> Refusal | None:
        """Forget a lost server if there are too many; the reason when none is lost."""
        records = self._servers.values()
        here = sum(record.caller == caller for record in records) if caller else 0
        if here >= self.servers_per_host_max and not self._forget_lost(
            lambda record: record.caller == caller
        ):
            problem = (
                f"{here} servers are registered from {caller}, the limit "
                "(master.servers_per_host_max)"
            )
            return Refusal(problem, (), 0.0, full=True)
        full = len(self._servers) >= self.servers_max
        if full and not self._forget_lost(lambda record: True):
            problem = f"{self.servers_max} servers are registered, the limit"
            return Refusal(problem, (), 0.0, full=True)
        return None

    def _forget_lost(self, wanted: Callable[[ServerRecord], bool]) -> bool:
        """Forget the `wanted` server that has been lost for the longest time, if there is one."""
        lost = [one for one in self._servers.values() if not one.alive and wanted(one)]
        if not lost:
            return False
        self._forget(min(lost, key=lambda record: record.last_seen))
        return True

    def _forget(self, record: ServerRecord) -> None:
        del self._servers[record.server]
        self._placer.remove(record)
        self._retire_all(record)

    def _room(self, record: ServerRecord, wanted: int) -> int:
        """How many of the `wanted` blocks may be listed for this server; perhaps more."""
        room = min(record.blocks_max - record.inventory.blocks, self.blocks_max - self._count)
        half = self.blocks_max // 2
        if record.caller and self._count + wanted > half:  # else no host can have more
            room = min(room, half - self._blocks_of(record.caller))
        return max(0, room)

    def _blocks_of(self, caller: str) -> int:
        """Blocks that the servers at one address have in this map."""
        return sum(one.inventory.blocks for one in self._servers.values() if one.caller == caller)

    def _retire(self, inventory: ServerInventory) -> None:
        """Its blocks are not readable any more, and are to be swept if there are any."""
        inventory.retired = True
        self._version += 1
        if inventory.blocks or self._locations.has_grown:
            self._walk_again = True

    def _retire_all(self, record: ServerRecord) -> None:
        """The process that had these blocks is lost, or a later one has taken its place."""
        self.changes.add(LoggedChange(ChangeKind.CLEARED, record.server))
        for inventory in (record.inventory, *record.earlier):
            inventory.lost = True
            self._retire(inventory)

    def _pieces_after(
        self, at: MapCursor
    ) -> Iterator[tuple[Namespace, int, dict[bytes, int], int]]:
        """The pieces of the map from there on: their namespaces and numbers, and from which place
        in them on. Change nothing meanwhile."""
        number, first = at.piece >> _PLACE_BITS, at.piece & _PLACE_MASK
        here = [Namespace(at.name, at.parts)] if at.name else []
        for namespace in itertools.chain(here, self._blocks.after(at.name, at.parts)):
            blocks = self._blocks.get(namespace)
            if not here or namespace is not here[0]:
                number = first = 0
            while blocks is not None and (piece := blocks.piece(number)) is not None:
                yield namespace, number, piece, first
                number, first = number + 1, 0

    def _copies(
        self, piece: dict[bytes, int], first: int, seed: int
    ) -> Iterator[tuple[int, Location, bytes]]:
        """The copies of the blocks in a piece, retired ones too, in order of their places in it,
        from place `first` on.

        A copy has the same place as long as it is here, whatever else comes and goes: by the hash
        of its block, and then by that of its server and part.
        """
        hashed = xxhash.xxh3_64_intdigest
        ranked: dict[int, list[tuple[int, Location]]] = {}  # once for each set of locations
        order = sorted(
            (hashed(digest, seed) & _HASH_MASK, digest, tag >> MARK_BITS)
            for digest, tag in piece.items()
        )
        for number, same in itertools.groupby(order, key=itemgetter(0)):
            if number < first >> _RANK_BITS:
                continue
            copies = []
            for _, digest, id in same:
                if id not in ranked:
                    here = self._locations.by_id[id].locations
                    names = [f"{one.inventory.server}/{one.part}".encode() for one in here]
                    ranks = [hashed(name, seed) & _RANK_MASK for name in names]
                    ranked[id] = list(zip(ranks, here, strict=True))
                copies += [(number << _RANK_BITS | rank, one, digest) for rank, one in ranked[id]]
            copies.sort(key=itemgetter(0))
            yield from (copy for copy in copies if copy[0] >= first)

    def _tier_of(self, one: Location) -> str:
        return self._tier_name(one.inventory.server, one.tier)

    def _tier_name(self, server: str, tier: int) -> str:
        record = self._servers.get(server)
        return record.tiers[tier] if record is not None and tier < len(record.tiers) else "?"

    def _held(self, blocks: BlockMap | None, digest: bytes) -> BlockLocations | None:
        tag = blocks.get(digest) if blocks is not None else None
        return self._locations.by_id[tag >> MARK_BITS] if tag is not None else None

    def _put(
        self, blocks: BlockMap, namespace: Namespace, digest: bytes, after: BlockLocations
    ) -> None:
        """The block has these locations from now on; without any it leaves the map."""
        blocks.split(blocks[digest])
        if after.locations:
            blocks[digest] = after.tag
            return
        del blocks[digest]
        self._count -= 1
        if not len(blocks):
            del self._blocks[namespace]

    def _pieces(self) -> Iterator[tuple[Namespace, BlockMap, dict[bytes, int]]]:
        """Every piece of the map that is here now, for a walk in steps."""
        for names in self._blocks.pieces():
            for namespace in list(names):
                blocks = self._blocks.get(namespace)
                if blocks is not None:
                    for piece in blocks.pieces():
                        yield namespace, blocks, piece

    def _sweep_all(self) -> Iterator[int]:
        """A walk through the map: how much is visited in each step."""
        self._locations.walk += 1
        for namespace, blocks, piece in self._pieces():
            count = 1 + len(piece)
            self._sweep_piece(namespace, blocks, piece)
            yield count
        yield from self._locations.drop_unused()

    def _sweep_piece(self, namespace: Namespace, blocks: BlockMap, piece: dict[bytes, int]) -> None:
        by_id = self._locations.by_id
        after: dict[int, BlockLocations] = {}  # once for each set of locations, not for each block
        before = len(piece)
        # Those of lost inventories have left with the change CLEARED.
        gone: dict[Location, list[bytes]] = {}
        for digest, tag in list(piece.items()):
            id = tag >> MARK_BITS
            kept = after.get(id)
            if kept is None:
                kept = after[id] = self._locations.unretired(by_id[id])
            if kept.id != id:
                held = by_id[id]
                for one in held.locations:
                    if one not in kept.locations:
                        _uncount(
                            digest, one.inventory, location_seed(namespace, one.part, one.tier)
                        )
                        if not one.inventory.lost:
                            gone.setdefault(one, []).append(digest)
                if not kept.locations:
                    self.tombstones.left(namespace, digest, self._reason(namespace, digest, held))
                self._put(blocks, namespace, digest, kept)
        for one, digests in gone.items():
            self.changes.add_blocks(
                ChangeKind.REMOVED, one.inventory.server, namespace, one.part, digests
            )
        if len(piece) < before // 2:
            compact(piece)

    def _resolve(self, held: BlockLocations) -> None:
        """Bring the status of `held` up to date: once per change of servers, not per block."""
        if held.version == self._version:
            return
        replicas = []
        lost = set()
        for inventory, tier, part in held.locations:
            record = self._servers.get(inventory.server)
            if not inventory.retired and record is not None and record.alive:
                name = record.tiers[tier] if tier < len(record.tiers) else "?"
                replicas.append(Replica(inventory.server, name, part))
            elif inventory.lost or not inventory.retired:
                lost.add(part)
        held.resolve(tuple(replicas), lost, self._version)

    def _known_spans(
        self, blocks: BlockMap, marks: Sequence[int], first: int, runs: list[Run]
    ) -> int:
        """Add spans from number `first` on, all in the same places, to `runs`; the next number.

        None are added if the map does not know the first one, or its blocks cannot be read.
        """
        known = blocks.spans
        tag = known.get(marks[first]) if first < len(marks) else None
        if tag is None:
            return first
        id = tag >> MARK_BITS
        held = self._locations.by_id[id]
        self._resolve(held)
        if held.status is not ReadStatus.HIT:
            return first
        last = first + 1
        # Many at once: half of the time of a match is here.
        for tag in known.get_all(marks[last : last + _SPANS_STEP]):
            if tag is None or tag >> MARK_BITS != id:
                break
            last += 1
        _extend(runs, first * spans.SPAN_BLOCKS, last * spans.SPAN_BLOCKS, held.replicas)
        return last

    def _look_at(
        self,
        namespace: Namespace,
        digests: Sequence[bytes],
        tags: Sequence[int | None],
        position: int,
        runs: list[Run],
        *,
        prefix: bool = False,
    ) -> dict[int, ReadStatus]:
        """Add what can be read to `runs`; the reason for each block that is a miss.

        The first of the blocks is at `position`. With `prefix` it stops at the first miss.
        """
        reasons: dict[int, ReadStatus] = {}
        first, count = 0, len(tags)
        while first < count and not (prefix and reasons):
            tag = tags[first]
            last = first + 1
            while last < count and tags[last] == tag:
                last += 1
            held = self._locations.by_id[tag >> MARK_BITS] if tag is not None else None
            if held is not None:
                self._resolve(held)
            if held is not None and held.status is ReadStatus.HIT:
                _extend(runs, position + first, position + last, held.replicas)
            else:
                for index in range(first, first + 1 if prefix else last):
                    reasons[position + index] = (
                        self.tombstones.reason(namespace, digests[index])
                        if held is None
                        else self._reason(namespace, digests[index], held)
                    )
            first = last
        return reasons

    def _complete_replicas(self, namespace: Namespace, digests: Sequence[bytes]) -> list[int]:
        """For each block: the number of servers from which each of its parts can be read."""
        blocks = self._blocks.get(namespace)
        counts = [0] * len(digests)
        tags = map(blocks.get, digests) if blocks is not None else ()
        for position, tag in enumerate(list(tags)):
            if tag is not None:
                self._resolve(held := self._locations.by_id[tag >> MARK_BITS])
                counts[position] = held.complete_replicas
        return counts

    def _reason(self, namespace: Namespace, digest: bytes, held: BlockLocations) -> ReadStatus:
        """Why a block that is in the directory cannot be read.

        Its server may be alive, with a new inventory that gave the reason: a tombstone has it. If
        that inventory gave none, this map was wrong or the server has forgotten the reason: then
        there is no record, but no server is lost.
        """
        self._resolve(held)
        if held.status is ReadStatus.PART_MISSING:
            return held.status
        recorded = self.tombstones.reason(namespace, digest)
        return held.status if recorded is ReadStatus.NEVER_WRITTEN else recorded

    def _explanation(
        self, namespace: Namespace, held: BlockLocations | None, status: ReadStatus
    ) -> str:
        if status is ReadStatus.HIT and held is not None:
            where = ", ".join(f"{r.server} ({r.tier})" for r in held.replicas)
            return f"present on {where}"
        if status is ReadStatus.PART_MISSING and held is not None:
            present = sorted({replica.part for replica in held.replicas})
            return f"parts {present} of {namespace.parts} are present, the others are missing"
        if status is ReadStatus.SERVER_LOST:
            if held is None:
                return "its server was lost or restarted empty"
            here = {(replica.server, replica.part) for replica in held.replicas}
            lost = [
                one.inventory
                for one in held.locations
                if (one.inventory.server, one.part) not in here
            ]
            servers = ", ".join(sorted({one.server for one in lost if not one.replaced}))
            return f"held by {servers}, which is lost or was restarted"
        if status is ReadStatus.NEVER_WRITTEN:
            if namespace not in self._blocks:
                return self._unknown_namespace(namespace)
            if held is not None or self.tombstones.forgotten:
                return "no record: never written, or removed so long ago that the reason is lost"
            return "never written (since this master started)"
        return f"{status.label}: it was stored earlier"

    def _unknown_namespace(self, namespace: Namespace) -> str:
        marker = marker_of(tenant_of(namespace.name))
        first = islice(self._blocks.after(marker), 3)
        others = ", ".join([repr(one.name) for one in first if one.name.startswith(marker)])
        if not others:
            return f"{'this tenant has' if marker else 'the pool holds'} no blocks"
        return (
            f"namespace {namespace.name!r} with {namespace.parts} part(s) has no blocks; "
            f"namespaces with blocks: {others}"
        )


class _Removal(NamedTuple):
    """What the removal of a block that lies in a set of places comes to.

    A server's further parts are no reason to keep quiet: an inventory names a block that has left
    once, not once for each part.
    """

    inventory: ServerInventory | None  # that loses it; None if it was not there
    seed: int  # of its place
    after: int | None  # the block's tag from then on; None: it leaves the map
    explains: bool  # no other server has it, so the reason is kept

    @classmethod
    def of(cls, step: Step, server: str, namespace: Namespace) -> _Removal:
        left, after = step.left, step.after
        return cls(
            left.inventory if left is not None else None,
            location_seed(namespace, left.part, left.tier) if left is not None else 0,
            after.tag if after.locations else None,
            all(one.inventory.server == server or one.inventory.retired for one in after.locations),
        )


def _gone(record: ServerRecord) -> ChangeKind:
    """What is told of a server that is not alive."""
    return ChangeKind.LEFT if record.left else ChangeKind.LOST


def _uncount(digest: bytes, inventory: ServerInventory, seed: int) -> None:
    """A block has left the place of this `location_seed`. A retired inventory is never compared
    again."""
    if not inventory.retired:
        inventory.listed.count(digest, seed, -1)


def _extend(runs: list[Run], first: int, end: int, replicas: tuple[Replica, ...]) -> None:
    """The blocks from `first` on, before `end`, lie there."""
    if runs and runs[-1].last + 1 == first and runs[-1].replicas is replicas:
        first = runs.pop().first
    runs.append(Run(first, end - 1, replicas))
