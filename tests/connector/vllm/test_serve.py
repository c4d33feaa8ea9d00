"""`vllm serve` as an operator runs it: OpenAI API, usage, metrics, several ranks, two at once."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_two_instances import Instance, transfer
from kvpool import admin
from kvpool.ops.engines import examine_engines
from tests.connector.vllm.helpers import Engine, Logs, Models, prompt
from tests.connector.vllm.helpers import transfer as always
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(500)


#: Over tcp, so that a save takes its time.
PATIENT = {"load": "always"}


def ask(
    instance: Instance, path: str, body: dict[str, Any] | None = None, rank: int | None = None
) -> list[dict[str, Any]]:
    """The answer, or all events of an answer that is a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", instance.port, timeout=100)
    headers = {"Content-Type": "application/json"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    connection.request("POST", path, json.dumps(body or {}), headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == 200, text
    if body and body.get("stream"):
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]
    return [json.loads(text)] if text else []


def chat(instance: Instance, question: str, rank: int | None = None) -> tuple[list[str], int]:
    """Two answers that are streamed, and how many tokens of the prompt were cached."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": question}],
        "n": 2,
        "temperature": 0.8,
        "seed": 3,
        "max_tokens": 24,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answers, cached = ["", ""], 0
    for event in ask(instance, "/v1/chat/completions", body, rank):
        for choice in event["choices"]:
            answers[choice["index"]] += choice["delta"].get("content") or ""
        if usage := event.get("usage"):
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return answers, cached


def test_two_instances_of_vllm_serve_share_conversations(
    pool: LocalPool, model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both serve at once, turns alternate; `cached_tokens` in the usage says what was cached."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # it has /sleep
    config = transfer(pool.master, **PATIENT)
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
        assert all("shares blocks as: vllm/5" in finding.text for finding in described)
        assert compared.text == "share blocks"
        # A chat, whose two answers are streamed
        question = " ".join(chance.choice(["ab", "cd", "ef", "gh"]) for _ in range(300))
        answers, cached = chat(instances[0], question)
        assert cached == 0
        assert answers[0] != answers[1]
        pool.settled()
        loaded, cached = chat(instances[1], question)
        assert loaded == answers
        assert cached >= 256
        # One sleeps as soon as it has answered: vLLM waits until its blocks are saved
        late = [chance.randrange(10, 1000) for _ in range(400)]
        turn = instances[0].answer(late, 8)
        ask(instances[0], "/sleep?level=1")
        ask(instances[0], "/wake_up")
        assert instances[0].answer(late, 8).answer == turn.answer
        elsewhere = instances[1].answer(late, 8)
        assert elsewhere.pool == 384
        assert elsewhere.answer == turn.answer
    finally:
        for instance in instances:
            instance.close()


@pytest.mark.long
def test_data_parallel_ranks_share(pool: LocalPool, model: Models, tmp_path: Path) -> None:
    """Each is an engine of its own, behind one address, and the pool is all that they share."""
    config = transfer(pool.master, **PATIENT)
    ranks = ("--data-parallel-size", "2")
    instance = Instance("DP", model(), tmp_path / "dp.log", config, arguments=ranks)
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"prompt": prompt(160, shared=0), "return_token_ids": True}
    try:
        instance.ready()
        (computed,) = ask(instance, "/v1/completions", body, rank=0)
        assert not (computed["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
        blocks = pool.settled()
        assert blocks == 15
        (loaded,) = ask(instance, "/v1/completions", body, rank=1)
        assert loaded["usage"]["prompt_tokens_details"]["cached_tokens"] == 480
        assert loaded["choices"][0]["token_ids"] == computed["choices"][0]["token_ids"]
        assert pool.settled() == blocks
        ((name, _),) = pool.ask(lambda client: admin(client).namespaces())
        assert name.parts == 1
    finally:
        instance.close()


@pytest.mark.long
def test_tensor_parallel_ranks_have_their_parts(pool: LocalPool, model: Models, logs: Logs) -> None:
    prompts = [prompt(number) for number in range(110, 112)]
    two = {"tensor_parallel_size": 2}
    config = always(pool.master)
    with Engine(model(), logs("tp-first"), kv_transfer_config=config, **two) as first:
        expected = first.ready().generate(prompts)
        pool.settled()
        (name, _), *_ = pool.ask(lambda client: admin(client).namespaces())
        assert name.parts == 2
        first.forget()
        again = first.generate(prompts)
        assert again["cached"] == [480, 480]
        assert again["tokens"] == expected["tokens"]
