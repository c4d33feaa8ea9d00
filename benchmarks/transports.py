"""Transports side by side, taking turns: shm, tcp, and ucx over each of its lanes that works here.

    python -m benchmarks.transports [--rounds 9] [--calls 1000] [--only shm tcp]

Batches of 64 blocks of 2 MiB, written and read back, verified; one block of 64 KiB, which over ucx
travels with its words; what eight connected clients that do nothing cost a server. Every way to
reach a server has a server of its own, master and servers are processes. Every byte is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import time
from contextlib import AsyncExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import kvpool
from kvpool import ClientConfig, Namespace, Pool, WriteStatus
from kvpool.errors import KvpoolError
from kvpool.ops import process
from kvpool.tools.bench import machine
from kvpool.tools.replay_report import quantiles
from kvpool.tools.subprocesses import Child, process_of, servers_up

_NAMESPACE = Namespace("bench")
_BATCH, _SIZE, _SINGLE = 64, 2 << 20, 64 << 10
_IDLE_CLIENTS = 8


class Way(NamedTuple):
    """How a client reaches its server."""

    name: str
    scheme: str
    lanes: str = ""

    @property
    def settings(self) -> str:
        """What is written behind the transport's name."""
        return f"?tls={self.lanes}" if self.lanes else ""


WAYS = (
    Way("shm", "shm"),
    Way("tcp", "tcp"),
    Way("ucx, tcp", "ucx", "tcp,self"),
    Way("ucx, posix", "ucx", "posix,self"),
    Way("ucx, sysv", "ucx", "sysv,self"),
    Way("ucx, posix and cma", "ucx", "posix,cma,self"),
)


class Lane:
    """One way, its server, and what was measured."""

    def __init__(self, way: Way, server: Child, pool: Pool) -> None:
        self.way = way
        self.server = server
        self.pool = pool
        self.writes: list[float] = []
        self.reads: list[float] = []
        self.singles: list[float] = []
        self.idle = 0.0

    async def batch(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        """Write and read all rows of `source`."""
        keys = [secrets.token_bytes(32) for _ in source]
        target[:, ::4096] = 0
        buffers = [row.data for row in target]
        began = time.perf_counter()
        statuses = await self.pool.write(_NAMESPACE, keys, [row.data for row in source])
        written = time.perf_counter()
        match = await self.pool.match(_NAMESPACE, keys)
        matched = time.perf_counter()
        results = await self.pool.read(_NAMESPACE, keys, buffers, match=match)
        ended = time.perf_counter()
        if set(statuses) != {WriteStatus.STORED} or not all(r.status.hit for r in results):
            raise KvpoolError(
                f"{self.way.name}: {set(statuses)}, { ({r.status for r in results}) }"
            )
        if not np.array_equal(source, target):
            raise KvpoolError(f"{self.way.name}: wrong bytes came back")
        await self.pool.remove(_NAMESPACE, keys)
        self.writes.append(source.nbytes / (written - began) / 1e9)
        self.reads.append(source.nbytes / (ended - matched) / 1e9)

    async def single(self, calls: int, data: bytes) -> None:
        key, back = secrets.token_bytes(32), bytearray(len(data))
        await self.pool.write(_NAMESPACE, [key], [data])
        match = await self.pool.match(_NAMESPACE, [key])
        for _ in range(calls):
            began = time.perf_counter()
            (result,) = await self.pool.read(_NAMESPACE, [key], [back], match=match)
            self.singles.append(time.perf_counter() - began)
            if not result.status.hit:
                raise KvpoolError(f"{self.way.name}: {result.status}")
        if back != data:
            raise KvpoolError(f"{self.way.name}: wrong bytes came back")
        await self.pool.remove(_NAMESPACE, [key])

    async def rest(self, master: str, seconds: float) -> None:
        """CPU that the server takes while clients that have read something do nothing."""
        async with AsyncExitStack() as stack:
            key, data = secrets.token_bytes(32), bytes(_SIZE)
            for _ in range(_IDLE_CLIENTS):
                pool = await stack.enter_async_context(await client(master, self.way))
                await pool.write(_NAMESPACE, [key], [data])
                await pool.read(_NAMESPACE, [key], [bytearray(_SIZE)])
            before = _cpu_s(self.server.pid)
            await asyncio.sleep(seconds)
            self.idle = (_cpu_s(self.server.pid) - before) / seconds


async def client(master: str, way: Way) -> Pool:
    config = ClientConfig(
        masters=[master], transports=[way.scheme + way.settings], timeout_s=60, attempt_s=10
    )
    return await kvpool.connect(config=config)


async def lane(way: Way, stack: AsyncExitStack) -> tuple[Lane, str]:
    """A master, a server and a client of its own."""
    quiet = ("--log-level", "error")
    master = await stack.enter_async_context(
        process_of("kvpool", "master", "--bind", "127.0.0.1:0", *quiet)
    )
    address = (await master.line()).removeprefix("master at ")
    place = "shm://" if way.scheme == "shm" else f"{way.scheme}://127.0.0.1:0{way.settings}"
    server = await stack.enter_async_context(
        process_of(
            *("kvpool", "server", "--masters", address, "--listen", place, *quiet),
            *("--capacity", str(2 * _BATCH * _SIZE)),
        )
    )
    await server.line()
    pool = await stack.enter_async_context(await client(address, way))
    await servers_up(address, 1)
    return Lane(way, server, pool), address


async def measure(options: argparse.Namespace, console: Console) -> list[Lane]:
    """All ways take turns, so that a busy minute is everybody's."""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (_BATCH, _SIZE), np.uint8)
    target = np.zeros_like(source)
    data = source[0][:_SINGLE].tobytes()
    lanes: list[tuple[Lane, str]] = []
    async with AsyncExitStack() as stack:
        for way in WAYS:
            if options.only and way.name not in options.only:
                continue
            try:
                made = await lane(way, stack)
                await made[0].batch(source, target)  # warms pages and connections
            except KvpoolError as error:
                console.print(f"  {way.name}: left out, {error}", highlight=False)
                continue
            made[0].reads.clear()
            made[0].writes.clear()
            lanes.append(made)
        for number in range(options.rounds):
            console.print(f"  round {number + 1} of {options.rounds}", highlight=False)
            for one, _ in lanes:
                await one.batch(source, target)
                await one.single(options.calls // options.rounds, data)
        for one, address in lanes:
            await one.rest(address, options.idle_s)
    return [one for one, _ in lanes]


def table(lanes: list[Lane]) -> Table:
    shown = Table()
    shown.add_column("way")
    for name in ("write", "read", "read / tcp", "read / shm", "64 KiB p50 / p99", "idle CPU"):
        shown.add_column(name, justify="right")
    median = {one.way.name: statistics.median(one.reads) for one in lanes}
    for one in lanes:
        read = median[one.way.name]
        p50, p99 = quantiles(one.singles)
        ratios = [f"{read / median[of]:.2f}x" if of in median else "" for of in ("tcp", "shm")]
        shown.add_row(
            one.way.name,
            f"{statistics.median(one.writes):.2f} GB/s",
            f"{read:.2f} GB/s",
            *ratios,
            f"{p50 * 1e6:.0f} / {p99 * 1e6:.0f} us",
            f"{one.idle * 100:.1f} %",
        )
    return shown


def _cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--idle-s", type=float, default=5.0)
    parser.add_argument("--only", nargs="*", help="names of ways, as in the table")
    options = parser.parse_args()
    console = Console(stderr=True)
    lanes = process.run(measure(options, console))
    console.print({k: v for k, v in machine().items() if k != "argv"}, highlight=False)
    Console(width=120).print(table(lanes))


if __name__ == "__main__":
    main()
