"""Each broken invariant of a directory is noticed: random histories are only as good as that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.errors import InvariantViolated
from kvpool.master.state.block_map import MARK_BITS, BlockMap
from kvpool.master.state.directory import Directory
from kvpool.master.state.locations import Location, ServerInventory
from kvpool.master.state.server_record import SequenceCheck
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.testing.invariants import check_invariants
from kvpool.types import Namespace
from tests.conftest import keys
from tests.master.test_directory import directory_of

ONE, TWO = Namespace("one"), Namespace("two")
CHAIN = keys("chain", 3)


def with_blocks() -> Directory:
    """Blocks on one server and on two; the inventory of one of them arrives just now."""
    directory = directory_of("a", "b")
    directory.stored("a", ONE, 0, 0, CHAIN)
    directory.stored("b", ONE, 0, 0, CHAIN[:2])
    assert directory.servers.check_piece("b", 1, 1, 0) is SequenceCheck.NEXT
    directory.stored("b", ONE, 0, 0, CHAIN[:1])
    check_invariants(directory)
    return directory


def place(directory: Directory, *locations: Location) -> None:
    """The last block has these locations, whatever the records of the servers say."""
    held = directory.locations.get(1, locations)
    directory.blocks[ONE][CHAIN[2]] = held.tag


def latest(directory: Directory, server: str) -> ServerInventory:
    return directory.servers.records[server].inventories.latest


def split(directory: Directory) -> None:
    held = directory.locations.by_id[directory.blocks[ONE][CHAIN[2]] >> MARK_BITS]
    directory.locations._sets = PiecewiseDict()
    assert held.locations


BROKEN: dict[str, Callable[[Directory], object]] = {
    "empty namespace": lambda d: d.blocks.__setitem__(TWO, BlockMap()),
    "counts 4 blocks": lambda d: setattr(d.blocks[ONE], "_count", 4),
    "span 7 has 0 blocks": lambda d: d.blocks[ONE].spans.__setitem__(7, 7),
    "counted 4 blocks, has 3": lambda d: setattr(d, "_count", 4),
    "a: counted": lambda d: latest(d, "a").listed.count(CHAIN[0], 7, 1),
    "has a retired inventory": lambda d: setattr(
        d.servers.records["b"].inventories.earlier[0], "retired", True
    ),
    "is not syncing": lambda d: setattr(d.servers.records["b"].inventories, "syncing", False),
    "has no location": place,
    "its locations are not shared": split,
    "is twice on one server": lambda d: place(
        d, Location(latest(d, "a"), 0, 0), Location(latest(d, "a"), 1, 0)
    ),
    "has part 1": lambda d: place(d, Location(latest(d, "a"), 0, 1)),
    "has part -1": lambda d: place(d, Location(latest(d, "a"), 0, -1)),
    "in an inventory that no server has": lambda d: place(d, Location(ServerInventory("a"), 0, 0)),
    "in an inventory that no server": lambda d: place(d, Location(ServerInventory("x"), 0, 0)),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_map_that_is_broken(problem: str) -> None:
    directory = with_blocks()
    BROKEN[problem](directory)
    with pytest.raises(InvariantViolated, match=problem):
        check_invariants(directory)
