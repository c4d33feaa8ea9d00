"""A chain on its way to the servers where it will be read, as `pool.spread` sends it.

Who fetches which piece from whom, and how fast a server fetches, is the product's code; the bytes
take the sender's link and the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.links import QueuedLink
from kvpool.client.spread_plan import Call, SpreadPlan, cut
from kvpool.server.moves.state.fetches import FetchBudget
from kvpool.tools.dry_pool import DryPool
from kvpool.types import MoveStatus, Namespace

#: A wait for the budget is a difference of times, and may be next to nothing.
_TURN_MIN_S: Final = 1e-4
#: As `kvpool.client.spread`.
_ASK_AGAIN_S: Final = 0.05


class ServerLinks:
    """Of the servers of one pool, each direction, and how much each fetches from others."""

    def __init__(self, names: Sequence[str], bytes_s: float) -> None:
        self.sends = {name: QueuedLink(bytes_s) for name in names}
        self.receives = {name: QueuedLink(bytes_s) for name in names}
        #: A quarter of the speed that each measures.
        self.budgets = {name: FetchBudget() for name in names}


class ChainSpread:
    """One chain that goes to these servers. `moved` receives the bytes of each piece."""

    def __init__(
        self,
        pool: DryPool,
        links: ServerLinks,
        events: EventQueue,
        *,
        namespace: Namespace,
        chain: Sequence[bytes],
        receivers: Sequence[str],
        block_bytes: float,
        latency_s: float,
        moved: Callable[[float], None],
    ) -> None:
        match = pool.match(chain, namespace)
        self._pool = pool
        self._links = links
        self._events = events
        self._namespace = namespace
        self._chain = chain
        self._block_bytes = block_bytes
        self._latency_s = latency_s
        self._moved = moved
        self._plan = SpreadPlan(cut(match.runs, namespace.parts, match.length), receivers)

    def step(self) -> None:
        """Begin what can begin; the end of each call goes on."""
        for call in self._plan.ready():
            self._begin(call)

    def _begin(self, call: Call) -> None:
        budget, now = self._links.budgets[call.receiver], self._events.now
        if call.receiver not in self._pool.servers:
            self._plan.lost(call)
            self.step()
            return
        if (wait_s := budget.wait_s(now)) > 0:
            self._events.after(max(wait_s, _TURN_MIN_S), self._begin, call)
            return
        piece = call.piece
        lacks = self._pool.lacks(
            call.receiver, self._chain[piece.first : piece.end], self._namespace
        )
        size = lacks * self._block_bytes
        if not size:
            self._events.after(self._latency_s, self._ended, call, lambda: None)
            return
        price_s = budget.begin(int(size), now)
        sent = self._links.sends[call.source].take(size, now)
        received = self._links.receives[call.receiver].take(size, now)
        end = max(sent, received) + self._latency_s
        paid = partial(budget.end, price_s, int(size), int(size), end - now)
        self._moved(size)
        self._events.at(end, self._ended, call, paid)

    def _ended(self, call: Call, paid: Callable[[], None]) -> None:
        paid()
        piece, now = call.piece, self._events.now
        statuses = self._pool.fetch(
            call.receiver, call.source, self._chain, piece.first, piece.end, now, self._namespace
        )
        if call.receiver not in self._pool.servers:
            self._plan.lost(call)
        elif MoveStatus.DONE in statuses or all(one.present for one in statuses):
            self._plan.ended(call, statuses)
        else:  # the client asks again a little later
            self._events.after(_ASK_AGAIN_S, self._failed, call, statuses)
            return
        self.step()

    def _failed(self, call: Call, statuses: Sequence[MoveStatus]) -> None:
        self._plan.ended(call, statuses)
        self.step()

    def progress(self) -> Mapping[str, int]:
        """Blocks that each receiver has, from the head on."""
        return {name: length for name, length, _, _ in self._plan.progress()}
