"""One of many loads is computed instead and compared: which one, what is compared, what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvpool import ConfigError
from kvpool.types import Match, ReadStatus, Replica, Run
from kvpool_connector import settings as settings_module
from kvpool_connector.messages import Mismatch, VerifyRequest, VerifyResult
from kvpool_connector.provenance import UNKNOWN
from kvpool_connector.scheduler import EngineStep
from kvpool_connector.values import CacheGroup, ScheduledRequest
from kvpool_connector.verifier import Verifier
from tests.conftest import keys
from tests.connector.test_halves import BLOCK, BYTES, Engine
from tests.support.local_pool import LocalPool

pytestmark = pytest.mark.timeout(60)

WRONG = Mismatch(0, 0, 0, b"digest", "layer.0", 1.0, 0.1, UNKNOWN)


def verifier(loads: int = 4, ranks: int = 1, groups: Sequence[int] = (16,)) -> Verifier:
    return Verifier(
        Counter(),  # type: ignore[arg-type]
        [CacheGroup(size, size // 16) for size in groups],
        ranks=ranks,
        loads_per_check=loads,
        timeout_s=5.0,
    )


def match(blocks: int) -> Match:
    return Match((Run(0, blocks - 1, (Replica("s", "dram"),)),), blocks, ReadStatus.NEVER_WRITTEN)


def verify(
    one: Verifier, blocks: int = 40, first: int = 0, start: int | None = None
) -> VerifyRequest | None:
    """Choose a request whose blocks the pool has from `first` on, and compute it in one step."""
    one.choose("r", first * 16, blocks * 16, (match(blocks),))
    start = first * 16 if start is None else start
    ids = [list(range(100, 100 + blocks + 1))]
    return one.take(ScheduledRequest("r", start, blocks * 16 + 5, ids), keys("r", blocks), None)


# --- which load -----------------------------------------------------------------------------------


def checks(one: Verifier, loads: int) -> list[int]:
    """At which of so many loads a verification happened; all are equal."""
    found = []
    for load in range(1, loads + 1):
        if one.due:
            found.append(load)
            request = verify(one)
            assert request is not None
            one.on_result(VerifyResult(request.job, 16))
        else:
            one.on_load()
    return found


def test_every_nth_load_is_verified() -> None:
    assert checks(verifier(10), 50) == [10, 20, 30, 40, 50]
    assert checks(verifier(1), 4) == [1, 2, 3, 4]
    assert checks(verifier(0), 100) == []


def test_a_rare_verification_comes_early_at_first() -> None:
    """An engine with a wrong name is wrong from the start."""
    assert checks(verifier(100), 500) == [16, 48, 112, 212, 312, 412]
    assert checks(verifier(2000), 5000) == [16, 48, 112, 240, 496, 1008, 2032, 4032]
    one = verifier(100)
    checks(one, 200)
    one.reset()
    assert checks(one, 60) == [16, 48]


def test_never_two_at_once() -> None:
    one = verifier(1)
    assert one.due
    one.choose("r", 0, 640, (match(40),))
    assert not one.due
    request = one.take(ScheduledRequest("r", 0, 640, [list(range(1, 41))]), keys("r", 40), None)
    assert request is not None
    assert one.running
    assert not one.due
    one.on_result(VerifyResult(request.job, 16))
    assert not one.running
    assert one.due


def test_a_request_that_ends_too_early_is_replaced_by_the_next() -> None:
    one = verifier(3)
    one.on_load()
    one.on_load()
    assert one.due
    one.choose("r", 0, 640, (match(40),))
    one.release("another")
    assert one.watches("r")
    assert one.take(ScheduledRequest("r", 0, 600, [[]]), keys("r", 40), None) is None
    one.release("r")
    assert not one.watches("r")
    assert one.take(ScheduledRequest("r", 600, 640, [[]]), keys("r", 40), None) is None
    assert one.due


# --- which blocks ---------------------------------------------------------------------------------


def test_blocks_of_the_whole_prompt_are_compared() -> None:
    request = verify(verifier(), blocks=31)
    assert request is not None
    assert [blocks.block_ids for blocks in request.blocks] == [(100 + n,) for n in range(0, 31, 2)]
    assert request.blocks[-1].digests == (keys("r", 31)[30],)
    assert request.blocks[1].match == match(31).of(2, 3)
    assert request.timeout_s == 5.0


def test_only_blocks_that_the_request_has_computed_are_compared() -> None:
    """Those before may have come from the pool, with an earlier request."""
    request = verify(verifier(), blocks=12, first=3)
    assert request is not None
    assert [blocks.block_ids[0] for blocks in request.blocks] == list(range(103, 112))
    request = verify(verifier(), blocks=12, first=3, start=9 * 16 + 1)
    assert request is not None
    assert [blocks.block_ids[0] for blocks in request.blocks] == [110, 111]


def test_later_steps_do_not_move_the_beginning() -> None:
    one = verifier()
    one.choose("r", 0, 64, (match(4),))
    ids = [[7, 8, 9, 10]]
    assert one.take(ScheduledRequest("r", 0, 40, ids), keys("r", 4), None) is None
    assert one.take(ScheduledRequest("s", 0, 400, ids), keys("s", 4), None) is None
    request = one.take(ScheduledRequest("r", 40, 64, ids), keys("r", 4), None)
    assert request is not None
    assert [blocks.block_ids[0] for blocks in request.blocks] == [7, 8, 9, 10]


def test_what_lies_before_a_sliding_window_is_left_out() -> None:
    one = verifier(groups=(16, 32))
    one.choose("r", 0, 64, (match(4), match(2)))
    ids = [[0, 0, 3, 4], [5, 6]]
    request = one.take(ScheduledRequest("r", 0, 64, ids), keys("r", 4), None)
    assert request is not None
    assert [(blocks.group, blocks.block_ids[0]) for blocks in request.blocks] == [
        (0, 3), (0, 4), (1, 5), (1, 6),
    ]  # fmt: skip
    assert request.blocks[2].digests == (keys("r", 4)[1],)


def test_a_request_without_a_block_to_compare_ends_the_verification() -> None:
    one = verifier(1)
    assert verify(one, blocks=3, start=48) is None
    assert one.due
    assert one._counters == {"verification not compared": 1}


# --- what follows ---------------------------------------------------------------------------------


def test_blocks_are_unpinned_once_when_every_rank_has_reported() -> None:
    one = verifier(ranks=2)
    request = verify(one, blocks=2)
    assert request is not None
    assert one.on_result(VerifyResult(request.job, 2, 0.01)) == ([], None)
    assert one.running
    assert one.on_result(VerifyResult(request.job, 2, 0.03)) == ([100, 101], None)
    assert one.on_result(VerifyResult(request.job, 2, 0.02)) == ([], None)
    assert one._counters == {"verification equal": 1, "verified_blocks": 4}
    assert one.difference == 0.03


def test_a_result_of_an_earlier_verification_is_ignored() -> None:
    one = verifier(1)
    first = verify(one)
    assert first is not None
    one.on_result(VerifyResult(first.job, 16))
    second = verify(one)
    assert second is not None
    assert one.on_result(VerifyResult(first.job, 16, 1.0, WRONG)) == ([], None)
    assert one.running
    assert one.mismatch is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_mismatch_of_one_rank_counts(order: tuple[int, int]) -> None:
    one = verifier(1, ranks=2)
    request = verify(one, blocks=1)
    assert request is not None
    results = [VerifyResult(request.job, 1), VerifyResult(request.job, 1, 1.0, WRONG)]
    outcomes = [one.on_result(results[rank]) for rank in order]
    assert outcomes[order.index(1)].mismatch == WRONG
    assert outcomes[order.index(0)].mismatch is None
    assert one.mismatch == WRONG
    assert outcomes[1].blocks_to_unpin == [100]
    assert one._counters["verification mismatch"] == 1
    assert "verification equal" not in one._counters


def test_a_rank_that_could_not_compare_proves_nothing() -> None:
    one = verifier(100, ranks=2)
    for _ in range(15):
        one.on_load()
    request = verify(one, blocks=1)
    assert request is not None
    one.on_result(VerifyResult(request.job, 1))
    one.on_result(VerifyResult(request.job, 0))
    assert one._counters == {"verification not compared": 1, "verified_blocks": 1}
    assert checks(one, 40) == [32]


def test_what_was_found_under_old_names_does_not_concern_the_new_ones() -> None:
    one = verifier(1)
    request = verify(one)
    assert request is not None
    one.reset()
    assert one.on_result(VerifyResult(request.job, 16, 1.0, WRONG)).mismatch is None
    assert one.mismatch is None
    assert not one.running
    request = verify(one)
    assert request is not None
    assert one.on_result(VerifyResult(request.job, 16, 1.0, WRONG)).mismatch == WRONG
    one.reset()
    assert one.mismatch is None
    one.choose("r", 0, 64, (match(4),))
    one.reset()
    assert not one.watches("r")


def test_the_servers_of_the_block_are_named() -> None:
    one = verifier(1)
    runs = (
        Run(0, 1, (Replica("a", "dram", 0), Replica("b", "dram", 1))),
        Run(2, 3, (Replica("c", "dram", 0), Replica("d", "nvme", 0), Replica("b", "dram", 1))),
    )
    one.choose("r", 0, 64, (Match(runs, 4, ReadStatus.NEVER_WRITTEN),))
    one.take(ScheduledRequest("r", 0, 64, [[1, 2, 3, 4]]), keys("r", 4), None)
    last = WRONG._replace(digest=keys("r", 4)[3])
    assert one.stored_at(last) == "c (dram), d (nvme)"
    assert one.stored_at(last._replace(part=1)) == "b (dram)"
    assert one.stored_at(WRONG) == "a server that is not known"


@pytest.mark.parametrize(
    ("rate", "loads"), [(0, 0), (1, 1), (0.1, 10), (1 / 2000, 2000), (0.3, 4), (1e-6, 10**6)]
)
def test_the_setting(rate: float, loads: int) -> None:
    assert settings_module.parse({"verify_rate": rate}).loads_per_check == loads
    assert settings_module.parse({}).loads_per_check == 2000


@pytest.mark.parametrize("rate", [-0.1, 1.1, "1:10", float("nan")])
def test_a_setting_that_is_no_share_is_refused(rate: Any) -> None:
    with pytest.raises(ConfigError, match="verify_rate"):
        settings_module.parse({"verify_rate": rate})


# --- both halves on a real pool -------------------------------------------------------------------


class ComputingEngine(Engine):
    """An engine whose `seed` makes KV of keys: equal numbers mean equal KV, but for rounding."""

    def __init__(self, address: str, *, seed: int = 0, dtype: str = "bfloat16", **options: Any):
        super().__init__(address, dtype=getattr(torch, dtype), **options)
        self.seed, self.dtype, self.serial = seed, getattr(torch, dtype), 0
        self.loads = 0

    def make(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Compute these blocks."""
        for rank, memory in enumerate(self.memory):
            for digest, block in zip(hashes, blocks, strict=True):
                seed = int.from_bytes(digest[:4], "big") + self.seed + 1000 * rank
                count = BYTES // self.dtype.itemsize
                values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
                self.serial += 1
                noise = torch.randn(count, generator=torch.Generator().manual_seed(self.serial))
                rounded = values * (1 + noise / 300)
                memory[block] = rounded.to(self.dtype).view(torch.uint8)

    def serve(self, name: str, hashes: list[bytes]) -> bool:
        """A request in one step. Whether its blocks were loaded."""
        blocks = list(range(1, len(hashes) + 1))
        tokens = len(hashes) * BLOCK + 1
        loadable = self.ask(name, hashes)
        self.scheduler.on_blocks_allocated(name, [blocks] if loadable else [], loadable)
        if loadable:
            self.until(lambda: name in self.loaded)
        lost = name in self.failed or not loadable
        if lost:
            self.make(hashes, blocks)
        start = 0 if lost else loadable
        self.step([ScheduledRequest(name, start, tokens, [[*blocks, 60]])])
        self.until(lambda: sorted(self.pinned) == sorted(self.unpinned))
        self.scheduler.on_request_finished(name)
        return not lost

    @property
    def counters(self) -> dict[str, float]:
        return self.scheduler.planner.counters


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    local = LocalPool()
    yield local
    local.close()


@pytest.fixture
def start(pool: LocalPool) -> Iterator[Callable[..., ComputingEngine]]:
    made: list[ComputingEngine] = []

    def engine(**options: Any) -> ComputingEngine:
        made.append(ComputingEngine(pool.master, **options))
        engine_of_test = made[-1]
        engine_of_test.connected()
        return engine_of_test

    yield engine
    for one in made:
        one.close()


Start = Callable[..., ComputingEngine]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_engines_that_compute_the_same_go_on_sharing(start: Start, dtype: str) -> None:
    writer, reader = start(dtype=dtype), start(verify_rate=0.5, dtype=dtype)
    hashes = keys(f"the same {dtype}", 5)
    assert not writer.serve("w", hashes)
    assert [reader.serve(f"r{n}", hashes) for n in range(6)] == [True, False] * 3
    assert reader.counters["verification equal"] == 3
    assert reader.counters["verified_blocks"] == 15
    assert reader.counters["decision verify"] == 3
    assert reader.counters["decision load"] == 3
    assert 0 < reader.scheduler.take_metrics()["verified_difference"] < 0.1
    assert reader.pinned == [1, 2, 3, 4, 5] * 3


def test_a_wrong_pool_is_found_at_the_tenth_load_and_never_used_again(
    pool: LocalPool, start: Start
) -> None:
    writer, reader = start(), start(seed=7, verify_rate=0.1)
    prompts = [keys(f"wrong {n}", 3) for n in range(50)]
    for number, hashes in enumerate(prompts):
        writer.serve(f"w{number}", hashes)
    served = [reader.serve(f"r{n}", hashes) for n, hashes in enumerate(prompts)]
    assert served == [True] * 9 + [False] * 41
    assert reader.counters["verification mismatch"] == 1
    assert reader.counters["miss mismatch"] == 40
    [line] = [line for line in reader.lines if "other KV than this engine computes" in line]
    name = reader.scheduler.namespaces[0]
    stored = pool.ask(lambda client: client.match(name, prompts[9]))
    [replica] = stored.runs[0].replicas
    for part in (
        name.name,
        "layer.0",
        "pid ",
        "rank 0",
        f"stored by {writer.scheduler.names.writer} on {replica.server} (dram)",
        "revision",
    ):
        assert part in line, line
    assert any(one.hex() in line for one in prompts[9])
    # What this engine computes does not go under that name any more, from its queue neither.
    reader.serve("new", keys("not saved", 2))
    assert pool.ask(lambda client: client.match(name, keys("not saved", 2))).length == 0
    assert sorted(reader.pinned) == sorted(reader.unpinned)
    # New names are trusted again.
    reader.scheduler.reset()
    assert not reader.serve("a", prompts[0])
    assert reader.serve("b", prompts[0])


def test_one_rank_that_differs_is_enough(start: Start) -> None:
    writer, reader = start(ranks=2), start(ranks=2, verify_rate=1.0)
    hashes = keys("one rank", 3)
    writer.serve("w", hashes)
    right, reader.make = reader.make, lambda *_: None  # type: ignore[method-assign]
    reader.memory[0][1:4] = writer.memory[0][1:4]
    assert not reader.serve("r", hashes)  # the second rank has computed zeros
    assert reader.counters["verification mismatch"] == 1
    [line] = [line for line in reader.lines if "other KV" in line]
    assert "rank 1" in line
    reader.make = right  # type: ignore[method-assign]
    assert not reader.serve("s", hashes)
    assert reader.unpinned == [1, 2, 3]


def test_a_load_that_is_under_way_at_the_mismatch_is_computed(
    pool: LocalPool, start: Start
) -> None:
    writer, reader = start(), start(seed=3, verify_rate=0.5)
    first, second = keys("under way", 3), keys("computed", 3)
    writer.serve("w", first)
    writer.serve("x", second)
    reader.serve("a", first)
    # One request is verified, the other one loads and ends later.
    assert reader.ask("b", second) == 0
    reader.scheduler.on_blocks_allocated("b", [], 0)
    assert reader.ask("c", first) == 3 * BLOCK
    reader.scheduler.on_blocks_allocated("c", [[11, 12, 13]], 3 * BLOCK)
    reader.make(second, [1, 2, 3])
    work, _ = reader.scheduler.plan_step(
        _step(ScheduledRequest("b", 0, 3 * BLOCK + 1, [[1, 2, 3, 4]])), lambda *block: True
    )
    [worker] = reader.workers
    loads, work.loads = work.loads, []
    worker.start_loads(work)
    worker.start_saves(work)
    reader.until(lambda: reader.counters["verification mismatch"] == 1)
    work.loads, work.verify = loads, None
    worker.start_loads(work)
    reader.until(lambda: "c" in reader.loaded)
    assert "c" in reader.failed
    assert reader.bad_blocks == {11, 12, 13}


def _step(*scheduled: ScheduledRequest) -> EngineStep:
    return EngineStep(scheduled, (), [(one.start, one.end) for one in scheduled], idle=False)


def test_blocks_that_the_pool_has_lost_are_not_compared(pool: LocalPool, start: Start) -> None:
    writer, reader = start(), start(seed=5, verify_rate=1.0)
    hashes = keys("lost meanwhile", 3)
    writer.serve("w", hashes)
    assert reader.ask("r", hashes) == 0
    reader.scheduler.on_blocks_allocated("r", [], 0)
    name = reader.scheduler.namespaces[0]
    pool.ask(lambda client: client.remove(name, hashes))
    reader.make(hashes, [1, 2, 3])
    reader.step([ScheduledRequest("r", 0, 3 * BLOCK + 1, [[1, 2, 3, 4]])])
    reader.until(lambda: reader.unpinned == [1, 2, 3])
    assert reader.counters["verification not compared"] == 1
    assert reader.scheduler.planner.verifier.mismatch is None


def test_a_type_that_cannot_be_compared_ends_it(start: Start) -> None:
    writer, reader = start(dtype="uint8"), start(dtype="uint8", verify_rate=0.5)
    hashes = keys("plain bytes", 2)
    writer.serve("w", hashes)
    assert [reader.serve(f"r{n}", hashes) for n in range(6)] == [True, False] + [True] * 4
    [line] = [line for line in reader.lines if "verify_rate" in line]
    assert line == "verify_rate has no effect: layer.0 has elements of type uint8"


def test_a_verification_ends_when_the_pool_has_gone() -> None:
    local = LocalPool()
    writer = ComputingEngine(local.master)
    reader = ComputingEngine(local.master, verify_rate=1.0, load_timeout_s=0.3)
    try:
        writer.connected()
        reader.connected()
        hashes = keys("gone", 3)
        writer.serve("w", hashes)
        assert reader.ask("r", hashes) == 0
        reader.scheduler.on_blocks_allocated("r", [], 0)
        local.close()
        reader.make(hashes, [1, 2, 3])
        reader.step([ScheduledRequest("r", 0, 3 * BLOCK + 1, [[1, 2, 3, 4]])])
        assert reader.scheduler.planner.has_pending_work
        reader.until(lambda: reader.unpinned == [1, 2, 3])
        assert not reader.scheduler.planner.has_pending_work
        assert reader.counters["verification not compared"] == 1
    finally:
        writer.close()
        reader.close()


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_a_chosen_request_that_loses_its_blocks_is_not_compared(start: Start, how: str) -> None:
    writer, reader = start(), start(verify_rate=0.5)
    hashes = keys(f"loses {how}", 4)
    writer.serve("w", hashes)
    assert reader.serve("a", hashes)
    assert reader.ask("r", hashes) == 0
    reader.scheduler.on_blocks_allocated("r", [], 0)
    reader.step([ScheduledRequest("r", 0, 40, [[1, 2, 3]])])
    assert reader.scheduler.planner.quiet_until["r"] == 0
    if how == "finished":
        reader.scheduler.on_request_finished("r")
    else:
        reader.step(preempted=["r"])
    reader.step([ScheduledRequest("r", 40, 4 * BLOCK + 1, [[1, 2, 3, 4, 5]])])
    assert not reader.scheduler.planner.verifier.running
    reader.until(lambda: sorted(reader.pinned) == sorted(reader.unpinned))
    assert not reader.serve("next", hashes)
    assert reader.counters["verification equal"] == 1
