"""The scheduler's side of the class that vLLM calls: its hooks, of which none ends the engine.

An exception in one ends vLLM's EngineCore with all of its requests, so each is guarded
(`hook_guard.py`): after one the engine goes on without the pool, and a new half is made later.
"""

from __future__ import annotations

import operator
import time
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ClassVar, Final, TypeVar, cast

from kvpool_connector.hints.request_params import OWN, Asked, Mistakes, parse_request
from kvpool_connector.hook_guard import FailureLog, Fuse, Owed
from kvpool_connector.identity.adapters import Adapter
from kvpool_connector.identity.naming import EngineInfo
from kvpool_connector.records.messages import StepWork, WorkerReport
from kvpool_connector.records.promises import PROMISE
from kvpool_connector.records.values import CacheGroup, ScheduledRequest
from kvpool_connector.scheduler.scheduler import ConnectorScheduler, EngineStep
from kvpool_connector.settings import Settings
from kvpool_connector.vllm_engine import engine_log
from kvpool_connector.vllm_engine.interface import kv_cache_utils
from kvpool_connector.vllm_engine.kv_events import EngineEvents
from kvpool_connector.vllm_engine.replaced import named_by_client
from kvpool_connector.vllm_engine.stats import DESCRIPTION
from kvpool_engines.pool_thread import PoolThread

Hook = TypeVar("Hook", bound=Callable[..., Any])
_ID: Final = operator.attrgetter("block_id")


class BlockIds(Sequence[int]):
    """The ids of one group's blocks, each made when it is read.

    vLLM's own `get_block_ids` makes all: 8,192 for 128K tokens, of which a step needs one.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        found = self._blocks[index]
        return [*map(_ID, found)] if isinstance(found, list) else found.block_id


def _guarded(otherwise: Callable[..., Any]) -> Callable[[Hook], Hook]:
    """A hook of the scheduler's side that raises nothing: after an exception, in any of them, all
    do what `otherwise` does until there is a new half. (`hook_guard.py`)"""

    def decorate(hook: Hook) -> Hook:
        @wraps(hook)
        def guarded(self: SchedulerHooks, *args: Any, **kwargs: Any) -> Any:
            if not self._fuse.blown:
                try:
                    return hook(self, *args, **kwargs)
                except Exception as error:
                    self._blow(hook.__name__.lstrip("_"), error)
            return otherwise(self, *args, **kwargs)

        return cast("Hook", guarded)

    return decorate


def _nothing(hooks: SchedulerHooks, *args: Any, **kwargs: Any) -> None:
    """For hooks that return nothing."""


class SchedulerHooks:
    """What vLLM's scheduler calls, in terms of one `ConnectorScheduler` after the other.

    What is written here of pins and of loads (`Owed`) holds whatever becomes of that.
    """

    #: The request that the last promise was made for.
    _promised: ClassVar[weakref.ref[Any] | None] = None

    def __init__(
        self,
        settings: Settings,
        thread: PoolThread,
        engine: EngineInfo,
        kv_cache_config: Any,
        *,
        engine_events: bool,
    ) -> None:
        """`engine_events`: the engine sends KV events."""
        logs = engine_log.info, time.monotonic, engine_log.error, engine_log.warning
        self._make_scheduler = partial(ConnectorScheduler, settings, thread, engine, *logs)
        self._groups = engine.groups
        self._fuse, self._owed = Fuse(), Owed(engine.ranks)
        self._counted: defaultdict[str, float] = defaultdict(float)  # since the last metrics
        self._failures = FailureLog("", engine_log.error, partial(_add, self._counted))
        self.scheduler = self._make_scheduler()
        self._events: EngineEvents | None = None
        if engine_events and settings.kv_events != "off":
            self._events = EngineEvents(settings.kv_events, thread, kv_cache_config, self._counted)
        self._requests: dict[str, Any] = {}
        self._offered: dict[str, int] = {}  # tokens that the engine itself had, by request
        self._mistakes = Mistakes()
        #: Running requests that may have used KV which this engine would not compute, and how many
        #: tokens of them are not in its cache any more.
        self._tainted: dict[str, int] = {}
        #: Of the engine: its pool of blocks, and what has a request's blocks.
        self.block_pool: Any = None
        self.blocks_of: Callable[[str], tuple[list[Any], ...]]

    @_guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        began = time.perf_counter()
        scheduler = self.scheduler
        given, sampling = request.kv_transfer_params, request.sampling_params
        extra = sampling.extra_args if sampling is not None else None
        asked = Asked(given, request.session_id, extra, request.kv_hints, request.priority)
        hints, mistakes, outcomes = parse_request(asked)
        for outcome in outcomes:
            scheduler.planner.counters[f"kv_hint {outcome}"] += 1
        if mistakes:
            scheduler.planner.counters["bad_hints"] += 1
            for mistake in self._mistakes.new(mistakes):
                engine_log.warning(f"kv_transfer_params of request {request.request_id}: {mistake}")
        name, adapter = request.request_id, _adapter(request, self._groups[0])
        self._requests[name] = request
        scheduler.planner.quiet.wake(name)
        if request.mm_features and named_by_client(request.mm_features):
            scheduler.planner.counters["miss a client's name for a picture"] += 1
            return  # never tracked
        scheduler.on_new_request(name, request.block_hashes, request.num_tokens, hints, adapter)
        self._count_hook(began)

    @_guarded(lambda *_: (0, False))
    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be loaded (None: ask again), and whether any can."""
        began = time.perf_counter()
        scheduler = self.scheduler
        if request.request_id not in self._requests:
            self.on_new_request(request)
        tokens = scheduler.loadable_tokens(request.request_id, request.num_tokens, computed)
        if tokens:
            self._offered[request.request_id] = computed
        self._count_hook(began)
        return tokens, bool(tokens)

    def on_allocated(self, request_id: str, blocks: Any, tokens: int) -> None:
        """The engine wants so many of the tokens that were offered, in these blocks."""
        ids: tuple[list[int], ...] = blocks.get_block_ids() if tokens else ()
        own = self._offered.pop(request_id, 0)
        if tokens:
            waits_for = (
                of_group[own // size : -(-(own + tokens) // size)]
                for of_group, (size, *_) in zip(ids, self._groups, strict=True)
            )
            self._owed.on_allocated(request_id, tuple(waits_for))
        self._on_allocated(request_id, ids, tokens)

    @_guarded(_nothing)
    def _on_allocated(self, request_id: str, ids: Sequence[Sequence[int]], tokens: int) -> None:
        self.scheduler.on_blocks_allocated(request_id, ids, tokens)

    def _without_pool(self, scheduler_output: Any) -> StepWork:
        """The work of a step while the fuse is blown: loads that no worker knows fail."""
        now = time.monotonic()
        scheduler = self.scheduler
        self._unpin(self._owed.idle_pins())
        if self._tainted:  # as ever: nobody may use those blocks
            self._evict_tainted(scheduler_output.num_scheduled_tokens)
        wrong = scheduler.planner.verifier.writers.odd
        if self._fuse.due(now) and not self._owed and not wrong:
            try:
                self.scheduler = scheduler = self._make_scheduler(replaces=scheduler)
                for request_id in self._requests:  # how fast their prompts are computed counts
                    scheduler.planner.quiet.wake(request_id)
            except Exception as error:
                self._blow("making a new half", error)
            else:
                self._fuse.mend()
                engine_log.info("the pool is used again, after a mistake")
        idle = not scheduler_output.num_scheduled_tokens
        loads = self._owed.take_unsent()
        return StepWork(scheduler.next_step(), loads=loads, idle=idle, weights_wanted=False)

    @_guarded(_without_pool)
    def plan_step(self, scheduler_output: Any) -> StepWork:
        began = time.perf_counter()
        scheduled: list[ScheduledRequest] = []
        prefill: list[tuple[int, int]] = []
        counts, blocks_of = scheduler_output.num_scheduled_tokens, self.blocks_of
        total = scheduler_output.total_num_scheduled_tokens
        for request_id in self.scheduler.planner.quiet.awake(counts, total):
            request = self._requests[request_id]
            start = request.num_computed_tokens
            end = start + counts[request_id]
            ids = [BlockIds(blocks) for blocks in blocks_of(request_id)]
            scheduled.append(ScheduledRequest(request_id, start, end, ids))
            if start < request.num_prompt_tokens:
                prefill.append((start, end))
        preempted = list(scheduler_output.preempted_req_ids or ())
        step = EngineStep(scheduled, preempted, prefill, idle=not counts)
        if self._tainted:
            self._evict_tainted(counts)
        work, blocks_to_pin = self.scheduler.plan_step(step, self._still_cached)
        self._pin(blocks_to_pin)
        self._count_hook(began)
        waited = self.scheduler.wait_if_idle(work)
        if self._events is not None:
            waits = work.idle and not work.loads and not waited
            self._events.step(self.scheduler.namespaces, waits=waits)
        self._owed.on_sent(work)  # last: nothing that raises comes behind it
        return work

    @_guarded(lambda *_: False)
    def has_pending_frees(self) -> bool:
        """Whether blocks are about to come free, so that no request need be preempted for them."""
        blocks = self.block_pool.blocks
        return self._owed.frees_blocks(lambda block: int(blocks[block].ref_cnt), time.monotonic())

    def on_report(self, report: WorkerReport) -> None:
        self._owed.on_report(report)
        self._on_report(report)
        if self._fuse.blown:
            self._unpin(self._owed.idle_pins())

    @_guarded(_nothing)
    def _on_report(self, report: WorkerReport) -> None:
        began = time.perf_counter()
        outcome = self.scheduler.on_worker_report(report)
        if outcome.drop_cache:
            self.block_pool.evict_blocks(set(range(len(self.block_pool.blocks))))
            begun = [one for one in self._requests.values() if one.num_computed_tokens]
            self._tainted = {request.request_id: 0 for request in begun}
        self._unpin(outcome.blocks_to_unpin)
        if self._events is not None:
            self._events.on_stored(outcome.stored, self._requests)
        self._count_hook(began)

    @_guarded(lambda hooks: bool(hooks._owed))
    def has_pending_work(self) -> bool:
        """Whether the engine must step although it has nothing to compute."""
        sends = self._events is not None and self._events.waiting
        return sends or self.scheduler.planner.has_pending_work

    def on_finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        """What a proxy hands to another engine, if it asked for that."""
        # Blocks that are being saved are pinned by `touch`: vLLM may free the request's own.
        self._requests.pop(request.request_id, None)
        self._tainted.pop(request.request_id, None)
        self._offered.pop(request.request_id, None)
        return self._on_finished(request, block_ids)

    @_guarded(_nothing)
    def _on_finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        if self._events is not None:
            self._events.on_finished(request)
        params = self._promise(request)
        # The last token was never an input, whatever step is under way.
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        self._pin(self.scheduler.on_request_finished(request.request_id, computed, block_ids))
        return params

    @_guarded(lambda *_: ())
    def take_events(self) -> Iterable[Any]:
        return self._events.take() if self._events is not None else ()

    @_guarded(_nothing)  # a new half begins with names of its own
    def reset(self) -> None:
        self.scheduler.reset()

    def take_metrics(self) -> dict[str, Any]:
        """Sums since the last call, and the description of the engine where it has news."""
        metrics = {**self._take_metrics(), **self._counted}
        self._counted.clear()
        return metrics

    @_guarded(lambda *_: {})
    def _take_metrics(self) -> dict[str, Any]:
        data: dict[str, Any] = self.scheduler.report.take_metrics()
        if data:
            data["pinned_share"] = self._owed.pinned_blocks / len(self.block_pool.blocks)
        if description := self.scheduler.report.take_description():
            data[DESCRIPTION] = description
        return data

    def close(self) -> None:
        self.scheduler.close()

    def _blow(self, hook: str, error: Exception) -> None:
        off_s = self._fuse.blow(time.monotonic())
        self._failures.add(hook, error, f"for {off_s:g} s this engine shares nothing, and goes on")

    def _pin(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.block_pool.touch([*map(self.block_pool.blocks.__getitem__, blocks)])
            self._owed.on_pinned(blocks)

    def _unpin(self, blocks: Sequence[int]) -> None:
        if blocks:
            # Reversed: vLLM reuses a chain's last block before its first, and so must we.
            self.block_pool.free_blocks([*map(self.block_pool.blocks.__getitem__, blocks[::-1])])
            self._owed.on_unpinned(blocks)

    def _promise(self, request: Any) -> dict[str, Any] | None:
        """For the answer to a proxy that has another engine decode; it hands this on."""
        asked = request.kv_transfer_params
        if not isinstance(asked, Mapping) or asked.get("do_remote_decode") is not True:
            return None
        last = SchedulerHooks._promised
        if last is not None and last() is request:
            return None  # MultiConnector raises where two of its connectors return one key
        promise = self.scheduler.make_promise(request.request_id, request.num_computed_tokens)
        if promise is None:
            return None
        SchedulerHooks._promised = weakref.ref(request)
        return {OWN: {PROMISE: promise.as_params()}}

    def _evict_tainted(self, scheduled: Mapping[str, int]) -> None:
        """vLLM has put the blocks into its cache that this step completes, and those of a load
        that has ended. None may use them."""
        for request_id in self._tainted.keys() & scheduled.keys():
            start = self._tainted[request_id]
            end = self._requests[request_id].num_computed_tokens + scheduled[request_id]
            self._tainted[request_id] = end
            of_groups = self.blocks_of(request_id)
            for (size, *_), blocks in zip(self._groups, of_groups, strict=True):
                self.block_pool.evict_blocks(set(BlockIds(blocks)[start // size : end // size]))

    def _still_cached(self, block_id: int, group: int, digest: bytes) -> bool:
        own = self.scheduler.adapter_requests.known.engine_hashes
        named = kv_cache_utils.make_block_hash_with_group_id(own.get(digest, digest), group)
        return bool(self.block_pool.blocks[block_id].block_hash == named)

    def _count_hook(self, began: float) -> None:
        counters = self.scheduler.planner.counters
        counters["hook_s"] += time.perf_counter() - began
        counters["hooks"] += 1


def _add(counters: defaultdict[str, float], name: str, amount: float) -> None:
    counters[name] += amount


def _adapter(request: Any, group: CacheGroup) -> Adapter | None:
    """The LoRA adapter of a request, of whose blocks those of a group are made."""
    if (lora := request.lora_request) is None:
        return None

    def contents(first: int) -> Iterator[bytes]:
        place, hashed = 0, group.block_size // group.hashes_per_block
        extra_keys = kv_cache_utils.generate_block_hash_extra_keys
        for start in range(first * hashed, request.num_tokens, hashed):
            keys, place = extra_keys(request, start, start + hashed, place)
            tokens = array("q", request.all_token_ids[start : start + hashed]).tobytes()
            yield tokens + repr([one for one in keys if one[0] != "lora"]).encode()

    return Adapter(lora.lora_int_id, f"{lora.lora_name} at {lora.lora_path}", contents)
