"""How a reset waits for saves: what it may not lose, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_connector.vllm_engine import replaced
from kvpool_connector.vllm_engine.interface import engine_resets


class Core:
    """vLLM's engine with saves that end after some steps."""

    def __init__(self, saves: int) -> None:
        self.steps: list[str] = []
        self.pause_state = "unpaused"
        self.batch_queue: list[str] = []
        self.fails = False
        self.scheduler = self
        self.connector = SimpleNamespace(has_pending_push_work=lambda: len(self.steps) < saves)

    def set_pause_state(self, state: str) -> None:
        self.pause_state = state

    def step_fn(self) -> tuple[Any, bool]:
        self.steps.append(self.pause_state)
        if self.fails:
            raise RuntimeError("a step failed")
        saved = len(self.steps) if self.pause_state == "paused" else 0
        counted = SimpleNamespace(kv_connector_stats={"saved_blocks": saved} if saved > 1 else {})
        one = SimpleNamespace(outputs=[], finished_requests=None, scheduler_stats=counted)
        return {0: one}, self.pause_state != "paused"

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> tuple[int, bool]:
        return len(self.steps), reset_connector


class Process(Core):
    """The one that steps by itself."""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = Core.reset_prefix_cache
    monkeypatch.setattr(replaced, "engine_resets", lambda: (Core, Process, "paused"))
    replaced.drain_before_resets.cache_clear()
    replaced.drain_before_resets()
    replaced.drain_before_resets()
    yield
    replaced.drain_before_resets.cache_clear()
    Core.reset_prefix_cache = before  # type: ignore[method-assign]


def test_steps_until_the_last_save_has_ended_and_computes_nothing() -> None:
    core = Core(saves=3)
    assert core.reset_prefix_cache(reset_connector=True) == (3, True)
    assert core.steps == ["paused"] * 3
    assert core.pause_state == "unpaused"
    core.connector.has_pending_push_work = lambda: len(core.steps) < 4
    core.reset_prefix_cache()
    after = [core.step_fn() for _ in range(4)]  # what these have counted comes with the next ones
    counted = [outputs[0].scheduler_stats.kv_connector_stats for outputs, _ in after]
    assert counted == [{"saved_blocks": 2}, {"saved_blocks": 3}, {"saved_blocks": 4}, {}]
    assert [executed for _, executed in after] == [False, False, False, True]


@pytest.mark.parametrize("kind", [Core, Process])
def test_nothing_steps_that_need_not(kind: Any) -> None:
    """Nothing is saved, or tokens of requests are on their way, or it steps by itself."""
    core = kind(saves=0 if kind is Core else 3)
    assert core.reset_prefix_cache() == (0, False)
    busy = Core(saves=3)
    busy.batch_queue.append("tokens")
    assert busy.reset_prefix_cache() == (0, False)


def test_the_wait_is_bounded_and_leaves_the_engine_as_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replaced, "_WAIT_S", 0.02)
    core: Any = Core(saves=1 << 60)
    core.pause_state = "new requests wait"
    steps, _ = core.reset_prefix_cache()
    assert steps > 0
    assert core.pause_state == "new requests wait"
    core.fails = True
    with pytest.raises(RuntimeError, match="a step failed"):
        core.reset_prefix_cache()
    assert core.pause_state == "new requests wait"


def test_vllm_has_the_names() -> None:
    core, process, paused = engine_resets()
    assert issubclass(process, core)
    assert paused.name == "PAUSED_ALL"
