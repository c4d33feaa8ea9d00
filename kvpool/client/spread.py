"""Has servers fetch a chain before its readers come; each that has a piece feeds the next.

`SpreadPlan` decides who fetches what from whom. Here the calls are made, and the time ends
(design: movers).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from kvpool import moves
from kvpool.arguments import as_int
from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.client.spread_plan import (
    CANNOT_FETCH,
    NO_TIME,
    RECEIVERS_MAX,
    SERVER_LOST,
    Call,
    SpreadPlan,
    choose_receivers,
    cut,
    receivers_at,
)
from kvpool.errors import Forbidden, MasterLost, Overloaded, Unavailable, UsageError
from kvpool.protocols import Channel
from kvpool.types import Match, MoveStatus, Namespace, ReadStatus

#: One request to a server to fetch a piece.
_FETCH_S: Final = 5.0
#: A receiver that could fetch nothing now is asked again after so long.
_ASK_AGAIN_S: Final = 0.05


class SpreadTo(NamedTuple):
    """What `Admin.spread` has brought to one server.

    `blocks`: so many it has now, from the head of the chain on; `fetched`: blocks that it fetched
    in this call, each part counted. `problem` is empty when it has the whole chain; else `no room`,
    `no such name` (neither a server nor a host), `server lost`, `leaving`, `not reached`, `gone`,
    `corrupt`, `it cannot fetch`, or `no time was left`.
    """

    server: str
    blocks: int
    fetched: int
    problem: str


class SpreadReport(NamedTuple):
    """Of a chain's blocks the pool has the first `length`; why there are no more says `stopped`.

    One entry for each server that was to get it (design: movers).
    """

    length: int
    stopped: ReadStatus
    servers: tuple[SpreadTo, ...]

    @property
    def complete(self) -> bool:
        """Every server has all that the pool has."""
        return not any(one.problem for one in self.servers)


class Spreader(ClientExtension):
    """Spreads chains for one client. Nothing of a call is left when it ends."""

    def __init__(self, parts: ClientParts) -> None:
        self._lookup = parts.context.lookup
        self._servers = parts.context.servers
        self._counters = parts.context.counters

    async def spread(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        to: int | Sequence[str],
        deadline: float,
        report: Callable[[int, int], None] | None = None,
    ) -> SpreadReport:
        """As `Admin.spread`."""
        number = as_int(to)
        count = len(to) if isinstance(to, Sequence) and not isinstance(to, str) else number or 0
        if not 1 <= count <= RECEIVERS_MAX:
            raise UsageError(
                f"to is {to!r}, expected a number of servers or a list of names, "
                f"1 to {RECEIVERS_MAX}"
            )
        match = await self._lookup.match(namespace, chain, deadline)
        if match.stopped is ReadStatus.NO_MASTER and not match.length:
            raise MasterLost("no master answers where the chain is")
        members = await self._servers.refresh(deadline)
        problems: dict[str, str] = {}
        if number is None:
            receivers, problems = receivers_at(members, cast(Sequence[str], to))
        else:
            held = _blocks_of(match, namespace.parts)
            receivers = choose_receivers(members, held, match.length, number)
        pieces = cut(match.runs, namespace.parts, match.length)
        plan = SpreadPlan(pieces, receivers)

        def look() -> None:
            """Those that get no more do not count."""
            going_on = ("", NO_TIME)  # what is said of those that have not all of it yet
            held = [blocks for _, blocks, _, problem in plan.progress() if problem in going_on]
            if report is not None:
                report(sum(held), match.length * len(held))

        await self._run(plan, namespace, chain, deadline, look)
        brought = [SpreadTo(*one) for one in plan.progress()]
        brought += [SpreadTo(name, 0, 0, problem) for name, problem in problems.items()]
        self._counters["spread_blocks"] += sum(one.fetched for one in brought)
        return SpreadReport(match.length, match.stopped, tuple(brought))

    async def _run(
        self,
        plan: SpreadPlan,
        namespace: Namespace,
        chain: Sequence[bytes],
        deadline: float,
        look: Callable[[], None],
    ) -> None:
        """Make the calls of the plan until it is over, or until the deadline."""
        loop = asyncio.get_running_loop()
        running: list[asyncio.Task[None]] = []  # in the order in which they began
        try:
            while loop.time() < deadline:
                look()
                for call in plan.ready():
                    step = self._call(plan, call, namespace, chain, deadline)
                    running.append(loop.create_task(step))
                if not running:
                    return
                timeout = max(0.0, deadline - loop.time())
                await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in running:
                    if task.done():
                        task.result()
                running = [task for task in running if not task.done()]
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _call(
        self,
        plan: SpreadPlan,
        call: Call,
        namespace: Namespace,
        chain: Sequence[bytes],
        deadline: float,
    ) -> None:
        """One call; its answer is in the plan when this returns."""
        loop = asyncio.get_running_loop()
        part, first, end, _ = call.piece
        until = min(deadline, loop.time() + _FETCH_S)

        async def fetch(channel: Channel) -> list[MoveStatus]:
            digests = chain[first:end]
            return await moves.fetch(
                channel, namespace, part, digests, call.source, extra=True, deadline=until
            )

        try:
            statuses = await self._servers.call(call.receiver, fetch, until)
        except (Unavailable, Overloaded):
            plan.lost(call, NO_TIME if loop.time() >= deadline else SERVER_LOST)
        except Forbidden:
            plan.lost(call, CANNOT_FETCH)
        else:
            if len(statuses) != end - first:
                plan.lost(call, CANNOT_FETCH)
                return
            if MoveStatus.DONE not in statuses and not all(one.present for one in statuses):
                await asyncio.sleep(_ASK_AGAIN_S)
            plan.ended(call, statuses)


def _blocks_of(match: Match, parts: int) -> dict[str, int]:
    """How many blocks each server has, with all their parts."""
    counts: Counter[str] = Counter()
    for run in match.runs:
        held = Counter(replica.server for replica in dict.fromkeys(run.replicas))
        for server, here in held.items():
            if here >= parts:
                counts[server] += run.last + 1 - run.first
    return dict(counts)
