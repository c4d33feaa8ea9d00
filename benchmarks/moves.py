"""What clients notice while a server moves blocks: reads with and without a drain, or a prefetch.

    python -m benchmarks.moves [--mib 512] [--directory /disk]

The master and the servers are processes of their own. One client reads single blocks over tcp, as
an engine with short prompts does: from the server that leaves, before, during and after its drain;
and from the memory of a server, while other chains come up from its file and while none does.
(design: moves, movers, promotion)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from kvpool import ClientConfig, Namespace, Pool, admin, connect
from kvpool.ops import process
from kvpool.tools.bench import Row, table
from kvpool.tools.subprocesses import process_of, servers_up
from kvpool.types import MoveStatus

_NAMESPACE: Final = Namespace("bench")
_BLOCK: Final = 1 << 20
_IDLE_S: Final = 4.0
_PAUSE_S: Final = 0.002
_TARGET: Final = 1.3
#: Chains that come up, one after the other. An eighth of the memory may be prefetched and unread.
_ROUNDS: Final = 8
_SHARE: Final = 8
#: A chain has come up after so long.
_PREFETCH_S: Final = 60.0


def measure(mib: int, directory: Path | None = None) -> list[Row]:
    """The p99 of reads during a drain and during prefetches, beside that of the same reads while
    nothing moves.

    The prefetches are from a file of 4 times `mib` in `directory`, the one for temporary files if
    it is None.
    """
    idle, moving, seconds = process.run(_measure(mib))
    rows = [_row(f"a drain of {mib} MiB", idle, moving, mib / seconds)]
    with tempfile.TemporaryDirectory(dir=directory) as there:
        idle, moving, seconds = process.run(_measure_prefetch(mib, Path(there)))
    count = mib // _SHARE * _ROUNDS
    return [*rows, _row(f"prefetches of {count} MiB", idle, moving, count / seconds)]


def _row(what: str, idle: list[float], moving: list[float], speed: float) -> Row:
    ratio = _p99(moving) / _p99(idle)
    return Row(
        f"reads of 1 MiB, p99, during {what} at {speed:.0f} MiB/s",
        f"{_p99(moving) * 1e3:.2f} ms of {len(moving):,}",
        f"{_p99(idle) * 1e3:.2f} ms idle",
        ratio,
        f"<= {_TARGET}",
        ratio <= _TARGET,
    )


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
            await admin(pool).write_to("leaves", _NAMESPACE, digest, random.randbytes(_BLOCK))
        idle = await _read_while(pool, digests, lambda: asyncio.sleep(_IDLE_S))
        began = time.perf_counter()
        moving = await _read_while(pool, digests, lambda: _drain(pool))
        seconds = time.perf_counter() - began
        idle += await _read_while(pool, digests, lambda: asyncio.sleep(_IDLE_S))
        return idle, moving, seconds


async def _measure_prefetch(mib: int, directory: Path) -> tuple[list[float], list[float], float]:
    """Seconds of each read while nothing comes up, and while chains do; seconds of the latter."""
    async with contextlib.AsyncExitStack() as stack:
        master = await stack.enter_async_context(
            process_of("kvpool", "master", "--bind", "127.0.0.1:0", "--log-level", "error")
        )
        address = (await master.line()).removeprefix("master at ")
        tiers = ("--tier", f"dram:{mib}MiB", "--tier", f"nvme:{directory / 'file'}:{4 * mib}MiB")
        server = await stack.enter_async_context(
            process_of(
                *("kvpool", "server", "--masters", address, "--id", "bench", *tiers),
                *("--log-level", "error"),
            )
        )
        await server.line()
        await servers_up(address, 1)
        config = ClientConfig(masters=[address], transports=["tcp"], timeout_s=30.0)
        pool = await stack.enter_async_context(await connect(config=config))
        cold = [_digests(f"cold {number}", mib // _SHARE) for number in range(_ROUNDS)]
        # Fills the memory: the cold chains are in the file alone then, and what is read is newest.
        fill = _digests("fill", mib)
        for chain in [*cold, fill]:
            for digest in chain:
                await admin(pool).write_to("bench", _NAMESPACE, digest, random.randbytes(_BLOCK))
        hot, idle, moving, seconds = fill[-mib // 4 :], [], [], 0.0
        await _read_while(pool, hot, lambda: asyncio.sleep(_IDLE_S))  # until older blocks may go
        for chain in cold:
            idle += await _read_while(pool, hot, lambda: asyncio.sleep(_IDLE_S / 2))
            began = time.perf_counter()
            moving += await _read_while(pool, hot, functools.partial(_prefetch, pool, chain))
            seconds += time.perf_counter() - began
            into = [bytearray(_BLOCK) for _ in chain]
            await pool.read(_NAMESPACE, chain, into)  # the next chain has its share again
        return idle, moving, seconds


def _digests(what: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{what} {number}".encode()).digest() for number in range(count)]


async def _prefetch(pool: Pool, chain: list[bytes]) -> None:
    """Returns when all of it has come up."""
    end = time.perf_counter() + _PREFETCH_S
    statuses = await pool.prefetch(_NAMESPACE, chain)
    while not all(status is MoveStatus.HERE for status in statuses):
        assert time.perf_counter() < end, Counter(status.name for status in statuses)
        await asyncio.sleep(0.05)
        statuses = await pool.prefetch(_NAMESPACE, chain)


async def _drain(pool: Pool) -> None:
    report = await admin(pool).drain("leaves", within_s=120.0)
    while report.state is MoveStatus.IN_PROGRESS:
        await asyncio.sleep(0.05)
        report = await admin(pool).drain_report("leaves")
    assert report.state is MoveStatus.DONE, report


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
    arguments.add_argument("--directory", type=Path, help="for the file of the second part")
    options = arguments.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(measure(options.mib, options.directory)))


if __name__ == "__main__":
    main()
