"""Time that jumps to the next timer whenever nothing is to be done: a deadline costs nothing."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from tests.wire.offline import Loop


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test that does no I/O in virtual time; its fixtures may not be coroutines."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(test(*arguments, **named))

    return run
