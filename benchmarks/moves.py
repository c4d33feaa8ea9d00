"""What clients notice while a server hands over its blocks: reads with and without a drain.

    python -m benchmarks.moves [--mib 512]

A master and two servers are processes of their own. One client reads single blocks from the server
that leaves, over tcp, as an engine with short prompts does, before, during and after its drain.
(design: moves, drain)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Final

from rich.console import Console

from kvpool import ClientConfig, Namespace, Pool, connect, runtime
from kvpool.tools.bench import Row, table
from kvpool.tools.subprocesses import process_of, servers_up
from kvpool.types import DrainState

_NAMESPACE: Final = Namespace("bench")
_BLOCK: Final = 1 << 20
_IDLE_S: Final = 4.0
_PAUSE_S: Final = 0.002
_TARGET: Final = 1.3


def measure(mib: int) -> list[Row]:
    """The p99 of reads during a drain, beside that of the same reads without one."""
    idle, moving, seconds = runtime.run(_measure(mib))
    ratio = _p99(moving) / _p99(idle)
    speed = mib / seconds
    return [
        Row(
            f"reads of 1 MiB, p99, during a drain of {mib} MiB at {speed:.0f} MiB/s",
            f"{_p99(moving) * 1e3:.2f} ms of {len(moving):,}",
            f"{_p99(idle) * 1e3:.2f} ms idle",
            ratio,
            f"<= {_TARGET}",
            ratio <= _TARGET,
        )
    ]


async def _measure(mib: int) -> tuple[list[float], list[float], float]:
    """Seconds of each read while nothing moves, and while blocks do; seconds of the drain."""
    async with contextlib.AsyncExitStack() as stack:
        master = await stack.enter_async_context(
            process_of("kvpool", "master", "--bind", "127.0.0.1:0", "--log-level", "error")
        )
        address = (await master.line()).removeprefix("master at ")
        for name in ("leaves", "stays"):
            arguments = ("--masters", address, "--id", name, "--capacity", f"{2 * mib}MiB")
            server = await stack.enter_async_context(
                process_of("kvpool", "server", *arguments, "--log-level", "error")
            )
            await server.line()
        await servers_up(address, 2)
        config = ClientConfig(masters=[address], transports=["tcp"], timeout_s=30.0)
        pool = await stack.enter_async_context(await connect(config=config))
        digests = [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(mib)]
        for digest in digests:
            await pool.write_to("leaves", _NAMESPACE, digest, random.randbytes(_BLOCK))
        idle = await _read_while(pool, digests, lambda: asyncio.sleep(_IDLE_S))
        began = time.perf_counter()
        moving = await _read_while(pool, digests, lambda: _drain(pool))
        seconds = time.perf_counter() - began
        idle += await _read_while(pool, digests, lambda: asyncio.sleep(_IDLE_S))
        return idle, moving, seconds


async def _drain(pool: Pool) -> None:
    report = await pool.drain("leaves", within_s=120.0)
    while report.state is DrainState.RUNNING:
        await asyncio.sleep(0.05)
        report = await pool.drain_report("leaves")
    assert report.state is DrainState.DONE, report


async def _read_while(
    pool: Pool, digests: list[bytes], what: Callable[[], Awaitable[None]]
) -> list[float]:
    """Read one block after the other until `what` is done; the seconds of each read."""
    doing = asyncio.ensure_future(what())
    buffer, times = bytearray(_BLOCK), []
    rng = random.Random(1)
    while not doing.done():
        began = time.perf_counter()
        (result,) = await pool.read(_NAMESPACE, [rng.choice(digests)], [buffer])
        times.append(time.perf_counter() - began)
        assert result.status.hit, result
        await asyncio.sleep(_PAUSE_S)
    await doing
    return times


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=512)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(measure(arguments.parse_args().mib)))


if __name__ == "__main__":
    main()
