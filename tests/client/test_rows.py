"""Results that are made from columns."""

from __future__ import annotations

import pytest

from kvpool.types import ReadResult, ReadStatus
from kvpool_transports.streams.requests import verified


def test_each_block_of_a_batch_is_verified_by_its_own_checksum() -> None:
    expected = [1, 2, 3, 4]
    found = verified([10, 20, 10, 30], expected, [1, 2, 7, 4])
    hit, corrupt = ReadStatus.HIT, ReadStatus.CORRUPT
    assert [result.status for result in found] == [hit, hit, corrupt, hit]
    assert [result.size for result in found] == [10, 20, 0, 30]
    assert verified([10, 20], [5, 6], [5, 6]) == [ReadResult(hit, 10), ReadResult(hit, 20)]
    with pytest.raises(ValueError, match="shorter"):
        verified([10, 20], [5, 6], [5])
