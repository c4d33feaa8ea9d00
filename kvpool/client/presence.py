"""Which copies of a block count for a process, and how fast they are. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

from kvpool.types import Presence, Replica

#: Tiers from the fastest; one of another package counts as the slowest.
_TIERS: Final = ("hbm", "dram", "nvme")
MEMORY_TIERS: Final = _TIERS[:2]  # nothing of them is left when their server has ended


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
