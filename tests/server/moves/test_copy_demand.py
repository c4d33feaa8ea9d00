"""What is read is looked at within bounds; extra copies go first."""

from __future__ import annotations

import pytest

from kvpool.protocols import ReserveRequest
from kvpool.server.moves.state import copy_demand
from kvpool.server.moves.state.copy_demand import CHECK_S, RepairPlanner
from kvpool.server.moves.state.wants import BlockName, MoveView
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.entry import Entry
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, WriteStatus
from tests.conftest import key, keys
from tests.support.stores import ONE, PAGE, TWO, write

HOT = key("hot")
MINE, THEIRS = Namespace("@globex/m"), Namespace("@acme/m")


def store_of(blocks: list[bytes], copies: int = 1, pages: int = 10_000) -> Store:
    store = Store(pages * PAGE)
    write(store, blocks, 0.0, apart=True, copies=copies)
    return store


def planner_of(*blocks: bytes, copies: int = 1) -> RepairPlanner:
    return RepairPlanner(Blocks([store_of(list(blocks), copies)]))


def due(planner: RepairPlanner, now: float) -> list[Entry]:
    return [entry for step in planner.read_since(now) for entry in step]


def test_a_block_that_was_written_with_copies_is_due_at_a_read_and_then_not_for_a_while() -> None:
    planner = planner_of(HOT, copies=2)
    assert due(planner, 0.0) == []
    for now, count in ((0.0, 1), (4.9, 0), (5.0, 1)):
        planner.read(ONE, 0, [HOT, key("gone")])
        assert len(due(planner, now)) == count
        assert due(planner, 9 * CHECK_S) == [], "it is looked at once for a read"
    planner = planner_of(HOT)
    planner.read(ONE, 0, [HOT])
    assert due(planner, 0.0) == []
    assert not len(planner._followed)


def test_what_one_round_looks_at_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = keys("b", 5000)
    planner = planner_of(*blocks, copies=2)
    for first in range(0, 5000, 1000):
        planner.read(ONE, 0, blocks[first : first + 1000])
    steps = list(planner.read_since(0.0))
    assert max(map(len, steps)) <= 512
    assert sum(map(len, steps)) == 4096
    assert {entry.digest for step in steps for entry in step} >= set(blocks[1000:]), "the last ones"
    monkeypatch.setattr(copy_demand, "_FOLLOWED_MAX", 10)
    planner = planner_of(*blocks, copies=2)
    planner.read(ONE, 0, blocks)
    assert len(due(planner, 100.0)) == 4096
    assert len(planner._followed) <= 10


def test_what_one_tenant_reads_keeps_nobody_from_having_lost_copies_made_again() -> None:
    store, here, mine = Store(20_000 * PAGE), BlockName(MINE, 0, HOT), keys("m", 3)
    blocks = keys("b", 6000)
    for namespace, digests in ((MINE, [HOT, *mine]), (THEIRS, blocks)):
        write(store, digests, 0.0, namespace=namespace, apart=True, copies=2)
    planner = RepairPlanner(Blocks([store]))
    assert not planner.may_copy(here, 1, short=True)
    planner.read(MINE, 0, [HOT])
    planner.read(MINE, 0, mine)
    for n in range(1000):  # small ones, and then some of many blocks
        planner.read(THEIRS, 0, [blocks[n]])
    for first in range(0, 6000, 1000):
        planner.read(THEIRS, 0, blocks[first : first + 1000])
    found = due(planner, 0.0)
    assert {e.digest for e in found if e.index.namespace == MINE} == {HOT, *mine}
    assert len(found) == 4096, "they get what nobody else has asked for"
    for later in (CHECK_S, 2 * CHECK_S, 3 * CHECK_S):
        planner.read(THEIRS, 0, blocks)
        due(planner, later)
        planner.read(THEIRS, 0, blocks[4000:])
        due(planner, later + 0.1)
    assert planner.may_copy(here, 1, short=True), "it is remembered that nobody else has"
    planner.read(THEIRS, 0, blocks)
    planner.read(MINE, 0, mine)  # was used before all of these
    wants = planner.wants(MoveView("here", 5 * CHECK_S))
    assert [e.index.namespace for want in wants for e in want.entries].count(MINE) == 3


def test_rounds_come_once_a_second_and_one_names_a_bounded_part() -> None:
    blocks = keys("b", 2000)
    planner, view = planner_of(*blocks, copies=2), MoveView("here", 7.0)
    assert planner.due_at() == float("inf")
    assert planner.read(ONE, 0, blocks), "the first read wakes"
    assert not planner.read(ONE, 0, blocks), "and no other one of this round"
    assert planner.due_at() <= 7.0
    wants = [want for want in planner.wants(view) if want.entries]
    assert len(wants) == 16
    assert planner.due_at() == float("inf")
    planner.read(ONE, 0, blocks)
    assert planner.due_at() == 8.0


def test_a_round_asks_no_more_with_many_tenants_and_all_get_their_turn() -> None:
    store, tenants = Store(1000 * PAGE), [Namespace(f"@t{number}/m") for number in range(40)]
    for tenant in tenants:
        write(store, [HOT], 0.0, namespace=tenant, apart=True, copies=2)
    planner, seen = RepairPlanner(Blocks([store])), set[Namespace]()
    for number in range(3):
        for tenant in tenants:
            planner.read(tenant, 0, [HOT])
        wants = planner.wants(MoveView("here", number * 2 * CHECK_S))
        now = [entry.index.namespace for want in wants for entry in want.entries]
        assert len(now) == 16
        seen.update(now)
    assert seen == {*tenants}


def test_the_first_holder_copies_and_the_others_only_if_it_does_not() -> None:
    first, third, name = planner_of(), planner_of(), BlockName(ONE, 0, HOT)
    assert first.may_copy(name, 0, short=True)
    assert [third.may_copy(name, 2, short=True) for _ in range(3)] == [False, False, True]
    assert not third.may_copy(name, 2, short=False)  # somebody has
    assert not third.may_copy(name, 2, short=True)


def test_extra_copies_are_looked_at_in_turns_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_demand, "_EXTRAS_MAX", 3)
    monkeypatch.setattr(copy_demand, "_EXTRAS", 2)
    extras = keys("e", 4)
    planner, view = planner_of(*extras, copies=0), MoveView("here")
    names = [BlockName(ONE, 0, digest) for digest in extras]

    def copies(name: BlockName) -> int:
        found = planner._store.peek(*name)
        assert found is not None
        return found.copies

    def looked_at() -> list[bytes]:
        return [entry.digest for want in planner.wants(view) for entry in want.entries]

    for name in names:
        planner.brought_extra(name)
    assert [copies(name) for name in names] == [1, 0, 0, 0], "too many: it is an ordinary one"
    assert looked_at() == extras[1:3]
    assert looked_at() == [extras[3], extras[1]]
    entries = {name: planner._store.peek(*name) for name in names[2:]}
    holders = {names[2]: {"here"}, names[3]: {"here", "there"}}
    assert planner.missing(entries, holders, view) == []  # type: ignore[arg-type]
    assert [copies(name) for name in names[2:]] == [1, 0], "the last one is extra no more"
    assert looked_at() == [extras[3], extras[1]]
    for one in keys("flood", 9):
        planner.brought_extra(BlockName(THEIRS, 0, one))
    assert looked_at() == [extras[1]], "another tenant has its part of them, and no more"


def fetch(store: Store, digest: bytes, last_used: float, copies: int) -> bool:
    statuses = write(store, [digest], 100.0, owner=2, last_used=last_used, copies=copies)
    return statuses == [WriteStatus.RESERVED]


def test_extra_copies_go_first_oldest_first() -> None:
    a, b, c, d = keys("x", 4)
    store = store_of([a, b], pages=4)
    assert fetch(store, c, 50.0, 0)
    assert fetch(store, d, 40.0, 0)
    for new, evicted in ((key("1"), d), (key("2"), c), (key("3"), a)):
        write(store, [new], 200.0)
        assert store.index.peek(ONE, 0, evicted) is None


def test_an_extra_copy_takes_the_place_of_older_ones_only_and_a_last_one_of_any_extra() -> None:
    a, b = keys("x", 2)
    store = store_of([], pages=2)
    assert fetch(store, a, 50.0, 0)
    assert fetch(store, b, 60.0, 0)
    assert not fetch(store, key("as old"), 50.0, 0)
    assert fetch(store, key("newer"), 55.0, 0)
    assert store.index.peek(ONE, 0, a) is None
    assert fetch(store, key("last one"), 1.0, 1)
    assert store.index.peek(ONE, 0, key("newer")) is None


def test_the_last_copy_and_one_that_a_writer_relies_on_are_extra_no_more() -> None:
    a, b, c = keys("x", 3)
    store = store_of([], pages=3)
    for digest in (a, b, c):
        assert fetch(store, digest, 50.0, 0)
    entry = store.index.peek(ONE, 0, a)
    assert entry is not None
    entry.copies = 1
    store.reserve(1, ReserveRequest(ONE, 0, [b], [ROOT], [PAGE], copies=[2]), 100.0)
    for number in range(2):
        write(store, [key(number)], 200.0)
        # First the one that is still extra, then in the order of uses.
        assert [store.index.peek(ONE, 0, one) is not None for one in (a, b, c)] == (
            [True, True, False] if number == 0 else [False, True, False]
        )


def test_a_block_that_is_extra_no_more_does_not_go_for_one_that_is_read() -> None:
    """The oldest extra copy is pinned, and the next one is the last copy by now."""
    read, last, extra = keys("x", 3)
    store = store_of([], pages=3)
    for digest, used in ((read, 50), (last, 51), (extra, 52)):
        assert fetch(store, digest, used, 0)
    oldest, entry = store.index.peek(ONE, 0, read), store.index.peek(ONE, 0, last)
    assert oldest is not None
    assert entry is not None
    entry.copies = 1
    pin = store.held.pin(1, oldest)
    assert fetch(store, key("new"), 200.0, 1)
    assert [store.index.peek(ONE, 0, one) is not None for one in (read, last, extra)] == [1, 1, 0]
    store.unpin(1, pin)
    assert fetch(store, key("newer"), 201.0, 1)
    assert [store.index.peek(ONE, 0, one) is not None for one in (read, last)] == [0, 1]
    check_invariants(store)


def test_the_parts_of_a_block_are_of_one_kind() -> None:
    """They leave together: an extra part would take one that is the last copy with it."""
    store = store_of([], pages=4)
    digest = key("parts")
    for part, copies in ((0, 0), (1, 2)):
        write(store, [digest], 100.0, namespace=TWO, part=part, last_used=50.0, copies=copies)
    assert [store.index.peek(TWO, part, digest).copies for part in (0, 1)] == [2, 2]  # type: ignore[union-attr]
    assert fetch(store, key("extra"), 60.0, 0)
    assert fetch(store, key("other"), 40.0, 1)
    assert not fetch(store, key("older"), 1.0, 0)
    assert fetch(store, key("last one"), 1.0, 1)
    assert store.index.peek(ONE, 0, key("extra")) is None
    assert store.index.peek(TWO, 0, digest) is not None
