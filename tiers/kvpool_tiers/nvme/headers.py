"""Which extents of a file have a header, and of which namespace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvpool.protocols.persistent_tier import Record
from kvpool_tiers.nvme.format import Geometry
from kvpool_tiers.nvme.namespaces import NamespaceTable, UnnamedExtents

#: Headers of neighbours are written at once when no more zeros than this lie between them.
_GAP_MAX: Final = 4096


class Headers:
    """The table of namespaces, and its use by each extent that has a header."""

    def __init__(self, path: str) -> None:
        self.table = NamespaceTable(path)
        self.unnamed = UnnamedExtents()
        self._namespace_of: dict[int, int] = {}  # by offset: its number

    def __contains__(self, offset: int) -> bool:
        return offset in self._namespace_of

    def refer(self, offset: int, number: int) -> None:
        """The extent at `offset` has a header of this namespace from now on."""
        self.unnamed.discard(offset)
        before = self._namespace_of.get(offset)
        if before != number:
            self.table.use(before, -1)
            self.table.use(number, +1)
            self._namespace_of[offset] = number

    def forget(self, offset: int) -> None:
        """It has none any more."""
        self.table.use(self._namespace_of.pop(offset, None), -1)
        self.unnamed.discard(offset)


def runs_of(
    geometry: Geometry, headers: Sequence[tuple[Record, bytes]]
) -> Iterator[tuple[int, bytes]]:
    """Headers and their positions. Those of neighbouring small extents are written at once.

    The slots between them are inside the first extent, where no other can start: zeros.
    """
    run = bytearray()
    at = end = 0  # where the run begins, and the offset behind its last extent
    for record, header in headers:
        position = geometry.header(record.offset)
        gap = position - at - len(run)
        if run and record.offset == end and 0 <= gap <= _GAP_MAX:
            run += bytes(gap)
        else:
            if run:
                yield at, bytes(run)
            run.clear()
            at = position
        run += header
        end = record.offset + -(-record.size // geometry.alignment) * geometry.alignment
    if run:
        yield at, bytes(run)
