"""The timer of a silent server: it ends a call that receives nothing, and no other (G6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

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


async def test_a_call_that_is_overdue_ends_although_something_arrives() -> None:
    """Another server would have been faster; but not while this client makes it wait."""
    loop = asyncio.get_running_loop()
    began, overdue = loop.time(), False

    async def receive() -> None:
        nonlocal overdue
        async with InactivityTimer(0.2, lambda _: overdue) as timer:
            timer.rest()
            overdue = True
            await asyncio.sleep(0.2)
            for _ in range(3000):
                timer.touch()
                await asyncio.sleep(0.01)

    with pytest.raises(ServerUnresponsive, match="another server") as ended:
        await receive()
    assert ended.value.left_early
    assert 0.19 < loop.time() - began < 5


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


async def answer(yes: bool, after_s: float = 0.0) -> bool:
    await asyncio.sleep(after_s)
    return yes


async def test_a_call_ends_early_if_it_may_be_left() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ServerUnresponsive, match=r"nothing was received for 0\.1 s") as caught:
        async with InactivityTimer(5.0, ask_s=0.1, may_leave=lambda: answer(True)):
            await asyncio.sleep(30)
    assert caught.value.left_early
    assert 0.09 < loop.time() - began < 4


@pytest.mark.parametrize(("yes", "after_s"), [(False, 0.0), (True, 30.0)])
async def test_a_call_that_may_not_be_left_has_all_of_its_time(yes: bool, after_s: float) -> None:
    """Nor one of which nobody can say so in time; the question ends with the call."""
    loop = asyncio.get_running_loop()
    began, others = loop.time(), asyncio.all_tasks()
    with pytest.raises(ServerUnresponsive, match=r"nothing was received for 0\.4 s") as caught:
        async with InactivityTimer(0.4, ask_s=0.1, may_leave=lambda: answer(yes, after_s)):
            await asyncio.sleep(30)
    assert not caught.value.left_early
    assert 0.39 < loop.time() - began < 5
    assert asyncio.all_tasks() == others


async def test_a_call_that_receives_something_meanwhile_is_not_left() -> None:
    """It is asked once; after the first byte only the longer time counts."""
    asked = 0

    def ask() -> Awaitable[bool]:
        nonlocal asked
        asked += 1
        return answer(True, 0.1)

    async with InactivityTimer(0.8, ask_s=0.5, may_leave=ask) as timer:
        await asyncio.sleep(0.55)
        timer.touch()
        await asyncio.sleep(0.5)
        timer.touch()
        await asyncio.sleep(0.5)
    assert asked == 1


@pytest.mark.parametrize("how", ["disarm", "rest"])
async def test_an_answer_that_comes_too_late_to_leave_ends_nothing(how: str) -> None:
    """The call is complete, or waits for other calls of this client, when the answer is there."""
    async with InactivityTimer(0.4, ask_s=0.1, may_leave=lambda: answer(True, 0.1)) as timer:
        await asyncio.sleep(0.15)
        getattr(timer, how)()
        await asyncio.sleep(0.8)


async def test_nothing_is_asked_of_a_call_that_keeps_receiving() -> None:
    async with InactivityTimer(0.8, ask_s=0.4, may_leave=lambda: answer(True)) as timer:
        for _ in range(8):
            await asyncio.sleep(0.08)
            timer.touch()
