"""The way of blocks between a device and pinned memory of the host, in one direction.

Pinned are pages that the kernel does not move: a device copies from and to them itself. A block in
one row is one such copy. Pieces of one size at equal distances, as engines keep the layers of a
block, are a row of two dimensions: gathered in scratch memory of the device, or scattered from it,
they are one copy, too (design: device-memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvpool.device.checksum import DeviceRows
from kvpool.device.thread import DeviceThread
from kvpool.device_copy import first_line, pinned
from kvpool.errors import ConfigError
from kvpool.units import human

if TYPE_CHECKING:
    import torch

#: The rows of a block, and pinned memory of its bytes: all of them, or the first ones.
Move: TypeAlias = "tuple[DeviceRows, torch.Tensor]"


class Lane(DeviceThread):
    """A request waits for a load, and nobody for a save: for each direction there is a lane.

    With so many bytes of `scratch` memory on the device, which are taken here: pieces that are
    more than half as large, or all of them if there is none, are copied one by one. Raises what
    `DeviceThread` raises, and ConfigError when there is no memory for it.
    """

    def __init__(
        self, device: torch.device, prepare: Callable[[], object] = tuple, *, scratch: int = 0
    ) -> None:
        super().__init__(device, prepare)
        self.scratch: torch.Tensor | None = None
        if scratch:
            import torch

            try:
                # On the stream that uses it: the allocator may hand out what another one reads.
                with self.on_stream():
                    self.scratch = torch.empty(scratch, dtype=torch.uint8, device=device)
            except RuntimeError as error:
                raise ConfigError(
                    f"{human(scratch)} of {device} cannot be had: {first_line(error)}"
                ) from None

    async def copy(self, moves: Iterable[Move], *, to_host: bool) -> None:
        """Copy blocks; `moves` are looked at in the thread. It ends as `run` does: when the device
        has done it, and nothing reads or writes any of that memory any more."""
        await self.run(partial(self._queue, moves, to_host), lambda _: None)

    def _queue(self, moves: Iterable[Move], to_host: bool) -> None:
        for rows, place in moves:
            for row, part in beside(rows, place):
                if row.ndim == 1:
                    _copy(row, part, to_host)
                else:
                    self._queue_pieces(row, part, to_host)

    def _queue_pieces(self, row: torch.Tensor, part: torch.Tensor, to_host: bool) -> None:
        size = row.shape[1]
        count = len(self.scratch) // size if self.scratch is not None else 0
        if self.scratch is None or count < 2:
            for piece, place in zip(row.unbind(), part.split(size), strict=True):
                _copy(piece, place, to_host)
            return
        # One scratch memory for all: the stream keeps the order, and nothing waits in between.
        for pieces, place in zip(row.split(count), part.split(count * size), strict=True):
            whole = self.scratch[: pieces.numel()]
            if to_host:
                whole.view(pieces.shape).copy_(pieces)
                place.copy_(whole, non_blocking=True)
            else:
                whole.copy_(place, non_blocking=True)
                pieces.copy_(whole.view(pieces.shape))


def pin(size: int, device: torch.device, where: str) -> torch.Tensor:
    """So much pinned memory. Raises ConfigError, which says `where` to look."""
    try:
        return pinned(size, device)
    except RuntimeError as error:
        raise ConfigError(
            f"{human(size)} of pinned host memory for {device} cannot be had: "
            f"{first_line(error)}; see {where}"
        ) from None


def beside(rows: DeviceRows, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each row of a block, and its bytes in memory that has the whole block, or its first bytes: a
    block may be smaller than the memory it is read into."""
    start, end = 0, len(memory)
    for row in rows:
        size = row.numel()
        if start + size <= end:
            yield row, memory if size == end else memory[start : start + size]
        elif row.ndim == 2:
            yield from beside(row.unbind(), memory[start:])
        elif start < end:
            yield row[: end - start], memory[start:]
        start += size


def _copy(row: torch.Tensor, place: torch.Tensor, to_host: bool) -> None:
    target, source = (place, row) if to_host else (row, place)
    target.copy_(source, non_blocking=True)
