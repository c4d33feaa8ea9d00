"""Calls that leave the loop to others, end where nobody answers, and are made once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvpool import removals
from kvpool.errors import Overloaded, Unavailable
from kvpool.protocols import Channel
from kvpool.testing.harness import (
    NAMESPACE,
    NotDeclared,
    Scene,
    Stage,
    TransportCheck,
    blank,
    blocks,
    describe,
    digest,
)
from kvpool.testing.tier_checks import MakeTier, TierCheck, opened, read

#: What one call may take of the loop at a time. Others may be busy on the machine: of so many
#: attempts one must be within it.
TURN_S: Final = 0.005
#: The same of a connect, which some libraries make in one piece.
DIAL_TURN_S: Final = 0.025
#: What a call that moves little takes, where both sides are one process.
SMALL_S: Final = 0.01
_ATTEMPTS: Final = 25
#: Bytes that are moved meanwhile.
_SIZE: Final = 64 << 10
#: The deadline of a connect that nobody answers, and how much later it must have ended.
_DIAL_S: Final = 0.3
_LATE_S: Final = 3.0


def _own_s() -> float:
    """A clock of this thread that stands still while others have the processor. (Without Linux they
    count; a wait for a medium or for another thread always does.)"""
    try:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:
        waited_ns = 0
    return time.perf_counter() - waited_ns / 1e9


async def longest_turn(call: Awaitable[object]) -> float:
    """Seconds of the longest turn of the loop until the call has ended."""
    longest, before, over = 0.0, _own_s(), False

    async def watch() -> None:
        nonlocal longest, before
        while not over:
            await asyncio.sleep(0)
            now = _own_s()
            longest, before = max(longest, now - before), now

    watching = asyncio.ensure_future(watch())
    try:
        await call
    finally:
        over = True
        longest = max(longest, _own_s() - before)
        await watching
    return longest


async def keeps_no_loop(
    scene: Scene, make: Callable[[], Awaitable[object]], what: str, turn_s: float = TURN_S
) -> None:
    """Raises ConformanceError for a call that takes more than `turn_s` of the loop each time."""
    best = float("inf")
    for _ in range(_ATTEMPTS):
        best = min(best, await longest_turn(make()))
        if best <= turn_s:
            return
    text = f"{best * 1000:.0f} ms at best, in {_ATTEMPTS} attempts"
    scene.expect(False, f"{what} to take {turn_s * 1000:.0f} ms of the loop at most", text)


# --- tiers ---------------------------------------------------------------------------------------


@TierCheck
async def no_call_of_a_tier_keeps_the_loop(scene: Scene, make: MakeTier) -> None:
    """While a medium works, the server serves others."""
    async with opened(make) as tier:
        for size in (min(_SIZE, tier.capacity), tier.capacity):
            data, into = memoryview(bytes(size)), memoryview(bytearray(size))
            writing, reading = partial(tier.write_from, 0, data), partial(tier.read_into, 0, into)
            await keeps_no_loop(scene, writing, f"a write of {size} bytes")
            await keeps_no_loop(scene, reading, f"a read of {size} bytes")


@TierCheck
async def a_buffer_is_the_callers_again(scene: Scene, make: MakeTier) -> None:
    """After a call the tier has no use for its buffer: what the caller writes there is his own."""
    async with opened(make) as tier:
        for size in (tier.alignment, 4 * tier.alignment, 100):
            buffer = bytearray(b"w" * size)
            await tier.write_from(0, memoryview(buffer))
            buffer[:] = b"c" * size
            got = await read(tier, 0, size)
            scene.expect(got == b"w" * size, f"the {size} bytes as they were at the write")
            got[:] = b"r" * size
            again = await read(tier, 0, size)
            scene.expect(again == b"w" * size, f"the {size} bytes, also after that")


# --- transports ----------------------------------------------------------------------------------


@TransportCheck
async def no_call_keeps_the_loop(stage: Stage) -> None:
    """Connecting and small calls take little of the client's loop at a time."""
    channel = await stage.connect()
    await keeps_no_loop(stage, stage.connect, "connecting", DIAL_TURN_S)
    for name, call in _small_calls(stage, channel).items():
        await keeps_no_loop(stage, call, name)


def _small_calls(stage: Stage, channel: Channel) -> dict[str, Callable[[], Awaitable[object]]]:
    """Calls that move little: 100 bytes, and _SIZE; and those that move none."""
    calls: dict[str, Callable[[], Awaitable[object]]] = {}
    for size in (100, _SIZE):
        data = blocks(f"turns of {size}", 2, size)
        into = [blank(size) for _ in data]
        calls[f"a write of {size} bytes"] = partial(stage.write, channel, data)
        calls[f"a read of {size} bytes"] = partial(stage.read, channel, list(data), into)
    keys = [digest("no")]
    calls["a removal"] = lambda: removals.remove(channel, NAMESPACE, keys, deadline=stage.within())
    calls["a report"] = lambda: removals.report_corruption(
        channel, NAMESPACE, 0, keys, deadline=stage.within()
    )
    return calls


@TransportCheck
async def no_small_call_waits_for_a_timer(stage: Stage) -> None:
    """It takes what the way to the server takes: nothing is collected for a while, or polled."""
    channel, loop = await stage.connect(), asyncio.get_running_loop()
    for name, call in _small_calls(stage, channel).items():
        took = []
        for _ in range(_ATTEMPTS):
            began = loop.time()
            await call()
            took.append(loop.time() - began)
            if took[-1] <= SMALL_S:
                break
        text = f"{min(took) * 1000:.0f} ms at best, in {_ATTEMPTS} attempts"
        stage.expect(min(took) <= SMALL_S, f"{name} within {SMALL_S * 1000:.0f} ms", text)


@TransportCheck
async def connecting_to_a_silent_server_keeps_its_deadline(stage: Stage) -> None:
    """The other process is there and does not run: its kernel accepts, and nothing is answered."""
    if stage.transport is stage.client_transport:
        raise NotDeclared("both sides are one process: none is silent while the other runs")
    frozen = asyncio.new_event_loop()

    def run(call: Any) -> Any:
        return frozen.run_until_complete(call)

    listener = await asyncio.to_thread(run, stage.transport.listen("", stage.recorder))
    try:
        dialling = asyncio.ensure_future(stage.connect(listener.address, within_s=_DIAL_S))
        await asyncio.wait([dialling], timeout=_DIAL_S + _LATE_S)
        in_time = dialling.done()
        dialling.cancel()
        (outcome,) = await asyncio.gather(dialling, return_exceptions=True)
    finally:
        await asyncio.to_thread(run, listener.close())
        await asyncio.to_thread(run, asyncio.sleep(0.01))
        frozen.close()
    stage.expect(in_time, f"an end by the deadline, {_DIAL_S:g} s", "it went on")
    stage.expect(isinstance(outcome, Unavailable), "Unavailable", describe(outcome))


@TransportCheck
async def a_refused_call_is_made_once(stage: Stage) -> None:
    """Reads, removals and reports, too: only the client knows whether to repeat them."""
    channel = await stage.connect()
    data = blocks("once", 2, 100)
    await stage.stored(channel, data)
    keys, deadline = list(data), stage.within()
    for call in (
        lambda: stage.read(channel, keys, [blank(100) for _ in keys]),
        lambda: removals.remove(channel, NAMESPACE, keys, deadline=deadline),
        lambda: removals.report_corruption(channel, NAMESPACE, 0, keys, deadline=deadline),
    ):
        stage.recorder.refused.clear()
        stage.recorder.refuse_others = Overloaded("not now")
        await stage.raises(Overloaded, call(), "a call that is refused")
        stage.recorder.refuse_others = None
        count = len(stage.recorder.refused)
        stage.expect(count == 1, "one attempt", f"the server was asked {count} times")
    await stage.holds(channel, data)
