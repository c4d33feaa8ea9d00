"""Who wrote a block stands behind its bytes."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool import Namespace, ReadStatus, WriteStatus
from kvpool.types import ReadResult
from kvpool_connector.memory import block_form
from kvpool_connector.memory.block_form import BlockForm
from kvpool_connector.records.provenance import MARK_BYTES, UNKNOWN, BlockWriter, writer_of
from tests.support import raising


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


class OneBlockPool:
    """What was written is what is read."""

    rows: tuple[Any, ...] = ()

    async def write(self, name: Namespace, digests: Any, rows: Any, **_: Any) -> list[WriteStatus]:
        self.rows = tuple(b"".join(map(bytes, row)) for row in rows)
        return [WriteStatus.STORED] * len(rows)

    async def read(self, name: Namespace, digests: Any, rows: Any, **_: Any) -> list[ReadResult]:
        for row, stored in zip(rows, self.rows, strict=True):
            for piece in row:
                part, stored = stored[: len(piece)], stored[len(piece) :]
                piece[: len(part)] = part
            assert not stored
        return [ReadResult(ReadStatus.HIT, len(stored)) for stored in self.rows]


async def test_room_for_a_mark_follows_a_block_in_one_or_several_pieces() -> None:
    writer, pool, form = BlockWriter.new(), OneBlockPool(), BlockForm()
    at: Any = (pool, Namespace("a"), SimpleNamespace(block_bytes=3, parts=1), [b"1", b"2"])
    await form.write(
        *at, [memoryview(b"one"), [memoryview(b"t"), memoryview(b"wo")]], writer.mark()
    )
    whole, first, rest = bytearray(3), bytearray(2), bytearray(1)
    into = [[memoryview(first), memoryview(rest)], memoryview(whole)]
    found = await form.read(*at, into, part=0, match=None, until=math.inf)
    assert found == [("", writer), ("", writer)]
    assert (first, rest, whole) == (b"on", b"e", b"two")


class Shortening:
    """A coder that leaves the last byte of a block out."""

    tolerance, end_bytes = 0.0, 1
    arrived: Any = None

    def on_moved(self, size: int, seconds: float) -> None: ...

    on_read = on_written = on_moved

    async def encoded(self, block: list[memoryview], layers: Any) -> list[memoryview]:
        return [memoryview(b"".join(block)[:-1]), memoryview(b"!")]

    async def decoded(self, arrived: Any, layers: Any, until: float) -> list[str]:
        self.arrived = [(bytes(pieces[0]), taken, end) for pieces, taken, end in arrived]
        return [""] * len(arrived)


@pytest.mark.parametrize("coded", [False, True])
async def test_a_block_s_writer_is_found_where_it_ends_and_a_shorter_one_is_none(
    coded: bool,
) -> None:
    writer, pool, coder = BlockWriter.new(), OneBlockPool(), Shortening()
    form, memory = BlockForm(coder if coded else None), SimpleNamespace(layers=[])
    memory.block_bytes, memory.parts = 3, 1
    at: Any = (pool, Namespace("a"), memory, [b"1", b"2"])
    await form.write(*at, [memoryview(b"one")], writer.mark())
    pool.rows = (*pool.rows, b"o" + writer.mark()[:-1])
    into = [memoryview(bytearray(3)), memoryview(bytearray(3))]
    found = await form.read(*at, into, part=0, match=None, until=math.inf)
    assert found[0] == ("", writer)
    assert found[1].problem == "wrong size"
    assert not coded or coder.arrived == [(b"on!", 2, b"!")]


async def test_marks_on_a_device_are_read_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = [torch.frombuffer(bytearray(BlockWriter.new().mark()), dtype=torch.uint8)]
    monkeypatch.setattr(threading.Thread, "start", raising.no_thread)
    assert [one.mark() for one in await block_form._writers(marks)] == [bytes(marks[0].numpy())]
