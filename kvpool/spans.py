"""Marks: one number in place of the keys of 32 consecutive blocks of a chain.

A *span* is the blocks `32 n` to `32 n + 31` of a chain, its *mark* the XXH3 hash of their keys. A
client and a master that both know a span talk of its mark. Marks of different spans are equal with
a probability of 2^-64, and who makes up keys with equal marks changes answers about the own
namespace only: a wrong answer is a miss at the server, never a wrong byte. (design: match)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import xxhash

#: Blocks of a span.
SPAN_BLOCKS: Final = 32
#: Bytes of a mark in a message.
MARK_SIZE: Final = 8


def marks_of(packed: bytes, digest_size: int) -> list[int]:
    """The marks of the whole spans of these keys, of which the first is that of a span."""
    step = SPAN_BLOCKS * digest_size
    mark = xxhash.xxh3_64_intdigest
    return [mark(packed[at : at + step]) for at in range(0, len(packed) - step + 1, step)]


def pack_marks(marks: Sequence[int]) -> bytes:
    """As they travel in messages."""
    return struct.pack(f"<{len(marks)}Q", *marks) if marks else b""  # most questions have none


def unpack_marks(packed: bytes) -> tuple[int, ...]:
    """The marks again. Raises ValueError when the length does not fit."""
    if not packed:
        return ()
    if len(packed) % MARK_SIZE:
        raise ValueError(f"{len(packed)} bytes of marks are no multiple of {MARK_SIZE}")
    return struct.unpack(f"<{len(packed) // MARK_SIZE}Q", packed)


class MarkedChain:
    """The blocks of a chain, or of a page of it: marks of its whole spans, and keys.

    The first `unsent` spans have no keys here; those of all blocks behind them are in `packed`.
    """

    __slots__ = ("_first", "_packed", "_size", "marks", "unsent")

    def __init__(self, digest_size: int, packed: bytes, unsent: Sequence[int] = ()) -> None:
        self._size = digest_size
        self._packed = packed
        self._first = SPAN_BLOCKS * len(unsent)
        self.unsent = len(unsent)
        self.marks = [*unsent, *marks_of(packed, digest_size)]

    def __len__(self) -> int:
        """Blocks."""
        return self._first + len(self._packed) // self._size

    def digests(self, first: int, last: int, step: int = 1) -> list[bytes]:
        """The keys of the blocks from `first` on, before `last`: every one, or each `step`-th.

        The keys of these blocks are here.
        """
        packed, size = self._packed, self._size
        begin, end = (first - self._first) * size, (last - self._first) * size
        return [packed[at : at + size] for at in range(begin, end, step * size)]
