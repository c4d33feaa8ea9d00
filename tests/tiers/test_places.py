"""Where extents of a file lie and where there is room, against sets of pages."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.protocols.persistent_tier import Record
from kvpool.types import ROOT, Namespace
from kvpool_tiers.nvme.format import OverlapResolver
from kvpool_tiers.nvme.free_places import FreePlaces
from kvpool_tiers.nvme.in_turns import in_order, in_turns
from kvpool_tiers.nvme.namespaces import UnnamedExtents
from kvpool_tiers.nvme.tier import Nvme
from tests.support.turns import others

UNIT, UNITS = 512, 40
FUZZ = settings(max_examples=200, derandomize=True, deadline=None, database=None)
#: A gap in front of each extent, and its size in bytes.
EXTENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4 * UNIT)), max_size=9)


def placed(drawn: list[tuple[int, int]]) -> dict[int, int]:
    """Offset and size of extents that do not overlap, in the order of offsets."""
    found, end = {}, 0
    for gap, size in drawn:
        offset = end + gap * UNIT
        found[offset] = size
        end = offset + -(-size // UNIT) * UNIT
    return found


@FUZZ
@given(drawn=EXTENTS, sizes=st.lists(st.integers(1, 4 * UNIT), max_size=20))
def test_the_lowest_range_with_room_is_taken(
    drawn: list[tuple[int, int]], sizes: list[int]
) -> None:
    end = UNITS * UNIT
    extents = {offset: size for offset, size in placed(drawn).items() if offset + size <= end}
    places = FreePlaces(UNITS * UNIT, UNIT)
    for extent in extents.items():
        places.add_taken(*extent)
    taken = {u for o, s in extents.items() for u in range(o // UNIT, -(-(o + s) // UNIT))}
    for size in sizes:
        units = -(-size // UNIT)
        lowest = next(
            (n for n in range(UNITS - units + 1) if not taken & set(range(n, n + units))), None
        )
        assert places.take(size) == (None if lowest is None else lowest * UNIT)
        if lowest is not None:
            taken |= set(range(lowest, lowest + units))


async def test_others_have_their_turn_while_many_extents_are_put_in_order() -> None:
    items = random.Random(1).sample(range(10_000), 10_000)
    async with others() as turns:

        def key(item: int) -> int:
            turns.step()
            return -item

        assert [one async for one in in_order(items, key)] == sorted(items, reverse=True)
        assert [one async for one in in_order([], key)] == []
        await asyncio.sleep(0)
        async for _ in in_turns(items):
            turns.step()
    assert 0 < turns.longest <= 4096


async def test_others_have_their_turn_while_a_file_becomes_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, space = 4096, Namespace("n")
    records = [
        Record(space, 0, n.to_bytes(32, "little"), ROOT, n * page, page, 7, n + 1, 1)
        for n in range(8000)
    ]
    tier = Nvme(8000 * page, tmp_path / "tier", direct=False)
    await tier.recover()
    await tier.persist(records)
    tier.close()
    tier = Nvme(4000 * page, tmp_path / "tier", direct=False)
    add_taken, take = FreePlaces.add_taken, FreePlaces.take
    async with others() as turns:

        def counted_add(places: FreePlaces, offset: int, size: int) -> None:
            turns.step()
            add_taken(places, offset, size)

        def counted_take(places: FreePlaces, size: int) -> int | None:
            turns.step()
            return take(places, size)

        monkeypatch.setattr(FreePlaces, "add_taken", counted_add)
        monkeypatch.setattr(FreePlaces, "take", counted_take)
        assert {one.offset for one in await tier.recover()} == {n * page for n in range(4000)}
    tier.close()
    assert 0 < turns.longest <= 1024


def test_an_empty_file_has_room_from_its_start() -> None:
    places = FreePlaces(3 * UNIT, UNIT)
    assert [places.take(UNIT) for _ in range(4)] == [0, UNIT, 2 * UNIT, None]


@FUZZ
@given(
    drawn=EXTENTS,
    discarded=st.sets(st.integers(0, 8)),
    first=st.integers(0, UNITS),
    size=st.integers(1, 8 * UNIT),
)
def test_extents_without_a_name_are_found_by_each_of_their_bytes(
    drawn: list[tuple[int, int]], discarded: set[int], first: int, size: int
) -> None:
    extents, unnamed = placed(drawn), UnnamedExtents()
    for offset, length in extents.items():
        unnamed.add(offset, length)
    for number in discarded:
        if number < len(drawn):
            offset = list(placed(drawn))[number]
            extents.pop(offset)
            unnamed.discard(offset)
            unnamed.discard(offset)
    assert unnamed.extents() == list(extents.items())
    assert len(unnamed) == len(extents)
    start = first * UNIT
    inside = range(start, start + size)
    assert unnamed.within(start, size) == [
        offset
        for offset, length in extents.items()
        if offset < inside.stop and offset + length > inside.start
    ]


@FUZZ
@given(
    drawn=st.lists(st.tuples(st.integers(0, UNITS), st.integers(1, 9 * UNIT)), max_size=12),
    ages=st.permutations(range(12)),
)
def test_what_a_newer_extent_lies_over_is_gone(
    drawn: list[tuple[int, int]], ages: list[int]
) -> None:
    """Also if that one is gone, too: it has overwritten what lay there before."""
    extents = sorted(
        Record(Namespace("n"), 0, b"", ROOT, first * UNIT, size, 0, age)
        for (first, size), age in zip(dict(drawn).items(), ages, strict=False)
    )
    resolver = OverlapResolver()
    for one in sorted(extents, key=lambda one: one.offset):
        resolver.add(one)
    resolver.finish()
    kept = [
        one
        for one in extents
        if not any(
            other.generation > one.generation
            and other.offset < one.offset + one.size
            and one.offset < other.offset + other.size
            for other in extents
        )
    ]
    assert sorted(resolver.kept) == sorted(kept)
    gone = {one.offset for one in resolver.superseded}
    assert gone == {one.offset for one in extents} - {one.offset for one in kept}
