"""Blocks that lie in pieces: for channels that copy pieces as they lie, and for those that do not.

An engine keeps the layers of a block apart. A channel that copies by itself (shm) gathers them
straight into the pool's memory, and scatters them straight out of it. For one that sends a block
as a whole the pieces are put together here first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, TypeGuard

import numpy as np

from kvpool.errors import BadBuffer, TooLarge
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
