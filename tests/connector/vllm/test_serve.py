"""`vllm serve` as an operator runs it: OpenAI API, usage, metrics, several ranks, two at once."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.vllm_two_instances import Instance, transfer
from kvpool.ops.engines import examine_engines
from tests.connector.vllm.helpers import Engine, closing, prompt
from tests.connector.vllm.helpers import transfer as always
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(500)


def test_two_instances_of_vllm_serve_share_a_conversation(
    model: Callable[..., Path], tmp_path: Path
) -> None:
    """Both serve at once, turns alternate; `cached_tokens` in the usage says what was cached."""
    pool = LocalPool()
    config = transfer(pool.master, load="always", lookup_timeout_s=2.0)
    instances = [Instance(name, model(), tmp_path / f"{name}.log", config) for name in "AB"]
    chance = random.Random(3)
    try:
        for instance in instances:
            instance.ready()
        history: list[int] = []
        for number in range(4):
            history += [chance.randrange(10, 1000) for _ in range(200)]
            turn = instances[number % 2].answer(history, 24)
            history += turn.answer
            if number:
                assert turn.pool >= 160
                assert turn.own + turn.pool >= (len(history) - 24 - 200 - 32) // 32 * 32
            pool.settled()
        again = [instance.answer(history[:400], 8).answer for instance in instances]
        assert again[0] == again[1]
        metrics = instances[1].metrics()
        assert metrics["vllm:kvpool_hit_tokens_total"] >= 160
        assert metrics["vllm:kvpool_hooks_total"] > 0
        average_s = metrics["vllm:kvpool_hook_seconds_total"] / metrics["vllm:kvpool_hooks_total"]
        assert average_s < 0.005
        urls = [f"127.0.0.1:{instance.port}" for instance in instances]
        *described, compared = asyncio.run(examine_engines(urls))
        assert all("shares blocks as: vllm/2" in finding.text for finding in described)
        assert compared.text == "share blocks"
    finally:
        for instance in instances:
            instance.close()
        pool.close()


def test_tensor_parallel_ranks_each_have_their_part(
    model: Callable[..., Path], logs: Callable[[str], Path]
) -> None:
    prompts = [prompt(number) for number in range(110, 112)]
    pool = LocalPool()
    two = {"tensor_parallel_size": 2}
    config = always(pool.master)
    try:
        with Engine(model(), logs("tp-first"), kv_transfer_config=config, **two) as first:
            expected = first.ready().generate(prompts)
            pool.settled()
            (name, _), *_ = pool.ask(lambda client: client.namespaces())
            assert name.parts == 2
            first.forget()
            again = first.generate(prompts)
            assert again["cached"] == [480, 480]
            assert again["tokens"] == expected["tokens"]
    finally:
        pool.close()


def test_two_engines_share_agentic_traffic(
    model: Callable[..., Path], logs: Callable[[str], Path]
) -> None:
    """Conversations with one system prompt, whose turns go round robin over two engines at once."""
    pool = LocalPool()
    config = always(pool.master)
    shared = [Engine(model(), logs(f"agent-{n}"), kv_transfer_config=config) for n in range(2)]
    alone = [Engine(model(), logs(f"alone-{n}")) for n in range(2)]
    try:
        with closing(*shared, *alone):
            with_pool, without = _converse(shared, pool), _converse(alone, None)
    finally:
        pool.close()
    assert with_pool["answers"] == without["answers"]
    print(
        f"hit rate {with_pool['hits']:.3f} with the pool, {without['hits']:.3f} without; turn "
        f"{with_pool['seconds']:.3f} s with, {without['seconds']:.3f} s without (medians)"
    )
    assert with_pool["hits"] > without["hits"] + 0.1


def _converse(engines: list[Engine], pool: LocalPool | None) -> dict[str, float | list[list[int]]]:
    """Four conversations of five turns."""
    chance = random.Random(11)
    system = [chance.randrange(10, 1000) for _ in range(256)]
    histories = [list(system) for _ in range(4)]
    cached = prompts = 0
    seconds, answers = [], []
    for turn in range(5):
        for number, history in enumerate(histories):
            history += [chance.randrange(10, 1000) for _ in range(chance.randrange(60, 200))]
            answer = engines[(turn + number) % 2].generate(
                [history], max_tokens=16, params={"session_id": f"agent {number}"}
            )
            prompts += len(history)
            cached += answer["cached"][0]
            seconds.append(answer["seconds"])
            answers.append(answer["tokens"][0])
            history += answer["tokens"][0]
        if pool is not None:
            pool.settled()
    return {"hits": cached / prompts, "seconds": statistics.median(seconds), "answers": answers}
