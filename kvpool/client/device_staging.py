"""Blocks whose memory lies on a CUDA device: they cross in pinned memory of this client.

A block that is read lands there, is verified there by its transport as ever, and only then goes to
the device: bytes that nobody has seen cannot be told from wrong ones. A block that is written is
copied there first. Batches go in rounds: while one is on the network, another one crosses between
host and device. The memory is taken when a device is used for the first time, and never grows.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvpool.client import buffers as pieces
from kvpool.device_copy import Bytes, DeviceCopier, first_line, pinned
from kvpool.errors import (
    BadBuffer,
    Closed,
    ConfigError,
    DeadlineExceeded,
    TooLarge,
    Unavailable,
)
from kvpool.types import BLOCK_SIZE_MAX, Memory, ReadResult, ReadStatus, WriteStatus

if TYPE_CHECKING:
    import torch

#: Bytes in a round. Large enough that a question to a server costs little beside it, small enough
#: that the first round has come when the last one is asked for.
ROUND: Final = 16 << 20
#: Rounds of a call that are under way: one on the network, one between host and device.
_AT_ONCE: Final = 2
#: How often it is asked whether a device has come to where its caller is.
_MARK_S: Final = 0.0005
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
            sizes.append(pieces.size(views))
    return Buffers(memory, device, sizes)


class _Place(NamedTuple):
    """Where in pinned memory a block is while it crosses."""

    number: int
    block: OnDevice
    start: int


class Staging:
    """The pinned memory of one client, `capacity` bytes, and what copies from and to it."""

    def __init__(self, capacity: int, counters: Counter[str]) -> None:
        self._capacity = capacity
        self._counters = counters
        self._array: Bytes | None = None
        self._taken: dict[int, int] = {}  # where, how much
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._making = asyncio.Lock()
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._closed = False

    async def read(
        self,
        blocks: Mapping[int, OnDevice],
        fetch: Callable[[Rows], Awaitable[Mapping[int, ReadResult]]],
        deadline: float,
    ) -> Mapping[int, ReadResult]:
        """Have `fetch` fill rows of the host, one round at a time, and bring hits to the device.

        When it returns a hit, the device has the block. However it ends, nothing is written to
        the blocks' memory any more.
        """
        results = dict.fromkeys(blocks, ReadResult(ReadStatus.DEADLINE))
        rounds, fetching = iter(self._rounds(blocks)), asyncio.Lock()

        async def some() -> None:
            for numbers in rounds:
                try:
                    async with self._room(blocks, numbers, deadline) as places:
                        async with fetching:
                            found = await fetch(self._rows(places))
                        hits = []
                        for place in places:
                            result = found[place.number]
                            if result.status.hit:
                                hits.append((place, result.size))
                            else:
                                results[place.number] = result
                        await _passed([place.block for place, _ in hits], deadline)
                        await self._cross(hits, deadline, to_host=False)
                        results.update(found)
                except DeadlineExceeded:
                    continue

        await _side_by_side(some)
        return results

    async def write(
        self,
        blocks: Mapping[int, OnDevice],
        send: Callable[[Rows], Awaitable[Mapping[int, WriteStatus]]],
        deadline: float,
    ) -> Mapping[int, WriteStatus]:
        """Bring blocks from the device, in order, and have `send` take them from the host."""
        statuses = dict.fromkeys(blocks, WriteStatus.DEADLINE)
        rounds, filling, sending = iter(self._rounds(blocks)), asyncio.Lock(), asyncio.Lock()

        async def some() -> None:
            for numbers in rounds:
                try:
                    async with self._room(blocks, numbers, deadline) as places:
                        # Locks let nobody past who came first: parents are sent before children.
                        async with filling:
                            whole = [(place, place.block.size) for place in places]
                            await self._cross(whole, deadline, to_host=True)
                        async with sending:
                            statuses.update(await send(self._rows(places)))
                except DeadlineExceeded:
                    continue

        try:
            await _passed(blocks.values(), deadline)  # holding nothing that others wait for
        except DeadlineExceeded:
            return statuses
        await _side_by_side(some)
        return statuses

    def close(self) -> None:
        """Running calls end with Closed; waits for the steps that their copies are at."""
        self._closed = True
        for copier in self._copiers.values():
            copier.close()
        self._array = None

    def _rounds(self, blocks: Mapping[int, OnDevice]) -> list[list[int]]:
        """Consecutive blocks, up to ROUND bytes together, or one larger one."""
        rounds: list[list[int]] = []
        held = 0
        for number, block in blocks.items():
            if block.size > self._capacity:
                raise TooLarge(
                    f"buffer {number} has {block.size} bytes on a device, and this client "
                    f"{self._capacity} for them to cross in: raise client.device_staging"
                )
            if not rounds or held + block.size > min(ROUND, self._capacity):
                rounds.append([])
                held = 0
            rounds[-1].append(number)
            held += block.size
        return rounds

    @asynccontextmanager
    async def _room(
        self, blocks: Mapping[int, OnDevice], numbers: Sequence[int], deadline: float
    ) -> AsyncIterator[list[_Place]]:
        """Places for these blocks, one behind the other. Raises DeadlineExceeded."""
        size = sum(blocks[number].size for number in numbers)
        start: int | None = None
        try:
            async with _in_time(deadline):
                await self._make({blocks[number].device for number in numbers})
                async with self._turn:  # a large round is not passed for ever by small ones
                    while (start := self._gap(size)) is None:
                        self._freed.clear()
                        await self._freed.wait()
                    self._taken[start] = size
            places, at = [], start
            for number in numbers:
                places.append(_Place(number, blocks[number], at))
                at += blocks[number].size
            yield places
        finally:
            if start is not None:
                del self._taken[start]
                self._freed.set()

    def _gap(self, size: int) -> int | None:
        """Where so many bytes are free."""
        start = 0
        for other, taken in sorted(self._taken.items()):
            if other - start >= size:
                break
            start = other + taken
        return start if start + size <= self._capacity else None

    def _rows(self, places: Iterable[_Place]) -> Rows:
        memory = self._memory()
        return {p.number: (memory[p.start : p.start + p.block.size].data,) for p in places}

    def _memory(self) -> Bytes:
        if self._array is None:
            raise Closed("the pool is closed")
        return self._array

    async def _make(self, devices: Iterable[torch.device]) -> None:
        """Have the memory and a copier for each device. Raises ConfigError when it cannot be."""
        async with self._making:
            for device in devices:
                if self._closed:
                    raise Closed("the pool is closed")
                if device not in self._copiers:
                    try:
                        made = await asyncio.to_thread(self._made, device)
                    except RuntimeError as error:
                        raise ConfigError(
                            f"{self._capacity} bytes of pinned host memory for {device} cannot be "
                            f"had: {first_line(error)}; see client.device_staging"
                        ) from None
                    if self._closed:
                        made[1].close()
                        raise Closed("the pool is closed")
                    self._array, self._copiers[device] = made

    def _made(self, device: torch.device) -> tuple[Bytes, DeviceCopier]:
        """In a thread: pinning takes as long as touching it all."""
        array = self._array
        if array is None:
            array = pinned(self._capacity, device).numpy()
        return array, DeviceCopier(device, _AT_ONCE)

    async def _cross(
        self, moves: Sequence[tuple[_Place, int]], deadline: float, *, to_host: bool
    ) -> None:
        """Copy so many bytes of each place. Raises DeadlineExceeded; Unavailable: the device."""
        memory = self._memory()
        async with _in_time(deadline):
            for device, rows, start, size in _joined(moves):
                copier = self._copiers[device]
                await copier.copy(rows, memory[start : start + size], to_host=to_host)
                self._counters[f"staged_{'write' if to_host else 'read'}_bytes"] += size


async def _passed(blocks: Iterable[OnDevice], deadline: float) -> None:
    """Wait until the device has come to where the blocks' owner was. Raises DeadlineExceeded."""
    # Asked, not waited for in a thread: nothing has begun, so a caller may give up at any time,
    # whatever the device is busy with. A device sets no events of ours.
    try:
        async with _in_time(deadline):
            for mark in {mark for block in blocks for mark in block.after}:
                while not mark.query():  # noqa: ASYNC110
                    await asyncio.sleep(_MARK_S)
    except RuntimeError as error:  # of the work that the owner gave it
        raise Unavailable(f"device: {first_line(error)}") from None


def _joined(
    moves: Iterable[tuple[_Place, int]],
) -> Iterator[tuple[torch.device, list[torch.Tensor], int, int]]:
    """What lies together on the host is copied at once."""
    rows: list[torch.Tensor] = []
    start = held = 0
    for place, size in moves:
        if rows and (place.block.device != rows[0].device or place.start != start + held):
            yield rows[0].device, rows, start, held
            rows = []
        if not rows:
            start, held = place.start, 0
        rows += _beginning(place.block, size)
        held += size
    if rows:
        yield rows[0].device, rows, start, held


def _beginning(block: OnDevice, size: int) -> Iterator[torch.Tensor]:
    """The first `size` bytes: a block may be smaller than the memory it is read into."""
    for row in block.rows:
        if size <= 0:
            break
        yield row[:size]
        size -= len(row)


async def _side_by_side(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do it twice at once, until both have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@asynccontextmanager
async def _in_time(deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the device's copies did not end in time") from None


# --- what callers pass ------------------------------------------------------------------------


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
