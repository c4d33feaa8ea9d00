"""A server with memory over a file, measured through shm, against bare threads on the same file.

    python -m benchmarks.tiers [directory]

Reads are of blocks that lie in the file only: they come up, are checked by the server, copied and
checked again by the client, and that time counts. Of writes, which nobody waits for, the seconds
count in which the server moved blocks to the file, while the client wrote on. The limit takes turns
with the pool and reads or writes the same file in the same mode, with as many threads as the tier.
The block that is read while others go down is another client's than theirs.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from benchmarks.nvme import Bare
from kvpool import Pool
from kvpool.checksum import checksum
from kvpool.client.opening import connect
from kvpool.config import ClientConfig
from kvpool.ops import process
from kvpool.tools.bench import Row, table
from kvpool.tools.subprocesses import process_of, servers_up
from kvpool.types import Namespace, TierUsage

_BLOCK: Final = 2 << 20
_BATCH: Final = 64
_MEMORY: Final = 256 << 20
_FILE: Final = 2 << 30
_ROUNDS: Final = 9
_LATENCIES: Final = 400
_PLACES: Final = range(0, _BATCH * _BLOCK // 2, _BLOCK)
_NAMESPACE: Final = Namespace("bench")


def keys(what: str, count: int) -> list[bytes]:
    return [f"{what} {number}".encode().rjust(32, b".") for number in range(count)]


async def _disk(pool: Pool) -> TierUsage:
    (member,) = await pool.members()
    return member.stats.usage[1]


async def _written(pool: Pool, size: int) -> float:
    """Wait until the tier has been written so many bytes; the seconds in which it was."""
    while True:
        disk = await _disk(pool)
        if disk.written_bytes >= size:
            return disk.write_s
        await asyncio.sleep(0.02)


async def measure(directory: Path) -> list[Row]:
    path = directory / f"kvpool-benchmark-{os.getpid()}"
    arguments = ("--bind", "127.0.0.1:0", "--log-level", "error")
    try:
        async with process_of("kvpool", "master", *arguments) as running:
            master = (await running.line()).removeprefix("master at ")
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
                    rows = await _measure(pool, path)
                    return rows + await _foreground(pool, master, path)
    finally:
        path.unlink(missing_ok=True)


async def _measure(pool: Pool, path: Path) -> list[Row]:
    mode = (await _disk(pool)).status_text.rpartition(", ")[2]
    memory = memoryview(mmap.mmap(-1, _BATCH * _BLOCK))
    memory[:] = os.urandom(_BLOCK) * _BATCH
    buffers = [memory[n * _BLOCK : (n + 1) * _BLOCK] for n in range(_BATCH)]
    bare = Bare(path, mode, buffers)
    # What has only been set aside is not read from the disk at all.
    bare.seconds(range(0, _FILE, _BLOCK), _BLOCK, write=True)
    size = _BATCH * _BLOCK
    batches = [keys(f"batch {number}", _BATCH) for number in range(_FILE // size - 2)]
    down, bare_down, up, bare_up = [], [], [], []
    for first in range(0, len(batches), 2):
        before = (await _disk(pool)).write_s
        for batch in batches[first : first + 2]:
            await pool.write(_NAMESPACE, batch, buffers)
        down.append((await _written(pool, (first + 2) * size) - before) / 2)
        bare_down.append(bare.seconds(range(_FILE - size, _FILE, _BLOCK), _BLOCK, write=True))
    for number in range(_ROUNDS):
        started = time.perf_counter()
        results = await pool.read(_NAMESPACE, batches[number % len(batches)], buffers)
        up.append(time.perf_counter() - started)
        assert all(result.status.hit for result in results)
        places = range(number * size, (number + 1) * size, _BLOCK)
        bare_up.append(bare.seconds(places, _BLOCK, write=False))
    bare.close()
    rows = []
    for what, ours, limit in (("down", down, bare_down), ("up, verified", up, bare_up)):
        rate, most = (size / statistics.median(times) / 1e9 for times in (ours, limit))
        ratio = rate / most
        text = f"bare {mode}: {most:.2f} GB/s"
        name = f"tiers: {what}, 2 MiB x 64"
        rows.append(Row(name, f"{rate:.2f} GB/s", text, ratio, ">= 0.9", ratio > 0.9))
    return rows


async def _foreground(pool: Pool, master: str, path: Path) -> list[Row]:
    """One block in memory, read again and again, while nothing and while everything goes down.

    And while bare threads do what that comes to, without a server: what such a machine can keep.
    """
    hot = keys("hot", 1)
    block = [bytearray(os.urandom(64 << 10))]
    await pool.write(_NAMESPACE, hot, block)
    mode = (await _disk(pool)).status_text.rpartition(", ")[2]
    times = [await _latencies(pool, hot, block)]
    promoted = 0
    for arguments in (("--bare-flood", f"{path}-bare", mode), ("--flood", master)):
        async with process_of("benchmarks.tiers", *arguments) as writer:
            await writer.line()
            before = (await _disk(pool)).hits
            times.append(await _latencies(pool, hot, block))
            promoted = (await _disk(pool)).hits - before
    p50 = [statistics.median(taken) * 1e3 for taken in times]
    p99 = [sorted(taken)[len(taken) * 99 // 100] * 1e3 for taken in times]
    texts = [f"{half:.2f} / {most:.2f} ms" for half, most in zip(p50, p99, strict=True)]
    ratio, idle = p99[2] / p99[0], f"idle: {texts[0]}"
    what = "tiers: 64 KiB read while blocks go down, p50 / p99"
    bare = "the same beside bare threads that copy, hash and write"
    return [
        Row(what, f"{texts[2]}, {promoted} from the file", idle, ratio, "<= 2", ratio <= 2),
        Row(bare, texts[1], idle, p99[1] / p99[0], "report", None),
    ]


async def _latencies(pool: Pool, chain: list[bytes], buffers: list[bytearray]) -> list[float]:
    times = []
    for _ in range(_LATENCIES):
        started = time.perf_counter()
        (result,) = await pool.read(_NAMESPACE, chain, buffers)
        times.append(time.perf_counter() - started)
        assert result.status.hit
        await asyncio.sleep(0.002)
    return times


async def _flood(master: str) -> None:
    """Write for ever, faster than any disk takes it; says so when memory is full."""
    block = memoryview(os.urandom(_BLOCK))
    async with await connect(config=ClientConfig(masters=[master], transports=["shm"])) as pool:
        for number in itertools.count():
            await pool.write(_NAMESPACE, keys(f"flood {number}", 8), [block] * 8, timeout=10)
            if number * 8 * _BLOCK == 2 * _MEMORY:
                print("memory is full", flush=True)


def _bare_flood(path: Path, mode: str) -> None:
    """What a block on its way down costs at least: one copy, one checksum, one write. For ever."""
    halves = [memoryview(mmap.mmap(-1, _BATCH * _BLOCK // 2)) for _ in range(2)]
    block = np.frombuffer(os.urandom(_BLOCK), np.uint8)

    def fill(memory: memoryview) -> None:
        for start in range(0, len(memory), _BLOCK):
            np.copyto(np.frombuffer(memory[start : start + _BLOCK], np.uint8), block)
            checksum(memory[start : start + _BLOCK], 0)

    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _BATCH * _BLOCK * 2)
    try:
        bares = [Bare(path, mode, [half[n : n + _BLOCK] for n in _PLACES]) for half in halves]
        path.unlink()
        with ThreadPoolExecutor(1) as filler:
            for number in itertools.count():
                filling = filler.submit(fill, halves[number % 2])
                bares[(number + 1) % 2].seconds(_PLACES, _BLOCK, write=True)
                filling.result()
                if number == 4:
                    print("writing", flush=True)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    process.freeze_gc()
    if sys.argv[1:2] == ["--flood"]:
        process.die_with_parent()
        process.run(_flood(sys.argv[2]))
    elif sys.argv[1:2] == ["--bare-flood"]:
        process.die_with_parent()
        _bare_flood(Path(sys.argv[2]), sys.argv[3])
    else:
        target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table(process.run(measure(target))))
