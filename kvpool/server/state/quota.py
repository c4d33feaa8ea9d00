"""How much of one tier each tenant holds, and how much of it is its own (design: quotas).

A `TenantAccount` counts the bytes of whole extents of a tenant's blocks. A block is counted from
the moment at which it gets its extent until that is free again:

| counted in                        | not counted any more in                                     |
|-----------------------------------|-------------------------------------------------------------|
| `Store.reserve`: a block of a     | `Extents.free`: cancelled, evicted, removed, corrupt;       |
| client, of another server, or of  | after the last unpin; after the quarantine                  |
| another tier                      | `Extents.evict`: its extent goes to another block at once   |
| `FileStore.restore`: from a file  |                                                             |

So blocks that are reserved, pinned after their removal, or in quarantine count, and so do extra
copies and copies in several tiers, each in its tier. A block that is moved within its tier counts
once. `testing.invariants` counts again from the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from kvpool.server.state.entry import UNLIMITED, Account
from kvpool.tenant_names import tenant_of
from kvpool.types import OTHERS

#: Tenants that one account names: each with each would be a million.
_NAMED_MAX: Final = 64


class Quota(NamedTuple):
    """What one tenant may have of one tier, in bytes.

    Within `guaranteed` its blocks are not evicted for others; above `limit` it evicts its own.
    """

    guaranteed: int = 0
    limit: int = UNLIMITED


class TenantAccount(Account):
    """The bytes of one tenant in one tier."""

    __slots__ = ("configured", "evicted", "evicted_by", "needed", "quota")

    def __init__(self, name: str, quota: Quota | None = None) -> None:
        super().__init__(name)
        #: Bytes of its blocks that were evicted, and by the tenant that they made room for.
        self.evicted = 0
        self.evicted_by: Counter[str] = Counter()
        #: A block of so many bytes is its next victim: it is none while less than that is spare.
        self.needed = 1
        self.set_quota(quota)

    def __repr__(self) -> str:
        return f"<Account {self.name!r} {self.used} of {self.quota}>"

    def set_quota(self, quota: Quota | None) -> None:
        """From now on; None: nothing is its own, and nothing limits it."""
        self.configured = quota is not None
        self.quota = quota or Quota()
        self.limit = self.quota.limit
        self.needed = 1

    def lost(self, size: int, by: str) -> None:
        """So many bytes made room for that tenant."""
        self.evicted += size
        counts = self.evicted_by
        counts[by if by in counts or len(counts) < _NAMED_MAX else OTHERS] += size

    @property
    def spare(self) -> int:
        """Bytes that others may take from it; 0 or less: it is within its guarantee."""
        return self.used - self.quota.guaranteed

    def owns(self, size: int) -> bool:
        """Whether so many bytes more are within its guarantee."""
        return self.used + size <= self.quota.guaranteed

    def may_take_from(self, other: Account, size: int) -> bool:
        """Whether blocks of another tenant, or its own, may make room for so many bytes more."""
        assert isinstance(other, TenantAccount)
        return other is self or (other.spare > 0 and not self.exceeds(size))


class Accounts:
    """The accounts of one tier, by tenant.

    Each tenant that has blocks has one: the quota decides what that means, so a quota that comes,
    changes or goes moves no block.
    """

    def __init__(self) -> None:
        self.pool = TenantAccount("")
        self._accounts: dict[str, TenantAccount] = {"": self.pool}
        self._quotas: Mapping[str, Quota] = {}

    def __iter__(self) -> Iterator[TenantAccount]:
        return iter(self._accounts.values())

    def get(self, tenant: str) -> TenantAccount | None:
        """The account of a tenant, if it has one."""
        return self._accounts.get(tenant)

    def of(self, namespace: str) -> TenantAccount:
        """The account of the tenant that a namespace of this name belongs to."""
        tenant = tenant_of(namespace)
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantAccount(tenant, self._quotas.get(tenant))
        return account

    def configure(self, quotas: Mapping[str, Quota]) -> list[TenantAccount]:
        """Apply all quotas, by tenant: those that are missing are gone. Returns accounts that
        nothing counts in any more, which are forgotten."""
        self._quotas = dict(quotas)
        idle = []
        for name, account in list(self._accounts.items()):
            account.set_quota(self._quotas.get(name))
            if name and not (account.configured or account.used or account.indexes):
                idle.append(self._accounts.pop(name))
        return idle
