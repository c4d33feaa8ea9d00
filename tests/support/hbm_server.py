"""A master and a server that has its blocks on a fake device alone: `python -m` this, to be killed.

It prints `master at` its address; what is written leaves the host's memory as soon as it has been
demoted.
"""

from __future__ import annotations

import asyncio

import pytest

from kvpool import dev
from kvpool.server.block_server import BlockServer
from kvpool.types import ReadStatus
from kvpool_transports.ucx import UcxTransport
from tests.support.fake_device import FakeGpu, torch


async def main() -> None:
    """Serve until the process is ended."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = FakeGpu(patch)
        with gpu.on_stream(torch.cuda.Stream(torch.device("cuda", 0))):
            async with dev.serve(
                listen=("ucx://127.0.0.1:0",),
                transports={"ucx": UcxTransport(tls="tcp,cuda_copy,self")},
                tiers=["dram:64MiB", "hbm:128MiB?device=cuda:1"],
            ) as running:
                print(f"master at {running.address}", flush=True)
                while True:
                    leave_memory(running.servers[0])
                    await asyncio.sleep(0.005)


def leave_memory(server: BlockServer) -> None:
    """Evict from the host's memory what the device has."""
    stack = server.stack
    for entry in stack.front.index.inventory():
        index = entry.index
        if entry.clean and stack.stores[1].index.peek(index.namespace, index.part, entry.digest):
            stack.front.remove(index.namespace, [entry.digest], ReadStatus.EVICTED, index.part)


if __name__ == "__main__":
    asyncio.run(main())
