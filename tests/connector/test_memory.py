"""An engine serves for weeks: what a request has left behind must not stay."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator

import pytest

from kvpool.master.state.hint_log import HintLog
from kvpool_connector.records.values import ScheduledRequest
from tests.conftest import keys
from tests.connector.test_halves import BLOCK, Engine
from tests.support.local_pool import LocalPool

MORE, PROMPTS = 400, 8

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(HintLog.__init__, "__defaults__", (64,))  # a master's of lookups
    pool = LocalPool()
    engine = Engine(pool.master)
    yield engine.connected()
    engine.close()
    pool.close()


def serve(engine: Engine, number: int) -> None:
    """A request that loads, or is saved. Half of them are preempted; half of those are aborted."""
    name, hashes = f"r{number}", keys(f"prompt {number % PROMPTS}", 4)
    ids, tokens = [10, 11, 12, 13, 14], 4 * BLOCK + 1
    if computed := engine.ask(name, hashes):
        engine.scheduler.on_blocks_allocated(name, [ids], computed)
        engine.until(lambda: name in engine.loaded)
    if number % 2:
        engine.step(preempted=[name])
        computed = 0
    if number % 4 == 1:
        engine.until(lambda: engine.loadable(name, tokens) is not None)
    if number % 4 != 3:
        engine.step([ScheduledRequest(name, computed, tokens, [ids])])
    engine.scheduler.on_request_finished(name)
    engine.settle()
    engine.scheduler.report.take_metrics()
    engine.workers[0].take_counters()
    engine.forget()


def kept() -> int:
    """Objects that stay: the server looks once a second at what was read, and forgets it then."""
    found = sys.maxsize
    for _ in range(8):
        time.sleep(0.2)
        gc.collect()
        found = min(found, sys.getallocatedblocks())
    return found


def grown(engine: Engine, first: int) -> int:
    before = kept()
    for number in range(first, first + MORE):
        serve(engine, number)
    return kept() - before


def test_memory_does_not_grow_with_the_number_of_requests(engine: Engine) -> None:
    """Over the same prompts. What a busy machine does beside it, such as connecting, grows once."""
    rounds = (grown(engine, number * MORE) for number in range(5))
    next(rounds)  # what is made at first
    assert any(more < MORE // 5 for more in rounds), "an object stays for a part of the requests"
