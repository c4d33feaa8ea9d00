"""The connector's staged way, asked of the product: a KV cache on this device, one row per block.

A step that computes for a while is queued; a save right behind it must have what it computes, and a
load what it read must stay until then (design: device-memory).
"""

from __future__ import annotations

from typing import Final

import torch

from benchmarks.gpu.report import Answer
from kvpool import runtime

_LAYERS, _BLOCKS, _HEADS, _TOKENS, _CONTENT = 8, 64, 2, 16, 256
_ROUNDS: Final = 20
#: Bytes that a step changes, over and over, before it comes to the blocks.
_WORK: Final = 64 << 20
_SAVED, _LOADED = (5, 0, 63, 17), (1, 2, 4, 40)


def keeps_the_order(device: str) -> Answer:
    return runtime.run(_order(torch.device(device)))


async def _order(device: torch.device) -> Answer:
    from kvpool_connector.memory import block_memory as memory  # needs torch, as workers have it

    shape = (_BLOCKS, _LAYERS, _HEADS, _TOKENS, _CONTENT)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    layers = {f"layers.{n}": cache[:, n] for n in range(_LAYERS)}
    buffers: list[torch.Tensor] = []
    views = memory.views_of(layers, buffers)
    staged = memory.DeviceBlockMemory(views, buffers)
    work = torch.zeros(_WORK, dtype=torch.uint8, device=device)
    wrong = 0
    for _ in range(_ROUNDS):
        for _ in range(20 if device.type == "cuda" else 1):
            work.add_(1)
        cache.copy_(torch.randn(shape, dtype=torch.bfloat16, device=device))
        async with staged.source(_SAVED, staged.record_event()) as rows:
            found = [bytes(row) for row in rows]  # type: ignore[arg-type]
        wrong += found != _bytes(cache, _SAVED)
        before = _bytes(cache, range(_BLOCKS))
        seen = cache.clone()  # the blocks' last user, behind the same work
        async with staged.target(_LOADED, staged.record_event()) as places:
            for place, block in zip(places, found, strict=True):
                place[:] = block  # type: ignore[index]
        wrong += _bytes(cache, _LOADED) != found
        wrong += _bytes(seen, range(_BLOCKS)) != before
        kept = [b for b in range(_BLOCKS) if b not in _LOADED]
        wrong += _bytes(cache, kept) != [before[b] for b in kept]
    return Answer(wrong == 0, f"{wrong} of {4 * _ROUNDS} comparisons differ")


def _bytes(cache: torch.Tensor, blocks: tuple[int, ...] | range | list[int]) -> list[bytes]:
    """Of these blocks, when the device has done all that was queued."""
    if cache.is_cuda:
        torch.cuda.synchronize(cache.device)
    rows = cache[list(blocks)].flatten(1).view(torch.uint8).cpu().numpy()
    return [row.tobytes() for row in rows]
