"""What to look up, what to load, what to save, and when: the connector's decisions, pure.

It knows no engine, clock or socket. The scheduler half (`scheduler.py`) calls it with what
happened and carries out what it returns; `now` is in seconds of any one clock.
(design: connector)

One request, as a rule: `on_new_request` returns what to look up; `on_lookup_result` takes the
matches; `loadable_tokens` tells the engine how many tokens can be loaded, or to ask again;
`on_blocks_allocated` turns that into a load; `plan_step` returns the loads and saves that go with a
step; `on_load_result` and `on_save_result` take what the workers report.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.types import ROOT, Match
from kvpool_connector.cost_model import PrefillCost, TransferCost
from kvpool_connector.messages import (
    GroupBlocks,
    LoadRequest,
    LoadResult,
    ProbeRequest,
    ProbeResult,
    SaveRequest,
    SaveResult,
)
from kvpool_connector.save_queue import SaveItem, SaveQueue, StoredBlock

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
#: More tokens than any request has.
_NEVER: Final = 1 << 62
#: After a pool has become slow the second probe comes so soon, each further one twice as late.
_PROBE_AGAIN_S: Final = 0.25
#: Bytes that a probe reads at most.
_PROBE_BYTES: Final = 4 << 20


class CacheGroup(NamedTuple):
    """A KV cache group: tokens in one of its blocks, and how many of the engine's hashes those are.

    All groups of an engine cover the same tokens, in blocks of different sizes.
    """

    block_size: int
    hashes_per_block: int


class PlannerLimits(NamedTuple):
    """The settings that decisions depend on (`settings.py` explains each)."""

    load: str = "auto"
    save: bool = True
    hit_tokens_min: int = 1
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    save_decode: bool = True
    loads_max: int = 32
    saved_blocks_max: int = 1 << 30
    save_retries: int = 3
    probe_every_s: float = 5.0


class RequestHints(NamedTuple):
    """What a request's parameters say about its conversation."""

    session: str = ""
    resume_in_s: float | None = None
    ends: bool = False
    #: Not a hint, but as lasting: number and fingerprints of its LoRA adapter.
    adapter: tuple[int, tuple[str, ...]] | None = None


class LoadDecision(enum.Enum):
    """Why the tokens that the pool has are loaded, or are not. Names a metric's label."""

    LOAD = "load"
    NOTHING_NEW = "nothing new"  # the engine has as much as the pool
    TOO_SHORT = "too short"
    SLOWER = "slower"  # loading is estimated to take longer than computing
    MEASURING = "measuring"  # after a load that was slow: a probe measures whether the pool is
    TOO_MANY = "too many loads"
    NOT_CHOSEN = "not chosen"  # the engine loads from another connector


class RequestState(enum.Enum):
    """Where a request is on its way to its first load; `TRANSITIONS` are the possible moves."""

    LOOKING_UP = "the pool has not answered yet"
    ANSWERED = "the lookup has ended, or nothing was looked up: `matches` are what the pool has"
    OFFERED = "the engine knows the number of loadable tokens"
    LOADING = "workers fill the blocks that the engine allocated"


#: `on_request_finished` ends every state, `on_restart` leads from every state to LOOKING_UP (or to
#: ANSWERED, when there is nothing to look up). Saving is no state of a request: its blocks are
#: saved in every state, and after it has finished (`SaveQueue` has their states).
TRANSITIONS: Final[Mapping[RequestState, frozenset[RequestState]]] = {
    # on_lookup_result: an answer, or the reason why there is none
    RequestState.LOOKING_UP: frozenset({RequestState.LOOKING_UP, RequestState.ANSWERED}),
    # loadable_tokens decides to load; on_restart
    RequestState.ANSWERED: frozenset(
        {RequestState.OFFERED, RequestState.LOOKING_UP, RequestState.ANSWERED}
    ),
    # on_blocks_allocated: LOADING, or ANSWERED when the engine takes none of the tokens;
    # loadable_tokens may be asked again and decide otherwise; on_preempted
    RequestState.OFFERED: frozenset(
        {RequestState.LOADING, RequestState.ANSWERED, RequestState.LOOKING_UP}
    ),
    # on_load_result of the last rank; on_restart
    RequestState.LOADING: frozenset({RequestState.ANSWERED, RequestState.LOOKING_UP}),
}


class ScheduledRequest(NamedTuple):
    """One request in one step: computes tokens `start` to `end` (excluded).

    `block_ids[group][n]` is where block n of that group lies; id 0 is no block. Only the blocks
    that the step completes are read.
    """

    request_id: str
    start: int
    end: int
    block_ids: Sequence[Sequence[int]]


class LookupRequest(NamedTuple):
    """Match these chains in the pool, one for each group. `serial` marks answers that are old."""

    request_id: str
    serial: int
    chains: tuple[tuple[bytes, ...], ...]


@dataclass(slots=True)
class StepPlan:
    """What the workers do besides computing a step; the engine pins `blocks_to_pin` for it."""

    loads: list[LoadRequest] = field(default_factory=list)
    saves: list[SaveRequest] = field(default_factory=list)
    probe: ProbeRequest | None = None
    blocks_to_pin: list[int] = field(default_factory=list)


class _Estimates(NamedTuple):
    load_s: float = 0.0
    prefill_s: float | None = None  # None: no prefill was measured yet


_NO_ESTIMATES: Final = _Estimates()


@dataclass(slots=True)
class _RunningLoad:
    started_at: float
    first: int  # tokens
    last: int
    size: int  # bytes that one rank moves
    ranks_left: int
    timeout_s: float
    complete: bool = True
    size_loaded: int = 0
    seconds: float = 0.0  # that the slowest rank needed


class _SlowLoad(NamedTuple):
    """A load that took longer than it may. Only a probe tells whether the pool has become slow."""

    size: int  # bytes, as those that came
    size_loaded: int
    seconds: float
    limit_s: float


@dataclass(slots=True)
class _TrackedRequest:
    hashes: Sequence[bytes]  # grows while the request generates
    prompt: int  # tokens
    hints: RequestHints
    serial: int
    asked_at: float
    blocks_saved: list[int]  # by group: blocks from the first on that are stored or being saved
    state: RequestState = RequestState.LOOKING_UP
    matches: tuple[Match, ...] = ()
    decision: LoadDecision | None = None  # not counted yet
    offered: tuple[int, int] = (0, 0)  # tokens, while OFFERED
    estimates: _Estimates = _NO_ESTIMATES
    load: _RunningLoad | None = None  # while LOADING

    def move_to(self, state: RequestState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


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
        #: For each tracked request: a step after which it has fewer tokens than this completes no
        #: block of it, and `plan_step` need not know that it was scheduled. 0 while it computes its
        #: prompt. The engine compares: a call for each request is too slow.
        #: (design: quiet-requests)
        self.quiet_until: dict[str, int] = {}
        #: Bytes of a block of each group, of one rank; 0 until the ranks have reported them.
        self.block_bytes: tuple[int, ...] = (0,) * len(groups)
        self._groups = tuple(groups)
        #: Tokens: only whole multiples are loaded, so that no group's block is loaded in part.
        self._unit = math.lcm(*(group.block_size for group in groups))
        self._limits = limits
        self._ranks = ranks
        self._requests: dict[str, _TrackedRequest] = {}
        self._serial = 0
        self._loads: list[LoadRequest] = []  # for the next step
        self._loading_bytes = 0
        self._loading_count = 0
        self._saves = SaveQueue(
            self.counters,
            ranks=ranks,
            pinned_blocks_max=limits.saved_blocks_max,
            retries_max=limits.save_retries,
        )
        self._probe: ProbeRequest | None = None  # for the next step
        self._probing = 0  # ranks that have not ended a probe
        self._probed_at = -math.inf
        self._probe_delay_s = limits.probe_every_s
        self._slow_load: _SlowLoad | None = None  # a probe will tell whether the pool is slow
        self._excused = False  # the latest load was slow, and a probe was not

    @property
    def has_pending_work(self) -> bool:
        """The engine must go on stepping: for saves that are not acknowledged, or for a probe."""
        measuring = self._slow_load is not None and self._probing > 0
        return self._saves.running or self._probe is not None or measuring

    @property
    def loading(self) -> int:
        """How many loads are running."""
        return self._loading_count

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
        request = _TrackedRequest(
            hashes, tokens, hints, self._serial, now, blocks_saved=[0] * len(self._groups)
        )
        self._requests[request_id] = request
        self.quiet_until[request_id] = 0
        return self._lookup(request_id, request, tokens)

    def on_restart(self, request_id: str, tokens: int, now: float) -> LookupRequest | None:
        """A preempted request is scheduled again, now with `tokens`. Returns what to look up."""
        request = self._requests[request_id]
        self._serial += 1
        request.serial, request.asked_at = self._serial, now
        request.matches, request.decision = (), None
        request.blocks_saved = [0] * len(self._groups)
        self.quiet_until[request_id] = 0
        self._end_load(request)
        request.move_to(RequestState.LOOKING_UP)
        return self._lookup(request_id, request, tokens)

    def lookup_started(self, request_id: str, now: float) -> None:
        """The time of this lookup begins at `now`: before, no master could be asked."""
        request = self._requests.get(request_id)
        if request is not None:
            request.asked_at = now

    def on_lookup_result(
        self, request_id: str, serial: int, matches: Sequence[Match], reason: str
    ) -> None:
        """The answer to a lookup, one match for each group. Without matches it is a miss.

        Ignored when it comes after its timeout, or after the request has restarted or finished.
        """
        request = self._requests.get(request_id)
        if request is None or request.serial != serial:
            return
        if request.state is not RequestState.LOOKING_UP:
            return
        request.move_to(RequestState.ANSWERED)
        if not matches:
            self.counters[f"miss {reason}"] += 1
            return
        request.matches = tuple(matches)
        request.blocks_saved = [
            max(blocks, match.length)
            for blocks, match in zip(request.blocks_saved, matches, strict=True)
        ]
        stopped = min(matches, key=lambda match: match.length).stopped
        if not stopped.hit:
            self.counters[f"miss {stopped.label}"] += 1

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
        if now - request.asked_at < self._lookup_timeout_s(tokens, computed):
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
        request.move_to(RequestState.ANSWERED)
        if not request.matches:
            request.decision = None
            return 0
        last = min(self._available(request.matches), (tokens - 1) // self._unit * self._unit)
        request.decision = self._decide_load(request, computed, last)
        if request.decision is not LoadDecision.LOAD:
            slow = request.decision in (LoadDecision.SLOWER, LoadDecision.MEASURING)
            if slow and self._probe_due(now):
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
        self._count_decision(request, tokens)
        if request.state is not RequestState.OFFERED:
            return
        if tokens <= 0:
            request.move_to(RequestState.ANSWERED)
            return
        first, last = request.offered[0], request.offered[0] + tokens
        load = self._load(request_id, request, first, last, block_ids)
        self._loads.append(load)
        size = self._size(first, last)
        request.load = _RunningLoad(now, first, last, size, self._ranks, load.timeout_s)
        request.move_to(RequestState.LOADING)
        self._loading_bytes += size
        self._loading_count += 1
        self._count_hits(request.matches[0], first, last)

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
        if load.ranks_left:
            return
        self._end_load(request)
        request.move_to(RequestState.ANSWERED)
        self._measure_load(request, load, now)
        if self._slow_load is not None:
            # Slow for once, as a first load is, or from now on? A probe finds out, so that the next
            # request does not have to.
            self._probe_prefix(request, load.first, load.last, now)
        self.counters["load_s"] += now - load.started_at
        self.counters["loads"] += 1
        if not load.complete:
            self.counters["loads_failed"] += 1
            # The engine asks again: without this the same blocks would be loaded for ever. What
            # the pool has lost is computed, and can be saved again.
            request.matches = ()
            self.quiet_until[result.request_id] = 0
            request.blocks_saved = [
                min(blocks, load.first // group.block_size)
                for blocks, group in zip(request.blocks_saved, self._groups, strict=True)
            ]

    def on_probe_result(self, result: ProbeResult) -> None:
        """One rank has ended a probe."""
        self._probing = max(0, self._probing - 1)
        waited = not result.size and result.seconds >= self._limits.load_timeout_s
        slow_load = self._slow_load
        if slow_load is not None and (waited or _is_slow(result, slow_load)):
            self._start_over(slow_load, _PROBE_AGAIN_S)  # it may be fast again at once
        if result.size:
            self.transfer_cost.observe(result.size, result.seconds)
            if not self._probing and self._slow_load is not None:
                self._slow_load, self._excused = None, True
        elif waited:
            self.transfer_cost.start_over(_PROBE_BYTES, 0, result.seconds)

    # --- saving ---------------------------------------------------------------------------

    def plan_step(
        self,
        scheduled: Iterable[ScheduledRequest],
        still_cached: Callable[[int, int, bytes], bool],
        now: float,
    ) -> StepPlan:
        """What is to be loaded, saved and probed with this step; each is in one plan.

        `scheduled` may leave out requests that are quiet (`quiet_until`).
        `still_cached(block_id, group, digest)` says whether a block still has these contents.
        """
        plan = StepPlan(loads=self._loads, probe=self._probe)
        if self._probe is not None:
            self._probing = self._ranks
        self._loads, self._probe = [], None
        sessions: dict[tuple[str, float | None], list[SaveItem]] = {}
        for one in scheduled:
            request = self._requests.get(one.request_id)
            if request is None:
                continue
            if self._limits.save and (items := self._complete_blocks(request, one)):
                session = (request.hints.session, request.hints.resume_in_s)
                sessions.setdefault(session, []).extend(items)
            self.quiet_until[one.request_id] = self._next_save_at(request, one.end)
        if retries := self._saves.take_due(still_cached, now):
            sessions.setdefault(("", None), []).extend(retries)
        for (name, resume_in_s), items in sessions.items():
            save = self._saves.start(items, name, resume_in_s, now)
            if save is not None:
                plan.saves.append(save)
                for blocks in save.blocks:
                    plan.blocks_to_pin += blocks.block_ids
        return plan

    def on_save_result(self, result: SaveResult, now: float) -> tuple[list[int], list[StoredBlock]]:
        """One rank has ended a save. Returns block ids to unpin, and what the pool has now."""
        unpinned, stored = self._saves.on_result(result, now)
        if stored and not self.transfer_cost.samples and self._probe_due(now):
            # Measure before the first load, so that it can be weighed as well, and so that it does
            # not wait for a connection.
            digests = tuple(block.digest for block in stored if not block.group)
            self._plan_probe(GroupBlocks(0, digests[: self._probe_blocks], ()), now)
        return unpinned, stored

    # --- the end --------------------------------------------------------------------------

    def on_preempted(self, request_id: str) -> None:
        """The engine took its blocks away; those that are being saved stay pinned all the same."""
        request = self._requests.get(request_id)
        if request is not None:
            request.blocks_saved = [0] * len(self._groups)
            self.quiet_until[request_id] = 0
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
        del self.quiet_until[request_id]
        self._end_load(request)
        return request.hints

    # --- inside ---------------------------------------------------------------------------

    def _lookup(
        self, request_id: str, request: _TrackedRequest, tokens: int
    ) -> LookupRequest | None:
        # The last token is always computed: its output is what the engine goes on from.
        if self._limits.load == "never" or tokens - 1 < self._unit:
            request.move_to(RequestState.ANSWERED)
            return None
        chains = tuple(
            tuple(
                request.hashes[(i + 1) * group.hashes_per_block - 1]
                for i in range((tokens - 1) // self._unit * self._unit // group.block_size)
            )
            for group in self._groups
        )
        self.counters["lookups"] += 1
        return LookupRequest(request_id, request.serial, chains)

    def _lookup_timeout_s(self, tokens: int, computed: int) -> float:
        limit_s = self._limits.lookup_timeout_s
        if self._limits.load != "auto":
            return limit_s
        prefill_s = self.prefill_cost.seconds(computed, tokens)
        if prefill_s is None:
            return min(limit_s, _FIRST_TIMEOUT_S_MIN)
        return min(limit_s, max(prefill_s * _LOOKUP_SHARE, _LOOKUP_TIMEOUT_S_MIN))

    def _available(self, matches: Sequence[Match]) -> int:
        """Tokens that every group has."""
        tokens = min(
            match.length * group.block_size
            for match, group in zip(matches, self._groups, strict=True)
        )
        return tokens // self._unit * self._unit

    def _decide_load(self, request: _TrackedRequest, computed: int, last: int) -> LoadDecision:
        """Load only what is estimated to come faster than it is computed. (G10)

        The estimate includes the bytes of loads that are running: they share the link.
        (design: load-or-recompute)
        """
        if last <= computed:
            return LoadDecision.NOTHING_NEW
        if last - computed < self._limits.hit_tokens_min:
            return LoadDecision.TOO_SHORT
        load_s = self.transfer_cost.seconds(self._size(computed, last) + self._loading_bytes)
        prefill_s = self.prefill_cost.seconds(computed, last)
        request.estimates = _Estimates(load_s, prefill_s)
        if self._limits.load == "always":
            return LoadDecision.LOAD
        if self._loading_count >= self._limits.loads_max:
            return LoadDecision.TOO_MANY
        if prefill_s is not None and load_s >= prefill_s:
            return LoadDecision.SLOWER
        if self._slow_load is not None:
            return LoadDecision.MEASURING
        return LoadDecision.LOAD

    def _load(
        self,
        request_id: str,
        request: _TrackedRequest,
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
            contiguous = wanted[-1] + 1 - wanted[0] == len(wanted)
            match = request.matches[number].of(wanted[0], wanted[-1] + 1) if contiguous else None
            blocks.append(
                GroupBlocks(
                    number,
                    tuple(_digest(request.hashes, group, i) for i in wanted),
                    tuple(ids[i] for i in wanted),
                    match=match,
                )
            )
        return LoadRequest(request_id, tuple(blocks), self._load_timeout_s(request.estimates))

    def _load_timeout_s(self, estimates: _Estimates) -> float:
        """When a load is aborted and its tokens are computed."""
        load_s, prefill_s = estimates
        if self._limits.load != "auto":
            return self._limits.load_timeout_s
        if prefill_s is None:
            timeout_s = max(load_s * _ABORT_FACTOR, _FIRST_TIMEOUT_S_MIN)
        elif not self.transfer_cost.samples:  # it may just as well take as long as computing
            timeout_s = prefill_s
        else:
            timeout_s = max(load_s * _ABORT_FACTOR, prefill_s * _ABORT_SHARE_MIN)
            timeout_s = min(timeout_s, prefill_s)
        return min(self._limits.load_timeout_s, max(timeout_s, _LOAD_TIMEOUT_S_MIN))

    def _measure_load(self, request: _TrackedRequest, load: _RunningLoad, now: float) -> None:
        """One slow load may be an accident: a busy core is enough. So a probe judges it.

        Without one good load between two that were slow the pool is slow, whatever a probe says.
        (design: load-or-recompute)
        """
        aborted = not load.complete and load.seconds >= load.timeout_s
        prefill_s = request.estimates.prefill_s or math.inf
        if aborted or (load.size_loaded and load.seconds >= prefill_s):
            limit_s = load.timeout_s if aborted else prefill_s
            slow_load = _SlowLoad(load.size, load.size_loaded, load.seconds, limit_s)
            if self._limits.load != "auto":
                self._start_over(slow_load, self._limits.probe_every_s)
            elif not self._excused:
                self._slow_load = slow_load
            elif load.started_at >= self._probed_at:
                self._probed_at = now  # the probe that has excused the first one was wrong
                self._start_over(slow_load, self._limits.probe_every_s)
            # Else it ran beside the first one, and is excused with it.
        elif load.size_loaded:
            # A load that found nothing and waited for nothing is no measure of the pool's speed.
            self.transfer_cost.observe(load.size_loaded, load.seconds)
            self._excused = False

    def _start_over(self, slow_load: _SlowLoad, probe_delay_s: float) -> None:
        """The pool has become slow."""
        self.transfer_cost.start_over(slow_load.size, slow_load.size_loaded, slow_load.seconds)
        self._slow_load, self._excused = None, False
        self._probe_delay_s = min(probe_delay_s, self._limits.probe_every_s)

    def _count_decision(self, request: _TrackedRequest, tokens: int) -> None:
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
        block = self._groups[0].block_size
        for run in match.runs:
            inside = min(last, (run.last + 1) * block) - max(first, run.first * block)
            if inside > 0 and run.replicas:
                self.counters[f"hit_tokens {run.replicas[0].tier}"] += inside

    def _end_load(self, request: _TrackedRequest) -> None:
        if request.load is not None:
            self._loading_bytes -= request.load.size
            self._loading_count -= 1
            request.load = None

    def _size(self, first: int, last: int) -> int:
        """Bytes that one rank moves for these tokens."""
        return sum(
            (last - first) // group.block_size * size
            for group, size in zip(self._groups, self.block_bytes, strict=True)
        )

    def _probe_due(self, now: float) -> bool:
        return now - self._probed_at >= self._probe_delay_s

    @property
    def _probe_blocks(self) -> int:
        return max(1, _PROBE_BYTES // max(1, self.block_bytes[0]))

    def _probe_prefix(self, request: _TrackedRequest, first: int, last: int, now: float) -> None:
        """Measure in the background what was not loaded because it was estimated to be slow."""
        group = self._groups[0]
        start = first // group.block_size
        stop = min(last // group.block_size, start + self._probe_blocks)
        digests = tuple(_digest(request.hashes, group, i) for i in range(start, stop))
        self._plan_probe(GroupBlocks(0, digests, (), match=request.matches[0].of(start, stop)), now)

    def _plan_probe(self, blocks: GroupBlocks, now: float) -> None:
        """With the next step. One probe at a time, and only where its result decides anything."""
        if self._limits.load == "auto" and blocks.digests and not self._probing:
            self._probed_at = now
            self._probe_delay_s = min(2 * self._probe_delay_s, self._limits.probe_every_s)
            self._probe = ProbeRequest((blocks,), self._limits.load_timeout_s)

    def _next_save_at(self, request: _TrackedRequest, tokens: int) -> int:
        """The tokens that the request has when its next block is complete. (`quiet_until`)"""
        if tokens < request.prompt:
            return 0
        if not (self._limits.save and self._limits.save_decode):
            return _NEVER
        next_at = _NEVER
        for blocks, group in zip(request.blocks_saved, self._groups, strict=True):
            next_at = min(next_at, (blocks + 1) * group.block_size)
        return next_at

    def _complete_blocks(self, request: _TrackedRequest, one: ScheduledRequest) -> list[SaveItem]:
        """Blocks that are complete after this step and neither stored nor being saved."""
        items: list[SaveItem] = []
        end = one.end if self._limits.save_decode else min(one.end, request.prompt)
        for number, group in enumerate(self._groups):
            first = request.blocks_saved[number]
            hashed = len(request.hashes) // group.hashes_per_block
            stop = min(end // group.block_size, hashed)
            if stop <= first:
                continue
            block_ids = one.block_ids[number][first:stop]
            parent = _digest(request.hashes, group, first - 1) if first else ROOT
            for index, block_id in enumerate(block_ids, first):
                digest = _digest(request.hashes, group, index)
                if block_id:
                    item = SaveItem(one.request_id, number, index, digest, parent, block_id)
                    items.append(item._replace(adapter=request.hints.adapter))
                parent = digest
            request.blocks_saved[number] = first + len(block_ids)
        return items


def _digest(hashes: Sequence[bytes], group: CacheGroup, index: int) -> bytes:
    """The key of a block is the last of the engine's hashes inside it."""
    return bytes(hashes[(index + 1) * group.hashes_per_block - 1])


def _is_slow(probe: ProbeResult, slow_load: _SlowLoad) -> bool:
    """At the speed of this probe the load would have taken too long as well."""
    return probe.seconds * slow_load.size > slow_load.limit_s * probe.size > 0
