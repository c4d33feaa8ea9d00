"""Who wrote a block: a mark behind its bytes, which goes wherever they go. (design: provenance)"""

from __future__ import annotations

import functools
import os
import secrets
import socket
from typing import Final, NamedTuple

#: Behind each part of a block. A block in the pool begins at a page, so that this costs most blocks
#: a page of room, whether it has 8 bytes or 64.
MARK_BYTES: Final = 64
_MAGIC: Final = b"kvw1"
ID_BYTES: Final = 8
_LABEL_BYTES: Final = MARK_BYTES - len(_MAGIC) - ID_BYTES


class BlockWriter(NamedTuple):
    """An engine from its start, or its last reset, on: a random `id`, and what people call it.

    Both are claims. They find a mistake among engines that may write under one name, not malice.
    """

    id: bytes
    label: str

    @classmethod
    def new(cls) -> BlockWriter:
        """For this process."""
        return cls(secrets.token_bytes(ID_BYTES), f"{socket.gethostname()} (pid {os.getpid()})")

    def __str__(self) -> str:
        return f"{self.label} (writer {self.id.hex()})"

    @functools.lru_cache(maxsize=64)  # noqa: B019 (each step and load has it; writers are values)
    def mark(self) -> bytes:
        """What stands behind its blocks. A long label is cut."""
        label = self.label.encode()[:_LABEL_BYTES].decode(errors="ignore")
        return (_MAGIC + self.id + label.encode()).ljust(MARK_BYTES, b"\0")


#: Of a block whose mark is none: nobody vouches for it.
UNKNOWN: Final = BlockWriter(b"", "an unknown engine")


@functools.lru_cache(maxsize=1024)  # a load has thousands, of a few writers
def writer_of(mark: bytes) -> BlockWriter:
    """`UNKNOWN` if these bytes are no mark."""
    magic, rest = mark[: len(_MAGIC)], mark[len(_MAGIC) :]
    label = rest[ID_BYTES:].rstrip(b"\0").decode(errors="replace")
    if magic != _MAGIC or len(mark) != MARK_BYTES or not label.isprintable():
        return UNKNOWN
    return BlockWriter(rest[:ID_BYTES], label)


class Trust(NamedTuple):
    """Whose blocks are loaded, beside an engine's own; None: everybody's. Those of `removed`
    writers are taken out of the pool where a load meets them."""

    writers: frozenset[bytes] | None
    removed: frozenset[bytes] = frozenset()

    def covers(self, writer: BlockWriter, mark: bytes = b"") -> bool:
        """`mark` is the engine's own."""
        return self.writers is None or writer.id in self.writers or writer.mark() == mark


class MetWriters(NamedTuple):
    """Who wrote what a load has read: what it uses, and what it refuses. Those that are to be
    `compared` are refused, too."""

    compared: frozenset[bytes]
    writers: set[BlockWriter]
    refused: set[bytes]
