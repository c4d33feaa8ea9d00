"""A prompt that waits in an engine's queue: its blocks stay until it is served, or is given up."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvpool import ClientConfig, Cluster, MatchPoller, Pool, dev
from kvpool.client.match_poller import PolledMatches
from kvpool.protocols import ReserveRequest
from kvpool.server.eviction.lease import Lease
from kvpool.server.eviction.session_announcements import WAIT_S, WAIT_S_MAX
from kvpool.server.state.entry import MOVER
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.store import Store
from kvpool.server.state.tiered_store import TieredStore
from kvpool.testing.invariants import check_invariants
from kvpool.types import ARRIVED, ROOT, ChainEnd, ReadStatus, SessionHint, WriteStatus
from tests.conftest import NAMESPACE, eventually, keys, values
from tests.server.test_session_hints import Books
from tests.support.stores import ONE, PAGE, TWO


@pytest.fixture
def books() -> Books:
    """A store of 20 pages: session `old` has the oldest 8, nobody the 8 others."""
    books = Books(20)
    books.write("old", keys("old", 8))
    books.write("", keys("other", 8))
    books.now += 30.0
    return books


def arrive(books: Books, session: str = "old", age_s: float = 0.0) -> bool | None:
    answer = books.store.hint(session, ARRIVED, books.now, age_s=age_s)
    check_invariants(books.store)
    return answer


def waiting(books: Books) -> int:
    return books.store.extents.policy.figures["waiting_sessions"]


# --- what stays --------------------------------------------------------------------------


def test_blocks_that_a_prompt_waits_for_are_no_victims(books: Books) -> None:
    assert arrive(books) is True
    books.fill(12)
    assert (books.here(keys("old", 8)), books.here(keys("other", 8))) == (8, 0)
    books.fill(12)
    assert books.here(keys("old", 8)) == 8


def test_a_session_that_has_ended_and_is_read_again_is_waited_for(books: Books) -> None:
    """Also when a victim was looked for between its read and its arrival."""
    books.store.hint("old", None, books.now)
    books.now += 1.0
    books.read(keys("old", 8))
    books.fill(5)
    books.now += 1.0
    assert arrive(books) is True
    books.fill(12)
    assert books.here(keys("old", 8)) == 8


def test_an_announcement_does_not_lapse_while_its_prompt_is_in_a_queue() -> None:
    books = Books(20)
    books.write("old", keys("old", 8), resume_in=2.0)
    books.now += 2.0
    arrive(books)
    books.now += 60.0  # the announcement alone would have lapsed ten seconds after the write
    books.fill(15)
    assert books.here(keys("old", 8)) == 8


@pytest.mark.parametrize("ended_by", ["read", "write"])
def test_a_prompt_that_is_served_waits_no_more(books: Books, ended_by: str) -> None:
    arrive(books)
    if ended_by == "read":
        books.read(keys("old", 8))
    else:
        books.write("old", keys("more", 1), parent=keys("old", 8)[-1])
    assert waiting(books) == 0
    assert books.store.extents.policy.figures["announced_bytes"] == 0
    books.fill(20)
    assert books.here(keys("old", 8)) == 0


def test_a_read_of_the_first_blocks_leaves_the_rest_waited_for(books: Books) -> None:
    """A prompt is read in several batches; so is a system prompt that others share."""
    arrive(books)
    books.read(keys("old", 8)[:3])
    assert waiting(books) == 1
    books.read(keys("old", 8)[3:])
    assert waiting(books) == 0


@pytest.mark.parametrize("session", ["ranks", ""])
def test_either_part_of_a_block_may_be_read_first(session: str) -> None:
    books, chain = Books(40), keys("ranks", 4)
    for part in (0, 1):
        books.write(session, chain, namespace=TWO, part=part)
    books.now += 5.0
    books.store.hint(session or ChainEnd(TWO.name, 2, chain[-1]), ARRIVED, books.now)
    books.fill(40)
    assert (books.here(chain, TWO), waiting(books)) == (4, 1)
    for pin in books.store.pin(1, TWO, 1, chain, books.now):
        books.store.unpin(1, pin.id)
    assert waiting(books) == 0
    check_invariants(books.store)


def test_a_served_prompt_is_not_waited_for_when_its_arrival_comes_late(books: Books) -> None:
    """An arrival comes with a heartbeat; an idle engine has read by then."""
    books.read(keys("old", 8))
    books.now += 0.5
    assert arrive(books, age_s=0.6) is True
    assert waiting(books) == 0
    assert arrive(books, age_s=0.2) is True  # the next prompt
    assert waiting(books) == 1


def test_a_prompt_that_reads_an_earlier_branch_is_served(books: Books) -> None:
    """The session has gone on from another point meanwhile: its chain ends elsewhere."""
    chain = keys("old", 8)
    books.write("old", keys("branch", 2), parent=chain[3])
    books.now += 5.0
    books.store.pin(1, ONE, 0, chain, books.now)  # it is being read
    books.now += 0.5
    assert arrive(books, age_s=0.7) is True
    assert waiting(books) == 0


def test_moving_a_block_between_tiers_is_no_use(books: Books) -> None:
    arrive(books)
    request = ReserveRequest(ONE, 0, keys("moved", 1), [ROOT], [PAGE], SessionHint("old"))
    (answer,) = books.store.reserve(MOVER, request, books.now)
    books.store.cancel(MOVER, answer.id)
    assert waiting(books) == 1


def test_a_read_in_one_tier_ends_the_wait_in_all() -> None:
    stack = TieredStore([kind(16 * PAGE, alignment=PAGE) for kind in (FrontStore, Store)])
    request = ReserveRequest(ONE, 0, keys("a", 1), [ROOT], [PAGE], SessionHint("a"))
    for store in stack.stores:
        (answer,) = store.reserve(1, request, 1.0)
        store.seal(1, answer.id, 0, 1.0)
    stack.hint("a", ARRIVED, 5.0)
    assert [store.extents.policy.announced.waiting for store in stack.stores] == [1, 1]
    (pin,) = stack.pin(1, ONE, 0, keys("a", 1), 6.0, [PAGE])
    assert pin.status is ReadStatus.HIT
    assert [store.extents.policy.announced.waiting for store in stack.stores] == [0, 0]


# --- its bounds --------------------------------------------------------------------------


def test_an_arrival_that_nothing_follows_lapses(books: Books) -> None:
    arrive(books)
    books.now += WAIT_S + 1.0
    books.fill(12)
    assert books.here(keys("old", 8)) == 0
    assert waiting(books) == 0
    assert books.store.extents.policy.figures["arrivals_lapsed"] == 1


def test_a_prompt_that_waits_for_long_is_repeated_and_not_for_ever(books: Books) -> None:
    began = books.now
    while books.now < began + WAIT_S_MAX - WAIT_S / 2:
        assert arrive(books) is True
        books.now += WAIT_S / 2
    books.fill(12)
    assert books.here(keys("old", 8)) == 8
    books.now = began + WAIT_S_MAX + 1.0
    books.fill(4)
    assert arrive(books) is False  # it was not used since
    assert waiting(books) == 0
    books.fill(8)
    assert books.here(keys("old", 8)) == 0


def test_arrivals_take_no_more_than_the_budget_and_the_first_in_the_queue_stay() -> None:
    books = Books(20)
    for number in range(4):
        books.write(f"{number}", keys(f"{number}", 5))
    books.now += 30.0
    answers = []
    for number in (2, 0, 3, 1):
        books.now += 1.0
        answers.append(arrive(books, f"{number}"))
    assert answers == [True] * 3 + [False]
    books.fill(4)  # somebody who has no session finds room at once
    assert [books.here(keys(f"{number}", 5)) for number in range(4)] == [5, 1, 5, 5]


def test_a_store_full_of_waiting_sessions_is_not_frozen() -> None:
    """Under the policy that refuses most, and the budget of hints is all of the store (G9)."""
    books = Books(20, policy=Lease(20 * PAGE), hint_budget=1.0)  # type: ignore[arg-type]
    for number in range(4):
        books.write(f"{number}", keys(f"{number}", 5))
    books.now += 30.0
    for number in range(4):
        arrive(books, f"{number}")
    assert books.write("", keys("early", 1)) == [WriteStatus.BYPASSED]
    books.now += WAIT_S
    assert books.write("", keys("late", 1)) == [WriteStatus.RESERVED]


def test_what_an_arrival_means_beside_other_hints(books: Books) -> None:
    books.store.hint("old", None, books.now)
    assert arrive(books, age_s=3.0) is True  # the end came after it
    assert waiting(books) == 0
    books.now += 1.0
    arrive(books)  # it has not ended, then
    assert books.store.hint("old", 500.0, books.now) is False
    books.fill(12)
    assert books.here(keys("old", 8)) == 8
    books.store.hint("old", None, books.now)
    assert waiting(books) == 0
    books.fill(8)
    assert books.here(keys("old", 8)) == 0


def test_a_waiting_session_whose_blocks_are_removed_is_forgotten(books: Books) -> None:
    arrive(books)
    books.store.remove(ONE, keys("old", 8))
    check_invariants(books.store)
    found = books.store.extents.policy.figures
    assert (found["sessions"], found["announced_bytes"], found["waiting_sessions"]) == (0, 0, 0)


# --- what a lease learns -----------------------------------------------------------------


def take_turns(books: Books, pause_s: float, turns: int) -> Lease[object]:
    """Sessions whose blocks never last until their next prompt, and their arrivals."""
    for turn in range(turns):
        name = f"{turn % 5}"
        chain = keys(f"{turn}", 4)
        books.write(name, chain)
        books.now += pause_s
        books.store.remove(ONE, chain)
        books.store.hint(name, ARRIVED, books.now)
        books.store.hint(name, ARRIVED, books.now)  # repeated: one pause
    policy = books.store.extents.policy.policy  # type: ignore[attr-defined]
    assert isinstance(policy, Lease)
    return policy


def test_a_lease_is_as_long_as_sessions_pause_though_none_hits() -> None:
    books = Books(20, policy=Lease(20 * PAGE))  # type: ignore[arg-type]
    lease = take_turns(books, 200.0, 70)
    assert lease._pauses._total == 70
    assert 400.0 < lease.lease_s < 520.0


def test_a_lease_has_an_end_whatever_strangers_report() -> None:
    lease: Lease[object] = Lease(20 * PAGE)  # type: ignore[type-var]
    for _ in range(200):
        lease.arrived(1e6)
    assert lease.lease_s == 600.0


def test_sessions_without_blocks_are_remembered_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.server.eviction.session.SESSIONS_MAX", 3)
    books = Books(20, policy=Lease(20 * PAGE))  # type: ignore[arg-type]
    for number in range(9):
        books.write(f"{number}", keys(f"{number}", 1))
        books.store.remove(ONE, keys(f"{number}", 1))
    for number in range(9):
        books.store.hint(f"{number}", ARRIVED, books.now + 5.0)
    policy = books.store.extents.policy.policy  # type: ignore[attr-defined]
    assert isinstance(policy, Lease)
    assert policy._pauses._total == 3


# --- prompts without a session -----------------------------------------------------------


def wait_for(books: Books, chain: list[bytes]) -> None:
    """A prompt of no session has found this chain, and waits."""
    books.now += 1.0
    end = ChainEnd(ONE.name, 1, chain[-1])
    assert books.store.hint(end, ARRIVED, books.now) is None
    check_invariants(books.store)


@pytest.mark.parametrize("ends", ["not", "read", "continued", "written again", "lapsed"])
def test_a_prompt_that_waits_keeps_what_it_has_found(ends: str) -> None:
    books, found = Books(20), keys("found", 6)
    books.write("", found)
    wait_for(books, found)
    assert waiting(books) == 1
    last = books.store.index.peek(ONE, 0, found[-1])
    assert last is not None
    assert books.store.extents.policy.hint_of(last.session, books.now) is None  # of no name
    books.fill(20)
    assert books.here(found) == 6
    match ends:
        case "read":
            books.read(found)
        case "continued":
            books.write("", keys("answer", 1), parent=found[-1])
        case "written again":
            books.write("", found)
        case "lapsed":
            books.now += 120.0
    books.fill(20)
    assert books.here(found) == (6 if ends == "not" else 0)
    assert waiting(books) == (ends == "not")


def test_prompts_that_wait_refuse_nothing() -> None:
    """If they wait for all that there is, the one that came last is the first to lose."""
    books, chains = Books(18), [keys(f"{number}", 6) for number in range(3)]
    for chain in chains:
        books.write("", chain)
        wait_for(books, chain)
    books.fill(4)
    assert [books.here(chain) for chain in chains] == [6, 6, 2]


def test_an_arrival_that_is_heard_late_or_of_what_has_left_keeps_nothing(books: Books) -> None:
    found, shared = keys("found", 4), keys("shared", 2)
    books.write("", shared)
    books.write("", found, parent=shared[-1])
    late = ChainEnd(ONE.name, 1, found[-1])
    for later, age_s in ((5.0, 6.0), (200.0, 120.0), (3601.0, 0.0)):  # read since, lapsed, too old
        books.store.hint(late, ARRIVED, books.now + later, age_s=age_s)
    wait_for(books, keys("unknown", 3))
    wait_for(books, shared)  # which others keep
    books.write("ended", chat := keys("ended", 6))
    assert books.store.hint("ended", None, books.now) is True
    wait_for(books, chat[:3])  # another conversation may begin alike
    assert waiting(books) == 0
    books.fill(10)
    assert (books.here(found), books.here(chat)) == (4, 0)


def test_of_a_session_that_is_known_the_prompt_waits(books: Books) -> None:
    chat = keys("chat", 6)
    books.write("chat", chat)
    wait_for(books, chat)
    books.fill(20)
    assert books.here(chat) == 6
    assert waiting(books) == 1


# --- on its way --------------------------------------------------------------------------


async def test_a_match_with_a_session_reaches_the_servers(pool: Pool, pool_dev: dev.Dev) -> None:
    (server,) = pool_dev.servers
    chain = keys("chain", 4)
    await pool.write(NAMESPACE, chain, values(chain, 64), session="agent")
    await asyncio.sleep(0.15)  # at once after the write it would count as the same use
    await pool.match(NAMESPACE, chain)
    for number in range(20):
        await pool.match(NAMESPACE, keys("elsewhere", 1), session=f"nobody {number}")
    assert pool_dev.master.hints.last == 20
    assert (await pool.match(NAMESPACE, chain, session="agent")).length == 4
    await eventually(lambda: server.store.extents.policy.figures["waiting_sessions"] == 1)
    await pool.read(NAMESPACE, chain, [bytearray(64) for _ in chain])
    assert server.store.extents.policy.figures["waiting_sessions"] == 0
    await asyncio.sleep(0.15)
    assert await pool.session("agent").arrived() is True
    await eventually(lambda: server.store.extents.policy.figures["waiting_sessions"] == 1)


async def test_a_lookup_without_a_session_reaches_them(pool: Pool, pool_dev: dev.Dev) -> None:
    """Of what a chain of two pages found, its last block waits."""
    (server,) = pool_dev.servers
    chain, size = keys("chain", 600), 64
    for at in range(0, len(chain), 100):
        parent = chain[at - 1] if at else ROOT
        blocks = values(chain[at : at + 100], size)
        await pool.write(NAMESPACE, chain[at : at + 100], blocks, parent=parent)
    await asyncio.sleep(0.15)
    config, ended = ClientConfig(masters=[pool_dev.address]), list[PolledMatches]()
    order = server.store.extents.policy
    with contextlib.closing(MatchPoller(config, Cluster())) as poller:
        # The second time the poller knows the spans of the chain, and asks with one page.
        for asked, found in ((keys("new", 3), 0), (chain, 600), (chain + keys("next", 2), 600)):
            poller.start(found, [(NAMESPACE, asked)])
            await eventually(lambda: ended.extend(poller.poll()) or ended)
            assert ended.pop().matches[0].length == found
            assert bool(pool_dev.master.hints.last) == bool(found)
            if found:
                await eventually(lambda: order.figures["waiting_sessions"] == 1)
                await pool.read(NAMESPACE, chain[-100:], [bytearray(size) for _ in range(100)])
            assert order.figures["waiting_sessions"] == 0
            await asyncio.sleep(0.15)
