"""A turn whose blocks lie on disk, with a prefetch and without; and what a stranger's prefetches
cost the readers beside them.

    python -m benchmarks.prefetch [directory] [--turns 120]

One server process with 256 MiB of memory above a file of 2 GiB. Each turn reads 24 blocks of 1 MiB
that are in the file only, half a second after its prompt has arrived, as behind a queue. Turns with
and without a prefetch at the arrival alternate. Then readers of blocks in memory, and of chains on
disk, are measured in turns with and without a client beside them that prefetches without end and
reads nothing. The figures are ratios inside one run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from kvpool import Namespace, Pool
from kvpool.client.opening import connect
from kvpool.config import ClientConfig
from kvpool.tools.subprocesses import process_of, servers_up

_BLOCK: Final = 1 << 20
_CHAIN: Final = 24
_CHAINS: Final = 60
_HOT: Final = 8
_QUEUE_S: Final = 0.5
_MEMORY: Final = 256 << 20
_FILE: Final = 2 << 30
_NAMESPACE: Final = Namespace("bench")
#: Phases of readers alone and beside the stranger, and how long each is.
_PHASES: Final = 4
_PHASE_S: Final = 5.0


def keys(what: str, count: int) -> list[bytes]:
    return [f"{what} {number}".encode().rjust(32, b".") for number in range(count)]


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[tuple[Pool, str]]:
    path = directory / f"kvpool-benchmark-{os.getpid()}"
    try:
        async with process_of(
            "kvpool", "master", "--bind", "127.0.0.1:0", "--log-level", "error"
        ) as master_process:
            master = (await master_process.line()).removeprefix("master at ")
            server = process_of(
                "kvpool",
                "server",
                *("--masters", master, "--id", "bench", "--log-level", "error"),
                *("--tier", f"dram:{_MEMORY}", "--tier", f"nvme:{path}:{_FILE}"),
                environment={"KVPOOL_SERVER_HEARTBEAT_S": "100ms"},
            )
            async with server as child:
                await child.line()
                await servers_up(master, 1)
                config = ClientConfig(masters=[master], transports=["shm"], timeout_s=60)
                async with await connect(config=config) as pool:
                    yield pool, master
    finally:
        path.unlink(missing_ok=True)


async def written(pool: Pool, blocks: int) -> None:
    """Wait until the file has so many blocks."""
    while True:
        (member,) = await pool.members()
        if member.stats.usage[1].written_blocks >= blocks:
            return
        await asyncio.sleep(0.05)


async def turn(pool: Pool, chain: Sequence[bytes], buffers: Sequence[memoryview]) -> float:
    """Seconds of what an engine waits for: where the blocks are, and the blocks."""
    began = time.perf_counter()
    match = await pool.match(_NAMESPACE, chain)
    results = await pool.read(_NAMESPACE, chain, buffers, match=match)
    seconds = time.perf_counter() - began
    assert all(result.status.hit for result in results), "a block was not there"
    return seconds


async def turns(
    pool: Pool, chains: Sequence[Sequence[bytes]], buffers: Sequence[memoryview], count: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"from disk": [], "prefetched": [], "in memory": []}
    for number in range(count):
        chain = chains[number % len(chains)]
        name = ("from disk", "prefetched")[number % 2 ^ number // len(chains) % 2]
        if name == "prefetched":
            began = time.perf_counter()
            await pool.prefetch(_NAMESPACE, chain)
            found.setdefault("the call", []).append(time.perf_counter() - began)
        await asyncio.sleep(_QUEUE_S)
        found[name].append(await turn(pool, chain, buffers))
        found["in memory"].append(await turn(pool, chain, buffers))
    return found


async def beside(
    pool: Pool, master: str, chains: Sequence[Sequence[bytes]], buffers: Sequence[memoryview]
) -> dict[str, list[float]]:
    """Readers alone and beside a client that prefetches all that it can."""
    found: dict[str, list[float]] = {}
    hot, cold = keys("hot", _HOT), chains[: len(chains) // 2]
    for phase in range(_PHASES * 3):
        label = ("", " beside matches", " beside prefetches")[phase % 3]
        async with contextlib.AsyncExitStack() as stack:
            if phase % 3:
                asks = ("--stranger", master, *(["--matches"] if phase % 3 == 1 else []))
                other = process_of("benchmarks.prefetch", *asks)
                await (await stack.enter_async_context(other)).line()
            until, number = time.perf_counter() + _PHASE_S, phase * 7
            while time.perf_counter() < until:
                for _ in range(10):
                    seconds = await turn(pool, hot, buffers[:_HOT])
                    found.setdefault(f"hot{label}", []).append(seconds)
                    await asyncio.sleep(0.01)
                number += 1
                seconds = await turn(pool, cold[number % len(cold)], buffers)
                found.setdefault(f"cold{label}", []).append(seconds)
    return found


async def stranger(master: str, *, matches: bool) -> None:
    """Prefetch, or look up, without end, and read nothing."""
    config = ClientConfig(masters=[master], transports=["shm"], timeout_s=60)
    async with await connect(config=config) as pool:
        print("begins", flush=True)
        for number in itertools.count():
            chain = keys(f"chain {_CHAINS // 2 + number % 30}", _CHAIN)
            ask = pool.match if matches else pool.prefetch
            await ask(_NAMESPACE, chain)
            await asyncio.sleep(0.02)


def _ms(seconds: Sequence[float], share: float) -> float:
    return float(np.quantile(seconds, share)) * 1000


async def main(directory: Path, count: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "turns", "p50 ms", "p99 ms", "p50 ratio", "p99 ratio"):
        table.add_column(name, justify="left" if not name else "right")
    source = [memoryview(np.random.default_rng(n).bytes(_BLOCK)) for n in range(_CHAIN)]
    buffers = [memoryview(bytearray(_BLOCK)) for _ in range(_CHAIN)]
    chains = [keys(f"chain {number}", _CHAIN) for number in range(_CHAINS)]

    def add(label: str, seconds: Sequence[float], base: Sequence[float]) -> None:
        halves = [_ms(seconds, share) for share in (0.5, 0.99)]
        ratios = [_ms(seconds, share) / _ms(base, share) for share in (0.5, 0.99)]
        figures = [f"{one:.1f}" for one in halves] + [f"{one:.2f}" for one in ratios]
        table.add_row(label, str(len(seconds)), *figures)

    async with running(directory) as (pool, master):
        for number, chain in enumerate(chains):
            await pool.write(_NAMESPACE, chain, source)
            await written(pool, (number + 1) * _CHAIN)
        await pool.write(_NAMESPACE, keys("hot", _HOT), source[:_HOT])
        found = await turns(pool, chains, buffers, count)
        base = found["from disk"]
        add("a turn from disk", base, base)
        add("prefetched at its arrival", found["prefetched"], base)
        add("the prefetch itself", found["the call"], base)
        add("in memory (the limit)", found["in memory"], base)
        found = await beside(pool, master, chains, buffers)
        for kind, label in (("hot", "8 blocks in memory"), ("cold", "24 blocks on disk")):
            base = found[f"{kind} beside matches"]
            add(f"{label}, alone", found[kind], base)
            add("... beside a stranger who looks up", base, base)
            add("... beside one who prefetches as often", found[f"{kind} beside prefetches"], base)
        (member,) = await pool.members()
        counters = member.stats.counters
        shown = ", ".join(f"{n} {c:,}" for n, c in counters.items() if n.startswith("prefetch"))
        table.caption = shown
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A turn whose blocks lie on disk.")
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir(), type=Path)
    parser.add_argument("--turns", default=120, type=int)
    parser.add_argument("--stranger", help=argparse.SUPPRESS)
    parser.add_argument("--matches", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stranger:
        asyncio.run(stranger(arguments.stranger, matches=arguments.matches))
    Console().print(asyncio.run(main(arguments.directory, arguments.turns)))
