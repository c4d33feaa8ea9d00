"""Policies in the real store: who goes first, who may stay, and that the books stay whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import pytest

from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Decision, Inferred, Policy
from kvpool.server.eviction.arc import ARC
from kvpool.server.eviction.density import Density, LifetimeHistogram
from kvpool.server.eviction.lease import Lease, ReuseHistogram
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.programs import Programs
from kvpool.server.eviction.session_hints import SessionAwarePolicy
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.extent_state import State
from kvpool.server.state.store import Store
from kvpool.testing import POLICY_CHECKS, ConformanceError, NotDeclared, check_policy
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, WriteStatus
from tests.conftest import keys
from tests.support.stores import ONE, PAGE, here, read, write

POLICIES: dict[str, Callable[[int], Policy[Entry]]] = {
    "lru": LRU,
    "arc": ARC,
    "lease": Lease,
    "density": Density,
    "programs": Programs,
}


def books(policy: str, pages: int) -> Store:
    return Store(pages * PAGE, policy=POLICIES[policy](pages * PAGE))


# --- arc ---------------------------------------------------------------------------------


def test_arc_keeps_what_was_used_again_through_a_scan() -> None:
    """Twice the store of blocks that nobody asks for again push out LRU's blocks, not ARC's."""
    kept = {}
    for policy in ("lru", "arc"):
        store = books(policy, 20)
        loved = keys("loved", 5)
        write(store, loved, 0.0)
        read(store, loved, 1.0)
        for number in range(40):
            write(store, keys(f"scan/{number}", 1), 2.0 + number)
        kept[policy] = here(store, loved)
    assert kept == {"lru": 0, "arc": 5}


def test_arc_counts_a_write_as_one_use() -> None:
    """Reserved and sealed is not used twice: a scan alone makes nothing dear."""
    store = books("arc", 4)
    first = keys("first", 4)
    write(store, first, 0.0)
    read(store, first[:1], 1.0)
    write(store, keys("scan", 3), 2.0)
    assert [store.index.peek(ONE, 0, digest) is not None for digest in first] == [True] + [
        False
    ] * 3


def test_arc_gives_more_room_to_the_kind_that_came_back() -> None:
    """Blocks used once that return soon after they went: their kind had too little."""
    policy: ARC[Entry] = ARC(8 * PAGE)
    store = Store(8 * PAGE, policy=policy)
    loved = keys("loved", 6)
    write(store, loved, 0.0)
    read(store, loved, 1.0)
    assert policy.once_share == 0.0
    for now in range(2, 40):
        write(store, [keys("cycle", 3)[now % 3]], float(now))
    assert policy.once_share > 0.0


def test_arc_remembers_no_more_than_its_store_could_hold() -> None:
    policy: ARC[Entry] = ARC(16 * PAGE)
    store = Store(16 * PAGE, policy=policy)
    for number in range(500):
        write(store, keys(f"scan/{number}", 3), float(number))
        read(store, keys(f"scan/{number}", 3), number + 0.5)
        assert policy.ghosts <= 16


# --- lease -------------------------------------------------------------------------------


def trained(pages: int, gap_s: float = 5.0) -> tuple[Store, Lease[Entry], float]:
    """A store that has seen blocks used every `gap_s`; and the time."""
    policy: Lease[Entry] = Lease(pages * PAGE)
    store = Store(pages * PAGE, policy=policy)
    chain = keys("training", pages)
    write(store, chain, 0.0)
    now = 0.0
    for _ in range(1 + 1024 // pages):
        now += gap_s
        read(store, chain, now)
    return store, policy, now


def test_a_lease_is_learned_from_how_soon_blocks_are_used_again() -> None:
    _, policy, _ = trained(10)
    assert 9.5 < policy.lease_s < 13.0
    _, policy, _ = trained(10, gap_s=600.0)
    assert policy.lease_s == 30.0


def test_what_was_used_a_moment_ago_stays_and_the_newcomer_is_refused_at_once() -> None:
    store, _, now = trained(10)
    new = keys("new", 3)
    assert write(store, new, now + 1.0) == [WriteStatus.BYPASSED] * 3
    assert here(store, keys("training", 10)) == 10
    assert store.extents.bypassed == 1


def test_leases_end_by_themselves() -> None:
    """A full store never freezes on old data (G9), not even on data that was dear (once)."""
    store, policy, now = trained(10)
    now += policy.lease_s + 0.1
    assert write(store, keys("new", 10), now) == [WriteStatus.RESERVED] * 10
    assert here(store, keys("training", 10)) == 0


def test_the_median_follows_the_traffic() -> None:
    gaps = ReuseHistogram()
    for _ in range(5000):
        gaps.add(2.0)
    assert 1.7 < gaps.median_s < 2.4
    for _ in range(200_000):
        gaps.add(50.0)
    assert 42.0 < gaps.median_s < 60.0
    gaps.add(0.0)
    gaps.add(float("1e12"))


@pytest.mark.parametrize(
    ("counts", "median_s"),
    [
        # In bins of a quarter octave from 10 ms on: bin 8 is 40 ms to 47.6 ms, 12 is 80 ms on.
        ({0.04: 1024}, 0.01 * 2 ** (8.5 / 4)),
        ({0.0475: 1024}, 0.01 * 2 ** (8.5 / 4)),
        ({0.04: 256, 0.08: 768}, 0.01 * 2 ** ((12 + 1 / 3) / 4)),
        ({0.04: 512, 0.08: 512}, 0.01 * 2 ** (9 / 4)),
        ({0.04: 511, 0.08: 513}, 0.01 * 2 ** ((12 + 1 / 513) / 4)),
        ({0.01: 1024}, 0.01 * 2 ** (0.5 / 4)),
        ({1e9: 1024}, 0.01 * 2 ** (87.5 / 4)),
    ],
)
def test_the_median_lies_where_half_of_the_times_are_below(
    counts: dict[float, int], median_s: float
) -> None:
    gaps = ReuseHistogram()
    gaps.add(0.0099)  # a step of one use
    for gap_s, count in counts.items():
        for _ in range(count):
            assert gaps.median_s == 0.0
            gaps.add(gap_s)
    assert gaps.median_s == pytest.approx(median_s)


# --- density -----------------------------------------------------------------------------


def test_densities_of_lives_that_end_at_two_ages() -> None:
    """100 blocks: 40 are used again in the second bin, 20 in the tenth, 40 never are."""
    lives = LifetimeHistogram()
    lives.began = 100.0
    edges = [0.0] + [0.25 * 2 ** (number / 4) for number in range(64)]  # of the bins, in seconds
    for number, count in ((1, 40), (9, 20)):
        for _ in range(count):
            lives.ended((edges[number] + edges[number + 1]) / 2)
    lives.learn()
    widths = [after - before for before, after in itertools.pairwise(edges)]
    # Until the second bin ends 100 blocks wait, half of the 40 during that bin; then 60.
    first = 40 / (100 * widths[0] + 80 * widths[1])
    second = 40 / (80 * widths[1])
    last = 20 / (50 * widths[9])
    later = 20 / (60 * sum(widths[5:9]) + 50 * widths[9])
    for age_s, density in ((0.2, first), (0.27, second), (edges[9] * 1.01, last)):
        assert lives.density(age_s) == pytest.approx(density)
    assert lives.density(edges[5] * 1.01) == pytest.approx(later)
    assert lives.density(edges[10] * 1.01) == 0.0
    assert lives.rank(0.27) == math.frexp(second)[1]
    assert lives.rank(edges[10] * 1.01) == -10_000
    assert lives.began == pytest.approx(90.0)
    lives.learn()  # all counts are nine tenths: the densities are what they were
    assert lives.density(0.27) == pytest.approx(second)


def cycle(pages: int, count: int, rounds: int) -> tuple[int, int]:
    """Hits of LRU and of density when `count` blocks take turns in a store for `pages`."""
    hits = {"lru": 0, "density": 0}
    names = keys("turn", count)
    for policy in hits:
        store = books(policy, pages)
        for now in range(rounds * count):
            digest = names[now % count]
            if store.index.peek(ONE, 0, digest) is None:
                write(store, [digest], float(now))
            else:
                hits[policy] += now > rounds * count // 2
                read(store, [digest], float(now))
    return hits["lru"], hits["density"]


@pytest.mark.parametrize(("relearn_every", "rounds"), [(300, 40), (None, 120)])
def test_density_learns_not_to_let_in_what_would_push_out_what_is_next(
    monkeypatch: pytest.MonkeyPatch, relearn_every: int | None, rounds: int
) -> None:
    """Thirty blocks take turns in a store for twenty: LRU never hits. As it is installed, too,
    before a small server was touched 3,600 times."""
    if relearn_every is not None:
        monkeypatch.setattr("kvpool.server.eviction.density._RELEARN_EVERY", relearn_every)
    monkeypatch.setattr("kvpool.server.eviction.density._SAMPLE", 1)
    lru, density = cycle(20, 30, rounds)
    assert lru == 0
    assert density > 0.5 * 30 * min(rounds / 2, 60)


def test_density_refuses_nothing_in_a_shortage_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty blocks take turns in a store for twenty, then thirty do, then twenty again.

    Each victim is dearer than the newcomer, from the first one on. It counts only while many blocks
    are asked for again too late.
    """
    monkeypatch.setattr("kvpool.server.eviction.density._RELEARN_EVERY", 300)
    monkeypatch.setattr("kvpool.server.eviction.density._SAMPLE", 1)
    store = books("density", 20)
    names, others = keys("turn", 30), keys("later", 400)
    refused = []
    for now in range(4000):
        of = 30 if 600 <= now < 1400 else 20
        name = names[now % of] if now % 20 or now < 3000 else others[now // 20]
        if store.index.peek(ONE, 0, name) is not None:
            read(store, [name], float(now))
        elif write(store, [name], float(now)) == [WriteStatus.BYPASSED]:
            refused.append(now)
    assert refused[0] > 660
    assert sum(now < 1400 for now in refused) > 30
    assert not [now for now in refused if now >= 3000]


# --- all ---------------------------------------------------------------------------------


#: Around the simplest policy, and around one that refuses newcomers.
SESSION_AWARE: dict[str, Callable[[int], Policy[Entry]]] = {
    "sessions/lru": lambda capacity: SessionAwarePolicy(LRU(capacity), capacity),
    "sessions/density": lambda capacity: SessionAwarePolicy(Density(capacity), capacity),
}


@pytest.mark.parametrize("make", (both := {**POLICIES, **SESSION_AWARE}).values(), ids=both)
@pytest.mark.parametrize("check", POLICY_CHECKS.values(), ids=POLICY_CHECKS)
def test_conformance(
    check: Callable[[Callable[[int], Policy[Entry]]], None], make: Callable[[int], Policy[Entry]]
) -> None:
    with suppress(NotDeclared):
        check(make)


def test_check_policy_runs_the_checks() -> None:
    with pytest.raises(ConformanceError, match="no_victim_that_may_not_go"):
        check_policy(ForgetsToAsk)


# --- wrong policies ------------------------------------------------------------------------

Evictable = Callable[[Entry], bool]
Answer = Entry | Decision | None


class ForgetsToAsk(LRU[Entry]):
    """The oldest block, whether it may go or not."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        return super().victim(newcomer, lambda _: True, now)


class KeepsTheRemoved(LRU[Entry]):
    """Blocks that have left are offered as victims."""

    def remove(self, block: Entry) -> None:
        pass

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        return super().victim(newcomer, lambda b: b.state is State.FREE or evictable(b), now)


class NeverGives(LRU[Entry]):
    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        return None


class Insists(LRU[Entry]):
    """The same block again and again, whatever it is told."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        return self._heap[0][1]


class KeepsRejected(LRU[Entry]):
    """What may not go stays in the queue."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        rejected = []
        while isinstance(block := self.oldest(), Entry) and not evictable(block):
            rejected.append(block)
            self.take()
        if isinstance(block, Entry):
            self.take()
        for one in rejected:
            self.add_candidate(one)
        return block


class IgnoresReads(LRU[Entry]):
    """First in, first out."""

    def touch(self, block: Entry, now: float) -> None:
        if block.policy_data < 2:
            super().touch(block, now)
        block.policy_data += 1


class Lists(LRU[Entry]):
    """Has all blocks in a list."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self.all: list[Entry] = []

    def add_candidate(self, block: Entry) -> None:
        self.all.append(block)
        super().add_candidate(block)


class Scans(Lists):
    """Looks at every block for each victim."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        min(self.all, key=lambda block: block.last_used, default=None)
        return super().victim(newcomer, evictable, now)


class ScansInC(Lists):
    """The same, where no line of Python shows it."""

    def remove(self, block: Entry) -> None:
        super().remove(block)
        if block in self.all:
            self.all.remove(block)

    def victim_age(self, now: float) -> float:
        return max(0.0, now - min(map(attrgetter("last_used"), self.all), default=now * 1e6) / 1e6)


class Thorough(LRU[Entry]):
    """Goes on until it has an answer."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        while (answer := super().victim(newcomer, evictable, now)) is Decision.NOT_YET:
            pass
        return answer


class Hesitant(LRU[Entry]):
    """Puts an answer off, and does nothing meanwhile."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        return Decision.NOT_YET


class Sacrifices(LRU[Entry]):
    """Where nothing can go, the new block does."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        answer = super().victim(newcomer, evictable, now)
        return newcomer if answer is None else answer


class LeavesItToRemove(LRU[Entry]):
    """A victim is in the queue until the store takes it out."""

    def victim(self, newcomer: Entry, evictable: Evictable, now: float) -> Answer:
        answer = super().victim(newcomer, evictable, now)
        if isinstance(answer, Entry):
            self.add_candidate(answer)
        return answer


class Meddles(LRU[Entry]):
    """Counts reads in a field of the store's."""

    def touch(self, block: Entry, now: float) -> None:
        super().touch(block, now)
        block.reads += 1


class LearnsTooMuch(LRU[Entry]):
    """Forgets its queue for what it learns."""

    def arrived(self, pause_s: float) -> None:
        self._heap.clear()


class Guesses(LRU[Entry]):
    """Knows why of those that it has seen."""

    def inferred(self) -> Inferred:
        return Inferred({"seen": 0}, {}.__getitem__)


class InMilliseconds(LRU[Entry]):
    def victim_age(self, now: float) -> float:
        return super().victim_age(now) * 1000


class OneStamp(LRU[Entry]):
    """Two uses at the same time have the same number."""

    def touch(self, block: Entry, now: float) -> None:
        super().touch(block, now)
        block.last_used = int(now * 1e6)


@pytest.mark.parametrize(
    ("policy", "check"),
    [
        (KeepsRejected, "a_rejected_block_comes_back_when_it_is_offered"),
        (IgnoresReads, "a_block_that_was_read_outlives_those_that_were_only_written"),
        (Scans, "a_call_takes_as_long_with_many_blocks"),
        (Scans, "a_call_does_as_much_with_many_blocks"),
        (ScansInC, "a_call_does_as_much_with_many_blocks"),
        (Thorough, "no_call_is_long"),
        (Hesitant, "every_candidate_is_a_victim_once"),
        (Sacrifices, "every_candidate_is_a_victim_once"),
        (LeavesItToRemove, "a_victim_has_left_the_queue"),
        (Meddles, "a_policy_changes_its_own_fields_only"),
        (Guesses, "what_it_infers_is_for_people"),
        (LearnsTooMuch, "what_it_learns_from_arrivals_is_bounded"),
        (InMilliseconds, "the_age_is_that_of_the_next_victim"),
        (OneStamp, "the_time_of_a_use_is_made_unique"),
        (ForgetsToAsk, "no_victim_that_may_not_go"),
        (ForgetsToAsk, "random_histories_in_a_store"),
        (KeepsTheRemoved, "a_removed_block_is_no_victim"),
        (KeepsTheRemoved, "random_histories_in_a_store"),
        (Lists, "removed_blocks_take_no_memory"),
        (NeverGives, "every_candidate_is_a_victim_once"),
        (NeverGives, "bypass_ends"),
        (NeverGives, "random_histories_in_a_store"),
        (Insists, "every_candidate_is_a_victim_once"),
    ],
)
def test_the_kit_notices_a_wrong_policy(policy: Callable[[int], Policy[Entry]], check: str) -> None:
    with pytest.raises(ConformanceError, match=check):
        POLICY_CHECKS[check](policy)


@pytest.mark.parametrize("policy", [ForgetsToAsk, Insists])
def test_the_store_asks_again_before_it_evicts(policy: Callable[[int], Policy[Entry]]) -> None:
    """A wrong policy hands no pinned extent to a writer (G4), and does not stop the store."""
    store = Store(4 * PAGE, policy=policy(4 * PAGE))
    rejected: list[Entry] = []
    store.extents.on_rejected_victim = rejected.append
    chain = keys("chain", 4)
    for now, digest in enumerate(chain):
        write(store, [digest], float(now))
    (pin,) = store.pin(2, ONE, 0, chain[:1], 4.0)
    for other in store.pin(3, ONE, 0, chain[1:], 5.0):  # later uses: the pinned one is the oldest
        store.unpin(3, other.id)
    answers = write(store, keys("new", 1), 6.0)
    assert rejected
    assert {entry.digest for entry in rejected} == {chain[0]}
    assert len(rejected) <= 8
    assert store.index.peek(ONE, 0, chain[0]) is not None
    assert answers == [WriteStatus.NO_SPACE if policy is Insists else WriteStatus.RESERVED]
    store.unpin(2, pin.id)
    assert write(store, keys("newer", 1), 7.0) == [WriteStatus.RESERVED]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_move_into_a_full_tier_does_not_wait_for_all_of_the_order(policy: str) -> None:
    """Each block was read since the order was looked at: that is brought up to date in steps."""
    store, blocks = books(policy, 3000), keys("here", 3000)
    for first in range(0, 3000, 100):
        write(store, blocks[first : first + 100], float(first))
    for first in range(0, 3000, 100):
        read(store, blocks[first : first + 100], 1e6 + first)
    asked, victim = 0, store.extents.policy.victim

    def count(*arguments: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        return victim(*arguments, **more)

    store.extents.policy.victim = count  # type: ignore[method-assign]
    statuses = []
    while WriteStatus.RESERVED not in statuses:
        before = asked
        request = ReserveRequest(ONE, 0, keys("new", 1), [ROOT], [PAGE], None)
        statuses += [one.status for one in store.reserve(MOVER, request, 2e6)]
        assert asked - before <= 2
        assert len(statuses) < 100
    assert set(statuses[:-1]) <= {WriteStatus.NOT_YET}
    check_invariants(store)


def test_a_policy_that_never_answers_does_not_stop_a_move() -> None:
    store = Store(4 * PAGE, policy=Hesitant(4 * PAGE))
    write(store, keys("here", 4), 0.0)
    request = ReserveRequest(ONE, 0, keys("new", 1), [ROOT], [PAGE], None)
    assert [one.status for one in store.reserve(MOVER, request, 1.0)] == [WriteStatus.NOT_YET]
