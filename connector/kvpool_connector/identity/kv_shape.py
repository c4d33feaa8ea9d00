"""What of a vLLM engine's configuration shapes its KV, field by field; and its description.

Every field of vLLM's configurations is either in the description or in `IRRELEVANT`, with one
sentence that says why it cannot change the KV of given tokens. A field that is in neither (a newer
vLLM has added it) is described: then engines that differ in it do not share. (design: namespace)

The description is made in a worker after the model was loaded: only then is the configuration the
one that was used, and the model itself tells what was chosen while it was built.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, Final

import torch

from kvpool_connector.identity.environment import PLUGINS, environment

_PATHS = "names a place; what was read from it is in hf_config and in the weights' fingerprint"
_TEXT = "is about text, sampling or answers; KV depends on token ids alone"
_DERIVED = "is made of other fields, which are described"
_SIZE = "is how much memory there is, not what is in it"
_ROUNDING = "chooses between kernels that compute the same function; results differ by rounding"
_PLACEMENT = "decides where and by which processes the same values are computed"
_MAMBA = "is for Mamba layers, which are refused"
_TIMING = "decides what is computed when; a token's KV does not depend on it"
_OBSERVES = "watches the engine and changes nothing in it"
_FIELD = "is a field of the namespace of its own, or of the KV cache configuration"
_REQUESTS = "limits which requests are accepted"
_DRAFTS = "changes which drafts are proposed; the model verifies them, and only then is KV kept"
_DRAFT_MODEL = "is about the draft model, whose modules and weights are described as they are"
_HASHED = "changes content that is part of a block's hash"
_OF_ADAPTERS = (
    "lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format "
    "enable_moe_shared_loras"
)

#: By configuration and field, why it is not in the description.
IRRELEVANT: Final[Mapping[str, Mapping[str, str]]] = {
    name: {field: reason for reason, names in groups.items() for field in names.split()}
    for name, groups in {
        "VllmConfig": {
            _OBSERVES: "observability_config logging_config profiler_config kv_events_config",
            _TEXT: "structured_outputs_config reasoning_config watermark_config",
            _PLACEMENT: "device_config offload_config ec_transfer_config ec_manager_config "
            "instance_id shutdown_timeout engram_config",
            _ROUNDING: "compilation_config optimization_level performance_mode",
            _MAMBA: "mamba_config",
            "says how weights come; those that came are fingerprinted": "load_config "
            "weight_transfer_config",
            "is this connector's own": "kv_transfer_config",
            "changes what is returned beside tokens": "aux_output_config",
        },
        "ModelConfig": {
            _PATHS: "model model_weights hf_config_path revision code_revision config_format "
            "hf_token trust_remote_code",
            "has been applied to hf_config, which is described": "hf_overrides",
            "is a part of hf_config": "hf_text_config",
            _TEXT: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init logprobs_mode "
            "max_logprobs return_sampling_mask use_fp64_gumbel enable_trace_replay "
            "served_model_name generation_config override_generation_config logits_processors "
            "io_processor_plugin renderer_num_workers pooler_config",
            "draws samples, and dummy weights, which are fingerprinted": "seed",
            "is described where it matters: by the modules that were built for it": "max_model_len "
            "spec_target_max_model_len",
            _REQUESTS: "allowed_local_media_path allowed_media_domains",
            "concerns the output layer": "word_embeddings_untied_by_checkpoint",
            _HASHED: "enable_prompt_embeds",
            _ROUNDING: "enforce_eager disable_cascade_attn",
            _SIZE: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
            "permits a method that `quantization` names": "allow_deprecated_quantization",
        },
        "CacheConfig": {
            _FIELD: "block_size kv_cache_layout cache_dtype prefix_caching_hash_algo "
            "hash_block_size sliding_window",
            _DERIVED: "user_specified_block_size _block_size_resolved is_attention_free "
            "effective_attention_block_size",
            _SIZE: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend",
            "decides which prefixes are found or kept, not their contents": "prefix_match_unit "
            "enable_prefix_caching prefix_cache_retention_interval cache_hit_alignment_tokens "
            "swa_bounded_replay",
            _MAMBA: "mamba_page_size_padded mamba_block_size mamba_cache_dtype "
            "mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
            "replayssm_buffer_len use_replayssm use_kda_recoverssm",
        },
        "ParallelConfig": {
            _FIELD: "tensor_parallel_size pipeline_parallel_size",
            "is 1, anything else is refused": "decode_context_parallel_size "
            "prefill_context_parallel_size dcp_kv_cache_interleave_size dcp_comm_backend "
            "dcp_q_replicate cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size",
            _PLACEMENT: "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port "
            "dp_sync_interval data_parallel_master_port data_parallel_backend "
            "data_parallel_external_lb data_parallel_hybrid_lb is_moe_model "
            "enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
            "expert_placement_strategy max_parallel_loading_workers enable_shm_tensor_arena "
            "enable_elastic_ep elastic_ep_max_dp_size disable_nccl_for_dp_synchronization "
            "ray_workers_use_nsight ray_runtime_env placement_group "
            "distributed_executor_backend master_addr master_port node_rank nnodes numa_bind "
            "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank "
            "_data_parallel_master_port_list _coord_store_port data_parallel_index "
            "_api_process_count _api_process_rank enable_fault_tolerance "
            "fault_tolerance_config",
            _ROUNDING: "enable_hc_sp all2all_backend disable_custom_all_reduce",
            _TIMING: "enable_dbo ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold",
            "samples": "enable_batch_sharded_sampling",
        },
        "LoRAConfig": {
            "limits adapters; those that are used are fingerprinted": "max_lora_rank max_loras "
            "max_cpu_loras",
            _PLACEMENT: "fully_sharded_loras",
            _ROUNDING: "specialize_active_lora",
            _HASHED: "default_mm_loras",
            "concerns the output layer": "max_lora_cls_labels",
            "is a part of each adapter's fingerprint": _OF_ADAPTERS,
        },
        "SpeculativeConfig": {
            _PATHS: "model revision code_revision draft_load_config",
            _DRAFT_MODEL: "draft_model_config quantization max_model_len",
            _DERIVED: "target_model_config target_parallel_config draft_parallel_config",
            _PLACEMENT: "draft_tensor_parallel_size tensor_parallel_size",
            _ROUNDING: "enforce_eager moe_backend use_local_argmax_reduction",
            _DRAFTS: "num_speculative_tokens num_speculative_tokens_per_batch_size "
            "prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
            "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
            "synthetic_acceptance_length enable_adaptive_verification draft_sample_method "
            "dspark_draft_topk disable_padded_drafter_batch use_heterogeneous_vocab",
            "decides which prefixes are found, not their contents": "disable_eagle_block_drop",
        },
        "MultiModalConfig": {
            _REQUESTS: "limit_per_prompt enable_mm_embeds language_model_only mm_encoder_only "
            "allow_missing_mm_embeddings",
            _SIZE: "mm_processor_cache_gb mm_processor_cache_type mm_ipc_gpu_memory_gb "
            "mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc",
            _PLACEMENT: "mm_encoder_tp_mode",
            _TEXT: "interleave_mm_strings",
            "is only written": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        },
        "AttentionConfig": {
            "is described as it was resolved: by the backend of every layer (packing)": "backend "
            "backend_per_kind",
            _ROUNDING: "minimax_m3_msa_decode_backend flash_attn_version "
            "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
            "tq_max_kv_splits_for_cuda_graph mla_prefill_backend sparse_mla_force_mqa "
            "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
            _SIZE: "sparse_mla_prefill_workspace_factor hisparse_config",
        },
        "KernelConfig": {
            _ROUNDING: "ir_op_priority enable_flashinfer_autotune sparse_indexer_topk_backend "
            "enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup"
        },
        "SchedulerConfig": {
            _TIMING: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
            "max_num_active_seqs long_prefill_token_threshold "
            "long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens "
            "enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy "
            "disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl watermark "
            "prefill_schedule_interval async_scheduling stream_interval",
            "shows in the KV cache groups, each of which has a namespace": (
                "disable_hybrid_kv_cache_manager"
            ),
            _DERIVED: "runner_type is_multimodal_model",
        },
        "DiffusionConfig": {},
    }.items()
}
#: Configurations inside VllmConfig that have a table of their own. `speculative_config` counts
#: only where drafts have KV of their own; what else is inside VllmConfig is described as a whole.
_TABLES: Final = {
    "model_config": "ModelConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "lora_config": "LoRAConfig",
    "speculative_config": "SpeculativeConfig",
    "attention_config": "AttentionConfig",
    "kernel_config": "KernelConfig",
    "diffusion_config": "DiffusionConfig",
    "multimodal_config": "MultiModalConfig",
}
#: Of the model's own configuration, by reason, what no layer that makes KV reads.
_HF_IRRELEVANT: Final[Mapping[str, str]] = {
    "says where it came from": "transformers_version _name_or_path name_or_path _commit_hash "
    "torch_dtype",
    "is about text and sampling": "bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
    "begin_suppress_tokens bad_words_ids",
    "is about training": "initializer_range initializer_factor attention_dropout hidden_dropout "
    "dropout resid_pdrop embd_pdrop attn_pdrop classifier_dropout use_cache "
    "router_aux_loss_coef router_jitter_noise gradient_checkpointing pretraining_tp",
    "is about what transformers returns": "output_attentions output_hidden_states "
    "output_router_logits return_dict torchscript use_return_dict",
    "concerns the output layer": "tie_word_embeddings id2label label2id num_labels problem_type "
    "finetuning_task task_specific_params",
}
_HF_IGNORED: Final = frozenset(" ".join(_HF_IRRELEVANT.values()).split())
#: Attributes of modules that are known to change what attention, rotary embeddings, norms,
#: activations, experts and quantization compute. What else a module has is no part of the name:
#: sizes show in the shapes of its tensors, and vLLM hangs on modules what it needs for itself.
_SHAPES_KV: Final = re.compile(
    r"scal(e|ing)|soft_?cap|window|sliding|sink|alibi|causal|attn_type|temperature|nope|clip_qkv"
    r"|qk_(layer)?norm|query_key_norm|kv_shar|kv_cache_(torch_)?dtype|attention_(chunk|bias|mult)"
    r"|^chunk_size$|top_?k|layer_type"
    r"|rope|rotary|theta|^base$|beta_(fast|slow)|extrapolation|attn_factor|neox|interleaved"
    r"|eps(ilon)?$|normaliz|norm_(before|after|topk|type)|has_weight|act(ivation)?(_fn|_func)?$"
    r"|approximate|swiglu|^(alpha|beta|gamma|limit)$|clamp|multiplier"
    r"|score?(ing)?_func|expert_group|n_group|routed|router_(dtype|weight)"
    r"|quant|^(params_|out_|weight_|activation_)?dtype$|num_bits|weight_bits|symmetric|strategy"
    r"|^group_size$|static_input|per_token|has_bias"
)
#: Of those, what says how much memory there is, or where.
_NO_KV: Final = re.compile(r"workspace|max_|path|device")
#: vLLM puts these around layers where adapters are allowed. Without one they compute the same.
_WITH_ADAPTERS: Final = "WithLoRA"
#: A longer text is cut and gets a hash of all of it.
_TEXT_MAX: Final = 160
_DEPTH_MAX: Final = 6


def described(vllm_config: Any, roots: Iterable[torch.nn.Module]) -> dict[str, str]:
    """The description of an engine: readable values by name, in a stable order.

    It is the same for every number of tensor parallel ranks, before and after the model was
    compiled, and with adapters allowed or not.

    `roots` are the models that share the KV cache: the model itself, then draft models that have
    KV of their own.
    """
    models = list(roots)
    text: dict[str, str] = {}

    def describe(config: Any, table: str, prefix: str = "") -> None:
        for name in _described_fields(config, table):
            value, short = getattr(config, name), name.removesuffix("_config")
            if name in _TABLES:
                if value is not None and (short != "speculative" or len(models) > 1):
                    describe(value, _TABLES[name], f"{short}.")
            elif name == "hf_config":
                text.update(_described_hf(value))
            elif prefix or value is not None:
                text[prefix + name if prefix else short] = shortened(canonical(value))

    describe(vllm_config, "VllmConfig")
    installed = itertools.chain(*(entry_points(group=group) for group in PLUGINS))
    text.update((name, shortened(value)) for name, value in environment(os.environ, installed))
    for number, root in enumerate(models):
        text.update(_described_modules(root, "draft." if number else "module."))
    return dict(sorted(text.items()))


def _described_fields(config: Any, table: str) -> list[str]:
    known = IRRELEVANT[table]
    return [field.name for field in fields(config) if field.name not in known]


def described_adapters(lora_config: Any) -> str:
    """What of its configuration shapes the KV of every request with an adapter."""
    return canonical({name: getattr(lora_config, name) for name in _OF_ADAPTERS.split()})


def _described_hf(config: Any) -> Iterator[tuple[str, str]]:
    """The model's configuration after all overrides, nested names joined by dots."""

    def flat(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in values.items():
            if key in _HF_IGNORED:
                continue
            if isinstance(value, Mapping) and len(value) <= 64 and prefix.count(".") < 3:
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", shortened(canonical(value))

    yield from flat(config.to_dict(), "hf.")


def _described_modules(root: torch.nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """For every class of modules, the attributes that shape KV in all its instances.

    What depends on more than the model's configuration shows here: which rope factors
    `max_model_len` has chosen, how many experts a token uses, scales, windows.
    """
    values: dict[str, dict[str, list[str]]] = {}
    for module in root.modules():
        if type(module).__name__.endswith(_WITH_ADAPTERS):
            continue
        kind = values.setdefault(type(module).__name__, {})
        for name, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str | enum.Enum | torch.dtype)
            if plain and _SHAPES_KV.search(name) and not _NO_KV.search(name):
                kind.setdefault(name, []).append(canonical(value))
            elif name == "quant_method":
                kind.setdefault(name, []).append(type(value).__name__)
    for kind_name, attributes in values.items():
        words = [
            f"{name}={seen[0] if len(set(seen)) == 1 else _digest(';'.join(seen))}"
            for name, seen in sorted(attributes.items())
        ]
        yield f"{prefix}{kind_name}", shortened(" ".join(words), 600)


def canonical(value: object, depth: int = 0) -> str:
    """The value as text: equal for equal values in two processes, with no address in it."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, type) or callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    if depth >= _DEPTH_MAX:
        return type(value).__name__
    if isinstance(value, Mapping):
        items = sorted((canonical(k, depth + 1), canonical(v, depth + 1)) for k, v in value.items())
        return "{" + ",".join(f"{key}:{text}" for key, text in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(canonical(one, depth + 1) for one in value) + "]"
    if isinstance(value, set | frozenset):
        return "[" + ",".join(sorted(canonical(one, depth + 1) for one in value)) + "]"
    if hasattr(value, "to_dict"):
        return canonical(value.to_dict(), depth + 1)
    if is_dataclass(value):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        inside = {k: v for k, v in getattr(value, "__dict__", {}).items() if k[0] != "_"}
    return type(value).__name__ + canonical(inside, depth + 1)


def shortened(text: str, most: int = _TEXT_MAX) -> str:
    """At most `most` characters; a text that was cut ends with a hash of all of it."""
    return text if len(text) <= most else f"{text[: most - 14]}~{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
