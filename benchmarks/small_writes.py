"""Writes in one request and in steps, in turns against one pool of processes, as ratios.

python -m benchmarks.small_writes [--rounds 40]

A write in one request is `Reserve` with the bytes behind it; in steps it is `Reserve`, the bytes,
`Seal`. The client alone is switched from one to the other, each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Final

import uvloop

from benchmarks.started import at_least, started
from kvpool import ClientConfig, Namespace, Pool, WriteStatus, connect
from kvpool_transports.streams import requests

_NAMESPACE: Final = Namespace("small writes")
#: Bytes of a block, blocks in a write, writes in a round.
_SHAPES: Final = [
    (4 << 10, 1, 40),
    (64 << 10, 1, 40),
    (128 << 10, 1, 40),
    (256 << 10, 1, 20),
    (512 << 10, 1, 20),
    (1 << 20, 1, 20),
    (2 << 20, 1, 10),
    (4 << 10, 16, 20),
    (16 << 10, 64, 10),
    (64 << 10, 64, 4),
    (128 << 10, 64, 2),
]
_LIMITS: Final = {"steps": 0, "one request": 16 << 20}


async def _round(pool: Pool, name: str, size: int, count: int, writes: int) -> list[float]:
    """Seconds of each write, of new blocks."""
    data = [os.urandom(size) for _ in range(count)]
    taken = []
    for number in range(writes):
        chain = [f"{name} {number} {i}".encode().ljust(32) for i in range(count)]
        began = time.perf_counter()
        statuses = await pool.write(_NAMESPACE, chain, data)
        taken.append(time.perf_counter() - began)
        assert set(statuses) == {WriteStatus.STORED}, statuses
    return taken


async def _measure(master: str, scheme: str, rounds: int) -> None:
    config = ClientConfig(masters=[master], transports=[scheme], timeout_s=30.0)
    async with await connect(config=config) as pool:
        for size, count, writes in _SHAPES:
            taken: dict[str, list[float]] = {way: [] for way in _LIMITS}
            for number in range(rounds):
                for way, limit in _LIMITS.items():
                    vars(requests)["ONE_REQUEST_MAX"] = limit
                    vars(requests)["ONE_REQUEST_MAPPED_MAX"] = limit
                    name = f"{scheme[0]} {size >> 10} {count} {way[0]} {number}"
                    times = await _round(pool, name, size, count, writes)
                    taken[way] += times if number else []  # the first round is not counted
            steps, one = (statistics.median(taken[way]) for way in _LIMITS)
            print(
                f"{scheme}  {count:3} x {size >> 10:4} KiB   in steps {steps * 1e3:7.3f} ms   "
                f"one request {one * 1e3:7.3f} ms   {one / steps:.2f}"
            )


def main() -> None:
    """Print a line for each transport and shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=20)
    rounds = parser.parse_args().rounds
    with (
        started("kvpool", "master", "--bind", "127.0.0.1:0", says="master at") as master,
        started("kvpool", "server", "--capacity", "2GiB", "--masters", master, says="server "),
    ):
        for scheme in ("tcp", "shm"):
            uvloop.run(_measure(master, scheme, rounds + 1))
    print("load of the machine:", " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
