"""The timer of a silent server: it ends a call that receives nothing, and no other (G6)."""

from __future__ import annotations

import asyncio

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
