"""A device that copies as late as CUDA may, on a machine that has none.

On the device `cpu` every copy is done at once, so a missing wait would never be noticed. Here a
copy happens only when the thread that started it waits for an event recorded after the copy.
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
    """The copies that this thread has started and not waited for."""
    if not hasattr(_threads, "started"):
        _threads.started = []
    started: list[Callable[[], object]] = _threads.started
    return started


class LateTensor(torch.Tensor):  # type: ignore[misc,name-defined,unused-ignore]
    """Copies from and to it are queued on the stream of the thread."""

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


class LateEvent:
    """An event: `synchronize` makes the copies that were started before `record`, and no others."""

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
    """An event whose `synchronize` returns only when `open` returns true."""

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
    """All copy streams of a copier, which must be idle."""
    found = [copier._streams.get_nowait() for _ in range(copier._streams.qsize())]
    for copy_stream in found:
        copier._streams.put(copy_stream)
    return found


def _nothing() -> None:
    pass
