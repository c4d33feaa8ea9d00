"""vLLM's real scheduler with the connector, and a worker that the test plays: no model runs."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import deque
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as Counter_
from vllm.config import (
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from kvpool import WriteStatus, kv_events
from kvpool_connector import hook_guard
from kvpool_connector.plan.verifier import VerifyOutcome
from kvpool_connector.records.messages import (
    LoadResult,
    Mismatch,
    ModelInfo,
    SaveResult,
    VerifyResult,
    WorkerInfo,
)
from kvpool_connector.records.provenance import UNKNOWN
from kvpool_connector.vllm_engine import engine_log
from kvpool_connector.vllm_engine.kv_events import vllm_event
from kvpool_connector.vllm_engine.replaced import RefusedSettings
from kvpool_connector.vllm_engine.stats import ConnectorPromMetrics, ConnectorStats
from tests.connector.vllm.helpers import Models, transfer
from tests.connector.vllm.played import BLOCK, BLOCKS, SIZE, Play, Played, keys_of, store, warmed
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(120)


def short_of_blocks(played: Played) -> Any:
    """A request that needs some of the blocks of a save, which nobody acknowledges."""
    played.step()
    played.add("saved", 64 * BLOCK)
    for _ in range(50):
        played.step()
        if not played.scheduler.has_unfinished_requests() and played.saves:
            break
        time.sleep(0.005)  # for its lookup
    request = played.add("long", played.free * BLOCK, first=2000)
    for _ in range(200):
        step, _ = played.step()
        if played.connector.hooks._owed._short_since:
            assert not step.num_scheduled_tokens
            return request
        assert not step.preempted_req_ids
        time.sleep(0 if step.num_scheduled_tokens else 0.005)
    raise AssertionError("it has enough blocks")


def test_an_engine_waits_for_blocks_of_a_save_and_preempts_nobody(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_connector.scheduler.engine_report._METRICS_EVERY_S", 0.0)
    request = short_of_blocks(played)
    assert request.status == RequestStatus.RUNNING
    assert played.counters["pinned_share"] == 0.25
    step, _ = played.step(saved=played.acknowledged())
    assert not step.preempted_req_ids
    assert played.counters["pinned_share"] == 0.0
    step, _ = played.step()
    assert step.num_scheduled_tokens["long"]
    assert request.num_preemptions == 0


def test_an_engine_does_not_wait_for_a_save_that_does_not_end(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = short_of_blocks(played)
    monkeypatch.setattr(hook_guard, "FREES_WAIT_S", 0.0)
    step, _ = played.step()
    assert step.preempted_req_ids == {"long"}
    assert request.num_preemptions == 1


def test_blocks_that_a_request_has_do_not_come_free_with_their_pins(played: Played) -> None:
    """Waiting for such a save would end with no block."""
    played.step()
    played.add("long", 20 * BLOCK)
    while not played.connector.hooks._owed.pinned_blocks:
        played.step()
    assert not played.connector.has_pending_block_frees()
    while played.scheduler.has_unfinished_requests():
        played.step()
    assert played.connector.has_pending_block_frees()
    played.step(saved=played.acknowledged())
    assert not played.connector.has_pending_block_frees()


@pytest.mark.parametrize("flat", [False, True])
def test_a_step_that_is_scheduled_early_saves_no_block_whose_tokens_are_not_known(
    pool: LocalPool, play: Play, monkeypatch: pytest.MonkeyPatch, flat: bool
) -> None:
    """With asynchronous scheduling the next step is scheduled while this one is computed."""
    monkeypatch.setattr("kvpool_connector.scheduler.scheduler.SAVE_GATHER_S", 0.0)
    config = transfer(pool.master)
    played = play(config, scheduler_class=AsyncScheduler)
    if flat:  # as from MultiConnector, beside a connector that knows no groups
        of_one_group = played.connector.request_finished
        played.connector.request_finished_all_groups = lambda one, ids: of_one_group(one, *ids)
    request = played.request("a", 40)
    request.max_tokens = 56
    saved: list[bytes] = []
    played.step()
    played.scheduler.add_request(request)
    under_way: deque[Any] = deque()
    for _ in range(200):
        known, ended = request.num_tokens, request.is_finished()
        under_way.append(played.scheduler.schedule())
        work = under_way[-1].kv_connector_metadata.work
        for blocks in (blocks for save in work.saves for blocks in save.blocks):
            saved += blocks.digests
        assert len(saved) * BLOCK <= known
        if len(under_way) > 1:
            played.end(under_way.popleft(), saved=played.acknowledged())
        if ended:
            break
    assert saved == [bytes(digest) for digest in request.block_hashes[: len(saved)]]
    assert len(saved) == (request.num_tokens - 1) // BLOCK == 5
    assert played.free == BLOCKS - 1 - 3  # pinned until they are saved
    for step in under_way:
        played.end(step, saved=played.acknowledged())
    played.finish()
    assert played.free == BLOCKS - 1


def test_a_block_that_is_being_saved_is_not_reused(played: Played) -> None:
    """The request is over and its blocks would be free, were they not being read."""
    played.step()
    played.add("a", 64)
    for _ in range(100):
        played.step()
        if not played.scheduler.has_unfinished_requests():
            break
        time.sleep(0.005)
    assert played.connector.has_pending_push_work()
    assert played.free == BLOCKS - 1 - 4
    played.add("b", 16, first=500)
    played.step(saved=played.acknowledged())
    played.finish()
    assert played.free == BLOCKS - 1


def test_a_hit_is_loaded_and_the_last_token_computed(pool: LocalPool, played: Played) -> None:
    warmed(pool, played)
    request = played.add("a", 64)
    load = played.until_loading(request)
    assert len(load.blocks[0].digests) == 3
    assert request.num_computed_tokens == 48
    played.step(finished_recving={"a"}, loaded=[LoadResult("a", 3 * SIZE, True, 0.0)])
    step, _ = played.step()
    assert step.num_scheduled_tokens == {"a": 16}
    played.finish()
    assert played.free == BLOCKS - 1


def test_after_a_mismatch_no_request_that_may_have_used_wrong_blocks_is_cached(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither blocks of its prompt nor those of its answer; what comes later is cached again."""
    verifier = played.connector.hooks.scheduler.planner.verifier
    wrong = VerifyOutcome([], Mismatch(0, 0, 0, b"d", "layer", 1.0, 0.1, UNKNOWN), True)
    monkeypatch.setattr(verifier, "on_result", lambda result: wrong)
    played.step()
    tokens = 38 * BLOCK - 3  # two steps of prefill; the last step completes a block
    played.add("a", tokens)
    played.until_cached(32)
    played.step(verified=[VerifyResult(1, 1)])
    assert played.cached == 0
    while played.scheduler.has_requests() or played.saves:
        played.step(saved=played.acknowledged())
        assert played.cached == 0
    played.add("b", tokens)
    played.until_cached(32)


def test_nothing_of_the_old_weights_is_cached_when_they_were_changed_without_a_reset(
    pool: LocalPool, played: Played
) -> None:
    """Neither what was computed, nor what was loaded until the worker found out."""
    warmed(pool, played)
    before = played.namespace
    played.until_loading(played.add("loads", 64 + 2 * BLOCK))
    info = WorkerInfo(0, ModelInfo(weights="new"), (SIZE,), 2)
    loaded = [LoadResult("loads", 4 * SIZE, True, 0.0)]
    played.step(finished_recving={"loads"}, loaded=loaded, worker_infos=[info])
    assert played.namespace != before
    while played.scheduler.has_requests() or played.saves:
        played.step(saved=played.acknowledged())
        assert played.cached == 0
    assert played.counters["saved_blocks"] == 4, "those of the first request"
    played.add("b", 64)
    played.finish()
    assert played.cached == 4
    assert played.counters["saved_blocks"] == 8


def test_a_request_aborted_while_it_loads_leaves_nothing(pool: LocalPool, played: Played) -> None:
    warmed(pool, played)
    request = played.add("a", 64)
    played.until_loading(request)
    played.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert played.free < BLOCKS - 1
    played.step(finished_recving={"a"}, loaded=[LoadResult("a", 0, False, 0.0)])
    assert played.free == BLOCKS - 1
    assert "a" not in played.scheduler.requests


def test_a_bad_block_is_computed_again(pool: LocalPool, played: Played) -> None:
    warmed(pool, played)
    request = played.add("a", 64)
    load = played.until_loading(request)
    bad = load.blocks[0].block_ids[2]
    played.step(
        finished_recving={"a"},
        invalid_block_ids={bad},
        loaded=[LoadResult("a", 2 * SIZE, False, 0.0)],
    )
    step, _ = played.step()
    assert step.num_scheduled_tokens == {"a": 32}
    played.finish()
    assert played.free == BLOCKS - 1


def image(name: str) -> MultiModalFeatureSpec:
    """20 tokens of a picture, from the second block on, hashed as vLLM does."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return MultiModalFeatureSpec(None, "image", digest, PlaceholderRange(BLOCK + 4, 20))


ONE, MOVED, TWO = (
    {"lora_request": LoRARequest(*told)}
    for told in (("one", 1, "/one"), ("another", 1, "/elsewhere"), ("one", 2, "/one"))
)
CAT, DOG = ({"mm_features": [image(name)]} for name in ("cat", "dog"))


@pytest.mark.parametrize(
    ("own", "other", "shared"),
    [
        pytest.param({"cache_salt": "a"}, {"cache_salt": "b"}, 0, id="salts"),
        pytest.param({"cache_salt": "a"}, {}, 0, id="salted and not"),
        pytest.param(ONE, TWO, 0, id="adapters"),
        pytest.param(ONE, {}, 0, id="adapted and not"),
        pytest.param(ONE, MOVED, 4 * BLOCK, id="an adapter elsewhere"),
        pytest.param(ONE, {**MOVED, "cache_salt": "b"}, 0, id="adapted, salted and not"),
        pytest.param({**ONE, **CAT}, {**MOVED, **DOG}, BLOCK, id="adapted, pictures"),
        pytest.param(CAT, DOG, BLOCK, id="pictures"),
    ],
)
def test_what_vllm_hashes_with_the_tokens_keeps_them_apart(
    pool: LocalPool, play: Play, own: dict[str, Any], other: dict[str, Any], shared: int
) -> None:
    """The same tokens, two engines: found with the same salt, adapter and pictures, and only so."""
    config = transfer(pool.master)
    writer, reader = play(config), play(config)
    writer.step()
    reader.step()
    store(pool, writer, writer.request("a", 65, **own), 4)
    assert reader.offered(reader.request("b", 65, **own)) == 64
    assert reader.offered(reader.request("c", 65, **other)) == shared


def test_with_eagle_the_last_block_of_a_prefix_is_computed_as_with_vllms_own_cache(
    pool: LocalPool, model: Models, play: Play
) -> None:
    """A draft's KV of a block's last token is made of the token behind the block, too."""
    target = ModelConfig(model=str(model()), dtype="bfloat16", seed=0)
    offered = {}
    for dropped in (True, False):
        speculative = SpeculativeConfig(
            method="eagle",
            model=str(model("eagle")),
            num_speculative_tokens=2,
            target_model_config=target,
            target_parallel_config=ParallelConfig(),
            disable_eagle_block_drop=not dropped,
        )
        writer, reader = (play(speculative_config=speculative) for _ in range(2))
        writer.step()
        reader.step()
        request = writer.request(f"a{dropped}", 70, 1000 * dropped)
        store(pool, writer, request, 4)
        offered[dropped] = reader.offered(reader.request("b", 70, 1000 * dropped))
    assert offered == {True: 48, False: 64}


def test_an_adapter_that_was_replaced_has_other_keys_under_its_old_name_and_path(
    pool: LocalPool, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """A fresh engine finds nothing of the former one's; an engine that has had both shares none."""
    config = transfer(pool.master)
    writer, reader = play(config), play(config)
    reader.adapters = {1: "replaced"}
    writer.step()
    reader.step()
    store(pool, writer, writer.request("a", 65, **ONE), 4)
    assert reader.offered(reader.request("b", 65, **ONE)) == 0
    assert writer.offered(writer.request("c", 65, **ONE)) == 64
    writer.adapters, writer.greeted = {7: "replaced"}, False
    writer.step()
    again = {"lora_request": LoRARequest("one", 7, "/one")}
    store(pool, writer, writer.request("d", 65, **again), 4)
    assert writer.offered(writer.request("e", 65, **again)) == 0
    writer.connector.reset_cache()
    writer.greeted = False
    writer.step()
    store(pool, writer, writer.request("f", 65, **again), 4)
    assert writer.offered(writer.request("g", 65, **again)) == 64


def test_an_adapter_that_is_not_loaded_yet_is_computed_and_saved(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the pool has refused it once: the engine's own cache still has its blocks. What is
    generated has the key of the same tokens in a prompt."""
    monkeypatch.setattr("kvpool_connector.plan.save_queue._RETRY_AFTER_S", 0.0)
    played = play(lora_config=LoRAConfig())
    played.adapters = {}
    played.step()
    request = played.request("a", 61, **ONE)
    played.scheduler.add_request(request)
    while not request.num_computed_tokens:  # it waits for one report, and for nothing else
        played.step()
    assert not played.saves
    played.adapters, played.greeted = {1: "one"}, False
    while not played.saves:
        played.step()
    (save,), played.saves = played.saves, []
    refused = tuple((0, digest, WriteStatus.NO_SPACE) for digest in save.blocks[0].digests)
    played.step(saved=[SaveResult(save.job, 0, refused)])
    saved: set[bytes] = set()
    while len(saved) < 4:
        played.step(saved=played.acknowledged())
        saved.update(*(one.blocks[0].digests for one in played.saves))
    played.finish()
    assert saved == set(keys_of(played, request, 4))
    assert played.counters["saved_blocks"] == played.counters["save_retries"] == 4
    assert played.counters["miss adapter not loaded"] == 1


@pytest.mark.parametrize("axis", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_every_ranks_part_is_needed(pool: LocalPool, play: Play, axis: str) -> None:
    parallel = ParallelConfig(**{axis: 2})
    played = play(ranks=2, parallel_config=parallel)
    played.step()
    assert played.namespace.parts == 2
    assert f"{axis[0]}p=2" in played.namespace.name
    request = played.request("a", 65)
    store(pool, played, request, 4)
    assert played.offered(played.request("b", 65)) == 0
    store(pool, played, request, 4, part=1)
    assert played.offered(played.request("c", 65)) == 64


class Recorder:
    """Where events are published."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def shutdown(self) -> None:
        pass


def published(pool: LocalPool, play: Play, **settings: Any) -> tuple[Played, Any, list[Any]]:
    """An engine whose prompt was saved, when the pool really has it; the request; its events."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    played = play(transfer(pool.master, **settings), kv_events_config=events)
    recorder = played.scheduler.kv_event_publisher = Recorder()
    played.step()
    request = played.request("a", 64, session_id="chat")
    played.scheduler.add_request(request)
    played.until_cached(4)  # looked up before the pool has it
    store(pool, played, request, 4)
    played.finish()
    until = time.monotonic() + 5
    while played.connector.has_pending_push_work() and time.monotonic() < until:
        played.step()
        time.sleep(0.002)
    assert not played.connector.has_pending_push_work()
    return played, request, recorder.events


def test_what_the_pool_has_is_published_and_what_it_loses_is_taken_back(
    pool: LocalPool, play: Play
) -> None:
    """One KV event of a chain of the pool's blocks beside the engine's own, with equal hashes."""
    played, request, events = published(pool, play)
    stored = [event for event in events if isinstance(event, BlockStored)]
    own = [h for event in stored if event.medium == "GPU" for h in event.block_hashes]
    (pooled,) = [event for event in stored if event.medium == "CPU"]
    assert pooled.block_hashes == own[:4]
    assert pooled.parent_block_hash is None
    assert pooled.token_ids == list(range(64))
    assert pooled.block_size == BLOCK
    # The pool's server is on this host: every engine here reads it as its own memory.
    assert (pooled.locality, pooled.ownership) == ("LOCAL", None)
    assert (pooled.session_id, pooled.group_idx) == ("chat", 0)
    mine = next(event for event in stored if event.medium == "GPU")
    assert pooled.kv_cache_spec_kind == mine.kv_cache_spec_kind == "full_attention"
    assert pooled.extra_keys is None
    lost = [bytes(digest) for digest in request.block_hashes[2:4]]
    pool.ask(lambda client: client.remove(played.namespace, lost))
    removed: list[Any] = []
    until = time.monotonic() + 10
    while not removed and time.monotonic() < until:
        played.step()
        time.sleep(0.02)
        removed = [one for one in events if isinstance(one, BlockRemoved) and one.medium == "CPU"]
    assert [hash for one in removed for hash in one.block_hashes] == pooled.block_hashes[2:]


def test_nothing_is_published_where_it_is_switched_off(pool: LocalPool, play: Play) -> None:
    *_, events = published(pool, play, kv_events="off")
    assert {event.medium for event in events if isinstance(event, BlockStored)} == {"GPU"}


def test_events_are_encoded_as_vllms_own() -> None:
    """`kvpool events` and the tests with real routers use these instead of vLLM's classes."""
    said: dict[str, Any] = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1] * 32,
        "block_size": 16,
        "lora_id": 1,
        "medium": "CPU",
        "lora_name": "adapter",
        "extra_keys": [("adapter", "salt"), None],
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 64,
        "locality": "REMOTE",
        "ownership": "kvpool",
        "session_id": "chat",
    }
    assert {field.name for field in msgspec.structs.fields(BlockStored)} == said.keys()
    removed = {name: said[name] for name in BlockRemoved.__struct_fields__}
    ours = [kv_events.StoredEvent(**said), kv_events.RemovedEvent(**removed)]
    theirs = [BlockStored(**said), BlockRemoved(**removed), AllBlocksCleared()]
    assert [vllm_event(event) for event in ours] == theirs[:2]
    batch = kv_events.EventBatch(1.5, [*ours, kv_events.ClearedEvent()], 0)
    encoded = msgspec.msgpack.encode(KVEventBatch(1.5, theirs, 0))
    assert msgspec.msgpack.decode(kv_events.encode_batch(batch)) == msgspec.msgpack.decode(encoded)
    assert kv_events.decode_batch(encoded) == batch
    digest = bytes(range(32))
    assert kv_cache_utils.maybe_convert_block_hash(digest) == kv_events.short_hash(digest)


def test_a_decode_step_makes_no_table(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes the ids of a request's blocks when they are asked for: of a long one, 8,192."""
    played.step()
    played.add("a", 64)
    while not played.step()[0].num_scheduled_tokens:
        time.sleep(0.002)  # the lookup is not back
    made: list[str] = []
    manager = played.scheduler.kv_cache_manager
    blocks_of, ids_of = played.connector.hooks.blocks_of, manager.get_block_ids
    monkeypatch.setattr(
        played.connector.hooks, "blocks_of", lambda name: [made.append(name), blocks_of(name)][1]
    )
    monkeypatch.setattr(manager, "get_block_ids", lambda name: [made.append(name), ids_of(name)][1])
    step, work = played.step(saved=played.acknowledged())
    assert step.num_scheduled_tokens == {"a": 1}
    assert not made
    assert not work.idle, "workers of an idle step sleep"
    played.finish()


WRONG_SETTINGS = [
    ({"master": ["127.0.0.1:7450"]}, "unknown setting 'master'; did you mean 'masters'?"),
    ({"masters": ["nowhere"]}, "master 'nowhere': expected host:port"),
    ({"transports": ["smh"]}, "unknown transport 'smh'; did you mean 'shm'?"),
    ({"load": "sometimes"}, "load is 'sometimes', expected one of"),
    ({"load_timeout_s": -1}, "load_timeout_s is -1, expected a number"),
    ({"secret_file": "/no/such"}, "secret file '/no/such': No such file"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_SETTINGS)
def test_a_wrong_setting_is_named_when_the_configuration_is_parsed(
    settings: dict[str, Any], message: str
) -> None:
    config = {**transfer("127.0.0.1:7450"), "kv_connector_extra_config": settings}
    with pytest.raises(RefusedSettings, match=re.escape(message)):
        KVTransferConfig(**config)
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, config]
        },
    }
    with pytest.raises(RefusedSettings, match=re.escape(message)):
        KVTransferConfig(**several)
    other = {**config, "kv_connector": "ExampleConnector"}
    assert KVTransferConfig(**other).kv_connector_extra_config == settings


def test_a_setting_that_was_wrong_before_the_plugin_was_loaded_stops_the_start() -> None:
    config = KVTransferConfig(**transfer("127.0.0.1:7450"))
    config.kv_connector_extra_config = {"load": "sometimes"}
    with pytest.raises(RefusedSettings, match="expected one of"):
        VllmConfig(kv_transfer_config=config)


def test_the_command_line_ends_with_the_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    config = {**transfer("127.0.0.1:7450"), "kv_connector_extra_config": {"transports": ["smh"]}}
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-transfer-config", json.dumps(config)])
    printed = capfd.readouterr().err
    assert printed.count("unknown transport 'smh'; did you mean 'shm'?") == 1
    assert "unknown transport 'smh'" in printed.strip().splitlines()[-1]


def test_a_producer_saves_its_first_prompt_of_one_token(pool: LocalPool, play: Play) -> None:
    """As the prefill side of P/D: the request ends with the step that computes its prompt."""
    played = play({**transfer(pool.master), "kv_role": "kv_producer"})
    request = played.request("a", 65)
    request.max_tokens = 1
    played.scheduler.add_request(request)
    for _ in range(10):
        played.step(saved=played.acknowledged())
    saved = [digest for save in played.saves for digest in save.blocks[0].digests]
    assert len(saved) == 4 or played.counters["saved_blocks"] == 4


def test_an_answer_promises_what_another_engine_loads_at_once(pool: LocalPool, play: Play) -> None:
    """Nothing of it is in the pool yet. Of two connectors in a MultiConnector one promises: vLLM
    ends where two of them return the same key."""
    config = transfer(pool.master, verify_rate=0)
    producer = play({**config, "kv_role": "kv_producer"})
    beside = play({**config, "kv_role": "kv_producer"})
    consumer = play({**config, "kv_role": "kv_consumer"})
    request = producer.request("a", 70)
    request.max_tokens = 1
    request.kv_transfer_params = {"do_remote_decode": True, "remote_host": None}
    beside.step()
    beside.connector.on_new_request(request)
    producer.scheduler.add_request(request)
    answers = []
    finished = producer.connector.request_finished_all_groups

    def both(*arguments: Any) -> Any:
        answers.append(finished(*arguments))
        answers.append(beside.connector.request_finished_all_groups(*arguments))
        return answers[0]

    producer.connector.request_finished_all_groups = both
    for _ in range(10):
        producer.step()
    (hold, params), (_, nothing) = answers
    assert not hold
    assert nothing is None
    promise = params["kvpool"]["promise"]
    assert (promise["version"], promise["tokens"]) == (1, 64)
    assert promise["tail"] == bytes(request.block_hashes[3]).hex()
    assert pool.blocks == 0
    waiting = consumer.request("d", 70)
    waiting.kv_transfer_params = json.loads(json.dumps(params))
    consumer.step()
    consumer.scheduler.add_request(waiting)
    load = consumer.until_loading(waiting)
    assert len(load.blocks[0].digests) == 4
    assert load.wait_limits is not None
    ended = LoadResult("d", 4 * SIZE, True, 0.01, 0.02)
    consumer.step(finished_recving={"d"}, loaded=[ended])
    assert waiting.num_computed_tokens == 64
    consumer.finish()
    assert consumer.counters["promise kept"] == 1
    assert consumer.free == BLOCKS - 1


def test_a_misspelt_key_of_a_request_is_counted_and_logged_once(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(engine_log.logger, "warning", lambda text, *of: lines.append(text % of))
    for name in ("a", "b"):
        request = played.request(name, 33)
        request.kv_transfer_params = {"skip_laod": True, "do_remote_prefill": False}
        played.connector.on_new_request(request)
    assert played.connector.hooks.scheduler.planner.counters["bad_hints"] == 2
    (line,) = lines
    assert "kvpool" in line
    assert "unknown key 'skip_laod'; did you mean 'skip_load'?" in line


def metrics_of_vllm() -> tuple[ConnectorPromMetrics, Any]:
    registry = CollectorRegistry()
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer("127.0.0.1:7450")))
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter_, Gauge, Histogram)}
    metrics = ConnectorPromMetrics(config, kinds, ["engine"], {0: ["0"]})
    return metrics, registry.get_sample_value


def test_durations_are_histograms_of_vllms_metrics() -> None:
    metrics, found = metrics_of_vllm()
    stats = ConnectorStats(data={"lookup_duration 0.0012": 3.0, "load_s": 2.0})
    stats.aggregate(ConnectorStats(data={"lookup_duration 0.0012": 1.0, "load_duration 4": 1.0}))
    stats.aggregate(ConnectorStats(data={"read_duration tcp 0.02": 2.0}))
    metrics.observe(stats.data)
    name = "vllm:kvpool_lookup_duration_seconds"
    assert found(f"{name}_count", {"engine": "0"}) == 4
    assert found(f"{name}_sum", {"engine": "0"}) == pytest.approx(0.0048)
    assert found(f"{name}_bucket", {"engine": "0", "le": "0.001"}) == 0
    assert found(f"{name}_bucket", {"engine": "0", "le": "0.0025"}) == 4
    assert found("vllm:kvpool_load_duration_seconds_sum", {"engine": "0"}) == 4
    tcp = {"engine": "0", "transport": "tcp"}
    assert found("vllm:kvpool_read_duration_seconds_sum", tcp) == pytest.approx(0.04)
    assert not any("duration" in line for line in stats.reduce())


def test_a_metric_that_cannot_be_taken_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(engine_log, "error", lambda line, cause=None: lines.append(line))
    metrics, found = metrics_of_vllm()
    for _ in range(2):
        metrics.observe({"read_duration 0.02": 1.0, "load_s": 2.0, "description": None})
    assert found("vllm:kvpool_load_seconds_total", {"engine": "0"}) == 4
    assert len(lines) == 2, "each reason once"
