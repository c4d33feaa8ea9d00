"""Removes whole namespaces from a server, in steps that its other clients do not notice."""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from itertools import islice
from typing import Final, NamedTuple

from kvpool.operators import Holding, HoldingsPage, Removal, RemovalCursor
from kvpool.protocols import Peer
from kvpool.server.context import ServerContext
from kvpool.server.extension import Extensions, Handlers, ServerExtension, ServerParts
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.extent_state import State
from kvpool.server.state.store import Store
from kvpool.tenant_names import marker_of
from kvpool.types import Namespace
from kvpool.wire import messages as wire
from kvpool.wire.questions import Namespaces
from kvpool.wire.removal import HoldingsReply, RemoveAll, RemovedAll

#: Blocks that are removed in one turn of the loop: a millisecond or two.
_STEP: Final = 64
#: One call removes for so long, and then waits for the disk and the masters.
_CALL_S: Final = 0.2
#: Names that are looked at in one turn.
_NAMES_STEP: Final = 1024
#: Namespaces in one answer, with names of any length.
_HOLDINGS_MAX: Final = 256
#: Names are kept for so long until the next page is asked for.
_NAMES_S: Final = 60.0
#: Before all names.
_FIRST: Final = ("", 0)


class RemovalStep(NamedTuple):
    """What a step has removed, of one part, and where to go on; None: that was all."""

    part: int = 0
    digests: tuple[bytes, ...] = ()
    bytes: int = 0
    at: RemovalCursor | None = None


class NamespaceRemoval(ServerExtension):
    """Answers what `kvpool remove` asks of one server."""

    def __init__(self, parts: ServerParts) -> None:
        self._context = parts.context
        self._extensions = parts.extensions
        #: By tenant, while it asks page after page: what there was at its first one, until when.
        self._names: dict[str, tuple[list[Namespace], asyncio.TimerHandle]] = {}

    @property
    def handlers(self) -> Handlers:
        return {Namespaces: self._holdings, RemoveAll: self._remove_all}

    async def close(self) -> None:
        for tenant in list(self._names):
            self._forget(tenant)

    async def _holdings(self, peer: Peer, m: Namespaces) -> HoldingsReply:
        found = await self.holdings(peer.tenant, (m.after, m.parts))
        held = [(one.namespace.name, one.namespace.parts, *one[1:]) for one in found.held]
        return HoldingsReply((*found.begin,), held, found.more)

    async def holdings(self, tenant: str, after: tuple[str, int]) -> HoldingsPage:
        """What the server has of the namespaces behind `after`; of a tenant's only, if one asks.

        They are put in order once, for all pages: what comes meanwhile is not to be removed.
        """
        store = self._context.store
        begin = RemovalCursor(self._context.epoch, store.front.held.last_id)
        kept = None if after == _FIRST else self._names.get(tenant)
        names = kept[0] if kept is not None else await _in_order(store, marker_of(tenant))
        self._forget(tenant)
        ending = asyncio.get_running_loop().call_later(_NAMES_S, self._forget, tenant)
        self._names[tenant] = names, ending
        held: list[Holding] = []
        for one in islice(names, bisect_right(names, after, key=_name), None):
            found = holding(store, one)
            if found.blocks and len(held) == _HOLDINGS_MAX:
                return HoldingsPage(begin, tuple(held), more=True)
            if found.blocks:  # else it has left meanwhile
                held.append(found)
            await asyncio.sleep(0)  # it may have 256 parts in each tier
        self._forget(tenant)
        return HoldingsPage(begin, tuple(held), more=False)

    def _forget(self, tenant: str) -> None:
        if (kept := self._names.pop(tenant, None)) is not None:
            kept[1].cancel()

    async def _remove_all(self, peer: Peer, m: RemoveAll) -> RemovedAll:
        namespace, at = wire.checked_namespace(m.namespace, m.parts), RemovalCursor(*m.at)
        removal = await remove_all(self._context, self._extensions, namespace, at)
        if removal.blocks:
            self._context.audit_removed(peer, removal.blocks, f"RemoveAll {namespace.name}")
        following = (*removal.at,) if removal.at is not None else None
        return RemovedAll(removal.blocks, removal.bytes, following)


async def _in_order(store: Blocks, marker: str) -> list[Namespace]:
    """The namespaces of which a server has something, whose names begin so; in steps."""
    found: set[Namespace] = set()
    for tier in store.stores:
        keys = list(tier.index.by_part)
        for start in range(0, len(keys), _NAMES_STEP):
            some = keys[start : start + _NAMES_STEP]
            found.update([one for one, _ in some if one.name.startswith(marker)])
            await asyncio.sleep(0)
    names, runs = list(found), []
    for start in range(0, len(names), _NAMES_STEP):
        runs.append(sorted(names[start : start + _NAMES_STEP], key=_name))
        await asyncio.sleep(0)
    ordered: list[Namespace] = []
    for one in heapq.merge(*runs, key=_name):
        ordered.append(one)
        if len(ordered) % _NAMES_STEP == 0:
            await asyncio.sleep(0)
    return ordered


def holding(store: Blocks, namespace: Namespace) -> Holding:
    """What a server has of a namespace."""
    blocks = size = 0
    for part in range(namespace.parts):
        tiers = [_held(one, namespace, part) for one in store.online]
        blocks += max(count for count, _ in tiers)
        size += sum(used for _, used in tiers)
    return Holding(namespace, blocks, size)


def remove_written(
    store: Blocks, namespace: Namespace, at: RemovalCursor, blocks_max: int
) -> RemovalStep:
    """Remove some blocks of a namespace that were written up to generation `at.upto` of the
    front tier, at most `blocks_max`; what was written later stays.

    A step looks at one piece of one index. A block that is here from the first step to the last
    is removed, wherever its copies move meanwhile.
    """
    _, upto, tier, part, piece = at
    if tier >= len(store.stores):
        return RemovalStep()
    online = store.stores[tier] in store.online and part < namespace.parts
    found = store.stores[tier].index.blocks(namespace, part).piece(piece) if online else None
    if found is None:
        end = part + 1 >= namespace.parts or not online
        place = (tier + 1, 0, 0) if end else (tier, part + 1, 0)
        return RemovalStep(at=RemovalCursor(at.epoch, upto, *place))
    old = [e for e in found.values() if e.born <= upto and e.state is State.STORED]
    more, digests = len(old) > blocks_max, [entry.digest for entry in old[:blocks_max]]
    before = sum(_held(one, namespace, part)[1] for one in store.online)
    store.remove(namespace, digests, part=part)
    size = before - sum(_held(one, namespace, part)[1] for one in store.online)
    following = at if more else at._replace(piece=piece + 1)
    return RemovalStep(part, tuple(digests), size, following)


def _held(store: Store, namespace: Namespace, part: int) -> tuple[int, int]:
    """Its blocks in one tier, and the bytes of their extents. O(1)."""
    index = store.index.by_part.get((namespace, part))
    return (len(index.blocks), index.used) if index is not None else (0, 0)


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
        step = remove_written(context.store, namespace, following, _STEP)
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


def _name(one: Namespace) -> tuple[str, int]:
    return one.name, one.parts
