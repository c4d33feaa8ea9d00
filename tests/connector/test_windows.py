"""Of a sliding window the end of a prefix is enough, and only that is asked for and loaded."""

from __future__ import annotations

import random

import pytest

from kvpool import Match, ReadStatus
from kvpool.types import Replica, Run
from kvpool_connector.plan.windows import Windows
from kvpool_connector.records.messages import LoadResult
from kvpool_connector.records.values import (
    CacheGroup,
    LookupRequest,
    RequestHints,
    ScheduledRequest,
)
from tests.connector.test_planner import BLOCK, Played, hashes, matched

#: The first group has a window of three blocks, the second one needs every block.
GROUPS = (CacheGroup(BLOCK, 1, 3), CacheGroup(BLOCK, 1))
TOKENS = 10 * BLOCK + 1


def look_up(
    played: Played, window: int, whole: int, hints: RequestHints | None = None
) -> LookupRequest | None:
    """The pool has so many blocks of the prefix, by group. Returns what is asked next."""
    return played.look_up("a", TOKENS, [window, whole], hints=hints or RequestHints())


def test_the_end_of_the_window_is_asked_for_where_its_beginning_is_lost() -> None:
    played = Played(groups=GROUPS)
    asked = look_up(played, 0, 8)
    assert asked.groups == (0,)
    assert asked.chains == (tuple(hashes("a", TOKENS)[5:8]),)
    assert played.offer("a", TOKENS) is None  # the request waits for that as well
    assert played.planner.lookups.on_result("a", asked.serial, [matched(3)], "") is None
    assert played.offer("a", TOKENS) == 8 * BLOCK
    ids = [[0, 0, 0, 0, 0, 11, 12, 13], list(range(21, 29))]
    played.planner.on_blocks_allocated("a", ids, 8 * BLOCK, played.now)
    (load,) = played.idle().loads
    assert [blocks.block_ids for blocks in load.blocks] == [(11, 12, 13), tuple(range(21, 29))]
    assert load.blocks[0].match == Match(
        (Run(0, 2, (Replica("a", "dram"),)),), 3, ReadStatus.NEVER_WRITTEN
    )
    assert played.planner.counters["hit_tokens dram"] == 8 * BLOCK
    played.planner.on_load_result(LoadResult("a", 11 << 20, True, 0.1), played.now)
    played.planner.on_request_finished("a")


@pytest.mark.parametrize(
    ("window", "whole", "end", "tokens"),
    [
        (4, 8, 2, 4),  # a part of the end does not help: what both prefixes have is loaded
        (0, 8, 0, 0),
        (4, 8, None, 4),  # no answer in time
        (0, 2, 2, 2),  # a prefix shorter than the window
        (2, 8, 3, 8),
    ],
)
def test_what_is_offered(window: int, whole: int, end: int | None, tokens: int) -> None:
    played = Played(groups=GROUPS)
    asked = look_up(played, window, whole)
    assert len(asked.chains[0]) == min(3, whole)
    found = () if end is None else (matched(end),)
    played.planner.lookups.on_result("a", asked.serial, found, "lookup timeout")
    assert played.offer("a", TOKENS) == tokens * BLOCK
    assert played.planner.counters["miss lookup timeout"] == 0


@pytest.mark.parametrize(("window", "whole"), [(8, 8), (10, 8), (0, 0), (3, 0)])
def test_nothing_more_is_asked_where_the_prefixes_suffice(window: int, whole: int) -> None:
    assert look_up(Played(groups=GROUPS), window, whole) is None


def test_a_request_that_takes_less_than_there_is_needs_the_prefix() -> None:
    """Its window ends elsewhere."""
    played = Played(groups=GROUPS)
    assert look_up(played, 4, 8, RequestHints(max_load_tokens=6 * BLOCK)) is None
    assert played.offer("a", TOKENS) == 4 * BLOCK


def test_only_what_was_found_is_compared_with_what_is_computed() -> None:
    """The pool lost the beginning of the window's group: its blocks there prove nothing."""
    played = Played(groups=GROUPS, loads_per_check=1)
    asked = look_up(played, 0, 8)
    played.planner.lookups.on_result("a", asked.serial, [matched(3)], "")
    loadable = played.offer("a", TOKENS)
    ids = [list(range(10, 21)), list(range(30, 41))]
    played.planner.on_blocks_allocated("a", ids, loadable or 0, played.now)
    played.idle()
    refused = LoadResult("a", 0, False, 0.1, refused=frozenset([b"somebody"]))
    played.planner.on_load_result(refused, played.now)
    plan = played.idle(ScheduledRequest("a", 0, TOKENS, ids))
    assert plan.verify is not None
    compared = [blocks for blocks in plan.verify.blocks if blocks.group == 0]
    assert [blocks.block_ids for blocks in compared] == [(15, 16, 17)]
    assert all(blocks.match is not None and blocks.match.runs for blocks in compared)


def test_a_speed_is_measured_with_what_was_found() -> None:
    """A load that is estimated to be slow is not made, and the pool's speed is measured."""
    played = Played(groups=GROUPS, probe_every_s=0.0)
    played.planner.choice.transfer_cost.observe(1 << 20, 1.0)
    played.planner.choice.prefill_cost.observe([(0, 64 * BLOCK)], 0.001)
    asked = look_up(played, 0, 8)
    played.planner.lookups.on_result("a", asked.serial, [matched(3)], "")
    assert played.offer("a", TOKENS) == 0
    probe = played.idle().probe
    (blocks,) = probe.blocks
    assert blocks.digests == tuple(hashes("a", TOKENS)[5 : 5 + len(blocks.digests)])
    assert blocks.match is not None
    assert blocks.match.length == len(blocks.digests) <= 3


def test_a_request_that_restarts_forgets_what_it_has_asked() -> None:
    played = Played(groups=GROUPS)
    asked = look_up(played, 0, 8)
    again = played.planner.on_restart("a", TOKENS, played.now)
    assert played.planner.lookups.on_result("a", asked.serial, [matched(3)], "") is None
    assert played.offer("a", TOKENS) is None
    assert played.planner.lookups.on_result("a", again.serial, [matched(8), matched(8)], "") is None
    assert played.offer("a", TOKENS) == 8 * BLOCK


def test_the_estimate_counts_what_a_load_moves() -> None:
    windows = Windows(GROUPS)
    assert [windows.blocks(group, 0, 8 * BLOCK) for group in GROUPS] == [3, 8]
    assert [windows.blocks(group, 6 * BLOCK, 8 * BLOCK) for group in GROUPS] == [2, 2]


#: Two windows of different sizes and blocks.
MIXED = (CacheGroup(BLOCK, 1, 3), CacheGroup(2 * BLOCK, 2), CacheGroup(2 * BLOCK, 2, 2))
CHAIN = hashes("a", 12 * BLOCK)


def answered(request: LookupRequest, has: list[set[int]]) -> list[Match]:
    """What a pool with these blocks of each group answers."""
    found = []
    for group, chain in zip(request.groups or range(3), request.chains, strict=True):
        per_block = MIXED[group].hashes_per_block
        indexes = [(CHAIN.index(digest) + 1) // per_block - 1 for digest in chain]
        there = [index in has[group] for index in indexes]
        found.append(matched([*there, False].index(False)))
    return found


def test_whatever_the_pool_has_lost_what_is_offered_is_there() -> None:
    chance = random.Random(5)
    more = 0
    for _ in range(500):
        has = [{i for i in range(12) if chance.random() < 0.85} for _ in MIXED]
        planner = Played(groups=MIXED).planner
        asked = planner.on_new_request("a", CHAIN, 12 * BLOCK + 1, RequestHints(), 0.0)
        prefixes = answered(asked, has)
        again = planner.lookups.on_result("a", asked.serial, prefixes, "")
        if again is not None:
            planner.lookups.on_result("a", again.serial, answered(again, has), "")
        tokens = planner.loadable_tokens("a", 12 * BLOCK + 1, 0, 0.0)
        assert tokens is not None
        by_prefixes = Windows(MIXED).available(prefixes)
        assert tokens % (2 * BLOCK) == 0
        assert tokens >= by_prefixes
        more += tokens > by_prefixes
        for group, held in zip(MIXED, has, strict=True):
            stop = tokens // group.block_size
            assert held.issuperset(range(max(0, stop - (group.window_blocks or stop)), stop))
    assert more > 50


def test_windows_alone_need_their_prefix() -> None:
    """Nothing says where such a prefix ends."""
    windows = Windows((CacheGroup(BLOCK, 1, 3),))
    assert not windows.wanted([matched(2)], hashes("a", TOKENS))
    assert windows.available([matched(2)]) == 2 * BLOCK
