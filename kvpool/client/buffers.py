"""The memory that callers pass: checked once, here, and handed on as bytes.

Memory of the host becomes views of bytes. Memory of a CUDA device becomes a `DeviceBlock`: rows of
bytes, which `device_staging.py` copies (design: device-memory). An engine keeps the layers of a
block apart, so the memory of one block may be several pieces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from kvpool.errors import BadBuffer, TooLarge
from kvpool.types import (
    BATCH_BLOCKS_MAX,
    BLOCK_SIZE_MAX,
    DeviceEvent,
    DeviceRows,
    Memory,
)

if TYPE_CHECKING:
    import torch

#: Bytes that one call to a channel carries; larger batches go in several.
_BATCH_BYTES: Final = 256 << 20
_PIECES: Final = (list, tuple)
_HOST: Final = (bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """The memory of one block on a device: rows of bytes, whose concatenation is the block."""

    rows: tuple[torch.Tensor, ...]
    size: int
    #: No byte is copied before the device has reached these.
    ready_events: tuple[DeviceEvent, ...]

    @property
    def device(self) -> torch.device:
        return self.rows[0].device


#: The memory of one block in a call: as the caller passed it, or after `with_device_blocks`.
BufferLike: TypeAlias = "Memory | DeviceBlock"
#: Memory of the host for blocks, by their positions.
HostRows: TypeAlias = Mapping[int, tuple[memoryview, ...]]


class Buffers(NamedTuple):
    """The memory of a call's blocks.

    `host` and `sizes` run parallel to the call's digests; `host` is empty where `device`, by
    position, has the block.
    """

    host: list[tuple[memoryview, ...]]
    device: dict[int, DeviceBlock]
    sizes: list[int]


def check_one_for_each(buffers: Sequence[BufferLike], digests: Sequence[bytes]) -> None:
    """Raises BadBuffer unless there is one buffer for each key."""
    try:
        count = len(buffers)
    except TypeError:
        raise BadBuffer(f"buffers are a {type(buffers).__name__}, expected a list") from None
    if count != len(digests):
        raise BadBuffer(f"{count} buffers for {len(digests)} keys")


def normalize_buffers(buffers: Sequence[BufferLike], *, writable: bool) -> Buffers:
    """What a caller passed, checked. Raises BadBuffer and TooLarge, which name the buffer.

    `writable`: for memory that blocks are read into.
    """
    host: list[tuple[memoryview, ...]] = []
    device: dict[int, DeviceBlock] = {}
    sizes = []
    for position, buffer in enumerate(with_device_blocks(buffers)):
        if isinstance(buffer, DeviceBlock):
            device[position] = buffer
            host.append(())
            sizes.append(buffer.size)
            continue
        if not isinstance(buffer, _PIECES):  # most blocks: without a generator
            view = _view(buffer, position)
            views: tuple[memoryview, ...] = (view,)
            size, readonly = len(view), view.readonly
        else:
            views = as_views(buffer, position)
            size = sum(map(len, views))
            readonly = writable and any(view.readonly for view in views)
        if size > BLOCK_SIZE_MAX:
            raise TooLarge(f"buffer {position} has {size} bytes, a block at most {BLOCK_SIZE_MAX}")
        if writable and readonly:
            raise BadBuffer(f"buffer {position} is read-only: a block cannot be read into it")
        host.append(views)
        sizes.append(size)
    return Buffers(host, device, sizes)


def with_device_blocks(buffers: Sequence[BufferLike]) -> Sequence[BufferLike]:
    """The same, with memory of devices as `DeviceBlock`, and tensors of the host as their bytes.

    To be called in the thread that works with the device, whose current stream is its own: the
    work that is on that stream now is waited for before any byte is copied. Raises BadBuffer and
    TooLarge.
    """
    numpy = sys.modules.get("numpy")  # who has not imported it passes no arrays
    host = (*_HOST, numpy.ndarray) if numpy is not None else _HOST
    for buffer in buffers:
        piece = buffer[0] if isinstance(buffer, _PIECES) and buffer else buffer
        if not isinstance(piece, host):
            break
    else:
        return buffers
    events: dict[torch.device, DeviceEvent] = {}
    return [_resolve(buffer, index, events) for index, buffer in enumerate(buffers)]


def as_views(memory: Memory, index: int) -> tuple[memoryview, ...]:
    """The pieces of one block's memory on the host, as bytes. Raises BadBuffer."""
    if not isinstance(memory, _PIECES):
        return (_view(memory, index),)
    if not memory:
        raise BadBuffer(f"buffer {index} has no pieces: a block has at least one byte")
    # An engine passes some thirty views of bytes for each block: those stay as they are.
    for piece in memory:
        if type(piece) is not memoryview or piece.format != "B" or piece.ndim != 1:
            break
        if not piece.contiguous or not piece:
            break
    else:
        return tuple(memory)
    return tuple([_view(piece, index) for piece in memory])


def batches(positions: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive positions in batches that a channel takes in one call."""
    total = sum([sizes[position] for position in positions])
    if len(positions) <= BATCH_BLOCKS_MAX and total <= _BATCH_BYTES:
        return [list(positions)] if positions else []
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


# --- memory of the host -----------------------------------------------------------------------


def _view(buffer: Any, index: int) -> memoryview:
    """The bytes of a buffer. Raises BadBuffer."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):  # nothing of memory, or closed, or of no format
        raise BadBuffer(
            f"buffer {index} is {type(buffer).__name__}, expected contiguous memory such as bytes, "
            "bytearray or a numpy array"
        ) from None
    if not view.c_contiguous:
        raise BadBuffer(f"buffer {index} is not contiguous: copy it, or pass its pieces")
    if view.format != "B" or view.ndim != 1:
        # Addresses of objects mean nothing elsewhere, and read here they would crash the process.
        if "O" in re.sub(":[^:]*:", "", view.format):  # less the names of fields
            raise BadBuffer(f"buffer {index} holds Python objects, expected bytes or numbers")
        view = view.cast("B")
    if not view:
        raise BadBuffer(f"buffer {index} is empty: a block has at least one byte")
    return view


# --- memory of devices ------------------------------------------------------------------------


def _resolve(memory: Any, index: int, events: dict[torch.device, DeviceEvent]) -> Any:
    """Memory on a device as a `DeviceBlock`; tensors of the host as arrays; the rest as it is."""
    if isinstance(memory, DeviceRows):
        return _device_block(tuple(memory.rows), index, memory.ready)
    pieces = memory if isinstance(memory, _PIECES) else (memory,)
    if isinstance(memory, DeviceBlock) or not any(
        _is_tensor(piece) or _is_on_device(piece) for piece in pieces
    ):
        return memory
    if not any(map(_is_on_device, pieces)):
        host = [_array(piece, index) if _is_tensor(piece) else piece for piece in pieces]
        return host if isinstance(memory, _PIECES) else host[0]
    block = _device_block(pieces, index, None)
    device = block.device
    if device not in events:  # one for a call: an event costs microseconds
        events[device] = record_event(device)
    return replace(block, ready_events=(events[device], *block.ready_events))


def _device_block(pieces: Sequence[Any], index: int, ready: DeviceEvent | None) -> DeviceBlock:
    """Pieces on a device, checked. Raises BadBuffer and TooLarge."""
    if not pieces:
        raise BadBuffer(f"buffer {index} has no pieces: a block has at least one byte")
    tensors = [_tensor(piece, index) for piece in pieces]
    rows = tuple([_byte_row(tensor, index) for tensor in tensors])
    (device, *others) = {row.device for row in rows}
    size = sum(map(len, rows))
    if others:
        raise BadBuffer(f"buffer {index} has pieces on several devices: a block lies on one")
    if size > BLOCK_SIZE_MAX:
        raise TooLarge(f"buffer {index} has {size} bytes, a block at most {BLOCK_SIZE_MAX}")
    # Arrays of other libraries name the stream on which their contents become ready.
    own = {record_event(device, stream) for p in pieces if (stream := _stream(p)) is not None}
    return DeviceBlock(rows, size, (*own,) if ready is None else (ready, *own))


def record_event(device: torch.device, stream: int | None = None) -> DeviceEvent:
    """Behind the work that is on a stream now: the thread's current one, or that handle's."""
    import torch

    event: DeviceEvent = (
        torch.cuda.current_stream(device)
        if stream is None
        else torch.cuda.ExternalStream(stream, device)
    ).record_event()
    return event


def _is_tensor(piece: Any) -> bool:
    torch = sys.modules.get("torch")  # who has not imported it passes no tensors
    return torch is not None and isinstance(piece, torch.Tensor)


def _is_on_device(piece: Any) -> bool:
    if _is_tensor(piece):
        return bool(piece.is_cuda)
    return hasattr(type(piece), "__cuda_array_interface__")


def _stream(piece: Any) -> int | None:
    """The handle of the stream on which another library's array is ready."""
    return None if _is_tensor(piece) else piece.__cuda_array_interface__.get("stream")


def _tensor(piece: Any, index: int) -> torch.Tensor:
    """The piece itself as a tensor, never a copy. Raises BadBuffer."""
    if not _is_on_device(piece):
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
        from kvpool.device_copy import first_line  # not at the top (design: layout)

        raise BadBuffer(f"buffer {index} cannot be used: {first_line(error)}") from None
    if tensor.data_ptr() != piece.__cuda_array_interface__["data"][0]:  # torch has copied it
        raise BadBuffer(f"buffer {index} lies on another device than torch's current one")
    return tensor


def _array(tensor: Any, index: int) -> Any:
    """The memory of a tensor on the host, as an array of bytes. Raises BadBuffer."""
    try:
        return _byte_row(tensor, index).numpy()
    except (TypeError, RuntimeError) as error:  # without memory, conjugated, of another device
        from kvpool.device_copy import first_line  # not at the top (design: layout)

        raise BadBuffer(f"buffer {index} cannot be used: {first_line(error)}") from None


def _byte_row(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The tensor's own memory as a row of bytes. Raises BadBuffer."""
    import torch

    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise BadBuffer(f"buffer {index} is not contiguous: copy it, or pass its pieces")
    if not tensor.numel():
        raise BadBuffer(f"buffer {index} is empty: a block has at least one byte")
    if tensor.dtype is torch.uint8 and tensor.ndim == 1 and not tensor.requires_grad:
        return tensor  # an engine passes thousands of them
    return tensor.detach().view(-1).view(torch.uint8)
