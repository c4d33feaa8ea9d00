"""Where blocks lie: sets of locations, each stored once and shared.

Memory limits a directory of millions of blocks, and most of them lie together: all blocks in the
same locations share one `BlockLocations`. A block then costs one dictionary slot, its digest and a
pointer, and whether it can be read is computed once for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvpool.types import ReadStatus, Replica


class ServerInventory:
    """One inventory of one server as this master received it. The next inventory replaces it.

    | state    | `current` | its blocks                                               |
    |----------|-----------|----------------------------------------------------------|
    | arriving | False     | indexed, not readable: the previous inventory is valid   |
    | current  | True      | readable as long as the server is alive                  |
    | retired  | False     | not readable; `Directory.sweep` removes them step by step |
    """

    __slots__ = ("blocks", "current", "server")

    def __init__(self, server: str) -> None:
        self.server = server
        self.blocks = 0
        self.current = False


class Location(NamedTuple):
    """One part of a block in one tier of one server."""

    inventory: ServerInventory
    tier: int
    part: int


class BlockLocations:
    """All locations of a block. Made by `LocationTable`: equal sets are one object.

    `version` is the directory's when the fields below it were derived. If it is older, call
    `resolve` before reading them.
    """

    __slots__ = (
        "after_add",
        "after_remove",
        "complete_replicas",
        "locations",
        "parts",
        "replicas",
        "status",
        "version",
    )

    def __init__(self, parts: int, locations: tuple[Location, ...]) -> None:
        self.parts = parts  # that make a whole block, by its namespace
        self.locations = locations
        self.version = -1
        self.status = ReadStatus.SERVER_LOST
        self.replicas: tuple[Replica, ...] = ()
        self.complete_replicas = 0  # every part can be read from at least this many servers
        #: Results of `LocationTable.add` and `remove`: an announcement repeats the same step.
        self.after_add: dict[Location, BlockLocations] = {}
        self.after_remove: dict[tuple[ServerInventory, int], BlockLocations] = {}

    def has_part(self, inventory: ServerInventory, part: int) -> bool:
        return any(one.inventory is inventory and one.part == part for one in self.locations)

    def resolve(self, replicas: tuple[Replica, ...], version: int) -> None:
        """Derive the status from the `replicas` that can be read at this `version`."""
        self.version = version
        self.replicas = replicas
        per_part = Counter(replica.part for replica in replicas)
        complete = len(per_part) == self.parts
        self.complete_replicas = min(per_part.values()) if complete else 0
        if complete:
            self.status = ReadStatus.HIT
        elif len(per_part) == len({location.part for location in self.locations}):
            self.status = ReadStatus.PART_MISSING
        else:
            self.status = ReadStatus.SERVER_LOST


class LocationTable:
    """Every set of locations that some block has, once."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, frozenset[Location]], BlockLocations] = {}

    def get(self, parts: int, locations: Iterable[Location]) -> BlockLocations:
        """The one object for these locations."""
        key = (parts, frozenset(locations))
        held = self._sets.get(key)
        if held is None:
            # Sorted: the order must not depend on how a set of objects happens to iterate.
            ordered = sorted(key[1], key=lambda one: (one.inventory.server, one.part, one.tier))
            held = self._sets[key] = BlockLocations(parts, tuple(ordered))
        return held

    def add(self, held: BlockLocations, location: Location) -> BlockLocations:
        """`held` and this location. It replaces one of the same inventory and part: a part lies in
        one tier of a server.
        """
        others = (
            one
            for one in held.locations
            if one.inventory is not location.inventory or one.part != location.part
        )
        after = held.after_add[location] = self.get(held.parts, (*others, location))
        return after

    def remove(self, held: BlockLocations, inventory: ServerInventory, part: int) -> BlockLocations:
        """`held` without this part on this server; `held` itself when it has no such location."""
        after = held.after_remove.get((inventory, part))
        if after is None:
            after = self.keep(held, lambda one: one.inventory is not inventory or one.part != part)
            held.after_remove[inventory, part] = after
        return after

    def keep(self, held: BlockLocations, wanted: Callable[[Location], bool]) -> BlockLocations:
        """The locations of `held` that are `wanted`; `held` itself when all are."""
        kept = [one for one in held.locations if wanted(one)]
        return self.get(held.parts, kept) if len(kept) < len(held.locations) else held

    def drop(self, retired: Callable[[Location], bool]) -> None:
        """Forget the sets with a retired location, and all remembered steps: no block has them."""
        stale = [key for key in self._sets if any(map(retired, key[1]))]
        if stale:
            for key in stale:
                del self._sets[key]
            for held in self._sets.values():
                held.after_add.clear()
                held.after_remove.clear()
