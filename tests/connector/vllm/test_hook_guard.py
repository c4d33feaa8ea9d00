"""No mistake of the connector ends an engine: vLLM's own scheduler goes on when anything raises."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.v1.request import RequestStatus

from kvpool_connector import hook_guard
from kvpool_connector.records.messages import (
    GroupBlocks,
    LoadResult,
    SaveRequest,
    SaveResult,
    StepWork,
    WorkerReport,
)
from kvpool_connector.scheduler.engine_report import EngineReport
from kvpool_connector.scheduler.scheduler import ConnectorScheduler
from kvpool_connector.vllm_engine.kv_events import EngineEvents
from kvpool_connector.vllm_engine.scheduler_hooks import SchedulerHooks
from tests.connector.vllm.helpers import transfer
from tests.connector.vllm.played import BLOCKS, SIZE, Play, Played, warmed
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(120)

#: What the hooks call, each of which may raise at any time.
CALLS = [
    *("on_new_request", "loadable_tokens", "on_blocks_allocated", "plan_step", "wait_if_idle"),
    *("on_worker_report", "make_promise", "on_request_finished"),
    *("report.take_metrics", "report.take_description"),
    *("events.step", "events.on_stored", "events.on_finished", "events.take"),
]


class Worker:
    """Ends every load and every save of a step in the next one."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self._work = StepWork(0)

    def step(self) -> Any:
        """Loads without a name fail, as in a real worker."""
        loads = {load.request_id: load for load in self._work.loads}
        known = bool(self._work.serials)
        lost = [b for one in loads.values() for part in one.blocks for b in part.block_ids]
        step, self._work = self._played.step(
            saved=self._played.acknowledged(),
            loaded=[LoadResult(name, SIZE * known, known, 0.01) for name in loads],
            finished_recving=set(loads),
            invalid_block_ids=set() if known else set(lost),
        )
        return step

    def finish(self) -> None:
        """Until every request has come to its end and every save is acknowledged."""
        for _ in range(500):
            self.step()
            if not self._played.scheduler.has_requests() and not self._played.saves:
                self.step()  # what was acknowledged last
                return
        raise AssertionError("it does not end")


def owner(method: str) -> type:
    kinds = {"report": EngineReport, "events": EngineEvents}
    return kinds.get(method.partition(".")[0], ConnectorScheduler)


def raising_once(method: str, at_call: int = 1) -> Callable[..., Any]:
    real = getattr(owner(method), method.rpartition(".")[2])
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise KeyError("planted")
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("at_call", [1, 2])
@pytest.mark.parametrize("method", CALLS)
def test_requests_end_and_no_block_stays_pinned_when_a_call_raises(
    method: str, at_call: int, pool: LocalPool, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    played = play(transfer(pool.master, load_timeout_s=0.5), kv_events_config=events)
    warmed(pool, played)
    monkeypatch.setattr(owner(method), method.rpartition(".")[2], raising_once(method, at_call))
    requests = [played.request(name, 64, first) for name, first in (("a", 0), ("b", 500))]
    requests[1].kv_transfer_params = {"do_remote_decode": True}
    for request in requests:
        played.scheduler.add_request(request)
    Worker(played).finish()
    assert all(request.num_output_tokens == 4 for request in requests)
    assert played.free == BLOCKS - 1
    assert not played.connector.hooks._owed


def test_a_request_that_waits_for_a_load_which_was_never_sent_is_computed(
    pool: LocalPool, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has been promised three blocks of it, and the step that loads them fails."""
    warmed(pool, played)
    request = played.add("a", 64)
    real = ConnectorScheduler.plan_step

    def plan_step(self: ConnectorScheduler, *args: Any) -> Any:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            raise ValueError("planted")
        return real(self, *args)

    monkeypatch.setattr(ConnectorScheduler, "plan_step", plan_step)
    Worker(played).finish()
    assert request.num_output_tokens == 4
    assert played.counters["hook_failed plan_step"] == 1
    assert played.free == BLOCKS - 1


def test_blocks_that_a_worker_may_still_read_stay_pinned_until_it_has_ended(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed earlier, they would be stored with the bytes of another block."""
    worker = Worker(played)
    worker.step()
    played.add("a", 64)
    for _ in range(100):
        played.step()
        if not played.scheduler.has_unfinished_requests() and played.saves:
            break
    held = BLOCKS - 1 - played.free
    assert held == 4
    monkeypatch.setattr(ConnectorScheduler, "plan_step", raising_once("plan_step"))
    played.step()
    played.step()
    assert played.connector.hooks._fuse.blown
    assert BLOCKS - 1 - played.free == held
    assert played.connector.has_pending_push_work()
    played.step(saved=played.acknowledged())
    assert played.free == BLOCKS - 1
    assert not played.connector.has_pending_push_work()


def test_with_two_ranks_the_slower_one_lets_go() -> None:
    owed = hook_guard.Owed(ranks=2)
    blocks = GroupBlocks(0, (b"a", b"b"), (1, 2))
    owed.on_pinned([1, 2, 3])
    owed.on_sent(StepWork(1, saves=[SaveRequest(7, (blocks,))]))
    report = WorkerReport(1, saves=[SaveResult(7, 0, ())])
    owed.on_report(report)
    assert owed.idle_pins() == [3]
    owed.on_unpinned([3])
    owed.on_report(report)
    assert owed.idle_pins() == [1, 2]
    owed.on_unpinned([1, 2])
    assert not owed


def test_the_pool_is_used_again_after_a_while(
    pool: LocalPool, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_guard, "OFF_S", 0.0)
    played.connector.hooks._fuse = hook_guard.Fuse()
    warmed(pool, played)
    name = played.namespace
    with monkeypatch.context() as patched:
        patched.setattr(ConnectorScheduler, "plan_step", raising_once("plan_step"))
        played.step()
    played.greeted = False  # the worker describes its model anew
    played.step()
    assert played.counters["hook_failed plan_step"] == 1
    assert played.namespace == name, "the same weights"
    request = played.add("a", 64)
    assert len(played.until_loading(request).blocks[0].digests) == 3


def test_a_new_half_that_cannot_be_made_is_tried_again_later(
    pool: LocalPool, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no descriptor left, say."""
    monkeypatch.setattr(hook_guard, "OFF_S", 0.0)
    hooks = played.connector.hooks
    hooks._fuse = hook_guard.Fuse()
    warmed(pool, played)
    make = hooks._make_scheduler
    monkeypatch.setattr(hooks, "_make_scheduler", raising)
    with monkeypatch.context() as patched:
        patched.setattr(ConnectorScheduler, "plan_step", raising_once("plan_step"))
        played.step()
    assert hooks._fuse.blown
    monkeypatch.setattr(hooks, "_make_scheduler", make)
    played.step()
    assert not hooks._fuse.blown
    played.greeted = False  # the worker describes its model anew
    played.step()
    assert len(played.until_loading(played.add("a", 64)).blocks[0].digests) == 3


def raising(*_: object, **__: object) -> Any:
    raise OSError("planted")


def test_each_reason_is_logged_once_and_counted_each_time() -> None:
    lines: list[str] = []
    counts: Counter[str] = Counter()
    log = hook_guard.FailureLog(
        "rank 1: ",
        lambda line, error: lines.append(line),
        lambda name, n: counts.update({name: int(n)}),
    )
    for reason in ("a", "a", "b"):
        log.add("starting", KeyError(reason), "for 60 s nothing is shared")
    assert len(lines) == 2
    assert lines[0].startswith("rank 1: starting failed with KeyError: 'a'; for 60 s nothing is sh")
    assert counts == {"hook_failed starting": 3}
    for number in range(1000):
        log.add("starting", KeyError(number))
    assert len(lines) < 100, "what others can make us log is bounded"


def test_the_pause_grows_up_to_an_hour() -> None:
    fuse = hook_guard.Fuse()
    assert fuse.blow(100.0) == 60
    assert not fuse.due(159.9)
    assert fuse.due(160.0)
    fuse.mend()
    assert not fuse.due(200.0)
    assert fuse.blow(200.0) == 120
    assert not fuse.due(319.9)
    assert [fuse.blow(0.0) for _ in range(20)][-1] == 3600
    assert fuse.due(3600.0)


def test_every_hook_of_the_scheduler_is_guarded() -> None:
    """What vLLM calls, and what those call here: nothing asks the scheduler's half unguarded."""
    source = ast.parse(inspect.getsource(SchedulerHooks))
    [body] = source.body
    assert isinstance(body, ast.ClassDef)
    guarded: set[str] = set()
    uses: dict[str, set[str]] = {}
    for method in body.body:
        if isinstance(method, ast.FunctionDef):
            calls = [node.func for node in ast.walk(method) if isinstance(node, ast.Call)]
            uses[method.name] = {ast.unparse(call) for call in calls}
            if any("_guarded" in ast.unparse(one) for one in method.decorator_list):
                guarded.add(method.name)
    called = {name.removeprefix("self.") for one in guarded for name in uses[one]}
    asks = {name for name, calls in uses.items() if any("self.scheduler." in c for c in calls)}
    assert asks - guarded - called == {"close"}
