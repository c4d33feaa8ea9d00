"""Real routers behind `kvpool events --engine`: an engine, and what the pool has, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvpool import PoolEventKind
from kvpool.kv_events import ClearedEvent, removals
from tests.routers.partners import (
    GPU,
    SETTLE_S,
    Indexer,
    Prompt,
    RelayedEngine,
    Router,
    dynamo_indexer,
    need,
    vllm_router,
)

need("aiohttp", "vllm_router", "dynamo")

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["static", "discovered"])
async def router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Router]:
    path = tmp_path_factory.mktemp("relayed")
    async with vllm_router(request.param, path, RelayedEngine) as running:
        yield running


def engine_of(router: Router) -> RelayedEngine:
    assert isinstance(router.a, RelayedEngine)
    return router.a


async def settled() -> None:
    await asyncio.sleep(2 * SETTLE_S)


async def asked(router: Router, prompt: Prompt) -> str:
    """Who gets such a prompt; three times the same."""
    await settled()
    answers = {await router.ask(prompt.tokens) for _ in range(3)}
    assert len(answers) == 1
    return answers.pop()


async def test_what_the_engine_evicts_the_pool_still_has(router: Router) -> None:
    engine, prompt = engine_of(router), Prompt(9)
    known = await router.remember()
    engine.send(prompt.stored(0, 8, GPU))
    router.b.send(prompt.stored(0, 4, GPU))
    engine.pool(PoolEventKind.STORED, prompt.hashes[:8])
    assert await asked(router, prompt) == "a"
    engine.send(*removals([(hash, None, GPU) for hash in prompt.hashes[:8]]))
    assert await asked(router, prompt) == "a", "0.8 of eight blocks against four"
    engine.pool(PoolEventKind.REMOVED, prompt.hashes[:8])
    assert await asked(router, prompt) == "b"
    assert await router.knows_a(known)


async def test_a_gap_makes_the_router_forget_the_device_and_not_the_pool(router: Router) -> None:
    engine, pooled, device = engine_of(router), Prompt(9), Prompt(9)
    engine.pool(PoolEventKind.STORED, pooled.hashes[:8])
    for prompt in (pooled, device):
        engine.send(prompt.stored(0, 8, GPU))
        router.b.send(prompt.stored(0, 4, GPU))
    assert [await asked(router, prompt) for prompt in (pooled, device)] == ["a", "a"]
    engine.lose(*removals([(hash, None, GPU) for hash in device.hashes[:8]]))
    engine.send(Prompt(1).stored(0, 1, GPU))
    assert [await asked(router, prompt) for prompt in (pooled, device)] == ["a", "b"]


async def test_an_engine_that_clears_is_forgotten_and_learned_again(router: Router) -> None:
    engine, prompt = engine_of(router), Prompt(9)
    engine.send(prompt.stored(0, 8, GPU))
    engine.pool(PoolEventKind.STORED, prompt.hashes[:8])
    router.b.send(prompt.stored(0, 4, GPU))
    assert await asked(router, prompt) == "a"
    engine.send(ClearedEvent())
    assert await asked(router, prompt) == "b"
    engine.send(prompt.stored(0, 8, GPU))
    assert await asked(router, prompt) == "a"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def indexer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Indexer]:
    async with dynamo_indexer(tmp_path_factory.mktemp("dynamo")) as running:
        yield running


async def test_dynamo_believes_the_same(indexer: Indexer) -> None:
    engine, prompt = RelayedEngine("a"), Prompt(4)
    await indexer.register(1, engine)
    try:
        await asyncio.sleep(1.0)
        engine.send(prompt.stored(0, 4, GPU))
        engine.pool(PoolEventKind.STORED, prompt.hashes)
        await settled()
        assert await indexer.blocks(1, prompt) == {"gpu": 4, "cpu": 4, "disk": 4}
        engine.send(*removals([(hash, None, GPU) for hash in prompt.hashes]))
        await settled()
        assert await indexer.blocks(1, prompt) == {"gpu": 0, "cpu": 4, "disk": 4}
        engine.pool(PoolEventKind.REMOVED, prompt.hashes)
        await settled()
        assert await indexer.blocks(1, prompt) == {"gpu": 0, "cpu": 0, "disk": 0}
    finally:
        await indexer.unregister(1)
        engine.close()
