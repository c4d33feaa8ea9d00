"""Which chains a full server hands over to servers that have room, and in which order.

Each chain has one server among all, by the hash of its first block: rendezvous hashing, weighted by
memory (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005). A chain may go
to that server and to no other, so a server that joins is given its share of the chains of every
age, and nothing goes to and fro. Pure: `hand_over.py` carries it out (design: movers).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Final

import xxhash

from kvpool.server.moves.state.wants import (
    PAUSE,
    BlockName,
    MovePlanner,
    MoveView,
    Staying,
    Want,
    Wants,
    in_stretches,
)
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.server.state.extent_state import State
from kvpool.types import FULL_SHARE, ROOM_SHARE

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
#: A plan looks at every block: it is made again after this time at the earliest, after so many
#: times the time that it took, and less often while nothing comes of it.
_PLAN_GAP_S: Final = 10.0
_PLAN_GAP_MAX_S: Final = 640.0
_PLAN_SHARE: Final = 50
#: A master may know of room before others do.
_NO_TARGET_S: Final = 0.5
#: Blocks that are looked at in one turn of the loop.
_STEP: Final = 512
#: Of a server: a larger chain stays. It would leave and come back with little use between.
CHAIN_SHARE: Final = 1 / 8


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

    def __init__(self, store: Blocks, shares: ChainOwners, targets: Collection[str]) -> None:
        self._store = store
        self._shares = shares
        self._targets = targets
        self._ends: list[tuple[int, int, Entry, str]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def is_end(self, entry: Entry) -> bool:
        """Whether a chain ends here that may be read again: nobody reads the blocks of sessions
        that have ended, and of superseded branches, so these stay."""
        policy = self._store.stores[entry.index.tier].extents.policy
        return not _children(self._store, entry) and not policy.is_over(entry)

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
            if above is None or _children(self._store, above) >= SHARED_FROM:
                return
            yield above
            above = self._store.peek(above.index.namespace, above.index.part, above.parent)


class BalancePlanner(MovePlanner):
    """Makes room here by giving other servers, which have room, their share of the chains.

    | state   | means                                            | next state                     |
    |---------|--------------------------------------------------|--------------------------------|
    | idle    | this server is not full, or all others are, too  | moving: a master says that one |
    |         |                                                  | has room, and this one is full |
    | moving  | chains are fetched from here, and forgotten      | idle: it is not full any more, |
    |         |                                                  | or no chain belongs elsewhere  |

    So as much is moved as clients write here, and not faster than the receivers' budgets allow.
    """

    forgets = True

    def __init__(self, store: Blocks) -> None:
        self._store = store
        self._plan = SharePlan(store, ChainOwners({}), ())
        self._chains = self._plan.chains()
        self._asked = False
        self._gap_s = _PLAN_GAP_S
        self._plan_not_before = -math.inf
        self._room = RoomOfOthers()
        self._missing: list[BlockName] = []  # of the last want
        self._steps = 0

    def others_have_room(self) -> None:
        """A master says that this server is full, and another one is not."""
        self._asked = True

    def due_at(self) -> float:
        return -math.inf if self._asked else math.inf

    def wants(self, view: MoveView) -> Wants:
        self._asked = False
        while is_full(self._store):
            found = next(self._chains, None)
            if found is None:
                if view.now < self._plan_not_before:
                    return
                yield from self._make_plan(view)
                if not len(self._plan):
                    return
                continue
            target, end = found
            chain = yield from self._chain(end)
            # Blocks above it may have come or gone since: then it begins, and belongs, elsewhere.
            if chain and self._plan.target(chain[0]) == target:
                yield from self._hand_over(target, chain, view)
            yield PAUSE

    def missing(
        self,
        entries: Mapping[BlockName, Entry],
        holders: Mapping[BlockName, set[str]],
        view: MoveView,
    ) -> list[BlockName]:
        self._missing = super().missing(entries, holders, view)
        return list(self._missing)

    def targets(self, placed: Sequence[str], view: MoveView) -> Sequence[str]:
        there = ((one, view.staying[one]) for one in super().targets(placed, view))
        return [name for name, one in there if one.used < FULL_SHARE * one.capacity]

    def came(self, name: BlockName, target: str, *, moved: bool) -> None:
        if moved and (entry := self._store.peek(*name)) is not None:
            self._missing.remove(name)
            self._room.sent(target, entry.size)
            self._gap_s = _PLAN_GAP_S

    # --- inside ----------------------------------------------------------------------------------

    def _make_plan(self, view: MoveView) -> Wants:
        """Look which chains belong to servers with room."""
        began, staying = view.now, view.staying
        self._plan_not_before = began + _PLAN_GAP_MAX_S  # if this fails
        targets = {
            name for name in view.others if staying[name].used < ROOM_SHARE * staying[name].capacity
        }
        shares = ChainOwners({name: one.capacity for name, one in staying.items()})
        plan = self._plan = SharePlan(self._store, shares, targets)
        if not targets:
            self._plan_not_before = began + _NO_TARGET_S
            return
        for step in self._store.inventory_steps():
            for stretch in step:
                is_cold = stretch.tier == self._store.cold_tier
                for digest in () if is_cold else stretch.digests:
                    self._steps += 1
                    if self._steps % _STEP == 0:
                        yield PAUSE
                    entry = self._store.peek(stretch.namespace, stretch.part, digest)
                    if entry is not None and plan.is_end(entry):
                        chain = yield from self._chain(entry)
                        plan.add(entry, chain[0])
        gap_s = max(self._gap_s, _PLAN_SHARE * (view.now - began))
        self._plan_not_before = view.now + gap_s
        self._gap_s = min(_PLAN_GAP_MAX_S, 2 * self._gap_s)  # until a chain has moved
        self._chains = plan.chains()

    def _chain(self, end: Entry) -> Generator[Want, None, list[Entry]]:
        """The chain that ends here, head first."""
        chain = []
        for entry in self._plan.climb(end):
            chain.append(entry)
            if len(chain) % _STEP == 0:
                yield PAUSE
        return chain[::-1]

    def _hand_over(self, target: str, chain: Sequence[Entry], view: MoveView) -> Wants:
        """Nothing of a chain so large that `target` would evict for it, or be the fuller one then.
        Of another one, what only this server has, until something does not come."""
        size = sum(entry.size for entry in chain)
        info = view.staying.get(target)
        if info is not None and self._room.fits(target, info, size, self._store):
            for stretch in in_stretches(chain):
                self._missing = []
                yield Want(stretch, target)
                if self._missing:
                    return


class RoomOfOthers:
    """How much other servers can take: what masters know of them, and what was sent since."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, int, int]] = {}  # epoch and use as known, bytes since

    def fits(self, server: str, info: Staying, size: int, store: Blocks) -> bool:
        """Whether so many bytes are a small share of this server, and make it neither full, nor
        fuller than the `store` that they come from is without them."""
        if size > CHAIN_SHARE * info.capacity:
            return False
        known = info.epoch, info.used
        *before, sent = self._sent.get(server, (*known, 0))
        if tuple(before) != known:  # a heartbeat has come since
            sent = 0
        self._sent[server] = (*known, sent)
        here = store.backing.allocator.capacity
        fill = (info.used + sent + size) / max(1, info.capacity)
        return fill <= min(FULL_SHARE, (store.used_bytes - size) / here)

    def sent(self, server: str, size: int) -> None:
        """So many bytes were sent there, after a call of `fits`."""
        epoch, used, sent = self._sent[server]
        self._sent[server] = epoch, used, sent + size


def is_full(store: Blocks) -> bool:
    """Whether a server is to hand over chains, if others have room."""
    return store.used_bytes >= FULL_SHARE * store.backing.allocator.capacity


def _children(store: Blocks, entry: Entry) -> int:
    """How many blocks of one tier, that with the most of them, go on from this one."""
    index = entry.index
    found = (one.index.peek(index.namespace, index.part, entry.digest) for one in store.online)
    return max((one.children for one in found if one is not None), default=0)
