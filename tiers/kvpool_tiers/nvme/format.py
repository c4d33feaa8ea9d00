"""What an NVMe tier's file contains, byte for byte. Pure: bytes to values and back, no I/O.

    superblock, twice | namespaces, one page each | the same again | group | group | ...
                              a group: headers, HEADER_SIZE for each unit | payload, GROUP_SIZE

The payload is counted in *allocation units* of `alignment` bytes. Each unit has a slot for one
header, and an extent is described by the header of its first unit. So the header of an extent is
found by arithmetic, all headers by reading the slots in sequence, and the payload stays aligned. An
empty slot is zero, as in a new file.

Groups let a file grow or shrink while its contents stay where they are: no position depends on the
capacity. An extent that reaches over the end of its group lies in two pieces.
(design: nvme-format)

Nothing that is read here is trusted. Every value carries its own checksum, a namespace its number,
a header its offset and a hash of its namespace as well: one that lies in a wrong slot, or refers to
a namespace that was replaced, is not valid. What all blocks depend on, or all blocks of a
namespace, is there twice; of two intact copies the one of the higher generation counts. Integers
are little-endian. (design: nvme-format)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvpool.checksum import checksum, namespace_seed
from kvpool.errors import ConfigError, KvpoolError
from kvpool.protocols.persistent_tier import Record
from kvpool.types import COPIES_MAX, DIGEST_SIZE_MAX, Namespace

PAGE: Final = 4096
VERSION: Final = 2
HEADER_SIZE: Final = 128
#: Of an encrypted file: a header, what is needed to decrypt its extent, and what to decrypt these.
SEALED_HEADER_SIZE: Final = 256
#: Payload bytes of one group, whose headers are read at once: 2 MiB with the smallest alignment.
GROUP_SIZE: Final = 64 << 20
ALIGNMENT_MIN: Final = PAGE
ALIGNMENT_MAX: Final = 1 << 20
#: Namespaces that have extents at the same time. Blocks of further ones are served, but not found
#: after a restart.
NAMESPACES: Final = 1023
#: Of the superblock, and of the page of each namespace.
COPIES: Final = 2

SUPERBLOCK_SIZE: Final = COPIES * PAGE
_HEAD_SIZE: Final = SUPERBLOCK_SIZE + COPIES * NAMESPACES * PAGE

#: magic, version, header size, alignment, group size, owner (zeros: none, as in older files)
_SUPERBLOCK: Final = struct.Struct("<8sIIQQ16s")
#: Of a file that no server has claimed.
NO_OWNER: Final = bytes(16)
_SUPERBLOCK_MAGIC: Final = b"\x93kvpool\n"  # not text: no editor and no copy in text mode keeps it
#: magic, number, generation, parts, bytes of the name
_NAMESPACE: Final = struct.Struct("<8sIQHH")
_NAMESPACE_MAGIC: Final = b"kvpnames"
#: magic, digest, parent, their sizes, namespace, part, offset, size, checksum, generation, hash of
#: the namespace
_HEADER: Final = struct.Struct("<8s32s32sBBHIQQQQQ")
_HEADER_MAGIC: Final = b"kvpextn1"
#: The sizes of digest and parent take the lower bits of their bytes. The upper two of each are the
#: number of copies, less one: 0 for one copy, as in headers that were written without it.
_SIZE_BITS: Final = 6
_SIZE_MASK: Final = (1 << _SIZE_BITS) - 1
_SUM: Final = struct.Struct("<Q")

assert _HEADER.size + _SUM.size == HEADER_SIZE


class FilePiece(NamedTuple):
    """Bytes `start` to `stop` of an extent, and where they lie in the file."""

    position: int
    start: int
    stop: int


class HeaderRegion(NamedTuple):
    """The headers of one group: `size` bytes, the first of the unit at `offset`."""

    position: int
    size: int
    offset: int


class Geometry:
    """The positions of everything in a file for `capacity` bytes of payload; all in bytes."""

    __slots__ = (
        *("_group_size", "_headers_size"),
        *("alignment", "capacity", "file_size", "header_size"),
    )

    def __init__(self, capacity: int, alignment: int, header_size: int = HEADER_SIZE) -> None:
        self.capacity = capacity
        self.alignment = alignment
        self.header_size = header_size
        self._headers_size = GROUP_SIZE // alignment * header_size
        self._group_size = self._headers_size + GROUP_SIZE
        groups = -(-capacity // GROUP_SIZE)
        #: About 1/32 more than the capacity with the smallest alignment; encrypted, 1/16.
        self.file_size = _HEAD_SIZE + groups * self._headers_size + capacity

    @classmethod
    def of_file(cls, size: int, alignment: int, header_size: int = HEADER_SIZE) -> Geometry:
        """That of a file of so many bytes."""
        group = cls(GROUP_SIZE, alignment, header_size)
        groups, rest = divmod(max(size - _HEAD_SIZE, 0), group._group_size)
        capacity = groups * GROUP_SIZE + max(rest - group._headers_size, 0)
        return cls(capacity - capacity % alignment, alignment, header_size)

    def pieces(self, offset: int, size: int) -> list[FilePiece]:
        """The extent's bytes: one piece, or one for each group that it reaches into."""
        pieces = []
        start = 0
        while start < size:
            number, inside = divmod(offset + start, GROUP_SIZE)
            stop = min(size, start + GROUP_SIZE - inside)
            position = _HEAD_SIZE + number * self._group_size + self._headers_size + inside
            pieces.append(FilePiece(position, start, stop))
            start = stop
        return pieces

    def header(self, offset: int) -> int:
        """The position of the header of an extent that starts at `offset`."""
        number, inside = divmod(offset, GROUP_SIZE)
        return _HEAD_SIZE + number * self._group_size + inside // self.alignment * self.header_size

    def regions(self) -> Iterator[HeaderRegion]:
        """All headers, in the order of their offsets."""
        for offset in range(0, self.capacity, GROUP_SIZE):
            units = min(GROUP_SIZE, self.capacity - offset) // self.alignment
            yield HeaderRegion(self.header(offset), units * self.header_size, offset)

    def unused_headers(self) -> HeaderRegion:
        """The slots of the last group that no unit has, because the group is not whole."""
        units = -self.capacity % GROUP_SIZE // self.alignment
        return HeaderRegion(self.header(self.capacity), units * self.header_size, self.capacity)

    @staticmethod
    def namespace(index: int, copy: int) -> int:
        """The position of one copy of the namespace with this number."""
        return SUPERBLOCK_SIZE + (copy * NAMESPACES + index) * PAGE


# --- superblock --------------------------------------------------------------------------


def pack_superblock(
    alignment: int, owner: bytes = NO_OWNER, header_size: int = HEADER_SIZE
) -> bytes:
    """Both copies. They are written when the file is made, and once more with its owner."""
    body = _SUPERBLOCK.pack(_SUPERBLOCK_MAGIC, VERSION, header_size, alignment, GROUP_SIZE, owner)
    return _summed(body) * COPIES


def check_superblock(
    head: bytes, alignment: int, owner: bytes = NO_OWNER, wanted_size: int = HEADER_SIZE
) -> bool:
    """False when a copy is damaged, or does not name `owner` yet. Raises ConfigError if the file is
    not ours, not so aligned, has no headers of `wanted_size`, or is another one's.

    Our mark in one copy is enough: everything else in the file is verified by itself anyway.
    """
    copies = [head[start : start + PAGE] for start in range(0, SUPERBLOCK_SIZE, PAGE)]
    ours = [copy for copy in copies if copy.startswith(_SUPERBLOCK_MAGIC)]
    if not ours:
        raise ConfigError(
            "is not empty and is not the file of an NVMe tier, so it is not changed: "
            "name another, or remove it"
        )
    intact = [copy for copy in ours if _is_intact(copy)]
    named = True
    for copy in intact:
        _, version, header_size, written_alignment, group_size, written_owner = (
            _SUPERBLOCK.unpack_from(copy)
        )
        known = header_size in (HEADER_SIZE, SEALED_HEADER_SIZE)
        if (version, known, group_size) != (VERSION, True, GROUP_SIZE):
            raise ConfigError(
                f"was written by version {version} of the format, this is version {VERSION}: "
                "remove it to start empty"
            )
        if header_size != wanted_size:
            encrypted = header_size == SEALED_HEADER_SIZE
            raise ConfigError(
                f"is {'' if encrypted else 'not '}encrypted: set encrypt="
                f"{'yes' if encrypted else 'no'}, or remove it to start empty"
            )
        if written_alignment != alignment:
            raise ConfigError(
                f"was made with alignment {written_alignment}, not {alignment}: "
                "set that, or remove it to start empty"
            )
        if owner != NO_OWNER and written_owner == NO_OWNER:
            named = False
        elif owner not in (NO_OWNER, written_owner):
            raise ConfigError(
                "belongs to another cluster, or to this one under another secret, so none of its "
                "blocks is served: name another, or remove it to start empty"
            )
    return named and len(intact) == len(copies)


def is_damaged(head: bytes) -> bool:
    """Whether a copy is not intact."""
    return not all(
        _is_intact(head[start : start + PAGE]) for start in range(0, SUPERBLOCK_SIZE, PAGE)
    )


# --- namespaces --------------------------------------------------------------------------


class NamespacePage(NamedTuple):
    """One copy of a namespace's page. The higher generation is the one written last."""

    namespace: Namespace
    generation: int


def pack_namespace(page: NamespacePage, index: int) -> bytes:
    """The page of the namespace with this number; both copies are alike."""
    name = page.namespace.name.encode()
    fields = index, page.generation, page.namespace.parts, len(name)
    return _summed(_NAMESPACE.pack(_NAMESPACE_MAGIC, *fields) + name)


def unpack_namespace(page: bytes, index: int) -> NamespacePage | None:
    """None for a page without a namespace, with a damaged one, or with that of another number."""
    if not page.startswith(_NAMESPACE_MAGIC) or not _is_intact(page):
        return None
    _, number, generation, parts, size = _NAMESPACE.unpack_from(page)
    if number != index:
        return None
    try:
        name = page[_NAMESPACE.size : _NAMESPACE.size + size].decode()
        return NamespacePage(Namespace(name, parts), generation)
    except (KvpoolError, UnicodeDecodeError):
        return None


def _summed(body: bytes) -> bytes:
    page = body.ljust(PAGE - _SUM.size, b"\0")
    return page + _SUM.pack(checksum(page, 0))


def _is_intact(page: bytes) -> bool:
    body, sum_ = page[: -_SUM.size], page[-_SUM.size :]
    return len(page) == PAGE and sum_ == _SUM.pack(checksum(body, 0))


# --- headers -----------------------------------------------------------------------------


def pack_header(record: Record, namespace_index: int, seed: int) -> bytes:
    """The header of an extent whose namespace has this number, and its part this seed."""
    body = _HEADER.pack(
        _HEADER_MAGIC,
        record.digest,
        record.parent,
        len(record.digest) | (record.copies - 1 & 3) << _SIZE_BITS,
        len(record.parent) | (record.copies - 1 >> 2) << _SIZE_BITS,
        namespace_index,
        record.part,
        record.offset,
        record.size,
        record.checksum,
        record.generation,
        seed,
    )
    return body + _SUM.pack(checksum(body, 0))


class ExtentSeal(NamedTuple):
    """What is needed to read the `size` encrypted bytes of an extent (`encryption.py`)."""

    salt: bytes
    nonce: int
    size: int
    tag: bytes


SALT_SIZE: Final = 32
TAG_SIZE: Final = 16
#: Of an extent that was never written.
NO_SEAL: Final = ExtentSeal(bytes(SALT_SIZE), 0, 0, bytes(TAG_SIZE))


class NamespaceEntry(NamedTuple):
    """A namespace of the file, and the seed that headers of each of its parts carry."""

    namespace: Namespace
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, namespace: Namespace) -> NamespaceEntry:
        return cls(namespace, tuple(namespace_seed(namespace, n) for n in range(namespace.parts)))


class ValidHeader(NamedTuple):
    """A header whose checksum, offset and namespace are right, and its namespace's number."""

    record: Record
    namespace_index: int


class UnnamedHeader(NamedTuple):
    """A valid header whose namespace has no intact page: nobody can ask for its block now.

    It stays in the file, because the block is whole, and the page may be mended.
    """

    offset: int
    size: int
    generation: int
    namespace_index: int
    seed: int


class InvalidHeader(NamedTuple):
    """A slot that is not empty but has no valid header: which offset, and what is wrong.

    `damaged` (checksum), `misplaced` (another offset), `beyond` (the capacity), `replaced` (the
    namespace of that number is another one now), `overlapped` (a newer extent lies over it),
    `altered` (it does not decrypt).
    """

    offset: int
    reason: str


def used_slots(headers: memoryview, header_size: int = HEADER_SIZE) -> list[int]:
    """The numbers of the slots in a region that are not empty."""
    rows = np.frombuffer(headers, np.uint64).reshape(-1, header_size // 8)
    used: list[int] = np.flatnonzero(rows.any(axis=1)).tolist()
    return used


def unpack_header(
    headers: memoryview,
    slot: int,
    offset: int,
    capacity: int,
    namespaces: Sequence[NamespaceEntry | None],
) -> ValidHeader | UnnamedHeader | InvalidHeader:
    """The header in `slot` of a region, which must describe the extent at `offset`.

    `namespaces[n]` is the namespace with number n, None without an intact page. Never raises,
    whatever the slot contains.
    """
    start = slot * HEADER_SIZE
    end = start + _HEADER.size
    if _SUM.unpack_from(headers, end)[0] != checksum(headers[start:end], 0):
        return InvalidHeader(offset, "damaged")
    values = _HEADER.unpack_from(headers, start)
    magic, digest, parent, digest_size, parent_size, index, part, claimed, *rest = values
    copies = (digest_size >> _SIZE_BITS) + (parent_size >> _SIZE_BITS << 2) + 1
    digest_size, parent_size = digest_size & _SIZE_MASK, parent_size & _SIZE_MASK
    size, sum_, generation, seed = rest
    if magic != _HEADER_MAGIC or claimed != offset or max(digest_size, parent_size) > len(digest):
        return InvalidHeader(offset, "misplaced")
    if not 0 < size <= capacity - offset:
        return InvalidHeader(offset, "beyond")
    if index >= len(namespaces):
        return InvalidHeader(offset, "misplaced")
    entry = namespaces[index]
    if entry is None:
        return UnnamedHeader(offset, size, generation, index, seed)
    if part >= len(entry.seeds) or entry.seeds[part] != seed:
        return InvalidHeader(offset, "replaced")
    namespace = entry.namespace
    digest, parent = digest[:digest_size], parent[:parent_size]
    return ValidHeader(
        Record(namespace, part, digest, parent, offset, size, sum_, generation, copies),
        index,
    )


class OverlapResolver:
    """Drops extents that a newer one lies over; extents are added in the order of their offsets.

    A newer extent has overwritten an older one even if it was itself overwritten since, so all
    that overlap are compared. `kept` and `superseded` are complete after `finish`.
    """

    def __init__(self) -> None:
        self.kept: list[Record | UnnamedHeader] = []
        self.superseded: list[InvalidHeader] = []
        #: They reach to the last offset added: nearly always one.
        self._open: list[Record | UnnamedHeader] = []
        self._superseded: set[int] = set()  # offsets of extents that have lost a comparison

    def add(self, record: Record | UnnamedHeader) -> None:
        """The next extent."""
        still = []
        for other in self._open:
            if other.offset + other.size <= record.offset:
                self._resolve(other)
            else:
                older = other if other.generation < record.generation else record
                self._superseded.add(older.offset)
                still.append(other)
        still.append(record)
        self._open = still

    def finish(self) -> None:
        """There are no more extents."""
        for record in self._open:
            self._resolve(record)
        self._open = []

    def _resolve(self, record: Record | UnnamedHeader) -> None:
        if record.offset in self._superseded:
            self._superseded.discard(record.offset)
            self.superseded.append(InvalidHeader(record.offset, "overlapped"))
        else:
            self.kept.append(record)


def is_storable(record: Record, geometry: Geometry) -> bool:
    """Whether its fields fit into a header, and its extent into the file."""
    return (
        0 <= record.offset < geometry.capacity
        and record.offset % geometry.alignment == 0
        and 0 < record.size <= geometry.capacity - record.offset
        and 0 <= record.part < record.namespace.parts
        and len(record.digest) <= DIGEST_SIZE_MAX
        and len(record.parent) <= DIGEST_SIZE_MAX
        and 0 <= record.checksum < 1 << 64
        and 0 <= record.generation < 1 << 64
        and 1 <= record.copies <= COPIES_MAX
    )
