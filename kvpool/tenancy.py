"""The guard of a pool that may have tenants: their secrets, what they may ask for, the audit."""

from __future__ import annotations

from kvpool.audit import AuditLog
from kvpool.guard import Guard, TenantSecrets, Who
from kvpool.tenants import TenantKeys
from kvpool.wire.access import check_access
from kvpool.write_rates import WriteRates


class TenantGuard(Guard):
    """As `Guard`, for the tenants whose `secrets` these are."""

    check = staticmethod(check_access)

    def __init__(self, secrets: TenantSecrets | None) -> None:
        self.has_tenants = secrets is not None
        self._secrets = secrets or TenantKeys()
        self.rates = WriteRates()
        self._audit = AuditLog()

    def secrets_of(self, tenant: str) -> tuple[bytes, ...]:
        return self._secrets.secrets_of(tenant)

    def wait_s(self, tenant: str, now: float) -> float:
        return self.rates.wait_s(tenant, now)

    def begin(self, tenant: str, size: int, now: float) -> None:
        self.rates.begin(tenant, size, now)

    def give_back(self, tenant: str, size: int) -> None:
        self.rates.give_back(tenant, size)

    def refused(self, now: float, who: Who, request: str, why: str) -> None:
        self._audit.refused(now, **who._asdict(), request=request, why=why)

    def removed(self, now: float, who: Who, request: str, blocks: int) -> None:
        self._audit.removed(now, **who._asdict(), request=request, blocks=blocks)

    def flush(self, now: float) -> bool:
        self._audit.flush(now)
        return len(self._audit) > 0
