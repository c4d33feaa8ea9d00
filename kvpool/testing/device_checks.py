"""What a channel does that receives into memory on a device (complete, in place, and unverified),
and that sends from there.

The memory here is an array of the host in the place of a device's: what a driver does is not part
of the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.checksum import block_seeds, checksum
from kvpool.errors import DeadlineExceeded, Unavailable
from kvpool.protocols import (
    Channel,
    DeviceReadBlock,
    DeviceToken,
    DeviceWriteBlock,
    ReadOptions,
    WriteOptions,
)
from kvpool.protocols.device_transport import (
    DeviceArrival,
    ReachesDevices,
    SupportsDeviceRead,
    SupportsDeviceWrite,
)
from kvpool.testing.harness import (
    NAMESPACE,
    NotDeclared,
    Stage,
    TransportCheck,
    blocks,
    content,
    describe,
    digest,
)
from kvpool.types import ROOT, ReadStatus, WriteStatus

_FILL = 0xA5
_REST = 333


@TransportCheck
async def what_lacks_nothing_reaches_devices(stage: Stage) -> None:
    """Every channel of such a transport reads to them."""
    channel = await stage.connect()
    saying = [
        one for one in (stage.transport, stage.client_transport) if isinstance(one, ReachesDevices)
    ]
    if not saying:
        raise NotDeclared("it does not say what it lacks for devices: `device_lack`")
    for transport in saying:
        fine = bool(transport.device_lack) or isinstance(channel, SupportsDeviceRead)
        stage.expect(fine, "a channel that reads to devices: nothing is lacking", repr(channel))


@TransportCheck
async def blocks_arrive_on_a_device(stage: Stage) -> None:
    """Of every size, alone and together, with the checksums that they were written with; the
    memory behind them is untouched."""
    channel = await stage.connect()
    reader = _reader(channel)
    sizes = (1, 240, 241, 4095, 4097, 65_537, 300_001, 1 << 20, (3 << 20) + 5)
    data = {digest(size): content(digest(size), size) for size in sizes}
    await stage.stored(channel, data)
    for batch in (list(data), *([key] for key in data)):
        memory = {key: _memory(len(data[key]) + _REST) for key in batch}
        arrivals = await _read(stage, reader, memory)
        for key, arrival in zip(batch, arrivals, strict=True):
            _expect_block(stage, key, data[key], memory[key], arrival)


@TransportCheck
async def misses_leave_a_device_alone(stage: Stage) -> None:
    """Each status where its block was asked for; memory that is too small is one of them."""
    channel = await stage.connect()
    reader = _reader(channel)
    data = blocks("device", 3, 200_000)
    first, second, third = data
    await stage.stored(channel, data)
    never = digest("never on a device")
    sizes = {never: 200_000, third: 200_000, first: 199_999, second: 200_000}
    memory = {key: _memory(size) for key, size in sizes.items()}
    arrivals = await _read(stage, reader, memory)
    statuses = [
        ReadStatus.NEVER_WRITTEN,
        ReadStatus.HIT,
        ReadStatus.BUFFER_TOO_SMALL,
        ReadStatus.HIT,
    ]
    stage.expect([a.status for a in arrivals] == statuses, f"{statuses}", describe(arrivals))
    for key in (never, first):
        stage.expect(bool((memory[key] == _FILL).all()), "the memory of a miss to be untouched")
    for key, arrival in ((third, arrivals[1]), (second, arrivals[3])):
        _expect_block(stage, key, data[key], memory[key], arrival)


@TransportCheck
async def damaged_blocks_arrive_with_their_checksum(stage: Stage) -> None:
    """Nobody compares it here: the caller finds the difference, on the device."""
    channel = await stage.connect()
    reader = _reader(channel)
    for size in (300, 300_000):
        (key,) = data = blocks(f"damaged {size}", 1, size)
        await stage.stored(channel, data)
        stage.memory_of(key)[size // 2] ^= 1
        memory = {key: _memory(size)}
        (arrival,) = await _read(stage, reader, memory)
        (seed,) = block_seeds(NAMESPACE, 0, [key])
        arrived = arrival.data if arrival.data is not None else memory[key].data
        stage.expect(arrival.checksum == checksum(data[key], seed), "the checksum of the writer")
        stage.expect(checksum(arrived, seed) != arrival.checksum, "the bytes as they are stored")


@TransportCheck
async def a_device_read_that_ends_early_writes_nothing_more(stage: Stage) -> None:
    """Cancelled after any number of the loop's turns, late, or with its channel closed."""
    channel = await stage.connect()
    data = blocks("early", 4, 1 << 20)
    await stage.stored(channel, data)
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        memory = {key: _memory(1 << 20) for key in data}
        reading = asyncio.ensure_future(_read(stage, _reader(channel), memory))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await _expect_still(stage, memory, f"a call that was cancelled after {turns} turns")
    memory = {key: _memory(1 << 20) for key in data}
    late = _reader(channel).read_to_device(
        ReadOptions(NAMESPACE, 0), _blocks(memory), deadline=stage.within(0.0)
    )
    await stage.raises(DeadlineExceeded, late, "a read without time")
    await _expect_still(stage, memory, "a call that was late")
    reading = asyncio.ensure_future(_read(stage, _reader(channel), memory))
    await asyncio.sleep(0)
    channel.abort()
    with contextlib.suppress(Unavailable):
        await reading
    await _expect_still(stage, memory, "`abort`")


@TransportCheck
async def blocks_leave_a_device(stage: Stage) -> None:
    """Of every size, alone and together, under the checksums that the caller has computed; what
    the server has already is not sent again."""
    channel = await stage.connect()
    writer = _writer(channel)
    sizes = (1, 240, 241, 4095, 65_537, 131_072, 131_073, 300_001, 1 << 20, (3 << 20) + 5)
    data = {digest(size): content(digest(size), size) for size in sizes}
    for batch in ([digest(1 << 20)], list(data), *([digest(-size)] for size in sizes)):
        memory = {key: _filled(data.get(key) or content(key, 70_000)) for key in batch}
        statuses = await _write(stage, writer, memory)
        for key, status in zip(batch, statuses, strict=True):
            known = len(batch) > 1 and key == digest(1 << 20)
            wanted = WriteStatus.ALREADY_STORED if known else WriteStatus.STORED
            stage.expect(status is wanted, f"{wanted}", describe(status))
        for key, array in memory.items():
            (result,) = await stage.read(channel, [key], [bytearray(len(array))])
            stage.expect(result.status is ReadStatus.HIT, "its checksum to be right", f"{result}")


@TransportCheck
async def a_device_write_that_ends_early_reads_nothing_more(stage: Stage) -> None:
    """Cancelled after any number of the loop's turns, or late: what the server has then is right,
    or nothing, though the memory is used again at once."""
    channel = await stage.connect()
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        data = blocks(f"early {turns}", 4, 1 << 20)
        memory = {key: _filled(value) for key, value in data.items()}
        writing = asyncio.ensure_future(_write(stage, _writer(channel), memory))
        for _ in range(turns):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        for array in memory.values():
            array.fill(_FILL)
        for key, value in data.items():
            buffer = bytearray(len(value))
            (result,) = await stage.read(channel, [key], [buffer])
            right = result.status.hit and bytes(buffer) == value
            gone = result.status is ReadStatus.NEVER_WRITTEN
            stage.expect(right or gone, "the block, or none", describe(result))
    data = blocks("late", 1, 1 << 20)
    late = _writer(channel).write_from_device(
        WriteOptions(NAMESPACE, 0, visible=True),
        _sources({key: _filled(value) for key, value in data.items()}),
        _token(),
        _to_host,
        deadline=stage.within(0.0),
    )
    await stage.raises(DeadlineExceeded, late, "a write without time")


def _reader(channel: Channel) -> SupportsDeviceRead:
    if not isinstance(channel, SupportsDeviceRead):
        raise NotDeclared("over this channel nothing is received into memory on a device")
    return channel


def _writer(channel: Channel) -> SupportsDeviceWrite:
    if not isinstance(channel, SupportsDeviceWrite):
        raise NotDeclared("over this channel nothing is sent from memory on a device")
    return channel


def _filled(value: bytes | bytearray) -> NDArray[np.uint8]:
    return np.frombuffer(bytes(value), np.uint8).copy()


def _token() -> DeviceToken:
    content = b"token 42"
    return DeviceToken("an array", _filled(content), content)


async def _to_host(blocks: Sequence[DeviceWriteBlock]) -> list[memoryview]:
    return [np.array(block.memory, np.uint8).data for block in blocks]


def _sources(memory: Mapping[bytes, NDArray[np.uint8]]) -> list[DeviceWriteBlock]:
    seeds = block_seeds(NAMESPACE, 0, list(memory))
    return [
        DeviceWriteBlock(key, ROOT, array, checksum(array.data, seed))
        for (key, array), seed in zip(memory.items(), seeds, strict=True)
    ]


async def _write(
    stage: Stage, writer: SupportsDeviceWrite, memory: Mapping[bytes, NDArray[np.uint8]]
) -> Sequence[WriteStatus]:
    return await writer.write_from_device(
        WriteOptions(NAMESPACE, 0, visible=True),
        _sources(memory),
        _token(),
        _to_host,
        deadline=stage.within(),
    )


def _memory(size: int) -> NDArray[np.uint8]:
    return np.full(size, _FILL, np.uint8)


def _blocks(memory: Mapping[bytes, NDArray[np.uint8]]) -> list[DeviceReadBlock]:
    return [DeviceReadBlock(key, array) for key, array in memory.items()]


async def _read(
    stage: Stage, reader: SupportsDeviceRead, memory: Mapping[bytes, NDArray[np.uint8]]
) -> Sequence[DeviceArrival]:
    return await reader.read_to_device(
        ReadOptions(NAMESPACE, 0), _blocks(memory), deadline=stage.within()
    )


def _expect_block(
    stage: Stage, key: bytes, value: bytes, memory: NDArray[np.uint8], arrival: DeviceArrival
) -> None:
    (seed,) = block_seeds(NAMESPACE, 0, [key])
    wanted = (ReadStatus.HIT, len(value), checksum(value, seed))
    stage.expect(arrival[:3] == wanted, f"{wanted}", describe(arrival))
    filled = 0 if arrival.data is not None else len(value)
    bytes_there = bytes(arrival.data) if arrival.data is not None else memory[:filled].tobytes()
    stage.expect(bytes_there == value, f"the {len(value)} bytes that were written")
    stage.expect(bool((memory[filled:] == _FILL).all()), "the rest of the memory to be untouched")


async def _expect_still(
    stage: Stage, memory: Mapping[bytes, NDArray[np.uint8]], after: str
) -> None:
    seen = [array.copy() for array in memory.values()]
    await asyncio.sleep(0.01)
    same = all(map(np.array_equal, seen, memory.values()))
    stage.expect(same, f"no byte to be written after {after}")
