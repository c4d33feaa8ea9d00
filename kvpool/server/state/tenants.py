"""A store with tenants: what each may have of it, and which of its blocks are too much. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvpool.errors import InvariantViolated
from kvpool.protocols.policy import Decision, Policy
from kvpool.server.eviction.order import make_order
from kvpool.server.eviction.tenant_orders import TenantOrders
from kvpool.server.state.entry import Entry, Index
from kvpool.server.state.extents import STEPS_MAX, STEPS_OF_EVICTION
from kvpool.server.state.quota import Accounts, Quota, TenantAccount
from kvpool.server.state.store import Store
from kvpool.types import ROOT, Namespace

#: Of a block that nobody writes: room is made for it, and nothing else.
_NOBODY: Final = Namespace("nobody")


def set_quotas(store: Store, quotas: Mapping[str, Quota]) -> None:
    """Apply what each tenant may have here; a tenant that is missing has no quota any more.

    The first call comes before the first block. Blocks above a limit that was lowered are evicted
    by what their tenant writes or reads next, and by `evict_beyond_limits`.
    """
    orders, allocator = store.extents.policy, store.allocator
    if not isinstance(orders, TenantOrders):
        if store.extents.blocks_at:
            raise InvariantViolated("a store that has blocks cannot begin to have tenants")
        make: Callable[[int], Policy[Entry]] = type(orders.policy)
        orders = store.extents.policy = TenantOrders(
            Accounts(),
            orders,
            lambda: make_order(make(allocator.capacity), store.hint_budget, allocator.rounded),
            lambda entry: store.held.size_of(store.index.parts(entry)),
            allocator.rounded,
        )
    orders.forget(orders.accounts.configure(quotas))


def account_of(store: Store, tenant: str) -> TenantAccount | None:
    """What this tenant has here, if it has something."""
    orders = store.extents.policy
    return orders.accounts.get(tenant) if isinstance(orders, TenantOrders) else None


def evict_beyond_limits(store: Store, now: float, steps: int = STEPS_MAX) -> bool:
    """Evict blocks of tenants that are above their limit, in a bounded number of steps; False when
    no more of them may go now. (In a cold tier none may: they leave with their objects.)"""
    for account in store.extents.policy.accounts:
        while account.used > account.limit:
            if steps <= 0:
                return True
            steps -= STEPS_OF_EVICTION
            newcomer = Entry(Index(_NOBODY, 0, store.index.tier, account), b"", ROOT, 0, 1, 0)
            victim = store.extents.policy.victim(newcomer, store.extents.evictable, now)
            if victim is None or victim is Decision.BYPASS:
                break
            if isinstance(victim, Decision):
                continue
            if store.extents.evictable(victim):
                store.extents.policy.evicting(victim, account)
                store.extents.evict(victim)
            else:
                store.extents.reject(victim)
    return False
