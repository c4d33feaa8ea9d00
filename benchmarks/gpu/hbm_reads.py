"""Reads of blocks that only a server's HBM tier has, asked of the product.

The server is in this process, and its tier on the same device as the memory that is read into; the
lanes are those of direct reads (design: device-memory).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import torch

from benchmarks.gpu import direct
from benchmarks.gpu.checks import _wait
from benchmarks.gpu.report import Answer
from kvpool import Pool, ReadStatus, dev
from kvpool.ops import process
from kvpool.server.state.tiered_store import TieredStore
from kvpool_tiers.hbm import Hbm
from kvpool_transports.ucx import UcxTransport

#: Of new blocks that are read as soon as the tier has them.
_ROUNDS: Final = 20


def give_right_bytes(device: str) -> Answer:
    """Read as soon as the tier has them, in one row and in layers; a bit that rots there."""
    return process.run(_right_bytes(device))


def are_not_slower_than_promoted(device: str) -> Answer:
    """The same blocks into the same memory, from the tier and by way of the server's memory."""
    return process.run(_beside_promoted(device))


async def _right_bytes(device: str) -> Answer:
    drawn, wrong, compared = random.Random(13), 0, 0
    async with _here(device) as (running, writer, reader):
        stack = running.servers[0].stack
        sizes = direct._SIZES[2:] * 2
        for number in range(_ROUNDS):
            keys = [secrets.token_bytes(32) for _ in sizes]
            data = [drawn.randbytes(size) for size in sizes]
            await direct._store(writer, keys, data)
            await _leave_memory(running, keys)
            targets = [direct._layers(size, 1 + 4 * (number % 2), device) for size in sizes]
            results = await reader.read(direct._NAMESPACE, keys, targets)
            for result, rows, block in zip(results, targets, data, strict=True):
                got = b"".join(map(direct._bytes, rows))[: len(block)]
                compared += 1
                wrong += result.status is not ReadStatus.HIT or got != block
        if stack.front.index.stored:
            return Answer(
                False, f"{stack.front.index.stored} of {compared} blocks came by way of memory"
            )
        entry = stack.stores[1].index.peek(direct._NAMESPACE, 0, keys[-1])
        tier = running.servers[0].tiers[1]
        assert entry is not None
        assert isinstance(tier, Hbm)
        middle = entry.offset + entry.size // 2
        tier.device_view(middle, 1).bitwise_xor_(1)
        _wait(device)
        (rotten,) = await reader.read(direct._NAMESPACE, keys[-1:], targets[-1:])
        found = rotten.status is ReadStatus.CORRUPT
    return Answer(
        wrong == 0 and found,
        f"{wrong} of {compared} blocks differ; a bit that rots is "
        f"{'found' if found else 'NOT FOUND'}",
    )


async def _beside_promoted(device: str) -> Answer:
    best = {"from the tier": 0.0, "promoted": 0.0}
    async with _here(device) as (running, writer, reader):
        keys = [secrets.token_bytes(32) for _ in range(direct._BATCH // 2)]
        source = torch.randint(0, 256, (len(keys), direct._SIZE), dtype=torch.uint8)
        await direct._store(writer, keys, [row.numpy().data for row in source])
        stack = running.servers[0].stack
        assert isinstance(stack, TieredStore)
        in_place = stack.in_place_tiers
        for _ in range(5):  # the first connects, and warms the device
            for way in best:
                stack.in_place_tiers = in_place if way == "from the tier" else ()
                await _leave_memory(running, keys)
                target = torch.zeros((len(keys), direct._SIZE), dtype=torch.uint8, device=device)
                _wait(device)
                began = time.perf_counter()
                results = await reader.read(direct._NAMESPACE, keys, list(target))
                took = time.perf_counter() - began
                if not all(r.status.hit for r in results) or not torch.equal(target.cpu(), source):
                    raise RuntimeError(f"{way}: misses or wrong bytes")
                if bool(stack.front.index.stored) is (way == "from the tier"):
                    raise RuntimeError(f"{way}: {stack.front.index.stored} blocks are in memory")
                best[way] = max(best[way], source.numel() / took / 1e9)
    figures = ", ".join(f"{way} {rate:.1f} GB/s" for way, rate in best.items())
    slower = best["from the tier"] < best["promoted"]
    return Answer(not slower, f"{figures}; lanes {direct._lanes()}")


async def _leave_memory(running: dev.Dev, keys: Sequence[bytes]) -> None:
    """Wait until the tier has them, and evict them from the server's memory at once."""
    stack = running.servers[0].stack
    device = stack.stores[1]
    until = time.monotonic() + 10
    while stack.front.extents.dirty or any(
        device.index.peek(direct._NAMESPACE, 0, key) is None for key in keys
    ):
        if time.monotonic() > until:
            raise RuntimeError("the blocks do not come to the tier")
        await asyncio.sleep(0)
    stack.front.remove(direct._NAMESPACE, keys, ReadStatus.EVICTED)


@asynccontextmanager
async def _here(device: str) -> AsyncIterator[tuple[dev.Dev, Pool, Pool]]:
    """A server with an HBM tier, a client that stages and one that reads directly."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            dev.serve(
                listen=("ucx://127.0.0.1:0",),
                transports={"ucx": UcxTransport(tls=direct._lanes())},
                tiers=["dram:128MiB", f"hbm:512MiB?device={device}"],
            )
        )
        writer, reader = [
            await stack.enter_async_context(running.pool(direct._config(running.address, path)))
            for path in ("staged", "direct")
        ]
        yield running, writer, reader
