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
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Final

from msgspec import structs
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
from kvpool.server.block_server import BlockServer
from kvpool.types import Member, TierUsage

#: Of a server's counters, those that go up and down.
_LEVELS: Final = frozenset(("connections", "quarantined", "sessions", "announced_bytes"))
#: Counters come from servers over the wire; what could be no name of ours is left out.
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}(?<!_total)")

_SERVER_FIGURES: Final[Mapping[str, tuple[str, Callable[[Member], float]]]] = {
    "up": ("1 while it and a master hear of each other", lambda m: m.alive),
    "heard_seconds": ("since its last heartbeat", lambda m: m.heard_s),
    "capacity_bytes": ("of the tier that holds the pool", lambda m: m.capacity),
    "used_bytes": ("reserved or stored in that tier", lambda m: m.used),
    "blocks": ("stored", lambda m: m.blocks),
    "pins": ("held by readers", lambda m: m.pins),
    "reservations": ("held by writers", lambda m: m.reservations),
    "resident_bytes": ("memory of the process", lambda m: m.rss),
    "victim_age_seconds": ("since the next victim was last used", lambda m: m.victim_age_s),
}
_TIER_LEVELS: Final[Mapping[str, tuple[str, Callable[[TierUsage], float]]]] = {
    "lost": ("1 when it was taken out of service", lambda t: t.lost),
    "capacity_bytes": ("of the tier", lambda t: t.capacity),
    "used_bytes": ("reserved or stored", lambda t: t.used),
    "blocks": ("stored", lambda t: t.blocks),
}
_TIER_COUNTERS: Final[Mapping[str, tuple[str, Callable[[TierUsage], float]]]] = {
    "hits": ("blocks that were read where they lay in it", lambda t: t.hits),
    "read_bytes": ("moved up out of it", lambda t: t.read_bytes),
    "read_seconds": ("in which any of that moved", lambda t: t.read_s),
    "written_bytes": ("moved down into it", lambda t: t.written_bytes),
    "write_seconds": ("in which any of that moved", lambda t: t.write_s),
    "failures": ("reads and writes that failed", lambda t: t.failures),
    "corrupt_blocks": ("whose bytes failed their checksum", lambda t: t.corrupt),
}


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
    """Figures are read when somebody asks; nothing is kept twice."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _of_members(members: Iterable[Member]) -> Iterator[Metric]:
    members = sorted(members)
    for name, (help, figure) in _SERVER_FIGURES.items():
        family = GaugeMetricFamily(f"kvpool_server_{name}", help, labels=["server"])
        for member in members:
            family.add_metric([member.server], figure(member))
        yield family
    for name in sorted({name for member in members for name in member.counters}):
        if not _NAME.fullmatch(name) or name in _SERVER_FIGURES:
            continue
        kind = GaugeMetricFamily if name in _LEVELS else CounterMetricFamily
        counter = kind(f"kvpool_server_{name}", "as the server counts it", labels=["server"])
        for member in members:
            if name in member.counters:
                counter.add_metric([member.server], member.counters[name])
        yield counter
    yield from _of_tiers(members, GaugeMetricFamily, _TIER_LEVELS)
    yield from _of_tiers(members, CounterMetricFamily, _TIER_COUNTERS)


def _of_tiers(
    members: Iterable[Member],
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    figures: Mapping[str, tuple[str, Callable[[TierUsage], float]]],
) -> Iterator[Metric]:
    for name, (help, figure) in figures.items():
        family = kind(f"kvpool_tier_{name}", help, labels=["server", "tier"])
        for member in members:
            for tier in member.usage:
                family.add_metric([member.server, tier.name], figure(tier))
        yield family


def _member(server: BlockServer, now: float) -> Member:
    """A server as masters see it, in its own eyes."""
    told = server.heartbeat(now)
    return Member(
        server=server.server,
        epoch=server.epoch,
        host=server.host.name,
        addresses=tuple(server.addresses),
        tiers=tuple(tier.name for tier in server.tiers),
        alive=server.registered,
        heard_s=0.0,
        capacity=told.free + told.used,
        used=told.used,
        blocks=told.blocks,
        pins=told.pins,
        reservations=told.reservations,
        rss=told.rss,
        victim_age_s=told.victim_age_s,
        counters=told.counters,
        usage=tuple(TierUsage(*structs.astuple(tier)) for tier in told.tiers),
    )


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help, value=value)
