"""A load of one chain over 1, 2 and 4 servers that hold it, each behind a link of its own speed.

    python -m benchmarks.ways [--rounds 5] [--mib 96] [--rate 50] [--kib 1024]

The master and the servers are processes of their own. The kernel paces what each connection to a
server carries (SO_MAX_PACING_RATE), and a load uses one connection to each. The limit is the load
from one server. In the last row one server of four is frozen while a load runs (design: hedging).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
import signal
import socket
import statistics
import sys
import time
from typing import Final

from rich.console import Console

from kvpool import ClientConfig, Namespace, Pool, admin, connect
from kvpool.cli.app import main as command
from kvpool.ops import process
from kvpool.tools.bench import Row, table
from kvpool.tools.subprocesses import process_of, servers_up
from kvpool_transports import tcp

_NAMESPACE: Final = Namespace("bench")
_SERVERS: Final = 4
_SO_MAX_PACING_RATE: Final = 47
#: A load over so many ways is to be so much faster than over one.
_TARGETS: Final = {2: 1.85, 4: 3.4}


def measure(rounds: int, mib: int = 96, rate: float = 50e6, kib: int = 1024) -> list[Row]:
    """Speed as a ratio to that of one server, at `rate` bytes per second for each, with blocks of
    `kib`."""
    return process.run(_measure(rounds, mib, rate, kib << 10))


async def _measure(rounds: int, mib: int, rate: float, block: int) -> list[Row]:
    async with contextlib.AsyncExitStack() as stack:
        quiet = ("--log-level", "error")
        master = await stack.enter_async_context(
            process_of("kvpool", "master", "--bind", "127.0.0.1:0", *quiet)
        )
        address = (await master.line()).removeprefix("master at ")
        children = []
        for number in range(_SERVERS):
            place = ("--masters", address, "--id", f"s{number}", "--capacity", f"{4 * mib}MiB")
            listen = ("--listen", "tcp://127.0.0.1:0")
            serve = ("serve", str(rate), "server", *place, *listen, *quiet, "--die-with-parent")
            children.append(await stack.enter_async_context(process_of("benchmarks.ways", *serve)))
            await children[-1].line()
        await servers_up(address, _SERVERS)
        config = ClientConfig(masters=[address], transports=["tcp"], timeout_s=30.0)
        pool = await stack.enter_async_context(await connect(config=config))
        buffers = [bytearray(block) for _ in range((mib << 20) // block)]
        chains = {count: await _write(pool, count, len(buffers), block) for count in (1, *_TARGETS)}
        seconds: dict[int, list[float]] = {count: [] for count in chains}
        for number in range(rounds + 1):
            for count, chain in chains.items():
                took = await _load(pool, chain, buffers)
                if number:  # the first round opens connections
                    seconds[count].append(took)
        one = statistics.median(seconds[1])
        rows = [_row(mib, count, statistics.median(seconds[count]), one) for count in chains]
        pid = children[1].pid
        pool_s = statistics.median(seconds[_SERVERS])
        os.kill(pid, signal.SIGSTOP)
        frozen_s = await _load(pool, chains[_SERVERS], buffers)
        os.kill(pid, signal.SIGCONT)
        three_s = pool_s * _SERVERS / (_SERVERS - 1)
        rows.append(
            Row(
                f"the same, one of {_SERVERS} frozen",
                f"{frozen_s * 1e3:.0f} ms",
                f"over {_SERVERS - 1} {three_s * 1e3:.0f} ms, hedge {config.hedge_s * 1e3:.0f} ms",
                (frozen_s - three_s) / config.hedge_s,
                "<= 1 hedge",
                frozen_s - three_s <= config.hedge_s,
            )
        )
        return rows


async def _write(pool: Pool, servers: int, count: int, block: int) -> list[bytes]:
    """One chain that the first so many servers hold."""
    rng = random.Random(servers)
    chain = [hashlib.sha256(f"{servers}/{i}".encode()).digest() for i in range(count)]
    for digest in chain:
        data = rng.randbytes(block)
        for number in range(servers):
            await admin(pool).write_to(f"s{number}", _NAMESPACE, digest, data)
    return chain


async def _load(pool: Pool, chain: list[bytes], buffers: list[bytearray]) -> float:
    match = await pool.match(_NAMESPACE, chain)
    began = time.perf_counter()
    results = await pool.read(_NAMESPACE, chain, buffers, match=match)
    took = time.perf_counter() - began
    if not all(result.status.hit for result in results):
        raise SystemExit(f"reads ended as { ({one.status.label for one in results}) }")
    return took


def _row(mib: int, count: int, seconds: float, one: float) -> Row:
    ratio, target = one / seconds, _TARGETS.get(count)
    return Row(
        f"a load of {mib} MiB, {count} of {_SERVERS} servers hold it",
        f"{mib * 2**20 / seconds / 1e6:.0f} MB/s",
        f"one server {mib * 2**20 / one / 1e6:.0f} MB/s",
        ratio,
        f">= {target}" if target else "",
        ratio >= target if target else None,
    )


def _serve(rate: float) -> None:
    """A `kvpool` process that paces each connection."""
    tune = tcp.tune

    def paced(transport: asyncio.BaseTransport) -> None:
        tune(transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(rate))

    tcp.tune = paced
    command()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s")
    parser.add_argument("--kib", type=int, default=1024, help="of a block")
    options = parser.parse_args()
    rows = measure(options.rounds, options.mib, options.rate * 1e6, options.kib)
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        rate = float(sys.argv[2])
        sys.argv[1:3] = []
        _serve(rate)
    else:
        main()
