"""Blocks whose memory lies on a CUDA device pass through pinned memory of this client.

A block that is read arrives in pinned memory, its transport verifies it there as always, and only
then it is copied to the device: bytes that were never in host memory could not be verified. A
block that is written is copied to pinned memory first. Batches go in rounds: while one round is on
the network, another is copied between host and device. The memory is allocated once, when a device
is used for the first time, and never grows (design: device-memory).
"""

from __future__ import annotations

import asyncio
import functools
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvpool.client.buffers import DeviceBlock, HostRows
from kvpool.device_copy import Bytes, DeviceCopier, first_line, pinned
from kvpool.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    TooLarge,
    Unavailable,
)
from kvpool.runtime import task_group
from kvpool.types import ReadResult, ReadStatus, WriteStatus
from kvpool.units import human

if TYPE_CHECKING:
    import torch

#: Bytes in a round. Large enough that a request to a server costs little beside it, small enough
#: that copying the first round overlaps with receiving the others.
ROUND: Final = 16 << 20
#: Rounds of a call that are under way: one on the network, one between host and device.
_ROUNDS_AT_ONCE: Final = 2
#: How often to ask whether a device has reached its caller's events.
_POLL_S: Final = 0.0005


class StagingSlot(NamedTuple):
    """Where in pinned memory a block is while it passes through."""

    number: int
    block: DeviceBlock
    start: int


class Staging:
    """The pinned memory of one client, `capacity` bytes, and the copiers from and to it.

    A round first allocates its slots, then fills them, then empties them, and frees them however
    it ends. Two rounds of a call run at a time.
    """

    def __init__(self, capacity: int, counters: Counter[str]) -> None:
        self._capacity = capacity
        self._counters = counters
        self._array: Bytes | None = None
        self._used: dict[int, int] = {}  # sizes of what is allocated, by where it starts
        self._allocating = asyncio.Lock()
        self._space_freed = asyncio.Event()
        self._making: asyncio.Future[tuple[Bytes, DeviceCopier]] | None = None
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._closed = False

    async def read(
        self,
        blocks: Mapping[int, DeviceBlock],
        fetch: Callable[[HostRows], Awaitable[Mapping[int, ReadResult]]],
        deadline: float,
    ) -> Mapping[int, ReadResult]:
        """Have `fetch` fill rows of the host, one round at a time, and bring hits to the device.

        When it returns a hit, the device has the block. However it ends, nothing writes to the
        blocks' memory any more.
        """
        results = dict.fromkeys(blocks, ReadResult(ReadStatus.DEADLINE))
        rounds, fetching = iter(self._rounds(blocks)), asyncio.Lock()

        async def run_rounds() -> None:
            for numbers in rounds:
                try:
                    async with self._allocate(blocks, numbers, deadline) as slots:
                        async with fetching:
                            found = await fetch(self._rows(slots))
                        hits = []
                        for slot in slots:
                            result = found[slot.number]
                            if result.status is ReadStatus.HIT:
                                hits.append((slot, result.size))
                            else:
                                results[slot.number] = result
                        # Before the first byte: its owner's work may still use that memory.
                        await wait_for_stream([slot.block for slot, _ in hits], deadline)
                        await self._transfer(hits, deadline, to_host=False)
                        results.update(found)
                except DeadlineExceeded:
                    continue

        await _run_two(run_rounds)
        return results

    async def write(
        self,
        blocks: Mapping[int, DeviceBlock],
        send: Callable[[HostRows], Awaitable[Mapping[int, WriteStatus]]],
        deadline: float,
    ) -> Mapping[int, WriteStatus]:
        """Bring blocks from the device, in order, and have `send` take them from the host."""
        statuses = dict.fromkeys(blocks, WriteStatus.DEADLINE)
        rounds, filling, sending = iter(self._rounds(blocks)), asyncio.Lock(), asyncio.Lock()

        async def run_rounds() -> None:
            for numbers in rounds:
                try:
                    async with self._allocate(blocks, numbers, deadline) as slots:
                        # Locks are fair, so rounds stay in order: parents before children.
                        async with filling:
                            whole = [(slot, slot.block.size) for slot in slots]
                            await self._transfer(whole, deadline, to_host=True)
                        async with sending:
                            statuses.update(await send(self._rows(slots)))
                except DeadlineExceeded:
                    continue

        try:
            # Before anything is allocated: other calls must not wait for this one's stream.
            await wait_for_stream(blocks.values(), deadline)
        except DeadlineExceeded:
            return statuses
        await _run_two(run_rounds)
        return statuses

    def close(self) -> None:
        """Running calls end with Closed. Waits for the copies that have begun."""
        self._closed = True
        for copier in self._copiers.values():
            copier.close()
        self._array = None

    def _rounds(self, blocks: Mapping[int, DeviceBlock]) -> list[list[int]]:
        """Consecutive blocks, up to ROUND bytes together, or one larger one."""
        rounds: list[list[int]] = []
        held = 0
        for number, block in blocks.items():
            if block.size > self._capacity:
                raise TooLarge(
                    f"buffer {number} has {human(block.size)} on a device, and this client "
                    f"{human(self._capacity)} for them to cross in: raise client.device_staging"
                )
            if not rounds or held + block.size > min(ROUND, self._capacity):
                rounds.append([])
                held = 0
            rounds[-1].append(number)
            held += block.size
        return rounds

    @asynccontextmanager
    async def _allocate(
        self, blocks: Mapping[int, DeviceBlock], numbers: Sequence[int], deadline: float
    ) -> AsyncIterator[list[StagingSlot]]:
        """Slots for these blocks, one behind the other. Raises DeadlineExceeded."""
        size = sum(blocks[number].size for number in numbers)
        start: int | None = None
        try:
            async with until(deadline):
                await self._prepare({blocks[number].device for number in numbers})
                # One waits for space at a time, or small rounds would starve a large one.
                async with self._allocating:
                    while (start := self._gap(size)) is None:
                        self._space_freed.clear()
                        await self._space_freed.wait()
                    self._used[start] = size
            slots, at = [], start
            for number in numbers:
                slots.append(StagingSlot(number, blocks[number], at))
                at += blocks[number].size
            yield slots
        finally:
            if start is not None:
                del self._used[start]
                self._space_freed.set()

    def _gap(self, size: int) -> int | None:
        """The first place where so many bytes are free; None while there is none."""
        start = 0
        for other, taken in sorted(self._used.items()):
            if other - start >= size:
                break
            start = other + taken
        return start if start + size <= self._capacity else None

    def _rows(self, slots: Iterable[StagingSlot]) -> HostRows:
        memory = self._memory()
        return {s.number: (memory[s.start : s.start + s.block.size].data,) for s in slots}

    def _memory(self) -> Bytes:
        if self._array is None:
            raise Closed("the pool is closed")
        return self._array

    async def _prepare(self, devices: Iterable[torch.device]) -> None:
        """Allocate the memory, and a copier for each device. Raises ConfigError when that fails.

        A call that ends meanwhile leaves it to those that follow: with deadlines shorter than it
        takes, each would begin anew.
        """
        for device in devices:
            while device not in self._copiers:
                if self._closed:
                    raise Closed("the pool is closed")
                making = self._making
                if making is None:
                    loop = asyncio.get_running_loop()
                    making = self._making = loop.run_in_executor(None, self._create, device)
                    making.add_done_callback(functools.partial(self._made, device))
                await asyncio.wait([making])
                if isinstance(error := making.exception(), ConfigError):
                    raise error.fresh()
                making.result()

    def _made(
        self, device: torch.device, making: asyncio.Future[tuple[Bytes, DeviceCopier]]
    ) -> None:
        self._making = None
        if making.cancelled() or making.exception() is not None:
            return
        array, copier = making.result()
        if self._closed:
            copier.close()
        else:
            self._array, self._copiers[device] = array, copier

    def _create(self, device: torch.device) -> tuple[Bytes, DeviceCopier]:
        """In a thread: pinning takes as long as touching every page."""
        try:
            array = self._array
            if array is None:
                array = pinned(self._capacity, device).numpy()
            return array, DeviceCopier(device, _ROUNDS_AT_ONCE)
        except RuntimeError as error:
            raise ConfigError(
                f"{human(self._capacity)} of pinned host memory for {device} cannot be had: "
                f"{first_line(error)}; see client.device_staging"
            ) from None

    async def _transfer(
        self, moves: Sequence[tuple[StagingSlot, int]], deadline: float, *, to_host: bool
    ) -> None:
        """Copy so many bytes of each slot. Raises DeadlineExceeded, and Unavailable for CUDA."""
        memory = self._memory()
        async with until(deadline):
            for device, rows, start, size in _contiguous(moves):
                copier = self._copiers[device]
                await copier.copy(rows, memory[start : start + size], to_host=to_host)
                self._counters[f"staged_{'write' if to_host else 'read'}_bytes"] += size


async def wait_for_stream(blocks: Iterable[DeviceBlock], deadline: float) -> None:
    """Wait until the device has reached the blocks' events. Raises DeadlineExceeded.

    Raises Unavailable when the work before them failed.
    """
    # Polled, and not waited for in a thread: no copy has begun, so the call can be cancelled at
    # any time, however long the device is busy. CUDA cannot wake a loop.
    try:
        async with until(deadline):
            for event in {event for block in blocks for event in block.ready_events}:
                while not event.query():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
    except RuntimeError as error:
        raise Unavailable(f"device: {first_line(error)}") from None


def _contiguous(
    moves: Iterable[tuple[StagingSlot, int]],
) -> Iterator[tuple[torch.device, list[torch.Tensor], int, int]]:
    """Moves that lie side by side in pinned memory, joined: one copy instead of several."""
    rows: list[torch.Tensor] = []
    start = held = 0
    for slot, size in moves:
        if rows and (slot.block.device != rows[0].device or slot.start != start + held):
            yield rows[0].device, rows, start, held
            rows = []
        if not rows:
            start, held = slot.start, 0
        rows += first_bytes(slot.block, size)
        held += size
    if rows:
        yield rows[0].device, rows, start, held


def first_bytes(block: DeviceBlock, size: int) -> Iterator[torch.Tensor]:
    """The first `size` bytes: a block may be smaller than the memory it is read into."""
    for row in block.rows:
        if size <= 0:
            break
        yield row[:size]
        size -= len(row)


async def _run_two(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it twice at the same time, until both have ended."""
    async with task_group() as group:
        for _ in range(_ROUNDS_AT_ONCE):
            group.create_task(work())


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when what is inside does not end in time."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the device's copies did not end in time") from None
