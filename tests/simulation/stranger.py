"""A client that takes all that a server gives, and then does nothing more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvpool.errors import KvpoolError
from kvpool.types import Cluster
from kvpool.wire.messages import Read, Reserve, pack_parents
from kvpool_transports.streams import requests
from kvpool_transports.streams.stream import Stream
from tests.simulation.blocks import ONE, value

if TYPE_CHECKING:
    from tests.simulation.nodes import ServerNode
    from tests.simulation.world import World

#: How long it would keep what it has reserved.
_WAIT_S: Final = 60.0


class Stranger:
    """Connections to one server; each pins or reserves as much as it can, then is silent."""

    def __init__(self, world: World, node: ServerNode, *, writes: bool) -> None:
        self._world = world
        self._node = node
        self.writes = writes
        self._rng = world.rng["strangers"]
        self._streams: list[Stream] = []
        self.process = world.process(f"stranger-{world.loop.now:g}", node.host)

    async def take(self, connections: int) -> None:
        """Connect, ask for everything, and read no answer."""

        async def run() -> None:
            for number in range(connections):
                try:
                    await self._take(number)
                except (KvpoolError, OSError) as error:
                    self._world.note(f"{self.process.name} {type(error).__name__}")

        await self.process.spawn(run())

    async def _take(self, number: int) -> None:
        loop, server = asyncio.get_running_loop(), self._node.server
        assert server is not None
        address = self._rng.choice(server.addresses).partition("://")[2]
        host, _, port = address.partition(":")
        _, stream = await loop.create_connection(Stream, host, int(port))
        self._streams.append(stream)
        deadline = loop.time() + 2
        await requests.handshake(
            stream, cluster=Cluster(), client="stranger", server="", deadline=deadline
        )
        if self.writes:
            digests = self._world.catalog.fresh(12)
            sizes = [len(value(ONE, digest, 0)) for digest in digests]
            parents = pack_parents([b""] * len(digests), len(digests[0]))
            packed = b"".join(digests)
            message = Reserve(ONE.name, 1, len(digests[0]), packed, 0, parents, sizes, _WAIT_S)
            await stream.send(message, deadline=deadline)
        else:
            held = self._node.store.index.inventory()
            digests = [entry.digest for entry in held if entry.index.namespace == ONE]
            if digests:
                sizes = [1 << 20] * len(digests)
                packed = b"".join(digests)
                await stream.send(
                    Read(ONE.name, 1, len(digests[0]), packed, 0, sizes), deadline=deadline
                )
