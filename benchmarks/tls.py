"""What TLS costs: reads and writes over tls and over tcp, in turns, as ratios.

python -m benchmarks.tls
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from kvpool import ClientConfig, Cluster, Namespace, Pool, dev
from kvpool.net.control_network import TcpNetwork
from kvpool.protocols import Transport
from kvpool_transports.tcp import TcpTransport
from kvpool_transports.tls import TlsTransport

_CLUSTER = Cluster("default", b"a secret of this benchmark alone")
_NAMESPACE = Namespace("tls")
_SIZE, _BLOCKS, _ROUNDS, _SINGLES = 1 << 20, 32, 9, 20


async def _measure(cert: Path, key: Path) -> dict[str, dict[str, float]]:
    """Median seconds by what is done and by transport; the first round is not counted."""
    transports: dict[str, Transport] = {
        "tcp": TcpTransport(),
        "tls": TlsTransport(cert=str(cert), key=str(key)),
    }
    taken: dict[str, dict[str, list[float]]] = {
        what: {scheme: [] for scheme in transports} for what in ("read", "write", "one block")
    }
    async with AsyncExitStack() as stack:
        listen = ("tcp://127.0.0.1:0", "tls://127.0.0.1:0")
        running = await stack.enter_async_context(
            dev.serve("1GiB", listen=listen, transports=transports, cluster=_CLUSTER)
        )
        pools = {
            scheme: await stack.enter_async_context(_pool(running.address, scheme, transports))
            for scheme in transports
        }
        for number in range(_ROUNDS):
            for scheme, pool in pools.items():
                await _round(pool, f"{scheme}{number}", scheme, taken)
    return {
        what: {scheme: statistics.median(times[1:]) for scheme, times in by_scheme.items()}
        for what, by_scheme in taken.items()
    }


def _pool(master: str, scheme: str, transports: Mapping[str, Transport]) -> Pool:
    return Pool(
        ClientConfig(masters=[master], transports=[scheme], timeout_s=30.0),
        cluster=_CLUSTER,
        network=TcpNetwork(_CLUSTER),
        transports={scheme: transports[scheme]},
        owns_network=True,
    )


async def _round(
    pool: Pool, name: str, scheme: str, taken: dict[str, dict[str, list[float]]]
) -> None:
    chain = [f"{name} {number}".encode().ljust(32) for number in range(_BLOCKS)]
    data = [bytes([number]) * _SIZE for number in range(_BLOCKS)]
    buffers = [bytearray(_SIZE) for _ in range(_BLOCKS)]

    async def timed(what: str, call: Awaitable[object], calls: int = 1) -> None:
        began = time.perf_counter()
        await call
        taken[what][scheme].append((time.perf_counter() - began) / calls)

    async def singles() -> None:
        for _ in range(_SINGLES):
            await pool.read(_NAMESPACE, chain[:1], buffers[:1])

    await timed("write", pool.write(_NAMESPACE, chain, data))
    await timed("read", pool.read(_NAMESPACE, chain, buffers))
    assert buffers == data
    await timed("one block", singles(), _SINGLES)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cert, key = Path(folder) / "cert.pem", Path(folder) / "key.pem"
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        files = ["-subj", "/CN=benchmark", "-keyout", str(key), "-out", str(cert)]
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
        medians = uvloop.run(_measure(cert, key))
    for what, seconds in medians.items():
        size = 1 if what == "one block" else _BLOCKS
        tcp, tls = (1e3 * seconds[scheme] for scheme in ("tcp", "tls"))
        print(f"{what:9} {size:2} MiB: tcp {tcp:6.2f} ms, tls {tls:6.2f} ms: {tls / tcp:.2f} times")


if __name__ == "__main__":
    main()
