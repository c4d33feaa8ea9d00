"""Prompts with one prefix that arrive together: it is loaded once, and nobody waits in vain."""

from __future__ import annotations

import pytest

from kvpool import WriteStatus
from kvpool_connector.plan.cost_model import ONE_WAY
from kvpool_connector.plan.running_loads import RunningLoad, RunningLoads
from kvpool_connector.records.messages import LoadResult
from kvpool_connector.records.values import CacheGroup, ScheduledRequest
from tests.connector.test_planner import BLOCK, Played, hashes, matched

MIB = 1 << 20  # of a block


def knowing(load_s: float, prefill_s: float, **limits: object) -> Played:
    """A planner that has measured: six blocks are loaded in `load_s`, computed in `prefill_s`."""
    played = Played(**limits)
    for _ in range(20):
        played.planner.choice.transfer_cost.observe(6 * MIB, load_s)
    played.planner.choice.prefill_cost.observe([(0, 96)], prefill_s)
    return played


def loading(played: Played, name: str, tokens: int = 100, prompt: str = "p") -> None:
    """A request whose prompt the pool has, and that loads it."""
    blocks = (tokens - 1) // BLOCK
    played.look_up(name, tokens, blocks, prompt)
    assert played.offer(name, tokens) == blocks * BLOCK
    played.allocate(name, blocks + 1, blocks * BLOCK)


def waiting(played: Played, *names: str) -> None:
    """Requests with that prompt, too, which wait for its load."""
    for name in names:
        if name not in played.planner.requests:
            played.look_up(name, 100, 6, "p")
        assert played.offer(name, 100) is None


def ended(played: Played, name: str, blocks: int, complete: bool = True) -> None:
    request = played.planner.requests.get(name)
    seconds = played.now - request.load.started_at if request and request.load else 0.0
    result = LoadResult(name, blocks * MIB, complete, seconds)
    played.planner.on_load_result(result, played.now)


def test_a_prefix_that_is_being_loaded_is_waited_for() -> None:
    played = knowing(0.1, 1.0)
    loading(played, "a")
    waiting(played, *"bcd")
    waiting(played, *"bcd")
    assert len(played.idle().loads) == 1
    played.now += 0.1
    ended(played, "a", 6)
    for name in "bcd":
        assert played.offer(name, 100, computed=96) == 0  # the engine has it by now
    assert played.planner.counters["load_waits"] == 3
    assert played.planner.counters["load_wait_s"] == pytest.approx(0.3)


@pytest.mark.parametrize(("later_s", "blocks", "complete"), [(0.1, 6, True), (0.0, 3, False)])
def test_what_is_behind_the_shared_prefix_is_loaded_afterwards(
    later_s: float, blocks: int, complete: bool
) -> None:
    """Also where only the first one's own tail was lost: what the others need of it is there."""
    played = knowing(0.1, 10.0)
    loading(played, "a")
    chain = hashes("p", 48) + hashes("own", 200)
    played.look_up("b", 200, 12, chain=chain)
    assert played.offer("b", 200) is None
    played.now += later_s
    ended(played, "a", blocks, complete=complete)
    assert played.offer("b", 200, computed=48) == 144


def test_the_beginning_of_a_long_load_is_not_waited_for() -> None:
    """The engine learns only of its end; and long and short loads take turns at the link."""
    played = knowing(0.1, 1.0)
    played.planner.choice.prefill_cost.observe([(96, 6400)], 100.0)
    loading(played, "long", 6400)
    played.look_up("b", 100, 6, "p")
    assert played.offer("b", 100) == 96
    assert played.planner.requests["b"].choice.estimates.load_s == pytest.approx(0.2)


def test_nobody_waits_longer_than_computing_takes() -> None:
    played = knowing(0.1, 1.0)
    loading(played, "a")
    played.planner.choice.prefill_cost.observe([(0, 96)] * 50, 0.001)  # it has become fast
    played.look_up("b", 100, 6, "p")
    assert played.offer("b", 100) == 0
    played.allocate("b", 7, 0)
    assert played.planner.counters["decision slower"] == 1


def test_a_request_that_is_aborted_while_it_loads_delays_no_other() -> None:
    played = knowing(0.1, 1.0)
    loading(played, "a")
    waiting(played, *"bc")
    played.planner.on_request_finished("a")
    assert played.offer("b", 100) == 96
    played.allocate("b", 7, 96)
    assert played.offer("c", 100) is None  # now for that one
    ended(played, "a", 6)  # of a request that is gone
    assert played.offer("c", 100) is None
    played.now += 0.1
    ended(played, "b", 6)
    assert played.offer("c", 100, computed=96) == 0


def test_a_load_whose_blocks_are_lost_is_not_tried_by_each() -> None:
    """24 requests would find out one after the other; and they save the blocks anew."""
    played = knowing(0.1, 1.0)
    loading(played, "a")
    names = [f"b{number}" for number in range(24)]
    waiting(played, *names)
    played.now += 0.01
    ended(played, "a", 2, complete=False)
    for name in names:
        assert played.offer(name, 100, computed=32) == 0
    (save,) = played.step("b7", 32, 100).saves
    assert save.blocks[0].digests == tuple(hashes("p", 96)[2:])


def test_a_late_load_is_waited_for_as_long_as_one_of_ones_own() -> None:
    played = knowing(0.1, 1.0)
    loading(played, "a")
    waiting(played, "b")
    played.now += 0.59
    assert played.offer("b", 100) is None
    played.now += 0.02  # three times what its own load beside the other one would take
    assert played.offer("b", 100) == 0
    played.allocate("b", 7, 0)
    assert played.planner.counters["decision late"] == 1


def test_waiting_for_one_load_after_the_other_has_one_deadline() -> None:
    played = knowing(0.1, 1.0)
    loading(played, "a0")
    played.look_up("b", 100, 6, "p")
    for number in range(5):
        assert played.offer("b", 100) is None
        played.now += 0.115
        played.planner.on_request_finished(f"a{number}")
        loading(played, f"a{number + 1}")
    played.now += 0.03
    assert played.offer("b", 100) == 0


def test_a_load_that_was_aborted_for_slowness_is_judged_by_the_estimate() -> None:
    played = knowing(0.1, 1.0)
    loading(played, "a")
    waiting(played, *"bc")
    played.now += 0.5
    ended(played, "a", 0, complete=False)
    assert [played.offer(name, 100) for name in "bc"] == [0, 0]
    assert played.planner.requests["b"].matches, "the pool has them, only slowly"


def test_a_request_that_starts_anew_waits_for_nothing() -> None:
    played = knowing(0.1, 1.0)
    loading(played, "a")
    waiting(played, "b")
    lookup = played.planner.on_restart("b", 100, played.now)
    assert played.planner.requests["b"].choice.shared is None
    played.planner.lookups.on_result("b", lookup.serial, [matched(6)], "")
    assert played.offer("b", 100) is None  # and then for that load again, with a new deadline
    played.now += 0.4
    assert played.offer("b", 100) is None


@pytest.mark.parametrize("count", [8, 24])
@pytest.mark.parametrize(("load_s", "prefill_s"), [(0.1, 1.0), (0.9, 1.0), (2.0, 1.0)])
def test_a_swarm_reads_its_prefix_once(count: int, load_s: float, prefill_s: float) -> None:
    """And is through no later than an engine that computes it."""
    played = knowing(load_s, prefill_s, loads_max=4)
    began, computed, bytes_read = played.now, 0, 0
    ends_at: dict[str, float] = {}
    waiting = [f"r{number}" for number in range(count)]
    for name in waiting:
        played.look_up(name, 100, 6, "p")
    while waiting:
        for name in tuple(waiting):
            if name in ends_at:
                continue
            offered = played.offer(name, 100, computed)
            if offered is None:
                continue
            played.allocate(name, 7, offered)
            if offered:
                ends_at[name] = played.now + load_s
            else:
                waiting.remove(name)
                played.now += prefill_s * (96 - computed) / 96
                computed = 96
        for load in played.idle().loads:
            bytes_read += sum(len(blocks.digests) for blocks in load.blocks) * MIB
        played.now += 0.001
        for name, end in tuple(ends_at.items()):
            if played.now >= end:
                ended(played, name, 6)
                del ends_at[name]
                computed = 96
    assert bytes_read <= 6 * MIB
    assert played.now - began <= prefill_s + 0.1


# --- the table of running loads -------------------------------------------------------------------


def running(prompt: str, first: int, last: int) -> RunningLoad:
    chain = hashes(prompt, last)
    return RunningLoad(chain, first, last, (last - first) << 16, ONE_WAY, 0.0, 1.0, None, 2.0, 1)


def test_the_load_that_brings_most_is_found() -> None:
    loads = RunningLoads(BLOCK, BLOCK)
    short, long, other = running("p", 0, 32), running("p", 0, 64), running("q", 0, 320)
    for load in (short, long, other):
        loads.start(load)
    assert loads.bringing(hashes("p", 320), 0, 320) == (long, 64)
    assert loads.bringing(hashes("p", 320), 0, 48) == (long, 48)
    assert loads.bringing(hashes("p", 320), 48, 320) == (long, 64)
    assert loads.bringing(hashes("p", 320), 64, 320) is None
    forked = hashes("p", 32) + hashes("fork", 320)
    found = loads.bringing(forked, 0, 320)
    assert found[1] == 32
    loads.end(long)
    assert loads.bringing(hashes("p", 320), 32, 320) is None
    assert not long.running


def test_a_load_that_begins_later_does_not_bring_the_beginning() -> None:
    loads = RunningLoads(BLOCK, BLOCK)
    loads.start(running("p", 32, 64))
    assert loads.bringing(hashes("p", 64), 16, 64) is None
    assert loads.bringing(hashes("p", 64), 32, 64) is not None


def test_groups_of_other_block_sizes_share_loads_in_whole_units() -> None:
    groups = (CacheGroup(2 * BLOCK, 2), CacheGroup(4 * BLOCK, 4))
    played = Played(groups=groups, load="always")
    for name, tail in (("a", "x"), ("b", "y")):
        played.look_up(name, 290, [8, 4], chain=hashes("p", 96) + hashes(tail, 200))
    assert played.offer("a", 290) == 256
    ids = [list(range(1, 11)), list(range(1, 6))]
    played.planner.on_blocks_allocated("a", ids, 256, played.now)
    assert played.offer("b", 290) is None
    shared = played.planner.requests["b"].choice.shared
    assert shared.last == 64, "96 equal tokens are one and a half units"


# --- saves ----------------------------------------------------------------------------------------


def scheduled(name: str) -> ScheduledRequest:
    return ScheduledRequest(name, 0, 100, [[1, 2, 3, 4, 5, 6, 7]])


def test_a_swarm_saves_its_prefix_once() -> None:
    """Also who is scheduled when it has been saved: when he asked the pool, it was not."""
    played = Played()
    names = [f"r{number}" for number in range(24)]
    for name in names:
        played.look_up(name, 100, 0, "p")
    played.now += 1
    (save,) = played.idle(*(scheduled(name) for name in names[:8])).saves
    assert len(save.blocks[0].digests) == 6
    assert not played.idle(*(scheduled(name) for name in names[8:16])).saves
    played.saved(save.job)
    assert not played.idle(*(scheduled(name) for name in names[16:])).saves
    assert played.planner.counters["saved_blocks"] == 6


def test_who_asks_after_a_save_and_finds_nothing_saves_again() -> None:
    """The pool has evicted it."""
    played = Played()
    played.look_up("a", 100, 0, "p")
    (save,) = played.idle(scheduled("a")).saves
    played.saved(save.job)
    played.look_up("b", 100, 0, "p")
    (save,) = played.idle(scheduled("b")).saves
    assert len(save.blocks[0].digests) == 6


def test_a_block_that_waits_for_a_retry_is_saved_by_who_comes_first() -> None:
    played = Played()
    played.look_up("a", 100, 0, "p")
    (save,) = played.idle(scheduled("a")).saves
    played.saved(save.job, (hashes("p", 96)[2], WriteStatus.NO_SPACE))
    played.look_up("b", 100, 0, "p")
    (save,) = played.idle(scheduled("b")).saves
    assert hashes("p", 96)[2] in save.blocks[0].digests
    played.now += 50
    assert not played.idle().saves
