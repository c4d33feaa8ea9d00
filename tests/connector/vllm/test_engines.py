"""What one engine computed another one finds, and whatever goes wrong, the tokens are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import soon
from tests.connector.vllm.helpers import (
    Engine,
    Logs,
    Models,
    PoolProcess,
    Running,
    SlowServer,
    prompt,
    transfer,
)
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(400)


class RowEngine(Engine):
    module = "tests.connector.vllm.row_engine"


def test_engines_share_whether_a_block_is_one_row_or_one_for_each_layer(
    model: Models, logs: Logs, plain: Engine, reader: Engine, shared_pool: LocalPool
) -> None:
    """One loads what the other saved, both ways."""
    prompts = [prompt(number, shared=0) for number in (20, 21)]
    expected = plain.generate(prompts)["tokens"]
    config = transfer(shared_pool.master, transports=["tcp"])
    with RowEngine(model(), logs("rows"), kv_transfer_config=config) as rows:
        assert rows.ready().generate(prompts[:1])["tokens"] == expected[:1]
        assert "Using BLHNC KV cache layout" in rows.said
        reader.generate(prompts[1:])
        shared_pool.settled()
        for engine, here in ((reader, 0), (rows, 1)):
            found = engine.generate(prompts[here : here + 1])
            assert found["tokens"] == expected[here : here + 1]
            assert found["cached"] == [480]


def test_what_was_generated_returns(plain: Engine, reader: Engine, shared_pool: LocalPool) -> None:
    """The next turn contains the answer, whose blocks decoding has made, token by token."""
    first = prompt(5, shared=0)
    answer = plain.generate([first], max_tokens=40)["tokens"][0]
    second = first + answer + prompt(6, 100, 0)
    expected = plain.generate([second], max_tokens=40)
    assert reader.generate([first], max_tokens=40)["tokens"][0] == answer
    shared_pool.settled()
    reader.forget()
    loaded = reader.generate([second], max_tokens=40)
    assert loaded["cached"] == expected["cached"] == [512]
    assert loaded["tokens"] == expected["tokens"]


def test_a_swarm_reads_its_shared_prefix_once(
    plain: Engine, reader: Engine, shared_pool: LocalPool
) -> None:
    """Eight prompts arrive together, and the engine has nothing of what they share."""
    prompts = [prompt(number, 1100, 1024) for number in range(800, 808)]
    expected = plain.generate(prompts)["tokens"]
    reader.generate([prompts[0]])
    shared_pool.settled()
    reader.forget()
    before = reader.metrics()
    assert reader.generate(prompts)["tokens"] == expected
    after = reader.metrics()
    read, loads = (
        after[name] - before.get(name, 0.0)
        for name in ("vllm:kvpool_load_bytes", "vllm:kvpool_loads")
    )
    assert loads == 1
    block_bytes = 32 * 2 * 4 * 2 * 32 * 2  # tokens, K and V, layers, heads, head size, bf16
    assert read <= 1.1 * block_bytes * (1024 // 32 + 2)


def test_a_corrupted_block_is_computed_again(
    plain: Engine, reader: Engine, shared_pool: LocalPool
) -> None:
    prompts = [prompt(10, shared=0)]
    expected = plain.generate(prompts)
    assert reader.generate(prompts)["tokens"] == expected["tokens"]
    shared_pool.settled()
    assert shared_pool.corrupt() > 0
    reader.forget()
    again = reader.generate(prompts)
    assert again["tokens"] == expected["tokens"]
    assert reader.metrics()["vllm:kvpool_load_misses corrupt"] > 0


def test_a_load_that_is_late_is_computed_instead(
    plain: Engine, pool: LocalPool, model: Models, running: Running
) -> None:
    """The pool becomes so slow that nothing comes; later it is fast again, and used again."""
    prompts = [prompt(20, shared=0)]
    expected = plain.generate(prompts)
    config = transfer(pool.master, transports=["tcp"], load_timeout_s=0.5)
    with running(model(), kv_transfer_config=config) as engine:
        assert engine.generate(prompts)["tokens"] == expected["tokens"]
        pool.settled()
        pool.conditions.stalled = True
        engine.forget()
        late = engine.generate(prompts)
        assert late["tokens"] == expected["tokens"]
        assert late["cached"] == [0]
        assert late["seconds"] < 5
        pool.conditions.stalled = False
        engine.forget()
        soon(lambda: _cached(engine, prompts) == [480], 30)
        assert engine.metrics()["vllm:kvpool_loads_failed"] >= 1


def _cached(engine: Engine, prompts: list[list[int]]) -> list[int]:
    engine.forget()
    cached: list[int] = engine.generate(prompts)["cached"]
    return cached


def test_the_pool_may_be_down_die_in_mid_load_and_come_back(
    model: Models, running: Running, plain: Engine
) -> None:
    """The engine starts without it, uses it when it comes, survives kill -9, and uses it again."""
    prompts = [prompt(number) for number in range(30, 33)]
    expected = plain.generate(prompts)["tokens"]
    pool = PoolProcess()
    config = transfer(pool.master, load_timeout_s=0.2)
    try:
        with running(model(), kv_transfer_config=config) as engine:
            assert engine.generate(prompts)["tokens"] == expected
            pool.start()
            soon(lambda: _cached(engine, prompts[:1]) == [480], 30)  # saved, and found
            engine.forget()
            engine.begin("generate", prompts=prompts)
            pool.kill()
            assert engine.answer()["tokens"] == expected
            assert engine.generate(prompts)["tokens"] == expected
            pool.start()
            soon(lambda: _cached(engine, prompts[:1]) == [480], 30)
            assert engine.generate(prompts)["tokens"] == expected
    finally:
        pool.kill()


def test_a_server_killed_in_mid_load_costs_a_recompute(
    model: Models, running: Running, plain: Engine
) -> None:
    """kill -9, over so slow a link that it falls into the load for certain."""
    prompts = [prompt(40, shared=0)]
    expected = plain.generate(prompts)["tokens"]
    pool = LocalPool(servers=0)
    server = SlowServer(pool.master)
    config = transfer(pool.master, transports=["tcp"])
    try:
        with running(model(), kv_transfer_config=config) as engine:
            assert engine.generate(prompts)["tokens"] == expected
            assert pool.settled() == 15
            engine.forget()
            server.slow(100_000)  # the prompt has 500 kB
            before = server.moved
            engine.begin("generate", prompts=prompts)
            soon(lambda: server.moved > before + 128_000)
            server.kill()
            answer = engine.answer()
            assert answer["tokens"] == expected
            assert answer["cached"] == [0]
            assert engine.metrics()["vllm:kvpool_load_blocks_missing"] == 15
    finally:
        server.kill()
        pool.close()


def test_preempted_requests_come_back_from_the_pool(
    model: Models, running: Running, shared_pool: LocalPool
) -> None:
    """So few blocks that requests throw each other out, while their blocks are being saved."""
    prompts = [prompt(number, 200, 0) for number in range(50, 58)]
    small = {"num_gpu_blocks_override": 40, "max_model_len": 512}
    config = transfer(shared_pool.master, tenant="preemption")
    with running(model(), **small) as without:
        expected = without.generate(prompts, max_tokens=150)["tokens"]
    with running(model(), kv_transfer_config=config, **small) as engine:
        assert engine.generate(prompts, max_tokens=150)["tokens"] == expected
        assert engine.generate(prompts, max_tokens=150)["tokens"] == expected
        metrics = engine.metrics()
        assert metrics["vllm:num_preemptions"] > 0
        assert metrics["vllm:kvpool_hit_tokens dram"] > 0


@pytest.mark.parametrize("first", ["KVPoolConnector", "ExampleConnector"])
def test_inside_a_multi_connector(
    first: str, pool: LocalPool, model: Models, running: Running, tmp_path: Path, plain: Engine
) -> None:
    """Both orders; both save, the first one with a hit loads, without hits nobody does.

    The other one has whole prompts only: the known beginning of a new one comes from the pool."""
    prompts = [prompt(number) for number in range(60, 63)]
    expected = plain.generate(prompts)["tokens"]
    ours = transfer(pool.master)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    children = [ours, example] if first == "KVPoolConnector" else [example, ours]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    with running(model(), kv_transfer_config=config) as engine:
        assert engine.generate(prompts[:2])["tokens"] == expected[:2]
        assert pool.settled() > 0
        engine.forget()
        again = engine.generate(prompts[:2])
        assert again["tokens"] == expected[:2]
        assert again["cached"] == [480, 480]
        loaded = 2 if first == "KVPoolConnector" else 0
        assert _loads_and_hits_left(engine) == (loaded, 2 - loaded)
        engine.forget()
        begun = engine.generate(prompts[2:])
        assert begun["tokens"] == expected[2:]
        assert begun["cached"] == [352]
        assert _loads_and_hits_left(engine) == (loaded + 1, 2 - loaded)
        assert engine.generate([prompt(69, shared=0)])["cached"] == [0]


def _loads_and_hits_left(engine: Engine) -> tuple[float, float]:
    """Loads of the pool, and its hits that another connector has loaded."""
    metrics = engine.metrics()
    names = ("vllm:kvpool_loads", "vllm:kvpool_decisions not_chosen")
    loads, left = (metrics.get(name, 0) for name in names)
    return loads, left


def test_latent_attention_is_saved_and_not_loaded_where_the_engine_cannot_go_on_from_it(
    model: Models, logs: Logs, running: Running, shared_pool: LocalPool
) -> None:
    """vLLM's MLA for CPUs computes nonsense behind a prefix that it has not computed itself."""
    folder = model("deepseek_v2", layers=2)
    config = transfer(shared_pool.master)
    log = logs("deepseek_v2-refused")
    refused = Engine(folder, log, block_size=16, kv_transfer_config=config)
    config = {**config, "kv_role": "kv_producer"}
    with running(folder, block_size=16) as without:
        expected = without.generate([prompt(70)])["tokens"]
    with running(folder, block_size=16, kv_transfer_config=config) as engine:
        before = shared_pool.settled()
        assert engine.generate([prompt(70)])["tokens"] == expected
        assert shared_pool.settled() == before + 31
    with pytest.raises(AssertionError, match="the engine ended"):
        refused.ready()
    refused.close()
    assert "KVPoolConnector cannot load for this model" in log.read_text()


def test_sessions_and_hints_reach_the_pool(reader: Engine, shared_pool: LocalPool) -> None:
    prompts = [prompt(90, shared=0)]
    reader.generate(prompts, params={"session_id": "a chat", "resume_in_s": 30.0})
    shared_pool.settled()
    (server,) = shared_pool.dev.servers
    soon(lambda: server.store.extents.policy.figures.get("hints_accepted", 0) > 0)
    bad = reader.generate(prompts, params={"session_id": 7, "resume_in_s": "soon"})
    assert bad["finish"] == ["length"]
    assert reader.metrics()["vllm:kvpool_bad_hints"] == 1


def test_an_engine_in_its_users_process_clears_its_cache_at_once(
    plain: Engine, model: Models, running: Running, shared_pool: LocalPool
) -> None:
    """It does not step when its requests have ended, and their last blocks are being saved then: in
    the first step, in the step of the last token, and in one between. It serves as before.

    After a reset of the connector, too: where that sees all weights, it sees that they are the same
    ones, and their blocks are found again. Kernels of some CPUs hide them, and nothing is."""
    prompts = [prompt(96, shared=0)]
    config = transfer(shared_pool.master, tenant="clear")
    with running(model(), kv_transfer_config=config) as engine:
        engine.generate(prompts)
        answer = engine.ask("clear", lengths=[1, 4, 17, 18, 33], prompts=prompts)
        engine.forget(connector=True)
        hidden = " weights=" in engine.said
        assert engine.generate(prompts)["cached"] == [0 if hidden else 480]
    assert answer["resets"] == [True] * 5
    assert answer["cached"] == [480]  # all blocks were saved, and nothing else could have them
    assert answer["tokens"] == plain.generate(prompts)["tokens"]
