"""A server that is drained: others fetch its blocks before it leaves.

Which blocks go, in which order, where placement wants them, what counts as safe and how fast each
receiver fetches is the product's code; the bytes take the links of both servers. The passes are
those of `kvpool.server.moves.drainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.spreads import ServerLinks
from kvpool.server.moves.state.drain_plan import DrainPlan, HandedOver
from kvpool.server.moves.state.wants import STRETCH_BYTES, name_of
from kvpool.server.state.entry import Entry
from kvpool.tools.dry_pool import DryPool
from kvpool.types import MoveStatus, ReadStatus

#: As `kvpool.server.moves.drainer`.
_STRETCHES: Final = 2
_PASS_GAP_S: Final = 0.5
#: A wait for the budget is a difference of times, and may be next to nothing.
_TURN_MIN_S: Final = 1e-4


class ServerDrain:
    """Of one server. It calls `over` when nothing is left, or after `within_s`; `moved` receives
    the bytes of each piece."""

    def __init__(
        self,
        pool: DryPool,
        name: str,
        links: ServerLinks,
        events: EventQueue,
        *,
        block_bytes: float,
        latency_s: float,
        within_s: float,
        moved: Callable[[float], None],
        over: Callable[[], None],
    ) -> None:
        self.handed = HandedOver()
        self._pool = pool
        self._name = name
        self._store = pool.servers[name].store
        self._links = links
        self._events = events
        self._block_bytes = block_bytes
        self._latency_s = latency_s
        self._until = events.now + within_s
        self._moved = moved
        self._over = over
        self._pieces: Iterator[Sequence[Entry]] = iter(())
        self._running = 0

    def begin(self) -> None:
        """From now on nothing new is placed there."""
        self._pool.drain(self._name, self._events.now)
        self._events.at(self._until, self._time_is_over)
        self._pass()

    # --- inside --------------------------------------------------------------------------

    @property
    def _is_here(self) -> bool:
        server = self._pool.servers.get(self._name)
        return server is not None and server.store is self._store

    def _time_is_over(self) -> None:
        if self._is_here:
            self._over()

    def _pass(self) -> None:
        """Hand over every block that is not safe."""
        if not self._is_here:
            return
        self.handed.take_problems()
        living = self._living()
        plan = DrainPlan(self._store.peek)
        for step in self._store.inventory_steps():
            for stretch in step:
                if stretch.status is ReadStatus.HIT:
                    namespace, part = stretch.namespace, stretch.part
                    found = (self._store.peek(namespace, part, one) for one in stretch.digests)
                    here = [entry for entry in found if entry is not None]
                    plan.add([one for one in here if not self.handed.is_safe(name_of(one), living)])
        if not plan.blocks:
            self._over()
            return
        self._pieces = self._cut(plan)
        self._running = _STRETCHES
        for _ in range(_STRETCHES):
            self._next()

    def _cut(self, plan: DrainPlan) -> Iterator[Sequence[Entry]]:
        """A stretch of the plan has so many blocks as if each had its real size."""
        blocks = max(1, int(STRETCH_BYTES / self._block_bytes))
        for stretch in plan.stretches():
            for first in range(0, len(stretch), blocks):
                yield stretch[first : first + blocks]

    def _living(self) -> set[str]:
        return {name for name, one in self._pool.servers.items() if not one.draining}

    def _next(self) -> None:
        """Begin with the next piece that another server has to fetch."""
        while self._is_here and (piece := next(self._pieces, None)) is not None:
            living, wanted = self._living(), []
            for entry in piece:
                name = name_of(entry)
                holders = self._pool.holders(name.namespace, name.digest) & living
                if holders:
                    self.handed.safe(name, min(holders), entry.size, moved=False)
                elif self._store.peek(*name) is entry:
                    wanted.append(entry)
            if wanted:
                self._offer(wanted, self._pool.drain_targets(wanted))
                return
        self._running -= 1
        if not self._running:
            self._events.after(_PASS_GAP_S, self._pass)

    def _offer(self, entries: Sequence[Entry], targets: Sequence[str]) -> None:
        """Have the first target fetch them, and the others what it does not take."""
        if not targets or not entries:
            for entry in entries:
                self.handed.left(name_of(entry), "no room", entry.size)
            self._next()
            return
        now, target = self._events.now, targets[0]
        budget = self._links.budgets[target]
        if (wait_s := budget.wait_s(now)) > 0:
            self._events.after(max(wait_s, _TURN_MIN_S), self._offer, entries, targets)
            return
        size = len(entries) * self._block_bytes
        price_s = budget.begin(int(size), now)
        sent = self._links.sends[self._name].take(size, now)
        received = self._links.receives[target].take(size, now)
        end = max(sent, received) + self._latency_s
        paid = partial(self._paid, target, price_s, int(size), end - now)
        self._events.at(end, self._fetched, entries, targets, paid)

    def _fetched(
        self, entries: Sequence[Entry], targets: Sequence[str], paid: Callable[[int], None]
    ) -> None:
        if not self._is_here:
            return
        first, target = entries[0], targets[0]
        # With its parent before it: a server that fetches is told where a chain goes on.
        chain = [first.parent, *(entry.digest for entry in entries)]
        namespace, now = first.index.namespace, self._events.now
        statuses = self._pool.fetch(target, self._name, chain, 1, len(chain), now, namespace)
        left = []
        for entry, status in zip(entries, statuses, strict=True):
            if status.present:
                moved = status is MoveStatus.DONE
                self.handed.safe(name_of(entry), target, entry.size, moved=moved)
            elif self._store.peek(*name_of(entry)) is not None:
                left.append(entry)
        size = statuses.count(MoveStatus.DONE) * self._block_bytes
        paid(int(size))
        self._moved(size)
        if left:
            self._offer(left, targets[1:])
        else:
            self._next()

    def _paid(self, target: str, price_s: float, size: int, seconds: float, moved: int) -> None:
        """What a receiver refuses it does not receive, and gets back what it had planned for it."""
        self._links.budgets[target].end(price_s, size, moved, seconds)
