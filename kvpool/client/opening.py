"""How a client is opened: with its transports and network, when a master has answered."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, cast

from msgspec.structs import replace

from kvpool import registry
from kvpool.arguments import as_text
from kvpool.client.pool import Pool
from kvpool.config import ClientConfig, checked_client
from kvpool.errors import ConfigError, KvpoolError, Unavailable
from kvpool.guard import of_secrets
from kvpool.net.control_network import TcpNetwork
from kvpool.types import Cluster

#: What makes the class of a pool that begins spans, where the environment has this variable.
TRACED: Final = {
    "KVPOOL_OTEL": "kvpool.client.traced_pool:pool_class",
}


class Opening(Coroutine[Any, Any, Pool]):
    """To be awaited, or for an `async with`, which closes the pool at its end."""

    def __init__(self, opening: Coroutine[Any, Any, Pool]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, Pool]:
        return self._opening.__await__()

    async def __aenter__(self) -> Pool:
        self._pool = await self._opening
        return self._pool

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    def send(self, value: Any, /) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()


def connect(
    *masters: str,
    transports: Sequence[str] | None = None,
    timeout: float | str | None = None,
    secret_file: str | Path = "",
    config: ClientConfig | None = None,
    cluster: str | Cluster = "default",
) -> Opening:
    """Open a pool on the masters at `host:port`, by `await` or `async with`; any one is enough.

    `transports` are used best first, `timeout` is for each call, in seconds or as `500ms`; they and
    `masters` replace those of `config`, which has all other settings. `secret_file` has the
    cluster's secret or is the key of a tenant; or pass `Cluster(name, secret)`. Raises MasterLost
    when no master answers within the timeout; ConfigError for a value that is not valid;
    Unavailable when this process cannot open a file or a socket.
    """
    config = client_config(config, masters, transports, timeout)
    return Opening(_connect(config, checked_cluster(cluster, secret_file)))


def client_config(
    config: ClientConfig | None,
    masters: Sequence[str],
    transports: Sequence[str] | None,
    timeout: float | str | None,
) -> ClientConfig:
    """The configuration with what is given beside it. Raises ConfigError."""
    known = checked_client(ClientConfig() if config is None else config)
    given = {"masters": masters or None, "transports": transports, "timeout_s": timeout}
    chosen = {name: value for name, value in given.items() if value is not None}
    return checked_client(replace(known, **chosen))


def checked_cluster(cluster: str | Cluster, secret_file: str | Path = "") -> Cluster:
    """A cluster by its name, with the secret in the file if there is one, or as it is. Raises
    ConfigError for a name or a secret that no file could hold."""
    known = cluster if isinstance(cluster, Cluster) else Cluster(cluster)
    name = as_text(known.name)
    if name is None:
        raise ConfigError(f"cluster is {known.name!r:.40}, expected a name or a kvpool.Cluster")
    known = known._replace(name=name)
    if (secret_file, known.secret) != ("", b""):
        known = of_secrets("checked_cluster")(known, secret_file)
    return known


async def _connect(config: ClientConfig, cluster: Cluster) -> Pool:
    try:
        async with AsyncExitStack() as undo:
            transports, network = registry.transports(config.transports), TcpNetwork(cluster)
            undo.callback(network.close)
            pool = _pool_class()(
                config, cluster=cluster, network=network, transports=transports, owns_network=True
            )
            undo.push_async_callback(pool.close)
            # Patient: a master to which hundreds of clients connect at once answers after seconds.
            await pool._servers.refresh(pool._context.begin(None), patient=True)
            undo.pop_all()
        return pool
    except KvpoolError:
        raise
    except OSError as error:
        raise Unavailable(f"cannot open a pool: {error}") from error


def _pool_class() -> Callable[..., Pool]:
    """One that begins spans, where the environment asks for them."""
    where = next((TRACED[variable] for variable in TRACED if variable in os.environ), "")
    return cast(Callable[..., Pool], resolve_name(where)() if where else Pool)
