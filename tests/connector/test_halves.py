"""Both halves of the connector on a real pool; the test is the engine between them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from kvpool import ROOT, Match, ReadStatus, WriteStatus, tracing
from kvpool.client.match_poller import PolledMatches
from kvpool_connector import settings as settings_module
from kvpool_connector.hints.request_params import Asked, parse_request
from kvpool_connector.identity.adapters import Adapter
from kvpool_connector.identity.naming import EngineInfo
from kvpool_connector.memory.block_memory import memory_of
from kvpool_connector.plan.save_queue import SaveQueue, SaveRun
from kvpool_connector.records.messages import LoadResult, ModelInfo, SaveResult, WorkerReport
from kvpool_connector.records.values import (
    CacheGroup,
    PlannerLimits,
    RequestHints,
    ScheduledRequest,
)
from kvpool_connector.scheduler.scheduler import ConnectorScheduler, EngineStep
from kvpool_connector.scheduler.sharing_watch import LOOKUPS_BEFORE_COMPARED
from kvpool_connector.vllm_engine.head_split import HeadSplit, LayerHeads, divide
from kvpool_connector.worker.rank_model import ModelInMemory
from kvpool_connector.worker.worker import ConnectorWorker, Rank
from kvpool_engines.pool_thread import START_WAIT_S, PoolThread
from tests.conftest import keys, soon
from tests.support.local_pool import LocalPool

BLOCK = 16  # tokens
BYTES = 4096  # of a block, of one rank
BLOCKS = 64

pytestmark = pytest.mark.timeout(60)


class Clock:
    """The scheduler half's clock, which a test may move."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


#: What an engine is given beside its settings: nobody else can set it.
UNSET: Final = {"promise_wait_s", "save_gather_s", "save_retries"}


@contextlib.contextmanager
def limited(limits: dict[str, Any]) -> Iterator[None]:
    """A planner that is made inside has these limits."""

    def made(**given: Any) -> PlannerLimits:
        return PlannerLimits(**{**given, **limits})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool_connector.scheduler.scheduler.PlannerLimits", made)
        yield


class Engine:
    """Blocks of KV memory on each rank, and steps: what an engine does to a connector."""

    def __init__(
        self,
        address: str,
        *,
        ranks: int = 1,
        kernel: str = "kernel",
        saves: Sequence[bool] = (),
        dtype: torch.dtype = torch.uint8,
        heads: int = 8,
        blocks: int = BLOCKS,
        model: ModelInfo | None = None,
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        patient = {"load": "always", "transports": ["tcp"], "verify_rate": 0}
        limits = {name: settings.pop(name) for name in UNSET & settings.keys()}
        self.settings = settings_module.parse({"masters": [address], **patient, **settings})
        parts = self.settings.kv_head_parts
        shape: tuple[int, ...] = (BYTES,)
        split = HeadSplit(ranks, 1, 1, by_heads=False)
        if parts:
            local = max(1, heads // ranks)
            split = divide(parts, ranks, [LayerHeads(local)], heads)
            shape = (local, 4, BYTES // 8 // 4)
        self.lines: list[str] = []
        self.clock = Clock()
        self.threads: list[PoolThread] = []
        info = EngineInfo(
            groups=(CacheGroup(BLOCK, 1),),
            kinds=("full",),
            fields={"model": "tiny"},
            seed=lambda: "0",
            ranks=ranks,
            parts=split.parts,
            blocks=blocks,
            stage_ranks=ranks if parts else 0,
        )._replace(**(engine or {}))
        with limited(limits):
            self.scheduler = ConnectorScheduler(
                self.settings, self._thread(), info, self.lines.append, self.clock
            )
        self.model = model or ModelInfo(packing=kernel)
        self.weight_changes = 0
        self.unreadable = False
        self.adapters: dict[int, str] = {}
        self.workers = []
        self.memory = [torch.zeros(blocks, *shape, dtype=torch.uint8) for _ in range(ranks)]
        for rank, memory in enumerate(self.memory):
            saving = saves[rank] if saves else rank % split.replicas == 0
            first = rank // split.replicas * split.parts_per_rank
            compares = not info.loads and bool(self.settings.verify_rate)
            place = Rank(rank, first, saving, split.parts_per_rank, compares)
            worker = ConnectorWorker(self.settings, self._thread(), place)
            layers = memory_of({"layer.0": memory.view(dtype)}, split.parts_per_rank)
            worker.register(
                [layers],
                ModelInMemory(
                    self._describe,
                    adapters=lambda: self.adapters,
                    changes=lambda: self.weight_changes,
                ),
            )
            self.workers.append(worker)
        self.unpinned: list[int] = []
        self.pinned: list[int] = []
        #: Whether a block still has the contents of this digest, in this group.
        self.still_cached: Callable[[int, int, bytes], bool] = lambda *block: True
        self.loaded: list[str] = []
        self.loads_ended: Counter[str] = Counter()  # by how many ranks, until all have
        self.failed: list[str] = []
        self.bad_blocks: set[int] = set()
        self.stored = 0
        self.caches_dropped = 0
        self.reports: list[WorkerReport] = []

    def _thread(self) -> PoolThread:
        say = self.lines.append
        thread = PoolThread(self.settings.client(), self.settings.member(), say, say)
        self.threads.append(thread)
        return thread

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def connected(self) -> Engine:
        for thread in self.threads:
            assert thread.wait(10)
        self.step()  # brings the workers' infos, and with it the names
        self.step()
        return self

    def step(
        self, scheduled: Sequence[ScheduledRequest] = (), preempted: Sequence[str] = ()
    ) -> WorkerReport:
        prefill = [(one.start, one.end) for one in scheduled]
        work, pins = self.scheduler.plan_step(
            EngineStep(scheduled, preempted, prefill, idle=not scheduled), self.still_cached
        )
        self.pinned += pins
        report = WorkerReport(work.step)
        for worker in self.workers:
            worker.start_loads(work)
            worker.start_saves(work)
        self.scheduler.wait_if_idle(work)
        done = [worker.take_finished() for worker in self.workers]
        self.loads_ended.update(request for one in done for request in one.loaded)
        for request in [one for one, by in self.loads_ended.items() if by == len(self.workers)]:
            del self.loads_ended[request]
            self.loaded.append(request)
        for one in done:
            self.failed += one.failed
            self.bad_blocks |= one.bad_blocks
        for worker in self.workers:
            report.merge(worker.take_report())
        outcome = self.scheduler.on_worker_report(report)
        self.unpinned += outcome.blocks_to_unpin
        self.stored += sum(len(run.digests) for run in outcome.stored)
        self.caches_dropped += outcome.drop_cache
        self.reports.append(report)
        return report

    def until(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"it did not happen; log: {self.lines}"
            self.step()
            time.sleep(0.002)

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        for rank, memory in enumerate(self.memory):
            generator = torch.Generator().manual_seed(seed * 10 + rank)
            for block in blocks:
                values = torch.randint(0, 256, memory.shape[1:], generator=generator)
                memory[block] = values.byte()

    def compute(
        self,
        request: str,
        hashes: list[bytes],
        blocks: list[int],
        adapter: int = 0,
        hints: RequestHints = RequestHints(),  # noqa: B008
    ) -> None:
        """A new request that loads nothing, computed in one step."""
        self.ask(request, hashes, 0, adapter, hints)
        self.step([ScheduledRequest(request, 0, len(hashes) * BLOCK, [blocks])])

    def change_weights(self, weights: str) -> None:
        """In place, by a call that the workers see."""
        self.model = self.model._replace(weights=weights)
        self.weight_changes += 1

    def forget(self) -> None:
        """What this test double has recorded."""
        for one in (self.pinned, self.unpinned, self.loaded, self.failed, self.reports, self.lines):
            one.clear()

    def named(self) -> None:
        """Go on until there are names, as an engine does that has requests."""
        while not self.scheduler.namespaces:
            assert self.loadable("any", 0) == 0
            self.step()

    def _describe(self) -> ModelInfo:
        assert not self.unreadable, "nobody may look at weights that are not there"
        return self.model

    def look_up(self, request: str, hashes: list[bytes], tokens: int = 0) -> None:
        """A new request, which has its answer before the next step."""
        tokens = tokens or len(hashes) * BLOCK
        self.scheduler.on_new_request(request, hashes, tokens, RequestHints())
        end = time.monotonic() + 20
        while self.loadable(request, tokens) is None:
            assert time.monotonic() < end, f"no answer; log: {self.lines}"
            time.sleep(0.001)

    def loadable(self, request: str, tokens: int, computed: int = 0) -> int | None:
        return self.scheduler.loadable_tokens(request, tokens, computed)

    def ask(
        self,
        request: str,
        hashes: list[bytes],
        extra_tokens: int = 1,
        adapter: int = 0,
        hints: RequestHints = RequestHints(),  # noqa: B008
    ) -> int:
        """A new request; how many of its tokens the pool has."""
        tokens = len(hashes) * BLOCK + extra_tokens
        chat = Adapter(adapter, "chat at /chat", lambda first: iter(hashes[first:]))
        self.scheduler.on_new_request(request, hashes, tokens, hints, chat if adapter else None)
        return self.answered(request, tokens)

    def answered(self, request: str, tokens: int, computed: int = 0) -> int:
        """Go on until a request has its answer: how many of its tokens it can load."""
        self.until(lambda: self.loadable(request, tokens, computed) is not None)
        return self.loadable(request, tokens, computed) or 0

    def begin_load(self, name: str, hashes: list[bytes], blocks: list[int]) -> None:
        """A request whose whole prompt the pool has, into these blocks."""
        assert self.ask(name, hashes) == len(hashes) * BLOCK
        self.scheduler.on_blocks_allocated(name, [blocks], len(hashes) * BLOCK)

    def load(self, name: str, hashes: list[bytes], blocks: list[int]) -> None:
        self.begin_load(name, hashes, blocks)
        self.until(lambda: name in self.loaded)

    def settle(self) -> None:
        """Until no transfer runs, and nothing waits for one."""
        self.until(lambda: ended(self) and not self.scheduler.planner.has_pending_work)

    def save(self, hashes: list[bytes], blocks: list[int], seed: int = 1) -> None:
        self.fill(blocks, seed)
        self.compute("save", hashes, blocks)
        self.until(lambda: self.stored == len(hashes))
        self.scheduler.on_request_finished("save")


Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    local = LocalPool()
    yield local
    local.close()


@contextlib.contextmanager
def starting(pool: LocalPool, kind: Callable[..., Any] = Engine) -> Iterator[Callable[..., Any]]:
    """Makes engines of this kind, on this pool or another one."""
    with contextlib.ExitStack() as stack:

        def engine(connected: bool = True, **options: Any) -> Any:
            made = kind(options.pop("address", pool.master), **options)
            stack.callback(made.close)
            return made.connected() if connected else made

        yield engine


@pytest.fixture
def start(pool: LocalPool) -> Iterator[Start]:
    with starting(pool) as engine:
        yield engine


def ended(engine: Engine) -> bool:
    """No worker believes that a transfer is running."""
    return all(worker._ended.running == 0 for worker in engine.workers)


def test_what_one_engine_saved_another_one_loads(start: Start) -> None:
    writer, reader = start(), start()
    hashes = keys("halves", 5)
    writer.save(hashes, [3, 4, 5, 6, 7])
    assert sorted(writer.pinned) == sorted(writer.unpinned) == [3, 4, 5, 6, 7]
    assert writer.stored == 5

    reader.load("r", hashes, [10, 9, 12, 11, 13])
    assert not reader.failed
    assert not reader.bad_blocks
    assert torch.equal(reader.memory[0][[10, 9, 12, 11, 13]], writer.memory[0][3:8])
    assert not reader.memory[0][14:].any()
    assert ended(reader)
    assert ended(writer)
    counters = reader.workers[0].take_counters()
    assert counters["load_bytes"] == 5 * BYTES
    assert "load_blocks_missing" not in counters
    assert reader.workers[0].take_counters() == {}


@pytest.mark.parametrize(
    ("writers", "readers", "parts", "heads"),
    [(1, 2, 2, 8), (2, 1, 2, 8), (1, 4, 4, 8), (4, 2, 8, 8), (2, 2, 4, 8), (4, 1, 2, 2)],
)
def test_ranks_of_another_number_load_their_heads(
    start: Start, writers: int, readers: int, parts: int, heads: int
) -> None:
    """Also with two ranks for each head, of which one saves."""
    common = {"kv_head_parts": parts, "revision": "r", "heads": heads}
    writer, reader = start(ranks=writers, **common), start(ranks=readers, **common)
    hashes = keys(f"heads-{writers}-{readers}-{parts}", 3)
    writer.save(hashes, [3, 4, 5])
    assert writer.scheduler.namespaces == reader.scheduler.namespaces
    reader.begin_load("r", hashes, [10, 9, 11])
    reader.step()
    reader.until(lambda: ended(reader))  # ranks end in different steps
    assert not reader.failed
    replicas = max(1, writers // heads)
    written = torch.cat(writer.memory[::replicas], 1)[[3, 4, 5]]
    assert torch.equal(torch.cat(reader.memory, 1)[[10, 9, 11]], written)
    loaded = sum(worker.take_counters()["load_bytes"] for worker in reader.workers)
    assert loaded == 3 * written[0].numel()


def test_a_block_is_loaded_only_with_all_of_its_parts(start: Start) -> None:
    """The first part of one block is corrupt, and the last of another."""
    own = LocalPool()
    try:
        common = {"address": own.master, "kv_head_parts": 2, "revision": "r"}
        writer, reader = start(**common), start(**common)
        hashes = keys("all-parts", 3)
        writer.save(hashes, [3, 4, 5])
        assert own.corrupt(every=5) == 2  # of six
        reader.begin_load("r", hashes, [10, 9, 11])
        reader.until(lambda: reader.failed == ["r"])
        assert reader.bad_blocks == {10, 11}
        assert reader.workers[0].take_counters()["load_bytes"] == BYTES
        writer.close()
        reader.close()
    finally:
        own.close()


def test_many_blocks_take_several_reads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_connector.memory.load_rounds._READ_BYTES_MIN", BYTES)
    writer, reader = start(), start()
    hashes = keys("several reads", 21)
    writer.save(hashes, list(range(1, 22)))
    reader.begin_load("r", hashes, list(range(40, 61)))
    spans: list[tuple[int, int]] = []
    read_part = ConnectorWorker._read_part

    async def recorded(*arguments: Any) -> set[int]:
        spans.append(arguments[5][:2])
        return await read_part(*arguments)

    monkeypatch.setattr(ConnectorWorker, "_read_part", recorded)
    reader.until(lambda: reader.loaded == ["r"])
    assert torch.equal(reader.memory[0][40:61], writer.memory[0][1:22])
    assert not reader.failed
    assert [last - first for first, last in spans] == [3] * 5 + [2] * 3  # eight reads at most
    assert [first for first, _ in spans[1:]] == [last for _, last in spans[:-1]]
    [load] = [load for report in reader.reports for load in report.loads]
    expected = LoadResult(
        "r", 21 * BYTES, True, 0.0, writers=frozenset([writer.scheduler.names.writer])
    )
    assert load._replace(seconds=0.0) == expected
    assert 0 < load.seconds < 20


def test_a_transfer_that_the_pool_answers_in_time_is_not_cancelled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector's own limit comes after the deadline that the pool has."""
    monkeypatch.setattr("kvpool_connector.worker.worker.CANCEL_AFTER_S", 60.0)
    writer = start(load="auto", load_timeout_s=20.0)
    reader = start(load_timeout_s=20.0)
    hashes = keys("in time", 2)
    writer.save(hashes, [1, 2])
    writer.until(lambda: any(report.probes for report in writer.reports))
    [probe] = [probe for report in writer.reports for probe in report.probes]
    assert probe.size == 2 * BYTES
    reader.load("r", hashes, [30, 31])
    assert not reader.failed


def test_blocks_that_were_lost_after_the_lookup_are_named(pool: LocalPool, start: Start) -> None:
    writer, reader = start(), start()
    hashes = keys("lost after the lookup", 4)
    writer.save(hashes, [1, 2, 3, 4])
    assert reader.ask("r", hashes) == 4 * BLOCK
    name = reader.scheduler.namespaces[0]
    pool.ask(lambda client: client.remove(name, hashes[2:]))
    reader.scheduler.on_blocks_allocated("r", [[30, 31, 32, 33]], 4 * BLOCK)
    reader.until(lambda: reader.loaded == ["r"])
    assert reader.failed == ["r"]
    assert reader.bad_blocks == {32, 33}
    assert torch.equal(reader.memory[0][30:32], writer.memory[0][1:3])
    assert reader.workers[0].take_counters()["load_blocks_missing"] == 2
    # The engine asks again; without a new answer from the pool it computes the rest.
    assert reader.loadable("r", 4 * BLOCK + 1, computed=2 * BLOCK) == 0
    # And what the pool has lost is saved again.
    reader.step([ScheduledRequest("r", 2 * BLOCK, 4 * BLOCK, [[30, 31, 32, 33]])])
    assert set(reader.pinned) >= {32, 33}
    reader.until(lambda: sorted(reader.unpinned) == sorted(reader.pinned))
    assert pool.ask(lambda client: client.match(name, hashes)).length == 4


def test_a_rank_that_saves_nothing_acknowledges_all(pool: LocalPool, start: Start) -> None:
    engine = start(saves=[False])
    hashes = keys("not the saving rank", 2)
    engine.save(hashes, [1, 2])
    assert sorted(engine.unpinned) == [1, 2]
    name = engine.scheduler.namespaces[0]
    assert pool.ask(lambda client: client.match(name, hashes)).length == 0


def updated(engine: Engine, weights: str) -> Engine:
    """The engine with other weights, after its operator has reset its caches."""
    engine.model = engine.model._replace(weights=weights)
    engine.scheduler.reset()
    engine.named()
    return engine


def test_a_prompt_in_the_queue_is_looked_up_anew_after_a_reset(start: Start) -> None:
    """It has computed nothing with the old weights: it loads, and is saved, as any other."""
    writer, engine = start(), start()
    hashes = keys("in the queue", 3)
    writer.save(hashes[:2], [1, 2])
    tokens = 3 * BLOCK
    engine.ask("r", hashes, 0)
    engine.scheduler.reset()
    assert engine.answered("r", tokens) == 2 * BLOCK
    engine.scheduler.on_blocks_allocated("r", [[10, 11]], 2 * BLOCK)
    engine.until(lambda: engine.loaded == ["r"])
    engine.step([ScheduledRequest("r", 2 * BLOCK, tokens, [[10, 11, 12]])])
    engine.until(lambda: engine.stored == 1)


def test_a_prompt_whose_adapter_may_have_been_replaced_is_not_looked_up_again(start: Start) -> None:
    """Its hashes have the fingerprint of the adapter that was loaded when it arrived."""
    engine = start()
    engine.adapters = {1: "v1"}
    engine.step()
    hashes = keys("adapted, preempted", 3)
    engine.compute("r", hashes[:2], [1, 2], 1)
    engine.until(lambda: engine.stored == 2)
    engine.scheduler.reset()
    engine.named()
    engine.step(preempted=["r"])
    assert engine.loadable("r", 3 * BLOCK) == 0
    engine.step([ScheduledRequest("r", 0, 2 * BLOCK, [[3, 4]])])
    engine.settle()
    assert engine.stored == 2


def test_engines_share_again_after_each_update_of_their_weights(start: Start) -> None:
    """Roll-outs: nothing of the old weights is found, and everything of the new ones."""
    one, two = start(), start()
    for number, update in enumerate(("first", "second", "third")):
        two.loaded.clear()
        for engine in (one, two):
            updated(engine, update)
        hashes = keys("roll-out", 2)  # the same prompt each time
        assert two.ask(f"before {update}", hashes) == 0
        one.stored = 0
        one.save(hashes, [1, 2], seed=number)
        two.begin_load(f"after {update}", hashes, [10, 11])
        two.until(lambda: bool(two.loaded))
        assert torch.equal(two.memory[0][10:12], one.memory[0][1:3])
    late = updated(start(), "second")
    assert late.ask("late", keys("roll-out", 2)) == 2 * BLOCK
    assert late.scheduler.namespaces != one.scheduler.namespaces


def test_weights_that_the_fingerprint_cannot_see_are_shared_with_nobody(start: Start) -> None:
    one, two = start(), start()
    for engine in (one, two):
        engine.model = engine.model._replace(hidden=1)
        updated(engine, "same")
    assert one.scheduler.namespaces != two.scheduler.namespaces


def test_what_old_weights_computed_is_not_saved_under_the_new_name(
    start: Start,
) -> None:
    engine = start()
    hashes = keys("half old", 3)
    engine.compute("old", hashes[:2], [1, 2])
    engine.until(lambda: engine.stored == 2)
    updated(engine, "new")
    # It goes on, with blocks of both: only a request that is computed again is saved.
    engine.step([ScheduledRequest("old", 2 * BLOCK, 3 * BLOCK, [[1, 2, 3]])])
    assert engine.ask("r", hashes) == 0
    engine.step(preempted=["old"])
    assert engine.answered("old", 3 * BLOCK) == 0
    engine.step([ScheduledRequest("old", 0, 2 * BLOCK, [[1, 2, 3]])])
    engine.until(lambda: engine.stored == 4)


def test_a_save_of_the_old_weights_is_not_tried_again_under_the_new_name() -> None:
    counters: dict[str, float] = defaultdict(float)
    queue = SaveQueue(counters, PlannerLimits(saved_blocks_max=1), ranks=1)
    items = [SaveRun("r", 0, n, [bytes([n]) * 16], ROOT, [n], 0.0) for n in (1, 2)]
    assert queue.add(items, "", None, 1.0) == [1]  # the second one waits for a pin
    [save] = queue.take_saves(1.0)
    queue.reset()
    refused = ((0, items[0].digests[0], WriteStatus.NO_SPACE),)
    assert queue.on_result(SaveResult(save.job, 0, refused), 2.0) == ([1], [])
    assert queue.take_due(lambda *block: True, 1e9) == []
    assert counters["dropped reset"] == 2


def test_the_first_prompt_of_an_engine_that_only_saves_is_saved(start: Start) -> None:
    """It ends with the step that computes it: before that, its blocks have a name."""
    engine = start(connected=False, engine={"loads": False})
    for thread in engine.threads:
        assert thread.wait(10)
    engine.compute("r", keys("a producer's first", 2), [1, 2])
    engine.scheduler.on_request_finished("r")
    engine.until(lambda: engine.stored == 2)


def test_a_request_waits_no_longer_for_names_than_the_setting_says(start: Start) -> None:
    engine = start(connected=False, engine={"loads": False})
    engine.scheduler.on_new_request("r", keys("no names", 2), 2 * BLOCK, RequestHints())
    assert engine.loadable("r", 2 * BLOCK) is None
    engine.clock.ahead_s += START_WAIT_S
    assert engine.loadable("r", 2 * BLOCK) == 0


def test_a_consumer_saves_nothing(start: Start) -> None:
    writer, consumer = start(), start(engine={"saves": False})
    hashes = keys("for a consumer", 2)
    writer.save(hashes, [1, 2])
    assert consumer.ask("r", hashes) == 2 * BLOCK
    consumer.compute("own", keys("a consumer's own", 2), [5, 6])
    assert not consumer.pinned


def test_a_request_may_ask_for_no_load_no_save_and_fewer_tokens(start: Start) -> None:
    writer, reader = start(), start()
    hashes = keys("by request", 4)
    writer.save(hashes, [1, 2, 3, 4])

    def offered(tokens_computed: int = 0, **params: Any) -> int:
        hints, mistakes, _ = parse_request(Asked(params))
        assert not mistakes
        name, tokens = f"r{params}{tokens_computed}", 4 * BLOCK + 1
        reader.scheduler.on_new_request(name, hashes, tokens, hints)
        return reader.answered(name, tokens, tokens_computed)

    assert offered() == 4 * BLOCK
    assert offered(skip_load=True) == 0
    for limit, blocks in ((0, 0), (BLOCK - 1, 0), (2 * BLOCK + 1, 2), (99 * BLOCK, 4)):
        assert offered(max_load_tokens=limit) == blocks * BLOCK
    assert offered(BLOCK, max_load_tokens=2 * BLOCK) == 2 * BLOCK

    hints = parse_request(Asked({"skip_save": True})).hints
    reader.compute("secret", keys("not to be saved", 2), [7, 8], hints=hints)
    assert not reader.pinned
    assert reader.scheduler.planner.quiet.left("secret") > 1 << 40


def test_durations_are_counted(start: Start) -> None:
    writer, reader = start(), start()
    hashes = keys("durations", 2)
    writer.save(hashes, [1, 2])
    reader.load("r", hashes, [10, 11])
    reader.step()
    reader.clock.ahead_s += 2
    asked, moved = reader.scheduler.report.take_metrics(), writer.workers[0].take_counters()
    read = reader.workers[0].take_counters()
    kinds = {one.rpartition(" ")[0] for one in (*asked, *moved, *read) if "duration" in one}
    assert kinds >= {"load_duration", "lookup_duration", "save_duration"}
    assert kinds >= {"write_duration tcp", "read_duration tcp"}
    assert not any("duration" in one for one in writer.workers[0].take_counters()), "taken twice"


def test_weights_that_were_changed_in_place_have_another_name(start: Start) -> None:
    """Without a reset. What is computed before the scheduler half knows goes under no name."""
    engine = start(ranks=2)
    before, between, after = keys("in place", 2), keys("in between", 2), keys("afterwards", 2)
    engine.save(before, [1, 2])
    names = engine.scheduler.namespaces
    engine.change_weights("new")
    engine.look_up("between", between)
    engine.step([ScheduledRequest("between", 0, 2 * BLOCK, [[3, 4]])])
    assert engine.scheduler.namespaces != names
    engine.look_up("r", after)
    engine.step([ScheduledRequest("r", 0, 2 * BLOCK, [[5, 6]])])
    engine.settle()
    assert engine.stored == 4
    assert engine.ask("new weights", before) == 0
    assert engine.ask("saved anew", after) == 2 * BLOCK
    engine.change_weights("")
    engine.ask("finds out", before)  # under the name of now, or already under the one of before
    engine.step()
    assert engine.scheduler.namespaces == names
    assert engine.ask("the weights of before", before) == 2 * BLOCK
    assert engine.ask("old weights", before) == 2 * BLOCK
    assert engine.ask("saved by none", between) == engine.ask("of the others", after) == 0
    assert sum("weights were changed" in line for line in engine.lines) == 2
    assert Counter(engine.pinned) == Counter(engine.unpinned)


def test_nothing_that_the_old_weights_computed_gets_the_name_of_the_new_ones(start: Start) -> None:
    """A generated block that waits for others, and the blocks that its request completes later."""
    engine = start(save_gather_s=10.0)
    hashes = keys("gathered, old", 4)
    engine.look_up("r", hashes, BLOCK)
    engine.step([ScheduledRequest("r", 0, BLOCK, [[1]])])
    engine.until(lambda: engine.stored == 1)
    engine.step([ScheduledRequest("r", BLOCK, 2 * BLOCK, [[1, 2]])])
    assert engine.pinned == [1, 2], "the second block is gathered"
    engine.change_weights("new")
    engine.step([ScheduledRequest("r", 2 * BLOCK, 3 * BLOCK, [[1, 2, 3]])])
    assert engine.caches_dropped == 1, "the engine's own cache has KV of the old weights"
    engine.step([ScheduledRequest("r", 3 * BLOCK, 4 * BLOCK, [[1, 2, 3, 4]])])
    engine.scheduler.on_request_finished("r")
    engine.settle()
    assert engine.stored == 1
    assert engine.ask("other", hashes) == 0
    assert Counter(engine.pinned) == Counter(engine.unpinned)


def test_a_load_that_runs_while_the_weights_change_fails(pool: LocalPool, start: Start) -> None:
    writer, reader = start(), start()
    hashes = keys("loaded meanwhile", 2)
    writer.save(hashes, [1, 2])
    reader.begin_load("r", hashes, [1, 2])
    pool.conditions.rate = 20_000.0
    try:
        reader.step()
        reader.change_weights("new")
        reader.look_up("other", keys("something else", 1))
        reader.step([ScheduledRequest("other", 0, BLOCK, [[9]])])
        assert not reader.loaded, "the load has ended already: this shows nothing"
    finally:
        pool.conditions.rate = 0.0
    reader.until(lambda: reader.loaded == ["r"])
    assert reader.failed == ["r"]
    assert reader.bad_blocks == {1, 2}


def test_weights_that_change_after_the_reset_have_their_own_name(start: Start) -> None:
    """vLLM resets when it pauses, before the update. Steps in the pause compute nothing: what they
    find is not what the engine computes with afterwards, and may not even be readable."""
    engine = start(ranks=2)
    before = keys("before the pause", 2)
    engine.save(before, [1, 2])
    names = engine.scheduler.namespaces
    engine.scheduler.reset()
    engine.step()
    engine.unreadable = True  # asleep
    engine.scheduler.on_new_request("queued", before, 2 * BLOCK + 1, RequestHints())
    engine.step()
    engine.scheduler.on_request_finished("queued")  # aborted, which makes vLLM step once
    engine.step()
    engine.unreadable, engine.model = False, engine.model._replace(weights="new")
    assert engine.ask("resumed", before) == 0
    assert engine.scheduler.namespaces
    assert engine.scheduler.namespaces != names
    assert not any("weights were changed" in line for line in engine.lines)


def test_a_rank_that_does_not_describe_its_model_again_is_named_in_the_log(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded or saved meanwhile, and no request waits for it."""
    engine = start(ranks=2, load_timeout_s=0.3)
    monkeypatch.setattr(engine.workers[0]._model, "_describe", lambda *_: None)
    engine.change_weights("new")
    engine.loadable("any", 0)
    engine.step()
    assert engine.ask("r", keys("half", 2)) == 0
    engine.clock.ahead_s += 2
    assert engine.ask("another", keys("half", 2)) == 0
    engine.step()
    (line,) = [line for line in engine.lines if "have not described" in line]
    assert "ranks [0]" in line


def test_a_block_whose_adapter_was_reloaded_is_not_saved(start: Start) -> None:
    """vLLM loads an adapter again in the step that computes with it: only the worker sees that."""
    engine = start()
    engine.adapters = {1: "v1"}
    engine.step()
    engine.compute("first", keys("adapted", 2), [1, 2], 1)
    engine.until(lambda: engine.stored == 2)
    engine.ask("r", keys("again", 2), 0, 1)
    engine.adapters = {1: "v2"}
    engine.step([ScheduledRequest("r", 0, 2 * BLOCK, [[3, 4]])])
    engine.settle()
    assert engine.stored == 2
    assert engine.workers[0].take_counters()["save_error ModelChanged"] == 1
    engine.compute("replaced", keys("a third", 2), [5, 6], 1)
    assert engine.scheduler.planner.counters["miss adapter refused"] == 1
    assert any("was replaced under its name" in line for line in engine.lines)


def test_workers_introduce_themselves_until_there_are_names(start: Start) -> None:
    engine = start(connected=False)
    assert len(engine.step().worker_infos) == 1
    assert engine.scheduler.namespaces
    engine.step()
    assert engine.step().worker_infos == []


def test_a_lookup_waits_for_the_workers_first_message(start: Start) -> None:
    writer = start()
    hashes = keys("before the names", 2)
    writer.save(hashes, [1, 2])
    engine = start(connected=False)
    for thread in engine.threads:
        assert thread.wait(10)
    engine.scheduler.on_new_request("r", hashes, 2 * BLOCK + 1, RequestHints())
    assert engine.loadable("r", 2 * BLOCK + 1) is None
    assert engine.answered("r", 2 * BLOCK + 1) == 2 * BLOCK


def test_a_preempted_request_is_looked_up_again(start: Start) -> None:
    writer, reader = start(), start()
    hashes = keys("preempted", 3)
    assert reader.ask("r", hashes) == 0
    writer.save(hashes, [1, 2, 3])
    reader.step(preempted=["r", "unknown"])
    assert reader.answered("r", 3 * BLOCK + 1) == 3 * BLOCK
    assert reader.scheduler.planner.counters["lookups"] == 2


class Recorded:
    """A pool that records the hints that it is sent."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sent: list[tuple[str, str, float | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def session(self, name: str) -> Any:
        def recorded(what: str) -> Callable[..., Any]:
            async def send(*, resume_in: float | None = None) -> None:
                self.sent.append((what, name, resume_in))

            return send

        return SimpleNamespace(**{what: recorded(what) for what in ("end", "hint", "arrived")})


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (RequestHints("chat", 30.0), [("hint", "chat", 30.0)]),
        (RequestHints("chat", 0.0), [("hint", "chat", 0.0)]),
        (RequestHints("chat", None, True), [("end", "chat", None)]),
        (RequestHints("chat", 30.0, True), [("end", "chat", None)]),
        (RequestHints("chat"), []),
        (RequestHints("", None, True), []),
    ],
)
def test_hints_are_sent_when_a_request_has_finished(
    start: Start, hints: RequestHints, expected: list[Any]
) -> None:
    engine = start()
    thread = engine.threads[0]
    recorded = Recorded(thread.pool)
    thread.pool = recorded  # type: ignore[assignment]
    engine.scheduler.on_new_request("r", keys("hints", 1), BLOCK, hints)
    engine.step()
    assert recorded.sent == []
    engine.scheduler.on_request_finished("r")
    engine.scheduler.on_request_finished("r")
    if expected:
        engine.until(lambda: bool(recorded.sent))
    else:
        time.sleep(0.05)
    assert recorded.sent == expected


def test_the_metrics_of_a_busy_engine_come_once_a_second(start: Start) -> None:
    engine = start()
    engine.scheduler.report.take_metrics()
    counters = engine.scheduler.planner.counters
    counters["hooks"] = 7
    assert engine.scheduler.report.take_metrics() == {}  # no news but the hooks' own time
    engine.clock.ahead_s += 1.0
    assert engine.scheduler.report.take_metrics()["hooks"] == 7
    assert counters == {}
    counters["saved_blocks"] = 3
    metrics = engine.scheduler.report.take_metrics()  # news are not held back
    assert metrics["saved_blocks"] == 3
    assert metrics["load_bytes_rate"] == engine.scheduler.planner.choice.transfer_cost.bandwidth
    assert "prefill_tokens_rate" not in metrics
    engine.scheduler.planner.choice.prefill_cost.observe([(0, 1024)], 2.0)
    counters["saved_blocks"] = 1
    assert engine.scheduler.report.take_metrics()["prefill_tokens_rate"] == pytest.approx(512)


def test_late_answers_are_one_line_a_minute(start: Start) -> None:
    engine = start()
    planner = engine.scheduler.planner

    def late(count: int) -> list[str]:
        planner.counters["miss lookup timeout"] += count
        planner.counters["miss no master"] += 1
        engine.scheduler.report.take_metrics()
        return [line for line in engine.lines if "without a lookup" in line]

    assert len(late(2)) == 1
    assert late(0)[0] == "3 prompts were computed without a lookup: 2 lookup timeout, 1 no master"
    engine.clock.ahead_s += 59.0
    assert len(late(4)) == 1
    engine.clock.ahead_s += 1.1
    assert late(1)[1].startswith("8 prompts were computed without a lookup: 5 lookup timeout, 3")


def test_an_engine_says_which_others_of_its_model_share_nothing_with_it(start: Start) -> None:
    """After some lookups: it looks healthy, and costs hits."""
    other, engine = start(kernel="of another CPU"), start()
    other.save(keys("others of this model", 2), [1, 2])
    engine.scheduler.planner.counters["lookups"] = LOOKUPS_BEFORE_COMPARED
    engine.scheduler.report.take_metrics()
    said = "other engines of this model share nothing with this one: "
    engine.until(lambda: any(line.startswith(said) for line in engine.lines))
    assert any("blocks differ in packing" in line for line in engine.lines)


class FakePoller:
    """In place of a `MatchPoller`: the test is the masters."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.sessions: list[str] = []
        self.ended: list[PolledMatches] = []
        self.connected = self.promising = True
        self.sends = True
        self.waited_s: list[float] = []

    def __len__(self) -> int:
        return len(self.running)

    def start(self, key: Any, chains: Any, session: str = "") -> None:
        self.running.append(key)
        self.sessions.append(session)

    def is_sent(self, key: Any) -> bool:
        return self.sends

    def poll(self, wait_s: float) -> list[PolledMatches]:
        self.waited_s.append(wait_s)
        ended, self.ended = self.ended, []
        return ended

    def end(self, status: ReadStatus = ReadStatus.NEVER_WRITTEN) -> None:
        """All that runs ends with this answer."""
        self.ended += [PolledMatches(key, (Match((), 0, status),)) for key in self.running]
        self.running.clear()

    def close(self) -> None:
        pass


@pytest.fixture
def asked(start: Start) -> tuple[Engine, FakePoller, Callable[[str], float]]:
    """An engine whose masters are the test, and how many requests of a name miss for a reason."""
    engine = start(load_timeout_s=0.1)
    poller = FakePoller()
    engine.scheduler._lookups._poller = poller  # type: ignore[assignment]
    counters = engine.scheduler.planner.counters

    def misses(reason: str) -> float:
        """One more request, which waits until its lookup has ended."""
        counters.clear()
        name = f"r{engine.clock.ahead_s}"
        tokens = 2 * BLOCK + 1
        engine.scheduler.on_new_request(name, keys(name, 2), tokens, RequestHints())
        if engine.loadable(name, tokens) is None:
            engine.clock.ahead_s += 0.11
            assert engine.loadable(name, tokens) == 0
        engine.clock.ahead_s += 0.001
        return counters[f"miss {reason}"]

    return engine, poller, misses


def test_a_lookup_reports_the_arrival_and_a_long_wait_repeats_it(asked: Any) -> None:
    """Servers keep what a prompt waits for, until it is scheduled or has ended."""
    engine, poller, _ = asked
    thread = engine.threads[0]
    thread.pool = recorded = Recorded(thread.pool)
    for name in ("first", "second", "third"):
        engine.scheduler.on_new_request(
            name, keys(name, 2), 2 * BLOCK + 1, RequestHints(f"chat {name}")
        )
    engine.scheduler.on_new_request("none", keys("none", 2), 2 * BLOCK + 1, RequestHints())
    assert poller.sessions == ["chat first", "chat second", "chat third", ""]
    engine.scheduler.on_blocks_allocated("first", [[]], 0)
    engine.scheduler.on_request_finished("second")
    for _ in range(2):
        engine.clock.ahead_s += 59.0
        engine.step()
    assert engine.scheduler.planner.counters["arrivals_repeated"] == 1
    engine.clock.ahead_s += START_WAIT_S
    engine.step()
    engine.until(lambda: len(recorded.sent) == 1)
    engine.clock.ahead_s += 58.1
    engine.step()
    engine.until(lambda: len(recorded.sent) == 2)
    assert recorded.sent == [("arrived", "chat third", None)] * 2
    engine.scheduler.on_request_finished("third")
    engine.clock.ahead_s += 600.0
    engine.step()
    assert engine.scheduler.planner.counters["arrivals_repeated"] == 2


def test_a_silent_pool_costs_three_requests_their_time_and_no_other(asked: Any) -> None:
    engine, poller, misses = asked
    engine.scheduler.on_new_request("good", keys("good", 2), 2 * BLOCK + 1, RequestHints())
    poller.end()
    assert engine.loadable("good", 2 * BLOCK + 1) == 0  # the pool has answered, once
    assert [misses("lookup timeout") for _ in range(3)] == [1, 1, 1]
    assert [misses("silent pool") for _ in range(5)] == [1] * 5  # at once
    poller.end(ReadStatus.NO_MASTER)
    for _ in range(5):
        engine.clock.ahead_s += 5.1  # the longest pause: no answer has come
        assert misses("silent pool") == 1
        assert len(poller) == 1  # one lookup runs without a request, to notice the pool's return
    poller.end()
    assert misses("silent pool") == 0


def test_a_pool_whose_answers_are_late_costs_one_request_a_pause(asked: Any) -> None:
    engine, poller, misses = asked
    for _ in range(3):
        assert misses("lookup timeout") == 1
    poller.end()  # late answers
    assert misses("silent pool") == 1
    for pause_s in (0.5, 1.0, 2.0, 4.0, 5.0, 5.0):
        poller.end()
        engine.clock.ahead_s += pause_s - 0.2
        assert misses("silent pool") == 1
        poller.end()
        engine.clock.ahead_s += 0.2
        assert misses("lookup timeout") == 1
    poller.end()
    engine.clock.ahead_s += 5.1
    # An answer in time ends it all.
    tokens = 2 * BLOCK + 1
    engine.scheduler.on_new_request("good", keys("good", 2), tokens, RequestHints())
    poller.end()
    assert engine.loadable("good", tokens) == 0
    assert [misses("lookup timeout") for _ in range(3)] == [1, 1, 1]
    assert misses("silent pool") == 1


def test_no_request_waits_for_a_master_that_is_not_connected(asked: Any) -> None:
    """Nor for one that refuses."""
    engine, poller, misses = asked
    engine.scheduler.on_new_request("r", keys("refused", 2), 2 * BLOCK + 1, RequestHints())
    poller.end(ReadStatus.NO_MASTER)
    assert engine.loadable("r", 2 * BLOCK + 1) == 0
    assert engine.scheduler.planner.counters["miss no master"] == 1
    began_s = engine.clock.ahead_s
    poller.sends = poller.promising = False
    assert [misses("no master") for _ in range(5)] == [1] * 5
    assert engine.clock.ahead_s - began_s < 0.1  # none has waited
    # But for the next connection, when one has ended, and for the first, within the lookup's time.
    poller.promising = True
    engine.scheduler.on_new_request("next", keys("next", 2), 2 * BLOCK + 1, RequestHints())
    assert engine.loadable("next", 2 * BLOCK + 1) is None
    poller.end()
    assert engine.loadable("next", 2 * BLOCK + 1) == 0
    poller.promising = False
    engine.scheduler._lookups._first_at = None
    poller.connected = False
    assert misses("no master") == 1
    assert engine.clock.ahead_s - began_s > 0.1
    engine.scheduler.on_new_request("w", keys("w", 2), 2 * BLOCK + 1, RequestHints())
    assert engine.loadable("w", 2 * BLOCK + 1) is None
    engine.clock.ahead_s += 1.1  # START_WAIT_S, and some
    assert engine.loadable("w", 2 * BLOCK + 1) == 0
    began_s = engine.clock.ahead_s
    assert misses("no master") == 1
    assert engine.clock.ahead_s - began_s < 0.1


def test_hooks_wait_a_millisecond_a_step(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, poller, _ = asked
    tokens = 2 * BLOCK + 1
    busy = ScheduledRequest("x", 0, 1, [[9]])
    for number in range(20):
        engine.scheduler.on_new_request(f"r{number}", keys("wait", 2), tokens, RequestHints())

    def waits() -> int:
        poller.waited_s.clear()
        for number in range(20):
            engine.loadable(f"r{number}", tokens)
        return sum(wait_s > 0 for wait_s in poller.waited_s)

    ticks = iter(range(1000))
    monkeypatch.setattr(
        "kvpool_connector.scheduler.scheduler.time.perf_counter", lambda: next(ticks) * 3e-4
    )
    assert waits() == 4
    assert waits() == 0
    engine.step([busy])
    assert waits() == 4
    poller.end()
    assert waits() == 0


def test_a_workers_silence_is_its_own_reason(start: Start) -> None:
    engine = start(connected=False, load_timeout_s=0.1)
    engine.scheduler.on_new_request("r", keys("early", 2), 2 * BLOCK + 1, RequestHints())
    engine.clock.ahead_s += START_WAIT_S
    assert engine.loadable("r", 2 * BLOCK + 1) is None
    engine.clock.ahead_s += 0.2
    assert engine.loadable("r", 2 * BLOCK + 1) == 0
    assert engine.scheduler.planner.counters["miss no namespace"] == 1
    engine.step()  # the lookup does not start any more
    assert engine.scheduler.namespaces
    assert not engine.scheduler._lookups.waiting


def test_a_lookup_that_began_with_the_names_is_late_as_any_other(start: Start) -> None:
    engine = start(connected=False, load_timeout_s=0.1)
    engine.scheduler._lookups._poller = FakePoller()  # type: ignore[assignment]
    engine.scheduler.on_new_request("r", keys("held", 2), 2 * BLOCK + 1, RequestHints())
    engine.until(lambda: bool(engine.scheduler.namespaces))
    assert engine.scheduler._lookups.waiting
    engine.clock.ahead_s += 0.2
    assert engine.loadable("r", 2 * BLOCK + 1) == 0
    assert engine.scheduler.planner.counters["miss lookup timeout"] == 1
    assert not engine.scheduler._lookups.waiting


def test_transfers_end_when_the_pool_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_connector.worker.worker._SAVE_TIMEOUT_S", 0.3)
    local = LocalPool()
    engine = Engine(local.master, load_timeout_s=0.3, save_retries=1)
    try:
        engine.connected()
        hashes = keys("gone", 2)
        engine.save(hashes, [1, 2])
        assert engine.ask("r", hashes) == 2 * BLOCK
        local.close()
        engine.scheduler.on_blocks_allocated("r", [[5, 6]], 2 * BLOCK)
        engine.until(lambda: engine.loaded == ["r"])
        assert engine.failed == ["r"]
        assert engine.bad_blocks == {5, 6}
        assert engine.scheduler.planner.loading == 0
        # Blocks of a save that failed are unpinned, pinned for one more attempt, and unpinned.
        engine.pinned.clear()
        engine.unpinned.clear()
        engine.compute("s", keys("never stored", 2), [7, 8])
        engine.until(lambda: len(engine.unpinned) == 4)
        assert sorted(engine.pinned) == [7, 7, 8, 8]
        assert engine.stored == 2  # those of the first save
        assert ended(engine)
    finally:
        engine.close()


class Waits:
    """An event that counts how often a thread waits for it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait(self, timeout: float) -> bool:
        self.count += 1
        return bool(self._inner.wait(timeout))


def test_an_idle_engine_waits_only_while_something_runs(start: Start) -> None:
    engine = start()
    worker = engine.workers[0]
    hashes = keys("idle", 2)
    engine.save(hashes, [1, 2])
    engine.load("r", hashes, [3, 4])
    transfers = worker._ended._one_ended = Waits(worker._ended._one_ended)  # type: ignore[assignment]
    poller = FakePoller()
    engine.scheduler._lookups._poller = poller  # type: ignore[assignment]
    for _ in range(3):
        engine.step()
    assert (transfers.count, poller.waited_s) == (0, [])
    worker._ended.begin()
    engine.scheduler.on_new_request("s", hashes, 2 * BLOCK + 1, RequestHints())
    engine.step()
    assert (transfers.count, poller.waited_s) == (1, [0.001])
    # An engine that computes something looks for answers, and waits for no transfer or lookup.
    engine.step([ScheduledRequest("x", 0, 1, [[9]])])
    assert (transfers.count, poller.waited_s) == (1, [0.001, 0.0])


def test_the_pools_speed_is_probed_after_the_first_save(start: Start, pool: LocalPool) -> None:
    engine = start(load="auto")
    engine.save(keys("probe", 4), [1, 2, 3, 4])
    cost = engine.scheduler.planner.choice.transfer_cost
    assert cost.samples == 0
    engine.until(lambda: cost.samples == 1)
    [probe] = [probe for report in engine.reports for probe in report.probes]
    assert probe.size == 4 * BYTES
    assert 0 < probe.seconds < 20
    assert engine.workers[0].take_counters()["probes"] == 1
    assert ended(engine)
    engine.until(lambda: bool(engine.scheduler._thread.near))
    for number in range(5):
        engine.compute(f"s{number}", keys("probe", 4), [1, 2, 3, 4])
    assert cost.samples == 1
    assert cost.near == {one.server for one in pool.dev.servers}


def test_a_client_ends_no_session_of_another_tenant(start: Start, pool: LocalPool) -> None:
    def saves_for(tenant: str) -> None:
        engine = start(tenant=tenant)
        hints = RequestHints("chat", ends=tenant == "default")
        engine.compute("r", keys(f"tenant {tenant}", 1), [1], hints=hints)
        engine.until(lambda: engine.stored == 1)
        engine.scheduler.on_request_finished("r")

    for tenant in ("red", "default"):
        saves_for(tenant)

    def hints_of(session: str) -> list[Any]:
        return list(pool.ask(lambda client: client.session(session).explain()).hints)

    soon(lambda: any(resume_in is None for _, resume_in in hints_of("chat")))
    assert all(resume_in is not None for _, resume_in in hints_of("tenant=red/chat"))
    known = [
        entry.session.name
        for server in pool.dev.servers
        for entry in server.store.index.inventory()
        if entry.session is not None
    ]
    assert {"tenant=red/chat", "chat"} <= set(known)


def test_a_save_that_was_refused_reports_why(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(save_retries=0)
    # As before the first connection. (monkeypatch ends before the engine is closed.)
    monkeypatch.setattr(engine.workers[0]._thread, "pool", None)
    engine.compute("s", keys("refused", 1), [1])
    engine.until(lambda: any(report.saves for report in engine.reports))
    [saved] = [save for report in engine.reports for save in report.saves]
    assert saved.size == 0
    assert saved.refused == ((0, keys("refused", 1)[0], WriteStatus.NO_MASTER),)
    assert engine.unpinned == [1]


def test_loads_and_saves_are_spans_with_their_reads_and_writes_inside(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvpool[otel]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setenv(tracing.VARIABLE, "1")
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("kvpool"))
    writer, reader = start(), start()
    hashes = keys("traced", 3)
    writer.save(hashes, [1, 2, 3])
    reader.load("r", hashes, [10, 11, 12])
    spans: dict[str, Any] = {}
    for one in exporter.get_finished_spans():
        spans.setdefault(one.name, one)
    save, load = dict(spans["kvpool.save"].attributes), dict(spans["kvpool.load"].attributes)
    assert save["kvpool.blocks"] == 3
    assert save["kvpool.refused"] == 0
    assert save["kvpool.bytes"] > 0
    assert load["kvpool.request"] == "r"
    assert (load["kvpool.blocks"], load["kvpool.missing"]) == (3, 0)
    assert load["kvpool.bytes"] == save["kvpool.bytes"]
    for inner, outer in (("kvpool.read", "kvpool.load"), ("kvpool.write", "kvpool.save")):
        assert spans[inner].parent.span_id == spans[outer].context.span_id
