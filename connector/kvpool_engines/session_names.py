"""Names of sessions: what clients call a conversation, as the pool calls it. Pure.

conversation-7               a client's name, of an engine without a tenant
tenant=blue/conversation-7   the same name in the tenant "blue"
sha256:1f...                 a name that is too long, or not printable, or looks like the second
"""

from __future__ import annotations

import hashlib
import urllib.parse
from typing import Final

#: Characters of a session's name in the pool.
NAME_MAX: Final = 128
#: Longer names are taken for a mistake: nobody pays for hashing megabytes in an engine's loop.
GIVEN_MAX: Final = 16_384
#: The tenant of engines that name none.
DEFAULT_TENANT: Final = "default"
_TENANT: Final = "tenant="


def session_name(given: object) -> str:
    """The pool's name of the session that a client calls `given`; "" where that is no name.

    Equal names become equal ones, in every process: a name that is too long for the pool, or not
    printable, becomes a hash of it.
    """
    if not isinstance(given, str) or not 0 < len(given) <= GIVEN_MAX:
        return ""
    if len(given) <= NAME_MAX and given.isprintable() and not given.startswith(_TENANT):
        return given
    return _hashed(given)


def in_tenant(tenant: str, session: str) -> str:
    """The pool's name of a session that an engine of this tenant serves; "" if there is none.

    Servers know sessions by name alone. Clients choose their names: two tenants may have the same
    one, and no client can choose that of another tenant, because `session_name` hashes it.
    """
    if tenant == DEFAULT_TENANT or not session:
        return session
    name = f"{_TENANT}{urllib.parse.quote(tenant, safe='')}/{session}"
    return name if len(name) <= NAME_MAX else _TENANT + _hashed(name)


def _hashed(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:40]


def child_name(session: str, child: str) -> str:
    """The name of a sub-agent that counts its name within its parent's session."""
    return session_name(f"{session}/{child}")
