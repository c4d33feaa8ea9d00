"""Who is served and who waits, by an invented clock; a gate, and what leaves it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest

from kvpool_agents import admission as admission_module
from kvpool_agents import admission_gate
from kvpool_agents.admission import SESSIONS_MAX, Admission, Seat
from kvpool_agents.admission_gate import AdmissionGate, LineFull
from tests.conftest import eventually


def serving(count: int, share: float | None = 0.5, *, until: float = 1000.0) -> Admission:
    """One in which so many sessions have had a place all the time, and engines are busy."""
    admission = Admission()
    for number in range(count):
        admission.asks("t", f"old {number}", 0.0)
    assert len(admission.admit(0.0)) == count
    admission.computes(1000, 0.0)
    admission.measured(share)
    admission.places(until)
    return admission


def admitted(admission: Admission, now: float) -> list[str]:
    return [seat.session for seat in admission.admit(now)]


def test_as_long_as_nothing_is_known_all_are_served() -> None:
    for share in (None, 0.5):
        admission = serving(40, share, until=60.0)  # no figure, or too short a time
        assert admission.places(60.0) == math.inf
        admission.asks("t", "new", 60.0)
        assert admitted(admission, 60.0) == ["new"]


def test_no_more_are_served_than_fit_and_the_first_that_came_is_the_next() -> None:
    admission = serving(40)
    assert admission.places(1000.0) == 40 * 0.5
    seats = [admission.asks("t", name, 1000.0 + n) for n, name in enumerate(("a", "b"))]
    assert admitted(admission, 1002.0) == []
    leave(admission, 20, 1002.0)
    assert admission.served == 20
    assert admitted(admission, 1002.0) == []  # none is free yet
    leave(admission, 1, 1002.0, first=20)
    assert admitted(admission, 1002.0) == ["a"]
    assert [seat.placed for seat in seats] == [True, False]


def leave(admission: Admission, count: int, now: float, first: int = 0) -> None:
    """So many of the old sessions end."""
    for number in range(first, first + count):
        seat = admission._seats["t"][f"old {number}"]
        admission.leaves(seat, now, ends=True)


def test_who_runs_keeps_its_place_however_little_fits() -> None:
    admission = serving(40, 0.01)
    assert admission.asks("t", "old 3", 1000.0).placed
    assert admission.places(1000.0) == 1.0
    admission.asks("t", "new", 1000.0)
    assert admitted(admission, 1500.0) == [], "a long answer is no idleness"
    assert admission.served == 40


def test_a_session_that_dies_without_an_end_gives_its_place_back() -> None:
    admission = serving(1, 0.1)
    waits = admission.asks("t", "new", 1000.0)
    dead = admission._seats["t"]["old 0"]
    admission.leaves(dead, 1000.0)
    assert admitted(admission, 1000.0 + admission_module.IDLE_S - 1) == []
    assert admitted(admission, 1000.0 + admission_module.IDLE_S) == ["new"]
    assert waits.placed
    back = admission.asks("t", "old 0", 1070.0)  # it was not dead
    admission.asks("t", "newer", 1065.0)
    assert not back.placed
    admission.leaves(waits, 1080.0, ends=True)
    assert admitted(admission, 1080.0) == ["old 0"]  # it had come before


@pytest.mark.parametrize("share", [1e-9, 0.5])
def test_a_wrong_figure_starves_nobody(share: float) -> None:
    admission = serving(10, share)
    seats = [admission.asks("t", f"new {n}", 1000.0) for n in range(30)]
    assert admission.admit(1000.0 + admission_module.WAIT_S - 1) == []
    assert len(admission.admit(1000.0 + admission_module.WAIT_S)) == 30
    assert all(seat.placed for seat in seats)


def test_waiting_counts_over_prompts_that_were_given_up_and_not_over_pauses() -> None:
    admission = serving(10)
    seat = admission.asks("t", "new", 1000.0)
    admission.leaves(seat, 1240.0)  # a refusal, and the client's next try
    assert admission.waiting == 0
    assert admission.asks("t", "new", 1245.0) is seat
    assert admitted(admission, 1000.0 + admission_module.WAIT_S) == ["new"]
    late = admission.asks("t", "late", 1000.0)
    admission.leaves(late, 1001.0)
    admission.asks("t", "late", 1001.0 + 890.0)
    assert admitted(admission, 1000.0 + admission_module.WAIT_S) == []


def test_while_engines_have_time_misses_cost_nobody_anything() -> None:
    admission = serving(40)
    admission.computes(-1000, 1000.0)
    for number in range(5):
        admission.asks("t", f"new {number}", 1000.0)
    assert admitted(admission, 1060.0) == []  # it is a mean
    later = 1000.0 + 10 * admission_module._BUSY_S
    assert len(admission.admit(later)) == 1
    assert admission.admit(later + 1.0) == []  # one after the other
    admission.measured(0.5, 10)
    assert len(admission.admit(later + 2.0)) == 1  # ten engines have more time


def test_a_flood_of_one_tenant_does_not_keep_another_one_out() -> None:
    admission = serving(10, 0.5)
    for number in range(200):
        admission.asks("t", f"flood {number}", 1000.0)
    admission.asks("u", "one", 1010.0)
    leave(admission, 6, 1010.0)
    assert admitted(admission, 1010.0) == ["one"]


def test_names_cost_a_bounded_memory_and_a_flood_of_them_takes_its_own() -> None:
    admission = serving(4, None)
    mine = admission.asks("u", "mine", 1000.0)
    admission.admit(1000.0)
    admission.leaves(mine, 1000.0)
    for number in range(SESSIONS_MAX + 100):
        admission.leaves(admission.asks("t", f"flood {number}", 1001.0), 1001.0)
    assert sum(map(len, admission._seats.values())) == SESSIONS_MAX
    assert admission.asks("u", "mine", 1002.0) is mine
    assert admission._seats["t"]["old 0"].placed  # it runs
    admission.admit(5000.0)
    assert sum(map(len, admission._seats.values())) == 5  # those that run


def test_a_working_set_that_shrinks_with_the_sessions_lets_no_fewer_in() -> None:
    """Both are means of the same time: the limit stays where it was."""
    admission = serving(40, 0.5)
    before = admission.places(1000.0)
    leave(admission, 20, 1000.0)
    mean = 20 + 20 * math.exp(-1)  # of the places, and so of the working set
    admission.measured(0.5 * 40 / mean)
    assert admission.places(1600.0) == pytest.approx(before, abs=2)


# --- the gate ------------------------------------------------------------------------------------


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AdmissionGate:
    """One place, which session `a` has; its engine is busy."""
    monkeypatch.setattr(admission_module, "_KNOWN_S", -1.0)
    monkeypatch.setattr(admission_gate, "_LOOK_S", 0.01)
    monkeypatch.setattr(admission_gate, "HOLD_S", 5.0)
    made = AdmissionGate(lambda: None)
    made.measured(1e-9)
    made.admission.computes(1000, made.now())
    made.admission._busy = 1000.0
    return made


async def waiting(gate: AdmissionGate, count: int) -> None:
    await eventually(lambda: gate.admission.waiting == count)


async def test_a_session_waits_until_another_one_ends(gate: AdmissionGate) -> None:
    first = await gate.enter("t", "a")
    assert first.waited_s == pytest.approx(0.0, abs=0.01)
    second = asyncio.create_task(gate.enter("t", "b"))
    third = asyncio.create_task(gate.enter("t", "b"))  # another prompt of it
    await waiting(gate, 1)
    assert (await gate.enter("t", "a")).waited_s < 0.01
    assert gate.shown()["waiting"] == 1
    assert "memory holds 0% of the live working set" in gate.shown()["why"]
    first.ended()
    await asyncio.sleep(0.03)
    assert not second.done()  # it may go on
    for prompt in (first, await gate.enter("t", "a")):
        prompt.ended(session_ends=True)
    gate.left(gate.admission._seats["t"]["a"], session_ends=True)
    assert (await second).waited_s > 0.0
    await third
    assert gate.shown() == {"served": 1, "waiting": 0, "places": 1.0, "why": ""}


async def test_a_prompt_that_waits_too_long_or_is_given_up_leaves_no_trace(
    gate: AdmissionGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gate.enter("t", "a")
    monkeypatch.setattr(admission_gate, "HOLD_S", 0.01)
    with pytest.raises(TimeoutError):
        await gate.enter("t", "b")
    monkeypatch.setattr(admission_gate, "HOLD_S", 5.0)
    left = asyncio.create_task(gate.enter("t", "c"))
    await waiting(gate, 1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert (gate.admission.waiting, gate._waiting) == (0, {})


async def test_a_line_is_bounded_and_nobody_s_alone(
    gate: AdmissionGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_gate, "LINE_MAX", 4)
    await gate.enter("t", "a")
    tasks = [asyncio.create_task(gate.enter("t", name)) for name in ("b", "c")]
    await waiting(gate, 2)
    with pytest.raises(LineFull):
        await gate.enter("t", "d")
    tasks.append(asyncio.create_task(gate.enter("u", "e")))
    await waiting(gate, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.admission.waiting, gate._waiting) == (0, {})


async def test_first_bytes_and_ends_count_once(gate: AdmissionGate) -> None:
    before = gate.admission._computing
    ticket = await gate.enter("t", "a")
    assert gate.admission._computing == before + 1
    for _ in range(2):
        ticket.began()
        ticket.ended()
    assert gate.admission._computing == before
    seats: Iterator[Seat] = iter(gate.admission._seats["t"].values())
    assert next(seats).prompts == 0


async def test_an_error_inside_keeps_nobody_waiting(
    gate: AdmissionGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one of whoever asks the pool, nor one of what decides."""
    first = await gate.enter("t", "a")
    gate._ask, gate._asked_at = lambda: 1 / 0, -math.inf  # type: ignore[method-assign,assignment]
    second = asyncio.create_task(gate.enter("t", "b"))
    await waiting(gate, 1)
    admit, failing = gate.admission.admit, iter([ValueError("a bug")] * 3)

    def admit_later(now: float) -> list[Seat]:
        if (error := next(failing, None)) is not None:
            raise error
        return list(admit(now))

    monkeypatch.setattr(gate.admission, "admit", admit_later)
    gate._asked_at = -math.inf
    first.ended(session_ends=True)
    assert (await second).waited_s < 4.0


async def test_a_pool_that_no_longer_answers_is_not_believed_for_ever(
    gate: AdmissionGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    gate._ask = lambda: asked.append(gate.now())
    (await gate.enter("t", "a")).ended()
    (await gate.enter("t", "a")).ended()
    assert len(asked) == 1  # once in ten seconds
    now = gate.now()
    gate.now = lambda: now + 101.0
    (await gate.enter("t", "b")).ended()
    assert len(asked) == 2
    assert gate.admission.places(now + 101.0) == math.inf
