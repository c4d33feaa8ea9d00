"""Removes whole namespaces, on every server that has some of them, in bounded steps.

A server tells what it has, and where a removal of that begins; each step says where the next one
goes on. So nothing has to be remembered elsewhere: a removal that was interrupted is begun again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvpool.client.context import own_namespace
from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.client.servers import gather_errors
from kvpool.errors import KvpoolError, Overloaded, Unavailable, UsageError
from kvpool.operators import Holding, HoldingsPage, Removal, RemovalCursor
from kvpool.protocols import Channel
from kvpool.runtime import task_group
from kvpool.tenant_names import unqualified
from kvpool.types import MEMORY_TIERS, Namespace
from kvpool.wire import messages as wire
from kvpool.wire.questions import Namespaces
from kvpool.wire.removal import HoldingsReply, RemoveAll, RemovedAll

#: One request to a server; it works for a part of a second, and waits for its disk and the masters.
_CALL_S: Final = 10.0
#: A server that does not answer is asked again after this time.
_AGAIN_S: Final = 0.5

#: Whether a namespace, by the name that this client's users have for it, is to be removed.
Wanted = Callable[[Namespace], bool]
#: Is told of each step: the server, and the blocks and bytes that it has removed.
Report = Callable[[str, int, int], None]


class HeldNamespace(NamedTuple):
    """What one server has of a namespace: blocks, and bytes in all of its tiers together. A removal
    of what it has now begins at `begin`."""

    server: str
    namespace: Namespace
    blocks: int
    bytes: int
    begin: RemovalCursor


class HeldByServers(NamedTuple):
    """What was found, and the servers that could not be asked, each with the reason: what they have
    in files may be back with them."""

    found: tuple[HeldNamespace, ...]
    missing: dict[str, str]


class Removals(ClientExtension):
    """Looks for whole namespaces and removes them, for one client. A client of a tenant sees, and
    removes, that tenant's only."""

    def __init__(self, parts: ClientParts) -> None:
        self._servers = parts.context.servers
        self._tenant = parts.context.tenant

    async def held(self, wanted: Wanted, *, timeout: float) -> HeldByServers:
        """What every server has of the `wanted` namespaces. Raises MasterLost."""
        deadline = _now() + timeout
        members = await self._servers.refresh(deadline)
        servers = [one.server for one in members if one.alive]
        missing = {
            one.server: "it has left" if one.left else "it is lost"
            for one in members
            if not one.alive and not (one.left and set(one.tiers) <= set(MEMORY_TIERS))
        }
        answers = await gather_errors([self._held_by(one, wanted, deadline) for one in servers])
        found: list[HeldNamespace] = []
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, KvpoolError):
                missing[server] = str(answer)
            else:
                found += answer
        return HeldByServers(tuple(found), missing)

    async def remove(
        self, held: Sequence[HeldNamespace], *, timeout: float, report: Report
    ) -> dict[str, str]:
        """Remove what was found, and nothing that was written since; the servers where some of it
        may be left, each with the reason.

        A server that does not answer is asked again until the time is over. After a restart all
        that its file has brought back of these namespaces goes.
        """
        deadline = _now() + timeout
        by_server: dict[str, list[HeldNamespace]] = {}
        for one in held:
            by_server.setdefault(one.server, []).append(one)
        async with task_group() as group:
            clearing = {
                server: group.create_task(self._clear(its, deadline, report))
                for server, its in by_server.items()
            }
        return {server: task.result() for server, task in clearing.items() if task.result()}

    async def _clear(self, held: Sequence[HeldNamespace], deadline: float, report: Report) -> str:
        """All of these on one server; why some of it may be left."""
        for server, namespace, _, _, begin in held:
            named, at = own_namespace(self._tenant, namespace), begin
            while True:
                until = min(deadline, _now() + _CALL_S)
                try:
                    call = functools.partial(_remove, named, at, until)
                    done = await self._servers.call(server, call, until)
                except (Unavailable, Overloaded) as error:
                    if _now() + _AGAIN_S >= deadline:
                        return str(error)
                    await asyncio.sleep(_AGAIN_S)
                    continue
                report(server, done.blocks, done.bytes)
                if done.at is None:
                    break
                if _now() >= deadline:
                    return "no time was left"
                at = done.at
        return ""

    async def _held_by(self, server: str, wanted: Wanted, deadline: float) -> list[HeldNamespace]:
        found: list[HeldNamespace] = []
        after = ("", 0)
        begin: RemovalCursor | None = None
        while True:
            page = await self._servers.call(
                server, functools.partial(_holdings, after, deadline), deadline
            )
            begin = begin or page.begin  # what is written while further pages come stays
            for namespace, blocks, size in page.held:
                seen = self._as_seen(namespace)
                if wanted(seen):
                    found.append(HeldNamespace(server, seen, blocks, size, begin))
            last = page.held[-1].namespace if page.held else None
            if not page.more or last is None or (last.name, last.parts) <= after:
                return found
            after = last.name, last.parts

    def _as_seen(self, namespace: Namespace) -> Namespace:
        try:
            return Namespace(unqualified(self._tenant, namespace.name), namespace.parts)
        except UsageError as error:
            raise Unavailable(f"a server answered with {error}") from None


async def _holdings(after: tuple[str, int], deadline: float, channel: Channel) -> HoldingsPage:
    answer = await channel.request(Namespaces(*after), HoldingsReply, deadline=deadline)
    held = [
        Holding(wire.checked_namespace(name, parts), blocks, size)
        for name, parts, blocks, size in answer.held
    ]
    return HoldingsPage(RemovalCursor(*answer.begin), tuple(held), answer.more)


async def _remove(
    namespace: Namespace, at: RemovalCursor, deadline: float, channel: Channel
) -> Removal:
    message = RemoveAll(namespace.name, namespace.parts, (*at,))
    answer = await channel.request(message, RemovedAll, deadline=deadline)
    following = RemovalCursor(*answer.at) if answer.at is not None else None
    return Removal(answer.blocks, answer.bytes, following)


def _now() -> float:
    return asyncio.get_running_loop().time()
