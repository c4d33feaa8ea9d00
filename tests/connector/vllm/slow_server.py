"""A block server in a process of its own, behind a slow link: something to kill in mid-load.

    python -m tests.connector.vllm.slow_server MASTER

It reads rates, in bytes per second, and writes how many bytes have moved, all the time.
"""

from __future__ import annotations

import asyncio
import sys

from kvpool import registry
from kvpool.config import ServerConfig
from kvpool.net.control_network import TcpNetwork
from kvpool.server.block_server import BlockServer
from kvpool.types import Cluster
from kvpool_transports.tcp import TcpTransport
from tests.chaos.shaped_transport import ShapedTransport


async def serve(master: str) -> None:
    config = ServerConfig(
        id="slow", masters=[master], capacity=64 << 20, listen=["tcp://127.0.0.1:0"]
    )
    tiers = registry.tiers(config, prefault=False)
    shaped = ShapedTransport(TcpTransport())
    server = BlockServer(
        config,
        cluster=Cluster(),
        network=TcpNetwork(),
        transports={"tcp": shaped},
        tiers=tiers,
        policy=registry.policy(config.policy, tiers[-1].capacity),
    )
    await server.start()
    await server.wait_until_registered(asyncio.get_running_loop().time() + 10)
    rates = asyncio.create_task(_listen(shaped))
    while not rates.done():  # with the end of its input it ends, too
        print(sum(proxy.moved for proxy in shaped.proxies), flush=True)
        await asyncio.sleep(0.02)
    await server.close()


async def _listen(shaped: ShapedTransport) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        shaped.conditions.rate = float(line)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
