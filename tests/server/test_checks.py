"""Each broken invariant of a store is noticed: random histories are only as good as that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.errors import InvariantViolated
from kvpool.protocols import ReserveRequest
from kvpool.server.state.entry import MOVER, Entry, Index
from kvpool.server.state.extent_state import State
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.holdings import Limits
from kvpool.server.state.store import Store
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace
from tests.conftest import key, keys
from tests.support.stores import ONE, PAGE, write

OTHER = Namespace("other")
CHAIN = keys("chain", 3)
READER, WRITER, LOST = 2, 3, 4


def begin(store: Store, owner: int, name: str) -> None:
    store.reserve(owner, ReserveRequest(ONE, 0, [key(name)], [ROOT], [PAGE]), 1.0)


def in_every_state() -> Store:
    """A store with blocks in each state of its table, and free memory between them."""
    store = Store(16 * PAGE)
    store.held.limits = Limits.of(16 * PAGE, 16 * PAGE)
    write(store, CHAIN, 1.0, session="talk")
    write(store, [key("child")], 1.0, parent=key("absent"))
    write(store, [key("removed"), key("gap")], 1.0)
    store.remove(ONE, [key("gap")])
    store.pin(READER, ONE, 0, [CHAIN[0], key("removed")], 2.0)
    store.remove(ONE, [key("removed")])
    begin(store, WRITER, "begun")
    begin(store, LOST, "lost")
    store.drop_owner(LOST, writer_may_be_alive=True)
    check_invariants(store)
    return store


def block(store: Store, digest: bytes) -> Entry:
    return next(entry for entry in store.extents.blocks_at.values() if entry.digest == digest)


def index(store: Store) -> Index:
    return store.index.by_part[ONE, 0]


def hold_twice(store: Store) -> None:
    entry = block(store, key("begun"))
    store.held.owner(9).reservations[99] = entry
    store.held.owner(9).reserved_bytes += PAGE
    store.held.limits.writes.used += PAGE


def unpin_pending(store: Store) -> None:
    """The last pin goes, and the extent stays."""
    holder = store.held._owners[READER]
    for id, entry in list(holder.pins.items()):
        if entry.digest == key("removed"):
            del holder.pins[id]
            entry.pins = 0
            holder.pinned_bytes -= PAGE
            store.held.limits.copies.used -= PAGE


def misfile_pending(store: Store) -> None:
    block(store, key("removed")).state = State.QUARANTINED


def forget_a_leaf(store: Store) -> None:
    """Of a session that has ended: nothing else would evict it."""
    write(store, [key("leaf")], 1.0, session="ended")
    leaf = block(store, key("leaf"))
    assert leaf.session is not None
    store.hint("ended", None, 2.0)
    check_invariants(store)
    leaf.is_candidate = False
    check_invariants(store)
    del leaf.session.leaves[leaf]


def share_an_extent(store: Store) -> None:
    pending = block(store, key("removed"))
    pending.offset = block(store, CHAIN[0]).offset


BROKEN_STORES: dict[str, Callable[[Store], object]] = {
    "part 0 is misfiled": lambda s: setattr(index(s), "part", 1),
    "empty index": lambda s: s.index.by_part.update({(OTHER, 0): Index(OTHER, 0, 0)}),
    "Entry .* is misfiled": lambda s: setattr(block(s, CHAIN[1]), "digest", key("x")),
    "Entry .* is misfiled$": lambda s: setattr(block(s, CHAIN[1]), "index", Index(ONE, 0, 0)),
    "is in the index": lambda s: setattr(block(s, CHAIN[2]), "state", State.QUARANTINED),
    "wrong count of children": lambda s: setattr(block(s, CHAIN[0]), "children", 2),
    "count of children of absent parents": lambda s: index(s).orphans.clear(),
    "is evictable but no candidate": lambda s: setattr(
        block(s, key("child")), "is_candidate", False
    ),
    "is evictable but no candidate: a leak": forget_a_leaf,
    "is listed as PENDING_FREE": misfile_pending,
    "shares its extent": share_an_extent,
    "disagree$": lambda s: s.extents.blocks_at.popitem(),
    "allocated extents and blocks": lambda s: s.allocator.allocate(1),
    "is pinned, but its extent was freed": lambda s: s.held._owners[READER].pins.update(
        {99: Entry(index(s), key("x"), ROOT, 15 * PAGE, PAGE, 9)}
    ),
    "is reserved twice": hold_twice,
    "counts 2 pins": lambda s: setattr(block(s, CHAIN[0]), "pins", 2),
    "state and reservations disagree": lambda s: s.held._owners[WRITER].reservations.clear(),
    "is pending free, but nothing pins it": unpin_pending,
    "counts of stored blocks": lambda s: setattr(s.index, "stored", s.index.stored + 1),
    "stored blocks and bytes": lambda s: setattr(s.index, "stored_bytes", 0),
    "a connection holds": lambda s: setattr(s.held._owners[READER], "pinned_bytes", 0),
    "a connection holds .*": lambda s: setattr(s.held._owners[WRITER], "reserved_bytes", 0),
    "bytes are held": lambda s: setattr(s.held.limits.copies, "used", 0),
    "bytes are held$": lambda s: setattr(s.held.limits.writes, "used", PAGE + 1),
    ", but 0 bytes": lambda s: setattr(s.held.limits.views, "used", 1),
    # of its session policy
    "bytes counted": lambda s: setattr(block(s, CHAIN[0]).session, "bytes", PAGE),
    "knows blocks that have left": lambda s: block(s, CHAIN[0]).session.chain_ends.update(  # type: ignore[union-attr]
        {index(s): Entry(index(s), key("x"), ROOT, 0, PAGE, 9)}
    ),
    "bytes announced": lambda s: setattr(s.extents.policy.announced, "bytes", 1),
    # of its allocator
    "expected one at": lambda s: s.allocator._sizes.pop(block(s, CHAIN[1]).offset),
    "extents end at": lambda s: setattr(s.allocator, "capacity", 17 * PAGE),
    "allocated is": lambda s: setattr(s.allocator, "allocated", 0),
    "is not kept, or more is": lambda s: setattr(s.allocator, "fence", (0, 16 * PAGE)),
    "bytes are fenced": lambda s: setattr(s.allocator, "fenced", 1),
    "free extents and their ends": lambda s: s.allocator._free_ends.clear(),
    "is in no class": lambda s: s.allocator._classes.clear(),
    "a class names": lambda s: s.allocator._classes.update({77: {3: None}}),
    "the class mask is wrong": lambda s: setattr(s.allocator, "_nonempty", 0),
}


@pytest.mark.parametrize("problem", BROKEN_STORES)
def test_a_store_that_is_broken(problem: str) -> None:
    store = in_every_state()
    BROKEN_STORES[problem](store)
    with pytest.raises(InvariantViolated, match=problem):
        check_invariants(store)


def test_free_neighbours_that_were_not_joined() -> None:
    allocator = Store(4 * PAGE).allocator
    allocator._take_free(0)
    allocator._put_free(0, PAGE)
    allocator._put_free(PAGE, 3 * PAGE)
    with pytest.raises(InvariantViolated, match="free neighbours at 4096"):
        check_invariants(allocator)


def two_tiers() -> TieredStore:
    """One block is written back, one is on its way down, and one waits."""
    stack = TieredStore([FrontStore(8 * PAGE), Store(8 * PAGE)])
    for name in ("down", "moving", "waiting"):
        write(stack, [key(name)], 1.0)
    down, moving = stack.transfers.next_writebacks(2 * PAGE, 2, 2.0)
    stack.transfers.done(down, good=True, now=3.0)
    assert moving.entry.pins == 1
    check_invariants(stack)
    return stack


BROKEN_STACKS: dict[str, Callable[[TieredStore], object]] = {
    "is dirty and in no queue": lambda s: s.queue.dirty.clear(),
    "is dirty and in no queue: a leak": lambda s: [
        s.front.unpin(MOVER, id) for id in list(s.front.held.owner(MOVER).pins)
    ],
    "bytes on their way": lambda s: setattr(s.queue, "moving_bytes", 0),
    "dirty blocks and bytes": lambda s: setattr(s.front.extents, "dirty_bytes", 0),
    "has left or is dirty, but is to be written": lambda s: s.queue.unwritten.update(s.queue.dirty),
    "counted": lambda s: s.front.index.fingerprint.count(key("x"), 7, 1),
    "stored blocks and bytes": lambda s: setattr(s.backing.index, "stored", 0),
}


@pytest.mark.parametrize("problem", BROKEN_STACKS)
def test_tiers_that_are_broken(problem: str) -> None:
    stack = two_tiers()
    BROKEN_STACKS[problem](stack)
    with pytest.raises(InvariantViolated, match=problem):
        check_invariants(stack)
