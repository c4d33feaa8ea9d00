"""What SGLang's engine says of its model, as fields of a namespace.

HiCache hands its storage the model's name, and nothing of weights, overrides and quantization: by
that alone two engines that compute different keys and values share them. But a storage lives in
the scheduler's process, where the engine's arguments are, and the files of the weights can be read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Final

import msgspec

from kvpool import ConfigError
from kvpool_engines import namespace, weight_files

#: Arguments that change no key and no value of a page, and those that the name has anyway (ranks,
#: pages). All others do, or may: one that a later SGLang adds keeps engines apart.
_NAMES: Final = """
abort_on_priority_when_disabled admin_api_key allow_auto_truncate api_key attn_cp_size base_gpu_id
batch_notify_size bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token
chat_template chunked_prefill_size completion_template constrained_json_disable_any_whitespace
constrained_json_whitespace_pattern crash_dump_folder custom_sigquit_handler dcp_size
decode_log_interval default_chat_template_kwargs default_priority_value delete_ckpt_after_loading
detokenizer_worker_num device disable_overlap_schedule disable_priority_preemption
disable_tokenizer_batch_decode disaggregation_bootstrap_port
disaggregation_decode_enable_radix_cache disaggregation_ib_device disaggregation_mode
disaggregation_transfer_backend dist_init_addr dist_timeout download_dir dp_size enable_cache_report
enable_dynamic_chunking enable_hierarchical_cache enable_http2 enable_memory_saver enable_metrics
enable_metrics_for_all_schedulers enable_priority_scheduling enable_request_time_stats_logging
enable_session_radix_cache enable_ssl_refresh enable_streaming_session enable_tokenizer_batch_encode
enable_trace export_metrics_to_file export_metrics_to_file_dir extra_metric_labels fastapi_root_path
file_storage_path gated_launch_port gc_threshold gc_warning_threshold_secs generation_tokens_buckets
gpu_id_step grammar_backend grpc_mode grpc_port grpc_worker_threads hf_chat_template_name
hicache_host_memory_fraction hicache_host_memory_mode hicache_io_backend hicache_mem_layout
hicache_ratio hicache_size hicache_storage_backend hicache_storage_backend_extra_config
hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts
hicache_storage_prefetch_retry_poll_interval hicache_write_policy host incremental_streaming_output
kv_events_config load_balance_method load_publish_endpoint log_level log_level_http log_requests
log_requests_format log_requests_level log_requests_target max_prefill_tokens max_queued_requests
max_running_requests max_total_tokens mem_fraction_static model_path nccl_port nnodes node_rank
num_continuous_decode_steps numa_node otlp_service_name otlp_traces_endpoint page_size port
pp_async_batch_depth pp_max_micro_batch_size pp_size preferred_sampling_params
prefill_decode_interval prefill_max_requests priority_scheduling_preemption_threshold
prompt_tokens_buckets radix_eviction_policy radix_eviction_policy_config random_seed
reasoning_parser retraction_policy return_input_ids return_output_ids revision sampling_backend
sampling_defaults schedule_conservativeness schedule_low_priority_values_first schedule_policy
scheduler_recv_interval served_model_name show_time_cost skip_server_warmup skip_tokenizer_init
sleep_on_idle soft_watchdog_timeout ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password
stat_loggers stream_interval stream_response_default_include_usage tokenizer_backend tokenizer_mode
tokenizer_path tokenizer_worker_num tool_call_parser tool_server tp_size trust_remote_code use_ray
uvicorn_access_log_exclude_prefixes warmups watchdog_timeout weight_loader_disable_mmap
weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints
weight_loader_prefetch_num_threads
"""
_WITHOUT_EFFECT: Final = frozenset(_NAMES.split())
_UPDATES: Final = (
    "update_weights_from_disk",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
#: The first call of SGLang's that has changed weights in this process, if one has.
_changed = ""


def fields(arguments: Any, model: str, revision: str) -> dict[str, str]:
    """The weights' files and all arguments with an effect. Raises ConfigError if one has no name.

    `arguments` are SGLang's `ServerArgs`, or None outside of an engine, where there is no more than
    the name `model`; `revision` is the operator's name of weights that do not
    come from files.
    """
    if arguments is None:
        if not revision:
            raise ConfigError("outside of SGLang's scheduler the weights have no name but revision")
        return {"model": model}
    given = _settings(arguments)
    if given.get("enable_lora"):
        raise ConfigError(
            "SGLang names an adapter by its name and path, which stay when its files change: with "
            "--enable-lora nothing can be shared"
        )
    if given.get("load_format") == "dummy":
        given["random_seed"] = arguments.random_seed
    name = PurePath(arguments.model_path).name  # a path is another one on another host
    try:
        weights = weight_files.files(arguments.model_path, arguments.revision or "")
        given["config.json"] = weight_files.settings(
            arguments.model_path, arguments.revision or ""
        ).decode()
    except OSError as error:
        if not revision:
            raise ConfigError(
                f"the weights of {arguments.model_path} have no name ({error}): give them one "
                'with "revision" in --hicache-storage-backend-extra-config, and change it with them'
            ) from None
        name, weights = arguments.model_path, "none"
    settings = json.dumps(given, sort_keys=True, default=str)
    return {"model": name, "weights": weights, "arguments": namespace.digest(settings, 16)}


def weights_changed() -> str:
    """The call that changed weights in this process after they were loaded, or ""."""
    return _changed


@functools.cache
def watch_updates() -> None:
    """From now on calls that change the weights in place are noticed."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for name in _UPDATES:
        setattr(WeightUpdater, name, _noticed(getattr(WeightUpdater, name)))


def _noticed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noticed(*arguments: Any, **named: Any) -> Any:
        global _changed
        _changed = _changed or call.__name__  # before: a part may be written when it fails
        return call(*arguments, **named)

    return noticed


def _settings(arguments: Any) -> dict[str, Any]:
    """The arguments that have an effect and are not at their default."""
    given: dict[str, Any] = {}
    for one in msgspec.structs.fields(type(arguments)):
        value = getattr(arguments, one.name)
        default = one.default
        if default is msgspec.NODEFAULT and one.default_factory is not msgspec.NODEFAULT:
            default = one.default_factory()
        if one.name not in _WITHOUT_EFFECT and value != default:
            given[one.name] = value
    return given
