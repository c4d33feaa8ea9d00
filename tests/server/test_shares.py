"""Nobody takes everything: what one tenant or peer may have of one pot."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvpool.master.state.demand import NAMESPACES_MAX, DemandMeter
from kvpool.master.state.hint_log import EXPLAINED_MAX, HintLog
from kvpool.server.state.entry import MISSED_MAX, Missed
from kvpool.shares import Recent, Shares
from kvpool.testing.policy_checks import work
from kvpool.types import ChainEnd, Namespace


def taken(shares: Shares, holder: str) -> int:
    """Units that a greedy holder gets, one by one."""
    before = shares.held(holder)
    while shares.take(holder):
        pass
    return shares.held(holder) - before


def test_one_alone_gets_half_and_the_next_half_of_the_rest() -> None:
    shares = Shares(1000)
    assert [taken(shares, holder) for holder in ("acme", "globex", "initech")] == [500, 250, 125]
    assert shares.used == 875
    assert shares.refused == {"acme": 1, "globex": 1, "initech": 1}
    shares.give_back("acme", 250)
    assert not shares.take("acme", 63), "it has 250, and 375 are free"
    assert taken(shares, "globex") == 62
    assert shares.refused["acme"] == 1 + 63


def test_the_pool_itself_may_have_all_and_the_last_one_is_for_who_has_nothing() -> None:
    shares = Shares(8)
    assert taken(shares, "") == 8
    assert not shares.take("acme")
    shares.give_back("", 2)
    assert taken(shares, "acme") == 1
    assert shares.take("globex"), "the last one"
    assert not shares.take("initech")
    assert shares.room("acme") == shares.room("initech") == 0
    shares.clear()
    assert (shares.used, shares.held("acme"), shares.room("")) == (0, 0, 8)
    assert shares.refused.total() == 4


@pytest.mark.parametrize("units", [1, 7])
def test_what_is_given_back_is_there_again(units: int) -> None:
    shares = Shares(64)
    for _ in range(100):
        assert shares.take("acme", units)
        assert shares.take("globex", units)
        shares.give_back("acme", units)
        shares.give_back("globex", units)
    assert shares.used == shares.held("acme") == shares.held("globex") == 0


def test_made_up_holders_cost_bounded_memory() -> None:
    shares = Shares(1 << 40)
    names = [f"t{n}" for n in range(5000)]
    assert all(shares.take(name, 3) for name in names)
    for name in names:
        shares.refuse(name)
        shares.give_back(name, 3)
    assert shares.used == 0
    assert shares.refused.total() == 5000
    assert len(shares.refused) < 2500


def test_missed_blocks_wait_once_and_each_tenant_has_its_share() -> None:
    missed = Missed()
    evil, mine = Namespace("@acme/none"), Namespace("@globex/m")
    for number in range(100):
        missed.add(evil, 0, [b"%07d%09d" % (number, k) for k in range(MISSED_MAX)])
    kept = missed.shares.used
    assert kept == MISSED_MAX // 2
    assert missed.shares.refused["acme"] == 100 * MISSED_MAX - kept
    for _ in range(3):
        missed.add(mine, 1, [b"a" * 16, b"b" * 16, b"a" * 16])
    assert missed.shares.held("globex") == 2
    taken = missed.take()
    assert taken[1:] == [(mine, 1, [b"a" * 16, b"b" * 16])]
    assert len(taken[0][2]) == kept
    assert missed.take() == []
    missed.add(evil, 0, [b"c" * 16])
    assert missed.take() == [(evil, 0, [b"c" * 16])]


def test_what_is_remembered_is_bounded() -> None:
    recent: Recent[str, int] = Recent(4)
    for n in range(100):
        recent.put("acme", str(n), n - 1)
        recent.put("acme", str(n), n)
        assert recent.get("acme", str(n)) == n
        assert recent.get("acme", str(max(0, n - 3))) == max(0, n - 3)
        assert len(recent) <= 4
    assert recent.get("acme", "0") is None
    assert recent.get("globex", "99") is None
    assert list(recent.values()) == [99, 98, 97, 96]


def test_a_flood_of_one_holder_drives_out_its_own() -> None:
    recent: Recent[int, int] = Recent(90)
    for n in range(30):
        recent.put("globex", n, n)
        recent.put("initech", n, n)
    for n in range(10_000):
        recent.put("acme", n, n)
    assert all(recent.get(one, n) == n for n in range(30) for one in ("globex", "initech"))
    assert sum(recent.get("acme", n) is not None for n in range(10_000)) == 30
    assert recent.get("acme", 9_999) == 9_999
    for n in range(30, 60):  # has its part already: its own oldest go
        recent.put("globex", n, n)
    assert all(recent.get("initech", n) == n for n in range(30))
    assert [recent.get("globex", n) is None for n in range(60)] == [True] * 30 + [False] * 30
    assert recent.get("acme", 9_999) == 9_999


@pytest.mark.parametrize("equal", [True, False])
def test_many_holders_make_a_call_no_longer(equal: bool) -> None:
    def puts(holders: int) -> int:
        recent: Recent[int, int] = Recent(4000)
        for n in range(4000):  # equal parts; or one that has nearly all
            recent.put(f"t{n % holders if equal or n < holders else 0}", n, n)

        def put() -> None:
            for n in range(1, 2001):
                recent.put(f"t{n % holders}", -n, n)

        return work(put)

    assert puts(1000) < 2 * puts(10)


def test_what_is_too_much_goes_to_those_that_come() -> None:
    recent: Recent[int, int] = Recent(1000)
    names = itertools.count()

    def come(holder: str, entries: int) -> None:
        for n in itertools.islice(names, entries):
            recent.put(holder, n, n)

    def kept(holder: str) -> int:
        return sum(recent.get(holder, n) is not None for n in range(3000))

    for n in range(100):
        come(f"t{n}", 1)
    come("first", 900)
    come("second", 500)
    come("third", 60)
    come("second", 330)
    assert kept("first") == 10, "all but its part"
    come("third", 500)
    assert kept("third") > 400, "the second one has far more than its part"
    assert all(kept(f"t{n}") for n in range(100))


def test_entries_of_one_holder_the_oldest_first() -> None:
    recent: Recent[str, int] = Recent(4)
    for holder, key, value in (("a", "x", 1), ("b", "x", 2), ("a", "y", 3), ("a", "x", 4)):
        recent.put(holder, key, value)
    assert list(recent.of("a")) == [("y", 3), ("x", 4)]
    assert list(recent.of("b")) == [("x", 2)]
    assert list(recent.of("c")) == []


def test_what_is_forgotten_makes_room_and_is_not_counted_as_dropped() -> None:
    recent: Recent[str, int] = Recent(2)
    recent.put("acme", "a", 1)
    recent.pop("acme", "a")
    recent.pop("acme", "a")
    recent.pop("globex", "b")
    assert (len(recent), recent.dropped) == (0, 0)
    for name in "bcd":
        recent.put("acme", name, 1)
    assert (len(recent), recent.dropped) == (2, 1)
    assert recent.get("acme", "b") is None


def test_made_up_holders_of_entries_share_one_part() -> None:
    recent: Recent[int, int] = Recent(5000)
    for n in range(5000):
        recent.put(f"t{n}", 0, n)
    for n in range(5000):
        recent.put("globex", n, n)
    assert len(recent) == 5000
    assert recent.get("globex", 4999) == 4999
    assert recent.get("t0", 0) == 0


@pytest.mark.parametrize("of", [str, lambda name: ChainEnd(name, 1, bytes(16))])
def test_hints_of_one_tenant_leave_room_for_those_of_others(
    of: Callable[[str], str | ChainEnd],
) -> None:
    log = HintLog(kept=100)
    sent = [log.add(of(f"@acme/{n}"), 5.0, 0.0) for n in range(200)]
    assert sent.count(True) == 50
    assert log.add("@globex/s", 5.0, 0.0) is True
    assert log.add("mine", None, 1.0) is True
    assert log.add("@acme/later", 5.0, 1.9) is False
    assert log.add("@acme/later", 5.0, 2.1) is True, "servers have the others"
    found, last = log.since(0, 1000)
    assert (len(found), last) == (53, 53)
    for second in range(10, 100):  # the ring goes round, and nothing is counted twice
        assert log.add("@globex/s", 5.0, float(second)) is True
    assert sum(log.add(f"@acme/{n}", 5.0, 200.0) is True for n in range(90)) == 50
    assert sum(log.add(f"{n}", None, 200.0) is True for n in range(90)) == 50
    assert [hint.subject for hint in log.since(0, 1000)[0][::99]] == ["@acme/0", "49"]
    log = HintLog(kept=100)
    for at in (0.0, 3.0):  # one about many parts counts as what it costs each server
        assert [log.add(ChainEnd("@acme/m", 256, b"k"), 5.0, at) for _ in (1, 2)] == [True, False]


def test_what_became_of_hints_is_remembered_for_every_tenant() -> None:
    log = HintLog()
    log.add("@globex/s", 5.0, 0.0)
    for n in range(3 * EXPLAINED_MAX):
        log.add(f"@acme/{n}", 5.0, 0.0)
    log.answered("server", "@globex/s", True, 1.0)
    report = log.explain("@globex/s", 2.0)
    assert report.hints == [(2.0, 5.0)]
    assert report.servers == [("server", True, 1.0)]
    assert log.explain("@acme/0", 2.0).hints == []
    assert len(log.latest(10 * EXPLAINED_MAX)) == EXPLAINED_MAX


def test_the_demand_of_one_tenant_is_measured_whatever_another_one_asks_for() -> None:
    meter, mine = DemandMeter(), Namespace("@globex/m")
    for second in range(100):
        meter.asked(mine, [b"a" * 16, b"b" * 16], float(second), 4096)
        for n in range(20):
            meter.asked(Namespace(f"@acme/{20 * second + n}"), [b"a" * 16], float(second), 4096)
    assert mine in {one.namespace for one in meter.demand(100.0).working_sets}
    for n in range(5 * NAMESPACES_MAX):
        meter.asked(Namespace(f"@acme/{n}"), [b"a" * 16], 100.0, 4096)
    assert mine in {one.namespace for one in meter.demand(100.0).working_sets}
