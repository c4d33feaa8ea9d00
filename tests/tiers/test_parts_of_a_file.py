"""The payload and the headers of a file, each without the tier."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool_tiers.nvme.format import PAGE, SEALED_HEADER_SIZE, Geometry
from kvpool_tiers.nvme.headers import Headers
from kvpool_tiers.nvme.payload import FilePayload
from tests.tiers.test_nvme import MemoryDisk


class Uses:
    """In place of the table of namespaces: it counts."""

    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def use(self, number: int | None, change: int) -> None:
        if number is not None:
            self.of[number] += change


def test_each_header_is_one_use_of_its_namespace() -> None:
    headers, uses = Headers("file"), Uses()
    headers.table = uses  # type: ignore[assignment]
    headers.unnamed.add(0, PAGE)
    for offset, number in ((0, 1), (PAGE, 1), (PAGE, 1), (0, 2)):
        headers.refer(offset, number)
    assert uses.of == {1: 1, 2: 1}
    assert not headers.unnamed
    assert 0 in headers
    for _ in range(2):
        headers.forget(0)
    assert 0 not in headers
    assert +uses.of == {1: 1}


@pytest.mark.parametrize("encrypted", [False, True])
async def test_an_extent_is_moved_with_the_padding_that_it_was_written_with(
    encrypted: bool,
) -> None:
    """A server reads as much as it wrote: of another number of bytes the seal is not good."""
    geometry = Geometry(64 * PAGE, PAGE, SEALED_HEADER_SIZE)
    payload = FilePayload(MemoryDisk(geometry.file_size), geometry, encrypted=encrypted)
    payload.use_key(bytes(32))
    whole = bytes(range(256)) * (2 * PAGE // 256)
    await payload.write(0, memoryview(whole))
    size = PAGE + 100
    moved = await payload.read_whole(0, size)
    assert bytes(moved[:size]) == whole[:size]
    await payload.write(8 * PAGE, moved)
    again = memoryview(bytearray(2 * PAGE if encrypted else size))
    await payload.read(8 * PAGE, again)
    assert bytes(again) == whole[: len(again)]
    assert payload.altered == 0
    payload.forget(8 * PAGE)
    await payload.read(8 * PAGE, again)
    assert (bytes(again) == bytes(len(again))) is encrypted
