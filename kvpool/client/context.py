"""What a pool, its sessions and its `Admin` share: when a call may begin, and by which names."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from functools import lru_cache
from typing import Final

from kvpool.arguments import as_float
from kvpool.client.checks import check_namespace, check_session
from kvpool.client.lookup import Lookup
from kvpool.client.masters import Masters
from kvpool.client.servers import Servers
from kvpool.config import ClientConfig
from kvpool.errors import BadKey, Closed, UsageError
from kvpool.tenant_names import marker_of, qualified
from kvpool.types import SESSION_NAME_MAX, Namespace

TIMEOUT_S_MAX: Final = 86_400.0


class ClientContext:
    """Of one client. It belongs to the event loop that made it.

    The names of a tenant's users are qualified with the tenant here, so that nothing behind it
    knows two names of one thing (design: tenants).
    """

    def __init__(
        self,
        config: ClientConfig,
        tenant: str,
        masters: Masters,
        servers: Servers,
        counters: Counter[str],
    ) -> None:
        self.tenant = tenant
        self.masters = masters
        self.servers = servers
        self.lookup = Lookup(masters, servers)
        self.counters = counters
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._timeout_s = config.timeout_s
        self.pid = os.getpid()  # no child's, by a fork

    def check_open(self) -> None:
        """Raises Closed after the pool was closed."""
        if self.closed:
            raise Closed("the pool is closed")

    def begin(self, timeout: float | None) -> float:
        """The deadline of a call that starts now.

        Raises Closed after `close` or a fork, and in another thread or loop; UsageError for a
        timeout that is no bound, because every call must end (design: hedging).
        """
        self.check_open()
        if os.getpid() != self.pid:
            raise Closed("the pool was opened before a fork: open another one in the child")
        if asyncio._get_running_loop() is not self.loop:
            raise Closed(
                "the pool belongs to another event loop or thread: use kvpool.sync.Pool from "
                "threads, or open one pool in each loop"
            )
        if timeout is None:
            return self.loop.time() + self._timeout_s
        seconds = as_float(timeout)
        if seconds is None or not seconds <= TIMEOUT_S_MAX:  # nor nan
            raise UsageError(
                f"timeout is {timeout!r:.40}, expected seconds, at most {TIMEOUT_S_MAX:g}"
            )
        return self.loop.time() + seconds

    def own(self, namespace: Namespace) -> Namespace:
        """The namespace that users of this tenant call so. UsageError for another type."""
        check_namespace(namespace)
        return own_namespace(self.tenant, namespace) if self.tenant else namespace

    def own_session(self, session: str) -> str:
        """The name by which the pool knows a session. Raises UsageError."""
        return own_session(self.tenant, check_session(session))


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
