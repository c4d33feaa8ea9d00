"""The namespaces of a file: which number each has, and how many extents refer to it.

A header refers to its namespace by number, so a page that is lost would take all blocks of its
namespace with it. Therefore each page is there twice, and an extent whose namespace is unknown
keeps its header for as long as nothing is written over it. (design: nvme-format)
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from kvpool import logs
from kvpool.checksum import namespace_seed
from kvpool.errors import Unavailable
from kvpool.shares import Shares
from kvpool.tenant_names import tenant_of
from kvpool.types import Namespace
from kvpool_tiers.nvme.file_disk import Disk, read_pages
from kvpool_tiers.nvme.format import (
    COPIES,
    NAMESPACES,
    Geometry,
    NamespaceEntry,
    NamespacePage,
    UnnamedHeader,
    pack_namespace,
    unpack_namespace,
)

log = logs.get("kvpool.nvme")

#: Pages that are parsed before other coroutines have their turn: about a millisecond.
_YIELD_EVERY: Final = 128


class NamespaceTable:
    """What the pages of one file say. A number is used again when no extent refers to it. Of the
    numbers that extents refer to each tenant has its share.

    | page of a number | copies                    | next                                          |
    |------------------|---------------------------|-----------------------------------------------|
    | empty            | none is intact            | written, for a new namespace                  |
    | intact           | both, or one is mended    | written over when no extent refers to it      |
    | lost             | none is intact, but valid | written again when a call names its namespace |
    |                  | headers refer to it       | (their seeds tell), or empty without headers  |

    The first copy is written and then the second, and headers refer to a number only when both are
    there. So after a crash at most one copy is damaged, or the two differ in a namespace that no
    header refers to.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers: dict[Namespace, int] = {}
        self._namespaces: list[Namespace | None] = [None] * NAMESPACES
        self._extents = [0] * NAMESPACES
        self._holders = [""] * NAMESPACES  # the tenant that a number with extents counts for
        self._shares = Shares(NAMESPACES)
        self._generation = 0  # of the page written last
        self._unreadable: set[int] = set()  # numbers of which the disk could read no copy
        self._lost: dict[int, int] = {}  # seeds of headers without a namespace -> its number
        self._lock = asyncio.Lock()
        #: Copies that were not intact and have been written again from the other one.
        self.mended = 0

    def use(self, number: int | None, change: int) -> None:
        """So many more, or fewer, extents refer to this number."""
        if number is None:
            return
        before = self._extents[number]
        self._extents[number] += change
        if not before:
            named = self._namespaces[number]
            self._holders[number] = tenant_of(named.name) if named is not None else ""
            self._shares.hold(self._holders[number])
        elif not self._extents[number]:
            self._shares.give_back(self._holders[number])

    def lost(self, header: UnnamedHeader) -> str:
        """Record the number that a header without a namespace refers to; the reason.

        `unnamed`: both copies are damaged. `unreadable`: the disk could read neither.
        """
        number = header.namespace_index
        self._lost[header.seed] = number
        return "unreadable" if number in self._unreadable else "unnamed"

    async def recover(self, disk: Disk) -> list[NamespaceEntry | None]:
        """The namespaces by number, None without an intact page; mends the other copy of a page.

        Raises Unavailable when the disk can read neither copy.
        """
        copies = await self._read(disk)
        entries: list[NamespaceEntry | None] = []
        mended: list[int] = []
        for index in range(NAMESPACES):
            if index % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            pages = [copy[index] for copy in copies]
            found = [
                page
                for data in pages
                if data is not None and (page := unpack_namespace(data, index)) is not None
            ]
            if not found:
                entries.append(None)
                if all(data is None for data in pages):
                    self._unreadable.add(index)
                continue
            page = max(found, key=lambda page: page.generation)
            self._generation = max(self._generation, page.generation)
            self._put(index, page.namespace)
            entries.append(NamespaceEntry.of(page.namespace))
            right = pack_namespace(page, index)
            for copy, data in enumerate(pages):
                if data != right and await self._mend(disk, index, copy, right):
                    mended.append(index)
        if mended:
            self.mended += len(mended)
            log.warning("pages of namespaces are mended", path=self._path, numbers=mended)
        return entries

    async def number(self, disk: Disk, namespace: Namespace) -> int | None:
        """Its number; both copies of its page are written before any header refers to it.

        None where its tenant has its share of the numbers with extents, or none is left. Raises
        Unavailable; then no header may refer to it.
        """
        found = self._numbers.get(namespace)
        if found is None:
            async with self._lock:
                found = self._numbers.get(namespace)
                if found is None and (found := self._number_for(namespace)) is not None:
                    await self._write(disk, found, namespace)
        elif not self._extents[found] and not self._shares.room(tenant_of(namespace.name)):
            found = None
        if found is None:
            self._refuse(tenant_of(namespace.name))
        return found

    def _refuse(self, tenant: str) -> None:
        """Count a record that is left out, and log the first one of each tenant."""
        if not self._shares.refused[tenant]:
            log.warning(
                "blocks of further namespaces are not kept for a restart",
                path=self._path,
                tenant=tenant,
                namespaces=self._shares.held(tenant),
                of=NAMESPACES,
            )
        self._shares.refuse(tenant)

    @property
    def refused(self) -> int:
        """Records whose namespace got no number."""
        return self._shares.refused.total()

    async def _read(self, disk: Disk) -> list[Sequence[bytes | None]]:
        """Both copies of all pages; one that the disk cannot read at all is nothing but None."""
        calls = [read_pages(disk, Geometry.namespace(0, n), NAMESPACES) for n in range(COPIES)]
        copies: list[Sequence[bytes | None]] = []
        problem: BaseException | None = None
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                problem = outcome
                copies.append([None] * NAMESPACES)
            else:
                copies.append(outcome)
        if problem is not None:
            none_read = all(page is None for copy in copies for page in copy)
            if none_read or not isinstance(problem, Unavailable):
                raise problem
        return copies

    async def _write(self, disk: Disk, number: int, namespace: Namespace) -> None:
        self._put(number, None)  # no new header may refer to the old namespace
        self._generation += 1
        page = memoryview(pack_namespace(NamespacePage(namespace, self._generation), number))
        for copy in range(COPIES):  # one after the other: a crash damages one of them at most
            await disk.write(Geometry.namespace(number, copy), page)
        self._put(number, namespace)
        if number in self._lost.values():
            self._lost = {seed: lost for seed, lost in self._lost.items() if lost != number}
            if self._extents[number]:
                log.warning(
                    "a lost page of a namespace is mended",
                    path=self._path,
                    number=number,
                    blocks_at_next_start=self._extents[number],
                )

    async def _mend(self, disk: Disk, index: int, copy: int, page: bytes) -> bool:
        try:
            await disk.write(Geometry.namespace(index, copy), memoryview(page))
        except Unavailable:  # then it stays as it is, and the other copy serves
            return False
        return True

    def _number_for(self, namespace: Namespace) -> int | None:
        """The number that headers without a namespace have for this one, or a free one.

        Free is a number without a namespace, or else one whose namespace has no extents; none is
        free for a tenant that has its share.
        """
        if self._lost:
            for part in range(namespace.parts):
                number = self._lost.get(namespace_seed(namespace, part))
                if number is not None and self._extents[number]:
                    return number
        if not self._shares.room(tenant_of(namespace.name)):
            return None
        unused = [index for index in range(NAMESPACES) if not self._extents[index]]
        return min(unused, key=lambda index: self._namespaces[index] is not None, default=None)

    def _put(self, index: int, namespace: Namespace | None) -> None:
        """Give this number to `namespace`, or to none."""
        before = self._namespaces[index]
        if before is not None and self._numbers.get(before) == index:
            del self._numbers[before]
        self._namespaces[index] = namespace
        if namespace is not None:
            self._numbers[namespace] = index


class UnnamedExtents:
    """Extents that keep their headers although their namespace is unknown. They do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, offset: int, size: int) -> None:
        """The next one, in the order of offsets."""
        self._starts.append(offset)
        self._sizes[offset] = size

    def discard(self, offset: int) -> None:
        """Its header is erased, or another one is written there."""
        self._sizes.pop(offset, None)

    def extents(self) -> list[tuple[int, int]]:
        """Offset and size of each."""
        return list(self._sizes.items())

    def within(self, offset: int, size: int) -> list[int]:
        """The offsets of those that share a byte with `size` bytes at `offset`."""
        first = max(bisect_right(self._starts, offset) - 1, 0)  # it may reach over `offset`
        last = bisect_left(self._starts, offset + size)
        starts = self._starts[first:last]
        return [start for start in starts if start + self._sizes.get(start, -start) > offset]
