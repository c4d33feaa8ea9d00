"""What shapes KV: every field of vLLM's configurations has a decision. No engine runs here."""

from __future__ import annotations

import ast
import enum
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from vllm.config import (
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    VllmConfig,
)
from vllm.v1.worker.worker_base import WorkerWrapperBase

from kvpool import ConfigError
from kvpool_connector import settings
from kvpool_connector.identity import kv_shape
from kvpool_connector.identity.environment import IRRELEVANT as NO_KV
from kvpool_connector.identity.kv_shape import IRRELEVANT
from kvpool_connector.memory import block_memory
from kvpool_connector.vllm_engine import interface as vllm_interface
from kvpool_connector.vllm_engine.config import check_supported
from kvpool_connector.vllm_plugin import register
from tests.connector.vllm.helpers import ROOT, Models
from tests.connector.vllm.test_gpu_layouts import ALONE, BESIDE

#: The fields that are described, each of which can change the KV of given tokens.
DESCRIBED = {
    "VllmConfig": "model_config cache_config parallel_config scheduler_config attention_config "
    "kernel_config lora_config speculative_config diffusion_config quant_config "
    "additional_config",
    "ModelConfig": "hf_config runner convert dtype is_submodel_config quantization "
    "quantization_config disable_sliding_window model_class_overrides model_impl multimodal_config",
    "CacheConfig": "kv_cache_dtype_skip_layers skip_page_size_padded kv_sharing_fast_prefill",
    "ParallelConfig": "worker_cls worker_extension_cls",
    "LoRAConfig": "",
    "SpeculativeConfig": "method attention_backend kv_cache_dtype parallel_drafting "
    "index_share_for_mtp_iteration",
    "MultiModalConfig": "media_io_kwargs mm_processor_kwargs mm_device_do_normalize "
    "mm_hasher_algorithm mm_encoder_attn_backend mm_encoder_attn_dtype "
    "mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
    "AttentionConfig": "use_trtllm_attention disable_flashinfer_q_quantization "
    "use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits use_non_causal",
    "KernelConfig": "moe_backend linear_backend linear_backend_per_quant",
    "SchedulerConfig": "",
    "DiffusionConfig": "canvas_length max_denoising_steps",
}


@pytest.mark.parametrize("name", sorted({*DESCRIBED, *IRRELEVANT}))
def test_every_field_is_in_the_name_or_has_a_reason_why_not(name: str) -> None:
    """A field that a new vLLM adds: decide, and write it here or into `IRRELEVANT`."""
    known = {field.name for field in fields(getattr(vllm.config, name))}
    described, reasons = set(DESCRIBED[name].split()), IRRELEVANT[name]
    assert known == described | reasons.keys()
    assert not described & reasons.keys()
    assert all(len(reason.split()) >= 4 or reason for reason in reasons.values())


def test_a_field_that_nothing_decides_about_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer vLLM that nobody has looked at separates engines too often, never too rarely."""
    monkeypatch.delitem(IRRELEVANT["SchedulerConfig"], "policy")  # type: ignore[attr-defined]
    described = kv_shape._described_fields(VllmConfig().scheduler_config, "SchedulerConfig")
    assert described == ["policy"]


class Attention(torch.nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


Describe = Callable[..., dict[str, str]]


@pytest.fixture
def described(model: Models) -> Describe:
    """The description of an engine, with fields set (`part.field`) and modules of its own."""

    def describe(*roots: torch.nn.Module, **values: Any) -> dict[str, str]:
        config = VllmConfig(
            model_config=ModelConfig(model=str(model()), dtype="bfloat16"),
            device_config=DeviceConfig("cpu"),
        )
        for place, value in values.items():
            *parts, field = place.split(".")
            setattr(reduce(getattr, parts, config), field, value)
        return kv_shape.described(config, roots or [Attention(scaling=0.5)])

    return describe


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("attention_config.use_non_causal", True),
        ("cache_config.kv_cache_dtype_skip_layers", ["0", "1"]),
        ("kernel_config.moe_backend", "triton"),
        ("parallel_config.worker_cls", "another.Worker"),
        ("model_config.model_impl", "transformers"),
        ("model_config.quantization", "fp8"),
        ("model_config.disable_sliding_window", True),
        ("model_config.dtype", torch.float16),
        ("additional_config", {"graph": True}),
        ("model_config.hf_config.num_attention_heads", 2),
        ("model_config.hf_config.factors", [1.0] * 100 + [2.0]),
        ("model_config.hf_config.rms_norm_eps", 0.001),
        ("model_config.hf_config.sliding_window", 128),
        ("cache_config.kv_sharing_fast_prefill", True),
        ("model_config.multimodal_config", MultiModalConfig(video_pruning_rate=0.5)),
    ],
)
def test_what_shapes_kv_is_described(described: Describe, place: str, value: Any) -> None:
    assert described(**{place: value}) != described()


@pytest.mark.parametrize(
    "roots",
    [
        [Attention(scaling=0.25)],
        [Attention(scaling=0.5, use_long_rope=True)],
        [Attention(scaling=0.5), Attention(scaling=0.5)],
    ],
)
def test_what_was_chosen_when_the_model_was_built_is_described(
    described: Describe, roots: list[torch.nn.Module]
) -> None:
    assert described(*roots) != described()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("scheduler_config.max_num_seqs", 3),
        ("cache_config.num_gpu_blocks", 77),
        ("parallel_config.data_parallel_rank", 1),
        ("parallel_config.enable_expert_parallel", True),
        ("compilation_config.cache_dir", "/cache"),
        ("model_config.enforce_eager", True),
        ("model_config.max_model_len", 77),
        ("model_config.model", "/elsewhere/model"),
        ("model_config.hf_config.transformers_version", "9.9"),
        ("model_config.hf_config._name_or_path", "elsewhere"),
        ("model_config.hf_config.eos_token_id", 77),
        ("model_config.hf_config.use_cache", False),
    ],
)
def test_what_does_not_is_left_out(described: Describe, place: str, value: Any) -> None:
    assert described(**{place: value}) == described()


@pytest.mark.parametrize(
    "hung",
    [
        {"tp_rank": 3, "max_num_seqs": 9, "prefix": "model.layers.1"},
        {"_aot_cache_dir": "/cache/1/rank_0_0", "was_aot_compile_fn_loaded_from_disk": True},
        {"_is_encoder": False, "evaluate_guards": False, "first_compile": True},
        {"scale_workspace_size": 7, "nobody_knows_it": 7},
    ],
)
def test_attributes_that_no_one_knows_to_shape_kv_are_left_out(
    described: Describe, hung: dict[str, Any]
) -> None:
    """vLLM and its compiler hang their own on modules, others in each process."""
    assert described(Attention(scaling=0.5, **hung)) == described()


def test_what_is_configured_for_adapters_is_in_the_fingerprint_of_each() -> None:
    half = kv_shape.described_adapters(LoRAConfig(lora_dtype="float16"))
    assert half != kv_shape.described_adapters(LoRAConfig(lora_dtype="bfloat16"))
    assert half == kv_shape.described_adapters(LoRAConfig(lora_dtype="float16", max_loras=7))


def test_a_long_text_is_cut_and_still_tells_a_difference() -> None:
    one, other = (kv_shape.shortened("x" * 999 + last) for last in "12")
    assert one != other
    assert len(one) == len(other) <= 160


def test_values_are_text_without_addresses() -> None:
    class Kind(enum.Enum):
        DECODER = 1

    class Config:
        def __init__(self) -> None:
            self.names = {"b", "a"}
            self.kind = Kind.DECODER
            self.dtype = torch.bfloat16
            self.function = test_values_are_text_without_addresses
            self._cache = object()

    text = kv_shape.canonical(Config())
    assert text == kv_shape.canonical(Config())
    assert "0x" not in text
    assert "names:[a,b]" in text
    assert "_cache" not in text


# --- what the connector uses of vLLM ----------------------------------------------------------


def test_this_vllm_has_every_name_that_the_connector_uses() -> None:
    assert vllm_interface.missing() == ""


@pytest.mark.parametrize("owner", [vllm_interface, vllm_interface.Request])
def test_a_vllm_that_lacks_a_name_is_refused_with_a_sentence(owner: Any) -> None:
    sentence = vllm_interface.missing([(owner, "renamed_since", "pinning blocks")])
    assert "supports vLLM 0.32" in sentence
    assert "renamed_since (pinning blocks)" in sentence


def test_an_engine_whose_vllm_lacks_a_name_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not meet a missing one at its first request."""
    config, no_cache = VllmConfig(device_config=DeviceConfig("cpu")), SimpleNamespace()
    monkeypatch.delattr(vllm_interface.BlockPool, "touch")
    with pytest.raises(ConfigError, match=r"vLLM 0\.32; .* lacks BlockPool\.touch \(pinning"):
        check_supported(config, no_cache, settings.parse({}))


PLUGIN = """
import sys
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
sys.modules["vllm.v1.metrics.cache_hit_source"] = None  # as in vLLM 0.31, which has no such module
from kvpool_connector.vllm_plugin import register
register()
register()
print("vLLM goes on")
KVConnectorFactory.get_connector_class_by_name("KVPoolConnector")
"""


def test_a_vllm_without_a_module_runs_and_refuses_the_connector_when_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert "vLLM goes on" in done.stdout, done.stderr
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "KVPoolConnector supports vLLM 0.32" in last
    assert "lacks a name" in last
    assert "cache_hit_source" in last


@pytest.mark.parametrize(
    ("version", "tested"), [("0.32.1", True), ("0.33.0", False), ("0.32.1.dev3+gabc", False)]
)
def test_a_version_that_no_test_has_run_with_is_named_in_the_log(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert (vllm_interface.untested() == "") is tested
    assert tested or version in vllm_interface.untested()


# --- device memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("connector", "device", "reserved"),
    [
        (ALONE, "meta", True),
        (BESIDE, "meta", True),
        ({"kv_connector": "ExampleConnector"}, "meta", False),
        (ALONE, "cpu", False),
        (None, "meta", False),
    ],
)
def test_device_memory_is_taken_before_vllm_measures_what_is_left(
    connector: dict[str, Any] | None, device: str, reserved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM measures after `init_device`, from a snapshot that it has made in it."""
    monkeypatch.setattr(block_memory, "DeviceStage", lambda device: object())
    block_memory.stage_of.cache_clear()
    taken: list[int] = []

    def init_device() -> None:
        worker.device = torch.device(device)
        taken.append(block_memory.stage_of.cache_info().currsize)

    worker = SimpleNamespace(device=None, init_device=init_device)
    wrapper = WorkerWrapperBase()
    wrapper.worker = worker  # type: ignore[assignment]
    transfer = connector and KVTransferConfig(kv_role="kv_both", **connector)
    wrapper.vllm_config = VllmConfig(device_config=DeviceConfig("cpu"))
    wrapper.vllm_config.kv_transfer_config = transfer or None
    register()
    wrapper.init_device()
    assert taken == [0]
    assert block_memory.stage_of.cache_info().currsize == reserved
    block_memory.stage_of.cache_clear()


def test_vllm_makes_the_snapshot_before_it_measures() -> None:
    """The order that the reservation relies on, in vLLM's own words."""
    source = Path(find_spec("vllm.v1.worker.gpu_worker").origin or "").read_text()  # type: ignore[union-attr]
    bodies = {
        node.name: ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    assert "self.init_snapshot = init_snapshot = MemorySnapshot" in bodies["init_device"]
    assert "self.init_snapshot" in bodies["determine_available_memory"]
    assert "ensure_kv_transfer_initialized" in bodies["initialize_from_config"]


def test_only_one_file_imports_vllm() -> None:
    importing = set()
    for path in Path(ROOT, "connector").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name == "vllm" or name.startswith("vllm.") for name in names):
                importing.add(f"{path.parent.name}/{path.name}")
    assert importing == {"vllm_engine/interface.py", "kvpool_connector/vllm_plugin.py"}


def test_releases_and_builds_share_with_themselves_only(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = ["0.32.0", "0.32.0+cpu", "0.32.1+cpu", "0.33.0.dev7+gabc"]
    names = set()
    for version in versions:
        monkeypatch.setattr(vllm, "__version__", version)
        names.add(vllm_interface.version())
    assert len(names) == len(versions)


def test_variables_that_are_left_out_are_variables_of_vllm() -> None:
    """One that vLLM has dropped may come back with another meaning."""
    ignored = {f"VLLM_{name}" for names in NO_KV.values() for name in names.split()}
    assert ignored <= set(vllm.envs.environment_variables)
