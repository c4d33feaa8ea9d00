"""The connector's metrics in vLLM's `/metrics` and log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvpool_connector.hook_guard import FailureLog
from kvpool_connector.vllm_engine import engine_log
from kvpool_connector.vllm_engine.interface import KVConnectorPromMetrics, KVConnectorStats

#: Counters whose key is "name label": the metric, the name of its label, and its help text.
_LABELLED: Final = {
    "hit_tokens": ("tier", "Prompt tokens loaded from the pool, by tier."),
    "miss": ("reason", "Lookups that did not find the whole prompt, by reason."),
    "decision": ("decision", "Decisions to load or to compute what the pool had of a prompt."),
    "load_miss": ("reason", "Blocks that a load did not find, by reason."),
    "load_error": ("error", "Loads that ended with an error."),
    "save_error": ("error", "Saves that ended with an error."),
    "dropped": ("reason", "Blocks that were not saved, by reason."),
    "kv_hint": ("outcome", "Actions of orchestrators' hint envelopes, by what became of them."),
    "promise": ("outcome", "Promises of blocks between engines, by what became of them."),
    "coded_blocks": ("outcome", "Blocks that met a codec when they were saved, by outcome."),
    "hook_failed": ("hook", "Exceptions in hooks, after which the pool was left alone."),
    "verification": ("result", "Comparisons of the pool's KV with the engine's own, by result."),
}
_PLAIN: Final = {
    "lookups": "Prompts looked up.",
    "loads": "Loads that have ended.",
    "loads_failed": "Loads that did not bring all of their blocks; the engine computed the rest.",
    "loads_refused": "Loads that met an engine's blocks that are compared first, or are wrong.",
    "removed_blocks": "Blocks of engines with other KV that were taken out of the pool.",
    "load_s": "Seconds from the decision to load until the scheduler had the result.",
    "load_bytes": "Bytes loaded.",
    "load_waits": "Requests that waited for another request's load of the same blocks.",
    "load_wait_s": "Seconds that requests waited for other requests' loads.",
    "promise_wait_s": "Seconds that loads waited for promised blocks.",
    "promised_tokens": "Prompt tokens loaded that were promised when their load began.",
    "load_blocks_missing": "Blocks that a load did not bring; the engine computed them.",
    "saved_blocks": "Blocks that the pool has acknowledged.",
    "save_bytes": "Bytes saved, without those that the pool had already.",
    "save_s": "Seconds of saving, in the background.",
    "coded_bytes_before": "Bytes of blocks that met a codec when they were saved.",
    "coded_bytes_after": "Bytes that those blocks went to the pool with.",
    "save_retries": "Refused blocks that were tried again.",
    "estimated_load_s": "Seconds that loads were estimated to take, where that was compared.",
    "estimated_prefill_s": "Seconds that computing was estimated to take, where that was compared.",
    "probes": "Background measurements of the pool's speed.",
    "verified_blocks": "Blocks that were compared with the engine's own.",
    "prefetches": "Prompts whose blocks were brought into memory while they waited.",
    "arrivals_repeated": "Arrivals repeated for prompts of sessions that wait for long.",
    "announced_blocks": "Blocks of the pool that were announced to routers in KV events.",
    "unannounced_blocks": "Announced blocks that KV events took back, because they have gone.",
    "bad_hints": "Requests with hints that are not valid.",
    "hook_s": "Seconds spent in the scheduler's hooks.",
    "hooks": "Calls of the scheduler's hooks.",
}
#: Values as of now, not sums.
_GAUGES: Final = {
    "load_bytes_rate": "Estimated bytes per second of a load.",
    "verified_difference": "Largest difference that the latest comparison has found, 0 to 2.",
    "pinned_share": "Share of the engine's blocks that are pinned, for saves and comparisons.",
    "prefill_tokens_rate": "Estimated prompt tokens per second that the engine computes.",
}
#: Not a number: what the engine's name is made of, by field.
DESCRIPTION: Final = "description"
#: Histograms: how long each took, in seconds rounded to two digits, which is the label.
_DURATIONS: Final = {
    "lookup_duration": "Seconds that a request waited for its lookup.",
    "load_duration": "Seconds from the decision to load until the scheduler had the result.",
    "save_duration": "Seconds of one save of one rank, in the background.",
}
#: The same of single messages, by transport: their keys are "name transport seconds".
_MESSAGE_DURATIONS: Final = {
    "read_duration": "Seconds until a server had answered a message that reads blocks.",
    "write_duration": "Seconds until a server had answered a message that writes blocks.",
}
_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_HISTOGRAMS: Final = _DURATIONS.keys() | _MESSAGE_DURATIONS.keys()
_UNITS: Final = {"load_s": "load_seconds", "save_s": "save_seconds", "hook_s": "hook_seconds"}


@dataclass
class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the last report, and gauges. A plain dict: vLLM sends it between processes."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            latest = name in _GAUGES or name == DESCRIPTION
            self.data[name] = value if latest else self.data.get(name, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"kvpool {name}": round(value, 4)
            for name, value in sorted(self.data.items())
            if name != DESCRIPTION and name.partition(" ")[0] not in _HISTOGRAMS
        }


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics `vllm:kvpool_*`; each series exists as soon as it has a value."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

        def made(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            every = [*self._labelnames, *labels]
            return kind(f"vllm:kvpool_{name}", text, labelnames=every, **options)

        counter, latest = self._counter_cls, {"multiprocess_mode": "mostrecent"}
        self._counters = {name: made(counter, _metric(name), text) for name, text in _PLAIN.items()}
        self._labelled = {
            name: made(counter, _metric(name), text, label)
            for name, (label, text) in _LABELLED.items()
        }
        self._histograms = {
            name: made(self._histogram_cls, f"{name}_seconds", text, *labels, buckets=_BUCKETS_S)
            for durations, labels in ((_DURATIONS, ()), (_MESSAGE_DURATIONS, ("transport",)))
            for name, text in durations.items()
        }
        self._gauges = {
            name: made(self._gauge_cls, name, text, **latest) for name, text in _GAUGES.items()
        }
        text = "The fields of the name under which the engine shares blocks; 1: it is so now."
        self._name_info = made(self._gauge_cls, "name_info", text, "field", "value", **latest)
        self._described: dict[int, dict[str, str]] = {}
        self._failures = FailureLog("", engine_log.error, lambda *_: None)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Where this raises, vLLM's API server ends all requests with an error."""
        for key, value in transfer_stats_data.items():
            self._failures.guard("a metric", partial(self._take, key, value, engine_idx), None)

    def _take(self, key: str, value: Any, engine_idx: int) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        name, _, label = key.partition(" ")
        if key == DESCRIPTION:
            self._describe(engine_idx, value)
        elif label and name in self._labelled:
            self._labelled[name].labels(*engine, label.replace(" ", "_")).inc(value)
        elif name in self._histograms:
            *transport, seconds = label.split(" ")
            histogram = self._histograms[name].labels(*engine, *transport)
            for _ in range(int(value)):
                histogram.observe(float(seconds))
        elif key in self._counters:
            self._counters[key].labels(*engine).inc(value)
        elif key in self._gauges:
            self._gauges[key].labels(*engine).set(value)

    def _describe(self, engine_idx: int, description: Mapping[str, str]) -> None:
        """Set the series of this description to 1, and end those of the former one."""
        engine = self.per_engine_labelvalues[engine_idx]
        for former in self._described.get(engine_idx, {}).items():
            if former not in description.items():
                self._name_info.labels(*engine, *former).set(0)  # where series cannot be removed
                if hasattr(self._name_info, "remove"):
                    self._name_info.remove(*engine, *former)
        for field_and_value in description.items():
            self._name_info.labels(*engine, *field_and_value).set(1)
        self._described[engine_idx] = dict(description)


def _metric(name: str) -> str:
    name = _UNITS.get(name, name)
    if name.endswith("_s"):
        name = name.removesuffix("_s") + "_seconds"
    if name in ("miss", "load_miss"):
        name += "es"
    if name in ("decision", "kv_hint", "promise", "load_error", "save_error", "verification"):
        name += "s"
    return f"{name}_total"
