"""KVPoolConnector: the class that vLLM calls. It translates between vLLM and the two halves.

    --kv-transfer-config '{"kv_connector": "KVPoolConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"masters": ["127.0.0.1:7450"]}}'

The engine makes one instance in its scheduler and one in each worker. Made for vLLM 0.32, whose
interface for connectors is documented as unstable: what it needs is checked at the start.
(design: connector)
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, overload

from kvpool_connector import settings, vllm_interface
from kvpool_connector.adapters import Adapter, salted
from kvpool_connector.head_split import head_split
from kvpool_connector.messages import StepWork, WorkerReport
from kvpool_connector.pool_thread import PoolThread
from kvpool_connector.promises import PROMISE
from kvpool_connector.request_params import OWN, Asked, Mistakes, parse_request
from kvpool_connector.scheduler import ConnectorScheduler, EngineStep
from kvpool_connector.stats import DESCRIPTION, ConnectorPromMetrics, ConnectorStats
from kvpool_connector.values import ScheduledRequest
from kvpool_connector.vllm_config import (
    engine_of,
    events_of,
    memories_of,
    rank_of,
    vllm_event,
)
from kvpool_connector.vllm_interface import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    group_kernel_blocks,
    init_logger,
    kv_cache_utils,
)
from kvpool_connector.vllm_memory import reserve_when_started
from kvpool_connector.vllm_model import LoadedAdapters, loaded_models, model_info
from kvpool_connector.vllm_settings import check_when_parsed
from kvpool_connector.vllm_weights import count_loads, count_updates, weight_changes
from kvpool_connector.worker import ConnectorWorker

if TYPE_CHECKING:
    import torch

logger = init_logger("vllm.kvpool")

#: Finished requests that are kept for the KV events of their last blocks.
_FINISHED_MAX: Final = 256


@dataclass
class WorkMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker, with each step."""

    work: StepWork


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From every worker to the scheduler, after each step."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, ReportMetadata):
            self.report.merge(other.report)
        return self


class BlockIds(Sequence[int]):
    """The ids of one group's blocks, each made when it is read.

    vLLM's own `get_block_ids` makes all of them: 8,192 for a request of 128K tokens, of which a
    step needs one.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        block_id: int = self._blocks[index].block_id
        return block_id


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads from the pool what another engine computed, and saves what this one computes."""

    _cache_hit_source = CacheHitSource.HOST
    #: The request that the last promise was made for.
    _promised: ClassVar[weakref.ref[Any] | None] = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        chosen = settings.parse(transfer.kv_connector_extra_config)
        self._settings = chosen
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.error(
                    'kv_load_failure_policy is "fail": a request fails when one of its blocks is '
                    'lost while it is loaded. Set it to "recompute" in --kv-transfer-config.'
                )
            engine = engine_of(vllm_config, kv_cache_config, chosen)
            if untested := vllm_interface.untested():
                _log_warning(untested)
            # Of all processes of an engine one says whether the pool is there.
            thread = PoolThread(chosen.client(), chosen.member(), _log_info, _log_warning)
            self._scheduler = ConnectorScheduler(
                chosen, thread, engine, _log_info, log_error=_log_error
            )
            if chosen.kv_events != "off" and _sends_events(vllm_config):
                self._scheduler.send_events(chosen.kv_events)
            self._requests: dict[str, Any] = {}
            self._mistakes = Mistakes()
            self._finished: OrderedDict[str, Any] = (
                OrderedDict()
            )  # for KV events of saves that end later
            self._pool: Any = None
            self._sends_events = self._scheduler.sends_events
            #: Running requests that may have used KV which this engine would not compute, and how
            #: many tokens of them are not in its cache any more.
            self._tainted: dict[str, int] = {}
        else:
            self._split = head_split(vllm_config, kv_cache_config, chosen)
            rank = rank_of(vllm_config, kv_cache_config, self._split, chosen)
            thread = PoolThread(chosen.client(), chosen.member(), _log_info)
            count_updates()
            self._worker = ConnectorWorker(chosen, thread, rank)
        thread.wait(chosen.start_wait_s)

    @property
    def requires_kv_delivery(self) -> bool:
        """Saves need not end before a request does: no other engine waits for them."""
        return False

    # --- the scheduler's side -----------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._blocks_of = kv_cache_manager.get_blocks

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        began = time.perf_counter()
        scheduler = self._of_scheduler()
        sampling = request.sampling_params
        hints, mistakes, outcomes = parse_request(
            Asked(
                request.kv_transfer_params,
                request.session_id,
                sampling.extra_args if sampling is not None else None,
                request.kv_hints,
                request.priority,
            )
        )
        for outcome in outcomes:
            scheduler.planner.counters[f"kv_hint {outcome}"] += 1
        if mistakes:
            scheduler.planner.counters["bad_hints"] += 1
            for mistake in self._mistakes.new(mistakes):
                logger.warning(
                    "kvpool: kv_transfer_params of request %s: %s", request.request_id, mistake
                )
        self._requests[request.request_id] = request
        scheduler.on_new_request(
            request.request_id, request.block_hashes, request.num_tokens, hints, _adapter(request)
        )
        self._count_hook(began)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        began = time.perf_counter()
        scheduler = self._of_scheduler()
        if request.request_id not in self._requests:
            self.on_new_request(request)
        tokens = scheduler.loadable_tokens(
            request.request_id, request.num_tokens, num_computed_tokens
        )
        self._count_hook(began)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids() if num_external_tokens else ()
        self._of_scheduler().on_blocks_allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        began = time.perf_counter()
        scheduled: list[ScheduledRequest] = []
        prefill: list[tuple[int, int]] = []
        requests, quiet_until = self._requests, self._of_scheduler().planner.quiet_until
        # Nearly all requests are quiet: what this loop does for those, it does 256 times a step.
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is None or request.num_computed_tokens + count < quiet_until.get(
                request_id, 0
            ):
                continue
            start = request.num_computed_tokens
            ids = [BlockIds(blocks) for blocks in self._blocks_of(request_id).blocks]
            scheduled.append(ScheduledRequest(request_id, start, start + count, ids))
            if start < request.num_prompt_tokens:
                prefill.append((start, start + count))
        step = EngineStep(
            scheduled,
            list(scheduler_output.preempted_req_ids or ()),
            prefill,
            idle=not scheduler_output.num_scheduled_tokens,
        )
        if self._tainted:
            self._evict_tainted(scheduler_output.num_scheduled_tokens)
        work, blocks_to_pin = self._of_scheduler().plan_step(step, self._still_cached)
        if blocks_to_pin:
            self._pool.touch([self._pool.blocks[block] for block in blocks_to_pin])
        self._count_hook(began)
        self._of_scheduler().wait_if_idle(work)
        return WorkMetadata(work)

    def update_connector_output(self, connector_output: Any) -> None:
        began = time.perf_counter()
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            outcome = self._of_scheduler().on_worker_report(metadata.report)
            if unpinned := outcome.blocks_to_unpin:
                # Reversed: vLLM reuses a chain's last block before its first, and so must we.
                self._pool.free_blocks([self._pool.blocks[block] for block in reversed(unpinned)])
            if outcome.drop_cache:
                self._pool.evict_blocks(set(range(self._kv_cache_config.num_blocks)))
                begun = [one for one in self._requests.values() if one.num_computed_tokens]
                self._tainted = {request.request_id: 0 for request in begun}
            if self._sends_events:
                known = {**self._finished, **self._requests}
                self._of_scheduler().announce(
                    events_of(outcome.stored, known, self._kv_cache_config)
                )
        self._count_hook(began)

    def has_pending_push_work(self) -> bool:
        return self._of_scheduler().has_pending_work

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Blocks that are being saved are pinned by `touch`: vLLM may free the request's own.
        self._requests.pop(request.request_id, None)
        self._tainted.pop(request.request_id, None)
        if self._sends_events:
            self._finished[request.request_id] = request
            while len(self._finished) > _FINISHED_MAX:
                self._finished.popitem(last=False)
        params = self._promise(request)
        self._of_scheduler().on_request_finished(request.request_id)
        return False, params

    def take_events(self) -> Iterable[Any]:
        return [vllm_event(event) for event in self._of_scheduler().take_events()]

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # --- a worker's side ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._kv_cache_config.num_blocks
        caches = {name: group_kernel_blocks(cache, blocks) for name, cache in kv_caches.items()}
        self._of_worker().register(
            memories_of(
                caches,
                self._kv_cache_config,
                self._split.parts_per_rank,
                direct=self._settings.device_path == "direct",
            ),
            partial(model_info, self._vllm_config, self._split),
            LoadedAdapters(self._vllm_config),
            partial(model_info, self._vllm_config, self._split, summed_bytes=1 << 60),
            weight_changes,
        )
        count_loads(loaded_models(self._vllm_config))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker().start_loads(self._work())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only when all of its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved with all their layers."""

    def wait_for_save(self) -> None:
        self._of_worker().start_saves(self._work())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        finished = self._finished_transfers = self._of_worker().take_finished()
        # With several groups vLLM takes failures by request, with one by block.
        failed = finished.failed if len(self._kv_cache_config.kv_cache_groups) > 1 else set()
        return KVConnectorTransferResults(finished_recving=finished.loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        several = len(self._kv_cache_config.kv_cache_groups) > 1
        return set() if several else self._finished_transfers.bad_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return ReportMetadata(self._of_worker().take_report())

    # --- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._worker is not None:
            data = self._worker.take_counters()
        else:
            data = self._of_scheduler().take_metrics()
            if description := self._of_scheduler().take_description():
                return ConnectorStats(data={**data, DESCRIPTION: description})
        return ConnectorStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(*arguments)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    def _of_scheduler(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "a call for the scheduler's side, in a worker"
        return self._scheduler

    def _of_worker(self) -> ConnectorWorker:
        assert self._worker is not None, "a call for a worker's side, in the scheduler"
        return self._worker

    def _work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, WorkMetadata)
        return metadata.work

    def _promise(self, request: Any) -> dict[str, Any] | None:
        """For the answer to a proxy that has another engine decode; it hands this on."""
        asked = request.kv_transfer_params
        if not isinstance(asked, Mapping) or asked.get("do_remote_decode") is not True:
            return None
        last = KVPoolConnector._promised
        if last is not None and last() is request:
            return None  # MultiConnector raises where two of its connectors return one key
        promise = self._of_scheduler().make_promise(request.request_id, request.num_computed_tokens)
        if promise is None:
            return None
        KVPoolConnector._promised = weakref.ref(request)
        return {OWN: {PROMISE: promise.as_params()}}

    def _evict_tainted(self, scheduled: Mapping[str, int]) -> None:
        """vLLM has put the blocks into its cache that this step completes, and those of a load
        that has ended. None may use them."""
        for request_id in self._tainted.keys() & scheduled.keys():
            start = self._tainted[request_id]
            end = self._requests[request_id].num_computed_tokens + scheduled[request_id]
            self._tainted[request_id] = end
            groups = self._kv_cache_config.kv_cache_groups
            for group, blocks in zip(groups, self._blocks_of(request_id).blocks, strict=True):
                size = group.kv_cache_spec.block_size
                self._pool.evict_blocks(set(BlockIds(blocks)[start // size : end // size]))

    def _still_cached(self, block_id: int, group: int, digest: bytes) -> bool:
        key = self._pool.blocks[block_id].block_hash
        if key is None:
            return False
        plain = kv_cache_utils.get_block_hash(key)
        if key != kv_cache_utils.make_block_hash_with_group_id(plain, group):
            return False
        adapters = self._of_scheduler().adapters.in_use
        return bool(digest == plain) or any(salted(plain, one) == digest for one in adapters)

    def _count_hook(self, began: float) -> None:
        counters = self._of_scheduler().planner.counters
        counters["hook_s"] += time.perf_counter() - began
        counters["hooks"] += 1


def _adapter(request: Any) -> Adapter | None:
    """The LoRA adapter of a request, by the name and path that vLLM's hashes contain."""
    lora = request.lora_request
    if lora is None:
        return None
    return Adapter(lora.lora_int_id, f"{lora.lora_name} at {lora.lora_path}")


def _log_info(line: str) -> None:
    logger.info("kvpool: %s", line)


def _log_error(line: str) -> None:
    logger.error("kvpool: %s", line)


def _log_warning(line: str) -> None:
    logger.warning("kvpool: %s", line)


def _sends_events(vllm_config: Any) -> bool:
    events = vllm_config.kv_events_config
    return bool(events is not None and events.enable_kv_cache_events)


def register() -> None:
    """Make the name known to vLLM in this process; `vllm_plugin` calls this in every one."""
    check_when_parsed()
    reserve_when_started()
    if KVPoolConnector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            KVPoolConnector.__name__, __name__, KVPoolConnector.__name__
        )


# MultiConnector finds its children's classes by name, also those that are given by module path.
register()
