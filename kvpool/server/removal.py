"""Removes whole namespaces from a server, in steps that its other clients do not notice."""

from __future__ import annotations

import asyncio
import heapq
from typing import Final

from kvpool.protocols import Peer
from kvpool.server.context import ServerContext
from kvpool.server.extension import Extensions, Handlers, ServerExtension, ServerParts
from kvpool.tenant_names import marker_of
from kvpool.types import HoldingsPage, Namespace, Removal, RemovalCursor
from kvpool.wire import messages as wire

#: Blocks that are removed in one turn of the loop: a millisecond or two.
_STEP: Final = 64
#: One call removes for so long, and then waits for the disk and the masters.
_CALL_S: Final = 0.2
#: Names that are looked at in one turn.
_NAMES_STEP: Final = 1024
#: Namespaces in one answer, with names of any length.
_HOLDINGS_MAX: Final = 256


class NamespaceRemoval(ServerExtension):
    """Answers what `kvpool remove` asks of one server."""

    def __init__(self, parts: ServerParts) -> None:
        self._context = parts.context
        self._extensions = parts.extensions

    @property
    def handlers(self) -> Handlers:
        return {wire.Holdings: self._holdings, wire.RemoveAll: self._remove_all}

    async def _holdings(self, peer: Peer, after: tuple[str, int]) -> HoldingsPage:
        return await holdings(self._context, peer.tenant, after)

    async def _remove_all(self, peer: Peer, namespace: Namespace, at: RemovalCursor) -> Removal:
        removal = await remove_all(self._context, self._extensions, namespace, at)
        if removal.blocks:
            request = f"RemoveAll {namespace.name}"
            self._context.audit_removed(peer, removal.blocks, request)
        return removal


async def holdings(context: ServerContext, tenant: str, after: tuple[str, int]) -> HoldingsPage:
    """What the server has of the namespaces behind `after`; of a tenant's only, if one asks."""
    store, marker = context.store, marker_of(tenant)
    begin = RemovalCursor(context.epoch, store.front.last_id)
    first: set[tuple[str, int]] = set()
    for tier in store.stores:
        keys = tier.names()
        for start in range(0, len(keys), _NAMES_STEP):
            names = {(one.name, one.parts) for one, _ in keys[start : start + _NAMES_STEP]}
            first |= {one for one in names if one > after and one[0].startswith(marker)}
            first = set(heapq.nsmallest(_HOLDINGS_MAX + 1, first))
            await asyncio.sleep(0)
    page = sorted(first)[:_HOLDINGS_MAX]
    held = [store.held(Namespace(*name)) for name in page]
    return HoldingsPage(begin, tuple(one for one in held if one.blocks), len(first) > len(page))


async def remove_all(
    context: ServerContext, extensions: Extensions, namespace: Namespace, at: RemovalCursor
) -> Removal:
    """Remove blocks of a namespace, from `at` on, as far as they were there when it began.

    Of what an earlier process of this server had, all that this one has found in its file.

    What it returns as removed is gone from the disk, and waits a moment until masters know. Each
    turn of the loop is short; after some of them the call ends, and the next one goes on.
    """
    loop = asyncio.get_running_loop()
    until, blocks, size = loop.time() + _CALL_S, 0, 0
    mine = at.epoch == context.epoch
    following: RemovalCursor | None = at if mine else RemovalCursor(context.epoch)
    while following is not None and loop.time() < until:
        step = context.store.remove_written(namespace, following, _STEP)
        following = step.at
        if step.digests:
            blocks, size = blocks + len(step.digests), size + step.bytes
            extensions.removed(namespace, step.digests, step.part)
            context.on_change()
            for pass_on in extensions.pass_on:
                await pass_on(namespace, step.digests, step.part)
        await asyncio.sleep(0)
    await context.mover.erase()  # it must not be back after a restart
    await context.wait_until_announced(loop.time() + 1.0)
    return Removal(blocks, size, following)
