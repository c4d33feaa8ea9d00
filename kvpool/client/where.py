"""Where blocks are, as one process sees it: for observers, who read none."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence, Set
from typing import Final

from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.client.servers import REFRESH_S
from kvpool.types import Namespace, Presence, Replica

#: Tiers from the fastest; one of another package counts as the slowest.
_TIERS: Final = ("hbm", "dram", "nvme")


class Observer(ClientExtension):
    def __init__(self, parts: ClientParts) -> None:
        self._lookup = parts.context.lookup
        self._servers = parts.context.servers

    async def where(
        self, namespace: Namespace, digests: Sequence[bytes], deadline: float
    ) -> list[Presence | None]:
        """As `Pool.where`."""
        answers: list[Presence | None] = []
        async for count, runs in self._lookup.pages(namespace, digests, deadline, observes=True):
            named = {replica.server for run in runs for replica in run.replicas}
            near = await self._near(named, deadline)
            page: list[Presence | None] = [None] * count
            for run in runs:
                here = presence(run.replicas, namespace.parts, near)
                page[run.first : run.last + 1] = [here] * (run.last + 1 - run.first)
            answers += page
        return answers

    async def _near(self, named: Set[str], deadline: float) -> frozenset[str]:
        """Those of them that are on this host. Asks a master about unknown ones."""
        servers, now = self._servers, asyncio.get_running_loop().time()
        if now >= servers.refreshed_at + REFRESH_S and not named <= servers.known.keys():
            await servers.refresh(deadline)
        return frozenset([one for one in named if not servers.standing(one).far])


def presence(replicas: Sequence[Replica], parts: int, near: Container[str]) -> Presence | None:
    """Where a block with these replicas is; None when a part of it is missing.

    `near` are the servers on the host that asks.
    """
    here = tier_of((one for one in replicas if one.server in near), parts)
    if here:
        return Presence(tuple(replicas), True, here)
    there = tier_of(replicas, parts)
    return Presence(tuple(replicas), False, there) if there else None


def tier_of(replicas: Iterable[Replica], parts: int) -> str:
    """The tier of the slowest of the parts, each in its fastest copy; empty when one is missing."""
    best: dict[int, str] = {}
    for one in replicas:
        before = best.get(one.part)
        if before is None or _rank(one.tier) < _rank(before):
            best[one.part] = one.tier
    return max(best.values(), key=_rank) if len(best) == parts else ""


def _rank(tier: str) -> int:
    return _TIERS.index(tier) if tier in _TIERS else len(_TIERS)
