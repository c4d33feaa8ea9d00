"""Which requests a step may leave out: those that complete no block and compute no prompt."""

from __future__ import annotations

import pickle
import random

import pytest

from kvpool import WriteStatus
from kvpool_connector.plan.planner import Planner
from kvpool_connector.plan.quiet_requests import QuietRequests
from kvpool_connector.records.messages import LoadResult, SaveResult
from kvpool_connector.records.values import (
    CacheGroup,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
    StepPlan,
)
from tests.connector.test_planner import BLOCK, Played, hashes, matched

FOREVER = 1 << 40
GROUPS = (CacheGroup(BLOCK, 1), CacheGroup(4 * BLOCK, 4))


def test_a_decoding_request_is_quiet_until_its_next_block_is_complete() -> None:
    played = Played()
    played.arrive("a", 100)
    assert played.planner.quiet.left("a") == 0
    played.step("a", 0, 60)
    assert played.planner.quiet.left("a") == 0  # the speed of computing a prompt is measured
    played.step("a", 60, 100)
    assert played.planner.quiet.left("a") == 12
    played.planner.on_preempted("a")
    assert played.planner.quiet.left("a") == 0
    played.planner.on_request_finished("a")
    assert not played.planner.quiet


def test_a_block_whose_hash_is_not_there_yet_keeps_its_request_awake() -> None:
    """With asynchronous scheduling a token is scheduled before its value is known."""
    played, known = Played(), hashes("a", 48)
    played.planner.on_new_request("a", known, 48, RequestHints(), played.now)
    played.step("a", 0, 64)
    assert played.planner.quiet.left("a") == 0
    known.append(hashes("b", 16)[0])
    assert played.step("a", 64, 65).saves[0].blocks[0].block_ids == (4,)
    assert played.planner.quiet.left("a") == 15


def test_what_a_failed_load_did_not_bring_wakes_its_request() -> None:
    played = Played()
    played.look_up("a", 100, 6)
    assert played.offer("a", 100) == 96
    played.allocate("a", 7, 96)
    played.step("a", 96, 100)
    assert played.planner.quiet.left("a") == 12
    played.planner.on_load_result(LoadResult("a", 0, False, 0.0), played.now)
    assert played.planner.quiet.left("a") == 0
    rest = ScheduledRequest("a", 100, 100, [list(range(1, 8))])
    assert played.planner.save_rest(rest, played.now) == []  # if it ends now: they are not there
    assert played.step("a", 0, 100).saves


def test_a_prompt_beside_them_wakes_no_quiet_request() -> None:
    quiet = QuietRequests()
    quiet.wake("prompt")
    quiet.wake("decodes")
    quiet.sleep("decodes", 16)
    step = {"prompt": 2048, "decodes": 1, "unknown": 1}
    assert [quiet.awake(step, 2050) for _ in range(15)] == [["prompt"]] * 15
    assert quiet.awake(step, 2050) == ["prompt", "decodes"]


def test_of_requests_that_have_ended_nothing_is_kept() -> None:
    quiet = QuietRequests()
    for number in range(1000):
        name = f"r{number}"
        quiet.wake(name)
        quiet.sleep(name, 1 + number % 16)
        quiet.awake({name: 1}, 1)
        quiet.forget(name)
    assert not quiet
    assert len(pickle.dumps(quiet.__dict__)) < 1000


@pytest.mark.parametrize("limits", [{"save": False}, {"save_decode": False}])
def test_who_saves_nothing_more_stays_quiet(limits: dict[str, bool]) -> None:
    played = Played(**limits)
    played.arrive("a", 100)
    played.step("a", 0, 90)
    assert played.planner.quiet.left("a") == 0
    played.step("a", 90, 100)
    assert played.planner.quiet.left("a") > FOREVER


@pytest.mark.parametrize("seed", range(40))
def test_leaving_out_quiet_requests_changes_no_plan(seed: int) -> None:
    """Two planners live the same life; one is shown every scheduled request, the other few."""
    chance = random.Random(seed)
    limits = PlannerLimits(save_decode=chance.random() < 0.8)
    both = [Planner(GROUPS, limits) for _ in range(2)]
    computed: dict[str, int] = {}
    prompts: dict[str, int] = {}
    left_out = 0
    now = 0.0
    for turn in range(200):
        now += 0.1
        if len(computed) < 3:
            name, tokens = f"r{turn}", chance.randrange(1, 300)
            chain = hashes(name, 2000)
            for planner in both:
                lookup = planner.on_new_request(name, chain, tokens, RequestHints(), now)
                if lookup is not None:
                    matches = [matched(tokens // group.block_size // 2) for group in GROUPS]
                    planner.lookups.on_result(name, lookup.serial, matches, "")
            computed[name], prompts[name] = 0, tokens
        name = chance.choice(sorted(computed))
        if chance.random() < 0.05:
            for planner in both:
                planner.on_preempted(name)
            computed[name] = 0
        elif chance.random() < 0.05:
            for planner in both:
                planner.on_request_finished(name)
            del computed[name]
        scheduled = []
        for name, start in computed.items():
            drafted = chance.randrange(1, 4)  # with speculation a step computes several tokens
            end = min(start + chance.randrange(1, 80), max(start + drafted, prompts[name]))
            ids = [list(range(1, 400)), list(range(401, 800))]
            scheduled.append(ScheduledRequest(name, start, end, ids))
            computed[name] = end
        counts = {one.request_id: one.end - one.start for one in scheduled}
        shown = both[1].quiet.awake(counts, sum(counts.values()))
        awake = [one for one in scheduled if one.request_id in shown]
        left_out += len(scheduled) - len(awake)
        plans = [
            planner.plan_step(some, lambda *block: True, now)
            for planner, some in zip(both, (scheduled, awake), strict=True)
        ]
        assert _saves(plans[0]) == _saves(plans[1])
        refused = [
            (blocks.group, blocks.digests[0], WriteStatus.NO_SPACE)
            for save in plans[0].saves
            for blocks in save.blocks[: chance.randrange(2)]
        ]
        for planner, plan in zip(both, plans, strict=True):
            for save in plan.saves:
                planner.on_save_result(SaveResult(save.job, 0, tuple(refused)), now)
    assert left_out > 20


def _saves(plan: StepPlan) -> list[tuple[object, ...]]:
    return [tuple(save) for save in plan.saves]
