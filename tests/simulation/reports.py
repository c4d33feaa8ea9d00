"""Two readers report one corrupt block, while a writer stores it anew between their reports.

What a report says holds for the copy whose bytes it has looked at, not for one that has come under
the same key since. So each copy that leaves as corrupt must be one that a fault has changed; that
is checked by `WatchedStore.remove` (design: simulation).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

from kvpool.checksum import block_seeds, checksum
from kvpool.protocols import Peer, ReserveRequest
from kvpool.types import ROOT, WriteStatus
from tests.simulation.blocks import ONE, value

if TYPE_CHECKING:
    from tests.simulation.nodes import ServerNode
    from tests.simulation.world import World

#: Further kind of fault: a block rots, and two readers report it.
REPORTS: Final = "reports meet"
_BLOCKS: Final = 6
_TURNS_MAX: Final = 100
_WAIT_S: Final = 1.0
_PLAY_S: Final = 30.0


async def meet(world: World) -> None:
    """At one server, while it runs; what cannot be stored there is not reported."""
    nodes = [node for node in world.servers if node.process.alive and node.server is not None]
    if not nodes:
        return
    node = world.rng["reports"].choice(nodes)
    with world.incident(REPORTS, node.name):
        playing = node.process.spawn(_Reports(world, node).play())
        # It never ends where the process is frozen, and then killed.
        done, _ = await asyncio.wait([playing], timeout=_PLAY_S)
        for one in done:
            one.result()


class _Reports:
    def __init__(self, world: World, node: ServerNode) -> None:
        self._world = world
        self._node = node
        server = cast(Any, node.server)
        self._connections = [server.connect(Peer(f"reader-{n}", "tcp")) for n in range(3)]

    async def play(self) -> None:
        writer, first, second = self._connections
        digests = self._world.catalog.fresh(_BLOCKS)
        try:
            if not all([await self._store(writer, digest) for digest in digests]):
                return
            bad = digests[0]
            self._spoil(bad)
            late = asyncio.ensure_future(second.report_corruption(ONE, 0, digests))
            await asyncio.sleep(0)
            soon = asyncio.ensure_future(first.report_corruption(ONE, 0, [bad]))
            for _ in range(_TURNS_MAX):
                if self._node.store.index.peek(ONE, 0, bad) is None:
                    self._world.truth.probes.add("a block was stored anew between two reports")
                    await self._store(writer, bad)
                    break
                await asyncio.sleep(0)
            await asyncio.gather(late, soon, return_exceptions=True)
        finally:
            for connection in self._connections:
                connection.close()

    async def _store(self, writer: Any, digest: bytes) -> bool:
        """Whether it is there now, and was not before."""
        data = value(ONE, digest, 0)
        request = ReserveRequest(ONE, 0, [digest], [ROOT], [len(data)])
        (answer,) = writer.reserve_now(request)
        if answer.status is not WriteStatus.RESERVED:
            return False
        (view,) = writer.views([answer])
        view[:] = data
        (seed,) = block_seeds(ONE, 0, [digest])
        deadline = asyncio.get_running_loop().time() + _WAIT_S
        await writer.seal([answer.id], [checksum(data, seed)], visible=False, deadline=deadline)
        return True

    def _spoil(self, digest: bytes) -> None:
        entry = self._node.store.index.peek(ONE, 0, digest)
        if entry is not None:
            self._world.truth.history(ONE, digest, 0).corrupted += 1
            self._node.store.corrupted.add((entry.offset, entry.generation))
            self._node.memory[entry.offset] ^= 1
