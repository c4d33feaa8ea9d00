"""The allocator hands out no byte twice and loses none (G3)."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.errors import InvariantViolated, UsageError
from kvpool.server.state.allocator import Allocator
from kvpool.server.state.divided_allocator import FileAllocator
from kvpool.server.state.fenced_allocator import FencedAllocator
from kvpool.testing.invariants import check_invariants

PAGE = 4096
PAGES = 64


class FencedFile(FencedAllocator, FileAllocator):
    """That no one allocator does all of it changes nothing of what each must do."""


class FencedMemory(FencedFile):
    _carve = Allocator._carve


class Machine(RuleBasedStateMachine):
    """Every call against a model: what each page belongs to, and which pages are fenced."""

    kind: type[FencedFile] = FencedMemory

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.kind(PAGES * PAGE)
        self.model: dict[int, int] = {}
        self.fence = range(0)

    def is_free(self, pages: range) -> bool:
        used = {page for start, size in self.model.items() for page in pages_of(start, size)}
        return not used.intersection(pages)

    def holes(self) -> dict[int, int]:
        """The free stretches that do not lie in the fence: offset and size."""
        taken = {page for start, size in self.model.items() for page in pages_of(start, size)}
        ends = [-1, *sorted({*taken, *self.fence, PAGES})]
        return {
            (last + 1) * PAGE: (end - last - 1) * PAGE
            for last, end in itertools.pairwise(ends)
            if end - last > 1
        }

    @rule(size=st.integers(1, 40 * PAGE))
    def allocate(self, size: int) -> None:
        size_taken = self.allocator.rounded(size)
        offset = self.allocator.allocate(size)
        if offset is None:
            assert max(self.holes().values(), default=0) < size_taken
            return
        taken = pages_of(offset, size_taken)
        assert taken.start >= 0
        assert taken.stop <= PAGES
        assert self.is_free(taken)
        assert not set(taken) & set(self.fence)
        self.model[offset] = size_taken

    @rule(first=st.integers(-2, PAGES + 1), size=st.integers(1, 5 * PAGE), odd=st.booleans())
    def claim(self, first: int, size: int, odd: bool) -> None:
        wanted = pages_of(first * PAGE, self.allocator.rounded(size))
        is_possible = (
            wanted.start >= 0
            and wanted.stop <= PAGES
            and self.is_free(wanted)
            and not set(wanted) & set(self.fence)
            and not odd
        )
        assert self.allocator.claim(first * PAGE + odd * 512, size) is is_possible
        if is_possible:
            self.model[first * PAGE] = len(wanted) * PAGE

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.model)))
        assert self.allocator.release(offset) == self.model.pop(offset)

    @precondition(lambda self: not self.fence)
    @rule(data=st.data())
    def open_fence(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted({**self.model, **self.holes()})))
        self.allocator.open_fence(offset)
        self.fence = range(offset // PAGE, offset // PAGE)
        self.extend_fence(PAGES)

    @precondition(lambda self: self.fence)
    @rule(pages=st.integers(1, 8))
    def extend_fence(self, pages: int) -> None:
        end = self.fence.stop * PAGE
        hole, allocated = self.holes().get(end), self.model.get(end)
        found = self.allocator.extend_fence(pages * PAGE)
        if allocated is not None:
            assert found == end
            self.fence = range(self.fence.start, (end + allocated) // PAGE)
        elif hole is not None:
            assert found == -1
            self.fence = range(self.fence.start, (end + min(hole, pages * PAGE)) // PAGE)
        else:
            assert (found, end) == (None, PAGES * PAGE)

    @precondition(lambda self: self.fence)
    @rule(pages=st.integers(1, 12))
    def take_fenced(self, pages: int) -> None:
        if not self.is_free(self.fence) or pages > len(self.fence):
            with pytest.raises(InvariantViolated, match="are free, not"):
                self.allocator.take_fenced(pages * PAGE)
            return
        assert self.allocator.take_fenced(pages * PAGE - 1) == self.fence.start * PAGE
        self.model[self.fence.start * PAGE] = pages * PAGE
        self.fence = range(0)

    @precondition(lambda self: self.fence)
    @rule()
    def lift_fence(self) -> None:
        with pytest.raises(InvariantViolated, match="fenced already"):
            self.allocator.open_fence(0)
        self.allocator.lift_fence()
        self.fence = range(0)

    @invariant()
    def whole(self) -> None:
        allocator, holes = self.allocator, self.holes()
        check_invariants(allocator)
        assert allocator.allocated == sum(self.model.values())
        assert allocator.free == PAGES * PAGE - allocator.allocated
        assert allocator.available == sum(holes.values())
        found = allocator.largest_holes(PAGES)
        assert {offset: allocator.hole_size(offset) for offset in found} == holes
        sizes = [holes[offset] for offset in found]
        assert all(size * 8 <= before * 9 for before, size in itertools.pairwise(sizes))
        assert allocator.largest_holes(2) == found[:2]
        walked = allocator.walk(0)
        for offset, size in sorted([*self.model.items(), *holes.items()]):
            if self.fence and offset >= self.fence.start * PAGE:
                break  # a walk ends at free memory of the fence
            assert next(walked) == (offset, size, offset in holes)


def pages_of(offset: int, size: int) -> range:
    return range(offset // PAGE, (offset + size) // PAGE)


class FileMachine(Machine):
    kind = FencedFile


TestAllocator, TestFileAllocator = Machine.TestCase, FileMachine.TestCase
TestAllocator.settings = TestFileAllocator.settings = settings(
    max_examples=100,
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


def test_a_capacity_is_rounded_down_to_whole_extents() -> None:
    assert Allocator(10_000).capacity == 8192
    with pytest.raises(UsageError, match="at least 4096"):
        Allocator(100)
    with pytest.raises(UsageError, match="power of two"):
        Allocator(1 << 20, alignment=3000)


def test_from_the_front_nothing_lies_behind_what_was_once_in_use() -> None:
    """A file may be cut at its end: the highest end is that of the most that was ever in use."""
    chance = random.Random(3)
    allocator = FileAllocator(1000 * 4096)
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
        check_invariants(allocator)
    assert highest == most * 4096


def test_only_an_extent_of_the_same_size_outside_of_the_fence_is_passed_on() -> None:
    allocator = FencedAllocator(16 * 4096, 4096)
    first, second = (allocator.allocate(2 * 4096) or 0 for _ in range(2))
    sizes = [1, 4096, 4096 + 1, 2 * 4096, 2 * 4096 + 1]
    assert [allocator.may_pass_on(first, size) for size in sizes] == [0, 0, 1, 1, 0]
    allocator.open_fence(first)
    allocator.extend_fence(4096)
    assert not allocator.may_pass_on(first, 2 * 4096)  # it is being emptied for one block
    assert allocator.may_pass_on(second, 2 * 4096)
