"""Which tenant's order evicts next, of orders of which the test says how old they are."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool.server.eviction.tenant_orders import OldestOrder
from kvpool.server.state.entry import Account
from kvpool.server.state.quota import TenantAccount


class Aged:
    """An order whose next victim was used at `used`."""

    def __init__(self, used: float) -> None:
        self.used = used
        self.asked = 0

    def rank(self, now: float) -> tuple[int, float]:
        self.asked += 1
        return 2, self.used


class Three:
    """Accounts a, b, c, used at 1, 2 and 3, each beyond its guarantee."""

    def __init__(self) -> None:
        self.accounts = {name: TenantAccount(name) for name in "abc"}
        for account in self.accounts.values():
            account.used = 100
        self.aged = {one: Aged(1.0 + n) for n, one in enumerate(self.accounts.values())}
        orders: dict[Any, Any] = dict(self.aged)
        self.oldest = OldestOrder(orders)

    def found(self, *asked: str) -> str:
        done: set[Account] = {self.accounts[name] for name in asked}
        account, _ = self.oldest.find(done, 10.0)
        return account.name if account is not None else ""

    def order(self, name: str) -> Aged:
        return self.aged[self.accounts[name]]


@pytest.fixture
def three() -> Three:
    return Three()


def test_the_oldest_keeps_its_turn_and_one_of_the_others_is_asked_now_and_then(
    three: Three,
) -> None:
    assert [three.found() for _ in range(99)] == ["a"] * 99
    assert 4 <= three.order("b").asked + three.order("c").asked <= 8


def test_many_tenants_are_not_all_asked_for_each_block() -> None:
    """Of 200 tenants the one that is found is the oldest at each time."""
    accounts = [TenantAccount(str(number)) for number in range(200)]
    aged = {account: Aged(float(number)) for number, account in enumerate(accounts)}
    orders: dict[Any, Any] = dict(aged)
    oldest, rng = OldestOrder(orders), random.Random(7)
    for account in accounts:
        account.used = 100
    for step in range(2_000):
        found, _ = oldest.find(set(), 10.0)
        assert found is not None
        assert aged[found].used == min(aged[one].used for one in accounts if one.used)
        aged[found].used = rng.choice((aged[found].used, 200.0 + step))  # its victim has left
        other = rng.choice(accounts)
        if rng.random() < 0.5:
            aged[other].used = 201.0 + step  # it was used, which nobody tells
        else:
            other.used = 100 - other.used  # within its guarantee, or not any more
            aged[other].used = rng.uniform(0.0, 200.0 + step)
            oldest.on_change(other)
            oldest.end_turn()
    assert sum(one.asked for one in aged.values()) < 8 * 2_000
    assert len(oldest._heap) < 1_000, "what has changed since is not kept"


def test_the_turn_ends_when_another_one_is_older(three: Three) -> None:
    assert three.found() == "a"
    three.order("a").used = 2.0
    assert three.found() == "a", "as old as the next"
    three.order("a").used = 2.5
    assert three.found() == "b"


def test_who_was_asked_has_no_victim_or_is_within_its_guarantee_is_passed_over(
    three: Three,
) -> None:
    assert three.found() == "a"
    three.oldest.dry.add(three.accounts["a"])
    assert three.found() == "b", "although it was the turn of a"
    assert three.found("b") == "c"
    three.accounts["c"].used = 0
    assert three.found("b") == ""
    for account in three.accounts.values():
        three.oldest.on_change(account)
    assert three.found() == "a"


def test_what_only_time_has_made_older_is_found_when_it_was_its_turn_to_be_asked(
    three: Three,
) -> None:
    assert three.found() == "a"
    three.order("c").used = 0.0
    assert "c" in [three.found() for _ in range(4 * 33)]
