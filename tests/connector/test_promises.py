"""Promises between engines: what one says, what the other believes, and how long it waits."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest

from kvpool import Match, Namespace, ReadStatus
from kvpool_connector.hints.request_params import Asked, parse_request
from kvpool_connector.records.messages import LoadResult
from kvpool_connector.records.promises import (
    TRANSITIONS,
    BlockWait,
    GivenPromise,
    PromisedBlocks,
    PromiseState,
    WaitLimits,
    parse_promise,
    promise_name,
)
from kvpool_connector.records.values import CacheGroup, RequestHints
from tests.connector.test_planner import BLOCK, Played, hashes, matched
from tests.connector.test_shared_loads import MIB

NAME = "0123456789abcdef"
GOOD = PromisedBlocks(96, hashes("p", 96)[-1], NAME, 0.5)


def played(**limits: object) -> Played:
    made = Played(**limits)
    made.planner.promises.name = NAME
    return made


def given(
    engine: Played,
    name: str = "d",
    tokens: int = 100,
    promise: PromisedBlocks = GOOD,
    length: int = 0,
) -> None:
    """A request with a promise, of whose blocks the pool has `length`."""
    engine.look_up(name, tokens, length, hints=RequestHints(promise=promise), prompt="p")


def outcomes(engine: Played) -> dict[str, float]:
    return {
        name.removeprefix("promise "): value
        for name, value in engine.planner.counters.items()
        if name.startswith("promise ")
    }


# --- what is promised -----------------------------------------------------------------------------


def test_an_engine_promises_what_it_has_computed_in_whole_blocks() -> None:
    producer = played()
    producer.arrive("a", 100, prompt="p")
    producer.planner.choice.prefill_cost.observe([(0, 100)], 1.0)
    promise = producer.planner.make_promise("a", 100)
    assert promise == (96, hashes("p", 96)[-1], NAME, pytest.approx(0.96))
    half = producer.planner.make_promise("a", 63)
    assert (half.tokens, half.tail) == (48, hashes("p", 48)[-1])
    generated = producer.planner.make_promise("a", 200)  # nothing that was generated
    assert generated == promise
    assert outcomes(producer) == {"made": 3}


@pytest.mark.parametrize(
    "unable", ["unknown", "short", "skip_save", "saves nothing", "reset", "no name", "switched off"]
)
def test_what_is_not_saved_is_not_promised(unable: str) -> None:
    limits: dict[str, object] = {"save": unable != "saves nothing"}
    producer = played(**limits, promise_wait_s=0.0 if unable == "switched off" else 1.0)
    producer.arrive("a", 100, RequestHints(skip_save=unable == "skip_save"))
    if unable == "no name":
        producer.planner.promises.name = ""
    if unable == "reset":
        producer.planner.on_reset()
    name = "b" if unable == "unknown" else "a"
    assert producer.planner.make_promise(name, 15 if unable == "short" else 100) is None
    assert not outcomes(producer)


def test_a_promise_survives_json_and_is_small() -> None:
    text = json.dumps(GOOD.as_params())
    assert parse_promise(json.loads(text)) == GOOD
    assert len(text) < 250
    without = GOOD._replace(computing_s=None)
    assert parse_promise(without.as_params()) == without


GOOD_PARAMS = GOOD.as_params()


@pytest.mark.parametrize(
    "absurd",
    [
        7,
        [],
        "promise",
        {},
        {**GOOD_PARAMS, "version": 2},
        {**GOOD_PARAMS, "version": True},
        {**GOOD_PARAMS, "version": "1"},
        {**GOOD_PARAMS, "tokens": 0},
        {**GOOD_PARAMS, "tokens": -96},
        {**GOOD_PARAMS, "tokens": True},
        {**GOOD_PARAMS, "tokens": 96.0},
        {**GOOD_PARAMS, "tokens": 1 << 60},
        {**GOOD_PARAMS, "tokens": "96"},
        {**GOOD_PARAMS, "tail": ""},
        {**GOOD_PARAMS, "tail": "no digits"},
        {**GOOD_PARAMS, "tail": "ab" * 1_000_000},
        {**GOOD_PARAMS, "tail": None},
        {**GOOD_PARAMS, "name": "short"},
        {**GOOD_PARAMS, "name": ["0"] * 16},
        {**GOOD_PARAMS, "computing_s": -1},
        {**GOOD_PARAMS, "computing_s": math.inf},
        {**GOOD_PARAMS, "computing_s": math.nan},
        {**GOOD_PARAMS, "computing_s": True},
        {"version": 1, "computing_s": "1"},
    ],
)
def test_what_is_no_promise_is_ignored_with_a_reason(absurd: Any) -> None:
    assert isinstance(parse_promise(absurd), str)
    hints, (mistake,), _ = parse_request(Asked({"kvpool": {"promise": absurd, "session_id": "s"}}))
    assert mistake.startswith("promise is ignored: ")
    assert len(mistake) < 200
    assert (hints.promise, hints.session) == (None, "s")


def test_a_promise_stands_beside_other_connectors_keys() -> None:
    params = {"do_remote_prefill": True, "remote_host": "h", "kvpool": {"promise": GOOD_PARAMS}}
    hints, mistakes, _ = parse_request(Asked(params))
    assert (hints.promise, mistakes) == (GOOD, [])
    hints, mistakes, _ = parse_request(Asked({"kvpool": {"promise": None}}))
    assert (hints.promise, mistakes) == (None, [])


def test_engines_have_one_name_if_they_share_all_groups() -> None:
    one, other = Namespace("kv", parts=2), Namespace("kv/1", parts=2)
    assert promise_name([one, other]) == promise_name([one, other])
    different = [[one], [other, one], [one, Namespace("kv/1")], [one, Namespace("kv/2", parts=2)]]
    assert promise_name([one, other]) not in [promise_name(some) for some in different]
    assert promise_name([]) == ""


# --- what is waited for ---------------------------------------------------------------------------


def test_a_promised_prompt_is_loaded_before_it_is_there() -> None:
    consumer = played()
    given(consumer, length=2)
    assert consumer.offer("d", 100) == 96
    assert consumer.offer("d", 100) == 96  # asking changes nothing
    consumer.allocate("d", 7, 96)
    (load,) = consumer.idle().loads
    (blocks,) = load.blocks
    assert blocks.digests == tuple(hashes("p", 96))
    assert blocks.match is None, "it covers two of six blocks"
    assert load.wait_limits == WaitLimits(0.5, 10.0), (
        "of the promise: this engine has measured nothing"
    )
    consumer.now += 0.4
    ended = LoadResult("d", 6 * MIB, True, 0.1, 0.3)
    consumer.planner.on_load_result(ended, consumer.now)
    assert outcomes(consumer) == {"kept": 1}
    assert consumer.planner.counters["promise_wait_s"] == pytest.approx(0.3)
    assert consumer.planner.counters["promised_tokens"] == 64
    assert consumer.planner.choice.transfer_cost.seconds(6 * MIB) == pytest.approx(0.1)
    assert not consumer.step("d", 96, 100).saves, "the other engine has saved them"


def test_a_load_that_is_refused_uses_no_promise_and_compares_what_was_there() -> None:
    consumer = played(loads_per_check=1)
    given(consumer, "promised", length=2)
    consumer.begin("promised")
    ended = LoadResult("promised", 0, False, 0.1, refused=frozenset([b"somebody"]))
    consumer.planner.on_load_result(ended, consumer.now)
    assert outcomes(consumer) == {"not used": 1}
    plan = consumer.step("promised", 0, 100)
    assert plan.verify is not None
    assert len(plan.verify.blocks[0].digests) == 2


@pytest.mark.parametrize(
    ("tokens", "length", "computed", "offered", "limits", "outcome"),
    [
        (100, 6, 0, 96, {}, {"found": 1}),  # an ordinary load
        (100, 0, 96, 0, {}, {"found": 1}),  # the engine has it itself
        (96, 0, 0, 80, {}, {}),  # the last token is computed, so the wait is for one block less
        (100, 2, 0, 32, {"promise_wait_s": 0.0}, {}),  # this engine may not wait
    ],
)
def test_only_what_is_missing_is_waited_for(
    tokens: int, length: int, computed: int, offered: int, limits: Any, outcome: Any
) -> None:
    consumer = played(**limits)
    given(consumer, tokens=tokens, length=length)
    assert consumer.offer("d", tokens, computed) == offered
    consumer.allocate("d", 7, offered)
    loads = consumer.idle().loads
    assert [load.wait_limits is not None for load in loads] == ([offered == 80] if offered else [])
    assert outcomes(consumer) == outcome


@pytest.mark.parametrize(
    ("promise", "outcome"),
    [
        (GOOD._replace(name="f" * 16), "other name"),
        (GOOD._replace(tail=hashes("q", 96)[-1]), "other prompt"),
        (GOOD._replace(tokens=80), "other prompt"),
        (GOOD._replace(tokens=97), "other prompt"),
        (GOOD._replace(tokens=1600), "other prompt"),
        (GOOD._replace(tokens=1 << 39), "other prompt"),
    ],
)
def test_a_promise_about_something_else_is_free(promise: PromisedBlocks, outcome: str) -> None:
    consumer = played()
    given(consumer, promise=promise, length=2)
    load = consumer.begin("d", 32)
    assert load.wait_limits is None
    assert outcomes(consumer) == {outcome: 1}


def test_a_broken_promise_is_computed_and_not_waited_for_again() -> None:
    consumer = played()
    given(consumer, length=2)
    consumer.begin("d")
    ended = LoadResult("d", 2 * MIB, False, 0.1, 0.5)
    consumer.planner.on_load_result(ended, consumer.now)
    assert consumer.offer("d", 100, computed=32) == 0
    assert outcomes(consumer) == {"broken": 1}
    assert consumer.planner.choice.transfer_cost.samples == 1, "it was not slow"
    assert consumer.step("d", 32, 100).saves, "the other engine has not saved them"


@pytest.mark.parametrize("complete", [True, False])
def test_a_reset_in_the_middle_of_a_wait_harms_nothing(complete: bool) -> None:
    consumer = played()
    given(consumer, length=2)
    assert consumer.offer("d", 100) == 96
    consumer.allocate("d", 7, 96)
    consumer.planner.on_reset()
    size = 6 * MIB if complete else 0
    ended = LoadResult("d", size, complete, 0.1, 0.3)
    consumer.planner.on_load_result(ended, consumer.now)
    assert outcomes(consumer) == {"kept" if complete else "broken": 1}
    assert consumer.offer("d", 100, computed=96 if complete else 0) == 0


@pytest.mark.parametrize("end", ["finished", "preempted", "another connector"])
def test_a_promise_ends_with_its_request(end: str) -> None:
    consumer = played()
    given(consumer)
    assert consumer.offer("d", 100) == 96
    if end == "another connector":
        consumer.allocate("d", 7, 0)
        assert not consumer.idle().loads
        assert consumer.planner.counters["decision not chosen"] == 1
    else:
        consumer.allocate("d", 7, 96)
    if end == "finished":
        consumer.planner.on_request_finished("d")
    if end == "preempted":
        lookup = consumer.planner.on_restart("d", 100, consumer.now)
        consumer.planner.lookups.on_result("d", lookup.serial, [matched(0)], "")
        assert consumer.offer("d", 100) == 0
    assert outcomes(consumer) == {"not used": 1}
    assert consumer.planner._running.awaiting == 0 or end == "another connector"


def test_nothing_is_waited_for_where_no_master_answers() -> None:
    consumer = played()
    lookup = consumer.arrive("d", 100, RequestHints(promise=GOOD), "p")
    nothing = Match((), 0, ReadStatus.NO_MASTER)
    consumer.planner.lookups.on_result("d", lookup.serial, [nothing], "no master")
    assert consumer.offer("d", 100) == 0
    consumer.allocate("d", 7, 0)
    assert outcomes(consumer) == {"not used": 1}


def test_promises_that_clients_make_up_leave_half_of_the_loads_to_others() -> None:
    consumer = played(loads_max=8)
    for number in range(8):
        promise = GOOD._replace(tail=hashes(f"f{number}", 100)[-1])
        consumer.look_up(f"f{number}", 100, 0, hints=RequestHints(promise=promise))
        offered = consumer.offer(f"f{number}", 100)
        consumer.allocate(f"f{number}", 7, offered or 0)
    assert consumer.planner._running.awaiting == 4
    assert outcomes(consumer) == {"too many": 4}
    consumer.look_up("a", 100, 6)
    assert consumer.offer("a", 100) == 96


@pytest.mark.parametrize("kept", [True, False])
def test_two_requests_with_one_promise_wait_once(kept: bool) -> None:
    consumer = played()
    for name in ("d", "e"):
        given(consumer, name)
    assert consumer.offer("d", 100) == 96
    consumer.allocate("d", 7, 96)
    assert consumer.offer("e", 100) is None
    ended = LoadResult("d", 6 * MIB if kept else 0, kept, 0.1, 0.4)
    consumer.planner.on_load_result(ended, consumer.now)
    assert consumer.offer("e", 100, computed=96 if kept else 0) == 0
    consumer.allocate("e", 7, 0)
    assert outcomes(consumer) == ({"kept": 1, "found": 1} if kept else {"broken": 1, "not used": 1})


def test_a_promise_that_a_client_made_up_delays_nobody_with_the_same_beginning() -> None:
    """Everybody's prompt begins with the same instructions, which the pool has."""
    consumer = played()
    for _ in range(20):
        consumer.planner.choice.transfer_cost.observe(6 * MIB, 0.1)
    consumer.planner.choice.prefill_cost.observe([(0, 96)], 1.0)
    for name, promise in (("forged", True), ("plain", False), ("promised", True)):
        chain = hashes("instructions", 96) + hashes(name, 96)
        hints = RequestHints(promise=PromisedBlocks(192, chain[-1], NAME) if promise else None)
        consumer.look_up(name, 200, 6, hints=hints, chain=chain)
        expected = 192 if promise else 96
        assert consumer.offer(name, 200) == expected
        consumer.allocate(name, 13, expected)
        if name == "plain":  # what an ordinary load brings is waited for as ever
            consumer.planner.on_load_result(LoadResult(name, 6 * MIB, True, 0.1), consumer.now)


def test_a_proxy_that_asks_both_at_once_promises_the_whole_prompt() -> None:
    consumer = played()
    given(consumer, promise=PromisedBlocks(), length=1)
    consumer.planner.choice.prefill_cost.observe([(0, 96)], 0.8)
    load = consumer.begin("d")
    assert load.wait_limits == (pytest.approx(0.8), 10.0)


def test_blocks_of_groups_are_waited_for_in_whole_units() -> None:
    """A window's blocks, too: of these the last ones only."""
    groups = (CacheGroup(2 * BLOCK, 2), CacheGroup(4 * BLOCK, 4, window_blocks=2))
    consumer = Played(groups=groups)
    consumer.planner.promises.name = NAME
    chain = hashes("p", 300)
    promise = PromisedBlocks(256, chain[15], NAME)
    consumer.look_up("d", 300, [0, 0], hints=RequestHints(promise=promise), prompt="p")
    assert consumer.offer("d", 300) == 256
    ids = [list(range(1, 11)), [0, 0, 3, 4, 5]]
    consumer.planner.on_blocks_allocated("d", ids, 256, consumer.now)
    (load,) = consumer.idle().loads
    assert [len(blocks.digests) for blocks in load.blocks] == [8, 2]
    assert load.blocks[1].digests == (chain[11], chain[15])
    assert load.wait_limits is not None


def test_a_promise_ends_once() -> None:
    counters: dict[str, float] = defaultdict(float)
    for state in TRANSITIONS[PromiseState.GIVEN] - TRANSITIONS.keys():
        promise = GivenPromise(GOOD, counters)
        promise.move_to(state)
        promise.move_to(PromiseState.NOT_USED)
        promise.move_to(PromiseState.AWAITED)
        assert promise.state is state
        assert promise.tokens(NAME, hashes("p", 96), BLOCK) == 0
    assert set(counters.values()) == {1}
    with pytest.raises(AssertionError):
        GivenPromise(GOOD, counters).move_to(PromiseState.KEPT)


# --- how long -------------------------------------------------------------------------------------


def waited(
    wait_limits: WaitLimits, rate: float, blocks: int = 100, stops_at: int = 1 << 30
) -> float:
    """Seconds of waiting for blocks that come at this rate, up to `stops_at` of them."""
    wait, came, now = BlockWait(wait_limits, blocks), 0, 0.0
    while came < blocks:
        there = min(int(now * rate), blocks, stops_at)
        if there > came:
            wait.came(there - came)
            came = there
            continue
        look_s = wait.next_look_s()
        if look_s is None:
            break
        assert 0 < look_s <= 0.05
        wait.waited(look_s)
        now += look_s
    return wait.waited_s


def test_a_producer_that_is_as_fast_is_waited_for_to_the_end() -> None:
    assert waited(WaitLimits(1.0, 10.0), rate=100) == pytest.approx(1.0, abs=0.06)
    assert waited(WaitLimits(1.0, 10.0), rate=80) == pytest.approx(1.25, abs=0.06)


def test_a_producer_that_is_silent_costs_what_computing_costs() -> None:
    assert waited(WaitLimits(1.0, 10.0), rate=0) == pytest.approx(1.0, abs=0.06)
    assert waited(WaitLimits(0.001, 10.0), rate=0) == pytest.approx(0.03, abs=0.002)


def test_a_producer_that_is_slower_than_computing_is_left() -> None:
    """The rest is computed: in all less than twice the time without a pool."""
    for rate in (10, 25, 50):
        seconds = waited(WaitLimits(1.0, 10.0), rate)
        assert seconds + (1 - seconds * rate / 100) < 2.0


@pytest.mark.parametrize("stops_at", [1, 50, 90, 99])
def test_a_producer_that_dies_costs_at_most_what_its_rest_costs(stops_at: int) -> None:
    seconds = waited(WaitLimits(1.0, 10.0), rate=1000, stops_at=stops_at)
    rest_s = 1.0 * (100 - stops_at) / 100
    assert seconds <= stops_at / 1000 + max(rest_s, 0.03) + 0.06


def test_a_wait_ends_at_its_limit() -> None:
    assert waited(WaitLimits(100.0, 0.5), rate=0) == pytest.approx(0.5, abs=0.001)
    assert waited(WaitLimits(math.inf, 0.5), rate=0) == pytest.approx(0.5, abs=0.001)


def test_looks_become_rarer() -> None:
    """Masters are asked some 20 times in the first second, whatever was made up."""
    wait, looks = BlockWait(WaitLimits(3600.0, 10.0), 10), 0
    while (look_s := wait.next_look_s()) is not None:
        looks += 1
        wait.waited(look_s)
    assert looks < 250
