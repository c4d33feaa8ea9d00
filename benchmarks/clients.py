"""Many clients on one server, and many servers for one client: who is refused, and who waits.

    python -m benchmarks.clients [--clients 250,1000,2000] [--servers 1,16,128] [--seconds 20]

Each client is one of its own (`kvpool.connect`), in four processes, and reads four blocks of 64 KiB
now and then: after a pause that is random, five seconds on average. A server has 1,024 connections
(`server.connections_max`), so 2,000 clients must share them. The server is a process of its own,
over tcp. Then one client reads a block of each of many servers in one call. Every byte is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.connections import private_mib
from kvpool import ClientConfig, Cluster, Namespace, Pool, admin, connect, dev, registry
from kvpool.errors import KvpoolError, MasterLost
from kvpool.net.control_network import TcpNetwork
from kvpool.ops import process as command
from kvpool.runtime import this_host

_NAMESPACE: Final = Namespace("bench")
_SIZE: Final = 64 << 10
_READ_BLOCKS: Final = 4
_PAUSE_S: Final = 5.0
_PROCESSES: Final = 4
#: Clients of one process that connect at the same time.
_CONNECT_AT_ONCE: Final = 16
_ROUNDS: Final = 50


def _keys(count: int) -> list[bytes]:
    return [hashlib.sha256(number.to_bytes(4)).digest() for number in range(count)]


def _value(key: bytes) -> bytes:
    return key * (_SIZE // len(key))


async def _serve(servers: int) -> None:
    """A pool in this process until it is killed; its address goes to stdout."""
    async with dev.serve("16MiB", servers=servers, listen=("tcp://127.0.0.1:0",)) as running:
        command.freeze_gc()
        print(running.address, urlsplit(running.servers[0].addresses[0]).port, flush=True)
        await asyncio.Event().wait()


async def _read(pool: Pool, keys: Sequence[bytes], answers: Counter[str]) -> float:
    """Seconds of one read of all keys; counts the status of each block, wrong bytes as `wrong`."""
    targets = [bytearray(_SIZE) for _ in keys]
    begin = time.perf_counter()
    try:
        results = await pool.read(_NAMESPACE, keys, targets)
    except KvpoolError as error:
        answers[type(error).__name__] += len(keys)
        return time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    for key, target, result in zip(keys, targets, results, strict=True):
        right = not result.status.hit or target == _value(key)
        answers[result.status.name if right else "wrong"] += 1
    return seconds


async def _clients(master: str, count: int, seed: int, seconds: float) -> None:
    """`count` clients of this process; a line when all are connected, one with what they saw."""
    answers: Counter[str] = Counter()
    took: list[float] = []
    gate = asyncio.Semaphore(_CONNECT_AT_ONCE)
    config = ClientConfig(masters=[master], transports=["tcp"])

    async def open_one(number: int) -> Pool:
        # Servers know a client by its process, and here many are in one.
        host = replace(this_host(), process=f"client/{seed}.{number}")
        async with gate:
            network = TcpNetwork(Cluster())
            pool = Pool(
                config, cluster=Cluster(), network=network, transports=transports,
                owns_network=True, host=host,
            )  # fmt: skip
            await stack.enter_async_context(pool)
            while True:
                with suppress(MasterLost):  # which answers hundreds of new clients at once later
                    await pool.where(_NAMESPACE, keys)
                    break
        return pool

    async def live(pool: Pool, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / _PAUSE_S))
            took.append(await _read(pool, keys, answers))

    keys, transports = _keys(_READ_BLOCKS), registry.transports(config.transports)
    async with AsyncExitStack() as stack:
        pools = await asyncio.gather(*[open_one(number) for number in range(count)])
        print("connected", flush=True)
        tasks = [
            asyncio.create_task(live(pool, random.Random(f"{seed}.{number}")))
            for number, pool in enumerate(pools)
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        print(json.dumps([answers, took]), flush=True)


@contextmanager
def _role(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.clients", "--role", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _connections(port: int) -> int:
    """How many there are to a port of this host, accepted or not."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    places = (line.split()[1:4:2] for line in lines)
    return sum(place.endswith(f":{port:04X}") and state == "01" for place, state in places)


def _sockets() -> int:
    """How many this process has."""
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(name) and os.readlink(name).startswith("socket:") for name in names)


async def _write(master: str, keys: Sequence[bytes]) -> None:
    config = ClientConfig(masters=[master], transports=["tcp"])
    async with await connect(config=config) as pool:
        await pool.write(_NAMESPACE, keys, [_value(key) for key in keys])


def _many_clients(count: int, seconds: float) -> list[str]:
    """One row: `count` clients of one server."""
    with _role("serve", 1) as server, ExitStack() as roles:
        master, port = _line(server).split()
        command.run(_write(master, _keys(_READ_BLOCKS)))
        begin = time.perf_counter()
        share = [len(range(number, count, _PROCESSES)) for number in range(_PROCESSES)]
        clients = [
            roles.enter_context(_role("clients", master, each, number, seconds))
            for number, each in enumerate(share)
        ]
        for process in clients:
            _line(process)
        connected = time.perf_counter() - begin
        time.sleep(seconds / 2)
        held, memory = _connections(int(port)), private_mib(server.pid)
        answers: Counter[str] = Counter()
        took: list[float] = []
        for process in clients:
            seen, times = json.loads(_line(process))
            answers.update(seen)
            took += times
    blocks = sum(answers.values())
    rest = ", ".join(f"{n} {name}" for name, n in answers.items() if name != "HIT") or "none"
    p50, p99 = np.percentile(took or [np.nan], [50, 99]) * 1e3
    return [
        f"{count:,}",
        f"{connected:.1f} s",
        f"{held:,}",
        f"{len(took) / seconds:.0f}",
        f"{answers['HIT'] / max(1, blocks):.2%}",
        rest,
        f"{p50:.1f} / {p99:.0f} ms",
        f"{memory:.0f} MiB",
    ]


async def _one_client(master: str, servers: int) -> list[str]:
    """One row: a client that reads a block of each server in one call."""
    answers: Counter[str] = Counter()
    config = ClientConfig(masters=[master], transports=["tcp"])
    keys = _keys(servers)
    async with await connect(config=config) as pool:
        for number, key in enumerate(keys):
            await admin(pool).write_to(f"dev-{number}", _NAMESPACE, key, _value(key))
    before = _sockets()
    async with await connect(config=config) as pool:
        first = await _read(pool, keys, answers)
        took = [await _read(pool, keys, answers) for _ in range(_ROUNDS)]
        held = _sockets() - before
    hits = answers["HIT"] / sum(answers.values())
    p50, p99 = np.percentile(took, [50, 99]) * 1e3
    times = f"{p50:.1f} / {p99:.1f} ms"
    return [f"{servers}", f"{held}", f"{hits:.2%}", f"{first * 1e3:.1f} ms", times]


def _many_servers(count: int) -> list[str]:
    with _role("serve", count) as servers:
        return command.run(_one_client(_line(servers).split()[0], count))


def _numbers(text: str) -> list[int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",") if part]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 1 on, as 250,1000")
    return numbers


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--clients", type=_numbers, default=[250, 1000, 2000])
    arguments.add_argument("--servers", type=_numbers, default=[1, 16, 128])
    arguments.add_argument("--seconds", type=float, default=20.0)
    arguments.add_argument("--role", nargs="+", default=[], help=argparse.SUPPRESS)
    options = arguments.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    match options.role:
        case ["serve", servers]:
            command.run(_serve(int(servers)))
            return
        case ["clients", master, count, seed, seconds]:
            command.run(_clients(master, int(count), int(seed), float(seconds)))
            return
    console = Console()
    table = Table(
        "clients", "all there", "connections", "reads/s", "hits", "other answers",
        "read p50 / p99", "server's memory",
    )  # fmt: skip
    for count in options.clients:
        table.add_row(*_many_clients(count, options.seconds))
    console.print(f"load {os.getloadavg()[0]:.1f}")
    console.print(table)
    table = Table("servers", "sockets of the client", "hits", "first read", "read p50 / p99")
    for count in options.servers:
        table.add_row(*_many_servers(count))
    console.print(table)


if __name__ == "__main__":
    main()
