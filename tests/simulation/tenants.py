"""Tenants of a simulated pool: what each may have, by a second account that is kept independently.

What a tenant has is counted again from the blocks that lie in a store, at each eviction and each
write; the quotas are those that the operator of the world has given last (design: quotas).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.server.state.quota import Quota
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tenancy import Tenancy
from kvpool.tenants import Share, Tenant
from kvpool.types import Namespace, Reservation, WriteStatus
from tests.simulation.blocks import OF_TENANTS

if TYPE_CHECKING:
    from tests.simulation.nodes import ServerNode
    from tests.simulation.oracles import WatchedStore
    from tests.simulation.world import World

#: The part of a tier that both tenants together are guaranteed, at most.
_GUARANTEED_MAX: Final = 0.5
_UNLIMITED: Final = 1 << 62


class TenantOracle:
    """What one store must keep. Names of tenants are read here, not by the pool's own function."""

    def __init__(self, store: WatchedStore, stack: Blocks, quotas: Mapping[str, Quota]) -> None:
        self._store = store
        self._stack = stack
        self.quotas = quotas

    def evicting(self, victim: Entry, newcomer: Entry | None) -> None:
        """A block makes room for another one, or for none: its tenant is above its limit."""
        mine, theirs = _tenant(newcomer or victim), _tenant(victim)
        if newcomer is None or mine == theirs:
            return
        store, quota = self._store, self._quota(theirs)
        leaving = store.held.size_of(store.index.parts(victim))
        if self._used(theirs) - leaving < quota.guaranteed:
            self._fail(
                f"{victim!r} of tenant {theirs!r} goes for {mine!r}: it has {self._used(theirs)} "
                f"bytes, {quota.guaranteed} are guaranteed"
            )
        size = store.allocator.rounded(newcomer.size)
        if self._used(mine) + size > self._quota(mine).limit:
            self._fail(f"{victim!r} of tenant {theirs!r} goes for {mine!r}, beyond its limit")
        store.truth.probes.add("a tenant made room for another one")

    def answered(self, namespace: Namespace, answers: Sequence[Reservation]) -> None:
        """A call has reserved what it could."""
        tenant = _name(namespace)
        used, quota = self._used(tenant), self._quota(tenant)
        if any(answer.extent is not None for answer in answers) and used > quota.limit:
            self._fail(f"tenant {tenant!r} has {used} bytes, its limit is {quota.limit}")
        if used + self._store.allocator.rounded(1) > quota.limit:
            self._store.truth.probes.add("a tenant reached its limit")
        bypassed = any(answer.status is WriteStatus.BYPASSED for answer in answers)
        largest = max((one.size for one in self._store.extents.blocks_at.values()), default=0)
        if bypassed and used + 2 * self._store.allocator.rounded(largest) <= quota.guaranteed:
            self._fail(f"tenant {tenant!r} is refused a place within its guarantee")

    def removing(self, namespace: Namespace) -> None:
        """A block leaves, perhaps because another tier has evicted it."""
        if not (isinstance(self._stack, TieredStore) and self._stack.is_evicting):
            return
        tenant = _name(namespace)
        used, quota = self._used(tenant), self._quota(tenant)
        if 0 < used <= quota.guaranteed:
            self._fail(f"tenant {tenant!r} loses copies that it is guaranteed in this tier")

    def keeps(self, namespace: Namespace) -> bool:
        """Whether what the tenant has here is within its guarantee."""
        tenant = _name(namespace)
        return tenant in self.quotas and self._used(tenant) <= self._quota(tenant).guaranteed

    def _quota(self, tenant: str) -> Quota:
        return self.quotas.get(tenant, Quota(0, _UNLIMITED))

    def _used(self, tenant: str) -> int:
        return self._store.held.size_of(
            one for one in self._store.extents.blocks_at.values() if _tenant(one) == tenant
        )

    def _fail(self, what: str) -> None:
        self._store.truth.fail(f"G12: {what}")


class Tenants:
    """The operator of the world, and the clients' choice of a tenant."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng["tenants"]
        self.tenants = self._draw()

    def watch(self, node: ServerNode) -> None:
        """A server's process begins, and has no blocks yet."""
        assert node.server is not None
        for store in _stores(node):
            store.tenants = TenantOracle(
                store, node.server.stack, self._quotas(store, self.tenants)
            )
        Tenancy.of(node.server).quotas.apply(self.tenants)

    def change(self) -> None:
        """The tenants file has changed, for all servers at the same time."""
        self._apply(self._draw())

    def remove_all(self) -> None:
        """There are no tenants any more: their blocks are as those of the pool."""
        self._apply({})

    def namespace(self, rng: random.Random) -> Namespace:
        return rng.choice(OF_TENANTS)

    def session(self, rng: random.Random, namespace: Namespace) -> str:
        """A conversation, mostly of the namespace's tenant."""
        tenant = _name(namespace) if rng.random() < 0.8 else rng.choice("ab")
        return f"@{tenant}/{rng.randrange(4)}" if tenant else f"{rng.randrange(4)}"

    # --- inside ----------------------------------------------------------------------------------

    def _apply(self, tenants: dict[str, Tenant]) -> None:
        self.tenants = tenants
        for node in self._world.servers:
            if node.server is None or not node.process.alive:
                continue
            node.process.spawn(self._applied(node, tenants))

    async def _applied(self, node: ServerNode, tenants: Mapping[str, Tenant]) -> None:
        assert node.server is not None
        for store in _stores(node):
            assert store.tenants is not None
            store.tenants.quotas = self._quotas(store, tenants)
        Tenancy.of(node.server).quotas.apply(tenants)

    def _draw(self) -> dict[str, Tenant]:
        rng = self._rng
        tenants = {}
        for name in "ab":
            if rng.random() < 0.8:
                guaranteed = rng.choice([0.0, 0.5, 1.0]) * _GUARANTEED_MAX / 2
                limit = max(guaranteed, rng.choice([0.25, 0.5, 1.0, 1.0]))
                shares = Share(percent=100 * guaranteed), Share(percent=100 * limit)
                tenants[name] = Tenant(name, (), *shares)
        return tenants

    def _quotas(self, store: WatchedStore, tenants: Mapping[str, Tenant]) -> dict[str, Quota]:
        capacity = store.allocator.capacity
        return {
            name: Quota(
                int(capacity * one.guaranteed.percent / 100),
                int(capacity * one.limit.percent / 100),
            )
            for name, one in tenants.items()
        }


def _stores(node: ServerNode) -> list[WatchedStore]:
    return [node.store] if node.tiers is None else [node.store, node.tiers.base]


def _tenant(entry: Entry) -> str:
    return _name(entry.index.namespace)


def _name(namespace: Namespace) -> str:
    marked, _, _ = namespace.name.partition("/")
    return marked[1:] if marked.startswith("@") else ""
