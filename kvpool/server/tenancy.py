"""The tenants of one server: what they have, how much they may have, and how fast they may write.

Its connections ask the guard who may have what (`kvpool/tenancy.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from kvpool import logs
from kvpool.config import parse_transport
from kvpool.errors import ConfigError, InvariantViolated, Unauthenticated
from kvpool.guard import Who
from kvpool.protocols import Peer, ReserveRequest
from kvpool.server.consumers import Consumers
from kvpool.server.extension import ServerExtension, ServerParts
from kvpool.server.quota_keeper import QuotaKeeper
from kvpool.server.state.tenants import account_of
from kvpool.tenancy import TenantGuard
from kvpool.tenants import Tenant
from kvpool.types import Reservation, ServerStats, WriteStatus
from kvpool.units import human

if TYPE_CHECKING:
    from kvpool.server.block_server import BlockServer

log = logs.get("kvpool.server")

_ASK_AGAIN: Final = Reservation(WriteStatus.NOT_YET)
_TOO_FAST: Final = Reservation(WriteStatus.REFUSED)

Reserve: TypeAlias = Callable[[ReserveRequest, float], Awaitable[list[Reservation]]]
ReserveNow: TypeAlias = Callable[[ReserveRequest, float], list[Reservation]]


class Tenancy(ServerExtension):
    """As `TenantWrites`, too."""

    def __init__(self, parts: ServerParts) -> None:
        context, guard = parts.context, parts.context.guard
        assert isinstance(guard, TenantGuard)
        self._parts = parts
        self.guard = guard
        self._context = context
        #: What each tenant may have; `apply` it before the server starts (design: quotas).
        self.quotas = QuotaKeeper(context.store, context.on_change, context.tasks)
        self.consumers = Consumers(context.store, [tier.name for tier in context.tiers])
        parts.extensions.on_served.append(self.consumers.read)
        parts.extensions.tenant_writes = self

    @classmethod
    def of(cls, server: BlockServer) -> Tenancy:
        """That of a server."""
        for one in server.extensions.all:
            if isinstance(one, cls):
                return one
        raise InvariantViolated("a server without its tenancy")

    def check(self) -> None:
        if not self.guard.has_tenants:
            return
        config, transports = self._parts.config, self._parts.transports
        if not self._parts.cluster.secret:
            raise ConfigError("tenants need a cluster with a secret (setting secret_file)")
        open_to_all = sorted(
            {parse_transport(text).scheme for text in config.listen}
            & {scheme for scheme, one in transports.items() if not one.authenticated}
        )
        if open_to_all and not config.insecure:
            raise ConfigError(
                f"transport {open_to_all[0]!r} does not ask its peers for a secret, so tenants "
                "would reach each other's blocks: leave it out of --listen, or pass --insecure if "
                "only operators can reach its port"
            )

    def start(self) -> None:
        self.quotas.trim()

    async def close(self) -> None:
        await self.quotas.close()

    def completed(self, stats: ServerStats) -> ServerStats:
        return msgspec.structs.replace(stats, consumers=self.consumers.report())

    def tenants_changed(self, tenants: Mapping[str, Tenant]) -> None:
        """The tenants file says something else now, and so do its secrets: take over quotas and
        rates, and end the connections whose secret is not good any more. The first call comes
        before the server starts."""
        self.quotas.apply(tenants)
        rates = {one.name: one.rate for one in tenants.values()}
        self.guard.rates.replace(rates, asyncio.get_running_loop().time())
        ended: Counter[str] = Counter()
        for connection in list(self._context.clients.connections):
            proved, link = connection.peer.proved, connection.peer.link
            if proved is None or proved.secret in self.guard.secrets_of(proved.tenant):
                continue
            self._context.counters["revoked_connections"] += 1
            ended[proved.tenant] += 1
            if link is not None:
                link.hang_up(Unauthenticated("the secret of this tenant was revoked"))
        for tenant, count in ended.items():
            log.info("connections of a revoked secret end", tenant=tenant, connections=count)

    # --- writes ---------------------------------------------------------------------------

    async def reserve(
        self, peer: Peer, request: ReserveRequest, until: float, reserve: Reserve
    ) -> list[Reservation]:
        """`reserve` when the tenant's earlier writes are paid for; REFUSED, at once, if that is
        later than `until`."""
        rates, tenant, loop = self.guard.rates, peer.tenant, asyncio.get_running_loop()
        if not rates.rate(tenant):
            return await reserve(request, until)
        while wait_s := rates.wait_s(tenant, now := loop.time()):
            if now + wait_s > until:
                self._context.counters["over_rate_writes"] += 1
                self._refused(peer, f"it writes more than its rate, {human(rates.rate(tenant))}/s")
                return [_TOO_FAST] * len(request.digests)
            await asyncio.sleep(wait_s)
        size, granted = sum(request.sizes), 0
        rates.begin(tenant, size, loop.time())
        try:
            answers = await reserve(request, until)
            granted = _granted(answers)
        finally:
            rates.give_back(tenant, max(0, size - granted))
        return answers

    def reserve_now(
        self, peer: Peer, request: ReserveRequest, now: float, reserve: ReserveNow
    ) -> list[Reservation]:
        """The same at once: NOT_YET where it would wait."""
        rates, tenant = self.guard.rates, peer.tenant
        if not rates.rate(tenant):
            return reserve(request, now)
        if rates.wait_s(tenant, now):
            return [_ASK_AGAIN] * len(request.digests)
        size = sum(request.sizes)
        rates.begin(tenant, size, now)
        answers = reserve(request, now)
        rates.give_back(tenant, size - _granted(answers))
        return answers

    def no_space(self, peer: Peer, size: int, blocks: int) -> None:
        """Where it was the tenant's limit and not the pool: count that, and say so in the audit."""
        for store in self._context.store.stores:
            account = account_of(store, peer.tenant)
            if account is not None and account.exceeds(store.allocator.rounded(size)):
                self._context.counters["over_limit_blocks"] += blocks
                why = f"a block of {human(size)} is above its limit of a tier, "
                why += f"{human(account.limit)}, beside what it has in use there"
                self._refused(peer, why)
                return

    def _refused(self, peer: Peer, why: str) -> None:
        who = Who(peer.tenant, peer.name, peer.address)
        self.guard.refused(asyncio.get_running_loop().time(), who, "Reserve", why)


def _granted(answers: list[Reservation]) -> int:
    """Bytes that were reserved."""
    return sum(answer.extent.size for answer in answers if answer.extent is not None)
