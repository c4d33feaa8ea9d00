"""What a worker finds in the model that vLLM has loaded: weights, structure, LoRA adapters."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from kvpool_connector.identity import kv_shape
from kvpool_connector.records.messages import ModelInfo
from kvpool_connector.vllm_engine.head_split import HeadSplit, why_undivided
from kvpool_connector.vllm_engine.interface import LAYERWISE_INFO
from kvpool_engines import fingerprint, namespace

#: Tensors that every tensor parallel rank has as a whole.
_UNDIVIDED: Final = re.compile(r"norm\.|layernorm\.|cos_sin_cache")
#: In the names of layers that vLLM has put into one for adapters.
_ADAPTED: Final = re.compile(r"\.base_layer\b")
#: Bytes of an adapter whose rows are summed, while the engine waits.
_ADAPTER_SUMMED_BYTES: Final = 16 << 20


def model_info(vllm_config: Any, split: HeadSplit, *, summed_bytes: int | None = None) -> ModelInfo:
    """The loaded model as it is now. Call it again after its weights were changed.

    With a split by heads it is described by what does not depend on the number of ranks. Takes less
    than a second: a GPU's tensors are summed there, of a CPU's a part is read,
    unless `summed_bytes` asks for more.
    """
    roots = loaded_models(vllm_config)
    if not roots:
        return ModelInfo(unknown="vLLM does not say which model it has loaded")
    parallel = vllm_config.parallel_config
    if why := why_undivided(
        vllm_config.compilation_config.static_forward_context,
        (module for root in roots for module in root.modules()),
        split,
        parallel.tensor_parallel_size,
    ):
        return ModelInfo(unknown=why)
    partial = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    left_out = _expert_layers(vllm_config) if partial else set()
    tensors = _tensors(roots, left_out)
    if split.by_heads:
        tensors = (one for one in tensors if _UNDIVIDED.search(one[0]))
    found = fingerprint.memory(tensors, summed_bytes=summed_bytes)
    return ModelInfo(
        weights=found.digest,
        hidden=found.hidden + len(left_out),
        packing=_packing(vllm_config),
        description=tuple(kv_shape.described(vllm_config, roots).items()),
        adapters=vllm_config.lora_config is None or _lora_manager(roots[0]) is not None,
    )


def loaded_models(vllm_config: Any) -> list[torch.nn.Module]:
    """The models that compute this engine's KV, in the order in which they were built: the model
    itself, then its drafts."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    modules = list(LAYERWISE_INFO)
    inner = {child for module in modules for child in module.children()}
    wanted = {id(layer) for layer in layers}
    roots: list[torch.nn.Module] = []
    seen: set[int] = set()
    for module in sorted(
        (one for one in modules if one not in inner), key=lambda one: -sum(1 for _ in one.modules())
    ):
        inside = {id(one) for one in module.modules()}
        if inside & wanted and id(module) not in seen:
            roots.append(module)
        seen |= inside
    return sorted(roots, key=modules.index)


class LoadedAdapters:
    """The LoRA adapters that a worker has loaded, by the fingerprint of their tensors."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._manager: Any = None
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def __call__(self) -> Mapping[int, str]:
        """The fingerprint of each, by the id that vLLM uses in this engine.

        Those that were there at the last call, the same objects, are not read again.
        """
        if self._config.lora_config is None:
            return {}
        if self._manager is None:
            roots = loaded_models(self._config)
            self._manager = _lora_manager(roots[0]) if roots else None
            if self._manager is None:
                return {}
        found: dict[int, tuple[weakref.ref[Any], str]] = {}
        for number, adapter in self._manager.list_adapters().items():
            known = self._known.get(number)
            if known is None or known[0]() is not adapter:
                tensors = _adapter_tensors(adapter)
                found_now = fingerprint.memory(tensors, summed_bytes=_ADAPTER_SUMMED_BYTES)
                options = kv_shape.described_adapters(self._config.lora_config)
                known = (weakref.ref(adapter), namespace.digest(f"{found_now.digest} {options}"))
            found[number] = known
        self._known = found
        return {number: digest for number, (_, digest) in found.items()}


def _tensors(
    roots: list[torch.nn.Module], left_out: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the models. Buffers are what was computed at the start from the
    configuration: rope tables, scales."""
    for number, root in enumerate(roots):
        for prefix, module in root.named_modules():
            if id(module) in left_out:
                continue
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    yield f"{number}.{_ADAPTED.sub('', prefix)}.{name}", tensor


def _expert_layers(vllm_config: Any) -> set[int]:
    """Layers of which this instance has a part, with expert parallelism over several instances."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return {id(layer) for layer in layers if hasattr(layer, "expert_map")}


def _packing(vllm_config: Any) -> str:
    """How the kernels pack the inside of a block: backend and instruction set of each layer."""
    layers = vllm_config.compilation_config.static_forward_context
    return ";".join(
        f"{name}:{type(getattr(layer, 'impl', layer)).__name__}:{getattr(layer, 'isa', '')}"
        for name, layer in sorted(layers.items())
    )


def _lora_manager(root: torch.nn.Module) -> Any:
    managers = (vars(module).get("lora_manager") for module in root.modules())
    return next((one for one in managers if one is not None), None)


def _adapter_tensors(adapter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    weights = {**adapter.loras, **getattr(adapter, "modules_to_save", {})}
    for module, weight in sorted(weights.items()):
        for name, value in sorted(vars(weight).items()):
            for number, one in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(one, torch.Tensor):
                    yield f"{module}.{name}.{number}", one
                elif isinstance(one, int | float):
                    yield f"{module}.{name}.{number}={one}", torch.zeros(1)
