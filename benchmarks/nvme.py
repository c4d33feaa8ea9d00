"""The NVMe tier against bare system calls on the same file, and how long it takes to come back.

    python -m benchmarks.nvme [directory]

The limit is as many threads as the tier has (the queue depth), each with preadv or pwritev in a
loop, in the same mode (O_DIRECT or not), from and to the same aligned memory, at the same places.
They take turns with the tier, and the medians count. The file is removed at the end.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from kvpool.ops import process
from kvpool.protocols.persistent_tier import Record
from kvpool.runtime import resident_bytes
from kvpool.tools.bench import Row, table
from kvpool.types import Namespace
from kvpool_tiers.dram import Dram
from kvpool_tiers.nvme.format import Geometry
from kvpool_tiers.nvme.tier import Nvme

_CAPACITY: Final = 2 << 30
_QUEUE_DEPTH: Final = 16
_BATCH: Final = 64
_ROUNDS: Final = 9
_ROUND_BYTES: Final = 256 << 20
_EXTENTS: Final = 1_000_000
_RECORDS_AT_ONCE: Final = 4096


class Bare:
    """Threads with nothing but a system call in them."""

    def __init__(self, path: Path, mode: str, memory: Sequence[memoryview]) -> None:
        direct = os.O_DIRECT if mode == "O_DIRECT" else 0
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | direct)
        self._memory = memory
        self._geometry = Geometry(_CAPACITY, 4096)

    def seconds(self, offsets: Sequence[int], size: int, *, write: bool) -> float:
        """How long all of them take together."""
        call = os.pwritev if write else os.preadv
        pieces = [
            (self._memory[number % _BATCH][piece.start : piece.stop], piece.position)
            for number, offset in enumerate(offsets)
            for piece in self._geometry.pieces(offset, size)
        ]
        queue = iter(pieces)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    piece = next(queue, None)
                if piece is None:
                    return
                call(self._fd, [piece[0]], piece[1])

        threads = [threading.Thread(target=work) for _ in range(_QUEUE_DEPTH)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started

    def close(self) -> None:
        os.close(self._fd)


async def through_the_tier(
    tier: Nvme, memory: Sequence[memoryview], offsets: Sequence[int], *, write: bool
) -> float:
    """Seconds for batches of calls, one after the other."""
    call = tier.write_from if write else tier.read_into
    started = time.perf_counter()
    for first in range(0, len(offsets), _BATCH):
        batch = offsets[first : first + _BATCH]
        await asyncio.gather(*(call(o, m) for o, m in zip(batch, memory, strict=False)))
    return time.perf_counter() - started


async def bandwidth(path: Path) -> list[Row]:
    """Reads and writes of two block sizes."""
    tier = Nvme(_CAPACITY, path=path, queue_depth=_QUEUE_DEPTH)
    mode = tier.mode
    mapped = memoryview(mmap.mmap(-1, _BATCH * (2 << 20)))
    mapped[:] = os.urandom(1 << 20) * (len(mapped) >> 20)
    chance = random.Random(1)
    rows = []
    whole = [mapped[n * (2 << 20) : (n + 1) * (2 << 20)] for n in range(_BATCH)]
    bare = Bare(path, str(mode), whole)
    await through_the_tier(tier, whole, range(0, _CAPACITY, 2 << 20), write=True)
    for size, target in ((2 << 20, ">= 0.9"), (64 << 10, "report")):
        memory = [piece[:size] for piece in whole]
        for write in (False, True):
            ours, limit = [], []
            for _ in range(_ROUNDS):
                offsets = chance.sample(range(0, _CAPACITY, size), _ROUND_BYTES // size)
                limit.append(bare.seconds(offsets, size, write=write))
                ours.append(await through_the_tier(tier, memory, offsets, write=write))
            rate, most = (_ROUND_BYTES / statistics.median(times) / 1e9 for times in (ours, limit))
            what = f"nvme {'write' if write else 'read'}, {size >> 10} KiB, batches of {_BATCH}"
            met = rate / most >= 0.9 if target != "report" else None
            limit_text = f"bare {mode}: {most:.2f} GB/s"
            rows.append(Row(what, f"{rate:.2f} GB/s", limit_text, rate / most, target, met))
    bare.close()
    tier.close()
    return rows


async def large_pages(path: Path) -> list[Row]:
    """The same bare reads into a memfd as it comes, and into what `Dram` makes of one."""
    tier = Nvme(_CAPACITY, path=path, queue_depth=_QUEUE_DEPTH)
    mode = tier.mode
    size = _BATCH * (2 << 20)
    fd = os.memfd_create("plain")
    os.ftruncate(fd, size)
    plain = memoryview(mmap.mmap(fd, size))
    dram = Dram(size)
    dram.wait_until_touched()
    memories = [
        [memory[n * (2 << 20) : (n + 1) * (2 << 20)] for n in range(_BATCH)]
        for memory in (plain, dram.view(0, size))
    ]
    plain[:] = os.urandom(1 << 20) * (size >> 20)
    bares = [Bare(path, mode, memory) for memory in memories]
    bares[0].seconds(range(0, _CAPACITY, 2 << 20), 2 << 20, write=True)
    times: list[list[float]] = [[], []]
    chance = random.Random(2)
    for _ in range(_ROUNDS):
        for bare, taken in zip(bares, times, strict=True):
            offsets = chance.sample(range(0, _CAPACITY, 2 << 20), _BATCH)
            taken.append(bare.seconds(offsets, 2 << 20, write=False))
    scattered, large = (size / statistics.median(taken) / 1e9 for taken in times)
    for bare in bares:
        bare.close()
    tier.close()
    os.close(fd)
    what, limit = "bare read into a memfd as it comes", f"into the dram tier: {large:.2f} GB/s"
    return [Row(what, f"{scattered:.2f} GB/s", limit, scattered / large, "report", None)]


async def recovery(path: Path, alignment: int = 4096) -> list[Row]:
    """A million extents, as dense as they can be; and the longest time that others had to wait."""
    tier = Nvme(_EXTENTS * alignment, path=path)
    namespace = Namespace("bench")
    started = time.perf_counter()
    for first in range(0, _EXTENTS, _RECORDS_AT_ONCE):
        numbers = range(first, min(first + _RECORDS_AT_ONCE, _EXTENTS))
        digest = os.urandom(32)
        await tier.persist(
            [
                Record(namespace, 0, digest, digest, n * alignment, alignment, n, n + 1)
                for n in numbers
            ]
        )
    remembered = _EXTENTS / (time.perf_counter() - started)
    tier.close()
    before = resident_bytes()
    tier = Nvme(_EXTENTS * alignment, path=path)
    lags: list[float] = []
    watcher = asyncio.ensure_future(_watch(lags))
    started = time.perf_counter()
    records = await tier.recover()
    took = time.perf_counter() - started
    watcher.cancel()
    memory = (resident_bytes() - before) / _EXTENTS
    assert len(records) == _EXTENTS
    tier.close()
    lags.sort()
    lag = f"{lags[-1] * 1e3:.1f} ms, p99 {lags[len(lags) * 99 // 100] * 1e3:.1f} ms"
    return [
        Row(
            "nvme: 1 million extents remembered", f"{remembered:,.0f} /s", "", None, "report", None
        ),
        Row("nvme: 1 million extents recovered", f"{took:.1f} s", "", None, "<= 30 s", took <= 30),
        Row("nvme: the loop stalls meanwhile", lag, "", None, "report", None),
        Row("nvme: memory for their records", f"{memory:.0f} bytes", "", None, "report", None),
    ]


async def _watch(lags: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - started - 0.001)


async def measure(directory: Path) -> list[Row]:
    """Everything, in a file of this directory that is gone afterwards."""
    path = directory / f"kvpool-benchmark-{os.getpid()}"
    rows: list[Row] = []
    for part in (bandwidth, large_pages, recovery):
        try:
            rows += await part(path)
        finally:
            path.unlink(missing_ok=True)
    return rows


if __name__ == "__main__":
    process.freeze_gc()
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(process.run(measure(target))))
