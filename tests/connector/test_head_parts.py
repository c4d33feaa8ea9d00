"""Blocks in parts by KV heads: whatever the number of ranks, each gets exactly its heads."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError
from kvpool_connector import settings
from kvpool_connector.identity.naming import EngineInfo, EngineNames
from kvpool_connector.memory.block_memory import DeviceBlockMemory, HostBlockMemory, views_of
from kvpool_connector.memory.kv_layout import (
    LayerView,
    UnsupportedLayout,
    head_parts,
    layer_slices,
    slice_runs,
)
from kvpool_connector.records.messages import ModelInfo, WorkerInfo
from kvpool_connector.records.values import CacheGroup
from kvpool_connector.vllm_engine.head_split import HeadSplit, LayerHeads, divide, why_undivided

BLOCKS = 3
#: The inner dimensions of vLLM's layouts in memory, of [layers, blocks, heads, tokens, content].
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def empty(shape: tuple[int, ...], order: tuple[int, ...]) -> list[torch.Tensor]:
    """One cache for each layer, [blocks, heads, tokens, content], lying in memory as `order`."""
    memory = torch.zeros([shape[one] for one in order], dtype=torch.int32)
    whole = memory.permute([order.index(one) for one in range(5)])
    return list(whole)


def filled(shape: tuple[int, ...], order: tuple[int, ...], first_head: int) -> list[torch.Tensor]:
    """A rank's caches; each value tells its layer, block, head of the model, token and place."""
    axes = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
    layer, block, head, token, content = axes
    numbers = (((layer * 8 + block) * 64 + first_head + head) * 16 + token) * 16 + content
    return [cache.copy_(of) for cache, of in zip(empty(shape, order), numbers, strict=True)]


def memory_of_rank(kind: type, layers: list[torch.Tensor], parts: int) -> Any:
    buffers: list[torch.Tensor] = []
    views = views_of({f"layers.{n}": layer for n, layer in enumerate(layers)}, buffers)
    return kind(views, buffers, parts)


@hypothesis.settings(derandomize=True, deadline=None)
@given(
    order=st.sampled_from(sorted(ORDERS)),
    heads_per_part=st.integers(1, 3),
    sizes=st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (1, 8)]),
    factor=st.integers(1, 2),
    layers=st.integers(1, 3),
    tokens=st.integers(1, 3),
    content=st.integers(1, 3),
    on_device=st.booleans(),
)
async def test_every_rank_gets_its_heads_of_what_ranks_of_another_size_wrote(
    order: str,
    heads_per_part: int,
    sizes: tuple[int, int],
    factor: int,
    layers: int,
    tokens: int,
    content: int,
    on_device: bool,
) -> None:
    parts = max(sizes) * factor
    heads = parts * heads_per_part
    written: dict[int, bytes] = {}
    packings = set()
    kind = DeviceBlockMemory if on_device else HostBlockMemory
    for rank in range(sizes[0]):
        shape = (layers, BLOCKS, heads // sizes[0], tokens, content)
        memory = memory_of_rank(
            kind, filled(shape, ORDERS[order], rank * shape[2]), parts // sizes[0]
        )
        packings.add(memory.packing)
        for part in range(memory.parts):
            async with memory.source([1], memory.record_event(), part) as (block,):
                pieces = block if isinstance(block, list) else [block]
                written[rank * memory.parts + part] = b"".join(pieces)
    assert sorted(written) == list(range(parts))
    for rank in range(sizes[1]):
        shape = (layers, BLOCKS, heads // sizes[1], tokens, content)
        found = empty(shape, ORDERS[order])
        memory = memory_of_rank(kind, found, parts // sizes[1])
        packings.add(memory.packing)
        for part in range(memory.parts):
            async with memory.target([2], None, part) as (block,):
                left = written[rank * memory.parts + part]
                assert len(left) * memory.parts == memory.block_bytes
                for piece in block if isinstance(block, list) else [block]:
                    piece[:], left = left[: len(piece)], left[len(piece) :]
        wanted = filled(shape, ORDERS[order], rank * shape[2])
        for layer, expected in zip(found, wanted, strict=True):
            assert torch.equal(layer[2], expected[1])
            assert not layer[:2].any()  # no other block has changed
    assert len(packings) == 1  # or they would not share a name


def test_the_kernels_own_blocks_inside_a_block_are_divided_too() -> None:
    view = LayerView("l", (4, 2, 8, 16, 32), (8192, 4096, 512, 32, 1), 2, 0, 0)
    first, second = head_parts([view], 2)
    assert first[0].shape == second[0].shape == (4, 2, 4, 16, 32)
    assert (first[0].offset, second[0].offset) == (0, 4 * 512)


def test_pieces_at_equal_distances_are_one_run() -> None:
    """Half of the heads of 16 tokens is 16 pieces, which a device copies at once."""
    view = LayerView("l", (4, 8, 16, 32), (4096, 32, 256, 1), 2, 0, 0)
    for part, of_part in enumerate(head_parts([view], 2)):
        assert slice_runs(layer_slices(of_part)) == [(0, 8192, part * 256, 256, 16, 512)]


@pytest.mark.parametrize("shape", [(4, 6, 2, 2), (4, 2, 2)])
def test_heads_that_make_no_equal_parts_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedLayout, match="4 equal parts"):
        head_parts([LayerView("l", shape, tuple(range(len(shape))), 2, 0, 0)], 4)


# --- who has which part -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "ranks", "heads", "expected"),
    [
        (4, 1, 8, (4, 4, 1)),
        (4, 2, 8, (4, 2, 1)),
        (4, 4, 8, (4, 1, 1)),
        (8, 8, 8, (8, 1, 1)),
        (2, 4, 2, (2, 1, 2)),  # ranks 0 and 1 have the same head
        (1, 4, 1, (1, 1, 4)),
        (1, 1, 8, (1, 1, 1)),
    ],
)
def test_each_part_belongs_to_one_rank_or_to_its_replicas(
    parts: int, ranks: int, heads: int, expected: tuple[int, int, int]
) -> None:
    local = max(1, heads // ranks)
    assert divide(parts, ranks, [LayerHeads(local)], heads) == (*expected, True)


@pytest.mark.parametrize(
    ("parts", "ranks", "layers", "why"),
    [
        (3, 1, [LayerHeads(8)], "8 KV heads make no 3"),
        (2, 4, [LayerHeads(2)], "4 tensor parallel ranks"),
        (2, 2, [LayerHeads(4), LayerHeads(1, 1)], "different ranks|make no"),
        (1, 2, [LayerHeads(4)], "2 tensor parallel ranks"),
        (2, 3, [LayerHeads(1)], "3 ranks share 2"),
    ],
)
def test_parts_that_ranks_cannot_have_are_refused(
    parts: int, ranks: int, layers: list[LayerHeads], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        divide(parts, ranks, layers, 2)


def test_latent_attention_is_one_part_that_one_rank_writes() -> None:
    assert divide(1, 4, [LayerHeads(1, 1)], 128) == (1, 1, 4, True)


class CPUAttentionBackendImpl:
    pass


class Layer:
    def __init__(self, impl: object) -> None:
        self.impl = impl


class Projection:
    def __init__(self, replicas: int) -> None:
        self.num_kv_head_replicas = replicas


SPLIT = HeadSplit(2, 1, 1, True)
KNOWN = {"l": Layer(CPUAttentionBackendImpl())}


@pytest.mark.parametrize(
    ("layers", "modules", "why"),
    [
        (KNOWN, [Projection(1)], ""),
        ({"l": Layer(object())}, [Projection(1)], "how object packs heads"),
        (KNOWN, [], "do not say"),
        (KNOWN, [Projection(2)], "do not say"),  # fewer heads than the configuration says
    ],
)
def test_a_model_that_divides_its_heads_otherwise_shares_nothing(
    layers: dict[str, Layer], modules: list[Projection], why: str
) -> None:
    found = why_undivided(layers, modules, SPLIT, 2)
    assert why in found
    assert bool(why) == bool(found)


def test_without_the_setting_nothing_is_asked_of_the_model() -> None:
    assert not why_undivided({"l": Layer(object())}, [], HeadSplit(2, 1, 1, False), 2)


# --- one name for all sizes -----------------------------------------------------------------------


def name_of(weights: list[str], stage_ranks: int) -> str:
    """Of an engine whose ranks have found these weights, in pipeline stages of so many ranks."""
    names = EngineNames(
        EngineInfo(
            groups=(CacheGroup(16, 1),),
            kinds=("full",),
            fields={},
            seed=lambda: "0",
            ranks=len(weights),
            parts=4,
            blocks=8,
            stage_ranks=stage_ranks,
        )
    )
    for rank, found in enumerate(weights):
        names.on_info(WorkerInfo(rank, ModelInfo(weights=found, packing="p"), (64,), 1))
    (namespace,) = names.namespaces
    return namespace.name


def test_ranks_that_agree_have_the_name_of_one_rank() -> None:
    assert name_of(["w"], 1) == name_of(["w", "w"], 2) == name_of(["w"] * 4, 4)
    assert name_of(["a", "b"], 1) == name_of(["a", "a", "b", "b"], 2)  # two pipeline stages
    assert name_of(["a", "b"], 1) != name_of(["a", "b"], 2)
    assert name_of(["a", "b"], 2) != name_of(["b", "a"], 2)
    assert name_of(["w"], 1) != name_of(["w", "w"], 1)
    assert name_of(["w"], 0) != name_of(["w", "w"], 0)  # without the setting each counts
    assert name_of(["a", "b"], 0) != name_of(["b", "a"], 0)


def test_parts_of_heads_need_a_name_for_the_weights() -> None:
    with pytest.raises(ConfigError, match="kv_head_parts needs revision"):
        settings.parse({"kv_head_parts": 2})
    assert settings.parse({"kv_head_parts": 2, "revision": "v1"}).kv_head_parts == 2
