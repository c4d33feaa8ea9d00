"""The timer of a silent server: it ends a call that receives nothing, and no other (G6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvpool.client.idle_timeout import InactivityTimer, ServerUnresponsive
from tests.support.virtual_time import virtual_time
from tests.wire.offline import Loop

SILENT, LATE = "nothing was received for", "another server would have brought it by now"
#: What happens to a call, and when. It takes a minute if nothing ends it before.
Script = list[tuple[float, str]]
END = (2.0, "end")


async def ends(script: Script, silence_s: float = 0.4, **options: Any) -> tuple[float, str, bool]:
    """When a call of this script ends, why, and whether it was left early."""
    loop, others = asyncio.get_running_loop(), asyncio.all_tasks()
    began, why, early = loop.time(), "", False
    try:
        async with InactivityTimer(silence_s, **options) as timer:
            for at, what in [*script, (60.0, "end")]:
                await asyncio.sleep(began + at - loop.time())
                if what == "end":
                    break
                getattr(timer, what)()
    except ServerUnresponsive as error:
        why, early = str(error), error.left_early
    took = loop.time() - began
    assert asyncio.all_tasks() == others
    await asyncio.sleep(5.0)  # what has ended is not interrupted later
    return round(took, 6), why.partition(" for ")[0] + " for" if SILENT in why else why, early


@pytest.mark.parametrize(
    ("script", "at"),
    [
        ([], 0.4),
        ([(0.1 * n - 0.01, "touch") for n in range(1, 9)], 0.79 + 0.4),
        ([(0.1, "rest"), (0.65, "touch")], 0.65 + 0.4),  # it waited for this client's other calls
    ],
)
@virtual_time
async def test_a_call_ends_when_nothing_was_received_for_so_long(script: Script, at: float) -> None:
    assert await ends(script) == (at, SILENT, False)


@pytest.mark.parametrize(
    "script",
    [
        [(0.1, "end")],
        [(0.1, "disarm"), END],  # what follows the answer is local work
        [(0.25, "touch"), (0.45, "disarm"), END],  # it has fired, and is set to the touch's time
        [(0.1, "rest"), END],
    ],
)
@virtual_time
async def test_a_call_that_has_its_answer_or_waits_for_others_goes_on(script: Script) -> None:
    assert await ends(script) == (script[-1][0], "", False)


@virtual_time
async def test_a_call_that_is_overdue_ends_although_something_arrives() -> None:
    """Another server would have been faster; but not while this client makes it wait."""
    script = [(0.0, "rest"), *[(0.25 + n / 100, "touch") for n in range(300)]]
    assert await ends(script, overdue=lambda _: True) == (0.3, LATE, True)


class Asked:
    """Whether the call may be left, said after a while."""

    def __init__(self, yes: bool, after_s: float = 0.0) -> None:
        self.yes, self.after_s, self.times = yes, after_s, 0

    async def __call__(self) -> bool:
        self.times += 1
        await asyncio.sleep(self.after_s)
        return self.yes


@pytest.mark.parametrize(
    ("answer", "script", "at", "why", "asked"),
    [
        (Asked(True), [], 0.1, SILENT, 1),
        (Asked(False), [], 0.8, SILENT, 1),
        (Asked(True, 30.0), [], 0.8, SILENT, 1),  # nobody can say so in time
        (Asked(True, 0.1), [(0.15, "touch"), (0.9, "end")], 0.9, "", 1),
        (Asked(True, 0.1), [(0.15, "touch"), (0.9, "touch")], 1.7, SILENT, 1),  # asked once
        (Asked(True, 0.1), [(0.15, "disarm"), END], 2.0, "", 1),
        (Asked(True, 0.1), [(0.15, "rest"), END], 2.0, "", 1),
        (Asked(True), [*[(0.08 * n, "touch") for n in range(9)], (0.65, "end")], 0.65, "", 0),
    ],
)
@virtual_time
async def test_a_call_ends_early_if_it_may_be_left(
    answer: Asked, script: Script, at: float, why: str, asked: int
) -> None:
    early = at == 0.1
    assert await ends(script, 0.8, ask_s=0.1, may_leave=answer) == (at, why, early)
    assert answer.times == asked


def busy(seconds: float) -> Callable[[], None]:
    """Something keeps the loop for so long."""
    clock = cast(Loop, asyncio.get_running_loop()).clock

    def pass_by() -> None:
        clock.now += seconds

    return pass_by


@virtual_time
async def test_the_silence_of_this_process_is_not_the_servers() -> None:
    """A loop that was busy has read nothing: what came meanwhile counts."""
    asyncio.get_running_loop().call_later(0.05, busy(0.7))
    assert await ends([(0.9, "touch"), (1.0, "end")]) == (1.0, "", False)


@virtual_time
async def test_a_busy_loop_does_not_keep_a_silent_server_for_ever() -> None:
    async def work() -> None:
        turn = busy(0.08)
        while True:
            turn()
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    at, why, _ = await asyncio.wait_for(ends([], 0.2), 30)
    working.cancel()
    assert (0.2 < at < 1.0, why) == (True, SILENT)
