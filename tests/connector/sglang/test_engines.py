"""Real SGLang engines that share a pool: its scheduler, radix tree and HiCache, on a CPU.

What an engine's GPU kernels do is done by `stand_ins`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang 0.5.23: make test WITH=sglang", allow_module_level=True)

from examples import tiny_model
from tests.conftest import soon
from tests.connector.vllm.helpers import Engine, prompt
from tests.support.local_pool import LocalPool
from tests.support.programs import free_port

pytestmark = pytest.mark.timeout(400)  # an engine takes half a minute to start

#: With 4 pages in common: SGLang loads only where 256 tokens or more are to come.
PROMPTS = [prompt(number, shared=140) for number in range(3)]
#: Whole pages of a prompt of 500 tokens; the page with its last token is computed.
WHOLE = 480


class SglangEngine(Engine):
    module = "tests.connector.sglang.engine"

    def forget(self, **told: Any) -> None:
        """SGLang refuses while it saves."""
        soon(lambda: self.ask("forget", **told))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    made = LocalPool()
    yield made
    made.close()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., SglangEngine]]:
    """Begins an engine; several begin at the same time."""
    engines: list[SglangEngine] = []

    def start(master: str = "", **arguments: Any) -> SglangEngine:
        log = tmp_path / f"engine{len(engines)}.log"
        storage = arguments.pop("storage", {})
        if master:
            arguments["storage"] = {"masters": [master], **storage}
        engines.append(SglangEngine(arguments.pop("model", model), log, **arguments))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def truth(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What an engine answers that has no pool and no HiCache."""
    with SglangEngine(model, tmp_path_factory.mktemp("plain") / "log").ready() as engine:
        answers: list[list[int]] = engine.generate(PROMPTS)["tokens"]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_a_fresh_process_loads_what_another_has_computed(
    start: Callable[..., SglangEngine], pool: LocalPool, truth: list[list[int]], layout: str
) -> None:
    writer, reader = (start(pool.master, hicache_mem_layout=layout) for _ in range(2))
    assert writer.ready().generate(PROMPTS)["tokens"] == truth
    assert pool.settled() == 15 + 11 + 11
    answer = reader.ready().generate(PROMPTS)
    assert answer["tokens"] == truth
    assert answer["cached"] == [WHOLE] * 3


def test_two_salts_and_two_models_share_nothing(
    start: Callable[..., SglangEngine],
    pool: LocalPool,
    truth: list[list[int]],
    model: Path,
    tmp_path: Path,
) -> None:
    """Another model under the same name, too: a directory's content changes, its path stays."""
    path = tiny_model.make(tmp_path / "named", "qwen3")
    writer = start(pool.master, model=path).ready()
    writer.generate(PROMPTS[:1], salt="a")
    assert pool.settled() == 15
    salted = [writer.generate(PROMPTS[:1], salt=salt) for salt in ("b", None)]
    assert [answer["cached"] for answer in salted] == [[0], [0]]
    assert {tuple(answer["tokens"][0]) for answer in salted} == {tuple(truth[0])}
    stored = pool.settled()
    assert stored == 45
    writer.close()

    from safetensors.torch import load_file, save_file

    weights = path / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][::2] *= 2
    save_file(tensors, weights, metadata={"format": "pt"})
    other = start(pool.master, model=path).ready()
    assert other.generate(PROMPTS[:1], salt="a")["cached"] == [0]
    assert pool.settled() == stored + 15


def test_weights_that_change_in_place_end_sharing(
    start: Callable[..., SglangEngine], pool: LocalPool, model: Path, truth: list[list[int]]
) -> None:
    engine = start(pool.master).ready()
    assert engine.generate(PROMPTS[:1])["tokens"] == truth[:1]
    stored = pool.settled()
    assert engine.ask("update_weights", path=str(model))
    engine.forget()
    answer = engine.generate(PROMPTS)
    assert answer["tokens"] == truth
    assert answer["cached"][0] == 0
    assert pool.settled() == stored
    assert engine.log.read_text().count("the weights were changed in place") == 1


def test_answers_stay_right_while_the_pool_ends_and_comes_back(
    start: Callable[..., SglangEngine], tmp_path: Path, truth: list[list[int]]
) -> None:
    """It is not there when the engine starts, comes, is killed in the middle, and comes back."""
    port = free_port()
    command = [sys.executable, "-m", "kvpool", "dev", "--bind", f"127.0.0.1:{port}"]
    engine = start(f"127.0.0.1:{port}").ready()
    assert engine.generate(PROMPTS)["tokens"] == truth
    assert engine.log.read_text().count("WARNING: kvpool") <= 1
    for _ in range(2):
        with (tmp_path / "pool.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            cached = _until_loaded(engine, truth)
            assert cached == WHOLE
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        engine.forget()
        began = time.monotonic()
        answer = engine.generate(PROMPTS)
        assert answer["tokens"] == truth
        assert time.monotonic() - began < 20


def _until_loaded(engine: SglangEngine, truth: list[list[int]]) -> int:
    """Ask until a prompt comes from the pool; how many of its tokens."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        answer = engine.generate(PROMPTS)
        assert answer["tokens"] == truth
        time.sleep(1.0)  # its pages are saved in the background
        engine.forget()
        answer = engine.generate(PROMPTS[:1])
        assert answer["tokens"] == truth[:1]
        if answer["cached"][0]:
            return int(answer["cached"][0])
    raise AssertionError("nothing was loaded for a minute")


def test_sglangs_own_fault_injector(
    start: Callable[..., SglangEngine],
    pool: LocalPool,
    truth: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of its calls to the storage fail, and all are late: no answer changes."""
    writer = start(pool.master).ready()
    writer.generate(PROMPTS)
    stored = pool.settled()
    writer.close()
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.05")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    engine = start(pool.master).ready()
    for _ in range(4):
        assert engine.generate(PROMPTS)["tokens"] == truth
        engine.forget()
    assert pool.settled() == stored


def test_a_wrong_setting_ends_the_start_in_a_sentence(
    start: Callable[..., SglangEngine],
) -> None:
    engine = start("127.0.0.1:1", storage={"master": ["127.0.0.1:1"]})
    with pytest.raises(AssertionError, match="the engine ended"):
        engine.ready()
    assert "did you mean 'masters'" in engine.log.read_text()
