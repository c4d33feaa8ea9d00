"""The paths of a client's servers that reach memory on devices, and calls over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import TypeVar

from kvpool.client.servers import KnownServer, Path, Servers, is_fast
from kvpool.errors import Overloaded, ServerLost
from kvpool.protocols import Channel, Transport
from kvpool.protocols.device_transport import ReachesDevices

T = TypeVar("T")


class DevicePaths:
    """Of one client. With `only_fabrics` no path inside this host counts, nor one that nothing
    shows to be fast: there the host's memory is on the way in any case."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def call(
        self,
        server: str,
        operation: Callable[[Channel], Awaitable[T]],
        deadline: float,
        *,
        only_fabrics: bool,
        counted_as: str,
    ) -> T:
        """As `Servers.call`, on paths whose channels receive into memory on devices, and send from
        it.

        Raises Overloaded where none of them works: over another path the server may be well.
        """
        record = await self._servers.resolve(server, deadline)
        if order := self._paths(record, only_fabrics=only_fabrics):
            with contextlib.suppress(ServerLost):
                return await self._servers.call_on(record, order, operation, deadline, counted_as)
        raise Overloaded(f"server {server} has no path to devices here that works")

    def reach(self, server: str, *, only_fabrics: bool) -> bool:
        """Whether `call` has a path to this server, as far as it is known."""
        record = self._servers.known.get(server)
        return record is not None and bool(self._paths(record, only_fabrics=only_fabrics))

    def reach_some(self, *, only_fabrics: bool) -> bool:
        """The same for any server that this client knows by now."""
        return any(self.reach(server, only_fabrics=only_fabrics) for server in self._servers.known)

    def avoid(self, server: str) -> None:
        """They were silent: `call` does not take them for a while."""
        record = self._servers.known.get(server)
        for path in self._paths(record, only_fabrics=False) if record is not None else ():
            self._servers.mark_broken(path)

    @cached_property
    def _schemes(self) -> frozenset[str]:
        """Of those that reach devices: asked once, because they look at files."""
        found = self._servers.transports.items()
        return frozenset(scheme for scheme, one in found if not _lack({scheme: one}))

    @property
    def lack(self) -> str:
        """Why no transport of this client reaches devices; empty if one does."""
        return _lack(self._servers.transports)

    @property
    def has_fabric(self) -> bool:
        """Whether a fabric leads to devices: over what else does, `staged` is faster."""
        return any(is_fast(self._servers.transports[scheme]) for scheme in self._schemes)

    def _paths(self, record: KnownServer, *, only_fabrics: bool) -> list[Path]:
        servers = self._servers
        if only_fabrics and not servers.standing(record.server).far:
            return []
        now = asyncio.get_running_loop().time()
        return [
            path
            for path in record.paths
            if path.scheme in self._schemes
            and not servers.is_broken(path, now)
            and not (only_fabrics and not is_fast(servers.transports[path.scheme]))
        ]


def _lack(transports: Mapping[str, Transport]) -> str:
    """Why none of these reaches memory on devices; empty if one does."""
    lacks = [one.device_lack for one in transports.values() if isinstance(one, ReachesDevices)]
    if lacks and not all(lacks):
        return ""
    return "; ".join(lacks) or f"none of {', '.join(transports)} reaches devices"
