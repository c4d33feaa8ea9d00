"""Who has what of this server, and what its readers get: by tenant, namespace and program.

Bytes come from the accounts and indexes of the stores, which count them anyway. Reads are counted
here, once for each call. All lists are bounded, and what does not fit is summed as OTHERS.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final

from kvpool.server.state.blocks import Blocks
from kvpool.server.state.quota import TenantAccount
from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import NAME_MAX, OTHERS, Consumer, Namespace

#: Names of each kind whose reads are counted apart; no tenant has all of them.
NAMES_MAX: Final = 1024
#: Indexes of a tier whose bytes are listed by namespace; a look must not take long.
_INDEXES_MAX: Final = 2048
#: Consumers of each kind that one heartbeat names: those that have most.
_SHOWN: Final[Mapping[str, int]] = {"tenant": 16, "namespace": 8, "program": 8}


class _Reads:
    """What the readers of one consumer got."""

    __slots__ = ("bytes", "hits", "missed")

    def __init__(self) -> None:
        self.hits = self.bytes = self.missed = 0


class Consumers:
    """Counts reads, and lists the consumers of a server."""

    def __init__(self, store: Blocks, tier_names: Sequence[str]) -> None:
        self._store = store
        self._tier_names = tier_names
        self._reads: dict[str, dict[str, _Reads]] = {kind: {} for kind in _SHOWN}
        self._names = {kind: Shares(NAMES_MAX - 1) for kind in _SHOWN}  # OTHERS is one

    def read(
        self,
        namespace: Namespace,
        part: int,
        last: bytes,
        hits: int,
        size: int,
        missed: int,
    ) -> None:
        """A call got `hits` blocks of `size` bytes, `last` the last of them, and missed others."""
        known = bool(hits)
        names = {"tenant": tenant_of(namespace.name), "namespace": namespace.name}
        if hits:
            entry = self._store.front.index.blocks(namespace, part).get(last)
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
        stores = list(zip(self._tier_names, self._store.stores, strict=True))
        of_tenants: dict[str, Counter[str]] = defaultdict(Counter)
        of_namespaces: dict[str, Counter[str]] = defaultdict(Counter)
        of_programs: dict[str, Counter[str]] = defaultdict(Counter)
        for tier, store in stores:
            listed = 0
            for account in store.extents.policy.accounts:
                of_tenants[account.name][tier] += account.used
                listed += account.used
            for index in islice(store.index.by_part.values(), _INDEXES_MAX):
                of_namespaces[index.namespace.name][tier] += index.used
                listed -= index.used
            if listed:
                of_namespaces[OTHERS][tier] += listed
            for program, size in store.extents.policy.bytes_of_programs().items():
                of_programs[program][tier] += size
        accounts = self._store.backing.extents.policy.accounts
        evicted = {one.name: one.evicted_by for one in accounts if isinstance(one, TenantAccount)}
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
        self,
        kind: str,
        tiers: Mapping[str, Counter[str]],
        evicted: Mapping[str, Counter[str]],
    ) -> list[Consumer]:
        reads = self._reads[kind]
        names = {name for name in (*tiers, *reads) if name != OTHERS}

        def weight(name: str) -> tuple[int, int, str]:
            read = reads.get(name)
            return sum(tiers.get(name, {}).values()), read.bytes if read else 0, name

        shown = nlargest(_SHOWN[kind], names, key=weight)
        rest = [*names.difference(shown), OTHERS]
        found = [_sum(kind, name, [name], tiers, reads, evicted) for name in shown]
        others = _sum(kind, OTHERS, rest, tiers, reads, evicted)
        empty = Consumer(by=kind, name=OTHERS)
        return [*found, others] if others != empty else found


def _sum(
    kind: str,
    name: str,
    names: Iterable[str],
    tiers: Mapping[str, Counter[str]],
    reads: Mapping[str, _Reads],
    evicted: Mapping[str, Counter[str]],
) -> Consumer:
    stored: Counter[str] = Counter()
    evicted_by: Counter[str] = Counter()
    counts = [reads[one] for one in names if one in reads]
    for one in names:  # thousands, perhaps: Counter.update takes a microsecond even for nothing
        for tier, size in tiers.get(one, {}).items():
            stored[tier] += size
        if one in evicted:
            evicted_by.update(evicted[one])
    shown = dict(evicted_by.most_common(_SHOWN[kind]))
    if len(shown) < len(evicted_by):
        shown[OTHERS] = evicted_by.total() - sum(shown.values())
    return Consumer(
        by=kind,
        name=name[:NAME_MAX],
        tiers={tier: size for tier, size in stored.items() if size},
        hit_blocks=sum(one.hits for one in counts),
        hit_bytes=sum(one.bytes for one in counts),
        missed_blocks=sum(one.missed for one in counts),
        evicted_by={by: size for by, size in shown.items() if size},
    )
