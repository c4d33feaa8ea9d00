"""The payload of a frame: blocks one after the other, each in pieces of memory as its owner has it.

Received, the bytes go straight into the pieces; sent, they leave straight from them. Either way a
block has one checksum over all of its pieces, and is hashed in steps while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import xxhash

from kvpool.protocols import IdleTimeout
from kvpool.wire.frames import Frame

#: Received at most this much at once: the piece is then hashed while it is in the cache.
STEP: Final = 256 << 10
#: Sent at most this much at once, so that hashing a large block never stalls the loop.
SEND_STEP: Final = 1 << 20
#: Pieces smaller than this leave together with their neighbours. Up to here, joining them (which
#: is what asyncio does before Python 3.12) costs less than a system call for each.
SMALL_PIECE: Final = 64 << 10

#: The memory of one block: its pieces, one after the other.
Pieces: TypeAlias = Sequence[memoryview]


class PayloadReceiver:
    """Where a payload goes: into blocks, each hashed across its pieces if there are seeds.

    No block is empty. `checksums` grows by one for each block that is full; `idle_timeout` is
    touched by every step.
    """

    __slots__ = (
        "_at",
        "_blocks",
        "_hasher",
        "_idle_timeout",
        "_left",
        "_number",
        "_piece",
        "_pieces",
        "_seeds",
        "checksums",
        "missing",
    )

    def __init__(
        self,
        blocks: Sequence[Pieces],
        seeds: Sequence[int] | None = None,
        idle_timeout: IdleTimeout | None = None,
    ) -> None:
        self._blocks = blocks
        self._seeds = seeds
        self._idle_timeout = idle_timeout
        self._number = -1  # of the block that is being filled
        self._left = 0  # bytes that it still needs
        self._pieces: Iterator[memoryview] = iter(())
        self._piece = memoryview(b"")
        self._at = 0  # in that piece
        self._hasher: xxhash.xxh3_64 | None = None
        self.missing = sum([len(piece) for pieces in blocks for piece in pieces])
        self.checksums: list[int] = []
        if self.missing:
            self._next_block()

    def next(self) -> memoryview:
        """Where the next bytes go."""
        return self._piece[self._at : self._at + STEP]

    def received(self, count: int) -> None:
        """`count` bytes have arrived in what `next` returned."""
        if self._idle_timeout is not None:
            self._idle_timeout.touch()
        first = self._at
        self._at += count
        self._left -= count
        self.missing -= count
        if self._hasher is not None:
            self._hasher.update(self._piece[first : self._at])
        if not self._left:
            if self._hasher is not None:
                self.checksums.append(self._hasher.intdigest())
            if self.missing:
                self._next_block()
        elif self._at == len(self._piece):
            self._next_piece()

    def segments(self, size: int) -> list[Pieces]:
        """All that is missing, in order, cut at `size` bytes and at the ends of blocks."""
        return [segment for pieces in self._blocks for segment in cut(pieces, size)]

    def filled(self, count: int) -> None:
        """The next `count` bytes are in place, however they came there."""
        while count:
            step = min(count, len(self.next()))
            self.received(step)
            count -= step

    def _next_block(self) -> None:
        self._number += 1
        pieces = self._blocks[self._number]
        self._left = sum(map(len, pieces))
        self._pieces = iter(pieces)
        if self._seeds is not None:
            self._hasher = xxhash.xxh3_64(seed=self._seeds[self._number])
        self._next_piece()

    def _next_piece(self) -> None:
        self._at = 0
        self._piece = next(self._pieces)
        while not self._piece:
            self._piece = next(self._pieces)


def no_payload(frame: Frame) -> PayloadReceiver:
    """The target of an exchange that expects none."""
    return PayloadReceiver(())


def first_bytes(pieces: Pieces, size: int) -> Pieces:
    """The first `size` bytes of some pieces, which have at least that many."""
    if len(pieces) == 1:
        return (pieces[0][:size],)
    kept: list[memoryview] = []
    for piece in pieces:
        if size <= len(piece):
            kept.append(piece[:size])
            break
        kept.append(piece)
        size -= len(piece)
    return kept


def cut(pieces: Pieces, size: int) -> Iterator[Pieces]:
    """The same bytes in portions of `size`, the last perhaps smaller; each in pieces again."""
    portion: list[memoryview] = []
    room = size
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + room]
            portion.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield portion
                portion, room = [], size
    if portion:
        yield portion


def writes(
    head: bytes, blocks: Sequence[Pieces], seeds: Sequence[int] | None, checksums: list[int]
) -> Iterator[list[list[bytes | memoryview]]]:
    """The frame in portions of about SEND_STEP, hashed just before; each is some writes in a row.

    Large pieces are written alone and uncopied; small ones together, the head with the first of
    them. A block's checksum is appended to `checksums` when its last byte has been hashed.
    """
    together: list[bytes | memoryview] = [head]  # the write that still grows
    portion, held, size = [together], len(head), len(head)
    for number, pieces in enumerate(blocks):
        hasher = xxhash.xxh3_64(seed=seeds[number]) if seeds else None
        for piece in pieces:
            for start in range(0, len(piece), SEND_STEP):
                part = piece[start : start + SEND_STEP]
                if size + len(part) > SEND_STEP and size:
                    yield portion
                    together = []
                    portion, held, size = [together], 0, 0
                if hasher is not None:
                    hasher.update(part)
                size += len(part)
                if len(part) >= SMALL_PIECE:
                    together = []
                    portion += [[part], together]
                    held = 0
                else:
                    together.append(part)
                    held += len(part)
                    if held >= STEP:
                        together, held = [], 0
                        portion.append(together)
        if hasher is not None:
            checksums.append(hasher.intdigest())
    yield portion
