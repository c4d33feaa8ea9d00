"""Questions to masters without a secret and with one, in turns: calls of a client, as ratios.

    python -m benchmarks.control [--rounds 10] [--busy N]

Two pools of processes, each a master and a server; with a secret all is encrypted. One process is a
client of both, and the same calls go to each, round after round. The first row has no pool: a
process that answers what it is asked. `--busy`: so many loops run beside. (design: control-plane)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeVar

import uvloop

from benchmarks.started import at_least, started
from kvpool import ClientConfig, Namespace, Pool, WriteStatus, connect, read_secret
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Link
from kvpool.types import Cluster

_T = TypeVar("_T")

_NAMESPACE: Final = Namespace("control")
_CAPACITY: Final = 1 << 30
_WAYS: Final = ("open", "secret")
_CHAIN: Final = [(b"chain %d" % i).ljust(32) for i in range(640)]

Call = Callable[[Pool, str], Awaitable[object]]


async def _match(pool: Pool, name: str) -> None:
    assert (await pool.match(_NAMESPACE, _CHAIN[:1])).length == 1


async def _match_chain(pool: Pool, name: str) -> None:
    assert (await pool.match(_NAMESPACE, _CHAIN)).length == len(_CHAIN)


def _write(size: int, count: int) -> Call:
    data = [os.urandom(size) for _ in range(count)]

    async def call(pool: Pool, name: str) -> None:
        keys = [f"{name} {size} {count} {i}".encode().ljust(32) for i in range(count)]
        statuses = await pool.write(_NAMESPACE, keys, data)
        assert set(statuses) == {WriteStatus.STORED}, statuses

    return call


_CALLS: Final[dict[str, tuple[Call, int]]] = {
    "match of 1": (_match, 100),
    "match of 640, seen before": (_match_chain, 50),
    "write of 4 KiB": (_write(4 << 10, 1), 50),
    "write of 128 KiB": (_write(128 << 10, 1), 50),
    "write of 64 x 64 KiB": (_write(64 << 10, 64), 8),
    "write of 64 x 128 KiB": (_write(128 << 10, 64), 4),
}


async def _measure(masters: dict[str, str], clusters: dict[str, Cluster], rounds: int) -> None:
    pools = {}
    for way, master in masters.items():
        config = ClientConfig(masters=[master], transports=["shm"], timeout_s=30.0)
        pools[way] = await connect(config=config, cluster=clusters[way])
        await _touched(pools[way])
        await pools[way].write(_NAMESPACE, _CHAIN, [b"x"] * len(_CHAIN))
    for what, (call, calls) in _CALLS.items():
        await _row(what, pools, call, calls, rounds)
    for pool in pools.values():
        await pool.close()


async def _touched(pool: Pool) -> None:
    """Return when the server's memory is there: else the server that was started last is slower."""
    async with asyncio.timeout(60):
        while True:
            (member,) = await pool.members()
            if member.stats.rss >= _CAPACITY:
                return
            await asyncio.sleep(0.1)


async def _row(
    what: str,
    ways: Mapping[str, _T],
    call: Callable[[_T, str], Awaitable[object]],
    calls: int,
    rounds: int,
) -> None:
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, one in ways.items():
            for i in range(calls):
                began = time.perf_counter()
                await call(one, f"{number} {i}")
                if number:  # the first round is not counted
                    took[way].append(time.perf_counter() - began)
    medians = {way: statistics.median(times) * 1e6 for way, times in took.items()}
    late = {way: sorted(times)[len(times) * 99 // 100] * 1e6 for way, times in took.items()}
    print(
        f"{what:26} open {medians['open']:6,.0f} us, p99 {late['open']:7,.0f}   "
        f"secret {medians['secret']:6,.0f} us, p99 {late['secret']:7,.0f}   "
        f"{medians['secret'] / medians['open']:.2f}",
        flush=True,
    )


async def _measure_bare(
    addresses: dict[str, str], clusters: dict[str, Cluster], rounds: int
) -> None:
    networks = {way: TcpNetwork(cluster) for way, cluster in clusters.items()}
    loop = asyncio.get_running_loop()

    async def call(link: Link, name: str) -> None:
        await link.request(1, bytes(100), deadline=loop.time() + 10)

    links = {way: networks[way].connect(address) for way, address in addresses.items()}
    await _row("nothing but an answer", links, call, 500, rounds)
    for network in networks.values():
        network.close()


async def _answer(secret: str) -> None:
    """The process of the first row."""
    network = TcpNetwork(Cluster("default", read_secret(secret)))
    listener = await network.serve("127.0.0.1:0", lambda type, body, caller: (type, body))
    print(f"answers at {listener.address}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=at_least(1), default=10)
    parser.add_argument("--busy", type=at_least(0), default=0)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        uvloop.run(_answer(os.environ.get("KVPOOL_SECRET_FILE", "")))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder) / "secret"
        file.touch(mode=0o600)
        file.write_bytes(os.urandom(32).hex().encode())
        secret = Cluster("default", read_secret(str(file)))
        clusters = dict(zip(_WAYS, (Cluster(), secret), strict=True))
        masters, bare = {}, {}
        for way, cluster in clusters.items():
            own = {"KVPOOL_SECRET_FILE": str(file)} if cluster.secret else {}
            run = functools.partial(started, env=own)
            answer = run("benchmarks.control", "--answer", says="answers at")
            bare[way] = stack.enter_context(answer)
            master = run("kvpool", "master", "--bind", "127.0.0.1:0", says="master at")
            masters[way] = stack.enter_context(master)
            serve = ("kvpool", "server", "--capacity", str(_CAPACITY), "--masters", masters[way])
            stack.enter_context(run(*serve, says="server "))
        for _ in range(options.busy):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.kill)
        uvloop.run(_measure_bare(bare, clusters, options.rounds))
        uvloop.run(_measure(masters, clusters, options.rounds))
    print("load of the machine:", " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
