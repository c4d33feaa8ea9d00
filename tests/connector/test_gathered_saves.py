"""Generated blocks wait for others, so that one message stores many; no request waits for them."""

from __future__ import annotations

import pytest

from kvpool import ROOT
from kvpool_connector.records.messages import SaveRequest
from kvpool_connector.records.provenance import BlockWriter
from kvpool_connector.records.values import CacheGroup, RequestHints, ScheduledRequest, StepPlan
from tests.connector.test_planner import BLOCK, Played, hashes

GATHER_S = 0.1


class Decoding(Played):
    """Requests that have computed and saved a prompt of one block, and decode."""

    def __init__(self, *names: str, hints: RequestHints | None = None, **limits: object) -> None:
        super().__init__(save_gather_s=GATHER_S, **limits)
        self.at: dict[str, int] = {}
        for number, name in enumerate(names):
            chain = hashes(name, 20 * BLOCK)
            hint = hints or RequestHints()
            self.planner.on_new_request(name, chain, BLOCK, hint, self.now)
            [save] = self.step(name, 0, BLOCK, first=100 * number + 1).saves
            self.saved(save.job)
            self.at[name] = 1

    def completes(self, *names: str) -> StepPlan:
        """A step in which each of these requests completes its next block."""
        scheduled = []
        for name in names:
            number = self.at[name]
            self.at[name] = number + 1
            first = 100 * list(self.at).index(name) + 1
            ids = [list(range(first, first + number + 1))]
            end = (number + 1) * BLOCK
            scheduled.append(ScheduledRequest(name, end - 1, end, ids))
        return self.idle(*scheduled)


def make_odd(played: Played) -> None:
    """All other engines compute other KV than this one."""
    for name in (b"one", b"two"):
        played.planner.verifier.writers.on_wrong(BlockWriter(name, ""))


def ids(saves: list[SaveRequest]) -> list[tuple[int, ...]]:
    return [blocks.block_ids for save in saves for blocks in save.blocks]


def test_blocks_of_several_steps_are_one_save_with_parents_first() -> None:
    played = Decoding("a", "b")
    for block in (2, 3):
        plan = played.completes("a")
        assert not plan.saves
        assert plan.blocks_to_pin == [block]  # from now on: the request may end at any time
        assert played.planner.has_pending_work
    assert not played.completes("b").saves
    played.now += GATHER_S
    [save] = played.completes("a").saves
    assert ids([save]) == [(2, 3, 102, 4)]
    [blocks] = save.blocks
    chain, other = hashes("a", 4 * BLOCK), hashes("b", 2 * BLOCK)
    assert blocks.digests == (chain[1], chain[2], other[1], chain[3])
    assert blocks.parents == (chain[0], chain[1], other[0], chain[2])
    assert played.saved(save.job) == [2, 3, 102, 4]
    assert not played.planner.has_pending_work


def test_a_prompt_is_saved_at_once_and_takes_along_what_waits() -> None:
    played = Decoding("a")
    assert not played.completes("a").saves
    chain = hashes("prompt", 2 * BLOCK)
    played.planner.on_new_request("prompt", chain, 2 * BLOCK, RequestHints(), played.now)
    [save] = played.step("prompt", 0, 2 * BLOCK, first=50).saves
    assert ids([save]) == [(2, 50, 51)]
    assert save.blocks[0].parents[1:] == (ROOT, chain[0])


@pytest.mark.parametrize("why", ["", "preempted", "begun", "reset", "mismatch", "skip_save"])
def test_the_end_of_a_request_saves_the_blocks_that_no_step_has_looked_at(why: str) -> None:
    """Its next turn may come at once, to another engine."""
    played = Played(save_gather_s=GATHER_S, tokens_together=64)
    hints = RequestHints(skip_save=why == "skip_save")
    played.planner.on_new_request("a", hashes("a", 400), 100, hints, played.now)
    played.step("a", 0, 100)
    assert why == "skip_save" or played.planner.quiet.left("a") == 6 * BLOCK + 4 * BLOCK - 100
    if why == "preempted":
        played.planner.on_preempted("a")
    elif why == "begun":  # anew: nothing is in its blocks yet
        played.allocate("a", 10, 0)
    elif why == "reset":
        played.planner.on_reset()
    elif why == "mismatch":
        make_odd(played)
    rest = ScheduledRequest("a", 150, 150, [list(range(1, 11))])
    assert played.planner.save_rest(rest, played.now) == ([] if why else [7, 8, 9])
    played.planner.on_request_finished("a")
    assert ids(played.idle().saves) == ([] if why else [(7, 8, 9)])


@pytest.mark.parametrize("group", [CacheGroup(BLOCK, 1, 2), CacheGroup(BLOCK, 1, kept=False)])
def test_blocks_that_a_running_request_loses_are_not_waited_for(group: CacheGroup) -> None:
    played = Played(groups=(group,), tokens_together=64)
    played.arrive("a", 100)
    played.step("a", 0, 100)
    assert played.planner.quiet.left("a") == 7 * BLOCK - 100


def test_the_end_of_one_session_hurries_no_other() -> None:
    played = Decoding("a", hints=RequestHints(session="one"))
    chain = hashes("b", 20 * BLOCK)
    played.planner.on_new_request("b", chain, BLOCK, RequestHints(session="two"), played.now)
    played.step("b", 0, BLOCK, first=101)
    played.at["b"] = 1
    assert not played.completes("a", "b").saves
    played.planner.on_request_finished("a")
    [save] = played.idle().saves
    assert (save.session, ids([save])) == ("one", [(2,)])
    played.now += GATHER_S
    [save] = played.idle().saves
    assert (save.session, ids([save])) == ("two", [(102,)])


def test_a_preemption_or_an_idle_engine_ends_the_wait() -> None:
    played = Decoding("a", "b")
    played.completes("a")
    played.planner.on_preempted("b")  # the engine has no free blocks
    assert ids(played.idle().saves) == [(2,)]
    played.completes("a")
    plan = played.planner.plan_step((), lambda *block: True, played.now, idle=True)
    assert ids(plan.saves) == [(3,)]


def test_waiting_blocks_are_few_of_those_that_may_be_pinned() -> None:
    played = Decoding("a", saved_blocks_max=8)
    assert not played.completes("a").saves
    assert not played.completes("a").saves
    assert ids(played.completes("a").saves) == [(2, 3, 4)]
    assert not played.completes("a").saves  # counted anew


@pytest.mark.parametrize("why", ["reset", "mismatch"])
def test_what_may_not_be_shared_any_more_is_unpinned_and_never_saved(why: str) -> None:
    """The names after a reset are those of other weights; a mismatch is with all other engines."""
    played = Decoding("a")
    assert played.completes("a").blocks_to_pin == [2]
    if why == "reset":
        played.planner.on_reset()
        assert played.planner.has_pending_work
    else:
        make_odd(played)
    played.now += GATHER_S
    assert not played.idle().saves
    assert played.planner.saves.queue.take_dropped() == [2]
    assert played.planner.saves.queue.take_dropped() == []
    assert played.planner.saves.queue._gathered_blocks == 0
    assert not played.planner.has_pending_work
    assert played.planner.counters[f"dropped {why}"] == 1
