"""Engines as people start them: compiled ahead of time. Equal models share, whatever else differs.

Those of the other tests are compiled when they run, which starts in half of the time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvpool_engines import whole_files
from tests.connector.vllm.helpers import Engine, Logs, Models, prompt, transfer
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(600)

PROMPTS = [prompt(number, shared=0) for number in (700, 701)]
#: Tokens of the 15 whole blocks of each.
WHOLE = [480, 480]


@pytest.fixture(scope="module")
def process(model: Models, logs: Logs, shared_pool: LocalPool) -> Iterator[Engine]:
    """A compiled engine that has saved the prompts; others start in its process."""
    compiled = {"VLLM_USE_AOT_COMPILE": "1"}
    with Engine(model(), logs("compiled"), environment=compiled, **pooled(shared_pool)) as engine:
        assert engine.ready().generate(PROMPTS)["cached"] == [0, 0]
        shared_pool.settled()
        yield engine


@pytest.fixture(scope="module")
def expected(model: Models, process: Engine) -> list[list[int]]:
    """What an engine without a pool answers."""
    tokens: list[list[int]] = process.start(model()).generate(PROMPTS)["tokens"]
    return tokens


def pooled(pool: LocalPool) -> dict[str, Any]:
    return {"kv_transfer_config": transfer(pool.master, tenant="compiled", transports=["tcp"])}


def rearranged(model: Path, target: Path) -> Path:
    """The same model elsewhere: its tensors in two files, and settings that no layer reads."""
    shutil.copytree(model, target)
    whole = target / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, target / file, {"format": "pt"})
    whole.unlink()
    index = {"weight_map": {name: file for file, inside in files.items() for name in inside}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((target / "config.json").read_text())
    config |= {"eos_token_id": 3, "use_cache": False}
    (target / "config.json").write_text(json.dumps(config))
    whole_files.read(str(target))
    return target


SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 256, "max_model_len": 2048}
#: What another engine of the same model is started with.
OTHERS: dict[str, dict[str, Any]] = {
    "again": {},
    "for other sizes": SMALL,
    "elsewhere, in two files": {},
    # Their kernels differ by rounding.
    "eager": {"enforce_eager": True},
    "with adapters allowed": {"enable_lora": True, "max_lora_rank": 8},
}


@pytest.mark.parametrize("case", OTHERS)
def test_engines_of_equal_models_share(
    case: str,
    model: Models,
    process: Engine,
    shared_pool: LocalPool,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    """What vLLM compiles lies elsewhere, as on another host."""
    folder = rearranged(model(), tmp_path / "elsewhere") if "two files" in case else model()
    compiled = {"environment": {"VLLM_CACHE_ROOT": str(tmp_path)}}
    process.start(folder, **OTHERS[case], **compiled, **pooled(shared_pool))
    loaded = process.generate(PROMPTS)
    assert loaded["cached"] == WHOLE
    assert loaded["tokens"] == expected or case in list(OTHERS)[3:]
