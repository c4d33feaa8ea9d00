"""What is wanted, what runs, what it costs, and who must hear of a removal: without any I/O."""

from __future__ import annotations

import random

import pytest

from kvpool.errors import InvariantViolated
from kvpool.protocols import ReserveRequest
from kvpool.server.moves.state.fetches import FetchBudget, Fetches, Receivers
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.store import Store
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, ReadStatus, WriteStatus
from tests.conftest import key, keys
from tests.support.stores import ONE, PAGE, TWO, write


@pytest.mark.parametrize("rate", [1e6, 0.0])
def test_transfers_never_run_ahead_of_the_budget_by_more_than_one(rate: float) -> None:
    rng = random.Random(1)
    budget = FetchBudget(rate)
    now, moved, speed = 0.0, 0, 8e6
    for _ in range(500):
        now += budget.wait_s(now)
        size = rng.choice([1000, 50_000, 4_000_000])
        price_s = budget.begin(size, now)
        now += size / speed
        budget.end(price_s, size, size, size / speed)
        moved += size
    allowed = rate or speed / 4
    assert moved - size <= allowed * now * 1.01
    assert moved >= allowed * now * 0.5, "and it uses what it may"


def test_a_transfer_that_brings_nothing_costs_nothing() -> None:
    budget = FetchBudget(1000)
    price_s = budget.begin(1000, 5.0)
    assert budget.wait_s(5.0) == pytest.approx(1.0)
    with pytest.raises(InvariantViolated):
        budget.begin(1, 5.5)
    budget.end(price_s, 1000, 250, 0.1)
    assert budget.wait_s(5.0) == pytest.approx(0.25)


def test_a_quarter_of_what_was_measured_follows_the_speed() -> None:
    budget = FetchBudget()
    for speed in (1e9, 1e7):
        for _ in range(100):
            budget.end(0.0, 1 << 20, 1 << 20, (1 << 20) / speed)
        assert budget.rate == pytest.approx(speed / 4, rel=0.01)


def test_a_peer_that_is_nearly_frozen_slows_down_no_other() -> None:
    """It takes most of the time, for few of the bytes: 1.9 MB/s for all, once, instead of 250."""
    budget, size = FetchBudget(), 4 << 20
    for _ in range(20):
        for _ in range(9):
            budget.end(0.0, size, size, size / 1e9)
        budget.end(0.0, size, size, 4.9)
    assert budget.rate > 1e9 / 4 * 0.8
    budget.end(0.0, size, 100, 1e-9)  # nor is a moment with a few bytes the speed of all
    assert budget.rate < 1e9


def test_a_block_is_fetched_by_one_call_and_not_after_its_removal() -> None:
    fetches, (a, b) = Fetches(), keys("block", 2)
    assert fetches.begin(TWO, 1, a)
    assert not fetches.begin(TWO, 1, a)
    assert fetches.begin(TWO, 0, a)
    assert fetches.begin(TWO, 1, b)
    fetches.revoke(TWO, [a], 1)
    assert [fetches.may_seal(TWO, part, a) for part in (0, 1)] == [True, False]
    assert fetches.may_seal(TWO, 1, b)
    fetches.revoke(TWO, [a], None)
    assert not fetches.may_seal(TWO, 0, a)
    fetches.revoke(ONE, [b], None)
    assert fetches.may_seal(TWO, 1, b)
    fetches.end(TWO, 1, a)
    assert not fetches.may_seal(TWO, 1, a)
    assert fetches.begin(TWO, 1, a), "a later call may bring what was written again"
    for part, digest in ((1, a), (0, a), (1, b)):
        fetches.end(TWO, part, digest)
    assert len(fetches) == 0


def test_a_removal_follows_a_block_once_to_each_receiver() -> None:
    receivers, (a, b) = Receivers(), keys("block", 2)
    for part, digest, server in ((0, a, "x"), (1, a, "x"), (1, a, "y"), (0, b, "y")):
        receivers.add(TWO, part, digest, server)
    assert receivers.take(ONE, [a, b], None) == {}
    assert receivers.of(TWO, [a], 0) == {"x": [a]}  # a removal that comes later follows it, too
    assert receivers.take(TWO, [a], 0) == {"x": [a]}
    found = receivers.take(TWO, [a, b], None)
    assert {server: set(blocks) for server, blocks in found.items()} == {"x": {a}, "y": {a, b}}
    assert receivers.take(TWO, [a, b], None) == {}
    assert len(receivers) == 0


def test_what_is_remembered_of_receivers_is_bounded() -> None:
    receivers = Receivers(limit=10)
    for number in range(100):
        receivers.add(ONE, 0, key(number), f"server-{number}")
        receivers.add(ONE, 0, key("often"), f"server-{number}")
    assert len(receivers) == 10
    assert len(receivers.take(ONE, [key("often")], None)) == 16
    assert receivers.take(ONE, [key(99)], None) == {"server-99": [key(99)]}
    assert receivers.take(ONE, [key(5)], None) == {}


def test_a_tenant_that_asks_for_many_takes_no_record_of_others() -> None:
    """Else a block that was removed would come back where another server had just fetched it."""
    mine, theirs = Namespace("@globex/m"), Namespace("@acme/m", parts=2)
    receivers = Receivers(limit=100)
    receivers.add(mine, 0, key("mine"), "x")
    for number in range(1000):
        receivers.add(theirs, number % 2, key(number), "y")
    assert receivers.dropped == 901
    assert receivers.take(mine, [key("mine")], None) == {"x": [key("mine")]}
    assert len(receivers) == 99
    assert receivers.take(theirs, [key(999)], 1) == {"y": [key(999)]}
    assert receivers.take(theirs, [key(999)], None) == {}
    receivers.add(theirs, 0, key("another"), "y")
    assert receivers.dropped == 901, "what was taken made room"


# --- room -----------------------------------------------------------------------------------------


def fetch(
    store: Store | TieredStore, name: str, last_used: float, now: float = 50.0
) -> WriteStatus:
    (status,) = write(store, [key(name)], now, owner=2, last_used=last_used)
    return status


def test_a_fetched_block_takes_the_place_of_an_older_one_only() -> None:
    store = Store(4 * PAGE, alignment=PAGE)
    old = keys("old", 4)
    for number, digest in enumerate(old):
        write(store, [digest], 10.0 + number)
    assert fetch(store, "colder", 9.0, 100.0) is WriteStatus.NO_SPACE
    check_invariants(store)
    assert store.extents.evicted == 0
    assert fetch(store, "as cold", 10.0, 100.0) is WriteStatus.NO_SPACE
    assert fetch(store, "warmer", 10.5, 100.0) is WriteStatus.RESERVED
    assert store.index.peek(ONE, 0, old[0]) is None
    # It is as old as it was elsewhere, so it is the next victim.
    write(store, [key("new")], 101.0)
    assert store.index.peek(ONE, 0, key("warmer")) is None
    assert store.index.peek(ONE, 0, old[1]) is not None
    check_invariants(store)


def test_a_fetched_block_does_not_take_the_place_of_an_announced_session() -> None:
    store = Store(2 * PAGE, alignment=PAGE, hint_budget=1.0)
    write(store, [key("a")], 10.0, session="agent", resume_in=60.0)
    write(store, [key("b")], 11.0, session="agent", resume_in=60.0)
    assert fetch(store, "fetched", 19.0, 20.0) in (WriteStatus.NO_SPACE, WriteStatus.BYPASSED)
    assert store.extents.evicted == 0
    check_invariants(store)


@pytest.mark.parametrize(("now", "session"), [(30.0, ""), (11.0, "agent")])
def test_parts_leave_together_so_latest_use_and_any_hint_count(now: float, session: str) -> None:
    """Another session may write one part: hints are about the other parts only."""
    store = Store(2 * PAGE, alignment=PAGE)
    write(store, [key("a")], 10.0, namespace=TWO)
    write(store, [key("a")], now, namespace=TWO, part=1, session=session, resume_in=60.0)
    assert fetch(store, "fetched", 20.0, 50.0) in (WriteStatus.NO_SPACE, WriteStatus.BYPASSED)
    assert store.index.stored == 2


def demote(stack: TieredStore, now: float) -> None:
    while copies := stack.transfers.next_writebacks(1 << 30, 1 << 10, now):
        for copy in copies:
            stack.transfers.done(copy, good=True, now=now)


def test_below_memory_a_fetched_block_takes_the_place_of_an_older_one_only() -> None:
    stack = TieredStore([FrontStore(2 * PAGE, alignment=PAGE), Store(4 * PAGE, alignment=PAGE)])
    for number, digest in enumerate(keys("old", 4)):
        write(stack, [digest], 10.0 + number)
        demote(stack, 10.0 + number)
    # Memory has only copies of what is on the disk, so it may drop newer ones.
    assert fetch(stack, "colder", 9.0, 100.0) is WriteStatus.NO_SPACE
    assert fetch(stack, "warmer", 10.5, 100.0) is WriteStatus.RESERVED
    demote(stack, 100.0)
    assert stack.peek(ONE, 0, keys("old", 1)[0]) is None
    assert stack.backing.index.peek(ONE, 0, key("warmer")) is not None
    check_invariants(stack)
    # On the disk, too, it is as old as it was.
    write(stack, [key("new")], 101.0)
    demote(stack, 101.0)
    assert stack.peek(ONE, 0, key("warmer")) is None
    check_invariants(stack)


def test_a_block_that_the_disk_has_no_room_for_when_its_turn_comes_evicts_nothing() -> None:
    stack = TieredStore([FrontStore(4 * PAGE, alignment=PAGE), Store(2 * PAGE, alignment=PAGE)])
    assert fetch(stack, "fetched", 5.0, 50.0) is WriteStatus.RESERVED
    for number, digest in enumerate(keys("new", 2)):  # while it waits, others fill the disk
        request = ReserveRequest(ONE, 0, [digest], [ROOT], [PAGE])
        (answer,) = stack.backing.reserve(9, request, 60.0 + number)
        stack.backing.seal_all(9, [answer.id], [7], 60.0 + number, from_other_tier=True)
    demote(stack, 70.0)
    assert stack.backing.extents.evicted == 0
    assert stack.peek(ONE, 0, key("fetched")) is not None, "in memory, until that is full"


def test_while_the_disk_takes_no_writes_memory_keeps_what_is_newer() -> None:
    stack = TieredStore([FrontStore(2 * PAGE, alignment=PAGE), Store(4 * PAGE, alignment=PAGE)])
    for _ in stack.queue.stop_writing():
        pass
    for number, digest in enumerate(keys("only in memory", 2)):
        write(stack, [digest], 10.0 + number)
    assert fetch(stack, "colder", 9.0, 100.0) is WriteStatus.NO_SPACE
    assert fetch(stack, "warmer", 10.5, 100.0) is WriteStatus.RESERVED
    assert (
        stack.front.index.change_log.tombstones.reason(ONE, keys("only in memory", 1)[0])
        is ReadStatus.EVICTED
    )
    check_invariants(stack)
