"""A client that keeps a pool busy and exports what it sees: `python -m tests.prometheus.traffic
MASTER PORT`. Beside it what an engine's `/metrics` would have, made by the connector's own exporter
without vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

import kvpool
from kvpool.ops.client_metrics import PoolMetrics

NAMESPACE = kvpool.Namespace("model=traffic tenant=red")
BLOCK = 64 << 10


def engine() -> asyncio.Task[None]:
    """The series `vllm:kvpool_*` of an engine that has done a little of everything."""

    class PromMetrics:
        """As vLLM's base class: the kinds of metrics, and the labels of each engine."""

        def __init__(self) -> None:
            self._counter_cls = partial(Counter, registry=REGISTRY)
            self._histogram_cls = partial(Histogram, registry=REGISTRY)
            self._gauge_cls = partial(Gauge, registry=REGISTRY)
            self._labelnames = ["model_name", "engine"]
            self.per_engine_labelvalues = {0: ["m", "0"]}

    vllm: Any = ModuleType("kvpool_connector.vllm_engine.interface")
    vllm.KVConnectorPromMetrics, vllm.KVConnectorStats = PromMetrics, object
    sys.modules[vllm.__name__] = vllm
    from kvpool_connector.vllm_engine.stats import ConnectorPromMetrics

    exporter = ConnectorPromMetrics()
    news = {
        "lookups": 2.0,
        "hit_tokens dram": 512.0,
        "miss evicted": 1.0,
        "decision load": 2.0,
        "loads_failed": 1.0,
        "dropped too many waiting": 1.0,
        "lookup_duration 0.001": 2.0,
        "load_duration 0.02": 2.0,
        "save_duration 0.03": 2.0,
        "read_duration tcp 0.004": 2.0,
        "write_duration tcp 0.005": 2.0,
    }

    async def steps() -> None:
        while True:
            exporter.observe(news)
            await asyncio.sleep(0.2)

    return asyncio.get_running_loop().create_task(steps())


def key(turn: int, n: int) -> bytes:
    return hashlib.sha256(b"%d-%d" % (turn, n)).digest()


async def main(master: str, port: int) -> None:
    patient = kvpool.ClientConfig(masters=[master], timeout_s=30.0, attempt_s=10.0)
    async with await kvpool.connect(config=patient) as pool:
        REGISTRY.register(PoolMetrics(pool))
        start_http_server(port, "127.0.0.1")
        running = engine()
        turn = 0
        while not running.done():
            chain = [key(turn % 14, n) for n in range(16)]
            chain[-1] = key(turn, 97)  # new in each turn
            await pool.write(NAMESPACE, chain, [bytes([n]) * BLOCK for n in range(16)])
            match = await pool.match(NAMESPACE, [*chain, key(turn, 99)], session=f"s-{turn % 5}")
            await pool.read(NAMESPACE, [key(turn, 98)], [bytearray(BLOCK)])
            if match.length:
                buffers = [bytearray(BLOCK) for _ in range(match.length)]
                await pool.read(NAMESPACE, chain[: match.length], buffers, match=match)
            turn += 1
            await asyncio.sleep(0.02)
        running.result()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
