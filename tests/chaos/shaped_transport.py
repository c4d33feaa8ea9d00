"""A transport whose listener is behind a proxy: slow links on one machine."""

from __future__ import annotations

from kvpool.protocols import BlockStore, Channel, Listener, Transport
from kvpool.types import Cluster
from tests.chaos.proxy import LinkConditions, Proxy


class ShapedTransport:
    """Wraps a transport over TCP: a proxy is between each client and the server."""

    def __init__(self, inner: Transport, conditions: LinkConditions | None = None) -> None:
        self._inner = inner
        self.conditions = conditions or LinkConditions()
        self.proxies: list[Proxy] = []

    @property
    def scheme(self) -> str:
        return self._inner.scheme

    @property
    def same_host(self) -> bool:
        return self._inner.same_host

    @property
    def authenticated(self) -> bool:
        return self._inner.authenticated

    async def listen(self, address: str, store: BlockStore) -> Listener:
        listener = await self._inner.listen(address, store)
        proxy = Proxy(listener.address.partition("://")[2])
        proxy.conditions = self.conditions
        await proxy.start()
        self.proxies.append(proxy)
        return _ShapedListener(listener, proxy, self.scheme)

    async def connect(
        self, address: str, *, cluster: Cluster, client: str, deadline: float
    ) -> Channel:
        return await self._inner.connect(address, cluster=cluster, client=client, deadline=deadline)


class _ShapedListener:
    def __init__(self, inner: Listener, proxy: Proxy, scheme: str) -> None:
        self._inner = inner
        self._proxy = proxy
        self._scheme = scheme

    @property
    def address(self) -> str:
        return f"{self._scheme}://{self._proxy.address}"

    async def close(self) -> None:
        await self._proxy.close()
        await self._inner.close()
