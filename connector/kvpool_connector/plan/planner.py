"""What to look up, what to load, what to save, and when: the connector's decisions, pure.

The scheduler half (`scheduler.py`) calls it with what happened and carries out what it returns.
(design: pool-thread)

One request, as a rule: `on_new_request` returns what to look up; `lookups.on_result` takes the
matches; `loadable_tokens` tells the engine how many tokens can be loaded, or to ask again;
`on_blocks_allocated` turns that into a load; `plan_step` returns the loads and saves that go with a
step; `on_load_result` and `on_save_result` take what the workers report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvpool.types import Match
from kvpool_connector.plan.cost_model import PrefillCost, TransferCost
from kvpool_connector.plan.known_writers import KnownWriters
from kvpool_connector.plan.load_or_recompute import NO_CHOICE, LoadDecision, LoadOrRecompute, Wanted
from kvpool_connector.plan.probing import Prober
from kvpool_connector.plan.promised_loads import PromisedLoads
from kvpool_connector.plan.quiet_requests import NEVER, QuietRequests
from kvpool_connector.plan.request_lookups import Prefetches, RequestLookups
from kvpool_connector.plan.request_saves import RequestSaves
from kvpool_connector.plan.running_loads import RunningLoad, RunningLoads
from kvpool_connector.plan.save_queue import SaveRun
from kvpool_connector.plan.tracked_request import RequestState, TrackedRequest, digest_of
from kvpool_connector.plan.verifier import Verifier
from kvpool_connector.plan.windows import Windows
from kvpool_connector.records.messages import GroupBlocks, LoadRequest, LoadResult, SaveResult
from kvpool_connector.records.promises import PromisedBlocks, PromiseState
from kvpool_connector.records.values import (
    CacheGroup,
    LookupRequest,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
    StepPlan,
)


class Planner:
    """Decides for one engine. `ranks` workers each do every load and every save.

    Every request that is tracked is in one `RequestState`. Two things it must not lose: a load is
    counted as running until its last rank has reported or its request has finished; a block that is
    being saved stays pinned until every rank has acknowledged (`SaveQueue`).
    """

    def __init__(
        self, groups: Sequence[CacheGroup], limits: PlannerLimits, *, ranks: int = 1
    ) -> None:
        #: What happened so far: seconds where the name ends in _s, else how often.
        self.counters: dict[str, float] = defaultdict(float)
        #: Every request of which the engine has told, until it has finished.
        self.requests: dict[str, TrackedRequest] = {}
        #: `plan_step` need not know that these were scheduled. None of them computes its prompt.
        self.quiet = QuietRequests()
        self.windows = Windows(groups)
        self._groups = tuple(groups)
        self._limits = limits
        self._ranks = ranks
        self._loads: list[LoadRequest] = []  # for the next step
        tokens_per_hash = groups[0].block_size // groups[0].hashes_per_block
        self._running = RunningLoads(tokens_per_hash, self.windows.unit)
        transfer_cost, prefill_cost = TransferCost(), PrefillCost()
        writers, timeout_s = KnownWriters(limits.loads_per_check), limits.load_timeout_s
        self.verifier = Verifier(self.counters, self._groups, writers, ranks, timeout_s)
        self.prober = Prober(limits, transfer_cost, ranks)
        self.choice = LoadOrRecompute(
            limits, transfer_cost, prefill_cost, self._running, self.prober, self.windows.bytes_of
        )
        self.lookups = RequestLookups(
            *(self.counters, self._groups, limits, self.windows, self.choice, self.requests),
            Prefetches(groups),
        )
        self.promises = PromisedLoads(
            self.counters, self._groups, limits, self.windows, self._running, prefill_cost
        )
        self.saves = RequestSaves(self.counters, self._groups, limits, ranks)

    @property
    def has_pending_work(self) -> bool:
        """The engine must go on stepping until saves, probes and verifications have ended."""
        return self.saves.queue.running or self.prober.pending or self.verifier.running

    @property
    def loading(self) -> int:
        """How many loads are running."""
        return len(self._running)

    # --- looking up -----------------------------------------------------------------------

    def on_new_request(
        self, request_id: str, hashes: Sequence[bytes], tokens: int, hints: RequestHints, now: float
    ) -> LookupRequest | None:
        """Track a new request. Returns what to look up, if it has a whole block.

        `hashes` are of all its blocks; the engine may append to them later.
        """
        hints = hints._replace(skip_save=hints.skip_save or not self._limits.save)
        request = TrackedRequest(hashes, tokens, hints, now, [0] * len(self._groups))
        request.promise = self.promises.given(hints.promise)
        return self._begin(request_id, request, tokens)

    def on_restart(self, request_id: str, tokens: int, now: float) -> LookupRequest | None:
        """A preempted request is scheduled again, now with `tokens`. Returns what to look up."""
        before = self.requests[request_id]
        self.on_request_finished(request_id)
        hashes, prompt, hints = before.hashes, before.prompt, before.hints
        request = TrackedRequest(hashes, prompt, hints, now, [0] * len(self._groups))
        # Its hashes name an adapter of before: it is computed.
        request.stale = before.stale and hints.adapter is not None
        return self._begin(request_id, request, tokens)

    def wants_names(self, request_id: str) -> bool:
        """Whether blocks of this request are going to be saved."""
        request = self.requests[request_id]
        whole = min(group.block_size for group in self._groups)
        return not request.hints.skip_save and request.prompt >= whole

    def loadable_tokens(
        self, request_id: str, tokens: int, computed: int, now: float
    ) -> int | None:
        """How many of the request's `tokens` beyond `computed` can be loaded; None: ask again.

        The engine may ask any number of times before it allocates; the last answer counts.
        """
        request = self.requests[request_id]
        if request.state is RequestState.LOADING:
            return 0
        if request.state is RequestState.LOOKING_UP:
            return None
        if (shared := request.choice.shared) is not None:
            assert request.waits_until is not None
            if shared.load.running and now < request.waits_until:
                return None
            self.counters["load_wait_s"] += now - shared.since
            if shared.load.lost and computed < shared.last:
                # The pool has these blocks no more, although the lookup found them.
                self._forget_matches(request_id, request, computed)
        request.move_to(RequestState.ANSWERED)
        request.choice = NO_CHOICE
        if not request.matches or self.verifier.writers.odd:
            return 0
        there = self.windows.available(request.matches)
        last = max(there, self.promises.tokens(request, max(there, computed)))
        last = min(last, self.windows.whole_units(tokens - 1))
        if self._limits.drops_last_block:
            last = max(0, last - self.windows.unit)
        if (most := request.hints.max_load_tokens) is not None:
            last = min(last, self.windows.whole_units(computed + most))
        until, block = request.waits_until, self._groups[self.windows.whole].block_size
        found = request.matches[self.windows.whole].of(computed // block, last // block)
        size = self.windows.bytes_of(computed, last)
        route = self.choice.transfer_cost.route(found, size)
        wanted = Wanted(request.hashes, computed, last, until, last > there, route)
        request.choice = self.choice.choose(wanted, now)
        if (decision := request.choice.decision) is LoadDecision.WAIT:
            request.move_to(RequestState.WAITING)
            if request.waits_until is None:
                self.counters["load_waits"] += 1
                request.waits_until = now + self.choice.timeout_s(request.choice.estimates, route)
            return None
        if decision is not LoadDecision.LOAD:
            slow = decision in (LoadDecision.SLOWER, LoadDecision.MEASURING)
            if slow and self.prober.due(now):
                self._probe_route(request, computed, last, now)
            return 0
        request.offered = (computed, last, route)
        request.move_to(RequestState.OFFERED)
        return last - computed

    # --- loading --------------------------------------------------------------------------

    def on_blocks_allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int, now: float
    ) -> None:
        """The engine has allocated the request's blocks and wants `tokens` of what was offered.

        0: it loads from another connector, or nothing.
        """
        request = self.requests[request_id]
        request.phase = "begun"
        self.lookups.prefetches.drop(request_id)
        self._count_decision(request, tokens)
        if request.state is not RequestState.OFFERED or tokens <= 0:
            if request.state is RequestState.OFFERED:
                request.move_to(RequestState.ANSWERED)
            if request.promise is not None and request.promise.state is PromiseState.GIVEN:
                _give_up_promise(request)
            return
        first, _, route = request.offered
        last = first + tokens
        load = self._load(request_id, request, first, last, block_ids)
        self._loads.append(load)
        size = self.windows.bytes_of(first, last)
        request.load = RunningLoad(
            *(request.hashes, first, last, size, route, now, *request.choice.estimates),
            *(load.timeout_s, self._ranks, self._running.bytes_beside(size, route)),
            awaits=load.wait_limits is not None,
        )
        self._running.start(request.load)
        request.move_to(RequestState.LOADING)
        self._count_hits(request.matches[self.windows.whole], first, last)

    def on_load_result(self, result: LoadResult, now: float) -> None:
        """One rank has ended a load. With the last one, its speed is measured."""
        request = self.requests.get(result.request_id)
        load = request.load if request is not None else None
        if request is None or load is None or not load.on_rank(result):
            return
        self._end_load(request)
        id, first, result = result.request_id, load.first, load.ended
        refused = self.verifier.on_load(result, first, load.last, request.matches)
        self.promises.on_load(request, load, refused=refused)
        request.move_to(RequestState.ANSWERED)
        if refused:  # that says nothing about the pool's speed
            load.lost = True
            return self._forget_matches(id, request, first)
        self.prober.on_load(load, now)
        if self.prober.measuring and request.matches:  # none after a reset
            # Slow for once, as a first load is, or from now on? A probe finds out, so that the next
            # request does not have to.
            self._probe_route(request, load.first, load.last, now)
        self.counters["load_s"] += now - load.started_at
        self.counters[f"load_duration {now - load.started_at:.2g}"] += 1
        self.counters["loads"] += 1
        if not result.complete:
            self.counters["loads_failed"] += 1
            load.lost = not load.aborted
            # The engine asks again: without this the same blocks would be loaded for ever.
            self._forget_matches(id, request, first)

    # --- saving ---------------------------------------------------------------------------

    def plan_step(
        self,
        scheduled: Iterable[ScheduledRequest],
        still_cached: Callable[[int, int, bytes], bool],
        now: float,
        *,
        idle: bool = False,
    ) -> StepPlan:
        """What is to be loaded, saved and probed with this step; each is in one plan.

        `scheduled` may leave out requests that are `quiet`. `idle`: nothing is
        computed, so that no block comes that a save could wait for.
        `still_cached(block_id, group, digest)` says whether a block still has these contents.
        """
        plan = StepPlan(loads=self._loads, probe=self.prober.take())
        self._loads = []
        saves = not self.verifier.writers.odd
        watched = self.verifier.watched
        for one in scheduled:
            request = self.requests.get(one.request_id)
            left = 0
            if request is None:  # its adapter is not known yet, or nothing of it is shared
                pass
            elif request.saves_nothing:
                # Until its prompt is computed each step tells how fast that is.
                left = NEVER if one.end >= request.prompt else 0
            elif saves:
                left = self.saves.on_scheduled(request, one)
            if request is not None and one.request_id == watched:
                plan.verify = self.verifier.take(one, request.hashes, request.hints.adapter)
                left = 0
            self.quiet.sleep(one.request_id, left)
        if plan.verify is not None:
            plan.blocks_to_pin += [one for blocks in plan.verify.blocks for one in blocks.block_ids]
        if saves:
            plan.saves, pinned = self.saves.take(still_cached, now, idle=idle)
            plan.blocks_to_pin += pinned
        else:
            self.saves.queue.drop_gathered("mismatch")
        return plan

    def on_reset(self) -> list[str]:
        """The weights have changed. What requests have computed with the old ones is not saved, and
        what was looked up for them is not loaded.

        Returns those that have no blocks yet: `on_restart` can begin them anew.
        """
        self.saves.queue.reset()
        self.lookups.prefetches.clear()
        for request in self.requests.values():
            request.stale = True
            request.matches = ()
            if request.state is RequestState.LOOKING_UP:
                self.counters["miss reset"] += 1
                request.move_to(RequestState.ANSWERED)
            elif request.state is RequestState.OFFERED:
                request.move_to(RequestState.ANSWERED)
        return [name for name, request in self.requests.items() if request.phase == "queued"]

    def on_save_result(self, result: SaveResult, now: float) -> tuple[list[int], list[SaveRun]]:
        """One rank has ended a save. Returns block ids to unpin, and what the pool has now."""
        unpinned, stored = self.saves.queue.on_result(result, now)
        if stored and not self.choice.transfer_cost.samples and self.prober.due(now):
            # Measure before the first load, so that it can be weighed as well, and so that it does
            # not wait for a connection.
            digests = [one for run in stored if not run.group for one in run.digests]
            blocks = self.prober.blocks(self.windows.block_bytes[0])
            self.prober.plan(digests[:blocks], None, now, self.choice.transfer_cost.route(None, 0))
        return unpinned, stored

    def make_promise(self, request_id: str, computed: int) -> PromisedBlocks | None:
        """What the engine that decodes may wait for, of a prompt of which `computed` tokens are.

        None: this engine saves nothing of it, or not a whole block.
        """
        request = self.requests.get(request_id)
        if request is None or self.verifier.writers.odd:
            return None
        return self.promises.make(request, computed)

    # --- the end --------------------------------------------------------------------------

    def on_preempted(self, request_id: str) -> None:
        """The engine took its blocks away; those that are being saved stay pinned all the same."""
        request = self.requests.get(request_id)
        if request is not None:
            request.phase = "queued"
            request.blocks_saved = [0] * len(self._groups)
            self.quiet.wake(request_id)
            self.verifier.release(request_id)
            self.saves.queue.expedite_all()  # the engine has no free blocks
            if request.state is RequestState.OFFERED:
                request.move_to(RequestState.ANSWERED)

    def save_rest(self, one: ScheduledRequest, now: float) -> list[int]:
        """The request is about to finish, at `one.end`. Returns the block ids to pin: those that no
        step has looked at, because it was quiet."""
        request = self.requests.get(one.request_id)
        if request is None or request.phase != "decodes":
            return []
        if request.saves_nothing or self.verifier.writers.odd:
            return []
        self.saves.on_scheduled(request, one)
        return self.saves.gather(now)

    def on_request_finished(self, request_id: str) -> RequestHints | None:
        """It has ended or was aborted, in any state. Returns its hints; None if it is not tracked.

        A running load goes on: the engine frees those blocks when the workers have reported that
        nothing is written to them any more.
        """
        self.quiet.forget(request_id)
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        _give_up_promise(request)
        self.lookups.prefetches.drop(request_id)
        self.verifier.release(request_id)
        self._end_load(request)
        self.saves.queue.expedite(request.hints.session, request.hints.resume_in_s)
        return request.hints

    # --- inside ---------------------------------------------------------------------------

    def _begin(self, request_id: str, request: TrackedRequest, tokens: int) -> LookupRequest | None:
        self.requests[request_id] = request
        self.quiet.wake(request_id)
        refused = self.verifier.writers.odd
        return self.lookups.start(request_id, request, tokens, refused=refused)

    def _forget_matches(self, request_id: str, request: TrackedRequest, tokens: int) -> None:
        """What the pool has lost behind so many tokens is computed, and can be saved again."""
        request.matches = ()
        _give_up_promise(request)
        if request.phase == "decodes":
            request.phase = "begun"
        self.quiet.wake(request_id)
        request.blocks_saved = [
            min(blocks, tokens // group.block_size)
            for blocks, group in zip(request.blocks_saved, self._groups, strict=True)
        ]

    def _load(
        self,
        request_id: str,
        request: TrackedRequest,
        first: int,
        last: int,
        block_ids: Sequence[Sequence[int]],
    ) -> LoadRequest:
        blocks = []
        for number, group in enumerate(self._groups):
            ids = block_ids[number]
            covered = range(first // group.block_size, last // group.block_size)
            # Id 0 is no block: what lies before a sliding window is not needed.
            wanted = [index for index in covered if ids[index]]
            if not wanted:
                continue
            found = request.matches[number]
            contiguous = wanted[-1] + 1 - wanted[0] == len(wanted)
            known = contiguous and wanted[-1] < found.length
            match = found.of(wanted[0], wanted[-1] + 1) if known else None
            digests = tuple(digest_of(request.hashes, group, i) for i in wanted)
            found_ids = tuple(ids[i] for i in wanted)
            blocks.append(GroupBlocks(number, digests, found_ids, match=match))
        return LoadRequest(
            *(request_id, tuple(blocks)),
            self.choice.timeout_s(request.choice.estimates, request.offered[2]),
            *(self.promises.wait_limits(request, first, last), self.verifier.asks(request_id)),
        )

    def _count_decision(self, request: TrackedRequest, tokens: int) -> None:
        decision = request.choice.decision
        if decision is None or decision is LoadDecision.WAIT:
            return
        if decision is LoadDecision.LOAD and tokens <= 0:
            decision = LoadDecision.NOT_CHOSEN
        self.counters[f"decision {decision.value}"] += 1
        if decision in (LoadDecision.LOAD, LoadDecision.SLOWER):
            load_s, prefill_s = request.choice.estimates
            self.counters["estimated_load_s"] += load_s
            self.counters["estimated_prefill_s"] += prefill_s or 0.0
        request.choice = request.choice._replace(decision=None)

    def _count_hits(self, match: Match, first: int, last: int) -> None:
        """Tokens `first` to `last` by the tier that they are read from; groups have the same."""
        block = self._groups[self.windows.whole].block_size
        for run in match.runs:
            inside = min(last, (run.last + 1) * block) - max(first, run.first * block)
            if inside > 0 and run.replicas:
                self.counters[f"hit_tokens {run.replicas[0].tier}"] += inside

    def _end_load(self, request: TrackedRequest) -> None:
        if request.load is not None:
            self._running.end(request.load)
            request.load = None

    def _probe_route(self, request: TrackedRequest, first: int, last: int, now: float) -> None:
        """Measure in the background what was not loaded because it was estimated to be slow."""
        group, cost, size = self._groups[0], self.choice.transfer_cost, self.windows.block_bytes[0]
        stop = last // group.block_size
        start = stop - self.windows.blocks(group, first, last)
        match = request.matches[0].of(start, stop)
        route = cost.route(match, (stop - start) * size)
        numbers, places = cost.sample(match, self.prober.blocks(size), route)
        digests = [digest_of(request.hashes, group, start + n) for n in numbers]
        self.prober.plan(digests, places, now, route)


def _give_up_promise(request: TrackedRequest) -> None:
    """Nobody waits for it any more. One that has ended stays what it is."""
    if request.promise is not None:
        request.promise.move_to(PromiseState.NOT_USED)
