"""A batch into a full store: room is made for its blocks at once, as it would be for one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest

from kvpool.protocols import ReserveRequest
from kvpool.server.eviction import tenant_orders
from kvpool.server.eviction.arc import ARC
from kvpool.server.eviction.density import Density
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.programs import Programs
from kvpool.server.eviction.tenant_orders import TenantOrders
from kvpool.server.state import store
from kvpool.server.state.extents import STEPS_MAX, STEPS_OF_EVICTION
from kvpool.server.state.holdings import START, Budget
from kvpool.server.state.quota import Quota
from kvpool.server.state.store import Store
from kvpool.server.state.tenants import set_quotas
from kvpool.server.state.tier_stores import FileStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import ROOT, Namespace, SessionHint, WriteStatus
from tests.conftest import keys

PAGE = 4096
NAMESPACES = (Namespace("one"), Namespace("@acme/one"), Namespace("@beta/one"))
HERE = (WriteStatus.ALREADY_STORED, WriteStatus.IN_PROGRESS, WriteStatus.RESERVED)


def reserve(
    books: Store, request: ReserveRequest, now: float, *, at_once: bool
) -> list[tuple[WriteStatus, int]]:
    """Statuses and ids; in one call, or as a writer would ask for block after block."""
    if at_once:
        return [(one.status, one.id) for one in books.reserve(1, request, now)]
    answers: list[tuple[WriteStatus, int]] = []
    refusal = None
    for position, digest in enumerate(request.digests):
        here = books.index.blocks(request.namespace, request.part).get(digest) is not None
        if refusal is not None and not here:
            answers.append((refusal, 0))
            continue
        (one,) = books.reserve(1, request.subset([position]), now)
        answers.append((one.status, one.id))
        if one.status not in HERE:
            refusal = one.status
    return answers


def present(books: Store) -> set[tuple[str, bytes]]:
    return {(one.index.namespace.name, one.digest) for one in books.index.inventory()}


@pytest.mark.parametrize("policy", [LRU, Density], ids=lambda one: one.__name__)
@pytest.mark.parametrize("seed", range(12))
def test_the_same_blocks_leave_as_for_one_block_after_the_other(
    policy: type[LRU] | type[Density], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else who was asked last, and how often, has a say in whose block is the next victim.
    monkeypatch.setattr(tenant_orders, "_TURNS", 0)
    rng = random.Random(seed)
    both = [FileStore(48 * PAGE, policy=policy(48 * PAGE)) for _ in range(2)]
    for books in both:
        set_quotas(books, {"acme": Quota(16 * PAGE, 30 * PAGE), "beta": Quota(8 * PAGE, 1 << 62)})
        books.held.limits = books.held.limits._replace(writes=Budget(40 * PAGE, 40 * PAGE))
        books.held.limits.writes.start = 12 * PAGE
    names_in = {namespace: keys(f"{namespace.name} {seed}", 90) for namespace in NAMESPACES}
    read = 0
    for turn in range(120):
        namespace = rng.choice(NAMESPACES)
        names = names_in[namespace]
        chain = rng.sample(names, rng.choice([1, 3, 8, 20]))
        parents = [rng.choice([ROOT, *names[:20]]), *chain[:-1]]
        sizes = (
            [PAGE] * len(chain)
            if rng.random() < 0.7
            else rng.choices([1, PAGE, 9000], k=len(chain))
        )
        session = SessionHint(f"{namespace.name.removesuffix('one')}{turn % 7}")
        hint = session if seed % 3 == 0 and turn % 5 else None
        request = ReserveRequest(namespace, 0, chain, parents, sizes, hint)
        found = []
        for books, at_once in zip(both, (True, False), strict=True):
            # A session's chain in two calls is another one: only its evictions go one by one.
            books.extents.policy.in_a_row = at_once
            answers = reserve(books, request, float(turn), at_once=at_once or seed % 3 == 0)
            check_invariants(books)
            ids = [id for status, id in answers if status is WriteStatus.RESERVED]
            books.seal_all(1, ids, ids, turn + 0.5)
            if read < 4 and seed % 2:
                books.pin(2, namespace, 0, chain[:1], turn + 0.6)
            elif seed % 2:
                books.unpin_all(2, list(books.held.owner(2).pins))
            accounts = cast("TenantOrders", books.extents.policy).accounts
            evicted_by = [account.evicted_by for account in accounts]
            found.append(([status for status, _ in answers], present(books), evicted_by))
        read = (read + 1) % 6
        assert found[0] == found[1], f"turn {turn}"


@pytest.mark.parametrize("seed", range(8))
def test_a_chain_leaves_at_once_as_it_would_block_after_block(seed: int) -> None:
    rng, names, most = random.Random(seed), keys(f"run {seed}", 90), 0
    both = [Store(48 * PAGE, policy=Density(48 * PAGE)) for _ in range(2)]
    vars(both[1].extents.policy)["_takes_parent"] = None
    for turn in range(150):
        first, count = rng.randrange(80), rng.choice([1, 3, 8, 20])
        chain = names[first : first + count]
        sizes = [PAGE] * len(chain) if turn % 4 else rng.choices([1, PAGE, 9000], k=len(chain))
        parents = [rng.choice([ROOT, *names[:first][-1:], *names[:20]]), *chain[:-1]]
        parents[0] = ROOT if parents[0] in chain else parents[0]
        hint = SessionHint(str(turn % 5)) if seed % 3 == 0 and turn % 2 else None
        request = ReserveRequest(NAMESPACES[0], 0, chain, parents, sizes, hint)
        session, due, read = str(rng.randrange(6)), rng.choice([None, 9.0]), rng.randrange(3)
        found = []
        for books in both:
            before, books.extents.in_steps = books.extents.evicted, seed % 2 == 1
            answers = books.reserve(1, request, float(turn))
            check_invariants(books)
            ids = [one.id for one in answers if one.id]
            books.seal_all(1, ids, ids, turn + 0.5)
            if read == 1:
                books.pin(2, NAMESPACES[0], 0, chain[:2], turn + 0.6)
            elif read == 2:
                books.unpin_all(2, list(books.held.owner(2).pins))
            books.hint(session, due, turn + 0.7)
            most = max(most, books.extents.evicted - before)
            places = {offset: one.digest for offset, one in books.extents.blocks_at.items()}
            gone = books.index.change_log.tombstones.reasons(NAMESPACES[0], names)
            why = [books.extents.policy.inferred().why(digest) for digest in names]
            held = books.index.fingerprint.packed(), books.extents.evicted_bytes
            found.append((answers, places, gone, why, held))
        assert found[0] == found[1], f"turn {turn}"
    assert most > 8


@pytest.mark.parametrize("policy", [LRU, ARC, Density, Programs], ids=lambda one: one.__name__)
def test_a_batch_evicts_as_much_as_it_stores(policy: type[LRU]) -> None:
    books = Store(256 * PAGE, policy=policy(256 * PAGE))
    books.extents.in_steps = True
    for turn in range(12):
        chain = keys(f"chain {turn}", 64)
        answers = books.reserve(1, request_of(chain), turn)
        check_invariants(books)
        assert {one.status for one in answers} == {WriteStatus.RESERVED}
        assert books.extents.evicted == max(0, 64 * (turn + 1) - 256)
        books.seal_all(1, [one.id for one in answers], [0] * 64, turn)


def request_of(chain: Sequence[bytes], size: int = PAGE) -> ReserveRequest:
    parents = [ROOT, *chain[:-1]]
    return ReserveRequest(NAMESPACES[0], 0, chain, parents, [size] * len(chain))


def fill(books: Store, blocks: int) -> None:
    for digest in keys("old", blocks):
        (answer,) = books.reserve(1, request_of([digest]), 0.0)
        books.seal_all(1, [answer.id], [0], 0.0)


def test_a_writer_that_seals_nothing_evicts_no_more_with_a_batch() -> None:
    books = Store(1024 * PAGE)
    fill(books, 1024)
    books.held.limits = books.held.limits._replace(writes=Budget(512 * PAGE, 1024 * PAGE))
    answers = books.reserve(7, request_of(keys("new", 500)), 1.0)
    granted = sum(one.status is WriteStatus.RESERVED for one in answers)
    assert granted == books.extents.evicted == START // PAGE
    assert answers[-1].status is WriteStatus.NOT_YET


def test_a_batch_that_takes_too_long_goes_on_in_the_next_call() -> None:
    books = Store(1024 * PAGE)
    fill(books, 1024)
    books.extents.in_steps = True
    new = keys("new", 300)
    request, reserved = request_of(new), 0
    for _ in range(4):
        answers = books.reserve(1, request, 1.0)
        granted = [one for one in answers if one.status is WriteStatus.RESERVED]
        assert granted == answers[: len(granted)]
        assert len(granted) <= STEPS_MAX // STEPS_OF_EVICTION + 1
        reserved += len(granted)
        assert books.extents.evicted == reserved
        check_invariants(books)
        request = request.subset(range(len(granted), len(answers)))
        if not request.digests:
            break
    assert reserved == len(new)


def test_no_block_of_a_batch_takes_the_place_of_its_parent() -> None:
    books = Store(8 * PAGE)
    old = keys("old", 8)
    fill(books, 8)
    new = keys("new", 4)
    # The second one follows the block that was used least recently but one.
    request = ReserveRequest(NAMESPACES[0], 0, new, [ROOT, old[1], new[1], new[2]], [PAGE] * 4)
    answers = books.reserve(1, request, 1.0)
    assert {one.status for one in answers} == {WriteStatus.RESERVED}
    assert books.index.peek(NAMESPACES[0], 0, old[1]) is not None


def test_a_block_that_was_here_does_not_go_for_its_new_child() -> None:
    books = Store(8 * PAGE)
    fill(books, 8)
    here, new = keys("old", 1), keys("new", 8)
    parents = [ROOT] * 8 + here
    request = ReserveRequest(NAMESPACES[0], 0, [*here, *new], parents, [PAGE] * 9)
    answers = books.reserve(1, request, 1.0)
    assert answers[-1].status is WriteStatus.NO_SPACE
    assert books.index.peek(NAMESPACES[0], 0, here[0]) is not None


@pytest.mark.parametrize("policy", [LRU, Density], ids=lambda one: one.__name__)
@pytest.mark.parametrize("seed", [85, 93])  # of 150, those that go over it if nothing is looked at
def test_a_tenant_at_its_limit_stays_there_with_batches_of_large_blocks(
    policy: type[LRU] | type[Density], seed: int
) -> None:
    rng = random.Random(seed)
    books = FileStore(64 * PAGE, policy=policy(64 * PAGE))
    set_quotas(books, {"acme": Quota(0, 30 * PAGE)})
    for turn in range(60):
        namespace, count = rng.choice(NAMESPACES[1:]), rng.choice([1, 2, 5, 10])
        size = rng.choice([1, 1, 1, 2, 2, 5]) * PAGE
        chain = keys(str(turn), count)
        request = ReserveRequest(namespace, 0, chain, [ROOT] * count, [size] * count)
        answers = books.reserve(1, request, float(turn))
        accounts = cast("TenantOrders", books.extents.policy).accounts
        assert all(one.used <= one.limit for one in accounts)
        books.seal_all(1, ids := [one.id for one in answers if one.id], ids, turn + 0.5)


def test_a_block_that_stands_twice_in_a_batch_takes_one_place() -> None:
    books = Store(8 * PAGE)
    fill(books, 8)
    new = keys("new", 3)
    answers = books.reserve(1, request_of([*new, new[1]]), 1.0)
    assert [one.status for one in answers] == [WriteStatus.RESERVED] * 3 + [WriteStatus.IN_PROGRESS]
    assert books.extents.evicted == 3
    check_invariants(books)


def test_a_batch_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose blocks are not alike, or come one by one: not again for each block."""
    looks, alike = list[int](), store._alike_until
    monkeypatch.setattr(store, "_alike_until", lambda *of: looks.append(1) or alike(*of))
    books = Store(64 * PAGE)
    fill(books, 64)
    new, sizes = keys("new", 32), [PAGE, 2 * PAGE] * 16
    books.reserve(1, ReserveRequest(NAMESPACES[0], 0, new, [ROOT] * 32, sizes), 1.0)
    assert len(looks) == 1
