"""Who wrote a block stands behind its bytes."""

from __future__ import annotations

import pytest

from kvpool_connector.memory.block_form import PlainRows
from kvpool_connector.records.provenance import MARK_BYTES, UNKNOWN, BlockWriter, writer_of


@pytest.mark.parametrize("label", ["", "gpu1 (pid 12)", "h" * 300, "hôte" * 20])
def test_a_mark_says_who_has_written(label: str) -> None:
    assert BlockWriter.new().id != BlockWriter.new().id
    one = BlockWriter(b"12345678", label)
    read = writer_of(one.mark())
    assert len(one.mark()) == MARK_BYTES
    assert read.id == one.id
    assert label.startswith(read.label)
    assert len(read.label) >= min(len(label), 30)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(MARK_BYTES),
        b"kvw1",
        b"kvw1" + b"\x07" * 60,
        BlockWriter(b"12345678", "a").mark()[:-1],
    ],
)
def test_what_is_no_mark_is_of_nobody_that_is_known(data: bytes) -> None:
    assert writer_of(data) == UNKNOWN


async def test_room_for_a_mark_follows_a_block_in_one_or_several_pieces() -> None:
    writer = BlockWriter.new()
    source = await PlainRows.of(
        [memoryview(b"one"), [memoryview(b"t"), memoryview(b"wo")]], 3, writer.mark()
    )
    target = await PlainRows.of([memoryview(bytearray(3)), [memoryview(bytearray(3))]], 3)
    for ours, theirs in zip(source.memory, target.memory, strict=True):
        assert isinstance(ours, list)
        assert isinstance(theirs, list)
        stored = b"".join(bytes(piece) for piece in ours)  # type: ignore[arg-type]
        for piece in theirs:
            piece[:] = stored[: len(piece)]  # type: ignore[index, arg-type]
            stored = stored[len(piece) :]  # type: ignore[arg-type]
        assert not stored
    assert await target.writers() == [writer, writer]
