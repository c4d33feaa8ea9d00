"""What to look up, what to load, what to save, and when: the connector's decisions, pure.

It knows no engine, clock or socket. The scheduler half (`scheduler.py`) calls it with what
happened and carries out what it returns; `now` is in seconds of any one clock.
(design: pool-thread)

One request, as a rule: `on_new_request` returns what to look up; `on_lookup_result` takes the
matches; `loadable_tokens` tells the engine how many tokens can be loaded, or to ask again;
`on_blocks_allocated` turns that into a load; `plan_step` returns the loads and saves that go with a
step; `on_load_result` and `on_save_result` take what the workers report.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvpool.types import ROOT, Match, ReadStatus
from kvpool_connector.cost_model import PrefillCost, TransferCost
from kvpool_connector.known_writers import KnownWriters
from kvpool_connector.load_or_recompute import LoadDecision, LoadOrRecompute, Wanted
from kvpool_connector.messages import GroupBlocks, LoadRequest, LoadResult, ProbeResult, SaveResult
from kvpool_connector.prefetching import Prefetches, PrefetchRequest
from kvpool_connector.probing import Prober
from kvpool_connector.promises import GivenPromise, PromisedBlocks, PromiseState, WaitLimits
from kvpool_connector.quiet_requests import NEVER, QuietRequests
from kvpool_connector.running_loads import RunningLoad, RunningLoads, SharedLoad
from kvpool_connector.save_queue import SaveQueue, SaveRun
from kvpool_connector.tracked_request import RequestState, TrackedRequest, digest_of, digests_of
from kvpool_connector.values import (
    CacheGroup,
    LookupRequest,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
    StepPlan,
)
from kvpool_connector.verifier import Verifier
from kvpool_connector.windows import Windows


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
        self.transfer_cost = TransferCost()
        self.prefill_cost = PrefillCost()
        #: `plan_step` need not know that these were scheduled. None of them computes its prompt.
        self.quiet = QuietRequests()
        #: Bytes of a block of each group, of one rank; 0 until the ranks have reported them.
        self.block_bytes: tuple[int, ...] = (0,) * len(groups)
        #: What promises call the names that this engine shares under; empty until there are any.
        self.promise_name = ""
        self._groups = tuple(groups)
        #: Tokens: only whole multiples are loaded, so that no group's block is loaded in part.
        self._unit = math.lcm(*(group.block_size for group in groups))
        self._windows = Windows(self._groups, self._unit)
        #: A group of which a hit has every block.
        self._whole = self._windows.whole
        self._limits = limits
        self._ranks = ranks
        self._requests: dict[str, TrackedRequest] = {}
        self._serial = 0
        self._loads: list[LoadRequest] = []  # for the next step
        self._prefetches = Prefetches(self._groups)
        first = self._groups[0]
        self._tokens_per_hash = first.block_size // first.hashes_per_block
        self._running = RunningLoads(self._tokens_per_hash, self._unit)
        writers, timeout_s = KnownWriters(limits.loads_per_check), limits.load_timeout_s
        self.verifier = Verifier(
            self.counters, self._groups, writers, ranks=ranks, timeout_s=timeout_s
        )
        self._prober = Prober(limits, self.transfer_cost, ranks)
        self._choice = LoadOrRecompute(
            limits,
            self.transfer_cost,
            self.prefill_cost,
            self._running,
            self._prober,
            self._bytes_of,
        )
        self._saves = SaveQueue(
            self.counters,
            ranks=ranks,
            pinned_blocks_max=limits.saved_blocks_max,
            retries_max=limits.save_retries,
            gather_s=limits.save_gather_s,
        )

    @property
    def has_pending_work(self) -> bool:
        """The engine must go on stepping until saves, probes and verifications have ended."""
        return self._saves.running or self._prober.pending or self.verifier.running

    @property
    def loading(self) -> int:
        """How many loads are running."""
        return len(self._running)

    def tracks(self, request_id: str) -> bool:
        return request_id in self._requests

    # --- looking up -----------------------------------------------------------------------

    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens: int,
        hints: RequestHints,
        now: float,
    ) -> LookupRequest | None:
        """Track a new request. Returns what to look up, if it has a whole block.

        `hashes` are of all its blocks; the engine may append to them later.
        """
        self._serial += 1
        request = TrackedRequest(
            hashes, tokens, hints, self._serial, now, blocks_saved=[0] * len(self._groups)
        )
        if hints.promise is not None and self._limits.promise_wait_s:
            request.promise = GivenPromise(hints.promise, self.counters)
        self._requests[request_id] = request
        self.quiet.wake(request_id)
        return self._lookup(request_id, request, tokens)

    def on_restart(self, request_id: str, tokens: int, now: float) -> LookupRequest | None:
        """A preempted request is scheduled again, now with `tokens`. Returns what to look up."""
        request = self._requests[request_id]
        self._serial += 1
        request.serial, request.asked_at = self._serial, now
        request.matches, request.prefixes, request.decision = (), (), None
        self._prefetches.drop(request_id)
        request.shared = request.waits_until = None
        request.blocks_saved = [0] * len(self._groups)
        self.quiet.wake(request_id)
        self._end_load(request)
        _give_up_promise(request)
        request.move_to(RequestState.LOOKING_UP)
        if request.stale and request.hints.adapter is not None:
            request.move_to(RequestState.ANSWERED)  # its hashes name an adapter of before
            return None
        request.stale = False
        return self._lookup(request_id, request, tokens)

    def lookup_started(self, request_id: str, now: float) -> None:
        """The time of this lookup begins at `now`: before, no master could be asked."""
        request = self._requests.get(request_id)
        if request is not None:
            request.asked_at = now

    def on_lookup_result(
        self, request_id: str, serial: int, matches: Sequence[Match], reason: str
    ) -> LookupRequest | None:
        """The answer to a lookup, one match for each group. Without matches it is a miss.

        Returns what else to look up, under the same serial; its answer comes here as well.
        Ignored when it comes after its timeout, or after the request has restarted or finished.
        """
        request = self._requests.get(request_id)
        if request is None or request.serial != serial:
            return None
        if request.state is not RequestState.LOOKING_UP:
            return None
        if prefixes := request.prefixes:
            request.prefixes = ()
            matches = self._windows.joined(prefixes, matches)
        elif (
            matches and request.hints.max_load_tokens is None and not self._limits.drops_last_block
        ):
            chains = self._windows.wanted(matches, request.hashes)
            if chains:
                request.prefixes = tuple(matches)
                return LookupRequest(request_id, serial, tuple(chains.values()), tuple(chains))
        request.move_to(RequestState.ANSWERED)
        if not matches:
            self.counters[f"miss {reason}"] += 1
            return None
        request.matches = tuple(matches)
        if not request.hints.skip_prefetch:
            self._prefetches.found(request_id, request.hashes, matches)
        request.blocks_saved = [
            max(blocks, match.length)
            for blocks, match in zip(request.blocks_saved, matches, strict=True)
        ]
        stopped = min(matches, key=lambda match: match.length).stopped
        if not stopped.hit:
            self.counters[f"miss {stopped.label}"] += 1
        return None

    def take_prefetches(self) -> list[PrefetchRequest]:
        """What prompts that still wait will load, and no memory has. Once for each prompt."""
        if not self._prefetches:
            return []
        found = self._prefetches.take()
        self.counters["prefetches"] += len({id(one.hashes) for one in found})
        return found

    def wants_names(self, request_id: str) -> bool:
        """Whether blocks of this request are going to be saved."""
        request = self._requests[request_id]
        whole = min(group.block_size for group in self._groups)
        return self._limits.save and not request.hints.skip_save and request.prompt >= whole

    def is_looking_up(self, request_id: str) -> bool:
        return self._requests[request_id].state is RequestState.LOOKING_UP

    def late_lookup(self, request_id: str, tokens: int, computed: int, now: float) -> int | None:
        """The serial of a lookup that has taken as long as it may; None: there is none.

        It may take a share of what it can save: the time of computing the prompt.
        (design: load-or-recompute)
        """
        request = self._requests[request_id]
        if request.state is not RequestState.LOOKING_UP:
            return None
        if now - request.asked_at < self._choice.lookup_timeout_s(computed, tokens):
            return None
        return request.serial

    def loadable_tokens(
        self, request_id: str, tokens: int, computed: int, now: float
    ) -> int | None:
        """How many of the request's `tokens` beyond `computed` can be loaded; None: ask again.

        The engine may ask any number of times before it allocates; the last answer counts.
        """
        request = self._requests[request_id]
        if request.state is RequestState.LOADING:
            return 0
        if request.state is RequestState.LOOKING_UP:
            return None
        if (shared := request.shared) is not None:
            assert request.waits_until is not None
            if shared.load.running and now < request.waits_until:
                return None
            self._end_wait(request_id, request, shared, computed, now)
        request.move_to(RequestState.ANSWERED)
        request.decision = None
        if not request.matches or self.verifier.writers.odd:
            return 0
        there = self._windows.available(request.matches)
        last = min(
            max(there, self._promised(request, max(there, computed))),
            (tokens - 1) // self._unit * self._unit,
        )
        if self._limits.drops_last_block:
            last = max(0, last - self._unit)
        if (most := request.hints.max_load_tokens) is not None:
            last = min(last, (computed + most) // self._unit * self._unit)
        wanted = Wanted(request.hashes, computed, last, request.waits_until, last > there)
        decision, request.estimates, request.shared = self._choice.choose(wanted, now)
        if request.shared is not None:
            self._begin_wait(request, now)
            return None
        request.decision = decision
        if decision is not LoadDecision.LOAD:
            slow = decision in (LoadDecision.SLOWER, LoadDecision.MEASURING)
            if slow and self._prober.due(now):
                self._probe_prefix(request, computed, last, now)
            return 0
        request.offered = (computed, last)
        request.move_to(RequestState.OFFERED)
        return last - computed

    # --- loading --------------------------------------------------------------------------

    def on_blocks_allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int, now: float
    ) -> None:
        """The engine has allocated the request's blocks and wants `tokens` of what was offered.

        0: it loads from another connector, or nothing.
        """
        request = self._requests[request_id]
        request.begun = True
        self._prefetches.drop(request_id)
        self._count_decision(request, tokens)
        if request.state is not RequestState.OFFERED or tokens <= 0:
            if request.state is RequestState.OFFERED:
                request.move_to(RequestState.ANSWERED)
            if request.promise is not None and request.promise.state is PromiseState.GIVEN:
                _give_up_promise(request)
            return
        first, last = request.offered[0], request.offered[0] + tokens
        load = self._load(request_id, request, first, last, block_ids)
        self._loads.append(load)
        size = self._bytes_of(first, last)
        request.load = RunningLoad(
            request.hashes,
            first,
            last,
            size,
            started_at=now,
            expected_s=request.estimates.load_s,
            prefill_s=request.estimates.prefill_s,
            timeout_s=load.timeout_s,
            ranks_left=self._ranks,
            size_beside=self._running.bytes_beside(size),
            awaits=load.wait_limits is not None,
        )
        self._running.start(request.load)
        request.move_to(RequestState.LOADING)
        self._count_hits(request.matches[self._whole], first, last)

    def on_load_result(self, result: LoadResult, now: float) -> None:
        """One rank has ended a load. With the last one, its speed is measured."""
        request = self._requests.get(result.request_id)
        load = request.load if request is not None else None
        if request is None or load is None:
            return
        load.ranks_left -= 1
        load.complete &= result.complete
        load.size_loaded = max(load.size_loaded, result.size)
        load.seconds = max(load.seconds, result.seconds)
        load.waited_s = max(load.waited_s, result.waited_s)
        self.verifier.on_rank_loaded(result)
        if load.ranks_left:
            return
        self._end_load(request)
        id, first, last = result.request_id, load.first, load.last
        refused = self.verifier.on_load(id, first, last, request.matches)
        self._end_promise(request, load, refused=refused)
        request.move_to(RequestState.ANSWERED)
        if refused:  # that says nothing about the pool's speed
            load.lost = True
            return self._forget_matches(id, request, first)
        self._prober.on_load(load, now)
        if self._prober.measuring:
            # Slow for once, as a first load is, or from now on? A probe finds out, so that the next
            # request does not have to.
            self._probe_prefix(request, load.first, load.last, now)
        self.counters["load_s"] += now - load.started_at
        self.counters[f"load_duration {now - load.started_at:.2g}"] += 1
        self.counters["loads"] += 1
        if not load.complete:
            self.counters["loads_failed"] += 1
            load.lost = not load.aborted
            # The engine asks again: without this the same blocks would be loaded for ever.
            self._forget_matches(result.request_id, request, load.first)

    def on_probe_result(self, result: ProbeResult) -> None:
        """One rank has ended a probe."""
        self._prober.on_result(result)

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
        plan = StepPlan(loads=self._loads, probe=self._prober.take())
        self._loads = []
        saves = self._limits.save and not self.verifier.writers.odd
        sessions: dict[tuple[str, float | None], list[SaveRun]] = {}
        at_once: set[tuple[str, float | None]] = set()
        for one in scheduled:
            request = self._requests.get(one.request_id)
            if request is None:
                continue
            watched = self.verifier.watches(one.request_id)
            if watched and plan.verify is None:
                plan.verify = self.verifier.take(one, request.hashes, request.hints.adapter)
            wanted = saves and not (request.hints.skip_save or request.stale)
            if wanted and (runs := self._complete_blocks(request, one)):
                session = (request.hints.session, request.hints.resume_in_s)
                sessions.setdefault(session, []).extend(runs)
                if one.start < request.prompt:  # other engines may wait for it
                    at_once.add(session)
            self.quiet.sleep(one.request_id, 0 if watched else self._tokens_to_save(request, one))
        if plan.verify is not None:
            plan.blocks_to_pin += [one for blocks in plan.verify.blocks for one in blocks.block_ids]
        if saves and (retries := self._saves.take_due(still_cached, now)):
            sessions.setdefault(("", None), []).extend(retries)
            at_once.add(("", None))
        for session, items in sessions.items():
            plan.blocks_to_pin += self._saves.add(items, *session, now, at_once=session in at_once)
        if not saves:
            self._saves.drop_gathered("mismatch")
        elif idle:
            self._saves.expedite_all()
        plan.saves = self._saves.take_saves(now)
        return plan

    def on_reset(self) -> list[str]:
        """The weights have changed. What requests have computed with the old ones is not saved, and
        what was looked up for them is not loaded.

        Returns those that have no blocks yet: `on_restart` can begin them anew.
        """
        self._saves.reset()
        self._prefetches.clear()
        for request in self._requests.values():
            request.stale = True
            request.matches = request.prefixes = ()
            if request.state is RequestState.LOOKING_UP:
                self.counters["miss reset"] += 1
                request.move_to(RequestState.ANSWERED)
            elif request.state is RequestState.OFFERED:
                request.move_to(RequestState.ANSWERED)
        return [name for name, request in self._requests.items() if not request.begun]

    def on_save_result(self, result: SaveResult, now: float) -> tuple[list[int], list[SaveRun]]:
        """One rank has ended a save. Returns block ids to unpin, and what the pool has now."""
        unpinned, stored = self._saves.on_result(result, now)
        if stored and not self.transfer_cost.samples and self._prober.due(now):
            # Measure before the first load, so that it can be weighed as well, and so that it does
            # not wait for a connection.
            digests = [one for run in stored if not run.group for one in run.digests]
            self._prober.plan(digests[: self._prober.blocks(self.block_bytes[0])], None, now)
        return unpinned, stored

    def take_dropped(self) -> list[int]:
        """Block ids to unpin, which a plan had pinned for a save and nothing saves any more."""
        return self._saves.take_dropped()

    # --- promises -------------------------------------------------------------------------

    def make_promise(self, request_id: str, computed: int) -> PromisedBlocks | None:
        """What the engine that decodes may wait for, of a prompt of which `computed` tokens are.

        None: this engine saves nothing of it, or not a whole block.
        """
        request = self._requests.get(request_id)
        if request is None or not self.promise_name or not self._limits.promise_wait_s:
            return None
        saves = self._limits.save and not self.verifier.writers.odd
        tokens = min(request.prompt, computed) // self._unit * self._unit
        if not saves or request.hints.skip_save or request.stale or not tokens:
            return None
        self.counters["promise made"] += 1
        return PromisedBlocks(
            tokens,
            bytes(request.hashes[tokens // self._tokens_per_hash - 1]),
            self.promise_name,
            self.prefill_cost.seconds(0, tokens),
        )

    def _promised(self, request: TrackedRequest, there: int) -> int:
        """Tokens that a load of this request may wait for; 0: none beyond those that are there."""
        promise = request.promise
        if promise is None:
            return 0
        if any(match.stopped is ReadStatus.NO_MASTER for match in request.matches):
            return 0  # nothing comes out of a pool that is not there
        tokens = promise.tokens(self.promise_name, request.hashes, self._tokens_per_hash)
        tokens = min(tokens, request.prompt - 1) // self._unit * self._unit
        if tokens and tokens <= there:
            promise.move_to(PromiseState.FOUND)
        elif tokens and self._running.awaiting >= max(1, self._limits.loads_max // 2):
            # Clients can make promises up. Those must not keep others from loading.
            promise.move_to(PromiseState.TOO_MANY)
        return tokens if promise.state is PromiseState.GIVEN else 0

    def _wait_limits(self, request: TrackedRequest, first: int, last: int) -> WaitLimits | None:
        """For a load of tokens that were promised; None: all of them are there."""
        promise = request.promise
        if promise is None or last <= self._windows.available(request.matches):
            return None
        promise.move_to(PromiseState.AWAITED)
        always = self._limits.load == "always"
        prefill_s = math.inf if always else request.estimates.prefill_s
        return promise.wait_limits(first, last, prefill_s, self._limits.promise_wait_s)

    def _end_promise(self, request: TrackedRequest, load: RunningLoad, *, refused: bool) -> None:
        """A load has ended. What it has waited for is in the pool, or is computed."""
        if not load.awaits or request.promise is None:
            return
        self.counters["promise_wait_s"] += load.waited_s
        lost = PromiseState.NOT_USED if refused else PromiseState.BROKEN
        request.promise.move_to(PromiseState.KEPT if load.complete else lost)
        if load.complete:
            # After a reset there are no matches any more.
            found = self._windows.available(request.matches) if request.matches else 0
            self.counters["promised_tokens"] += load.last - max(load.first, found)
            request.blocks_saved = [
                max(blocks, load.last // group.block_size)
                for blocks, group in zip(request.blocks_saved, self._groups, strict=True)
            ]

    # --- the end --------------------------------------------------------------------------

    def on_preempted(self, request_id: str) -> None:
        """The engine took its blocks away; those that are being saved stay pinned all the same."""
        request = self._requests.get(request_id)
        if request is not None:
            request.begun = False
            request.blocks_saved = [0] * len(self._groups)
            self.quiet.wake(request_id)
            self.verifier.release(request_id)
            self._saves.expedite_all()  # the engine has no free blocks
            if request.state is RequestState.OFFERED:
                request.move_to(RequestState.ANSWERED)

    def on_request_finished(self, request_id: str) -> RequestHints | None:
        """It has ended or was aborted, in any state. Returns its hints; None if it is not tracked.

        A running load goes on: the engine frees those blocks when the workers have reported that
        nothing is written to them any more.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.quiet.forget(request_id)
        _give_up_promise(request)
        self._prefetches.drop(request_id)
        self.verifier.release(request_id)
        self._end_load(request)
        self._saves.expedite(request.hints.session, request.hints.resume_in_s)
        return request.hints

    # --- inside ---------------------------------------------------------------------------

    def _lookup(
        self, request_id: str, request: TrackedRequest, tokens: int
    ) -> LookupRequest | None:
        # The last token is always computed: its output is what the engine goes on from.
        no_load = self._limits.load == "never" or request.hints.skip_load
        if no_load or tokens - 1 < self._unit:
            request.move_to(RequestState.ANSWERED)
            return None
        if self.verifier.writers.odd:
            self.counters["miss mismatch"] += 1
            request.move_to(RequestState.ANSWERED)
            return None
        chains = tuple(
            tuple(
                digests_of(
                    request.hashes,
                    group,
                    0,
                    (tokens - 1) // self._unit * self._unit // group.block_size,
                )
            )
            for group in self._groups
        )
        self.counters["lookups"] += 1
        return LookupRequest(request_id, request.serial, chains, session=request.hints.session)

    def _begin_wait(self, request: TrackedRequest, now: float) -> None:
        request.move_to(RequestState.WAITING)
        if request.waits_until is None:
            self.counters["load_waits"] += 1
            request.waits_until = now + self._choice.timeout_s(request.estimates)

    def _end_wait(
        self,
        request_id: str,
        request: TrackedRequest,
        shared: SharedLoad,
        computed: int,
        now: float,
    ) -> None:
        request.shared = None
        self.counters["load_wait_s"] += now - shared.since
        if shared.load.lost and computed < shared.last:
            # The pool does not have these blocks any more, although the lookup found them.
            self._forget_matches(request_id, request, computed)

    def _forget_matches(self, request_id: str, request: TrackedRequest, tokens: int) -> None:
        """What the pool has lost behind so many tokens is computed, and can be saved again."""
        request.matches = ()
        _give_up_promise(request)
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
            blocks.append(
                GroupBlocks(
                    number,
                    tuple(digest_of(request.hashes, group, i) for i in wanted),
                    tuple(ids[i] for i in wanted),
                    match=match,
                )
            )
        return LoadRequest(
            request_id,
            tuple(blocks),
            self._choice.timeout_s(request.estimates),
            self._wait_limits(request, first, last),
            self.verifier.asks(request_id),
        )

    def _count_decision(self, request: TrackedRequest, tokens: int) -> None:
        decision, request.decision = request.decision, None
        if decision is None:
            return
        if decision is LoadDecision.LOAD and tokens <= 0:
            decision = LoadDecision.NOT_CHOSEN
        self.counters[f"decision {decision.value}"] += 1
        if decision in (LoadDecision.LOAD, LoadDecision.SLOWER):
            load_s, prefill_s = request.estimates
            self.counters["estimated_load_s"] += load_s
            self.counters["estimated_prefill_s"] += prefill_s or 0.0

    def _count_hits(self, match: Match, first: int, last: int) -> None:
        """Tokens `first` to `last` by the tier that they are read from; groups have the same."""
        block = self._groups[self._whole].block_size
        for run in match.runs:
            inside = min(last, (run.last + 1) * block) - max(first, run.first * block)
            if inside > 0 and run.replicas:
                self.counters[f"hit_tokens {run.replicas[0].tier}"] += inside

    def _end_load(self, request: TrackedRequest) -> None:
        if request.load is not None:
            self._running.end(request.load)
            request.load = None

    def _bytes_of(self, first: int, last: int) -> int:
        """Bytes that one rank moves for these tokens."""
        return sum(
            self._windows.blocks(group, first, last) * size
            for group, size in zip(self._groups, self.block_bytes, strict=True)
        )

    def _probe_prefix(self, request: TrackedRequest, first: int, last: int, now: float) -> None:
        """Measure in the background what was not loaded because it was estimated to be slow."""
        group = self._groups[0]
        start = last // group.block_size - self._windows.blocks(group, first, last)
        stop = min(last // group.block_size, start + self._prober.blocks(self.block_bytes[0]))
        digests = [digest_of(request.hashes, group, i) for i in range(start, stop)]
        self._prober.plan(digests, request.matches[0].of(start, stop), now)

    def _tokens_to_save(self, request: TrackedRequest, one: ScheduledRequest) -> int:
        """How many the request computes after this step until its next block is complete."""
        if one.end < request.prompt:
            return 0
        if not (self._limits.save and self._limits.save_decode) or request.hints.skip_save:
            return NEVER
        next_at = NEVER
        for blocks, group in zip(request.blocks_saved, self._groups, strict=True):
            at = (blocks + 1) * group.block_size
            if at < next_at:
                next_at = at
        return max(0, next_at - one.end)

    def _complete_blocks(self, request: TrackedRequest, one: ScheduledRequest) -> list[SaveRun]:
        """Blocks that are complete after this step and neither stored nor being saved."""
        runs: list[SaveRun] = []
        end = one.end if self._limits.save_decode else min(one.end, request.prompt)
        for number, group in enumerate(self._groups):
            first = request.blocks_saved[number]
            hashed = len(request.hashes) // group.hashes_per_block
            stop = min(end // group.block_size, hashed)
            if stop <= first:
                continue
            ids = one.block_ids[number][first:stop]
            run = SaveRun(
                one.request_id,
                number,
                first,
                digests_of(request.hashes, group, first, first + len(ids)),
                digest_of(request.hashes, group, first - 1) if first else ROOT,
                ids,
                request.asked_at,
                request.hints.adapter,
            )
            if all(ids):
                runs.append(run)
            else:  # id 0 is no block
                runs += [part for there, part in run.split([bool(one) for one in ids]) if there]
            request.blocks_saved[number] = first + len(ids)
        return runs


def _give_up_promise(request: TrackedRequest) -> None:
    """Nobody waits for it any more. One that has ended stays what it is."""
    if request.promise is not None:
        request.promise.move_to(PromiseState.NOT_USED)
