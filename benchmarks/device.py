"""Blocks from and to memory of a GPU beside blocks from and to memory of the host. Needs a GPU.

    python -m benchmarks.device [--rounds 9] [--only shm tcp]

Batches of 64 blocks of 2 MiB, written by a client and read back, verified, over each transport:
from and to the device, and from and to the host, in turns. Beside them what the device does alone:
a copy within its memory, and one from and to pinned memory of the host. Master and servers are
processes. Every byte is compared. `--device cpu` says nothing, but that the command works.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.transports import WAYS, Lane, lane
from kvpool import Namespace, WriteStatus
from kvpool.errors import KvpoolError
from kvpool.ops import process
from kvpool.tools.bench import machine

_NAMESPACE: Final = Namespace("bench")
_BATCH, _SIZE = 64, 2 << 20
#: Where a batch is written from and read into.
_PLACES: Final = ("host", "device")


class Memory:
    """The same blocks in memory of the host and of the device, and room for them."""

    def __init__(self, device: str) -> None:
        host = torch.randint(0, 256, (_BATCH, _SIZE), dtype=torch.uint8)
        self._cuda = torch.device(device).type == "cuda"
        self.source = {"host": host, "device": host.to(device)}
        self.target = {place: torch.zeros_like(t) for place, t in self.source.items()}
        self._pinned = host.pin_memory() if self._cuda else host.clone()

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def limits(self) -> dict[str, float]:
        """GB/s of one plain copy of a whole batch, nothing else at work."""
        device = self.target["device"]
        return {
            "device to device": self._rate(lambda: device.copy_(self.source["device"])),
            "pinned to device": self._rate(lambda: device.copy_(self._pinned, non_blocking=True)),
            "device to pinned": self._rate(lambda: self._pinned.copy_(device, non_blocking=True)),
        }

    def _rate(self, copy: Callable[[], object]) -> float:
        self.wait()
        began = time.perf_counter()
        copy()
        self.wait()
        return _BATCH * _SIZE / (time.perf_counter() - began) / 1e9


Rates = dict[tuple[str, str, str], list[float]]


async def batch(one: Lane, memory: Memory, place: str) -> tuple[float, float]:
    """Write and read all blocks; GB/s of both."""
    keys = [secrets.token_bytes(32) for _ in range(_BATCH)]
    source, target = memory.source[place], memory.target[place]
    target.zero_()
    memory.wait()
    began = time.perf_counter()
    statuses = await one.pool.write(_NAMESPACE, keys, list(source))
    written = time.perf_counter()
    match = await one.pool.match(_NAMESPACE, keys)
    matched = time.perf_counter()
    results = await one.pool.read(_NAMESPACE, keys, list(target), match=match)
    ended = time.perf_counter()
    if set(statuses) != {WriteStatus.STORED} or not all(r.status.hit for r in results):
        raise KvpoolError(f"{one.way.name}: {set(statuses)}, { ({r.status for r in results}) }")
    if not torch.equal(source, target):
        raise KvpoolError(f"{one.way.name}: wrong bytes came back into memory of the {place}")
    await one.pool.remove(_NAMESPACE, keys)
    total = _BATCH * _SIZE / 1e9
    return total / (written - began), total / (ended - matched)


async def measure(
    options: argparse.Namespace, console: Console
) -> tuple[Rates, dict[str, list[float]]]:
    memory = Memory(options.device)
    rates: Rates = {}
    limits: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        lanes = []
        for way in WAYS:
            if way.name not in (options.only or [w.name for w in WAYS]):
                continue
            try:
                made, _ = await lane(way, stack)
                for place in _PLACES:  # warms pages, connections and the device
                    await batch(made, memory, place)
                lanes.append(made)
            except KvpoolError as error:
                console.print(f"  {way.name}: left out, {error}", highlight=False)
        for _ in range(options.rounds):
            for name, rate in memory.limits().items():
                limits.setdefault(name, []).append(rate)
            for one in lanes:
                for place in _PLACES:
                    both = await batch(one, memory, place)
                    for what, rate in zip(("write", "read"), both, strict=True):
                        rates.setdefault((one.way.name, place, what), []).append(rate)
    return rates, limits


def table(rates: Rates, limits: dict[str, list[float]]) -> Table:
    shown = Table("way", title=", ".join(f"{n} {_text(all_)}" for n, all_ in limits.items()))
    columns = [(what, place) for what in ("write", "read") for place in _PLACES]
    for what, place in columns:
        shown.add_column(f"{what} {place}", justify="right")
    shown.add_column("read device / host", justify="right")
    for way in dict.fromkeys(way for way, _, _ in rates):
        cells = [_text(rates[way, place, what]) for what, place in columns]
        device, host = (statistics.median(rates[way, place, "read"]) for place in _PLACES[::-1])
        shown.add_row(way, *cells, f"{device / host:.2f}x")
    return shown


def _text(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.2f} GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="names of ways, as in the table")
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        sys.exit(f"this needs a GPU: torch {torch.__version__} finds no CUDA device")
    console = Console(stderr=True)
    rates, limits = process.run(measure(options, console))
    name = torch.cuda.get_device_name(options.device) if cuda else "cpu: no figures of a device"
    console.print({k: v for k, v in machine().items() if k != "argv"}, highlight=False)
    console.print(f"{name}, torch {torch.__version__}", highlight=False)
    Console(width=120).print(table(rates, limits))


if __name__ == "__main__":
    main()
