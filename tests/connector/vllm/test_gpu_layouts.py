"""The layouts of KV caches on GPUs: without one on CPU tensors of the same shapes and strides. No
engine runs.

vLLM itself makes them: a backend for GPUs customizes the spec of a layer (`customize_spec`), vLLM's
own code groups the layers, places them for a layout and allocates the cache. Without a GPU only the
device is another one. So a block that comes back here has met every stride that it meets there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvpool_connector.memory.block_memory import (
    BlockMemory,
    DeviceBlockMemory,
    DeviceStage,
    views_of,
)
from kvpool_connector.vllm_engine.config import memories_of
from kvpool_connector.vllm_plugin import register

BLOCKS, TOKENS, HEADS, SIZE = 7, 32, 2, 16
CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU


class Case(NamedTuple):
    """The specs of a model's layers, and the layouts that its backend takes (none: any)."""

    specs: dict[str, KVCacheSpec]
    layouts: tuple[KVCacheLayout, ...] = tuple(KVCacheLayout)


def backend(module: str, name: str) -> Any:
    return getattr(import_module(f"vllm.v1.attention.backends.{module}"), name)


def full(**fields: Any) -> FullAttentionSpec:
    common = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": SIZE}
    return FullAttentionSpec(**common | {"dtype": torch.bfloat16} | fields)


def latent(**fields: Any) -> MLAAttentionSpec:
    common = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 576, "head_size_v": 0}
    return MLAAttentionSpec(**common | {"dtype": torch.bfloat16} | fields)


def layers(spec: KVCacheSpec, count: int = 3) -> dict[str, KVCacheSpec]:
    return {f"model.layers.{number}.attn": spec for number in range(count)}


def of(module: str, name: str, spec: KVCacheSpec) -> Case:
    """Three layers of this backend."""
    made = backend(module, name)
    layouts = made.supported_kv_cache_layouts()
    return Case(layers(made.customize_spec(spec)), layouts or tuple(KVCacheLayout))


def flashinfer(spec: FullAttentionSpec) -> Case:
    """Its module needs the package flashinfer. What `FlashInferBackend.customize_spec` does to a
    spec for NVFP4 (vllm/v1/attention/backends/flashinfer.py, 0.32) stands here; others stay."""
    if spec.kv_quant_mode is KVQuantMode.NVFP4:
        object.__setattr__(spec, "num_head_slots", 2 * spec.num_kv_heads)
        # fp4 pairs, and a scale of fp8 for each 16 of them.
        object.__setattr__(spec, "state_content_bytes", spec.head_size // 2 + spec.head_size // 16)
    # On Blackwell the kernels want the heads outside of the tokens; elsewhere any layout.
    return Case(layers(spec))


def hybrid(*, even: bool) -> dict[str, KVCacheSpec]:
    """Full and sliding layers: with pages of equal size, or side by side in a block."""
    window = SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS if even else 2 * HEADS,
        head_size=SIZE,
        dtype=torch.bfloat16,
        sliding_window=64,
    )
    return {f"model.layers.{number}.attn": full() if number % 2 else window for number in range(4)}


FP8 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
FP8_SCALES = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD}
NVFP4 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.NVFP4}
UNEVEN = (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)  # those that vLLM allows for uneven pages

CASES: dict[str, Callable[[], Case]] = {
    "FlashAttention": lambda: of("flash_attn", "FlashAttentionBackend", full()),
    "FlashAttention fp8": lambda: of("flash_attn", "FlashAttentionBackend", full(**FP8)),
    "FlashAttention K and V of different sizes": lambda: of(
        "flash_attn_diffkv", "FlashAttentionDiffKVBackend", full(head_size_v=8)
    ),
    "FlashInfer": lambda: flashinfer(full()),
    "FlashInfer fp8": lambda: flashinfer(full(**FP8)),
    "FlashInfer nvfp4": lambda: flashinfer(full(**NVFP4)),
    "Triton": lambda: of("triton_attn", "TritonAttentionBackend", full()),
    "Triton fp8 with scales": lambda: of(
        "triton_attn", "TritonAttentionBackend", full(**FP8_SCALES)
    ),
    "Flex": lambda: of("flex_attention", "FlexAttentionBackend", full()),
    "B12x": lambda: of("b12x", "B12xPagedAttentionBackend", full()),
    "FlashMLA": lambda: of("mla.flashmla", "FlashMLABackend", latent()),
    "Triton MLA fp8 with scales": lambda: of(
        "mla.triton_mla", "TritonMLABackend", latent(**FP8_SCALES)
    ),
    "FlashMLA sparse fp8": lambda: of(
        "mla.flashmla_sparse",
        "FlashMLASparseBackend",
        latent(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656),
    ),
    "hybrid": lambda: Case(hybrid(even=True)),
    "hybrid with uneven pages": lambda: Case(hybrid(even=False), UNEVEN),
    "uneven pages in one group": lambda: Case(
        layers(full(), 2) | {"model.layers.9.attn": full(head_size=2 * SIZE)}, UNEVEN
    ),
}


def allocated(
    case: Case, layout: KVCacheLayout, device: torch.device = CPU
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """The cache as vLLM allocates it, filled with bytes that no two blocks have alike."""
    cache = CacheConfig(block_size=TOKENS)
    config = VllmConfig(cache_config=cache, device_config=DeviceConfig("cpu"))
    config.cache_config.kv_cache_layout = layout.name  # as the engine core resolves it
    sizes = {spec.page_size_bytes for spec in case.specs.values()}
    if len(sizes) > 1 and len({type(spec) for spec in case.specs.values()}) == 1:
        together = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=case.specs)
        groups = [KVCacheGroupSpec(list(case.specs), together)]
    elif len(sizes) > 1:
        of_kind: dict[KVCacheSpec, list[str]] = {}
        for name, spec in case.specs.items():
            of_kind.setdefault(spec, []).append(name)
        groups = [KVCacheGroupSpec(names, spec) for spec, names in of_kind.items()]
    else:
        groups = get_kv_cache_groups(config, case.specs)
    room = BLOCKS * 4 * sum(spec.page_size_bytes for spec in case.specs.values())
    made = get_kv_cache_config_from_groups(config, groups, room)
    assert made.num_blocks >= BLOCKS
    caches = allocate_kv_cache(made, device, layout)
    whole = everything(caches)
    whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8))
    return made, {name: group_kernel_blocks(one, made.num_blocks) for name, one in caches.items()}


def content(caches: dict[str, torch.Tensor], block: int) -> bytes:
    """What the engine's kernels see of a block, layer by layer."""
    seen = [cache[block].contiguous().view(-1).view(torch.uint8) for cache in caches.values()]
    return bytes(torch.cat(seen).cpu().numpy())


@pytest.mark.parametrize("name", CASES)
async def test_a_block_comes_back_in_every_layout_of_its_backend(name: str) -> None:
    """In place and over the device's stage; every other byte of the allocation stays as it was."""
    case = CASES[name]()
    for layout in case.layouts:
        made, caches = allocated(case, layout, DEVICE)
        for group, memory in zip(made.kv_cache_groups, memories_of(caches, made), strict=True):
            layers_of_group = {name: caches[name] for name in group.layer_names}
            assert memory.block_bytes == len(content(layers_of_group, 0)), layout
            buffers: list[torch.Tensor] = []
            views = views_of(layers_of_group, buffers)
            staged = DeviceBlockMemory(views, buffers, stage=DeviceStage(DEVICE, 5000))
            assert staged.packing == memory.packing
            await moves(memory, staged, layers_of_group, 1)
            await moves(staged, memory, layers_of_group, 3)


async def moves(
    saved: BlockMemory, loaded: BlockMemory, caches: dict[str, torch.Tensor], block: int
) -> None:
    """From `block` to block 5, and to nowhere else."""
    whole = everything(caches)
    was, before = content(caches, block), whole.clone()
    async with saved.source([block], saved.record_event()) as (source,):
        data = b"".join(source if isinstance(source, list) else [source])
    async with loaded.target([5], loaded.record_event()) as (target,):
        for piece in target if isinstance(target, list) else [target]:
            piece[:] = data[: len(piece)]
            data = data[len(piece) :]
        assert not data
    assert content(caches, 5) == was
    elsewhere = torch.ones(len(whole), dtype=torch.bool, device=whole.device)
    for cache in caches.values():
        _unmark(elsewhere, cache)
    assert torch.equal(before[elsewhere], whole[elsewhere])


def everything(caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of the allocation in which all of these lie."""
    first = next(iter(caches.values()))
    empty = torch.empty(0, dtype=torch.uint8, device=first.device)
    return empty.set_(first.untyped_storage())


def _unmark(mask: torch.Tensor, cache: torch.Tensor) -> None:
    """Where block 5 of this layer lies."""
    item = cache.element_size()
    for byte in range(item):
        shape, strides = cache.shape[1:], [stride * item for stride in cache.stride()[1:]]
        first = (cache.storage_offset() + 5 * cache.stride(0)) * item + byte
        torch.as_strided(mask, shape, strides, first).fill_(False)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
async def test_a_block_of_several_kernel_blocks(layout: KVCacheLayout) -> None:
    """Kernels may take smaller blocks than the manager, where a block of a layer is one page."""
    case = Case(layers(full()))
    made, _ = allocated(case, layout)
    caches = allocate_kv_cache(made, CPU, layout, [TOKENS // 2])
    for name, one in caches.items():
        assert one.shape[0] == 2 * made.num_blocks
        one.copy_(torch.randn(one.shape))
        caches[name] = group_kernel_blocks(one, made.num_blocks)
    assert {one.ndim for one in caches.values()} == {5}
    (memory,) = memories_of(caches, made)
    was = content(caches, 2)
    async with memory.source([2], None) as (source,), memory.target([6], None) as (target,):
        for there, piece in zip(target, source, strict=True):
            there[:] = bytes(piece)
    assert content(caches, 6) == was


def test_engines_with_different_layouts_inside_a_block_do_not_share() -> None:
    """NHD and HND are different packings; layers outside or inside of blocks are not."""
    case = Case(layers(full()))
    packings = {
        layout.name: memories_of(caches, made)[0].packing
        for layout in KVCacheLayout
        for made, caches in [allocated(case, layout)]
    }
    heads_first = {packings[name] for name in ("LBHNC", "LHBNC", "BLHNC", "BHLNC")}
    tokens_first = {packings[name] for name in ("LBNHC", "BLNHC")}
    assert len(heads_first) == len(tokens_first) == 1
    assert heads_first != tokens_first


def config_with(connector: dict[str, Any], device: str = "cuda") -> VllmConfig:
    """As vLLM parses it, on a machine with such a device."""
    config = VllmConfig(
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **connector),
    )
    config.device_config.device_type = device
    again: VllmConfig = pickle.loads(pickle.dumps(config))  # the engine is another process
    return again


ALONE = {"kv_connector": "KVPoolConnector"}
BESIDE = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {
        "connectors": [
            {**ALONE, "kv_role": "kv_both"},
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        ]
    },
}


@pytest.mark.parametrize("name", CASES)
async def test_a_block_is_one_row_where_the_backend_can(name: str) -> None:
    """vLLM chooses the layout, among those of the backend, from what the connector asks for."""
    register()
    case, config = CASES[name](), config_with(ALONE)
    possible = [layout.name for layout in case.layouts]
    chosen = resolve_kv_cache_layout(config, [possible], case.specs.values())
    assert (chosen is KVCacheLayout.BLHNC) == ("BLHNC" in possible)
    made, caches = allocated(case, chosen)
    for memory in memories_of(caches, made):
        async with memory.source([1], None) as (pieces,):
            assert (len(pieces) == 1) == ("BLHNC" in possible)


@pytest.mark.parametrize(("connector", "device"), [(ALONE, "cpu"), (BESIDE, "cuda")])
def test_an_engine_starts_that_cannot_have_it(connector: dict[str, Any], device: str) -> None:
    """vLLM refuses to start where two connectors ask for different layouts, and warns where its
    backend cannot."""
    register()
    wanted = get_kv_connector_cache_layout(config_with(connector, device))
    assert wanted == (None if connector is ALONE else "LBHNC")
