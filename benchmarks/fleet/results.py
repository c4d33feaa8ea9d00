"""What a run came to: throughput, times and hits of the prompts that ended in a window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from benchmarks.fleet.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of seconds."""

    p50: float
    p90: float
    p99: float


class MovedBytes(NamedTuple):
    """In a whole run: loaded by engines, come up from disks, and written to disks."""

    loaded: float = 0.0
    disk_read: float = 0.0
    disk_written: float = 0.0


class TurnParts(NamedTuple):
    """Where the time of a turn goes: mean seconds of each part, in their order."""

    until_ready: float  # front end, lookup, load, and the queue until then
    for_engine: float  # ready, and another prompt is computed
    computed: float
    handed_over: float  # to the decode engine, until the first token
    answered: float


@dataclass(frozen=True, slots=True)
class AfterIncident:
    """`worst` is the hit rate of the worst minute of the ten after it; `back_s` how long it took
    from the incident until, after that one, a minute's hit rate was within a twentieth of the mean
    before it; None: never."""

    before: float  # hit rate
    worst: float
    back_s: float | None


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Means over a window in which the fleet was full; `tokens_s` counts prompts and answers.

    `hit_rate` is the share of prompt tokens that were not computed, `pool_rate` the share that was
    loaded. `token_s` is the median time between two tokens of an answer. `first_tokens` are seconds
    to the first token at 0, 5, ... 100 % of the prompts.
    """

    prompts: int
    seconds: float
    tokens_s: float
    tokens_s_per_gpu: float
    hit_rate: float
    pool_rate: float
    first_token: Quantiles
    first_tokens: tuple[float, ...]
    end_to_end: Quantiles
    token_s: float
    parts: TurnParts
    session_waited: Quantiles  # by all prompts of a session together, for first tokens
    waited: Quantiles  # from the sending to the beginning of the computing
    loaded_bytes: float  # in the whole run, as the next three
    disk_read_bytes: float
    disk_written_bytes: float
    saves_dropped: int
    after: AfterIncident | None = None


def measured(
    prompts: Sequence[Prompt],
    *,
    gpus: int,
    first: float,
    last: float,
    moved: MovedBytes,
    saves_dropped: int,
    incident_at: float | None = None,
) -> FleetResult:
    """Of the prompts that ended between `first` and `last`; of all if there are none in between."""
    inside = [one for one in prompts if first <= one.done_at <= last]
    if not inside:
        inside = list(prompts)
        first, last = 0.0, max(one.done_at for one in prompts)
    seconds = last - first
    asked = sum(one.tokens for one in inside)
    tokens_s = (asked + sum(one.output for one in inside)) / seconds
    first_token_s = [one.first_token_at - one.sent_at for one in inside]
    return FleetResult(
        prompts=len(inside),
        seconds=seconds,
        tokens_s=tokens_s,
        tokens_s_per_gpu=tokens_s / gpus,
        hit_rate=sum(one.hit_tokens for one in inside) / asked,
        pool_rate=sum(max(0, one.loaded_tokens - one.own_tokens) for one in inside) / asked,
        first_token=_quantiles(first_token_s),
        first_tokens=tuple(map(float, np.percentile(first_token_s, range(0, 101, 5)))),
        end_to_end=_quantiles([one.done_at - one.sent_at for one in inside]),
        token_s=float(np.median([one.token_s for one in inside])),
        parts=_parts(inside),
        session_waited=_quantiles(_session_waits(prompts, inside)),
        waited=_quantiles([one.began_at - one.sent_at for one in inside]),
        loaded_bytes=moved.loaded,
        disk_read_bytes=moved.disk_read,
        disk_written_bytes=moved.disk_written,
        saves_dropped=saves_dropped,
        after=None if incident_at is None else _after(inside, incident_at, last),
    )


def _session_waits(prompts: Sequence[Prompt], inside: Sequence[Prompt]) -> list[float]:
    """Of each session that has ended inside: seconds until first tokens, of all its prompts."""
    waited = defaultdict[int, float](float)
    for one in prompts:
        waited[one.session] += one.first_token_at - one.sent_at
    ended = {one.session for one in inside if one.last}
    return [waited[session] for session in sorted(ended or waited)]


def _parts(prompts: Sequence[Prompt]) -> TurnParts:
    spent = [
        (
            one.ready_at - one.sent_at,
            one.began_at - one.ready_at,
            one.prefilled_at - one.began_at,
            one.first_token_at - one.prefilled_at,
            one.done_at - one.first_token_at,
        )
        for one in prompts
    ]
    return TurnParts(*map(float, np.mean(spent, axis=0)))


def _after(prompts: Sequence[Prompt], incident_at: float, last: float) -> AfterIncident:
    """Of minutes by the time at which the prompts were computed, the first one at the incident."""

    def hit_rate(first: float, last: float) -> float | None:
        inside = [one for one in prompts if first <= one.began_at < last]
        asked = sum(one.tokens for one in inside)
        return sum(one.hit_tokens for one in inside) / asked if asked else None

    before = hit_rate(0.0, incident_at) or 0.0
    worst: float = 1.0
    back_s: float | None = None
    for second in range(0, max(0, int(last - incident_at) - _WINDOW_S), _STEP_S):
        rate = hit_rate(incident_at + second, incident_at + second + _WINDOW_S)
        if rate is None:
            continue
        if rate < worst and second < _WORST_WITHIN_S:
            worst, back_s = rate, None
        if back_s is None and rate >= _BACK_SHARE * before:
            back_s = float(second)
    return AfterIncident(before, worst, back_s)


_WINDOW_S: Final = 60
_STEP_S: Final = 10
_WORST_WITHIN_S: Final = 600
_BACK_SHARE: Final = 0.95


def _quantiles(seconds: Sequence[float]) -> Quantiles:
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return Quantiles(float(p50), float(p90), float(p99))
