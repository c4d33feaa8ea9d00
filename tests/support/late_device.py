"""A device that copies as late as CUDA may, on a machine that has none.

On the device `cpu` every copy is done at once, so a wait that is missing would never show. Here a
copy happens when a mark behind it is waited for, by the thread that started it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpool.device_copy import CopyStream, DeviceCopier

torch = pytest.importorskip("torch", reason="devices need torch")

_threads = threading.local()


def stream() -> list[Callable[[], object]]:
    """What this thread has started, and not waited for."""
    if not hasattr(_threads, "started"):
        _threads.started = []
    started: list[Callable[[], object]] = _threads.started
    return started


class LateTensor(torch.Tensor):  # type: ignore[misc,name-defined,unused-ignore]
    """Copies to and from it wait on the stream of the thread."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs or {})
        assert (kwargs or {}).get("non_blocking"), "the thread would wait for other work, too"
        target, source = (tensor.as_subclass(torch.Tensor) for tensor in args)
        stream().append(lambda: target.copy_(source))
        return args[0]


class LateMark:
    """Waiting for it does what was started before it was recorded, and not more."""

    def __init__(self) -> None:
        self._behind = 0

    def record(self) -> None:
        self._behind = len(stream())

    def synchronize(self) -> None:
        started = stream()
        for number in range(min(self._behind, len(started))):
            started[number]()
            started[number] = _nothing


class Gate:
    """A mark that is not passed before it is opened."""

    def __init__(self) -> None:
        self.waiting = False
        self.open: Callable[[], bool] = lambda: False

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.waiting = True
        while not self.open():
            pass


def copy_streams(copier: DeviceCopier) -> list[CopyStream]:
    """All of them, which must be idle."""
    found = [copier._streams.get_nowait() for _ in range(copier._streams.qsize())]
    for copy_stream in found:
        copier._streams.put(copy_stream)
    return found


def make_late(copier: DeviceCopier) -> None:
    for copy_stream in copy_streams(copier):
        for half in copy_stream.halves:
            half.tensor = half.tensor.as_subclass(LateTensor)
            half.event = LateMark()


def _nothing() -> None:
    pass
