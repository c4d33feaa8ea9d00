"""Direct writes as a whole, asked of the product, as `direct.py` asks for reads
(design: device-memory)."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from contextlib import AsyncExitStack
from typing import Final

import torch

from benchmarks.gpu import direct
from benchmarks.gpu.checks import _wait
from benchmarks.gpu.report import Answer
from kvpool import ReadStatus, WriteStatus
from kvpool.ops import process

_WRITES: Final = 60


def give_right_bytes(device: str) -> Answer:
    """In one row and in layers, with the work that fills them still queued."""
    return process.run(_right_bytes(device))


def end_when_they_return(device: str) -> Answer:
    """Writes that are cancelled in mid-transfer, and whose memory is used again at once."""
    return process.run(_ended(device))


def are_not_slower_than_staged(device: str) -> Answer:
    """The same blocks to the same server, both ways in turn."""
    return process.run(_beside_staged(device))


async def _right_bytes(device: str) -> Answer:
    drawn, wrong = random.Random(21), 0
    async with direct._here() as (_, reader, writer):
        sizes = [size for size in direct._SIZES for _ in range(3)]
        for layers in (1, 5):
            keys = [secrets.token_bytes(32) for _ in sizes]
            data = [drawn.randbytes(size) for size in sizes]
            sources = []
            for size, block in zip(sizes, data, strict=True):
                rows = [row[16:-16] for row in direct._layers(size, layers, device)]
                _fill(rows, block, device)
                sources.append(rows)
            written = await writer.write(direct._NAMESPACE, keys, sources)
            wrong += sum(status is not WriteStatus.STORED for status in written)
            targets = [bytearray(size) for size in sizes]
            results = await reader.read(direct._NAMESPACE, keys, targets)
            wrong += sum(result.status is not ReadStatus.HIT for result in results)
            wrong += sum(bytes(t) != block for t, block in zip(targets, data, strict=True))
        if not writer.counters["direct_write_bytes"]:
            raise RuntimeError("no block was written directly: nothing was shown")
    return Answer(wrong == 0, f"{wrong} of {6 * len(sizes)} comparisons differ")


async def _ended(device: str) -> Answer:
    drawn, wrong, gone, midst = random.Random(22), 0, 0, 0
    async with direct._here() as (_, reader, writer):
        takes = 0.0
        for number in range(_WRITES + 2):
            keys = [secrets.token_bytes(32) for _ in range(8)]
            whole = torch.randint(0, 256, (8, direct._SIZE), dtype=torch.uint8, device=device)
            _wait(device)
            expected = [direct._bytes(row) for row in whole]
            began = time.perf_counter()
            writing = asyncio.ensure_future(writer.write(direct._NAMESPACE, keys, list(whole)))
            if number >= 2:  # the first connects
                await asyncio.sleep(drawn.uniform(0, takes))
                writing.cancel()
            await asyncio.wait([writing])
            whole.fill_(7)
            _wait(device)
            if number < 2:
                takes = time.perf_counter() - began
            midst += writing.cancelled()
            targets = [bytearray(direct._SIZE) for _ in keys]
            results = await reader.read(direct._NAMESPACE, keys, targets)
            for result, target, block in zip(results, targets, expected, strict=True):
                gone += not result.status.hit
                wrong += result.status is ReadStatus.CORRUPT
                wrong += result.status.hit and bytes(target) != block
    if not midst:
        raise RuntimeError(f"none of {_WRITES} writes was cancelled in time: nothing was shown")
    return Answer(
        wrong == 0,
        f"{midst} of {_WRITES} were cancelled; {gone} blocks are not there, {wrong} are wrong",
    )


async def _beside_staged(device: str) -> Answer:
    best = {"direct": 0.0, "staged": 0.0}
    async with AsyncExitStack() as stack:
        address = await direct._server(stack)
        pools = {
            path: await stack.enter_async_context(await direct._client(address, path))
            for path in best
        }
        shape = (direct._BATCH, direct._SIZE)
        source = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        for _ in range(5):  # the first connects, and warms the device
            for path, pool in pools.items():
                keys = [secrets.token_bytes(32) for _ in range(direct._BATCH)]
                _wait(device)
                began = time.perf_counter()
                await direct._store(pool, keys, list(source))
                took = time.perf_counter() - began
                best[path] = max(best[path], source.numel() / took / 1e9)
                await pool.remove(direct._NAMESPACE, keys)
        if not pools["direct"].counters["direct_write_bytes"]:
            raise RuntimeError("no block was written directly: nothing was measured")
    figures = ", ".join(f"{path} {rate:.1f} GB/s" for path, rate in best.items())
    text = f"{figures}; lanes {direct._lanes()}"
    return Answer(best["direct"] >= best["staged"], text, best["direct"], best["staged"])


def _fill(rows: list[torch.Tensor], block: bytes, device: str) -> None:
    """Queue copies of a block's bytes into its rows; nobody waits for them here."""
    taken = 0
    for row in rows:
        part = bytearray(block[taken : taken + len(row)])
        row.copy_(torch.frombuffer(part, dtype=torch.uint8).to(device))
        taken += len(row)
