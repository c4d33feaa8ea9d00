"""The engine's KV cache as memory that the pool can read and write.

Memory of this process is used in place: the pool gets a block's pieces where they are. Memory of a
device is staged: one gather on the device, one copy to page-locked memory, and the reverse.
(design: connector)
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import torch

from kvpool.types import Memory
from kvpool_connector.comparison import LayerBytes
from kvpool_connector.kv_layout import (
    LayerSlice,
    LayerView,
    SliceRun,
    UnsupportedLayout,
    describe,
    head_parts,
    layer_bytes,
    layer_slices,
    slice_runs,
)

#: Staging memory of one call; the worker splits larger transfers.
STAGING_BYTES: Final = 256 << 20


class BlockMemory(Protocol):
    """Blocks of one KV cache group, each of which consists of `parts` of equal size."""

    parts: int
    #: Of a block, with all its parts.
    block_bytes: int
    #: How the bytes of a block are arranged: engines share blocks only if theirs are equal.
    packing: str
    #: What a block consists of, in this order.
    layers: list[LayerBytes]
    #: How many blocks one `source` or `target` takes.
    blocks_per_transfer: int

    def record_event(self) -> Any:
        """The device's work that the engine has submitted so far. Called by the engine's thread."""

    async def source(self, block_ids: Sequence[int], after: Any, part: int = 0) -> list[Memory]:
        """The bytes of a part of these blocks when the work before the event `after` is done.

        Valid until the blocks change.
        """

    def target(
        self, block_ids: Sequence[int], after: Any, part: int = 0
    ) -> AbstractAsyncContextManager[list[Memory]]:
        """Memory to write a part of these blocks into; they have it when the `with` has ended."""


def views_of(layers: Mapping[str, torch.Tensor], buffers: list[torch.Tensor]) -> list[LayerView]:
    """How the layers of a group lie in memory; new allocations are added to `buffers`, as bytes."""
    views = []
    for layer in sorted(layers, key=_natural):
        tensor = layers[layer]
        storage = tensor.untyped_storage()
        known = [b.untyped_storage().data_ptr() for b in buffers]
        if storage.data_ptr() not in known:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            buffers.append(whole.set_(storage))
            known.append(storage.data_ptr())
        views.append(
            LayerView(
                layer,
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.element_size(),
                int(tensor.storage_offset()),
                known.index(storage.data_ptr()),
                str(tensor.dtype).removeprefix("torch."),
            )
        )
    return views


def memory_of(layers: Mapping[str, torch.Tensor], parts: int = 1) -> BlockMemory:
    """The memory of a group, blocks first in each tensor. Raises UnsupportedLayout.

    Several parts divide the KV heads (`kv_layout.head_parts`).
    """
    buffers: list[torch.Tensor] = []
    views = views_of(layers, buffers)
    if not views:
        raise UnsupportedLayout("a KV cache group without layers")
    if all(buffer.device.type == "cpu" for buffer in buffers):
        return HostBlockMemory(views, buffers, parts)
    return DeviceBlockMemory(views, buffers, parts)


class HostBlockMemory:
    """Blocks in memory of this process."""

    def __init__(
        self, views: Sequence[LayerView], buffers: Sequence[torch.Tensor], parts: int = 1
    ) -> None:
        divided = head_parts(views, parts)
        slices = [layer_slices(of_part) for of_part in divided]
        memory = [buffer.numpy().data for buffer in buffers]
        #: For each part, runs of pieces with one stride and size: for each piece the memory from
        #: that of block 0 on. To cut them is most of what a `source` costs.
        self._runs = [
            [
                (stride, size, [memory[piece.buffer][piece.start :] for piece in run])
                for (stride, size), run in itertools.groupby(of_part, _stride_and_size)
            ]
            for of_part in slices
        ]
        self.parts = parts
        self.block_bytes = sum(piece.size for of_part in slices for piece in of_part)
        self.packing = describe(divided[0])
        self.layers = layer_bytes(divided[0])
        self.blocks_per_transfer = 1 << 30

    def record_event(self) -> None:
        return None

    async def source(self, block_ids: Sequence[int], after: None, part: int = 0) -> list[Memory]:
        return [self._pieces(block, part) for block in block_ids]

    @asynccontextmanager
    async def target(
        self, block_ids: Sequence[int], after: None, part: int = 0
    ) -> AsyncIterator[list[Memory]]:
        yield [self._pieces(block, part) for block in block_ids]

    def _pieces(self, block: int, part: int) -> list[Any]:
        pieces: list[Any] = []
        for stride, size, views in self._runs[part]:
            cut = slice(block * stride, block * stride + size)
            pieces += [view[cut] for view in views]
        return pieces


class DeviceBlockMemory:
    """Blocks in memory of a device, which the host cannot address. (design: device-memory)

    One thread with a CUDA stream of its own gathers and scatters, so that neither the engine nor
    the pool waits for it. A part of each block is one row of a page-locked buffer.
    """

    def __init__(
        self, views: Sequence[LayerView], buffers: Sequence[torch.Tensor], parts: int = 1
    ) -> None:
        divided = head_parts(views, parts)
        slices = [layer_slices(of_part) for of_part in divided]
        self._device = buffers[0].device
        self.parts = parts
        self._part_bytes = sum(piece.size for piece in slices[0])
        self.block_bytes = self._part_bytes * parts
        self.packing = describe(divided[0])
        self.blocks_per_transfer = max(1, STAGING_BYTES // self._part_bytes)
        self.layers = layer_bytes(divided[0])
        blocks = views[0].shape[0]
        self._rows = [
            [_rows(buffers[run.buffer], run, blocks) for run in slice_runs(of_part)]
            for of_part in slices
        ]
        self._executor = ThreadPoolExecutor(1, "kvpool-stage")
        cuda = self._device.type == "cuda"
        self._pinned = cuda
        self._stream = torch.cuda.Stream(self._device) if cuda else None

    def record_event(self) -> Any:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    async def source(self, block_ids: Sequence[int], after: Any, part: int = 0) -> list[Memory]:
        staged = await self._do(lambda: self._gather(block_ids, after, part))
        return [row.numpy().data for row in staged]

    @asynccontextmanager
    async def target(
        self, block_ids: Sequence[int], after: Any, part: int = 0
    ) -> AsyncIterator[list[Memory]]:
        staged = await self._do(lambda: self._staging(len(block_ids)))
        yield [row.numpy().data for row in staged]
        await self._do(lambda: self._scatter(block_ids, staged, after, part))

    async def _do(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        # A cancelled call must not leave the thread at work on memory that is given back.
        task = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    def _staging(self, count: int) -> torch.Tensor:
        return torch.empty(count, self._part_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _gather(self, block_ids: Sequence[int], after: Any, part: int) -> torch.Tensor:
        host = self._staging(len(block_ids))
        with torch.cuda.stream(self._stream):  # no stream: no effect
            if self._stream is not None:
                self._stream.wait_event(after)
            ids = torch.tensor(block_ids, device=self._device)
            device = torch.empty(host.shape, dtype=torch.uint8, device=self._device)
            start = 0
            for rows in self._rows[part]:
                size = rows.shape[1] * rows.shape[2]
                place = device[:, start : start + size].unflatten(1, rows.shape[1:])
                place.copy_(rows.index_select(0, ids))
                start += size
            host.copy_(device, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return host

    def _scatter(
        self, block_ids: Sequence[int], host: torch.Tensor, after: Any, part: int
    ) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            if self._stream is not None:  # kernels of the blocks' last user may still run
                self._stream.wait_event(after)
            ids = torch.tensor(block_ids, device=self._device)
            device = host.to(self._device, non_blocking=True)
            start = 0
            for rows in self._rows[part]:
                size = rows.shape[1] * rows.shape[2]
                place = device[:, start : start + size].unflatten(1, rows.shape[1:])
                rows.index_copy_(0, ids, place)
                start += size
        if self._stream is not None:
            self._stream.synchronize()
        return host


def _stride_and_size(piece: LayerSlice) -> tuple[int, int]:
    return piece.stride, piece.size


def _rows(buffer: torch.Tensor, run: SliceRun, blocks: int) -> torch.Tensor:
    """The pieces of a run of every block: blocks, pieces, bytes; no copy."""
    shape, strides = (blocks, run.pieces, run.size), (run.stride, run.step, 1)
    return torch.as_strided(buffer, shape, strides, run.start)


def _natural(layer: str) -> tuple[tuple[int, int | str], ...]:
    """Layer 10 comes after layer 9."""
    words = layer.split(".")
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in words)
