"""Prompts that wait: what servers are asked to bring into memory, and when nothing is asked."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool import Match, Pool, ReadStatus, Replica, Run
from kvpool_connector.plan.planner import Planner
from kvpool_connector.plan.request_lookups import Prefetches
from kvpool_connector.records.values import CacheGroup, PlannerLimits, RequestHints
from tests.conftest import NAMESPACE, keys
from tests.connector.test_halves import BLOCK, Engine
from tests.support.local_pool import LocalPool

MEMORY, DISK = (Replica("a", "dram"),), (Replica("a", "nvme"),)
GROUPS = (CacheGroup(BLOCK, 1),)


def match(*runs: tuple[int, tuple[Replica, ...]]) -> Match:
    """Runs of so many blocks each."""
    found, first = [], 0
    for count, replicas in runs:
        found.append(Run(first, first + count - 1, replicas))
        first += count
    return Match(tuple(found), first, ReadStatus.NEVER_WRITTEN)


def test_only_what_lies_below_is_asked_for_once_and_from_there_on() -> None:
    prefetches = Prefetches(GROUPS)
    hashes = keys("prompt", 10)
    prefetches.found("warm", hashes, [match((6, MEMORY))])
    prefetches.found("both", hashes, [match((6, (*DISK, Replica("b", "dram"))))])
    assert prefetches.take() == []
    prefetches.found("cold", hashes, [match((2, MEMORY), (5, DISK))])
    (request,) = prefetches.take()
    assert request.digests() == hashes[2:7]
    assert request.match == match((5, DISK))
    assert prefetches.take() == []


def test_a_part_that_no_memory_has_is_enough() -> None:
    prefetches = Prefetches(GROUPS)
    both = (Replica("a", "dram", 0), Replica("b", "nvme", 1))
    prefetches.found("r", keys("prompt", 4), [match((4, both))])
    assert [len(one.digests()) for one in prefetches.take()] == [4]


def test_of_a_sliding_window_the_end_and_of_a_long_prompt_one_message() -> None:
    prefetches = Prefetches((CacheGroup(BLOCK, 1), CacheGroup(BLOCK, 1, 3)))
    hashes = keys("prompt", 2000)
    prefetches.found("r", hashes, [match((2000, DISK)), match((2000, DISK))])
    whole, window = prefetches.take()
    assert whole.digests() == hashes[:1024]
    assert (window.group, window.digests()) == (1, hashes[1997:])


def looked_up(hints: RequestHints | None = None, **limits: Any) -> Planner:
    planner = Planner(GROUPS, PlannerLimits(**limits))
    hashes = keys("prompt", 6)
    lookup = planner.on_new_request("r", hashes, 6 * BLOCK, hints or RequestHints(), 1.0)
    planner.lookups.on_result("r", lookup.serial, [match((5, DISK))], "")
    return planner


def test_a_prompt_that_waits_is_prefetched_once() -> None:
    planner = looked_up()
    assert [len(one.digests()) for one in planner.lookups.take_prefetches()] == [5]
    assert planner.lookups.take_prefetches() == []
    assert planner.counters["prefetches"] == 1


@pytest.mark.parametrize("end", ["allocated", "finished", "restarted", "reset"])
def test_a_prompt_that_waits_no_longer_is_not(end: str) -> None:
    planner = looked_up()
    match end:
        case "allocated":
            planner.on_blocks_allocated("r", [[1] * 6], 0, 2.0)
        case "finished":
            planner.on_request_finished("r")
        case "restarted":
            planner.on_restart("r", 6 * BLOCK, 2.0)
        case "reset":
            planner.on_reset()
    assert planner.lookups.take_prefetches() == []


def test_a_request_can_switch_it_off() -> None:
    assert looked_up(RequestHints(skip_prefetch=True)).lookups.take_prefetches() == []


@pytest.mark.timeout(60)
def test_its_blocks_are_in_memory_when_the_engine_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves on a real pool, whose memory has room for 64 blocks."""
    monkeypatch.setattr("kvpool.server.state.tier_transfers.FRESH_S", 0.0)
    pool = LocalPool(tiers=["dram:256KiB", f"nvme:{tmp_path}/tier:8MiB"])
    engines = [Engine(pool.master) for _ in range(2)]
    try:
        _play(pool, *(engine.connected() for engine in engines))
    finally:
        for engine in engines:
            engine.close()
        pool.close()


def _play(pool: LocalPool, writer: Engine, reader: Engine) -> None:
    (server,) = pool.dev.servers
    chain = keys("a prompt", 4)
    writer.save(chain, [1, 2, 3, 4])
    fillers = [keys(f"filler {number}", 24) for number in range(4)]
    buffers = [bytes(4096)] * 24
    for filler in fillers:
        pool.ask(partial(Pool.write, namespace=NAMESPACE, digests=filler, buffers=buffers))

    def in_memory() -> int:
        namespace = reader.scheduler.namespaces[0]
        return sum(server.store.index.peek(namespace, 0, digest) is not None for digest in chain)

    writer.until(lambda: in_memory() == 0)
    reader.scheduler.on_new_request("r", chain, 4 * BLOCK + 1, RequestHints())
    reader.until(lambda: in_memory() == 4)
    assert reader.scheduler.planner.counters["prefetches"] == 1
    reader.until(lambda: reader.loadable("r", 4 * BLOCK + 1, 0) == 4 * BLOCK)
    assert server.stats(time.monotonic()).counters["prefetched_blocks"] == 4
