"""How fast a tenant may write, when its rate changes."""

from __future__ import annotations

import pytest

from kvpool.errors import InvariantViolated
from kvpool.write_rates import BURST_S, WriteRates

MB, NOW = 1_000_000, 1000.0


def rates(rate: int) -> WriteRates:
    found = WriteRates()
    found.replace({"acme": rate, "other": MB})
    return found


@pytest.mark.parametrize(
    ("after_s", "rate", "wait_s"),
    [
        (0, 100 * MB, 0.99),  # of 100 MB one is paid for by the burst
        (49, 100 * MB, 0.5),
        (99, MB // 2, 0.0),  # all was paid for at the old rate
        (500, MB // 2, 0.0),
        (49, MB // 2, 100.0),
    ],
)
def test_what_is_owed_is_paid_at_the_new_rate(after_s: float, rate: int, wait_s: float) -> None:
    limits = rates(MB)
    limits.begin("acme", 100 * MB, NOW)
    assert limits.wait_s("acme", NOW) == 99
    limits.replace({"acme": rate}, NOW + after_s)
    assert limits.wait_s("acme", NOW + after_s) == pytest.approx(wait_s)
    assert limits.wait_s("other", NOW) == 0


def test_a_rate_holds_over_any_time_with_one_burst() -> None:
    limits, now, written = rates(1000), 100.0, 0
    limits.replace({"acme": 1000, "blue": 0})
    while now < 200.0:
        if wait := limits.wait_s("acme", now):
            now += wait
            continue
        limits.begin("acme", 300, now)
        written += 300
    assert 100 * 1000 <= written <= (100 + BURST_S) * 1000 + 300
    assert limits.wait_s("blue", now) == limits.wait_s("nobody", now) == 0.0
    with pytest.raises(InvariantViolated):
        limits.begin("acme", 10_000, now) or limits.begin("acme", 1, now)


def test_what_is_not_written_is_given_back_after_a_change() -> None:
    limits = rates(MB)
    limits.begin("acme", 100 * MB, NOW)
    limits.replace({"acme": 2 * MB}, NOW)
    limits.give_back("acme", 100 * MB)
    assert limits.wait_s("acme", NOW) == 0
    limits.begin("acme", 10 * MB, NOW)
    assert limits.wait_s("acme", NOW) == pytest.approx(4.5)


def test_a_change_of_another_tenant_changes_nothing() -> None:
    limits = rates(MB)
    limits.begin("acme", 100 * MB, NOW)
    for _ in range(3):
        limits.replace({"acme": MB, "other": 5 * MB}, NOW + 1)
    assert limits.wait_s("acme", NOW + 1) == pytest.approx(98)
    limits.replace({"other": MB}, NOW + 1)
    assert limits.wait_s("acme", NOW + 1) == 0  # it has no limit now
    limits.give_back("acme", MB)
