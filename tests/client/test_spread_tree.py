"""The tree of a spread: pure, so that every order of answers and losses can be played."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvpool.client.spread_tree import (
    FAN_OUT,
    Call,
    SpreadTree,
    choose_receivers,
    cut,
    receivers_at,
)
from kvpool.types import FetchStatus, Member, Replica, Run, ServerStats

FETCHED, NOT_YET, GONE = FetchStatus.FETCHED, FetchStatus.NOT_YET, FetchStatus.GONE
LOST = FetchStatus.SOURCE_LOST
_CALLS_MAX = 10_000


def run(first: int, last: int, *servers: str, parts: int = 1) -> Run:
    return Run(
        first, last, tuple(Replica(s, "dram", part) for s in servers for part in range(parts))
    )


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def blocks(call: Call) -> int:
    return call.piece.end - call.piece.first


def play(tree: SpreadTree, answer: Callable[[Call], list[FetchStatus] | str]) -> int:
    """Let every call take one second; returns the seconds until the spread is over."""
    running = tree.ready()
    for second in range(_CALLS_MAX):
        if not running:
            return second
        serving = Counter(call.source for call in running)
        assert max(serving.values()) <= FAN_OUT
        for call in running:
            answered = answer(call)
            if isinstance(answered, str):
                tree.lost(call, answered)
            else:
                tree.ended(call, answered)
        running = tree.ready()
    raise AssertionError(f"not over after {_CALLS_MAX} calls: {tree.progress()}")


def fetched(call: Call) -> list[FetchStatus]:
    return [FETCHED] * blocks(call)


def test_a_tree_takes_the_time_of_one_copy_and_of_its_depth() -> None:
    pieces = cut([run(0, 639, "a")], 1, 640)
    assert len(pieces) == 64
    for count, depth in ((1, 1), (2, 1), (6, 2), (14, 3), (16, 4), (62, 5)):
        tree = SpreadTree(pieces, names(count))
        assert play(tree, fetched) == 64 + depth - 1
        assert {one[1:] for one in tree.progress()} == {(640, 640, "")}


def test_every_receiver_gets_the_head_first_and_from_a_server_that_has_it() -> None:
    pieces = cut([run(0, 99, "a", "b"), run(100, 130, "b")], 1, 131)
    has: dict[str, set[int]] = {"a": set(range(100)), "b": set(range(131))}
    tree = SpreadTree(pieces, names(9))

    def answer(call: Call) -> list[FetchStatus]:
        wanted = range(call.piece.first, call.piece.end)
        assert has[call.source].issuperset(wanted)
        assert has.setdefault(call.receiver, set()) == set(range(call.piece.first))
        return fetched(call)

    def then(call: Call) -> list[FetchStatus]:
        answers = answer(call)
        has[call.receiver] |= set(range(call.piece.first, call.piece.end))
        return answers

    play(tree, then)
    assert all(here == set(range(131)) for server, here in has.items() if server != "a")


def test_what_a_receiver_has_is_not_fetched() -> None:
    pieces = cut([run(0, 9, "a", "r0"), run(10, 19, "a")], 1, 20)
    tree = SpreadTree(pieces, ["r0", "r1"])
    calls: list[Call] = []

    def answer(call: Call) -> list[FetchStatus]:
        calls.append(call)
        return fetched(call)

    play(tree, answer)
    assert all(call.piece.first >= 10 for call in calls if call.receiver == "r0")
    assert tree.progress() == [("r0", 20, 10, ""), ("r1", 20, 20, "")]


def test_those_below_a_lost_receiver_fetch_from_the_one_above_it() -> None:
    pieces = cut([run(0, 63, "a")], 1, 64)
    tree = SpreadTree(pieces, names(6))  # r0 feeds r2 and r3

    def answer(call: Call) -> list[FetchStatus] | str:
        if call.receiver == "r0" and call.piece.first == 10:
            return "server lost"
        return [LOST] if call.source == "r0" and call.piece.first >= 9 else fetched(call)

    play(tree, answer)
    assert tree.progress()[0] == ("r0", 10, 10, "server lost")
    assert all(one[1:] == (64, 64, "") for one in tree.progress()[1:])


@pytest.mark.parametrize(
    ("status", "problem"), [(FetchStatus.NO_ROOM, "no room"), (FetchStatus.REFUSED, "leaving")]
)
def test_a_receiver_without_room_keeps_what_it_has_and_feeds_it(
    status: FetchStatus, problem: str
) -> None:
    tree = SpreadTree(cut([run(0, 63, "a")], 1, 64), names(4))
    sources: Counter[str] = Counter()

    def answer(call: Call) -> list[FetchStatus]:
        sources[call.source] += 1
        full = call.receiver == "r0" and call.piece.first == 32
        return [status] if full else fetched(call)

    play(tree, answer)
    assert tree.progress()[0] == ("r0", 32, 32, problem)
    assert all(one[1:] == (64, 64, "") for one in tree.progress()[1:])
    assert sources["r0"] >= 60


def test_nobody_waits_for_a_receiver_that_gets_nothing() -> None:
    tree = SpreadTree(cut([run(0, 63, "a")], 1, 64), names(6))
    asked: Counter[str] = Counter()

    def answer(call: Call) -> list[FetchStatus] | str:
        asked[call.receiver] += 1
        if call.receiver != "r0":
            return fetched(call)
        return [NOT_YET] if asked["r0"] < 300 else "no time was left"

    play(tree, answer)
    assert tree.progress()[0] == ("r0", 0, 0, "no time was left")
    assert all(one[1:] == (64, 64, "") for one in tree.progress()[1:])


@pytest.mark.parametrize(("status", "problem"), [(LOST, "not reached"), (GONE, "gone")])
def test_a_chain_that_no_source_serves_ends_with_the_reason(
    status: FetchStatus, problem: str
) -> None:
    tree = SpreadTree(cut([run(0, 63, "a", "b")], 1, 64), names(5))
    play(tree, lambda call: fetched(call) if call.piece.first < 20 else [status])
    for server, length, count, why in tree.progress():
        assert (length, count, why) == (20, 20, problem), server


def test_a_source_that_is_reached_at_the_second_attempt_serves() -> None:
    tree = SpreadTree(cut([run(0, 63, "a")], 1, 64), names(2))
    failed: set[str] = set()

    def answer(call: Call) -> list[FetchStatus]:
        if call.receiver not in failed:
            failed.add(call.receiver)
            return [LOST]
        return fetched(call)

    play(tree, answer)
    assert all(one[1:] == (64, 64, "") for one in tree.progress())


def test_parts_arrive_together() -> None:
    pieces = cut([run(0, 9, "a", parts=2)], 2, 10)
    assert [(one.part, one.first, one.end) for one in pieces[:4]] == [
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 2),
        (1, 1, 2),
    ]
    tree = SpreadTree(pieces, ["r0"])
    play(tree, lambda c: fetched(c) if (c.piece.part, c.piece.first) != (1, 4) else [GONE])
    assert tree.progress() == [("r0", 4, 9, "gone")]


def test_a_part_of_a_piece_counts_and_is_progress() -> None:
    pieces = cut([run(0, 639, "a")], 1, 640)  # ten blocks each
    tree = SpreadTree(pieces, ["r0", "r1", "r2"])
    (first, *_) = tree.ready()
    tree.ended(first, [FETCHED] * 3 + [NOT_YET] * 7)
    assert tree.progress()[0] == ("r0", 3, 3, "no time was left")
    assert [call.receiver for call in tree.ready()] == ["r0"]


def test_pieces_end_where_other_servers_have_the_chain() -> None:
    pieces = cut([run(0, 999, "a"), run(1000, 1000, "b"), run(1001, 2999, "a", "b")], 1, 2999)
    assert [one.first for one in pieces] == [
        *range(0, 1000, 47), 1000, *range(1001, 2999, 47)
    ]  # fmt: skip
    assert pieces[-1].end == 2999
    assert all(left.end == right.first for left, right in itertools.pairwise(pieces))
    assert max(one.end - one.first for one in cut([run(0, 99_999, "a")], 1, 100_000)) == 256


@pytest.mark.parametrize("seed", range(300))
def test_whatever_fails_the_spread_ends_and_says_why(seed: int) -> None:
    """Answers in any order; servers that are lost, lose blocks, have no room or no time."""
    rng = random.Random(seed)
    length, parts = rng.choice([1, 7, 100, 1000]), rng.choice([1, 1, 2])
    at = rng.randrange(length)
    runs = [run(0, at, "a", "b", parts=parts)]
    if at < length - 1:
        runs.append(run(at + 1, length - 1, rng.choice("ab"), parts=parts))
    pieces = cut(runs, parts, length)
    receivers = [*names(rng.randint(1, 20)), *rng.sample(["a", "b"], rng.randint(0, 2))]
    tree = SpreadTree(pieces, receivers)
    has: dict[str, set[tuple[int, int]]] = {server: set() for server in receivers}
    for piece in pieces:
        for holder in piece.holders:
            has.setdefault(holder, set()).update(
                (piece.part, i) for i in range(piece.first, piece.end)
            )
    dead: set[str] = set()
    trouble = rng.choice([0.0, 0.05, 0.3])
    running: list[Call] = tree.ready()
    for _ in range(200_000):
        if not running:
            break
        call = running.pop(rng.randrange(len(running)))
        wanted = [(call.piece.part, i) for i in range(call.piece.first, call.piece.end)]
        assert call.source != call.receiver
        if rng.random() < trouble / 10:
            dead.add(rng.choice(list(has)))
        if call.receiver in dead:
            tree.lost(call)
        elif call.source in dead:
            tree.ended(call, [LOST] * len(wanted))
        elif rng.random() < trouble:
            status = rng.choice([NOT_YET, FetchStatus.IN_PROGRESS, GONE, FetchStatus.NO_ROOM])
            done = rng.randrange(len(wanted))
            if status is GONE:
                has[call.source].difference_update(wanted[done:])
            has[call.receiver].update(wanted[:done])
            tree.ended(call, [FETCHED] * done + [status] * (len(wanted) - done))
        elif has[call.source].issuperset(wanted):
            has[call.receiver].update(wanted)
            tree.ended(call, [FETCHED] * len(wanted))
        else:
            tree.ended(call, [FETCHED if one in has[call.source] else GONE for one in wanted])
        running += tree.ready()
        assert max(Counter(one.source for one in running).values(), default=0) <= FAN_OUT
    assert not running
    for server, count, _, problem in tree.progress():
        assert problem != "no time was left", server  # it would wait for ever
        assert bool(problem) == (count < length)
        if trouble == 0.0:
            assert not problem


def member(
    server: str,
    host: str = "",
    *,
    used: int = 0,
    age: float = 0.0,
    draining: bool = False,
    alive: bool = True,
) -> Member:
    stats = ServerStats(used=used, victim_age_s=age, draining=draining)
    return Member(server, 1, host or server, (), ("dram",), alive, 0.0, 100, stats)


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
