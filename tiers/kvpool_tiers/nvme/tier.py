"""NVMe: one preallocated file that records what its bytes mean.

`format.py` says what lies where, `file_disk.py` reads and writes. This file has the order of
writes: the payload first, then its header (`persist`); the header is erased (`erase`) before the
payload is overwritten. So after kill -9 everything that returned is there: the kernel has it. A
*power cut* may lose the last seconds: headers wait in the page cache, payload in the disk's own
cache. Then a header is missing (a miss), or it is there without all of its bytes, which the
reader's checksum finds (a miss). Never wrong bytes. (design: nvme-format)

An error of the disk fails the call that met it, and nothing else: the server decides whether to go
on with such a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvpool import logs
from kvpool.checksum import namespace_seed
from kvpool.errors import Closed, ConfigError, Unavailable, UsageError
from kvpool.types import Namespace, Record
from kvpool_tiers.nvme.file_disk import Disk, FileDisk, read_pages
from kvpool_tiers.nvme.format import (
    ALIGNMENT_MAX,
    ALIGNMENT_MIN,
    COPIES,
    HEADER_SIZE,
    PAGE,
    Geometry,
    HeaderRegion,
    InvalidHeader,
    NamespaceEntry,
    OverlapResolver,
    UnnamedHeader,
    ValidHeader,
    check_superblock,
    is_storable,
    pack_header,
    pack_superblock,
    unpack_header,
    used_slots,
)
from kvpool_tiers.nvme.namespaces import NamespaceTable, UnnamedExtents

log = logs.get("kvpool.nvme")

#: Extents up to here are padded to whole pages in a copy: cheaper than a second write.
_PAD_COPY_MAX: Final = 64 << 10
#: Headers of neighbours are written at once when no more zeros than this lie between them.
_GAP_MAX: Final = 4096
#: Regions of headers that `recover` reads at once: 8 MiB.
_REGIONS_AT_ONCE: Final = 4
#: Headers that are parsed before other coroutines have their turn: about a millisecond.
_YIELD_EVERY: Final = 128
#: Headers that are erased at once.
_ERASED_MAX: Final = 1024


class Nvme:
    """`capacity` bytes of one file, which is about 1/32 larger (`disk_size`)."""

    name = "nvme"
    survives_restart = True

    def __init__(
        self,
        capacity: int,
        path: Path | str,
        *,
        queue_depth: int = 16,
        direct: bool = True,
        alignment: int = ALIGNMENT_MIN,
        disk: Disk | None = None,
    ) -> None:
        """Open the file at `path`, or make it where there is none; its directory must exist.

        A file of another capacity keeps what lies within the new one, and grows or shrinks. Only an
        empty file or one of ours is ever written to. With `direct` the payload goes past the page
        cache, if the file system can; `status_text` has the result. `queue_depth` threads read and
        write. A larger `alignment` (bytes, a power of two) makes the headers fewer; choose it close
        to the smallest block, it is fixed for the life of the file. With `disk` that one is used,
        and `path` is only its name. Raises ConfigError.
        """
        if alignment & (alignment - 1) or not ALIGNMENT_MIN <= alignment <= ALIGNMENT_MAX:
            raise ConfigError(
                f"alignment is {alignment}, expected a power of two from "
                f"{ALIGNMENT_MIN} to {ALIGNMENT_MAX}"
            )
        self.alignment = alignment
        self.capacity = max(capacity - capacity % alignment, alignment)
        self.path = Path(path)
        self.queue_depth = queue_depth
        self._geometry = Geometry(self.capacity, alignment)
        self._simulated = disk is not None
        self._disk = disk if disk is not None else self._open(direct)
        if self._disk.size < self._geometry.file_size:
            raise ConfigError(
                f"{path} has {self._disk.size} bytes, "
                f"capacity {self.capacity} needs {self._geometry.file_size}"
            )
        self._table = NamespaceTable(str(path))
        self._unnamed = UnnamedExtents()
        self._namespace_of: dict[int, int] = {}  # offset of an extent with a header -> its number
        #: Headers that `recover` dropped, by reason: see `InvalidHeader` and `NamespaceTable.lost`.
        #: `unreadable` counts a whole region of headers as one.
        self.dropped: Counter[str] = Counter()
        #: Records that `persist` left out since the file was opened: the table of namespaces was
        #: full.
        self.not_persisted = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Nvme {self.path}, {self.capacity} bytes, {self._disk.mode}>"

    @staticmethod
    def disk_size(capacity: int, alignment: int = ALIGNMENT_MIN) -> int:
        """How many bytes a disk must have for a tier of this capacity."""
        return Geometry(max(capacity - capacity % alignment, alignment), alignment).file_size

    @property
    def mode(self) -> str:
        """`O_DIRECT`, or `buffered` where the file system refuses that."""
        return self._disk.mode

    @property
    def status_text(self) -> str:
        """Its path, how it is accessed, and what it could not keep: for `kvpool status`."""
        parts = [str(self.path), self._disk.mode]
        parts += [f"{count} {reason} headers dropped" for reason, count in self.dropped.items()]
        if self._table.mended:
            parts.append(f"{self._table.mended} pages mended")
        if self.not_persisted:
            parts.append(f"{self.not_persisted} blocks not kept for a restart")
        return ", ".join(parts)

    def close(self) -> None:
        """Take no more calls. Never waits: calls on a stuck disk keep the file until they end."""
        self._closed = True
        self._disk.close()

    # --- bytes -----------------------------------------------------------------------------

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; without a copy if its memory is aligned to PAGE, as the offset is.

        On a stuck disk it does not end, not even when it is cancelled: the disk may still write
        into the buffer. A caller that must go on runs it in a task of its own. (design: disks)
        """
        self._check(offset, len(buffer))
        for position, start, stop in self._geometry.pieces(offset, len(buffer)):
            await self._disk.read(position, buffer[start:stop])

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        """Store `buffer`, in whole pages. On a stuck disk it does not end, like `read_into`."""
        self._check(offset, len(buffer))
        if self._unnamed and (over := self._unnamed.within(offset, len(buffer))):
            await self.erase(over)  # before their payload is overwritten, as for any extent
        for position, start, stop in self._geometry.pieces(offset, len(buffer)):
            await self._write_pages(position, buffer[start:stop])

    async def _write_pages(self, position: int, buffer: memoryview) -> None:
        whole = len(buffer) - len(buffer) % PAGE
        if whole < len(buffer) <= _PAD_COPY_MAX:
            whole = 0
        if whole:
            await self._disk.write(position, buffer[:whole])
        if rest := buffer[whole:]:
            padded = bytearray(-(-len(rest) // PAGE) * PAGE)
            padded[: len(rest)] = rest
            await self._disk.write(position + whole, memoryview(padded))

    # --- what they mean ----------------------------------------------------------------------

    async def persist(self, records: Sequence[Record]) -> None:
        """Once it has returned, `recover` finds these records after kill -9. (design: nvme-format)

        A record whose namespace has no room in the table is left out and counted in
        `not_persisted`.
        """
        self._check_open()
        for record in records:
            if not is_storable(record, self._geometry):
                raise UsageError(f"{record} cannot be stored in {self!r}")
        newest = {record.offset: record for record in sorted(records, key=_generation)}
        headers: list[tuple[Record, bytes]] = []
        seeds: dict[tuple[Namespace, int], int] = {}
        for number, (offset, record) in enumerate(sorted(newest.items())):
            if number % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
            index = await self._table.number(self._disk, record.namespace)
            if index is None:
                self.not_persisted += 1
                continue
            self._reference(offset, index)
            key = record.namespace, record.part
            if (seed := seeds.get(key)) is None:
                seed = seeds[key] = namespace_seed(*key)
            headers.append((record, pack_header(record, index, seed)))
        await _all(self._disk.write(at, memoryview(run)) for at, run in self._runs(headers))

    async def erase(self, offsets: Sequence[int]) -> None:
        """`recover` does not find these extents any more. Slots that are empty are written, too."""
        self._check_open()
        for offset in offsets:
            if offset % self.alignment or not 0 <= offset < self.capacity:
                raise UsageError(f"no extent can start at {offset} of {self!r}")
        nothing = memoryview(bytes(HEADER_SIZE))
        await _all(self._disk.write(self._geometry.header(o), nothing) for o in offsets)
        for offset in offsets:
            self._table.use(self._namespace_of.pop(offset, None), -1)
            self._unnamed.discard(offset)

    async def recover(self) -> Sequence[Record]:
        """The records that were persisted and whose headers are valid. (design: recovery)

        Reads the headers only, not the payload, and lets other coroutines run every millisecond.
        What it drops is counted in `dropped`, and erased, so that it does not come back later; but
        for extents without a namespace, whose headers stay until something is written over them.
        Raises Unavailable when the superblock, the namespaces or all headers cannot be read,
        ConfigError if the disk that was given to this tier is not one of ours.
        """
        self._check_open()
        await self._recover_superblock()
        namespaces = await self._table.recover(self._disk)
        resolver = OverlapResolver()
        invalid: list[InvalidHeader] = []
        regions = self._geometry.regions()
        problem: BaseException | None = None
        read_any = False
        while ahead := list(islice(regions, _REGIONS_AT_ONCE)):
            read = await asyncio.gather(*map(self._read_region, ahead), return_exceptions=True)
            for region, headers in zip(ahead, read, strict=True):
                if isinstance(headers, BaseException):
                    problem = headers
                    self.dropped["unreadable"] += 1
                else:
                    read_any = True
                    await self._parse_region(region, headers, namespaces, resolver, invalid)
        if problem is not None and not (read_any and isinstance(problem, Unavailable)):
            raise problem
        resolver.finish()
        records = [one for one in resolver.kept if isinstance(one, Record)]
        for one in resolver.kept:
            if isinstance(one, UnnamedHeader):
                self._unnamed.add(one.offset, one.size)
                self.dropped[self._table.lost(one)] += 1
        await self._drop(invalid + resolver.superseded)
        return records

    # --- recovery, step by step --------------------------------------------------------------

    async def _recover_superblock(self) -> None:
        """Check it again, this time through the disk, and repair a damaged copy."""
        pages = await read_pages(self._disk, 0, COPIES)
        head = b"".join(page or bytes(PAGE) for page in pages)
        if self._simulated and not any(head):
            intact = False
        else:
            try:
                intact = check_superblock(head, self.alignment)
            except ConfigError as error:
                raise ConfigError(f"{self.path}: {error}") from None
        if not intact:
            with contextlib.suppress(Unavailable):  # then it stays as it is
                await self._disk.write(0, memoryview(pack_superblock(self.alignment)))
            if any(head):
                log.warning("the superblock is mended", path=str(self.path))

    async def _parse_region(
        self,
        region: HeaderRegion,
        headers: memoryview,
        namespaces: Sequence[NamespaceEntry | None],
        resolver: OverlapResolver,
        invalid: list[InvalidHeader],
    ) -> None:
        for number, slot in enumerate(used_slots(headers)):
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            offset = region.offset + slot * self.alignment
            header = unpack_header(headers, slot, offset, self.capacity, namespaces)
            if isinstance(header, ValidHeader):
                self._reference(offset, header.namespace_index)
                resolver.add(header.record)
            elif isinstance(header, UnnamedHeader):
                self._reference(offset, header.namespace_index)
                resolver.add(header)
            else:
                invalid.append(header)

    async def _drop(self, dropped: Sequence[InvalidHeader]) -> None:
        """Count them, and erase them as far as the disk allows."""
        self.dropped.update(reason for _, reason in dropped)
        for first in range(0, len(dropped), _ERASED_MAX):
            with contextlib.suppress(Unavailable):
                await self.erase([offset for offset, _ in dropped[first : first + _ERASED_MAX]])

    async def _read_region(self, region: HeaderRegion) -> memoryview:
        return await self._read(region.position, region.size)

    async def _read(self, position: int, size: int) -> memoryview:
        buffer = memoryview(bytearray(size))
        await self._disk.read(position, buffer)
        return buffer

    # --- headers ----------------------------------------------------------------

    def _runs(self, headers: Sequence[tuple[Record, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Headers and their positions. Those of neighbouring small extents are written at once.

        The slots between them are inside the first extent, where no other can start: zeros.
        """
        run = bytearray()
        at = end = 0  # where the run begins, and the offset behind its last extent
        for record, header in headers:
            position = self._geometry.header(record.offset)
            gap = position - at - len(run)
            if run and record.offset == end and 0 <= gap <= _GAP_MAX:
                run += bytes(gap)
            else:
                if run:
                    yield at, bytes(run)
                run.clear()
                at = position
            run += header
            end = record.offset + -(-record.size // self.alignment) * self.alignment
        if run:
            yield at, bytes(run)

    def _reference(self, offset: int, index: int) -> None:
        self._unnamed.discard(offset)
        before = self._namespace_of.get(offset)
        if before != index:
            self._table.use(before, -1)
            self._table.use(index, +1)
            self._namespace_of[offset] = index

    def _check(self, offset: int, size: int) -> None:
        self._check_open()
        if not 0 <= offset <= offset + size <= self.capacity or offset % self.alignment:
            raise UsageError(
                f"{size} bytes at {offset}: there are {self.capacity}, "
                f"and offsets are multiples of {self.alignment}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the tier is closed")

    def _open(self, direct: bool) -> FileDisk:
        return FileDisk(
            self.path,
            self._geometry.file_size,
            head=pack_superblock(self.alignment),
            accept=lambda head: check_superblock(head, self.alignment),
            queue_depth=self.queue_depth,
            direct=direct,
        )


def _generation(record: Record) -> int:
    return record.generation


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for every call, also when one fails; raises the first error in their order."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
