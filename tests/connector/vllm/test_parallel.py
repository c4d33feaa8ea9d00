"""Engines of different parallel sizes share blocks, and each computes what it computes alone."""

from __future__ import annotations

import pytest

from kvpool import admin
from tests.connector.vllm.helpers import Engine, Logs, Models, closing, prompt, transfer
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(400)

#: Ranks add up in another order: with bf16 the greedy tokens of two sizes may differ anyway.
EXACT = {"dtype": "float32"}


def test_pipeline_stages_share_with_equals_only(
    model: Models, logs: Logs, plain: Engine, reader: Engine, shared_pool: LocalPool
) -> None:
    """Two stages load what two have saved. The name of one stage's blocks is another one."""
    prompts = [prompt(number, shared=0) for number in (150, 151)]
    expected = plain.generate(prompts)["tokens"]
    assert reader.generate(prompts)["tokens"] == expected
    shared_pool.settled()
    stages = {
        "pipeline_parallel_size": 2,
        "worker_cls": "tests.connector.vllm.pipeline_worker.PipelineWorker",
    }
    config = transfer(shared_pool.master)
    with Engine(model(), logs("pp-2"), kv_transfer_config=config, **stages) as two:
        computed = two.ready().generate(prompts)
        assert computed["cached"] == [0, 0]
        assert computed["tokens"] == expected
        shared_pool.settled()
        two.forget()
        loaded = two.generate(prompts)
        assert loaded["cached"] == [480, 480]
        assert loaded["tokens"] == expected
    names = [name for name, _ in shared_pool.ask(lambda client: admin(client).namespaces())]
    assert [name.parts for name in names if " pp=2 " in name.name] == [2]


def test_what_one_size_of_tensor_parallelism_wrote_the_other_reads(
    pool: LocalPool, model: Models, logs: Logs
) -> None:
    """One rank writes and two read, two write and one reads; the truth is an engine alone."""
    config = transfer(pool.master, kv_head_parts=2, revision="one", load_timeout_s=30)
    alone = Engine(model(), logs("parallel-alone"), **EXACT)
    one = Engine(model(), logs("tp-1"), kv_transfer_config=config, **EXACT)
    two = Engine(model(), logs("tp-2"), kv_transfer_config=config, tensor_parallel_size=2, **EXACT)
    early = [prompt(number, shared=0) for number in (140, 141)]
    late = [prompt(number, shared=0) for number in (142, 143)]
    with closing(alone, one, two):
        expected = alone.generate([*early, *late])["tokens"]
        assert one.generate(early)["tokens"] == expected[:2]
        pool.settled()
        loaded = two.generate(early)
        assert loaded["cached"] == [480, 480]
        assert loaded["tokens"] == expected[:2]
        assert two.generate(late)["tokens"] == expected[2:]
        pool.settled()
        loaded = one.generate(late)
        assert loaded["cached"] == [480, 480]
        assert loaded["tokens"] == expected[2:]
        ((name, _),) = pool.ask(lambda client: admin(client).namespaces())
        assert name.parts == 2
