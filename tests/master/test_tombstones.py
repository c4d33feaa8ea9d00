"""The reasons of the last departures: as many as were asked for, the last of each block."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sized

import pytest

from kvpool import tombstones
from kvpool.piecewise_dict import PIECE_KEYS
from kvpool.tenant_names import TENANTS_MAX
from kvpool.tombstones import Tombstones
from kvpool.types import Namespace, ReadStatus
from tests.conftest import keys

SPACES = (Namespace("one"), Namespace("two", parts=2), Namespace("two"))
REASONS = (ReadStatus.EVICTED, ReadStatus.REMOVED, ReadStatus.CORRUPT, ReadStatus.SERVER_LOST)


@pytest.mark.parametrize("limit", [1, 7, 40])
def test_against_a_model(limit: int) -> None:
    """The model keeps the last `limit` departures, and of each block the last one of them."""
    rng = random.Random(limit)
    digests = keys("block", 20)
    stones = Tombstones(limit)
    departures: list[tuple[Namespace, bytes, ReadStatus, bool]] = []
    for _ in range(1500):
        space = rng.choice(SPACES)
        some = rng.sample(digests, rng.randint(1, 6))
        if rng.random() < 0.6:
            reason = rng.choice(REASONS)
            stones.left_all(space, some, reason)
            departures += [(space, one, reason, True) for one in some]
        else:
            stones.came_back_all(space, some)
            gone = {(space, one) for one in some}
            departures = [
                (name, one, reason, still and (name, one) not in gone)
                for name, one, reason, still in departures
            ]
        departures = departures[-limit:]
        expected: OrderedDict[tuple[Namespace, bytes], ReadStatus] = OrderedDict()
        for name, one, reason, still in departures:
            expected.pop((name, one), None)
            if still:
                expected[name, one] = reason
        assert [one for step in stones.steps(7) for one in step] == list(expected.items())
        assert len(stones) == len(expected)
        for name in SPACES:
            for one in digests:
                wanted = expected.get((name, one), ReadStatus.NEVER_WRITTEN)
                assert stones.reason(name, one) is wanted


def test_what_ages_out_is_counted_and_what_came_back_is_not() -> None:
    stones = Tombstones(3)
    first, *others = keys("block", 5)
    stones.left(SPACES[0], first, ReadStatus.EVICTED)
    stones.came_back_all(SPACES[0], [first])
    for digest in others[:3]:
        stones.left(SPACES[0], digest, ReadStatus.EVICTED)
    assert (len(stones), stones.forgotten) == (3, 0)
    stones.left(SPACES[0], others[3], ReadStatus.EVICTED)
    stones.left(SPACES[0], first, ReadStatus.NEVER_WRITTEN)  # no reason is known
    assert (len(stones), stones.forgotten) == (3, 2)


def test_no_step_moves_all_records() -> None:
    """They are in small dicts, however many have come and gone."""
    stones = Tombstones(20_000)
    for number in range(60):
        stones.left_all(SPACES[0], keys(f"{number}", 1000), ReadStatus.EVICTED)
    assert len(stones) == 20_000
    assert list(map(len, stones._lines.values())) == [20_000]
    assert max(map(len, stones._reasons.pieces())) < 4 * PIECE_KEYS


def test_a_walk_in_steps_has_what_is_gone_from_begin_to_end() -> None:
    stones = Tombstones(limit=1000)
    gone = keys("walk", 100)
    for digest in gone:
        stones.left(SPACES[0], digest, ReadStatus.EVICTED)
    met = []
    for step, records in enumerate(stones.steps(10)):
        assert len(records) <= 10, "a step takes a millisecond at most"
        met += [digest for (_, digest), _ in records]
        stones.came_back_all(SPACES[0], [gone[50 + step]])  # ahead of the walk
        stones.left(SPACES[0], gone[20 + step], ReadStatus.REMOVED)  # is announced as a change
    assert met == [*gone[:20], *gone[22:50], *gone[55:]]


def test_a_flood_of_one_tenant_leaves_the_reasons_of_others() -> None:
    mine, theirs, pool = Namespace("@globex/m"), Namespace("@acme/m"), SPACES[0]
    stones = Tombstones(300)
    gone, others = keys("mine", 100), keys("pool", 90)
    stones.left_all(mine, gone, ReadStatus.EVICTED)
    stones.left_all(pool, others, ReadStatus.REMOVED)
    for number in range(30):
        stones.left_all(theirs, keys(f"theirs/{number}", 100), ReadStatus.EVICTED)
    assert {stones.reason(mine, one) for one in gone} == {ReadStatus.EVICTED}
    assert {stones.reason(pool, one) for one in others} == {ReadStatus.REMOVED}
    assert len(stones) == 300
    assert stones.forgotten == 3000 - 110
    kept = [stones.reason(theirs, one) for one in keys("theirs/29", 100)]
    assert kept == [ReadStatus.EVICTED] * 100, "the oldest of the flood go"
    met = [block for step in stones.steps(64) for block, _ in step]
    assert len(met) == 300
    assert [digest for namespace, digest in met if namespace == mine] == gone


def test_a_tenant_alone_has_all_of_them_and_gives_way_to_another() -> None:
    mine, theirs = Namespace("@globex/m"), Namespace("@acme/m")
    stones = Tombstones(100)
    stones.left_all(theirs, keys("theirs", 200), ReadStatus.EVICTED)
    assert len(stones) == 100
    stones.left_all(mine, keys("mine", 50), ReadStatus.EVICTED)
    stones.came_back_all(theirs, keys("theirs", 200))
    assert len(stones) == 50
    assert stones.reason(mine, keys("mine", 1)[0]) is ReadStatus.EVICTED


def test_who_had_most_once_keeps_its_part_when_another_has_more() -> None:
    mine, theirs = Namespace("@globex/m"), Namespace("@acme/m")
    stones = Tombstones(300)
    stones.left_all(mine, keys("mine", 400), ReadStatus.EVICTED)
    stones.left_all(theirs, keys("theirs", 1000), ReadStatus.EVICTED)
    kept = sum(stones.reason(mine, one) is ReadStatus.EVICTED for one in keys("mine", 400))
    assert kept == 150


def test_tenants_without_a_departure_are_forgotten() -> None:
    stones = Tombstones(10)
    for number in range(50):
        stones.left(Namespace(f"@t{number}/m"), b"a" * 16, ReadStatus.EVICTED)
    assert len(stones) == 10
    assert len(stones._lines) <= 11


def test_made_up_tenants_are_one() -> None:
    """A name may be in the line of all of them first, and then in one of its own."""
    stones = Tombstones(3000)
    for number in range(4000):
        stones.left(Namespace(f"@t{number}/m"), b"a" * 16, ReadStatus.EVICTED)
    assert len(stones._lines) <= TENANTS_MAX + 2
    assert len(stones) == 3000
    assert stones.reason(Namespace("@t3999/m"), b"a" * 16) is ReadStatus.EVICTED
    stones.left_all(SPACES[0], keys("pool", 5000), ReadStatus.EVICTED)
    assert len(stones) == sum(len(step) for step in stones.steps(100)) == 3000


@pytest.mark.parametrize("equal", [True, False])
def test_many_tenants_make_a_departure_no_longer(
    equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit, where all have equal parts, or one has nearly all."""

    def searches(tenants: int) -> int:
        stones, found = Tombstones(4000), 0
        spaces = [Namespace(f"@t{n}/m") for n in range(tenants)]

        def search(lines: Iterable[Sized], key: Callable[[Sized], int]) -> Sized:
            nonlocal found
            found += 1
            return max(lines, key=key)

        for n in range(4000):
            space = spaces[n % tenants if equal or n < tenants else 0]
            stones.left(space, b"%016d" % n, ReadStatus.EVICTED)
        monkeypatch.setattr(tombstones, "max", search, raising=False)
        for n in range(4000, 6000):
            stones.left(spaces[n % tenants], b"%016d" % n, ReadStatus.EVICTED)
        return found

    assert searches(1000) <= 4, "each looks at all of them"
    assert searches(10) <= 202


def test_what_is_too_much_goes_to_those_that_come() -> None:
    stones, names = Tombstones(1000), iter(range(10_000))
    spaces = {one: Namespace(f"@{one}/m") for one in ("first", "second", "third")}

    def leave(tenant: str, count: int) -> None:
        for n in itertools.islice(names, count):
            space = spaces.get(tenant) or Namespace(f"@{tenant}/m")
            stones.left(space, b"%016d" % n, ReadStatus.EVICTED)

    def known(tenant: str) -> int:
        digests = [b"%016d" % n for n in range(2390)]
        found = stones.reasons(spaces[tenant], digests)
        return sum(one is ReadStatus.EVICTED for one in found)

    for n in range(100):
        leave(f"t{n}", 1)
    for tenant, count in (("first", 900), ("second", 500), ("third", 60), ("second", 330)):
        leave(tenant, count)
    assert known("first") == 10, "all but its part"
    leave("third", 500)
    assert known("third") > 400, "the second one has far more than its part"
