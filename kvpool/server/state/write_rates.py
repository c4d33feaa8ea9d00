"""How fast clients of tenants may write into one server (design: tenants).

Pure, as the stores are: `now` is an argument. `connection.py` waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpool.errors import InvariantViolated

#: After a pause a tenant may write as much at once as its rate gives it in this time.
BURST_S: Final = 1.0


class WriteRates:
    """A token bucket for each tenant that has a rate, over all of its connections.

    A write may begin when those before it are paid for; each costs its size divided by the rate. So
    at most one write is ahead of the rate, whatever its size.
    """

    def __init__(self) -> None:
        self._rates: Mapping[str, int] = {}
        self._paid_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<WriteRates of {len(self._rates)} tenants>"

    def replace(self, rates: Mapping[str, int]) -> None:
        """From now on these are the rates, in bytes per second; 0: no limit. What a tenant has
        written before stays paid for or not."""
        self._rates = {tenant: rate for tenant, rate in rates.items() if rate}
        self._paid_at = {t: at for t, at in self._paid_at.items() if t in self._rates}

    def rate(self, tenant: str) -> int:
        """Bytes per second; 0: no limit."""
        return self._rates.get(tenant, 0)

    def wait_s(self, tenant: str, now: float) -> float:
        """Seconds until the tenant's next write may begin."""
        if tenant not in self._rates:
            return 0.0
        return max(0.0, self._paid_at.get(tenant, now) - now)

    def begin(self, tenant: str, size: int, now: float) -> None:
        """A write of at most `size` bytes begins. Raises InvariantViolated before its time."""
        if self.wait_s(tenant, now) > 0.0:
            raise InvariantViolated(f"tenant {tenant!r} writes too early")
        if rate := self.rate(tenant):
            since = max(self._paid_at.get(tenant, 0.0), now - BURST_S)
            self._paid_at[tenant] = since + size / rate

    def give_back(self, tenant: str, size: int) -> None:
        """Of a write that has begun, so many bytes are not written."""
        if tenant in self._paid_at and (rate := self.rate(tenant)):
            self._paid_at[tenant] -= size / rate
