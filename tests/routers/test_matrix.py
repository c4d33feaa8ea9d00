"""What real routers believe after each of our KV events, and that they never forget an engine.

vllm-router and Dynamo's indexer in processes of their own. The table is in docs/events.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import pytest
import pytest_asyncio

from kvpool.kv_events import (
    EVENTS_MAX,
    ClearedEvent,
    EventBatch,
    EventForm,
    RemovedEvent,
    Residency,
    announced,
    encode_batch,
    removals,
    residency,
)
from tests.routers.partners import (
    GPU,
    SETTLE_S,
    Engine,
    Indexer,
    Prompt,
    Router,
    dynamo_indexer,
    need,
    vllm_router,
)

need("aiohttp", "vllm_router", "dynamo")

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

#: What an event may say beside: a router must take it, and tells tenants and layouts apart by it.
FIELDS: Final[dict[str, Any]] = {
    "session_id": "conversation-1",
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
#: For each way to have a block: the credit of vllm-router, and where Dynamo has it.
BELIEVED: Final[dict[tuple[EventForm, bool, str], tuple[float, str]]] = {
    ("shared", True, "dram"): (0.8, "cpu"),
    ("shared", True, "nvme"): (0.3, "disk"),
    ("shared", False, "dram"): (0.6, ""),
    ("shared", False, "nvme"): (0.6, ""),
    ("plain", True, "dram"): (0.8, "cpu"),
    ("plain", True, "nvme"): (0.3, "disk"),
    ("plain", False, "dram"): (0.3, "disk"),
    ("plain", False, "nvme"): (0.3, "disk"),
}
KINDS: Final = {residency(form, near=near, tier=tier) for form, near, tier in BELIEVED}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["static", "discovered"])
async def router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Router]:
    async with vllm_router(request.param, tmp_path_factory.mktemp("router")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def indexer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Indexer]:
    async with dynamo_indexer(tmp_path_factory.mktemp("dynamo")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def engine(indexer: Indexer) -> AsyncIterator[Engine]:
    """An engine that Dynamo's indexer listens to."""
    one = Engine("a")
    await indexer.register(1, one)
    await asyncio.sleep(1.0)
    yield one
    await indexer.unregister(1)
    one.publisher.close()


@pytest.mark.parametrize(("kind", "believed"), BELIEVED.items(), ids=str)
async def test_vllm_router_credits_each_kind(
    router: Router, kind: tuple[EventForm, bool, str], believed: tuple[float, str]
) -> None:
    form, near, tier = kind
    known = await router.remember()
    low, high = await router.credit(residency(form, near=near, tier=tier), **FIELDS)
    assert low < believed[0] <= high
    assert await router.knows_a(known), "the router has forgotten the engine"


@pytest.mark.parametrize(("kind", "believed"), BELIEVED.items(), ids=str)
async def test_dynamo_believes_each_kind(
    indexer: Indexer, engine: Engine, kind: tuple[EventForm, bool, str], believed: tuple[float, str]
) -> None:
    form, near, tier = kind
    known, prompt = Prompt(4), Prompt(4)
    engine.send(known.stored(0, 4, GPU))
    engine.send(prompt.stored(0, 4, residency(form, near=near, tier=tier), **FIELDS))
    await asyncio.sleep(2 * SETTLE_S)
    # `cpu` counts what the device has, too, and `disk` all.
    expected = {"cpu": {"cpu": 4, "disk": 4}, "disk": {"disk": 4}, "": {}}[believed[1]]
    assert await indexer.blocks(1, prompt) == {"gpu": 0, "cpu": 0, "disk": 0} | expected
    assert (await indexer.blocks(1, known))["gpu"] == 4


@pytest.mark.parametrize("where", sorted(KINDS, key=str), ids=str)
async def test_what_the_pool_has_lost_is_not_credited(router: Router, where: Residency) -> None:
    known, prompt = await router.remember(), Prompt(8)
    router.a.send(prompt.stored(0, 8, where, **FIELDS))
    router.b.send(prompt.stored(0, 1, GPU))
    await asyncio.sleep(SETTLE_S)
    assert await router.ask(prompt.tokens) == "a"
    router.a.send(*removals([(hash, 0, where) for hash in prompt.hashes]))
    await asyncio.sleep(SETTLE_S)
    assert await router.ask(prompt.tokens) == "b"
    assert await router.knows_a(known)


async def test_dynamo_forgets_what_the_pool_has_lost(indexer: Indexer, engine: Engine) -> None:
    known, prompt, near = Prompt(4), Prompt(4), residency("shared", near=True, tier="dram")
    engine.send(known.stored(0, 4, GPU), prompt.stored(0, 4, near, **FIELDS))
    await asyncio.sleep(2 * SETTLE_S)
    assert (await indexer.blocks(1, prompt))["cpu"] == 4
    engine.send(*removals([(hash, 0, near) for hash in prompt.hashes[2:]]))
    await asyncio.sleep(2 * SETTLE_S)
    assert (await indexer.blocks(1, prompt))["cpu"] == 2
    assert (await indexer.blocks(1, known))["gpu"] == 4


@pytest.mark.parametrize("where", sorted(KINDS, key=str), ids=str)
async def test_a_block_that_a_router_never_knew_may_be_removed(
    router: Router, where: Residency
) -> None:
    """After AllBlocksCleared it knows none, and the pool still loses some."""
    known = await router.remember()
    router.a.send(RemovedEvent(block_hashes=[7, 8], group_idx=0, **where._asdict()))
    await asyncio.sleep(SETTLE_S)
    assert await router.knows_a(known)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "adapter", "extra_keys": [("adapter",)] * 4},
        {"group_idx": 1},
        {"session_id": "s" * 256},
        {"kv_cache_spec_kind": None, "group_idx": None, "session_id": None},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_no_field_makes_a_router_forget(router: Router, fields: dict[str, Any]) -> None:
    known = await router.remember()
    for form, near, tier in BELIEVED:
        stored = Prompt(4).stored(0, 4, residency(form, near=near, tier=tier))
        event = msgspec.structs.replace(stored, **{**FIELDS, **fields})
        assert announced(form, event)
        router.a.send(event)
    await asyncio.sleep(SETTLE_S)
    assert await router.knows_a(known)


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": [("salt",), None, None, None]},
        {"extra_keys": [(("picture", 3),), None, None, None]},
        {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64},
        {"kv_cache_spec_kind": "mla_attention"},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_what_a_discovering_router_forgets_at_is_not_in_its_form(
    router: Router, indexer: Indexer, engine: Engine, fields: dict[str, Any]
) -> None:
    """It does so at an engine's own events, too. The others take them, so `plain` has them."""
    known, far = await router.remember(), residency("plain", near=False, tier="dram")
    event = msgspec.structs.replace(Prompt(4).stored(0, 4, far), **{**FIELDS, **fields})
    assert not announced("shared", event)
    assert announced("plain", event)
    dynamo_knows = Prompt(4)
    engine.send(dynamo_knows.stored(0, 4, GPU), event)
    router.a.send(event)
    await asyncio.sleep(2 * SETTLE_S)
    assert (await indexer.blocks(1, dynamo_knows))["gpu"] == 4
    assert await router.knows_a(known) is (router.mode == "static")


async def test_dynamo_takes_every_field(indexer: Indexer, engine: Engine) -> None:
    prompt, near = Prompt(4), residency("shared", near=True, tier="dram")
    fields = {**FIELDS, "session_id": "s" * 256, "kv_cache_spec_sliding_window": None}
    engine.send(prompt.stored(0, 4, near, **fields))
    await asyncio.sleep(2 * SETTLE_S)
    assert (await indexer.blocks(1, prompt))["cpu"] == 4


async def test_many_events_at_once_are_several_batches(router: Router) -> None:
    """A batch of more than 4,096 events would be refused, and the engine forgotten."""
    known, far = await router.remember(), residency("shared", near=False, tier="dram")
    prompts = [Prompt(1) for _ in range(EVENTS_MAX + 100)]
    before = router.a.publisher.counts.batches
    router.a.send(*(one.stored(0, 1, far, **FIELDS) for one in prompts))
    assert router.a.publisher.counts.batches == before + 2
    await asyncio.sleep(4 * SETTLE_S)
    assert await router.knows_a(known)


async def test_hashes_of_all_bytes_are_understood(router: Router) -> None:
    """As an engine publishes them with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    known, prompt = await router.remember(), Prompt(8)
    prompt.hashes = [hash.to_bytes(32, "big") for hash in prompt.hashes]  # type: ignore[misc]
    router.a.send(prompt.stored(0, 8, residency("shared", near=False, tier="dram"), **FIELDS))
    await asyncio.sleep(SETTLE_S)
    assert await router.ask(prompt.tokens) == "a"
    assert await router.knows_a(known)


async def test_a_lost_batch_is_replayed(router: Router) -> None:
    known, prompt = await router.remember(), Prompt(6)
    lost = EventBatch(0.0, [prompt.stored(2, 4, GPU)], 0)
    router.a.send(prompt.stored(0, 2, GPU))
    router.a.publisher.buffer.add(encode_batch(lost))  # numbered and kept, and never sent
    router.a.send(prompt.stored(4, 6, GPU))
    await asyncio.sleep(4 * SETTLE_S)
    router.b.send(prompt.stored(0, 3, GPU))
    await asyncio.sleep(SETTLE_S)
    assert await router.ask(prompt.tokens) == "a"
    assert await router.knows_a(known)


async def test_cleared_means_all(router: Router, indexer: Indexer, engine: Engine) -> None:
    prompt, near = Prompt(4), residency("plain", near=True, tier="dram")
    router.a.send(prompt.stored(0, 4, near))
    router.b.send(prompt.stored(0, 1, GPU))
    engine.send(prompt.stored(0, 4, near))
    await asyncio.sleep(2 * SETTLE_S)
    assert await router.ask(prompt.tokens) == "a"
    assert (await indexer.blocks(1, prompt))["cpu"] == 4
    router.a.send(ClearedEvent())
    engine.send(ClearedEvent())
    await asyncio.sleep(2 * SETTLE_S)
    assert await router.ask(prompt.tokens) == "b"
    assert (await indexer.blocks(1, prompt))["cpu"] == 0


async def test_a_form_that_routers_refuse_is_noticed_here(router: Router) -> None:
    """REMOTE without an ownership: these tests would see it."""
    known = await router.remember()
    router.a.send(Prompt(2).stored(0, 2, Residency("CPU", "REMOTE")))
    await asyncio.sleep(SETTLE_S)
    # A router whose command line names the streams does not check this.
    assert await router.knows_a(known) is (router.mode == "static")
