"""What a client exports: durations by transport, and its counters, with names that Prometheus has
rules for."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

import kvpool
from kvpool import dev
from kvpool.client.servers import Durations
from kvpool.ops.client_metrics import BUCKETS_S, PoolMetrics
from kvpool.types import Duration

NAMESPACE = kvpool.Namespace("client-metrics")
CHAIN = [bytes([n]) * 16 for n in range(4)]


async def test_matches_reads_and_writes_are_timed_by_transport() -> None:
    registry = CollectorRegistry()
    async with dev.pool() as pool:
        registry.register(PoolMetrics(pool))
        await pool.write(NAMESPACE, CHAIN, [bytes(64)] * 4)
        found = await pool.match(NAMESPACE, [*CHAIN, bytes([9]) * 16])
        buffers = [bytearray(64) for _ in range(5)]
        for _ in range(2):
            await pool.read(NAMESPACE, CHAIN, buffers[:4], match=found)
        await pool.read(NAMESPACE, [bytes([9]) * 16], buffers[4:])
        (read,) = {one.transport for one in pool.durations.counts() if one.operation == "read"}
        value = registry.get_sample_value
        labels = {"transport": read}
        assert value("kvpool_client_match_duration_seconds_count", {"transport": "tcp"}) == 1
        assert value("kvpool_client_read_duration_seconds_count", labels) == 2
        assert value("kvpool_client_write_duration_seconds_count", labels) == 1
        for operation in ("read", "write"):
            name = f"kvpool_client_{operation}_duration_seconds"
            assert 0 < value(f"{name}_sum", labels) < 10
            assert value(f"{name}_bucket", {**labels, "le": "+Inf"}) == value(
                f"{name}_count", labels
            )
        assert value("kvpool_client_read_blocks_total", {"status": "hit"}) == 8
        assert value("kvpool_client_read_blocks_total", {"status": "never_written"}) == 1
        assert value("kvpool_client_read_blocks_total", {"status": "corrupt"}) == 0
        assert value("kvpool_client_write_blocks_total", {"status": "stored"}) == 4
        assert value("kvpool_client_read_bytes_total") == 8 * 64
        assert value("kvpool_client_corrupt_blocks_total") == 0
        pool.counters["corrupt"] += 3
        assert value("kvpool_client_corrupt_blocks_total") == 3


def test_buckets_hold_what_took_as_long_as_their_end_and_not_more() -> None:
    durations = Durations()
    for seconds in (*BUCKETS_S, 99.0):
        durations.record("read", "tcp", seconds)
    registry = CollectorRegistry()
    registry.register(PoolMetrics(_Timed(durations)))  # type: ignore[arg-type]
    for place, end in enumerate(BUCKETS_S, 1):
        labels = {"transport": "tcp", "le": str(end)}
        assert registry.get_sample_value("kvpool_client_read_duration_seconds_bucket", labels) == (
            place
        )
    total = registry.get_sample_value(
        "kvpool_client_read_duration_seconds_count", {"transport": "tcp"}
    )
    assert total == len(BUCKETS_S) + 1


def test_the_number_of_durations_is_bounded() -> None:
    durations = Durations()
    for n in range(200_000):
        durations.record("read", "tcp", 1.00013**n * 1e-6)  # from 1 us to some hours
    counts = durations.counts()
    assert len(counts) < 1_100
    assert sum(counts.values()) == 200_000
    total = sum(one.seconds * count for one, count in counts.items())
    exact = sum(1.00013**n * 1e-6 for n in range(200_000))
    assert total == pytest.approx(exact, rel=0.05)


async def test_another_thread_may_ask_while_the_client_counts() -> None:
    durations, problems = Durations(), []
    stop = threading.Event()
    metrics = PoolMetrics(_Timed(durations))  # type: ignore[arg-type]

    def ask() -> None:
        while not stop.is_set():
            try:
                list(metrics.collect())
            except RuntimeError as error:
                problems.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for n in range(20_000):
        durations.record("read", str(n % 997), n * 1e-5)
    stop.set()
    await asyncio.to_thread(asking.join)
    assert not problems


def test_a_duration_has_two_digits() -> None:
    durations = Durations()
    durations.record("match", "tcp", 0.0012345)
    assert durations.counts() == {Duration("match", "tcp", 0.0012): 1}


class _Timed:
    """As much of a pool as its durations need."""

    def __init__(self, durations: Durations) -> None:
        self.durations = durations
        self.counters: Counter[str] = Counter()
