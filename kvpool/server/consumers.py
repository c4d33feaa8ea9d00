"""Who has what of this server, and what its readers get: by tenant, namespace and program.

Bytes come from the accounts and indexes of the stores, which count them anyway. Reads are counted
here, once for each call. All lists are bounded, and what does not fit is summed as OTHERS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final, TypeAlias
from zlib import crc32

from kvpool.server.state.blocks import Blocks
from kvpool.server.state.quota import TenantAccount
from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import NAME_MAX, OTHERS, Consumer, Namespace, Pin

#: Names of each kind whose reads are counted apart; no tenant has all of them.
NAMES_MAX: Final = 1024
#: Indexes of a tier whose bytes are listed by namespace; a look must not take long.
_INDEXES_MAX: Final = 2048
#: Consumers of each kind that one heartbeat names: those that have most.
_SHOWN: Final[Mapping[str, int]] = {"tenant": 16, "namespace": 8, "program": 8}

#: Bytes by tier and name.
_Sizes: TypeAlias = dict[str, Mapping[str, int]]


class _Reads:
    """What the readers of one consumer got."""

    __slots__ = ("bytes", "hits", "missed")

    def __init__(self) -> None:
        self.hits = self.bytes = self.missed = 0

    def add(self, other: _Reads) -> None:
        self.hits += other.hits
        self.bytes += other.bytes
        self.missed += other.missed


class Consumers:
    """Counts reads, and lists the consumers of a server."""

    def __init__(self, store: Blocks, tier_names: Sequence[str]) -> None:
        self._store = store
        self._tier_names = tier_names
        self._reads: dict[str, dict[str, _Reads]] = {kind: {} for kind in _SHOWN}
        self._names = {kind: Shares(NAMES_MAX - 1) for kind in _SHOWN}  # OTHERS is one

    def read(
        self, namespace: Namespace, last: Pin | None, hits: int, size: int, missed: int
    ) -> None:
        """A call got `hits` blocks of `size` bytes, `last` the last of them, and missed others."""
        known = bool(hits)
        names = {"tenant": tenant_of(namespace.name), "namespace": namespace.name}
        if last is not None and last.extent is not None:
            store = self._store.front if last.tier is None else self._store.stores[last.tier]
            entry = store.extents.blocks_at.get(last.extent.offset)
            session = entry.session if entry is not None else None
            program = session.program if session is not None else ""
            if program or self._reads["program"]:  # what is of none, too, once there are programs
                names["program"] = program
        for kind, name in names.items():
            reads = self._of(kind, name, new=known)
            reads.hits += hits
            reads.bytes += size
            reads.missed += missed

    def report(self) -> list[Consumer]:
        """The largest consumers of each kind, and the sum of the others."""
        of_tenants, of_namespaces, of_programs = _Sizes(), _Sizes(), _Sizes()
        for tier, store in zip(self._tier_names, self._store.stores, strict=True):
            policy = store.extents.policy
            tenants = {account.name: account.used for account in policy.accounts}
            namespaces: Counter[str] = Counter()
            for index in islice(store.index.by_part.values(), _INDEXES_MAX):
                namespaces[index.namespace.name] += index.used
            if rest := sum(tenants.values()) - sum(namespaces.values()):
                namespaces[OTHERS] += rest
            of_tenants[tier], of_namespaces[tier] = tenants, namespaces
            of_programs[tier] = policy.bytes_of_programs()
        accounts = self._store.backing.extents.policy.accounts
        evicted = {one.name: one for one in accounts if isinstance(one, TenantAccount)}
        return [
            *self._largest("tenant", of_tenants, evicted),
            *self._largest("namespace", of_namespaces, {}),
            *self._largest("program", of_programs, {}),
        ]

    # --- inside ----------------------------------------------------------------------------------

    def _of(self, kind: str, name: str, *, new: bool) -> _Reads:
        """Where reads of this name are counted. Only hits make a new name: anybody may ask for
        blocks of a name that nobody has. A tenant has its share of the names."""
        found = self._reads[kind]
        reads = found.get(name)
        if reads is None:
            if not new or not self._names[kind].take(tenant_of(name)):
                name = OTHERS
            reads = found.setdefault(name, _Reads())
        return reads

    def _largest(
        self, kind: str, tiers: _Sizes, accounts: Mapping[str, TenantAccount]
    ) -> list[Consumer]:
        """There may be thousands: of those that are not shown only sums are taken."""
        reads, total, nothing = self._reads[kind], dict[str, int](), _Reads()
        for sizes in tiers.values():
            for name, size in sizes.items():
                total[name] = total.get(name, 0) + size
        if not (total or reads or accounts):
            return []
        names = (total.keys() | reads.keys()) - {OTHERS}
        weights = [(total.get(name, 0), reads.get(name, nothing).bytes, name) for name in names]
        shown = [name for *_, name in nlargest(_SHOWN[kind], weights)]
        found = []
        rest, evicted = _Reads(), sum(one.evicted for one in accounts.values())
        left = {tier: sum(sizes.values()) for tier, sizes in tiers.items()}
        for name in shown:
            own = {tier: sizes.get(name, 0) for tier, sizes in tiers.items()}
            by: dict[str, int] = {}
            if name in accounts:
                evicted -= accounts[name].evicted
                by = dict(accounts[name].evicted_by.most_common(_SHOWN[kind]))
                by[OTHERS] = by.get(OTHERS, 0) + accounts[name].evicted - sum(by.values())
            found.append(_consumer(kind, name, own, reads.get(name, nothing), by))
            left = {tier: size - own[tier] for tier, size in left.items()}
        for name in reads.keys() - set(shown):
            rest.add(reads[name])
        others = _consumer(kind, OTHERS, left, rest, {OTHERS: evicted})
        return [*found, others] if others != Consumer(by=kind, name=OTHERS) else found


def _consumer(
    kind: str, name: str, tiers: Mapping[str, int], reads: _Reads, evicted_by: Mapping[str, int]
) -> Consumer:
    if len(name) > NAME_MAX:  # a namespace has up to 512 characters, and two names stay two
        name = f"{name[: NAME_MAX - 9]}~{crc32(name.encode()):08x}"
    return Consumer(
        by=kind,
        name=name,
        tiers={tier: size for tier, size in tiers.items() if size},
        hit_blocks=reads.hits,
        hit_bytes=reads.bytes,
        missed_blocks=reads.missed,
        evicted_by={by: size for by, size in evicted_by.items() if size},
    )
