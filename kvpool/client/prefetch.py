"""Asks servers to bring the blocks of a chain into memory before they are read (design: promotion).

No call waits for a disk or for a copy: a server answers at once and goes on by itself, and copies
near the reader are spread in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from kvpool import logs
from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.client.servers import gather_errors
from kvpool.client.spread import Spreader
from kvpool.errors import KvpoolError, MasterLost, Overloaded
from kvpool.moves import moved
from kvpool.protocols import Channel
from kvpool.types import BATCH_BLOCKS_MAX, Match, MoveStatus, Namespace, ReadStatus
from kvpool.wire import messages as wire
from kvpool.wire.moves import Prefetch

log = logs.get("kvpool.client")

#: Chains that are copied near their readers at the same time, and the time of each.
_COPIES_MAX: Final = 4
_COPY_S: Final = 30.0

#: How a prefetch calls what it finds, in counters and tables.
WORDS: Final = {
    MoveStatus.HERE: "in memory",
    MoveStatus.IN_PROGRESS: "coming",
    MoveStatus.REFUSED: "refused",
    MoveStatus.GONE: "gone",
    MoveStatus.LOST: "lost",
}

_Wanted = dict[tuple[str, int], list[int]]


class PrefetchCalls(ClientExtension):
    """The prefetches of one client."""

    def __init__(self, parts: ClientParts) -> None:
        context = parts.context
        self._lookup = context.lookup
        self._servers = context.servers
        self._spreader = Spreader(parts)
        self._counters = context.counters
        self._copying: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End the copies that are being made. Idempotent."""
        for task in self._copying:
            task.cancel()
        if self._copying:
            await asyncio.wait(self._copying)

    async def prefetch(
        self,
        namespace: Namespace,
        chain: Sequence[bytes],
        near: str,
        match: Match | None,
        deadline: float,
    ) -> list[MoveStatus]:
        """As `Pool.prefetch`."""
        if match is None:
            match = await self._lookup.match(namespace, chain, deadline)
        no_master = match.stopped is ReadStatus.NO_MASTER
        statuses = [MoveStatus.LOST if no_master else MoveStatus.GONE] * len(chain)
        there = await self._servers_at(near, deadline) if near else set[str]()
        wanted, far = self._wanted(namespace, match, there, statuses)
        if far:
            copied = self._copy(namespace, chain[: match.length], near)
            for position in far:
                statuses[position] = MoveStatus.IN_PROGRESS if copied else MoveStatus.REFUSED
        answers = await gather_errors(
            [
                self._ask(server, namespace, part, [chain[i] for i in positions], deadline)
                for (server, part), positions in wanted.items()
            ]
        )
        for positions, answer in zip(wanted.values(), answers, strict=True):
            if isinstance(answer, KvpoolError):
                refused = isinstance(answer, Overloaded)
                lost = MoveStatus.REFUSED if refused else MoveStatus.LOST
                answer = [lost] * len(positions)
            for position, status in zip(positions, answer, strict=True):
                statuses[position] = max(statuses[position], status)  # of a block's parts
        for status in statuses:
            self._counters["prefetch_" + WORDS.get(status, status.label).replace(" ", "_")] += 1
        return statuses

    async def _servers_at(self, near: str, deadline: float) -> set[str]:
        """The living servers that `near` names: one by its id, or those of a host."""
        with contextlib.suppress(MasterLost):
            members = await self._servers.refresh(deadline)
            return {one.server for one in members if one.alive and near in (one.server, one.host)}
        return set()

    def _wanted(
        self,
        namespace: Namespace,
        match: Match,
        near: Collection[str],
        statuses: list[MoveStatus],
    ) -> tuple[_Wanted, list[int]]:
        """Whom to ask for which positions: the server that a reader would ask, for each part that
        no server has in memory; and the positions that the servers `near` do not have."""
        wanted: _Wanted = defaultdict(list)
        far: list[int] = []
        parts = set(range(namespace.parts))
        for run in match.runs:
            positions = range(run.first, min(run.last + 1, len(statuses)))
            if near:
                here = [replica for replica in run.replicas if replica.server in near]
                if {replica.part for replica in here} != parts:
                    far += positions
                    continue
                run = run._replace(replicas=tuple(here))
            for position in positions:
                statuses[position] = MoveStatus.HERE
            for part in parts - run.parts_in_memory():
                servers = self._servers.rank(r.server for r in run.replicas if r.part == part)
                if servers:
                    wanted[servers[0], part] += positions
        return wanted, far

    def _copy(self, namespace: Namespace, chain: Sequence[bytes], near: str) -> bool:
        """Have a server there fetch what it lacks of a chain, in the background; False when as many
        chains are copied as may be."""
        if len(self._copying) >= _COPIES_MAX:
            return False
        loop = asyncio.get_running_loop()

        async def copy() -> None:
            try:
                await self._spreader.spread(namespace, chain, [near], loop.time() + _COPY_S)
            except MasterLost as error:
                log.debug("a chain is not copied", near=near, why=str(error))

        task = loop.create_task(copy())
        self._copying.add(task)
        task.add_done_callback(self._copied)
        return True

    def _copied(self, task: asyncio.Task[None]) -> None:
        self._copying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a chain was not copied", why=repr(error))

    async def _ask(
        self,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        deadline: float,
    ) -> list[MoveStatus]:
        statuses: list[MoveStatus] = []
        for first in range(0, len(digests), BATCH_BLOCKS_MAX):
            batch = digests[first : first + BATCH_BLOCKS_MAX]

            async def prefetch(
                channel: Channel, batch: Sequence[bytes] = batch
            ) -> list[MoveStatus]:
                message = Prefetch(*wire.keys_of(namespace, batch), part)
                answer = await channel.request(message, wire.StatusReply, deadline=deadline)
                return moved(answer, len(batch))

            statuses += await self._servers.call(server, prefetch, deadline)
        return statuses
