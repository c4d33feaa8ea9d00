"""What a master and a block server say of themselves, for Prometheus and for probes.

    /metrics   every figure of `kvpool status`, and what the process costs
    /health    200 while the loop turns
    /ready     200 when it is of use: a server when a master knows it

Names are `kvpool_<subject>_<unit>`, sizes in bytes, times in seconds. A master tells of every
server that it knows (label `server`), so that scraping masters is enough; a server of itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Final, get_type_hints

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from kvpool.master.service import Master
from kvpool.net.http_server import Page
from kvpool.ops.demand import tenant_of
from kvpool.server.block_server import BlockServer
from kvpool.types import Demand, Figure, Member, ServerStats, TierUsage

#: Of a server's counters, those that go up and down.
_LEVELS: Final = frozenset(
    (
        "connections",
        "quarantined",
        "quarantined_bytes",
        "sessions",
        "announced_bytes",
        "waiting_sessions",
        "unlisted_blocks",
        "dirty_bytes",
        "prefetch_unread_bytes",
    )
)
#: Counters come from servers over the wire; what could be no name of ours is left out.
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}(?<!_total)")

#: What a master knows of a server besides the figures that the server reports.
_SEEN_BY_MASTER: Final[Mapping[Figure, Callable[[Member], float]]] = {
    Figure("up", "1 while it and a master hear of each other"): lambda m: m.alive,
    Figure("heard_seconds", "since its last heartbeat"): lambda m: m.heard_s,
    Figure("capacity_bytes", "of the tier that holds the pool"): lambda m: m.capacity,
}


def figures_of(stats: type[ServerStats | TierUsage]) -> dict[str, Figure]:
    """The fields of a struct that are metrics, by name of the field."""
    hints = get_type_hints(stats, include_extras=True)
    return {
        field: note
        for field, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Figure)
    }


_SERVER_FIGURES: Final = figures_of(ServerStats)
_TIER_FIGURES: Final = figures_of(TierUsage)
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
            "messages in the name of a server, by reason",
            labels=["reason"],
        )
        for reason, count in sorted(master.refusals.items()):
            refusals.add_metric([reason], count)
        yield refusals
        yield CounterMetricFamily(
            "kvpool_master_map_differences",
            "heartbeats after which the map was not what the server held",
            value=master.differences,
        )
        yield from _of_demand(master.demand(now()))
        yield from _of_members(master.directory.members(now()))

    return _pages(collect, lambda: None)


def pages_of_server(server: BlockServer) -> dict[str, Callable[[], Page]]:
    """For `http.pages`, on the loop that runs the server."""
    now = asyncio.get_running_loop().time

    def unready() -> str | None:
        return None if server.registered else "no master knows this server yet"

    return _pages(lambda: _of_members([_member(server, now())]), unready)


def _pages(
    collect: Callable[[], Iterable[Metric]], unready: Callable[[], str | None]
) -> dict[str, Callable[[], Page]]:
    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)

    def metrics() -> Page:
        return Page(HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST)

    def ready() -> Page:
        problem = unready()
        if problem is None:
            return Page(HTTPStatus.OK, b"ready\n")
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n".encode())

    return {
        "/metrics": metrics,
        "/health": lambda: Page(HTTPStatus.OK, b"alive\n"),
        "/ready": ready,
    }


class _Collector(Collector):
    """Reads the figures when a client requests them, so no value is stored twice."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _of_members(members: Iterable[Member]) -> Iterator[Metric]:
    members = sorted(members)
    for figure, value in _SEEN_BY_MASTER.items():
        yield _family("server", figure, [([m.server], value(m)) for m in members])
    for field, figure in _SERVER_FIGURES.items():
        yield _family("server", figure, [([m.server], getattr(m.stats, field)) for m in members])
    for name in sorted({name for m in members for name in m.stats.counters}):
        if _NAME.fullmatch(name) and name not in _SERVER_METRICS:
            figure = Figure(name, "as the server counts it", name not in _LEVELS)
            counts = [([m.server], m.stats.counters.get(name)) for m in members]
            yield _family("server", figure, counts)
    tiers = [([m.server, tier.name], tier) for m in members for tier in m.stats.usage]
    for field, figure in _TIER_FIGURES.items():
        values = [(labels, getattr(tier, field)) for labels, tier in tiers]
        if any(isinstance(value, dict) for _, value in values):
            values = [
                ([*labels, reason], count)
                for labels, counts in values
                for reason, count in sorted(counts.items())
            ]
            yield _family("tier", figure, values, "reason")
        else:
            yield _family("tier", figure, values)


def _of_demand(demand: Demand) -> Iterator[Metric]:
    sizes = GaugeMetricFamily(
        "kvpool_master_working_set_bytes",
        "of blocks that clients asked for and ask for again: the mean of ten minutes",
        labels=["namespace", "parts", "tenant"],
    )
    for one in demand.working_sets:
        name = one.namespace.name
        sizes.add_metric([name, str(one.namespace.parts), tenant_of(name)], one.size)
    yield sizes
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
) -> Metric:
    """One metric, with a sample for every server or tier that has a value."""
    kind = CounterMetricFamily if figure.grows else GaugeMetricFamily
    labels = ["server", "tier"] if subject == "tier" else ["server"]
    labels += more_labels
    family = kind(f"kvpool_{subject}_{figure.metric}", figure.help, labels=labels)
    for values, sample in samples:
        if sample is not None:
            family.add_metric(values, sample)
    return family


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
