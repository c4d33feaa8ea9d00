"""The order in which a server hands over its blocks, and the account of what is left."""

from __future__ import annotations

import itertools
import random

from kvpool.server.moves.state.drain_plan import DrainPlan, HandedOver
from kvpool.server.moves.state.wants import STRETCH_BLOCKS, name_of
from kvpool.server.state.entry import Entry
from kvpool.server.state.store import Store
from kvpool.types import ROOT
from tests.conftest import key, keys
from tests.support.stores import ONE, PAGE, write


def planned(store: Store, *, step: int = 7) -> list[list[Entry]]:
    plan = DrainPlan(store.index.peek)
    entries = store.index.inventory()
    random.Random(3).shuffle(entries)
    for first in range(0, len(entries), step):
        plan.add(entries[first : first + step])
    assert (plan.blocks, plan.bytes) == (len(entries), sum(one.size for one in entries))
    return list(plan.stretches())


def test_heads_go_before_tails_and_the_last_used_chain_first() -> None:
    store = Store(1000 * PAGE, alignment=PAGE)
    head, old, new = keys("head", 5), keys("old", 90), keys("new", 90)
    write(store, head, 1.0)
    write(store, old, 2.0, parent=head[-1])
    write(store, new, 3.0, parent=head[-1])
    stretches = planned(store)
    order = [entry.digest for stretch in stretches for entry in stretch]
    assert order == [*head, *new, *old]
    assert all(0 < len(stretch) <= STRETCH_BLOCKS for stretch in stretches)
    for stretch in stretches:
        for above, entry in itertools.pairwise(stretch):
            assert entry.parent == above.digest, "one chain in a request"


def test_any_forest_is_handed_over_once_and_heads_first() -> None:
    rng = random.Random(7)
    for _ in range(30):
        store = Store(400 * PAGE, alignment=PAGE)
        known = [ROOT]
        for number in range(200):
            write(store, [key(number)], float(number), parent=rng.choice(known))
            known.append(key(number))
        for digest in rng.sample(known[1:], 100):
            entry = store.index.peek(ONE, 0, digest)
            assert entry is not None
            store.extents.policy.touch(entry, 1000.0 + rng.random())
        order = [entry.digest for stretch in planned(store) for entry in stretch]
        assert sorted(order) == sorted(known[1:])
        place = {digest: number for number, digest in enumerate(order)}
        for entry in store.index.inventory():
            if entry.parent != ROOT:
                assert place[entry.parent] < place[entry.digest]


def test_a_block_that_left_after_it_was_planned_is_skipped() -> None:
    store = Store(100 * PAGE, alignment=PAGE)
    chain = keys("chain", 5)
    write(store, chain, 1.0)
    plan = DrainPlan(store.index.peek)
    plan.add(store.index.inventory())
    store.remove(ONE, chain[3:])
    assert [[one.digest for one in stretch] for stretch in plan.stretches()] == [chain[:3]]


def test_a_block_is_safe_while_its_holder_lives() -> None:
    handed, name = HandedOver(), name_of(entry := an_entry())
    handed.left(name, "no room", entry.size)
    handed.left(name, "server lost", entry.size)
    assert handed.problems() == [("one", "server lost", 1, PAGE)]
    handed.safe(name, "b", entry.size, moved=True)
    assert handed.problems() == []
    assert handed.is_safe(name, {"b", "c"})
    assert not handed.is_safe(name, {"c"})
    assert (handed.moved_blocks, handed.moved_bytes) == (1, PAGE)
    handed.left(name, "no room", entry.size)
    handed.gone(name)
    handed.gone(name)
    assert handed.problems() == []


def an_entry() -> Entry:
    store = Store(4 * PAGE, alignment=PAGE)
    write(store, [key("a")], 1.0)
    (entry,) = store.index.inventory()
    return entry
