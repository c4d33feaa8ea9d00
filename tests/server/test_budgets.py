"""What one connection may keep from being reused is bounded, and comes back (design: budgets)."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvpool import Namespace, ReadStatus, WriteStatus, dev
from kvpool.client.pool import Pool
from kvpool.config import ClientConfig
from kvpool.errors import Overloaded
from kvpool.protocols import Decision, Peer, ReserveRequest
from kvpool.server import clients
from kvpool.server.block_server import default_reserved_max
from kvpool.server.eviction.lru import LRU
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.holdings import START, Budget, Limits, Owner
from kvpool.server.state.store import Store
from kvpool.server.state.tenants import set_quotas
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Pin, Reservation
from kvpool.wire import messages as wire
from kvpool_transports.copy_pool import CopyPool
from tests.conftest import NAMESPACE, buffers, eventually, key, keys, values
from tests.support.raw_peers import frame, payload, raw, read, reserve
from tests.support.tenant_pool import tenant, tenant_pool
from tests.support.turns import others

PAGE = 4096
ONE = Namespace("one")


class Books:
    """A store of `pages` pages with budgets, checked after each step."""

    def __init__(self, pages: int, *, pinned: int = 0, reserved: int = 0) -> None:
        self.store = Store(pages * PAGE)
        pinned, reserved = pinned or pages, reserved or 4 * pages
        self.store.held.limits = Limits.of(pinned * PAGE, reserved * PAGE)

    def reserve(self, owner: int, chain: Sequence[bytes], size: int = PAGE) -> list[Reservation]:
        parents = [ROOT, *chain[:-1]]
        request = ReserveRequest(ONE, 0, chain, parents, [size] * len(chain))
        answers = self.store.reserve(owner, request, 1.0)
        check_invariants(self.store)
        return answers

    def seal(self, owner: int, answers: Sequence[Reservation]) -> None:
        for answer in answers:
            if answer.extent is not None:
                self.store.seal(owner, answer.id, 7, 2.0)
        check_invariants(self.store)

    def fill(self, chain: Sequence[bytes], size: int = PAGE) -> None:
        limits, self.store.held.limits = self.store.held.limits, Limits.none()
        self.seal(99, self.reserve(99, chain, size))
        self.store.drop_owner(99)
        self.store.held.limits = limits

    def pin(self, owner: int, chain: Sequence[bytes], *, view: bool = False) -> list[Pin]:
        pins = self.store.pin(owner, ONE, 0, chain, 3.0, view=view)
        check_invariants(self.store)
        return pins

    def unpin(self, owner: int, pins: Sequence[Pin]) -> None:
        for pin in pins:
            if pin.extent is not None:
                self.store.unpin(owner, pin.id)
        check_invariants(self.store)


def test_the_budgets_of_a_configuration() -> None:
    """One connection gets half; views get half of all pins, and count among them."""
    copies, views, writes, lent = Limits.of(1000, 600)
    assert (copies.each, copies.total) == (500, 1000)
    assert copies.inside is views
    assert (views.each, views.total, views.inside) == (500, 500, None)
    assert (writes.each, writes.total, lent.total) == (300, 600, 600)
    assert lent.each > 1 << 60
    smallest = Limits.of(1, 1)
    assert (smallest.copies.each, smallest.views.each, smallest.writes.each) == (1, 1, 1)


@pytest.mark.parametrize(
    ("total", "start"),
    [(1 << 20, 1 << 20), (16 << 20, 1 << 20), (64 << 20, 4 << 20), (1 << 30, 16 << 20)],
)
def test_what_a_writer_may_throw_out_before_it_has_sealed(total: int, start: int) -> None:
    assert Budget(total=total).start == start
    owner = Owner({}, {}, limited=True)
    writes = Budget(total, total)
    for reserved, sealed, may in (
        (0, 0, True),
        (start - 1, 0, True),
        (start, 0, False),
        (start, start // 2, False),
        (start, start // 2 + 1, total > start),
        (total, total, False),  # never more than it may hold
    ):
        owner.reserved_bytes, owner.sealed_bytes = reserved, sealed
        assert (owner.left_to_evict(writes) > 0) is may, (reserved, sealed)


def statuses(answers: Sequence[Pin] | Sequence[Reservation]) -> list[str]:
    return [answer.status.name for answer in answers]


# --- pins ------------------------------------------------------------------------------


def filled() -> tuple[Books, list[bytes]]:
    books, chain = Books(16, pinned=8), keys("chain", 10)
    books.fill(chain)
    return books, chain


def test_a_read_beyond_the_budget_goes_in_steps() -> None:
    books, chain = filled()
    got = []
    rest = chain
    while rest:
        pins = books.pin(1, rest)
        hits = statuses(pins).count("HIT")
        assert hits == min(4, len(rest))  # half of 8 pages for one connection
        assert set(statuses(pins)[hits:]) <= {"NOT_YET"}
        got += rest[:hits]
        books.unpin(1, pins)
        rest = rest[hits:]
    assert got == chain
    assert books.store.held.limits.copies.used == 0


def test_two_connections_share_the_budget_of_all() -> None:
    books, chain = filled()
    first, _ = books.pin(1, chain), books.pin(2, chain)
    assert statuses(books.pin(3, chain[:1])) == ["NOT_YET"]
    books.unpin(1, first)
    assert statuses(books.pin(3, chain[:1])) == ["HIT"]


def test_views_leave_half_of_the_budget_to_reads_that_copy() -> None:
    books, chain = filled()
    views = books.pin(1, chain, view=True)
    assert statuses(views) == ["HIT"] * 4 + ["REFUSED"] * 6
    assert statuses(books.pin(2, chain[:1], view=True)) == ["REFUSED"]
    assert statuses(books.pin(3, chain)).count("HIT") == 4
    assert statuses(books.pin(5, chain[:1])) == ["NOT_YET"]  # with the views, that is all
    books.unpin(1, views)
    assert statuses(books.pin(4, chain)).count("HIT") == 4


def test_a_block_larger_than_the_budget_can_be_read_and_written() -> None:
    books = Books(16, pinned=2, reserved=2)
    answers = books.reserve(1, keys("large", 2), 6 * PAGE)
    assert statuses(answers) == ["RESERVED", "NOT_YET"]
    books.seal(1, answers)
    for view in (False, True):
        pins = books.pin(1, keys("large", 1), view=view)
        assert statuses(pins) == ["HIT"]
        books.unpin(1, pins)


def test_transfers_between_tiers_have_no_budget() -> None:
    books = Books(16, pinned=1, reserved=1)
    answers = books.reserve(MOVER, keys("promoted", 8))
    assert statuses(answers) == ["RESERVED"] * 8
    assert statuses(books.reserve(1, keys("other", 1))) == ["RESERVED"]
    books.seal(MOVER, answers)
    for entry in books.store.index.inventory():
        books.store.held.pin(MOVER, entry)
    assert statuses(books.pin(1, keys("promoted", 1))) == ["HIT"]


@pytest.mark.parametrize("view", [False, True])
def test_what_a_connection_has_pinned_before_counts(view: bool) -> None:
    books, chain = filled()
    assert statuses(books.pin(1, chain[:3], view=view)) == ["HIT"] * 3
    refused = "REFUSED" if view else "NOT_YET"
    assert statuses(books.pin(1, chain[3:6], view=view)) == ["HIT", refused, refused]


# --- reservations ------------------------------------------------------------------------


def test_who_has_stored_nothing_evicts_little_however_often_it_asks() -> None:
    pages = 4 * START // PAGE
    books = Books(pages)
    books.fill(keys("honest", pages))
    answers = statuses(books.reserve(1, keys("stranger", 1024)))
    assert answers.count("RESERVED") == START // PAGE
    assert set(answers) == {"RESERVED", "NOT_YET"}
    for stranger in range(1, 40):
        books.reserve(stranger, keys(stranger, 1024))
        books.store.drop_owner(stranger)
        check_invariants(books.store)
    assert books.store.extents.evicted == START // PAGE
    assert [budget.used for budget in books.store.held.limits] == [0, 0, 0, 0]


def test_a_writer_may_evict_in_proportion_to_what_it_has_stored() -> None:
    pages = 8 * START // PAGE
    books = Books(pages, reserved=pages)
    books.fill(keys("honest", pages))
    steps, rest = [], keys("mine", 7 * START // PAGE)
    while rest:
        answers = books.reserve(1, rest[:1024])
        books.seal(1, answers)
        steps.append(statuses(answers).count("RESERVED") * PAGE / START)
        rest = rest[round(steps[-1] * START / PAGE) :]
    assert steps == [1, 2, 4]


@pytest.mark.parametrize(
    ("reserved_max", "start"),
    [(PAGE, START), (16 * START, START), (64 * START, 4 * START), (1 << 40, 16 * START)],
)
def test_what_a_stranger_may_evict_is_a_share_of_what_all_may_reserve(
    reserved_max: int, start: int
) -> None:
    pages = 64 * START // PAGE
    books = Books(pages, reserved=reserved_max // PAGE)
    books.fill(keys("honest", pages // 256), 256 * PAGE)
    strangers = range(1, 9)
    for stranger in strangers:
        books.reserve(stranger, keys(stranger, 64), 256 * PAGE)
        books.store.drop_owner(stranger)
    assert books.store.extents.evicted_bytes == min(start, max(START, reserved_max // 2))


def test_what_all_have_reserved_is_bounded() -> None:
    books = Books(64, reserved=16)
    assert statuses(books.reserve(1, keys("a", 5))) == ["RESERVED"] * 5
    assert statuses(books.reserve(1, keys("more", 5))) == ["RESERVED"] * 3 + ["NOT_YET"] * 2
    assert statuses(books.reserve(2, keys("b", 10))).count("RESERVED") == 8
    assert statuses(books.reserve(3, keys("c", 10))) == ["NO_SPACE"] * 10  # nothing to seal first
    books.store.cancel_rest(1)
    assert statuses(books.reserve(3, keys("c", 10))).count("RESERVED") == 8
    books.store.drop_owner(2, writer_may_be_alive=True)
    check_invariants(books.store)
    assert statuses(books.reserve(4, keys("d", 10))).count("RESERVED") == 8


def test_writers_may_not_reserve_all_of_a_small_server() -> None:
    memory = 16 * PAGE
    books = Books(16, reserved=default_reserved_max(memory) // PAGE)
    for stranger in range(1, 5):
        books.reserve(stranger, keys(f"{stranger}", 16))
    for stranger in range(1, 5):  # stopped, and cut off: its memory stays in quarantine
        books.store.drop_owner(stranger, writer_may_be_alive=True)
    assert statuses(books.reserve(9, keys("new", 1))) == ["RESERVED"]
    assert default_reserved_max(16 * START) == 4 * START


def test_a_chain_that_does_not_fit_keeps_its_head() -> None:
    books = Books(8, reserved=8)
    chain = keys("chain", 12)
    stored: list[bytes] = []
    rest = chain
    for _ in range(10):
        answers = books.reserve(1, rest) if len(rest) == 12 else _continue(books, chain, rest)
        books.seal(1, answers)
        hits = statuses(answers).count("RESERVED")
        stored += rest[:hits]
        rest = rest[hits:]
    assert stored == chain[:8]
    assert statuses(answers) == ["NO_SPACE"] * 4
    assert books.store.extents.evicted == 0


def test_a_chain_goes_on_although_its_own_head_ranks_lowest() -> None:
    """Else a policy that thinks little of new prompts keeps all but their first blocks out."""

    class NewestFirst(LRU[Entry]):
        def victim(
            self, newcomer: Entry, evictable: Callable[[Entry], bool], now: float
        ) -> Entry | Decision | None:
            for one in sorted(self._heap, reverse=True):
                if evictable(one[1]):
                    self._heap.remove(one)
                    one[1].is_candidate = False
                    return one[1]
            return Decision.BYPASS

    books, chain = Books(4), keys("chain", 3)
    books.store = Store(4 * PAGE, policy=NewestFirst())
    for one in keys("old", 4):
        books.fill([one])
    for rest in (chain[:1], chain[1:2], chain[2:]):
        answers = books.reserve(1, rest) if rest == chain[:1] else _continue(books, chain, rest)
        assert statuses(answers) == ["RESERVED"]
        books.seal(1, answers)
    assert {*chain} < {entry.digest for entry in books.store.extents.blocks_at.values()}
    larger = ReserveRequest(ONE, 0, keys("last", 1), chain[-1:], [4 * PAGE])
    assert statuses(books.store.reserve(1, larger, 6.0)) == ["BYPASSED"]
    check_invariants(books.store)


def _continue(books: Books, chain: list[bytes], rest: list[bytes]) -> list[Reservation]:
    parents = [chain[chain.index(digest) - 1] for digest in rest]
    request = ReserveRequest(ONE, 0, rest, parents, [PAGE] * len(rest))
    return books.store.reserve(1, request, 5.0)


def test_a_block_takes_the_place_of_a_victim_of_its_size() -> None:
    books = Books(8, reserved=64)
    books.fill(keys("old", 8))
    before = dict(books.store.allocator.extents())
    books.seal(1, books.reserve(1, keys("new", 3)))
    assert books.store.extents.evicted == 3
    assert books.store.allocator.extents() == before
    books.seal(1, books.reserve(1, keys("larger", 1), 2 * PAGE))  # two leave for it
    assert books.store.extents.evicted == 5


def test_quarantine_and_what_may_come_into_it_have_one_budget() -> None:
    books = Books(64, reserved=16)
    store = books.store
    books.reserve(1, keys("a", 10))  # 8 of 16 pages: half of the budget of reservations
    assert store.held.lend(1)
    assert store.held.lend(1)  # asked twice, counted once
    store.drop_owner(1, writer_may_be_alive=True)
    check_invariants(store)
    assert store.held.quarantined_bytes == 8 * PAGE
    second = books.reserve(2, keys("b", 8))
    books.reserve(3, keys("c", 1))
    assert store.held.lend(2)
    assert not store.held.lend(3)  # 16 of 16
    check_invariants(store)
    books.seal(2, second)
    assert store.held.lend(3) is True  # what was sealed is out of reach of its writer
    store.drop_owner(3)
    store.drop_owner(2)
    store.writer_exited(1)
    check_invariants(store)
    assert store.held.quarantined_bytes == 0
    assert [budget.used for budget in store.held.limits] == [0, 0, 0, 0]


def test_a_batch_of_any_size_is_lent_while_nothing_else_is() -> None:
    books = Books(16, reserved=4)
    books.reserve(1, keys("large", 1), 10 * PAGE)
    assert books.store.held.lend(1)
    books.reserve(2, keys("small", 1))
    assert not books.store.held.lend(2)
    books.store.cancel_rest(1)
    check_invariants(books.store)
    assert books.store.held.lend(2)


def test_what_was_sealed_or_given_back_is_not_lent_any_more() -> None:
    books = Books(16, reserved=8)
    books.seal(1, lent(books, 1, keys("a", 2)))
    lent(books, 1, keys("b", 2))
    books.store.cancel_rest(1)
    books.reserve(1, keys("c", 2))  # not lent: the client has no address
    check_invariants(books.store)
    assert books.store.held.limits.lent.used == 0


def lent(books: Books, owner: int, chain: Sequence[bytes]) -> list[Reservation]:
    answers = books.reserve(owner, chain)
    assert books.store.held.lend(owner)
    return answers


# --- with real servers and clients -----------------------------------------------------------


BLOCK = 64 << 10
SIZE = 16 << 20  # of `pool_dev`


def blocks_of(
    name: str, count: int, namespace: str = NAMESPACE.name, wait_s: float = 60.0
) -> wire.Reserve:
    """A request to reserve so many blocks."""
    packed, parents = b"".join(keys(name, count)), bytes(32 * count)
    return wire.Reserve(namespace, 1, 32, packed, 0, parents, [BLOCK] * count, wait_s)


def large(each: int = SIZE // 2) -> Limits:
    """Half of the pool for a connection: more than the buffers of a socket hold."""
    return Limits.none()._replace(copies=Budget(each, SIZE - BLOCK))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers cut stalled clients after 0.5 s."""
    monkeypatch.setattr(clients, "STALLED_S", 0.5)
    monkeypatch.setattr(clients, "SAMPLE_S", 0.05)


@pytest.fixture
async def full(pool_dev: dev.Dev) -> AsyncIterator[tuple[Pool, list[bytes]]]:
    """A pool that is full of blocks, and a client that reads over tcp."""
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    async with pool_dev.pool(config) as pool:
        chain = keys("honest", SIZE // BLOCK)
        assert set(await pool.write(NAMESPACE, chain, values(chain, BLOCK))) == {WriteStatus.STORED}
        yield pool, chain


@pytest.mark.parametrize("transport", ["shm", "tcp", "inproc"])
@pytest.mark.parametrize("verify", [True, False])
async def test_a_large_call_goes_in_steps_and_loses_nothing(
    pool_dev: dev.Dev, transport: str, verify: bool
) -> None:
    (server,) = pool_dev.servers
    config = ClientConfig(masters=[pool_dev.address], transports=[transport], verify=verify)
    async with pool_dev.pool(config) as pool:
        for name in ("first", "second"):  # the second has to evict the first
            chain = keys(name, 15 << 20 >> 16)
            written = await pool.write(NAMESPACE, chain, values(chain, BLOCK))
            assert set(written) == {WriteStatus.STORED}
            got = buffers(len(chain), BLOCK)
            results = await pool.read(NAMESPACE, chain, got)
            assert {result.status for result in results} == {ReadStatus.HIT}
            assert got == values(chain, BLOCK)
        await eventually(
            lambda: [budget.used for budget in server.store.held.limits] == [0, 0, 0, 0]
        )


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_frozen_readers_stop_nobody(
    pool_dev: dev.Dev, full: tuple[Pool, list[bytes]], scheme: str, impatient: None
) -> None:
    """They pin all that they can and do nothing more; an honest client reads and writes."""
    (server,) = pool_dev.servers
    pool, chain = full
    server.store.held.limits = large()
    async with raw(pool_dev, scheme) as one, raw(pool_dev, scheme) as two:
        for peer in (one, two):
            await peer.ask(wire.Hello("default", "frozen"), wire.Welcome)
            await peer.send(frame(read(*chain)))
        await eventually(lambda: server.store.held.limits.copies.used >= SIZE - BLOCK)
        (status,) = await pool.write(NAMESPACE, [key("new")], [bytes(BLOCK)])
        assert status is WriteStatus.STORED
        stats = server.stats(asyncio.get_running_loop().time() + 1)
        assert stats.clients[0].name == "frozen"
        assert stats.clients[0].connections == 2
        assert stats.clients[0].pinned_bytes == stats.pinned_bytes >= SIZE - BLOCK
        assert stats.oldest_pin_s >= 1.0
        got = buffers(8, BLOCK)
        results = await pool.read(NAMESPACE, chain[:8], got)
        assert {result.status for result in results} <= {ReadStatus.HIT, ReadStatus.EVICTED}
        assert results[-1].status is ReadStatus.HIT
        assert server.stats(0.0).counters["cut_connections"] >= 1
        if scheme == "shm":
            assert "Overloaded" in (await one.refusal(), await two.refusal())
    await eventually(lambda: server.store.held.pins == 0)


async def test_silent_reservers_stop_nobody(
    pool_dev: dev.Dev, full: tuple[Pool, list[bytes]], impatient: None
) -> None:
    (server,) = pool_dev.servers
    pool, _ = full
    server.store.held.limits = Limits.of(SIZE // 4, 2 * START)
    async with raw(pool_dev) as one, raw(pool_dev) as two:
        for peer in (one, two):
            await peer.ask(wire.Hello("default", "silent"), wire.Welcome)
            await peer.ask(blocks_of(str(peer), 64), wire.Reserved)
        assert server.store.held.limits.writes.used == 2 * START
        assert server.store.extents.evicted == 2 * START // BLOCK
        (status,) = await pool.write(NAMESPACE, [key("new")], [bytes(BLOCK)])
        assert status is WriteStatus.STORED
        assert server.stats(0.0).counters["cut_connections"] >= 1


async def test_a_writer_that_asks_for_more_than_there_is_does_not_wait_with_what_it_holds(
    pool_dev: dev.Dev, impatient: None
) -> None:
    """While a server works for a client, it is not stalled: its wait must not keep the memory."""
    (server,) = pool_dev.servers
    server.store.held.limits = Limits.none()
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    async with pool_dev.pool(config) as pool, raw(pool_dev) as stranger:
        await stranger.ask(wire.Hello("default", "greedy"), wire.Welcome)
        count = SIZE // BLOCK + 8
        reserved = await stranger.ask(blocks_of("strange", count), wire.Reserved)
        late = WriteStatus.NOT_YET
        assert [status is late for status in map(WriteStatus, reserved.statuses)][-8:] == [True] * 8
        (status,) = await pool.write(NAMESPACE, [key("new")], [bytes(BLOCK)])
        assert status is WriteStatus.STORED
        assert server.stats(0.0).counters["cut_connections"] == 1


async def test_a_chain_that_is_larger_than_its_server_is_refused_at_once(
    pool_dev: dev.Dev,
) -> None:
    """Nothing is held by others: there is nothing to wait for."""
    config = ClientConfig(masters=[pool_dev.address], transports=["tcp"])
    async with pool_dev.pool(config) as pool:
        chain = keys("long", SIZE // BLOCK + 8)
        began = asyncio.get_running_loop().time()
        written = await pool.write(NAMESPACE, chain, values(chain, BLOCK), timeout=40.0)
        assert asyncio.get_running_loop().time() - began < 10.0
        assert (written[0], written[-1]) == (WriteStatus.STORED, WriteStatus.NO_SPACE)


async def test_stopped_writers_over_shm_leave_memory_and_the_way_to_it(
    pool_dev: dev.Dev, impatient: None
) -> None:
    """Each keeps its socket open, so what it had reserved cannot be reused: that is bounded."""
    (server,) = pool_dev.servers
    limit = server.store.held.limits.lent.total
    config = ClientConfig(masters=[pool_dev.address], transports=["shm"])
    async with pool_dev.pool(config) as pool, AsyncExitStack() as strangers:
        for number in range(8):  # of which each may reserve an eighth of the memory
            peer = await strangers.enter_async_context(raw(pool_dev, "shm"))
            await peer.ask(wire.Hello("default", "stopped"), wire.Welcome)
            await peer.ask(blocks_of(f"{number}", SIZE // BLOCK), wire.Reserved)
            chain = keys(f"honest {number}", 8)
            written = await pool.write(NAMESPACE, chain, values(chain, BLOCK))
            assert set(written) == {WriteStatus.STORED}
            got = buffers(8, BLOCK)
            results = await pool.read(NAMESPACE, chain, got)
            assert {result.status for result in results} == {ReadStatus.HIT}
            assert got == values(chain, BLOCK)
            assert server.store.held.quarantined_bytes <= limit
        stats = server.stats(asyncio.get_running_loop().time())
        assert stats.counters["carried_writes"] > 0
        assert stats.counters["quarantined_bytes"] > limit // 2
        assert stats.clients[0].name == "stopped"
        assert stats.clients[0].quarantined_bytes == stats.counters["quarantined_bytes"]
        before = stats.counters["carried_writes"]
        await strangers.aclose()
        await eventually(lambda: server.store.held.quarantined_bytes == 0)
        assert server.stats(0.0).counters["connections"] == 1
        await pool.write(NAMESPACE, [key("again")], [bytes(BLOCK)])
        assert server.stats(0.0).counters["carried_writes"] == before


async def test_clients_that_hold_as_much_are_listed_in_the_order_in_which_they_came(
    pool_dev: dev.Dev,
) -> None:
    """A simulated history must be the same each time, and so must what a server reports."""
    (server,) = pool_dev.servers
    now = asyncio.get_running_loop().time()
    connections = [server.connect(Peer(f"client-{number}")) for number in range(12)]
    for number, one in enumerate(connections):
        request = ReserveRequest(NAMESPACE, 0, [key(number)], [ROOT], [1024])
        await one.reserve(request, deadline=now + 5)
    reported = [client.name for client in server.stats(now).clients]
    assert reported == [f"client-{number}" for number in range(len(reported))]
    assert len(reported) > 5
    for one in connections:
        one.close()


async def test_a_writer_that_sends_its_bytes_leaves_nothing_in_quarantine(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops in the midst of them; what it had reserved is free, and more of it lands nowhere."""
    (server,) = pool_dev.servers
    monkeypatch.setattr(server.store.held, "lend", lambda owner: False)
    async with raw(pool_dev, "shm") as peer:
        await peer.ask(wire.Hello("default", "carried"), wire.Welcome)
        reserved = await peer.ask(reserve(key("a"), size=BLOCK), wire.Reserved)
        assert (len(reserved.ids), reserved.offsets) == (1, [])
        await peer.send(payload(BLOCK)[: BLOCK // 2])
        (link,) = (one.peer.link for one in server._context.clients.connections)
        link.hang_up(Overloaded("enough"))
        await eventually(lambda: server.store.held.reservations == 0)
        assert (server.store.held.quarantined, server.store.allocator.allocated) == (0, 0)
        await peer.send(payload(BLOCK)[BLOCK // 2 :])
        assert await peer.refusal() == "Overloaded"


async def test_space_goes_to_tenants_in_turns_and_in_each_to_who_has_the_least_time_left(
    pool_dev: dev.Dev,
) -> None:
    """One that waits for everything, for a minute, does not come before all others."""
    context_ = pool_dev.servers[0]._context
    now = asyncio.get_running_loop().time()
    served: list[float] = []

    async def wait(tenant: str, seconds: float) -> None:
        await context_.wait_for_space(now + seconds, Namespace(f"@{tenant}/m"))
        served.append(seconds)

    tasks = [asyncio.create_task(wait("acme", seconds)) for seconds in (0.0, *range(60, 20, -1))]
    await asyncio.sleep(0.01)
    assert served == [0.0], "one that gives up makes the others look"
    context_.space_changed()
    tasks += [asyncio.create_task(wait("blue", 70.0)) for _ in range(2)]
    await asyncio.sleep(0)
    context_.space_changed()
    await asyncio.gather(*tasks)
    assert 70.0 not in served[12:]
    assert [one for one in served if one < 70] == [0.0, *range(21, 61)]


async def test_of_many_that_wait_some_look_at_a_time_and_each_at_every_change(
    pool_dev: dev.Dev, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each block that is read, and each pause, would hold the loop up as long as all take."""
    monkeypatch.setattr(clients, "SAMPLE_S", 60.0)
    context_ = pool_dev.servers[0]._context
    looks: Counter[int] = Counter()

    async def wait(number: int, blocks: int = 1) -> None:
        while True:
            await context_.wait_for_space(math.inf, NAMESPACE, blocks)
            looks[number] += 1
            turns.step()

    async with others() as turns:
        tasks = [asyncio.create_task(wait(number)) for number in range(100)]
        await asyncio.sleep(0)
        for change in range(1, 4):
            context_.space_changed()
            context_.space_changed()
            await eventually(lambda each=change: [*looks.values()] == [each] * 100)  # type: ignore[misc]
    assert turns.longest <= 10
    monkeypatch.setattr(clients, "SAMPLE_S", 0.02)
    async with others() as turns:
        small, tasks = tasks, [asyncio.create_task(wait(n, 64)) for n in range(100, 200)]
        await asyncio.sleep(0)
        for task in small:  # also the one for whose pause all wait
            task.cancel()
        await eventually(lambda: min(looks[number] for number in range(100, 200)) > 1)
    assert turns.longest <= 2
    for task in tasks:
        task.cancel()
    await eventually(lambda: not context_._waiting_for_space and not context_._to_wake)


async def test_a_slow_reader_is_not_cut(
    pool_dev: dev.Dev, full: tuple[Pool, list[bytes]], impatient: None
) -> None:
    """It takes far longer than a frozen reader may, but its bytes move."""
    (server,) = pool_dev.servers
    _, chain = full
    server.store.held.limits = large(SIZE)
    loop = asyncio.get_running_loop()
    async with raw(pool_dev) as slow:
        await slow.ask(wire.Hello("default", "slow"), wire.Welcome)
        await slow.send(frame(read(*chain)))
        await eventually(lambda: server.store.held.pins > 0)
        until = loop.time() + 1.2
        while loop.time() < until:
            assert await loop.sock_recv(slow.socket, 256 << 10)
            await server._context.wait_for_space(loop.time() + 0.05, NAMESPACE)
        assert server.store.held.pins
        assert not server.stats(0.0).counters.get("cut_connections")


@pytest.mark.parametrize("verify", [True, False])
async def test_a_reader_that_was_cut_reads_again(
    pool_dev: dev.Dev, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins that are taken back while a client copies cost it one more connection, no wrong byte."""
    (server,) = pool_dev.servers
    config = ClientConfig(masters=[pool_dev.address], transports=["shm"], verify=verify)
    chain = keys("chain", 4)
    async with pool_dev.pool(config) as pool:
        await pool.write(NAMESPACE, chain, values(chain, BLOCK))
        await pool.read(NAMESPACE, chain, buffers(4, BLOCK))
        copy, cuts = CopyPool.run, []

        async def interrupted(self: CopyPool, jobs: object, **options: object) -> object:
            if not cuts:
                for one in list(server._context.clients.connections):
                    holder = server.store.held.known(one.id)
                    if holder is not None and holder.pins:
                        cuts.append(one)
                        one.peer.link.hang_up(Overloaded("test"))  # type: ignore[attr-defined]
                await eventually(lambda: server.store.held.pins == 0)
                for entry in server.store.index.inventory():  # another writer has the memory now
                    kept = bytes(server.tier.view(entry.offset, 64))  # type: ignore[attr-defined]
                    server.tier.view(entry.offset, 64)[:] = bytes(64)  # type: ignore[attr-defined]
                    cuts.append((entry, kept))
            got = await copy(self, jobs, **options)  # type: ignore[arg-type]
            while len(cuts) > 1:
                entry, kept = cuts.pop()
                server.tier.view(entry.offset, 64)[:] = kept  # type: ignore[attr-defined]
            return got

        monkeypatch.setattr(CopyPool, "run", interrupted)
        got = buffers(4, BLOCK)
        results = await pool.read(NAMESPACE, chain, got)
        assert len(cuts) == 1
        for result, one, right in zip(results, got, values(chain, BLOCK), strict=True):
            assert result.status is ReadStatus.HIT, result
            assert one == right
        assert not pool.counters["corrupt"]


def test_one_tenant_leaves_the_others_room_however_many_connections_it_opens() -> None:
    """Two greedy ones, too; and all is counted when their connections end."""
    books = Books(64, pinned=16, reserved=16)
    store = books.store
    set_quotas(store, {})
    books.fill(keys("stored", 40))

    def tenant(name: str, owners: Sequence[int]) -> None:
        for owner in owners:
            store.held.join_tenant(owner, name)

    tenant("greedy", range(1, 9))
    tenant("hungry", range(11, 19))
    tenant("modest", range(21, 22))

    def pinned(owners: Sequence[int]) -> int:
        return sum(
            sum(pin.status.hit for pin in books.pin(owner, keys("stored", 40)[:2]))
            for owner in owners
        )

    def reserved(owners: Sequence[int]) -> int:
        answers = [books.reserve(owner, keys(("new", owner), 2)) for owner in owners]
        return sum(answer.extent is not None for one in answers for answer in one)

    for take in (pinned, reserved):
        assert take(range(1, 9)) == 8  # half of 16, not all
        assert 0 < take(range(11, 19)) <= 4
        assert take([21]) == 2
        assert take([31]) > 0  # who is no tenant's
    for owner in (*range(1, 9), *range(11, 19)):
        store.drop_owner(owner)
        check_invariants(store)
    tenant("greedy", [41])
    assert pinned([41]) == 2
    for owner in (21, 31, 41):
        store.drop_owner(owner)
    check_invariants(store)
    assert not store.held._together


async def test_connections_of_a_tenant_are_counted_together(tmp_path: Path) -> None:
    """With a real server: streams of acme that reserve and do not send leave blue its room."""
    async with tenant_pool(tmp_path, capacity=16 << 20) as pool, AsyncExitStack() as peers:
        total = pool.server.store.held.limits.writes.total
        held = 0
        for number in range(4):
            stream = await peers.enter_async_context(pool.raw(tenant("acme")))
            ask = blocks_of(f"greedy {number}", 64, "@acme/llama", wait_s=1.0)
            held += len((await stream.ask(ask, wire.Reserved)).ids) * BLOCK
        assert total // 4 <= held <= total // 2 + BLOCK
        async with await pool.client(tenant("blue")) as blue:
            chain = keys("blue", 2)
            written = await blue.write(Namespace("llama"), chain, values(chain), timeout=1.0)
            assert set(written) == {WriteStatus.STORED}
        check_invariants(pool.server.stack)
