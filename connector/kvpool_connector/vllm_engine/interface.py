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
PRIVATE: Final[Sequence[tuple[Any, str, str]]] = (
    (
        KVConnectorFactory,
        "_registry",
        "whether the connector's name is known to MultiConnector already",
    ),
    (KVTransferConfig, "__post_init__", "checking settings when they are parsed"),
    (VllmConfig, "__post_init__", "checking settings when they are parsed"),
    (SpeculativeConfig, "use_eagle_block_drop", "which blocks of a prefix are computed anew"),
    (KVConnectorBase_V1, "_get_connector_metadata", "the work of the current step"),
    (KVConnectorBase_V1, "_kv_transfer_config", "the connector's settings"),
    (KVConnectorBase_V1, "_kv_cache_config", "the KV cache groups"),
    (KVConnectorBase_V1, "bind_gpu_block_pool", "pinning blocks that are being saved"),
    (KVConnectorBase_V1, "get_transfer_results", "reporting loads that have ended"),
    (KVConnectorBase_V1, "build_connector_worker_meta", "what workers report to the scheduler"),
    (KVConnectorBase_V1, "has_pending_block_frees", "waiting for pinned blocks, not preempting"),
    (KVConnectorBase_V1, "get_required_kvcache_layout", "asking for blocks in one row"),
    (KVConnectorBase_V1, "has_pending_push_work", "steps of an engine that only saves"),
    (BlockPool, "touch", "pinning blocks"),
    (BlockPool, "free_blocks", "unpinning blocks"),
    (BlockPool, "evict_blocks", "forgetting blocks that were loaded from a wrong pool"),
    (BlockPool, "blocks", "pinning blocks by their ids"),
    (KVCacheBlock, "ref_cnt", "whether only a pin keeps a block"),
    (KVCacheBlock, "block_hash", "whether a block still has the contents to save"),
    (KVCacheManager, "coordinator", "where the blocks of a request are"),
    (KVCacheCoordinator, "get_blocks", "where the blocks of a request are"),
    (SchedulerOutput, "num_scheduled_tokens", "which blocks a step completes"),
    (SchedulerOutput, "preempted_req_ids", "whose blocks were taken away"),
    (KVConnectorOutput, "kv_connector_worker_meta", "what workers report to the scheduler"),
    (KVCacheConfig, "kv_cache_groups", "the KV cache groups"),
    (KVCacheConfig, "hash_block_size", "which hash names a block"),
    (KVCacheConfig, "kv_tp_replicas", "which ranks have the same KV"),
    (KVCacheConfig, "kv_cache_layout", "the layout of blocks"),
    (KVCacheConfig, "prefix_cacheable_group_ids", "refusing groups that are not cacheable"),
    (KVCacheConfig, "has_mamba_layers", "refusing Mamba layers"),
    (KVCacheSpec, "block_size", "the size of blocks"),
    (Request, "block_hashes", "the keys of blocks"),
    (Request, "num_computed_tokens", "which blocks a step completes"),
    (Request, "num_prompt_tokens", "what is prompt and what was generated"),
    (Request, "kv_transfer_params", "hints of a request"),
    (Request, "session_id", "the conversation of a request"),
    (Request, "sampling_params", "hints among a request's extra arguments"),
    (Request, "kv_hints", "hints of an orchestrator"),
    (Request, "priority", "whether blocks are kept for a request"),
    (Request, "mm_features", "whose name for a picture a block's hash has"),
    (ProcessorInputs, "get_mm_hashes", "telling a client's names from digests"),
    (ProcessorInputs, "mm_uuid_items", "telling a client's names from digests"),
    (Request, "lora_request", "the LoRA adapter of a request"),
    (LoRARequest, "lora_int_id", "which loaded adapter a request uses"),
    (LoRARequest, "lora_path", "the name under which vLLM hashes an adapter"),
    (LoRAModelManager, "list_adapters", "fingerprints of the adapters that are loaded"),
    (LoRAModel, "loras", "fingerprints of the adapters that are loaded"),
    (WorkerWrapperBase, "init_device", "taking device memory before vLLM measures what is left"),
    (WorkerBase, "device", "taking device memory before vLLM measures what is left"),
    (kv_cache_utils, "get_none_hash_seed", "what all hashes begin with"),
    (kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "what all hashes begin with"),
    (kv_cache_utils, "maybe_convert_block_hash", "hashes in KV events"),
    (kv_cache_utils, "generate_block_hash_extra_keys", "salts and pictures in KV events"),
    (kv_cache_utils, "to_event_extra_keys", "salts and pictures in KV events"),
    (kv_cache_utils, "make_block_hash_with_group_id", "hashes of cached blocks"),
    (kv_cache_utils, "get_block_hash", "hashes of cached blocks"),
)


def missing(used: Sequence[tuple[Any, str, str]] = PRIVATE) -> str:
    """What this vLLM lacks, as one sentence; empty if it has everything."""
    gone = [
        f"{getattr(owner, '__name__', owner)}.{name} ({purpose})"
        for owner, name, purpose in used
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
    if gone := missing([(Worker, name, "noticing changes of the weights") for name in calls]):
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

    used = [
        (EngineCore, name, "resets") for name in ("reset_prefix_cache", "step_fn", "batch_queue")
    ]
    used += [(Scheduler, name, "resets") for name in ("pause_state", "set_pause_state")]
    if gone := missing([*used, (PauseState, "PAUSED_ALL", "resets")]):
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
