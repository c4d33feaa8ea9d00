"""What the connector refuses when an engine starts, each with one sentence. No engine runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.utils.hashing import sha256_cbor, xxhash_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpool import ConfigError
from kvpool_connector import settings
from kvpool_connector.vllm_engine.config import engine_of
from kvpool_engines import namespace
from tests.connector.vllm.helpers import Models, transfer

BLOCK = 32
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=BLOCK, **SHAPE)
#: Kernels for CPUs keep such scales where no block shows them.
WITHOUT_ROOM = FullAttentionSpec(
    block_size=BLOCK, **SHAPE, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD
)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))

Describe = Callable[..., Any]


@pytest.fixture
def engine(model: Models) -> Describe:
    """The engine as the scheduler half sees it, with these KV cache groups."""

    def describe(*specs: Any, **parallel: int) -> Any:
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.kv_cache_layout = "LBHNC"
        config = VllmConfig(
            model_config=ModelConfig(model=str(model()), dtype="bfloat16"),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**transfer("127.0.0.1:1")),
        )
        for name, size in parallel.items():
            setattr(config.parallel_config, name, size)
        groups = [KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
        caches = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
        return engine_of(config, caches, settings.Settings())

    return describe


@pytest.mark.parametrize(
    ("specs", "parallel", "sentence"),
    [
        ([FULL], {"decode_context_parallel_size": 2}, "decode context parallelism \\(2\\)"),
        ([FULL], {"prefill_context_parallel_size": 2}, "prefill context parallelism \\(2\\)"),
        ([MAMBA], {}, "Mamba layers: their state is no block"),
        ([FULL, MAMBA], {}, "Mamba layers: their state is no block"),
        ([WITHOUT_ROOM], {}, "INT8_PER_TOKEN_HEAD here: each token has a scale"),
        (
            [UniformTypeKVCacheSpecs(BLOCK, {"layer.0": FULL, "layer.1": WITHOUT_ROOM})],
            {},
            "INT8_PER_TOKEN_HEAD here: each token has a scale",
        ),
    ],
    ids=["DCP", "PCP", "Mamba", "Mamba and attention", "scales", "scales in some layers"],
)
def test_an_engine_whose_blocks_cannot_be_shared(
    engine: Describe, specs: list[Any], parallel: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^KVPoolConnector does not support .*{sentence}"):
        engine(*specs, **parallel)


@pytest.mark.parametrize(
    ("window", "blocks"), [(128, 4), (129, 4), (130, 5), (33, 1), (2, 1), (1, 1)]
)
def test_so_many_blocks_of_a_window_are_needed(engine: Describe, window: int, blocks: int) -> None:
    """As many as vLLM allocates for a prefix that comes from elsewhere."""
    sliding = SlidingWindowSpec(block_size=BLOCK, **SHAPE, sliding_window=window)
    chunked = ChunkedLocalAttentionSpec(block_size=BLOCK, **SHAPE, attention_chunk_size=window)
    groups = engine(FULL, sliding, chunked).groups
    assert [group.window_blocks for group in groups] == [0, blocks, 0]
    assert [group.kept for group in groups] == [True, False, False]


def test_scales_that_blocks_have_room_for_are_no_reason(engine: Describe) -> None:
    """As vLLM's Triton kernels keep them."""
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    roomy = FullAttentionSpec(block_size=BLOCK, **SHAPE, kv_quant_mode=mode, state_content_bytes=72)
    assert engine(roomy).groups[0].block_size == BLOCK


def test_the_name_says_where_pythonhashseed_is_not_set(
    engine: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM chooses its seed when the engine's cache is made, behind the connector."""
    seed = engine(FULL).seed
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)  # what other tests have left
    for value, said in ((None, "unset"), ("7", namespace.digest("7", 8))):
        if value is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", value)
        kv_cache_utils.init_none_hash(sha256_cbor)
        assert seed() == said
    monkeypatch.delenv("PYTHONHASHSEED")
    kv_cache_utils.init_none_hash(xxhash_cbor)
    random = seed()
    kv_cache_utils.init_none_hash(xxhash_cbor)
    assert "unset" != random != seed(), "such engines share with nobody"
