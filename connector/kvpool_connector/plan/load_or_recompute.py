"""Whether a prompt is loaded, computed, or waits for a load; and when a load is aborted: pure.

(design: load-or-recompute)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool_connector.plan.cost_model import ONE_WAY, PrefillCost, Route, TransferCost
from kvpool_connector.plan.probing import Prober
from kvpool_connector.plan.running_loads import RunningLoads, SharedLoad
from kvpool_connector.records.values import PlannerLimits

#: A load is aborted when it takes so many times longer than estimated; but not before
#: `_ABORT_SHARE_MIN` of the time that computing its tokens takes, and not after all of it. So when
#: a pool becomes slow, the first load after that costs half of a recompute as a rule, and only one
#: load does. (design: load-or-recompute)
_ABORT_FACTOR: Final = 3.0
_ABORT_SHARE_MIN: Final = 0.5
_LOAD_TIMEOUT_S_MIN: Final = 0.05
#: A request waits for its lookup so much of the time that computing its tokens takes.
_LOOKUP_SHARE: Final = 0.5
_LOOKUP_TIMEOUT_S_MIN: Final = 0.01
#: The same of a lookup and of a load before the first prefill was measured.
_FIRST_TIMEOUT_S_MIN: Final = 0.25


class LoadDecision(enum.Enum):
    """Why the tokens that the pool has are loaded, or are not. Names a metric's label."""

    LOAD = "load"
    WAIT = "wait"  # another prompt's load brings them; not final, so never counted
    NOTHING_NEW = "nothing new"  # the engine has as much as the pool
    SLOWER = "slower"  # loading is estimated to take longer than computing
    MEASURING = "measuring"  # after a load that was slow: a probe measures whether the pool is
    TOO_MANY = "too many loads"
    LATE = "late"  # the load that it waited for did not end in time
    NOT_CHOSEN = "not chosen"  # the engine loads from another connector


class Estimates(NamedTuple):
    """Seconds that loading and computing the same tokens will take."""

    load_s: float = 0.0
    prefill_s: float | None = None  # None: no prefill was measured yet


class Wanted(NamedTuple):
    """Tokens `first` to `last` (excluded) that the pool has of a prompt with these hashes.

    `waits_until`: when it stops to wait for other prompts' loads; None if it has not waited.
    `awaits`: some of them are only promised.
    """

    hashes: Sequence[bytes]
    first: int
    last: int
    waits_until: float | None = None
    awaits: bool = False
    route: Route = ONE_WAY


class Choice(NamedTuple):
    """What is done, the estimates that were compared, and with WAIT what is waited for."""

    decision: LoadDecision | None = None
    estimates: Estimates = Estimates()
    shared: SharedLoad | None = None


NO_CHOICE: Final = Choice()


@dataclass
class LoadOrRecompute:
    """Decides for one engine, from what it has measured. `bytes_of(first, last)` are those that one
    rank moves for these tokens."""

    _limits: PlannerLimits
    transfer_cost: TransferCost
    prefill_cost: PrefillCost
    _loads: RunningLoads
    _prober: Prober
    _bytes_of: Callable[[int, int], int]

    def choose(self, wanted: Wanted, now: float) -> Choice:
        """What ends first: to load, to wait for a load of the same blocks, or to compute. (G10)

        The estimate of loading includes the bytes of loads that are running: they share the link.
        Waiting ends at `wanted.waits_until`, however often another load took over.
        """
        _, first, last, waits_until, _, route = wanted
        if last <= first:
            return Choice(LoadDecision.NOTHING_NEW)
        size = self._bytes_of(first, last)
        load_s = self.transfer_cost.seconds(size + self._loads.bytes_beside(size, route), route)
        prefill_s = self.prefill_cost.seconds(first, last)
        estimates = Estimates(load_s, prefill_s)
        compute_s = prefill_s if prefill_s is not None else math.inf
        if self._limits.load == "always":
            compute_s = math.inf
        if (shared := self._shared(wanted, min(load_s, compute_s), now)) is not None:
            if waits_until is not None and now >= waits_until:
                return Choice(LoadDecision.LATE, estimates)
            return Choice(LoadDecision.WAIT, estimates, shared)
        if self._limits.load == "always":
            return Choice(LoadDecision.LOAD, estimates)
        if len(self._loads) >= self._limits.loads_max:
            return Choice(LoadDecision.TOO_MANY, estimates)
        if load_s >= compute_s:
            return Choice(LoadDecision.SLOWER, estimates)
        if self._prober.measuring:
            return Choice(LoadDecision.MEASURING, estimates)
        return Choice(LoadDecision.LOAD, estimates)

    def lookup_timeout_s(self, first: int, last: int) -> float:
        """How long a request waits for its lookup, which can save computing these tokens."""
        if self._limits.load != "auto":
            return self._limits.load_timeout_s
        limit_s = self._limits.lookup_timeout_s
        prefill_s = self.prefill_cost.seconds(first, last)
        if prefill_s is None:
            return min(limit_s, _FIRST_TIMEOUT_S_MIN)
        return min(limit_s, max(prefill_s * _LOOKUP_SHARE, _LOOKUP_TIMEOUT_S_MIN))

    def timeout_s(self, estimates: Estimates, route: Route) -> float:
        """When a load is aborted, or no longer waited for, and its tokens are computed."""
        load_s, prefill_s = estimates
        if self._limits.load != "auto":
            return self._limits.load_timeout_s
        if prefill_s is None:
            timeout_s = max(load_s * _ABORT_FACTOR, _FIRST_TIMEOUT_S_MIN)
        elif not self.transfer_cost.known(route.ways):  # it may take as long as computing
            timeout_s = prefill_s
        else:
            timeout_s = max(load_s * _ABORT_FACTOR, prefill_s * _ABORT_SHARE_MIN)
            timeout_s = min(timeout_s, prefill_s)
        return min(self._limits.load_timeout_s, max(timeout_s, _LOAD_TIMEOUT_S_MIN))

    def _shared(self, wanted: Wanted, otherwise_s: float, now: float) -> SharedLoad | None:
        """The load to wait for, if this and loading the rest afterwards ends before `otherwise_s`.

        A long load that shares only its beginning is not waited for: the engine learns of a load's
        end, not of its progress.
        """
        found = self._loads.bringing(wanted.hashes, wanted.first, wanted.last, awaits=wanted.awaits)
        if found is None:
            return None
        load, last = found
        rest = self._bytes_of(last, wanted.last)
        rest_s = self.transfer_cost.seconds(rest, wanted.route) if rest else 0.0
        wait_s = load.remaining_s(now) + rest_s
        return SharedLoad(load, last, now) if wait_s < otherwise_s else None
