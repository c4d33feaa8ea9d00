"""The header of an extent on a disk says with how many copies its block was written."""

from __future__ import annotations

import pytest

from kvpool.protocols.persistent_tier import Record
from kvpool_tiers.nvme.format import (
    PAGE,
    Geometry,
    NamespaceEntry,
    ValidHeader,
    is_storable,
    pack_header,
    unpack_header,
)
from tests.conftest import NAMESPACE


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 5, 13, 16])
@pytest.mark.parametrize("sizes", [(16, 0), (16, 16), (32, 32), (17, 32)])
def test_a_header_says_with_how_many_copies_a_block_was_written(
    copies: int, sizes: tuple[int, int]
) -> None:
    digest, parent = (bytes(range(1, size + 1)) for size in sizes)
    written = Record(NAMESPACE, 0, digest, parent, 0, 100, 7, 9, copies)
    entry = NamespaceEntry.of(NAMESPACE)
    header = pack_header(written, 3, entry.seeds[0])
    found = unpack_header(memoryview(header), 0, 0, PAGE, [None, None, None, entry])
    assert found == ValidHeader(written, 3)
    # With one copy it is byte for byte what it was before there was a number.
    assert (header[72] < 64 and header[73] < 64) == (copies == 1)
    assert is_storable(written, Geometry(PAGE, PAGE))
    assert not is_storable(written._replace(copies=17), Geometry(PAGE, PAGE))
    assert not is_storable(written._replace(copies=0), Geometry(PAGE, PAGE))
