"""The master's map: which server holds which block, who is alive, where to put more.

Pure and soft: everything here can be rebuilt from the servers' inventories, so losing it costs
two heartbeats and nothing else. A server's word is final about its own blocks; a clock only
decides whom to believe reachable, never which bytes are right.

Memory is what limits a map of millions of blocks, so a block costs one dict slot, its digest and
a pointer: all blocks that lie in the same places share one `Holding`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import xxhash

from kvpool.errors import InvariantViolated
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


class View:
    """One inventory of one server as this master has it; a resync replaces it whole."""

    __slots__ = ("blocks", "current", "server")

    def __init__(self, server: str) -> None:
        self.server = server
        self.blocks = 0
        self.current = False  # False while an inventory is arriving, and after it was replaced


class Copy(NamedTuple):
    view: View
    tier: int
    part: int


class Holding:
    """The places where a block lies. Interned: equal holdings are one object."""

    __slots__ = ("_minus", "_plus", "copies", "parts", "replicas", "status", "version", "whole")

    def __init__(self, parts: int, copies: tuple[Copy, ...]) -> None:
        self.parts = parts  # that make a whole block, by its namespace
        self.copies = copies
        self.version = -1  # of the directory, when `status` and `replicas` were worked out
        self.status = ReadStatus.SERVER_LOST
        self.replicas: tuple[Replica, ...] = ()
        self.whole = 0  # servers that each part can be read from, at least
        self._plus: dict[Copy, Holding] = {}
        self._minus: dict[tuple[View, int], Holding] = {}


@dataclass(slots=True)
class ServerState:
    """A block server, as far as this master has heard."""

    server: str
    epoch: int
    host: str
    addresses: tuple[str, ...]
    tiers: tuple[str, ...]
    capacity: int
    heard: float
    view: View
    alive: bool = True
    sequence: int = 0  # of the last announcement that was applied
    pieces: int = 1  # of the inventory with that number; an announcement is whole
    pending: View | None = None  # the inventory that is arriving
    stats: ServerStats = field(default_factory=ServerStats)
    placed: int = 0  # bytes sent there since its last heartbeat


class Placement(NamedTuple):
    """Servers to try, best first, and how many copies of each block the pool already has."""

    servers: tuple[str, ...]
    copies: list[int]


#: A server whose next victim is at least this share as old as the oldest elsewhere is under no
#: more pressure than the others: a chain stays where its parent is.
_AGE_TOLERANCE: Final = 0.9


def _victim_age(known: ServerState) -> float:
    """Age of the next victim, less what was sent there since it was reported."""
    return known.stats.victim_age_s * max(0.0, 1 - known.placed / known.capacity)


class Directory:
    """The map. `timeout_s` without a word makes a server silent; `forget_s` forgets it."""

    def __init__(
        self, *, timeout_s: float = 3.0, forget_s: float = 600.0, tombstones_max: int = 65_536
    ) -> None:
        self.timeout_s = timeout_s
        self.forget_s = forget_s
        self.tombstones = Tombstones(tombstones_max)
        self._servers: dict[str, ServerState] = {}
        self._blocks: dict[Namespace, dict[bytes, Holding]] = {}
        self._holdings: dict[tuple[int, frozenset[Copy]], Holding] = {}
        self._version = 0  # grows when a view or a server comes or goes
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
    ) -> bool:
        """A server says hello; False when another living one has its name.

        The same epoch is the same process: it is simply back, with all that is known of it. A
        new epoch starts with nothing until its inventory is here.
        """
        known = self._servers.get(server)
        if known is not None and known.epoch == epoch:
            known.heard = now
            known.addresses = tuple(addresses)
            self._set_alive(known, True)
            return True
        if known is not None:
            if known.alive and now - known.heard < self.timeout_s:
                return False
            self._retire(known.view)
        self._servers[server] = ServerState(
            server, epoch, host, tuple(addresses), tuple(tiers), capacity, now, View(server)
        )
        self._servers[server].view.current = True
        self._version += 1
        return True

    def heartbeat(
        self,
        server: str,
        epoch: int,
        stats: ServerStats,
        now: float,
        sequence: int = 0,
    ) -> bool:
        """A sign of life; False asks the server to register (again).

        Also when it has announced more, up to `sequence`, than was heard here: then it was another
        that heard it, our predecessor, and all that came to us was a belated greeting.
        """
        known = self._servers.get(server)
        if known is None or known.epoch != epoch:
            return False
        known.heard = now
        known.stats = stats
        known.placed = 0
        self._set_alive(known, True)
        return sequence <= known.sequence

    def leave(self, server: str, epoch: int) -> None:
        """A server says goodbye."""
        known = self._servers.get(server)
        if known is not None and known.epoch == epoch:
            self._set_alive(known, False)

    def tick(self, now: float) -> None:
        """Notice who has gone silent. Call it several times per `timeout_s`.

        A tick that comes late means that *we* slept, not that everybody died: the missing time
        is given back to all before anyone is judged.
        """
        if self._last_tick is not None:
            slept = now - self._last_tick - self.timeout_s / 2
            if slept > 0:
                for known in self._servers.values():
                    known.heard = min(now, known.heard + slept)
        self._last_tick = now
        for known in list(self._servers.values()):
            silent_s = now - known.heard
            if silent_s >= self.forget_s:
                del self._servers[known.server]
                self._retire(known.view)
            elif silent_s >= self.timeout_s:
                self._set_alive(known, False)

    def members(self, now: float) -> list[Member]:
        """Every server that is remembered, the silent ones included."""
        return [
            Member(
                server=known.server,
                epoch=known.epoch,
                host=known.host,
                addresses=known.addresses,
                tiers=known.tiers,
                alive=known.alive,
                heard_s=max(0.0, now - known.heard),
                capacity=known.capacity,
                stats=known.stats,
            )
            for known in self._servers.values()
        ]

    # --- announcements ---------------------------------------------------------------

    def accepts(self, server: str, epoch: int, sequence: int) -> bool | None:
        """Whether announcement `sequence` is next: True; None when it was applied before.

        False is a gap (or a stranger): the server must send its inventory.
        """
        known = self._servers.get(server)
        if known is None or known.epoch != epoch:
            return False
        if sequence <= known.sequence:
            return None
        if sequence != known.sequence + 1:
            return False
        known.sequence = sequence
        known.pieces = 1
        return True

    def accepts_piece(self, server: str, epoch: int, sequence: int, piece: int) -> bool | None:
        """Whether this piece of inventory `sequence` is next: True; None when it came before.

        False is a gap (or a stranger). Piece 0 begins a new inventory; what is known stays in
        force until it is complete.
        """
        known = self._servers.get(server)
        if known is None or known.epoch != epoch:
            return False
        if sequence < known.sequence or (sequence == known.sequence and piece < known.pieces):
            return None
        if piece == 0:
            if known.pending is not None:
                self._retire(known.pending)
            known.pending = View(server)
            known.sequence = sequence
            known.pieces = 1
            return True
        if sequence != known.sequence or piece != known.pieces or known.pending is None:
            return False
        known.pieces += 1
        return True

    def end_inventory(self, server: str) -> None:
        """It is complete: from now on it is what the server has, and all it has."""
        known = self._servers[server]
        if known.pending is not None:
            self._retire(known.view)
            known.view, known.pending = known.pending, None
            known.view.current = True
            self._version += 1

    def stored(
        self, server: str, namespace: Namespace, part: int, tier: int, digests: Sequence[bytes]
    ) -> None:
        """The server has these blocks (one part of each)."""
        if not digests:
            return
        known = self._servers[server]
        view = known.pending or known.view
        copy = Copy(view, tier, part)
        blocks = self._blocks.setdefault(namespace, {})
        alone = self._intern(namespace.parts, (copy,))
        added = 0
        for digest in digests:
            holding = blocks.get(digest)
            if holding is None:
                blocks[digest] = alone
                added += 1
                if self.tombstones:
                    self.tombstones.came_back(namespace, digest)
            else:
                if self.tombstones:
                    self.tombstones.came_back(namespace, digest)
                after = holding._plus.get(copy) or self._plus(holding, copy)
                if after is not holding:
                    blocks[digest] = after
                    added += all(c.view is not view or c.part != part for c in holding.copies)
        view.blocks += added

    def gone(
        self,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        reason: ReadStatus,
    ) -> None:
        """The server does not have these blocks (any more).

        Part of an inventory, it tells what became of blocks that this map may still have from an
        earlier one, or has never heard of.
        """
        known = self._servers[server]
        view = known.pending or known.view
        blocks = self._blocks.get(namespace, {})
        for digest in digests:
            holding = blocks.get(digest)
            after = self._minus(holding, view, part) if holding is not None else None
            if holding is not None and after is not None and after is not holding:
                view.blocks -= 1
                self._put(blocks, namespace, digest, after, reason)
            elif reason is not ReadStatus.NEVER_WRITTEN and (
                holding is None
                or all(c.view.server == server or not self._in_use(c.view) for c in holding.copies)
            ):
                self.tombstones.left(namespace, digest, reason)

    # --- questions -------------------------------------------------------------------

    def match(self, namespace: Namespace, digests: Sequence[bytes]) -> Match:
        """The longest prefix that is complete somewhere. Takes nothing, touches nothing (G9)."""
        runs, reasons = self.find(namespace, digests, prefix=True)
        if reasons:
            first, status = next(iter(reasons.items()))
            return Match(tuple(runs), first, status)
        return Match(tuple(runs), len(digests), ReadStatus.HIT)

    def find(
        self, namespace: Namespace, digests: Sequence[bytes], *, prefix: bool = False
    ) -> tuple[list[Run], dict[int, ReadStatus]]:
        """Runs of blocks that lie together, and the reason for each that is a miss.

        With `prefix` it stops at the first miss.
        """
        runs: list[Run] = []
        reasons: dict[int, ReadStatus] = {}
        found = list(map(self._blocks.get(namespace, {}).get, digests))
        count = len(found)
        first = 0
        while first < count:
            holding = found[first]
            if not first and found.count(holding) == count:
                last = count  # a chain in one place is the common case, and `count` is fast
            else:
                last = first + 1
                while last < count and found[last] is holding:
                    last += 1
            if holding is None:
                for position in range(first, last):
                    reasons[position] = self.tombstones.reason(namespace, digests[position])
                    if prefix:
                        break
            else:
                self._resolve(holding)
                if holding.status is ReadStatus.HIT:
                    runs.append(Run(first, last - 1, holding.replicas))
                else:
                    for position in range(first, last):
                        reasons[position] = self._reason(namespace, digests[position], holding)
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
        """Where to write `copies` copies of `size` bytes of blocks: advice, best server first.

        Servers on the caller's host come first, then those with room. When all are full, what
        is thrown out should be the oldest data of the pool, whichever server it is on: so the
        share of writes that a server gets falls with the age of its next victim (weighted
        rendezvous hashing, which also sends two writers of one block to one server). A chain
        stays with its parent as long as that costs no younger data. Further copies go to other
        hosts as long as there are any, because a host fails with all its servers.
        """
        servers = [known for known in self._servers.values() if known.alive]
        holding = self._blocks.get(namespace, {}).get(parent) if parent != ROOT else None
        parent_on = self._servers_of(holding)
        oldest_s = max((_victim_age(known) for known in servers), default=0.0)
        first = digests[0] if digests else b""

        def preference(known: ServerState) -> tuple[bool, bool, bool, float]:
            has_room = known.capacity - known.stats.used - known.placed >= size
            share = _victim_age(known) / oldest_s if oldest_s and not has_room else 1.0
            stays = known.server in parent_on and share >= _AGE_TOLERANCE
            # -weight / ln(uniform): the server with the largest wins in proportion to its weight.
            hashed = xxhash.xxh3_64_intdigest(first + known.server.encode())
            # 53 bits of it: with all 64 the quotient can round to 1, whose logarithm divides.
            uniform = ((hashed >> 11) + 1) / (2**53 + 1)
            return known.host == host, has_room, stays, -(share**2) / math.log(uniform)

        servers.sort(key=preference, reverse=True)
        if copies > 1:
            best_of_host = {known.host: known for known in reversed(servers)}
            servers.sort(key=lambda known: best_of_host[known.host] is not known)
        for known in servers[:copies]:
            known.placed += size
        return Placement(tuple(known.server for known in servers), self._copies(namespace, digests))

    def explain(self, namespace: Namespace, digests: Sequence[bytes]) -> list[Explanation]:
        """For each block: where it is, or why it is not, in words."""
        _, reasons = self.find(namespace, digests)
        answers = []
        for position, digest in enumerate(digests):
            holding = self._blocks.get(namespace, {}).get(digest)
            status = reasons.get(position, ReadStatus.HIT)
            replicas = holding.replicas if holding is not None else ()
            text = self._in_words(namespace, holding, status)
            answers.append(Explanation(BlockKey(namespace, digest), status, replicas, text))
        return answers

    def check(self) -> None:
        """Every invariant of the map. Raises InvariantViolated; O(blocks)."""
        counts: dict[View, int] = {}
        for namespace, blocks in self._blocks.items():
            if not blocks:
                raise InvariantViolated(f"empty namespace {namespace} was kept")
            for digest, holding in blocks.items():
                if not holding.copies:
                    raise InvariantViolated(f"{digest.hex()[:12]} is nowhere, yet in the map")
                key = (namespace.parts, frozenset(holding.copies))
                if self._holdings.get(key) is not holding:
                    raise InvariantViolated(f"{digest.hex()[:12]}: its holding is not interned")
                places = [(copy.view, copy.part) for copy in holding.copies]
                if len(set(places)) != len(places):
                    raise InvariantViolated(f"{digest.hex()[:12]} is twice on one server")
                for copy in holding.copies:
                    if not 0 <= copy.part < namespace.parts:
                        raise InvariantViolated(f"{digest.hex()[:12]} has part {copy.part}")
                    counts[copy.view] = counts.get(copy.view, 0) + 1
        for known in self._servers.values():
            for view in (known.view, known.pending):
                if view is not None and view.blocks != counts.get(view, 0):
                    raise InvariantViolated(
                        f"{known.server}: counted {view.blocks} blocks, has {counts.get(view, 0)}"
                    )
            if not known.view.current:
                raise InvariantViolated(f"{known.server} has no current inventory")

    def sweep(self, limit: int = 1024) -> int:
        """Forget copies on servers that are gone for good; at most `limit` blocks per call."""
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
            holding = blocks.get(digest) if blocks is not None else None
            if blocks is not None and holding is not None:
                after = self._without_retired(holding)
                if after is not holding:
                    reason = self._reason(namespace, digest, holding)
                    self._put(blocks, namespace, digest, after, reason)
        if not self._to_sweep and not self._sweep_again:
            self._drop_unused_holdings()
        return len(self._to_sweep)

    # --- inside ----------------------------------------------------------------------

    def _set_alive(self, known: ServerState, alive: bool) -> None:
        if known.alive is not alive:
            known.alive = alive
            self._version += 1

    def _retire(self, view: View) -> None:
        view.current = False
        self._version += 1
        self._sweep_again = True

    def _intern(self, parts: int, copies: Iterable[Copy]) -> Holding:
        key = (parts, frozenset(copies))
        holding = self._holdings.get(key)
        if holding is None:
            # Sorted: the order must not depend on how a set of objects happens to iterate.
            ordered = sorted(key[1], key=lambda copy: (copy.view.server, copy.part, copy.tier))
            holding = self._holdings[key] = Holding(parts, tuple(ordered))
        return holding

    def _plus(self, holding: Holding, copy: Copy) -> Holding:
        others = (
            c for c in holding.copies if c.view is not copy.view or c.part != copy.part
        )  # a block lies in one tier of a server
        after = holding._plus[copy] = self._intern(holding.parts, (*others, copy))
        return after

    def _minus(self, holding: Holding, view: View, part: int) -> Holding:
        after = holding._minus.get((view, part))
        if after is None:
            rest = [c for c in holding.copies if c.view is not view or c.part != part]
            after = (
                self._intern(holding.parts, rest) if len(rest) < len(holding.copies) else holding
            )
            holding._minus[view, part] = after
        return after

    def _without_retired(self, holding: Holding) -> Holding:
        kept = [copy for copy in holding.copies if self._in_use(copy.view)]
        return self._intern(holding.parts, kept) if len(kept) < len(holding.copies) else holding

    def _in_use(self, view: View) -> bool:
        known = self._servers.get(view.server)
        return known is not None and (known.view is view or known.pending is view)

    def _put(
        self,
        blocks: dict[bytes, Holding],
        namespace: Namespace,
        digest: bytes,
        after: Holding,
        reason: ReadStatus,
    ) -> None:
        if after.copies:
            blocks[digest] = after
            if not any(self._in_use(copy.view) for copy in after.copies):
                self.tombstones.left(namespace, digest, reason)  # the rest is only not swept yet
            return
        del blocks[digest]
        if not blocks:
            del self._blocks[namespace]
        self.tombstones.left(namespace, digest, reason)

    def _resolve(self, holding: Holding) -> None:
        """Work out, once per change of members, whether these places make a whole block."""
        if holding.version == self._version:
            return
        holding.version = self._version
        replicas = []
        for copy in holding.copies:
            known = self._servers.get(copy.view.server)
            if copy.view.current and known is not None and known.alive:
                tier = known.tiers[copy.tier] if copy.tier < len(known.tiers) else "?"
                replicas.append(Replica(copy.view.server, tier, copy.part))
        holding.replicas = tuple(replicas)
        per_part = Counter(replica.part for replica in replicas)
        parts = len(per_part)
        holding.whole = min(per_part.values()) if parts == holding.parts else 0
        if parts == holding.parts:
            holding.status = ReadStatus.HIT
        elif parts == len({copy.part for copy in holding.copies}):
            holding.status = ReadStatus.PART_MISSING
        else:
            holding.status = ReadStatus.SERVER_LOST

    def _copies(self, namespace: Namespace, digests: Sequence[bytes]) -> list[int]:
        """From how many servers each whole block can be read."""
        blocks = self._blocks.get(namespace, {})
        copies = []
        for digest in digests:
            holding = blocks.get(digest)
            if holding is not None:
                self._resolve(holding)
            copies.append(holding.whole if holding is not None else 0)
        return copies

    def _reason(self, namespace: Namespace, digest: bytes, holding: Holding) -> ReadStatus:
        """Why a block that the map has cannot be read.

        Its server may be alive and have sent an inventory without it: then it said why.
        """
        self._resolve(holding)
        if holding.status is ReadStatus.SERVER_LOST:
            said = self.tombstones.reason(namespace, digest)
            return holding.status if said is ReadStatus.NEVER_WRITTEN else said
        return holding.status

    def _servers_of(self, holding: Holding | None) -> frozenset[str]:
        if holding is None:
            return frozenset()
        return frozenset(copy.view.server for copy in holding.copies)

    def _drop_unused_holdings(self) -> None:
        """Once a sweep is through, holdings that name retired views are of no use to anyone."""
        stale = {
            key for key in self._holdings if any(not self._in_use(copy.view) for copy in key[1])
        }
        if stale:
            for key in stale:
                del self._holdings[key]
            for holding in self._holdings.values():
                holding._plus.clear()
                holding._minus.clear()

    def _in_words(self, namespace: Namespace, holding: Holding | None, status: ReadStatus) -> str:
        if status is ReadStatus.HIT and holding is not None:
            where = ", ".join(f"{r.server} ({r.tier})" for r in holding.replicas)
            return f"present on {where}"
        if status is ReadStatus.PART_MISSING and holding is not None:
            here = sorted({copy.part for copy in holding.copies})
            return f"parts {here} of {namespace.parts} are present, the others are not"
        if status is ReadStatus.SERVER_LOST:
            if holding is None:
                return "its server was lost or restarted empty"
            gone = ", ".join(sorted({copy.view.server for copy in holding.copies}))
            return f"held by {gone}, silent or restarted"
        if status is ReadStatus.NEVER_WRITTEN:
            if namespace not in self._blocks:
                return self._strange_namespace(namespace)
            if self.tombstones.forgotten:
                return "no record: never written, or gone longer ago than the record reaches"
            return "never written (since this master started)"
        return f"{status.label}: it was here"

    def _strange_namespace(self, namespace: Namespace) -> str:
        if not self._blocks:
            return "the pool holds no blocks"
        others = ", ".join(sorted(repr(other.name) for other in self._blocks)[:3])
        return (
            f"no block of namespace {namespace.name!r} with {namespace.parts} part(s) is here; "
            f"namespaces that are: {others}"
        )
