"""What the scheduler half tells its engine of itself: sums for metrics, and the engine's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvpool_connector.identity.naming import EngineNames
from kvpool_connector.plan.planner import Planner
from kvpool_connector.scheduler.lookups import Lookups
from kvpool_connector.scheduler.pool_messages import PoolMessages
from kvpool_connector.scheduler.sharing_watch import SharingWatch

#: Metrics that always have news, such as the hooks' own time, are reported this often.
_METRICS_EVERY_S: Final = 1.0
#: The engine's description is sent to its front end this often: one that has missed it gets it.
_DESCRIBE_EVERY_S: Final = 60.0
#: The estimated speed of computing is reported for a prompt of so many tokens.
_RATE_TOKENS: Final = 1024


@dataclass
class EngineReport:
    """Of one engine. Each report of metrics goes to `watch`, too."""

    _planner: Planner
    _names: EngineNames
    _lookups: Lookups
    _watch: SharingWatch
    _messages: PoolMessages
    _clock: Callable[[], float]
    _metrics_at: float = -_METRICS_EVERY_S
    _described: dict[str, str] = field(default_factory=dict)
    _described_at: float = -math.inf

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, and the estimates; empty when there is little news."""
        counters, choice = self._planner.counters, self._planner.choice
        now = self._clock()
        if now - self._metrics_at < _METRICS_EVERY_S and not counters.keys() - {"hooks", "hook_s"}:
            return {}
        self._metrics_at = now
        metrics = dict(counters)
        counters.clear()
        while self._lookups.durations:
            label = f"lookup_duration {self._lookups.durations.popleft():.2g}"
            metrics[label] = metrics.get(label, 0) + 1
        if self._watch.on_metrics(metrics, now):
            self._messages.compare_names(self._names.namespaces)
        metrics["verified_difference"] = self._planner.verifier.difference
        metrics["load_bytes_rate"] = choice.transfer_cost.bandwidth
        prefill_s = choice.prefill_cost.seconds(0, _RATE_TOKENS)
        if prefill_s:
            metrics["prefill_tokens_rate"] = _RATE_TOKENS / prefill_s
        return metrics

    def take_description(self) -> dict[str, str]:
        """The engine's name in fields, when it is new and once a minute; else empty."""
        now = self._clock()
        description = self._names.description
        if description == self._described and now - self._described_at < _DESCRIBE_EVERY_S:
            return {}
        self._described, self._described_at = description, now
        return description
