"""The connector's staged way, asked of the product: a KV cache on this device, one row per block.

A step that computes for a while is queued; a save right behind it must have what it computes, and a
load what it read must stay until then (design: device-memory). The same is asked with a part of the
order left out: where the answer is yes all the same, the question shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.gpu.report import Answer
from kvpool.device_copy import NullEvent
from kvpool.ops import process

_LAYERS, _BLOCKS, _HEADS, _TOKENS, _CONTENT = 8, 64, 2, 16, 256
_ROUNDS: Final = 20
#: Bytes that a step changes, over and over, before it comes to the blocks.
_WORK: Final = 64 << 20
_SAVED, _LOADED = (5, 0, 63, 17), (1, 2, 4, 40)


def keeps_the_order(device: str) -> Answer:
    wrong = process.run(_Engine(torch.device(device)).differences())
    return Answer(wrong == 0, f"{wrong} of {4 * _ROUNDS} comparisons differ")


def omissions_are_seen(device: str) -> Answer:
    seen = {}
    for name, leave_out in _OMISSIONS.items():
        engine = _Engine(torch.device(device))
        with leave_out(engine):
            seen[name] = process.run(engine.differences())
    words = ", ".join(f"{name}: {wrong}" for name, wrong in seen.items())
    return Answer(all(seen.values()), f"of {4 * _ROUNDS} comparisons differ with {words}")


class _Engine:
    def __init__(self, device: torch.device) -> None:
        from kvpool_connector.memory import block_memory as memory  # needs torch, as workers have

        self.shape = (_BLOCKS, _LAYERS, _HEADS, _TOKENS, _CONTENT)
        twin = torch.zeros(self.shape, dtype=torch.bfloat16)
        whole = torch.zeros(twin.nbytes, dtype=torch.uint8, device=device)
        self.device, self.cache = device, whole.view(torch.bfloat16).view(self.shape)
        views = memory.views_of({f"layers.{n}": twin[:, n] for n in range(_LAYERS)}, [])
        self.stage = memory.DeviceStage(device)
        self.lanes = (self.stage, self.stage.saves)
        self.memory = memory.DeviceBlockMemory(views, [whole], stage=self.stage)
        self._work = torch.zeros(_WORK, dtype=torch.uint8, device=device)

    async def differences(self) -> int:
        """How many of four comparisons in each round are not as they must be."""
        cache, staged, wrong = self.cache, self.memory, 0
        for _ in range(_ROUNDS):
            for lane in self.lanes:  # its own copies are late, too
                with lane.on_stream():
                    self._compute()
            self._compute()
            cache.copy_(torch.randn(self.shape, dtype=torch.bfloat16, device=self.device))
            async with staged.source(_SAVED, staged.record_event()) as rows:
                found = [bytes(row) for row in rows]  # type: ignore[arg-type]
            wrong += found != _bytes(cache, _SAVED)
            before = _bytes(cache, range(_BLOCKS))
            self._compute()
            seen = cache.clone()  # the blocks' last user, behind the same work
            async with staged.target(_LOADED, staged.record_event()) as places:
                for place, block in zip(places, found, strict=True):
                    place[:] = block  # type: ignore[index]
            wrong += _bytes(cache, _LOADED) != found
            wrong += _bytes(seen, range(_BLOCKS)) != before
            kept = [b for b in range(_BLOCKS) if b not in _LOADED]
            wrong += _bytes(cache, kept) != [before[b] for b in kept]
        return wrong

    def _compute(self) -> None:
        for _ in range(20 if self.device.type == "cuda" else 1):
            self._work.add_(1)


def _bytes(cache: torch.Tensor, blocks: tuple[int, ...] | range | list[int]) -> list[bytes]:
    """Of these blocks, when the device has done all that was queued."""
    if cache.is_cuda:
        torch.cuda.synchronize(cache.device)
    rows = torch.stack([cache[block] for block in blocks]).flatten(1).view(torch.uint8)
    return [row.tobytes() for row in rows.cpu().numpy()]


def _not_recorded(engine: _Engine) -> Any:
    """Nothing says where the step ends."""
    return mock.patch.object(engine.memory, "record_event", return_value=None)


def _not_waited_for(engine: _Engine) -> Any:
    async def at_once(after: Any) -> None:
        pass

    return mock.patch("kvpool_connector.memory.block_memory._reached", at_once)


@contextmanager
def _not_synchronized(engine: _Engine) -> Iterator[None]:
    """A call ends when its copies are queued."""
    events = [lane._event for lane in engine.lanes]
    for lane in engine.lanes:
        lane._event = NullEvent()
    yield
    for lane, event in zip(engine.lanes, events, strict=True):
        lane._event = event


_OMISSIONS: Final[dict[str, Callable[[_Engine], Any]]] = {
    "nothing recorded": _not_recorded,
    "nothing waited for": _not_waited_for,
    "nothing synchronized": _not_synchronized,
}
