"""Names as users of a tenant write them, made into those that the pool knows (design: tenants)."""

from __future__ import annotations

from functools import lru_cache

from kvpool.errors import BadKey, UsageError
from kvpool.tenant_names import marker_of, qualified
from kvpool.types import SESSION_NAME_MAX, Namespace


@lru_cache(maxsize=256)
def own_namespace(tenant: str, namespace: Namespace) -> Namespace:
    """The namespace that users of this tenant call so. Raises BadKey for a name that is too long.

    Each call gets the same object: seeds of checksums are kept by it.
    """
    try:
        return Namespace(qualified(tenant, namespace.name), namespace.parts)
    except BadKey:
        raise BadKey(
            f"namespace {namespace.name[:40]!r}: expected at most "
            f"{512 - len(marker_of(tenant))} characters for a client of tenant {tenant!r}"
        ) from None


def own_session(tenant: str, session: str) -> str:
    """The session that users of this tenant call so. Raises UsageError for one that is too long."""
    name = qualified(tenant, session)
    if len(name) > SESSION_NAME_MAX:
        raise UsageError(
            f"session {session[:40]!r}: expected at most "
            f"{SESSION_NAME_MAX - len(marker_of(tenant))} characters for a client of tenant "
            f"{tenant!r}"
        )
    return name
