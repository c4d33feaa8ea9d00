"""The memory of CUDA devices that callers pass: checked, and handed on as rows of bytes.

An engine keeps the layers of a block apart, so the memory of one block may be several pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpool.client.buffers import PIECES, DeviceBlock
from kvpool.errors import BadBuffer, TooLarge
from kvpool.types import BLOCK_SIZE_MAX, DeviceEvent, DeviceRows

if TYPE_CHECKING:
    import torch


def resolve(memory: Any, index: int, events: dict[torch.device, DeviceEvent]) -> Any:
    """Memory on a device as a `DeviceBlock`; tensors of the host as arrays; the rest as it is."""
    if isinstance(memory, DeviceRows):
        return _device_block(tuple(memory.rows), index, memory.ready)
    pieces = memory if isinstance(memory, PIECES) else (memory,)
    if isinstance(memory, DeviceBlock) or not any(
        _is_tensor(piece) or _is_on_device(piece) for piece in pieces
    ):
        return memory
    if not any(map(_is_on_device, pieces)):
        host = [_array(piece, index) if _is_tensor(piece) else piece for piece in pieces]
        return host if isinstance(memory, PIECES) else host[0]
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
    rows = tuple([one if _is_in_pieces(one) else _byte_row(one, index) for one in tensors])
    (device, *others) = {row.device for row in rows}
    size = sum([row.numel() for row in rows])
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


def _is_in_pieces(tensor: torch.Tensor) -> bool:
    """Whether it is pieces of bytes of one size, at equal distances: as engines keep layers."""
    import torch

    if tensor.ndim != 2 or tensor.dtype is not torch.uint8 or not tensor.numel():
        return False
    step, one = tensor.stride()
    return one == 1 and step > tensor.shape[1] and len(tensor) > 1 and not tensor.requires_grad


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
