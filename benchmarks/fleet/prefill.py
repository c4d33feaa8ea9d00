"""A prefill engine: a queue, its own prefix cache, and the connector's planner.

It computes one prompt at a time. The first few of its queue look up and load while another one
computes; one whose load has not ended is passed over. The engine's own cache is looked at when
computing begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.hbm_cache import HbmCache
from benchmarks.fleet.loads import PoolLoad
from benchmarks.fleet.memory import FleetMemory
from benchmarks.fleet.mixed import MixedDecoder
from benchmarks.fleet.prompts import Prompt, PromptState
from kvpool.types import Match, SessionHint
from kvpool_connector.plan.planner import Planner
from kvpool_connector.records.messages import LoadRequest, LoadResult, ProbeRequest, ProbeResult
from kvpool_connector.records.values import CacheGroup, PlannerLimits, RequestHints

#: So many prompts of the queue look up and load.
_WINDOW: Final = 4
#: An engine asks again so soon about a prompt that waits for another one's load.
_ASK_AGAIN_S: Final = 0.05
#: A step of an engine that only waits for a lookup, about.
_STEP_S: Final = 0.01


class PrefillEngine:
    """Engine `number` of the fleet. `load` is the connector's setting: auto, always or never. A
    mixed engine decodes `beside` it. `compute` calls back when so many seconds of computing are
    done, for engines that share a machine; else they take that time. `lookup_s` says how long the
    next lookup takes; inf: it has no answer, and the planner gives it up."""

    def __init__(
        self,
        number: int,
        events: EventQueue,
        constants: Constants,
        memory: FleetMemory | None,
        *,
        block: int,
        load: str,
        prefilled: Callable[[Prompt], None],
        hint: Callable[[Prompt], SessionHint | None],
        beside: MixedDecoder | None = None,
        compute: Callable[[float, Callable[[], None]], None] | None = None,
        lookup_s: Callable[[], float] | None = None,
    ) -> None:
        self.number = number
        self.cache = HbmCache(int(constants.hbm_tokens) // block)
        self._events = events
        self._constants = constants
        self._memory = memory
        self._block = block
        self._prefilled = prefilled
        self._hint = hint
        self._beside = beside
        self._compute_for = compute or events.after
        self._lookup_s = lookup_s or (lambda: constants.first_byte_s)
        self._queue: list[Prompt] = []
        self._computing: Prompt | None = None
        self._stopped = False
        limits = PlannerLimits(load=load, save=False)
        self._planner = Planner([CacheGroup(block, 1)], limits)
        self._block_bytes = block * constants.kv_bytes
        self._planner.windows.block_bytes = (int(self._block_bytes),)
        if memory is not None:
            self._planner.choice.transfer_cost.near = memory.near(number)

    @property
    def prompts(self) -> int:
        """How many wait here or are computed."""
        return len(self._queue) + (self._computing is not None)

    @property
    def work_s(self) -> float:
        """Seconds until a prompt that comes now is begun, as far as it can be told."""
        running = self._computing
        left = 0.0
        if running is not None:
            left = max(0.0, running.began_at + running.compute_s - self._events.now)
        return left + sum(prompt.compute_s for prompt in self._queue) if self._queue else left

    def stop(self) -> list[Prompt]:
        """The engine is lost. Returns the prompts that were here, as if they had just come."""
        self._stopped = True
        if self._beside is not None and self._computing is not None:
            self._beside.computed()
        prompts = [*([self._computing] if self._computing else []), *self._queue]
        for prompt in prompts:
            prompt.state = PromptState.QUEUED
            prompt.own_tokens = prompt.loaded_tokens = prompt.expected_tokens = 0
            prompt.began_at = 0.0
        return prompts

    def add(self, prompt: Prompt) -> None:
        """A router has sent it here."""
        prompt.engine = self.number
        self._estimate(prompt, prompt.expected_tokens)
        self._queue.append(prompt)
        self._step()

    # --- inside --------------------------------------------------------------------------

    def _after(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call it then, unless this engine is lost."""
        self._events.after(seconds, self._call, callback, *arguments)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._stopped:
            callback(*arguments)

    def _estimate(self, prompt: Prompt, hit_tokens: int) -> None:
        prompt.compute_s = self._constants.prefill_s(hit_tokens, prompt.tokens)

    def _ready(self, prompt: Prompt) -> None:
        """It needs nothing any more but the engine."""
        prompt.state = PromptState.READY
        prompt.ready_at = self._events.now
        self._estimate(prompt, prompt.hit_tokens)

    def _step(self) -> None:
        """Begin what can begin."""
        for prompt in self._queue[:_WINDOW]:
            if prompt.state is PromptState.QUEUED:
                self._look_up(prompt)
            elif prompt.state is PromptState.UNDECIDED:
                self._decide(prompt)
            if prompt.state is PromptState.READY and self._computing is None:
                self._queue.remove(prompt)
                self._compute(prompt)

    def _look_up(self, prompt: Prompt) -> None:
        if self._memory is None:
            self._ready(prompt)
            return
        now = self._events.now
        lookup = self._planner.on_new_request(
            prompt.id, prompt.chain, prompt.tokens, RequestHints(), now
        )
        if lookup is None:
            self._ready(prompt)
            return
        prompt.state = PromptState.LOOKING_UP
        seconds = self._lookup_s()
        if math.isinf(seconds):
            self._after(_STEP_S, self._look_if_late, prompt)
        else:
            self._after(seconds, self._looked_up, prompt, lookup.serial)

    def _look_if_late(self, prompt: Prompt) -> None:
        """In each step of an engine that has nothing else to do."""
        computed = self.cache.held(prompt.chain) * self._block
        now = self._events.now
        serial = self._planner.lookups.late(prompt.id, prompt.tokens, computed, now)
        if serial is None:
            self._after(_STEP_S, self._look_if_late, prompt)
            return
        self._planner.lookups.on_result(prompt.id, serial, (), "late")
        self._decide(prompt)
        self._step()

    def _looked_up(self, prompt: Prompt, serial: int) -> None:
        assert self._memory is not None
        match = self._memory.match(self.number, prompt.namespace, prompt.chain, self._events.now)
        self._planner.lookups.on_result(prompt.id, serial, [match], "")
        self._decide(prompt, just_matched=True)
        self._step()

    def _decide(self, prompt: Prompt, *, just_matched: bool = False) -> None:
        """Load it, compute it, or wait: for another load of the same blocks, or for the engine.

        That it is computed is decided when it can be: until then loading may become faster. What
        was `just_matched` need not be matched again to be loaded.
        """
        now = self._events.now
        computed = self.cache.held(prompt.chain) * self._block
        tokens = self._planner.loadable_tokens(prompt.id, prompt.tokens, computed, now)
        if tokens is None:
            prompt.state = PromptState.WAITING
            self._after(_ASK_AGAIN_S, self._ask_again, prompt)
            return
        if not tokens and self._computing is not None:
            prompt.state = PromptState.UNDECIDED  # `_step` asks again when it has ended
            return
        block_ids = range(1, len(prompt.chain) + 1)
        self._planner.on_blocks_allocated(prompt.id, [block_ids], tokens, now)
        prompt.own_tokens = computed
        prompt.state = PromptState.LOADING
        if not tokens:
            self._ready(prompt)
        plan = self._planner.plan_step((), _never_cached, now)
        for load in plan.loads:
            match = load.blocks[0].match if just_matched else None
            self._load(prompt, load, computed + tokens, match)
        if plan.probe is not None:
            self._probe(prompt, plan.probe)

    def _ask_again(self, prompt: Prompt) -> None:
        self._decide(prompt)
        self._step()

    def _load(self, prompt: Prompt, request: LoadRequest, last: int, match: Match | None) -> None:
        memory = self._memory
        assert memory is not None
        digests = request.blocks[0].digests
        wanted = len(digests) * self._block_bytes

        def loaded(load: PoolLoad) -> None:
            if self._stopped:
                memory.stop_load(load)
            elif load.running:  # it may have been given up
                self._loaded(prompt, load, wanted, last)

        load = memory.start_load(self.number, prompt.namespace, digests, loaded, match)
        self._events.after(request.timeout_s, loaded, load)

    def _loaded(self, prompt: Prompt, load: PoolLoad, wanted: float, last: int) -> None:
        assert self._memory is not None
        now = self._events.now
        size = self._memory.stop_load(load)
        complete = size >= wanted
        if complete:
            prompt.loaded_tokens = last
        result = LoadResult(prompt.id, int(size), complete, now - load.began)
        self._planner.on_load_result(result, now)
        self._ready(prompt)
        self._step()

    def _probe(self, prompt: Prompt, request: ProbeRequest) -> None:
        assert self._memory is not None
        digests = request.blocks[0].digests
        self._memory.start_load(self.number, prompt.namespace, digests, self._probed)

    def _probed(self, load: PoolLoad) -> None:
        assert self._memory is not None
        size = self._memory.stop_load(load)
        if self._stopped:
            return
        self._planner.prober.on_result(ProbeResult(int(size), self._events.now - load.began))

    def _compute(self, prompt: Prompt) -> None:
        now = self._events.now
        self._computing = prompt
        prompt.state = PromptState.COMPUTING
        prompt.began_at = now
        most = (prompt.tokens - 1) // self._block * self._block  # the last token is computed
        prompt.own_tokens = min(most, self.cache.held(prompt.chain) * self._block)
        self._estimate(prompt, prompt.hit_tokens)
        if self._beside is not None:
            new = prompt.tokens - prompt.hit_tokens
            prompt.compute_s = self._beside.compute(new, prompt.compute_s)
        self._compute_for(prompt.compute_s, lambda: self._call(self._computed, prompt))

    def _computed(self, prompt: Prompt) -> None:
        now = self._events.now
        self._computing = None
        if self._beside is not None:
            self._beside.computed()
        prompt.state = PromptState.DONE
        prompt.prefilled_at = now
        self._planner.choice.prefill_cost.observe(
            [(prompt.hit_tokens, prompt.tokens)], now - prompt.began_at
        )
        self._planner.on_request_finished(prompt.id)
        self.cache.add(prompt.chain)
        if self._memory is not None:
            end = self._memory.save_ends_at(self.number, prompt.namespace, prompt.chain, now)
            if end is not None:
                self._events.at(end, self._saved, prompt)
        self._prefilled(prompt)
        self._step()

    def _saved(self, prompt: Prompt) -> None:
        assert self._memory is not None
        self._memory.save(
            self.number, prompt.namespace, prompt.chain, self._hint(prompt), self._events.now
        )


def _never_cached(block_id: int, group: int, digest: bytes) -> bool:
    """The planner saves nothing here, so it asks for no block."""
    return False
