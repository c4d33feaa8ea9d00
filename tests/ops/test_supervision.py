"""No long-lived task ends in silence: it goes on, is counted, and probes hear of it."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Sequence

import pytest

from kvpool import supervision
from kvpool.supervision import Supervisor, stop
from tests.conftest import eventually


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "PAUSE_S", 0.01)
    monkeypatch.setattr(supervision, "WELL_AFTER_S", 0.1)


class Highest(random.Random):
    """No jitter: the longest delay each time."""

    def uniform(self, a: float, b: float) -> float:
        return b


def pauses_of(lines: Sequence[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"pause_s=([0-9.]+)", line))]


async def test_a_task_that_fails_goes_on_after_pauses_that_grow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks, began, loop = Supervisor(Highest()), list[float](), asyncio.get_running_loop()

    async def step() -> None:
        began.append(loop.time())
        if len(began) == 6:
            await asyncio.sleep(0.15)  # for long: it was well, and the next pause is short again
        if len(began) == 8:
            return  # a step has ended: the same
        if len(began) == 10:
            await asyncio.Event().wait()
        raise ValueError(f"run {len(began)}")

    task = tasks.forever("sweeping", step, pause_max_s=0.04)
    await eventually(lambda: len(began) == 10)
    await stop(task)
    pauses = [after - before for before, after in itertools.pairwise(began)]
    for pause, least in zip(
        pauses, [0.01, 0.02, 0.04, 0.04, 0.04, 0.16, 0.02, 0, 0.01], strict=True
    ):
        assert least * 0.99 <= pause < least + 0.5
    lines = [line for line in caplog.messages if "runs again" in line]
    assert pauses_of(lines) == [*(0.01, 0.02, 0.04, 0.04, 0.04, 0.01, 0.02, 0.01)]
    assert "sweeping" in lines[0]
    assert tasks.failures["sweeping"] == 8


async def test_tasks_that_fail_together_do_not_return_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = Supervisor(random.Random(1))

    async def fail() -> None:
        raise ValueError

    running = [tasks.until_done("one of many", fail) for _ in range(8)]
    await asyncio.sleep(0)
    pauses = pauses_of(caplog.messages)
    assert len(set(pauses)) > 2
    assert 0.005 <= min(pauses) < max(pauses) <= 0.01
    for task in running:
        await stop(task)


async def test_probes_hear_of_a_task_until_it_is_well() -> None:
    tasks, failing = Supervisor(), True
    quiet = asyncio.Event()

    async def step() -> None:
        if failing:
            raise KeyError("a tenant's name")
        await quiet.wait()
        await asyncio.sleep(0)

    async def fine() -> None:
        await asyncio.sleep(0.001)

    running = [tasks.forever("sweep", step, pause_max_s=0.02), tasks.forever("other", fine)]
    assert dict(tasks.failures) == {"sweep": 0, "other": 0}
    await eventually(lambda: tasks.failures["sweep"] >= 3)
    assert tasks.problem == "the task 'sweep' is failing: KeyError, see the log"
    failing = False
    await eventually(lambda: not tasks.problem)  # it waits for something, as it should
    quiet.set()
    failing = True
    await eventually(lambda: bool(tasks.problem))
    failing = False  # now a step ends
    await eventually(lambda: not tasks.problem)
    assert tasks.failures["other"] == 0
    for task in running:
        await stop(task)


async def test_a_task_is_failing_until_a_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it runs again is no proof."""
    monkeypatch.setattr(supervision, "WELL_AFTER_S", 60.0)
    tasks, calls, end = Supervisor(), 0, asyncio.Event()

    async def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError
        await end.wait()
        await asyncio.sleep(0)

    task = tasks.forever("sweep", step)
    await eventually(lambda: calls == 2)
    await asyncio.sleep(0.05)
    assert tasks.problem
    end.set()
    await eventually(lambda: calls > 3)
    assert not tasks.problem
    await stop(task)


async def test_work_that_ends_is_done_and_runs_again_until_then() -> None:
    tasks, runs = Supervisor(), 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise OSError(24, "Too many open files")

    await tasks.until_done("trim", work)
    assert (runs, tasks.failures["trim"], tasks.problem) == (3, 2, "")


async def test_a_task_that_is_cancelled_ends_and_is_failing_no_more() -> None:
    tasks = Supervisor()

    async def step() -> None:
        raise ValueError

    task = tasks.forever("bad", step)
    await eventually(lambda: bool(tasks.problem))
    await stop(task)
    assert task.cancelled()
    assert not tasks.problem
    waiting = tasks.until_done("waits", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await stop(waiting)
    assert waiting.cancelled()


async def test_a_cancellation_that_an_error_has_hidden_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else whoever closes a process would wait for ever."""
    monkeypatch.setattr(supervision, "_CANCEL_AGAIN_S", 0.01)
    errors = [ValueError("in that moment"), None]

    async def part() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if (error := errors.pop(0)) is not None:
                raise error

    async def step() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(part())

    task = Supervisor().forever("task", step)
    for _ in range(3):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await stop(task)
    assert task.cancelled()
