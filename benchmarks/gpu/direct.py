"""Direct reads as a whole, asked of the product: a server, UCX and a device of this machine.

The lanes are those of UCX_TLS, with one to devices; without it tcp, which only shows that it works
(design: device-memory).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import torch

from benchmarks.gpu import perftest
from benchmarks.gpu.checks import _beside, _own_stream, _wait
from benchmarks.gpu.report import Answer
from benchmarks.transports import Way, lane
from kvpool import ClientConfig, Namespace, Pool, ReadStatus, WriteStatus, connect, dev
from kvpool.ops import process
from kvpool_transports.ucx import UcxTransport

_NAMESPACE: Final = Namespace("acceptance")
_BATCH, _SIZE = 64, 2 << 20
#: Of blocks: one that comes with its frame, odd ones, several MiB.
_SIZES: Final = (1, 241, 65_537, 300_001, 1 << 20, (3 << 20) + 5)
_READS: Final = 60


def gives_right_bytes(device: str) -> Answer:
    """In one row and in layers, with what lies around them; a bit that rots in the server."""
    return process.run(_right_bytes(device))


def ends_when_it_returns(device: str) -> Answer:
    """Reads that are cancelled in mid-transfer: no byte comes later."""
    return process.run(_ended(device))


def is_not_slower_than_staged(device: str) -> Answer:
    """The same blocks from the same server, both ways in turn."""
    return process.run(_beside_staged(device))


def leaves_the_device_to_others(device: str) -> Answer:
    """Direct reads, one after the other, beside products of matrices."""

    def read(stopped: threading.Event) -> None:
        with _own_stream(device):
            process.run(_read_until(stopped, device))

    return _beside(read, 0.05, device)


async def _right_bytes(device: str) -> Answer:
    drawn, wrong = random.Random(11), 0
    async with _here() as (running, writer, reader):
        sizes = [size for size in _SIZES for _ in range(3)]
        keys = [secrets.token_bytes(32) for _ in sizes]
        data = [drawn.randbytes(size) for size in sizes]
        await _store(writer, keys, data)
        for layers in (1, 5):
            around = [_layers(size, layers, device) for size in sizes]
            targets = [[row[16:-16] for row in rows] for rows in around]
            results = await reader.read(_NAMESPACE, keys, targets)
            wrong += sum(result.status is not ReadStatus.HIT for result in results)
            for rows, target, block in zip(around, targets, data, strict=True):
                wrong += b"".join(_bytes(row) for row in target) != block
                wrong += any(_bytes(row[:16]) + _bytes(row[-16:]) != b"\7" * 32 for row in rows)
        (server,) = running.servers
        entry = server.store.index.peek(_NAMESPACE, 0, keys[-1])
        if entry is None or not reader.counters["direct_read_bytes"]:
            raise RuntimeError("no block was read directly: nothing was shown")
        server.tier.view(entry.offset, sizes[-1])[sizes[-1] // 2] ^= 1  # type: ignore[attr-defined]
        rows = _layers(sizes[-1], 5, device)
        (rotten,) = await reader.read(_NAMESPACE, keys[-1:], [rows])
        found = rotten.status is ReadStatus.CORRUPT
        clean = all(_bytes(row) == b"\7" * len(row) for row in rows)
    return Answer(
        wrong == 0 and found and clean,
        f"{wrong} of {6 * len(sizes)} comparisons differ; a bit that rots is "
        f"{'found' if found else 'NOT FOUND'}, and {'does not reach' if clean else 'REACHES'} "
        "the layers",
    )


async def _ended(device: str) -> Answer:
    drawn, changed, midst = random.Random(12), 0, 0
    # Unverified: what counts here is the transfer alone.
    async with _here(verify=False) as (_, writer, reader):
        keys = [secrets.token_bytes(32) for _ in range(16)]
        await _store(writer, keys, [b"\5" * _SIZE] * 16)
        whole = torch.zeros((16, _SIZE), dtype=torch.uint8, device=device)
        for _ in range(2):  # the first connects
            began = time.perf_counter()
            await reader.read(_NAMESPACE, keys, list(whole))
            takes = time.perf_counter() - began
        for _ in range(_READS):
            whole.zero_()
            _wait(device)
            reading = asyncio.ensure_future(reader.read(_NAMESPACE, keys, list(whole)))
            await asyncio.sleep(drawn.uniform(0, takes))
            reading.cancel()
            await asyncio.wait([reading])
            midst += 0 < int(whole.count_nonzero()) < 16 * _SIZE
            whole.fill_(7)
            _wait(device)
            await asyncio.sleep(0.02)  # the server goes on for a while
            changed += int((whole != 7).sum())
    if not midst:
        raise RuntimeError(f"none of {_READS} reads ended in mid-transfer: nothing was shown")
    return Answer(
        changed == 0, f"{midst} of {_READS} ended in mid-transfer; {changed} bytes came later"
    )


async def _beside_staged(device: str) -> Answer:
    best = {"direct": 0.0, "staged": 0.0}
    async with AsyncExitStack() as stack:
        address = await _server(stack)
        pools = {
            path: await stack.enter_async_context(await _client(address, path)) for path in best
        }
        keys = [secrets.token_bytes(32) for _ in range(_BATCH)]
        source = torch.randint(0, 256, (_BATCH, _SIZE), dtype=torch.uint8)
        await _store(pools["staged"], keys, [row.numpy().data for row in source])
        for _ in range(5):  # the first connects, and warms the device
            for path, pool in pools.items():
                target = torch.zeros((_BATCH, _SIZE), dtype=torch.uint8, device=device)
                _wait(device)
                began = time.perf_counter()
                results = await pool.read(_NAMESPACE, keys, list(target))
                took = time.perf_counter() - began
                if not all(r.status.hit for r in results) or not torch.equal(target.cpu(), source):
                    raise RuntimeError(f"{path}: misses or wrong bytes")
                best[path] = max(best[path], _BATCH * _SIZE / took / 1e9)
        if not pools["direct"].counters["direct_read_bytes"]:
            raise RuntimeError("no block was read directly: nothing was measured")
    figures = ", ".join(f"{path} {rate:.1f} GB/s" for path, rate in best.items())
    text = f"{figures}, {perftest.rate(_lanes())}; lanes {_lanes()}"
    return Answer(best["direct"] >= best["staged"], text, best["direct"], best["staged"])


async def _read_until(stopped: threading.Event, device: str) -> None:
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(await _client(await _server(stack), "direct"))
        keys = [secrets.token_bytes(32) for _ in range(_BATCH)]
        await _store(pool, keys, [secrets.token_bytes(_SIZE)] * _BATCH)
        target = torch.zeros((_BATCH, _SIZE), dtype=torch.uint8, device=device)
        while not stopped.is_set():
            await pool.read(_NAMESPACE, keys, list(target))


# --- inside -----------------------------------------------------------------------------------


@asynccontextmanager
async def _here(*, verify: bool = True) -> AsyncIterator[tuple[dev.Dev, Pool, Pool]]:
    """A server in this process, a client that stages and one that reads directly."""
    transports = {"ucx": UcxTransport(tls=_lanes())}
    listen = ("ucx://127.0.0.1:0",)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            dev.serve("128MiB", listen=listen, transports=transports)
        )
        pools = [
            await stack.enter_async_context(running.pool(_config(running.address, path, verify)))
            for path in ("staged", "direct")
        ]
        yield running, pools[0], pools[1]


async def _server(stack: AsyncExitStack) -> str:
    """A server in a process of its own; returns the address of its master."""
    own = ",".join(one for one in _lanes().split(",") if one not in ("cuda_copy", "gdr_copy"))
    return (await lane(Way("ucx", "ucx", own), stack))[1]


async def _client(address: str, path: str) -> Pool:
    return await connect(config=_config(address, path))


def _config(address: str, path: str, verify: bool = True) -> ClientConfig:
    return ClientConfig(
        masters=[address],
        transports=[f"ucx?tls={_lanes()}"],
        device_path=path,
        verify=verify,
        timeout_s=60,
        attempt_s=10,
    )


def _lanes() -> str:
    named = os.environ.get("UCX_TLS") or "tcp,self"
    return named if "cuda" in named else f"{named},cuda_copy"


async def _store(pool: Pool, keys: Sequence[bytes], data: Sequence[bytes | memoryview]) -> None:
    if set(await pool.write(_NAMESPACE, keys, list(data))) != {WriteStatus.STORED}:
        raise RuntimeError("the pool did not store every block")


def _layers(size: int, count: int, device: str) -> list[torch.Tensor]:
    """Memory for a block in so many rows, or fewer for a small one, with 16 bytes at each end."""
    count = min(count, size)
    cuts = [size * number // count for number in range(count + 1)]
    return [
        torch.full((end - start + 32,), 7, dtype=torch.uint8, device=device)
        for start, end in itertools.pairwise(cuts)
    ]


def _bytes(row: torch.Tensor) -> bytes:
    return bytes(row.cpu().numpy())
