"""Delays between attempts: longer after each failure, bounded, and not the same for all."""

from __future__ import annotations

import random

from kvpool.backoff import Backoff


def test_delays_grow_to_the_maximum_and_start_again_after_a_success() -> None:
    backoff = Backoff(0.4, 5.0)
    assert [backoff.next_delay() for _ in range(6)] == [0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert backoff.failures == 6
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_delay() == 0.4


def test_thousands_of_failures_are_no_overflow() -> None:
    """2.0 ** 1024 is one: a count of failures must not be an exponent."""
    backoff = Backoff(0.4, 5.0)
    assert {backoff.next_delay() for _ in range(5000)} == {0.4, 0.8, 1.6, 3.2, 5.0}


def test_jitter_takes_away_up_to_its_share() -> None:
    backoff = Backoff(1.0, 1.0, rng=random.Random(1))
    delays = [backoff.next_delay() for _ in range(1000)]
    assert all(0.5 <= delay <= 1.0 for delay in delays)
    assert len(set(delays)) > 900


def test_a_base_beyond_the_maximum_is_cut() -> None:
    assert Backoff(9.0, 5.0).next_delay() == 5.0
