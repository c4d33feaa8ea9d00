"""Copies of what many chains share, where such chains begin.

A chain that begins on another server than the block it goes on from depends on both: whoever loses
the first blocks of many chains loses all of these. So the client that began the chain has its
server fetch a copy of them, in the background: of each block that has only one (design: placement).
Each copy takes the memory of other blocks. Two are enough that one server may die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from kvpool import logs, moves
from kvpool.client.extension import ClientExtension, ClientParts
from kvpool.errors import Overloaded, PeerError, Unavailable
from kvpool.protocols import Channel, WriteOptions
from kvpool.types import BATCH_BLOCKS_MAX, ROOT, MoveStatus, Namespace

log = logs.get("kvpool.client")

#: One copy takes at most so long; what is missing then is fetched when the next chain begins there.
_COPY_S: Final = 10.0
#: Pairs of a block and a server that are not looked at again for so many seconds: a copy may have
#: been evicted since. At the limit all are forgotten.
_DONE_MAX: Final = 4096
_DONE_S: Final = 30.0
#: Copies of a block that many chains share, such as a system prompt. 1: none are made.
SHARED_COPIES_MAX: Final = 2


class SharedCopies(ClientExtension):
    """Has servers fetch shared blocks, one copy at a time: SHARED_COPIES_MAX in all.

    A copy that cannot be made is left out: nothing waits for it.
    """

    def __init__(self, parts: ClientParts) -> None:
        self._lookup = parts.context.lookup
        self._servers = parts.context.servers
        self._counters = parts.context.counters
        self._done: dict[tuple[bytes, str], float] = {}
        self._task: asyncio.Task[None] | None = None
        parts.on_apart.append(self.wrote)

    def wrote(self, options: WriteOptions, parent: bytes, last: bytes, server: str) -> None:
        """A chain that goes on from `parent` was written to `server` up to `last`."""
        if SHARED_COPIES_MAX < 2:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        known = parent == ROOT or now < self._done.get((parent, server), 0.0)
        self._finish(last, server)
        if known or self._task is not None:
            return
        self._task = loop.create_task(self._copy(options, parent, server, now + _COPY_S))
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """End the copy that is being made. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- inside --------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a copy of shared blocks has failed", why=repr(error))

    async def _copy(
        self, options: WriteOptions, parent: bytes, server: str, deadline: float
    ) -> None:
        namespace, part = options.namespace, options.part
        lacking: dict[str, list[bytes]] = {}  # by the server that has them
        statuses: list[MoveStatus] = []
        try:
            (holders,) = await self._lookup.holders(namespace, part, [parent], deadline)
            chain: list[bytes] = []
            if holders and server not in holders:
                chain = await self._ancestors(namespace, part, parent, server, deadline)
            # What begins the chain may begin others, too, and have its copies.
            each = await self._lookup.holders(namespace, part, chain, deadline) if chain else []
            for digest, found in zip(chain, each, strict=True):
                if needs_copy(server, found, SHARED_COPIES_MAX):
                    lacking.setdefault(found[0], []).append(digest)
            for source, digests in lacking.items():

                async def fetch(
                    channel: Channel, source: str = source, digests: list[bytes] = digests
                ) -> list[MoveStatus]:
                    asked = namespace, part, digests, source
                    return await moves.fetch(channel, *asked, deadline=deadline)

                statuses += await self._servers.call(server, fetch, deadline)
        except (Unavailable, PeerError, Overloaded) as error:  # a later chain tries it again
            log.debug("shared blocks are not copied", server=server, why=str(error))
            return
        finally:
            self._counters["shared_copies"] += statuses.count(MoveStatus.DONE)
        if MoveStatus.NOT_YET not in statuses:
            self._finish(parent, server)

    async def _ancestors(
        self, namespace: Namespace, part: int, block: bytes, receiver: str, deadline: float
    ) -> list[bytes]:
        """The block and those before it that are here, head first."""
        chain: dict[bytes, None] = {}
        source = ""
        while block != ROOT and block not in chain and len(chain) < BATCH_BLOCKS_MAX:
            digest = block

            async def offer(channel: Channel, digest: bytes = digest) -> bytes | None:
                asked = namespace, part, [digest], receiver
                (offered,) = await moves.offer(channel, *asked, deadline=deadline)
                return offered.parent if offered.status.hit else None

            parent = await self._servers.call(source, offer, deadline) if source else None
            if parent is None:
                (holders,) = await self._lookup.holders(namespace, part, [block], deadline)
                if not holders or source == (best := self._servers.rank(holders)[0]):
                    break
                source = best
                continue
            chain[digest] = None
            block = parent
        return list(chain)[::-1]

    def _finish(self, parent: bytes, server: str) -> None:
        if len(self._done) >= _DONE_MAX:
            self._done.clear()
        self._done[parent, server] = asyncio.get_running_loop().time() + _DONE_S


def needs_copy(server: str, holders: Collection[str], copies_max: int) -> bool:
    """Whether a block before a chain that began on `server` should be copied there."""
    return server not in holders and 0 < len(holders) < copies_max
