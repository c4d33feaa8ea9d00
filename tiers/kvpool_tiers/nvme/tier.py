"""NVMe: one preallocated file that remembers what its bytes mean.

`nvme_format` says what lies where, `disk` how it gets there; this is the order of things. The
payload is written first, its header after it (`persist`), and the header is erased (`erase`)
before the payload is written over. After kill -9 everything that returned is there: it is in the
kernel's hands. A *power cut* may take the last seconds: headers wait in the page cache, payload in
the disk's own. Then a header is missing (a miss), or there without all of its bytes, which the
checksum tells whoever reads them (a miss). Never wrong bytes.

An error of the disk fails the call that met it, and nothing else: whether to go on with such a
disk is for the server to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvpool.checksum import namespace_seed
from kvpool.errors import Closed, ConfigError, Unavailable, UsageError
from kvpool.types import Namespace, Record
from kvpool_tiers.nvme.file_disk import Disk, FileDisk
from kvpool_tiers.nvme.format import (
    GRAIN_MAX,
    GRAIN_MIN,
    HEADER_SIZE,
    NAMESPACES,
    PAGE,
    SUPERBLOCK_SIZE,
    Bad,
    Found,
    Geometry,
    Named,
    Region,
    Survivors,
    check_superblock,
    is_storable,
    pack_header,
    pack_namespace,
    pack_superblock,
    unpack_header,
    unpack_namespace,
    used_places,
)

#: Extents up to here are padded to whole pages in a copy: cheaper than a second write.
_PAD_COPY_MAX: Final = 64 << 10
#: Headers of neighbours are written at once when no more zeros than this lie between them.
_GAP_MAX: Final = 4096
#: Regions of headers that are read at once by `recover`: 8 MiB.
_READ_AHEAD: Final = 4
#: Headers that are looked at before others have their turn: about a millisecond.
_STEP: Final = 128
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
        alignment: int = GRAIN_MIN,
        disk: Disk | None = None,
    ) -> None:
        """Open the file at `path`, or make it where there is none; its directory must exist.

        A file of another capacity keeps what lies within the new one, and grows or shrinks. Only an
        empty file or one of ours is ever written to. With `direct` the payload goes past the page
        cache, if the file system can; `describe` says so. A larger `alignment` (a power of two)
        makes the headers fewer; choose it close to the smallest block, it is fixed for the life of
        the file. With `disk` that one is used, and `path` is only its name. Raises ConfigError.
        """
        if alignment & (alignment - 1) or not GRAIN_MIN <= alignment <= GRAIN_MAX:
            raise ConfigError(
                f"alignment is {alignment}, expected a power of two from {GRAIN_MIN} to {GRAIN_MAX}"
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
        self._names = _Names()
        self._naming = asyncio.Lock()
        self._held: dict[int, int] = {}  # offset of an extent with a header -> its namespace
        self._recovered = 0
        self._dropped: Counter[str] = Counter()
        self._skipped = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Nvme {self.path}, {self.capacity} bytes, {self._disk.mode}>"

    @staticmethod
    def disk_size(capacity: int, alignment: int = GRAIN_MIN) -> int:
        """How many bytes a disk must have for a tier of this capacity."""
        return Geometry(max(capacity - capacity % alignment, alignment), alignment).file_size

    @property
    def status_text(self) -> str:
        """Where it lies and how it is accessed."""
        return f"{self.path}, {self._disk.mode}"

    def describe(self) -> dict[str, str | int | float]:
        """For people: how it is, and what became of what it was to remember since it was opened.

        `dropped_...` counts headers that `recover` did not believe, by what was wrong
        (`unreadable`: whole regions of them), `not_remembered` records for which there was no room
        in the table of namespaces. What goes in and out is counted by who moves it.
        """
        return {
            "path": str(self.path),
            "mode": self._disk.mode,
            "queue_depth": self.queue_depth,
            "alignment": self.alignment,
            "file_bytes": self._geometry.file_size,
            "recovered": self._recovered,
            **{f"dropped_{reason}": count for reason, count in sorted(self._dropped.items())},
            "not_remembered": self._skipped,
        }

    def close(self) -> None:
        """Never waits: calls that a stuck disk has swallowed keep the file until they end."""
        self._closed = True
        self._disk.close()

    # --- bytes -----------------------------------------------------------------------------

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; without a copy if its memory is aligned to PAGE, as the offset is.

        On a disk that is stuck it does not end, not by being cancelled either: the disk may still
        write into the buffer. Whoever must go on lets it run in a task of its own.
        """
        self._check(offset, len(buffer))
        for position, start, stop in self._geometry.pieces(offset, len(buffer)):
            await self._disk.read(position, buffer[start:stop])

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        """Store `buffer`, in whole pages. What was said of a stuck disk holds here, too."""
        self._check(offset, len(buffer))
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
        """Found again after kill -9, once it has returned; see the head of this file."""
        self._check_open()
        for record in records:
            if not is_storable(record, self._geometry):
                raise UsageError(f"{record} cannot be remembered in {self!r}")
        newest = {record.offset: record for record in sorted(records, key=_generation)}
        headers: list[tuple[Record, bytes]] = []
        seeds: dict[tuple[Namespace, int], int] = {}
        for number, (offset, record) in enumerate(sorted(newest.items())):
            if number % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            name = await self._name(record.namespace)
            if name is None:
                self._skipped += 1
                continue
            self._hold(offset, name)
            key = record.namespace, record.part
            if (seed := seeds.get(key)) is None:
                seed = seeds[key] = namespace_seed(*key)
            headers.append((record, pack_header(record, name, seed)))
        await _all(self._disk.write(at, memoryview(run)) for at, run in self._runs(headers))

    async def erase(self, offsets: Sequence[int]) -> None:
        """Not found again. The places of headers that are not there are written, too."""
        self._check_open()
        for offset in offsets:
            if offset % self.alignment or not 0 <= offset < self.capacity:
                raise UsageError(f"no extent can start at {offset} of {self!r}")
        nothing = memoryview(bytes(HEADER_SIZE))
        await _all(self._disk.write(self._geometry.header(o), nothing) for o in offsets)
        for offset in offsets:
            self._names.use(self._held.pop(offset, None), -1)

    async def recover(self) -> Sequence[Record]:
        """What was remembered and still verifies; the bytes themselves are not read.

        Reads the headers only, in regions, and lets others run every millisecond. What it drops is
        counted, and erased, so that it does not come back later. Raises Unavailable when the
        superblock, the namespaces or all headers cannot be read. ConfigError if the disk that was
        given to this tier is not one of ours.
        """
        self._check_open()
        await self._recover_superblock()
        names = await self._recover_names()
        survivors = Survivors()
        bad: list[Bad] = []
        regions = self._geometry.regions()
        problem: BaseException | None = None
        read_any = False
        while ahead := list(islice(regions, _READ_AHEAD)):
            read = await asyncio.gather(*map(self._read_region, ahead), return_exceptions=True)
            for region, headers in zip(ahead, read, strict=True):
                if isinstance(headers, BaseException):
                    problem = headers
                    self._dropped["unreadable"] += 1
                else:
                    read_any = True
                    await self._look_through(region, headers, names, survivors, bad)
        if problem is not None and not (read_any and isinstance(problem, Unavailable)):
            raise problem
        survivors.finish()
        await self._drop(bad + survivors.beaten)
        self._recovered = len(survivors.kept)
        return survivors.kept

    # --- recovery, step by step --------------------------------------------------------------

    async def _recover_superblock(self) -> None:
        """Look again, this time through the disk, and mend what is damaged."""
        head = await self._read(0, SUPERBLOCK_SIZE)
        if self._simulated and not any(head):
            intact = False
        else:
            try:
                intact = check_superblock(bytes(head), self.alignment)
            except ConfigError as error:
                raise ConfigError(f"{self.path}: {error}") from None
        if not intact:
            with contextlib.suppress(Unavailable):  # then it stays as it is
                await self._disk.write(0, memoryview(pack_superblock(self.alignment)))

    async def _recover_names(self) -> list[Named | None]:
        pages = await self._read(self._geometry.namespace(0), NAMESPACES * PAGE)
        names: list[Named | None] = []
        for index in range(NAMESPACES):
            namespace = unpack_namespace(bytes(pages[index * PAGE : (index + 1) * PAGE]))
            if namespace is not None:
                self._names.put(index, namespace)
            names.append(Named.of(namespace) if namespace is not None else None)
            if index % _STEP == 0:
                await asyncio.sleep(0)
        return names

    async def _look_through(
        self,
        region: Region,
        headers: memoryview,
        names: Sequence[Named | None],
        survivors: Survivors,
        bad: list[Bad],
    ) -> None:
        for number, place in enumerate(used_places(headers)):
            if number % _STEP == 0:
                await asyncio.sleep(0)
            offset = region.offset + place * self.alignment
            header = unpack_header(headers, place, offset, self.capacity, names)
            if isinstance(header, Found):
                self._hold(offset, header.name)
                survivors.add(header.record)
            else:
                bad.append(header)

    async def _drop(self, dropped: Sequence[Bad]) -> None:
        """Count, and erase as far as the disk lets us."""
        self._dropped.update(reason for _, reason in dropped)
        for first in range(0, len(dropped), _ERASED_MAX):
            with contextlib.suppress(Unavailable):
                await self.erase([offset for offset, _ in dropped[first : first + _ERASED_MAX]])

    async def _read_region(self, region: Region) -> memoryview:
        return await self._read(region.position, region.size)

    async def _read(self, position: int, size: int) -> memoryview:
        buffer = memoryview(bytearray(size))
        await self._disk.read(position, buffer)
        return buffer

    # --- headers and namespaces ----------------------------------------------------------------

    def _runs(self, headers: Sequence[tuple[Record, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Headers and where they go. Those of small extents side by side are written at once.

        Between them are only places inside the first extent, in which no other can start: zeros.
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

    async def _name(self, namespace: Namespace) -> int | None:
        """Its number in the file, where it is written before anything refers to it.

        None when the table is full, and every namespace in it has extents.
        """
        index = self._names.find(namespace)
        if index is None:
            async with self._naming:
                index = self._names.find(namespace)
                if index is None and (index := self._names.free()) is not None:
                    self._names.put(index, None)  # nobody may refer to the old one any more
                    page = memoryview(pack_namespace(namespace))
                    await self._disk.write(self._geometry.namespace(index), page)
                    self._names.put(index, namespace)
        return index

    def _hold(self, offset: int, index: int) -> None:
        before = self._held.get(offset)
        if before != index:
            self._names.use(before, -1)
            self._names.use(index, +1)
            self._held[offset] = index

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


class _Names:
    """The table of namespaces: which has which number, and how many extents refer to it."""

    def __init__(self) -> None:
        self._numbers: dict[Namespace, int] = {}
        self._names: list[Namespace | None] = [None] * NAMESPACES
        self._extents = [0] * NAMESPACES

    def find(self, namespace: Namespace) -> int | None:
        return self._numbers.get(namespace)

    def put(self, index: int, namespace: Namespace | None) -> None:
        """Let this number stand for `namespace`, or for none."""
        before = self._names[index]
        if before is not None and self._numbers.get(before) == index:
            del self._numbers[before]
        self._names[index] = namespace
        if namespace is not None:
            self._numbers[namespace] = index

    def use(self, index: int | None, change: int) -> None:
        if index is not None:
            self._extents[index] += change

    def free(self) -> int | None:
        """A number that stands for nothing, or else for a namespace without extents."""
        unused = [index for index in range(NAMESPACES) if not self._extents[index]]
        return min(unused, key=lambda index: self._names[index] is not None, default=None)


def _generation(record: Record) -> int:
    return record.generation


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for every one, also when one fails or this is cancelled; raises the first error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
