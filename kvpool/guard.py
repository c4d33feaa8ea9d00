"""The joints of secrets and of tenancy: who is admitted, may ask what, and who notes it. Pure.

Without the lines and the files of the first a process has no secret, and refuses to be one of a
cluster that has. A master, its listener and a server have a guard each. Without the line and the
file of the last one a process admits who knows the cluster's secret, and refuses tenants.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final, NamedTuple, Protocol

from kvpool.errors import ConfigError, Forbidden

#: What reads files of secrets, and speaks for an end that has one.
SECRETS: Final = {
    "local_secret": "kvpool.secret_file:local_secret",
    "local_secret_file": "kvpool.secret_file:local_secret_file",
    "read_cluster": "kvpool.secret_file:read_cluster",
    "checked_cluster": "kvpool.secret_file:checked_cluster",
    "master_sessions": "kvpool.net.secret_sessions:master_sessions",
    "caller_session": "kvpool.net.secret_sessions:SecretCallerSession",
    "prove": "kvpool_transports.streams.proofs:prove",
    "ask_for_proof": "kvpool_transports.streams.proofs:ask_for_proof",
}

#: `module:class`; the last one is made.
GUARDS: Final = (
    "kvpool.guard:Guard",
    "kvpool.tenancy:TenantGuard",
)


class TenantSecrets(Protocol):
    """The secrets of tenants, as they are now."""

    def secrets_of(self, tenant: str) -> tuple[bytes, ...]:
        """Those that are good for a client of this tenant; none for one that is unknown."""


class Who(NamedTuple):
    """A caller, for the audit. Operators have no tenant."""

    tenant: str
    client: str
    address: str


class Guard:
    """What masters and servers ask. This one knows no tenant, and limits nobody."""

    def __init__(self, secrets: TenantSecrets | None) -> None:
        """Raises ConfigError for secrets that it cannot use."""
        if secrets is not None:
            raise ConfigError("this program runs without tenants (setting tenants_file)")

    def secrets_of(self, tenant: str) -> tuple[bytes, ...]:
        """As `TenantSecrets.secrets_of`."""
        return ()

    def check(self, tenant: str, request: Any) -> None:
        """Raises Forbidden for what a client of this tenant may not ask for; "" is no tenant."""
        if tenant:
            raise Forbidden("nothing here is for tenants")

    def wait_s(self, tenant: str, now: float) -> float:
        """Seconds until the tenant's next write may begin."""
        return 0.0

    def begin(self, tenant: str, size: int, now: float) -> None:
        """A write of at most `size` bytes begins, in its time."""

    def give_back(self, tenant: str, size: int) -> None:
        """Of a write that has begun, so many bytes are not written."""

    def refused(self, now: float, who: Who, request: str, why: str) -> None:
        """For the audit: a request was about what is not the caller's. `now` is loop time."""

    def removed(self, now: float, who: Who, request: str, blocks: int) -> None:
        """For the audit: a caller removed blocks."""

    def flush(self, now: float) -> bool:
        """Write the lines of the audit that are due; whether others are to come."""
        return False


def of_secrets(function: str) -> Any:
    """One of `SECRETS`. Raises ConfigError where this program runs without them."""
    if function not in SECRETS:
        raise ConfigError("this program runs without secrets (setting secret_file)")
    return resolve_name(SECRETS[function])


def make_guard(secrets: TenantSecrets | None = None) -> Guard:
    """The guard of a process with these tenants. Raises ConfigError where it can have none."""
    made: Guard = resolve_name(GUARDS[-1])(secrets)
    return made
