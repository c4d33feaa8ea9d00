"""Where the bytes of an engine's blocks lie: pure arithmetic on shapes and strides.

A block's bytes are opaque: kernels pack what is inside as they like. It is taken as a whole, layer
by layer in the order of the layers' names, each in the order in which it lies in memory. What that
order was is part of the namespace (`namespace.py`), so bytes of another layout are never read.

A block can also be taken in parts, each of which has some of the KV heads of every layer. A part
has the same bytes in engines of any tensor parallel size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvpool_engines.comparison import LayerBytes

#: Pieces of one block. More means that its bytes are scattered in crumbs: copying those would be
#: slower than computing them.
SLICES_MAX: Final = 4096


class UnsupportedLayout(ValueError):
    """This engine's KV cache cannot be taken block by block."""


class LayerView(NamedTuple):
    """One layer's cache as the engine shows it, blocks first. Strides are in elements."""

    layer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    offset: int  # of the first element, in elements
    buffer: int  # which allocation it lies in
    dtype: str = ""  # of its elements


class LayerSlice(NamedTuple):
    """One piece of every block: block b has `size` bytes at `start + b * stride` of a buffer."""

    buffer: int
    start: int
    stride: int
    size: int


class SliceRun(NamedTuple):
    """So many pieces of every block, each `step` bytes after the one before: a device copies them
    at once."""

    buffer: int
    stride: int
    start: int
    size: int
    pieces: int
    step: int


def layer_slices(views: Sequence[LayerView]) -> list[LayerSlice]:
    """The pieces of a block of a group, in the order in which they make the block.

    Raises Unsupported when it is not made of a bounded number of pieces.
    """
    found: list[LayerSlice] = []
    for view in views:
        for piece in _of_layer(view):
            last = found[-1] if found else None
            if (
                last is not None
                and (last.buffer, last.stride) == (piece.buffer, piece.stride)
                and last.start + last.size == piece.start
            ):
                found[-1] = last._replace(size=last.size + piece.size)
            else:
                found.append(piece)
        if len(found) > SLICES_MAX:
            raise UnsupportedLayout(
                f"a block of this KV cache lies in more than {SLICES_MAX} pieces"
            )
    return found


def slice_runs(slices: Sequence[LayerSlice]) -> list[SliceRun]:
    """The same pieces in the same order, in as few runs as there are."""
    runs: list[SliceRun] = []
    for piece in slices:
        last = runs[-1] if runs else None
        if last is not None and (last.buffer, last.stride, last.size) == (
            piece.buffer,
            piece.stride,
            piece.size,
        ):
            step = piece.start - last.start if last.pieces == 1 else last.step
            if step > 0 and piece.start == last.start + last.pieces * step:
                runs[-1] = last._replace(pieces=last.pieces + 1, step=step)
                continue
        runs.append(SliceRun(piece.buffer, piece.stride, piece.start, piece.size, 1, piece.size))
    return runs


def head_parts(views: Sequence[LayerView], parts: int) -> list[list[LayerView]]:
    """Views of equal parts of the KV heads: part i has heads i * H / parts to (i + 1) * H / parts.

    The heads are the dimension before the last two, as in vLLM's `[blocks, heads, tokens, content]`
    and, where a block consists of several of the kernel's, `[blocks, pieces, heads, ...]`.
    Raises UnsupportedLayout when they cannot be divided.
    """
    if parts == 1:
        return [list(views)]
    found: list[list[LayerView]] = [[] for _ in range(parts)]
    for view in views:
        axis = len(view.shape) - 3
        if axis < 1 or view.shape[axis] % parts:
            raise UnsupportedLayout(
                f"layer {view.layer}: the heads of shape {view.shape} make no {parts} equal parts"
            )
        heads = view.shape[axis] // parts
        shape = (*view.shape[:axis], heads, *view.shape[axis + 1 :])
        for part, of_part in enumerate(found):
            offset = view.offset + part * heads * view.strides[axis]
            of_part.append(view._replace(shape=shape, offset=offset))
    return found


def describe(views: Sequence[LayerView]) -> str:
    """What must be equal for two engines to exchange a group's bytes, as text to be hashed."""
    return ";".join(f"{v.layer}:{v.shape[1:]}:{_order(v)}:{v.item_size}" for v in views)


def layer_bytes(views: Sequence[LayerView]) -> list[LayerBytes]:
    """What each layer has of a block, in the order of `layer_slices`."""
    found = []
    for view in views:
        order, size = _order(view), math.prod(view.shape[1:]) * view.item_size
        shape = tuple(view.shape[d] for d in order)
        before_last = len(view.shape) - 2  # tokens, in all caches whose last is one token's content
        tokens = order.index(before_last) if before_last in order else -1
        found.append(LayerBytes(view.layer, size, view.dtype, shape, tokens))
    return found


def _of_layer(view: LayerView) -> list[LayerSlice]:
    if len(view.shape) < 2 or len(view.shape) != len(view.strides) or min(view.shape) < 1:
        raise UnsupportedLayout(f"layer {view.layer}: a KV cache of shape {view.shape}")
    # Innermost first: what is contiguous is one run, everything outside of it is enumerated.
    inner = sorted(
        (stride, size)
        for stride, size in zip(view.strides[1:], view.shape[1:], strict=True)
        if size > 1
    )
    run = 1
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    if any(stride < run for stride, _ in inner):
        raise UnsupportedLayout(
            f"layer {view.layer}: its elements overlap (strides {view.strides})"
        )
    count = math.prod(size for _, size in inner)
    if count > SLICES_MAX:
        raise UnsupportedLayout(
            f"layer {view.layer}: a block lies in {count} pieces of {run * view.item_size} bytes"
        )
    ranges = [[index * stride for index in range(size)] for stride, size in reversed(inner)]
    return [
        LayerSlice(
            view.buffer,
            (view.offset + sum(offsets)) * view.item_size,
            view.strides[0] * view.item_size,
            run * view.item_size,
        )
        for offsets in itertools.product(*ranges)
    ]


def _order(view: LayerView) -> tuple[int, ...]:
    """The inner dimensions as they lie in memory, outermost first.

    Those of size 1 have a place only on paper: their strides depend on what the engine allocated.
    """
    dimensions = [d for d in range(1, len(view.shape)) if view.shape[d] > 1]
    return tuple(sorted(dimensions, key=lambda d: (-view.strides[d], d)))
