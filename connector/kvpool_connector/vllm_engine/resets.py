"""Lets saves end before an engine in the process of its user clears its prefix cache.

Blocks that are being saved are pinned, and the cache cannot be cleared while one is. The engine
hears of the end of a save when it steps; a process of its own steps on until there are none, but
one in the user's process (VLLM_ENABLE_V1_MULTIPROCESSING=0) only while requests run.
(design: namespace)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from kvpool_connector.vllm_engine.interface import engine_resets

#: Seconds that a reset waits. A save that hangs ends before.
_WAIT_S: Final = 15.0


@functools.cache
def drain_before_resets() -> None:
    """From now on resets, pauses and sleep of an engine in this process wait for its saves. Called
    again, this does nothing."""
    core, process, paused = engine_resets()
    reset: Callable[..., bool] = core.reset_prefix_cache

    @functools.wraps(reset)
    def drained(engine: Any, *arguments: Any, **named: Any) -> bool:
        if not isinstance(engine, process):
            _drain(engine, paused)
        return reset(engine, *arguments, **named)

    core.reset_prefix_cache = drained


def _drain(engine: Any, paused: Any) -> None:
    scheduler = engine.scheduler
    if engine.batch_queue:  # tokens are on their way, which a step here would lose
        return
    until, before = time.monotonic() + _WAIT_S, scheduler.pause_state
    try:
        while scheduler.connector.has_pending_push_work() and time.monotonic() < until:
            if scheduler.pause_state != paused:
                scheduler.set_pause_state(paused)  # steps compute nothing
            engine.step_fn()
    finally:
        if scheduler.pause_state != before:
            scheduler.set_pause_state(before)
