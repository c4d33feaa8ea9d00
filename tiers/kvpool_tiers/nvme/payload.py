"""The payload of a file's extents: written in whole pages, and encrypted where the file is."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from kvpool.errors import UsageError
from kvpool_tiers.nvme.file_disk import Disk
from kvpool_tiers.nvme.format import NO_SEAL, PAGE, ExtentSeal, Geometry

if TYPE_CHECKING:
    from kvpool_tiers.nvme.encryption import FileCipher

#: Extents up to here are padded to whole pages in a copy: cheaper than a second write.
_PAD_COPY_MAX: Final = 64 << 10


class FilePayload:
    """Reads and writes extents. Of an encrypted file it knows how each is to be read."""

    def __init__(self, disk: Disk, geometry: Geometry, *, encrypted: bool) -> None:
        self.disk = disk
        self.encrypted = encrypted
        #: Extents that did not decrypt: somebody else has changed the file, or the disk is bad.
        self.altered = 0
        self._geometry = geometry
        self._cipher: FileCipher | None = None
        self._seals: dict[int, ExtentSeal] = {}

    def use_key(self, key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        from kvpool_tiers.nvme.encryption import FileCipher

        self._cipher = FileCipher(key, random)

    def read(self, offset: int, buffer: memoryview) -> Coroutine[Any, Any, None]:
        if self.encrypted:
            return self._read_sealed(offset, buffer)
        return self._read_pieces(offset, buffer)

    async def read_whole(self, offset: int, size: int) -> memoryview:
        """An extent of a block of `size` bytes, to be written elsewhere as it is."""
        if self.encrypted:  # also the padding, with which the server will read it
            size = self._seals.get(offset, NO_SEAL).size
        buffer = memoryview(bytearray(size))
        await self.read(offset, buffer)
        return buffer

    async def write(self, offset: int, buffer: memoryview) -> None:
        if self.encrypted:
            await self._write_sealed(offset, buffer)
            return
        for position, start, stop in self._geometry.pieces(offset, len(buffer)):
            await self._write_pages(position, buffer[start:stop])

    def forget(self, offset: int) -> None:
        """There is no extent any more."""
        self._seals.pop(offset, None)

    def seal_header(self, offset: int, header: bytes) -> bytes:
        """As it is written; with it, how the extent is to be read."""
        if not self.encrypted:
            return header
        return self._opened().seal_header(header, self._seals.get(offset, NO_SEAL))

    def open_header(
        self, offset: int, headers: memoryview, slot: int
    ) -> tuple[memoryview, int] | None:
        """Where it is as it was before `seal_header`; None if somebody has altered it."""
        if not self.encrypted:
            return headers, slot
        size = self._geometry.header_size
        opened = self._opened().open_header(bytes(headers[slot * size : (slot + 1) * size]))
        if opened is None:
            return None
        text, self._seals[offset] = opened
        return memoryview(text), 0

    async def _read_pieces(self, offset: int, buffer: memoryview) -> None:
        for position, start, stop in self._geometry.pieces(offset, len(buffer)):
            await self.disk.read(position, buffer[start:stop])

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
                    await self.disk.write(position + first - start, staging[:padded])
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
            await self.disk.write(position, buffer[:whole])
        if rest := buffer[whole:]:
            padded = bytearray(-(-len(rest) // PAGE) * PAGE)
            padded[: len(rest)] = rest
            await self.disk.write(position + whole, memoryview(padded))
