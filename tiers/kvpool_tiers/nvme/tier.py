"""NVMe: one preallocated file that records what its bytes mean.

`format.py` says what lies where, `file_disk.py` reads and writes, `payload.py` has the bytes of
extents, `headers.py` says which of them have one, `recovery.py` finds them at a start. This file
has the order of writes: the payload first, then its header (`persist`); the header is erased
(`erase`) before the payload is overwritten. So after kill -9 everything that returned is there: the
kernel has it. A *power cut* may lose the last seconds: headers wait in the page cache, payload in
the disk's own cache. Then a header is missing (a miss), or it is there without all of its bytes,
which the reader's checksum finds (a miss). Never wrong bytes. (design: nvme-format)

An error of the disk fails the call that met it, and nothing else: the server decides whether to go
on with such a disk.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvpool import logs
from kvpool.checksum import namespace_seed
from kvpool.errors import Closed, ConfigError, UsageError
from kvpool.protocols.persistent_tier import Record
from kvpool.types import Namespace
from kvpool.units import human
from kvpool_tiers.nvme.file_disk import Disk, FileDisk
from kvpool_tiers.nvme.format import (
    ALIGNMENT_MAX,
    ALIGNMENT_MIN,
    HEADER_SIZE,
    NO_OWNER,
    SEALED_HEADER_SIZE,
    Geometry,
    check_superblock,
    is_storable,
    pack_header,
    pack_superblock,
)
from kvpool_tiers.nvme.headers import Headers, runs_of
from kvpool_tiers.nvme.payload import FilePayload
from kvpool_tiers.nvme.recovery import Recovery
from kvpool_tiers.nvme.several import NvmeFiles, all_of

log = logs.get("kvpool.nvme")

#: Headers that are parsed before other coroutines have their turn: about a millisecond.
_YIELD_EVERY: Final = 128


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
        self._simulated = disk is not None
        self._disk = disk if disk is not None else self._open(direct)
        if self._disk.size < self._geometry.file_size:
            raise ConfigError(
                f"{path} has {human(self._disk.size)}, "
                f"capacity {human(self.capacity)} needs {human(self._geometry.file_size)}"
            )
        self._payload = FilePayload(self._disk, self._geometry, encrypted=encrypt)
        self._headers = Headers(str(path))
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
    def altered(self) -> int:
        """Extents that did not decrypt."""
        return self._payload.altered

    @property
    def status_text(self) -> str:
        """Its path, how it is accessed, and what it could not keep: for `kvpool status`."""
        parts = [str(self.path), self._disk.mode]
        if self.encrypted:
            parts.append("encrypted")
        if self.altered:
            parts.append(f"{self.altered} blocks did not decrypt")
        parts += [f"{count} {reason} headers dropped" for reason, count in self.dropped.items()]
        if mended := self._headers.table.mended:
            parts.append(f"{mended} pages mended")
        if self.not_persisted:
            parts.append(f"{self.not_persisted} blocks not kept for a restart")
        return ", ".join(parts)

    def claim(self, owner: bytes) -> None:
        """As `BelongsToOwner.claim`; a file of an older release has no owner, and gets this one."""
        self._owner = owner

    def use_key(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        """As `Encrypts.use_key`; `random` gives so many bytes that nobody has seen before."""
        self._payload.use_key(key, random)

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
        await self._payload.read(offset, buffer)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        """Store `buffer`, in whole pages. On a stuck disk it does not end, like `read_into`."""
        self._check(offset, len(buffer))
        unnamed = self._headers.unnamed
        if unnamed and (over := unnamed.within(offset, len(buffer))):
            await self.erase(over)  # before their payload is overwritten, as for any extent
        await self._payload.write(offset, buffer)

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
            index = await self._headers.table.number(self._disk, record.namespace)
            if index is None:
                continue
            self._headers.refer(offset, index)
            key = record.namespace, record.part
            if (seed := seeds.get(key)) is None:
                seed = seeds[key] = namespace_seed(*key)
            header = pack_header(record, index, seed)
            headers.append((record, self._payload.seal_header(offset, header)))
        runs = runs_of(self._geometry, headers)
        await all_of(self._disk.write(at, memoryview(run)) for at, run in runs)

    def check_storable(self, records: Sequence[Record]) -> None:
        """Raises UsageError for one that `persist` would refuse."""
        for record in records:
            if not is_storable(record, self._geometry):
                raise UsageError(f"{record} cannot be stored in {self!r}")

    def keeps(self, offset: int) -> bool:
        """As `KeepsSome.keeps`."""
        return offset in self._headers

    @property
    def not_persisted(self) -> int:
        """Records that `persist` left out since the file was opened."""
        return self._headers.table.refused

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
                self._headers.forget(offset)
                self._payload.forget(offset)

    async def recover(self) -> list[Record]:
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
        steps = Recovery(
            self.path,
            self._geometry,
            self._payload,
            self._headers,
            self.dropped,
            write=self.write_from,
            erase=self.erase,
            persist=self.persist,
        )
        return await steps.run(self._owner, may_be_empty=self._simulated)

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
