"""Batches of small blocks: this checkout beside another one, in turns, over shm and tcp.

    python -m benchmarks.batches [--beside PATH] [--shapes 64x64 128x64] [--busy 2]

Each checkout has a master, a server and a client of its own, all processes. A batch of new blocks
is written, read back into memory that was overwritten, compared and removed. The figures are the
median and the shortest time of a call, and the CPU time of client, server and master together per
GB. `--busy` starts so many endless loops beside. `--beside` is for comparisons while you work on
the hot paths: `git worktree add PATH main`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import uvloop

_HERE: Final = Path(__file__).resolve().parent.parent
_PACKAGES: Final = ("", "connector", "tiers", "transports")
_SCHEMES: Final = ("shm", "tcp")
#: Between a write and the read of it: what the write left to do is not counted for the read.
_REST_S: Final = 0.002


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far, all its threads: what `clock_getcpuclockid` is for in C."""
    return time.clock_gettime(~pid << 3 | 2)


@contextmanager
def _process(*command: str, says: str) -> Iterator[tuple[int, str]]:
    """A process of the pool: its id, and the last word that it says when it is ready."""
    started = subprocess.Popen(
        [sys.executable, "-m", "kvpool", *command, "--log-level", "error"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert started.stdout is not None
        yield started.pid, next(line for line in started.stdout if says in line).split()[-1]
    finally:
        started.terminate()
        started.wait()


# --- the process of one checkout --------------------------------------------------------------


async def _work(commands: IO[str]) -> None:
    """Do what each line says: `[scheme, block size, blocks, batches]`; answer with the figures."""
    from kvpool import ClientConfig, connect

    with ExitStack() as stack:
        master, address = stack.enter_context(
            _process("master", "--bind", "127.0.0.1:0", says="master at")
        )
        server, _ = stack.enter_context(
            _process("server", "--masters", address, "--capacity", "1GiB", says="server ")
        )
        pools = {
            scheme: await connect(
                config=ClientConfig(
                    masters=[address], transports=[scheme], timeout_s=60, attempt_s=10
                )
            )
            for scheme in _SCHEMES
        }
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, commands.readline):
            scheme, size, count, batches = json.loads(line)
            pids = [os.getpid(), server, master]
            figures = [await _batch(pools[scheme], size, count, pids) for _ in range(batches)]
            print(json.dumps(figures), flush=True)
        for pool in pools.values():
            await pool.close()


async def _batch(pool: Any, size: int, count: int, pids: list[int]) -> dict[str, list[float]]:
    """Seconds and CPU seconds of one write and of the read of it."""
    from kvpool import Namespace

    namespace = Namespace("batches")
    source = np.random.default_rng(secrets.randbits(32)).integers(0, 256, (count, size), np.uint8)
    target = np.full_like(source, 0xAA)
    keys = [secrets.token_bytes(32) for _ in range(count)]
    figures = {}
    for name, rows, call in (("write", source, pool.write), ("read", target, pool.read)):
        views = [row.data for row in rows]
        cpu, began = sum(map(_cpu_s, pids)), time.perf_counter()
        answers = await call(namespace, keys, views)
        seconds = time.perf_counter() - began
        figures[name] = [seconds, sum(map(_cpu_s, pids)) - cpu]
        states = {getattr(answer, "status", answer).name for answer in answers}
        if not states <= {"STORED", "HIT"}:
            raise SystemExit(f"{name}: {states}")
        await asyncio.sleep(_REST_S)
    if not np.array_equal(source, target):
        raise SystemExit("other bytes came back")
    await pool.remove(namespace, keys)
    return figures


# --- the command ------------------------------------------------------------------------------


@contextmanager
def _checkout(path: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that measures one checkout."""
    packages = ":".join(str(path / package) for package in _PACKAGES)
    worker = subprocess.Popen(
        [sys.executable, __file__, "--work"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": packages},
        cwd=path,
        text=True,
    )
    try:
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise SystemExit(f"{path} did not start")
        yield worker
    finally:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def _ask(worker: subprocess.Popen[str], *command: object) -> list[dict[str, list[float]]]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(command) + "\n")
    worker.stdin.flush()
    answer: list[dict[str, list[float]]] = json.loads(worker.stdout.readline())
    return answer


def _measure(options: argparse.Namespace, workers: dict[str, subprocess.Popen[str]]) -> None:
    for scheme in options.schemes:
        for shape in options.shapes:
            kib, count = map(int, shape.split("x"))
            gigabytes = count * kib * 1024 / 1e9
            found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in workers}
            for number in range(options.rounds + 1):
                for name in list(workers) if number % 2 else reversed(workers):
                    figures = _ask(workers[name], scheme, kib << 10, count, 2)
                    found[name] += figures if number else []  # the first round is not counted
            for operation in ("read", "write"):
                for name, figures in found.items():
                    seconds, cpu = zip(*(one[operation] for one in figures), strict=True)
                    middle = statistics.median(seconds)
                    print(
                        f"{scheme}  {count:3} x {kib:4} KiB  {operation:5}  {name:6}  "
                        f"{middle * 1e3:7.2f} ms (shortest {min(seconds) * 1e3:6.2f})  "
                        f"{gigabytes / middle:5.2f} GB/s  "
                        f"{statistics.median(cpu) / gigabytes:6.3f} CPU s/GB",
                        flush=True,
                    )


def main() -> None:
    """Print a line for each transport, shape, operation and checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--schemes", nargs="+", default=_SCHEMES, choices=_SCHEMES)
    parser.add_argument("--shapes", nargs="+", default=["64x64", "128x64", "1024x64"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0, help="endless loops beside")
    options = parser.parse_args()
    with ExitStack() as stack:
        for _ in range(options.busy):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.kill)
        workers = {}
        if options.beside is not None:
            workers["beside"] = stack.enter_context(_checkout(options.beside.resolve()))
        workers["here"] = stack.enter_context(_checkout(_HERE))
        _measure(options, workers)
    print("load of the machine:", " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    if "--work" in sys.argv:
        uvloop.run(_work(sys.stdin))
    else:
        main()
