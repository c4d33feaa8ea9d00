"""What people switch on: with the pool each engine answers as the same engine without one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvpool import Pool
from kvpool_connector.records.provenance import MARK_BYTES
from tests.connector.vllm.helpers import Engine, Logs, Models, Running, prompt, transfer
from tests.support.local_pool import LocalPool
from tests.support.wheel import build

pytestmark = pytest.mark.timeout(400)

#: Each is of 15 whole blocks of 32 tokens; they share nothing.
PROMPTS = [prompt(number, shared=0) for number in (400, 401)]
#: A text that repeats itself, for which a lookup in the prompt finds drafts.
REPETITIVE = [10 + (7 * i) % 50 for i in range(60)] * 8

#: Arguments of an engine, and the tokens of the whole blocks of each prompt.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "ngram": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        },
        480,
    ),
    "draft model": (
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
        480,
    ),
    # Of 15 whole blocks the last is computed anew: its drafts depend on the token behind it.
    "eagle": ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}}, 448),
    "fp8": ({"kv_cache_dtype": "fp8"}, 480),
    "blocks of 256": ({"block_size": 256}, 256),
    "fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, 480),
    "blocks of 64": ({"block_size": 64}, 448),
    "blocks of 128": ({"block_size": 128}, 384),
    "small steps": ({"max_num_batched_tokens": 64}, 480),
}
#: Those that every run tries; `make test WITH=vllm-long` runs the others.
SHORT = ("ngram", "fp8")


@pytest.fixture(scope="module")
def process(model: Models, running: Running) -> Iterator[Engine]:
    """A process in which one engine runs after the other."""
    with running(model()) as engine:
        yield engine


def _hides_weights(process: Engine) -> bool:
    """Whether kernels of this CPU pack weights out of sight: those may be others after a change.
    Where all are seen they are known to be the same ones, and their blocks are found."""
    return " weights=" in process.said


@pytest.mark.parametrize(
    "name",
    [
        name if name in SHORT else pytest.param(name, marks=pytest.mark.long)
        for name in CONFIGURATIONS
    ],
)
def test_what_was_computed_comes_back(
    name: str, model: Models, process: Engine, shared_pool: LocalPool
) -> None:
    arguments, whole = CONFIGURATIONS[name]
    if name.startswith("fp8") and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM has fp8 KV on CPUs with AVX-512 only")
    if name in ("draft model", "eagle"):
        draft = model("eagle") if name == "eagle" else model(layers=2, seed=1)
        drafts = {**arguments["speculative_config"], "model": str(draft)}
        arguments = {"speculative_config": drafts}
    prompts = [*PROMPTS, REPETITIVE[:470]] if name == "ngram" else PROMPTS
    expected = process.start(model(), **arguments).generate(prompts)["tokens"]
    config = transfer(shared_pool.master, tenant=name, transports=["tcp"])
    process.start(model(), kv_transfer_config=config, **arguments)
    computed = process.generate(prompts)
    assert computed["tokens"] == expected
    assert computed["cached"] == [0] * len(prompts)
    shared_pool.settled()
    process.forget()
    loaded = process.generate(prompts)
    assert loaded["tokens"] == expected
    assert loaded["cached"][:2] == [whole, whole]
    if name == "ngram":
        assert loaded["cached"][2] == 448
    if "speculative_config" in arguments:
        assert process.metrics()["vllm:spec_decode_num_drafts"] > 0


def test_of_a_sliding_window_only_the_end_is_loaded_and_needed(
    pool: LocalPool, model: Models, process: Engine
) -> None:
    """After the pool has lost all, a conversation's next turn saves what its engine still has."""
    first = prompt(410, 1500, 0)
    expected = process.start(model("gemma3")).generate([first])["tokens"]
    turn = first + expected[0]
    truth = process.generate([turn])["tokens"]
    config = transfer(pool.master, transports=["tcp"])
    process.start(model("gemma3"), kv_transfer_config=config)
    assert process.generate([first])["tokens"] == expected
    pool.settled()
    process.forget()
    loaded = process.generate([first])
    assert loaded["tokens"] == expected
    assert loaded["cached"] == [1472]
    (size,) = {entry.size for entry in pool.dev.servers[0].store.index.inventory()}
    # 46 blocks of the layers with full attention, 4 of those with a window of 128 tokens
    assert process.metrics()["vllm:kvpool_load_bytes"] == (46 + 4) * (size - MARK_BYTES)
    pool.settled()
    remove_all(pool)
    assert process.generate([turn])["tokens"] == truth  # its own cache has the prefix
    process.forget()  # which ends the saves
    assert 46 < pool.settled() < 2 * 46
    loaded = process.generate([turn])
    assert loaded["tokens"] == truth
    assert loaded["cached"] == [1504]


def remove_all(pool: LocalPool) -> None:
    """As a restart of a server without a disk does."""
    entries = [entry for server in pool.dev.servers for entry in server.store.index.inventory()]

    async def remove(client: Pool) -> None:
        for entry in entries:
            await client.remove(entry.index.namespace, [entry.digest])

    pool.ask(remove)
    assert pool.settled() == 0


def test_prompts_that_are_embeddings_share_with_equal_ones_only(
    model: Models, process: Engine, shared_pool: LocalPool, tmp_path: Path
) -> None:
    """Those of the same tokens as well: vLLM hashes what it was given."""
    table = load_file(model() / "model.safetensors")["model.embed_tokens.weight"]
    torch.save(table, tmp_path / "table")
    torch.save(table * 1.01, tmp_path / "other")
    config = transfer(shared_pool.master, tenant="embeddings", transports=["tcp"])
    process.start(model(), kv_transfer_config=config, enable_prompt_embeds=True)
    one, other = str(tmp_path / "table"), str(tmp_path / "other")
    computed = process.generate(PROMPTS, as_embeddings=one)
    assert computed["cached"] == [0, 0]
    shared_pool.settled()
    process.forget()
    assert process.generate(PROMPTS)["cached"] == [0, 0]
    assert process.generate(PROMPTS, as_embeddings=other)["cached"] == [0, 0]
    loaded = process.generate(PROMPTS, as_embeddings=one)
    assert loaded["cached"] == [480, 480]
    assert loaded["tokens"] == computed["tokens"]


def test_samples_sleep_and_updates_of_one_engine(
    model: Models, process: Engine, shared_pool: LocalPool, plain: Engine
) -> None:
    """Several samples of a prompt; then it sleeps; then its weights are updated without a reset, by
    vLLM and by a worker extension, and the next step finds out. They are the same weights, but on a
    CPU they are hidden and may be others: what its own cache and the pool have is not used."""
    expected = plain.generate(PROMPTS)["tokens"]
    config = transfer(shared_pool.master, tenant="one engine", transports=["tcp"])
    process.start(model(), kv_transfer_config=config)
    _share_samples(process, shared_pool, plain)

    def shares_again(told: int) -> None:
        """It answers as before from what it may still use, and finds what it has saved since."""
        before = [0 if _hides_weights(process) else 480] * 2
        answer = process.generate(PROMPTS)
        assert (answer["tokens"], answer["cached"]) == (expected, before)
        shared_pool.settled()
        process.forget()
        answer = process.generate(PROMPTS)
        assert (answer["tokens"], answer["cached"]) == (expected, [480, 480])
        assert process.said.count("the weights were changed") == told

    process.ask("sleep")
    shares_again(told=0)
    for number, by in enumerate(("vLLM", "a worker extension"), 1):
        process.ask("update", by=by)
        process.generate([prompt(777, 40, 0)])
        shares_again(told=number)


def _share_samples(process: Engine, shared_pool: LocalPool, plain: Engine) -> None:
    sampling = {"n": 3, "temperature": 0.8, "max_tokens": 40}
    expected = plain.generate(PROMPTS, **sampling)["samples"]
    assert len({tuple(one) for samples in expected for one in samples}) == 6
    assert process.generate(PROMPTS, **sampling)["samples"] == expected
    shared_pool.settled()
    process.forget()
    loaded = process.generate(PROMPTS, **sampling)
    assert loaded["samples"] == expected
    assert loaded["cached"] == [480, 480]
    # Each prompt once, in blocks of 32 KiB: the other samples wait for the first one's load
    assert process.metrics()["vllm:kvpool_load_bytes"] == 2 * 15 * 32_768


@pytest.mark.long
def test_a_wheel_is_enough(
    model: Models, logs: Logs, shared_pool: LocalPool, tmp_path: Path, plain: Engine
) -> None:
    """Installed as a user has it; its entry point alone tells vLLM the connector's name."""
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, installed, build(tmp_path)], check=True, timeout=100)
    config = transfer(shared_pool.master, tenant="wheel")
    del config["kv_connector_module_path"]
    arguments = {"installed": installed, "kv_transfer_config": config}
    with Engine(model(), logs("wheel"), **arguments) as engine:
        expected = plain.generate(PROMPTS)["tokens"]
        assert engine.ready().generate(PROMPTS)["tokens"] == expected
        assert all(Path(one).is_relative_to(installed) for one in engine.ask("sources"))
        shared_pool.settled()
        engine.forget()
        loaded = engine.generate(PROMPTS)
        assert loaded["tokens"] == expected
        assert loaded["cached"] == [480, 480]
