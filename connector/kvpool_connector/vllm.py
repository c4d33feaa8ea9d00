"""KVPoolConnector: the class that vLLM calls. It translates between vLLM and the two halves.

    --kv-transfer-config '{"kv_connector": "KVPoolConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"masters": ["127.0.0.1:7450"]}}'

The engine makes one instance in its scheduler and one in each worker. Made for vLLM 0.32, whose
interface for connectors is documented as unstable: what it needs is checked at the start.
(design: pool-thread)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpool_connector import settings
from kvpool_connector.memory.block_memory import device_of_this_thread
from kvpool_connector.records.messages import ModelInfo, StepWork, WorkerReport
from kvpool_connector.vllm_engine import engine_log
from kvpool_connector.vllm_engine import interface as vllm_interface
from kvpool_connector.vllm_engine.config import engine_of, memories_of, rank_of
from kvpool_connector.vllm_engine.head_split import head_split
from kvpool_connector.vllm_engine.interface import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    group_kernel_blocks,
)
from kvpool_connector.vllm_engine.model import LoadedAdapters, loaded_models, model_info
from kvpool_connector.vllm_engine.replaced import (
    count_loads,
    count_updates,
    drain_before_resets,
    replace_at_start,
    wanted_layout,
    weight_changes,
)
from kvpool_connector.vllm_engine.scheduler_hooks import SchedulerHooks
from kvpool_connector.vllm_engine.stats import ConnectorPromMetrics, ConnectorStats
from kvpool_connector.worker.rank_model import ModelInMemory
from kvpool_connector.worker.worker import ConnectorWorker
from kvpool_engines import client_log
from kvpool_engines.pool_thread import START_WAIT_S, PoolThread

if TYPE_CHECKING:
    import torch


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


def _nothing(*args: Any, **kwargs: Any) -> None:
    """For hooks that this connector does not need."""


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads from the pool what another engine computed, and saves what this one computes."""

    _cache_hit_source = CacheHitSource.HOST
    #: Saves need not end before a request does: no other engine waits for them.
    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        chosen = settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._settings = chosen
        self._hooks: SchedulerHooks | None = None
        self._worker: ConnectorWorker | None = None
        client_log.hand_on(engine_log.logger)
        if role == KVConnectorRole.SCHEDULER:
            if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
                engine_log.error(
                    'kv_load_failure_policy is "fail": a request fails when one of its blocks is '
                    'lost while it is loaded. Set it to "recompute" in --kv-transfer-config.'
                )
            engine = engine_of(vllm_config, kv_cache_config, chosen)
            if untested := vllm_interface.untested():
                engine_log.warning(untested)
            # Of all processes of an engine one says whether the pool is there.
            logs = engine_log.info, engine_log.warning
            thread = PoolThread(chosen.client(), chosen.member(), *logs)
            events = vllm_config.kv_events_config
            sends = bool(events is not None and events.enable_kv_cache_events)
            self._hooks = SchedulerHooks(
                chosen, thread, engine, kv_cache_config, engine_events=sends
            )
            drain_before_resets()
        else:
            self._split = head_split(vllm_config, kv_cache_config, chosen)
            rank = rank_of(vllm_config, kv_cache_config, self._split, chosen)

            def log_line(line: str) -> None:  # the scheduler's half says the same of its own
                engine_log.info(f"rank {rank.number}: {line}")

            thread = PoolThread(
                chosen.client(), chosen.member(), log_line, on_start=device_of_this_thread()
            )
            count_updates()
            self._worker = ConnectorWorker(chosen, thread, rank, engine_log.error)
        thread.wait(START_WAIT_S)

    # --- the scheduler's side -----------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.hooks.blocks_of = kv_cache_manager.coordinator.get_blocks

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.hooks.block_pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self.hooks.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.hooks.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.hooks.on_allocated(request.request_id, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return WorkMetadata(self.hooks.plan_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            self.hooks.on_report(metadata.report)

    def has_pending_block_frees(self) -> bool:
        return self.hooks.has_pending_frees()

    def has_pending_push_work(self) -> bool:
        return self.hooks.has_pending_work()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        of_groups = block_ids if isinstance(block_ids, tuple) else (block_ids,)
        return False, self.hooks.on_finished(request, of_groups)

    request_finished_all_groups = request_finished

    def take_events(self) -> Iterable[Any]:
        return self.hooks.take_events()

    def reset_cache(self) -> bool | None:
        if self._hooks is not None:
            self._hooks.reset()
        return True

    @property
    def hooks(self) -> SchedulerHooks:
        """The scheduler's side; a worker has none."""
        assert self._hooks is not None, "a call for the scheduler's side, in a worker"
        return self._hooks

    # --- a worker's side ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        def first_info() -> ModelInfo:
            count_loads(loaded_models(self._vllm_config))  # from now on
            return model_info(self._vllm_config, self._split)

        blocks = self._kv_cache_config.num_blocks
        caches = {name: group_kernel_blocks(cache, blocks) for name, cache in kv_caches.items()}
        self._of_worker().register(
            memories_of(
                caches,
                self._kv_cache_config,
                self._split.parts_per_rank,
                direct=self._settings.device_path == "direct",
            ),
            ModelInMemory(
                first_info,
                partial(model_info, self._vllm_config, self._split, summed_bytes=1 << 60),
                LoadedAdapters(self._vllm_config),
                weight_changes,
            ),
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker().start_loads(self._work())

    #: A request is scheduled only when all of its layers are loaded, and saved with all of them.
    wait_for_layer_load = save_kv_layer = _nothing

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

    get_required_kvcache_layout = staticmethod(wanted_layout)

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        worker = self._worker
        data = worker.take_counters() if worker is not None else self.hooks.take_metrics()
        return ConnectorStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data if data is not None else {})

    build_prom_metrics = ConnectorPromMetrics

    def shutdown(self) -> None:
        for half in (self._hooks, self._worker):
            if half is not None:
                try:
                    half.close()
                except Exception as error:
                    engine_log.error("closing failed", error)

    def _of_worker(self) -> ConnectorWorker:
        assert self._worker is not None, "a call for a worker's side, in the scheduler"
        return self._worker

    def _work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, WorkMetadata)
        return metadata.work


def register() -> None:
    """Make the name known to vLLM in this process; `vllm_plugin` calls this in every one."""
    replace_at_start()
    if KVPoolConnector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            KVPoolConnector.__name__, __name__, KVPoolConnector.__name__
        )


# MultiConnector finds its children's classes by name, also those that are given by module path.
register()
