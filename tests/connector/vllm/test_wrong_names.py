"""Engines whose KV differ share nothing, whatever makes it differ.

Each case is a pair of engines of one model's name, of which the first has filled the pool. Without
the field that keeps them apart, the second one answers every prompt of these wrongly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpool_engines import whole_files
from tests.connector.vllm.helpers import Engine, Logs, Models, Running, prompt, transfer
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(400)

#: They share nothing with each other, so that no engine finds a prefix in its own cache.
PROMPTS = [prompt(number, 300, 0) for number in range(200, 203)]
WARM_UP = prompt(209, 40, 0)
#: Tokens of the whole blocks of each.
WHOLE = 288


class Sequence:
    """Engines one after the other, in one process that imports vLLM once."""

    def __init__(self, log: Path, pool: LocalPool) -> None:
        self.log = log
        self.filled: set[str] = set()  # tenants whose first engine has run
        self._pool = pool
        self._engine: Engine | None = None

    def run(
        self, model: Path, *, tenant: str = "", adapter: Path | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Start an engine and ask it `PROMPTS`; with a tenant it uses the pool, as that one.

        With an adapter it is asked something else before: then it has loaded the adapter.
        """
        rounds = [[WARM_UP], PROMPTS] if adapter else [PROMPTS]
        *_, answer = self.rounds(model, rounds, tenant=tenant, adapter=adapter, **arguments)
        return answer

    def rounds(
        self,
        model: Path,
        rounds: list[list[list[int]]],
        *,
        tenant: str = "",
        adapter: Path | None = None,
        settings: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Start an engine and ask it one round of prompts after the other."""
        given: dict[str, Any] = {"max_model_len": 2048, **arguments}
        if tenant:
            chosen = {"tenant": tenant, "transports": ["tcp"]}
            given["kv_transfer_config"] = transfer(self._pool.master, **chosen, **(settings or {}))
        if self._engine is None:
            self._engine = Engine(model, self.log, **given).ready()
        else:
            self._engine.start(model, **given)
        told = {"adapter": (1, str(adapter))} if adapter else {}
        answers = []
        for prompts in rounds:
            answers.append(self._engine.generate(prompts, **told))
            if settings:  # what was loaded is compared before the next load
                self._engine.forget()
        if tenant:
            self._pool.settled()
        return [{name: answer[name] for name in ("tokens", "cached")} for answer in answers]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@pytest.fixture(scope="module")
def engines(logs: Logs, shared_pool: LocalPool) -> Iterator[Sequence]:
    sequence = Sequence(logs("sequence"), shared_pool)
    yield sequence
    sequence.close()


def test_an_equal_engine_finds_everything(model: Models, engines: Sequence) -> None:
    """The other cases would pass as well if engines never shared anything."""
    folder = model(layers=2)
    first = engines.run(folder, tenant="qwen3")
    engines.filled.add("qwen3")
    second = engines.run(folder, tenant="qwen3", max_model_len=4096, max_num_seqs=4)
    assert first["tokens"] == second["tokens"]
    assert second["cached"] == [WHOLE] * len(PROMPTS)


def rope(**parameters: Any) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
#: What makes the KV of another engine wrong: the model, and the other engine's arguments.
OTHER_KV: dict[str, tuple[str, dict[str, Any]]] = {
    "rope theta": ("qwen3", rope(rope_type="default", rope_theta=20_000.0)),
    "experts per token": ("qwen3_moe", {"hf_overrides": {"num_experts_per_tok": 1}}),
    "yarn": ("qwen3", rope(**YARN)),
    "longrope": ("phi3", {"max_model_len": 4096}),  # the longest context chooses its factors
    "embeddings": ("qwen3", {}),  # trained: the first KiB of every tensor is equal
}


@pytest.mark.parametrize("case", OTHER_KV)
def test_an_engine_with_other_kv_finds_nothing(
    case: str, model: Models, engines: Sequence, tmp_path: Path
) -> None:
    kind, overrides = OTHER_KV[case]
    folder = other = model(kind, layers=2)
    if case == "embeddings":
        other = trained_embeddings(folder, tmp_path / folder.name)
    if kind not in engines.filled:
        engines.run(folder, tenant=kind)
        engines.filled.add(kind)
    assert engines.run(other, tenant=kind, **overrides)["cached"] == [0] * len(PROMPTS)


def trained_embeddings(folder: Path, target: Path) -> Path:
    """A copy of a model, in which the embeddings of most tokens are others."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(7)
    rows[10:] += torch.randn(rows[10:].shape, generator=generator).to(rows.dtype) * 0.2
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    whole_files.read(str(target))
    return target


def adapter(folder: Path, seed: int, layers: int = 4) -> Path:
    """A LoRA adapter for the tiny model, strong enough to change its answers."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, 8, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_of_two_adapters_one_was_replaced_on_disk(
    model: Models, running: Running, shared_pool: LocalPool, tmp_path: Path
) -> None:
    """Under its old name and path: nothing of it is found, and all of the other one elsewhere."""
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    config = transfer(shared_pool.master, tenant="lora", transports=["tcp"])
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    adapters = [(1, str(one)), (2, str(two))]
    with running(model(), kv_transfer_config=config, **lora) as engine:
        computed = [engine.generate(PROMPTS, adapter=which) for which in adapters]
        shared_pool.settled()
        engine.forget()
        loaded = [engine.generate(PROMPTS, adapter=which) for which in adapters]
        assert [one["cached"] for one in loaded] == [[WHOLE] * len(PROMPTS)] * 2
        assert [one["tokens"] for one in loaded] == [one["tokens"] for one in computed]
        adapter(two, 3)
        adapters[0] = (1, str(shutil.copytree(one, tmp_path / "elsewhere")))
        truth_engine = engine.start(model(), **lora)
        truth = [truth_engine.generate(PROMPTS, adapter=which)["tokens"] for which in adapters]
        assert truth[0] == computed[0]["tokens"]
        assert truth[1] != computed[1]["tokens"]
        engine.start(model(), kv_transfer_config=config, **lora)
        engine.generate([WARM_UP], adapter=adapters[0])  # then it has loaded them
        engine.generate([WARM_UP], adapter=adapters[1])
        answers = [engine.generate(PROMPTS, adapter=which) for which in adapters]
        assert [one["tokens"] for one in answers] == truth
        assert [one["cached"] for one in answers] == [[WHOLE] * len(PROMPTS), [0] * len(PROMPTS)]
