"""How blocks are divided into parts by KV heads, so that engines of any tensor parallel size share.

Part i of a block has KV heads i * H / P to (i + 1) * H / P of every layer, in engines of all sizes;
each rank has the parts of its own heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from kvpool import ConfigError
from kvpool_connector.settings import Settings

#: Kernels that keep every head's bytes apart from those of the others, as the shape of their caches
#: `[blocks, heads, tokens, content]` says. Others use the same memory for views of their own.
BACKENDS: Final = frozenset(
    {
        "CPUAttentionBackendImpl",
        "FlashAttentionImpl",
        "FlashInferImpl",
        "FlexAttentionImpl",
        "TritonAttentionImpl",
    }
)
#: Quantized caches whose bytes depend on nothing outside of their head.
_QUANTIZED: Final = frozenset({"NONE", "FP8_PER_TENSOR"})


class HeadSplit(NamedTuple):
    """How the tensor parallel ranks of a pipeline stage share a block of `parts`.

    Of `replicas` consecutive ranks all have the same `parts_per_rank`. `by_heads` is false where a
    part is simply what a rank has.
    """

    parts: int
    parts_per_rank: int
    replicas: int
    by_heads: bool


class LayerHeads(NamedTuple):
    """KV heads of a layer on one rank, and into how many different shards ranks divide the layer
    at most; None: into as many as the model has KV heads."""

    local: int
    shards_max: int | None = None


def divide(
    parts: int, tensor_parallel: int, layers: Iterable[LayerHeads], model_heads: int
) -> HeadSplit:
    """The parts of each rank. Raises ConfigError if they cannot have all of their heads.

    `model_heads` are the KV heads of the model; there may be fewer than ranks, which then have
    replicas.
    """
    replicas = set()
    for heads, shards_max in set(layers):
        most = model_heads if heads == 1 else tensor_parallel
        shards = min(tensor_parallel, most if shards_max is None else shards_max)
        if tensor_parallel % shards:
            raise ConfigError(f"kv_head_parts: {tensor_parallel} ranks share {shards} KV heads")
        replicas.add(tensor_parallel // shards)
        if heads * shards % parts:
            raise ConfigError(
                f"kv_head_parts is {parts}: {heads * shards} KV heads make no {parts} equal parts"
            )
        if parts % shards:
            raise ConfigError(
                f"kv_head_parts is {parts}: {shards} tensor parallel ranks cannot have equally many"
            )
    if len(replicas) != 1:
        raise ConfigError("kv_head_parts: layers of this model are replicated on different ranks")
    of_each = replicas.pop()
    return HeadSplit(parts, parts * of_each // tensor_parallel, of_each, by_heads=True)


def head_split(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> HeadSplit:
    """The parts of an engine's blocks, as its settings ask. Raises ConfigError."""
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    parts = settings.kv_head_parts
    if not parts:
        replicas = max(1, kv_cache_config.kv_tp_replicas)
        return HeadSplit(tensor_parallel // replicas, 1, replicas, by_heads=False)
    specs = [one for group in kv_cache_config.kv_cache_groups for one in specs_of(group)]
    for spec in specs if parts > 1 else ():
        packed = spec.num_head_slots not in (None, spec.num_kv_heads)
        if packed or spec.state_content_bytes or spec.kv_quant_mode.name not in _QUANTIZED:
            raise ConfigError(
                f"kv_head_parts: a KV cache of the type {spec.kv_quant_mode.name} is packed across "
                "heads, so engines of different tensor parallel sizes cannot share it"
            )
    return divide(
        parts,
        tensor_parallel,
        [LayerHeads(spec.num_kv_heads, spec.max_tp_shards) for spec in specs],
        vllm_config.model_config.get_total_num_kv_heads(),
    )


def specs_of(group: Any) -> list[Any]:
    """What kinds of layers a KV cache group of vLLM has: one, or several of equal size."""
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def why_undivided(
    layers: Mapping[str, Any], modules: Iterable[Any], split: HeadSplit, tensor_parallel: int
) -> str:
    """Why the loaded model's heads are not where `split` has them; empty if they are.

    The configuration does not tell it: some models have layers with fewer KV heads than it says.
    `layers` are those with a KV cache, `modules` all of the model.
    """
    if not split.by_heads or split.parts == 1:  # whole blocks: no head is cut off
        return ""
    caches = [layer for layer in layers.values() if hasattr(layer, "impl")]
    for layer in caches:
        name = type(layer.impl).__name__
        if name not in BACKENDS:
            return f"kv_head_parts: it is not known how {name} packs heads; remove the setting"
    if tensor_parallel == 1:
        return ""
    projections = [module for module in modules if hasattr(module, "num_kv_head_replicas")]
    if len(projections) < len(caches) or any(
        module.num_kv_head_replicas != split.replicas for module in projections
    ):
        return (
            "kv_head_parts: this model's layers do not say, or not alike, how their KV heads are "
            "divided among ranks; remove the setting"
        )
    return ""
