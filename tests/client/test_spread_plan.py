"""The plan of a spread: pure, so that every order of answers and losses can be played."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.client.spread_plan import (
    FETCHES_MAX,
    Call,
    SpreadPlan,
    choose_receivers,
    cut,
    receivers_at,
)
from kvpool.types import Member, MoveStatus, Replica, Run
from tests.support.members import member as usual_member

FETCHED, NOT_YET, GONE = MoveStatus.DONE, MoveStatus.NOT_YET, MoveStatus.GONE
LOST = MoveStatus.LOST
_CALLS_MAX = 10_000


def run(first: int, last: int, *servers: str, parts: int = 1) -> Run:
    return Run(
        first, last, tuple(Replica(s, "dram", part) for s in servers for part in range(parts))
    )


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def blocks(call: Call) -> int:
    return call.piece.end - call.piece.first


def play(plan: SpreadPlan, answer: Callable[[Call], list[MoveStatus] | str]) -> int:
    """Let every call take one second; returns the seconds until the spread is over."""
    running = plan.ready()
    for second in range(_CALLS_MAX):
        if not running:
            return second
        serving = Counter(call.source for call in running)
        assert max(serving.values()) <= FETCHES_MAX
        for call in running:
            answered = answer(call)
            if isinstance(answered, str):
                plan.lost(call, answered)
            else:
                plan.ended(call, answered)
        running = plan.ready()
    raise AssertionError(f"not over after {_CALLS_MAX} calls: {plan.progress()}")


def fetched(call: Call) -> list[MoveStatus]:
    return [FETCHED] * blocks(call)


def test_many_receivers_take_little_more_time_than_one() -> None:
    pieces = cut([run(0, 639, "a")], 1, 640)
    assert len(pieces) == 64
    for count, depth in ((1, 1), (2, 1), (6, 2), (14, 3), (16, 4), (62, 5)):
        plan = SpreadPlan(pieces, names(count))
        assert play(plan, fetched) == 64 + depth - 1
        assert {one[1:] for one in plan.progress()} == {(640, 640, "")}


def test_nobody_waits_for_a_receiver_that_is_lost() -> None:
    pieces = cut([run(0, 63, "a")], 1, 64)
    plan = SpreadPlan(pieces, names(6))

    def answer(call: Call) -> list[MoveStatus] | str:
        if call.receiver == "r0" and call.piece.first == 10:
            return "server lost"
        return [LOST] if call.source == "r0" and call.piece.first >= 9 else fetched(call)

    play(plan, answer)
    assert plan.progress()[0] == ("r0", 10, 10, "server lost")
    assert all(one[1:] == (64, 64, "") for one in plan.progress()[1:])


@pytest.mark.parametrize(
    ("status", "problem"), [(MoveStatus.NO_ROOM, "no room"), (MoveStatus.REFUSED, "leaving")]
)
def test_a_receiver_without_room_keeps_what_it_has_and_feeds_it(
    status: MoveStatus, problem: str
) -> None:
    plan = SpreadPlan(cut([run(0, 63, "a")], 1, 64), names(2))
    asked: Counter[str] = Counter()

    def answer(call: Call) -> list[MoveStatus]:
        asked[call.receiver] += 1
        if call.receiver == "r1" and asked["r1"] < 40:  # it begins when the other one is full
            return [NOT_YET]
        if call.receiver == "r0":
            return fetched(call) if call.piece.first < 32 else [status]
        return [LOST] if call.source == "a" else fetched(call)

    play(plan, answer)
    assert plan.progress() == [("r0", 32, 32, problem), ("r1", 32, 32, "not reached")]


@pytest.mark.parametrize("stuck", [{"r0"}, {"r0", "r1"}])  # two could take all that "a" serves
def test_nobody_waits_for_a_receiver_that_gets_nothing(stuck: set[str]) -> None:
    plan = SpreadPlan(cut([run(0, 63, "a")], 1, 64), names(6))
    asked: Counter[str] = Counter()

    def answer(call: Call) -> list[MoveStatus] | str:
        asked[call.receiver] += 1
        if call.receiver not in stuck:
            return fetched(call)
        if asked[call.receiver] < 300:
            return [NOT_YET]
        lengths = {server: length for server, length, *_ in plan.progress()}
        assert lengths == {one: 0 if one in stuck else 64 for one in names(6)}
        return "no time was left"

    play(plan, answer)
    assert [one[3] for one in plan.progress()] == [
        "no time was left" if one in stuck else "" for one in names(6)
    ]


@pytest.mark.parametrize(("status", "problem"), [(LOST, "not reached"), (GONE, "gone")])
def test_a_chain_that_no_source_serves_ends_with_the_reason(
    status: MoveStatus, problem: str
) -> None:
    plan = SpreadPlan(cut([run(0, 63, "a", "b")], 1, 64), names(5))
    play(plan, lambda call: fetched(call) if call.piece.first < 20 else [status])
    for server, length, count, why in plan.progress():
        assert (length, count, why) == (20, 20, problem), server


def test_a_source_that_is_reached_at_the_second_attempt_serves() -> None:
    plan = SpreadPlan(cut([run(0, 63, "a")], 1, 64), names(2))
    failed: set[str] = set()

    def answer(call: Call) -> list[MoveStatus]:
        if call.receiver not in failed:
            failed.add(call.receiver)
            return [LOST]
        return fetched(call)

    play(plan, answer)
    assert all(one[1:] == (64, 64, "") for one in plan.progress())


def test_a_source_that_was_not_reached_is_tried_again_only_without_another() -> None:
    plan = SpreadPlan(cut([run(0, 63, "a", "b")], 1, 64), ["r0", "r1"])
    sources: Counter[str] = Counter()

    def answer(call: Call) -> list[MoveStatus]:
        sources[call.source] += 1
        return [LOST] if call.source == "a" else fetched(call)

    play(plan, answer)
    assert sources["a"] == 2, "once by each"
    assert plan.progress() == [("r0", 64, 64, ""), ("r1", 64, 64, "")]


def test_parts_arrive_together() -> None:
    pieces = cut([run(0, 9, "a", parts=2)], 2, 10)
    assert [(one.part, one.first, one.end) for one in pieces[:4]] == [
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 2),
        (1, 1, 2),
    ]
    plan = SpreadPlan(pieces, ["r0"])
    play(plan, lambda c: fetched(c) if (c.piece.part, c.piece.first) != (1, 4) else [GONE])
    assert plan.progress() == [("r0", 4, 9, "gone")]


def test_a_part_of_a_piece_counts_and_is_progress() -> None:
    pieces = cut([run(0, 639, "a")], 1, 640)  # ten blocks each
    plan = SpreadPlan(pieces, ["r0", "r1", "r2"])
    (first, *_) = plan.ready()
    plan.ended(first, [FETCHED] * 3 + [NOT_YET] * 7)
    assert plan.progress()[0] == ("r0", 3, 3, "no time was left")
    assert [call.receiver for call in plan.ready()] == ["r0"]


def test_pieces_end_where_other_servers_have_the_chain() -> None:
    pieces = cut([run(0, 999, "a"), run(1000, 1000, "b"), run(1001, 2999, "a", "b")], 1, 2999)
    assert [one.first for one in pieces] == [
        *range(0, 1000, 47), 1000, *range(1001, 2999, 47)
    ]  # fmt: skip
    assert pieces[-1].end == 2999
    assert all(left.end == right.first for left, right in itertools.pairwise(pieces))
    assert max(one.end - one.first for one in cut([run(0, 99_999, "a")], 1, 100_000)) == 256


@pytest.mark.parametrize("seed", range(60))
def test_whatever_fails_the_spread_ends_and_says_why(seed: int) -> None:
    """Answers in any order; servers that are lost, lose blocks, have no room or no time. Nobody is
    asked for what it has; and all get the head first, and from a server that has it."""
    rng = random.Random(seed)
    length, parts = rng.choice([1, 7, 100, 1000]), rng.choice([1, 1, 2])
    at = rng.randrange(length)
    runs = [run(0, at, "a", "b", parts=parts)]
    if at < length - 1:
        runs.append(run(at + 1, length - 1, rng.choice("ab"), parts=parts))
    pieces = cut(runs, parts, length)
    receivers = [*names(rng.randint(1, 20)), *rng.sample(["a", "b"], rng.randint(0, 2))]
    plan = SpreadPlan(pieces, receivers)
    has: dict[str, set[tuple[int, int]]] = {server: set() for server in receivers}
    for piece in pieces:
        for holder in piece.holders:
            has.setdefault(holder, set()).update(
                (piece.part, i) for i in range(piece.first, piece.end)
            )
    dead: set[str] = set()
    trouble = rng.choice([0.0, 0.05, 0.3])
    running: list[Call] = plan.ready()
    for _ in range(200_000):
        if not running:
            break
        call = running.pop(rng.randrange(len(running)))
        wanted = [(call.piece.part, i) for i in range(call.piece.first, call.piece.end)]
        assert call.source != call.receiver
        assert not has[call.receiver].issuperset(wanted)
        if trouble == 0.0:
            assert has[call.source].issuperset(wanted)
            before = [(part, i) for part in range(parts) for i in range(call.piece.first)]
            assert has[call.receiver].issuperset(before)
        if rng.random() < trouble / 10:
            dead.add(rng.choice(list(has)))
        if call.receiver in dead:
            plan.lost(call)
        elif call.source in dead:
            plan.ended(call, [LOST] * len(wanted))
        elif rng.random() < trouble:
            status = rng.choice([NOT_YET, MoveStatus.IN_PROGRESS, GONE, MoveStatus.NO_ROOM])
            done = rng.randrange(len(wanted))
            if status is GONE:
                has[call.source].difference_update(wanted[done:])
            has[call.receiver].update(wanted[:done])
            plan.ended(call, [FETCHED] * done + [status] * (len(wanted) - done))
        elif has[call.source].issuperset(wanted):
            has[call.receiver].update(wanted)
            plan.ended(call, [FETCHED] * len(wanted))
        else:
            plan.ended(call, [FETCHED if one in has[call.source] else GONE for one in wanted])
        running += plan.ready()
        assert max(Counter(one.source for one in running).values(), default=0) <= FETCHES_MAX
    assert not running
    for server, count, _, problem in plan.progress():
        assert problem != "no time was left", server  # it would wait for ever
        assert bool(problem) == (count < length)
        if trouble == 0.0:
            assert not problem


def member(server: str, host: str = "", *, age: float = 0.0, **more: Any) -> Member:
    own = {"host": host or server, "capacity": 100, "victim_age_s": age}
    return usual_member(server, **own, **more)


def test_a_number_of_servers_counts_those_that_have_the_chain() -> None:
    members = [
        member("a", "h1"),
        member("b", "h1"),
        member("c", "h2", used=90, age=50.0),
        member("d", "h3", used=95, age=99.0),
        member("e", "h4", draining=True),
        member("f", "h5", alive=False),
    ]
    assert choose_receivers(members, {"a": 10}, 10, 1) == []
    assert choose_receivers(members, {"a": 10}, 10, 2) == ["d"]  # less to lose there
    assert choose_receivers(members, {"a": 10}, 10, 3) == ["d", "c"]
    assert choose_receivers(members, {"a": 10}, 10, 9) == ["d", "c", "b"]  # a host twice at last
    assert choose_receivers(members, {"a": 10, "c": 4}, 10, 2) == ["c"]  # has some of it
    assert choose_receivers(members, {}, 10, 2) == ["a", "d"]


def test_names_are_servers_or_hosts_that_live() -> None:
    members = [
        member("a", "h1", used=50),
        member("b", "h1", used=10),
        member("c", "h2", alive=False),
        member("d", "h3", draining=True),
        member("h4", "h4", alive=False),
        member("e", "h4"),
    ]
    assert receivers_at(members, ["h1", "a", "b"]) == (["b", "a"], {})
    assert receivers_at(members, ["h4"]) == (["e"], {}), "its host, when the server has ended"
    assert receivers_at(members, ["h2", "c", "d", "h3", "?"]) == (
        [],
        {
            "h2": "server lost",
            "c": "server lost",
            "d": "leaving",
            "h3": "leaving",
            "?": "no such name",
        },
    )
