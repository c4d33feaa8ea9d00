"""The timer of a silent server: it ends a call that receives nothing, and no other (G6)."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvpool.client.idle_timeout import InactivityTimer, ServerUnresponsive


async def test_a_call_that_receives_nothing_ends() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ServerUnresponsive, match=r"nothing was received for 0\.1 s"):
        async with InactivityTimer(0.1):
            await asyncio.sleep(30)
    assert 0.09 < loop.time() - began < 5


async def test_a_call_goes_on_as_long_as_something_arrives() -> None:
    """Far longer than the time of silence; then it ends one such time after the last byte."""
    loop = asyncio.get_running_loop()
    last = 0.0

    async def receive() -> None:
        nonlocal last
        async with InactivityTimer(0.4) as timer:
            for _ in range(8):
                await asyncio.sleep(0.1)
                timer.touch()
                last = loop.time()
            await asyncio.sleep(30)

    with pytest.raises(ServerUnresponsive):
        await receive()
    assert last
    assert 0.39 < loop.time() - last < 5


async def test_local_work_after_the_answer_is_not_timed() -> None:
    async with InactivityTimer(0.1) as timer:
        timer.disarm()
        await asyncio.sleep(0.3)


async def test_the_answer_may_be_complete_after_the_timer_was_set_again() -> None:
    async with InactivityTimer(0.2) as timer:
        await asyncio.sleep(0.1)
        timer.touch()
        await asyncio.sleep(0.15)  # it has fired once, and is set to the time of the touch
        timer.disarm()
        await asyncio.sleep(0.3)


async def test_a_call_that_has_ended_is_not_interrupted() -> None:
    async with InactivityTimer(0.05):
        pass
    await asyncio.sleep(0.15)


async def test_the_silence_of_this_process_is_not_the_servers() -> None:
    """A loop that was busy has read nothing: what came meanwhile counts."""
    async with InactivityTimer(0.4) as timer:
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.7)
        asyncio.get_running_loop().call_later(0.9, timer.touch)
        await asyncio.sleep(1.0)


async def test_a_busy_loop_does_not_keep_a_silent_server_for_ever() -> None:
    loop = asyncio.get_running_loop()
    began, busy = loop.time(), True

    async def work() -> None:
        while busy:
            time.sleep(0.08)  # noqa: ASYNC251
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    with pytest.raises(ServerUnresponsive):
        async with InactivityTimer(0.2):
            await asyncio.sleep(30)
    busy = False
    await working
    assert loop.time() - began < 5


async def test_a_call_that_waits_for_others_is_not_timed() -> None:
    loop = asyncio.get_running_loop()
    began, touched = loop.time(), 0.0

    async def wait() -> None:
        nonlocal touched
        async with InactivityTimer(0.2) as timer:
            await asyncio.sleep(0.1)
            timer.rest()
            await asyncio.sleep(0.5)
            timer.touch()
            touched = loop.time()
            await asyncio.sleep(30)

    with pytest.raises(ServerUnresponsive):
        await wait()
    assert touched - began > 0.59
    assert 0.19 < loop.time() - touched < 5
