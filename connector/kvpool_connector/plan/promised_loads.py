"""What an engine promises of its prompts, and which promised tokens its loads wait for: pure.

(design: load-or-recompute)
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from kvpool.types import ReadStatus
from kvpool_connector.plan.cost_model import PrefillCost
from kvpool_connector.plan.running_loads import RunningLoad, RunningLoads
from kvpool_connector.plan.tracked_request import TrackedRequest
from kvpool_connector.plan.windows import Windows
from kvpool_connector.records.promises import GivenPromise, PromisedBlocks, PromiseState, WaitLimits
from kvpool_connector.records.values import CacheGroup, PlannerLimits


@dataclass
class PromisedLoads:
    """The promises of one engine: those that it makes, and those that its requests were given."""

    _counters: MutableMapping[str, float]
    _groups: Sequence[CacheGroup]
    _limits: PlannerLimits
    _windows: Windows
    _running: RunningLoads
    _prefill_cost: PrefillCost
    #: What promises call the names that this engine shares under; empty until there are any.
    name: str = ""

    def make(self, request: TrackedRequest, computed: int) -> PromisedBlocks | None:
        """As `Planner.make_promise`, of this request."""
        tokens = self._windows.whole_units(min(request.prompt, computed))
        wait = self._limits.promise_wait_s
        if not self.name or not wait or request.saves_nothing or not tokens:
            return None
        self._counters["promise made"] += 1
        tail = bytes(request.hashes[tokens // self._running.tokens_per_hash - 1])
        return PromisedBlocks(tokens, tail, self.name, self._prefill_cost.seconds(0, tokens))

    def given(self, promise: PromisedBlocks | None) -> GivenPromise | None:
        """What a new request has been told, if this engine waits for it."""
        if promise is None or not self._limits.promise_wait_s:
            return None
        return GivenPromise(promise, self._counters)

    def tokens(self, request: TrackedRequest, there: int) -> int:
        """How many a load of this request may wait for; 0: none beyond those that are `there`."""
        promise = request.promise
        if promise is None:
            return 0
        if any(match.stopped is ReadStatus.NO_MASTER for match in request.matches):
            return 0  # nothing comes out of a pool that is not there
        tokens = promise.tokens(self.name, request.hashes, self._running.tokens_per_hash)
        tokens = self._windows.whole_units(min(tokens, request.prompt - 1))
        if tokens and tokens <= there:
            promise.move_to(PromiseState.FOUND)
        elif tokens and self._running.awaiting >= max(1, self._limits.loads_max // 2):
            # Clients can make promises up. Those must not keep others from loading.
            promise.move_to(PromiseState.TOO_MANY)
        return tokens if promise.state is PromiseState.GIVEN else 0

    def wait_limits(self, request: TrackedRequest, first: int, last: int) -> WaitLimits | None:
        """For a load of tokens that were promised; None: all of them are there."""
        promise = request.promise
        if promise is None or last <= self._windows.available(request.matches):
            return None
        promise.move_to(PromiseState.AWAITED)
        always = self._limits.load == "always"
        prefill_s = math.inf if always else request.choice.estimates.prefill_s
        return promise.wait_limits(first, last, prefill_s, self._limits.promise_wait_s)

    def on_load(self, request: TrackedRequest, load: RunningLoad, *, refused: bool) -> None:
        """A load has ended. What it has waited for is in the pool, or is computed."""
        if not load.awaits or request.promise is None:
            return
        self._counters["promise_wait_s"] += load.ended.waited_s
        lost = PromiseState.NOT_USED if refused else PromiseState.BROKEN
        request.promise.move_to(PromiseState.KEPT if load.ended.complete else lost)
        if load.ended.complete:
            # After a reset there are no matches any more.
            found = self._windows.available(request.matches) if request.matches else 0
            self._counters["promised_tokens"] += load.last - max(load.first, found)
            request.blocks_saved = [
                max(blocks, load.last // group.block_size)
                for blocks, group in zip(request.blocks_saved, self._groups, strict=True)
            ]
