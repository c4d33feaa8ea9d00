"""What a tier must do, one check for each promise of `kvpool.protocols`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np

from kvpool.errors import Closed, KvpoolError, UsageError
from kvpool.protocols import Addressable, DeviceAddressable, Mappable, SupportsStatusText, Tier
from kvpool.testing.harness import NotDeclared, Scene, blank, content, describe, digest, named

CAPACITY: Final = 1 << 20
#: Loop steps after which a call is cancelled.
STEPS: Final = (*range(10), 15, 25, 50, 100)

#: Bytes of a tier whose memory is looked for when it is closed: more than an allocator keeps.
_LARGE: Final = 40 << 20
#: What DLPack calls the memory of this process.
_HOST: Final = 1

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

MakeTier = Callable[[int], Tier]


class TierCheck:
    """One check of a tier. Its name is that of the function."""

    def __init__(self, body: Callable[[Scene, MakeTier], Awaitable[None]]) -> None:
        functools.update_wrapper(self, body)
        self.name = getattr(body, "__name__", "")
        self._body = body

    async def __call__(self, make: MakeTier) -> None:
        """See `check_tier` for `make`."""
        async with named(self.name):
            await self._body(Scene(self.name), make)


@asynccontextmanager
async def opened(make: MakeTier, capacity: int = CAPACITY) -> AsyncIterator[Tier]:
    """A tier, closed at the end."""
    tier = make(capacity)
    try:
        yield tier
    finally:
        tier.close()


async def read(tier: Tier, offset: int, size: int) -> bytearray:
    """What lies there."""
    buffer = blank(size)
    await tier.read_into(offset, memoryview(buffer))
    return buffer


def addressable(tier: Tier) -> Addressable:
    """Raises NotDeclared when its memory cannot be looked at in place."""
    if not isinstance(tier, Addressable):
        raise NotDeclared(f"tier {tier.name!r} cannot be looked at in place")
    return tier


def mappable(tier: Tier) -> Mappable:
    """Raises NotDeclared when other processes cannot map it."""
    if not isinstance(tier, Mappable):
        raise NotDeclared(f"tier {tier.name!r} cannot be mapped")
    return tier


# --- bytes -------------------------------------------------------------------------------


@TierCheck
async def capacity_is_what_was_asked_for(scene: Scene, make: MakeTier) -> None:
    """Never more, and whole aligned extents; but one extent at least."""
    for asked in (CAPACITY, CAPACITY + 1, CAPACITY - 1, 1):
        async with opened(make, asked) as tier:
            alignment, capacity = tier.alignment, tier.capacity
            power = alignment > 0 and not alignment & (alignment - 1)
            scene.expect(power, "an alignment that is a power of two", describe(alignment))
            scene.expect(capacity % alignment == 0, "whole extents", f"{capacity} % {alignment}")
            most = max(asked, alignment)
            scene.expect(0 < capacity <= most, f"a capacity of at most {most}", describe(capacity))
            scene.expect(asked - capacity < alignment, f"nearly {asked} bytes", describe(capacity))
            scene.expect(bool(tier.name), "a name")
            before = capacity
            await tier.write_from(0, memoryview(bytes(alignment)))
            scene.expect(tier.capacity == before, "a fixed capacity", describe(tier.capacity))


@TierCheck
async def what_was_written_is_read(scene: Scene, make: MakeTier) -> None:
    """At both ends and around every edge, of any size; the caller's buffer stays as it is."""
    async with opened(make) as tier:
        step = tier.alignment
        for offset in (0, step, tier.capacity // 2 // step * step):
            for size in (1, 7, step - 1, step, step + 1, 5 * step + 3):
                data = content(digest((offset, size)), max(size, 1))
                source = bytearray(data)
                await tier.write_from(offset, memoryview(source))
                scene.expect(source == data, "`write_from` to leave its buffer alone")
                got = await read(tier, offset, len(data))
                scene.expect(got == data, f"the {size} bytes that were written at {offset}")
        last = tier.capacity - step
        for size in (1, step):
            await tier.write_from(last, memoryview(bytes([size % 251]) * size))
            got = await read(tier, last, size)
            scene.expect(got == bytes([size % 251]) * size, f"{size} bytes in the last extent")


@TierCheck
async def all_of_its_capacity_holds_bytes(scene: Scene, make: MakeTier) -> None:
    """In one piece and in many, none over another."""
    async with opened(make) as tier:
        whole = content(digest("whole"), tier.capacity)
        await tier.write_from(0, memoryview(whole))
        scene.expect(await read(tier, 0, tier.capacity) == whole, "all bytes, in one piece")
        step = max(tier.capacity // 256 // tier.alignment, 1) * tier.alignment
        offsets = range(0, tier.capacity - step + 1, step)
        await asyncio.gather(
            *(tier.write_from(o, memoryview(content(digest(o), step))) for o in offsets)
        )
        pieces = await asyncio.gather(*(read(tier, o, step) for o in offsets))
        wrong = [o for o, p in zip(offsets, pieces, strict=True) if p != content(digest(o), step)]
        what = f"{len(offsets)} pieces, written and read side by side"
        scene.expect(not wrong, what, f"wrong at {wrong[:8]}")


@TierCheck
async def two_tiers_share_nothing(scene: Scene, make: MakeTier) -> None:
    """A process may have several, as `kvpool dev` has: each has its own bytes, and its own end."""
    async with opened(make) as one:
        if one.survives_restart:
            raise NotDeclared(f"tier {one.name!r} is the same storage each time it is opened")
        size = one.capacity
        mine, theirs = content(digest("mine"), size), content(digest("theirs"), size)
        await one.write_from(0, memoryview(mine))
        async with opened(make) as other:
            before = await read(other, 0, size)
            scene.expect(before != mine, "a new tier without another one's bytes")
            await other.write_from(0, memoryview(theirs))
            scene.expect(await read(one, 0, size) == mine, "the bytes of the first tier")
            scene.expect(await read(other, 0, size) == theirs, "the bytes of the second tier")
        scene.expect(await read(one, 0, size) == mine, "the first, when the second is closed")


@TierCheck
async def neighbours_are_left_alone(scene: Scene, make: MakeTier) -> None:
    """A write changes its own extent only, a read nothing beyond its buffer."""
    async with opened(make) as tier:
        step = tier.alignment
        before = content(digest("before"), 4 * step)
        await tier.write_from(0, memoryview(before))
        await tier.write_from(step, memoryview(bytes(step + 1)))
        after = await read(tier, 0, 4 * step)
        same = after[:step] == before[:step] and after[3 * step :] == before[3 * step :]
        scene.expect(same, "the extents before and behind to be as they were")
        scene.expect(after[step : 2 * step + 1] == bytes(step + 1), "what was written")
        buffer = blank(100)
        await tier.read_into(0, memoryview(buffer)[10:90])
        edges = buffer[:10] + buffer[90:]
        scene.expect(edges == blank(20), "a read to stay inside its buffer")


@TierCheck
async def nothing_lies_outside(scene: Scene, make: MakeTier) -> None:
    """An offset or size beyond its memory is a UsageError, and changes nothing."""
    async with opened(make) as tier:
        end = tier.capacity
        for offset, size in ((end, 1), (end - 1, 2), (-1, 1), (0, end + 1), (end + 4096, 10)):
            outside = f"{size} bytes at {offset} of {end}"
            writing = tier.write_from(offset, memoryview(bytes(size)))
            await scene.raises(UsageError, writing, f"writing {outside}")
            await scene.raises(UsageError, read(tier, offset, size), f"reading {outside}")
            if isinstance(tier, Addressable):
                viewing = asyncio.to_thread(tier.view, offset, size)
                await scene.raises(UsageError, viewing, f"a view of {outside}")
        scene.expect(tier.capacity == end, "its capacity to be the same", describe(tier.capacity))


@TierCheck
async def a_cancelled_call_stops(scene: Scene, make: MakeTier) -> None:
    """When it has ended, nothing writes into the caller's buffer or into the memory any more."""
    async with opened(make) as tier:
        size = tier.capacity // 2 // tier.alignment * tier.alignment
        for after in STEPS:
            buffer = blank(size)
            await _cut_off(scene, tier.read_into(0, memoryview(buffer)), after)
            buffer[:] = bytes(size)
            writing = tier.write_from(0, memoryview(bytes([after + 1]) * size))
            await _cut_off(scene, writing, after)
            found = await read(tier, 0, size)
            await asyncio.sleep(0.002)
            scene.expect(buffer == bytes(size), "no byte in the buffer after the call has ended")
            now = await read(tier, 0, size)
            scene.expect(now == found, "no byte of a write after it was cancelled")


async def _cut_off(scene: Scene, call: Coroutine[Any, Any, None], after: int) -> None:
    task = asyncio.ensure_future(call)
    for _ in range(after):
        await asyncio.sleep(0)
    cancelled = task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
        scene.expect(not cancelled, "CancelledError from a cancelled call", "it went on")


# --- its end ---------------------------------------------------------------------------------


@TierCheck
async def closing_twice_is_closing_once(scene: Scene, make: MakeTier) -> None:
    """Every call of a closed tier raises Closed."""
    tier = make(CAPACITY)
    descriptors = len(os.listdir("/proc/self/fd"))
    tier.close()
    tier.close()
    left = len(os.listdir("/proc/self/fd"))
    scene.expect(left <= descriptors, "no new descriptor", f"{descriptors} before, {left} after")
    await scene.raises(Closed, read(tier, 0, 1), "reading a closed tier")
    writing = tier.write_from(0, memoryview(b"x"))
    await scene.raises(Closed, writing, "writing into a closed tier")
    if isinstance(tier, Addressable):
        await scene.raises(Closed, asyncio.to_thread(tier.view, 0, 1), "a view of a closed tier")
    if isinstance(tier, DeviceAddressable):
        viewing = asyncio.to_thread(tier.device_view, 0, 1)
        await scene.raises(Closed, viewing, "a view of a closed tier's device")


@TierCheck
async def closing_ends_running_calls(scene: Scene, make: MakeTier) -> None:
    """Each with its result or one of kvpool's errors; then nothing touches its buffer."""
    for after in STEPS:
        async with opened(make) as tier:
            size = tier.capacity // 2 // tier.alignment * tier.alignment
            buffer, source = blank(size), bytearray(size)
            written = content(b"before", size)
            await tier.write_from(0, memoryview(written))
            calls = [
                asyncio.ensure_future(tier.read_into(0, memoryview(buffer))),
                asyncio.ensure_future(tier.write_from(size, memoryview(source))),
            ]
            for _ in range(after):
                await asyncio.sleep(0)
            tier.close()
            outcomes = await scene.promptly(calls, "when its tier is closed")
            for outcome in outcomes:
                fine = outcome is None or isinstance(outcome, KvpoolError)
                scene.expect(fine, "a result, or an error of kvpool's", describe(outcome))
            whole = outcomes[0] is not None or buffer == written
            scene.expect(whole, "the bytes that were written, from a read that has not failed")
            buffer[:] = blank(size)
            await asyncio.sleep(0.002)
            scene.expect(buffer == blank(size), "no byte in the buffer after the call has ended")


@TierCheck
async def a_closed_tier_keeps_no_memory(scene: Scene, make: MakeTier) -> None:
    """What was written into it is nobody's any more, also while somebody knows the tier."""
    nothing, closed = memoryview(bytes(_LARGE)), []
    for number in range(5):
        async with opened(make, _LARGE) as tier:
            await tier.write_from(0, nothing[: tier.capacity])
        closed.append(tier)
        if number == 1:  # what is allocated once, and kept, is no leak
            before = _resident()
    grown = _resident() - before
    scene.expect(grown < _LARGE, f"three times {_LARGE} bytes to be free", f"{grown} are in use")


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@TierCheck
async def a_closed_tier_keeps_no_descriptor(scene: Scene, make: MakeTier) -> None:
    """However often it is opened."""
    make(CAPACITY).close()  # what is opened once and kept is no leak
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        async with opened(make) as tier:
            await tier.write_from(0, memoryview(b"some bytes"))
    await scene.eventually(
        lambda: len(os.listdir("/proc/self/fd")) <= before,
        "as many descriptors as before",
        lambda: f"there were {before}, there are {len(os.listdir('/proc/self/fd'))}",
    )


@TierCheck
async def what_survives_a_restart_is_there_again(scene: Scene, make: MakeTier) -> None:
    """For tiers that say so: close, make again, and read what was written."""
    async with opened(make) as tier:
        if not tier.survives_restart:
            raise NotDeclared(f"tier {tier.name!r} does not survive a restart")
        whole = content(digest("kept"), tier.capacity)
        await tier.write_from(0, memoryview(whole))
    async with opened(make) as tier:
        scene.expect(
            tier.capacity == len(whole), f"{len(whole)} bytes again", describe(tier.capacity)
        )
        scene.expect(await read(tier, 0, len(whole)) == whole, "the bytes from before the restart")


# --- memory in place ---------------------------------------------------------------------------


@TierCheck
async def a_view_is_the_memory_itself(scene: Scene, make: MakeTier) -> None:
    """What is written through one is seen through the other; views of one place are the same."""
    async with opened(make) as tier:
        view = addressable(tier).view(tier.alignment, 1000)
        scene.expect(len(view) == view.nbytes == 1000, "1000 bytes", describe(view.nbytes))
        scene.expect(not view.readonly, "memory that the server can write into")
        data = content(digest("view"), 1000)
        await tier.write_from(tier.alignment, memoryview(data))
        scene.expect(view == data, "a view to see what `write_from` stores")
        view[100:200] = bytes(100)
        got = await read(tier, tier.alignment, 1000)
        scene.expect(got[100:200] == bytes(100), "`read_into` to see what is written into a view")
        again = addressable(tier).view(tier.alignment, 1000)
        scene.expect(again == view, "two views of one place to be equal")
        again[0] ^= 1
        scene.expect(again[0] == view[0], "two views of one place to be one memory")
        view.release()
        again.release()


@TierCheck
async def a_view_outlives_its_tier(scene: Scene, make: MakeTier) -> None:
    """Views that are still held keep the memory alive when the tier is closed."""
    async with opened(make) as tier:
        view = addressable(tier).view(0, 1000)
        view[:] = bytes([7]) * 1000
        tier.close()
        scene.expect(view == bytes([7]) * 1000, "the bytes to stay until the view is released")
        view.release()


@TierCheck
async def other_processes_map_the_same_memory(scene: Scene, make: MakeTier) -> None:
    """`fd` has `capacity` bytes, and they are the tier's own."""
    async with opened(make) as tier:
        fd = mappable(tier).fd
        scene.expect(mappable(tier).fd == fd, "one descriptor, which is the tier's", "another")
        size = os.fstat(fd).st_size
        scene.expect(size == tier.capacity, f"{tier.capacity} bytes behind `fd`", describe(size))
        with mmap.mmap(fd, tier.capacity) as mapped:
            await tier.write_from(tier.alignment, memoryview(b"from the tier"))
            seen = mapped[tier.alignment : tier.alignment + 13]
            scene.expect(seen == b"from the tier", "a mapping to see what the tier stores")
            mapped[:12] = b"from outside"
            got = await read(tier, 0, 12)
            scene.expect(got == b"from outside", "the tier to see what is written into a mapping")


@TierCheck
async def nobody_can_resize_it(scene: Scene, make: MakeTier) -> None:
    """`fd` is sealed: a peer that could shrink it would kill every process that maps it."""
    async with opened(make) as tier:
        fd = mappable(tier).fd
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        scene.expect(
            seals & _SEALS == _SEALS, "seals against shrinking, growing, more seals", seals
        )
        for size in (0, 2 * tier.capacity):
            await scene.raises(
                PermissionError, asyncio.to_thread(os.ftruncate, fd, size), f"resizing to {size}"
            )


@TierCheck
async def memory_on_a_device_is_shown_in_place(scene: Scene, make: MakeTier) -> None:
    """`device_view` is what `write_from` stores; the token is eight bytes of the same device."""
    async with opened(make) as tier:
        if not isinstance(tier, DeviceAddressable):
            raise NotDeclared(f"tier {tier.name!r} has no memory on a device")
        token = tier.device_token
        sizes = len(token.memory), len(token.content)
        scene.expect(sizes == (8, 8) and bool(token.device), "8 bytes of a device", describe(sizes))
        same = tier.device_token.content == token.content
        scene.expect(same, "always the same token", "another one")
        view = tier.device_view(tier.alignment, 1000)
        sizes = len(view), len(view[10:30])
        scene.expect(sizes == (1000, 20), "1000 bytes, of which 20 can be had", describe(sizes))
        place, theirs = view.__dlpack_device__(), token.memory.__dlpack_device__()
        scene.expect(place == theirs, "the token on the same device", f"{theirs}, not {place}")
        data = content(digest("on a device"), 1000)
        await tier.write_from(tier.alignment, memoryview(data))
        if place[0] == _HOST:  # a driver may stand between this process and any other device
            scene.expect(_shown(view) == data, "a view to see what `write_from` stores")
            writable: Any = view
            np.from_dlpack(writable)[100:200] = 0
            got = await read(tier, tier.alignment, 300)
            scene.expect(got[90:210] == data[90:100] + bytes(100) + data[200:210], "to be writable")
            same = _shown(token.memory) == token.content
            scene.expect(same, "the token's bytes on the device")
        for offset, size in ((tier.capacity, 1), (-1, 1), (0, tier.capacity + 1)):
            viewing = asyncio.to_thread(tier.device_view, offset, size)
            await scene.raises(UsageError, viewing, f"a view of {size} bytes at {offset}")
        tier.close()
        kept = place[0] != _HOST or _shown(view)[:100] == data[:100]
        scene.expect(kept, "the bytes to stay until the view is released")


def _shown(memory: Any) -> bytes:
    return np.from_dlpack(memory).tobytes()


@TierCheck
async def what_an_operator_is_shown_is_a_line(scene: Scene, make: MakeTier) -> None:
    """`status_text`: some words, at every moment until `close`."""
    async with opened(make) as tier:
        if not isinstance(tier, SupportsStatusText):
            raise NotDeclared(f"tier {tier.name!r} has nothing to show to an operator")
        for _ in range(2):
            text = tier.status_text
            fine = isinstance(text, str) and bool(text.strip()) and text.isprintable()
            scene.expect(fine, "a few words in one line", describe(text))
            await tier.write_from(0, memoryview(b"some bytes"))
