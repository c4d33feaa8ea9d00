"""A load of the connector's staged way beside its parts, each alone, in the same rounds: what the
pool brings, verified, to memory of the host, and the copies from there to the device.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import torch

from benchmarks.gpu.report import Answer
from benchmarks.transports import WAYS, lane
from kvpool import Namespace, Pool
from kvpool.ops import process

_NAMESPACE: Final = Namespace("overlap")
_BLOCKS, _BLOCK_BYTES = 64, 1 << 20
#: In turns with their parts.
_LOADS: Final = 7
_MOST: Final = 1.15


def load_overlaps(device: str) -> Answer:
    best = process.run(_times(torch.device(device)))
    whole, slowest = best.pop("whole"), max(best.values())
    parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in best.items())
    text = f"{whole * 1e3:.1f} ms, {whole / slowest:.2f} of the slowest part ({parts})"
    return Answer(whole <= _MOST * slowest, text, whole / slowest, _MOST)


async def _times(device: torch.device) -> dict[str, float]:
    """Seconds of the fastest load of `_BLOCKS`, and of its parts."""
    from kvpool_connector.memory import block_memory as memory
    from kvpool_connector.memory.load_rounds import LoadRounds, Span
    from kvpool_connector.records.messages import GroupBlocks

    keys = tuple(secrets.token_bytes(32) for _ in range(_BLOCKS))
    host = torch.randint(0, 256, (_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8)
    whole = torch.zeros(host.nbytes, dtype=torch.uint8, device=device)
    views = memory.views_of({"layer": host.view(_BLOCKS, 1, 16, -1)}, [])
    blocks = memory.DeviceBlockMemory(views, [whole], stage=_stage(device))
    room = torch.zeros_like(host)

    async def to_host(span: Span, part: int) -> set[int]:
        await _bring(pool, keys, span, list(room[span.first : span.last]))
        return set(range(span.first, span.last))

    async def to_device(span: Span, part: int, *, reads: bool = False) -> set[int]:
        numbers = range(span.first, span.last)
        async with blocks.target(numbers, blocks.record_event()) as rows:
            if reads:
                await _bring(pool, keys, span, rows)
        return set(numbers)

    asked: dict[str, Callable[[Span, int], Awaitable[set[int]]]] = {
        "whole": lambda span, part: to_device(span, part, reads=True),
        "network and verification": to_host,
        "copy": to_device,
    }
    seconds = dict.fromkeys(asked, float("inf"))
    async with AsyncExitStack() as stack:
        pool = (await lane(WAYS[0], stack))[0].pool
        await pool.write(_NAMESPACE, keys, list(host))
        match = await pool.match(_NAMESPACE, keys)
        chain = GroupBlocks(0, keys, tuple(range(_BLOCKS)), match=match)
        for what, ask in [*asked.items()] * _LOADS:
            whole.zero_()
            began = time.monotonic()
            rounds = LoadRounds(pool, _NAMESPACE, chain, blocks, began + 60.0)
            if len(await rounds.run(ask)) < _BLOCKS:
                raise RuntimeError("a load has left blocks out")
            seconds[what] = min(seconds[what], time.monotonic() - began)
            if what == "whole" and not torch.equal(whole.cpu().view(host.shape), host):
                raise RuntimeError("wrong bytes came")
    return seconds


def _stage(device: torch.device) -> Any:
    from kvpool_connector.memory.block_memory import DeviceStage

    return DeviceStage(device)


async def _bring(pool: Pool, keys: Sequence[bytes], span: Any, into: Sequence[Any]) -> None:
    found = await pool.read(_NAMESPACE, keys[span.first : span.last], into, match=span.match)
    if not all(one.status.hit for one in found):
        raise RuntimeError("the pool did not find every block")
