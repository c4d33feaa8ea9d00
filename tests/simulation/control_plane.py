"""The simulated control plane: requests to masters and their replies, as single messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.net.requests import PendingRequests, cluster_id
from kvpool.protocols import CountedListener, Handler, Link
from tests.simulation.loop import PROCESS, Process

if TYPE_CHECKING:
    from tests.simulation.network import Net


class SimNetwork:
    """The control plane of one process (`protocols.Network`)."""

    def __init__(self, net: Net, cluster: str = "default") -> None:
        self._net = net
        self._process = PROCESS.get()
        self._cluster = cluster_id(cluster)
        self.authenticated = False

    def connect(self, address: str) -> Link:
        return _SimLink(self._net, self._process, address, self._cluster)

    async def serve(self, address: str, handler: Handler) -> CountedListener:
        self._net.serve(address, handler, self._cluster)
        return _SimListener(self._net, self._process, address)

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


class _SimLink(PendingRequests):
    def __init__(self, net: Net, process: Process, address: str, cluster: int) -> None:
        super().__init__(address, cluster)
        self._net = net
        self._process = process

    def _transmit(self, message: bytes) -> None:
        self._net.request(self._process, self.address, message, self)


class _SimListener:
    callers = refused = 0

    def __init__(self, net: Net, process: Process, address: str) -> None:
        self.address = address
        self._net = net
        self._process = process

    async def close(self) -> None:
        self._net.stop_serving(self.address, self._process)
