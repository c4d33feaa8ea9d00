"""The planner's bounds and accounts: what fits exactly, what is given back, what is counted."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool import Match, ReadStatus, Replica, Run, WriteStatus
from kvpool_connector.plan.cost_model import PrefillCost, TransferCost
from kvpool_connector.plan.save_queue import WAITING_BLOCKS_MAX, SaveQueue, SaveRun
from kvpool_connector.records.messages import LoadResult, ProbeResult, SaveResult
from kvpool_connector.records.provenance import BlockWriter
from kvpool_connector.records.values import (
    CacheGroup,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
)
from tests.connector.test_planner import Played, hashes, matched

MIB = 1 << 20


def estimating(played: Played, load_s: float, prefill_s: float) -> None:
    """Every load and every prefill is estimated to take so long."""
    played.planner.choice.transfer_cost.seconds = lambda size, route: load_s  # type: ignore[method-assign]
    played.planner.choice.prefill_cost.seconds = lambda first, last: prefill_s  # type: ignore[method-assign]


# --- bounds that are met exactly -------------------------------------------------------------


def test_the_last_token_is_computed_when_the_prompt_ends_with_a_block() -> None:
    played = Played()
    played.look_up("a", 100, 6)
    assert played.offer("a", 97) == 96
    assert played.offer("a", 96) == 80


def test_a_load_that_takes_as_long_as_computing_is_not_chosen() -> None:
    played = Played()
    played.look_up("a", 100, 6)
    estimating(played, 1.0, 1.0)
    assert played.offer("a", 100) == 0
    estimating(played, 0.999, 1.0)
    assert played.offer("a", 100) == 96


def test_a_probe_is_due_when_its_time_has_passed() -> None:
    played = Played(probe_every_s=4.0)
    estimating(played, 2.0, 1.0)
    for after_s, probed in ((0.0, True), (3.5, False), (0.5, True)):
        played.now += after_s
        played.look_up(f"r{played.now}", 100, 6)
        assert played.offer(f"r{played.now}", 100) == 0
        assert (played.idle().probe is not None) is probed
        if probed:
            played.planner.prober.on_result(ProbeResult(MIB, 0.5))


@pytest.mark.parametrize(("waited_s", "slow"), [(9.5, False), (10.0, True)])
def test_a_probe_that_waited_all_of_its_time_is_a_measurement(waited_s: float, slow: bool) -> None:
    played = Played(load_timeout_s=10.0)
    played.planner.prober.on_result(ProbeResult(0, waited_s))
    assert (played.planner.choice.transfer_cost.samples == 1) is slow
    assert (played.planner.choice.transfer_cost.seconds(4 * MIB) > 1.0) is slow


def test_a_probe_reads_one_block_although_that_is_larger_than_a_probe() -> None:
    played = Played()
    played.planner.windows.block_bytes = (8 * MIB,)
    estimating(played, 2.0, 1.0)
    played.look_up("a", 100, 6)
    assert played.offer("a", 100) == 0
    probe = played.idle().probe
    assert probe.blocks[0].digests == tuple(hashes("a", 16))
    assert played.planner.prober.blocks(3 << 19) == 3, "servers share it, which two would not be"


# --- what is given back ----------------------------------------------------------------------


def test_every_rank_ends_its_probe_before_there_is_another() -> None:
    played = Played(ranks=3, probe_every_s=1.0)
    estimating(played, 2.0, 1.0)
    probes = []
    for number in range(5):
        played.look_up(f"r{number}", 100, 6)
        assert played.offer(f"r{number}", 100) == 0
        probes.append(played.idle().probe is not None)
        played.planner.prober.on_result(ProbeResult(0, 0.001))
        played.now += 2
    assert probes == [True, False, False, True, False]


def test_a_restarted_request_has_nothing_of_its_first_life() -> None:
    """Neither a match, which may be of blocks that are gone, nor blocks that were saved."""
    played = Played(lookup_timeout_s=0.05)
    played.look_up("a", 100, 4)
    assert played.offer("a", 100) == 64
    played.now += 1
    assert played.planner.on_restart("a", 100, played.now) is not None
    assert played.offer("a", 100) is None  # its lookup has as long as the first one
    played.now += 1
    assert played.offer("a", 100) == 0
    (save,) = played.step("a", 0, 100).saves
    assert save.blocks[0].block_ids == (1, 2, 3, 4, 5, 6)


def test_a_preempted_request_takes_no_offer_and_saves_its_blocks_anew() -> None:
    """Its blocks are computed again, into other ones: those that were saved are gone."""
    played = Played()
    played.planner.on_preempted("nobody")
    played.look_up("a", 100, 5)
    assert played.offer("a", 100) == 80
    played.planner.on_preempted("a")
    played.allocate("a", 7, 80)
    assert not played.idle().loads
    played.arrive("b", 64)
    (save,) = played.step("b", 0, 64).saves
    played.saved(save.job)
    played.planner.on_preempted("b")
    (save,) = played.step("b", 0, 64, first=11).saves
    assert save.blocks[0].block_ids == (11, 12, 13, 14)


def test_a_late_answer_does_not_take_back_what_was_saved_meanwhile() -> None:
    played = Played()
    lookup = played.arrive("a", 100)
    (save,) = played.step("a", 0, 100).saves
    played.saved(save.job)
    played.planner.lookups.on_result("a", lookup.serial, [matched(2)], "")
    assert not played.step("a", 100, 101).saves


# --- what is counted and measured ------------------------------------------------------------


def test_seconds_and_loads_add_up() -> None:
    played = Played()
    for name in ("a", "b"):
        played.load(name)
        played.planner.on_load_result(LoadResult(name, 6 * MIB, True, 0.006), played.now + 0.5)
    assert played.planner.counters["load_s"] == pytest.approx(1.0)
    # The engine learns of an end after its step; the worker knows how long it took.
    assert played.planner.choice.transfer_cost.seconds(6 * MIB) == pytest.approx(0.006)
    assert played.planner.counters["loads"] == 2


def test_of_several_ranks_the_one_that_moved_most_is_measured() -> None:
    for order in ((6 * MIB, 1 * MIB), (1 * MIB, 6 * MIB)):
        played = Played(ranks=2)
        played.load("a")
        for size in order:
            played.planner.on_load_result(LoadResult("a", size, True, 0.5), played.now + 0.5)
        assert played.planner.choice.transfer_cost.seconds(6 * MIB) == pytest.approx(0.5)


@pytest.mark.parametrize("complete", [(False, True), (True, False), (False, False)])
def test_a_load_that_failed_on_one_rank_has_failed(complete: tuple[bool, bool]) -> None:
    """The tokens are computed on every rank, and saved again."""
    played = Played(ranks=2)
    played.load("a")
    for one in complete:
        assert played.planner.counters["loads_failed"] == 0
        played.planner.on_load_result(LoadResult("a", 6 * MIB, one, 0.1), played.now + 0.1)
    assert played.planner.counters["loads_failed"] == 1
    assert played.offer("a", 100) == 0
    assert played.step("a", 0, 100).blocks_to_pin == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_one_rank_has_met_the_whole_load_has_met(order: tuple[int, int]) -> None:
    """A refusal by one rank is one: the tokens are computed, and compared. A load that has brought
    blocks of a writer to one rank counts for that writer."""
    writer = BlockWriter(b"w" * 8, "other")
    results = (
        LoadResult("a", 0, False, 0.1, writers=frozenset({writer}), refused=frozenset({b"r" * 8})),
        LoadResult("a", 6 * MIB, True, 0.1),
    )
    played = Played(ranks=2, loads_per_check=4)
    played.planner.verifier.writers.on_equal([writer.id])
    assert not played.planner.verifier.writers.due
    played.load("a")
    for one in order:
        played.planner.on_load_result(results[one], played.now + 0.1)
    assert played.planner.counters["loads_refused"] == 1
    assert played.planner.verifier.watched == "a"
    assert played.planner.verifier.writers.due == {writer.id}


@pytest.mark.parametrize(
    ("computed", "taken", "expected"), [(16, 64, {"dram": 32, "nvme": 32}), (48, 48, {"nvme": 32})]
)
def test_what_is_loaded_is_counted_as_a_hit_where_it_is_read(
    computed: int, taken: int, expected: dict[str, int]
) -> None:
    """Neither what the engine had itself or does not take, nor what no server has any more."""
    played = Played()
    runs = (
        Run(0, 0, (Replica("a", "hbm"),)),
        Run(1, 2, (Replica("a", "dram"), Replica("b", "nvme"))),
        Run(3, 4, (Replica("b", "nvme"),)),
        Run(5, 5, ()),
    )
    played.look_up("a", 100, [Match(runs, 6, ReadStatus.HIT)])
    assert played.offer("a", 100, computed) == 96 - computed
    played.allocate("a", 7, taken)
    counted = {name: n for name, n in played.planner.counters.items() if name.startswith("hit_")}
    assert counted == {f"hit_tokens {tier}": tokens for tier, tokens in expected.items()}


def test_estimates_are_of_the_tokens_that_are_missing() -> None:
    played = Played()
    asked: list[tuple[int, int]] = []
    sizes: list[int] = []

    def load_s(size: int, route: object) -> float:
        sizes.append(size)
        return 0.25

    def prefill_s(first: int, last: int) -> float:
        asked.append((first, last))
        return 4.0

    played.planner.choice.transfer_cost.seconds = load_s  # type: ignore[method-assign]
    played.planner.choice.prefill_cost.seconds = prefill_s  # type: ignore[method-assign]
    played.look_up("a", 100, 6)
    assert played.offer("a", 100, 48) == 48
    played.allocate("a", 7, 48)
    assert (asked[0], sizes[0]) == ((48, 96), 3 * MIB)
    assert played.planner.counters["estimated_load_s"] == 0.25
    assert played.planner.counters["estimated_prefill_s"] == 4.0


def test_the_shortest_match_has_the_reason_of_a_miss() -> None:
    groups = (CacheGroup(16, 1), CacheGroup(16, 1))
    for lengths, reason in (((5, 2), "evicted"), ((2, 5), "removed")):
        played = Played(groups=groups)
        first, second = lengths
        matches = [matched(first, ReadStatus.REMOVED), matched(second, ReadStatus.EVICTED)]
        played.look_up("a", 100, matches)
        assert played.planner.counters[f"miss {reason}"] == 1


# --- which blocks ------------------------------------------------------------------------------


def test_blocks_with_a_hole_between_them_are_looked_up_when_they_are_read() -> None:
    """A match is of consecutive blocks: with a hole it would name other blocks."""
    played = Played()
    played.look_up("a", 100, 6)
    assert played.offer("a", 100) == 96
    played.planner.on_blocks_allocated("a", [[1, 0, 3, 4, 5, 6, 7]], 96, played.now)
    (blocks,) = played.idle().loads[0].blocks
    assert blocks.block_ids == (1, 3, 4, 5, 6)
    assert blocks.match is None


#: Groups of a hybrid model: blocks of 32 tokens, two hashes each, and of 16 tokens.
COARSE_AND_FINE = (CacheGroup(32, 2), CacheGroup(16, 1))


def saved_blocks(played: Played, start: int, end: int) -> list[tuple[int, ...]]:
    """The ids that a step saves of each group; block n of the groups is 1 + n and 101 + n."""
    ids = [[first + number for number in range(20)] for first in (1, 101)]
    saves = played.idle(ScheduledRequest("a", start, end, ids)).saves
    return [blocks.block_ids for save in saves for blocks in save.blocks]


def test_each_group_saves_its_own_blocks_once() -> None:
    played = Played(groups=COARSE_AND_FINE)
    played.arrive("a", 200)
    assert saved_blocks(played, 0, 50) == [(1,), (101, 102, 103)]
    assert saved_blocks(played, 50, 64) == [(2,), (104,)]
    assert saved_blocks(played, 64, 80) == [(105,)]
    assert saved_blocks(played, 80, 160) == [(3, 4, 5), (106, 107, 108, 109, 110)]


def test_what_the_pool_has_of_one_group_is_not_saved_again() -> None:
    played = Played(groups=COARSE_AND_FINE)
    played.look_up("a", 200, [1, 7])
    assert saved_blocks(played, 0, 50) == []
    assert saved_blocks(played, 50, 160) == [(2, 3, 4, 5), (108, 109, 110)]


def test_after_a_failed_load_each_group_saves_what_was_to_be_loaded() -> None:
    played = Played(groups=COARSE_AND_FINE)
    played.look_up("a", 200, [4, 10])
    assert played.offer("a", 200, 64) == 64
    ids = [[first + number for number in range(20)] for first in (1, 101)]
    played.planner.on_blocks_allocated("a", ids, 64, played.now)
    (request,) = played.idle().loads
    assert [blocks.block_ids for blocks in request.blocks] == [(3, 4), (105, 106, 107, 108)]
    played.planner.on_load_result(LoadResult("a", 0, False, 0.0), played.now)
    assert saved_blocks(played, 64, 192) == [(3, 4, 5, 6), tuple(range(105, 113))]


def test_blocks_whose_hashes_are_not_there_yet_are_saved_later() -> None:
    """An engine may hash a block some steps after it was computed."""
    played = Played(groups=COARSE_AND_FINE)
    chain = hashes("a", 128)
    known = chain[:3]
    played.planner.on_new_request("a", known, 48, RequestHints(), played.now)
    assert saved_blocks(played, 0, 128) == [(1,), (101, 102, 103)]
    known += chain[3:]
    assert saved_blocks(played, 128, 129) == [(2, 3, 4), (104, 105, 106, 107, 108)]


def test_a_retry_belongs_to_no_session() -> None:
    """The session may have ended meanwhile; and a step has the saves of other sessions, too."""
    played = Played()
    played.arrive("a", 64, RequestHints("one", 5.0))
    (save,) = played.step("a", 0, 64).saves
    assert (save.session, save.resume_in_s) == ("one", 5.0)
    chain = hashes("a", 64)
    played.saved(save.job, (chain[3], WriteStatus.NO_SPACE))
    played.now += 50
    played.arrive("b", 64, RequestHints("two", 7.0))
    saves = played.step("b", 0, 64, first=11).saves
    found = {save.session: save.blocks[0].block_ids for save in saves}
    assert found == {"two": (11, 12, 13, 14), "": (4,)}


# --- the queue of saves --------------------------------------------------------------------------


def queue(pinned_blocks_max: int = 100, counters: Counter[str] | None = None) -> SaveQueue:
    counted = Counter() if counters is None else counters
    return SaveQueue(counted, PlannerLimits(saved_blocks_max=pinned_blocks_max), ranks=1)


def may_pin(saves: SaveQueue, blocks: int) -> None:
    saves._limits = PlannerLimits(saved_blocks_max=blocks)


def refuse(saves: SaveQueue, items: list[SaveRun], now: float) -> None:
    """Save blocks, all of which the pool refuses."""
    saves.add(items, "", None, now)
    [request] = saves.take_saves(now)
    refused = tuple((0, *one.digests, WriteStatus.NO_SPACE) for one in items)
    saves.on_result(SaveResult(request.job, 0, refused), now)


def test_each_retry_waits_twice_as_long_as_the_one_before() -> None:
    saves, waiting, now = queue(), [chain(1, 2)], 0.0
    for wait_s in (1.0, 2.0, 4.0):
        refuse(saves, waiting, now)
        assert not saves.take_due(lambda *_: True, now + wait_s - 0.01)
        now += wait_s
        waiting = saves.take_due(lambda *_: True, now)
        assert [one.number for one in waiting] == [1]


def test_a_block_that_waits_longer_delays_no_other() -> None:
    saves = queue()
    refuse(saves, [chain(1, 2)], 0.0)
    refuse(saves, saves.take_due(lambda *_: True, 1.0), 1.0)  # its second retry is due at 3.0
    refuse(saves, [chain(2, 3)], 1.5)
    assert [one.number for one in saves.take_due(lambda *_: True, 2.5)] == [2]
    assert [one.number for one in saves.take_due(lambda *_: True, 3.0)] == [1]


def test_the_blocks_that_have_waited_longest_are_dropped() -> None:
    counters: Counter[str] = Counter()
    saves = queue(0, counters)
    many = [chain(number, number + 1) for number in range(WAITING_BLOCKS_MAX + 2)]
    assert not saves.add(many, "", None, 0.0)
    assert not saves.take_saves(0.0)
    assert counters["dropped too many waiting"] == 2
    may_pin(saves, 1 << 20)
    assert saves.take_due(lambda *_: True, 0.0)[0].number == 2


def chain(first: int, last: int, asked_at: float = 0.0, name: str = "a") -> SaveRun:
    """Blocks of one prompt, as a step that computes it at once reports them."""
    digests = [number.to_bytes(32, "big") for number in range(first, last)]
    before = (first - 1).to_bytes(32, "big") if first else b"root"
    return SaveRun(name, 0, first, digests, before, range(first + 1, last + 1), asked_at)


def test_a_prompt_of_which_another_request_saves_a_part_saves_the_rest_of_it() -> None:
    saves = queue()
    assert saves.add([chain(4, 6)], "", None, 0.0) == [5, 6]
    assert saves.add([chain(0, 9, name="b")], "other", None, 0.0) == [1, 2, 3, 4, 7, 8, 9]
    _, rest = saves.take_saves(0.0)
    (blocks,) = rest.blocks
    assert blocks.block_ids == (1, 2, 3, 4, 7, 8, 9)
    assert [int.from_bytes(one, "big") for one in blocks.parents[1:]] == [0, 1, 2, 5, 6, 7]


def test_a_block_that_two_requests_complete_in_one_step_is_saved_once() -> None:
    saves = queue()
    assert saves.add([chain(0, 2), chain(1, 3, name="b")], "", None, 0.0) == [1, 2, 3]
    (save,) = saves.take_saves(0.0)
    assert saves.on_result(SaveResult(save.job, 0, ()), 0.0)[0] == [1, 2, 3]
    assert not saves.running


def test_only_the_blocks_that_were_refused_are_tried_again_each_with_its_own_parent() -> None:
    saves = queue(counters=(counters := Counter()))
    prompt = chain(0, 5)
    saves.add([prompt], "", None, 0.0)
    (save,) = saves.take_saves(0.0)
    full, for_good = WriteStatus.NO_SPACE, WriteStatus.BYPASSED
    refused = [(0, prompt.digests[n], full if n < 4 else for_good) for n in (1, 3, 4)]
    unpinned, stored = saves.on_result(SaveResult(save.job, 0, tuple(refused)), 0.0)
    assert unpinned == [1, 2, 3, 4, 5]
    assert [(run.number, len(run.digests)) for run in stored] == [(0, 1), (2, 1)]
    due = saves.take_due(lambda *_: True, 10.0)
    assert [(run.number, run.parent) for run in due] == [
        (1, prompt.digests[0]),
        (3, prompt.digests[2]),
    ]
    assert counters["dropped bypassed"] == 1


def test_what_waits_for_a_pin_follows_in_order_and_a_block_that_was_overwritten_is_dropped() -> (
    None
):
    saves = queue(pinned_blocks_max=2)
    assert saves.add([chain(0, 7)], "", None, 0.0) == [1, 2]
    assert not saves.take_due(lambda *_: True, 1.0), "no block may be pinned"
    (save,) = saves.take_saves(0.0)
    saves.on_result(SaveResult(save.job, 0, ()), 1.0)
    due = saves.take_due(lambda block, *_: block != 5, 1.0)
    assert [list(run.block_ids) for run in due] == [[3, 4], [6, 7]]
    assert due[1].parent == (4).to_bytes(32, "big")
    assert saves.add(due, "", None, 1.0) == [3, 4]


def test_a_block_that_waits_for_two_requests_is_saved_from_where_it_lies_for_the_later_one() -> (
    None
):
    """The engine may have given the first one's block to others meanwhile."""
    saves = queue(pinned_blocks_max=0)
    saves.add([chain(0, 4)], "", None, 0.0)
    saves.add([chain(2, 3, name="b")._replace(block_ids=[99])], "", None, 0.0)
    may_pin(saves, 100)
    due = saves.take_due(lambda *_: True, 0.0)
    assert sorted(block for run in due for block in run.block_ids) == [1, 2, 4, 99]


def test_only_what_waits_now_counts_against_the_limit_of_what_may_wait() -> None:
    saves = queue(pinned_blocks_max=0)
    for first in range(0, 2 * WAITING_BLOCKS_MAX, 64):
        saves.add([chain(first, first + 64)], "", None, 0.0)
        may_pin(saves, 1)
        assert sum(len(run.digests) for run in saves.take_due(lambda *_: True, 0.0)) == 64
        may_pin(saves, 0)


def test_stored_blocks_are_left_out_for_those_who_asked_before_and_forgotten_in_time() -> None:
    saves = queue(pinned_blocks_max=1 << 20)

    def store(run: SaveRun, now: float) -> int:
        ids = saves.add([run], "", None, now)
        for save in saves.take_saves(now):
            saves.on_result(SaveResult(save.job, 0, ()), now)
        return len(ids)

    assert store(chain(0, 10), 1.0) == 10
    assert store(chain(0, 12, asked_at=0.5), 2.0) == 2
    assert store(chain(0, 10, asked_at=1.5), 3.0) == 10, "the pool has lost it since"
    store(chain(50_000, 59_000), 3.0)
    assert saves._stored_before[0].keys() >= set(chain(0, 10).digests)
    assert store(chain(0, 10, asked_at=2.5), 3.5) == 0
    for first in range(100, 40_000, 5000):
        store(chain(first, first + 5000), 4.0)
    held = sum(len(of) for one in (saves._stored, saves._stored_before) for of in one.values())
    assert held <= 1 << 14
    assert store(chain(0, 10), 5.0) == 10, "forgotten: offered once more"


@pytest.mark.parametrize("why_not", ["", "it was stored later", "reset"])
def test_what_was_lost_before_the_engine_heard_of_its_save_is_saved_again(why_not: str) -> None:
    """An engine that does not step hears late. Whoever asked while the save ran asked too early."""
    saves = SaveQueue(Counter(), PlannerLimits(saved_blocks_max=100), ranks=2)
    for first, last in ((0, 3), (90, 91)):
        saves.add([chain(first, last)], str(first), None, 0.0)
    save, other = saves.take_saves(0.0)
    for name in "abc":
        assert saves.add([chain(1, 3, asked_at=3.5, name=name)], "", None, 4.0) == []
    assert len(saves._again) == 1, "no step has time for all with this prompt"
    for _rank in range(2):
        saves.on_result(SaveResult(other.job, 0, ()), 4.0)
    assert not saves.take_due(lambda *_: True, 4.0), "it may be stored yet"
    if why_not == "reset":
        saves.reset()
        saves.add([chain(50, 51)], "", None, 4.0)
        (save,) = saves.take_saves(4.0)
    for age_s in (1.0 if why_not else 2.0, 2.0):
        saves.on_result(SaveResult(save.job, 0, (), age_s), 5.0)
    due = [block for run in saves.take_due(lambda *_: True, 5.0) for block in run.block_ids]
    assert (due, saves._again) == ([] if why_not else [2, 3], {})


# --- costs ---------------------------------------------------------------------------------------


def test_a_step_of_several_prompts_is_shared_by_tokens() -> None:
    prefill = PrefillCost()
    prefill.observe([(0, 300), (8000, 8100)], 4.0)
    assert prefill.seconds(0, 300) == pytest.approx(3.0)
    assert prefill.seconds(8000, 8100) == pytest.approx(1.0)


def test_each_length_of_a_context_has_its_own_speed() -> None:
    """Attention makes late tokens dearer: what is measured at one length says little of others."""
    prefill = PrefillCost()
    assert prefill.seconds(0, 100) is None
    measured = {(0, 1024): 1.0, (1024, 2048): 3.0, (2048, 4096): 8.0}
    for (first, last), seconds in measured.items():
        prefill.observe([(first, last)], seconds)
    for (first, last), seconds in list(measured.items())[1:]:
        assert prefill.seconds(first, last) == pytest.approx(seconds)
    assert prefill.seconds(1024, 4096) == pytest.approx(11.0)
    assert prefill.seconds(512, 1024) == pytest.approx(0.5)
    early = prefill.seconds(0, 512)
    prefill.observe([(0, 4)], 100.0)  # a step with a few tokens says nothing about them
    assert prefill.seconds(0, 512) == early


def test_a_transfer_of_nothing_known_is_no_free_one() -> None:
    free, cost = TransferCost(), TransferCost()
    free.observe(0, 0.0)
    assert free.seconds(MIB) > 0
    cost.observe(0, 0.5)
    assert cost.seconds(3) == pytest.approx(1.5)


def test_a_prompt_that_waits_for_anothers_load_has_not_decided() -> None:
    played = Played(load="always")
    played.load("a", prompt="p")
    played.look_up("b", 100, 6, "p")
    assert played.offer("b", 100) is None
    before = dict(played.planner.counters)
    played.allocate("b", 7, 0)
    assert dict(played.planner.counters) == before


def test_what_a_save_of_former_weights_stored_is_saved_again() -> None:
    played = Played()
    played.arrive("a", 64, prompt="p")
    (save,) = played.step("a", 0, 64).saves
    played.planner.on_reset()
    played.arrive("b", 64, prompt="p")
    played.now += 1
    assert played.saved(save.job) == [1, 2, 3, 4]
    assert played.planner.counters["saved_blocks"] == 0
    assert played.step("b", 0, 64).saves
