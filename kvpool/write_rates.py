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
        #: When a tenant's last write began, by its rate, and the bytes of it to pay for since then.
        self._owed: dict[str, tuple[float, float]] = {}
        self._latest = 0.0

    def __repr__(self) -> str:
        return f"<WriteRates of {len(self._rates)} tenants>"

    def replace(self, rates: Mapping[str, int], now: float = 0.0) -> None:
        """From `now` on these are the rates, in bytes per second; 0: no limit.

        Bytes that are not paid for by then are paid at the new rate. Without `now` it is the last
        time that a write began.
        """
        now = max(now, self._latest)
        for tenant in self._owed:
            paid_at = self._paid_at(tenant)
            left = (paid_at - now) * self._rates[tenant]
            self._owed[tenant] = (now, left) if left > 0 else (paid_at, 0.0)
        self._rates = {tenant: rate for tenant, rate in rates.items() if rate}
        self._owed = {t: owed for t, owed in self._owed.items() if t in self._rates}

    def rate(self, tenant: str) -> int:
        """Bytes per second; 0: no limit."""
        return self._rates.get(tenant, 0)

    def wait_s(self, tenant: str, now: float) -> float:
        """Seconds until the tenant's next write may begin."""
        return max(0.0, self._paid_at(tenant) - now) if tenant in self._owed else 0.0

    def begin(self, tenant: str, size: int, now: float) -> None:
        """A write of at most `size` bytes begins. Raises InvariantViolated before its time."""
        if self.wait_s(tenant, now) > 0.0:
            raise InvariantViolated(f"tenant {tenant!r} writes too early")
        if self.rate(tenant):
            began = self._paid_at(tenant) if tenant in self._owed else 0.0
            self._owed[tenant] = max(began, now - BURST_S), size
            self._latest = now

    def give_back(self, tenant: str, size: int) -> None:
        """Of a write that has begun, so many bytes are not written."""
        if tenant in self._owed:
            began, owed = self._owed[tenant]
            self._owed[tenant] = began, owed - size

    def _paid_at(self, tenant: str) -> float:
        """When all that the tenant has written is paid for, at its rate."""
        began, owed = self._owed[tenant]
        return began + owed / self._rates[tenant]
