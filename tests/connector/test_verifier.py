"""One of many loads is computed instead and compared: which one, what is compared, what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvpool.types import Match, ReadStatus, Replica, Run
from kvpool_connector.memory.block_form import BlockForm
from kvpool_connector.plan.known_writers import WRITERS_MAX, KnownWriters
from kvpool_connector.plan.verifier import Verifier
from kvpool_connector.records.messages import Mismatch, VerifyRequest, VerifyResult
from kvpool_connector.records.provenance import BlockWriter, Trust
from kvpool_connector.records.values import CacheGroup, RequestHints, ScheduledRequest
from kvpool_connector.scheduler.scheduler import EngineStep
from tests.conftest import keys
from tests.connector.test_halves import BLOCK, BYTES, Engine, pool, starting
from tests.support.local_pool import LocalPool

__all__ = ["pool"]  # a fixture

pytestmark = pytest.mark.timeout(60)

PEER, LIAR = BlockWriter(b"peer_id_", "peer"), BlockWriter(b"liar_id_", "liar")
WRONG = Mismatch(0, 0, 0, b"digest", "layer.0", 1.0, 0.1, LIAR)


def verifier(loads: int = 4, ranks: int = 1, groups: Sequence[int] = (16,)) -> Verifier:
    return Verifier(
        Counter(),  # type: ignore[arg-type]
        [CacheGroup(size, size // 16) for size in groups],
        KnownWriters(loads),
        ranks,
        5.0,
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


def checks(known: KnownWriters, loads: int) -> list[int]:
    """Which of so many loads of one writer's blocks are compared; all are equal."""
    found = []
    for load in range(1, loads + 1):
        if not known.trust.covers(PEER) or PEER.id in known.due:
            found.append(load)
            known.on_equal([PEER.id])
        else:
            known.on_load([PEER])
    return found


def test_the_first_load_of_a_writer_is_compared_and_then_ever_fewer() -> None:
    assert checks(KnownWriters(10), 60) == [1, 3, 7, 15, 25, 35, 45, 55]
    assert checks(KnownWriters(1), 4) == [1, 2, 3, 4]
    assert checks(KnownWriters(0), 100) == []
    found = checks(KnownWriters(2000), 100_000)
    assert found[:12] == [1, 3, 7, 15, 31, 63, 127, 255, 511, 1023, 2047, 4047]
    assert len(found) / 100_000 < 0.001


def test_a_writer_that_is_new_late_is_compared_at_once() -> None:
    known = KnownWriters(2000)
    checks(known, 5000)
    assert known.trust.covers(PEER)
    assert not known.trust.covers(LIAR)
    assert not known.on_wrong(LIAR)
    assert not known.trust.covers(LIAR)
    assert known.trust.covers(PEER)
    assert not known.odd


def test_wrong_is_final_and_a_writer_that_was_trusted_is_told_apart() -> None:
    known = KnownWriters(2000)
    known.on_equal([LIAR.id])
    assert known.on_wrong(LIAR)
    assert not known.on_wrong(LIAR)
    known.on_equal([LIAR.id])
    assert not known.trust.covers(LIAR)
    assert LIAR.id not in known.due
    known.reset()
    assert not known.wrong


def test_who_differs_from_several_and_equals_none_is_the_one_that_differs() -> None:
    known = KnownWriters(2000)
    known.on_wrong(LIAR)
    known.on_wrong(LIAR)
    assert not known.odd
    known.on_wrong(PEER)
    assert known.odd
    known.on_equal([b"a third"])
    assert not known.odd


def test_what_is_kept_of_writers_is_bounded_and_a_forgotten_one_is_not_trusted() -> None:
    known = KnownWriters(2000)
    known.on_wrong(LIAR)
    known.on_equal([PEER.id])
    for number in range(WRITERS_MAX - 1):
        known.on_load([PEER])
        known.on_equal([number.to_bytes(8, "big")])
    assert known.trust.covers(PEER)
    assert LIAR.id not in known.wrong
    assert not known.trust.covers(LIAR)


def test_one_load_at_a_time_refuses_a_writer_that_is_due() -> None:
    one = verifier(1)
    one.writers.on_equal([PEER.id])
    assert one.asks("a") == {PEER.id}
    assert one.asks("b") == frozenset()
    one.release("b")
    assert one.asks("c") == frozenset()
    one.release("a")
    assert one.asks("d") == {PEER.id}
    one.choose("r", 0, 640, (match(40),))
    assert one.asks("e") == frozenset()


def test_a_request_that_ends_too_early_is_replaced_by_the_next() -> None:
    one = verifier()
    one.choose("r", 0, 640, (match(40),))
    one.release("another")
    assert one.watched == "r"
    assert one.take(ScheduledRequest("r", 0, 600, [[]]), keys("r", 40), None) is None
    one.release("r")
    assert one.watched is None
    assert one.take(ScheduledRequest("r", 600, 640, [[]]), keys("r", 40), None) is None
    assert not one.running
    assert one.watched is None


# --- which blocks ---------------------------------------------------------------------------------


def test_blocks_of_the_whole_prompt_are_compared() -> None:
    request = verify(verifier(), blocks=31)
    [blocks] = request.blocks
    assert blocks.block_ids == tuple(range(100, 131))
    assert blocks.digests == tuple(keys("r", 31))
    assert blocks.match == match(31)
    assert request.timeout_s == 5.0


@pytest.mark.parametrize(
    ("blocks", "start", "compared"),
    [(400, None, range(103, 359)), (12, None, range(103, 112)), (12, 9 * 16 + 1, (110, 111))],
)
def test_so_many_of_the_blocks_that_the_request_has_computed_are_compared(
    blocks: int, start: int | None, compared: Sequence[int]
) -> None:
    """Those before may have come from the pool, with an earlier request."""
    request = verify(verifier(), blocks=blocks, first=3, start=start)
    assert request.blocks[0].block_ids == tuple(compared)


def test_later_steps_do_not_move_the_beginning() -> None:
    one = verifier()
    one.choose("r", 0, 64, (match(4),))
    ids = [[7, 8, 9, 10]]
    assert one.take(ScheduledRequest("r", 0, 40, ids), keys("r", 4), None) is None
    assert one.take(ScheduledRequest("s", 0, 400, ids), keys("s", 4), None) is None
    request = one.take(ScheduledRequest("r", 40, 64, ids), keys("r", 4), None)
    assert request.blocks[0].block_ids == (7, 8, 9, 10)


def test_what_lies_before_a_sliding_window_is_left_out() -> None:
    one = verifier(groups=(16, 32))
    one.choose("r", 0, 64, (match(4), match(2)))
    ids = [[0, 0, 3, 4], [5, 6]]
    request = one.take(ScheduledRequest("r", 0, 64, ids), keys("r", 4), None)
    assert [(one.group, one.block_ids) for one in request.blocks] == [(0, (3, 4)), (1, (5, 6))]
    assert request.blocks[1].digests == (keys("r", 4)[1], keys("r", 4)[3])


def test_a_request_without_a_block_to_compare_ends_the_verification() -> None:
    one = verifier(1)
    assert verify(one, blocks=3, start=48) is None
    assert not one.running
    assert one.watched is None
    assert one._counters == {"verification not compared": 1}


# --- what follows ---------------------------------------------------------------------------------


def test_blocks_are_unpinned_once_when_every_rank_has_reported() -> None:
    one = verifier(ranks=2)
    request = verify(one, blocks=2)
    equal = frozenset([PEER.id])
    assert one.on_result(VerifyResult(request.job, 2, 0.01, equal=equal)) == ([], None, False)
    assert one.running
    assert not one.writers.trust.covers(PEER)
    last = one.on_result(VerifyResult(request.job, 2, 0.03, equal=equal))
    assert last == ([100, 101], None, False)
    assert one.on_result(VerifyResult(request.job, 2, 0.02)) == ([], None, False)
    assert one._counters == {"verification equal": 1, "verified_blocks": 4}
    assert one.difference == 0.03
    assert one.writers.trust.covers(PEER)


def test_a_result_of_an_earlier_verification_is_ignored() -> None:
    one = verifier()
    first = verify(one)
    one.on_result(VerifyResult(first.job, 16))
    second = verify(one)
    assert second is not None
    assert one.on_result(VerifyResult(first.job, 16, 1.0, WRONG)) == ([], None, False)
    assert one.running
    assert not one.writers.wrong


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_mismatch_of_one_rank_counts(order: tuple[int, int]) -> None:
    one = verifier(ranks=2)
    request = verify(one, blocks=1)
    equal = frozenset([LIAR.id])
    results = [VerifyResult(request.job, 1, equal=equal), VerifyResult(request.job, 1, 1.0, WRONG)]
    outcomes = [one.on_result(results[rank]) for rank in order]
    assert outcomes[1] == ([100], WRONG, False)
    assert one.writers.wrong == {LIAR.id}
    assert one._counters["verification mismatch"] == 1
    assert "verification equal" not in one._counters


def test_of_blocks_that_differ_the_first_of_the_chain_is_blamed() -> None:
    """Whoever computed the next one may have loaded it, and is right otherwise."""
    one = verifier(ranks=2)
    request = verify(one, blocks=8)
    first = WRONG._replace(digest=keys("r", 8)[3])
    later = WRONG._replace(digest=keys("r", 8)[5], difference=2.0, writer=PEER)
    one.on_result(VerifyResult(request.job, 8, 2.0, later))
    assert one.on_result(VerifyResult(request.job, 8, 1.0, first)).mismatch == first
    assert one.writers.wrong == {LIAR.id}


def test_a_rank_that_could_not_compare_proves_nothing() -> None:
    one = verifier(ranks=2)
    request = verify(one, blocks=1)
    one.on_result(VerifyResult(request.job, 1, equal=frozenset([PEER.id])))
    one.on_result(VerifyResult(request.job, 0))
    assert one._counters == {"verification not compared": 1, "verified_blocks": 1}
    assert not one.writers.trust.covers(PEER)


def test_what_was_found_under_old_names_does_not_concern_the_new_ones() -> None:
    one = verifier()
    request = verify(one)
    one.reset()
    assert one.on_result(VerifyResult(request.job, 16, 1.0, WRONG)).mismatch is None
    assert not one.running
    request = verify(one)
    assert one.on_result(VerifyResult(request.job, 16, 1.0, WRONG)).mismatch == WRONG
    one.reset()
    assert not one.writers.wrong
    one.choose("r", 0, 64, (match(4),))
    one.reset()
    assert one.watched is None


def test_the_servers_of_the_block_are_named() -> None:
    one = verifier()
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


# --- both halves on a real pool -------------------------------------------------------------------


class ComputingEngine(Engine):
    """An engine whose `seed` makes KV of keys: equal numbers mean equal KV, but for rounding."""

    def __init__(
        self,
        address: str,
        *,
        seed: int = 0,
        dtype: str = "bfloat16",
        noise: float = 1 / 300,
        **options: Any,
    ):
        super().__init__(address, dtype=getattr(torch, dtype), **options)
        self.seed, self.dtype, self.serial = seed, getattr(torch, dtype), 0
        self.noise = noise
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
                rounded = values * (1 + noise * self.noise)
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


@pytest.fixture
def start(pool: LocalPool) -> Iterator[Callable[..., ComputingEngine]]:
    with starting(pool, ComputingEngine) as engine:
        yield engine


Start = Callable[..., ComputingEngine]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_engines_that_compute_the_same_go_on_sharing(start: Start, dtype: str) -> None:
    writer, reader = start(dtype=dtype), start(verify_rate=0.5, dtype=dtype)
    hashes = keys(f"the same {dtype}", 5)
    assert not writer.serve("w", hashes)
    assert [reader.serve(f"r{n}", hashes) for n in range(6)] == [False, True] * 3
    assert reader.counters["verification equal"] == 3
    assert reader.counters["verified_blocks"] == 15
    assert reader.counters["loads_refused"] == 3
    assert reader.counters["decision load"] == 6
    assert "loads_failed" not in reader.counters
    assert reader.workers[0].take_counters()["load_miss not trusted"] == 15
    assert 0 < reader.scheduler.report.take_metrics()["verified_difference"] < 0.1
    assert sorted(reader.pinned) == sorted(reader.unpinned)
    assert reader.caches_dropped == 0


@pytest.mark.parametrize(
    ("seed", "of_codec", "found"),
    [(0, 0.0, "mismatch"), (0, 0.02, "mismatch"), (0, 0.15, "equal"), (7, 0.3, "mismatch")],
)
def test_what_a_codec_may_change_is_no_mismatch(
    start: Start, monkeypatch: pytest.MonkeyPatch, seed: int, of_codec: float, found: str
) -> None:
    """A lossy codec says how much. That comes on top of rounding, and hides no other model."""
    monkeypatch.setattr(BlockForm, "tolerance", of_codec)
    writer, reader = start(seed=seed, noise=0.2), start(verify_rate=1.0)
    hashes = keys(f"coded {seed} {of_codec}", 4)
    writer.serve("w", hashes)
    reader.serve("r", hashes)
    assert reader.counters[f"verification {found}"] == 1


def test_of_an_engine_that_joins_late_and_differs_no_block_is_ever_loaded(
    pool: LocalPool, start: Start
) -> None:
    """The others go on sharing, and it stops when it has differed from two."""
    first, second = start(verify_rate=0.001), start(verify_rate=0.001)
    prompts = [keys(f"fleet {n}", 3) for n in range(20)]
    for number, hashes in enumerate(prompts):
        (first, second)[number % 2].serve(f"w{number}", hashes)
    for number, hashes in enumerate(prompts[:4]):
        (second, first)[number % 2].serve(f"r{number}", hashes)
    liar = start(seed=7, verify_rate=0.001)
    wrong = [keys(f"wrong {n}", 3) for n in range(20)]
    for number, hashes in enumerate(wrong):
        liar.serve(f"l{number}", hashes)
    assert not any(first.serve(f"a{n}", hashes) for n, hashes in enumerate(wrong))
    assert first.counters["verification mismatch"] == 1
    assert first.counters["loads_refused"] == 20 + 1
    served = [first.serve(f"b{n}", hashes) for n, hashes in enumerate(prompts[5::2])]
    assert served == [False, True, True, True] * 2  # its third and its seventh load are compared
    assert first.caches_dropped == 0
    [line] = [line for line in first.lines if "other KV than this engine computes" in line]
    for part in (
        first.scheduler.namespaces[0].name,
        "layer.0",
        "rank 0",
        f"Computed by {first.scheduler.names.writer}",
        f"stored by {liar.scheduler.names.writer} on ",
    ):
        assert part in line, line
    # The one that differs notices, and does not go on filling the pool.
    assert not any(liar.serve(f"m{n}", hashes) for n, hashes in enumerate(prompts))
    assert liar.counters["verification mismatch"] == 2
    assert any("it shares nothing any more" in line for line in liar.lines)
    liar.serve("new", keys("not saved", 2))
    name = liar.scheduler.namespaces[0]
    assert pool.ask(lambda client: client.match(name, keys("not saved", 2))).length == 0
    liar.scheduler.reset()
    assert not liar.scheduler.planner.verifier.writers.odd


def test_the_pool_gets_the_right_block_for_a_wrong_one(pool: LocalPool, start: Start) -> None:
    """By whoever meets it, if another engine has confirmed that one: then it is a hit for all."""
    good, liar, reader = start(), start(seed=7), start(verify_rate=0.001)
    hashes, more, shared = keys("wrong first", 3), keys("and second", 3), keys("confirms", 3)
    liar.serve("l", hashes)
    liar.serve("m", more)
    good.serve("g", shared)
    reader.serve("a", hashes)  # nobody has confirmed it yet: it removes nothing
    assert "removed_blocks" not in reader.workers[0].take_counters()
    assert not reader.serve("b", hashes)
    assert "removed_blocks" not in reader.workers[0].take_counters()
    reader.serve("c", shared)
    assert not reader.serve("d", more)
    assert reader.workers[0].take_counters()["removed_blocks"] == 3
    name = reader.scheduler.namespaces[0]
    reader.until(lambda: pool.ask(lambda client: client.match(name, more)).length == 3)
    other = start(seed=0, verify_rate=0.001)
    assert [other.serve(f"o{n}", more) for n in range(2)] == [False, True]
    assert other.counters["verification equal"] == 1
    # One that differs from everybody removes nothing of what is right.
    wrong = start(seed=9, verify_rate=0.001)
    for number, one in enumerate((shared, more, shared)):
        assert not wrong.serve(f"w{number}", one)
    assert pool.ask(lambda client: client.match(name, shared)).length == 3
    assert other.serve("again", shared) is False  # the first of this writer's is compared
    assert other.counters["verification equal"] == 2


def test_who_goes_on_from_wrong_blocks_is_not_blamed(start: Start) -> None:
    """Blocks behind wrong ones differ as well; the first that differs is found by halving."""
    good, liar = start(blocks=200), start(seed=7, blocks=200)  # a quarter may be saved at once
    reader, hashes = start(verify_rate=0.01, blocks=200), keys("goes on", 40)
    good.serve("g", hashes[:19])
    liar.memory[0].fill_(7)
    liar.serve("l", hashes[:20])  # loads 19, and saves one that is not read at first
    good.memory[0][20:].fill_(9)
    good.serve("h", hashes)  # loads 20, and what it saves behind them differs
    assert not reader.serve("r", hashes)
    [line] = [line for line in reader.lines if "other KV" in line]
    blamed = [n for n, one in enumerate(hashes) if one.hex() in line]
    assert blamed == [19]
    writers = reader.scheduler.planner.verifier.writers
    assert writers.wrong == {liar.scheduler.names.writer.id}
    assert writers.trust.covers(good.scheduler.names.writer)


def test_an_engine_that_only_saves_compares_some_of_what_is_there_already(start: Start) -> None:
    others, liar = start(), start(seed=7)
    hashes, wrong = keys("producer", 6), keys("wrong for producers", 6)
    others.serve("o", hashes)
    liar.serve("l", wrong)
    for kept, writer in ((hashes, others), (wrong, liar)):
        producer = start(verify_rate=0.001, engine={"loads": False})
        producer.serve("p", kept)
        producer.until(lambda one=producer: one.counters["verified_blocks"])  # type: ignore[misc]
        writers, id = producer.scheduler.planner.verifier.writers, writer.scheduler.names.writer.id
        assert (writers.wrong, id in (writers.trust.writers or ())) == (
            (set(), True) if writer is others else ({id}, False)
        )
        producer.serve("again", kept)
        assert producer.counters["verified_blocks"] <= 6
        assert sorted(producer.pinned) == sorted(producer.unpinned)


def test_a_save_that_goes_on_from_others_blocks_blames_nobody_for_its_first(
    start: Start,
) -> None:
    """What stands before it may have been wrong when it was computed."""
    liar = start(seed=7)
    reader = start(verify_rate=0.001, engine={"loads": False})
    hashes = keys("behind", 6)
    liar.serve("l", hashes)
    blocks = list(range(1, 7))
    reader.make(hashes, blocks)
    reader.scheduler.on_new_request("r", hashes, 6 * BLOCK, RequestHints(skip_load=True))
    reader.scheduler.planner.requests["r"].blocks_saved = [3]  # the others were there
    reader.step([ScheduledRequest("r", 3 * BLOCK, 6 * BLOCK, [blocks])])
    reader.until(lambda: reader.counters["verification mismatch"] == 1)
    assert not reader.scheduler.planner.verifier.writers.wrong


def test_one_rank_that_differs_is_enough(start: Start) -> None:
    writer, reader = start(ranks=2), start(ranks=2, verify_rate=1.0)
    hashes = keys("one rank", 3)
    writer.serve("w", hashes)
    right, reader.make = reader.make, lambda *_: None  # type: ignore[method-assign]

    def half(hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        reader.memory[0][1:4] = writer.memory[0][1:4]
        reader.memory[1][1:4] = 0

    reader.make = half  # type: ignore[method-assign]
    assert not reader.serve("r", hashes)
    assert reader.counters["verification mismatch"] == 1
    [line] = [line for line in reader.lines if "other KV" in line]
    assert "rank 1" in line
    reader.make = right  # type: ignore[method-assign]
    assert not reader.serve("s", hashes)
    assert sorted(reader.pinned) == sorted(reader.unpinned)


def refused(reader: ComputingEngine, name: str, hashes: list[bytes]) -> None:
    """A request whose load is refused, and that computes now."""
    blocks = list(range(1, len(hashes) + 1))
    reader.load(name, hashes, blocks)
    assert name in reader.failed
    assert reader.bad_blocks >= set(blocks)
    assert reader.loadable(name, len(hashes) * BLOCK + 1) == 0
    reader.make(hashes, blocks)


def test_a_load_under_way_when_its_writer_is_found_to_differ_is_computed(
    start: Start,
) -> None:
    writer, reader = start(), start(verify_rate=0.5)
    hashes = keys("under way", 3)
    writer.serve("w", hashes)
    reader.serve("a", hashes)
    reader.begin_load("c", hashes, [11, 12, 13])
    work, _ = reader.scheduler.plan_step(_step(), lambda *block: True)
    assert work.trust is not None
    assert work.trust.covers(writer.scheduler.names.writer)
    [worker] = reader.workers
    read = worker._read_part

    async def then_untrusted(*arguments: Any) -> set[int]:
        found = await read(*arguments)
        worker._trust = Trust(frozenset())
        return found

    worker._read_part = then_untrusted  # type: ignore[method-assign]
    worker.start_loads(work)
    reader.until(lambda: "c" in reader.loaded)
    assert "c" in reader.failed
    assert reader.bad_blocks >= {11, 12, 13}


def _step(*scheduled: ScheduledRequest) -> EngineStep:
    return EngineStep(scheduled, (), [(one.start, one.end) for one in scheduled], idle=False)


def test_blocks_that_the_pool_has_lost_are_not_compared(pool: LocalPool, start: Start) -> None:
    writer, reader = start(), start(seed=5, verify_rate=1.0)
    hashes = keys("lost meanwhile", 3)
    writer.serve("w", hashes)
    refused(reader, "r", hashes)
    name = reader.scheduler.namespaces[0]
    pool.ask(lambda client: client.remove(name, hashes))
    reader.step([ScheduledRequest("r", 0, 3 * BLOCK + 1, [[1, 2, 3, 4]])])
    reader.until(lambda: sorted(reader.unpinned) == sorted(reader.pinned) != [])
    assert reader.counters["verification mismatch"] == 0
    assert not reader.scheduler.planner.verifier.writers.wrong


def test_a_type_that_cannot_be_compared_ends_it(start: Start) -> None:
    writer, reader = start(dtype="uint8"), start(dtype="uint8", verify_rate=0.5)
    hashes = keys("plain bytes", 2)
    writer.serve("w", hashes)
    assert [reader.serve(f"r{n}", hashes) for n in range(6)] == [False] + [True] * 5
    [line] = [line for line in reader.lines if "verify_rate" in line]
    assert line == "verify_rate has no effect: layer.0 has elements of type uint8"


def test_an_engine_whose_requests_fail_with_a_block_refuses_none(start: Start) -> None:
    writer, reader = start(), start(verify_rate=1.0, engine={"recomputes": False})
    hashes = keys("fails", 2)
    writer.serve("w", hashes)
    assert reader.serve("r", hashes)


def test_a_verification_ends_when_the_pool_has_gone() -> None:
    local = LocalPool()
    writer = ComputingEngine(local.master)
    reader = ComputingEngine(local.master, verify_rate=1.0, load_timeout_s=0.3)
    try:
        writer.connected()
        reader.connected()
        hashes = keys("gone", 3)
        writer.serve("w", hashes)
        refused(reader, "r", hashes)
        local.close()
        reader.step([ScheduledRequest("r", 0, 3 * BLOCK + 1, [[1, 2, 3, 4]])])
        assert reader.scheduler.planner.has_pending_work
        reader.until(lambda: sorted(reader.unpinned) == sorted(reader.pinned) != [])
        assert not reader.scheduler.planner.verifier.running
        assert reader.counters["verification not compared"] == 1
    finally:
        writer.close()
        reader.close()


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_a_chosen_request_that_loses_its_blocks_is_not_compared(start: Start, how: str) -> None:
    writer, reader = start(), start(verify_rate=0.5)
    hashes = keys(f"loses {how}", 4)
    writer.serve("w", hashes)
    refused(reader, "r", hashes)
    reader.step([ScheduledRequest("r", 0, 40, [[1, 2, 3]])])
    assert reader.scheduler.planner.quiet.left("r") == 0
    if how == "finished":
        reader.scheduler.on_request_finished("r")
    else:
        reader.step(preempted=["r"])
    reader.step([ScheduledRequest("r", 40, 4 * BLOCK + 1, [[1, 2, 3, 4, 5]])])
    assert not reader.scheduler.planner.verifier.running
    reader.until(lambda: sorted(reader.pinned) == sorted(reader.unpinned))
    assert not reader.serve("next", hashes)
    assert reader.counters["verification equal"] == 1
