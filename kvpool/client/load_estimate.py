"""What a reader on each of several hosts would load of a chain, and how long that takes: pure.

The sums behind `Pool.score`. It knows no clock and no socket.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvpool.client.attempts import PRIOR_FAR_RATE, PRIOR_NEAR_RATE, ReadRates
from kvpool.client.where import presence
from kvpool.types import MEMORY_TIER, HostScore, Member, Replica, TierUsage

#: Bytes per second of another tier than memory whose server reports no reads of it.
_PRIOR_TIER_RATE: Final = 1e9


class _Place(NamedTuple):
    """Where some blocks are for the readers of some hosts."""

    near: bool
    tier: str
    server: str


class LoadEstimate:
    """One chain, run after run. A host in which no server has a block reads it from another one,
    and all such hosts have the same sum: a run costs by its replicas, not by the hosts."""

    def __init__(self, parts: int, members: Mapping[str, Member]) -> None:
        self._parts = parts
        self._members = members
        self._far: Counter[_Place] = Counter()  # for a host that has no server
        self._here: defaultdict[str, Counter[_Place]] = defaultdict(Counter)  # what differs there
        self._all_far: HostScore | None = None

    def add(self, replicas: Sequence[Replica], blocks: int) -> None:
        """So many blocks, one after the other, have these replicas."""
        hosts: defaultdict[str, set[str]] = defaultdict(set)
        for replica in replicas:
            member = self._members.get(replica.server)
            if member is not None and member.host:
                hosts[member.host].add(replica.server)
        far = self._place(replicas, frozenset())
        if far is None:
            return
        self._far[far] += blocks
        for host, servers in hosts.items():
            here = self._place(replicas, servers)
            if here is not None and here.near:
                self._here[host][here] += blocks
                self._here[host][far] -= blocks

    def score(self, host: str, rates: ReadRates, block_bytes: float | None) -> HostScore:
        """As `HostScore`; `block_bytes` of all parts, None to estimate them from the servers'."""
        if host not in self._here:
            if self._all_far is None:
                self._all_far = self._sum(host, Counter(self._far), rates, block_bytes)
            return self._all_far._replace(host=host)
        places = Counter(self._far)
        places.update(self._here[host])
        return self._sum(host, places, rates, block_bytes)

    def _sum(
        self,
        host: str,
        places: Mapping[_Place, int],
        rates: ReadRates,
        block_bytes: float | None,
    ) -> HostScore:
        tiers: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        seconds = size = 0.0
        measured = True
        for place, blocks in places.items():
            if blocks <= 0:
                continue
            tiers[place.near][place.tier] += blocks
            moved = blocks * (block_bytes or self._block_bytes(place))
            size += moved
            rate = rates.rate(place.near)
            measured &= rate is not None
            seconds += moved / (rate or (PRIOR_NEAR_RATE if place.near else PRIOR_FAR_RATE))
            if place.tier != MEMORY_TIER:
                rate = self._tier_rate(place)
                measured &= rate is not None
                seconds += moved / (rate or _PRIOR_TIER_RATE)
        return HostScore(
            host,
            tiers[True].total(),
            tiers[False].total(),
            dict(tiers[True]),
            dict(tiers[False]),
            round(size),
            seconds,
            measured and size > 0,
        )

    def _place(self, replicas: Sequence[Replica], near: set[str] | frozenset[str]) -> _Place | None:
        """Where a reader finds the block, and one server that has it in that tier."""
        where = presence(replicas, self._parts, near)
        if where is None:
            return None
        for replica in replicas:
            if replica.tier == where.tier and (not where.near or replica.server in near):
                return _Place(where.near, where.tier, replica.server)
        return None

    def _block_bytes(self, place: _Place) -> float:
        """The mean of what that server has in that tier, perhaps of several models; where its last
        heartbeat came before its first block, the mean of what all servers have."""
        usage = self._usage(place)
        if usage is not None and usage.blocks:
            return self._parts * usage.used / usage.blocks
        everything = [one for member in self._members.values() for one in member.stats.usage]
        blocks = sum(one.blocks for one in everything)
        return self._parts * sum(one.used for one in everything) / blocks if blocks else 0.0

    def _tier_rate(self, place: _Place) -> float | None:
        """Bytes per second while that tier was read, since the server's start."""
        usage = self._usage(place)
        return (
            usage.read_bytes / usage.read_s if usage and usage.read_bytes and usage.read_s else None
        )

    def _usage(self, place: _Place) -> TierUsage | None:
        member = self._members.get(place.server)
        usages = member.stats.usage if member is not None else ()
        return next((one for one in usages if one.name == place.tier), None)
