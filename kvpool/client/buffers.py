"""The memory that callers pass: checked once, here, and handed on as bytes.

Memory of the host becomes views of bytes, memory of a CUDA device becomes `OnDevice`: rows of
bytes, which `device_staging.py` copies. An engine keeps the layers of a block apart, so a block
may lie in several pieces. A channel that copies by itself (shm) gathers them straight into the
pool's memory, and scatters them straight out of it. For one that sends a block as a whole the
pieces are put together here first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeGuard

import numpy as np

from kvpool.device_copy import first_line
from kvpool.errors import (
    BadBuffer,
    TooLarge,
)
from kvpool.protocols import Channel, Piecewise, ReadOptions, WriteOptions
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    BLOCK_SIZE_MAX,
    Memory,
    Outgoing,
    ReadBlock,
    ReadResult,
    Wanted,
    WriteBlock,
    WriteStatus,
)

if TYPE_CHECKING:
    import torch

_PIECES: Final = (list, tuple)
#: Bytes that one call to a channel carries; larger batches go in several.
_BATCH_BYTES: Final = 256 << 20


def readable(memory: Memory, index: int) -> tuple[memoryview, ...]:
    """The pieces of one block's memory. Raises BadBuffer or TooLarge."""
    if not isinstance(memory, _PIECES):
        return (_view(memory, index),)
    if not memory:
        raise BadBuffer(f"buffer {index} has no pieces: a block has at least one byte")
    pieces = tuple(_view(piece, index) for piece in memory)
    if size(pieces) > BLOCK_SIZE_MAX:
        raise TooLarge(f"buffer {index} has {size(pieces)} bytes, a block at most {BLOCK_SIZE_MAX}")
    return pieces


def writable(memory: Memory, index: int) -> tuple[memoryview, ...]:
    """The same, for memory that a block is read into."""
    pieces = readable(memory, index)
    if pieces[0].readonly or any(piece.readonly for piece in pieces[1:]):
        raise BadBuffer(f"buffer {index} is read-only: a block cannot be read into it")
    return pieces


def size(pieces: Sequence[memoryview]) -> int:
    return len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))


def batches(positions: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive positions in batches that a channel takes in one call."""
    batches: list[list[int]] = []
    held = 0
    for position in positions:
        size = sizes[position]
        if not batches or len(batches[-1]) >= BATCH_BLOCKS_MAX or held + size > _BATCH_BYTES:
            batches.append([])
            held = 0
        batches[-1].append(position)
        held += size
    return batches


async def write(
    channel: Channel, writing: WriteOptions, blocks: Sequence[WriteBlock], deadline: float
) -> list[WriteStatus]:
    """`Channel.write`, for blocks in any number of pieces."""
    if _is_piecewise(channel):
        return await channel.write_pieces(writing, blocks, deadline=deadline)
    whole = [
        Outgoing(
            block.digest,
            block.parent,
            block.pieces[0] if len(block.pieces) == 1 else _joined(block.pieces),
        )
        for block in blocks
    ]
    return await channel.write(writing, whole, deadline=deadline)


async def read(
    channel: Channel, reading: ReadOptions, blocks: Sequence[ReadBlock], deadline: float
) -> list[ReadResult]:
    """`Channel.read`, into any number of pieces."""
    if _is_piecewise(channel):
        return await channel.read_pieces(reading, blocks, deadline=deadline)
    whole = [
        Wanted(
            block.digest,
            block.pieces[0] if len(block.pieces) == 1 else memoryview(bytearray(block.size)),
        )
        for block in blocks
    ]
    results = await channel.read(reading, whole, deadline=deadline)
    for block, wanted, result in zip(blocks, whole, results, strict=True):
        if len(block.pieces) > 1 and result.status.hit:
            _scatter(wanted.buffer[: result.size], block.pieces)
    return results


def _is_piecewise(channel: Channel) -> TypeGuard[Piecewise]:
    return _kind_is_piecewise(type(channel))


@functools.cache
def _kind_is_piecewise(kind: type[Channel]) -> bool:
    """Once for each kind of channel: looking a class over for a protocol takes 20 us."""
    return issubclass(kind, Piecewise)


def _joined(pieces: Sequence[memoryview]) -> memoryview:
    # numpy lets go of the GIL while it copies; bytes.join does not.
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces]).data


def _scatter(source: memoryview, pieces: Sequence[memoryview]) -> None:
    taken = 0
    for piece in pieces:
        part = source[taken : taken + len(piece)]
        np.copyto(np.frombuffer(piece, np.uint8)[: len(part)], np.frombuffer(part, np.uint8))
        taken += len(part)


def _view(buffer: Any, index: int) -> memoryview:
    """The bytes of a buffer. Raises BadBuffer or TooLarge."""
    try:
        view = memoryview(buffer)
    except TypeError:
        raise BadBuffer(
            f"buffer {index} is {type(buffer).__name__}, expected contiguous memory such as bytes, "
            "bytearray or a numpy array"
        ) from None
    if not view.contiguous:
        raise BadBuffer(f"buffer {index} is not contiguous: copy it, or pass its pieces")
    view = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    if not len(view):
        raise BadBuffer(f"buffer {index} is empty: a block has at least one byte")
    if len(view) > BLOCK_SIZE_MAX:
        raise TooLarge(f"buffer {index} has {len(view)} bytes, a block at most {BLOCK_SIZE_MAX}")
    return view


_HOST: Final = (bytes, bytearray, memoryview, np.ndarray)


class Mark(Protocol):
    """A point in what a device was asked for; a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come to it."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The memory of one block on a device: rows of bytes, whose concatenation is the block."""

    rows: tuple[torch.Tensor, ...]
    size: int
    #: Behind what its owner had asked the device for. Before that, nobody copies.
    after: tuple[Mark, ...]

    @property
    def device(self) -> torch.device:
        return self.rows[0].device


#: The memory of one block in a call, as it came or as `on_device` made it.
Seen: TypeAlias = "Memory | OnDevice"


#: Memory of the host for blocks, by their numbers.
Rows: TypeAlias = Mapping[int, tuple[memoryview, ...]]


def on_device(buffers: Sequence[Seen]) -> Sequence[Seen]:
    """The same, with memory of devices as `OnDevice`, and tensors of the host as their bytes.

    To be called in the thread that works with the device: what it has asked for on its current
    stream is waited for before anything is copied. Raises BadBuffer and TooLarge.
    """
    if all(isinstance(_pieces(buffer)[0], _HOST) for buffer in buffers):
        return buffers
    marks: dict[torch.device, Mark] = {}
    return [_seen(buffer, index, marks) for index, buffer in enumerate(buffers)]


class Buffers(NamedTuple):
    """The memory of each block; of those on a device apart; the sizes of all."""

    memory: list[tuple[memoryview, ...]]
    device: dict[int, OnDevice]
    sizes: list[int]


def split(
    buffers: Sequence[Seen], look: Callable[[Memory, int], tuple[memoryview, ...]]
) -> Buffers:
    """What a caller gave us; `look` is for memory of the host. Raises BadBuffer and TooLarge."""
    memory: list[tuple[memoryview, ...]] = []
    device: dict[int, OnDevice] = {}
    sizes = []
    for position, buffer in enumerate(on_device(buffers)):
        if isinstance(buffer, OnDevice):
            device[position] = buffer
            memory.append(())
            sizes.append(buffer.size)
        else:
            views = look(buffer, position)
            memory.append(views)
            sizes.append(size(views))
    return Buffers(memory, device, sizes)


def _pieces(memory: Any) -> Sequence[Any]:
    """At least one, so that somebody else finds out about none."""
    return memory if isinstance(memory, list | tuple) and memory else (memory,)


def _seen(memory: Any, index: int, marks: dict[torch.device, Mark]) -> Any:
    pieces = _pieces(memory)
    if isinstance(memory, OnDevice) or not any(
        _is_tensor(p) or _lies_on_a_device(p) for p in pieces
    ):
        return memory
    if not any(map(_lies_on_a_device, pieces)):
        seen = [_bytes(piece, index).numpy() if _is_tensor(piece) else piece for piece in pieces]
        return seen if isinstance(memory, list | tuple) else seen[0]
    tensors = [_tensor(piece, index) for piece in pieces]
    rows = tuple(_bytes(tensor, index) for tensor in tensors)
    (device, *others) = {row.device for row in rows}
    size = sum(map(len, rows))
    if others:
        raise BadBuffer(f"buffer {index} has pieces on several devices: a block lies on one")
    if size > BLOCK_SIZE_MAX:
        raise TooLarge(f"buffer {index} has {size} bytes, a block at most {BLOCK_SIZE_MAX}")
    if device not in marks:
        marks[device] = mark(device)
    own = {mark(device, stream) for piece in pieces if (stream := _stream(piece)) is not None}
    return OnDevice(rows, size, (marks[device], *own))


def mark(device: torch.device, stream: int | None = None) -> Mark:
    """Behind what was asked for on a stream, the calling thread's current one or that handle."""
    import torch

    made: Mark = (
        torch.cuda.current_stream(device)
        if stream is None
        else torch.cuda.ExternalStream(stream, device)
    ).record_event()
    return made


def _is_tensor(piece: Any) -> bool:
    torch = sys.modules.get("torch")  # without it there are none
    return torch is not None and isinstance(piece, torch.Tensor)


def _lies_on_a_device(piece: Any) -> bool:
    if _is_tensor(piece):
        return bool(piece.is_cuda)
    return hasattr(type(piece), "__cuda_array_interface__")


def _stream(piece: Any) -> int | None:
    """The stream that somebody else's array says it is ready on."""
    return None if _is_tensor(piece) else piece.__cuda_array_interface__.get("stream")


def _tensor(piece: Any, index: int) -> torch.Tensor:
    """The piece itself as a tensor, never a copy. Raises BadBuffer."""
    if not _lies_on_a_device(piece):
        raise BadBuffer(f"buffer {index} has pieces on a device and others: a block lies on one")
    if _is_tensor(piece):
        tensor: torch.Tensor = piece
        return tensor
    try:
        import torch

        tensor = torch.as_tensor(piece, device="cuda")
    except (ImportError, OSError):
        raise BadBuffer(
            f"buffer {index} lies on a device, which needs torch: pip install 'kvpool[torch]'"
        ) from None
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # no CUDA, odd array
        raise BadBuffer(f"buffer {index} cannot be used: {first_line(error)}") from None
    if tensor.data_ptr() != piece.__cuda_array_interface__["data"][0]:
        raise BadBuffer(f"buffer {index} lies on another device than torch's current one")
    return tensor


def _bytes(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The tensor's own memory as a row of bytes. Raises BadBuffer."""
    import torch

    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise BadBuffer(f"buffer {index} is not contiguous: copy it, or pass its pieces")
    if not tensor.numel():
        raise BadBuffer(f"buffer {index} is empty: a block has at least one byte")
    return tensor.detach().view(-1).view(torch.uint8)
