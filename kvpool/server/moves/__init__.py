"""Blocks that move from server to server; and into memory before they are read.

fetcher.py       blocks from and to other servers, which peer_servers.py reaches
hand_over.py     has others fetch blocks from here, as planners want it
drainer.py       when the server leaves: until when, and what is left
prefetcher.py    blocks that come up from a slower tier before they are read; it stands alone
state/           pure: what is under way, and the planners, which decide who gets what:
                 drain_plan.py (all blocks), copy_demand.py (lost copies of what is read),
                 share_plan.py (chains, to servers that have room, while this one is full)

The kernel knows none of these: `Moves` answers their messages, and is called for what they follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from kvpool.errors import BadMessage
from kvpool.moves import proposed
from kvpool.protocols import Peer
from kvpool.server.extension import Handlers, ServerExtension, ServerParts
from kvpool.server.moves.drainer import Drainer
from kvpool.server.moves.fetcher import Fetcher
from kvpool.server.moves.hand_over import HandOver
from kvpool.server.moves.peer_servers import PeerServers
from kvpool.server.moves.state.copy_demand import RepairPlanner
from kvpool.server.moves.state.share_plan import BalancePlanner
from kvpool.server.moves.state.wants import BlockName
from kvpool.shares import Recent
from kvpool.types import MoveStatus, Namespace, ServerStats
from kvpool.wire import messages as wire
from kvpool.wire.moves import Drain, Drained, Fetch, Propose, Proposed, unpack_part

#: Names of servers that fetch here.
_SERVERS_MAX: Final = 4096
#: What a client may ask us to wait for.
_WAIT_S_MAX: Final = 60.0


class Moves(ServerExtension):
    """All moves of one server's blocks."""

    def __init__(self, parts: ServerParts) -> None:
        config, context = parts.config, parts.context
        self._server, self._stores = parts.extensions, context.store.stores
        self.peers = PeerServers(
            context.server,
            parts.host,
            config.masters,
            cluster=parts.cluster,
            network=parts.network,
            transports=parts.transports,
        )
        self.fetcher = Fetcher(context, self.peers)
        durable = context.tiers[context.store.backing_tier].survives_restart
        self.repair = RepairPlanner(context.store)
        self.balance = BalancePlanner(context.store)
        planners = (self.repair, self.balance) if config.balance else (self.repair,)
        self.hand_over = HandOver(context, self.peers, planners)
        self.drainer = Drainer(context, self.peers, self.hand_over, durable=durable)
        #: Clients that fetch, the last ones: their reads are no use of a block.
        self._servers: Recent[str, bool] = Recent(_SERVERS_MAX)
        self._handlers: Handlers = {
            Propose: self._offer,
            Fetch: self._fetch,
            Drain: self._drain,
        }

    @property
    def handlers(self) -> Handlers:
        return self._handlers

    def start(self) -> None:
        self._server.on_read.append(self._read)
        self._server.on_removed.append(self.fetcher.revoke)
        self._server.pass_on.append(self.fetcher.pass_on)
        self._server.on_room_elsewhere.append(self._others_have_room)
        self.hand_over.start()

    async def leave(self) -> None:
        await self.hand_over.close()
        await self.drainer.close()

    async def close(self) -> None:
        await self.peers.close()

    def completed(self, stats: ServerStats) -> ServerStats:
        drained = self.drainer.report()
        counters = {
            "fetched_bytes": 0,  # a server that cannot fetch does not have it
            "handed_over_blocks": 0,
            "handed_over_bytes": 0,
            "repaired_copies": self.repair.repaired,
            **stats.counters,
        }
        return msgspec.structs.replace(
            stats,
            counters=counters,
            drain_left_blocks=drained.left_blocks,
            drain_left_bytes=drained.left_bytes,
        )

    def _read(self, namespace: Namespace, part: int, digests: Sequence[bytes], client: str) -> None:
        if any(store.index.copied for store in self._stores):
            fetches = self._servers.get("", client)
            if not fetches and self.repair.read(namespace, part, digests):
                self.hand_over.wake()

    def _others_have_room(self) -> None:
        self.balance.others_have_room()
        self.hand_over.wake()

    # --- requests ---------------------------------------------------------------------------

    async def _offer(self, peer: Peer, m: Propose) -> Proposed:
        asked = unpack_part(m)
        self._servers.put("", m.receiver, True)
        return proposed(self.fetcher.offer(*asked, m.receiver), m.digest_size)

    async def _fetch(self, peer: Peer, m: Fetch) -> wire.StatusReply:
        namespace, part, digests = unpack_part(m)
        deadline = asyncio.get_running_loop().time() + min(m.wait_s, _WAIT_S_MAX)
        asked = namespace, part, digests, m.source
        statuses = await self.fetcher.fetch(
            *asked, extra=m.extra, deadline=deadline, tenant=peer.tenant
        )
        if m.extra:
            for digest, status in zip(digests, statuses, strict=True):
                if status is MoveStatus.DONE:
                    self.repair.brought_extra(BlockName(namespace, part, digest))
            self.hand_over.wake()
        return wire.StatusReply(bytes(statuses))

    async def _drain(self, peer: Peer, m: Drain, *, wait: bool = False) -> Drained:
        if m.begin and m.cancel:
            raise BadMessage("a drain to begin and to cancel")
        if m.begin:
            self.drainer.begin(m.within_s, back_in_s=m.back_in_s)
        elif m.cancel:
            await self.drainer.cancel()
        report = await self.drainer.wait() if wait else self.drainer.report()
        return Drained(*report[:-1], [(*line,) for line in report.left])
