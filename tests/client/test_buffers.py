"""Blocks in pieces, as an engine keeps them: over every transport the same bytes."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch

from kvpool import BadBuffer, Match, Pool, ReadStatus, Run
from kvpool.client.buffers import normalize_buffers
from kvpool.types import Replica
from tests.conftest import NAMESPACE, keys, value, values


def pieces(data: bytes | bytearray, cuts: tuple[int, ...]) -> list[memoryview]:
    view, start, parts = memoryview(data), 0, []
    for size in cuts:
        parts.append(view[start : start + size])
        start += size
    return parts


async def test_large_pieces_are_copied_by_threads(pool: Pool) -> None:
    (name,) = keys("large", 1)
    data = value(name, 3 << 20)
    await pool.write(NAMESPACE, [name], [pieces(data, (1 << 20, 1 << 19, 3 << 19))])
    got = bytearray(3 << 20)
    (result,) = await pool.read(NAMESPACE, [name], [pieces(got, (7, (3 << 20) - 7))])
    assert result.status.hit
    assert got == data


async def test_pieces_that_are_none_are_refused_by_name(tcp: Pool) -> None:
    (name,) = keys("bad", 1)
    with pytest.raises(BadBuffer, match="no pieces"):
        await tcp.write(NAMESPACE, [name], [[]])
    with pytest.raises(BadBuffer, match="read-only"):
        await tcp.read(NAMESPACE, [name], [[bytearray(4), b"abc"]])
    await tcp.write(NAMESPACE, [name], [b"12345"])
    with pytest.raises(BadBuffer, match="bytes, block"):
        await tcp.read(NAMESPACE, [name], [[bytearray(2), bytearray(2)]])


async def test_a_reader_that_has_the_beginning_asks_for_the_rest(tcp: Pool) -> None:
    chain = keys("rest", 10)
    await tcp.write(NAMESPACE, chain, values(chain))
    match = await tcp.match(NAMESPACE, chain)
    got = [bytearray(8192) for _ in range(4)]
    results = await tcp.read(NAMESPACE, chain[3:7], got, match=match.of(3, 7))
    assert all(result.status.hit for result in results)
    assert got == values(chain[3:7])


def test_a_part_of_a_match_is_a_match() -> None:
    here, there = (Replica("a", "dram"),), (Replica("b", "dram"),)
    match = Match((Run(0, 3, here), Run(4, 8, there)), 9, ReadStatus.EVICTED)
    part = match.of(2, 6)
    assert part.runs == (Run(0, 1, here), Run(2, 3, there))
    assert part.length == 4
    assert match.of(0, 9) == match
    assert match.of(9, 12) == Match((), 0, ReadStatus.EVICTED)


async def test_views_of_other_shapes_are_bytes_too_and_bad_ones_are_found_behind_good_ones(
    tcp: Pool,
) -> None:
    """Views of bytes are taken as they are; one that is not must not be taken for one."""
    (name,) = keys("shapes", 1)
    data = value(name, 96)
    plain, words = memoryview(data[:16]), memoryview(data[16:32]).cast("H")
    square = memoryview(data[32:]).cast("B", (8, 8))
    await tcp.write(NAMESPACE, [name], [[plain, words, square]])
    got = bytearray(96)
    (result,) = await tcp.read(NAMESPACE, [name], [[memoryview(got).cast("I")]])
    assert result.size == 96
    assert got == data
    with pytest.raises(BadBuffer, match="not contiguous"):
        await tcp.write(NAMESPACE, [name], [[plain, memoryview(data)[::2]]])
    with pytest.raises(BadBuffer, match="empty"):
        await tcp.write(NAMESPACE, [name], [[plain, plain[:0]]])
    with pytest.raises(BadBuffer, match="read-only"):
        await tcp.read(NAMESPACE, [name], [[memoryview(got), memoryview(b"abc")]])


_CLOSED = mmap.mmap(-1, 4096)
_CLOSED.close()
_FIELDS = np.dtype([("Offset", "i4"), ("OO", "f8")])


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (np.array([object(), 1]), "holds Python objects"),
        (np.zeros(4, np.dtype([("number", "i4"), ("object", "O")])), "holds Python objects"),
        ([bytearray(8), np.array([None])], "holds Python objects"),
        (np.zeros((4, 8), order="F"), "not contiguous"),
        (np.zeros(4, "datetime64[s]"), "ndarray, expected"),
        (_CLOSED, "mmap, expected"),
        (torch.empty(8, device="meta"), "cannot be used: .*meta"),
        (torch.zeros(8, dtype=torch.complex64).conj(), "cannot be used: .*conjugate"),
        (torch.zeros(8).to_sparse(), "not contiguous"),
    ],
    ids=["objects", "fields", "piece", "order", "dates", "closed", "meta", "conjugate", "sparse"],
)
@pytest.mark.parametrize("writable", [False, True])
def test_memory_whose_bytes_are_not_the_contents(memory: Any, says: str, writable: bool) -> None:
    """An address of an object, read from the pool, would crash the process that follows it."""
    with pytest.raises(BadBuffer, match=rf"buffer 0 (is )?{says}"):
        normalize_buffers([memory], writable=writable)


async def test_numbers_of_every_kind_are_bytes(tcp: Pool) -> None:
    numbers = np.arange(6, dtype=np.int64)
    kinds = [np.float16, np.complex64, np.dtype(">i4"), np.longdouble, np.bool_, np.dtype("S3")]
    arrays = [*[numbers.astype(kind) for kind in kinds], np.ones(3, _FIELDS), np.array(7.5)]
    chain = keys("kinds", len(arrays))
    await tcp.write(NAMESPACE, chain, arrays)
    got = [np.zeros_like(array) for array in arrays]
    results = await tcp.read(NAMESPACE, chain, got)
    assert all(result.status.hit for result in results)
    assert [array.tobytes() for array in got] == [array.tobytes() for array in arrays]
