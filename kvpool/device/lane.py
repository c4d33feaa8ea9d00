"""The way of blocks between a device and pinned memory of the host, in one direction.

Pinned are pages that the kernel does not move: a device copies from and to them itself. A block in
one row is one such copy. Pieces of one size at equal distances, as engines keep the layers of a
block, are a row of two dimensions: gathered in scratch memory of the device, or scattered from it,
as many blocks as it takes are one copy, too (design: device-memory).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from kvpool.device.checksum import DeviceRows
from kvpool.device.thread import DeviceThread
from kvpool.device_copy import first_line, pinned
from kvpool.errors import ConfigError
from kvpool.units import human

if TYPE_CHECKING:
    import torch

_SHAPE: Final = attrgetter("shape")
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
        room = len(self.scratch) if self.scratch is not None else 0
        for rows, place in moves:
            end = 0
            for _, group in itertools.groupby(_cut(rows, len(place), room), _SHAPE):
                alike = list(group)
                begin, end = end, end + len(alike) * alike[0].numel()
                self._queue_alike(alike, place[begin:end], to_host)

    def _queue_alike(self, rows: list[torch.Tensor], place: torch.Tensor, to_host: bool) -> None:
        """Rows of one shape: of bytes one by one, of pieces as many as the scratch memory takes."""
        size = rows[0].numel()
        if self.scratch is None or rows[0].ndim == 1:
            for row, part in zip(rows, place.split(size), strict=True):
                _copy(row, part, to_host)
            return
        # One scratch memory for all: the stream keeps the order, and nothing waits in between.
        for part in place.split(len(self.scratch) // size * size):
            whole = self.scratch[: len(part)]
            if not to_host:
                _copy(whole, part, to_host)
            pieces = whole.view(-1, *rows[0].shape).unbind()
            for row, piece in zip(rows, pieces, strict=False):
                _copy(row, piece, to_host)
            if to_host:
                _copy(whole, part, to_host)
            rows = rows[len(pieces) :]


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
    for row in _first_bytes(rows, end):
        size = row.numel()
        yield row, memory if size == end else memory[start : start + size]
        start += size


def _first_bytes(rows: DeviceRows, count: int) -> Iterator[torch.Tensor]:
    """The rows of so many bytes, the last one cut."""
    for row in rows:
        if row.numel() <= count:
            yield row
        elif row.ndim == 2:
            yield from _first_bytes(row.unbind(), count)
        elif count:
            yield row[:count]
        count = max(0, count - row.numel())


def _cut(rows: DeviceRows, count: int, room: int) -> Iterator[torch.Tensor]:
    """The rows of so many bytes; those of pieces in parts that have room, or as single pieces if
    there is none for two."""
    for row in _first_bytes(rows, count):
        if row.ndim == 2 and row.numel() > room:
            pieces = room // row.shape[1]
            yield from row.split(pieces) if pieces > 1 else row.unbind()
        else:
            yield row


def _copy(row: torch.Tensor, place: torch.Tensor, to_host: bool) -> None:
    target, source = (place, row) if to_host else (row, place)
    target.copy_(source, non_blocking=True)
