"""Dynamo's selection of an engine, in this process: to which one it sends what the pool has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kvpool import PoolEventKind
from kvpool.kv_events import ClearedEvent, Residency, removals, residency
from tests.routers.partners import BLOCK, GPU, SETTLE_S, Engine, Prompt, RelayedEngine, need

need("dynamo")

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

A, B = 1, 2
_START_S = 20.0


class Selection:
    """Dynamo's service, which reads the streams of two engines; that of `a` is a relay's."""

    def __init__(self) -> None:
        from dynamo.llm import SelectionService

        self._service = SelectionService(indexer_threads=1, session_affinity_ttl_secs=60)
        self.a, self.b = RelayedEngine("a"), Engine("b")
        self._asked = 0

    async def start(self) -> None:
        for number, engine in ((A, self.a), (B, self.b)):
            await self._service.upsert_worker(
                {
                    "worker_id": number,
                    "endpoint": f"http://127.0.0.1:{number}",
                    "model_name": "m",
                    "block_size": BLOCK,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {0: engine.publisher.endpoint},
                    "replay_endpoint": engine.publisher.replay_endpoint,
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 1000,
                }
            )
        until = time.monotonic() + _START_S
        while not await self._reads():
            assert time.monotonic() < until, "it reads no events"

    async def _reads(self) -> bool:
        """Whether it takes events of both: a subscription takes a moment."""
        prompt = Prompt(1)
        for engine in (self.a, self.b):
            engine.send(prompt.stored(0, 1, GPU))
        await asyncio.sleep(SETTLE_S)
        known = await self.blocks(prompt)
        return all(one["device"] == 1 for one in known.values())

    async def blocks(self, prompt: Prompt) -> dict[int, dict[str, int]]:
        """Blocks of a prompt's beginning by engine: on the device, in its host's memory as well,
        on its disk as well."""
        await asyncio.sleep(2 * SETTLE_S)
        asked = {"model_name": "m", "token_ids": prompt.tokens}
        found = (await self._service.overlap_scores(asked))["workers"]
        return {
            one["worker_id"]: {
                "device": one["device_blocks"],
                "cpu": one["host_pinned_blocks"],
                "disk": one["disk_blocks"],
            }
            for one in found
        }

    async def chosen(self, prompt: Prompt) -> tuple[int, int]:
        """The engine that it selects, and the tokens of the prompt that it expects to compute."""
        self._asked += 1
        asked = {"model_name": "m", "token_ids": prompt.tokens, "selection_id": str(self._asked)}
        found: dict[str, Any] = await self._service.select(asked)
        return found["worker_id"], found["effective_prefill_tokens"]

    def close(self) -> None:
        self._service.shutdown()
        self.a.close()
        self.b.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def selection() -> AsyncIterator[Selection]:
    one = Selection()
    try:
        await one.start()
        yield one
    finally:
        one.close()


async def test_it_selects_the_engine_whose_pool_has_the_prompt(selection: Selection) -> None:
    """On the device; when the engine has evicted it, in the pool; and then nowhere any more."""
    prompt = Prompt(8)
    selection.a.send(prompt.stored(0, 6, GPU))
    selection.b.send(prompt.stored(0, 2, GPU))
    selection.a.pool(PoolEventKind.STORED, prompt.hashes[:6])
    found = await selection.blocks(prompt)
    assert found == {A: dict.fromkeys(("device", "cpu", "disk"), 6), B: found[B]}
    assert found[B]["device"] == 2
    assert await selection.chosen(prompt) == (A, 2 * BLOCK)
    selection.a.send(*removals([(hash, None, GPU) for hash in prompt.hashes[:6]]))
    assert (await selection.blocks(prompt))[A] == {"device": 0, "cpu": 6, "disk": 6}
    engine, computed = await selection.chosen(prompt)
    assert engine == A
    assert 2 * BLOCK < computed < 6 * BLOCK  # a block in memory counts less than one on the device
    selection.a.pool(PoolEventKind.REMOVED, prompt.hashes[:6])
    assert (await selection.blocks(prompt))[A] == {"device": 0, "cpu": 0, "disk": 0}
    assert await selection.chosen(prompt) == (B, 6 * BLOCK)


@pytest.mark.parametrize(
    ("where", "known"),
    [
        (residency("plain", near=False, tier="dram"), {"device": 0, "cpu": 0, "disk": 4}),
        (residency("shared", near=False, tier="dram"), {"device": 0, "cpu": 0, "disk": 0}),
        (residency("shared", near=True, tier="nvme"), {"device": 0, "cpu": 0, "disk": 4}),
    ],
    ids=str,
)
async def test_what_it_makes_of_each_form(
    selection: Selection, where: Residency, known: dict[str, int]
) -> None:
    """Blocks on other hosts count in the form `plain` only, as in its indexer."""
    prompt = Prompt(6)
    selection.b.send(prompt.stored(0, 4, where))
    assert (await selection.blocks(prompt)).get(B, dict.fromkeys(known, 0)) == known


async def test_a_cleared_engine_is_selected_for_nothing_that_it_had(selection: Selection) -> None:
    prompt, others = Prompt(8), Prompt(4)
    selection.a.send(prompt.stored(0, 6, GPU))
    selection.b.send(prompt.stored(0, 2, GPU), others.stored(0, 4, GPU))
    await selection.blocks(prompt)
    assert (await selection.chosen(prompt))[0] == A
    selection.a.send(ClearedEvent())
    found = await selection.blocks(prompt)
    assert found.get(A, {"device": 0})["device"] == 0
    assert await selection.chosen(prompt) == (B, 6 * BLOCK)
    assert (await selection.blocks(others))[B]["device"] == 4
