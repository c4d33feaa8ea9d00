"""Several files as one tier, each on a disk of its own: `--tier nvme:/a:1TiB --tier nvme:/b:1TiB`.

The files lie behind each other in one address space, and no extent crosses from one into the next.
Each keeps its own records, so a file can be added behind the others, made larger, or left out at a
restart, and the blocks of the others are there.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast

from kvpool.errors import Closed, ConfigError, UsageError
from kvpool.protocols import Tier
from kvpool.protocols.persistent_tier import PersistentTier, Record, TierPart

T = TypeVar("T")

#: Records that are put together in one turn of the loop: a millisecond or two.
_RECORDS_AT_ONCE: Final = 512


class _File(Tier, PersistentTier, Protocol):
    """What is used of an `Nvme`, which imports this file."""

    path: Path
    encrypted: bool
    dropped: Counter[str]

    @property
    def status_text(self) -> str: ...
    def claim(self, owner: bytes) -> None: ...
    def use_key(self, key: bytes) -> None: ...
    def keeps(self, offset: int) -> bool: ...
    def check_storable(self, records: Sequence[Record]) -> None: ...
    async def recover(self) -> list[Record]: ...


class NvmeFiles:
    """Two `Nvme` or more as one tier, which takes them over; offsets of one follow the last's.

    An error of one disk fails the calls that met it. A call for extents of several files does what
    each file allows, and then raises the first error.
    """

    name = "nvme"
    survives_restart = True

    def __init__(self, files: Sequence[_File]) -> None:
        """Raises ConfigError when they differ in their alignment, or only some are encrypted."""
        self.files = list(files)
        for what in ("alignment", "encrypted"):
            if len(found := {getattr(one, what): one.path for one in files}) > 1:
                listed = ", ".join(f"{path}: {value}" for value, path in found.items())
                raise ConfigError(f"files of one tier differ in {what} ({listed}): choose one")
        self.alignment = files[0].alignment
        self.encrypted = files[0].encrypted
        self.capacity = sum(one.capacity for one in files)
        self._starts = [0, *accumulate(one.capacity for one in files)][:-1]
        self._closed = False

    def __repr__(self) -> str:
        return f"<NvmeFiles {self.files!r}>"

    @property
    def parts(self) -> Sequence[TierPart]:
        """As `HasParts.parts`."""
        return [TierPart(str(one.path), one.capacity) for one in self.files]

    @property
    def status_text(self) -> str:
        return "; ".join(one.status_text for one in self.files)

    @property
    def dropped(self) -> Counter[str]:
        """As `ReportsDropped.dropped`."""
        return sum((one.dropped for one in self.files), Counter())

    def claim(self, owner: bytes) -> None:
        """As `BelongsToOwner.claim`."""
        for one in self.files:
            one.claim(owner)

    def use_key(self, key: bytes) -> None:
        """As `Encrypts.use_key`."""
        for one in self.files:
            one.use_key(key)

    def close(self) -> None:
        self._closed = True
        for one in self.files:
            one.close()

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        for file, local, start, stop in self._pieces(offset, len(buffer)):
            await file.read_into(local, buffer[start:stop])

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        for file, local, start, stop in self._pieces(offset, len(buffer)):
            await file.write_from(local, buffer[start:stop])

    def keeps(self, offset: int) -> bool:
        """As `KeepsSome.keeps`."""
        number = self._number(offset)
        return self.files[number].keeps(offset - self._starts[number])

    async def persist(self, records: Sequence[Record]) -> None:
        found: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            number = self._number(record.offset)
            found[number].append(record._replace(offset=record.offset - self._starts[number]))
        for number, local in found.items():
            self.files[number].check_storable(local)  # all, before one is stored
        await all_of(self.files[number].persist(local) for number, local in found.items())

    async def erase(self, offsets: Sequence[int]) -> None:
        found: dict[int, list[int]] = defaultdict(list)
        for offset in offsets:
            number = self._number(offset)
            found[number].append(offset - self._starts[number])
        await all_of(self.files[number].erase(local) for number, local in found.items())

    async def recover(self) -> list[Record]:
        """Of all files, in no order.

        Raises what one of them raises: it has to be left out of the tier then.
        """
        found: list[Record] = []
        recovered = await all_of(one.recover() for one in self.files)
        for start in self._starts:
            # From the end: to copy a million of them, or to free them at once, takes too long.
            records = recovered.pop(0)
            while records:
                some = records[-_RECORDS_AT_ONCE:]
                del records[-_RECORDS_AT_ONCE:]
                found += [one._replace(offset=start + one.offset) for one in some]
                await asyncio.sleep(0)
        return found

    def _number(self, offset: int) -> int:
        """Of the file in which an offset lies."""
        self._check(offset, 1)
        return bisect_right(self._starts, offset) - 1

    def _pieces(self, offset: int, size: int) -> Iterator[tuple[_File, int, int, int]]:
        """For each file that has some of these bytes: it, its own offset, and which of them."""
        self._check(offset, size)
        done = 0
        while done < size:
            number = bisect_right(self._starts, offset + done) - 1
            file, local = self.files[number], offset + done - self._starts[number]
            stop = min(size, done + file.capacity - local)
            yield file, local, done, stop
            done = stop

    def _check(self, offset: int, size: int) -> None:
        if self._closed:
            raise Closed("the tier is closed")
        if not 0 <= offset <= offset + size <= self.capacity:
            raise UsageError(f"{size} bytes at {offset}: there are {self.capacity}")


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results when every call has ended, also when one fails; raises the first error then."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast(list[T], outcomes)
