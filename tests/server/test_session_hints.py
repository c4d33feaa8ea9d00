"""Sessions that end, are superseded, or announce when they resume: who goes first then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.master.state.hint_log import ANSWERS_MAX, HintLog
from kvpool.protocols import ReserveRequest
from kvpool.protocols.policy import Decision
from kvpool.server.eviction.density import Density
from kvpool.server.eviction.lease import Lease
from kvpool.server.eviction.session_announcements import LEAVES_MAX, RESUME_S_MAX
from kvpool.server.state.entry import MOVER, Entry
from kvpool.server.state.front_store import FrontStore
from kvpool.server.state.store import Store
from kvpool.testing.invariants import check_invariants
from kvpool.types import ARRIVED, ROOT, Namespace, SessionHint, SessionReport, WriteStatus
from tests.conftest import keys
from tests.support.stores import ONE, PAGE, TWO, here, read, write


class Books:
    """A store of so many pages, and short words for what happens to it."""

    def __init__(self, pages: int, **options: Any) -> None:
        self.store = Store(pages * PAGE, **options)
        self.now = 0.0

    def write(self, session: str, chain: list[bytes], **how: Any) -> list[WriteStatus]:
        self.now += 1.0
        return write(self.store, chain, self.now, session=session, **how)

    def read(self, chain: list[bytes]) -> None:
        self.now += 1.0
        read(self.store, chain, self.now)

    def here(self, chain: list[bytes], namespace: Namespace = ONE) -> int:
        return here(self.store, chain, namespace)

    def fill(self, count: int, name: str = "filler") -> None:
        """Blocks of nobody, each a chain of its own."""
        for number in range(count):
            assert self.write("", keys(f"{name}/{self.now}/{number}", 1)) == [WriteStatus.RESERVED]


@pytest.fixture
def books() -> Books:
    return Books(20)


# --- end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_what_an_ended_session_leaves_behind_goes_first(books: Books, shared: bool) -> None:
    """But not what others have built on, also when what they built has left."""
    old, ended, others = keys("old", 8), keys("ended", 8), keys("others", 2)
    books.write("old", old)
    books.write("ended", ended)
    books.write("", others, parent=ended[-1] if shared else ROOT)
    books.store.remove(ONE, others)
    assert books.store.hint("ended", None, books.now) is True
    books.fill(12)
    assert (books.here(old), books.here(ended)) == ((0, 8) if shared else (8, 0))


def test_a_shared_head_outlives_the_session_that_wrote_it(books: Books) -> None:
    system, one, two = keys("system", 3), keys("one", 5), keys("two", 5)
    books.write("one", system + one)
    books.write("two", two, parent=system[-1])
    books.store.hint("one", None, books.now)
    books.fill(12)
    assert (books.here(system), books.here(one), books.here(two)) == (3, 0, 5)


def test_who_is_read_again_after_its_end_is_not_dead(books: Books) -> None:
    old, ended = keys("old", 8), keys("ended", 8)
    books.write("ended", ended)
    books.write("old", old)
    books.store.hint("ended", None, books.now)
    books.read(ended)
    books.fill(12)
    assert (books.here(old), books.here(ended)) == (0, 8)


def test_of_two_hints_that_which_was_given_last_counts(books: Books) -> None:
    """Not what came last: it may come through another master. Nor one that is refused."""
    books.write("others", keys("b", 15))
    books.write("a", keys("a", 5))
    assert books.store.hint("a", None, books.now)
    assert books.store.hint("a", 3.0, books.now + 1.0, age_s=2.0)
    assert not books.store.hint("a", 1.0, books.now + 400.0, age_s=399.0)
    books.fill(5)
    assert (books.here(keys("a", 5)), books.here(keys("b", 15))) == (0, 15)


def test_a_session_that_writes_has_not_ended(books: Books) -> None:
    old, chain = keys("old", 8), keys("chain", 8)
    books.write("chain", chain[:4])
    books.store.hint("chain", None, books.now)
    books.write("old", old)
    books.read(chain[:4])
    books.write("chain", chain[4:], parent=chain[3])
    books.fill(12)
    assert (books.here(old), books.here(chain)) == (0, 8)


def test_what_was_said_last_counts(books: Books) -> None:
    books.write("a", keys("a", 5))
    books.store.hint("a", None, books.now)
    books.store.hint("a", 60.0, books.now + 1.0)
    books.fill(25)
    assert books.here(keys("a", 5)) == 5


class Refusing(Density[Entry]):
    """It expects more of all that is stored than of anything new, for a while."""

    def victim(
        self, newcomer: Entry, evictable: Callable[[Entry], bool], now: float
    ) -> Entry | Decision | None:
        return Decision.BYPASS if now < 1e4 else super().victim(newcomer, evictable, now)


def test_nothing_is_refused_or_evicted_by_a_guess_that_a_client_announced() -> None:
    books = Books(20, policy=Refusing(20 * PAGE))
    announced, others = keys("a", 5), keys("b", 15)
    books.write("a", announced, resume_in=200.0)
    books.write("", others)
    books.now += 15.0
    assert books.write("", keys("c", 1)) == [WriteStatus.BYPASSED]
    assert books.here(announced) == 5
    assert books.write("d", keys("d", 1), resume_in=300.0) == [WriteStatus.RESERVED]
    assert (books.here(announced), books.here(others)) == (5, 14)


def test_a_guess_refuses_what_goes_down_and_not_what_a_reader_waits_for() -> None:
    """What comes up from a slower tier is needed now; a disk gets what is written back."""
    for kind, status in (Store, WriteStatus.BYPASSED), (FrontStore, WriteStatus.RESERVED):
        store = kind(20 * PAGE, policy=Refusing(20 * PAGE))
        write(store, keys("b", 20), 1.0)
        request = ReserveRequest(ONE, 0, keys("cold", 1), [ROOT], [PAGE])
        (answer,) = store.reserve(MOVER, request, 2.0)
        assert answer.status is status


def test_both_parts_of_an_ended_session_go_first(books: Books) -> None:
    ended, old = keys("ended", 3), keys("old", 8)
    books.write("old", old)
    for part in (0, 1):
        books.write("ended", ended, namespace=TWO, part=part)
    books.store.hint("ended", None, books.now)
    books.fill(12)
    assert (books.here(old), books.here(ended, TWO)) == (8, 0)


# --- supersede ---------------------------------------------------------------------------


def test_a_rewritten_history_goes_first(books: Books) -> None:
    """The session goes on from block 3: what followed there before is dead, the head is not."""
    old, chain, new = keys("old", 5), keys("chain", 10), keys("new", 3)
    books.write("old", old)
    books.write("agent", chain)
    books.write("agent", new, parent=chain[2])
    books.fill(9)
    assert (books.here(old), books.here(chain), books.here(new)) == (5, 3, 3)


def test_a_session_that_goes_on_supersedes_nothing(books: Books) -> None:
    old, chain = keys("old", 5), keys("chain", 10)
    books.write("old", old)
    books.write("agent", chain[:4])
    books.write("agent", chain[4:], parent=chain[3])
    books.store.remove(ONE, chain[4:])
    books.fill(16)
    assert (books.here(old), books.here(chain)) == (0, 4)


def test_two_conversations_with_one_name_do_not_drop_each_other(books: Books) -> None:
    """The second one supersedes the first, until that goes on: then it was no branch given up."""
    one, two, old = keys("one", 6), keys("two", 6), keys("old", 5)
    books.write("old", old)
    books.write("both", one[:3])
    books.write("both", two[:3])
    books.write("both", one[3:5], parent=one[2])
    assert books.store.extents.policy.figures["branches_resumed"] == 1
    books.write("both", two[3:5], parent=two[2])
    books.write("both", one[5:], parent=one[4])
    books.write("both", two[5:], parent=two[4])
    assert books.store.extents.policy.figures["branches_resumed"] == 1
    books.fill(8)
    assert (books.here(old), books.here(one), books.here(two)) == (0, 6, 6)


def test_a_branch_that_was_partly_evicted_may_go_on_too(books: Books) -> None:
    one, two = keys("one", 6), keys("two", 6)
    books.write("both", one)
    books.write("both", two)
    books.fill(10)  # the last two blocks of the branch are gone
    books.read(two)
    assert (books.here(one), books.here(two)) == (4, 6)
    books.read(one[:4])
    books.write("both", one[4:], parent=one[3])
    assert books.store.extents.policy.figures["branches_resumed"] == 1
    books.read(two)
    books.fill(6)
    assert (books.here(one), books.here(two)) == (6, 6)


def test_a_history_that_is_rewritten_twice_is_one_conversation(books: Books) -> None:
    """Also where the first branch has left already."""
    chain, second, third, old = keys("chain", 4), keys("2", 4), keys("3", 4), keys("old", 4)
    books.write("old", old)
    books.write("one", chain)
    books.write("one", second, parent=chain[1])
    books.fill(10)
    assert books.here(chain) == 2
    for kept in (old, second, chain[:2]):
        books.read(kept)
    books.write("one", third, parent=chain[1])
    assert books.store.extents.policy.figures.get("branches_resumed", 0) == 0
    books.fill(4, "more")
    assert (books.here(old), books.here(second), books.here(third)) == (4, 0, 4)


def test_where_a_lost_branch_began_the_chain_ends_again(books: Books) -> None:
    old, chain, branch = keys("old", 3), keys("chain", 3), keys("branch", 1)
    books.write("old", old)
    books.write("one", chain)
    books.write("one", branch, parent=chain[0])
    books.store.remove(ONE, branch)
    books.fill(14 + 3)
    assert (books.here(old), books.here(chain)) == (2, 1)


def test_what_another_session_built_on_is_not_superseded(books: Books) -> None:
    old, chain, fork, new = keys("old", 5), keys("chain", 6), keys("fork", 3), keys("new", 3)
    books.write("old", old)
    books.write("agent", chain)
    books.write("other", fork, parent=chain[5])
    books.write("agent", new, parent=chain[1])
    books.fill(8)
    assert (books.here(old), books.here(chain), books.here(fork)) == (0, 6, 3)


def test_a_stretch_whose_place_is_unknown_supersedes_nothing(books: Books) -> None:
    """The blocks between are on another server: the chain goes on there, as far as is known."""
    first, third, old = keys("first", 5), keys("third", 5), keys("old", 5)
    books.write("old", old)
    books.write("agent", first)
    books.write("agent", third, parent=keys("elsewhere", 1)[0])
    books.fill(10)
    assert (books.here(first), books.here(old)) == (5, 0)


def test_an_end_of_a_chain_that_is_shared_at_once_is_not_kept() -> None:
    books, chain, sizes = Books(4), keys("chain", 3), [PAGE, PAGE, 3 * PAGE]
    books.write("", keys("child", 1), parent=chain[1])  # it makes room for the last one in vain
    request = ReserveRequest(ONE, 0, chain, [ROOT, *chain[:2]], sizes, SessionHint("a"))
    ids = [answer.id for answer in books.store.reserve(1, request, 2.0)]
    books.store.seal_all(1, ids[:2], [7, 7], 2.0)
    books.store.remove(ONE, chain[1:])
    check_invariants(books.store)


# --- resume ------------------------------------------------------------------------------


def test_an_announced_session_stays_until_it_lapses() -> None:
    books = Books(20)
    soon, old = keys("soon", 8), keys("old", 8)
    books.write("soon", soon)
    books.write("old", old)
    books.now += 20.0
    assert books.store.hint("soon", 40.0, books.now) is True
    books.fill(12)
    assert (books.here(soon), books.here(old)) == (8, 0)
    books.now += 3 * 40.0
    books.fill(12)
    assert books.here(soon) == 0


def test_of_announced_sessions_the_furthest_goes_first() -> None:
    books = Books(18, hint_budget=1.0)
    chains = {name: keys(name, 6) for name in ("far", "near", "middle")}
    for name, resume_in in (("near", 20.0), ("far", 900.0), ("middle", 300.0)):
        books.write(name, chains[name], resume_in=resume_in)
    books.fill(6)
    assert [books.here(chains[name]) for name in ("far", "near", "middle")] == [0, 6, 6]


def test_a_hint_counts_while_its_session_writes() -> None:
    books = Books(18, hint_budget=1.0)
    soon, later = keys("soon", 9), keys("later", 9)
    books.write("later", later, resume_in=300.0)
    books.write("soon", soon[:5], resume_in=900.0)
    request = ReserveRequest(ONE, 0, soon[5:], soon[4:8], [PAGE] * 4, SessionHint("soon"))
    ids = [answer.id for answer in books.store.reserve(1, request, books.now)]
    books.store.hint("soon", 20.0, books.now)
    books.store.seal_all(1, ids, [7] * 4, books.now)
    books.fill(4)
    assert (books.here(soon), books.here(later)) == (9, 5)


def test_a_newcomer_that_resumes_last_is_not_let_in() -> None:
    books = Books(10, hint_budget=1.0)
    near = keys("near", 10)
    books.write("near", near, resume_in=30.0)
    assert set(books.write("far", keys("far", 3), resume_in=600.0)) == {WriteStatus.BYPASSED}
    assert set(books.write("next", keys("next", 3), resume_in=5.0)) == {WriteStatus.RESERVED}
    assert books.here(near) == 7


def test_hints_beyond_the_budget_take_no_room_from_others() -> None:
    """Everybody announces; who says nothing still gets a fifth of the store, and at once."""
    books = Books(20)
    statuses = []
    for number in range(4):
        books.write(f"{number}", keys(f"{number}", 5))
        statuses.append(books.store.hint(f"{number}", 5.0, books.now))
    assert statuses == [True] * 3 + [False]
    books.fill(4)
    assert sum(books.here(keys(f"{number}", 5)) for number in range(4)) == 16
    assert books.store.extents.policy.figures["announced_bytes"] == 16 * PAGE


def test_the_budget_of_hints_counts_whole_extents() -> None:
    """Small blocks take a page each: 17 of 20 pages are more than the budget of 16."""
    books = Books(20)
    chain = keys("small", 17)
    hint = SessionHint("small", 5.0)
    request = ReserveRequest(ONE, 0, chain, [ROOT, *chain[:-1]], [100] * 17, hint)
    for answer in books.store.reserve(1, request, 1.0):
        books.store.seal(1, answer.id, 0, 1.0)
    check_invariants(books.store)
    assert books.store.extents.policy.figures["announced_bytes"] == 17 * PAGE
    assert books.write("", keys("other", 4)) == [WriteStatus.RESERVED] * 4
    assert books.here(chain) == 16


def test_hints_are_counted_and_bounded(books: Books) -> None:
    store = books.store
    assert store.hint("nobody", 1.0, 0.0) is None
    assert store.hint("nobody", None, 0.0) is None
    books.write("a", keys("a", 3))
    assert store.hint("a", 2 * RESUME_S_MAX, books.now) is False
    assert store.hint("a", 1.0, books.now, age_s=60.0) is False
    assert store.hint("a", 1.0, books.now) is True
    assert store.hint("a", None, books.now) is True
    figures = store.extents.policy.figures
    assert [figures[f"hints_{one}"] for one in ("clipped", "refused", "accepted")] == [1, 1, 2]
    check_invariants(store)


def test_a_session_with_too_many_branches_is_refused() -> None:
    books = Books(LEAVES_MAX + 40)
    for number in range(LEAVES_MAX + 20):
        books.write("bush", keys(f"bush/{number}", 1))
    assert books.store.hint("bush", 1.0, books.now) is False
    books.fill(40)
    check_invariants(books.store)


def test_only_so_many_sessions_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.server.eviction.session.SESSIONS_MAX", 10)
    books = Books(20)
    for number in range(15):
        books.write(f"{number}", keys(f"{number}", 1), resume_in=500.0)
    assert books.store.extents.policy.figures["sessions"] == 10
    assert books.store.hint("0", 5.0, books.now) is None
    assert books.store.hint("14", 5.0, books.now) is not None
    assert books.store.extents.policy.figures["announced_bytes"] == 10 * PAGE


def test_a_full_store_of_announced_sessions_is_not_frozen() -> None:
    """All of it is announced for an hour, under the policy that refuses most (G9)."""
    books = Books(20, policy=Lease[Entry](20 * PAGE))
    for number in range(4):
        books.write(f"{number}", keys(f"{number}", 5), resume_in=1.0)
    assert books.write("", keys("new", 1)) == [WriteStatus.RESERVED]


def test_what_was_used_just_now_outlives_what_is_announced_far_away(books: Books) -> None:
    """Nothing is known of it; it is taken to be used again within ten seconds."""
    far, fresh = keys("far", 10), keys("fresh", 10)
    books.write("far", far, resume_in=300.0)
    books.write("", fresh)
    books.fill(5)
    assert (books.here(far), books.here(fresh)) == (5, 10)


# --- on their way ------------------------------------------------------------------------


def test_each_server_hears_of_each_hint_once_and_in_order() -> None:
    log = HintLog()
    for number in range(5):
        assert log.add(f"{number}", 1.0, 0.0) is True
    first, heard = log.since(0, 3)
    rest, end = log.since(heard, 3)
    assert [hint.subject for hint in (*first, *rest)] == list("01234")
    assert log.since(end, 3) == ([], 5)
    assert log.since(900, 3) == ([], 5)


def test_what_came_of_a_hint_is_known_of_some_servers() -> None:
    log = HintLog()
    log.add("chat", 4.0, 10.0)
    log.add("chat", ARRIVED, 12.0)
    log.answered("b", "chat", False, 12.5)
    log.answered("a", "chat", True, 11.0)
    log.answered("a", "chat", False, 13.0)
    log.answered("a", "nobody", True, 13.0)
    report = log.explain("chat", 14.0)
    assert report.hints == [(4.0, 4.0), (2.0, ARRIVED)]
    assert report.servers == [("a", False, 1.0), ("b", False, 1.5)]
    assert log.explain("nobody", 14.0) == SessionReport([], [])
    for number in range(1000):
        log.answered(f"{number}", "chat", True, 14.0)
    assert len(log.explain("chat", 14.0).servers) == ANSWERS_MAX
