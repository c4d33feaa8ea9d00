"""Which tenant a name belongs to.

Every namespace and session of the tenant `acme` has a name that begins with `@acme/`, on the wire,
in servers, masters and files. Clients of that tenant add it and take it away, so that their users
never see it. A name without such a marker belongs to the pool itself: to its operators, and, in a
pool without tenants, to everybody (design: tenants).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from kvpool.errors import UsageError

#: Begins the name of everything that belongs to a tenant.
MARKER: Final = "@"
#: What a tenant may be called.
TENANT_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
#: In one pool: what a master compares and shows for each must stay small.
TENANTS_MAX: Final = 1024
_MARKED: Final = re.compile(rf"{MARKER}({TENANT_NAME.pattern})/")


def is_tenant_name(name: str) -> bool:
    """1 to 32 lower-case letters, digits and hyphens; no hyphen first."""
    return TENANT_NAME.fullmatch(name) is not None


@lru_cache(maxsize=1024)
def tenant_of(name: str) -> str:
    """The tenant that a namespace or session of this name belongs to; empty: the pool itself.

    `@acme/llama` belongs to `acme`. Never raises: a name that only looks like a tenant's, such as
    `@/x` or `@ACME/x`, is the pool's own.
    """
    found = _MARKED.match(name)
    return found[1] if found is not None else ""


def marker_of(tenant: str) -> str:
    """How every name of this tenant begins; empty for the pool itself."""
    return f"{MARKER}{tenant}/" if tenant else ""


def qualified(tenant: str, name: str) -> str:
    """A name as users of this tenant write it, as the pool knows it."""
    return marker_of(tenant) + name


def unqualified(tenant: str, name: str) -> str:
    """The other way round. Raises UsageError for a name that is not this tenant's."""
    marker = marker_of(tenant)
    if not name.startswith(marker):
        raise UsageError(f"name {name[:40]!r} does not belong to tenant {tenant!r}")
    return name[len(marker) :]
