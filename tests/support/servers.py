"""A block server of a test: a little memory, least recently used."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.config import ServerConfig
from kvpool.guard import TenantSecrets
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Transport
from kvpool.server.block_server import BlockServer
from kvpool.server.eviction.lru import LRU
from kvpool.types import Cluster
from kvpool_tiers.dram import Dram


def small_server(
    config: ServerConfig,
    cluster: Cluster,
    network: TcpNetwork,
    transports: Mapping[str, Transport],
    *,
    tenants: TenantSecrets | None = None,
    capacity: int = 1 << 20,
) -> BlockServer:
    return BlockServer(
        config,
        cluster=cluster,
        network=network,
        transports=transports,
        tiers=[Dram(capacity, prefault=False)],
        policy=LRU(),
        tenants=tenants,
    )
