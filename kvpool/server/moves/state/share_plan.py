"""Which chains a full server hands over to servers that have room, and in which order.

Each chain has one server among all, by the hash of its first block: rendezvous hashing, weighted by
memory (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005). A chain may go
to that server and to no other, so a server that joins is given its share of the chains of every
age, and nothing goes to and fro. Pure: `balancer.py` asks masters and other servers.
(design: movers)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Protocol

import xxhash

from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.types import Namespace

#: A block from which so many chains go on is part of none of them: it stays where it is, and
#: clients have it copied to where such chains begin (design: placement).
SHARED_FROM: Final = 4
#: How far up a chain is followed.
_ANCESTORS_MAX: Final = 65_536
#: Chains that one plan remembers: those that were used last.
_CHAINS_MAX: Final = 4096
#: Memory is a claim: more than so many times the median is not believed, as for placement.
_MEDIANS_MAX: Final = 4.0
#: A server whose turn is so improbable is not compared with all the others.
_HOPELESS: Final = 20.0


class ChainIndex(Protocol):
    """The blocks of a server, as `TieredStore` has them."""

    def peek(self, namespace: Namespace, part: int, digest: bytes) -> Entry | None:
        """The sealed block, or None."""

    def children(self, entry: Entry) -> int:
        """How many blocks here go on from this one."""

    def is_over(self, entry: Entry) -> bool:
        """By the hints no session uses the block again."""


class ChainOwners:
    """Which server each chain belongs to. `capacities` are bytes, by the name of the server."""

    def __init__(self, capacities: Mapping[str, int]) -> None:
        median = sorted(capacities.values())[(len(capacities) - 1) // 2] if capacities else 0
        believed_max = max(1.0, _MEDIANS_MAX * median)
        self._weights = {
            server: min(max(1, size), believed_max) for server, size in capacities.items()
        }
        self._total = sum(self._weights.values())

    def owner(self, key: bytes, among: Collection[str]) -> str:
        """The server of the chain whose first block is `key`, if it is one of these; or nothing.

        Costs little while `among` are few of many servers.
        """
        best, turn = "", _HOPELESS / self._total if self._total else 0.0
        for server in sorted(among):
            own = self._turn(key, server)
            if own < turn:
                best, turn = server, own
        if best and any(self._turn(key, one) < turn for one in self._weights if one not in among):
            return ""
        return best

    def _turn(self, key: bytes, server: str) -> float:
        """The first of all servers by this number, of which larger ones get lower numbers."""
        hashed = xxhash.xxh3_64_intdigest(key, xxhash.xxh3_64_intdigest(server.encode()))
        return -math.log((hashed + 0.5) / 2**64) / self._weights[server]


class SharePlan:
    """The chains of this server that belong to servers with room, those used last first.

    `add` is called with the end of each chain, which `is_end` tells and `climb` walks up; `chains`
    returns what was added, in its order. The caller takes these steps, so that none is long.
    """

    def __init__(self, store: ChainIndex, shares: ChainOwners, targets: Collection[str]) -> None:
        self._store = store
        self._shares = shares
        self._targets = targets
        self._ends: list[tuple[int, int, Entry, str]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def is_end(self, entry: Entry) -> bool:
        """Whether a chain ends here that may be read again: nobody reads the blocks of sessions
        that have ended, and of superseded branches, so these stay."""
        return not self._store.children(entry) and not self._store.is_over(entry)

    def add(self, end: Entry, first: Entry) -> None:
        """A chain, whose first block decides where it belongs."""
        target = self.target(first)
        if target:
            self._ends.append((-end.last_used, end.generation, end, target))
            if len(self._ends) >= 2 * _CHAINS_MAX:
                self._ends.sort()
                del self._ends[_CHAINS_MAX:]

    def target(self, first: Entry) -> str:
        """The server with room to which the chain with this first block belongs; or nothing."""
        return self._shares.owner(first.digest, self._targets)

    def chains(self) -> Iterator[tuple[str, Entry]]:
        """The end of each chain that is still here, with the server that it belongs to."""
        for _, _, end, target in sorted(self._ends)[:_CHAINS_MAX]:
            if end.state is State.STORED and self.is_end(end):
                yield target, end

    def climb(self, end: Entry) -> Iterator[Entry]:
        """The blocks of a chain from its end up to where many chains branch off.

        The store may change between two blocks.
        """
        above: Entry | None = end
        for _ in range(_ANCESTORS_MAX):
            if above is None or self._store.children(above) >= SHARED_FROM:
                return
            yield above
            above = self._store.peek(above.index.namespace, above.index.part, above.parent)
