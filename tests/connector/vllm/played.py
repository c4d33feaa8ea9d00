"""The scheduler of a vLLM engine, whose workers are played: no model runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpool import Namespace
from kvpool_connector.identity.adapters import AdapterKeys
from kvpool_connector.records.messages import (
    AdapterInfo,
    LoadRequest,
    ModelInfo,
    SaveRequest,
    SaveResult,
    StepWork,
    WorkerInfo,
    WorkerReport,
)
from kvpool_connector.records.values import CacheGroup
from kvpool_connector.vllm import KVPoolConnector, ReportMetadata
from kvpool_connector.vllm_engine.scheduler_hooks import _adapter
from kvpool_connector.vllm_engine.stats import DESCRIPTION, ConnectorStats
from tests.support.local_pool import LocalPool

BLOCK, BLOCKS = 16, 100
SIZE = 1024


def output_of(step: Any, report: WorkerReport, **told: Any) -> ModelRunnerOutput:
    """What a worker returns of a step: a token for each request, and what it tells."""
    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: number for number, name in enumerate(ids)},
        sampled_token_ids=[[7] for _ in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=None,
        kv_connector_output=KVConnectorOutput(
            kv_connector_worker_meta=ReportMetadata(report), **told
        ),
    )


class Played:
    """The scheduler of an engine, and what its worker says."""

    def __init__(
        self,
        model: Path,
        transfer_config: dict[str, Any],
        *,
        ranks: int = 1,
        heads: int = 1,
        scheduler_class: type[Scheduler] = Scheduler,
        **options: Any,
    ) -> None:
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.kv_cache_layout, cache.num_gpu_blocks = "LBHNC", BLOCKS
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="bfloat16", seed=0),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**transfer_config),
            **options,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=512,
                max_model_len=2048,
                is_encoder_decoder=False,
                async_scheduling=scheduler_class is AsyncScheduler,
            ),
        )
        cache.block_size = BLOCK  # VllmConfig may have changed it
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16
        )
        kv = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv,
            log_stats=True,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config),
        )
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        assert isinstance(self.scheduler.connector, KVPoolConnector)
        self.connector = self.scheduler.connector
        self._ranks = ranks
        self.greeted = False
        self.adapters = {1: "one", 2: "two"}  # the worker has loaded them
        self.counters: Counter[str] = Counter()
        self.saves: list[SaveRequest] = []  # that nobody has acknowledged

    @property
    def free(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    @property
    def cached(self) -> int:
        """Blocks in the engine's own prefix cache."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        return sum(block.block_hash is not None for block in blocks)

    def until_cached(self, blocks: int) -> None:
        """Step until the lookup is back and so many blocks are computed."""
        for _ in range(200):
            self.step()
            if self.cached:
                break
            time.sleep(0.002)
        assert self.cached == blocks

    def request(self, name: str, tokens: int, first: int = 0, **extras: Any) -> Any:
        """As the engine makes it, with vLLM's own block hashes."""
        sampling = SamplingParams(max_tokens=4)
        sampling.update_from_generation_config({}, 2)
        return Request(
            request_id=name,
            prompt_token_ids=list(range(first, first + tokens)),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **extras,
        )

    def add(self, name: str, tokens: int, first: int = 0) -> Any:
        request = self.request(name, tokens, first)
        self.scheduler.add_request(request)
        return request

    def offered(self, request: Any) -> int:
        """Tokens that the connector says it can load, asked as the scheduler does."""
        self.connector.on_new_request(request)
        for _ in range(1000):
            tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                self.connector.request_finished_all_groups(request, ())
                return int(tokens)
            time.sleep(0.002)
        raise AssertionError("no answer")

    def step(self, **told: Any) -> tuple[Any, StepWork]:
        """One step of the engine, whose worker reports `told`; a first step says who it is."""
        step = self.scheduler.schedule()
        return step, self.end(step, **told)

    def end(self, step: Any, **told: Any) -> StepWork:
        """The worker has computed a step."""
        work: StepWork = step.kv_connector_metadata.work
        self.saves += work.saves
        report = WorkerReport(work.step, told.pop("worker_infos", []), told.pop("loaded", []))
        report.saves += told.pop("saved", [])
        report.verified += told.pop("verified", [])
        if not self.greeted:
            for rank in range(self._ranks):
                info = WorkerInfo(rank, ModelInfo(), (SIZE,), work.serial_min)
                report.worker_infos.append(info)
                report.adapters.append(AdapterInfo(rank, self.adapters))
            self.greeted = True
        self.update(step, output_of(step, report, **told))
        return work

    def update(self, step: Any, output: ModelRunnerOutput) -> None:
        """The scheduler hears of a step's end; what its answers count is added up."""
        for answer in self.scheduler.update_from_output(step, output).values():
            stats = answer.scheduler_stats
            news = dict((stats and stats.kv_connector_stats) or {})
            news.pop(DESCRIPTION, None)
            ConnectorStats(self.counters).aggregate(ConnectorStats(news))

    def until_loading(self, request: Any) -> LoadRequest:
        """Step until the lookup is back and the load goes out."""
        load = self.first_load()
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return load

    def first_load(self) -> LoadRequest:
        """Step until a load goes out."""
        for _ in range(200):
            _, work = self.step()
            if work.loads:
                (load,) = work.loads
                return load
            time.sleep(0.002)
        raise AssertionError("no load")

    def acknowledged(self) -> list[SaveResult]:
        """Every save has ended, and the pool has it."""
        saves, self.saves = self.saves, []
        return [SaveResult(save.job, 0, ()) for save in saves for _ in range(self._ranks)]

    def finish(self) -> None:
        """Let every request come to its end, each save acknowledged at once."""
        for _ in range(500):
            self.step(saved=self.acknowledged())
            if not self.scheduler.has_requests() and not self.saves:
                return
            time.sleep(0.001)
        raise AssertionError("it does not end")

    @property
    def namespace(self) -> Namespace:
        (namespace,) = self.connector.hooks.scheduler.namespaces
        return namespace

    def close(self) -> None:
        self.connector.shutdown()


#: The fixture that makes them: with the transfer configuration and options of `Played`.
Play = Callable[..., Played]


def keys_of(played: Played, request: Any, blocks: int) -> list[bytes]:
    """Of the first blocks of a request."""
    chain = [bytes(digest) for digest in request.block_hashes[:blocks]]
    known = played.connector.hooks.scheduler.adapter_requests.known
    adapter = _adapter(request, CacheGroup(BLOCK, 1))
    return AdapterKeys(chain, adapter, known)[:] if adapter else chain


def store(pool: LocalPool, played: Played, request: Any, blocks: int, part: int = 0) -> None:
    """Put the beginning of a request's prompt into the pool."""
    chain = keys_of(played, request, blocks)
    data = [bytes([number]) * SIZE for number in range(blocks)]
    pool.ask(lambda client: client.write(played.namespace, chain, data, part=part))


def warmed(pool: LocalPool, played: Played, tokens: int = 64) -> None:
    """Run a prompt of so many tokens to its end, and put all of it into the pool."""
    request = played.add("first", tokens)
    played.finish()
    store(pool, played, request, tokens // BLOCK)
    played.scheduler.reset_prefix_cache()
