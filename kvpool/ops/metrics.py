"""What a master, a block server and a publisher of events say of themselves, for Prometheus and
for probes.

    /metrics   every figure of `kvpool status`, and what the process costs
    /health    200 while the loop turns
    /ready     200 when it is of use: a server when a master knows it, a publisher when it has told
               all that the pool has, and none of its tasks is failing

Names are `kvpool_<subject>_<unit>`, sizes in bytes, times in seconds. A master tells of every
server that it knows (label `server`), so that scraping masters is enough; a server of itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from kvpool.client.room import labelled_tenant, room_of
from kvpool.master.service import Master
from kvpool.net.http_server import Page, PageInSteps
from kvpool.server.block_server import BlockServer
from kvpool.supervision import Supervisor
from kvpool.types import Consumer, Demand, Figure, Member, ServerStats, TierUsage

if TYPE_CHECKING:
    from kvpool.client.pool_events import EventReader
    from kvpool.net.event_publisher import EventPublisher
    from kvpool.ops.engine_stream import EngineStream
    from kvpool.ops.event_service import EngineCounts
    from kvpool.ops.pool_stream import PoolStream

#: Of a server's counters, those that go up and down.
_LEVELS: Final = frozenset(
    (
        "connections",
        "connections_max",
        "quarantined",
        "quarantined_bytes",
        "sessions",
        "announced_bytes",
        "waiting_sessions",
        "unlisted_blocks",
        "dirty_bytes",
        "cold_outdated",
        "prefetch_unread_bytes",
        "inferred_programs",
        "inferred_returning_programs",
        "inferred_dead_programs",
        "inferred_returning_blocks",
        "inferred_dead_blocks",
        "inferred_shared_blocks",
    )
)
#: Counters come from servers over the wire; what could be no name of ours is left out.
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}(?<!_total)")

#: Samples of one metric that are made in one turn of the loop: 2 ms.
_SAMPLES: Final = 500
#: A publisher that has not read all changes of the pool for so long is not ready.
_BEHIND_S: Final = 5.0

#: What a master knows of a server besides the figures that the server reports.
_SEEN_BY_MASTER: Final[Mapping[Figure, Callable[[Member], float]]] = {
    Figure("up", "1 while it and a master hear of each other"): lambda m: m.alive,
    Figure("left", "1 after it has ended in order, until it is back"): lambda m: m.left,
    Figure("heard_seconds", "since its last heartbeat"): lambda m: m.heard_s,
    Figure("capacity_bytes", "of the tier that holds the pool"): lambda m: m.capacity,
}


def figures_of(stats: type[ServerStats | TierUsage | Consumer]) -> dict[str, Figure]:
    """The fields of a struct that are metrics, by name of the field."""
    hints = get_type_hints(stats, include_extras=True)
    return {
        field: note
        for field, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Figure)
    }


#: Of the metrics of one subject.
_LABELS: Final = {
    "server": ["server"],
    "tier": ["server", "tier"],
    "consumer": ["server", "by", "name"],
}
_SERVER_FIGURES: Final = figures_of(ServerStats)
_TIER_FIGURES: Final = figures_of(TierUsage)
_CONSUMER_FIGURES: Final = figures_of(Consumer)
_SERVER_METRICS: Final = {figure.metric for figure in (*_SEEN_BY_MASTER, *_SERVER_FIGURES.values())}


def pages_of_master(master: Master) -> dict[str, Callable[[], Page]]:
    """For `http.pages`, on the loop that runs the master."""
    now = asyncio.get_running_loop().time

    def collect() -> Iterator[Metric]:
        yield _gauge("kvpool_master_uptime_seconds", "since it started", master.uptime_s(now()))
        yield _gauge("kvpool_master_blocks", "in its map", len(master.directory))
        requests = CounterMetricFamily(
            "kvpool_master_requests", "answered, by kind", labels=["request"]
        )
        for kind, count in sorted(master.requests.items()):
            requests.add_metric([kind], count)
        yield requests
        refusals = CounterMetricFamily(
            "kvpool_master_refusals",
            "messages in the name of a server, and what tenants may not ask for, by reason",
            labels=["reason"],
        )
        for reason, count in sorted(master.refusals.items()):
            refusals.add_metric([reason], count)
        yield refusals
        yield CounterMetricFamily(
            "kvpool_master_refused_connections",
            "that did not prove, or not in time, that they may ask",
            master.refused_connections,
        )
        yield _gauge("kvpool_master_callers", "connections on which they ask", master.callers)
        matches = CounterMetricFamily(
            "kvpool_master_matches", "of clients, by what ended them", labels=["stopped"]
        )
        for status, count in sorted(master.clients.matches.items()):
            matches.add_metric([status.name.lower()], count)
        yield matches
        asked = "blocks that clients asked for in matches"
        yield CounterMetricFamily("kvpool_master_asked_blocks", asked, master.clients.asked_blocks)
        found = "of these, in the pool from the first on without a gap"
        yield CounterMetricFamily("kvpool_master_found_blocks", found, master.clients.found_blocks)
        yield CounterMetricFamily(
            "kvpool_master_unknown_spans",
            "matches that clients had to ask a second time, with keys (design: match)",
            master.clients.unknown_spans,
        )
        yield CounterMetricFamily(
            "kvpool_master_map_differences",
            "heartbeats after which the map was not what the server held",
            value=master.servers.differences,
        )
        members = master.directory.servers.members(now())
        yield from _of_demand(master.clients.demand(now()), members)
        yield from _of_members(members)

    return _pages(collect, lambda: None, master.tasks)


def pages_of_server(server: BlockServer) -> dict[str, Callable[[], Page]]:
    """For `http.pages`, on the loop that runs the server."""
    now = asyncio.get_running_loop().time

    def unready() -> str | None:
        return None if server.registered else "no master knows this server yet"

    return _pages(lambda: _of_members([_member(server, now())]), unready, server.tasks)


def pages_of_events(
    publisher: EventPublisher,
    stream: PoolStream | EngineStream,
    pool: EventReader,
    engine: EngineCounts | None = None,
) -> dict[str, Callable[[], Page]]:
    """For `http.pages`, on the loop that runs `kvpool events`; `engine` of a relay."""

    def collect() -> Iterator[Metric]:
        counts = publisher.counts
        for name, help, value in (
            ("batches", "messages that were published", counts.batches),
            ("batch_bytes", "of these messages", counts.bytes),
            ("replays", "requests for what was missed, answered to the end", counts.replays),
            ("snapshots", "requests for all that is there, answered to the end", counts.snapshots),
            ("replays_too_late", "that began before the first batch kept", counts.too_late),
            ("readers_given_up", "of a replay, that took nothing or had gone", counts.given_up),
            ("refused_messages", "to the replay address, that were no requests", counts.refused),
            ("left_out", "copies of blocks beyond the limit", stream.left_out),
        ):
            yield CounterMetricFamily(f"kvpool_events_{name}", help, value=value)
        for name, help, level in (
            ("kept_batches", "for replay", len(publisher.buffer)),
            ("kept_bytes", "for replay", publisher.buffer.bytes),
            ("readers", "of replays and snapshots", publisher.readers),
            ("blocks", "copies in the pool, or blocks that the engine has told of", len(stream)),
            ("behind_seconds", "since all changes of the pool were read", pool.behind_s),
        ):
            yield _gauge(f"kvpool_events_{name}", help, level)
        if engine is not None:
            yield CounterMetricFamily(
                "kvpool_events_engine_batches", "that were passed on", value=engine.batches
            )
            yield CounterMetricFamily(
                "kvpool_events_engine_lost",
                "how often routers were told to forget the engine",
                value=engine.lost,
            )
            yield _gauge(
                "kvpool_events_engine_lag_seconds", "of the last batch, by its time", engine.lag_s
            )

    def unready() -> str | None:
        if pool.behind_s < _BEHIND_S:
            return None
        return f"the pool's changes were read {pool.behind_s:.0f} s ago"

    return _pages(collect, unready, publisher.tasks)


def _pages(
    collect: Callable[[], Iterable[Metric]], unready: Callable[[], str | None], tasks: Supervisor
) -> dict[str, Callable[[], Page]]:
    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    registry.register(_Collector(lambda: _of_tasks(tasks)))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)

    def ready() -> Page:
        problem = unready() or tasks.problem
        if not problem:
            return Page(HTTPStatus.OK, b"ready\n")
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n".encode())

    return {
        "/metrics": PageInSteps(lambda: _text_of(registry.collect()), CONTENT_TYPE_LATEST),
        "/health": lambda: Page(HTTPStatus.OK, b"alive\n"),
        "/ready": ready,
    }


def _text_of(metrics: Iterable[Metric]) -> Iterator[bytes]:
    """The text of a page, in pieces. Metrics of one name that follow each other are one."""
    registry = CollectorRegistry()
    before = ""
    for metric in metrics:
        one = _Collector(partial(iter, [metric]))
        registry.register(one)
        text = generate_latest(registry)
        registry.unregister(one)
        yield text.split(b"\n", 2)[2] if metric.name == before else text  # without its head
        before = metric.name


class _Collector(Collector):
    """Reads the figures when a client requests them, so no value is stored twice."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _of_tasks(tasks: Supervisor) -> Iterator[Metric]:
    failures = CounterMetricFamily(
        "kvpool_task_failures", "exceptions that a task went on after, by task", labels=["task"]
    )
    for name, count in sorted(tasks.failures.items()):
        failures.add_metric([name], count)
    yield failures


def _of_members(members: Iterable[Member]) -> Iterator[Metric]:
    members = sorted(members)
    for figure, value in _SEEN_BY_MASTER.items():
        yield from _family("server", figure, [([m.server], value(m)) for m in members])
    for field, figure in _SERVER_FIGURES.items():
        yield from _family(
            "server", figure, [([m.server], getattr(m.stats, field)) for m in members]
        )
    for name in sorted({name for m in members for name in m.stats.counters}):
        if _NAME.fullmatch(name) and name not in _SERVER_METRICS:
            figure = Figure(name, "as the server counts it", name not in _LEVELS)
            counts = [([m.server], m.stats.counters.get(name)) for m in members]
            yield from _family("server", figure, counts)
    tiers = [([m.server, tier.name], tier) for m in members for tier in m.stats.usage]
    for field, figure in _TIER_FIGURES.items():
        values: Any = [(labels, getattr(tier, field)) for labels, tier in tiers]
        if any(isinstance(value, dict) for _, value in values):
            values = (
                ([*labels, reason], count)
                for labels, counts in values
                for reason, count in sorted(counts.items())
            )
            yield from _family("tier", figure, values, "reason")
        else:
            yield from _family("tier", figure, values)
    yield from _of_consumers(members)


def _of_consumers(members: Iterable[Member]) -> Iterator[Metric]:
    """Each server names a bounded number of them, those that have most."""
    found = [([m.server, one.by, one.name], one) for m in members for one in m.stats.consumers]
    for field, figure in _CONSUMER_FIGURES.items():
        samples: Iterable[Any] = ((labels, getattr(one, field)) for labels, one in found)
        more = {"tiers": ["tier"], "evicted_by": ["by_tenant"]}.get(field, [])
        if more:
            samples = (
                ([*labels, name], value)
                for labels, values in samples
                for name, value in sorted(values.items())
            )
        yield from _family("consumer", figure, samples, *more)


def _of_demand(demand: Demand, members: Sequence[Member]) -> Iterator[Metric]:
    sizes = GaugeMetricFamily(
        "kvpool_master_working_set_bytes",
        "of blocks that clients asked for and ask for again: the mean of ten minutes",
        labels=["namespace", "parts", "tenant"],
    )
    for one in demand.working_sets:
        name = one.namespace.name
        sizes.add_metric([name, str(one.namespace.parts), labelled_tenant(name)], one.size)
    yield sizes
    room = room_of(demand, members)
    more = "of the mean prompt that fit beside what is live, by whose prompts they are like"
    fit = GaugeMetricFamily("kvpool_master_room_sessions", more, labels=["tenant"])
    for tenant in room.tenants if room.more is not None else ():
        fit.add_metric([tenant.tenant], tenant.more)
    yield fit
    yield _gauge("kvpool_master_chain_servers", "a prompt is read from", demand.chain_servers)
    yield _gauge(
        "kvpool_master_beyond_hole_ratio",
        "of the stored blocks of prompts, behind a missing one",
        demand.beyond_hole,
    )


def _family(
    subject: str,
    figure: Figure,
    samples: Iterable[tuple[Sequence[str], float | None]],
    *more_labels: str,
) -> Iterator[Metric]:
    """One metric, with a sample for every server or tier that has a value; in pieces."""
    kind = CounterMetricFamily if figure.grows else GaugeMetricFamily
    labels = [*_LABELS[subject], *more_labels]
    left = ((values, sample) for values, sample in samples if sample is not None)
    while True:
        family = kind(f"kvpool_{subject}_{figure.metric}", figure.help, labels=labels)
        for values, sample in islice(left, _SAMPLES):
            family.add_metric(values, sample)
        yield family
        if len(family.samples) < _SAMPLES:
            return


def _member(server: BlockServer, now: float) -> Member:
    """A server as masters see it, by its own figures."""
    return Member(
        server=server.server,
        epoch=server.epoch,
        host=server.host.name,
        addresses=tuple(server.addresses),
        tiers=tuple(tier.name for tier in server.tiers),
        alive=server.registered,
        heard_s=0.0,
        capacity=server.stack.backing.allocator.capacity,
        stats=server.stats(now),
    )


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help, value=value)
