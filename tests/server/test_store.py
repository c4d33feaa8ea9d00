"""The server's books: no shared byte, pins hold, tails go first (G2, G3, G4, G5, G9)."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict

import pytest

from kvpool.errors import BadMessage
from kvpool.protocols import ReserveRequest
from kvpool.protocols.persistent_tier import Record
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.store import Store
from kvpool.server.state.tier_stores import FileStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Extent, Namespace, ReadStatus, WriteStatus
from tests.conftest import key, keys

ONE = Namespace("one")
TWO = Namespace("two", parts=2)
PAGE = 4096


def store(pages: int, **options: int) -> Store:
    return Store(pages * PAGE, **options)  # type: ignore[arg-type]


def write(
    books: Store, chain: list[bytes], now: float = 0.0, parent: bytes = ROOT, part: int = 0
) -> list[WriteStatus]:
    """Reserve and seal blocks of one page; parts belong to namespace TWO."""
    namespace = TWO if part else ONE
    parents = [parent, *chain[:-1]]
    answers = books.reserve(
        1, ReserveRequest(namespace, part, chain, parents, [PAGE] * len(chain)), now
    )
    ids = [answer.id for answer in answers if answer.status is WriteStatus.RESERVED]
    books.seal_all(1, ids, ids, now)
    check_invariants(books)
    return [answer.status for answer in answers]


def present(books: Store, chain: list[bytes]) -> list[bool]:
    return [books.index.peek(ONE, 0, digest) is not None for digest in chain]


class Machine:
    """Several connections on a segment that is nearly always full.

    Beside the books runs an oracle of its own: who may touch which bytes. A new reservation must
    not overlap anything that somebody still holds, and a pin must show what was sealed. The map is
    what masters are told, and why blocks are gone: both must be so.
    """

    def __init__(self) -> None:
        self.books = store(24)
        self.now = 0.0
        self.reserved: dict[tuple[int, int], tuple[Namespace, int, bytes, Extent]] = {}
        self.pinned: dict[tuple[int, int], Extent] = {}
        self.quarantined: dict[int, list[Extent]] = {}
        self.sealed: dict[tuple[Namespace, int, bytes], tuple[Extent, int]] = {}
        self.map: set[tuple[Namespace, int, bytes]] = set()
        self.reasons: dict[tuple[Namespace, bytes], ReadStatus] = {}
        self.digests = keys("machine", 40)
        self.owners = 0

    def fill(self) -> None:
        for first in range(0, 24, 6):
            self.reserve(1, ONE, 0, first, 6, 1)
            self.seal_all(1)

    def held(self) -> list[Extent]:
        return [
            *(extent for _, _, _, extent in self.reserved.values()),
            *self.pinned.values(),
            *(extent for extents in self.quarantined.values() for extent in extents),
        ]

    def reserve(
        self, owner: int, namespace: Namespace, part: int, first: int, count: int, pages: int
    ) -> None:
        self.now += 1
        chain = self.digests[first : first + count]
        parents = [self.digests[first - 1] if first else ROOT, *chain[:-1]]
        held = self.held()
        answers = self.books.reserve(
            owner,
            ReserveRequest(namespace, part, chain, parents, [pages * PAGE] * len(chain)),
            self.now,
        )
        for digest, answer in zip(chain, answers, strict=True):
            if answer.extent is not None:
                assert not any(overlap(answer.extent, other) for other in held)
                self.reserved[owner, answer.id] = (namespace, part, digest, answer.extent)
                held.append(answer.extent)

    def seal_all(self, owner: int) -> None:
        for one, id in [held for held in self.reserved if held[0] == owner]:
            self.seal_one(one, id)

    def seal_one(self, owner: int, id: int) -> None:
        namespace, part, digest, extent = self.reserved.pop((owner, id))
        assert self.books.seal(owner, id, id * 7, self.now) is WriteStatus.STORED
        self.sealed[namespace, part, digest] = (extent, id * 7)

    def cancel(self, owner: int, id: int) -> None:
        del self.reserved[owner, id]
        self.books.cancel(owner, id)

    def pin(
        self, owner: int, namespace: Namespace, part: int, first: int, count: int, view: bool
    ) -> None:
        self.now += 1
        chain = self.digests[first : first + count]
        pins = self.books.pin(owner, namespace, part, chain, self.now, view=view)
        for digest, pin in zip(chain, pins, strict=True):
            if pin.extent is not None:
                assert (pin.extent, pin.checksum) == self.sealed[namespace, part, digest]
                self.pinned[owner, pin.id] = pin.extent
            elif any(one[:3] == (namespace, part, digest) for one in self.reserved.values()):
                assert pin.status is ReadStatus.BEING_WRITTEN
            else:
                reason = self.reasons.get((namespace, digest), ReadStatus.NEVER_WRITTEN)
                assert pin.status is reason

    def unpin(self, owner: int, id: int) -> None:
        del self.pinned[owner, id]
        self.books.unpin(owner, id)

    def remove(self, namespace: Namespace, first: int) -> None:
        self.books.remove(namespace, [self.digests[first]])
        assert self.books.index.peek(namespace, 0, self.digests[first]) is None

    def drop(self, owner: int, frozen: bool) -> None:
        extents = [v[3] for k, v in self.reserved.items() if k[0] == owner]
        self.reserved = {k: v for k, v in self.reserved.items() if k[0] != owner}
        self.pinned = {k: v for k, v in self.pinned.items() if k[0] != owner}
        if frozen:
            assert self.books.held.lend(owner)
            check_invariants(self.books)
        self.books.drop_owner(owner, writer_may_be_alive=frozen)
        if frozen:
            self.quarantined.setdefault(owner, []).extend(extents)

    def writer_ends(self, owner: int) -> None:
        self.books.writer_exited(owner)
        self.quarantined.pop(owner, None)

    def probe(self, first: int) -> None:
        self.books.index.peek(ONE, 0, self.digests[first])

    def whole(self) -> None:
        check_invariants(self.books)
        for namespace, part, digests, status, _ in self.books.index.change_log.take():
            for digest in digests:
                if status is ReadStatus.HIT:
                    self.map.add((namespace, part, digest))
                    self.reasons.pop((namespace, digest), None)
                else:
                    self.map.discard((namespace, part, digest))
                    self.reasons[namespace, digest] = status
        stored = self.books.index.inventory()
        assert self.map == {(one.index.namespace, one.index.part, one.digest) for one in stored}
        assert self.books.held.pins == len(self.pinned)
        assert self.books.held.reservations == len(self.reserved)


def overlap(one: Extent, other: Extent) -> bool:
    return one.offset < other.offset + other.size and other.offset < one.offset + one.size


def test_eviction_is_least_recently_used_tail_first() -> None:
    """Against a recency list of the textbook, on random chains of a tree."""
    rng = random.Random(7)
    books, model = store(60), OrderedDict[bytes, None]()
    tree = {n: keys(f"branch {n}", 20) for n in range(6)}
    trunk = keys("trunk", 5)
    for turn in range(400):
        chain = trunk + tree[rng.randrange(6)][: rng.randrange(1, 20)]
        hits = 0
        while hits < len(chain) and chain[hits] in model:
            hits += 1
        assert present(books, chain)[:hits] == [True] * hits
        assert hits == len(chain) or not present(books, chain)[hits]
        for digest in reversed(chain):
            model[digest] = None
            model.move_to_end(digest)
        while len(model) > 60:
            model.popitem(last=False)
        books.pin(2, ONE, 0, chain[:hits], float(turn))
        books.drop_owner(2)
        parent = chain[hits - 1] if hits else ROOT
        if chain[hits:]:
            write(books, chain[hits:], float(turn), parent)
        assert {d for d in model if not books.index.peek(ONE, 0, d)} == set()


@pytest.mark.parametrize("of", ["another", "it, twice"])
def test_with_a_foreign_id_nothing_of_a_batch_is_sealed_or_unpinned(of: str) -> None:
    books = store(4)
    chain = keys("k", 3)
    request = ReserveRequest(ONE, 0, chain[:2], [ROOT, chain[0]], [PAGE] * 2)
    ids = [answer.id for answer in books.reserve(1, request, 0.0)]
    (other,) = books.reserve(2, ReserveRequest(ONE, 0, chain[2:], [chain[1]], [PAGE]), 0.0)
    with pytest.raises(BadMessage):
        books.seal_all(1, [*ids, other.id if of == "another" else ids[0]], [7] * 3, 0.0)
    check_invariants(books)
    assert present(books, chain) == [False] * 3
    books.seal_all(1, ids, [7, 8], 0.0)
    pins = [pin.id for pin in books.pin(1, ONE, 0, chain[:2], 1.0)]
    with pytest.raises(BadMessage):
        books.unpin_all(1, [*pins, 999 if of == "another" else pins[0]])
    check_invariants(books)
    assert books.held.pins == 2
    books.unpin_all(1, pins)
    assert books.held.pins == 0
    check_invariants(books)


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_sealed_as_its_blocks_would_be_one_by_one(seed: int) -> None:
    """Chains of two namespaces and several parts, also from their tails, in a full store."""
    chance = random.Random(seed)
    both = [store(24), store(24)]
    chains = [keys(f"chain {number}", 6) for number in range(8)]
    for step in range(80):
        chain, part = chance.choice(chains), chance.choice([None, 0, 1])
        first = chance.randrange(len(chain))
        digests = chain[first : first + chance.randrange(1, 6)]
        namespace = ONE if part is None else TWO
        parents = [chain[first - 1] if first else ROOT, *digests[:-1]]
        if chance.random() < 0.3:
            digests, parents = digests[::-1], parents[::-1]
        request = ReserveRequest(namespace, part or 0, digests, parents, [PAGE] * len(digests))
        for number, books in enumerate(both):
            answers = books.reserve(1, request, float(step))
            ids = [answer.id for answer in answers if answer.extent is not None]
            if number:
                books.seal_all(1, ids, ids, float(step))
            else:
                for id in ids:
                    books.seal(1, id, id, float(step))
            pins = [pin.id for pin in books.pin(1, namespace, part or 0, chain, step + 0.5)]
            if number:
                books.unpin_all(1, [id for id in pins if id])
            else:
                for id in pins:
                    if id:
                        books.unpin(1, id)
            check_invariants(books)
        one, other = both
        told = [
            [
                (of, part, digest, status, tier)
                for of, part, all, status, tier in log
                for digest in all
            ]
            for log in (one.index.change_log.take(), other.index.change_log.take())
        ]
        assert told[0] == told[1]
        assert one.index.fingerprint == other.index.fingerprint
        assert [e.digest for e in one.index.inventory()] == [
            e.digest for e in other.index.inventory()
        ]
        gone = {block for step in one.index.change_log.tombstones.steps(1000) for block, _ in step}
        assert not gone & {(e.index.namespace, e.digest) for e in one.index.inventory()}
        assert (one.index.stored_bytes, one.index.sealed_bytes) == (
            other.index.stored_bytes,
            other.index.sealed_bytes,
        )
    assert one.extents.evicted == other.extents.evicted > 100


def test_a_buffer_too_small_pins_nothing() -> None:
    books = store(2)
    write(books, [key("k")])
    (pin,) = books.pin(1, ONE, 0, [key("k")], 1.0, [PAGE - 1])
    assert pin.status is ReadStatus.BUFFER_TOO_SMALL
    assert books.held.pins == 0


def test_a_child_may_come_before_its_parent() -> None:
    books = store(4)
    head, tail = keys("pair", 2)
    write(books, [tail], 1.0, parent=head)
    write(books, [head], 2.0)
    write(books, keys("filler", 3), 3.0)
    assert present(books, [head, tail]) == [True, False]


@pytest.mark.parametrize("seed", range(20))
def test_long_random_histories(seed: int) -> None:
    """Among them: a cancelled parent in the policy's queue, a part whose sibling was cancelled, and
    room that is made by throwing out the last block of a namespace.
    """
    rng = random.Random(seed)
    machine = Machine()
    machine.fill()
    for _ in range(400):
        step = rng.random()
        owner, first = rng.randint(1, 3), rng.randrange(40)
        namespace, part = rng.choice([(ONE, 0), (TWO, 0), (TWO, 1)])
        if step < 0.35:
            machine.reserve(owner, namespace, part, first, rng.randint(1, 8), rng.randint(1, 3))
        elif step < 0.4 and machine.reserved:
            machine.seal_one(*rng.choice(sorted(machine.reserved)))
        elif step < 0.55:
            machine.seal_all(owner)
        elif step < 0.7:
            machine.pin(owner, namespace, part, first, rng.randint(1, 5), rng.random() < 0.3)
        elif step < 0.78 and machine.pinned:
            machine.unpin(*rng.choice(sorted(machine.pinned)))
        elif step < 0.85 and machine.reserved:
            machine.cancel(*rng.choice(sorted(machine.reserved)))
        elif step < 0.92:
            machine.remove(namespace, first)
            machine.probe(rng.randrange(40))
        elif step < 0.97:
            machine.drop(owner, rng.random() < 0.3)
        else:
            machine.writer_ends(owner)
        machine.whole()


def departures(books: Store) -> list[tuple[bytes, ReadStatus]]:
    """The blocks whose departure an inventory of this store announces."""
    steps = itertools.chain.from_iterable(Blocks([books]).inventory_steps())
    return [(d, s.status) for s in steps for d in s.digests if s.status is not ReadStatus.HIT]


def test_departures_are_of_blocks_that_are_gone_in_every_part() -> None:
    """Seed 11515: the departure of one part was told as if it were that of another."""
    books = store(4)
    digest = key("parts")
    for part in (0, 1):
        (answer,) = books.reserve(1, ReserveRequest(TWO, part, [digest], [ROOT], [PAGE]), 0.0)
        books.seal(1, answer.id, 0, 0.0)
    books.remove(TWO, [digest], ReadStatus.CORRUPT, part=1)
    assert departures(books) == []
    books.remove(TWO, [digest], ReadStatus.REMOVED)
    assert departures(books) == [(digest, ReadStatus.REMOVED)]


def test_a_block_that_is_being_written_again_is_still_gone() -> None:
    """Seed 30742: a master that asked meanwhile never heard that it had been evicted."""
    books = store(4)
    digest = key("again")
    (answer,) = books.reserve(1, ReserveRequest(ONE, 0, [digest], [ROOT], [PAGE]), 0.0)
    books.seal(1, answer.id, 0, 0.0)
    books.remove(ONE, [digest])
    (answer,) = books.reserve(1, ReserveRequest(ONE, 0, [digest], [ROOT], [PAGE]), 1.0)
    assert departures(books) == [(digest, ReadStatus.REMOVED)]
    books.seal(1, answer.id, 0, 1.0)
    assert departures(books) == []


def reserved(books: Store, digest: bytes, parent: bytes, now: float) -> bool:
    """One block of half a page, written and sealed; False when there is no space for it."""
    (answer,) = books.reserve(1, ReserveRequest(ONE, 0, [digest], [parent], [2048]), now)
    if answer.status is not WriteStatus.RESERVED:
        return False
    books.seal(1, answer.id, 0, now)
    check_invariants(books)
    return True


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_blocks_that_are_their_own_ancestors_can_be_evicted(length: int) -> None:
    """G9: a circle of parents, written in either direction, does not fill a pool for ever."""
    for step in (1, -1):
        books = Store(length * 4096)
        circle = keys(f"circle {step}", length)[::step]
        for number, digest in enumerate(circle):
            assert reserved(books, digest, circle[number - 1], 0.0)
        for number, digest in enumerate(keys("honest", 2 * length)):
            assert reserved(books, digest, ROOT, 1.0 + number)
        assert present(books, circle) == [False] * length


def test_a_block_that_comes_back_between_its_parent_and_its_children_is_linked_again() -> None:
    """The tail is evicted before it, as in every chain; nothing was a circle."""
    books = Store(4 * 4096)
    chain = keys("chain", 3)
    for digest, parent in zip(chain, [ROOT, *chain], strict=False):
        assert reserved(books, digest, parent, 0.0)
    assert books.remove(ONE, chain[1:2])
    assert reserved(books, chain[1], chain[0], 1.0)
    assert reserved(books, key("one more"), ROOT, 2.0)
    assert reserved(books, key("and one"), ROOT, 3.0)
    assert present(books, chain) == [True, True, False]


def test_how_far_up_a_circle_is_looked_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block far down a chain, written after its children, counts as the first of a chain."""
    monkeypatch.setattr("kvpool.server.state.entry.ANCESTORS_MAX", 3)
    for depth, is_cut in ((2, False), (3, True)):
        books = Store(16 * 4096)
        chain = keys(f"deep {depth}", depth + 2)
        parents = [ROOT, *chain[:-1]]
        for number in (*range(depth), depth + 1, depth):
            assert reserved(books, chain[number], parents[number], 0.0)
        lowest = books.index.peek(ONE, 0, chain[depth])
        assert lowest is not None
        assert lowest.parent == (ROOT if is_cut else parents[depth])


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_circle_in_a_file_is_cut(length: int) -> None:
    """Restored in any order; the chain beside it keeps its links, and leaves tail first."""
    books = FileStore((length + 3) * 4096)
    circle, chain = keys("circle", length), keys("chain", 3)
    parents = {digest: circle[number - 1] for number, digest in enumerate(circle)}
    parents |= dict(zip(chain, [ROOT, *chain], strict=False))
    restored = [
        books.restore(Record(ONE, 0, digest, parents[digest], 4096 * place, 4096, 0, place + 1, 2))
        for place, digest in enumerate([*chain[::-1], *circle])
    ]
    entries = [entry for entry in restored if entry is not None]
    assert len(entries) == length + 3
    for _ in books.cut_circles(entries):
        pass
    list(books.activate_restored(entries, 0.0))
    check_invariants(books)
    for number in range(length + 2):
        assert reserved(books, key(f"honest {number}"), ROOT, 1.0 + number)
    assert sum(present(books, chain)) <= 1
    assert reserved(books, key("the last"), ROOT, 100.0)
    assert present(books, chain)[1:] == [False, False]


def test_a_block_that_its_own_batch_evicts_is_written_anew() -> None:
    """It was here when the write began: to answer so would leave the writer without it."""
    books = store(3)
    old, new = keys("old", 3), keys("new", 2)
    for now, digest in enumerate(old):
        write(books, [digest], float(now))
    batch = [*new, old[0]]
    answers = books.reserve(1, ReserveRequest(ONE, 0, batch, [ROOT] * 3, [PAGE] * 3), 9.0)
    assert [answer.status for answer in answers] == [WriteStatus.RESERVED] * 3
    books.seal_all(1, [answer.id for answer in answers], [1, 2, 3], 10.0)
    check_invariants(books)
    assert present(books, batch) == [True] * 3
