"""Where to write: the servers that a writer should try, best first.

A chain stays on the server that has it: there its blocks are kept and evicted together, and hints
about its session apply to all of it. A new chain goes where the least is written. Pure; a call
takes the same time with any number of servers. (design: placement)
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from kvpool.master.state.server_record import ServerRecord
from kvpool.shares import Recent
from kvpool.types import ROOT


class Placement(NamedTuple):
    """Servers to try, best first, and how many complete replicas of each block there are."""

    servers: tuple[str, ...]
    copies: list[int]


#: Servers that are compared for a new chain, drawn by its key; of fewer all.
DRAWN: Final = 16
#: Servers on the writer's host that are compared besides.
_LOCAL: Final = 2
#: A server with room counts as so many times less loaded: its room is a claim, and one server that
#: has come back empty must not get every new chain.
_ROOM_FACTOR: Final = 4.0
#: A server on the writer's host counts as so many times less loaded, if it is not full.
_LOCAL_FACTOR: Final = 1.25
#: Memory is a claim, too: more than so many times the median is not believed.
_CAPACITY_MEDIANS_MAX: Final = 4.0
#: From a block that so many chains go on from, each in its own way, a chain is a new one.
SHARED_FROM: Final = 4
#: A session stays on its server, unless that is so many times as loaded as the least loaded one:
#: many chains may have one name.
_STAYS_FACTOR: Final = 2.0
#: Blocks whose branches are counted, and new chains whose server is remembered.
_BRANCHES_KEPT: Final = 16_384
_CHAINS_KEPT: Final = 256
#: Sessions whose server is remembered.
_SESSIONS_KEPT: Final = 16_384


class Placer:
    """The servers that may be written to, and what was asked about chains lately.

    What it remembers of chains is bounded, and losing it costs hits at most.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._records: list[ServerRecord] = []  # in the order of their names
        self._by_host: dict[str, list[ServerRecord]] = {}
        #: By a block: the first blocks of the chains that went on from it, up to `SHARED_FROM`.
        self._branches: Recent[bytes, tuple[bytes, ...]] = Recent(_BRANCHES_KEPT)
        #: By its first new block: where a new chain was sent.
        self._begun: Recent[bytes, str] = Recent(_CHAINS_KEPT)
        #: By session: where its last blocks were sent.
        self._sessions: Recent[str, str] = Recent(_SESSIONS_KEPT)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, record: ServerRecord) -> None:
        """From now on this server is chosen."""
        position = bisect.bisect_left(self._names, record.server)
        self._names.insert(position, record.server)
        self._records.insert(position, record)
        self._by_host.setdefault(record.registration.host, []).append(record)

    def remove(self, record: ServerRecord) -> None:
        """From now on this server is not chosen; nothing if it was not."""
        position = bisect.bisect_left(self._names, record.server)
        if position < len(self._names) and self._records[position] is record:
            del self._names[position], self._records[position]
            host = record.registration.host
            here = self._by_host[host]
            here.remove(record)
            if not here:
                del self._by_host[host]

    def rank(
        self,
        *,
        key: bytes,
        parent: bytes,
        holders: Sequence[ServerRecord],
        size: int,
        host: str,
        copies: int,
        session: str = "",
        tenant: str = "",
    ) -> list[ServerRecord]:
        """Servers for `size` bytes whose first digest is `key`, best first; `DRAWN` or a few more.

        1. Those that have the parent, its `holders`, unless many chains branch off there.
        2. Where another writer of the same chain was sent a moment ago.
        3. Where this `session` was sent before: what it leaves behind when it begins anew is known
           to be of no use only where the new chain lies.
        4. The ones to which the fewest bytes were sent lately, for their memory. One with room
           counts as less loaded, and one on the writer's `host` a little, unless it is full. What
           others have claimed counts at most as much as the mean of this `tenant`'s own claims.

        With several `copies` the best servers of different hosts come first, because all servers of
        a host fail together.
        """
        drawn = {record.server: record for record in self._draw(key, host, copies)}
        drawn.update((record.server, record) for record in holders)
        before = self._record(self._sessions.get(tenant, session) or "") if session else None
        if before is not None:
            drawn[before.server] = before
        servers = list(drawn.values())
        if len(servers) < 2:  # there is nothing to compare
            return servers
        keeping = {record.server for record in holders}
        begun = None
        if not keeping or self._branch(tenant, parent, key) >= SHARED_FROM:
            keeping = set()
            begun = self._begun.get(tenant, key)
        loads = _loads(servers, tenant, size, host)
        if begun is None and before is not None:
            stays = loads[before.server] <= _STAYS_FACTOR * min(loads.values())
            begun = before.server if stays else None

        def order(record: ServerRecord) -> tuple[bool, bool, float]:
            server = record.server
            return server not in keeping, server != begun, loads[server]

        servers.sort(key=order)  # of equal ones the first that was drawn
        if not keeping:
            self._begun.put(tenant, key, servers[0].server)
        if session:
            self._sessions.put(tenant, session, servers[0].server)
        if copies > 1:
            best_of_host = {one.registration.host: one for one in reversed(servers)}
            servers.sort(key=lambda one: best_of_host[one.registration.host] is not one)
        return servers

    def _record(self, server: str) -> ServerRecord | None:
        """The server of this name, if it may be written to."""
        position = bisect.bisect_left(self._names, server)
        found = position < len(self._names) and self._names[position] == server
        return self._records[position] if found else None

    def _draw(self, key: bytes, host: str, copies: int) -> list[ServerRecord]:
        """Candidates in an order that the key decides; a server may be drawn twice."""
        hashed = xxhash.xxh3_64_intdigest(key)
        here = self._by_host.get(host, ())
        count = len(self._records)
        wanted = max(DRAWN, 2 * copies)
        if count <= wanted:
            first = hashed % max(1, count)
            return [*here[:_LOCAL], *self._records[first:], *self._records[:first]]
        drawn = [here[(hashed + n) % len(here)] for n in range(min(_LOCAL, len(here)))]
        for _ in range(wanted):
            hashed = (hashed * 6364136223846793005 + 1442695040888963407) % 2**64
            drawn.append(self._records[(hashed >> 32) * count >> 32])
        return drawn

    def _branch(self, tenant: str, parent: bytes, first: bytes) -> int:
        """Count the chain that goes on from `parent` with `first`; SHARED_FROM or how many did."""
        if parent == ROOT:
            return 0
        firsts = self._branches.get(tenant, parent) or ()
        # Another part or writer of a chain is no branch; nor is one that is written again.
        if first not in firsts and len(firsts) < SHARED_FROM:
            firsts = (*firsts, first)
        self._branches.put(tenant, parent, firsts)
        return len(firsts)


def _loads(servers: Sequence[ServerRecord], tenant: str, size: int, host: str) -> dict[str, float]:
    """How loaded each of the servers is, as the writer of `size` bytes for this tenant sees it."""
    median = sorted([one.registration.capacity for one in servers])[(len(servers) - 1) // 2]
    believed_max = max(1.0, _CAPACITY_MEDIANS_MAX * median)
    offered_max = sum([record.offered.of(tenant) for record in servers]) / len(servers)
    placed_max = sum([record.placed.of(tenant) for record in servers]) / len(servers)
    loads = {}
    for record in servers:
        offered = record.offered.believed(tenant, offered_max)
        placed = record.placed.believed(tenant, placed_max)
        own = record.registration
        load = offered / min(max(1, own.capacity), believed_max)
        if own.capacity - record.stats.used - placed >= size:
            load /= _ROOM_FACTOR * (_LOCAL_FACTOR if own.host == host else 1.0)
        loads[record.server] = load
    return loads
