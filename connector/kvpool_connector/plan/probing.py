"""How fast the pool is, from loads and from reads in the background (probes): pure.

(design: load-or-recompute)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.types import Match
from kvpool_connector.plan.cost_model import ONE_WAY, Route, TransferCost
from kvpool_connector.plan.running_loads import RunningLoad
from kvpool_connector.records.messages import GroupBlocks, ProbeRequest, ProbeResult
from kvpool_connector.records.values import PlannerLimits

#: After a pool has become slow the second probe comes so soon, each further one twice as late.
_PROBE_AGAIN_S: Final = 0.25
#: The first probe reads so many bytes, a later one what takes `_PROBE_S` as far as is known, at
#: most `_PROBE_BYTES_MAX`. On a fast link the latency is most of what a small one takes.
_PROBE_BYTES: Final = 4 << 20
_PROBE_BYTES_MAX: Final = 64 << 20
_PROBE_S: Final = 0.05


@dataclass
class Prober:
    """Measures for an engine with `ranks` workers; plans its probes, one at a time.

    | probe   |                                             | next state                         |
    |---------|---------------------------------------------|------------------------------------|
    | none    |                                             | planned, with `plan`               |
    | planned | goes with the next step; `plan` replaces it | running, with `take`               |
    | running | on the workers                              | none, when every rank has reported |
    """

    _limits: PlannerLimits
    _transfer_cost: TransferCost
    _ranks: int
    _planned: ProbeRequest | None = None
    _running: int = 0  # ranks that have not reported
    _route: Route = ONE_WAY  # of the probe
    _planned_at: float = -math.inf
    _delay_s: float = math.inf  # until the next one, `probe_every_s` at most
    #: A load that took longer than it may, and how long it may: a probe will tell whether the pool
    #: has become slow.
    _slow_load: tuple[RunningLoad, float] | None = None
    _excused: bool = False  # the latest load was slow, and a probe was not

    @property
    def measuring(self) -> bool:
        """Whether a load was slow, and no probe has told yet whether the pool is."""
        return self._slow_load is not None

    @property
    def pending(self) -> bool:
        """The engine must go on stepping: a probe is planned, or decides about a slow load."""
        return self._planned is not None or (self.measuring and self._running > 0)

    def due(self, now: float) -> bool:
        """Whether the last one was planned long enough ago."""
        return now - self._planned_at >= min(self._delay_s, self._limits.probe_every_s)

    def blocks(self, block_bytes: int) -> int:
        """How many blocks of this size a probe reads."""
        known = self._transfer_cost.bandwidth * _PROBE_S if self._transfer_cost.samples else 0
        size = max(_PROBE_BYTES, int(min(known, _PROBE_BYTES_MAX)))
        return -(-size // max(1, block_bytes))  # what is smaller than the first is not shared

    def plan(self, digests: Sequence[bytes], match: Match | None, now: float, route: Route) -> None:
        """Read these blocks of group 0 with the next step, if the result decides anything: all by
        the slowest part of this route."""
        if self._limits.load == "auto" and digests and not self._running:
            self._planned_at = now
            self._delay_s *= 2
            self._route = route._replace(share=1.0)
            blocks = GroupBlocks(0, tuple(digests), (), match=match)
            self._planned = ProbeRequest((blocks,), self._limits.load_timeout_s)

    def take(self) -> ProbeRequest | None:
        """The probe that goes with this step."""
        probe, self._planned = self._planned, None
        if probe is not None:
            self._running = self._ranks
        return probe

    def on_result(self, result: ProbeResult) -> None:
        """One rank has ended a probe."""
        self._running = max(0, self._running - 1)
        waited = not result.size and result.seconds >= self._limits.load_timeout_s
        slow_load = self._slow_load
        if slow_load is not None and (waited or _is_slow(result, *slow_load)):
            self._start_over(slow_load[0], _PROBE_AGAIN_S)  # it may be fast again at once
        if result.size:
            self._transfer_cost.observe(result.size, result.seconds, self._route)
            if not self._running and self._slow_load is not None:
                self._slow_load, self._excused = None, True
        elif waited:
            self._transfer_cost.start_over(_PROBE_BYTES, 0, result.seconds, self._route)

    def on_load(self, load: RunningLoad, now: float) -> None:
        """A load has ended.

        One slow load may be an accident: a busy core is enough. So a probe judges it. Without one
        good load between two that were slow the pool is slow, whatever a probe says.
        """
        prefill_s, ended = load.prefill_s or math.inf, load.ended
        if load.aborted or (ended.size and ended.seconds >= prefill_s):
            if self._limits.load != "auto":
                self._start_over(load, self._limits.probe_every_s)
            elif not self._excused:
                self._slow_load = load, load.timeout_s if load.aborted else prefill_s
            elif load.started_at >= self._planned_at:
                self._planned_at = now  # the probe that has excused the first one was wrong
                self._start_over(load, self._limits.probe_every_s)
            # Else it ran beside the first one, and is excused with it.
        elif ended.size:
            # A load that found nothing and waited for nothing is no measure of the pool's speed.
            # An estimate is of the bytes beside it, too.
            size = ended.size + load.size_beside
            self._transfer_cost.observe(size, ended.seconds, load.route)
            self._excused = False

    def _start_over(self, load: RunningLoad, probe_delay_s: float) -> None:
        """The pool has become slow."""
        self._transfer_cost.start_over(load.size, load.ended.size, load.ended.seconds, load.route)
        self._slow_load, self._excused = None, False
        self._delay_s = probe_delay_s


def _is_slow(probe: ProbeResult, load: RunningLoad, limit_s: float) -> bool:
    """At the speed of this probe the load would have taken too long as well."""
    return probe.seconds * load.size * load.route.share > limit_s * probe.size > 0
