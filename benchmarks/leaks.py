"""Memory of the connector's two halves over many requests, without an engine.

    .venv/bin/python -m benchmarks.leaks [--requests 20000]

Half of the requests load what the one before has saved. The pool is a process of its own. What is
remembered of blocks grows up to its bounds (16,384 stored blocks, 32,768 places of blocks, some
10 MiB), and nothing else may. Memory is measured after `malloc_trim`: without what was freed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import os
import sys

from kvpool_connector.records.values import ScheduledRequest
from tests.connector.test_halves import BLOCK, Engine, ended
from tests.connector.vllm.helpers import PoolProcess

ROWS = 10
BLOCKS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    requests = parser.parse_args().requests
    pool = PoolProcess()
    pool.start()
    engine = Engine(pool.master, transports=["shm"]).connected()
    try:
        for number in range(requests):
            serve(engine, number)
            if (number + 1) % max(1, requests // ROWS) == 0:
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)
                blocks = sys.getallocatedblocks()
                print(f"{number + 1:>7} requests: {own_mib():.1f} MiB, {blocks:,} objects")
    finally:
        engine.close()
        pool.kill()


def serve(engine: Engine, number: int) -> None:
    """One request: of two, the first is computed and saved, the second one loaded."""
    name, tokens = f"r{number}", BLOCKS * BLOCK + 1
    hashes = [hashlib.sha256(f"{number // 2}:{one}".encode()).digest() for one in range(BLOCKS)]
    ids = [list(range(10, 11 + BLOCKS))]
    computed = engine.ask(name, hashes)
    if computed:
        engine.scheduler.on_blocks_allocated(name, ids, computed)
        engine.until(lambda: name in engine.loaded)
    engine.step([ScheduledRequest(name, computed, tokens, ids)])
    engine.scheduler.on_request_finished(name)
    engine.until(lambda: ended(engine) and not engine.scheduler.planner.has_pending_work)
    engine.scheduler.report.take_metrics()
    engine.workers[0].take_counters()
    engine.forget()


def own_mib() -> float:
    """Memory of this process that it shares with no other."""
    with open("/proc/self/statm") as file:
        resident, shared = map(int, file.read().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
