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
    """Chains that are to come up, at most `limit`, of each tenant its share. They take turns, so
    that a long one does not keep the others waiting; each leaves at its time at the latest."""

    def __init__(self, limit: int) -> None:
        self._shares = Shares(limit)
        self._chains: deque[tuple[Chain, float]] = deque()

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, chain: Chain, until: float) -> bool:
        """False, and nothing is added, when its tenant has as many as it may have."""
        if not self._shares.take(tenant_of(chain.namespace.name)):
            return False
        self._chains.append((chain, until))
        return True

    def next(self, now: float) -> Chain | None:
        """The chain whose turn it is, if it still has blocks and time; the others move up."""
        for _ in range(len(self._chains)):
            chain, until = self._chains.popleft()
            if chain and now < until:
                self._chains.append((chain, until))
                return chain
            self._shares.give_back(tenant_of(chain.namespace.name))
        return None
