"""Chains that wait to come up from a slower tier."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace


class Chain(NamedTuple):
    """Blocks of one namespace and part, the head first."""

    namespace: Namespace
    part: int
    digests: deque[bytes]

    def __bool__(self) -> bool:
        return bool(self.digests)


class PrefetchQueue:
    """Chains that are to come up, at most `limit`, of each tenant its share. Tenants take turns,
    and the chains of each, so that a long one, or many of one tenant, do not keep the others
    waiting; each leaves at its time at the latest."""

    def __init__(self, limit: int) -> None:
        self._shares = Shares(limit)
        #: By tenant, in the order of their turns.
        self._lines: dict[str, deque[tuple[Chain, float]]] = {}

    def __len__(self) -> int:
        return self._shares.used

    def add(self, chain: Chain, until: float) -> bool:
        """False, and nothing is added, when its tenant has as many as it may have."""
        if not self._shares.take(tenant := tenant_of(chain.namespace.name)):
            return False
        self._lines.setdefault(tenant, deque()).append((chain, until))
        return True

    def next(self, now: float) -> Chain | None:
        """The chain whose turn it is, if it still has blocks and time; the others move up."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            del self._lines[tenant]
            chain, until = line.popleft()
            waits = bool(chain) and now < until
            if waits:
                line.append((chain, until))
            else:
                self._shares.give_back(tenant)
            if line:
                self._lines[tenant] = line  # behind the others
            if waits:
                return chain
        return None
