"""What has changed in a master's map, numbered: for those who follow it. Pure.

A ring of the last changes. Its memory is bounded and does not depend on who reads it: a reader that
comes too late sees that numbers are missing, and reads the map anew. (design: pool-events)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from kvpool.master.state.changes import PAGE_SIZE, ChangeKind, LoggedChange, NoFollowers, size_of
from kvpool.types import Namespace

#: Changes that are kept, the blocks in them, and bytes of their keys and names.
CHANGES_MAX: Final = 65_536
BLOCKS_MAX: Final = 1 << 18
SIZE_MAX: Final = 32 << 20


def blocks_of(change: LoggedChange) -> int:
    return len(change.digests) // change.digest_size if change.digest_size else 0


def message_size_of(change: LoggedChange) -> int:
    """Bytes of a message that it takes; perhaps more."""
    name = change.namespace.name if change.namespace is not None else ""
    return 128 + len(change.digests) + size_of(name, change.server, change.tier, change.host)


class ChangeRing(NoFollowers):
    """The last changes, numbered from 1 without a gap."""

    def __init__(self, changes_max: int = CHANGES_MAX, blocks_max: int = BLOCKS_MAX) -> None:
        #: The number of the last change.
        self.last = 0
        self._kept: deque[LoggedChange] = deque()
        self._changes_max = changes_max
        self._blocks_max = blocks_max
        self._blocks = 0
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def blocks(self) -> int:
        """Blocks in the kept changes."""
        return self._blocks

    def add(self, change: LoggedChange) -> None:
        """Number a change; the oldest ones go."""
        self.last += 1
        self._kept.append(change)
        self._blocks += blocks_of(change)
        self._size += message_size_of(change)
        while (
            len(self._kept) > self._changes_max
            or self._blocks > self._blocks_max
            or self._size > SIZE_MAX
        ):
            oldest = self._kept.popleft()
            self._blocks -= blocks_of(oldest)
            self._size -= message_size_of(oldest)

    def add_blocks(
        self,
        kind: ChangeKind,
        server: str,
        namespace: Namespace,
        part: int,
        digests: Sequence[bytes],
        tier: str = "",
    ) -> None:
        if not digests:
            return
        sizes = set(map(len, digests))
        for size in sizes:
            alike = digests if len(sizes) == 1 else [one for one in digests if len(one) == size]
            packed = b"".join(alike)
            self.add(LoggedChange(kind, server, namespace, part, tier, size, packed))

    def since(
        self, number: int, blocks: int, size: int = PAGE_SIZE
    ) -> tuple[list[LoggedChange], int] | None:
        """Changes after `number`, oldest first, and the number of the last of them.

        About so many blocks, changes and bytes of a message, and at least one change if there is
        one. None: some are missing, or this log has not reached that number.
        """
        first = number + 1 - (self.last - len(self._kept) + 1)
        if first < 0 or number > self.last:
            return None
        found: list[LoggedChange] = []
        for change in islice(self._kept, first, first + blocks):
            found.append(change)
            blocks -= blocks_of(change)
            size -= message_size_of(change)
            if blocks <= 0 or size <= 0:
                break
        return found, number + len(found)
