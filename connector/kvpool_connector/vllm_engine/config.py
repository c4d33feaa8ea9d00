"""What the connector must know of a vLLM engine, read from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from kvpool import ConfigError
from kvpool_connector.form_choice import fields_of
from kvpool_connector.identity.naming import EngineInfo
from kvpool_connector.memory.block_memory import BlockMemory, memory_of
from kvpool_connector.memory.kv_layout import UnsupportedLayout
from kvpool_connector.records.values import CacheGroup
from kvpool_connector.settings import Settings
from kvpool_connector.vllm_engine import interface as vllm_interface
from kvpool_connector.vllm_engine.head_split import HeadSplit, head_split, specs_of
from kvpool_connector.vllm_engine.interface import get_pp_group, get_tp_group, kv_cache_utils
from kvpool_connector.worker.worker import Rank
from kvpool_engines import namespace, weight_files
from kvpool_engines.whole_files import FileDigest, WholeFiles

#: Kinds of layers of which vLLM takes no block from a running request. Others do not need what is
#: behind a window, or in an earlier chunk.
_KEPT: Final = ("FullAttentionSpec", "MLAAttentionSpec")


def engine_of(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> EngineInfo:
    """The engine as the scheduler half sees it. Raises ConfigError for what is not supported."""
    check_supported(vllm_config, kv_cache_config, settings)
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    split = head_split(vllm_config, kv_cache_config, settings)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    hash_block = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
    for spec in specs:
        if spec.block_size % hash_block:
            raise ConfigError(f"blocks of {spec.block_size} tokens, hashes of {hash_block}")
    return EngineInfo(
        groups=tuple(
            CacheGroup(
                spec.block_size,
                spec.block_size // hash_block,
                _window_blocks(spec),
                all(type(one).__name__ in _KEPT for one in specs_of(group)),
            )
            for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True)
        ),
        kinds=tuple(_kind(spec) for spec in specs),
        fields=_fields(vllm_config, kv_cache_config, settings, hash_block),
        file_weights=_file_weights(vllm_config, settings),
        seed=_seed,
        ranks=ranks,
        parts=split.parts * parallel.pipeline_parallel_size,
        blocks=kv_cache_config.num_blocks,
        loads=bool(vllm_config.kv_transfer_config.is_kv_consumer),
        saves=vllm_config.kv_transfer_config.is_kv_producer,
        stage_ranks=parallel.tensor_parallel_size if settings.kv_head_parts else 0,
        # As vLLM's own cache does with EAGLE and MTP, unless an operator has switched that off.
        drops_last_block=bool(speculative is not None and speculative.use_eagle_block_drop()),
        recomputes=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
    )


def rank_of(vllm_config: Any, kv_cache_config: Any, split: HeadSplit, settings: Settings) -> Rank:
    """This worker's place among its peers. Raises ConfigError for what is not supported."""
    check_supported(vllm_config, kv_cache_config, settings)
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    stage, in_stage = get_pp_group().rank_in_group, get_tp_group().rank_in_group
    part = stage * split.parts + in_stage // split.replicas * split.parts_per_rank
    return Rank(
        stage * tensor_parallel + in_stage,
        part,
        in_stage % split.replicas == 0,
        split.parts_per_rank,
        bool(settings.verify_rate and not vllm_config.kv_transfer_config.is_kv_consumer),
    )


def memories_of(
    caches: Mapping[str, torch.Tensor], kv_config: Any, parts: int = 1, *, direct: bool = False
) -> list[BlockMemory]:
    """The memory of each group, in blocks of so many parts; `direct` as for `memory_of`.

    Raises ConfigError for a layout whose blocks cannot be copied.
    """
    memories = []
    for group in kv_config.kv_cache_groups:
        layers = {layer: caches[layer] for layer in group.layer_names if layer in caches}
        try:
            memory = memory_of(layers, parts, direct=direct)
        except UnsupportedLayout as error:
            raise ConfigError(f"this KV cache layout is not supported: {error}") from None
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        needed = sum(specs.get(layer, group.kv_cache_spec).real_page_size_bytes for layer in layers)
        if memory.block_bytes < needed:  # quantization scales in other tensors, for example
            raise ConfigError(
                f"this KV cache layout is not supported: a block has {needed} bytes, "
                f"and its tensors show {memory.block_bytes} of them"
            )
        memories.append(memory)
    return memories


def check_supported(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
    """Raises ConfigError for an engine whose blocks cannot be shared."""
    if lacking := vllm_interface.missing():
        raise ConfigError(lacking)
    parallel = vllm_config.parallel_config
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    for what in ("decode", "prefill"):
        if (n := getattr(parallel, f"{what}_context_parallel_size")) > 1:
            raise ConfigError(f"KVPoolConnector does not support {what} context parallelism ({n})")
    if kv_cache_config.has_mamba_layers:
        raise ConfigError("KVPoolConnector does not support Mamba layers: their state is no block")
    if tuple(kv_cache_config.prefix_cacheable_group_ids) != tuple(range(len(groups))):
        raise ConfigError("KVPoolConnector supports models only whose every KV group is cacheable")
    whole_prompts_only = not vllm_config.scheduler_config.enable_chunked_prefill
    loads = vllm_config.kv_transfer_config.is_kv_consumer
    if vllm_config.model_config.use_mla and whole_prompts_only and loads:
        # vLLM's reference MLA for CPUs computes wrong tokens behind a loaded prefix.
        raise ConfigError(
            "KVPoolConnector cannot load for this model: vLLM has turned chunked prefill off, and "
            'computes MLA wrongly behind a prefix that is there already; "kv_producer" can save'
        )
    for spec in (one for group in groups for one in specs_of(group)):
        if spec.kv_quant_mode.is_per_token_head and spec.state_content_bytes is None:
            # Found with vLLM's kernels for CPUs: each answer behind a loaded prefix was wrong.
            raise ConfigError(
                f"KVPoolConnector does not support a KV cache of the type "
                f"{spec.kv_quant_mode.name} here: each token has a scale, and this engine's blocks "
                "have no room for them"
            )
    if not vllm_config.cache_config.enable_prefix_caching and len(groups) > 1:
        raise ConfigError("KVPoolConnector needs prefix caching for a model with several KV groups")


def _window_blocks(spec: Any) -> int:
    """Blocks of a sliding window that the engine needs before the token where it goes on; 0: all.

    Of other kinds every block is loaded, whether or not a running request keeps them.
    """
    if type(spec).__name__ != "SlidingWindowSpec":
        return 0
    tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
    return max(1, int(-(-tokens // spec.block_size)))


def _kind(spec: Any) -> str:
    window = getattr(spec, "sliding_window", None)
    return type(spec).__name__.removesuffix("Spec") + (f"-{window}" if window else "")


def _fields(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, hash_block: int
) -> dict[str, object]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "tenant": settings.tenant,
        "model": _label(model.hf_text_config),
        **({"revision": settings.revision} if settings.revision else {}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization or "none",
        "kv": cache.cache_dtype,
        "block": "+".join(
            str(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups
        ),
        "hash": f"{cache.prefix_caching_hash_algo}/{hash_block}",
        "tp": f"{settings.kv_head_parts}-head-parts"
        if settings.kv_head_parts
        else parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "layout": _inside(kv_cache_config.kv_cache_layout or cache.kv_cache_layout or "default"),
        "vllm": vllm_interface.version(),
        **fields_of(settings.codec),
    }


def _inside(layout: str) -> str:
    """How a layer of a block lies in memory: heads before tokens or after them. Where its layers
    and the other blocks lie changes no byte of it."""
    return layout.translate({ord("L"): None, ord("B"): None}) if layout.isupper() else layout


def _label(config: Any) -> str:
    """A readable word for the model, the same wherever its files are: kind, layers, width."""
    sizes = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    return f"{config.model_type}-{'x'.join(str(size) for size in sizes if size)}"


def _file_weights(vllm_config: Any, settings: Settings) -> Callable[[], FileDigest | None]:
    """For tensors that cannot be read in the workers' memory. On CPUs all of each file counts; on a
    GPU, where those are experts of other instances, samples of them do."""
    model = vllm_config.model_config
    if settings.revision:
        found = FileDigest("")
    elif vllm_config.load_config.load_format == "dummy":
        found = FileDigest(f"dummy-{model.seed}")
    elif vllm_config.device_config.device_type == "cpu":
        return WholeFiles(model.model, model.revision or "")
    else:
        try:
            found = FileDigest(weight_files.files(model.model, model.revision or ""))
        except OSError as error:
            found = FileDigest("unknown", str(error))
    return lambda: found


def _seed() -> str:
    """What all hashes begin with; vLLM chooses it after it has made the connector.

    `unset` is vLLM's own, without PYTHONHASHSEED: a fleet that sets it on some hosts only is split,
    and this word tells operators where to look.
    """
    seed = kv_cache_utils.get_none_hash_seed()
    return "unset" if seed == kv_cache_utils.DEFAULT_NONE_HASH_SEED else namespace.digest(seed, 8)
