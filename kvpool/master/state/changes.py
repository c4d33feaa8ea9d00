"""What changes in a master's map, for those who follow it; how large an answer may be. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvpool.types import Namespace

#: Bytes of one answer, and one change more: well below what a message may have.
PAGE_SIZE: Final = 512 << 10


class ChangeKind(enum.IntEnum):
    """What has changed."""

    #: A server has these blocks; one that it had in another tier has moved.
    STORED = 0
    #: A server has them no more.
    REMOVED = 1
    #: A server has no block any more: it was restarted or forgotten.
    CLEARED = 2
    #: A server does not answer: its blocks cannot be read for now.
    LOST = 3
    #: A server is there, with the blocks that it had.
    BACK = 4
    #: The same as LOST, of a server that has said that it ends.
    LEFT = 5


class LoggedChange(NamedTuple):
    """One change at one server. `namespace`, `part` and `digests` (of equal length, one after the
    other) are those of STORED and REMOVED, `tier` of STORED, and `host` of BACK."""

    kind: ChangeKind
    server: str
    namespace: Namespace | None = None
    part: int = 0
    tier: str = ""
    digest_size: int = 0
    digests: bytes = b""
    host: str = ""


class NoFollowers:
    """What a master's map tells of each change. Here nobody follows it."""

    def add(self, change: LoggedChange) -> None:
        """A server has changed."""

    def add_blocks(
        self,
        kind: ChangeKind,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        tier: str = "",
    ) -> None:
        """Blocks have, whose digests may have several lengths."""


def size_of(*texts: str) -> int:
    """Bytes that these take in UTF-8; perhaps more."""
    return sum([len(text) if text.isascii() else 4 * len(text) for text in texts])
