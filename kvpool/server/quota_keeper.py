"""What the tenants file says, as bytes of each tier of this server (design: quotas)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from kvpool import logs
from kvpool.server.state import tenants
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.quota import Quota
from kvpool.supervision import Supervisor
from kvpool.tenants import Tenant
from kvpool.units import human

log = logs.get("kvpool.server")

#: What cannot be evicted now is looked at again after this time.
_LOOK_AGAIN_S: Final = 1.0


class QuotaKeeper:
    """Gives each store its quotas, and evicts what is above a limit that was lowered.

    `on_change` is called after evictions.
    """

    def __init__(self, store: Blocks, on_change: Callable[[], None], tasks: Supervisor) -> None:
        self._store = store
        self._tasks = tasks
        self._on_change = on_change
        self._trimming: asyncio.Task[None] | None = None

    def apply(self, known: Mapping[str, Tenant]) -> None:
        """From now on these are the tenants. The first call comes before the first block."""
        for store in self._store.stores:
            tenants.set_quotas(store, quotas_of(known, store.allocator.capacity, store.index.tier))
        self.trim()

    def trim(self) -> None:
        """Evict what is above the limits, in steps; idempotent. Nothing, where no loop runs yet."""
        if (self._trimming is None or self._trimming.done()) and self._is_above():
            self._trimming = self._tasks.until_done("quotas", self._trim)

    async def close(self) -> None:
        """Idempotent."""
        trimming, self._trimming = self._trimming, None
        if trimming is not None:
            trimming.cancel()
            await asyncio.wait([trimming])

    async def _trim(self) -> None:
        """Until no tenant is above its limit: what is pinned, or has yet to be written to the disk,
        goes later. A tenant that writes nothing any more must not keep it for good."""
        loop = asyncio.get_running_loop()
        while self._is_above():
            stores = self._store.stores
            goes_on = any(tenants.evict_beyond_limits(store, loop.time()) for store in stores)
            self._on_change()
            await asyncio.sleep(0 if goes_on else _LOOK_AGAIN_S)

    def _is_above(self) -> bool:
        return any(
            one.used > one.limit
            for store in self._store.stores
            if store.extents.evicts
            for one in store.extents.policy.accounts
        )


def quotas_of(tenants: Mapping[str, Tenant], capacity: int, tier: int = 0) -> dict[str, Quota]:
    """The quotas of a tier with this capacity, in bytes.

    If the guaranteed shares are more than the tier has, each is cut in proportion: a server must
    start with a file that suits the others.
    """
    wanted = {name: one.guaranteed.of(capacity) for name, one in tenants.items()}
    total = sum(wanted.values())
    if total > capacity:
        log.warning(
            "guaranteed shares are cut",
            why=f"they are {human(total)} together, and the tier has {human(capacity)}",
            tier=tier,
        )
        wanted = {name: size * capacity // total for name, size in wanted.items()}
    quotas = {}
    for name, tenant in tenants.items():
        limit = tenant.limit.of(capacity)
        quotas[name] = Quota(min(wanted[name], limit), limit)
    return quotas
