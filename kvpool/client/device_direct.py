"""Blocks that a transport receives into the memory of a CUDA device, and that are verified there.

No byte of such a block is in host memory, so the device computes its checksum
(`kvpool/device/checksum.py`) before the block counts as read. A block in one row is received into
that row. One in several rows, as engines have it, is received into memory of this client on the
same device, verified there, and then scattered to its rows, all blocks of a round in one launch.
So wrong bytes never reach the rows of such a block, and in a block of one row they are a miss, as
on the host (design: device-memory).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kvpool.checksum import block_seeds
from kvpool.client.buffers import DeviceBlock
from kvpool.client.device_arena import Arena, until
from kvpool.client.device_staging import reserve, wait_for_stream
from kvpool.config import DIRECT, ClientConfig
from kvpool.device.checksum import copy_rows, device_checksums, unsigned, uses_kernels
from kvpool.device.lane import beside
from kvpool.device.thread import DeviceFailed, DeviceThread
from kvpool.errors import Closed, DeadlineExceeded, TooLarge
from kvpool.protocols import DeviceReadBlock, DeviceToken, DeviceWriteBlock, ReadOptions
from kvpool.protocols.device_transport import DeviceArrival
from kvpool.types import DIRECT_PIECES_MAX, ReadResult, ReadStatus

if TYPE_CHECKING:
    import torch

#: Bytes of a device that one client uses for blocks that it gathers, and as many for those that it
#: scatters. They are taken with the first such block, and an engine has no memory to spare.
SCRATCH: Final = DIRECT_PIECES_MAX
#: Rounds that it is for: one on the network, one that is hashed, one that is scattered. A block
#: that is larger than its share is a round.
_ROUNDS: Final = 3
#: Bytes that are hashed at a time without kernels.
_STEP: Final = 1 << 20
#: Bytes of a row that kernels are compiled with: more than a step of the checksum.
_COMPILED_FOR: Final = 4096
#: Where a block begins there: so that kernels may load whole words.
_ALIGNMENT: Final = 256
_TOKEN_SIZE: Final = 8

#: Contiguous memory on a device for blocks, by their positions.
DeviceTargets: TypeAlias = "Mapping[int, torch.Tensor]"
Fetch: TypeAlias = Callable[[DeviceTargets], Awaitable[Mapping[int, ReadResult]]]


#: Scratch memory that was taken before the client that is going to use it.
_reserved: dict[torch.device, list[torch.Tensor]] = {}


def reserve_device_memory(device: torch.device, config: ClientConfig | None = None) -> None:
    """At the start of a program, take what the next client with this `config` needs for a device,
    so that no call waits for it. Called again, this does nothing until a client has it.

    For `staged` and `auto` pin `device_staging` bytes of the host. For `direct`, as without a
    config, take twice the `DIRECT_PIECES_MAX` bytes of the device, before the program measures what
    is left of it, and compile its kernels: that takes seconds. Raises ConfigError and RuntimeError.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # blocks say which one they lie on
        device = torch.device("cuda", torch.cuda.current_device())
    if config is not None and config.device_path != DIRECT:
        reserve(config.device_staging, device)
    elif not _reserved.get(device):
        _reserved[device] = [_allocate(device), _allocate(device)]
        _compile(device)


class _Scratch(NamedTuple):
    """Memory on one device, and what rounds have of it."""

    memory: torch.Tensor
    arena: Arena


class Devices:
    """What reads of one client, or its writes, have of devices: a thread for each, memory, and a
    token that writes send first.

    Nothing is taken of a device before a block needs it. A request waits for a read, and nobody for
    a write: neither is behind the other, and a write keeps its memory until a server has all of it.
    """

    def __init__(self) -> None:
        self._threads: dict[torch.device, DeviceThread] = {}
        self._scratch: dict[torch.device, _Scratch] = {}
        self._tokens: dict[torch.device, DeviceToken] = {}
        self._preparing = asyncio.Lock()
        self._closed = False

    @asynccontextmanager
    async def scratch(
        self, device: torch.device, size: int, deadline: float
    ) -> AsyncIterator[torch.Tensor]:
        """So much of a device's scratch memory, for one round: while it is verified and copied,
        another one is on the network. Raises DeadlineExceeded."""
        thread = self.thread(device)
        async with until(deadline), self._preparing:
            if device not in self._scratch:
                if spare := _reserved.get(device):
                    memory = spare.pop()
                else:
                    memory = await thread.run(partial(_allocate, device), _same)
                self._scratch[device] = _Scratch(memory, Arena(len(memory)))
        scratch = self._scratch[device]
        async with scratch.arena.allocate(size, deadline) as start:
            yield scratch.memory[start : start + size]

    async def token(self, device: torch.device, deadline: float) -> DeviceToken:
        """Some bytes that lie on that device. Raises DeadlineExceeded, and Unavailable."""
        thread = self.thread(device)
        async with until(deadline), self._preparing:
            if device not in self._tokens:
                content = os.urandom(_TOKEN_SIZE)
                memory = await thread.run(partial(_upload, content, device), _same)
                self._tokens[device] = DeviceToken(str(device), memory, content)
        return self._tokens[device]

    def thread(self, device: torch.device) -> DeviceThread:
        """The thread for work on that device. Raises Closed, and Unavailable for the device."""
        if self._closed:
            raise Closed("the pool is closed")
        if device not in self._threads:
            self._threads[device] = DeviceThread(device, partial(_compile, device))
        return self._threads[device]

    def is_ready(self, block: DeviceBlock) -> bool:
        """Whether the block's device verifies it sooner than the host would: with Triton's kernels,
        once they are compiled. Raises Closed."""
        if not is_fast(block):
            return False
        try:
            return self.thread(block.device).is_prepared()
        except DeviceFailed:  # the call meets the same, and says so
            return True

    def close(self) -> None:
        """Later calls raise Closed. Waits for the work that has begun."""
        self._closed = True
        for thread in self._threads.values():
            thread.close()
        self._scratch.clear()
        self._tokens.clear()


class DirectReads:
    """Direct reads of one client."""

    def __init__(self, devices: Devices, counters: Counter[str]) -> None:
        self._devices = devices
        self.is_ready = devices.is_ready
        self._counters = counters

    async def read(
        self, blocks: Mapping[int, DeviceBlock], fetch: Fetch, deadline: float
    ) -> Mapping[int, ReadResult]:
        """Have `fetch` fill memory of the devices, verified, and scatter what lies in rows.

        When it returns a hit, work on any stream of the device sees the block. However it ends,
        nothing writes to the blocks' memory any more.
        """
        results = dict.fromkeys(blocks, ReadResult(ReadStatus.DEADLINE))
        try:
            # Before the first byte: its owner's work may still use that memory.
            await wait_for_stream(blocks.values(), deadline)
        except DeadlineExceeded:
            return results
        whole = {i: block.rows[0] for i, block in blocks.items() if _is_whole(block)}
        if whole:
            results.update(await fetch(whole))
        for one in rounds({i: block for i, block in blocks.items() if i not in whole}):
            device = one.device
            try:
                async with self._devices.scratch(device, one.room, deadline) as memory:
                    places = places_in(memory, one.in_rows)
                    found = await fetch(places)
                    await self._scatter(device, blocks, places, found, deadline)
                    results.update(found)
            except DeadlineExceeded:
                continue
        for result in results.values():
            if result.status is ReadStatus.HIT:
                self._counters["direct_read_bytes"] += result.size
        return results

    async def verify(
        self,
        options: ReadOptions,
        blocks: Sequence[DeviceReadBlock],
        arrivals: Sequence[DeviceArrival],
        deadline: float,
    ) -> list[ReadResult]:
        """Compare what has arrived with its checksums, on the device: one launch for each device.

        A hit becomes CORRUPT where they differ. Raises DeadlineExceeded, and Unavailable when a
        device fails.
        """
        results = [ReadResult(arrival.status, arrival.size) for arrival in arrivals]
        by_device: dict[torch.device, list[int]] = {}
        for position, arrival in enumerate(arrivals):
            if arrival.status is ReadStatus.HIT:
                by_device.setdefault(tensor_of(blocks[position]).device, []).append(position)
        for device, positions in by_device.items():
            digests = [blocks[i].digest for i in positions]
            seeds = block_seeds(options.namespace, options.part, digests)
            pairs = [
                (tensor_of(blocks[i])[: arrivals[i].size], arrivals[i].data) for i in positions
            ]
            thread = self._devices.thread(device)
            async with until(deadline):
                if options.verify:
                    got = await thread.run(partial(_hash, pairs, seeds), unsigned)
                else:
                    await thread.run(partial(_land, pairs), _nothing)
                    got = [arrivals[i].checksum for i in positions]
            for position, checksum in zip(positions, got, strict=True):
                if checksum != arrivals[position].checksum:
                    results[position] = ReadResult(ReadStatus.CORRUPT)
        return results

    async def _scatter(
        self,
        device: torch.device,
        blocks: Mapping[int, DeviceBlock],
        places: DeviceTargets,
        found: Mapping[int, ReadResult],
        deadline: float,
    ) -> None:
        """Copy each hit from its place to its rows; when it returns the device has done it."""
        hits = {n: one.size for n, one in found.items() if one.status is ReadStatus.HIT}

        def work() -> None:  # in the thread: an engine has thousands of rows in a round
            pairs = [
                pair
                for number, size in hits.items()
                for pair in beside(blocks[number].rows, places[number][:size])
            ]
            copy_rows([place for _, place in pairs], [row for row, _ in pairs])

        if hits:
            thread = self._devices.thread(device)
            async with until(deadline):
                await thread.run(work, _nothing)


def check_sizes(blocks: Mapping[int, DeviceBlock], call: str) -> None:
    """For a direct `call` (a read, a write): raises TooLarge for a block that does not fit into the
    scratch memory."""
    for number, block in blocks.items():
        if not fits(block):
            raise TooLarge(
                f"buffer {number} has {block.size} bytes in pieces on a device; a "
                f"direct {call} takes up to {SCRATCH}: set client.device_path to auto or staged"
            )


def is_fast(block: DeviceBlock) -> bool:
    """Whether kernels run on the block's device."""
    return uses_kernels(block.device)


def _is_whole(block: DeviceBlock) -> bool:
    """Whether its bytes lie one after the other."""
    return len(block.rows) == 1 and block.rows[0].ndim == 1


def fits(block: DeviceBlock) -> bool:
    """Whether a block can be read or written directly."""
    return _is_whole(block) or block.size <= SCRATCH


class Round(NamedTuple):
    """Consecutive blocks on one device; those in rows leave room for other rounds."""

    device: torch.device
    numbers: list[int]
    in_rows: dict[int, int]  # their sizes

    @property
    def room(self) -> int:
        """Bytes of scratch memory that they take."""
        return sum(map(room, self.in_rows.values()))


def rounds(blocks: Mapping[int, DeviceBlock]) -> Iterator[Round]:
    """All blocks, in their order: parents before children."""
    current: Round | None = None
    held, limit = 0, SCRATCH // _ROUNDS
    for number, block in blocks.items():
        size = 0 if _is_whole(block) else room(block.size)
        full = held > 0 and held + size > limit
        if current is not None and (current.device != block.device or full):
            yield current
            current = None
        if current is None:
            current, held = Round(block.device, [], {}), 0
        current.numbers.append(number)
        if size:
            current.in_rows[number] = block.size
            held += size
    if current is not None:
        yield current


def room(size: int) -> int:
    """Bytes of scratch memory that a block takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def places_in(memory: torch.Tensor, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """A place for each block, one behind the other; as many bytes as `room` counts."""
    places, start = {}, 0
    for number, size in sizes.items():
        places[number] = memory[start : start + size]
        start += room(size)
    return places


def _hash(
    pairs: Sequence[tuple[torch.Tensor, memoryview | None]], seeds: Sequence[int]
) -> torch.Tensor:
    """The checksums of what has arrived."""
    _land(pairs)
    return hash_rows([row for row, _ in pairs], seeds)


def hash_rows(rows: Sequence[torch.Tensor], seeds: Sequence[int]) -> torch.Tensor:
    """The checksums of blocks of one row: in one launch, or in steps of a MiB or more where torch
    does it alone, which takes some times the memory that it hashes."""
    import torch

    blocks = [[row] for row in rows]
    if uses_kernels(rows[0].device):
        return device_checksums(blocks, seeds)
    found, first, held = [], 0, 0
    for number, row in enumerate(rows):
        held += len(row)
        if held >= _STEP or number == len(rows) - 1:
            part = slice(first, number + 1)
            found.append(device_checksums(blocks[part], seeds[part]))
            first, held = number + 1, 0
    return torch.cat(found)


def _land(pairs: Sequence[tuple[torch.Tensor, memoryview | None]]) -> None:
    """Bring the bytes that came to the host, few as they are, to the device."""
    import torch

    for row, data in pairs:
        if data is not None:
            row.copy_(torch.frombuffer(data, dtype=torch.uint8))


def _allocate(device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(SCRATCH, dtype=torch.uint8, device=device)


def _compile(device: torch.device) -> None:
    """Use each kernel once, with rows of whole words and with others: so they are compiled."""
    import torch

    memory = torch.zeros(4 * _COMPILED_FOR, dtype=torch.uint8, device=device)
    for start in (0, 1):
        first = memory[start : start + _COMPILED_FOR]
        second = memory[start + 2 * _COMPILED_FOR : start + 3 * _COMPILED_FOR]
        copy_rows([first], [second])
        hash_rows([second], [0])


def _upload(content: bytes, device: torch.device) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def tensor_of(block: DeviceReadBlock | DeviceWriteBlock) -> torch.Tensor:
    tensor: torch.Tensor = block.memory  # type: ignore[assignment]
    return tensor


def _same(memory: torch.Tensor) -> torch.Tensor:
    return memory


def _nothing(_: None) -> None:
    pass
