"""Promised blocks on a real pool: loaded while they come, and computed if they do not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvpool_connector.records.promises import PromisedBlocks
from kvpool_connector.records.values import RequestHints, ScheduledRequest
from tests.conftest import keys
from tests.connector.test_halves import BLOCK, Engine, Start, ended, pool, start
from tests.support.local_pool import LocalPool

__all__ = ["pool", "start"]

pytestmark = pytest.mark.timeout(60)


def promised(producer: Engine, name: str, hashes: list[bytes]) -> PromisedBlocks:
    """What the producer promises of a prompt, of which no step has computed anything yet."""
    assert producer.ask(name, hashes, 0, hints=RequestHints(skip_load=True)) == 0
    promise = producer.scheduler.make_promise(name, len(hashes) * BLOCK)
    assert promise is not None
    return promise


def awaiting(
    consumer: Engine, promise: PromisedBlocks, hashes: list[bytes], first: int = 1
) -> None:
    """A request that loads all of the promised blocks, whether they are there or not."""
    assert consumer.ask("d", hashes, hints=RequestHints(promise=promise)) == len(hashes) * BLOCK
    ids = list(range(first, first + len(hashes)))
    consumer.scheduler.on_blocks_allocated("d", [ids], len(hashes) * BLOCK)
    consumer.step()


def compute(producer: Engine, name: str, first: int, last: int, blocks: list[int]) -> None:
    """One step of the producer computes these blocks of a prompt."""
    producer.step([ScheduledRequest(name, first * BLOCK, last * BLOCK, [blocks])])


def all_loaded(consumer: Engine) -> bool:
    """Every rank has reported the end of the load, which it waits for alone."""
    ended_loads = [load for report in consumer.reports for load in report.loads]
    return len(ended_loads) == len(consumer.workers)


def counted(engine: Engine, outcome: str) -> float:
    return engine.scheduler.planner.counters[f"promise {outcome}"]


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {}), (2, {"kv_head_parts": 4, "revision": "r", "heads": 8})]
)
def test_blocks_are_loaded_while_the_producer_computes_the_next(
    start: Start, ranks: int, options: dict[str, Any]
) -> None:
    producer, consumer = (start(ranks=ranks, **options) for _ in range(2))
    hashes = keys(f"while {ranks} {len(options)}", 20)
    blocks = list(range(1, 21))
    producer.fill(blocks, 7)
    promise = promised(producer, "p", hashes)
    awaiting(consumer, promise, hashes, 30)
    for first in range(0, 20, 5):
        assert not all_loaded(consumer)
        compute(producer, "p", first, first + 5, blocks)
        producer.until(lambda first=first: producer.stored == first + 5)
        if first == 5:  # what has come is there before the rest is computed
            row = consumer.memory[0]
            consumer.until(lambda row=row: torch.equal(row[30:40], producer.memory[0][1:11]))
    consumer.until(lambda: all_loaded(consumer))
    for mine, theirs in zip(consumer.memory, producer.memory, strict=True):
        assert torch.equal(mine[30:50], theirs[1:21])
    assert not consumer.failed
    assert counted(consumer, "kept") == 1
    assert counted(producer, "made") == 1
    assert ended(consumer)
    [load] = [load for report in consumer.reports for load in report.loads][-1:]
    assert load.waited_s > 0
    assert load.seconds < 5


def test_a_wait_is_no_part_of_the_time_that_a_load_may_take(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_connector.worker.worker.CANCEL_AFTER_S", 0.1)
    producer, consumer = start(), start(load_timeout_s=0.3)
    hashes = keys("longer", 4)
    producer.fill([1, 2, 3, 4], 8)
    promise = promised(producer, "p", hashes)
    awaiting(consumer, promise, hashes, 30)
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        consumer.step()
        time.sleep(0.01)
    assert not consumer.loaded
    compute(producer, "p", 0, 4, [1, 2, 3, 4])
    producer.until(lambda: producer.stored == 4)
    consumer.until(lambda: consumer.loaded == ["d"])
    assert not consumer.failed


def test_blocks_of_a_producer_that_is_killed_are_computed(start: Start) -> None:
    """What it had stored is used all the same."""
    producer, consumer = start(), start(load="auto")
    hashes = keys("killed", 12)
    blocks = list(range(1, 13))
    producer.fill(blocks, 3)
    promise = promised(producer, "p", hashes)._replace(computing_s=0.4)
    compute(producer, "p", 0, 4, blocks)
    producer.until(lambda: producer.stored == 4)
    producer.close()
    began = time.monotonic()
    awaiting(consumer, promise, hashes, 30)
    consumer.until(lambda: consumer.loaded == ["d"])
    assert time.monotonic() - began < 3, "0.4 s would be needed to compute it"
    assert consumer.failed == ["d"]
    assert consumer.bad_blocks == set(range(34, 42))
    assert torch.equal(consumer.memory[0][30:34], producer.memory[0][1:5])
    assert counted(consumer, "broken") == 1
    tokens = len(hashes) * BLOCK + 1
    assert consumer.loadable("d", tokens, 4 * BLOCK) == 0
    assert not consumer.scheduler.planner.prober.measuring, "the pool is not slow"
    assert ended(consumer)


def test_engines_of_other_names_promise_each_other_nothing(start: Start) -> None:
    producer, consumer = start(), start(kernel="another kernel")
    hashes = keys("names", 5)
    promise = promised(producer, "p", hashes)
    assert consumer.ask("d", hashes, hints=RequestHints(promise=promise)) == 0
    consumer.scheduler.report.take_metrics()
    lines = [line for line in consumer.lines if "share nothing with this one" in line]
    assert lines == [lines[0]]
    assert lines[0].startswith("1 promises came")


def test_a_pool_that_dies_ends_the_wait() -> None:
    pool = LocalPool()
    producer = Engine(pool.master).connected()
    consumer = Engine(pool.master, promise_wait_s=30.0).connected()
    try:
        hashes = keys("dies", 6)
        awaiting(consumer, promised(producer, "p", hashes), hashes, 20)
        pool.close()
        began = time.monotonic()
        consumer.until(lambda: consumer.loaded == ["d"])
        assert time.monotonic() - began < 10
        assert consumer.failed == ["d"]
    finally:
        producer.close()
        consumer.close()
