"""Blocks whose memory lies on a CUDA device pass through pinned memory of this client.

A block that is read arrives in pinned memory, its transport verifies it there as always, and only
then it is copied to the device: bytes that were never in host memory could not be verified. A
block that is written is copied to pinned memory first. Batches go in rounds: while one round is on
the network, another is copied between host and device. The memory is allocated once, by `reserve`
or when a device is used for the first time, and never grows (design: device-memory).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvpool.client.buffers import DeviceBlock, HostRows
from kvpool.client.device_arena import Arena, until
from kvpool.device.lane import Lane, Move, pin
from kvpool.device.thread import reached
from kvpool.errors import Closed, DeadlineExceeded, TooLarge
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


#: What says how much that is.
_SETTING: Final = "client.device_staging"
#: Pinned memory that was taken before the client that is going to use it, by its size.
_reserved: dict[int, torch.Tensor] = {}


def reserve(capacity: int, device: torch.device) -> None:
    """Pin memory for the next client that has so much. Raises ConfigError. Called again, this does
    nothing until a client has it."""
    if capacity not in _reserved:
        _reserved[capacity] = pin(capacity, device, _SETTING)


class StagingSlot(NamedTuple):
    """Where in pinned memory a block is while it passes through."""

    number: int
    block: DeviceBlock
    start: int


class _Lanes(NamedTuple):
    """Of one device."""

    to_host: Lane
    to_device: Lane


class Staging:
    """The pinned memory of one client, `capacity` bytes, and the lanes from and to it.

    A round first allocates its slots, then fills them, then empties them, and frees them however
    it ends. Two rounds of a call run at a time.
    """

    def __init__(self, capacity: int, counters: Counter[str]) -> None:
        self._capacity = capacity
        self._counters = counters
        self._pinned: torch.Tensor | None = None
        self.arena = Arena(capacity)
        self._pinning = threading.Lock()
        self._lanes: dict[torch.device, _Lanes] = {}
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
        """Calls that have more to copy end with Closed. Waits for the copies that have begun."""
        self._closed = True
        self._pinned = None
        for lane in itertools.chain(*self._lanes.values()):
            lane.close()

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
        async with until(deadline):
            for device in {blocks[number].device for number in numbers}:
                await self._lanes_of(device).to_device.prepared()
        size = sum(blocks[number].size for number in numbers)
        async with self.arena.allocate(size, deadline) as at:
            slots = []
            for number in numbers:
                slots.append(StagingSlot(number, blocks[number], at))
                at += blocks[number].size
            yield slots

    def _rows(self, slots: Iterable[StagingSlot]) -> HostRows:
        memory = self._memory().numpy()
        return {s.number: (memory[s.start : s.start + s.block.size].data,) for s in slots}

    def _memory(self) -> torch.Tensor:
        if self._pinned is None:
            raise Closed("the pool is closed")
        return self._pinned

    def _lanes_of(self, device: torch.device) -> _Lanes:
        """Raises Closed, ConfigError, and DeviceFailed."""
        if self._closed:
            raise Closed("the pool is closed")
        if device not in self._lanes:
            prepare = functools.partial(self._pin, device)
            self._lanes[device] = _Lanes(Lane(device, prepare), Lane(device, prepare))
        return self._lanes[device]

    def _pin(self, device: torch.device) -> None:
        """In a thread: it takes as long as touching every page."""
        with self._pinning:
            if self._pinned is None:
                self._pinned = _reserved.pop(self._capacity, None)
            if self._pinned is None:
                self._pinned = pin(self._capacity, device, _SETTING)
            if self._closed:
                self._pinned = None

    async def _transfer(
        self, moves: Sequence[tuple[StagingSlot, int]], deadline: float, *, to_host: bool
    ) -> None:
        """Copy so many bytes of each slot. Raises DeadlineExceeded, and Unavailable for CUDA."""
        memory = self._memory()
        by_device: dict[torch.device, list[Move]] = {}
        for slot, size in moves:
            place = memory[slot.start : slot.start + size]
            by_device.setdefault(slot.block.device, []).append((slot.block.rows, place))
        async with until(deadline):
            for device, of_device in by_device.items():
                lanes = self._lanes_of(device)
                lane = lanes.to_host if to_host else lanes.to_device
                await lane.copy(of_device, to_host=to_host)
                count = sum(len(place) for _, place in of_device)
                self._counters[f"staged_{'write' if to_host else 'read'}_bytes"] += count


async def wait_for_stream(blocks: Iterable[DeviceBlock], deadline: float) -> None:
    """Wait until the device has reached the blocks' events. Raises DeadlineExceeded.

    Raises Unavailable when the work before them failed.
    """
    async with until(deadline):
        await reached({event for block in blocks for event in block.ready_events})


async def _run_two(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it twice at the same time, until both have ended."""
    async with task_group() as group:
        for _ in range(_ROUNDS_AT_ONCE):
            group.create_task(work())
