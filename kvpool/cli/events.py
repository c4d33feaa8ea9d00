"""The command that publishes what the pool has for routers: events."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

from kvpool import runtime
from kvpool.cli.shared import (
    ClusterName,
    ConfigFile,
    DieWithParent,
    Insecure,
    LocalOnly,
    LogLevel,
    Masters,
    SecretFile,
    console,
    fail,
    open_pool,
    query_settings,
    run,
)
from kvpool.config import Config, check_bind
from kvpool.errors import ConfigError, KvpoolError
from kvpool.types import Namespace


def events(
    namespace: Annotated[
        str, typer.Option(help="Name of the blocks to tell of; kvpool doctor lists them.")
    ],
    publish: Annotated[
        str, typer.Option(help="Where routers subscribe, e.g. tcp://127.0.0.1:5600.")
    ],
    replay: Annotated[
        str, typer.Option(help="Where they ask for what they missed, e.g. tcp://127.0.0.1:5601.")
    ] = "",
    parts: Annotated[int, typer.Option(help="Parts of the namespace.", min=1, max=256)] = 1,
    hashes: Annotated[
        str, typer.Option(help="short: 64 bits, as vLLM's default; full: the whole key.")
    ] = "short",
    insecure: Insecure = False,
    config: ConfigFile = None,
    masters: Masters = None,
    cluster: ClusterName = None,
    secret_file: SecretFile = None,
    local_only: LocalOnly = False,
    log_level: LogLevel = "info",
    die_with_parent: DieWithParent = False,
) -> None:
    """Publish what the pool has, and what it loses, in the format of vLLM's KV events.

    One stream for each namespace. docs/fleet.md says what is in it.
    """
    if die_with_parent:
        runtime.die_with_parent()
    settings = query_settings(config, masters, cluster, secret_file, local_only)
    if hashes not in ("short", "full"):
        fail(ConfigError(f"--hashes is {hashes!r}, expected short or full"))
    try:
        for endpoint in filter(None, (publish, replay)):
            _check_endpoint(endpoint, insecure)
        name = Namespace(namespace, parts)
    except KvpoolError as error:
        fail(error)
    form = cast(Literal["short", "full"], hashes)
    run(_events(settings, name, publish, replay, form), log_level)


async def _events(
    settings: Config,
    namespace: Namespace,
    publish: str,
    replay: str,
    hashes: Literal["short", "full"],
) -> None:
    from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
    from kvpool.ops.event_service import publish_pool
    from kvpool.ops.pool_stream import PoolStream

    stream = PoolStream(namespace, hashes)
    async with await open_pool(settings) as pool:
        publisher = EventPublisher(
            publish, replay, rank=None, buffer=ReplayBuffer(first=1), snapshot=stream.snapshot
        )
        publisher.start()
        try:
            console.print(f"publishing at {publisher.endpoint}", highlight=False, soft_wrap=True)
            await publish_pool(pool.events(), stream, publisher)
        finally:
            publisher.close()


def _check_endpoint(endpoint: str, insecure: bool) -> None:
    """Raises ConfigError for what is no tcp endpoint, and beyond loopback unless `insecure`."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp" or not address.rpartition(":")[2].isdigit():
        raise ConfigError(f"{endpoint!r}: expected an address such as tcp://127.0.0.1:5600")
    try:
        check_bind(address, insecure)
    except ConfigError:
        raise ConfigError(
            f"{endpoint} can be reached from other machines, and subscribers need no secret: "
            "publish at 127.0.0.1, or pass --insecure if the network is trusted"
        ) from None
