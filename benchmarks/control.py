"""Questions to masters over zmq and over streams, in turns: calls of a client, as ratios.

    python -m benchmarks.control [--rounds 10] [--secret] [--busy N]

Two pools of processes, each a master and a server. The master of one has no streams
(`master.stream_port` -1), so all goes by zmq. One process is a client of both, and the same calls
go to each, round after round. `--secret`: of a cluster with one, so all is encrypted. `--busy`: so
many loops run beside. (design: control-stream)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import uvloop

from kvpool import ClientConfig, Namespace, Pool, WriteStatus, connect, read_secret
from kvpool.types import Cluster

_NAMESPACE: Final = Namespace("control")
_PORTS: Final = {"zmq": "-1", "stream": "0"}
_CHAIN: Final = [(b"chain %d" % i).ljust(32) for i in range(640)]

Call = Callable[[Pool, str], Awaitable[object]]


@contextmanager
def _process(env: dict[str, str], *command: str, says: str) -> Iterator[str]:
    """A process of a pool; what it says when it is ready."""
    started = subprocess.Popen(
        [sys.executable, "-m", "kvpool", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        assert started.stdout is not None
        yield next(line for line in started.stdout if says in line).split()[-1]
    finally:
        started.terminate()
        started.wait()


async def _match(pool: Pool, name: str) -> None:
    assert (await pool.match(_NAMESPACE, _CHAIN[:1])).length == 1


async def _match_chain(pool: Pool, name: str) -> None:
    assert (await pool.match(_NAMESPACE, _CHAIN)).length == len(_CHAIN)


def _write(size: int, count: int) -> Call:
    data = [os.urandom(size) for _ in range(count)]

    async def call(pool: Pool, name: str) -> None:
        keys = [f"{name} {size} {i}".encode().ljust(32) for i in range(count)]
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


async def _measure(masters: dict[str, str], cluster: Cluster, rounds: int) -> None:
    pools = {}
    for way, master in masters.items():
        config = ClientConfig(masters=[master], transports=["shm"], timeout_s=30.0)
        pools[way] = await connect(config=config, cluster=cluster)
        await pools[way].write(_NAMESPACE, _CHAIN, [b"x"] * len(_CHAIN))
    for what, (call, calls) in _CALLS.items():
        took: dict[str, list[float]] = {way: [] for way in pools}
        for number in range(rounds + 1):
            for way, pool in pools.items():
                for i in range(calls):
                    began = time.perf_counter()
                    await call(pool, f"{number} {i}")
                    if number:  # the first round is not counted
                        took[way].append(time.perf_counter() - began)
        medians = {way: statistics.median(times) * 1e6 for way, times in took.items()}
        late = {way: sorted(times)[len(times) * 99 // 100] * 1e6 for way, times in took.items()}
        print(
            f"{what:26} zmq {medians['zmq']:6,.0f} us, p99 {late['zmq']:7,.0f}   "
            f"stream {medians['stream']:6,.0f} us, p99 {late['stream']:7,.0f}   "
            f"{medians['stream'] / medians['zmq']:.2f}",
            flush=True,
        )
    for pool in pools.values():
        await pool.close()


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--secret", action="store_true")
    parser.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    with ExitStack() as stack:
        env, cluster = {}, Cluster()
        if options.secret:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            file = Path(folder) / "secret"
            file.touch(mode=0o600)
            file.write_bytes(os.urandom(32).hex().encode())
            env, cluster = (
                {"KVPOOL_SECRET_FILE": str(file)},
                Cluster("default", read_secret(str(file))),
            )
        masters = {}
        for way, port in _PORTS.items():
            own = env | {"KVPOOL_MASTER_STREAM_PORT": port}
            at = _process(own, "master", "--bind", "127.0.0.1:0", says="master at")
            masters[way] = stack.enter_context(at)
            serve = ("server", "--capacity", "2GiB", "--masters", masters[way])
            stack.enter_context(_process(own, *serve, says="server "))
        for _ in range(options.busy):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.kill)
        uvloop.run(_measure(masters, cluster, options.rounds))
    print("load of the machine:", " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
