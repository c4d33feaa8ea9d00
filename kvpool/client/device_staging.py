"""Blocks whose memory lies on a CUDA device: they cross in pinned memory of this client.

A block that is read lands there, is verified there by its transport as ever, and only then goes to
the device: bytes that nobody has seen cannot be told from wrong ones. A block that is written is
copied there first. Batches go in rounds: while one is on the network, another one crosses between
host and device. The memory is taken when a device is used for the first time, and never grows.
"""

from __future__ import annotations

import asyncio
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

from kvpool.client.buffers import OnDevice, Rows
from kvpool.device_copy import Bytes, DeviceCopier, first_line, pinned
from kvpool.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    TooLarge,
    Unavailable,
)
from kvpool.types import ReadResult, ReadStatus, WriteStatus

if TYPE_CHECKING:
    import torch

#: Bytes in a round. Large enough that a question to a server costs little beside it, small enough
#: that the first round has come when the last one is asked for.
ROUND: Final = 16 << 20
#: Rounds of a call that are under way: one on the network, one between host and device.
_AT_ONCE: Final = 2
#: How often it is asked whether a device has come to where its caller is.
_MARK_S: Final = 0.0005


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
