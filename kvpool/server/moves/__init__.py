"""Blocks that move: from server to server, and into memory before they are read.

fetcher.py       blocks from and to other servers, which peer_servers.py reaches
balancer.py      hands over chains to servers that have room, while this one is full
copy_keeper.py   has copies made of what is read
drainer.py       hands over all blocks before the server leaves
prefetcher.py    blocks that come up from a slower tier before they are read
state/           pure: who gets what, and what is under way

The kernel knows none of these: `Moves` answers their messages, and is called for what they follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvpool.protocols import Peer, PersistentTier
from kvpool.server.extension import Handlers, ServerExtension, ServerParts
from kvpool.server.moves.balancer import Balancer
from kvpool.server.moves.copy_keeper import CopyKeeper
from kvpool.server.moves.drainer import Drainer
from kvpool.server.moves.fetcher import Fetcher
from kvpool.server.moves.peer_servers import PeerServers
from kvpool.server.moves.prefetcher import Prefetcher
from kvpool.types import (
    DrainOrder,
    DrainReport,
    FetchStatus,
    Namespace,
    Offer,
    PrefetchStatus,
    ServerStats,
)
from kvpool.wire import messages as wire


class Moves(ServerExtension):
    """All moves of one server's blocks."""

    def __init__(self, parts: ServerParts) -> None:
        config, context = parts.config, parts.context
        self._server = parts.extensions
        self.peers = PeerServers(
            context.server,
            parts.host,
            config.masters,
            cluster=parts.cluster,
            network=parts.network,
            transports=parts.transports,
        )
        self.fetcher = Fetcher(context, self.peers, rate=config.fetch_rate)
        self.prefetcher = Prefetcher(context.store, context.mover, context.on_change, context.tasks)
        durable = isinstance(context.tiers[context.store.backing_tier], PersistentTier)
        self.drainer = Drainer(context, self.peers, durable=durable)
        self.balancer = Balancer(context, self.peers, enabled=config.balance)
        self.keeper = CopyKeeper(context, self.peers)
        self._handlers: Handlers = {
            wire.Propose: self._offer,
            wire.Fetch: self._fetch,
            wire.Prefetch: self._prefetch,
            wire.Drain: self._drain,
        }

    @property
    def handlers(self) -> Handlers:
        return self._handlers

    def start(self) -> None:
        self._server.on_read.append(self.keeper.read)
        self._server.on_removed.append(self.fetcher.revoke)
        self._server.pass_on.append(self.fetcher.pass_on)
        self._server.on_room_elsewhere.append(self.balancer.others_have_room)
        self.prefetcher.start()
        self.balancer.start()

    async def leave(self) -> None:
        await self.balancer.close()
        await self.drainer.close()
        await self.keeper.close()

    async def close(self) -> None:
        await self.peers.close()
        await self.prefetcher.close()

    def completed(self, stats: ServerStats) -> ServerStats:
        drained = self.drainer.report()
        counters = {
            "fetched_bytes": 0,  # a server that cannot fetch does not have it
            "handed_over_blocks": 0,
            "handed_over_bytes": 0,
            **stats.counters,
            **self.prefetcher.counters,
        }
        return msgspec.structs.replace(
            stats,
            counters=counters,
            drain_left_blocks=drained.left_blocks,
            drain_left_bytes=drained.left_bytes,
        )

    # --- requests ---------------------------------------------------------------------------

    def _offer(
        self, peer: Peer, namespace: Namespace, part: int, digests: Sequence[bytes], receiver: str
    ) -> list[Offer]:
        self.keeper.server_fetches(receiver)
        return self.fetcher.offer(namespace, part, digests, receiver)

    async def _fetch(
        self,
        peer: Peer,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        source: str,
        *,
        extra: bool,
        deadline: float,
    ) -> list[FetchStatus]:
        statuses = await self.fetcher.fetch(
            namespace, part, digests, source, extra=extra, deadline=deadline, tenant=peer.tenant
        )
        if extra:
            brought = zip(digests, statuses, strict=True)
            new = [digest for digest, status in brought if status is FetchStatus.FETCHED]
            self.keeper.brought_extra(namespace, part, new)
        return statuses

    def _prefetch(
        self, peer: Peer, namespace: Namespace, part: int, digests: Sequence[bytes]
    ) -> list[PrefetchStatus]:
        return self.prefetcher.prefetch(namespace, part, digests)

    async def _drain(self, peer: Peer, order: DrainOrder, *, wait: bool = False) -> DrainReport:
        if order.begin:
            self.drainer.begin(order.within_s, back_in_s=order.back_in_s)
        elif order.cancel:
            await self.drainer.cancel()
        return await self.drainer.wait() if wait else self.drainer.report()
