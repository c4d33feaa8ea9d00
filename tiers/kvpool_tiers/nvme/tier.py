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
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpool import logs
from kvpool.checksum import namespace_seed
from kvpool.errors import Closed, ConfigError, Unavailable, UsageError
from kvpool.types import Namespace, Record
from kvpool.units import human
from kvpool_tiers.nvme.file_disk import Disk, FileDisk, read_pages
from kvpool_tiers.nvme.format import (
    ALIGNMENT_MAX,
    ALIGNMENT_MIN,
    COPIES,
    HEADER_SIZE,
    NO_OWNER,
    NO_SEAL,
    PAGE,
    SEALED_HEADER_SIZE,
    ExtentSeal,
    Geometry,
    HeaderRegion,
    InvalidHeader,
    NamespaceEntry,
    OverlapResolver,
    UnnamedHeader,
    ValidHeader,
    check_superblock,
    is_damaged,
    is_storable,
    pack_header,
    pack_superblock,
    unpack_header,
    used_slots,
)
from kvpool_tiers.nvme.free_places import FreePlaces
from kvpool_tiers.nvme.namespaces import NamespaceTable, UnnamedExtents
from kvpool_tiers.nvme.recovery_log import RecoveryLog
from kvpool_tiers.nvme.several import NvmeFiles, all_of

if TYPE_CHECKING:
    from kvpool_tiers.nvme.encryption import FileCipher

log = logs.get("kvpool.nvme")

#: Extents up to here are padded to whole pages in a copy: cheaper than a second write.
_PAD_COPY_MAX: Final = 64 << 10
#: Headers of neighbours are written at once when no more zeros than this lie between them.
_GAP_MAX: Final = 4096
#: Regions of headers that `recover` reads at once: 8 MiB.
_REGIONS_AT_ONCE: Final = 4
#: Headers that are parsed before other coroutines have their turn: about a millisecond.
_YIELD_EVERY: Final = 128
_SORTED_AT_ONCE: Final = 4096
#: Headers that are erased at once.
_ERASED_MAX: Final = 1024
#: Bytes that are moved at once when the file becomes smaller; no more are after so many seconds.
_MOVED_AT_ONCE: Final = 32 << 20
_MOVE_MAX_S: Final = 60.0


class Nvme:
    """`capacity` bytes of one file, which is about 1/32 larger (`disk_size`)."""

    name = "nvme"
    survives_restart = True
    #: What several files are as one tier.
    joined = NvmeFiles

    def __init__(
        self,
        capacity: int,
        path: Path | str,
        *,
        queue_depth: int = 16,
        direct: bool = True,
        alignment: int = ALIGNMENT_MIN,
        encrypt: bool = False,
        disk: Disk | None = None,
    ) -> None:
        """Open the file at `path`, or make it where there is none; its directory must exist.

        A file of another capacity grows, or shrinks in `recover`, and keeps what fits. Only an
        empty file or one of ours is ever written to. With `direct` the payload goes past the page
        cache, if the file system can; `status_text` has the result. `queue_depth` threads read and
        write. A larger `alignment` (bytes, a power of two) makes the headers fewer; choose it close
        to the smallest block, it is fixed for the life of the file. With `encrypt` blocks and
        their headers are encrypted with the key that `use_key` gives; that, too, is fixed. With
        `disk` that one is used, and `path` is only its name. Raises ConfigError.
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
        self.encrypted = encrypt
        self._header_size = SEALED_HEADER_SIZE if encrypt else HEADER_SIZE
        self._geometry = Geometry(self.capacity, alignment, self._header_size)
        self._cipher: FileCipher | None = None
        #: With `encrypt`: how to read each extent.
        self._seals: dict[int, ExtentSeal] = {}
        #: Extents that did not decrypt: somebody else has changed the file, or the disk is bad.
        self.altered = 0
        self._simulated = disk is not None
        self._disk = disk if disk is not None else self._open(direct)
        if self._disk.size < self._geometry.file_size:
            raise ConfigError(
                f"{path} has {human(self._disk.size)}, "
                f"capacity {human(self.capacity)} needs {human(self._geometry.file_size)}"
            )
        self._table = NamespaceTable(str(path))
        self._unnamed = UnnamedExtents()
        self._namespace_of: dict[int, int] = {}  # offset of an extent with a header -> its number
        #: Headers that `recover` dropped, by reason: see `InvalidHeader` and `NamespaceTable.lost`.
        #: `unreadable` counts a whole region of headers as one.
        self.dropped: Counter[str] = Counter()
        self._owner = NO_OWNER
        self._closed = False

    def __repr__(self) -> str:
        return f"<Nvme {self.path}, {self.capacity} bytes, {self._disk.mode}>"

    @staticmethod
    def disk_size(capacity: int, alignment: int = ALIGNMENT_MIN, *, encrypt: bool = False) -> int:
        """How many bytes a disk must have for a tier of this capacity."""
        size = SEALED_HEADER_SIZE if encrypt else HEADER_SIZE
        return Geometry(max(capacity - capacity % alignment, alignment), alignment, size).file_size

    @property
    def mode(self) -> str:
        """`O_DIRECT`, or `buffered` where the file system refuses that."""
        return self._disk.mode

    @property
    def status_text(self) -> str:
        """Its path, how it is accessed, and what it could not keep: for `kvpool status`."""
        parts = [str(self.path), self._disk.mode]
        if self.encrypted:
            parts.append("encrypted")
        if self.altered:
            parts.append(f"{self.altered} blocks did not decrypt")
        parts += [f"{count} {reason} headers dropped" for reason, count in self.dropped.items()]
        if self._table.mended:
            parts.append(f"{self._table.mended} pages mended")
        if self.not_persisted:
            parts.append(f"{self.not_persisted} blocks not kept for a restart")
        return ", ".join(parts)

    def claim(self, owner: bytes) -> None:
        """As `BelongsToOwner.claim`; a file of an older release has no owner, and gets this one."""
        self._owner = owner

    def use_key(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        """As `Encrypts.use_key`; `random` gives so many bytes that nobody has seen before."""
        from kvpool_tiers.nvme.encryption import FileCipher

        self._cipher = FileCipher(key, random)

    def close(self) -> None:
        """Take no more calls. Never waits: calls on a stuck disk keep the file until they end."""
        self._closed = True
        self._disk.close()

    # --- bytes -----------------------------------------------------------------------------

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; without a copy if its memory is aligned to PAGE, as the offset is.

        On a stuck disk it does not end, not even when it is cancelled: the disk may still write
        into the buffer. A caller that must go on runs it in a task of its own.
        """
        self._check(offset, len(buffer))
        if self.encrypted:
            await self._read_sealed(offset, buffer)
        else:
            await self._read_pieces(offset, buffer)

    async def _read_pieces(self, offset: int, buffer: memoryview) -> None:
        for position, start, stop in self._geometry.pieces(offset, len(buffer)):
            await self._disk.read(position, buffer[start:stop])

    async def _read_sealed(self, offset: int, buffer: memoryview) -> None:
        """An extent as it was encrypted; zeros, which no checksum fits, where it is another one."""
        seal = self._seals.get(offset)
        if seal is None:
            buffer[:] = bytes(len(buffer))
            return
        whole = buffer[: seal.size]
        if len(whole) < seal.size:
            whole = memoryview(bytearray(seal.size))
        await self._read_pieces(offset, whole)
        if not await self._opened().decrypt(whole, seal):
            self.altered += 1
        if len(buffer) < seal.size:
            buffer[:] = whole[: len(buffer)]
        else:
            buffer[seal.size :] = bytes(len(buffer) - seal.size)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        """Store `buffer`, in whole pages. On a stuck disk it does not end, like `read_into`."""
        self._check(offset, len(buffer))
        if self._unnamed and (over := self._unnamed.within(offset, len(buffer))):
            await self.erase(over)  # before their payload is overwritten, as for any extent
        if self.encrypted:
            await self._write_sealed(offset, buffer)
            return
        for position, start, stop in self._geometry.pieces(offset, len(buffer)):
            await self._write_pages(position, buffer[start:stop])

    async def _write_sealed(self, offset: int, buffer: memoryview) -> None:
        self._seals.pop(offset, None)
        cipher = self._opened()
        sealing = cipher.begin(len(buffer))
        staging = await cipher.staging()
        try:
            for position, start, stop in self._geometry.pieces(offset, len(buffer)):
                for first in range(start, stop, len(staging)):
                    source = buffer[first : min(first + len(staging), stop)]
                    await sealing.encrypt(source, staging[: len(source)])
                    padded = -(-len(source) // PAGE) * PAGE
                    staging[len(source) : padded] = bytes(padded - len(source))
                    await self._disk.write(position + first - start, staging[:padded])
        finally:
            cipher.give_back(staging)
        self._seals[offset] = sealing.finish()

    def _opened(self) -> FileCipher:
        if self._cipher is None:
            raise UsageError(f"{self!r} is encrypted, and use_key was not called")
        return self._cipher

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

        A record whose tenant has its share of the table of namespaces is left out.
        """
        self._check_open()
        self.check_storable(records)
        newest = {record.offset: record for record in sorted(records, key=_generation)}
        headers: list[tuple[Record, bytes]] = []
        seeds: dict[tuple[Namespace, int], int] = {}
        for number, (offset, record) in enumerate(sorted(newest.items())):
            if number % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
            index = await self._table.number(self._disk, record.namespace)
            if index is None:
                continue
            self._reference(offset, index)
            key = record.namespace, record.part
            if (seed := seeds.get(key)) is None:
                seed = seeds[key] = namespace_seed(*key)
            header = pack_header(record, index, seed)
            if self.encrypted:
                seal = self._seals.get(offset, NO_SEAL)
                header = self._opened().seal_header(header, seal)
            headers.append((record, header))
        await all_of(self._disk.write(at, memoryview(run)) for at, run in self._runs(headers))

    def check_storable(self, records: Sequence[Record]) -> None:
        """Raises UsageError for one that `persist` would refuse."""
        for record in records:
            if not is_storable(record, self._geometry):
                raise UsageError(f"{record} cannot be stored in {self!r}")

    def keeps(self, offset: int) -> bool:
        """As `KeepsSome.keeps`."""
        return offset in self._namespace_of

    @property
    def not_persisted(self) -> int:
        """Records that `persist` left out since the file was opened."""
        return self._table.refused

    async def erase(self, offsets: Sequence[int]) -> None:
        """`recover` does not find these extents any more. Slots that are empty are written, too."""
        self._check_open()
        for offset in offsets:
            if offset % self.alignment or not 0 <= offset < self.capacity:
                raise UsageError(f"no extent can start at {offset} of {self!r}")
        nothing = memoryview(bytes(self._header_size))
        for first in range(0, len(offsets), _YIELD_EVERY):
            some = offsets[first : first + _YIELD_EVERY]
            await all_of(self._disk.write(self._geometry.header(o), nothing) for o in some)
            for offset in some:
                self._table.use(self._namespace_of.pop(offset, None), -1)
                self._unnamed.discard(offset)
                self._seals.pop(offset, None)

    async def recover(self) -> Sequence[Record]:
        """The records that were persisted and whose headers are valid. (design: nvme-format)

        Reads the headers only, not the payload, and lets other coroutines run every millisecond.
        What it drops is counted in `dropped`, and erased, so that it does not come back later; but
        for extents without a namespace, whose headers stay until something is written over them.
        In a file that was larger, extents behind the new end are moved to free places, the newest
        first, as long as there is room, for a minute at most. Then the file is cut.
        Raises Unavailable when the superblock, the namespaces or all headers cannot be read,
        ConfigError if it is not one of ours, or has another owner than the one that claims it.
        """
        self._check_open()
        await self._recover_superblock()
        namespaces = await self._table.recover(self._disk)
        resolver = OverlapResolver()
        invalid: list[InvalidHeader] = []
        whole = Geometry.of_file(self._disk.size, self.alignment, self._header_size)
        if whole.capacity < self.capacity:
            whole = self._geometry
        regions = whole.regions()
        problem: BaseException | None = None
        read_any, progress = False, RecoveryLog(self.path, whole.capacity)
        while ahead := list(islice(regions, _REGIONS_AT_ONCE)):
            progress.at(ahead[0].offset)
            read = await asyncio.gather(*map(self._read_region, ahead), return_exceptions=True)
            for region, headers in zip(ahead, read, strict=True):
                if isinstance(headers, BaseException):
                    problem = headers
                    self.dropped["unreadable"] += 1
                else:
                    read_any = True
                    capacity = whole.capacity
                    await self._parse_region(
                        region, headers, capacity, namespaces, resolver, invalid
                    )
        if problem is not None and not (read_any and isinstance(problem, Unavailable)):
            raise problem
        resolver.finish()
        records, beyond = await self._sort_out(resolver.kept)
        await self._drop(invalid + resolver.superseded)
        if whole.capacity > self.capacity:
            records += await self._shrink(records, beyond)
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
                intact = check_superblock(head, self.alignment, self._owner, self._header_size)
            except ConfigError as error:
                raise ConfigError(f"{self.path}: {error}") from None
        if not intact:
            with contextlib.suppress(Unavailable):  # then it stays as it is
                head_now = pack_superblock(self.alignment, self._owner, self._header_size)
                await self._disk.write(0, memoryview(head_now))
            if any(head) and is_damaged(head):
                log.warning("the superblock is mended", path=str(self.path))

    async def _sort_out(
        self, found: Sequence[Record | UnnamedHeader]
    ) -> tuple[list[Record], list[Record]]:
        """Records within the capacity, and those that reach beyond it."""
        records: list[Record] = []
        beyond: list[Record] = []
        for number, one in enumerate(found):
            if number % _SORTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            inside = one.offset + one.size <= self.capacity
            if isinstance(one, UnnamedHeader):
                self.dropped[self._table.lost(one)] += 1
                if inside:
                    self._unnamed.add(one.offset, one.size)
            else:
                (records if inside else beyond).append(one)
        return records, beyond

    async def _shrink(self, inside: Sequence[Record], beyond: Sequence[Record]) -> list[Record]:
        """Move what lies behind the new end, then cut the file. Returns what has moved.

        A copy is complete with its header before the file is cut, so a crash costs nothing: the
        next start finds the copies, and moves the rest.
        """
        known = {(one.namespace, one.part, one.digest) for one in inside}
        left = [one for one in beyond if (one.namespace, one.part, one.digest) not in known]
        places = FreePlaces(self.capacity, self.alignment)
        # One that reaches over the new end may not be written over before it is moved.
        across = [one for one in beyond if one.offset < self.capacity]
        taken = [(one.offset, one.size) for one in (*inside, *across)] + self._unnamed.extents()
        places.set_taken(sorted(taken))
        end = asyncio.get_running_loop().time() + _MOVE_MAX_S
        moved: list[Record] = []
        batch: list[tuple[int, Record]] = []
        size = 0
        for record in sorted(left, key=_generation, reverse=True):
            if asyncio.get_running_loop().time() > end:
                break
            if (offset := places.take(record.size)) is not None:
                batch.append((record.offset, record._replace(offset=offset)))
                size += record.size
            if size >= _MOVED_AT_ONCE:
                moved += await self._move(batch)
                batch, size = [], 0
        moved += await self._move(batch)
        for one in beyond:
            self._table.use(self._namespace_of.pop(one.offset, None), -1)
            self._seals.pop(one.offset, None)
        if lost := len(left) - len(moved):
            self.dropped["beyond"] += lost
        report = log.warning if lost else log.info
        report("the file is smaller", path=str(self.path), moved=len(moved), dropped=lost)
        with contextlib.suppress(Unavailable):  # the next start does it again
            await self.erase([one.offset for one in across])
            unused = self._geometry.unused_headers()
            if unused.size:  # or a file that grows again would have headers of what was cut off
                await self._disk.write(unused.position, memoryview(bytes(unused.size)))
            await self._disk.truncate(self._geometry.file_size)
        return moved

    async def _move(self, batch: Sequence[tuple[int, Record]]) -> list[Record]:
        """Copy extents from where they were to their new places, and persist those that arrived."""

        async def copy(source: int, record: Record) -> Record:
            buffer = memoryview(bytearray(record.size))
            if self.encrypted:  # also the padding, with which the server will read it
                buffer = memoryview(bytearray(self._seals.get(source, NO_SEAL).size))
                await self._read_sealed(source, buffer)
            else:
                await self._read_pieces(source, buffer)
            await self.write_from(record.offset, buffer)
            return record

        outcomes = await asyncio.gather(*(copy(*one) for one in batch), return_exceptions=True)
        arrived = [one for one in outcomes if isinstance(one, Record)]
        for one in outcomes:
            if isinstance(one, BaseException) and not isinstance(one, Unavailable):
                raise one
        try:
            await self.persist(arrived)
        except Unavailable:
            return []
        return arrived

    async def _parse_region(
        self,
        region: HeaderRegion,
        headers: memoryview,
        capacity: int,
        namespaces: Sequence[NamespaceEntry | None],
        resolver: OverlapResolver,
        invalid: list[InvalidHeader],
    ) -> None:
        for number, slot in enumerate(used_slots(headers, self._header_size)):
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            offset = region.offset + slot * self.alignment
            if self.encrypted:
                header = self._open_header(headers, slot, offset, capacity, namespaces)
            else:
                header = unpack_header(headers, slot, offset, capacity, namespaces)
            if isinstance(header, ValidHeader):
                self._reference(offset, header.namespace_index)
                resolver.add(header.record)
            elif isinstance(header, UnnamedHeader):
                self._reference(offset, header.namespace_index)
                resolver.add(header)
            else:
                invalid.append(header)

    def _open_header(
        self,
        headers: memoryview,
        slot: int,
        offset: int,
        capacity: int,
        namespaces: Sequence[NamespaceEntry | None],
    ) -> ValidHeader | UnnamedHeader | InvalidHeader:
        """As `unpack_header`, of an encrypted file; notes how to read the extent."""
        start = slot * self._header_size
        opened = self._opened().open_header(bytes(headers[start : start + self._header_size]))
        if opened is None:
            return InvalidHeader(offset, "altered")
        text, self._seals[offset] = opened
        return unpack_header(memoryview(text), 0, offset, capacity, namespaces)

    async def _drop(self, dropped: Sequence[InvalidHeader]) -> None:
        """Count them, and erase them as far as the disk allows."""
        self.dropped.update(reason for _, reason in dropped)
        for first in range(0, len(dropped), _ERASED_MAX):
            with contextlib.suppress(Unavailable):
                step = [offset for offset, _ in dropped[first : first + _ERASED_MAX]]
                await self.erase([offset for offset in step if offset < self.capacity])

    async def _read_region(self, region: HeaderRegion) -> memoryview:
        buffer = memoryview(bytearray(region.size))
        await self._disk.read(region.position, buffer)
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
            head=pack_superblock(self.alignment, header_size=self._header_size),
            accept=lambda head: check_superblock(
                head, self.alignment, wanted_size=self._header_size
            ),
            queue_depth=self.queue_depth,
            direct=direct,
        )


def _generation(record: Record) -> int:
    return record.generation
