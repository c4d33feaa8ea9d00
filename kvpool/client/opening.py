"""How a client is opened: with its transports and network, when a master has answered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from kvpool import registry, tracing
from kvpool.client.pool import Pool
from kvpool.config import ClientConfig, checked_client, checked_cluster
from kvpool.errors import KvpoolError, MasterLost, Unavailable
from kvpool.net.diagnose import diagnose_unreachable
from kvpool.net.zmq_rpc import ZmqNetwork
from kvpool.types import Cluster


async def connect(
    *masters: str, config: ClientConfig | None = None, cluster: str | Cluster = "default"
) -> Pool:
    """Open a pool on the masters at `host:port`; any one of them is enough.

    A cluster with a secret is `Cluster(name, secret)`. Raises MasterLost when none answers within
    `timeout_s` of the configuration; ConfigError for a value that is not valid; Unavailable when
    this process cannot open a file or a socket.
    """
    try:
        return await _connect(masters, config, cluster)
    except OSError as error:
        if isinstance(error, KvpoolError):
            raise
        raise Unavailable(f"cannot open a pool: {error}") from error


async def _connect(
    masters: Sequence[str], config: ClientConfig | None, cluster: str | Cluster
) -> Pool:
    cluster = checked_cluster(cluster)
    if config is None:
        config = ClientConfig(masters=list(masters)) if masters else ClientConfig()
    config = checked_client(config)
    transports = registry.transports(config.transports)
    network = ZmqNetwork(cluster)
    try:
        pool = _pool_class()(
            config, cluster=cluster, network=network, transports=transports, owns_network=True
        )
    except BaseException:
        network.close()
        raise
    try:
        # Patient: a master to which hundreds of clients connect at once answers after seconds.
        await pool._servers.refresh(pool._begin(None), patient=True)
    except MasterLost as error:
        await pool.close()
        raise MasterLost(f"{error}{await diagnose_unreachable(config.masters, cluster)}") from None
    except BaseException:
        await pool.close()
        raise
    return pool


def _pool_class() -> Callable[..., Pool]:
    """One that begins spans, where the environment asks for them."""
    tracer = tracing.tracer()
    if tracer is None:
        return Pool
    from kvpool.client.traced_pool import TracedPool

    return functools.partial(TracedPool, tracer=tracer)
