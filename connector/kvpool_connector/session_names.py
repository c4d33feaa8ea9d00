"""Names of sessions: what clients call a conversation, as the pool calls it. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

#: Characters of a session's name in the pool.
NAME_MAX: Final = 128
#: Longer names are taken for a mistake: nobody pays for hashing megabytes in an engine's loop.
GIVEN_MAX: Final = 16_384


def session_name(given: object) -> str:
    """The pool's name of the session that a client calls `given`; "" where that is no name.

    Equal names become equal ones, in every process: a name that is too long for the pool, or not
    printable, becomes a hash of it.
    """
    if not isinstance(given, str) or not 0 < len(given) <= GIVEN_MAX:
        return ""
    if len(given) <= NAME_MAX and given.isprintable():
        return given
    return "sha256:" + hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:40]


def child_name(session: str, child: str) -> str:
    """The name of a sub-agent that counts its name within its parent's session."""
    return session_name(f"{session}/{child}")
