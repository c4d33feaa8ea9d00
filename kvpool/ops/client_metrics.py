"""What a client says of itself, for programs that have an endpoint for Prometheus.

    from prometheus_client import REGISTRY
    REGISTRY.register(PoolMetrics(pool))

Counters and durations are read when Prometheus asks: nothing is counted twice. vLLM's connector
exports the same durations in the engine's `/metrics`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.client.pool import Pool
from kvpool.types import Duration, ReadStatus, WriteStatus

#: Upper ends of the buckets, in seconds.
BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_HELP: Final = {
    "match": "until masters had told what the pool has of a chain",
    "read": "until a server had answered a message that reads blocks, with its bytes",
    "write": "until a server had answered a message that writes blocks",
}
_STATUSES: Final = {
    "read": ("blocks of reads, by result", [one.name.lower() for one in ReadStatus]),
    "write": ("blocks of writes, by result", [one.name.lower() for one in WriteStatus]),
}


class PoolMetrics(Collector):
    """The metrics `kvpool_client_*` of one client; several in one registry need other labels.

    It may be asked in another thread than the client's.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from _durations(self._pool.durations.counts())
        counters = self._pool.counters.copy()
        for operation, (text, statuses) in _STATUSES.items():
            blocks = CounterMetricFamily(
                f"kvpool_client_{operation}_blocks", text, labels=["status"]
            )
            for status in statuses:
                blocks.add_metric([status], counters.pop(f"{operation}_{status}", 0))
            yield blocks
        read = counters.pop("read_bytes", 0)
        yield CounterMetricFamily("kvpool_client_read_bytes", "payload of hits", value=read)
        corrupt = counters.pop("corrupt", 0)
        text = "read with a wrong checksum, and reported to the server"
        yield CounterMetricFamily("kvpool_client_corrupt_blocks", text, value=corrupt)
        for name, count in sorted(counters.items()):
            yield CounterMetricFamily(f"kvpool_client_{name}", "as the client counts it", count)


def _durations(counts: Mapping[Duration, int]) -> Iterator[Metric]:
    """A histogram for each operation, by transport."""
    for operation, text in _HELP.items():
        family = HistogramMetricFamily(
            f"kvpool_client_{operation}_duration_seconds", text, labels=["transport"]
        )
        for transport in sorted({one.transport for one in counts if one.operation == operation}):
            durations = {
                one.seconds: count
                for one, count in counts.items()
                if (one.operation, one.transport) == (operation, transport)
            }
            total = sum(seconds * count for seconds, count in durations.items())
            family.add_metric([transport], _buckets(durations), total)
        yield family


def _buckets(durations: Mapping[float, int]) -> list[tuple[str, float]]:
    """Cumulative, with their upper ends as Prometheus writes them."""
    inside: Counter[int] = Counter()
    for seconds, count in durations.items():
        inside[bisect_left(BUCKETS_S, seconds)] += count
    ends = [*map(str, BUCKETS_S), "+Inf"]
    sums = accumulate(inside[place] for place in range(len(ends)))
    return list(zip(ends, map(float, sums), strict=True))
