"""The engine's KV cache as memory that the pool can read and write.

Memory of this process is used in place: the pool gets a block's pieces where they are. Memory of a
device is staged, as the pool's client does it (`kvpool/device/lane.py`), over pinned memory and
16 MiB of the device that are taken at the start. Or, where that client takes memory of devices, it
gets the pieces there, too. (design: pool-thread)
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import operator
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import torch

from kvpool.device.lane import Lane, Move, pin
from kvpool.device.thread import reached
from kvpool.threads import in_thread
from kvpool.types import DIRECT_PIECES_MAX, DeviceRows, Memory
from kvpool_connector.memory.kv_layout import (
    LayerView,
    SliceRun,
    UnsupportedLayout,
    describe,
    head_parts,
    layer_bytes,
    layer_slices,
    slice_runs,
)
from kvpool_engines.comparison import LayerBytes

#: Pinned host memory of one transfer; the worker splits larger ones.
STAGING_BYTES: Final = 32 << 20
#: Reads and writes that one process has under way, each with such memory: two cores copy as fast as
#: memory does, and a request waits for a load, but none for a save.
READS_MAX: Final = 4
WRITES_MAX: Final = 2
#: All that staging takes of a device, whatever the model. Copying half of it over a bus takes
#: 0.15 ms or more: starting the next copy costs little beside it.
DEVICE_BYTES: Final = 16 << 20
#: Where to look if there is too little pinned memory.
_LIMITS: Final = "the limits of this container's memory and of locked memory (ulimit -l)"
#: Blocks whose pieces are named in one turn of the loop.
_BLOCKS_PER_TURN: Final = 8
_POLL_S: Final = 0.0005


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
    #: Reads of one load that are worth having under way at once.
    reads_at_once: int

    def record_event(self) -> Any:
        """The device's work that the engine has submitted so far. Called by the engine's thread."""

    def source(
        self, block_ids: Sequence[int], after: Any, part: int = 0
    ) -> AbstractAsyncContextManager[list[Memory]]:
        """The bytes of a part of these blocks when the work before the event `after` is done.

        Valid until the blocks change, or the `with` has ended.
        """

    async def host_source(self, block_id: int, after: Any, part: int = 0) -> list[Any]:
        """The pieces of a part of one block, in memory of the host."""

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


def memory_of(
    layers: Mapping[str, torch.Tensor], parts: int = 1, *, direct: bool = False
) -> BlockMemory:
    """The memory of a group, blocks first in each tensor. Raises UnsupportedLayout.

    Several parts divide the KV heads (`kv_layout.head_parts`). `direct`: the pool's client takes
    memory of devices as it is; blocks that are too large for that are staged all the same.
    """
    buffers: list[torch.Tensor] = []
    views = views_of(layers, buffers)
    if not views:
        raise UnsupportedLayout("a KV cache group without layers")
    if all(buffer.device.type == "cpu" for buffer in buffers):
        return HostBlockMemory(views, buffers, parts)
    part_bytes = sum(piece.size for piece in layer_slices(head_parts(views, parts)[0]))
    if direct and part_bytes <= DIRECT_PIECES_MAX:
        return DirectBlockMemory(views, buffers, parts)
    return DeviceBlockMemory(views, buffers, parts)


class _Blocks:
    """What blocks are, wherever they lie."""

    def __init__(
        self, views: Sequence[LayerView], buffers: Sequence[torch.Tensor], parts: int
    ) -> None:
        self._device = buffers[0].device
        divided = head_parts(views, parts)
        #: The pieces of each part of a block.
        self._slices = [layer_slices(of_part) for of_part in divided]
        self._part_bytes = sum(piece.size for piece in self._slices[0])
        self.parts = parts
        self.block_bytes = self._part_bytes * parts
        self.packing = describe(divided[0])
        self.layers = layer_bytes(divided[0])
        self.blocks_per_transfer = max(1, STAGING_BYTES // self._part_bytes)
        # On the network, verified, copied. What is left is for another load.
        self.reads_at_once = READS_MAX - 1

    def record_event(self) -> Any:
        device = self._device
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class HostBlockMemory(_Blocks):
    """Blocks in memory of this process."""

    def __init__(
        self, views: Sequence[LayerView], buffers: Sequence[torch.Tensor], parts: int = 1
    ) -> None:
        super().__init__(views, buffers, parts)
        memory = [buffer.numpy().data for buffer in buffers]
        #: For each part, runs of pieces with one stride and size: for each piece the memory from
        #: that of block 0 on. To cut them is most of what a `source` costs.
        self._runs = [
            [
                (stride, size, [memory[piece.buffer][piece.start :] for piece in run])
                for (stride, size), run in itertools.groupby(
                    of_part, operator.attrgetter("stride", "size")
                )
            ]
            for of_part in self._slices
        ]
        self.blocks_per_transfer = 1 << 30
        self.reads_at_once = 1  # a block is where it belongs when it has come

    @asynccontextmanager
    async def source(
        self, block_ids: Sequence[int], after: None, part: int = 0
    ) -> AsyncIterator[list[Memory]]:
        yield [self._pieces(block, part) for block in block_ids]

    async def host_source(self, block_id: int, after: None, part: int = 0) -> list[Any]:
        return self._pieces(block_id, part)

    target = source

    def _pieces(self, block: int, part: int) -> list[Any]:
        pieces: list[Any] = []
        for stride, size, views in self._runs[part]:
            cut = slice(block * stride, block * stride + size)
            pieces += [view[cut] for view in views]
        return pieces


class _Lane(Lane):
    """A lane with pinned memory of the host for so many `transfers`. No transfer takes more."""

    def __init__(self, device: torch.device, size: int, transfers: int) -> None:
        super().__init__(device, scratch=size)
        self._transfers = transfers
        self._host_bytes = 0
        self._free: list[torch.Tensor] = []
        self.hold(STAGING_BYTES)

    def hold(self, size: int) -> None:
        """Have pinned memory for transfers of so many bytes, and of all that have less.

        To be called at the start. Raises ConfigError if there is none.
        """
        if size <= self._host_bytes:
            return
        with self.on_stream():  # of this device, not of another
            whole = pin(self._transfers * size, self.device, _LIMITS)
        self._free, self._host_bytes = list(whole.view(self._transfers, size)), size

    @asynccontextmanager
    async def host(self, count: int, size: int) -> AsyncIterator[torch.Tensor]:
        """So many rows of pinned memory, as soon as a transfer that has it ends."""
        free = self._free
        while True:
            try:
                whole = free.pop()
                break
            except IndexError:  # polled: engines in one process may have a loop each
                await asyncio.sleep(_POLL_S)
        try:
            yield whole[: count * size].view(count, size)
        finally:
            free.append(whole)


class DeviceStage(_Lane):
    """What staging takes of a device and of its host: a lane for loads, and one for saves, half of
    `size` each. Raises ConfigError if there is no memory for them.

    A request waits for a load, and nobody for a save: neither is behind the other. All groups of a
    worker share it, so that neither their number nor the length of a prompt changes what is left
    for the engine. (design: device-memory)
    """

    def __init__(self, device: torch.device, size: int = DEVICE_BYTES) -> None:
        super().__init__(device, size // 2, READS_MAX)
        self.saves = _Lane(device, size // 2, WRITES_MAX)


@functools.cache
def stage_of(device: torch.device) -> DeviceStage:
    """The one of this process. It takes its memory when it is first asked for."""
    return DeviceStage(device)


class _DeviceBlocks(_Blocks):
    """Blocks in memory of a device, which the host cannot address."""

    def __init__(
        self, views: Sequence[LayerView], buffers: Sequence[torch.Tensor], parts: int = 1
    ) -> None:
        super().__init__(views, buffers, parts)
        blocks = views[0].shape[0]
        #: For each part its pieces of every block: as one row, where they are at equal distances.
        self._runs = [
            [_blocks_of(buffers[run.buffer], run, blocks) for run in slice_runs(of_part)]
            for of_part in self._slices
        ]

    def _rows(self, block: int, part: int) -> list[torch.Tensor]:
        return [run[block] for run in self._runs[part]]


class DeviceBlockMemory(_DeviceBlocks):
    """Blocks that are staged. (design: device-memory)

    Lanes, with a thread and a stream each, copy them, so that neither the engine nor the pool waits
    for them. They never wait for the engine: a copy begins when its event was reached. A part of
    each block is one row of pinned memory.
    """

    def __init__(
        self,
        views: Sequence[LayerView],
        buffers: Sequence[torch.Tensor],
        parts: int = 1,
        stage: DeviceStage | None = None,
    ) -> None:
        super().__init__(views, buffers, parts)
        self._stage = stage or stage_of(buffers[0].device)
        self._stage.hold(self._part_bytes)
        self._stage.saves.hold(self._part_bytes)

    @asynccontextmanager
    async def source(
        self, block_ids: Sequence[int], after: Any, part: int = 0
    ) -> AsyncIterator[list[Memory]]:
        await _reached(after)
        lane = self._stage.saves
        async with lane.host(len(block_ids), self._part_bytes) as staged:
            await lane.copy(self._moves(block_ids, part, staged), to_host=True)
            yield [row.numpy().data for row in staged]

    async def host_source(self, block_id: int, after: Any, part: int = 0) -> list[Any]:
        async with self.source([block_id], after, part) as rows:
            return [bytes(row) for row in rows]  # type: ignore[arg-type]

    @asynccontextmanager
    async def target(
        self, block_ids: Sequence[int], after: Any, part: int = 0
    ) -> AsyncIterator[list[Memory]]:
        lane = self._stage
        async with lane.host(len(block_ids), self._part_bytes) as staged:
            yield [row.numpy().data for row in staged]
            await _reached(after)  # kernels of the blocks' last user may still run
            await lane.copy(self._moves(block_ids, part, staged), to_host=False)

    def _moves(self, block_ids: Sequence[int], part: int, staged: torch.Tensor) -> Iterator[Move]:
        # As one, so that what is small goes together.
        yield [row for block in block_ids for row in self._rows(block, part)], staged.view(-1)


class DirectBlockMemory(_DeviceBlocks):
    """Blocks that the pool's client takes where they lie.

    It gathers, scatters and hashes on the device itself, over 64 MiB that it takes once; nothing is
    staged here. (design: device-memory)
    """

    @asynccontextmanager
    async def source(
        self, block_ids: Sequence[int], after: Any, part: int = 0
    ) -> AsyncIterator[list[Memory]]:
        # The client waits for the event before it touches a byte.
        yield [DeviceRows(rows, after) for rows in await self._blocks(block_ids, part)]

    async def host_source(self, block_id: int, after: Any, part: int = 0) -> list[Any]:
        [block] = await self._blocks([block_id], part)
        await _reached(after)
        # In a thread: the device is waited for.
        return await in_thread(lambda: [row.cpu().view(-1).numpy().data for row in block])

    target = source

    async def _blocks(self, block_ids: Sequence[int], part: int) -> list[list[torch.Tensor]]:
        """The rows of each block."""
        found = []
        for number, block in enumerate(block_ids):
            found.append(self._rows(block, part))
            if number % _BLOCKS_PER_TURN == _BLOCKS_PER_TURN - 1:
                await asyncio.sleep(0)  # some microseconds for each
        return found


def device_of_this_thread() -> Callable[[], object]:
    """To be called by a new thread, which gets the CUDA context of this one.

    Asking an event of CUDA, or UCX, takes half a GB of the first device in a thread without one,
    and each rank of an engine would do that.
    """
    if not torch.cuda.is_initialized():
        return tuple
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


async def _reached(after: Any) -> None:
    """Wait for the engine's work before an event, and hold up nothing else meanwhile."""
    if after is not None:  # else no device has work
        await reached([after])


def _blocks_of(buffer: torch.Tensor, run: SliceRun, blocks: int) -> torch.Tensor:
    """The pieces of a run of every block: blocks, pieces (if there are several), bytes; no copy."""
    shape, strides = (blocks, run.pieces, run.size), (run.stride, run.step, 1)
    found = torch.as_strided(buffer, shape, strides, run.start)
    return found.squeeze(1) if run.pieces == 1 else found


def _natural(layer: str) -> tuple[tuple[int, int | str], ...]:
    """Layer 10 comes after layer 9."""
    words = layer.split(".")
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in words)
