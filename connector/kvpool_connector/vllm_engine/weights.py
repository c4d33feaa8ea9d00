"""Counts the calls that change the weights of a loaded model in place.

vLLM tells a connector of no update. What is computed between an update and the reset after it, or
after an update without a reset, must not get the name of the old weights. (design: namespace)
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kvpool_connector.vllm_engine.interface import worker_updates

_calls: Counter[str] = Counter()


def weight_changes() -> int:
    """How many calls in this process may have changed weights."""
    return _calls.total()


@functools.cache
def count_updates() -> None:
    """From now on updates by vLLM's own calls are counted. Called again, this does nothing."""
    worker, calls = worker_updates()
    for name in calls:
        setattr(worker, name, _counted(getattr(worker, name)))


def count_loads(models: Iterable[Any]) -> None:
    """From now on calls of these models' `load_weights` are counted: all that other code calls."""
    for model in models:
        if (load := getattr(model, "load_weights", None)) is not None:
            model.load_weights = _counted(load)


def _counted(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        finally:  # also when it fails: a part may have been written
            _calls[call.__qualname__] += 1

    return counted
