"""What a file still holds when it is opened again: its headers, step by step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Final

from kvpool import logs
from kvpool.errors import ConfigError, Unavailable
from kvpool.protocols.persistent_tier import Record
from kvpool.types import Namespace
from kvpool_tiers.nvme.file_disk import read_pages
from kvpool_tiers.nvme.format import (
    COPIES,
    PAGE,
    Geometry,
    HeaderRegion,
    InvalidHeader,
    NamespaceEntry,
    OverlapResolver,
    UnnamedHeader,
    check_superblock,
    is_damaged,
    pack_superblock,
    unpack_header,
    used_slots,
)
from kvpool_tiers.nvme.free_places import FreePlaces
from kvpool_tiers.nvme.headers import Headers
from kvpool_tiers.nvme.in_turns import in_order, in_turns
from kvpool_tiers.nvme.payload import FilePayload
from kvpool_tiers.nvme.recovery_log import RecoveryLog

log = logs.get("kvpool.nvme")

#: Regions of headers that are read at once: 8 MiB.
_REGIONS_AT_ONCE: Final = 4
#: Headers that are parsed before other coroutines have their turn: about a millisecond.
_YIELD_EVERY: Final = 128
#: Headers that are erased at once.
_ERASED_MAX: Final = 1024
#: Bytes that are moved at once when the file becomes smaller; no more are after so many seconds.
_MOVED_AT_ONCE: Final = 32 << 20
_MOVE_MAX_S: Final = 60.0


class Recovery:
    """Reads the headers of a file, and brings its extents into what its size is now.

    `write`, `erase` and `persist` are those of the tier; `dropped` counts what is lost, by reason.
    """

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        payload: FilePayload,
        headers: Headers,
        dropped: Counter[str],
        *,
        write: Callable[[int, memoryview], Awaitable[None]],
        erase: Callable[[Sequence[int]], Awaitable[None]],
        persist: Callable[[Sequence[Record]], Awaitable[None]],
    ) -> None:
        self._path = path
        self._geometry = geometry
        self._payload = payload
        self._headers = headers
        self._dropped = dropped
        self._write = write
        self._erase = erase
        self._persist = persist

    async def run(self, owner: bytes, *, may_be_empty: bool) -> list[Record]:
        """As `Nvme.recover`."""
        geometry, disk = self._geometry, self._payload.disk
        await self._recover_superblock(owner, may_be_empty=may_be_empty)
        namespaces = await self._headers.table.recover(disk)
        resolver = OverlapResolver()
        invalid: list[InvalidHeader] = []
        whole = Geometry.of_file(disk.size, geometry.alignment, geometry.header_size)
        if whole.capacity < geometry.capacity:
            whole = geometry
        regions = whole.regions()
        problem: BaseException | None = None
        read_any, progress = False, RecoveryLog(self._path, whole.capacity)
        while ahead := list(islice(regions, _REGIONS_AT_ONCE)):
            progress.at(ahead[0].offset)
            read = await asyncio.gather(*map(self._read_region, ahead), return_exceptions=True)
            for region, headers in zip(ahead, read, strict=True):
                if isinstance(headers, BaseException):
                    problem = headers
                    self._dropped["unreadable"] += 1
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
        if whole.capacity > geometry.capacity:
            records += await self._shrink(records, beyond)
        return records

    async def _recover_superblock(self, owner: bytes, *, may_be_empty: bool) -> None:
        """Check it again, this time through the disk, and repair a damaged copy."""
        pages = await read_pages(self._payload.disk, 0, COPIES)
        head = b"".join(page or bytes(PAGE) for page in pages)
        alignment, header_size = self._geometry.alignment, self._geometry.header_size
        if may_be_empty and not any(head):
            intact = False
        else:
            try:
                intact = check_superblock(head, alignment, owner, header_size)
            except ConfigError as error:
                raise ConfigError(f"{self._path}: {error}") from None
        if not intact:
            with contextlib.suppress(Unavailable):  # then it stays as it is
                head_now = pack_superblock(alignment, owner, header_size)
                await self._payload.disk.write(0, memoryview(head_now))
            if any(head) and is_damaged(head):
                log.warning("the superblock is mended", path=str(self._path))

    async def _sort_out(
        self, found: Sequence[Record | UnnamedHeader]
    ) -> tuple[list[Record], list[Record]]:
        """Records within the capacity, and those that reach beyond it."""
        records: list[Record] = []
        beyond: list[Record] = []
        async for one in in_turns(found):
            inside = one.offset + one.size <= self._geometry.capacity
            if isinstance(one, UnnamedHeader):
                self._dropped[self._headers.table.lost(one)] += 1
                if inside:
                    self._headers.unnamed.add(one.offset, one.size)
            else:
                (records if inside else beyond).append(one)
        return records, beyond

    async def _shrink(self, inside: Sequence[Record], beyond: Sequence[Record]) -> list[Record]:
        """Move what lies behind the new end, then cut the file. Returns what has moved.

        A copy is complete with its header before the file is cut, so a crash costs nothing: the
        next start finds the copies, and moves the rest.
        """
        known = {_block(one) async for one in in_turns(inside)}
        left = [one async for one in in_turns(beyond) if _block(one) not in known]
        async for _ in in_turns(range(len(known))):
            known.pop()  # to give back a million of them takes a while, too
        places = FreePlaces(self._geometry.capacity, self._geometry.alignment)
        # One that reaches over the new end may not be written over before it is moved.
        end_now = self._geometry.capacity
        across = [one async for one in in_turns(beyond) if one.offset < end_now]
        taken = ((one.offset, one.size) for one in chain(inside, across))
        extents = chain(taken, self._headers.unnamed.extents())
        async for extent in in_order(extents, itemgetter(0)):
            places.add_taken(*extent)
        end = asyncio.get_running_loop().time() + _MOVE_MAX_S
        moved: list[Record] = []
        batch: list[tuple[int, Record]] = []
        size = 0
        async for record in in_order(left, lambda one: -one.generation):
            late = asyncio.get_running_loop().time() > end
            if not late and (offset := places.take(record.size)) is not None:
                batch.append((record.offset, record._replace(offset=offset)))
                size += record.size
            if size >= _MOVED_AT_ONCE:
                moved += await self._move(batch)
                batch, size = [], 0
        moved += await self._move(batch)
        async for one in in_turns(beyond):
            self._headers.forget(one.offset)
            self._payload.forget(one.offset)
        if lost := len(left) - len(moved):
            self._dropped["beyond"] += lost
        report = log.warning if lost else log.info
        report("the file is smaller", path=str(self._path), moved=len(moved), dropped=lost)
        with contextlib.suppress(Unavailable):  # the next start does it again
            await self._erase([one.offset for one in across])
            unused = self._geometry.unused_headers()
            if unused.size:  # or a file that grows again would have headers of what was cut off
                await self._payload.disk.write(unused.position, memoryview(bytes(unused.size)))
            await self._payload.disk.truncate(self._geometry.file_size)
        return moved

    async def _move(self, batch: Sequence[tuple[int, Record]]) -> list[Record]:
        """Copy extents from where they were to their new places, and persist those that arrived."""

        async def copy(source: int, record: Record) -> Record:
            buffer = await self._payload.read_whole(source, record.size)
            await self._write(record.offset, buffer)
            return record

        outcomes = await asyncio.gather(*(copy(*one) for one in batch), return_exceptions=True)
        arrived = [one for one in outcomes if isinstance(one, Record)]
        for one in outcomes:
            if isinstance(one, BaseException) and not isinstance(one, Unavailable):
                raise one
        try:
            await self._persist(arrived)
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
        for number, slot in enumerate(used_slots(headers, self._geometry.header_size)):
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            offset = region.offset + slot * self._geometry.alignment
            opened = self._payload.open_header(offset, headers, slot)
            if opened is None:
                invalid.append(InvalidHeader(offset, "altered"))
                continue
            header = unpack_header(*opened, offset, capacity, namespaces)
            if isinstance(header, InvalidHeader):
                invalid.append(header)
                continue
            self._headers.refer(offset, header.namespace_index)
            resolver.add(header if isinstance(header, UnnamedHeader) else header.record)

    async def _drop(self, dropped: Sequence[InvalidHeader]) -> None:
        """Count them, and erase them as far as the disk allows."""
        self._dropped.update(reason for _, reason in dropped)
        for first in range(0, len(dropped), _ERASED_MAX):
            with contextlib.suppress(Unavailable):
                step = [offset for offset, _ in dropped[first : first + _ERASED_MAX]]
                await self._erase([offset for offset in step if offset < self._geometry.capacity])

    async def _read_region(self, region: HeaderRegion) -> memoryview:
        buffer = memoryview(bytearray(region.size))
        await self._payload.disk.read(region.position, buffer)
        return buffer


def _block(record: Record) -> tuple[Namespace, int, bytes]:
    return record.namespace, record.part, record.digest
