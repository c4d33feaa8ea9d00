"""What an NVMe tier's file contains, byte for byte. Pure: bytes to values and back, no I/O.

    superblock, twice | namespaces, one page each | group | group | ...
                              a group: headers, HEADER_SIZE for each grain | payload, GROUP_SIZE

The payload is counted in *grains*, the tier's alignment. Each grain has a place for one header, and
an extent is described by the header of its first grain. So a header is found from an offset by
arithmetic, all of them by reading the headers in sequence, and the payload stays aligned. A place
without a header is zero, as a new file is.

Groups make a file that grows or shrinks keep its contents where they are: nothing in it depends on
its capacity. An extent may reach over the end of its group; then it lies in two pieces.

Whatever is read here may be rotten. Every value carries a sum of its own, a header its offset and a
hash of its namespace as well, so one that lies in a wrong place or refers to a namespace that was
replaced is no header. Integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvpool.checksum import checksum, namespace_seed
from kvpool.errors import ConfigError, KvpoolError
from kvpool.types import DIGEST_SIZE_MAX, Namespace, Record

PAGE: Final = 4096
VERSION: Final = 1
HEADER_SIZE: Final = 128
#: Payload bytes of one group, whose headers are read at once: 2 MiB with the smallest grain.
GROUP_SIZE: Final = 64 << 20
GRAIN_MIN: Final = PAGE
GRAIN_MAX: Final = 1 << 20
#: Namespaces that have extents at the same time. More are served, but not found after a restart.
NAMESPACES: Final = 1022

SUPERBLOCK_SIZE: Final = 2 * PAGE
_HEAD_SIZE: Final = SUPERBLOCK_SIZE + NAMESPACES * PAGE

_SUPERBLOCK: Final = struct.Struct("<8sIIQQ")  # magic, version, header size, grain, group size
_SUPERBLOCK_MAGIC: Final = b"\x93kvpool\n"  # not text: no editor and no copy in text mode keeps it
_NAMESPACE: Final = struct.Struct("<8sHH")  # magic, parts, bytes of the name
_NAMESPACE_MAGIC: Final = b"kvpnames"
#: magic, digest, parent, their sizes, namespace, part, offset, size, checksum, generation, hash of
#: the namespace
_HEADER: Final = struct.Struct("<8s32s32sBBHIQQQQQ")
_HEADER_MAGIC: Final = b"kvpextn1"
_SUM: Final = struct.Struct("<Q")

assert _HEADER.size + _SUM.size == HEADER_SIZE


class Piece(NamedTuple):
    """Bytes `start` to `stop` of an extent, and where they lie in the file."""

    position: int
    start: int
    stop: int


class Region(NamedTuple):
    """The headers of one group: `size` bytes, the first for the grain at `offset`."""

    position: int
    size: int
    offset: int


class Geometry:
    """Where things are in a file for `capacity` bytes of payload."""

    __slots__ = ("_group_size", "_headers_size", "capacity", "file_size", "grain")

    def __init__(self, capacity: int, grain: int) -> None:
        self.capacity = capacity
        self.grain = grain
        self._headers_size = GROUP_SIZE // grain * HEADER_SIZE
        self._group_size = self._headers_size + GROUP_SIZE
        groups = -(-capacity // GROUP_SIZE)
        #: About 1/32 more than the capacity with the smallest grain.
        self.file_size = _HEAD_SIZE + groups * self._headers_size + capacity

    def pieces(self, offset: int, size: int) -> list[Piece]:
        """The extent's bytes: one piece, or one for each group that it reaches into."""
        pieces = []
        start = 0
        while start < size:
            number, inside = divmod(offset + start, GROUP_SIZE)
            stop = min(size, start + GROUP_SIZE - inside)
            position = _HEAD_SIZE + number * self._group_size + self._headers_size + inside
            pieces.append(Piece(position, start, stop))
            start = stop
        return pieces

    def header(self, offset: int) -> int:
        """The position of the header of an extent that starts at `offset`."""
        number, inside = divmod(offset, GROUP_SIZE)
        return _HEAD_SIZE + number * self._group_size + inside // self.grain * HEADER_SIZE

    def regions(self) -> Iterator[Region]:
        """All headers, in the order of their offsets."""
        for offset in range(0, self.capacity, GROUP_SIZE):
            grains = min(GROUP_SIZE, self.capacity - offset) // self.grain
            yield Region(self.header(offset), grains * HEADER_SIZE, offset)

    @staticmethod
    def namespace(index: int) -> int:
        """The position of the namespace with this number."""
        return SUPERBLOCK_SIZE + index * PAGE


# --- superblock --------------------------------------------------------------------------


def pack_superblock(grain: int) -> bytes:
    """Both copies. They are written once, when the file is made, and never again."""
    body = _SUPERBLOCK.pack(_SUPERBLOCK_MAGIC, VERSION, HEADER_SIZE, grain, GROUP_SIZE)
    return _summed(body) * 2


def check_superblock(head: bytes, grain: int) -> bool:
    """False when a copy is damaged. Raises ConfigError unless the file is ours and fits `grain`.

    Our mark in one copy is enough: what a damaged file contains is believed piece by piece anyway.
    """
    copies = [head[start : start + PAGE] for start in (0, PAGE)]
    ours = [copy for copy in copies if copy.startswith(_SUPERBLOCK_MAGIC)]
    if not ours:
        raise ConfigError(
            "is not empty and no file of an NVMe tier, so it is left alone: "
            "name another, or remove it"
        )
    intact = [copy for copy in ours if _is_intact(copy)]
    for copy in intact:
        _, version, header_size, written_grain, group_size = _SUPERBLOCK.unpack_from(copy)
        if (version, header_size, group_size) != (VERSION, HEADER_SIZE, GROUP_SIZE):
            raise ConfigError(
                f"was written by version {version} of the format, this is version {VERSION}: "
                "remove it to start empty"
            )
        if written_grain != grain:
            raise ConfigError(
                f"was made with alignment {written_grain}, not {grain}: "
                "set that, or remove it to start empty"
            )
    return len(intact) == len(copies)


# --- namespaces --------------------------------------------------------------------------


def pack_namespace(namespace: Namespace) -> bytes:
    """One page."""
    name = namespace.name.encode()
    return _summed(_NAMESPACE.pack(_NAMESPACE_MAGIC, namespace.parts, len(name)) + name)


def unpack_namespace(page: bytes) -> Namespace | None:
    """None where there is none, or a damaged one."""
    if not page.startswith(_NAMESPACE_MAGIC) or not _is_intact(page):
        return None
    _, parts, size = _NAMESPACE.unpack_from(page)
    try:
        return Namespace(page[_NAMESPACE.size : _NAMESPACE.size + size].decode(), parts)
    except (KvpoolError, UnicodeDecodeError):
        return None


def _summed(body: bytes) -> bytes:
    page = body.ljust(PAGE - _SUM.size, b"\0")
    return page + _SUM.pack(checksum(page, 0))


def _is_intact(page: bytes) -> bool:
    body, sum_ = page[: -_SUM.size], page[-_SUM.size :]
    return len(page) == PAGE and sum_ == _SUM.pack(checksum(body, 0))


# --- headers -----------------------------------------------------------------------------


def pack_header(record: Record, name: int, seed: int) -> bytes:
    """The header of an extent whose namespace has the number `name`, and its part this `seed`."""
    body = _HEADER.pack(
        _HEADER_MAGIC,
        record.digest,
        record.parent,
        len(record.digest),
        len(record.parent),
        name,
        record.part,
        record.offset,
        record.size,
        record.checksum,
        record.generation,
        seed,
    )
    return body + _SUM.pack(checksum(body, 0))


class Named(NamedTuple):
    """A namespace of the file, and the seed that headers of each of its parts carry."""

    namespace: Namespace
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, namespace: Namespace) -> Named:
        return cls(namespace, tuple(namespace_seed(namespace, n) for n in range(namespace.parts)))


class Found(NamedTuple):
    """A header that verifies, and the number of its namespace."""

    record: Record
    name: int


class Bad(NamedTuple):
    """What is no header, though something is there: at which offset, and what is wrong."""

    offset: int
    reason: str


def used_places(headers: memoryview) -> list[int]:
    """The numbers of the places in a region that are not zero."""
    rows = np.frombuffer(headers, np.uint64).reshape(-1, HEADER_SIZE // 8)
    used: list[int] = np.flatnonzero(rows.any(axis=1)).tolist()
    return used


def unpack_header(
    headers: memoryview, place: int, offset: int, capacity: int, names: Sequence[Named | None]
) -> Found | Bad:
    """The header at `place` of a region; it must describe the extent at `offset`."""
    start = place * HEADER_SIZE
    end = start + _HEADER.size
    if _SUM.unpack_from(headers, end)[0] != checksum(headers[start:end], 0):
        return Bad(offset, "damaged")
    values = _HEADER.unpack_from(headers, start)
    magic, digest, parent, digest_size, parent_size, index, part, claimed, *rest = values
    size, sum_, generation, seed = rest
    if magic != _HEADER_MAGIC or claimed != offset or max(digest_size, parent_size) > len(digest):
        return Bad(offset, "misplaced")
    if not 0 < size <= capacity - offset:
        return Bad(offset, "beyond")
    named = names[index] if index < len(names) else None
    if named is None or part >= len(named.seeds) or named.seeds[part] != seed:
        return Bad(offset, "unnamed")
    namespace = named.namespace
    digest, parent = digest[:digest_size], parent[:parent_size]
    return Found(
        Record(namespace, part, digest, parent, offset, size, sum_, generation),
        index,
    )


class Survivors:
    """Of extents that come in the order of their offsets, those that no newer one lies over.

    A newer one has overwritten an older one also where it was overwritten itself since, so all of
    them are compared. `kept` is complete after `finish`.
    """

    def __init__(self) -> None:
        self.kept: list[Record] = []
        self.beaten: list[Bad] = []
        self._open: list[Record] = []  # reaching to where we are: nearly always one
        self._losers: set[int] = set()  # their offsets

    def add(self, record: Record) -> None:
        """The next one."""
        still = []
        for other in self._open:
            if other.offset + other.size <= record.offset:
                self._settle(other)
            else:
                older = other if other.generation < record.generation else record
                self._losers.add(older.offset)
                still.append(other)
        still.append(record)
        self._open = still

    def finish(self) -> None:
        """There are no more."""
        for record in self._open:
            self._settle(record)
        self._open = []

    def _settle(self, record: Record) -> None:
        if record.offset in self._losers:
            self._losers.discard(record.offset)
            self.beaten.append(Bad(record.offset, "overlapped"))
        else:
            self.kept.append(record)


def is_storable(record: Record, geometry: Geometry) -> bool:
    """Its fields fit into a header, and its extent into the file."""
    return (
        0 <= record.offset < geometry.capacity
        and record.offset % geometry.grain == 0
        and 0 < record.size <= geometry.capacity - record.offset
        and 0 <= record.part < record.namespace.parts
        and len(record.digest) <= DIGEST_SIZE_MAX
        and len(record.parent) <= DIGEST_SIZE_MAX
        and 0 <= record.checksum < 1 << 64
        and 0 <= record.generation < 1 << 64
    )
