"""Policies that infer, with all that they measure wrong: what they refuse is taken in time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool import registry
from kvpool.server.eviction import density, programs
from kvpool.server.eviction.density import LifetimeHistogram
from kvpool.server.state.store import Store
from kvpool.types import ROOT, WriteStatus
from tests.conftest import keys
from tests.support.stores import PAGE, read, write

PAGES = 20
CHAINS = [keys(f"chain {number}/", 5) for number in range(12)]


@pytest.fixture(autouse=True)
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes back is taken for something that was away for almost three hours: the longer
    nobody asked for a block, the dearer it seems, and a new one seems to be worth nothing."""
    ended = LifetimeHistogram.ended
    monkeypatch.setattr(LifetimeHistogram, "ended", lambda self, age_s: ended(self, 10_000.0))
    monkeypatch.setattr(density, "_SAMPLE", 1)
    monkeypatch.setattr(density, "_RELEARN_EVERY", 200)
    monkeypatch.setattr(programs, "_LEARN_EVERY", 1)


def mistaken(policy: str) -> tuple[Store, list[Any]]:
    """A store after 600 prompts, one a second, and what came of the blocks that were written."""
    store = Store(PAGES * PAGE, policy=registry.policy(policy, PAGES * PAGE))
    rng, statuses = random.Random(1), []
    for now in range(600):
        chain = rng.choice(CHAINS)
        held = read(store, chain, float(now))
        if held < len(chain):
            parent = chain[held - 1] if held else ROOT
            statuses += write(store, chain[held:], float(now), parent=parent)
    return store, statuses


@pytest.mark.parametrize("policy", ["density", "programs"])
def test_what_is_refused_by_mistake_is_taken_after_ten_minutes(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LifetimeHistogram, "density", lambda self, age_s: 1.0 + age_s)
    store, statuses = mistaken(policy)
    assert WriteStatus.BYPASSED in statuses  # the mistakes are made
    assert write(store, keys("soon", 1), 605.0) == [WriteStatus.BYPASSED]
    assert write(store, keys("late", 1), 1_205.0) == [WriteStatus.RESERVED]
