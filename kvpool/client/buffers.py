"""The memory that callers pass: checked once, here, and handed on as bytes.

Memory of the host becomes views of bytes, other memory what `RESOLVERS` make of it: a `DeviceBlock`
is rows of bytes on a CUDA device (design: device-memory).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from kvpool.errors import BadBuffer, TooLarge
from kvpool.types import BLOCK_SIZE_MAX, DeviceEvent, Memory

if TYPE_CHECKING:
    import torch

#: What makes a `DeviceBlock` of memory on a device, and arrays of tensors: `module:function`. It
#: is imported when a call first passes memory that is none of the host's.
RESOLVERS: Final = {
    "devices": "kvpool.client.device_buffers:resolve",
}
PIECES: Final = (list, tuple)
_HOST: Final = (bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """The memory of one block on a device: rows of bytes, whose concatenation is the block.

    A row of two dimensions is several pieces of one size: a layout of many layers costs one row.
    """

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
        if not isinstance(buffer, PIECES):  # most blocks: without a generator
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
        piece = buffer[0] if isinstance(buffer, PIECES) and buffer else buffer
        if not isinstance(piece, host):
            break
    else:
        return buffers
    for where in RESOLVERS.values():
        module, _, name = where.partition(":")
        resolve, events = getattr(import_module(module), name), dict[Any, DeviceEvent]()
        buffers = [resolve(buffer, index, events) for index, buffer in enumerate(buffers)]
    return buffers


def as_views(memory: Memory, index: int) -> tuple[memoryview, ...]:
    """The pieces of one block's memory on the host, as bytes. Raises BadBuffer."""
    if not isinstance(memory, PIECES):
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
