"""Pages of a master's whole map, for those who begin to follow it. (design: pool-events)"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import itemgetter
from typing import Final, NamedTuple

import xxhash

from kvpool.master.state.block_map import MARK_BITS
from kvpool.master.state.changes import PAGE_SIZE, ChangeKind, LoggedChange, size_of
from kvpool.master.state.directory import Directory
from kvpool.master.state.locations import Location, LocationTable
from kvpool.master.state.namespace_map import NamespaceMap, in_order
from kvpool.master.state.server_table import ServerTable, gone
from kvpool.types import Namespace

#: Of the number in a `MapCursor`: below the number of a piece the place of a copy in it, which has
#: bits of the hash of the block, and below them of its server and part.
_RANK_BITS: Final = 16
_RANK_MASK: Final = (1 << _RANK_BITS) - 1
_HASH_MASK: Final = (1 << 12) - 1
_PLACE_BITS: Final = 12 + _RANK_BITS
_PLACE_MASK: Final = (1 << _PLACE_BITS) - 1


class MapCursor(NamedTuple):
    """How far a snapshot has come: a namespace, and its next piece and place in that."""

    name: str = ""
    parts: int = 0
    piece: int = 0


def server_page(
    servers: ServerTable, after: str = "", size: int = PAGE_SIZE
) -> tuple[list[LoggedChange], bool]:
    """The servers that have a record and whose names come behind `after`, in order, as changes:
    BACK, and LOST or LEFT if it is gone. About `size` bytes; and whether there are more."""
    found: list[LoggedChange] = []
    for name in sorted(name for name in servers.records if name > after):
        if size <= 0:
            return found, True
        record = servers.records[name]
        host = record.registration.host
        found.append(LoggedChange(ChangeKind.BACK, name, host=host))
        if not record.alive:
            found.append(LoggedChange(gone(record), name))
        size -= 256 + 2 * size_of(name, host)
    return found, False


def snapshot(
    directory: Directory, after: MapCursor, blocks: int, size: int = PAGE_SIZE, seed: int = 0
) -> tuple[list[LoggedChange], MapCursor | None]:
    """What the map has behind `after`, as changes, and where to go on; None: that was all.

    About so many copies of blocks, and bytes of a message. A copy that is here during the whole
    walk is met, perhaps twice (`PiecewiseDict.pieces`). The `seed` is the same for the whole
    walk, and not known to those who choose keys.
    """
    records = directory.servers.records
    found: dict[tuple[Namespace, Location, int], list[bytes]] = {}
    at: MapCursor | None = None
    for namespace, number, piece, first in _pieces_after(in_order(directory), after):
        at = MapCursor(namespace.name, namespace.parts, number << _PLACE_BITS)
        if blocks <= 0 or size <= 0:
            break
        blocks -= 1
        for place, one, digest in _copies(directory.locations, piece, first, seed):
            if blocks <= 0 or size <= 0:
                at = at._replace(piece=number << _PLACE_BITS | place)
                break
            blocks -= 1
            if one.inventory.retired:
                continue
            digests = found.setdefault((namespace, one, len(digest)), [])
            size -= len(digest)
            if not digests:
                tier = records[one.inventory.server].tier_name(one.tier)
                size -= 128 + size_of(namespace.name, one.inventory.server, tier)
            digests.append(digest)
        else:
            at = None
            continue
        break
    return [
        LoggedChange(
            *(ChangeKind.STORED, one.inventory.server, namespace, one.part),
            *(records[one.inventory.server].tier_name(one.tier), length, b"".join(digests)),
        )
        for (namespace, one, length), digests in found.items()
    ], at


def _pieces_after(
    namespaces: NamespaceMap, at: MapCursor
) -> Iterator[tuple[Namespace, int, dict[bytes, int], int]]:
    """The pieces of the map from there on: their namespaces and numbers, and from which place
    in them on. Change nothing meanwhile."""
    number, first = at.piece >> _PLACE_BITS, at.piece & _PLACE_MASK
    here = [Namespace(at.name, at.parts)] if at.name else []
    for namespace in itertools.chain(here, namespaces.after(at.name, at.parts)):
        blocks = namespaces.get(namespace)
        if not here or namespace is not here[0]:
            number = first = 0
        while blocks is not None and (piece := blocks.piece(number)) is not None:
            yield namespace, number, piece, first
            number, first = number + 1, 0


def _copies(
    locations: LocationTable, piece: dict[bytes, int], first: int, seed: int
) -> Iterator[tuple[int, Location, bytes]]:
    """The copies of the blocks in a piece, retired ones too, in order of their places in it,
    from place `first` on.

    A copy has the same place as long as it is here, whatever else comes and goes: by the hash
    of its block, and then by that of its server and part.
    """
    hashed = xxhash.xxh3_64_intdigest
    ranked: dict[int, list[tuple[int, Location]]] = {}  # once for each set of locations
    order = sorted(
        (hashed(digest, seed) & _HASH_MASK, digest, tag >> MARK_BITS)
        for digest, tag in piece.items()
    )
    for number, same in itertools.groupby(order, key=itemgetter(0)):
        if number < first >> _RANK_BITS:
            continue
        copies = []
        for _, digest, id in same:
            if id not in ranked:
                here = locations.by_id[id].locations
                names = [f"{one.inventory.server}/{one.part}".encode() for one in here]
                ranks = [hashed(name, seed) & _RANK_MASK for name in names]
                ranked[id] = list(zip(ranks, here, strict=True))
            copies += [(number << _RANK_BITS | rank, one, digest) for rank, one in ranked[id]]
        copies.sort(key=itemgetter(0))
        yield from (copy for copy in copies if copy[0] >= first)
