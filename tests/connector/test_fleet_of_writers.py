"""What a fleet of engines finds out about each other: wrong answers, false blame and cost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from kvpool_connector.plan.known_writers import KnownWriters
from kvpool_connector.records.provenance import BlockWriter
from kvpool_connector.settings import parse
from kvpool_engines.comparison import TOLERANCES, difference
from tests.connector.test_comparison import data

#: Loads of blocks of each other engine, by each engine.
LOADS = 10_000
VALUES = torch.randn(2048, generator=torch.Generator().manual_seed(1))
LOADS_PER_CHECK = parse({}).loads_per_check


@dataclass
class FleetEngine:
    """Loads blocks as the connector does; what it computes is rounded as by kernels of its own."""

    name: str
    formula: int = 1  # the power of what others compute
    counts: Counter[str] = field(default_factory=Counter)
    known: KnownWriters = field(default_factory=lambda: KnownWriters(LOADS_PER_CHECK))

    def __post_init__(self) -> None:
        self.writer = BlockWriter(self.name.encode().ljust(8, b"_"), self.name)
        self.noise = torch.Generator().manual_seed(int.from_bytes(self.name.encode()[-4:]))

    def computes(self) -> memoryview:
        """One layer of a block: each sum a unit in the last place off, or two."""
        noise = torch.randn(VALUES.shape, generator=self.noise).clamp(-2, 2)
        return data(VALUES**self.formula * (1 + 2**-8 * noise), "bfloat16")

    def asks_for_blocks_of(self, other: FleetEngine) -> None:
        if self.known.odd:
            self.counts["computed"] += 1
        elif not self.known.trust.covers(other.writer) or other.writer.id in self.known.due:
            self.counts["compared"] += 1
            found = difference([(self.computes(), other.computes())], "bfloat16")
            if found <= TOLERANCES["bfloat16"]:
                self.known.on_equal([other.writer.id])
            elif other.writer.id not in self.known.wrong:
                self.known.on_wrong(other.writer)
        else:
            self.known.on_load([other.writer])
            self.counts["loaded"] += 1
            self.counts["wrong"] += other.formula != self.formula


@pytest.fixture(scope="module")
def fleet() -> list[FleetEngine]:
    """Four engines that have shared for long."""
    engines = [FleetEngine(f"good {number}") for number in range(4)]
    for _ in range(LOADS):
        for engine in engines:
            for other in engines:
                if other is not engine:
                    engine.asks_for_blocks_of(other)
    return engines


def test_late_engines_with_other_formulas_give_no_wrong_answer(
    fleet: list[FleetEngine],
) -> None:
    liars = [FleetEngine("cubes", formula=3), FleetEngine("fifths", formula=5)]
    everybody, chance = [*fleet, *liars], random.Random(5)
    for _ in range(LOADS):
        one, other = chance.sample(everybody, 2)
        one.asks_for_blocks_of(other)
    assert sum(engine.counts["wrong"] for engine in everybody) == 0
    for engine in fleet:
        assert engine.known.wrong == {liar.writer.id for liar in liars}
        assert not engine.known.odd
    for liar in liars:
        assert liar.known.odd, "it is itself the one that differs"
        assert liar.counts["compared"] <= 16


def test_an_engine_that_turns_wrong_under_its_old_name_is_found_by_each_other_one(
    fleet: list[FleetEngine],
) -> None:
    """By its next check. (This is the last test of the fleet.)"""
    turned, *others = fleet
    turned.formula = 3
    for engine in others:
        before = engine.counts["wrong"]
        for _ in range(2 * LOADS_PER_CHECK):
            engine.asks_for_blocks_of(turned)
            turned.asks_for_blocks_of(engine)
        assert 0 < engine.counts["wrong"] - before <= LOADS_PER_CHECK
        assert turned.writer.id in engine.known.wrong
    assert turned.known.odd
    assert turned.counts["wrong"] <= LOADS_PER_CHECK * len(others)
