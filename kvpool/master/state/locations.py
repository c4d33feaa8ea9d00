"""Where blocks lie: sets of locations, each stored once and shared.

Memory limits a directory of millions of blocks, and most of them lie together: all blocks in the
same locations share one `BlockLocations`. A block then costs one dictionary slot, its digest and a
pointer, and whether it can be read is computed once for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvpool.fingerprint import MapFingerprint, location_seed
from kvpool.master.state.block_map import MARK_BITS
from kvpool.piecewise_dict import PiecewiseDict
from kvpool.types import Namespace, ReadStatus, Replica

#: Sets of locations that may be useless before the map is walked for them.
_SLACK: Final = 1024


class ServerInventory:
    """One inventory of one server as this master received it. The next inventory replaces it.

    | state    | `retired` | its blocks                                                        |
    |----------|-----------|-------------------------------------------------------------------|
    | latest   | False     | readable as long as the server is alive; new blocks are added     |
    | earlier  | False     | readable, too, while the latest one arrives; each block that is in |
    |          |           | that one moves there                                              |
    | replaced | True      | not readable: the server runs, and did not list them again        |
    | lost     | True      | not readable: the process that had them is lost or has ended      |

    `Sweeper` removes the blocks of retired inventories step by step.
    """

    __slots__ = ("listed", "lost", "retired", "server")

    def __init__(self, server: str) -> None:
        self.server = server
        #: Its blocks, to be compared with what the server holds (design: announcements).
        self.listed = MapFingerprint()
        self.retired = False
        self.lost = False  # retired together with the process that had the blocks

    @property
    def blocks(self) -> int:
        return self.listed.blocks

    def uncount(self, digest: bytes, seed: int) -> None:
        """A block has left the place of this seed. A retired inventory is never compared again."""
        if not self.retired:
            self.listed.count(digest, seed, -1)

    @property
    def replaced(self) -> bool:
        return self.retired and not self.lost


class Location(NamedTuple):
    """One part of a block in one tier of one server."""

    inventory: ServerInventory
    tier: int
    part: int

    def seed(self, namespace: Namespace) -> int:
        """What a block's hash begins with here."""
        return location_seed(namespace, self.part, self.tier)


class Step(NamedTuple):
    """What a change makes of a set of locations."""

    after: BlockLocations
    left: Location | None  # that the block loses


class BlockLocations:
    """All locations of a block. Made by `LocationTable`: equal sets are one object.

    A part of a block has at most one location on each server.

    The map of blocks stores `tag`, always this one int object, or one with the same `id` and the
    mark of a span (`BlockMap`), because the garbage collector visits neither ints nor dicts of them
    (design: turns).

    `version` is the directory's when the fields below it were derived. If it is older, call
    `resolve` before reading them.
    """

    __slots__ = (
        "after_add",
        "after_remove",
        "complete_replicas",
        "id",
        "locations",
        "parts",
        "replicas",
        "status",
        "tag",
        "version",
        "walk",
    )

    def __init__(self, id: int, parts: int, locations: tuple[Location, ...]) -> None:
        self.id = id
        self.tag = id << MARK_BITS  # of a block that is in no span
        self.parts = parts  # that make a whole block, by its namespace
        self.locations = locations
        self.version = -1
        self.status = ReadStatus.SERVER_LOST
        self.replicas: tuple[Replica, ...] = ()
        self.complete_replicas = 0  # every part can be read from at least this many servers
        #: Results of `LocationTable.add` and `remove`: an announcement repeats the same step.
        self.after_add: dict[Location, Step] = {}
        self.after_remove: dict[tuple[str, int], Step] = {}
        self.walk = 0  # of the map, in which it was used last; the steps are of that time

    def resolve(self, replicas: tuple[Replica, ...], lost: set[int], version: int) -> None:
        """Derive the status from the `replicas` that can be read at this `version`.

        `lost` are the parts of which a copy is on a lost server. A copy that its server did not
        list again is no lost one: that server lives, and has it no more.
        """
        self.version = version
        self.replicas = replicas
        per_part = Counter(replica.part for replica in replicas)
        complete = len(per_part) == self.parts
        self.complete_replicas = min(per_part.values()) if complete else 0
        if complete:
            self.status = ReadStatus.HIT
        elif not lost <= per_part.keys():
            self.status = ReadStatus.SERVER_LOST
        else:
            self.status = ReadStatus.PART_MISSING if replicas else ReadStatus.NEVER_WRITTEN


class LocationTable:
    """The sets of locations that blocks have, each once.

    Which of them no block has any more shows a walk through the map: what was in no piece of it,
    and was not used meanwhile. So a set is used by `touch`, or by what calls it.
    """

    def __init__(self) -> None:
        #: By `id`. Only ids that are in the map of blocks may be looked up.
        self.by_id: dict[int, BlockLocations] = {}
        self._sets: PiecewiseDict[tuple[int, frozenset[Location]], BlockLocations] = PiecewiseDict()
        self._last_id = 0
        self._kept = 0  # sets after the last walk
        #: Number of the walk that is under way, or was the last one.
        self.walk = 0

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def has_grown(self) -> bool:
        """There are so many more sets than before that some may be useless: walk."""
        return len(self._sets) > 2 * self._kept + _SLACK

    def touch(self, held: BlockLocations) -> None:
        """It is used in this walk. Steps from before may lead to sets that this walk drops."""
        if held.walk != self.walk:
            held.walk = self.walk
            held.after_add.clear()
            held.after_remove.clear()

    def get(self, parts: int, locations: Iterable[Location]) -> BlockLocations:
        """The one object for these locations."""
        key = (parts, frozenset(locations))
        held = self._sets.get(key)
        if held is None:
            # Sorted: the order must not depend on how a set of objects happens to iterate.
            ordered = sorted(key[1], key=lambda one: (one.inventory.server, one.part, one.tier))
            self._last_id += 1
            held = self._sets[key] = BlockLocations(self._last_id, parts, tuple(ordered))
            self.by_id[held.id] = held
        if held.walk != self.walk:  # it is asked for each announcement
            self.touch(held)
        return held

    def add(self, held: BlockLocations, location: Location) -> Step:
        """`held` and this location. It replaces one of the same part on the same server: the block
        moved to another tier, or a later inventory has it.
        """
        others = self.remove(held, location.inventory.server, location.part)
        after = self.get(held.parts, (*others.after.locations, location))
        step = held.after_add[location] = Step(after, others.left)
        return step

    def remove(self, held: BlockLocations, server: str, part: int) -> Step:
        """`held` without this part on this server; `held` itself when it has no such location."""
        step = held.after_remove.get((server, part))
        if step is None:
            kept, left = [], None
            for one in held.locations:
                if one.inventory.server == server and one.part == part:
                    left = one
                else:
                    kept.append(one)
            after = self.get(held.parts, kept) if left is not None else held
            step = held.after_remove[server, part] = Step(after, left)
        return step

    def unretired(self, held: BlockLocations) -> BlockLocations:
        """`held` without locations in retired inventories; `held` itself when it has none."""
        kept = [one for one in held.locations if not one.inventory.retired]
        if len(kept) < len(held.locations):
            return self.get(held.parts, kept)
        self.touch(held)
        return held

    def drop_unused(self) -> Iterator[int]:
        """Forget the sets that were not used since `walk` was counted up, in small steps: how many
        were looked at in each."""
        for piece in self._sets.pieces():
            unused = [key for key, held in piece.items() if held.walk != self.walk]
            for key in unused:
                held = piece.pop(key)
                del self.by_id[held.id]
                held.after_add.clear()  # steps lead back to it
                held.after_remove.clear()
            self._sets.changed(-len(unused))
            yield 1 + len(piece) + len(unused)
        self._kept = len(self._sets)
