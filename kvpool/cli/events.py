"""The command that publishes what the pool has for routers: events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, cast

import typer

from kvpool import runtime
from kvpool.addresses import split
from kvpool.cli.shared import (
    ClusterName,
    ConfigFile,
    DieWithParent,
    Http,
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
from kvpool.ops import process
from kvpool.types import Namespace

if TYPE_CHECKING:
    from kvpool.kv_events import EventForm
    from kvpool.net.event_publisher import EventPublisher
    from kvpool.net.http_server import Page

#: Longest topic: subscribers compare it with each message's.
TOPIC_MAX: Final = 256


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
    engine: Annotated[
        str, typer.Option(help="Stream of one engine to publish with it, e.g. tcp://gpu1:5557.")
    ] = "",
    engine_replay: Annotated[
        str, typer.Option(help="Replay address of that engine, e.g. tcp://gpu1:5558.")
    ] = "",
    form: Annotated[
        str, typer.Option(help="shared: for vllm-router; plain: for Dynamo and llm-d.")
    ] = "shared",
    topic: Annotated[
        str, typer.Option(help="Topic of the messages; llm-d subscribes to kv@POD@MODEL.")
    ] = "",
    parts: Annotated[int, typer.Option(help="Parts of the namespace.", min=1, max=256)] = 1,
    hashes: Annotated[
        str, typer.Option(help="short: 64 bits, as vLLM's default; full: the whole key.")
    ] = "short",
    http: Http = None,
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

    One stream for each namespace, or with --engine one for each engine: its own events, and where
    the pool has its blocks. docs/events.md says what is in it.
    """
    if die_with_parent:
        process.die_with_parent()
    settings = query_settings(config, masters, cluster, secret_file, local_only)
    if hashes not in ("short", "full"):
        fail(ConfigError(f"--hashes is {hashes!r}, expected short or full"))
    if form not in ("shared", "plain"):
        fail(ConfigError(f"--form is {form!r}, expected shared or plain"))
    if len(topic) > TOPIC_MAX or not topic.isprintable():
        fail(ConfigError(f"--topic: expected at most {TOPIC_MAX} characters that can be printed"))
    if engine_replay and not engine:
        fail(ConfigError("--engine-replay needs --engine"))
    try:
        for endpoint in filter(None, (publish, replay)):
            _check_endpoint(endpoint, insecure)
        public = insecure or bool(settings.secret_file)  # a scraper need not have the secret
        if http:
            check_bind(http, public)
        name = Namespace(namespace, parts)
    except KvpoolError as error:
        fail(error)
    stream = StreamAddress(publish, replay, topic, http or "", public)
    if engine:
        source = EngineAddress(engine, engine_replay, cast("EventForm", form))
        run(process.until_stopped(_engine_events(settings, name, stream, source)), log_level)
        return
    width = cast(Literal["short", "full"], hashes)
    run(process.until_stopped(_events(settings, name, stream, width)), log_level)


async def _events(
    settings: Config,
    namespace: Namespace,
    at: StreamAddress,
    hashes: Literal["short", "full"],
) -> None:
    from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
    from kvpool.ops.event_service import publish_pool
    from kvpool.ops.metrics import pages_of_events
    from kvpool.ops.pool_stream import PoolStream

    stream = PoolStream(namespace, hashes)
    async with await open_pool(settings) as pool:
        publisher = EventPublisher(
            at.endpoint,
            at.replay_endpoint,
            topic=at.topic,
            rank=None,
            buffer=ReplayBuffer(first=1),
            snapshot=stream.snapshot,
        )
        publisher.start()
        try:
            await _say_where(publisher)
            reader = pool.events()
            async with _served(pages_of_events(publisher, stream, reader), at):
                await publish_pool(reader, stream, publisher)
        finally:
            publisher.close()


class StreamAddress(NamedTuple):
    """Where this command publishes, under which topic, and where its metrics are, if anywhere."""

    endpoint: str
    replay_endpoint: str
    topic: str
    http: str
    public: bool


class EngineAddress(NamedTuple):
    """Where an engine publishes its events, and the form in which the pool's are added."""

    endpoint: str
    replay_endpoint: str
    form: EventForm


async def _engine_events(
    settings: Config, namespace: Namespace, at: StreamAddress, engine: EngineAddress
) -> None:
    from kvpool.net.event_publisher import EventPublisher, ReplayBuffer
    from kvpool.net.event_subscriber import EventSubscriber
    from kvpool.ops.engine_stream import EngineStream
    from kvpool.ops.event_service import EngineCounts, publish_engine
    from kvpool.ops.metrics import pages_of_events

    stream = EngineStream(namespace, engine.form, runtime.host_id())
    async with await open_pool(settings) as pool:
        publisher = EventPublisher(
            at.endpoint,
            at.replay_endpoint,
            topic=at.topic,
            buffer=ReplayBuffer(first=1),
            snapshot=stream.snapshot,
        )
        publisher.start()
        subscriber: EventSubscriber | None = None
        try:
            subscriber = EventSubscriber(engine.endpoint, engine.replay_endpoint)
            await _say_where(publisher)
            reader, counts = pool.events(), EngineCounts()
            async with _served(pages_of_events(publisher, stream, reader, counts), at):
                await publish_engine(subscriber.batches(), reader, stream, publisher, counts)
        finally:
            publisher.close()
            if subscriber is not None:
                subscriber.close()


@asynccontextmanager
async def _served(
    served: Mapping[str, Callable[[], Page]], at: StreamAddress
) -> AsyncIterator[None]:
    """Their metrics, where `--http` says."""
    from kvpool.net.announced import reachable
    from kvpool.net.http_server import pages

    async with pages(served, at.http, at.public) as serving:
        if serving is not None:
            shown = await reachable(serving.address)
            console.print(f"metrics, health, ready at http://{shown}", markup=False)
        yield


async def _say_where(publisher: EventPublisher) -> None:
    from kvpool.net.announced import reachable

    shown = await reachable(publisher.endpoint)
    console.print(f"publishing at {shown}", markup=False, highlight=False, soft_wrap=True)


def _check_endpoint(endpoint: str, insecure: bool) -> None:
    """Raises ConfigError for what is no tcp endpoint, and beyond loopback unless `insecure`."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp" or split(address) is None:
        raise ConfigError(f"{endpoint!r}: expected an address such as tcp://127.0.0.1:5600")
    try:
        check_bind(address, insecure)
    except ConfigError:
        raise ConfigError(
            f"{endpoint} can be reached from other machines, and subscribers need no secret: "
            "publish at 127.0.0.1, or pass --insecure if the network is trusted"
        ) from None
