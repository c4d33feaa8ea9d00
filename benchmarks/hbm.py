"""The HBM tier beside a plain copy between pinned memory and the device, in the same run.

The limit is one `copy_` of as many bytes as the batch has, from or to pinned memory, and a wait for
the device. It takes turns with the tier, and the medians count. Every byte is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from kvpool.errors import ConfigError
from kvpool.ops import process
from kvpool.tools.bench import Row, table
from kvpool_tiers.hbm import Hbm

#: Size and number of the blocks that are copied at a time.
SHAPES = ((64 << 10, 512), (2 << 20, 64), (128 << 20, 1))


class Host(NamedTuple):
    """Memory of the host, as the tier's callers have it: one array, cut into blocks."""

    name: str
    source: torch.Tensor
    target: torch.Tensor

    def blocks(self, tensor: torch.Tensor, size: int) -> Iterator[tuple[int, memoryview]]:
        array: npt.NDArray[np.uint8] = tensor.numpy()
        whole = array.data
        for offset in range(0, len(whole), size):
            yield offset, whole[offset : offset + size]


class Bench:
    """One tier, and plain memory of the same device beside it."""

    def __init__(self, device: str, rounds: int) -> None:
        self._rounds = rounds
        self._device = torch.device(device)
        self._size = max(size * count for size, count in SHAPES)
        self._tier = Hbm(self._size, device=device)
        self._plain = torch.empty(self._size, dtype=torch.uint8, device=device)
        self._pinned = self._host("pinned")

    async def rows(self) -> list[Row]:
        rows = []
        for host in (self._host("pageable"), self._pinned):
            for size, count in SHAPES:
                rows += await self._measure(host, size, count)
        self._tier.close()
        return rows

    def _host(self, name: str) -> Host:
        pin = name == "pinned" and self._device.type == "cuda"
        source = torch.randint(0, 256, (self._size,), dtype=torch.uint8)
        target = torch.zeros(self._size, dtype=torch.uint8)
        return (
            Host(name, source.pin_memory(), target.pin_memory())
            if pin
            else Host(name, source, target)
        )

    async def _measure(self, host: Host, size: int, count: int) -> list[Row]:
        tier = self._tier
        total = size * count
        seconds: dict[str, list[float]] = {name: [] for name in ("in", "out", "write", "read")}
        for number in range(self._rounds + 1):
            host.target.zero_()
            limit_in = self._plain_copy(self._plain, self._pinned.source, total)
            started = time.perf_counter()
            blocks = host.blocks(host.source[:total], size)
            await asyncio.gather(*(tier.write_from(at, block) for at, block in blocks))
            write = time.perf_counter() - started
            limit_out = self._plain_copy(self._pinned.target, self._plain, total)
            host.target.zero_()
            started = time.perf_counter()
            blocks = host.blocks(host.target[:total], size)
            await asyncio.gather(*(tier.read_into(at, block) for at, block in blocks))
            read = time.perf_counter() - started
            if not np.array_equal(host.target[:total].numpy(), host.source[:total].numpy()):
                raise SystemExit(f"wrong bytes: {count} blocks of {size}, {host.name} memory")
            if number:  # the first round warms pages, threads and the device
                taken = (limit_in, limit_out, write, read)
                for name, one in zip(seconds, taken, strict=True):
                    seconds[name].append(one)
        rate = {name: total / statistics.median(all_) / 1e9 for name, all_ in seconds.items()}
        what = f"{count} x {size >> 10} KiB, {host.name} memory"
        return [
            _row(f"write {what}", rate["write"], rate["in"]),
            _row(f"read {what}", rate["read"], rate["out"]),
        ]

    def _plain_copy(self, target: torch.Tensor, source: torch.Tensor, total: int) -> float:
        wait: Callable[[], None] = (
            torch.cuda.synchronize if self._device.type == "cuda" else lambda: None
        )
        wait()
        started = time.perf_counter()
        target[:total].copy_(source[:total], non_blocking=True)
        wait()
        return time.perf_counter() - started


def _row(what: str, rate: float, limit: float) -> Row:
    return Row(what, f"{rate:.2f} GB/s", f"{limit:.2f} GB/s", rate / limit, "report", None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hbm", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)  # on `cpu` torch would copy with all cores, and wake them each time
    try:
        bench = Bench(options.device, options.rounds)
    except ConfigError as error:
        sys.exit(str(error))
    name = torch.cuda.get_device_name(options.device) if "cuda" in options.device else "cpu"
    rows = process.run(bench.rows())
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{name}, torch {torch.__version__}, the limit is a plain pinned copy_")
    console.print(table(rows))


if __name__ == "__main__":
    main()
