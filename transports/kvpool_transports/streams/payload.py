"""The payload of a frame on its way out: blocks in pieces of memory, as their owner has them.

The bytes leave straight from the pieces. A block has one checksum over all of its pieces, and is
hashed in steps while it is in the cache. The way in is `kvpool.wire.frames.PayloadReceiver`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from kvpool.wire.frames import STEP, Pieces

#: Sent at most this much at once, so that hashing a large block never stalls the loop.
SEND_STEP: Final = 1 << 20
#: Pieces smaller than this leave together with their neighbours. Up to here, joining them (which
#: is what asyncio does before Python 3.12) costs less than a system call for each.
SMALL_PIECE: Final = 64 << 10


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
