"""An object store in this process, which fails as it is told to, and a tier that uses it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import pytest

from kvpool import Cluster, Pool, registry
from kvpool.config import ClientConfig, MasterConfig, ServerConfig
from kvpool.dev import Dev
from kvpool.errors import Unavailable
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols.cold_tier import Gone, Listed
from kvpool.server.block_server import BlockServer
from kvpool.server.cold import ColdRing
from kvpool_tiers.objects.tier import Objects


class Shelf:
    """What all servers see: bytes and times by name."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        #: How far its clock is ahead of everybody else's.
        self.ahead_s = 0.0
        self.requests: Counter[str] = Counter()
        #: Of a request and a name: why it fails; empty if it does not.
        self.why: Callable[[str, str], str] = lambda request, name: ""
        #: And how long it takes.
        self.delay_s: Callable[[str, str], float] = lambda request, name: 0.0

    def names(self, folder: str) -> list[str]:
        """In a folder, whatever the cluster is, without those of the servers' signs of life."""
        return sorted(one for one in self.objects if one.split("/")[1] == folder)

    def fails(self, why: str, *requests: str) -> None:
        self.why = lambda request, name: why if request in (requests or (request,)) else ""

    def works(self) -> None:
        self.why, self.delay_s = lambda request, name: "", lambda request, name: 0.0

    def rot(self, folder: str, change: Callable[[bytes], bytes]) -> None:
        for name in self.names(folder):
            self.objects[name] = change(self.objects[name])


class ShelfObjects:
    def __init__(self, shelf: Shelf, prefix: str) -> None:
        self._shelf = shelf
        self._prefix = prefix

    async def put(self, name: str, data: bytes | memoryview) -> None:
        name = await self._asked("put", name)
        self._shelf.objects[name] = bytes(data)
        self._shelf.times[name] = time.time() + self._shelf.ahead_s

    async def get(self, name: str, start: int, size: int) -> bytes:
        name = await self._asked("get", name)
        if name not in self._shelf.objects:
            raise Gone("there is no such object")
        return self._shelf.objects[name][start : start + size]

    async def listing(self, prefix: str) -> list[Listed]:
        prefix = await self._asked("list", prefix)
        shelf, cut = self._shelf, len(self._prefix) + 1
        return [
            Listed(name[cut:], len(data), shelf.times[name])
            for name, data in shelf.objects.items()
            if name.startswith(prefix)
        ]

    async def folders(self, prefix: str) -> list[str]:
        prefix = await self._asked("list", prefix)
        found = [one.removeprefix(prefix) for one in self._shelf.objects if one.startswith(prefix)]
        return sorted({one.split("/")[0] for one in found if "/" in one})

    async def delete(self, name: str) -> None:
        name = await self._asked("delete", name)
        self._shelf.objects.pop(name, None)

    async def _asked(self, request: str, name: str) -> str:
        self._shelf.requests[request] += 1
        if delay_s := self._shelf.delay_s(request, name):
            await asyncio.sleep(delay_s)
        if why := self._shelf.why(request, name):
            raise Unavailable(why)
        return f"{self._prefix}/{name}"


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return shelf_in(monkeypatch)


def shelf_in(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """While the test runs, `--tier shelf:any:SIZE` is a tier in this store."""
    made = Shelf()

    class ShelfTier(Objects):
        name = "shelf"
        bounds: ClassVar = {**Objects.bounds, "beat_s": (0.01, 3600)}

        def objects(self, prefix: str) -> ShelfObjects:
            return ShelfObjects(made, prefix)

    class Entry:
        @staticmethod
        def load() -> type[Objects]:
            return ShelfTier

    installed = registry.installed

    def also(group: str) -> dict[str, object]:
        return {**installed(group), **({"shelf": Entry} if group == registry.TIERS else {})}

    monkeypatch.setattr(registry, "installed", also)
    return made


class Fleet:
    """A master, and servers that come, go and are lost, all in this process."""

    def __init__(self, tiers: Sequence[str], cluster: Cluster) -> None:
        self._tiers = tiers
        self._cluster = cluster
        self._network = TcpNetwork(cluster)
        self._transports = registry.transports(["inproc://"])
        self.master = Master(MasterConfig(bind="127.0.0.1:0"), self._network)
        self.servers: dict[str, BlockServer] = {}

    async def __aenter__(self) -> Fleet:
        await self.master.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for server in self.servers.values():
            await server.close()
        await self.master.close()
        self._network.close()

    async def start(self, id: str, tiers: Sequence[str] = ()) -> BlockServer:
        config = ServerConfig(
            id=id,
            masters=[self.master.address],
            listen=["inproc://"],
            tiers=list(tiers or self._tiers),
        )
        server = BlockServer(
            config,
            cluster=self._cluster,
            network=self._network,
            transports=self._transports,
            tiers=registry.tiers(config, prefault=False),
        )
        self.servers[id] = server
        await server.start()
        await server.wait_until_registered(asyncio.get_running_loop().time() + 5)
        return server

    async def lose(self, id: str) -> None:
        """As kill -9 does: it says nothing to anybody, and writes nothing any more."""
        server = self.servers.pop(id)
        ring = ring_of(server)
        ring._leaving = True
        ring._stop()
        await server.close()
        await asyncio.sleep(0.15)  # three beats of 40 ms: who looks now knows

    async def stop(self, id: str) -> None:
        await self.servers.pop(id).close()

    def pool(self) -> AbstractAsyncContextManager[Pool]:
        dev = Dev(self.master, [], self._transports, self._cluster)
        return dev.pool(ClientConfig(masters=[self.master.address], timeout_s=5))


def ring_of(server: BlockServer) -> ColdRing:
    (found,) = (one for one in server.extensions.all if isinstance(one, ColdRing))
    return found
