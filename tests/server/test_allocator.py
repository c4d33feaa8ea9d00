"""The allocator hands out no byte twice and loses none (G3)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.errors import InvariantViolated, UsageError
from kvpool.server.state.allocator import Allocator


class Machine(RuleBasedStateMachine):
    """Allocate and release against a model: a list of intervals."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(64 * 4096)
        self.model: dict[int, int] = {}

    @rule(size=st.integers(1, 40 * 4096))
    def allocate(self, size: int) -> None:
        offset = self.allocator.allocate(size)
        if offset is None:
            assert self.largest_hole() < self.allocator.rounded(size)
            return
        end = offset + self.allocator.rounded(size)
        assert 0 <= offset < end <= self.allocator.capacity
        assert all(end <= other or offset >= other + s for other, s in self.model.items())
        self.model[offset] = self.allocator.rounded(size)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.model)))
        assert self.allocator.release(offset) == self.model.pop(offset)

    @invariant()
    def whole(self) -> None:
        self.allocator.check()
        assert self.allocator.allocated == sum(self.model.values())
        assert self.allocator.free + self.allocator.allocated == self.allocator.capacity

    def largest_hole(self) -> int:
        position, largest = 0, 0
        for offset, size in [*sorted(self.model.items()), (self.allocator.capacity, 0)]:
            largest = max(largest, offset - position)
            position = offset + size
        return largest


TestAllocator = Machine.TestCase
TestAllocator.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_double_free_is_refused() -> None:
    allocator = Allocator(1 << 20)
    offset = allocator.allocate(5000)
    assert offset is not None
    allocator.release(offset)
    with pytest.raises(InvariantViolated, match="freed twice"):
        allocator.release(offset)


def test_a_full_segment_takes_back_exactly_what_was_freed() -> None:
    allocator = Allocator(100 * 4096)
    offsets = [allocator.allocate(4096) for _ in range(100)]
    assert allocator.allocate(1) is None
    for offset in offsets:
        assert offset is not None
        allocator.release(offset)
        assert allocator.allocate(4096) == offset


def test_freed_neighbours_join_to_one_extent() -> None:
    allocator = Allocator(64 * 4096)
    offsets = [allocator.allocate(4096) for _ in range(64)]
    for offset in (*offsets[::2], *offsets[1::2]):
        assert offset is not None
        allocator.release(offset)
    assert allocator.allocate(64 * 4096) == 0


def test_a_capacity_is_rounded_down_to_whole_extents() -> None:
    assert Allocator(10_000).capacity == 8192
    with pytest.raises(UsageError, match="at least 4096"):
        Allocator(100)
    with pytest.raises(UsageError, match="power of two"):
        Allocator(1 << 20, alignment=3000)


def test_from_the_front_nothing_lies_behind_what_was_once_in_use() -> None:
    """A file may be cut at its end: the highest end is that of the most that was ever in use."""
    chance = random.Random(3)
    allocator = Allocator(1000 * 4096, from_front=True)
    assert [allocator.allocate(4096) for _ in range(3)] == [0, 4096, 8192]
    allocator.release(4096)
    assert allocator.allocate(4000) == 4096
    held = [0, 4096, 8192]
    most, highest = 3, 0
    for _ in range(3000):
        if chance.random() < 0.5 and len(held) < 300:
            offset = allocator.allocate(4096)
            assert offset is not None
            held.append(offset)
            highest = max(highest, offset + 4096)
        elif held:
            allocator.release(held.pop(chance.randrange(len(held))))
        most = max(most, len(held))
        allocator.check()
    assert highest == most * 4096
