"""What vLLM pads inside of a weight's shape is zero: equal engines have equal fingerprints.

Its own code makes each weight twice, in memory that has had other contents. A kind that fails here
would cost every hit between two engines, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvpool_engines import fingerprint
from tests.support.poisoned_memory import PoisonedMemory

nvfp4 = pytest.importorskip(
    "vllm.model_executor.layers.quantization.utils.nvfp4_utils", reason="needs vLLM"
)

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.quantization.utils import (  # noqa: E402
    flashinfer_utils,
    mxfp8_utils,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: E402


def numbers(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 100 + 1).view(shape).to(dtype)


def fp8_scales(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.float32).to(torch.float8_e4m3fn)


def vocabulary() -> Sequence[torch.Tensor]:
    """Of 100 words, in room for 128."""
    with set_current_vllm_config(VllmConfig()):
        layer = VocabParallelEmbedding(100, 32, params_dtype=torch.bfloat16)
    layer.weight_loader(layer.weight, numbers(100, 32, dtype=torch.bfloat16))
    assert len(layer.weight) == 128
    return [layer.weight]


PADDED: dict[str, Callable[[], Sequence[Any]]] = {
    "nvfp4 weights": lambda: nvfp4.pad_nvfp4_weight_for_cutlass(numbers(40, 44))[:1],
    "nvfp4 scales": lambda: [nvfp4.swizzle_blockscale(fp8_scales(130, 5))],
    "mxfp8 scales": lambda: [mxfp8_utils.swizzle_mxfp8_scale(numbers(130, 5), 130, 160)],
    "nvfp4 experts": lambda: flashinfer_utils.align_fp4_moe_hidden_dim_for_fi(
        numbers(2, 64, 40), fp8_scales(2, 64, 5), numbers(2, 80, 16), fp8_scales(2, 80, 2)
    )[:4],
    "vocabulary": vocabulary,
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding

    monkeypatch.setattr(embedding, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(embedding, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_: tensor)


@pytest.mark.parametrize("kind", PADDED)
def test_padding_is_the_same_in_two_engines(kind: str) -> None:
    found = set()
    for poison in (0x11, 0xEE):
        with PoisonedMemory(poison):
            weights = [(str(number), one) for number, one in enumerate(PADDED[kind]())]
        found.add(fingerprint.memory(weights).digest)
    assert len(found) == 1
