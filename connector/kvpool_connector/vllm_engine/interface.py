"""Everything that the connector uses of vLLM, in one place; checked when an engine starts.

Made for vLLM 0.32, whose interface for connectors is documented as unstable. To adopt another
version: change `SUPPORTED` here and `VLLM_VERSION` in the Makefile, run `make test WITH=vllm`, and
mend what this file or `tests/connector/vllm/test_shape.py` reports. The other modules import vLLM
only from here; `vllm_plugin.py` alone must work with any version.
"""

# ruff: noqa: F401 - the other modules import it from here

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import vllm

#: First part of the versions that the connector was tested with.
SUPPORTED: Final = "0.32"

try:
    from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group
    from vllm.logger import init_logger
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheSpec,
        get_kv_cache_spec_kind,
        get_kv_cache_spec_sliding_window,
        group_kernel_blocks,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase
except ImportError as error:
    raise ImportError(
        f"KVPoolConnector supports vLLM {SUPPORTED}; {vllm.__version__} lacks a name: {error}"
    ) from error

#: Attributes of vLLM's objects that are not documented for connectors, and what needs them.
#: Several of one object are in one text.
PRIVATE: Final[Sequence[tuple[Any, str, str]]] = (
    (KVConnectorFactory, "_registry", "whether MultiConnector knows the connector's name already"),
    (KVTransferConfig, "__post_init__", "checking settings when they are parsed"),
    (VllmConfig, "__post_init__", "checking settings when they are parsed"),
    (SpeculativeConfig, "use_eagle_block_drop", "which blocks of a prefix are computed anew"),
    (KVConnectorBase_V1, "_get_connector_metadata", "the work of the current step"),
    (KVConnectorBase_V1, "_kv_transfer_config _kv_cache_config", "settings and KV cache groups"),
    (KVConnectorBase_V1, "bind_gpu_block_pool", "pinning blocks that are being saved"),
    (KVConnectorBase_V1, "get_transfer_results", "reporting loads that have ended"),
    (KVConnectorBase_V1, "build_connector_worker_meta", "what workers report to the scheduler"),
    (KVConnectorBase_V1, "has_pending_block_frees", "waiting for pinned blocks, not preempting"),
    (KVConnectorBase_V1, "get_required_kvcache_layout", "asking for blocks in one row"),
    (KVConnectorBase_V1, "has_pending_push_work", "steps of an engine that only saves"),
    (BlockPool, "touch free_blocks blocks", "pinning blocks by their ids, and unpinning them"),
    (BlockPool, "evict_blocks", "forgetting blocks that were loaded from a wrong pool"),
    (KVCacheBlock, "ref_cnt block_hash", "whether only a pin keeps a block, and what it has"),
    (KVCacheManager, "coordinator", "where the blocks of a request are"),
    (KVCacheCoordinator, "get_blocks", "where the blocks of a request are"),
    (SchedulerOutput, "num_scheduled_tokens total_num_scheduled_tokens", "what a step completes"),
    (SchedulerOutput, "preempted_req_ids", "whose blocks were taken away"),
    (KVConnectorOutput, "kv_connector_worker_meta", "what workers report to the scheduler"),
    (KVCacheConfig, "kv_cache_groups kv_cache_layout hash_block_size", "how blocks lie and hash"),
    (KVCacheConfig, "kv_tp_replicas", "which ranks have the same KV"),
    (KVCacheConfig, "prefix_cacheable_group_ids has_mamba_layers", "refusing what is not shared"),
    (KVCacheSpec, "block_size", "the size of blocks"),
    (Request, "block_hashes num_computed_tokens num_prompt_tokens", "which blocks are complete"),
    (Request, "kv_transfer_params session_id sampling_params kv_hints priority", "its hints"),
    (Request, "mm_features", "whose name for a picture a block's hash has"),
    (ProcessorInputs, "get_mm_hashes mm_uuid_items", "telling a client's names from digests"),
    (Request, "lora_request", "the LoRA adapter of a request"),
    (LoRARequest, "lora_int_id lora_path", "which loaded adapter a request uses"),
    (LoRAModelManager, "list_adapters", "fingerprints of the adapters that are loaded"),
    (LoRAModel, "loras", "fingerprints of the adapters that are loaded"),
    (WorkerWrapperBase, "init_device", "taking device memory before vLLM measures what is left"),
    (WorkerBase, "device", "taking device memory before vLLM measures what is left"),
    (kv_cache_utils, "get_none_hash_seed DEFAULT_NONE_HASH_SEED", "what all hashes begin with"),
    (kv_cache_utils, "maybe_convert_block_hash to_event_extra_keys", "what KV events say"),
    (kv_cache_utils, "generate_block_hash_extra_keys", "keys with adapters, and KV events"),
    (kv_cache_utils, "make_block_hash_with_group_id", "hashes of cached blocks"),
)


def missing(used: Sequence[tuple[Any, str, str]] = PRIVATE) -> str:
    """What this vLLM lacks, as one sentence; empty if it has everything."""
    gone = [
        f"{getattr(owner, '__name__', owner)}.{name} ({purpose})"
        for owner, names, purpose in used
        for name in names.split()
        if not _has(owner, name)
    ]
    if not gone:
        return ""
    return f"KVPoolConnector supports vLLM {SUPPORTED}; {vllm.__version__} lacks {', '.join(gone)}"


def worker_updates() -> tuple[Any, Sequence[str]]:
    """vLLM's worker, of which those of all platforms are kinds, and its calls that change weights.

    Only a worker's process has this class, so it is not imported before. ImportError if a call is
    gone: nobody would notice an update any more.
    """
    from vllm.v1.worker.gpu_worker import Worker

    calls = ("update_weights", "finish_weight_update", "reload_weights")
    if gone := missing([(Worker, " ".join(calls), "noticing changes of the weights")]):
        raise ImportError(gone)
    return Worker, calls


def engine_resets() -> tuple[Any, Any, Any]:
    """vLLM's engine, the one that runs in a process of its own, and the state in which steps
    compute nothing.

    Only an engine's process has these. ImportError if a name is gone: resets would fail.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    used = (
        (EngineCore, "reset_prefix_cache step_fn batch_queue", "resets"),
        (Scheduler, "pause_state set_pause_state", "resets"),
        (PauseState, "PAUSED_ALL", "resets"),
    )
    if gone := missing(used):
        raise ImportError(gone)
    return EngineCore, EngineCoreProc, PauseState.PAUSED_ALL


def untested() -> str:
    """A sentence about a vLLM that no test of the connector has run with; empty for the others."""
    if re.fullmatch(rf"{re.escape(SUPPORTED)}(\.\d+)?(\+.*)?", version()):
        return ""
    return (
        f"tested with vLLM {SUPPORTED}, this is {vllm.__version__}: what the connector needs is "
        "there, but its tests have not run with it"
    )


def _has(owner: Any, name: str) -> bool:
    """Whether a class has the attribute, or its objects get it when they are made."""
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    if is_dataclass(owner) and name in {field.name for field in fields(owner)}:
        return True
    annotated: Mapping[str, Any] = getattr(owner, "__annotations__", {})
    if name in annotated or name in getattr(owner, "__struct_fields__", ()):
        return True
    code = getattr(owner.__init__, "__code__", None)
    return code is not None and name in code.co_names


def version() -> str:
    """vLLM's version, all of which must be equal: a patch release may compute otherwise."""
    return str(vllm.__version__)
