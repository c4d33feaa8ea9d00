"""What a tenants file says of each tenant, and the secrets that admit their clients.

Pure: `kvpool.net.tenants_file` reads the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from kvpool.errors import ConfigError
from kvpool.tenant_names import TENANTS_MAX, is_tenant_name
from kvpool.units import human, parse_size

#: Secrets of one tenant that are good at the same time: the old one and the new one.
SECRETS_MAX: Final = 2


class Share(NamedTuple):
    """A part of each tier of each server: so many bytes, or a percentage of its capacity."""

    size: int = 0
    percent: float = 0.0

    def of(self, capacity: int) -> int:
        """Bytes of a tier with this capacity, at most all of them."""
        return min(capacity, self.size + int(capacity * self.percent / 100))

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent else human(self.size)


#: All of a tier.
WHOLE: Final = Share(percent=100.0)


class Tenant(NamedTuple):
    """What the tenants file says of one tenant.

    `guaranteed` and `limit` hold in each tier of each server: what is stored of the tenant within
    `guaranteed` is never evicted for others, and above `limit` it evicts its own. `rate`: bytes per
    second that its clients may write into one server; 0: as fast as they can.
    """

    name: str
    secret_files: tuple[str, ...] = ()
    guaranteed: Share = Share()
    limit: Share = WHOLE
    rate: int = 0


class TenantKeys:
    """The secrets with which clients of tenants are admitted, as this process knows them now.

    One object for all connections of a process: `replace` changes it when the tenants file does.
    """

    def __init__(self) -> None:
        self._secrets: Mapping[str, tuple[bytes, ...]] = {}

    def __repr__(self) -> str:
        return f"<TenantKeys of {len(self._secrets)} tenants>"

    def replace(self, secrets: Mapping[str, tuple[bytes, ...]]) -> None:
        """From now on these secrets are good, by tenant, and no others."""
        self._secrets = secrets

    def secrets_of(self, tenant: str) -> tuple[bytes, ...]:
        """The secrets that are good for a client of this tenant; none for one that is unknown."""
        return self._secrets.get(tenant, ())


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant as it is written."""

    name: str
    secret_file: str | Annotated[list[str], Meta(min_length=1, max_length=SECRETS_MAX)]
    guaranteed: int | float | str = 0
    limit: int | float | str = "100%"
    rate: int | float | str = 0


def parse_tenants(raw: object, source: str) -> dict[str, Tenant]:
    """The tenants of a file, by name, from what YAML made of it: `{"tenants": [...]}`.

    Raises ConfigError: one sentence with `source`, the tenant, the value, and what is expected.
    """
    if not isinstance(raw, Mapping) or raw.keys() != {"tenants"}:
        # Not what is in it: it may be the file of a secret.
        kind = "nothing" if raw is None else type(raw).__name__
        got = ", ".join(sorted(map(str, raw))) if isinstance(raw, Mapping) else kind
        raise ConfigError(f"tenants file {source}: got {got}, expected one list: `tenants:`")
    entries = raw["tenants"]
    if not isinstance(entries, list) or len(entries) > TENANTS_MAX:
        raise ConfigError(
            f"tenants file {source}: `tenants` is no list of at most {TENANTS_MAX} tenants"
        )
    tenants: dict[str, Tenant] = {}
    for number, entry in enumerate(entries, 1):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        what = f"tenants file {source}: tenant {name if name is not None else number!r}"
        tenant = _parse_tenant(entry, what)
        if tenant.name in tenants:
            raise ConfigError(f"{what} is there twice, expected each name once")
        tenants[tenant.name] = tenant
    check_fit(tenants.values(), source)
    return tenants


def check_fit(tenants: Iterable[Tenant], source: str, capacity: int | None = None) -> None:
    """Raises ConfigError where the guaranteed shares are more than a tier has.

    Without a `capacity` only what is wrong for every capacity: percentages of more than 100 in all.
    With the `capacity` of a tier, in bytes, the shares in bytes count, too.
    """
    tenants = list(tenants)
    percent = round(sum(tenant.guaranteed.percent for tenant in tenants), 6)  # three thirds are 100
    if percent > 100:
        raise ConfigError(
            f"tenants file {source}: the guaranteed shares are {percent:g}% together, "
            "expected at most 100%"
        )
    if capacity is None:
        return
    size = sum(tenant.guaranteed.of(capacity) for tenant in tenants)
    if size > capacity:
        raise ConfigError(
            f"tenants file {source}: the guaranteed shares are {human(size)} together, expected at "
            f"most {human(capacity)}, the capacity of the tier"
        )
    for tenant in tenants:
        if tenant.guaranteed.of(capacity) > tenant.limit.of(capacity):
            raise ConfigError(
                f"tenants file {source}: tenant {tenant.name}: guaranteed {tenant.guaranteed} is "
                f"more than its limit {tenant.limit}, of a tier of {human(capacity)}"
            )


def _parse_tenant(raw: Any, what: str) -> Tenant:
    known = ", ".join(_Entry.__struct_fields__)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{what}: got {raw!r:.40}, expected settings: {known}")
    unknown = sorted(str(key) for key in raw if key not in _Entry.__struct_fields__)
    if unknown:
        raise ConfigError(f"{what}: unknown setting {unknown[0]!r}, expected one of: {known}")
    try:
        entry = msgspec.convert(dict(raw), _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}") from None
    if not is_tenant_name(entry.name):
        raise ConfigError(
            f"{what}: name {entry.name!r}, expected 1 to 32 lower-case letters, digits and "
            "hyphens, no hyphen first"
        )
    files = [entry.secret_file] if isinstance(entry.secret_file, str) else entry.secret_file
    if "" in files or len(set(files)) != len(files):
        raise ConfigError(
            f"{what}: secret_file {entry.secret_file!r}, expected the path of a file, "
            f"or a list of at most {SECRETS_MAX} different ones"
        )
    guaranteed = _parse_share(entry.guaranteed, f"{what}: guaranteed")
    limit = _parse_share(entry.limit, f"{what}: limit")
    if limit == Share():
        raise ConfigError(f"{what}: limit {entry.limit!r}, expected more than nothing")
    comparable = bool(guaranteed.percent) == bool(limit.percent)
    if comparable and (guaranteed.percent, guaranteed.size) > (limit.percent, limit.size):
        raise ConfigError(
            f"{what}: guaranteed {entry.guaranteed!r} is more than the limit {entry.limit!r}"
        )
    try:
        rate = parse_size(entry.rate)
    except ConfigError as error:
        raise ConfigError(f"{what}: rate: {error} (bytes per second)") from None
    return Tenant(entry.name, tuple(files), guaranteed, limit, rate)


def _parse_share(value: int | float | str, what: str) -> Share:
    """`64GiB`, `25%`. Raises ConfigError."""
    text = str(value).strip()
    if not text.endswith("%"):
        try:
            return Share(size=parse_size(value))
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}; or a percentage, like 25%") from None
    try:
        percent = float(text[:-1])
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ConfigError(f"{what} {value!r}, expected 0% to 100%")
    return Share(percent=percent)
