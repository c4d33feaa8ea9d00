"""The whole pool in one process: for a notebook, a test, a first look.

    async with kvpool.dev.pool("256MiB") as pool:
        ...

Master, servers and client are the real ones; only the transport is `inproc`, and tcp and shm are
there, too, so that other processes can join.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from kvpool import registry
from kvpool.client.pool import Pool
from kvpool.config import WRITE_THROUGH, ClientConfig, MasterConfig, ServerConfig, parse_transport
from kvpool.master.service import Master
from kvpool.master.state.directory import Directory
from kvpool.master.state.server_table import SERVERS_PER_HOST_MAX, ServerTable
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Transport
from kvpool.server.block_server import BlockServer
from kvpool.types import Cluster
from kvpool.units import parse_size

_REGISTERED_WITHIN_S = 10.0
_OPEN = Cluster()


class Dev:
    """A master and block servers in this process."""

    def __init__(
        self,
        master: Master,
        servers: list[BlockServer],
        transports: dict[str, Transport],
        cluster: Cluster = _OPEN,
    ) -> None:
        self._cluster = cluster
        self.master = master
        self.servers = servers
        self._transports = transports

    @property
    def address(self) -> str:
        """The master's `host:port`."""
        return self.master.address

    @asynccontextmanager
    async def pool(self, config: ClientConfig | None = None) -> AsyncIterator[Pool]:
        """A client of this pool, over inproc unless `config` says otherwise."""
        config = config or ClientConfig(masters=[self.address])
        network = TcpNetwork(self._cluster)
        chosen = {
            scheme: self._transports[scheme]
            for scheme, _, _ in map(parse_transport, config.transports)
            if scheme in self._transports
        }
        pool = Pool(
            config, cluster=self._cluster, network=network, transports=chosen, owns_network=True
        )
        async with pool:
            yield pool


@asynccontextmanager
async def serve(
    capacity: int | str = "256MiB",
    *,
    servers: int = 1,
    bind: str = "127.0.0.1:0",
    listen: tuple[str, ...] = ("inproc://", "shm://", "tcp://127.0.0.1:0"),
    transports: Mapping[str, Transport] | None = None,
    prefault: bool = False,
    tiers: Sequence[str] = (),
    write_mode: str = WRITE_THROUGH,
    cluster: Cluster = _OPEN,
) -> AsyncIterator[Dev]:
    """A master at `bind` and servers of `capacity` bytes each; all end with the `with`.

    `transports` are by scheme; those of `listen` that are not there must be installed. With
    `tiers`, as in a configuration, these instead of `capacity`; `{server}` in one becomes the
    server's id, because a file serves one server. `write_mode` is that of the configuration.
    """
    async with AsyncExitStack() as stack:
        network = TcpNetwork(cluster)
        stack.callback(network.close)
        chosen = dict(transports or {})
        if missing := [text for text in listen if parse_transport(text).scheme not in chosen]:
            chosen |= registry.transports(missing, strict=True)
        # All of them are on one host; a real pool's master bounds how many may be.
        table = ServerTable(per_host_max=max(servers, SERVERS_PER_HOST_MAX))
        master = Master(MasterConfig(bind=bind), network, directory=Directory(table))
        await master.start()
        stack.push_async_callback(master.close)
        started = []
        for number in range(servers):
            config = ServerConfig(
                id=f"dev-{number}",
                masters=[master.address],
                capacity=parse_size(capacity),
                listen=list(listen),
                tiers=[tier.replace("{server}", f"dev-{number}") for tier in tiers],
                write_mode=write_mode,
            )
            opened = registry.tiers(config, prefault=prefault)
            server = BlockServer(
                config,
                cluster=cluster,
                network=network,
                transports=chosen,
                tiers=opened,
                policy=registry.policy(config.policy, registry.pool_tier(opened).capacity),
            )
            stack.push_async_callback(server.close)
            await server.start()
            await server.wait_until_registered(
                asyncio.get_running_loop().time() + _REGISTERED_WITHIN_S
            )
            started.append(server)
        yield Dev(master, started, chosen, cluster)


@asynccontextmanager
async def pool(capacity: int | str = "256MiB", *, servers: int = 1) -> AsyncIterator[Pool]:
    """A pool and a client of it, both gone with the `with`."""
    async with serve(capacity, servers=servers) as dev, dev.pool() as client:
        yield client
