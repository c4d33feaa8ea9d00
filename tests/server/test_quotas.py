"""What tenants may keep of one tier: exactly counted, and kept when others write (G12)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvpool import dev
from kvpool.errors import InvariantViolated
from kvpool.protocols import ReserveRequest
from kvpool.protocols.persistent_tier import Record
from kvpool.protocols.policy import Policy
from kvpool.server import quota_keeper
from kvpool.server.eviction.arc import ARC
from kvpool.server.eviction.density import Density
from kvpool.server.eviction.lease import Lease
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.order import Order
from kvpool.server.eviction.programs import Programs
from kvpool.server.eviction.tenant_orders import TenantOrders
from kvpool.server.state.clearing import Clearing, let_blocks_move
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.quota import Quota
from kvpool.server.state.store import Store
from kvpool.server.state.tenants import account_of, evict_beyond_limits, set_quotas
from kvpool.server.state.tier_stores import ColdStore, FileStore
from kvpool.server.state.tiered_store import TieredStore
from kvpool.server.tenancy import Tenancy
from kvpool.supervision import Supervisor
from kvpool.tenants import Share, Tenant
from kvpool.testing.invariants import check_invariants
from kvpool.types import ARRIVED, ROOT, ChainEnd, Namespace, ReadStatus, SessionHint, WriteStatus
from tests.conftest import eventually, keys

PAGE = 4096
POOL, ACME, BETA = Namespace("llm"), Namespace("@acme/llm"), Namespace("@beta/llm")
HALVES = Namespace("@acme/halves", 2)
_SEEDS = itertools.count()
POLICIES = pytest.mark.parametrize(
    "policy", [LRU, ARC, Lease, Density, Programs], ids=lambda p: p.__name__
)


def pages(**quotas: tuple[int, int]) -> dict[str, Quota]:
    """Guaranteed and limit in pages, by tenant."""
    return {name: Quota(low * PAGE, high * PAGE) for name, (low, high) in quotas.items()}


def store(
    size: int, policy: Callable[[int], Policy[Entry]] = LRU, **quotas: tuple[int, int]
) -> FileStore:
    books = FileStore(size * PAGE, policy=policy(size * PAGE))
    set_quotas(books, pages(**quotas))
    return books


def write(
    books: Store,
    namespace: Namespace,
    digests: list[bytes],
    now: float,
    *,
    size: int = PAGE,
    part: int = 0,
    chain: bool = False,
    session: SessionHint | None = None,
) -> list[WriteStatus]:
    """Reserve and seal blocks, each of its own chain or all of one, and check the books."""
    parents = [ROOT, *digests[:-1]] if chain else [ROOT] * len(digests)
    request = ReserveRequest(namespace, part, digests, parents, [size] * len(digests), session)
    answers = books.reserve(1, request, now)
    for answer in answers:
        if answer.status is WriteStatus.RESERVED:
            books.seal(1, answer.id, 0, now)
    check_invariants(books)
    return [answer.status for answer in answers]


def fresh(count: int) -> list[bytes]:
    return keys(next(_SEEDS), count)


def there(books: Store, namespace: Namespace, digests: list[bytes]) -> int:
    return sum(books.index.peek(namespace, 0, digest) is not None for digest in digests)


def used(books: Store, tenant: str) -> int:
    """Pages."""
    account = account_of(books, tenant)
    return account.used // PAGE if account is not None else 0


def stored(statuses: list[WriteStatus]) -> bool:
    return set(statuses) == {WriteStatus.RESERVED}


# --- the account -------------------------------------------------------------------------------


def test_every_way_in_and_out_is_counted_once() -> None:
    books = store(16, acme=(4, 16))
    (first, second, third, fourth) = fresh(4)
    write(books, ACME, [first, second], 1.0, size=PAGE + 1)
    assert used(books, "acme") == 4  # whole extents
    (pin,) = books.pin(2, ACME, 0, [first], 2.0)
    books.remove(ACME, [first])
    assert used(books, "acme") == 4  # a reader still has it
    books.unpin(2, pin.id)
    assert used(books, "acme") == 2
    request = ReserveRequest(ACME, 0, [third, fourth], [ROOT, ROOT], [PAGE, PAGE])
    answers = books.reserve(3, request, 3.0)
    books.cancel(3, answers[0].id)
    books.drop_owner(3, writer_may_be_alive=True)
    assert used(books, "acme") == 3  # its writer may still write there
    check_invariants(books)
    books.writer_exited(3)
    books.remove(ACME, [second], ReadStatus.CORRUPT)
    assert used(books, "acme") == 0
    check_invariants(books)


def test_recovered_blocks_count_for_their_tenants() -> None:
    books = store(8, acme=(4, 8))
    records = [
        Record(namespace, 0, digest, ROOT, n * PAGE, PAGE, 0, n + 1, 1)
        for n, (namespace, digest) in enumerate(
            zip([ACME, ACME, BETA, POOL], fresh(4), strict=True)
        )
    ]
    entries = [books.restore(record) for record in records]
    list(books.activate_restored([one for one in entries if one is not None], 1.0))
    check_invariants(books)
    assert (used(books, "acme"), used(books, "beta"), used(books, "")) == (2, 1, 1)
    assert stored(write(books, POOL, fresh(6), 2.0))  # beta has no quota: its block is ordinary
    assert (used(books, "acme"), used(books, "beta"), used(books, "")) == (2, 0, 6)


def test_an_extent_that_goes_from_one_tenant_to_another_counts_for_the_new_one() -> None:
    books = store(4, acme=(0, 4))
    write(books, ACME, fresh(4), 1.0)
    assert stored(write(books, BETA, fresh(3), 2.0))
    assert (used(books, "acme"), used(books, "beta")) == (1, 3)
    account = account_of(books, "acme")
    assert account is not None
    assert account.evicted_by == {"beta": 3 * PAGE}


def test_a_block_that_moves_to_make_room_counts_once() -> None:
    books = Store(8 * PAGE)
    set_quotas(books, pages(acme=(8, 8)))
    let_blocks_move(books.extents)
    for digest in (blocks := fresh(8)):
        write(books, ACME, [digest], 1.0)
    books.remove(ACME, blocks[::2])
    request = ReserveRequest(ACME, 0, fresh(1), [ROOT], [3 * PAGE])
    books.reserve(1, request, 2.0)
    clearing = books.extents.clearing
    assert isinstance(clearing, Clearing)
    while not (clearing.over or clearing.is_ready):
        for move in clearing.next_moves(8, 1 << 20):
            clearing.move_done(move, good=True)
            check_invariants(books)
    assert books.reserve(1, request, 3.0)[0].extent is not None
    check_invariants(books)
    assert used(books, "acme") == 7


def test_without_tenants_all_is_the_pools() -> None:
    books = FileStore(4 * PAGE)
    assert stored(write(books, ACME, fresh(2), 1.0))
    assert [account.name for account in books.extents.policy.accounts] == [""]
    with pytest.raises(InvariantViolated, match="begin to have tenants"):
        set_quotas(books, {})


# --- guarantees and limits ---------------------------------------------------------------------


@POLICIES
@pytest.mark.parametrize("seed", range(6))
def test_whoever_writes_what_is_guaranteed_stays_and_no_limit_is_passed(
    seed: int, policy: Callable[[int], Policy[Entry]]
) -> None:
    """Blocks of any size and in parts, which are read, held and removed. Who is owed space gets it;
    and who may have more evicts its own at its limit, even where space is free."""
    rng, now = random.Random(seed), 0.0
    quotas = {"acme": (7, 12), "beta": (5, 30)}
    spaces = {"acme": [ACME, HALVES], "beta": [BETA], "": [POOL]}
    books = store(30, policy, **quotas)
    known: list[tuple[Namespace, bytes]] = []
    for _ in range(400):
        now += rng.choice([0.01, 1.0, 100.0])
        some, step = rng.sample(known, min(len(known), 4)), rng.random()
        for namespace, digest in some:
            if step < 0.3:
                books.pin(2, namespace, 0, [digest], now)
            elif step < 0.35:
                books.remove(namespace, [digest])
        if step < 0.15:
            books.drop_owner(2)
        if step < 0.35:
            continue
        tenant = rng.choice([*spaces])
        namespace, size = rng.choice(spaces[tenant]), rng.choice([PAGE, PAGE, PAGE + 1, 3 * PAGE])
        digests = fresh(rng.randint(1, 4))
        if step < 0.5:
            digests = [digest for of, digest in some if of == namespace] or digests
        before = {name: used(books, name) for name in quotas}
        part = rng.randrange(namespace.parts)
        statuses = write(books, namespace, digests, now, size=size, part=part)
        known = [*known[-60:], *((namespace, digest) for digest in digests)]
        if not books.held.pins and WriteStatus.ALREADY_STORED not in statuses and tenant:
            low, _ = quotas[tenant]
            if size == PAGE and (owed := before[tenant] + len(digests)) <= low:
                assert (stored(statuses), used(books, tenant)) == (True, owed)
            if policy is LRU and len(digests) == 1:
                assert stored(statuses)
        for name, (guaranteed, limit) in quotas.items():
            assert used(books, name) <= limit
            assert name == tenant or used(books, name) >= min(guaranteed, before[name])


# --- the guarantee -----------------------------------------------------------------------------


def test_beyond_the_guarantee_the_least_recently_used_goes_whoever_has_it() -> None:
    """Six thousand steps beside a list that is kept here: exactly the order of one store."""
    rng = random.Random(5)
    books = store(24, acme=(0, 24), beta=(0, 24))
    mine: list[tuple[Namespace, bytes]] = []  # least recently used first
    for step in range(6000):
        now = float(step + 1)
        if mine and rng.random() < 0.5:
            namespace, digest = rng.choice(mine)
            (pin,) = books.pin(2, namespace, 0, [digest], now)
            books.unpin(2, pin.id)
            mine.remove((namespace, digest))
        else:
            namespace, (digest,) = rng.choice([POOL, ACME, BETA]), fresh(1)
            request = ReserveRequest(namespace, 0, [digest], [ROOT], [PAGE])
            (answer,) = books.reserve(1, request, now)
            books.seal(1, answer.id, 0, now)
            del mine[: len(mine) - 23]
        mine.append((namespace, digest))
    check_invariants(books)
    assert all(books.index.peek(namespace, 0, digest) is not None for namespace, digest in mine)


def test_a_tenant_within_its_guarantee_evicts_its_own_where_nothing_else_may_go() -> None:
    books = store(8, acme=(4, 8), beta=(4, 8))
    write(books, BETA, fresh(4), 1.0)
    write(books, ACME, fresh(3), 1.0)
    books.pin(2, BETA, 0, [], 1.0)
    held = fresh(1)
    write(books, POOL, held, 1.0)
    books.pin(2, POOL, 0, held, 2.0)
    assert stored(write(books, ACME, fresh(2), 3.0))
    assert (used(books, "acme"), used(books, "beta"), used(books, "")) == (3, 4, 1)


def test_ten_thousand_protected_blocks_are_not_walked_past() -> None:
    """A burst beside a large tenant looks at a few blocks for each that it evicts."""
    books = store(11_000, acme=(10_000, 11_000))
    write(books, ACME, fresh(10_000), 1.0)
    write(books, POOL, fresh(1_000), 2.0)
    looked = 0
    evictable = books.extents.evictable

    def counted(entry: Entry) -> bool:
        nonlocal looked
        looked += 1
        return evictable(entry)

    books.extents.evictable = counted  # type: ignore[method-assign]
    request = ReserveRequest(POOL, 0, fresh(500), [ROOT] * 500, [PAGE] * 500)
    books.reserve(1, request, 3.0)
    assert looked < 4 * 500


# --- the limit ---------------------------------------------------------------------------------


def test_a_block_larger_than_the_limit_is_refused_at_once() -> None:
    books = store(16, acme=(0, 4))
    assert write(books, ACME, fresh(1), 1.0, size=5 * PAGE) == [WriteStatus.NO_SPACE]
    assert write(books, POOL, fresh(1), 1.0, size=5 * PAGE) == [WriteStatus.RESERVED]


# --- hints -------------------------------------------------------------------------------------


def test_hints_of_one_tenant_do_not_keep_space_that_another_one_is_owed() -> None:
    books = store(12, acme=(6, 12))
    write(books, BETA, fresh(12), 1.0, chain=True, session=SessionHint("@beta/s", 5.0))
    assert books.hint("@beta/s", 3.0, 1.5) is not None
    assert stored(write(books, ACME, fresh(6), 2.0))
    assert (used(books, "acme"), used(books, "beta")) == (6, 6)


def test_a_session_of_another_tenant_is_no_session_of_this_one() -> None:
    books = store(12, acme=(0, 12))
    (own,) = fresh(1)
    write(books, ACME, [own], 5.0, session=SessionHint("@beta/s"))
    assert books.hint("@beta/s", None, 6.0) is None
    write(books, POOL, fresh(11), 1.0)
    write(books, POOL, fresh(5), 7.0)
    assert there(books, ACME, [own]) == 1


def test_a_prompt_that_nobody_names_waits_in_its_tenant() -> None:
    books = store(12, acme=(0, 12))
    old, young = fresh(3), fresh(3)
    write(books, ACME, old, 1.0, chain=True)
    write(books, ACME, young, 2.0, chain=True)
    write(books, POOL, fresh(6), 3.0)
    books.hint(ChainEnd(ACME.name, 1, old[-1]), ARRIVED, 4.0)
    write(books, POOL, fresh(3), 5.0)
    assert (there(books, ACME, old), there(books, ACME, young)) == (3, 0)


def test_a_session_is_ended_in_its_tenant() -> None:
    books = store(12, acme=(0, 12))
    own = fresh(3)
    write(books, POOL, fresh(9), 1.0)
    write(books, ACME, own, 5.0, chain=True, session=SessionHint("@acme/s"))
    assert books.hint("@acme/s", None, 6.0) is True
    write(books, POOL, fresh(3), 7.0)
    assert there(books, ACME, own) == 0  # before older ones: nobody will use them


# --- changes -----------------------------------------------------------------------------------


def test_a_quota_that_comes_changes_and_goes_takes_effect_at_once() -> None:
    books = store(12)
    own = fresh(6)
    write(books, ACME, own, 1.0)
    write(books, POOL, fresh(6), 2.0)
    set_quotas(books, pages(acme=(6, 12)))
    write(books, POOL, fresh(20), 3.0)
    assert there(books, ACME, own) == 6
    set_quotas(books, pages(acme=(3, 12)))
    write(books, POOL, fresh(20), 4.0)
    assert used(books, "acme") == 3 == books.extents.policy.victim_age(4.0) + 3
    set_quotas(books, {})
    write(books, POOL, fresh(20), 5.0)
    assert used(books, "acme") == 0
    set_quotas(books, {})
    assert [account.name for account in books.extents.policy.accounts] == [""]
    assert len(cast(TenantOrders, books.extents.policy)._oldest_use) == 1
    set_quotas(books, pages(acme=(4, 4)))
    write(books, ACME, fresh(9), 6.0)
    assert used(books, "acme") == 4


def test_a_lowered_limit_is_reached_in_bounded_steps_and_by_the_next_write() -> None:
    books = store(600, acme=(0, 600))
    write(books, ACME, fresh(600), 1.0)
    set_quotas(books, pages(acme=(0, 100)))
    goes_on = evict_beyond_limits(books, 2.0, 80)
    assert goes_on
    assert 560 <= used(books, "acme") < 600
    request = ReserveRequest(ACME, 0, fresh(1), [ROOT], [PAGE])
    before = used(books, "acme")
    assert books.reserve(MOVER, request, 3.0)[0].status is WriteStatus.NOT_YET
    assert before - 200 < used(books, "acme") < before
    assert stored(write(books, ACME, fresh(1), 4.0))
    assert used(books, "acme") == 100
    assert not evict_beyond_limits(books, 5.0)
    check_invariants(books)


async def test_an_idle_tenant_comes_below_a_lowered_limit_when_its_readers_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quota_keeper, "_LOOK_AGAIN_S", 0.01)
    async with dev.serve() as running, running.pool() as pool:
        (server,) = running.servers
        Tenancy.of(server).quotas.apply({"": Tenant("")})
        chain = keys("chain", 4)
        await pool.write(Namespace("any"), chain, [b"x"] * 4)
        pins = server.store.pin(1 << 40, Namespace("any"), 0, chain[3:], 0.0)
        Tenancy.of(server).quotas.apply({"": Tenant("", limit=Share(0))})
        await asyncio.sleep(0.05)
        assert server.stack.stored == 4, "it is read, and the others are its head"
        server.store.unpin(1 << 40, pins[0].id)
        await eventually(lambda: server.stack.stored == 0)
        tasks = asyncio.all_tasks
        await eventually(lambda: not any(one.get_name() == "quotas" for one in tasks()))


def test_a_cold_tier_above_a_lowered_limit_is_not_looked_at_for_ever() -> None:
    """Its blocks leave with their objects, which are not of one tenant."""
    stack = TieredStore([FrontStore(8 * PAGE), ColdStore(8 * PAGE, PAGE)])
    for books in stack.stores:
        set_quotas(books, pages(acme=(0, 8)))
    chain = fresh(4)
    for number, digest in enumerate(chain):
        stack.stores[1].add(Record(ACME, 0, digest, ROOT, number << 36, PAGE, 1, 1, 1), 0)
    keeper = quota_keeper.QuotaKeeper(stack, lambda: None, cast(Supervisor, None))
    keeper.apply({"acme": Tenant("", limit=Share(0))})  # or it would begin a task
    assert used(stack.stores[1], "acme") == 4


@pytest.mark.parametrize("policy", [Lease, Density])
def test_a_policy_does_not_keep_what_is_above_a_lowered_limit(
    policy: Callable[[int], Policy[Entry]],
) -> None:
    books = store(64, policy, acme=(0, 64))
    write(books, ACME, fresh(64), 1.0)
    set_quotas(books, pages(acme=(0, 10)))
    while evict_beyond_limits(books, 1.5):
        pass
    assert used(books, "acme") == 10


# --- with several tiers ------------------------------------------------------------------------


def two_tiers(memory: int, disk: int, **quotas: tuple[int, int]) -> TieredStore:
    stack = TieredStore([FrontStore(memory * PAGE), FileStore(disk * PAGE)])
    for one in stack.stores:
        set_quotas(one, pages(**quotas))
    return stack


def write_through(
    stack: TieredStore, namespace: Namespace, digests: list[bytes], now: float
) -> None:
    for digest in digests:
        request = ReserveRequest(namespace, 0, [digest], [ROOT], [PAGE])
        (answer,) = stack.reserve(1, request, now)
        stack.seal(1, answer.id, 0, now)
        for copy in stack.transfers.next_writebacks(1 << 30, 100, now):
            stack.transfers.done(copy, good=True, now=now)
        check_invariants(stack)


def test_a_block_of_the_disk_comes_up_for_a_tenant_above_a_lowered_limit() -> None:
    """Nobody else makes room for it: of what is above, nothing could go when the limit changed."""
    stack = two_tiers(300, 400, acme=(0, 400))
    digests = fresh(301)
    write_through(stack, ACME, digests, 1.0)
    set_quotas(stack.front, pages(acme=(0, 4)))
    left = 300
    while not (copies := stack.transfers.start_promotions(ACME, 0, digests[:1], 1, 2.0)):
        left, before = used(stack.front, "acme"), left
        assert stack.transfers.behind
        assert 0 < before - left < 200, "bounded work"
    assert copies[0].entry.digest == digests[0]
    assert used(stack.front, "acme") == 4


def test_a_copy_in_memory_that_is_guaranteed_outlives_the_one_on_the_disk() -> None:
    stack = two_tiers(8, 8, acme=(4, 8))
    own = fresh(4)
    write_through(stack, ACME, own, 1.0)
    set_quotas(stack.backing, pages(acme=(0, 8)))
    write_through(stack, POOL, fresh(12), 2.0)
    assert used(stack.backing, "acme") == 0
    assert there(stack.front, ACME, own) == 4
    assert all(stack.peek(ACME, 0, digest) is not None for digest in own)


def write_and_leave(
    stack: TieredStore, namespace: Namespace, digests: list[bytes], now: float
) -> list[WriteStatus]:
    """Nothing of it is written to the disk."""
    answers = []
    for digest in digests:
        request = ReserveRequest(namespace, 0, [digest], [ROOT], [PAGE])
        (answer,) = stack.reserve(1, request, now)
        answers.append(answer.status)
        if answer.extent is not None:
            stack.seal(1, answer.id, 0, now)
    return answers


@pytest.mark.parametrize(
    ("writer", "waits_for", "waits"),
    [
        # Whose blocks go first is decided by their age, beyond the guarantees.
        (POOL, POOL, True),
        (POOL, BETA, True),
        # A block that its owner is guaranteed, or that the writer's limit keeps from it, never goes
        # for this one: to wait for it would be in vain.
        (POOL, Namespace("@safe/llm"), False),
        (Namespace("@low/llm"), POOL, False),
        # Nor do those of a tenant that gets what it is guaranteed: others make room for it.
        (Namespace("@safe/llm"), Namespace("@safe/llm"), False),
    ],
    ids=lambda value: value.name if isinstance(value, Namespace) else str(value),
)
def test_a_writer_waits_for_the_disk_only_where_that_can_make_room_for_it(
    writer: Namespace, waits_for: Namespace, waits: bool
) -> None:
    """The only block that may go now was used last; an older one is not on the disk yet."""
    stack = two_tiers(4, 16, beta=(0, 4), safe=(4, 4), low=(0, 1))
    victim = Namespace("@low/llm") if "low" in writer.name else ACME
    hot = fresh(1)
    write_through(stack, victim, hot, 1.0)
    assert write_and_leave(stack, waits_for, fresh(1), 2.0) == [WriteStatus.RESERVED]
    filler = fresh(2)
    stored(write_and_leave(stack, waits_for, filler, 3.0))
    stack.pin(2, victim, 0, hot, 4.0, [PAGE])
    stack.drop_owner(2)
    (answer,) = write_and_leave(stack, writer, fresh(1), 5.0)
    assert answer is (WriteStatus.NO_SPACE if waits else WriteStatus.RESERVED)
    check_invariants(stack)


def test_each_tier_counts_its_own_copies() -> None:
    stack = two_tiers(4, 16, acme=(2, 16))
    own = fresh(6)
    write_through(stack, ACME, own, 1.0)
    assert [used(one, "acme") for one in stack.stores] == [4, 6]
    (copy,) = stack.transfers.start_promotions(ACME, 0, own[:1], 1 << 20, 2.0)
    stack.transfers.done(copy, good=True, now=2.0)
    check_invariants(stack)
    assert [used(one, "acme") for one in stack.stores] == [4, 6]


def test_a_promotion_takes_nothing_that_another_tenant_is_guaranteed() -> None:
    stack = two_tiers(4, 16, acme=(2, 16), beta=(2, 16))
    theirs, own = fresh(2), fresh(6)
    write_through(stack, BETA, theirs, 1.0)
    write_through(stack, ACME, own, 2.0)
    for digest in own * 3:
        for copy in stack.transfers.start_promotions(ACME, 0, [digest], 1 << 20, 3.0):
            stack.transfers.done(copy, good=True, now=3.0)
    assert there(stack.front, BETA, theirs) == 2


def test_the_orders_of_many_tenants_cost_little_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tenants, all beyond their guarantee: not all are asked for each eviction, and not
    either when each has written one block after the other, or for the age in a heartbeat."""
    books = store(3000, **{f"t{n}": (1, 3000) for n in range(1000)})
    for n in range(3000):
        request = ReserveRequest(Namespace(f"@t{n % 1000}/x"), 0, fresh(1), [ROOT], [PAGE])
        books.seal(1, books.reserve(1, request, 1.0 + n)[0].id, 0, 1.0 + n)
    orders = books.extents.policy
    assert isinstance(orders, TenantOrders)
    kind = type(orders._orders[books.index.of(POOL, 0, orders.account_of).account])
    asked: Counter[str] = Counter()
    for what in ("rank", "victim_age"):
        real = getattr(kind, what)

        def counted(order: Order, now: float, what: str = what, real: Any = real) -> Any:
            asked[what] += 1
            return real(order, now)

        monkeypatch.setattr(kind, what, counted)
    write(books, POOL, fresh(400), 9000.0)
    assert used(books, "") == 400
    assert asked["rank"] <= 1000 + 8 * 400
    for _ in range(20):
        asked.clear()
        age = orders.victim_age(9500.0)
        assert asked["victim_age"] <= 64
    assert age == pytest.approx(9099.0, abs=0.1)
