"""The master's directory: which server holds which block, and which servers are alive.

Pure, and soft state: all of it can be rebuilt from the servers' inventories, so losing it costs two
heartbeats and no data. Only a server says which blocks it has; the clock only decides which servers
count as reachable, never which bytes are right. (design: announcements)
"""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Final, NamedTuple

from kvpool import spans
from kvpool.fingerprint import entry_hash, location_seed
from kvpool.master.state.block_map import MARK_BITS, BlockMap
from kvpool.master.state.changes import ChangeKind
from kvpool.master.state.locations import (
    BlockLocations,
    Location,
    LocationTable,
    ServerInventory,
    Step,
)
from kvpool.master.state.placement import Placement
from kvpool.master.state.server_record import ServerRecord
from kvpool.master.state.server_table import ServerTable
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.spans import MarkedChain
from kvpool.tenant_names import tenant_of
from kvpool.tombstones import Tombstones
from kvpool.types import ROOT, Match, Namespace, ReadStatus, Replica, Run

#: The joint of the map, what has the blocks of all namespaces: `module:class`; the last one is
#: made. Without its line and file they are in no order.
NAMESPACES: Final = (
    "kvpool.piecewise_dict:PiecewiseDict",
    "kvpool.master.state.namespace_map:NamespaceMap",
)
#: Spans that are looked up at once.
_SPANS_STEP: Final = 128


class ChainMatch(NamedTuple):
    """As `Match`. `stopped` is None where this map cannot tell without the keys of the next span:
    it does not know the span, or its blocks cannot be read, and a reason belongs to a block."""

    runs: list[Run]
    length: int
    stopped: ReadStatus | None


class Directory:
    """The directory of one master: its servers, and the blocks that they announced."""

    def __init__(self, servers: ServerTable | None = None, *, blocks_max: int = 50_000_000) -> None:
        self.servers = servers if servers is not None else ServerTable()
        self.blocks_max = blocks_max
        self.tombstones = Tombstones()
        #: For those who walk through the map; it is changed by `stored`, `removed` and `put` alone.
        self.blocks: PiecewiseDict[Namespace, BlockMap] = resolve_name(NAMESPACES[-1])()
        self.locations = LocationTable()
        self._count = 0  # blocks of all namespaces

    def __len__(self) -> int:
        return self._count

    # --- announcements ---------------------------------------------------------------

    def within_limits(
        self, server: str, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> Sequence[bytes]:
        """The first of the `digests` for which there is room, and those that are listed already.

        Where there is none, servers that are lost make room: their blocks are swept step by step,
        so it is there a little later. (design: bounds)
        """
        record = self.servers.records[server]
        room = self._room(record, len(digests))
        if room >= len(digests):
            return digests
        if self._count >= self.blocks_max // 2:
            self.servers.forget_lost_blocks()
        blocks = self.blocks.get(namespace)
        listed = []
        for digest in digests:
            held = self.held(blocks, digest)
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
        record = self.servers.records[server]
        most, caller = record.registration.blocks_max, record.registration.caller
        if record.inventories.latest.blocks >= most:
            return (
                f"{server!r} has {most} blocks in this map, as many as fit into the memory that it "
                "registered"
            )
        if self._count < self.blocks_max:
            return (
                f"the servers at {caller} have {self.servers.blocks_of(caller)} blocks in this "
                f"map, and half of master.blocks_max ({self.blocks_max}) is the limit"
            )
        return f"this map has {self._count} blocks, the limit (master.blocks_max)"

    def stored(
        self, server: str, namespace: Namespace, part: int, tier: int, digests: Sequence[bytes]
    ) -> bool:
        """The server has this part of these blocks; whether no other one has any part of them.
        Raises TypeError unless all are bytes."""
        if not digests:
            return True
        if set(map(type, digests)) != {bytes}:
            raise TypeError("a digest is not bytes")
        record = self.servers.records[server]
        inventory = record.inventories.latest
        location = Location(inventory, tier, part)
        blocks = self.blocks.get(namespace)
        if blocks is None:
            blocks = self.blocks[namespace] = BlockMap()
        table, mask, by_id = blocks.table, blocks.mask, self.locations.by_id
        only_here = self.locations.get(namespace.parts, (location,)).tag
        seed, hashed = location_seed(namespace, part, tier), entry_hash
        new = moved = total = 0
        seen = set[BlockLocations]()
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
                step = held.after_add.get(location) or self.locations.add(held, location)
                seen.add(step.after)
                if step.after is not held:
                    blocks.split(tag)
                    piece[digest] = step.after.tag
                    moved += 1
                    total += hashed(digest, seed)
                    if step.left is not None:
                        step.left.inventory.uncount(digest, step.left.seed(namespace))
        inventory.listed.blocks += new + moved
        inventory.listed.total += total
        self._count += new
        blocks.changed(new)
        if new or moved:
            where = server, namespace, part, digests, record.tier_name(tier)
            self.servers.changes.add_blocks(ChangeKind.STORED, *where)
        self.tombstones.came_back_all(namespace, digests)
        return all(one.inventory.server == server for held in seen for one in held.locations)

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
        blocks = self.blocks.get(namespace)
        if blocks is None:
            explained = list(digests)
        else:
            self._remove_from(blocks, server, namespace, part, digests, gone, explained)
        if reason is not ReadStatus.NEVER_WRITTEN:
            self.tombstones.left_all(namespace, explained, reason)
        self.servers.changes.add_blocks(ChangeKind.REMOVED, server, namespace, part, gone)

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
        table, mask, by_id = blocks.table, blocks.mask, self.locations.by_id
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
                step = self.locations.remove(by_id[tag >> MARK_BITS], server, part)
                removal = removals[tag >> MARK_BITS] = _Removal.of(step, server, namespace)
            if removal.inventory is not None:
                removal.inventory.uncount(digest, removal.seed)
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
            del self.blocks[namespace]

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
        blocks = self.blocks.get(namespace)
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
        blocks = self.blocks.get(namespace)
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
        held = self.held(self.blocks.get(namespace), parent) if parent != ROOT else None
        if held is not None:
            self.servers.resolve(held)
        holders = [self.servers.records[one.server] for one in held.replicas] if held else []
        tenant = tenant_of(namespace.name) or namespace.name
        ranked = self.servers.placer.rank(
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

    # --- inside ----------------------------------------------------------------------

    def _room(self, record: ServerRecord, wanted: int) -> int:
        """How many of the `wanted` blocks may be listed for this server; perhaps more."""
        own, half = record.registration, self.blocks_max // 2
        listed = record.inventories.latest.listed.blocks
        room = min(own.blocks_max - listed, self.blocks_max - self._count)
        if own.caller and self._count + wanted > half:  # else no host can have more
            room = min(room, half - self.servers.blocks_of(own.caller))
        return max(0, room)

    def held(self, blocks: BlockMap | None, digest: bytes) -> BlockLocations | None:
        tag = blocks.get(digest) if blocks is not None else None
        return self.locations.by_id[tag >> MARK_BITS] if tag is not None else None

    def put(
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
            del self.blocks[namespace]

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
        held = self.locations.by_id[id]
        self.servers.resolve(held)
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
            held = self.locations.by_id[tag >> MARK_BITS] if tag is not None else None
            if held is not None:
                self.servers.resolve(held)
            if held is not None and held.status is ReadStatus.HIT:
                _extend(runs, position + first, position + last, held.replicas)
            else:
                for index in range(first, first + 1 if prefix else last):
                    reasons[position + index] = (
                        self.tombstones.reason(namespace, digests[index])
                        if held is None
                        else self.reason(namespace, digests[index], held)
                    )
            first = last
        return reasons

    def _complete_replicas(self, namespace: Namespace, digests: Sequence[bytes]) -> list[int]:
        """For each block: the number of servers from which each of its parts can be read."""
        blocks = self.blocks.get(namespace)
        counts = [0] * len(digests)
        tags = map(blocks.get, digests) if blocks is not None else ()
        for position, tag in enumerate(list(tags)):
            if tag is not None:
                self.servers.resolve(held := self.locations.by_id[tag >> MARK_BITS])
                counts[position] = held.complete_replicas
        return counts

    def reason(self, namespace: Namespace, digest: bytes, held: BlockLocations) -> ReadStatus:
        """Why a block that is in the directory cannot be read.

        Its server may be alive, with a new inventory that gave the reason: a tombstone has it. If
        that inventory gave none, this map was wrong or the server has forgotten the reason: then
        there is no record, but no server is lost.
        """
        self.servers.resolve(held)
        if held.status is ReadStatus.PART_MISSING:
            return held.status
        recorded = self.tombstones.reason(namespace, digest)
        return held.status if recorded is ReadStatus.NEVER_WRITTEN else recorded


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
            left.seed(namespace) if left is not None else 0,
            after.tag if after.locations else None,
            all(one.inventory.server == server or one.inventory.retired for one in after.locations),
        )


def _extend(runs: list[Run], first: int, end: int, replicas: tuple[Replica, ...]) -> None:
    """The blocks from `first` on, before `end`, lie there."""
    if runs and runs[-1].last + 1 == first and runs[-1].replicas is replicas:
        first = runs.pop().first
    runs.append(Run(first, end - 1, replicas))
