"""What is no more leaves a master's map step by step: retired inventories, unused locations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvpool.master.state.block_map import MARK_BITS, BlockMap
from kvpool.master.state.changes import ChangeKind
from kvpool.master.state.directory import Directory
from kvpool.master.state.locations import BlockLocations, Location
from kvpool.piecewise_dict import compact
from kvpool.types import Namespace


class Sweeper:
    """A walk through the map of a directory, in small steps; again when there is a reason."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._walk: Iterator[int] | None = None
        self._retired = 0  # inventories with blocks, when the last walk began

    @property
    def due(self) -> bool:
        """There is something to be removed."""
        directory = self._directory
        return (
            self._walk is not None
            or directory.servers.retired > self._retired
            or directory.locations.has_grown
        )

    def step(self, limit: int = 512) -> bool:
        """Remove retired locations from some of the blocks, and sets of locations that no block
        has; False when none are left.

        A step visits at least `limit` blocks, if there are as many, and at most one piece of the
        map more. So a lost server with millions of blocks does not stall the loop.
        """
        if self._walk is None:
            if not self.due:
                return False
            self._retired = self._directory.servers.retired
            self._walk = self._sweep_all()
        while limit > 0:
            visited = next(self._walk, 0)
            if not visited:
                self._walk = None
                return self.due
            limit -= visited
        return True

    def _sweep_all(self) -> Iterator[int]:
        """A walk through the map: how much is visited in each step."""
        self._directory.locations.walk += 1
        namespaces = self._directory.blocks
        for namespace in itertools.chain.from_iterable(map(list, namespaces.pieces())):
            blocks = namespaces.get(namespace)
            if blocks is None:
                continue
            for piece in blocks.pieces():
                count = 1 + len(piece)
                self._sweep_piece(namespace, blocks, piece)
                yield count
        yield from self._directory.locations.drop_unused()

    def _sweep_piece(self, namespace: Namespace, blocks: BlockMap, piece: dict[bytes, int]) -> None:
        directory, by_id = self._directory, self._directory.locations.by_id
        after: dict[int, BlockLocations] = {}  # once for each set of locations, not for each block
        before = len(piece)
        # Those of lost inventories have left with the change CLEARED.
        gone: dict[Location, list[bytes]] = {}
        for digest, tag in list(piece.items()):
            id = tag >> MARK_BITS
            kept = after.get(id)
            if kept is None:
                kept = after[id] = directory.locations.unretired(by_id[id])
            if kept.id != id:
                held = by_id[id]
                for one in held.locations:
                    if one not in kept.locations:
                        one.inventory.uncount(digest, one.seed(namespace))
                        if not one.inventory.lost:
                            gone.setdefault(one, []).append(digest)
                if not kept.locations:
                    reason = directory.reason(namespace, digest, held)
                    directory.tombstones.left(namespace, digest, reason)
                directory.put(blocks, namespace, digest, kept)
        for one, digests in gone.items():
            where = one.inventory.server, namespace, one.part, digests
            directory.servers.changes.add_blocks(ChangeKind.REMOVED, *where)
        if len(piece) < before // 2:
            compact(piece)
