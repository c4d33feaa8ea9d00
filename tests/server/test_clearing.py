"""Blocks of any sizes share a segment: one write evicts what it needs, and little more (G9)."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Decision
from kvpool.server.eviction.lru import LRU
from kvpool.server.state.clearing import Clearing, Move, let_blocks_move
from kvpool.server.state.entry import Entry
from kvpool.server.state.extents import MAKING_ROOM
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, Reservation, WriteStatus
from tests.conftest import key, keys

ONE = Namespace("one")
KIB, MIB, PAGE = 1 << 10, 1 << 20, 4096


def stepwise(capacity: int) -> Store:
    """A store as servers have it."""
    store = Store(capacity)
    let_blocks_move(store.extents)
    return store


class Writer:
    """Writes blocks as a server's connection does, and counts what each of them costs."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = 0.0
        self.largest = 0  # block so far
        self.evicted_at_once = 0  # by one call of `reserve`
        self.beyond: list[float] = []  # per block: evicted bytes beyond the promise
        self.moved = 0

    def write(self, digest: bytes, size: int, parent: bytes = ROOT) -> WriteStatus:
        store = self.store
        self.now += 0.001
        self.largest = max(self.largest, size)
        before = store.extents.evicted_bytes
        request = ReserveRequest(ONE, 0, [digest], [parent], [size])
        for _ in range(20_000):
            evicted = store.extents.evicted
            (answer,) = store.reserve(1, request, self.now)
            self.evicted_at_once = max(self.evicted_at_once, store.extents.evicted - evicted)
            if answer is not MAKING_ROOM:
                break
            if store.extents.clearing is not None:
                self.step(store.extents.clearing)
        assert answer is not MAKING_ROOM, "no end"
        if answer.status is WriteStatus.RESERVED:
            store.seal(1, answer.id, 0, self.now)
        self.beyond.append(store.extents.evicted_bytes - before - 2 * size - self.largest)
        store.index.change_log.take()
        return answer.status

    def step(self, clearing: Clearing) -> None:
        for move in clearing.next_moves(64, MIB):
            self.moved += move.entry.size
            clearing.move_done(move, good=True)

    def read(self, digests: list[bytes]) -> int:
        """How many were here."""
        self.now += 0.001
        pins = self.store.pin(1, ONE, 0, digests, self.now)
        for pin in pins:
            if pin.id:
                self.store.unpin(1, pin.id)
        self.store.index.change_log.take()
        return sum(bool(pin.id) for pin in pins)

    @property
    def use(self) -> float:
        return self.store.allocator.allocated / self.store.allocator.capacity

    def check_promise(self) -> None:
        """At the 99th percentile: twice what is written, and one block of the larger class."""
        self.beyond.sort()
        assert self.beyond[int(len(self.beyond) * 0.99)] <= 0
        check_invariants(self.store)


def full(small: int, capacity: int) -> Writer:
    """A pool of small blocks that were used in random order."""
    writer = Writer(stepwise(capacity))
    digests = keys("small", capacity // small)
    for digest in digests:
        assert writer.write(digest, small) is WriteStatus.RESERVED
    random.Random(1).shuffle(digests)
    for first in range(0, len(digests), 64):
        writer.read(digests[first : first + 64])
    assert writer.use == 1.0
    return writer


@pytest.mark.parametrize(
    ("small", "large", "capacity"),
    [
        (16 * KIB, MIB, 64 * MIB),
        (4 * KIB, 64 * KIB, 32 * MIB),
        (4 * KIB, 16 * MIB, 48 * MIB),
        (64 * KIB, 80 * KIB, 32 * MIB),
    ],
)
def test_one_large_write_evicts_what_it_needs(small: int, large: int, capacity: int) -> None:
    writer = full(small, capacity)
    before = writer.store.extents.evicted_bytes
    assert writer.write(key("large"), large) is WriteStatus.RESERVED
    assert large <= writer.store.extents.evicted_bytes - before <= 2 * large + small
    assert writer.use > 0.85 or large == 16 * MIB
    check_invariants(writer.store)


def test_where_no_block_moves_a_large_one_gets_its_room_by_evictions() -> None:
    """As in a server without what moves them: in steps, and the block is stored."""
    writer = Writer(Store(16 * MIB))
    writer.store.extents.in_steps = True
    small = keys("small", 16 * MIB // (16 * KIB))
    for digest in small:
        assert writer.write(digest, 16 * KIB) is WriteStatus.RESERVED
    writer.read(small[::2])  # which are then used last: holes lie between them
    assert writer.write(key("large"), MIB) is WriteStatus.RESERVED
    assert writer.evicted_at_once <= 128
    check_invariants(writer.store)


def test_sizes_that_alternate_cost_their_size() -> None:
    writer = Writer(stepwise(16 * MIB))
    for number, digest in enumerate(keys("both", 2000)):
        assert writer.write(digest, (64 if number % 2 else 4) * KIB) is WriteStatus.RESERVED
    writer.check_promise()
    assert writer.use > 0.85


def test_a_mix_of_all_sizes_keeps_the_pool_full() -> None:
    writer, rng = Writer(stepwise(128 * MIB)), random.Random(3)
    use: list[float] = []
    for number, digest in enumerate(keys("mix", 1500)):
        size = min(16 * MIB, max(PAGE, int(rng.lognormvariate(math.log(128 * KIB), 1.5))))
        assert writer.write(digest, size) is WriteStatus.RESERVED
        if number > 750:
            use.append(writer.use)
    writer.check_promise()
    assert sum(use) / len(use) > 0.85


def test_models_that_take_turns_keep_their_prefixes() -> None:
    writer, rng = Writer(stepwise(32 * MIB)), random.Random(4)
    chains: dict[bytes, bytes] = {}  # each block and its parent
    for turn, size in enumerate([16 * KIB, 256 * KIB, MIB, 16 * KIB, MIB]):
        written = 0
        while written < 24 * MIB:
            chain = keys(f"{turn} {written}", rng.randint(4, 24))
            parents = [ROOT, *chain[:-1]]
            for digest, parent in zip(chain, parents, strict=True):
                assert writer.write(digest, size, parent) is WriteStatus.RESERVED
                chains[digest] = parent
                written += size
        for digest, parent in chains.items():
            here = writer.store.index.peek(ONE, 0, digest) is not None
            assert not here or parent == ROOT or writer.store.index.peek(ONE, 0, parent) is not None
    writer.check_promise()


def test_one_call_does_a_bounded_amount_of_work() -> None:
    writer = full(4 * KIB, 48 * MIB)
    writer.write(key("large"), 16 * MIB)
    assert 0 < writer.evicted_at_once <= 128
    request = ReserveRequest(
        ONE, 0, keys("batch", 1024), [ROOT, *keys("batch", 1023)], [PAGE] * 1024
    )
    answers = writer.store.reserve(1, request, writer.now)
    granted = [answer for answer in answers if answer.status is WriteStatus.RESERVED]
    assert 0 < len(granted) <= 512
    assert answers[len(granted) :] == [MAKING_ROOM] * (1024 - len(granted))


def test_a_policy_brings_its_order_up_to_date_in_steps() -> None:
    """After a million reads the oldest block is at the bottom of the heap."""
    policy: LRU[Entry] = LRU()
    writer = Writer(Store(4096 * PAGE, policy=policy))
    digests = keys("read", 4096)
    for digest in digests:
        writer.write(digest, PAGE)
    writer.read(digests)
    newcomer = Entry(next(iter(writer.store.index.by_part.values())), key("new"), ROOT, 0, PAGE, 1)
    answers = [policy.victim(newcomer, lambda entry: True, writer.now) for _ in range(9)]
    assert answers[:8] == [Decision.NOT_YET] * 8
    assert isinstance(answers[8], Entry)
    assert answers[8].digest == digests[0]


# --- moves that meet others ------------------------------------------------------------------


def begin(writer: Writer, owner: int = 2, size: int = MIB) -> tuple[Clearing, list[Move]]:
    """A clearing for a block of `owner`, and its first moves."""
    request = ReserveRequest(ONE, 0, [key("large")], [ROOT], [size])
    store = writer.store
    for _ in range(100):
        assert store.reserve(owner, request, writer.now)[0] is MAKING_ROOM
        if store.extents.clearing is not None:
            return store.extents.clearing, store.extents.clearing.next_moves(8, MIB)
    raise AssertionError("no clearing")


def emptied(writer: Writer) -> Clearing:
    """A clearing whose range is ready for a block of owner 2."""
    clearing, moves = begin(writer)
    for move in moves:
        clearing.move_done(move, good=True)
    while not clearing.is_ready:
        writer.step(clearing)
    return clearing


def test_a_block_that_a_reader_has_pinned_meanwhile_stays() -> None:
    writer = full(16 * KIB, 8 * MIB)
    store = writer.store
    clearing, moves = begin(writer)
    entry = moves[0].entry
    (pin,) = store.pin(3, ONE, 0, [entry.digest], writer.now)
    for move in moves:
        clearing.move_done(move, good=True)
    assert pin.extent == entry.extent  # where the reader looks
    check_invariants(store)
    for _ in range(100):
        writer.step(clearing)
        assert not clearing.is_ready
    assert clearing.over  # it does not wait for a slow reader
    store.unpin(3, pin.id)
    check_invariants(store)


def test_others_do_not_get_what_was_made_free_for_a_block() -> None:
    writer = full(16 * KIB, 8 * MIB)
    store = writer.store
    emptied(writer)
    start, end = store.allocator.fence
    for number in range(100):
        (answer,) = store.reserve(
            4, ReserveRequest(ONE, 0, [key(f"small {number}")], [ROOT], [PAGE]), writer.now
        )
        assert answer.extent is not None
        assert not start <= answer.extent.offset < end
    request = ReserveRequest(ONE, 0, [key("large")], [ROOT], [MIB])
    (answer,) = store.reserve(2, request, writer.now)
    assert answer.extent is not None
    assert answer.extent.offset == start
    assert store.extents.clearing is None
    check_invariants(store)


def test_a_step_of_moves_has_its_size() -> None:
    """Nobody reads or writes a block while it is copied: so few are, for a short time."""
    writer = full(16 * KIB, 8 * MIB)
    request = ReserveRequest(ONE, 0, [key("large")], [ROOT], [MIB])
    while (clearing := writer.store.extents.clearing) is None:
        writer.store.reserve(2, request, writer.now)
    assert len(clearing.next_moves(64, 16 * KIB)) == 1
    assert len(clearing.next_moves(64, 32 * KIB)) == 2
    assert len(clearing.next_moves(64, 33 * KIB)) == 3
    assert len(clearing.next_moves(2, MIB)) == 2
    check_invariants(writer.store)


def test_a_range_that_was_taken_is_over() -> None:
    """Its mover asks once more: nothing is fenced for a block that is there."""
    writer = full(16 * KIB, 8 * MIB)
    clearing = emptied(writer)
    request = ReserveRequest(ONE, 0, [key("large")], [ROOT], [MIB])
    (answer,) = writer.store.reserve(2, request, writer.now)
    assert answer.extent is not None
    assert clearing.over
    assert clearing.next_moves(64, MIB) == []
    assert not clearing.is_ready
    clearing.abandon()
    assert writer.store.allocator.fence == (0, 0)
    check_invariants(writer.store)


def test_a_range_that_would_reach_beyond_the_end_is_given_up() -> None:
    writer = full(16 * KIB, 8 * MIB)
    store = writer.store
    first, *_, last = sorted(entry.offset for entry in store.index.inventory())
    store.remove(ONE, [store.extents.blocks_at[first].digest])  # a place for the last block
    store.extents.clearing = clearing = Clearing(store.extents, 2, key("large"), MIB, last)
    assert clearing.next_moves(64, MIB) == []
    assert clearing.over
    assert store.extents.clearing is None
    check_invariants(store)


def test_a_few_pinned_blocks_do_not_let_one_write_empty_the_pool() -> None:
    writer = full(16 * KIB, 16 * MIB)
    store = writer.store
    for entry in store.index.inventory():
        if entry.offset % (256 * KIB) == 0:
            store.pin(3, ONE, 0, [entry.digest], writer.now)
    before = store.extents.evicted_bytes
    assert writer.write(key("large"), MIB) is WriteStatus.NO_SPACE
    assert store.extents.evicted_bytes - before <= 5 * MIB
    store.drop_owner(3)
    assert writer.write(key("large"), MIB) is WriteStatus.RESERVED
    check_invariants(store)


def test_a_range_that_its_writer_needs_no_more_is_given_up() -> None:
    """Another writer has begun the block meanwhile, and the rest of the batch needs a range."""
    writer = full(16 * KIB, 8 * MIB)
    store = writer.store
    clearing = emptied(writer)
    rest = ReserveRequest(ONE, 0, [key("next")], [key("large")], [MIB])
    (answer,) = store.reserve(2, rest, writer.now)
    assert clearing.over
    assert answer.extent is not None or store.extents.clearing is not clearing
    check_invariants(store)


# --- any order of calls ----------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Writers of many sizes, readers and removals, while ranges are emptied.

    The model is the memory: each block's bytes are its number, and moves copy them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = stepwise(64 * PAGE)
        self.memory = [0] * 64  # by page: the block that was written there
        self.digests = keys("machine", 120)
        self.now = 0.0
        self.moves: list[tuple[Clearing, Move]] = []
        self.pins: list[tuple[int, Reservation | int, int]] = []

    @initialize()
    def fill_up(self) -> None:
        """With blocks that were used in another order than they lie: else no range is emptied."""
        for number in range(60, 120):
            self.write(1, number, 1)
        for number in random.Random(1).sample(range(60, 120), 60):
            self.now += 1
            self.pin(number)
            self.unpin()

    @rule(owner=st.integers(1, 3), number=st.integers(0, 59), pages=st.sampled_from([1, 1, 2, 9]))
    def write(self, owner: int, number: int, pages: int) -> None:
        self.now += 1
        parent = self.digests[number - 1] if number % 6 else ROOT
        request = ReserveRequest(ONE, 0, [self.digests[number]], [parent], [pages * PAGE])
        for _ in range(9):  # as a connection asks again, until a range is being emptied for it
            (answer,) = self.store.reserve(owner, request, self.now)
            if answer is not MAKING_ROOM or self.store.extents.clearing is not None:
                break
        if answer.extent is not None:
            self.fill(answer.extent.offset, pages, number + 1)
            self.store.seal(owner, answer.id, 0, self.now)

    @rule()
    def ask_again(self) -> None:
        """Whoever the range is emptied for: it gets it, or waits on."""
        clearing = self.store.extents.clearing
        if clearing is not None:
            number = self.digests.index(clearing.digest)
            self.write(clearing.owner, number, clearing.size // PAGE)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        clearing = self.store.extents.clearing
        if clearing is not None:
            for move in clearing.next_moves(count, 64 * PAGE):
                self.moves.append((clearing, move))

    @rule(good=st.booleans())
    def copied(self, good: bool) -> None:
        if self.moves:
            clearing, move = self.moves.pop()
            entry = move.entry
            if good:
                page = entry.offset // PAGE
                self.fill(move.target, entry.size // PAGE, self.memory[page])
            clearing.move_done(move, good=good)

    @rule(owner=st.integers(1, 3))
    def give_up(self, owner: int) -> None:
        clearing = self.store.extents.clearing
        if clearing is not None and clearing.owner == owner:
            clearing.abandon()

    @rule(number=st.integers(0, 119))
    def pin(self, number: int) -> None:
        (pin,) = self.store.pin(4, ONE, 0, [self.digests[number]], self.now)
        if pin.extent is not None:
            self.pins.append((number, pin.id, pin.extent.offset))

    @rule()
    def unpin(self) -> None:
        if self.pins:
            number, id, offset = self.pins.pop(0)
            assert self.memory[offset // PAGE] == number + 1  # whatever happened meanwhile
            assert isinstance(id, int)
            self.store.unpin(4, id)

    @rule(number=st.integers(0, 119))
    def remove(self, number: int) -> None:
        self.store.remove(ONE, [self.digests[number]])

    @invariant()
    def consistent(self) -> None:
        check_invariants(self.store)
        for entry in self.store.index.inventory():
            first = entry.offset // PAGE
            pages = self.memory[first : first + entry.size // PAGE]
            assert set(pages) == {self.digests.index(entry.digest) + 1}

    def teardown(self) -> None:
        for clearing, move in self.moves:
            clearing.move_done(move, good=False)
        if self.store.extents.clearing is not None:
            self.store.extents.clearing.abandon()
        self.store.drop_owner(4)
        self.store.remove(ONE, self.digests)
        assert self.store.allocator.allocated == 0
        assert self.store.allocator.fenced == 0
        check_invariants(self.store)

    def fill(self, offset: int, pages: int, number: int) -> None:
        first = offset // PAGE
        self.memory[first : first + pages] = [number] * pages


TestClearing = Machine.TestCase
TestClearing.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
